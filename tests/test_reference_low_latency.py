"""The oracle of low latency against other ways to compute the same."""

import ctypes
import ctypes.util

import numpy as np
import pytest
from low_latency_harness import KINDS, experts_of, routing, rows_of, weights_of

from epcomm import QuantConfig, dtypes
from epcomm import reference_low_latency as oracle
from epcomm.quant import row_bytes


def operands(rng, kind, n):
    if kind == "any bits":
        return rng.integers(0, 2**32, (3, n), dtype=np.uint32).view(np.float32)
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    if kind == "cancellation":
        return x, y, -(x * y) * (1 + rng.integers(-3, 4, n).astype(np.float32) * np.float32(2.0**-23))
    if kind == "ties":  # halves of the last bit, and a trifle beside them
        x = np.float32(1) + rng.integers(0, 2**12, n).astype(np.float32) * np.float32(2.0**-12)
        return x, x, np.exp2(rng.integers(-60, 30, n)).astype(np.float32) * rng.choice([-1, 1], n)
    tiny = np.float32(2.0**-75)
    return x * tiny, y * tiny, (rng.integers(-50, 50, n) * 2.0**-149).astype(np.float32)


@pytest.mark.parametrize("kind", ["any bits", "cancellation", "ties", "subnormal"])
def test_fma_is_the_c_library_s(kind):
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    libm.fmaf.restype = ctypes.c_float
    libm.fmaf.argtypes = [ctypes.c_float] * 3
    x, y, z = operands(np.random.default_rng(1), kind, 20000)
    with np.errstate(all="ignore"):
        got = oracle.fma(x, y, z)
    want = np.array([libm.fmaf(*v) for v in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)], np.float32)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))


@pytest.mark.parametrize("powers", [False, True])
def test_quantised_rows_are_near_and_within_range(powers):
    x = rows_of(1, 2, 40, 384)
    q, scales = oracle.quantize(x, powers)
    wide = x.astype(np.float32).reshape(40, 3, 128)
    error = np.abs(oracle.dequantize(q, scales) - x.astype(np.float32)).reshape(wide.shape)
    assert (error <= 16.1 * scales[..., None]).all()
    largest = np.maximum(np.abs(wide).max(axis=-1), 1e-4)
    if powers:
        assert (np.frexp(scales)[0] == 0.5).all()
        assert (scales >= largest / 448 * (1 - 1e-6)).all() and (
            scales < largest / 448 * 2 * (1 + 1e-6)
        ).all()
    else:
        np.testing.assert_allclose(scales, largest / 448, rtol=1e-6)
    assert not np.isnan(q.astype(np.float32)).any()
    assert row_bytes(7168, None) == 14336 and row_bytes(7168, QuantConfig()) == 7168 + 224


def case(kind, ranks, tokens, topk, experts, hidden=8):
    ids = [routing(kind, r, tokens[r], topk, experts, 1) for r in range(ranks)]
    x = [rows_of(r, 1, tokens[r], hidden) for r in range(ranks)]
    weights = [weights_of(r, 1, tokens[r], topk) for r in range(ranks)]
    return x, ids, weights


@pytest.mark.parametrize("rank_major", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_its_token_s(kind, rank_major):
    ranks, experts, capacity = 3, 6, 9
    x, ids, weights = case(kind, ranks, (9, 0, 4), 4, experts)
    received = oracle.dispatch(
        x, ids, weights, num_experts=experts, max_tokens=capacity, rank_major=rank_major, fill=-9
    )
    for rank, r in enumerate(received):
        valid = r.src_info >= 0
        assert (r.tokens[~valid] == -9).all()
        ranges = np.atleast_2d(r.layout_range)
        if not rank_major:
            np.testing.assert_array_equal((ranges & 0xFFFFFFFF).sum(axis=1), r.counts)
            assert (np.sort(valid)[:, ::-1] == valid).all()  # in front
        else:
            np.testing.assert_array_equal(ranges[0] & 0xFFFFFFFF, r.counts)
        for number, row in enumerate(ranges):
            for source, entry in enumerate(row):
                first, count = int(entry) >> 32, int(entry) & 0xFFFFFFFF
                tokens, info = (a if rank_major else a[number] for a in (r.tokens, r.src_info))
                mine = info[first : first + count]
                assert (np.diff(mine) > 0).all()  # token order, each once
                assert tokens[first : first + count].tobytes() == x[source][mine].tobytes()
                wanted = range(rank * 2, rank * 2 + 2) if rank_major else [rank * 2 + number]
                np.testing.assert_array_equal(mine, np.flatnonzero(np.isin(ids[source], wanted).any(axis=1)))


@pytest.mark.parametrize("rank_major", [False, True])
@pytest.mark.parametrize("direct_send", [False, True])
def test_sums_are_near_those_in_float64(direct_send, rank_major):
    ranks, experts, capacity, topk = 3, 6, 9, 4
    x, ids, weights = case("masked", ranks, (9, 0, 4), topk, experts)
    received = oracle.dispatch(
        x,
        ids,
        weights,
        num_experts=experts,
        max_tokens=capacity,
        rank_major=rank_major,
        direct_send=direct_send,
    )
    shape = received[0].tokens.shape
    if rank_major and direct_send:
        shape = (shape[0], topk, shape[1])
    outputs = [experts_of(r, 1, shape) for r in range(ranks)]
    got = oracle.combine(outputs, received, weights, rank_major=rank_major, direct_send=direct_send)
    for source in range(ranks):
        want = np.zeros(got[source].shape)
        bound = np.full(got[source].shape, 1e-30)
        for rank, r in enumerate(received):
            rows, place = outputs[rank].reshape(-1, 8).astype(np.float64), r.rows[source]
            for t, k in np.argwhere(place >= 0):
                if rank_major and not direct_send:
                    if (place[t, :k] >= 0).any():
                        continue
                    term = rows[place[t, k]]
                else:
                    term = weights[source][t, k].astype(np.float64) * rows[place[t, k]]
                want[t] += term
                bound[t] += np.abs(term) * 2.0**-7
        assert (np.abs(got[source].astype(np.float64) - want) <= bound).all()


def test_ids_outside_the_experts_are_counted():
    ids, bad = oracle.valid_ids([[-1, 0, 5], [6, -2, 2**40]], 6)
    assert ids.tolist() == [[-1, 0, 5], [-1, -1, -1]] and bad == 3


def test_no_weights_are_ones():
    x, ids, _ = case("masked", 2, (5, 3), 4, 4)
    ones = [np.ones(i.shape, np.float32) for i in ids]
    received = oracle.dispatch(x, ids, None, num_experts=4, max_tokens=5, rank_major=True)
    with_ones = oracle.dispatch(x, ids, ones, num_experts=4, max_tokens=5, rank_major=True)
    for a, b in zip(received, with_ones, strict=True):
        np.testing.assert_array_equal(a.topk_weights, b.topk_weights)
    rows = [r.tokens.astype(dtypes.bfloat16) for r in received]
    for a, b in zip(*(oracle.combine(rows, received, w, rank_major=True) for w in (None, ones)), strict=True):
        assert a.tobytes() == b.tobytes()
