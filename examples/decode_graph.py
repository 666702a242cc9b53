"""A decode loop in a CUDA graph: one MoE layer over few tokens, recorded once and replayed for every step.

    python -m mpi_launch -n 2 examples/decode_graph.py

The graph holds addresses, so what changes from step to step is written in place: routing and tokens. On CPU
ranks, which have no graphs, the same loop calls the step itself.
"""

import contextlib

from ml_dtypes import bfloat16

import epcomm

TOKENS, HIDDEN, TOPK, STEPS = 16, 512, 4, 20


def own_stream(device):
    """A stream to work on: the default one cannot be recorded."""
    return device.xp.cuda.Stream(non_blocking=True) if device.kind == "cuda" else contextlib.nullcontext()


def record(device, step):
    """A function that repeats `step`: the launch of a graph, on the CPU the step itself."""
    step()  # warm-up: the first call of an operation cannot be captured
    if device.kind == "cpu":
        return step
    stream = device.xp.cuda.get_current_stream()
    stream.begin_capture()
    step()
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def main():
    with (
        epcomm.Group() as group,
        epcomm.MoECommunicator(
            group, num_experts=4 * group.size, hidden_size=HIDDEN, topk=TOPK, max_tokens_per_rank=TOKENS
        ) as moe,
        own_stream(group.device),
    ):
        xp, experts = moe.xp, moe.num_local_experts
        xp.random.seed(group.rank)
        x, y = xp.empty((TOKENS, HIDDEN), bfloat16), xp.empty((TOKENS, HIDDEN), bfloat16)
        topk_idx = xp.empty((TOKENS, TOPK), xp.int32)
        tokens = xp.zeros((experts, group.size * TOKENS, HIDDEN), bfloat16)  # rows that nobody sends stay
        # Expert e multiplies by e + 1.
        scale = (1 + group.rank * experts + xp.arange(experts)).astype(bfloat16)[:, None, None]

        def step():
            output, handle = moe.dispatch(x, topk_idx, output_buffer=tokens)  # no weights: each counts once
            rows = tokens * scale
            kept[:] = output, handle, rows  # memory of a capture must live as long as the graph
            moe.combine(rows, handle, out=y)

        kept = []
        wrong = xp.zeros((), xp.int64)
        for number in range(STEPS):
            x[...] = xp.random.random((TOKENS, HIDDEN)).astype(bfloat16)
            topk_idx[...] = xp.argsort(xp.random.random((TOKENS, moe.num_experts)), axis=1)[:, :TOPK]
            if number == 0:
                replay = record(group.device, step)
            replay()
            wanted = x.astype(xp.float32) * (topk_idx + 1).sum(axis=1, keepdims=True)
            wrong += (xp.abs(y.astype(xp.float32) - wanted) > 0.03 * wanted).sum()
        moe.check()  # waits for the device
        assert int(wrong) == 0
        how = "the same step, eager" if group.device.kind == "cpu" else "one graph"
        print(f"rank {group.rank}: {STEPS} steps, {how}, right")


if __name__ == "__main__":
    main()
