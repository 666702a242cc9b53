"""CUDA graphs of a Buffer's operations: replayed with routing and rows changed in place, eager calls in
between."""

import numpy as np
import pytest
from ranks import on_gpus, run_ranks
from test_buffer import routing, rows_of, settings_of

from epcomm import Buffer, EpcommError, ExpertPool, dtypes, reference

pytestmark = pytest.mark.skipif(not on_gpus(), reason="graphs are CUDA's")

VARIANTS = 6


class Variants:
    """Routings and rows to put in place before a replay, with what the ranks must then hold, all on the
    device."""

    def __init__(self, group, buffer, tokens):
        xp, me, ranks = buffer.xp, group.rank, group.size
        settings = buffer.num_topk, buffer.num_experts
        self.xp = xp
        self.wrong = xp.zeros((), np.int64)
        self.ids, self.x, self.rows, self.out, self.dst, self.ends = [], [], [], [], [], []
        for v in range(VARIANTS):
            kind = ("uniform", "skewed", "masked")[v % 3]
            ids = [routing(kind, r, tokens, *settings, v).astype(np.int32) for r in range(ranks)]
            x = [rows_of(r, v, tokens, buffer.hidden, buffer.dtype) for r in range(ranks)]
            plan = reference.plan(ids, buffer.num_experts, buffer.num_tokens, buffer.token_padding)
            rows, _ = reference.dispatch(x, plan)
            out, _ = reference.combine(rows, plan, dtypes.bfloat16)
            self.ids.append(xp.asarray(ids[me]))
            self.x.append(xp.asarray(x[me]))
            self.rows.append(xp.asarray(rows[me].view(np.uint16)))
            self.out.append(xp.asarray(out[me].view(np.uint16)))
            self.dst.append(xp.asarray(plan.ranks[me].dst))
            self.ends.append(int(plan.ranks[me].cu_seqlens[-1]))

    def count_wrong_rows(self, got, want):
        """A device kernel that adds up; nothing is read before the end."""
        self.wrong += (got.view(np.uint16) != want).any(axis=1).sum()


def captured(stream, call):
    stream.begin_capture()
    try:
        result = call()
    finally:
        graph = stream.end_capture()
    return graph, result


def replay(group, replays, which):
    """Single-call graphs, or one of the whole step, replayed for ever new input; returns the number of wrong
    rows."""
    import cupy

    with Buffer(group, **settings_of()) as buffer, cupy.cuda.Stream(non_blocking=True) as stream:
        variants = Variants(group, buffer, tokens=20)
        ids, x = cupy.empty_like(variants.ids[0]), cupy.empty_like(variants.x[0])
        rng = np.random.default_rng(5)

        def put(v):
            ids[:], x[:] = variants.ids[v], variants.x[v]

        def whole():
            got = buffer.dispatch(x, ids, zero_copy=True)
            return got, buffer.combine(got.x, got.plan, zero_copy=True)

        put(0)
        got, back = whole()  # warm-up
        if which == "step":
            graph, (got, back) = captured(stream, whole)
            replayed = [graph]
        else:
            plan_graph, plan = captured(stream, lambda: buffer.plan(ids))
            dispatch_graph, got = captured(stream, lambda: buffer.dispatch(x, plan=plan, zero_copy=True))
            combine_graph, back = captured(stream, lambda: buffer.combine(got.x, plan, zero_copy=True))
            replayed = [plan_graph, dispatch_graph, combine_graph]
        for _ in range(replays):
            v = int(rng.integers(VARIANTS))
            put(v)
            back.x.view(np.uint16)[:] = 0x7FC0
            for graph in replayed:
                graph.launch(stream)
            variants.count_wrong_rows(got.x[: variants.ends[v]], variants.rows[v][: variants.ends[v]])
            variants.count_wrong_rows(back.x, variants.out[v])
            if rng.random() < 0.1:  # eager calls in between, of another size
                eager = buffer.dispatch(x[:7], ids[:7])
                buffer.combine(eager.x, eager.plan)
        buffer.check()
        return int(variants.wrong)


@pytest.mark.parametrize("which", ["single calls", "step"])
def test_replays_with_changing_input(which):
    assert run_ranks(2, replay, 1000, which) == [0, 0]


def backward(group, replays):
    """Forward and backward of a step in one graph, with prefetch and gradient reduction, against the eager
    step."""
    import cupy

    with Buffer(group, **settings_of()) as buffer, cupy.cuda.Stream(non_blocking=True) as stream:
        variants = Variants(group, buffer, tokens=20)
        ids, x = cupy.empty_like(variants.ids[0]), cupy.empty_like(variants.x[0])
        weights, grads = ExpertPool(buffer, (4, 8), "bfloat16"), ExpertPool(buffer, (4, 8), "float32")
        weights.local[:] = 3

        def step():
            got = buffer.dispatch(x, ids, zero_copy=True)
            buffer.prefetch_weight(got.plan, weights, async_finish=True).wait()
            out = buffer.combine(got.x, got.plan, zero_copy=True)
            grad = buffer.dispatch(out.x, plan=got.plan, zero_copy=True)
            back = buffer.combine(grad.x, got.plan, zero_copy=True)
            grads.slots[:] = 1
            buffer.reduce_grad(got.plan, grads)
            return back.x

        ids[:], x[:] = variants.ids[0], variants.x[0]
        step()
        graph, result = captured(stream, step)
        wrong = cupy.zeros((), np.int64)
        for i in range(replays):
            ids[:], x[:] = variants.ids[i % VARIANTS], variants.x[i % VARIANTS]
            graph.launch(stream)
            eager = step()
            wrong += (result.view(np.uint16) != eager.view(np.uint16)).any(axis=1).sum()
        buffer.check()
        weights.close()
        grads.close()
        return int(wrong)


def test_a_whole_step_forward_and_backward():
    assert run_ranks(2, backward, 200) == [0, 0]


def cold(group):
    import cupy

    with Buffer(group, **settings_of()) as buffer, cupy.cuda.Stream(non_blocking=True) as stream:
        ids = cupy.zeros((3, 4), np.int32)
        with pytest.raises(EpcommError, match="warm-up"):
            captured(stream, lambda: buffer.plan(ids))
        buffer.plan(ids)
        buffer.check()


def test_a_first_call_inside_a_capture_is_refused():
    run_ranks(2, cold)
