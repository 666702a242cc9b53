"""Low-latency dispatch and combine in plain NumPy, for any number of ranks: the oracle of the tests.

Every rank's inputs go in, every rank's outputs come out, with the same row order, the same rounding and the
same order of sums as the kernels. It is written to be read, not to be fast.

Words: `R` ranks, `E` experts, `L = E / R` experts of a rank, `K` top-k, `T` most tokens of a rank, `t <= T`
its tokens in a call, `H` columns.
"""

from dataclasses import dataclass

import numpy as np

from . import dtypes
from .quant import BLOCK, LARGEST, SMALLEST_AMAX


def fma(x, y, z):
    """`x * y + z` in float32 with one rounding, as the kernels compute it (NumPy has none).

    The product of two float32 is exact in float64. The sum is rounded to odd in float64 (an inexact result
    gets an odd last bit), which the final rounding to float32 cannot mistake for a tie (Boldo and Melquiond,
    2008).
    """
    product = np.asarray(x, np.float32).astype(np.float64) * np.asarray(y, np.float32)
    addend = np.asarray(z, np.float32).astype(np.float64)
    total = product + addend
    part = total - product  # Knuth's two-sum: what the addition has lost, exactly
    with np.errstate(invalid="ignore"):
        lost = (product - (total - part)) + (addend - part)
    even = (total.view(np.uint64) & 1) == 0
    other = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    inexact = np.isfinite(total) & (lost != 0)
    return np.where(inexact & even, other, total).astype(np.float32)


def quantize(x, power_of_two_scales=False):
    """Rows as float8_e4m3fn with a scale for each 128 columns; the formula is QuantConfig's.

    Args:
        x: [..., H] bfloat16 or float32, H a multiple of 128.

    Returns:
        (q [..., H] float8_e4m3fn, scales [..., H/128] float32); a NaN has the bits 0x7f.
    """
    blocks = np.asarray(x).astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    largest = np.fmax.reduce(np.abs(blocks), axis=-1, initial=np.float32(SMALLEST_AMAX))
    scales = largest / np.float32(LARGEST)
    inverse = np.float32(LARGEST) / largest
    if power_of_two_scales:
        bits = scales.view(np.uint32)
        up = (bits & 0x7FFFFF != 0).astype(np.uint32)
        scales = ((bits >> 23) + up << 23).astype(np.uint32).view(np.float32)
        inverse = np.float32(1) / scales
    with np.errstate(invalid="ignore"):
        scaled = np.clip(blocks * inverse[..., None], -np.float32(LARGEST), np.float32(LARGEST))
    q = scaled.astype(dtypes.float8_e4m3fn)
    q.view(np.uint8)[np.isnan(scaled)] = 0x7F
    return q.reshape(x.shape), scales


def dequantize(q, scales):
    """`q * scale` in float32, [..., H]."""
    blocks = q.astype(np.float32).reshape(*scales.shape, BLOCK)
    return (blocks * scales[..., None]).reshape(q.shape)


@dataclass(frozen=True)
class Received:
    """What one rank holds after a dispatch.

    Attributes:
        tokens: [L, R*T, H] (expert-major) or [R*T, H] (rank-major); rows that nobody sent hold `fill`.
        scales: [..., H/128] float32 beside tokens, or None.
        counts: [L] rows of each expert, or [R] rows of each source rank, int32.
        layout_range: [L, R] or [R] int64: first row << 32 | rows.
        src_info: [L, R*T] or [R*T] int32: the row's token at its source; -1 where there is none.
        topk_idx, topk_weights: rank-major: [R*T, K] int32 expert ids (-1 = elsewhere or no row) and float32
            weights (0 there); else None.
        rows: for every source rank, [t, K] int64: the row of each entry in the array that combine takes,
            flattened to rows; -1 = not here. Rank-major with direct send: row * K + k.
    """

    tokens: np.ndarray
    scales: np.ndarray | None
    counts: np.ndarray
    layout_range: np.ndarray
    src_info: np.ndarray
    topk_idx: np.ndarray | None
    topk_weights: np.ndarray | None
    rows: list


def valid_ids(topk_idx, num_experts):
    """(ids with everything outside the experts replaced by -1, how many were neither an expert nor -1)."""
    ids = np.asarray(topk_idx).astype(np.int64)
    outside = (ids < 0) | (ids >= num_experts)
    return np.where(outside, -1, ids), int((ids[outside] != -1).sum())


def dispatch(
    x,
    topk_idx,
    topk_weights,
    *,
    num_experts,
    max_tokens,
    rank_major=False,
    quant=None,
    direct_send=False,
    fill=0,
):
    """Rows to the experts' ranks.

    Args:
        x: for every rank, [t, H] bfloat16.
        topk_idx: for every rank, [t, K] integers; -1 = no expert, ids outside the experts act as -1.
        topk_weights: for every rank, [t, K] float32, or None = 1.
        num_experts, max_tokens: `E`, `T`.
        rank_major: the layout.
        quant: a QuantConfig, or None for bfloat16.
        direct_send: the combine mode, which `rows` depends on in the rank-major layout.
        fill: what stands in rows that nobody sent.

    Returns:
        a Received for every rank.
    """
    ids = [valid_ids(i, num_experts)[0] for i in topk_idx]
    weights = [np.ones(i.shape, np.float32) for i in ids] if topk_weights is None else topk_weights
    rows = [np.asarray(a) for a in x]
    scales = [None] * len(rows)
    if quant is not None:
        rows, scales = zip(*(quantize(a, quant.power_of_two_scales) for a in rows), strict=True)
    deliver = _rank_major if rank_major else _expert_major
    return [
        deliver(rank, rows, scales, ids, weights, num_experts // len(rows), max_tokens, direct_send, fill)
        for rank in range(len(rows))
    ]


def _expert_major(rank, x, scales, ids, weights, local, capacity, direct_send, fill):
    ranks, hidden = len(x), x[0].shape[1]
    tokens, block_scales = _empty((local, ranks * capacity), x, scales, fill)
    counts = np.zeros(local, np.int32)
    layout_range = np.zeros((local, ranks), np.int64)
    src_info = np.full((local, ranks * capacity), -1, np.int32)
    rows = [np.full(i.shape, -1, np.int64) for i in ids]
    for expert in range(local):
        for source in range(ranks):
            named = ids[source] == rank * local + expert
            senders = np.flatnonzero(named.any(axis=1))
            first, n = counts[expert], len(senders)
            tokens[expert, first : first + n] = x[source][senders]
            if block_scales is not None:
                block_scales[expert, first : first + n] = scales[source][senders]
            src_info[expert, first : first + n] = senders
            place = np.full(len(ids[source]), -1)
            place[senders] = expert * ranks * capacity + first + np.arange(n)
            rows[source] = np.where(named, place[:, None], rows[source])
            layout_range[expert, source] = int(first) << 32 | n
            counts[expert] += n
    return Received(
        tokens.reshape(local, -1, hidden), block_scales, counts, layout_range, src_info, None, None, rows
    )


def _rank_major(rank, x, scales, ids, weights, local, capacity, direct_send, fill):
    ranks, topk = len(x), ids[0].shape[1]
    tokens, block_scales = _empty((ranks * capacity,), x, scales, fill)
    counts = np.zeros(ranks, np.int32)
    layout_range = np.zeros(ranks, np.int64)
    src_info = np.full(ranks * capacity, -1, np.int32)
    topk_idx = np.full((ranks * capacity, topk), -1, np.int32)
    topk_weights = np.zeros((ranks * capacity, topk), np.float32)
    rows = []
    for source in range(ranks):
        here = ids[source] // local == rank
        senders = np.flatnonzero(here.any(axis=1))
        places = source * capacity + np.arange(len(senders))
        tokens[places] = x[source][senders]
        if block_scales is not None:
            block_scales[places] = scales[source][senders]
        src_info[places] = senders
        topk_idx[places] = np.where(here, ids[source], -1)[senders]
        topk_weights[places] = np.where(here, weights[source], 0)[senders]
        counts[source] = len(senders)
        layout_range[source] = source * capacity << 32 | len(senders)
        place = np.full(len(ids[source]), -1)
        place[senders] = places
        entries = (
            place[:, None] * topk + np.arange(topk)
            if direct_send
            else np.broadcast_to(place[:, None], here.shape)
        )
        rows.append(np.where(here, entries, -1))
    return Received(tokens, block_scales, counts, layout_range, src_info, topk_idx, topk_weights, rows)


def _empty(shape, x, scales, fill):
    tokens = np.full((*shape, x[0].shape[1]), fill, x[0].dtype)
    return tokens, None if scales[0] is None else np.full((*shape, scales[0].shape[1]), fill, np.float32)


def combine(expert_output, received, topk_weights, *, rank_major=False, direct_send=False):
    """Rows back to their tokens, weighted and summed.

    Rank-local reduce: every rank sums a token's rows there, `acc = fma(w_k, row_k, acc)` in float32 from +0
    in ascending k, and rounds once to bfloat16 (rank-major: the caller's row is that sum); the source adds
    these in ascending rank in float32 from +0 and rounds once. Direct send: `acc = fma(w_k, row_k, acc)` over
    all k at the source, in float32 from +0 in ascending k, rounded once.

    Args:
        expert_output: for every rank, bfloat16 [L, R*T, H]; rank-major [R*T, H], with direct send
            [R*T, K, H].
        received: the dispatch's Received of every rank.
        topk_weights: for every rank, the [t, K] float32 of the dispatch, or None = 1.

    Returns:
        for every rank, [t, H] bfloat16.
    """
    hidden = expert_output[0].shape[-1]
    values = [a.reshape(-1, hidden).astype(np.float32) for a in expert_output]
    out = []
    for source in range(len(received)):
        places = [r.rows[source] for r in received]
        weights = (
            np.ones(places[0].shape, np.float32)
            if topk_weights is None
            else np.asarray(topk_weights[source], np.float32)
        )
        acc = np.zeros((len(places[0]), hidden), np.float32)
        if direct_send:
            for k in range(places[0].shape[1]):
                for rows, place in zip(values, places, strict=True):
                    has = place[:, k] >= 0
                    acc[has] = fma(weights[has, k, None], rows[place[has, k]], acc[has])
        else:
            for rows, place in zip(values, places, strict=True):
                has = (place >= 0).any(axis=1)
                acc[has] += _partial(rows, place[has], weights[has], rank_major)
        out.append(acc.astype(dtypes.bfloat16))
    return out


def _partial(rows, place, weights, rank_major):
    """One rank's sum of each token, rounded to bfloat16, as float32."""
    if rank_major:
        return rows[place.max(axis=1)]
    acc = np.zeros((len(place), rows.shape[1]), np.float32)
    for k in range(place.shape[1]):
        has = place[:, k] >= 0
        acc[has] = fma(weights[has, k, None], rows[place[has, k]], acc[has])
    return acc.astype(dtypes.bfloat16).astype(np.float32)
