"""The main job: balanced dispatch -> experts -> combine over a sweep of router skews, checked and timed.

    python -m mpi_launch -n 4 bench/bench_balanced.py

For every wanted MaxVio it runs a step (plan, dispatch, every expert over its segment, combine), compares it
with the reference, then times plan, dispatch (plan given) and combine by themselves, beside what moving the
bytes must cost on this machine (floor) and beside an unbalanced expert exchange over NCCL (GPUs) or MPI (CPU
ranks).
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import check, floors, harness, libs, limits, plots, steps, workload
from epcomm import Group, reference

NAME = "balanced"
_CUDA_SMS = 64
_COLUMNS = {
    "lib": "lib",
    "max_vio": "MaxVio",
    "plan_us": "plan us",
    "dispatch_us": "dispatch us",
    "dispatch_x_floor": "x floor",
    "combine_us": "combine us",
    "combine_x_floor": "x floor",
    "floor_us": "floor us",
    "pad_mb": "pad MB",
    "pad_us": "pad us",
    "host_us": "host us",
    "spread": "spread %",
    "checked": "checked",
}
_TRAINING_COLUMNS = {
    "max_vio": "MaxVio",
    "dispatch_us": "dispatch us",
    "dispatch_backward_us": "backward",
    "combine_us": "combine us",
    "combine_backward_us": "backward",
    "prefetch_us": "prefetch us",
    "prefetch_mb": "MB",
    "prefetch_gbps": "GB/s",
    "prefetch_x_floor": "x wire",
    "reduce_grad_us": "reduce_grad us",
    "reduce_grad_mb": "MB",
    "reduce_grad_gbps": "GB/s",
    "reduce_grad_x_floor": "x wire",
}
_HP = {"cuda": 2048, "cpu": 256}


def arguments(words=None):
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    workload.add_arguments(parser)
    parser.add_argument("--num-sms", type=int, help=f"SMs of dispatch and combine ({_CUDA_SMS})")
    parser.add_argument(
        "--token-padding", type=int, default=128, help="rows that a segment is padded to (128)"
    )
    parser.add_argument(
        "--backward", action="store_true", help="time dispatch and combine of the backward pass"
    )
    parser.add_argument("--prefetch", action="store_true", help="time fetching the copied experts' weights")
    parser.add_argument(
        "--reduce-grad", action="store_true", help="time adding up the copied experts' gradients"
    )
    harness.add_timing_arguments(parser)
    parser.add_argument("--out", default=harness.RESULTS, help="folder of balanced.json, .csv and .png")
    parser.add_argument("--no-check", action="store_true", help="do not compare with the reference")
    return parser.parse_args(words)


def main(words=None):
    """Runs the benchmark; returns the exit code."""
    args = arguments(words)
    with Group(device=args.device) as group:
        return run(group, args)


def run(group, args):
    """The benchmark on one rank of `group`; returns the exit code, the same on every rank."""
    workload.fill_in(args, group)
    num_sms = args.num_sms or (_CUDA_SMS if group.device.kind == "cuda" else None)
    shape = workload.Shape(
        args.num_tokens,
        args.hidden,
        args.num_topk,
        args.num_experts,
        args.token_padding,
        num_sms,
        hp=_HP[group.device.kind],
    )
    session = harness.Session(group, NAME, **harness.counts(args, group))
    session.headline(
        f"Balanced step on {group.size} ranks: S={shape.num_tokens} H={shape.hidden} K={shape.num_topk} "
        f"E={shape.num_experts} padding={shape.token_padding}"
    )
    skews = workload.Skews(group, shape)
    cases = [skews.case(target) for target in args.maxvios]
    plans = [
        reference.plan(case.topk_idx, shape.num_experts, shape.num_tokens, shape.token_padding)
        for case in cases
    ]

    rows, errors = _run_epcomm(session, args, shape, cases, plans)
    peer_rows, peer_errors = _run_peer(session, shape, cases, rows, check_steps=not args.no_check)
    rows += peer_rows
    session.table("us; x floor: over the larger of wire and local time of the same bytes", _COLUMNS, rows)
    if args.backward or args.prefetch or args.reduce_grad:
        session.table(
            "training; GB/s over the largest receiver or owner", _TRAINING_COLUMNS, rows[: len(cases)]
        )
    _say_pads(session, rows)
    for row in peer_rows:
        if libs.quality(row):
            session.say(f"{row['lib']} at MaxVio {row['max_vio']:.3g}: {libs.quality(row)}")
    path = session.save(rows, args.out)
    if session.leads:
        plots.save(figure, rows, path.with_suffix(".png"))
    for error in errors + peer_errors:
        print(f"rank {group.rank}: {error}", file=sys.stderr, flush=True)
    return 0 if session.agree(not errors and not peer_errors) else 1


def _run_epcomm(session, args, shape, cases, plans):
    group = session.group
    device = group.device
    rows, errors = [], []
    every_x = None if args.no_check else [workload.rows(rank, shape) for rank in range(group.size)]
    every_weights = [workload.weights(rank, shape) for rank in range(group.size)]
    x = workload.on_device(device, workload.rows(group.rank, shape))
    weights = workload.on_device(device, every_weights[group.rank])
    wanted = {key: getattr(args, key) for key in ("backward", "prefetch", "reduce_grad")}
    job = steps.Step(group, shape, x, weights, **wanted)
    with session.progress(len(cases) + 1) as step:
        step("what this machine can do")
        rates = limits.measure_rates(session, x.nbytes, shape.num_topk, job.buffer.num_sms)
        for case, plan in zip(cases, plans, strict=True):
            step(f"epcomm, MaxVio {case.max_vio:.3g}")
            topk_idx = workload.on_device(device, case.topk_idx[group.rank])
            found = None
            if not args.no_check:
                found = job.check(topk_idx, check.Oracle(device, group.rank, plan, every_x, every_weights))
                errors += [f"MaxVio {case.max_vio:.3g}: {text}" for text in found]
            times, moved = job.time(topk_idx, session)
            row = _row(session, shape, case, "epcomm", times, found, job.buffer.num_sms)
            rows.append(row | _distances(row, shape, plan, rates, moved))
    job.close()
    return rows, errors


def _run_peer(session, shape, cases, epcomm_rows, check_steps):
    """The same routings by the exchange that one writes by hand, against the floors of the balanced step."""
    group = session.group
    name = libs.peer_of(group)
    adapter = libs.module(name)
    why = adapter.missing(group)
    if why:
        session.say(f"{name}: not run ({why})")
        return [], []
    rows, errors = [], []
    library = adapter.Library(group, shape)
    x = workload.on_device(group.device, workload.rows(group.rank, shape))
    weights = workload.on_device(group.device, workload.weights(group.rank, shape))
    with session.progress(len(cases)) as step:
        for case, beside in zip(cases, epcomm_rows, strict=True):
            step(f"{name}, MaxVio {case.max_vio:.3g}")
            topk_idx = workload.on_device(group.device, case.topk_idx[group.rank])
            library.load(topk_idx, x, weights)
            found = None
            out = library.round_trip()
            if check_steps:
                found = check.round_trip_errors(out, x, topk_idx)
                errors += [f"{name}, MaxVio {case.max_vio:.3g}: {text}" for text in found]
            run = library.operations()
            times = {
                key: session.time(run[of])
                for key, of in (("plan", "plan"), ("dispatch", "d_b"), ("combine", "c_f"))
            }
            row = _row(session, shape, case, name, times, found, shape.num_sms) | library.figures(session)
            row |= {key: beside[key] for key in ("floor_us", "combine_floor_us")}
            rows.append(row | _over_floor(row))
    library.close()
    return rows, errors


def _row(session, shape, case, lib, times, found, num_sms):
    """A result row from Timings by operation and the list of errors (None: not compared)."""
    row = session.row(
        lib=lib,
        num_tokens=shape.num_tokens,
        hidden=shape.hidden,
        num_topk=shape.num_topk,
        num_experts=shape.num_experts,
        num_sms=num_sms,
        token_padding=shape.token_padding,
        target_max_vio=case.target,
        max_vio=round(case.max_vio, 4),
        sigma=case.sigma,
        floored=case.floored,
    )
    for name, timing in times.items():
        if timing is not None:
            row |= {f"{name}_us": timing.us, f"{name}_max_us": timing.max_us}
    timed = [times[name] for name in ("dispatch", "combine")]
    row["spread"] = 100 * max(timing.spread for timing in timed)
    row["checked"] = None if found is None else session.agree(not found)
    return row


def _distances(row, shape, plan, rates, moved):
    """Floors, distances to them, what the pad rows cost, and the rates of what moved expert weights."""
    traffic = floors.Traffic.of_plan(plan)
    dispatch = floors.dispatch_floor(traffic, shape.row_bytes, rates)
    combine = floors.combine_floor(traffic, shape.row_bytes, rates)
    more = {
        "floor_us": dispatch.us,
        "floor_wire_us": dispatch.wire_us,
        "floor_local_us": dispatch.local_us,
        "combine_floor_us": combine.us,
        "wire_gbps": rates.wire,
        "local_gbps": rates.local,
    }
    if shape.token_padding > 1:
        pad_bytes = floors.pad_rows(plan) * shape.row_bytes
        more |= {
            "pad_mb": pad_bytes / 1e6,
            "store_gbps": rates.store,
            "pad_us": pad_bytes / rates.store / 1e3,
        }
    for name, nbytes in moved.items():
        us = row.get(f"{name}_us")
        if us is not None and nbytes:
            more |= {f"{name}_mb": nbytes / 1e6, f"{name}_gbps": nbytes / us / 1e3}
            more[f"{name}_x_floor"] = rates.wire / more[f"{name}_gbps"]
    return more | _over_floor(row | more)


def _over_floor(row):
    return {
        "dispatch_x_floor": row["dispatch_us"] / row["floor_us"],
        "combine_x_floor": row["combine_us"] / row["combine_floor_us"],
    }


def _say_pads(session, rows):
    row = rows[0]
    if "pad_us" in row:
        session.say(
            f"pad rows at MaxVio {row['max_vio']:.3g}: {row['pad_mb']:.1f} MB on the busiest rank; stores of "
            f"this run: {row['store_gbps']:.0f} GB/s with {row['num_sms']} SMs; pad bytes / store rate: "
            f"{row['pad_us']:.0f} us"
        )


def figure(rows):
    """Dispatch and combine over MaxVio, planning stacked on dispatch, beside the floors."""
    panels = (
        ("dispatch", "floor_us", {"dispatch": "dispatch_us", "planning": "plan_us"}),
        ("combine", "combine_floor_us", {"combine": "combine_us"}),
    )
    picture, axes = plots.panels(1, 2, plots.configuration(rows[0]))
    for axis, (title, floor, parts) in zip(axes.flat, panels, strict=True):
        plots.stacked_bars(axis, rows, parts, group="max_vio", floor=floor)
        axis.set_title(title)
        axis.set_xlabel("MaxVio")
    plots.legend(picture, ("communication", "planning"), plots.distinct(rows, "lib"), floor=True)
    return picture


if __name__ == "__main__":
    sys.exit(main())
