"""Lower bounds of a step's times: the bytes that an actual routing must move, over what the machine can move.

A token crosses a link once per destination rank, whatever the number of its experts there; the rest is local
memory. The floor is the larger of both times, since transfers and local work can overlap completely:

    dispatch  wire:  one row per (token, other rank), the busiest direction of the busiest rank
              local: every token's row read once, every row of the expert-grouped result written once
    combine   wire:  the same rows, backwards
              local: every expert row read once, every arriving row written once, every result written once

What may stay in a cache (an arrived row read again, a token's row for its second destination) is not counted.
Rates are those that `bench/limits.py` measured in the same run with the whole chip, whatever the SMs in use.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rates:
    """What a rank can do, in GB/s: `wire` per direction (None: no peers), `local` bytes read plus bytes
    written, `store` pure writes with the SMs of the operation."""

    wire: float | None
    local: float
    store: float


@dataclass(frozen=True)
class Traffic:
    """Rows that a routing moves.

    Attributes:
        wire: [R, R] rows from a source (first axis) to another rank, one per (token, rank); 0 on the
            diagonal.
        tokens: [R] tokens of each rank.
        landed: [R] rows that each rank computes, pad rows not counted.
    """

    wire: np.ndarray
    tokens: np.ndarray
    landed: np.ndarray

    @classmethod
    def of(cls, destinations, ranks):
        """From the rank of every entry: for each source rank [s, K] integers, -1 = nowhere."""
        wire = np.zeros((ranks, ranks), np.int64)
        landed = np.zeros(ranks, np.int64)
        for source, to in enumerate(destinations):
            for rank in range(ranks):
                wire[source, rank] = np.sum((to == rank).any(axis=1))
                landed[rank] += np.sum(to == rank)
        np.fill_diagonal(wire, 0)
        return cls(wire, np.array([len(to) for to in destinations]), landed)

    @classmethod
    def of_plan(cls, plan):
        """From an epcomm.reference.GlobalPlan."""
        ranks = [np.where(mine.dst < 0, -1, mine.dst // plan.row_capacity) for mine in plan.ranks]
        topk = plan.topk_idx[0].shape[1]
        return cls.of([to.reshape(-1, topk) for to in ranks], plan.num_ranks)

    @property
    def wire_rows(self):
        """Rows through the busiest direction of the busiest rank."""
        return int(max(self.wire.sum(axis=0).max(), self.wire.sum(axis=1).max()))

    @property
    def dispatch_rows(self):
        """Rows through the local memory of the busiest rank, read or written."""
        return int((self.tokens + self.landed).max())

    @property
    def combine_rows(self):
        """The same for combine: a rank's tokens come back as one row from every other rank."""
        return int((self.landed + self.wire.sum(axis=1) + self.tokens).max())


@dataclass(frozen=True)
class Floor:
    """Microseconds: `wire_us` and `local_us` cannot be undercut, `us` is the larger one."""

    wire_us: float
    local_us: float

    @property
    def us(self):
        return max(self.wire_us, self.local_us)


def dispatch_floor(traffic, row_bytes, rates):
    """Floor of dispatch with a given plan."""
    return _floor(traffic.wire_rows, traffic.dispatch_rows, row_bytes, rates)


def combine_floor(traffic, row_bytes, rates):
    """Floor of combine."""
    return _floor(traffic.wire_rows, traffic.combine_rows, row_bytes, rates)


def _floor(wire_rows, local_rows, row_bytes, rates):
    wire_us = wire_rows * row_bytes / rates.wire / 1e3 if rates.wire else 0.0
    return Floor(wire_us, local_rows * row_bytes / rates.local / 1e3)


def pad_rows(plan):
    """Rows that the busiest rank zeroes: what the segments hold beyond their tokens."""
    return int(max(mine.cu_seqlens[-1] - mine.counts.sum() for mine in plan.ranks))
