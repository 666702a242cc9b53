"""MoECommunicator against the oracle: layouts, combine modes, bf16 and fp8, both ways of sending rows."""

import itertools

import numpy as np
import pytest
from low_latency_harness import Call, calls_for, serve, settings_of, verify
from ranks import on_gpus, run_ranks

from epcomm import CombineMode, DispatchLayout, QuantConfig, dtypes
from epcomm import reference_low_latency as oracle
from epcomm.runtime import _fibers

LAYOUTS = tuple(DispatchLayout)
MODES = tuple(CombineMode)
FP8, POWERS = QuantConfig(), QuantConfig(power_of_two_scales=True)


def check(ranks, settings, calls, **kw):
    verify(run_ranks(ranks, serve, settings, calls, **kw), settings)


@pytest.mark.parametrize("how", ["lines", "flags"])
@pytest.mark.parametrize("quant", [None, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda m: m.value)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_routings(ranks, layout, mode, quant, how):
    settings = settings_of(
        num_experts=4 * ranks, hidden_size=128, output_layout=layout, combine_mode=mode, quant=quant
    )
    check(ranks, settings, calls_for(ranks, 12, 6), how=how)


def shapes():
    """Every number of ranks with every H of bf16 and of fp8, and K by turns; the variants drawn."""
    rng = np.random.default_rng(1)
    topks = itertools.cycle([1, 2, 8, 9, 22, 32, 8])
    for ranks in (1, 2, 3, 5, 8):
        for hidden, quantised in [(h, False) for h in (8, 64, 200, 1000, 2880, 7168)] + [
            (h, True) for h in (128, 384, 7168)
        ]:
            layout, mode = LAYOUTS[rng.integers(2)], MODES[rng.integers(2)]
            quant = (FP8, POWERS)[rng.integers(2)] if quantised else None
            yield ranks, hidden, next(topks), layout, mode, quant, ("lines", "flags")[rng.integers(2)]


@pytest.mark.parametrize(
    ("ranks", "hidden", "topk", "layout", "mode", "quant", "how"),
    [
        pytest.param(*s, id="-".join(map(str, (*s[:3], s[3].value, s[4].value, s[5] and "fp8", s[6]))))
        for s in shapes()
    ],
)
def test_shapes(ranks, hidden, topk, layout, mode, quant, how):
    settings = settings_of(
        num_experts=ranks * 3,
        hidden_size=hidden,
        topk=topk,
        max_tokens_per_rank=5,
        output_layout=layout,
        combine_mode=mode,
        quant=quant,
    )
    check(ranks, settings, calls_for(ranks, 5, 3, seed=hidden + topk), how=how)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda m: m.value)
@pytest.mark.parametrize(
    "changes", [dict(num_blocks=1), dict(num_blocks=2), dict(max_tokens_per_rank=1)], ids=str
)
def test_few_blocks_and_few_tokens(changes, layout):
    settings = settings_of(num_experts=9, output_layout=layout) | changes
    check(3, settings, calls_for(3, settings["max_tokens_per_rank"], 4))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda m: m.value)
def test_more_tokens_than_a_window_of_the_table(layout):
    """Little shared memory: block 0 goes through the tokens 32 at a time."""
    settings = settings_of(num_experts=40, hidden_size=16, max_tokens_per_rank=150, output_layout=layout)
    check(
        2, settings, calls_for(2, 150, 4), max_shared=1024 if layout is DispatchLayout.EXPERT_MAJOR else 700
    )


@pytest.mark.parametrize("how", ["lines", "flags"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_changes_nothing(late, mode, how):
    settings = settings_of(num_experts=12, combine_mode=mode)
    check(3, settings, calls_for(3, 12, 6), delay_rank=late, how=how)


def test_ids_out_of_range_act_as_masked():
    settings = settings_of(num_experts=9)
    check(3, settings, [Call("bad ids", (12, 0, 5)), Call("uniform", (3, 3, 3))])


def strange_rows(group, settings):
    """Rows of fp8's edges: zeros, tiny and huge values, infinities, NaN, and values that saturate."""
    from epcomm import MoECommunicator

    x = np.zeros((8, 256), np.float32)
    x[1] = 1e-30
    x[2, ::3] = 3e38
    x[3, 5] = np.inf
    x[4, 200] = np.nan
    x[5] = np.linspace(-448, 448, 256)
    x[6] = np.exp2(np.arange(-128, 128) / 16)
    x[7] = -1e-4
    x = x.astype(dtypes.bfloat16)
    with MoECommunicator(group, **settings) as comm:
        output, handle = comm.dispatch(comm.xp.asarray(x), comm.xp.zeros((8, 1), np.int32))
        comm.check()
        to_host = group.device.to_host
        return to_host(output.tokens)[0, :8], to_host(output.quant.block_scales)[0, :8], x


@pytest.mark.parametrize("quant", [FP8, POWERS], ids=str)
def test_edges_of_fp8(quant):
    settings = settings_of(num_experts=1, hidden_size=256, topk=1, quant=quant)
    ((q, scales, x),) = run_ranks(1, strange_rows, settings)
    want_q, want_scales = oracle.quantize(x, quant.power_of_two_scales)
    np.testing.assert_array_equal(q.view(np.uint8), want_q.view(np.uint8))
    np.testing.assert_array_equal(scales.view(np.uint32), want_scales.view(np.uint32))


def shuffled(group, settings, calls, seed, how):
    _fibers.set_schedule(seed * 64 + group.rank + 1)
    try:
        return serve(group, settings, calls, how)
    finally:
        _fibers.set_schedule(None)


@pytest.mark.skipif(on_gpus(), reason="the order of fibers can be chosen on the CPU device only")
@pytest.mark.parametrize("seed", range(16))
def test_any_order_of_threads_gives_the_same_bits(seed):
    quant = FP8 if seed & 8 else None
    settings = settings_of(
        num_experts=6,
        hidden_size=128,
        max_tokens_per_rank=7,
        output_layout=LAYOUTS[seed & 1],
        combine_mode=MODES[seed >> 1 & 1],
        quant=quant,
    )
    results = run_ranks(
        3, shuffled, settings, calls_for(3, 7, 4, seed), seed, "flags" if seed & 4 else "lines"
    )
    verify(results, settings)
