"""Low latency with FP8: rows are quantised on the way out and come back as bf16, weighted and summed.

    python -m mpi_launch -n 2 examples/low_latency_fp8.py

Expert e multiplies a row by e + 1. CuPy has no fp8: there `tokens` are the bits as uint8, and a table of the
256 values reads them on both devices. A real expert is a GEMM that takes fp8 and the scales as they are.
"""

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

import epcomm

TOKENS, HIDDEN, TOPK, BLOCK = 32, 512, 4, 128
E4M3 = np.arange(256, dtype=np.uint8).view(float8_e4m3fn).astype(np.float32)


def main():
    with (
        epcomm.Group() as group,
        epcomm.MoECommunicator(
            group,
            num_experts=4 * group.size,
            hidden_size=HIDDEN,
            topk=TOPK,
            max_tokens_per_rank=TOKENS,
            quant=epcomm.QuantConfig(epcomm.DispatchDataType.FP8_E4M3),
        ) as moe,
    ):
        xp = moe.xp
        xp.random.seed(group.rank)
        tokens = TOKENS - 5 * group.rank % TOKENS  # any number up to TOKENS, also 0
        x = xp.random.standard_normal((tokens, HIDDEN)).astype(bfloat16)
        topk_idx = xp.argsort(xp.random.random((tokens, moe.num_experts)), axis=1)[:, :TOPK]
        topk_weights = xp.full((tokens, TOPK), 1 / TOPK, xp.float32)

        output, handle = moe.dispatch(x, topk_idx, topk_weights)

        # tokens [experts, R * TOKENS, HIDDEN], a scale for each 128 columns; expert i has counts[i] rows.
        table, scales = xp.asarray(E4M3), output.quant.block_scales
        counts = output.layout.num_tokens_per_expert.tolist()  # waits for the device; a GEMM reads them there
        y = xp.zeros(output.tokens.shape, bfloat16)
        for i, count in enumerate(counts):
            blocks = table[output.tokens[i, :count].view(xp.uint8)].reshape(count, HIDDEN // BLOCK, BLOCK)
            rows = (blocks * scales[i, :count, :, None]).reshape(count, HIDDEN)
            y[i, :count] = (rows * (group.rank * moe.num_local_experts + i + 1)).astype(bfloat16)

        back = moe.combine(y, handle)  # [tokens, HIDDEN] bf16: the weighted sum of a token's rows

        wanted = x.astype(xp.float32) * (topk_weights * (topk_idx + 1)).sum(axis=1, keepdims=True)
        error = xp.abs(back.astype(xp.float32) - wanted)
        moe.check()  # waits for the device
        assert bool((error <= 0.08 * xp.abs(wanted) + 0.01).all())  # e4m3 keeps 4 bits of a number
        print(f"rank {group.rank}: {sum(counts)} rows received as {output.quant.format.name}, right")


if __name__ == "__main__":
    main()
