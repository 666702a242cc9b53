"""The real kernels under seeded schedules of the CPU device: threads in any order, bulk copies as late as
may be.
"""

import low_latency_harness as low_latency
import pytest
import test_buffer as balanced
import test_pool as pools
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from epcomm import CombineMode, DispatchLayout, QuantConfig
from epcomm.runtime import _fibers
from epcomm.testing import run_threads

TIMEOUT = 20.0  # seconds: a seeded launch takes several times as long
seeds = st.integers(1, 2**63 - 1)
some = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a seed cannot be made smaller
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def unseeded_afterwards():
    yield
    _fibers.set_schedule(None)


@some
@given(seeds, st.integers(1, 4), st.sampled_from([2, 6, 24]), st.sampled_from([1, 8]))
def test_dispatch_and_combine(seed, ranks, ring_tokens, token_padding):
    _fibers.set_schedule(seed)
    sizes = balanced.settings_of(num_experts=4 * ranks, hidden=136, token_padding=token_padding)
    calls = [(kind, balanced.unequal(ranks)) for kind in ("skewed", "masked", "uniform")]
    seen = run_threads(ranks, balanced.step, sizes, calls, ring_tokens=ring_tokens, timeout=TIMEOUT)
    balanced.verify(seen, sizes)


@some
@given(seeds, st.integers(2, 4))
def test_prefetch_and_reduce(seed, ranks):
    _fibers.set_schedule(seed)
    sizes = balanced.settings_of(num_experts=ranks * 3)
    run_threads(ranks, pools.train, sizes, (4, 20), [balanced.unequal(ranks)], 2, timeout=TIMEOUT)


@some
@given(seeds, st.integers(2, 4))
def test_reductions_in_a_row(seed, ranks):
    _fibers.set_schedule(seed)
    for got, wanted in run_threads(ranks, pools.reduce_in_a_row, 4, None, timeout=TIMEOUT):
        assert (got == wanted[:, None, None]).all()


@some
@given(
    seeds,
    st.integers(1, 4),
    st.sampled_from(list(DispatchLayout)),
    st.sampled_from(list(CombineMode)),
    st.sampled_from([None, QuantConfig()]),
    st.sampled_from(["lines", "flags"]),
)
def test_low_latency(seed, ranks, layout, mode, quant, how):
    _fibers.set_schedule(seed)
    sizes = low_latency.settings_of(
        num_experts=4 * ranks, hidden_size=128, output_layout=layout, combine_mode=mode, quant=quant
    )
    calls = low_latency.calls_for(ranks, 8, 3)
    seen = run_threads(ranks, low_latency.serve, sizes, calls, how=how, timeout=TIMEOUT)
    low_latency.verify(seen, sizes)
