"""What balancing makes of a recorded routing.

    python -m mpi_launch -n 2 examples/routing_trace.py [TRACE.npz]

The file holds topk_idx [ranks, tokens, K], expert ids (-1 = none), as np.savez(path, topk_idx=...) writes it.
Rank r of the group replays rank r of the trace, which needs as many ranks; without a file it makes one up.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

import epcomm


def make_up(path, ranks):
    """Writes a trace of a skewed router: the popularity of experts falls off as 1 / (1 + id)."""
    experts, tokens, topk = 16 * ranks, 512, 4
    popularity = 1 / (1 + np.arange(experts))
    keys = np.random.default_rng(0).exponential(size=(ranks, tokens, experts)) / popularity
    np.savez(path, topk_idx=np.argsort(keys, axis=2)[:, :, :topk].astype(np.int32))


def describe(topk_idx, num_experts, ranks):
    """MaxVio and the rows that each rank gets when every expert stays at home."""
    counts = np.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    home = counts.reshape(ranks, -1).sum(axis=1)
    return counts.max() / counts.mean() - 1, home.tolist()


def main():
    with epcomm.Group() as group, tempfile.TemporaryDirectory() as folder:
        path = Path(*sys.argv[1:2] or [folder, "made_up.npz"])
        if len(sys.argv) == 1:
            make_up(path, group.size)
        topk_idx = np.load(path)["topk_idx"]
        recorded, tokens, topk = topk_idx.shape
        if recorded != group.size:
            sys.exit(f"{path} was recorded on {recorded} ranks: start {recorded}, not {group.size}")
        num_experts = -(-(int(topk_idx.max()) + 1) // group.size) * group.size

        settings = {"num_tokens": tokens, "hidden": 1024, "num_topk": topk, "num_experts": num_experts}
        with epcomm.Buffer(group, **settings) as buffer:
            xp = buffer.xp
            x = xp.full((tokens, buffer.hidden), group.rank).astype(bfloat16)
            plan = buffer.plan(xp.asarray(topk_idx[group.rank]))
            buffer.combine(buffer.dispatch(x, plan=plan, zero_copy=True).x, plan)
            buffer.check()
            rows = group.comm.allgather(int(plan.num_tokens_per_expert.sum()))
            copied = int((plan.experts_to_copy >= 0).sum())

        if group.rank == 0:
            max_vio, home = describe(topk_idx, num_experts, group.size)
            fullest = max(home) / np.mean(home)
            shape = f"{tokens} tokens a rank, top {topk} of {num_experts} experts"
            print(f"{path.name}: {shape}, MaxVio {max_vio:.2f}")
            print(f"rows a rank, experts at home: {home}, the fullest has {fullest:.2f} of the mean")
            print(f"rows a rank, balanced:        {rows}, with {copied} copies of experts")


if __name__ == "__main__":
    main()
