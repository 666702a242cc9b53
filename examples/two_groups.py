"""One process in two groups: a Buffer over all ranks and one over pairs of ranks, used in turn.

    python -m mpi_launch -n 2 examples/two_groups.py

As in a model with two kinds of MoE layers: some spread their experts over all ranks, others over two. All
groups of a process drive the same GPU; the calls of all objects run in the order in which they are made, so
every rank makes them in the same order.
"""

from ml_dtypes import bfloat16

import epcomm

TOKENS, HIDDEN, TOPK = 64, 256, 2
SHAPE = {"num_tokens": TOKENS, "hidden": HIDDEN, "num_topk": TOPK}


def layer(buffer, x, num_experts, seed):
    """Dispatch and combine over one group. Each row comes back TOPK times, so the result is TOPK * x."""
    xp = buffer.xp
    xp.random.seed(seed)
    topk_idx = xp.argsort(xp.random.random((TOKENS, num_experts)), axis=1)[:, :TOPK].astype(xp.int32)
    got = buffer.dispatch(x, topk_idx, zero_copy=True)  # a view of the buffer, good until its next dispatch
    return buffer.combine(got.x, got.plan, zero_copy=True).x


def main():
    with (
        epcomm.Group() as everybody,
        epcomm.Group(everybody.comm.Split(everybody.rank // 2, everybody.rank)) as pair,
        epcomm.Buffer(everybody, num_experts=8 * everybody.size, **SHAPE) as wide,
        epcomm.Buffer(pair, num_experts=4 * pair.size, **SHAPE) as narrow,
    ):
        xp = wide.xp
        x = xp.full((TOKENS, HIDDEN), 1 + everybody.rank / 8).astype(bfloat16)
        y = x
        for step in range(3):
            y = layer(wide, y, wide.num_experts, seed=100 * step + everybody.rank)
            y = layer(narrow, y, narrow.num_experts, seed=200 * step + everybody.rank)
        wide.check()
        narrow.check()
        assert bool((y == TOPK**6 * x).all())
        print(f"rank {everybody.rank} of {everybody.size}, {pair.rank} of {pair.size} in its pair: right")


if __name__ == "__main__":
    main()
