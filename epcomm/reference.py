"""Balanced expert parallelism in plain NumPy: the planner, dispatch and combine, for any number of ranks.

This is the oracle of the tests: every rank's inputs go in, every rank's outputs come out, with the same
tie-breaks, the same rounding and the same order of sums as the kernels. It is written to be read, not to be
fast.

Words: `R` ranks, `E` experts, `epn = E / R` home experts a rank, `K` top-k, `S` token capacity of a rank,
`s <= S` its tokens in this step. Rank r has `2 * epn` segments: its home experts, then its `epn` prefetch
slots.
"""

from dataclasses import dataclass

import numpy as np

from .plan_layout import align_up, row_capacity


@dataclass(frozen=True)
class RankPlan:
    """What one rank knows of a plan.

    Attributes:
        dst: [s*K] int32, where every entry (token, k) of this rank goes: `rank * row_capacity + row`; -1:
            nowhere.
        counts: [2*epn] int32, tokens in this rank's segments.
        cu_seqlens: [2*epn] int32, padded end of each segment; segments lie back to back from row 0.
        rows: for every source rank, [s_source, K] int32: the rows here of each of its tokens, in ascending k,
            then -1.
    """

    rank: int
    dst: np.ndarray
    counts: np.ndarray
    cu_seqlens: np.ndarray
    rows: list


@dataclass(frozen=True)
class GlobalPlan:
    """The plan of a step, for all ranks.

    Attributes:
        topk_idx: for every rank, [s, K] int64 with all invalid ids replaced by -1.
        alloc: [E, R] int64, tokens of expert e that rank r computes.
        experts_to_copy: [R, epn] int32, the expert in each prefetch slot, ascending; -1 = idle.
        num_tokens_per_rank: [R] int32, the `s` of every rank.
        row_capacity: rows of a receive buffer.
        token_padding: every segment is padded to a multiple of this many rows.
        bad_ids: ids that are neither an expert nor -1.
        ranks: a RankPlan for every rank.
    """

    topk_idx: list
    alloc: np.ndarray
    experts_to_copy: np.ndarray
    num_tokens_per_rank: np.ndarray
    row_capacity: int
    token_padding: int
    bad_ids: int
    ranks: list

    @property
    def num_ranks(self):
        """R."""
        return self.alloc.shape[1]

    @property
    def num_experts(self):
        """E."""
        return self.alloc.shape[0]


def plan(topk_idx, num_experts, num_tokens, token_padding=128):
    """Balances one step.

    Args:
        topk_idx: for every rank, [s, K] integers; -1 = no expert; ids outside [-1, num_experts) act as -1.
        num_experts: `E`, a multiple of the number of ranks.
        num_tokens: `S`, the capacity that `row_capacity` follows from.
        token_padding: rows that every segment is padded to.

    Returns:
        GlobalPlan.

    Raises:
        ValueError: `E` is no multiple of the number of ranks, or a rank has more than `S` tokens.
    """
    topk_idx = [np.asarray(ids).astype(np.int64) for ids in topk_idx]
    ranks, topk = len(topk_idx), topk_idx[0].shape[1]
    if num_experts % ranks:
        raise ValueError(f"num_experts must be a multiple of the {ranks} ranks, got {num_experts}")
    if max(map(len, topk_idx)) > num_tokens:
        raise ValueError(f"num_tokens (capacity) is {num_tokens}, a rank has {max(map(len, topk_idx))}")
    invalid = [(ids < 0) | (ids >= num_experts) for ids in topk_idx]
    bad_ids = sum(int(np.sum(ids[bad] != -1)) for ids, bad in zip(topk_idx, invalid, strict=True))
    topk_idx = [np.where(bad, -1, ids) for ids, bad in zip(topk_idx, invalid, strict=True)]
    counts = np.array([np.bincount(ids[ids >= 0], minlength=num_experts) for ids in topk_idx])

    alloc = balance(counts.sum(axis=0), ranks)
    experts_to_copy, segments = _segments(alloc)
    seg_counts = np.where(segments >= 0, alloc[segments, np.arange(ranks)[:, None]], 0)
    ends = np.cumsum(align_up(seg_counts, token_padding), axis=1)
    begins = ends - align_up(seg_counts, token_padding)
    start = np.zeros((num_experts, ranks), np.int64)  # first row of expert e on rank r
    for rank in range(ranks):
        used = segments[rank] >= 0
        start[segments[rank, used], rank] = begins[rank, used]

    capacity = row_capacity(num_tokens, topk, num_experts, ranks, token_padding)
    before = np.cumsum(counts, axis=0) - counts  # tokens of e on earlier ranks
    dst = [_destinations(ids, alloc, start, before[rank], capacity) for rank, ids in enumerate(topk_idx)]
    return GlobalPlan(
        topk_idx=topk_idx,
        alloc=alloc,
        experts_to_copy=experts_to_copy,
        num_tokens_per_rank=np.array([len(ids) for ids in topk_idx], np.int32),
        row_capacity=capacity,
        token_padding=token_padding,
        bad_ids=bad_ids,
        ranks=[
            RankPlan(
                rank=rank,
                dst=dst[rank],
                counts=seg_counts[rank].astype(np.int32),
                cu_seqlens=ends[rank].astype(np.int32),
                rows=[_rows_here(d.reshape(-1, topk), rank, capacity) for d in dst],
            )
            for rank in range(ranks)
        ],
    )


def balance(tokens, ranks):
    """Shares the tokens of every expert out, so that all ranks get equally many (the first `total % R`
    one more).

    Ranks first exchange amounts: the largest surplus fills the largest deficit completely, until no surplus
    is left, so that a rank receives from one other at most. Then each giver meets its largest open amount
    from its largest remaining expert until all are met. Ties go to the lower rank and the lower expert.

    Args:
        tokens: [E] tokens of every expert over all ranks.
        ranks: `R`, a divisor of `E`.

    Returns:
        [E, R] int64: tokens of expert e for rank r.
    """
    tokens = np.asarray(tokens, np.int64)
    epn = len(tokens) // ranks
    total = int(tokens.sum())
    cap = total // ranks + (np.arange(ranks) < total % ranks)
    surplus = tokens.reshape(ranks, epn).sum(axis=1) - cap
    moves = np.zeros((ranks, ranks), np.int64)  # [giver, receiver]
    while surplus.max() > 0:
        giver, receiver = surplus.argmax(), surplus.argmin()
        moves[giver, receiver] = -surplus[receiver]
        surplus[giver] += surplus[receiver]
        surplus[receiver] = 0

    alloc = np.zeros((len(tokens), ranks), np.int64)
    for giver in range(ranks):
        left = tokens[giver * epn : (giver + 1) * epn].copy()
        open_ = moves[giver]
        while open_.max() > 0:
            receiver, expert = open_.argmax(), left.argmax()
            amount = min(open_[receiver], left[expert])
            alloc[giver * epn + expert, receiver] += amount
            open_[receiver] -= amount
            left[expert] -= amount
        alloc[giver * epn : (giver + 1) * epn, giver] = left
    return alloc


def _segments(alloc):
    """The prefetch slots [R, epn] int32, and every rank's segments [R, 2*epn]: expert ids, -1 = idle slot."""
    experts, ranks = alloc.shape
    epn = experts // ranks
    slots = np.full((ranks, epn), -1, np.int32)
    for rank in range(ranks):
        foreign = np.flatnonzero(alloc[:, rank])
        foreign = foreign[foreign // epn != rank]
        slots[rank, : len(foreign)] = foreign
    return slots, np.hstack([np.arange(experts).reshape(ranks, epn), slots])


def _destinations(ids, alloc, start, before, capacity):
    """[s*K] int32 destinations of one rank's entries: entry number g of an expert, counted over earlier ranks
    and then in token order, goes to the rank whose share covers g, shares lying one after the other in rank
    order."""
    ids = ids.reshape(-1)
    dst = np.full(len(ids), -1, np.int32)
    order = np.argsort(ids, kind="stable")
    order = order[ids[order] >= 0]
    expert = ids[order]
    g = before[expert] + np.arange(len(order)) - np.searchsorted(expert, expert)
    upto = np.cumsum(alloc, axis=1)[expert]
    rank = (g[:, None] >= upto).sum(axis=1)
    taken = upto[np.arange(len(g)), rank] - alloc[expert, rank]
    dst[order] = rank * capacity + start[expert, rank] + g - taken
    return dst


def _rows_here(dst, rank, capacity):
    here = (dst >= 0) & (dst // capacity == rank)
    order = np.argsort(~here, axis=1, kind="stable")
    return np.take_along_axis(np.where(here, dst - rank * capacity, -1), order, axis=1).astype(np.int32)


def dispatch(x, plan, topk_weights=None, *, fill=0):
    """Moves every token's row to its places.

    Args:
        x: for every rank, [s, ...] rows of any dtype.
        plan: GlobalPlan.
        topk_weights: for every rank [s, K] float32, or None.
        fill: what stands in the rows behind the last segment, which the operation leaves alone.

    Returns:
        (rows, weights): for every rank [row_capacity, ...] with zeros in the pad rows; and [row_capacity]
        float32 with zeros there, or None.
    """
    rows = _scatter([np.repeat(np.asarray(a), _topk(plan), axis=0) for a in x], plan, fill)
    if topk_weights is None:
        return rows, None
    return rows, _scatter([np.asarray(w, np.float32).reshape(-1) for w in topk_weights], plan, fill)


def _topk(plan):
    return plan.topk_idx[0].shape[1]


def _scatter(entries, plan, fill):
    out = []
    for mine in plan.ranks:
        rows = np.zeros((plan.row_capacity, *entries[0].shape[1:]), entries[0].dtype)
        rows[mine.cu_seqlens[-1] :] = fill
        out.append(rows)
    for source, values in zip(plan.ranks, entries, strict=True):
        for rank, rows in enumerate(out):
            here = (source.dst >= 0) & (source.dst // plan.row_capacity == rank)
            rows[source.dst[here] - rank * plan.row_capacity] = values[here]
    return out


def combine(rows, plan, dtype, row_weights=None):
    """Sums every token's rows, unweighted.

    A rank adds a token's rows there in ascending k in float32, from +0, and rounds the sum once to `dtype`
    (to nearest even); the token's rank adds these partial sums in ascending rank in float32, from +0, and
    rounds once. A rank with no row of the token adds nothing; a token without rows gives zeros.

    Args:
        rows: for every rank, [row_capacity, H] of `dtype`, or only its leading rows that hold all segments.
        plan: GlobalPlan.
        dtype: bfloat16 (ml_dtypes), float16 or float32.
        row_weights: for every rank, [row_capacity] float32, or None.

    Returns:
        (out, weights): for every rank [s, H] of `dtype`; and [s, K] float32, what `row_weights` holds where
        each entry went (0 where the entry is -1), or None.
    """
    dtype = np.dtype(dtype)
    out = []
    for source, num_tokens in enumerate(plan.num_tokens_per_rank):
        acc = np.zeros((num_tokens, rows[0].shape[1]), np.float32)
        for rank, mine in enumerate(plan.ranks):
            places = mine.rows[source]
            partial = np.zeros_like(acc)
            for column in places.T:
                partial[column >= 0] += rows[rank][column[column >= 0]].astype(np.float32)
            has_rows = (places >= 0).any(axis=1)
            acc[has_rows] += partial[has_rows].astype(dtype).astype(np.float32)
        out.append(acc.astype(dtype))
    if row_weights is None:
        return out, None
    weights = []
    for mine in plan.ranks:
        gathered = np.zeros(len(mine.dst), np.float32)
        for rank, here in enumerate(row_weights):
            entries = (mine.dst >= 0) & (mine.dst // plan.row_capacity == rank)
            gathered[entries] = here[mine.dst[entries] - rank * plan.row_capacity]
        weights.append(gathered.reshape(-1, _topk(plan)))
    return out, weights


def max_vio(topk_idx, num_experts):
    """Hottest expert's tokens over the mean, minus 1, over all ranks' [s, K] ids: 0 = balanced or empty."""
    ids = np.concatenate([np.asarray(a).reshape(-1) for a in topk_idx])
    counts = np.bincount(ids[(ids >= 0) & (ids < num_experts)], minlength=num_experts)
    return float(counts.max() / counts.mean() - 1) if counts.any() else 0.0


def invariants(plan):
    """Raises AssertionError where a plan breaks what every plan promises."""
    experts, ranks = plan.alloc.shape
    epn, topk = experts // ranks, _topk(plan)
    ids = np.concatenate([a.reshape(-1) for a in plan.topk_idx])
    tokens = np.bincount(ids[ids >= 0], minlength=experts)
    total = int(tokens.sum())
    assert (plan.alloc >= 0).all(), "a share is negative"
    assert (plan.alloc.sum(axis=1) == tokens).all(), "tokens of an expert are lost or invented"
    cap = total // ranks + (np.arange(ranks) < total % ranks)
    assert (plan.alloc.sum(axis=0) == cap).all(), "a rank does not get its cap"
    foreign_homes = [{e // epn for e in np.flatnonzero(plan.alloc[:, r])} - {r} for r in range(ranks)]
    assert max(map(len, foreign_homes)) <= 1, "a rank receives from several home ranks"
    assert ((plan.alloc > 0).sum(axis=0) <= 2 * epn).all(), "more segments than a rank has room for"

    for mine, slots in zip(plan.ranks, plan.experts_to_copy, strict=True):
        assert mine.counts.sum() == cap[mine.rank], "segments do not hold the rank's cap"
        used = slots[slots >= 0]
        assert (slots[: len(used)] == used).all() and (np.diff(used) > 0).all(), "slots are not ascending"
        assert not (used // epn == mine.rank).any(), "a home expert is copied"
        held = np.concatenate([np.arange(mine.rank * epn, (mine.rank + 1) * epn), slots])
        shares = np.where(held >= 0, plan.alloc[held, mine.rank], 0)
        assert (mine.counts == shares).all(), "counts differ from the shares"
        ends = np.concatenate([[0], mine.cu_seqlens])
        assert (np.diff(ends) >= mine.counts).all(), "a segment is shorter than its tokens"
        assert (np.diff(ends) - mine.counts < plan.token_padding).all(), "a segment is padded too far"
        assert (ends % plan.token_padding == 0).all(), "a segment is not padded"
        assert ends[-1] <= plan.row_capacity, "the layout exceeds the receive buffer"

        places = np.concatenate([here.reshape(-1) for here in mine.rows])
        places = np.sort(places[places >= 0])
        filled = np.concatenate([np.arange(b, b + n) for b, n in zip(ends, mine.counts, strict=False)])
        assert (places == filled).all(), "rows are taken twice or left out"
        for source, here in zip(plan.ranks, mine.rows, strict=True):
            expert = plan.topk_idx[source.rank].reshape(-1)
            entries = np.flatnonzero((source.dst >= 0) & (source.dst // plan.row_capacity == mine.rank))
            row = source.dst[entries] - mine.rank * plan.row_capacity
            segment = np.searchsorted(mine.cu_seqlens, row, side="right")
            assert (held[segment] == expert[entries]).all(), "an entry lies in another expert's segment"
            assert (np.sort(here[here >= 0]) == np.sort(row)).all(), "rows and dst differ"
    for mine, ids in zip(plan.ranks, plan.topk_idx, strict=True):
        assert len(mine.dst) == ids.size == len(ids) * topk
        assert ((mine.dst >= 0) == (ids.reshape(-1) >= 0)).all(), "an entry is lost or invented"
