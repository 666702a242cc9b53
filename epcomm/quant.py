"""Quantised rows of low-latency dispatch: what may be asked for, and what comes with the rows."""

import enum

from . import dtypes

BLOCK = 128  # columns that share one scale
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_AMAX = 1e-4  # keeps the scale of an all-zero block away from 0


class DispatchDataType(enum.Enum):
    """What rows travel as, and arrive as."""

    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"


class QuantConfig:
    """Quantise rows on the way, with one float32 scale for each 128 columns.

    `m = max(largest magnitude of the 128 columns, 1e-4)`, `scale = m / 448`, elements are `x * (448 / m)` as
    float8_e4m3fn, to nearest even and saturating; all in IEEE float32. A NaN stays a NaN and does not touch
    its neighbours.

    Args:
        format: DispatchDataType.FP8_E4M3.
        power_of_two_scales: round `scale` up to a power of two first and quantise with that, so that it is
            exact as e8m0.
    """

    __slots__ = ("format", "power_of_two_scales")

    def __init__(self, format=DispatchDataType.FP8_E4M3, *, power_of_two_scales=False):
        if format is not DispatchDataType.FP8_E4M3:
            raise ValueError(f"format: expected DispatchDataType.FP8_E4M3, got {format!r}")
        if not isinstance(power_of_two_scales, bool):
            raise TypeError(f"power_of_two_scales: expected a bool, got {power_of_two_scales!r}")
        self.format = format
        self.power_of_two_scales = power_of_two_scales

    def __eq__(self, other):
        return isinstance(other, QuantConfig) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __repr__(self):
        return f"QuantConfig({self.format}, power_of_two_scales={self.power_of_two_scales})"

    def _key(self):
        return self.format, self.power_of_two_scales


def row_dtype(quant):
    """The element type of the rows that dispatch delivers: bfloat16, or float8_e4m3fn under a QuantConfig."""
    return dtypes.bfloat16 if quant is None else dtypes.float8_e4m3fn


def row_bytes(hidden, quant) -> int:
    """Bytes of a row on the wire: `2H` for bf16, `H + 4H/128` for fp8 with its scales."""
    return 2 * hidden if quant is None else hidden + 4 * (hidden // BLOCK)
