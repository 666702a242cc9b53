"""One balanced step: tokens go to the ranks that hold their experts, and come back.

    python -m mpi_launch -n 2 examples/hello.py

Expert e multiplies a row by e + 1. The router is skewed: half of all tokens name expert 0.
"""

from itertools import pairwise

from ml_dtypes import bfloat16

import epcomm

TOKENS, HIDDEN, TOPK = 256, 512, 4


def router(xp, rank, num_experts):
    """topk_idx [s, K] int32, skewed, and topk_weights [s, K] float32 whose rows add up to 1."""
    xp.random.seed(rank)
    score = xp.random.random((TOKENS, num_experts))
    score[: TOKENS // 2, 0] = 2  # the first half likes expert 0
    topk_idx = xp.argsort(-score, axis=1)[:, :TOPK].astype(xp.int32)
    topk_weights = xp.take_along_axis(score, topk_idx, axis=1).astype(xp.float32)
    return topk_idx, topk_weights / topk_weights.sum(axis=1, keepdims=True)


def main():
    with (
        epcomm.Group() as group,
        epcomm.Buffer(
            group, num_tokens=TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=4 * group.size
        ) as buffer,
    ):
        xp = buffer.xp  # cupy; on CPU ranks numpy
        x = xp.random.standard_normal((TOKENS, HIDDEN)).astype(bfloat16)
        topk_idx, topk_weights = router(xp, group.rank, buffer.num_experts)

        got = buffer.dispatch(x, topk_idx, topk_weights)

        # A segment holds the rows of one expert: first this rank's own experts, then this step's copies.
        own = range(group.rank * buffer.experts_per_rank, (group.rank + 1) * buffer.experts_per_rank)
        experts = [*own, *got.plan.experts_to_copy[group.rank].tolist()]  # -1: an idle slot, without rows
        ends = got.cu_seqlens.tolist()  # waits for the GPU; a grouped GEMM reads got.cu_seqlens there
        y = xp.zeros_like(got.x)
        for expert, (start, end) in zip(experts, pairwise([0, *ends]), strict=True):
            scale = got.topk_weights[start:end, None] * (expert + 1)
            y[start:end] = (got.x[start:end].astype(xp.float32) * scale).astype(bfloat16)

        back = buffer.combine(y, got.plan)  # sums a token's K rows

        wanted = x.astype(xp.float32) * (topk_weights * (topk_idx + 1)).sum(axis=1, keepdims=True)
        error = float(xp.abs(back.x.astype(xp.float32) - wanted).max())
        rows = int(got.plan.num_tokens_per_expert.sum())
        copies = [expert for expert in experts[len(own) :] if expert >= 0]
        buffer.check()  # raises what went wrong on the device
        assert error < 0.02 * float(xp.abs(wanted).max())
        print(f"rank {group.rank} on {group.device}: {rows} rows, copies of experts {copies}, right")


if __name__ == "__main__":
    main()
