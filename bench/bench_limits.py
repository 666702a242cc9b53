"""What this machine can do, and what a step must cost here at least.

    python -m mpi_launch -n 2 bench/bench_limits.py

First the limits: transfers to and from the peers by number of SMs with all ranks at it at once, the copy
engine, local copies, fan-out and stores, the round trip of a flag between ranks 0 and 1, the launch of an
empty kernel. Then the floors of dispatch and combine for a shape and its routings (see bench/floors.py), also
for more ranks than there are.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import floors, harness, limits, plots, routing, workload
from epcomm import Group, reference

NAME = "limits"
_TURNS = {"cuda": 1000, "cpu": 50}
_GRAPH_KERNELS = 100
_LIMIT_COLUMNS = {
    "what": "limit",
    "sms": "SMs",
    "mb": "MB",
    "us": "us",
    "gbps": "GB/s",
    "max_us": "slowest rank us",
    "spread": "spread %",
}
_FLOOR_COLUMNS = {
    "routing": "routing",
    "max_vio": "MaxVio",
    "wire_mb": "wire MB",
    "dispatch_mb": "dispatch MB",
    "combine_mb": "combine MB",
    "wire_us": "wire us",
    "dispatch_us": "dispatch us",
    "combine_us": "combine us",
}


def arguments(words=None):
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    workload.add_arguments(parser)
    parser.add_argument("--ranks", type=int, help="ranks of that step (those that run)")
    routings = "skewed (to --maxvios), round_robin, one_hot, or a recorded trace (.npz, .npy)"
    parser.add_argument("--routing", default="skewed", help=routings)
    harness.add_timing_arguments(parser)
    parser.add_argument("--out", default=harness.RESULTS, help="folder of limits.json, .csv and .png")
    return parser.parse_args(words)


def main(words=None):
    """Runs the benchmark; returns the exit code."""
    args = arguments(words)
    with Group(device=args.device) as group:
        return run(group, args)


def run(group, args):
    """The benchmark on one rank of `group`; returns the exit code."""
    workload.fill_in(args, group)
    shape = workload.Shape(args.num_tokens, args.hidden, args.num_topk, args.num_experts)
    session = harness.Session(group, NAME, **harness.counts(args, group))
    session.headline(
        f"Limits with {group.size} ranks, all at once; {shape.num_tokens} rows of {shape.row_bytes} B"
    )
    rows = measure(session, shape.num_tokens * shape.row_bytes, shape.num_topk)
    session.table(
        "what this machine can do (GB/s: bytes sent; local: bytes read + written)", _LIMIT_COLUMNS, rows
    )
    ranks = args.ranks or group.size
    found = floor_rows(session, shape, ranks, args.routing, args.maxvios, rates_of(rows))
    session.table(
        f"floors of a step on {ranks} ranks: S={shape.num_tokens} H={shape.hidden} K={shape.num_topk} "
        f"E={shape.num_experts}; the busiest rank",
        _FLOOR_COLUMNS,
        found,
    )
    path = session.save(rows + found, args.out)
    if session.leads:
        plots.save(figure, rows + found, path.with_suffix(".png"))
    return 0


def measure(session, nbytes, copies):
    """Collective. The limits as result rows: `what`, `sms`, `us`, `gbps`."""
    group = session.group
    rows = []
    with limits.opened(limits.open_limits(group, nbytes, copies)) as machine:
        size = machine.nbytes
        sweeps = [
            ("local copy", machine.local_copy, 2 * size),
            (f"local fan-out to {copies}", lambda sms: machine.fanout(sms), (1 + copies) * size),
            ("local stores", machine.fill, copies * size),
        ]
        if group.size > 1:
            sweeps = [("push", machine.push, size), ("pull", machine.pull, size), *sweeps]
        counts = machine.sm_counts()
        others = _others(machine, group)
        with session.progress(len(sweeps) * len(counts) + len(others)) as step:
            for what, make, moved in sweeps:
                for sms in counts:
                    step(what if sms is None else f"{what}, {sms} SMs")
                    rows.append(_limit(session, what, session.time(make(sms)), moved=moved, sms=sms))
            for what, function, moved, per_call in others:
                step(what)
                timing = session.time(function)
                rows.append(_limit(session, what, timing, moved=moved, per_call=per_call))
                if what.startswith("kernel, launched"):
                    host = session.host_time(function)
                    rows.append(_limit(session, f"{what}: host time of a call", host))
    return rows


def _others(machine, group):
    """(what, function, bytes moved or None, things done per call) of what has no sweep."""
    cuda = group.device.kind == "cuda"
    turns = _TURNS[group.device.kind]
    found = []
    if group.size > 1:
        how = "" if cuda else ", polled from Python"
        found.append((f"flag round trip{how}", machine.flag_round_trips(turns), None, turns))
    if cuda:
        if group.size > 1:
            found.append(("copy engine", machine.copy_engine(), machine.nbytes, 1))
        found += [
            ("kernel, launched by epcomm", machine.nothing(), None, 1),
            ("kernel, launched by CuPy", machine.nothing_by_cupy(), None, 1),
            ("kernel in a CUDA graph", machine.graph_of_nothing(_GRAPH_KERNELS), None, _GRAPH_KERNELS),
        ]
    return found


def _limit(session, what, timing, moved=None, sms=None, per_call=1):
    # Only ranks 0 and 1 exchange flags: the mean over all ranks would count the idle ones.
    us = timing.max_us if what.startswith("flag") else timing.us
    row = session.row(kind="limit", what=what, sms=sms, us=us / per_call, max_us=timing.max_us / per_call)
    row["spread"] = 100 * timing.spread
    if moved is not None:
        row |= {"mb": moved / 1e6, "gbps": moved / us / 1e3}
    return row


def rates_of(rows):
    """The Rates of limit rows: the best of each kind."""

    def best(*names):
        found = [row["gbps"] for row in rows if row["what"].startswith(names)]
        return max(found) if found else None

    return floors.Rates(best("push"), best("local copy", "local fan-out"), best("local stores"))


def floor_rows(session, shape, ranks, kind, maxvios, rates):
    """Collective. Floors of dispatch and combine for routings of `ranks` ranks, as result rows."""
    rows = []
    for name, topk_idx in _routings(session.group, shape, ranks, kind, maxvios):
        capacity = max(map(len, topk_idx))
        plan = reference.plan(topk_idx, shape.num_experts, capacity, token_padding=1)
        traffic = floors.Traffic.of_plan(plan)
        dispatch = floors.dispatch_floor(traffic, shape.row_bytes, rates)
        combine = floors.combine_floor(traffic, shape.row_bytes, rates)
        mb = shape.row_bytes / 1e6
        rows.append(
            session.row(
                kind="floor",
                routing=name,
                floor_ranks=ranks,
                max_vio=reference.max_vio(topk_idx, shape.num_experts),
                num_tokens=capacity,
                hidden=shape.hidden,
                num_topk=topk_idx[0].shape[1],
                num_experts=shape.num_experts,
                wire_mb=traffic.wire_rows * mb,
                dispatch_mb=traffic.dispatch_rows * mb,
                combine_mb=traffic.combine_rows * mb,
                wire_us=dispatch.wire_us,
                dispatch_us=dispatch.us,
                combine_us=combine.us,
            )
        )
    return rows


def _routings(group, shape, ranks, kind, maxvios):
    """(name, topk_idx of every rank) of each routing."""
    if kind == "skewed":
        skews = workload.Skews(group, shape, ranks)
        for case in map(skews.case, maxvios):
            yield f"skewed, sigma {case.sigma:.3g}{', floored' if case.floored else ''}", case.topk_idx
    elif kind == "round_robin":
        sizes = (shape.num_tokens, shape.num_topk, shape.num_experts, ranks)
        yield kind, [routing.round_robin(*sizes, rank) for rank in range(ranks)]
    elif kind == "one_hot":
        yield kind, [routing.one_hot(shape.num_tokens, shape.num_topk)] * ranks
    else:
        topk_idx, _ = routing.load_trace(kind)
        if len(topk_idx) != ranks:
            raise ValueError(f"{kind}: a trace of {len(topk_idx)} ranks, asked for {ranks} (--ranks)")
        yield Path(kind).name, list(topk_idx)


def figure(rows):
    """GB/s by number of SMs: across ranks on the left, in local memory on the right."""
    found = [row for row in rows if row.get("gbps") is not None]
    picture, axes = plots.panels(1, 2, plots.configuration(rows[0]))
    for axis, local in zip(axes.flat, (False, True), strict=True):
        mine = [row for row in found if row["what"].startswith("local") == local]
        axis.set_title("local memory: read + written" if local else "to and from peers, per direction")
        axis.set_ylabel("GB/s" if plots.one_device(rows) == "cuda" else "GB/s (CPU ranks)")
        if any(row["sms"] is not None for row in mine):
            _lines(axis, mine)
        else:
            axis.bar([row["what"] for row in mine], [row["gbps"] for row in mine], color=plots.COLOURS[0])
            axis.tick_params(axis="x", labelsize=7)
    return picture


def _lines(axis, rows):
    for number, what in enumerate(plots.distinct(rows, "what")):
        mine = [row for row in rows if row["what"] == what]
        colour = plots.COLOURS[number % len(plots.COLOURS)]
        if mine[0]["sms"] is None:
            axis.axhline(mine[0]["gbps"], color=colour, linestyle="--", label=what)
        else:
            axis.plot(
                [row["sms"] for row in mine], [row["gbps"] for row in mine], "o-", color=colour, label=what
            )
    axis.set_xlabel("SMs")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    sys.exit(main())
