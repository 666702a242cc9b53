"""The inputs of a measured step: shapes, routings of a wanted skew, and data from fixed seeds."""

import time
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from bench import harness, routing

DATA_SEED = 7777
DEFAULTS = {
    "cuda": {
        "num_tokens": 8192,
        "hidden": 7168,
        "num_topk": 8,
        "num_experts": 384,
        "maxvios": [0.2, 1, 10, 20],
    },
    "cpu": {"num_tokens": 256, "hidden": 1024, "num_topk": 4, "num_experts": 32, "maxvios": [0.2, 1, 3, 6]},
}


def add_arguments(parser, topk="--num-topk", experts="--num-experts"):
    """The step's shape and `--maxvios`; the defaults depend on the device (see `fill_in`)."""
    for option in ("--num-tokens", "--hidden", topk, experts):
        key = {topk: "num_topk", experts: "num_experts"}.get(option, option[2:].replace("-", "_"))
        text = f"{DEFAULTS['cuda'][key]}; {DEFAULTS['cpu'][key]} on CPU ranks"
        parser.add_argument(option, dest=key, type=int, help=text)
    parser.add_argument("--maxvios", type=harness.numbers(float), help="0.2,1,10,20; 0.2,1,3,6 on CPU ranks")


def fill_in(args, group):
    """Gives the parsed arguments that were left out their defaults for the group's device."""
    for key, value in DEFAULTS[group.device.kind].items():
        if getattr(args, key) is None:
            setattr(args, key, value)


@dataclass(frozen=True)
class Shape:
    """num_tokens = `S` of every rank; hp = `H'`, the experts' inner size, for their weights."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    token_padding: int = 128
    num_sms: int | None = None
    hp: int = 0

    @property
    def row_bytes(self):
        return self.hidden * 2


@dataclass(frozen=True)
class Case:
    """One routing of all ranks.

    Attributes:
        target, max_vio, sigma: the wanted MaxVio, the one reached, and the generator's parameter.
        floored: the wanted MaxVio is missed by more than max(5 %, 0.01).
        topk_idx: for every rank [num_tokens, topk] int32.
        solve_s: seconds that finding it took.
    """

    target: float
    max_vio: float
    sigma: float
    topk_idx: list
    solve_s: float

    @property
    def floored(self):
        return abs(self.max_vio - self.target) > max(0.05 * self.target, 0.01)


class Skews:
    """Routings by MaxVio for one shape; rank 0 solves for all.

    Args:
        group: anything with `rank` and a `comm` that broadcasts.
        ranks: ranks to make routings for; None = those of the group.
    """

    def __init__(self, group, shape, ranks=None):
        self.group = group
        self.draws = None
        if group.rank == 0:
            self.draws = routing.Draws(
                shape.num_tokens, shape.num_topk, shape.num_experts, ranks or group.size
            )

    def case(self, target):
        """Collective. The Case for a wanted MaxVio."""
        found = None
        if self.draws is not None:
            start = time.perf_counter()
            solution = self.draws.solve(target)
            ids = self.draws.topk_idx(solution.sigma)
            seconds = time.perf_counter() - start
            found = Case(target, float(solution.max_vio), float(solution.sigma), ids, seconds)
        return self.group.comm.bcast(found)


def rows(rank, shape):
    """[num_tokens, hidden] bfloat16 of a rank, standard normal."""
    random = np.random.default_rng(DATA_SEED + rank)
    values = random.standard_normal((shape.num_tokens, shape.hidden), np.float32)
    return values.astype(ml_dtypes.bfloat16)


def weights(rank, shape):
    """[num_tokens, topk] float32 route weights of a rank; a token's sum to 1."""
    random = np.random.default_rng([DATA_SEED + rank, 1])
    values = random.random((shape.num_tokens, shape.num_topk), np.float32) + np.float32(0.1)
    return values / values.sum(axis=1, keepdims=True)


def on_device(device, array):
    """A NumPy array as an array of the device, aligned for the kernels."""
    copy = device.empty(array.shape, array.dtype)
    copy[...] = device.xp.asarray(array)
    return copy
