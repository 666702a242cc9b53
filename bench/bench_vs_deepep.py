"""The aligned comparison: the same routing, data, timing, SM budget and alignment for every library.

    python -m mpi_launch -n 2 bench/bench_vs_deepep.py --libs epcomm nccl

Per library and MaxVio, in us (median over batches of the mean over ranks):

    plan  planning alone; for a library that cannot plan alone, max(d_f - d_b, 0)
    d_f   dispatch, forward: planning, rows and route weights; epcomm: zero copy, with pf
    d_b   dispatch with the saved plan, rows alone (combine's backward); epcomm: with pf
    c_f   combine, rows alone
    c_b   combine, and the gradient of the route weights back to their tokens
    pf    fetching the copied experts' weights, alone

Every call synchronises the ranks as far as it must; that is in its time. Gradient reduction is left out: it
overlaps with the backward pass. GB/s = S*K*H*2 bytes / time: every row once per expert, local rows included,
so it may exceed the wire.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import check, floors, harness, libs, limits, plots, workload
from epcomm import Group, reference

NAME = "vs_deepep"
TIMES = ("plan", "d_f", "d_b", "c_f", "c_b", "pf")
_SMS = 32
_ALIGNMENT = 128
_NOTE = "gradient reduction is left out: it overlaps with the backward pass"
_COLUMNS = {
    "lib": "lib",
    "maxvio": "MaxVio",
    "plan": "plan us (% of d_f)",
    "d_f": "d_f us (GB/s)",
    "d_b": "d_b us (GB/s)",
    "c_f": "c_f us (GB/s)",
    "c_b": "c_b us (GB/s)",
    "pf": "pf us (% of d_f, GB/s)",
    "d_x_floor": "(d_f-pf) x floor",
    "c_x_floor": "c_f x floor",
    "spread": "spread %",
    "checked": "checked",
    "note": "",
}
_SECONDS = {
    "lib": "lib",
    "maxvio": "MaxVio",
    "solve_s": "solve s",
    "prepare_s": "prepare s",
    "time_s": "time s",
    "create_s": "create s",
    "destroy_s": "destroy s",
}


def arguments(words=None):
    """The parsed command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    default = "epcomm nccl deepep_v2; epcomm mpi on CPU ranks"
    parser.add_argument("--libs", nargs="+", choices=libs.NAMES, metavar="LIB", help=default)
    workload.add_arguments(parser, topk="--topk", experts="--experts")
    parser.add_argument(
        "--hp", type=int, help="H', experts' inner size; 0: no weights (2048; 256 on CPU ranks)"
    )
    parser.add_argument("--num-sms", type=int, help=f"SMs of every library ({_SMS})")
    harness.add_timing_arguments(parser)
    parser.add_argument(
        "--out", default=harness.RESULTS / f"{NAME}.csv", type=Path, help="CSV; the JSON is beside it"
    )
    parser.add_argument("--plot", type=Path, help="picture (beside the CSV)")
    return parser.parse_args(words)


def main(words=None):
    """Runs the benchmark; returns the exit code."""
    args = arguments(words)
    with Group(device=args.device) as group:
        return run(group, args)


def run(group, args):
    """The benchmark on one rank of `group`; returns the exit code, the same on every rank."""
    cuda = group.device.kind == "cuda"
    workload.fill_in(args, group)
    names = args.libs or (["epcomm", "nccl", "deepep_v2"] if cuda else ["epcomm", "mpi"])
    shape = workload.Shape(
        args.num_tokens,
        args.hidden,
        args.num_topk,
        args.num_experts,
        token_padding=_ALIGNMENT,
        num_sms=args.num_sms or (_SMS if cuda else None),
        hp=(2048 if cuda else 256) if args.hp is None else args.hp,
    )
    session = harness.Session(group, NAME, **harness.counts(args, group))
    session.headline(
        f"{' / '.join(names)} on {group.size} ranks: S={shape.num_tokens} H={shape.hidden} "
        f"K={shape.num_topk} E={shape.num_experts} H'={shape.hp} alignment={_ALIGNMENT} "
        f"SMs={shape.num_sms or '-'}"
    )
    skews = workload.Skews(group, shape)
    cases = [skews.case(target) for target in args.maxvios]
    del skews
    rates = limits.measure_rates(session, shape.num_tokens * shape.row_bytes, shape.num_topk, shape.num_sms)
    traffic = [floors.Traffic.of_plan(_plan(shape, case)) for case in cases]

    rows, errors = [], []
    missing = {name: libs.module(name).missing(group) for name in names}
    with session.progress(list(missing.values()).count(None) * len(cases)) as step:
        for name, reason in missing.items():
            if reason:
                rows.append(_row(session, shape, name) | {"note": reason})
                continue
            found, wrong = _run_library(session, shape, name, cases, traffic, rates, step)
            rows += found
            errors += wrong
    _print(session, rows)
    session.save(rows, args.out.parent, args.out.stem)
    if session.leads:
        plots.save(figure, rows, args.plot or args.out.with_suffix(".png"))
    for error in errors:
        print(f"rank {group.rank}: {error}", file=sys.stderr, flush=True)
    return 0 if session.agree(not errors) else 1


def _plan(shape, case):
    return reference.plan(case.topk_idx, shape.num_experts, shape.num_tokens, shape.token_padding)


def _run_library(session, shape, name, cases, traffic, rates, step):
    """Rows of a library for every case, from one set of buffers; and what its results got wrong."""
    group = session.group
    x = workload.on_device(group.device, workload.rows(group.rank, shape))
    weights = workload.on_device(group.device, workload.weights(group.rank, shape))
    rows, errors = [], []
    start = time.perf_counter()
    library = libs.module(name).Library(group, shape)
    create_s = time.perf_counter() - start
    for case, moved in zip(cases, traffic, strict=True):
        step(f"{name}, MaxVio {case.max_vio:.3g}")
        start = time.perf_counter()
        topk_idx = workload.on_device(group.device, case.topk_idx[group.rank])
        library.load(topk_idx, x, weights)
        wrong = check.round_trip_errors(library.round_trip(), x, topk_idx)
        errors += [f"{name}, MaxVio {case.max_vio:.3g}: {text}" for text in wrong]
        prepared = time.perf_counter()
        row = _row(session, shape, name, case) | _times(session, shape, library)
        row |= _distances(row, shape, moved, rates)
        row |= {
            "solve_s": case.solve_s,
            "prepare_s": prepared - start,
            "time_s": time.perf_counter() - prepared,
        }
        row |= {"checked": session.agree(not wrong), "note": "floored" if case.floored else ""}
        rows.append(row)
    start = time.perf_counter()
    library.close()
    destroy_s = time.perf_counter() - start
    return [row | {"create_s": create_s, "destroy_s": destroy_s} for row in rows], errors


def _row(session, shape, name, case=None):
    """The fields that say what was measured."""
    row = session.row(
        lib=name,
        ep=session.group.size,
        E=shape.num_experts,
        H=shape.hidden,
        K=shape.num_topk,
        S=shape.num_tokens,
        hp=shape.hp,
        num_sms=shape.num_sms,
        alignment=shape.token_padding,
    )
    if case is not None:
        row |= {
            "sigma": case.sigma,
            "target_maxvio": case.target,
            "maxvio": case.max_vio,
            "floored": case.floored,
        }
    return row


def _times(session, shape, library):
    """The library's operations, timed: `*_us`, `*_max_us`, GB/s, shares of d_f."""
    timings = {name: session.time(function) for name, function in library.operations().items()}
    row = {}
    for name in TIMES:
        if name in timings:
            row |= {f"{name}_us": timings[name].us, f"{name}_max_us": timings[name].max_us}
    if "plan" not in timings:
        row["plan_us"] = max(row["d_f_us"] - row["d_b_us"], 0.0)
    for name in ("plan", "pf"):
        if f"{name}_us" in row:
            row[f"{name}_percent"] = 100 * row[f"{name}_us"] / row["d_f_us"]
    logical = shape.num_tokens * shape.num_topk * shape.row_bytes
    for name in ("d_f", "d_b", "c_f", "c_b"):
        row[f"{name}_gbps"] = logical / row[f"{name}_us"] / 1e3
    row |= library.figures(session)
    if "prefetched_mb" in row:
        row["pf_gbps"] = row["prefetched_mb"] / row["pf_us"] * 1e3
    row["spread"] = 100 * max(timings[name].spread for name in ("d_f", "d_b", "c_f", "c_b"))
    return row


def _distances(row, shape, traffic, rates):
    dispatch = floors.dispatch_floor(traffic, shape.row_bytes, rates).us
    combine = floors.combine_floor(traffic, shape.row_bytes, rates).us
    return {
        "floor_us": dispatch,
        "combine_floor_us": combine,
        "d_x_floor": (row["d_f_us"] - row.get("pf_us", 0.0)) / dispatch,
        "c_x_floor": row["c_f_us"] / combine,
    }


def _print(session, rows):
    session.table("us (GB/s = S*K*H*2 / time); floor: the balanced step's, planning not included", _COLUMNS, [
        row | {name: _cell(row, name) for name in TIMES} for row in rows
    ])  # fmt: skip
    for row in rows:
        if libs.quality(row):
            session.say(f"{row['lib']} at MaxVio {row['maxvio']:.3g}: {libs.quality(row)}")
    session.table("seconds", _SECONDS, [row for row in rows if "time_s" in row])
    session.say(_NOTE)


def _cell(row, name):
    """A time in us and what goes with it, as text; None if the library has no such operation."""
    if row.get(f"{name}_us") is None:
        return None
    more = [f"{row[f'{name}_percent']:.0f} %"] if f"{name}_percent" in row else []
    more += [f"{row[f'{name}_gbps']:.4g}"] if f"{name}_gbps" in row else []
    return f"{row[f'{name}_us']:.1f} ({', '.join(more)})"


def figure(rows):
    """Dispatch and combine, forward and backward: stacked bars over MaxVio."""
    rows = [dict(row, maxvio=round(row["maxvio"], 3)) for row in rows if row.get("d_f_us") is not None]
    for row in rows:
        fetched = row.get("pf_us") or 0.0
        row["rest_d_f"] = max(row["d_f_us"] - row["plan_us"] - fetched, 0.0)
        row["rest_d_b"] = max(row["d_b_us"] - fetched, 0.0)
    first = rows[0]
    names = {"S": "S", "H": "H", "K": "K", "E": "E", "H'": "hp", "alignment": "alignment", "SMs": "num_sms"}
    words = [f"{name}={first[key]}" for name, key in names.items() if first[key] is not None]
    title = f"{first['ep']} x {first['device_name']}: {' '.join(words)}\n{_NOTE}"
    picture, axes = plots.panels(2, 2, title)
    panels = (
        (
            "dispatch, forward (d_f)",
            {"communication": "rest_d_f", "planning": "plan_us", "prefetch": "pf_us"},
        ),
        ("dispatch, backward (d_b)", {"communication": "rest_d_b", "planning": "-", "prefetch": "pf_us"}),
        ("combine, forward (c_f)", {"communication": "c_f_us"}),
        ("combine, backward (c_b)", {"communication": "c_b_us"}),
    )
    for axis, (name, parts) in zip(axes.flat, panels, strict=True):
        plots.stacked_bars(axis, rows, parts, group="target_maxvio")
        axis.set_title(name)
        axis.set_xlabel("MaxVio")
    plots.legend(picture, panels[0][1], plots.distinct(rows, "lib"))
    return picture


if __name__ == "__main__":
    sys.exit(main())
