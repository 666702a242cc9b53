"""Routings to measure with: skewed to a wanted MaxVio, perfectly even, one-hot, or a recorded trace.

The skewed one is the field's usual generator: an expert's popularity is exp(N(0, sigma)), drawn once for all
ranks, and every token draws `topk` different experts in proportion to it.
"""

import math
from dataclasses import dataclass

import numpy as np

POPULARITY_SEED = 1234
SIGMAS = (1e-3, 12.0)  # from what draws alone blur to what sends every token to the same experts


@dataclass(frozen=True)
class Solution:
    """A sigma and the MaxVio that its routing has; `reached` = it is the wanted one, within the tolerance."""

    sigma: float
    max_vio: float
    wanted: float
    reached: bool

    def __str__(self):
        text = f"MaxVio {self.max_vio:.4g} (sigma {self.sigma:.4g})"
        return text if self.reached else f"{text}; {self.wanted:.4g} is out of reach"


class Draws:
    """The random draws behind the skewed routings of one shape: the same for every sigma.

    Args:
        num_tokens: tokens of each rank, or one number for all.
        topk, experts, ranks: the shape; `topk <= experts`.
    """

    def __init__(self, num_tokens, topk, experts, ranks):
        if not 1 <= topk <= experts:
            raise ValueError(f"topk must be in 1 ... {experts} (num_experts), got {topk}")
        sizes = np.broadcast_to(num_tokens, ranks)
        self.topk, self.experts = topk, experts
        # An exponential race: the experts with the least Exp(1) / popularity are draws without replacement.
        self._races = [
            np.random.default_rng(rank).standard_exponential((int(s), experts), np.float32)
            for rank, s in enumerate(sizes)
        ]
        self._normals = np.random.default_rng(POPULARITY_SEED).standard_normal(experts)

    def _handicap(self, sigma):
        """1 / popularity, relative to the most popular expert; bounded, to stay within float32."""
        return np.exp(np.minimum(sigma * (self._normals.max() - self._normals), 80)).astype(np.float32)

    def topk_idx(self, sigma):
        """[s, topk] int32 for every rank, in the order of the draws."""
        out = []
        for race in self._races:
            times = race * self._handicap(sigma)
            first = np.argpartition(times, self.topk - 1, axis=1)[:, : self.topk]
            order = np.argsort(np.take_along_axis(times, first, axis=1), axis=1)
            out.append(np.take_along_axis(first, order, axis=1).astype(np.int32))
        return out

    def max_vio(self, sigma):
        """MaxVio of `topk_idx(sigma)`, without making it."""
        counts, tokens = np.zeros(self.experts, np.int64), 0
        for race in self._races:
            times = race * self._handicap(sigma)
            last = np.partition(times, self.topk - 1, axis=1)[:, self.topk - 1 : self.topk]
            counts += np.count_nonzero(times <= last, axis=0)
            tokens += len(race)
        return float(counts.max() * self.experts / (tokens * self.topk) - 1) if tokens else 0.0

    def expected_max_vio(self, sigma):
        """Estimate for many tokens: whoever comes by the time at which `topk` have come, on average."""
        rate = 1 / self._handicap(sigma).astype(np.float64)
        _, time = _bisect(lambda t: (1 - np.exp(-rate * t)).sum(), self.topk, 1e-6, 1e40, 1e-6 * self.topk)
        return (1 - np.exp(-rate * time)).max() * self.experts / self.topk - 1

    def solve(self, wanted):
        """The sigma whose routing has the wanted MaxVio, to 2 % or 0.005, whichever is more.

        Returns:
            Solution; `reached` is False where no sigma gets there: MaxVio is at most experts / topk - 1, and
            at least what the chance of the draws makes of equally popular experts.
        """
        tolerance = max(0.02 * wanted, 0.005)
        _, guess = _bisect(self.expected_max_vio, wanted, *SIGMAS, tolerance)
        low, high = max(guess / 1.2, SIGMAS[0]), min(guess * 1.2, SIGMAS[1])
        while low > SIGMAS[0] and self.max_vio(low) > wanted:
            low, high = max(low / 2, SIGMAS[0]), low
        while high < SIGMAS[1] and self.max_vio(high) < wanted:
            low, high = high, min(high * 2, SIGMAS[1])
        got, sigma = _bisect(self.max_vio, wanted, low, high, tolerance)
        return Solution(sigma, got, wanted, abs(got - wanted) <= tolerance)


def _bisect(function, wanted, low, high, tolerance):
    """(function(x), x) with x in [low, high], by halving on a log scale, for a function that grows with x."""
    while True:
        x = math.sqrt(low * high)
        got = function(x)
        if abs(got - wanted) <= tolerance or high / low < 1 + 1e-6:
            return got, x
        low, high = (x, high) if got < wanted else (low, x)


def round_robin(num_tokens, topk, experts, ranks, rank):
    """[num_tokens, topk] int32 in perfect balance: token t's k-th expert is on rank (t + k) % ranks.

    Args:
        rank: shifts the experts, so that ranks do not all start at the same one.
    """
    epn = experts // ranks
    t, k = np.ogrid[:num_tokens, :topk]
    return ((t + k) % ranks * epn + (t // ranks + k // ranks + rank) % epn).astype(np.int32)


def one_hot(num_tokens, topk):
    """[num_tokens, topk] int32 in the worst balance: every token names experts 0 ... topk - 1."""
    return np.tile(np.arange(topk, dtype=np.int32), (num_tokens, 1))


def save_trace(path, topk_idx, topk_weights=None):
    """Writes a recorded routing: `topk_idx` [ranks, tokens, topk] integers, `topk_weights` likewise float32
    or None; a .npz, or a .npy of the ids alone."""
    if str(path).endswith(".npy"):
        if topk_weights is not None:
            raise ValueError("a .npy holds topk_idx alone: save weights to a .npz")
        np.save(path, topk_idx)
    else:
        weights = {} if topk_weights is None else {"topk_weights": np.asarray(topk_weights, np.float32)}
        np.savez_compressed(path, topk_idx=topk_idx, **weights)


def load_trace(path):
    """Reads a recorded routing: (topk_idx [ranks, tokens, topk] int64, topk_weights float32 or None).

    Raises:
        ValueError: the file holds no integer `topk_idx` with three axes, or weights of another shape.
    """
    data = np.load(path, allow_pickle=False)
    named = isinstance(data, np.lib.npyio.NpzFile)
    if named and "topk_idx" not in data:
        raise ValueError(f"{path}: no topk_idx in it, only {', '.join(data.files) or 'nothing'}")
    ids = data["topk_idx"] if named else data
    weights = data["topk_weights"] if named and "topk_weights" in data else None
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: topk_idx must be integers [ranks, tokens, topk], got {ids.dtype} {ids.shape}"
        )
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"{path}: topk_weights {weights.shape} do not match topk_idx {ids.shape}")
    return ids.astype(np.int64), None if weights is None else weights.astype(np.float32)
