"""MoECommunicator against the oracle: layouts, combine modes, bf16 and fp8, both ways of sending rows."""

import pytest
from low_latency_harness import calls_for, serve, settings_of, verify
from ranks import run_ranks

from epcomm import CombineMode, DispatchLayout, QuantConfig

LAYOUTS = tuple(DispatchLayout)
MODES = tuple(CombineMode)
FP8, FP8_POWERS = QuantConfig(), QuantConfig(power_of_two_scales=True)


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
