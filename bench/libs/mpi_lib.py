"""Expert exchange over MPI on CPU ranks: permute, exchange counts, Alltoallv, group by expert; and back.

What one writes by hand with mpi4py and NumPy, without balancing and with one row per (token, expert).
"""

import numpy as np


def missing(group):
    """Why this library cannot run here, or None."""
    if group.device.kind != "cpu":
        return "CPU ranks only"
    if not hasattr(group.comm, "Alltoallv"):
        return "not started by MPI"
    return None


class Library:
    """See bench.libs. Rows go to `rows`, grouped by expert, every group padded to `token_padding` rows."""

    def __init__(self, group, shape):
        self.group = group
        self.shape = shape
        self.epn = shape.num_experts // group.size
        self.rows = None

    def load(self, topk_idx, x, topk_weights):
        self.topk_idx, self.x, self.topk_weights = topk_idx, x, topk_weights

    def operations(self):
        return {
            "plan": self.plan,
            "d_f": lambda: (self.plan(), self.dispatch(weights=True)),
            "d_b": self.dispatch,
            "c_f": self.combine,
            "c_b": lambda: self.combine(weights=True),
        }

    def figures(self, session):
        return {}

    def round_trip(self):
        self.plan()
        self.dispatch(weights=True)
        return self.combine()

    def plan(self):
        """Who gets how many rows, and where each row goes at both ends."""
        ids = self.topk_idx.reshape(-1)
        self.order = np.argsort(ids, kind="stable")
        self.order = self.order[ids[self.order] >= 0]
        self.place = np.full(len(ids), -1, np.int64)
        self.place[self.order] = np.arange(len(self.order))
        sent = np.bincount(ids[self.order], minlength=self.shape.num_experts).astype(np.int32)
        received = np.empty_like(sent)
        self.group.comm.Alltoall(sent, received)
        self.sent = sent.reshape(self.group.size, self.epn).sum(axis=1)
        received = received.reshape(self.group.size, self.epn)
        self.received = received.sum(axis=1)

        padding = self.shape.token_padding
        totals = received.sum(axis=0)
        self.cu_seqlens = np.cumsum(-(-totals // padding) * padding)
        starts = np.concatenate([[0], self.cu_seqlens[:-1]])
        first = (starts + np.cumsum(received, axis=0) - received).reshape(-1)  # of every (source, expert)
        counts = received.reshape(-1)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self.target = np.repeat(first, counts) + within

    def dispatch(self, weights=False):
        self.rows = np.empty((self.cu_seqlens[-1], self.shape.hidden), self.x.dtype)
        self.rows[self.target] = self._exchange(self.x[self.order // self.shape.num_topk])
        if weights:
            self.row_weights = np.empty(len(self.rows), np.float32)
            self.row_weights[self.target] = self._exchange(self.topk_weights.reshape(-1)[self.order])

    def combine(self, weights=False):
        back = self._exchange(self.rows[self.target], backwards=True)
        out = np.zeros(self.x.shape, np.float32)
        place = self.place.reshape(self.topk_idx.shape)
        for column in place.T:
            out[column >= 0] += back[column[column >= 0]].astype(np.float32)
        if weights:
            back = self._exchange(self.row_weights[self.target], backwards=True)
            self.returned_weights = np.where(place >= 0, back[place], 0)
        return out.astype(self.x.dtype)

    def close(self):
        self.rows = None

    def _exchange(self, values, backwards=False):
        """Alltoallv of whole rows, as bytes."""
        sent, received = (self.received, self.sent) if backwards else (self.sent, self.received)
        row = values.dtype.itemsize * int(np.prod(values.shape[1:]))
        result = np.empty((received.sum(), *values.shape[1:]), values.dtype)
        self.group.comm.Alltoallv(
            (np.ascontiguousarray(values).view(np.uint8), sent * row),
            (result.view(np.uint8), received * row),
        )
        return result
