"""Compares a measured step with the oracle: the plan's integers exactly, every row and every sum bit for bit.

The plan comes from `epcomm.reference.plan`. What dispatch and combine make of it is computed here on the
device, by the rules of `epcomm.reference.dispatch` and `.combine` (the test suite compares the two), since
the whole rows of a large step are too much for NumPy.
"""

import numpy as np

_TOKENS_AT_ONCE = 1024


def expert(rows, number):
    """What expert `number` does to its rows [n, H]: scales them in float32, rounded once. `number`: a scalar,
    or [n, 1] for rows of different experts.
    """
    scale = (1 + number % 7) / 4
    return (rows.astype(np.float32) * scale).astype(rows.dtype)


def run_experts(rows, cu_seqlens, segment_experts):
    """Every expert over its segment of `rows` [n, H], in place; idle slots have the number -1."""
    begin = 0
    for end, number in zip(cu_seqlens, segment_experts, strict=True):
        if number >= 0 and end > begin:
            rows[begin:end] = expert(rows[begin:end], int(number))
        begin = end


class Oracle:
    """What a step must give on this rank.

    Args:
        device: the group's device; comparisons run there.
        rank: this rank.
        plan: epcomm.reference.GlobalPlan of the step.
        x: for every rank [s, H]; topk_weights: for every rank [s, K] float32 (NumPy).
    """

    def __init__(self, device, rank, plan, x, topk_weights):
        self.device = device
        self.xp = device.xp
        self.rank = rank
        self.plan = plan
        self.topk = plan.topk_idx[0].shape[1]
        self.mine = plan.ranks[rank]
        self.x = self.xp.asarray(x[rank])
        self.all_x = self.xp.asarray(np.concatenate(x))
        self.all_weights = self.xp.asarray(np.concatenate([w.reshape(-1) for w in topk_weights]))
        self.entry = self._entry_of_row()

    @property
    def segment_experts(self):
        """[2 * epn] expert of each of this rank's segments, -1 = idle slot."""
        epn = self.plan.num_experts // self.plan.num_ranks
        home = np.arange(self.rank * epn, (self.rank + 1) * epn)
        return np.concatenate([home, self.plan.experts_to_copy[self.rank]])

    def plan_errors(self, plan):
        """What differs in an epcomm.Plan of this rank, as a list of texts."""
        wanted = {
            "dst": self.mine.dst,
            "num_tokens_per_expert": self.mine.counts,
            "cu_seqlens": self.mine.cu_seqlens,
            "experts_to_copy": self.plan.experts_to_copy,
            "num_tokens_per_rank": self.plan.num_tokens_per_rank,
        }
        return [
            f"plan.{name} differs from the reference"
            for name, value in wanted.items()
            if not np.array_equal(self.device.to_host(getattr(plan, name)), value)
        ]

    def dispatch_errors(self, rows, row_weights):
        """What differs in the received `rows` [n, H] and `row_weights` [n] up to the last segment's end."""
        xp, end = self.xp, len(self.entry)
        wrong = 0
        for at in range(0, end, _TOKENS_AT_ONCE):
            entry = self.entry[at : at + _TOKENS_AT_ONCE]
            wanted = xp.where((entry >= 0)[:, None], _bits(self.all_x[entry // self.topk]), 0)
            wrong += int((_bits(rows[at : at + len(entry)]) != wanted).any(axis=1).sum())
        errors = [f"{wrong} of {end} dispatched rows are wrong"] if wrong else []
        wanted = xp.where(self.entry >= 0, self.all_weights[self.entry], 0)
        if row_weights is not None and not bool((row_weights[:end] == wanted).all()):
            errors.append("dispatched route weights are wrong")
        return errors

    def combine_errors(self, out):
        """What differs in the sums `out` [s, H] of rows that `run_experts` went over."""
        wrong = 0
        for at in range(0, len(self.x), _TOKENS_AT_ONCE):
            part = slice(at, at + _TOKENS_AT_ONCE)
            wrong += int((_bits(out[part]) != _bits(self._combined(part))).any(axis=1).sum())
        return [f"{wrong} of {len(self.x)} combined tokens are wrong"] if wrong else []

    def weight_errors(self, topk_weights):
        """What differs in the route weights [s, K] that came back from the rows."""
        first = int(self.plan.num_tokens_per_rank[: self.rank].sum()) * self.topk
        sent = self.all_weights[first : first + topk_weights.size].reshape(topk_weights.shape)
        wanted = self.xp.where(self.xp.asarray(self.plan.topk_idx[self.rank]) >= 0, sent, 0)
        return [] if bool((topk_weights == wanted).all()) else ["returned route weights are wrong"]

    def _entry_of_row(self):
        """[rows up to the last segment's end] number of the (rank, token, k) entry there, -1 = pad row."""
        entry = np.full(self.mine.cu_seqlens[-1], -1, np.int64)
        first = 0
        for source in self.plan.ranks:
            here = (source.dst >= 0) & (source.dst // self.plan.row_capacity == self.rank)
            places = source.dst[here] - self.rank * self.plan.row_capacity
            entry[places] = first + np.flatnonzero(here)
            first += len(source.dst)
        return self.xp.asarray(entry)

    def _combined(self, part):
        xp, x = self.xp, self.x[part]
        ids = xp.asarray(self.plan.topk_idx[self.rank][part].astype(np.float32))
        dst = self.mine.dst.reshape(-1, self.topk)[part]
        ranks = xp.asarray(np.where(dst < 0, -1, dst // self.plan.row_capacity))
        values = [expert(x, ids[:, k : k + 1]).astype(np.float32) for k in range(self.topk)]
        acc = xp.zeros(x.shape, np.float32)
        for rank in range(self.plan.num_ranks):
            partial = xp.zeros(x.shape, np.float32)
            for k, value in enumerate(values):
                partial += xp.where(ranks[:, k : k + 1] == rank, value, 0)
            acc += partial.astype(x.dtype).astype(np.float32)
        return acc.astype(x.dtype)


def round_trip_errors(out, x, topk_idx):
    """What differs where experts change nothing: a token's sum is its row times its valid entries, but for
    the roundings to bfloat16 (at most two, each of 2^-8).
    """
    wanted = x.astype(np.float32) * (topk_idx >= 0).sum(axis=1, keepdims=True)
    error = abs(out.astype(np.float32) - wanted)
    wrong = int((error > abs(wanted) / 128).any(axis=1).sum())
    return [f"{wrong} of {len(x)} tokens are wrong after the round trip"] if wrong else []


def _bits(rows):
    return rows.view(np.uint16)
