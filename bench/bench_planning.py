"""Time of the planner, and the balance that it reaches, by experts, tokens and ranks.

    python -m mpi_launch -n 2 bench/bench_planning.py       # the ranks that there are
    python bench/bench_planning.py --device cpu             # alone: 2 to 64 ranks, as threads of this process

Each sweep varies one of E, S and R. Times of simulated ranks are those of threads that share the cores: they
show that the planner works at that size, no more. Balance: tokens of the fullest rank over the mean, before
(every expert at home) and after planning, and the experts that had to be copied for it.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import harness, plots, workload
from epcomm import Buffer, Group
from epcomm.testing import run_threads

NAME = "planning"
_HIDDEN = 8  # rows play no part
_DEFAULTS = {
    "cuda": {"experts": [64, 128, 256, 384, 512, 1024], "tokens": [128, 512, 2048, 8192, 16384]},
    "cpu": {"experts": [64, 256, 1024], "tokens": [128, 1024, 8192]},
}
_MIDDLE = {"cuda": (384, 8192), "cpu": (64, 256)}  # E and S where the other is varied
_SIMULATED = {"ranks": [2, 4, 8, 16, 32, 64], "middle": 4}
_COLUMNS = {
    "sweep": "sweep",
    "ranks": "R",
    "num_experts": "E",
    "num_tokens": "S",
    "max_vio": "MaxVio",
    "plan_us": "plan us",
    "plan_max_us": "slowest rank us",
    "spread": "spread %",
    "home_balance": "max/mean at home",
    "balance": "max/mean planned",
    "copied_max": "copied experts, most",
    "copied_mean": "mean",
}


def arguments(words=None):
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--experts", type=harness.numbers(int), help="64 ... 1024 (fewer values on CPU ranks)"
    )
    parser.add_argument("--num-tokens", type=harness.numbers(int), help="128 ... 16384 (less on CPU ranks)")
    parser.add_argument(
        "--ranks", type=harness.numbers(int), help="simulated ranks, if started alone: 2 ... 64"
    )
    parser.add_argument("--topk", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--maxvio", type=float, default=1.0, help="skew of the routing (1)")
    harness.add_timing_arguments(parser)
    parser.add_argument("--out", default=harness.RESULTS, help="folder of planning.json, .csv and .png")
    return parser.parse_args(words)


def main(words=None):
    """Runs the benchmark; returns the exit code."""
    args = arguments(words)
    with Group(device=args.device) as group:
        return run(group, args)


def run(group, args):
    """The benchmark on one rank of `group`; returns the exit code."""
    kind = group.device.kind
    session = harness.Session(group, NAME, **harness.counts(args, group))
    session.headline(f"Planner: K={args.topk}, wanted MaxVio {args.maxvio:g}")
    simulates = kind == "cpu" and group.size == 1
    rows = []
    points = list(_points(args, kind, group.size, simulates))
    with session.progress(len(points)) as step:
        for sweep, ranks, experts, tokens in points:
            step(f"R={ranks} E={experts} S={tokens}")
            shape = workload.Shape(tokens, _HIDDEN, args.topk, experts, token_padding=1)
            case = workload.Skews(group, shape, ranks).case(args.maxvio)
            if simulates:
                counts = {"warmup": session.warmup, "iters": session.iters}
                found = run_threads(ranks, _simulated, shape, case, counts)[0]
            else:
                found = measure(session, shape, case)
            rows.append(session.row(sweep=sweep, simulated=simulates) | found)
    session.table("planner", _COLUMNS, rows)
    path = session.save(rows, args.out)
    if session.leads:
        plots.save(figure, rows, path.with_suffix(".png"))
    return 0


def _points(args, kind, size, simulates):
    """(sweep, R, E, S) of every measurement."""
    middle_experts, middle_tokens = _MIDDLE[kind]
    ranks = _SIMULATED["middle"] if simulates else size
    for experts in args.experts or _DEFAULTS[kind]["experts"]:
        yield "E", ranks, experts, middle_tokens
    for tokens in args.num_tokens or _DEFAULTS[kind]["tokens"]:
        yield "S", ranks, middle_experts, tokens
    if simulates:
        for ranks in args.ranks or _SIMULATED["ranks"]:
            yield "R", ranks, middle_experts, middle_tokens


def _simulated(group, shape, case, counts):
    return measure(harness.Session(group, NAME, **counts), shape, case)


def measure(session, shape, case):
    """Collective. Time of the planner for one routing, and what it makes of it, as fields of a row."""
    group = session.group
    with Buffer(
        group,
        num_tokens=shape.num_tokens,
        hidden=shape.hidden,
        num_topk=shape.num_topk,
        num_experts=shape.num_experts,
        token_padding=shape.token_padding,
    ) as buffer:
        topk_idx = workload.on_device(group.device, case.topk_idx[group.rank])
        timing = session.time(lambda: buffer.plan(topk_idx))
        plan = buffer.plan(topk_idx)
        buffer.check()
        landed = group.comm.allgather(int(group.device.to_host(plan.num_tokens_per_expert).sum()))
        copied = (group.device.to_host(plan.experts_to_copy) >= 0).sum(axis=1)
    homes = np.concatenate([ids.reshape(-1) for ids in case.topk_idx]) // (shape.num_experts // group.size)
    at_home = np.bincount(homes, minlength=group.size)
    return {
        "ranks": group.size,
        "num_experts": shape.num_experts,
        "num_tokens": shape.num_tokens,
        "num_topk": shape.num_topk,
        "max_vio": case.max_vio,
        "plan_us": timing.us,
        "plan_max_us": timing.max_us,
        "spread": 100 * timing.spread,
        "home_balance": float(at_home.max() / at_home.mean()),
        "balance": float(max(landed) / np.mean(landed)),
        "copied_max": int(copied.max()),
        "copied_mean": float(copied.mean()),
    }


def figure(rows):
    """Planner time over each swept size; for ranks also the balance."""
    axis_of = {"E": "num_experts", "S": "num_tokens", "R": "ranks"}
    sweeps = plots.distinct(rows, "sweep")
    kind = plots.one_device(rows)
    first = rows[0]
    title = f"planner on {first['device_name']}: K={first['num_topk']}, MaxVio about {first['max_vio']:.3g}"
    picture, axes = plots.panels(1, len(sweeps) + 1, title)
    for axis, sweep in zip(axes.flat, sweeps, strict=False):
        mine = [row for row in rows if row["sweep"] == sweep]
        others = [f"{name}={mine[0][field]}" for name, field in axis_of.items() if name != sweep]
        axis.plot(
            [row[axis_of[sweep]] for row in mine],
            [row["plan_us"] for row in mine],
            "o-",
            color=plots.COLOURS[0],
        )
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(", ".join(others))
        axis.set_xlabel(sweep)
        axis.set_ylabel("us" if kind == "cuda" else "us (CPU ranks)")
    axis = axes.flat[len(sweeps)]
    for colour, field, label in ((5, "home_balance", "experts at home"), (0, "balance", "planned")):
        axis.plot(
            range(len(rows)), [row[field] for row in rows], "o-", color=plots.COLOURS[colour], label=label
        )
    names = [f"{row['sweep']} {row[axis_of[row['sweep']]]}" for row in rows]
    axis.set_xticks(range(len(rows)), names, rotation=90, fontsize=7)
    axis.set_title("fullest rank / mean")
    axis.legend(fontsize=8, frameon=False)
    return picture


if __name__ == "__main__":
    sys.exit(main())
