"""CUDA graphs of a MoECommunicator: one pair a graph, replayed for ever with everything changed in place.

Wrong rows are counted by device kernels and read once, at the end.
"""

import numpy as np
import pytest
from low_latency_harness import KINDS, experts_of, routing, rows_of, settings_of, signal, weights_of
from ranks import on_gpus, run_ranks
from test_graph import captured

from epcomm import CombineMode, DispatchLayout, EpcommError, MoECommunicator, QuantConfig, dtypes
from epcomm import reference_low_latency as oracle

pytestmark = pytest.mark.skipif(not on_gpus(), reason="graphs are CUDA's")

VARIANTS = 2 * len(KINDS)


class Variants:
    """Inputs to put in place before a replay, with what the rank must then hold, all on the device."""

    def __init__(self, comm, tokens):
        xp, me, ranks, settings = comm.xp, comm.group.rank, comm.group.size, (comm.topk, comm.num_experts)
        rank_major = comm.output_layout is DispatchLayout.RANK_MAJOR
        direct_send = comm.combine_mode is CombineMode.DIRECT_SEND
        self.comm, self.xp, self.wrong = comm, xp, xp.zeros((), np.int64)
        self.inputs, self.rows, self.valid, self.sums, self.counts = [], [], [], [], []
        for v in range(VARIANTS):
            ids = [routing(KINDS[v % len(KINDS)], r, tokens, *settings, v) for r in range(ranks)]
            x = [rows_of(r, v, tokens, comm.hidden_size) for r in range(ranks)]
            weights = [weights_of(r, v, tokens, comm.topk) for r in range(ranks)]
            experts = [experts_of(r, v, comm._shape.expert_output_shape) for r in range(ranks)]
            received = oracle.dispatch(
                x,
                ids,
                weights,
                num_experts=comm.num_experts,
                max_tokens=comm.max_tokens_per_rank,
                rank_major=rank_major,
                quant=comm.quant,
                direct_send=direct_send,
            )
            sums = oracle.combine(experts, received, weights, rank_major=rank_major, direct_send=direct_send)
            mine = received[me]
            self.inputs.append(
                [xp.asarray(a) for a in (x[me], ids[me].astype(np.int32), weights[me], experts[me])]
            )
            self.rows.append(xp.asarray(bits(mine.tokens)))
            self.valid.append(xp.asarray(mine.src_info >= 0))
            self.counts.append(xp.asarray(mine.counts))
            self.sums.append(xp.asarray(bits(sums[me])))

    def count_wrong(self, v, tokens, counts, sums):
        """Rows, counts and sums that differ from variant `v`, added up on the device."""
        rows = (bits(tokens) != self.rows[v]).any(axis=-1) & self.valid[v]
        self.wrong += (
            rows.sum() + (counts != self.counts[v]).sum() + (bits(sums) != self.sums[v]).any(axis=-1).sum()
        )


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


class Delay:
    """A kernel that spins for a random while, so that ranks and replays drift apart."""

    def __init__(self, rank):
        import cupy

        code = r"""
        extern "C" __global__ void spin(long long cycles) {
          const long long start = clock64();
          while (clock64() - start < cycles) {}
        }
        """
        self._kernel = cupy.RawModule(code=code).get_function("spin")
        self._rng = np.random.default_rng([rank, 17])

    def __call__(self):
        if self._rng.random() < 0.3:
            self._kernel((1,), (1,), (np.int64(self._rng.integers(1, 60_000)),))


def counts_of(comm, output):
    info = output.layout
    return (
        info.num_tokens_per_expert
        if comm.output_layout is DispatchLayout.EXPERT_MAJOR
        else info.num_tokens_per_rank
    )


def replay(group, settings, replays, how="lines"):
    """Two graphs of a pair each and eager calls, in an order drawn alike on all ranks; how much was wrong."""
    import cupy

    with (
        signal(how),
        MoECommunicator(group, **settings) as comm,
        cupy.cuda.Stream(non_blocking=True) as stream,
    ):
        tokens = comm.max_tokens_per_rank - 3
        variants, delay = Variants(comm, tokens), Delay(group.rank)
        x, ids, weights, experts = (cupy.empty_like(a) for a in variants.inputs[0])

        def put(v):
            for place, value in zip((x, ids, weights, experts), variants.inputs[v], strict=True):
                place[...] = value

        def pair():
            output, handle = comm.dispatch(x, ids, weights)
            return output, handle, comm.combine(experts, handle)

        put(0)
        pair()
        graphs = [captured(stream, pair) for _ in range(2)]
        rng = np.random.default_rng(3)
        for _ in range(replays):
            v, what = int(rng.integers(VARIANTS)), rng.random()
            put(v)
            delay()
            if what < 0.05:
                output, _, sums = pair()
            else:
                graph, (output, _, sums) = graphs[what < 0.5]
                bits(output.tokens)[...] = 0xA5
                bits(sums)[...] = 0xA5
                graph.launch(stream)
            variants.count_wrong(v, output.tokens, counts_of(comm, output), sums)
        comm.check()
        return int(variants.wrong)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["lines", "flags"])
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(output_layout=DispatchLayout.RANK_MAJOR),
        dict(combine_mode=CombineMode.DIRECT_SEND, quant=QuantConfig()),
        dict(output_layout=DispatchLayout.RANK_MAJOR, combine_mode=CombineMode.DIRECT_SEND),
    ],
    ids=["expert-major", "rank-major", "expert-major fp8 direct send", "rank-major direct send"],
)
def test_ten_thousand_replays(changes, how):
    settings = settings_of(num_experts=32, hidden_size=1024, topk=4, max_tokens_per_rank=24) | changes
    assert run_ranks(2, replay, settings, 10_000, how) == [0, 0]


@pytest.mark.timeout(300)
def test_replays_of_the_usual_shape():
    settings = settings_of(num_experts=256, hidden_size=7168, topk=8, max_tokens_per_rank=128)
    assert run_ranks(2, replay, settings, 500) == [0, 0]


def in_stages(group):
    """Dispatch and combine in graphs of their own; two dispatches outstanding between the combines."""
    import cupy

    settings = settings_of(num_experts=32, hidden_size=256)
    with MoECommunicator(group, **settings) as comm, cupy.cuda.Stream(non_blocking=True) as stream:
        variants = Variants(comm, 12)
        places = [[cupy.empty_like(a) for a in variants.inputs[0]] for _ in range(2)]
        for place in places:
            for a, value in zip(place, variants.inputs[0], strict=True):
                a[...] = value
        _, handle = comm.dispatch(*places[0][:3])
        comm.combine(places[0][3], handle)
        dispatches = [captured(stream, lambda p=p: comm.dispatch(*p[:3])) for p in places]
        combines = [
            captured(stream, lambda p=p, d=d: comm.combine(p[3], d[1][1]))
            for p, d in zip(places, dispatches, strict=True)
        ]
        rng = np.random.default_rng(8)
        for _ in range(500):
            drawn = rng.integers(VARIANTS, size=2)
            for place, v in zip(places, drawn, strict=True):
                for a, value in zip(place, variants.inputs[v], strict=True):
                    a[...] = value
            for graph, _ in dispatches:
                graph.launch(stream)
            for i in rng.permutation(2):
                combines[i][0].launch(stream)
            for v, (_, (output, _)), (_, sums) in zip(drawn, dispatches, combines, strict=True):
                variants.count_wrong(v, output.tokens, counts_of(comm, output), sums)
        comm.check()
        return int(variants.wrong)


def test_graphs_of_single_calls_with_two_dispatches_outstanding():
    assert run_ranks(2, in_stages) == [0, 0]


def cold(group):
    import cupy

    with (
        MoECommunicator(group, **settings_of(num_experts=4)) as comm,
        cupy.cuda.Stream(non_blocking=True) as stream,
    ):
        x, ids = cupy.zeros((3, 64), dtypes.bfloat16), cupy.zeros((3, 4), np.int32)
        with pytest.raises(EpcommError, match="warm-up"):
            captured(stream, lambda: comm.dispatch(x, ids))
        comm.dispatch(x, ids)
        comm.check()


def test_a_first_call_inside_a_capture_is_refused():
    run_ranks(2, cold)
