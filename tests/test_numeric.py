"""Number formats of numeric.cuh, bit by bit against ml_dtypes and NumPy."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from toys import aligned, library

TO = {0: (ml_dtypes.bfloat16, np.uint16), 1: (np.float16, np.uint16), 2: (ml_dtypes.float8_e4m3fn, np.uint8)}
FROM = {
    3: (ml_dtypes.bfloat16, np.uint16),
    4: (np.float16, np.uint16),
    5: (ml_dtypes.float8_e4m3fn, np.uint8),
}


def convert(what, source, bits):
    out = np.empty(source.size, bits)
    library().convert(
        what,
        source.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_size_t(source.size),
    )
    return out


@pytest.fixture(scope="module")
def floats():
    """Random bit patterns, and what rounds: every value of every format, the middles between neighbours, one
    ulp off."""
    rng = np.random.default_rng(0)
    exact = [
        np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float32)
        for kind in (ml_dtypes.bfloat16, np.float16)
    ]
    exact.append(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    values = [
        rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32),
        rng.normal(0, 30, 1 << 18).astype(np.float32),
    ]
    with np.errstate(all="ignore"):
        for e in exact:
            finite = np.sort(e[np.isfinite(e)].astype(np.float64))
            middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
            values += [
                e,
                middle,
                np.nextafter(middle, np.float32(np.inf)),
                np.nextafter(middle, np.float32(-np.inf)),
            ]
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        65504,
        65519.996,
        65520,
        448,
        464,
        463.99997,
        480,
        2**-25,
        2**-10,
        2**-149,
        3.4e38,
    ]
    return np.concatenate([*values, np.float32(special), -np.float32(special)]).astype(np.float32)


@pytest.mark.parametrize("what", TO)
def test_from_float(floats, what):
    kind, bits = TO[what]
    source = floats
    if what == 2:  # saturating: no infinities, NaN only from NaN
        source = np.where(np.isnan(floats), floats, np.clip(floats, -448, 448))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wanted = source.astype(kind).view(bits)
    got = convert(what, floats, bits)
    nan = np.isnan(floats)
    np.testing.assert_array_equal(got[~nan], wanted[~nan])
    assert np.isnan(got[nan].view(kind).astype(np.float32)).all()
    if what == 2:
        assert (got[nan] == 0x7F).all()
    else:
        np.testing.assert_array_equal(got[nan] >> 15, floats[nan].view(np.uint32) >> 31)


@pytest.mark.parametrize("what", FROM)
def test_to_float(what):
    kind, bits = FROM[what]
    source = np.arange(1 << (8 * np.dtype(bits).itemsize), dtype=np.uint32).astype(bits)
    wanted = source.view(kind).astype(np.float32)
    got = convert(what, source, np.float32)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), wanted[~nan].view(np.uint32))
    assert np.isnan(got[nan]).all()


@pytest.mark.parametrize("dtype,kind", [(0, ml_dtypes.bfloat16), (1, np.float16), (2, np.float32)])
def test_vectors_keep_their_elements_in_order(dtype, kind):
    values = (np.arange(16 // np.dtype(kind).itemsize) * 1.25 - 3).astype(kind)
    source, out, floats = aligned(4), aligned(4), np.zeros(8, np.float32)
    source[:] = values.view(np.uint32)
    library().vectors(dtype, *(ctypes.c_void_p(x.ctypes.data) for x in (source, floats, out)))
    np.testing.assert_array_equal(floats[: values.size], values.astype(np.float32))
    np.testing.assert_array_equal(out, source)


def test_arithmetic_is_not_contracted():
    rng = np.random.default_rng(3)
    out = np.zeros(3, np.float32)
    differ = 0
    for x, y, z in rng.normal(size=(500, 3)).astype(np.float32):
        library().arithmetic(*(ctypes.c_float(v) for v in (x, y, z)), ctypes.c_void_p(out.ctypes.data))
        exact = np.float64(x) * np.float64(
            y
        )  # of 48 bits: the sum below rounds twice, which for these values does no harm
        assert out[1] == np.float32(x * y) + z and out[2] == x / y
        assert abs(np.float64(out[0]) - (exact + np.float64(z))) <= np.spacing(np.abs(out[0])) / 2
        differ += out[0] != out[1]
    assert differ > 50
