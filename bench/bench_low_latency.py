"""Low latency: dispatch and combine of few tokens, checked, timed eagerly and in a CUDA graph.

    python -m mpi_launch -n 2 bench/bench_low_latency.py --bench --cuda-graph

First every call is checked: counts, rows and scales against the all-gathered routing and the sources' rows,
sums bit for bit, a graph's replay against the eager call. With --bench it is then timed for every number of
tokens, with all ranks busy in both directions. Times are microseconds a call.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench import harness, plots
from bench.low_latency import Case
from epcomm import CombineMode, DispatchDataType, DispatchLayout, Group, MoECommunicator, QuantConfig

NAME = "low_latency"
_DEFAULTS = {
    "cuda": dict(hidden=7168, num_topk=8, experts=256, num_tokens=[128], sweep=[1, 8, 32, 128, 512]),
    "cpu": dict(hidden=512, num_topk=4, experts=None, num_tokens=[16], sweep=[1, 4, 16]),
}
_MASKED = 10  # entries of a rank that are -1 in checked runs
_COLUMNS = {
    "num_tokens": "tokens",
    "dispatch_us": "dispatch us",
    "dispatch_range": "min-max",
    "combine_us": "combine us",
    "combine_range": "min-max",
    "both_us": "both us",
    "both_range": "min-max",
    "dispatch_selections_gbps": "dispatch GB/s selections",
    "dispatch_wire_gbps": "wire",
    "combine_selections_gbps": "combine GB/s selections",
    "combine_wire_gbps": "wire",
    "all_wire_gbps": "wire, all ranks",
    "host_dispatch_us": "host dispatch us",
    "host_combine_us": "host combine us",
}


def arguments(words=None):
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cuda, cpu = _DEFAULTS["cuda"], _DEFAULTS["cpu"]
    text = (
        "most tokens of a rank, one number or several (128, with --bench 1,8,32,128,512; fewer on CPU ranks)"
    )
    parser.add_argument("--num-tokens", type=harness.numbers(int), help=text)
    parser.add_argument("--hidden", type=int, help=f"{cuda['hidden']}; {cpu['hidden']} on CPU ranks")
    parser.add_argument("--num-topk", type=int, help=f"{cuda['num_topk']}; {cpu['num_topk']} on CPU ranks")
    parser.add_argument("--num-experts", type=int, help=f"{cuda['experts']}; 8 a rank on CPU ranks")
    text = "choose among the experts of the first ones only (0 = of all)"
    parser.add_argument("--num-active-ranks", type=int, default=0, help=text)
    parser.add_argument("--no-weights", action="store_true", help="dispatch without topk_weights")
    types = [kind.value for kind in DispatchDataType]
    parser.add_argument("--dispatch-dtype", choices=types, default="bf16")
    layouts = [kind.value for kind in DispatchLayout]
    parser.add_argument("--output-layout", choices=layouts, default="expert_major")
    modes = [kind.value for kind in CombineMode]
    parser.add_argument("--combine-mode", choices=modes, default="rank_local_reduce")
    text = "most blocks of a kernel (130; clamped to tokens + 1 and to the SMs)"
    parser.add_argument("--num-blocks", type=int, default=130, help=text)
    parser.add_argument("--check", action="store_true", help="verify; this is done in every run")
    parser.add_argument("--bench", action="store_true", help="time it, too")
    parser.add_argument("--cuda-graph", action="store_true", help="check a graph's replay, and time graphs")
    parser.add_argument("--bench-warmup", type=int, default=5, help="calls before timing (5)")
    parser.add_argument("--bench-iters", type=int, default=20, help="calls in each of 5 timed batches (20)")
    parser.add_argument(
        "--pairs-per-graph", type=int, default=1, help="calls, or pairs of them, in a graph (1)"
    )
    parser.add_argument(
        "--skew-us", type=float, default=0, help="delay the last rank before every timed call (0)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="GPUs if there are any, else CPU ranks")
    parser.add_argument("--out", default=harness.RESULTS, help="folder of low_latency.json, .csv and .png")
    return parser.parse_args(words)


def main(words=None):
    """Runs the benchmark; returns the exit code."""
    args = arguments(words)
    with Group(device=args.device) as group:
        return run(group, args)


def run(group, args):
    """The benchmark on one rank of `group`; returns the exit code, the same on every rank."""
    defaults = _DEFAULTS[group.device.kind]
    hidden, topk = args.hidden or defaults["hidden"], args.num_topk or defaults["num_topk"]
    experts = args.num_experts or defaults["experts"] or 8 * group.size
    tokens = args.num_tokens or (defaults["sweep"] if args.bench else defaults["num_tokens"])
    active = args.num_active_ranks or group.size
    if not 0 < active <= group.size or topk > experts // group.size * active:
        raise ValueError(f"--num-active-ranks {active}: top-{topk} does not fit into these ranks' experts")
    session = harness.Session(group, NAME, warmup=args.bench_warmup, iters=args.bench_iters)
    session.headline(
        f"Low latency on {group.size} ranks: tokens {', '.join(map(str, tokens))}, H={hidden} K={topk} "
        f"E={experts}, {args.dispatch_dtype}, {args.output_layout}, {args.combine_mode}"
    )
    settings = dict(
        hidden_size=hidden,
        topk=topk,
        num_experts=experts,
        output_layout=DispatchLayout(args.output_layout),
        combine_mode=CombineMode(args.combine_mode),
        quant=QuantConfig() if args.dispatch_dtype == "fp8_e4m3" else None,
        num_blocks=args.num_blocks,
    )
    good, rows = True, []
    for number in tokens:
        with MoECommunicator(group, max_tokens_per_rank=number, **settings) as comm:
            good = _check(session, comm, args) and good
            if good and args.bench:
                rows.append(_time(session, comm, args))
    if rows:
        _report(session, args, rows)
    session.say("PASS" if good else "FAIL")
    return 0 if good else 1


# ---- checking


def _check(session, comm, args):
    """Collective. Whether all is right on all ranks; says what."""
    group, gather = session.group, session.group.comm.allgather
    case = Case(comm, args.num_active_ranks, not args.no_weights, min(_MASKED, comm.max_tokens_per_rank))
    output, handle = comm.dispatch(*case.inputs)
    errors = case.dispatch_errors(output, handle)
    made = case.run_experts(output)
    out = comm.combine(made, handle)
    comm.check()
    dispatched = session.agree(not errors)
    difference, same = case.combine_difference(out)
    if not same:
        errors.append(f"sums differ from the reference by up to {difference:g}, or are not finite")
    differences = gather(difference)
    name = f"{comm.max_tokens_per_rank} tokens, {comm.num_blocks} blocks:"
    session.say(f"{name} [dispatch] {'OK' if dispatched else 'FAILED'}")
    shown = ", ".join(f"rank {rank} {value:g}" for rank, value in enumerate(differences))
    session.say(f"{name} [combine] largest difference: {shown}")
    if args.cuda_graph and group.device.kind == "cuda":
        errors += _graph_errors(comm, case, made, output, out)
        session.say(f"{name} [graph] {'replay equals eager' if session.agree(not errors) else 'FAILED'}")
    elif args.cuda_graph:
        session.say(f"{name} [graph] CPU ranks have none")
    for error in errors:
        print(f"rank {group.rank}: {name} {error}", file=sys.stderr, flush=True)
    return session.agree(not errors)


def _graph_errors(comm, case, made, output, out):
    with comm.xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        replayed, handle = comm.dispatch(*case.inputs)
        sums = comm.combine(made, handle)
        graph = stream.end_capture()
        replayed.tokens.view(np.uint8)[...] = 0xA5
        sums.view(np.uint8)[...] = 0xA5
        graph.launch(stream)
        errors = case.dispatch_errors(replayed, handle)
        if not bool((sums.view(np.uint16) == out.view(np.uint16)).all()):
            errors.append("sums differ from the eager call's")
    return [f"graph: {error}" for error in errors]


# ---- timing


def _time(session, comm, args):
    """Collective. A row of times and rates for one number of tokens."""
    group, device = session.group, session.group.device
    case = Case(comm, args.num_active_ranks, not args.no_weights, 0)
    output, handle = comm.dispatch(*case.inputs)
    made = case.run_experts(output)
    out = comm.combine(made, handle)
    kept = output.tokens

    def dispatch():
        return comm.dispatch(*case.inputs, output_buffer=kept)

    def combine():
        comm.combine(made, handle, out=out)

    def both():
        comm.combine(made, dispatch()[1], out=out)

    row = session.row(
        num_tokens=comm.max_tokens_per_rank,
        hidden=comm.hidden_size,
        num_topk=comm.topk,
        num_experts=comm.num_experts,
        dispatch_dtype=args.dispatch_dtype,
        output_layout=args.output_layout,
        combine_mode=args.combine_mode,
        num_blocks=comm.num_blocks,
        signal="lines" if comm._shape.lines else "flags",
        skew_us=args.skew_us,
        graph=bool(args.cuda_graph and device.kind == "cuda"),
        pairs_per_graph=args.pairs_per_graph,
    )
    steps = {"dispatch": dispatch, "combine": combine, "both": both}
    for name, step in steps.items():
        timing = _time_step(session, step, args)
        row |= {f"{name}_us": timing.us, f"{name}_min_us": timing.min_us, f"{name}_max_us": timing.max_us}
    for name in ("dispatch", "combine"):
        timing = session.host_time(steps[name])
        row[f"host_{name}_us"] = None if timing is None else timing.us
    comm.check()
    every = group.comm.allgather(case.bytes())
    for name in every[0]:
        total = sum(one[name] for one in every)
        time_us = row[f"{name.partition('_')[0]}_us"]
        row[f"{name}_bytes"] = total / group.size
        row[f"{name}_gbps"] = total / group.size / time_us / 1e3
        row[f"all_{name}_gbps"] = total / time_us / 1e3
    return row


def _time_step(session, step, args):
    """The Timing of one call: eager, or in a graph of several."""
    if not (args.cuda_graph and session.group.device.kind == "cuda"):
        return session.time(_late(session, step, args.skew_us))
    with session.group.device.xp.cuda.Stream(non_blocking=True) as stream:
        step()  # memory of this stream
        stream.begin_capture()
        kept = [step() for _ in range(args.pairs_per_graph)]
        graph = stream.end_capture()
        timing = session.time(_late(session, lambda: graph.launch(stream), args.skew_us))
        stream.synchronize()
        del kept
    return timing.over(args.pairs_per_graph)


def _late(session, step, skew_us):
    """`step`, on the last rank `skew_us` after its time."""
    if not skew_us or session.group.rank != session.group.size - 1:
        return step

    def late():
        end = time.perf_counter_ns() + skew_us * 1e3
        while time.perf_counter_ns() < end:
            pass
        step()

    return late


# ---- results


def _report(session, args, rows):
    for row in rows:
        for name in ("dispatch", "combine", "both"):
            row[f"{name}_range"] = f"{row[f'{name}_min_us']:.1f}-{row[f'{name}_max_us']:.1f}"
        row["all_wire_gbps"] = (
            (row["dispatch_wire_bytes"] + row["combine_wire_bytes"]) * row["ranks"] / row["both_us"] / 1e3
        )
    how = f"in graphs of {args.pairs_per_graph}" if rows[0]["graph"] else "eager"
    session.table(f"us a call, {how}: mean over ranks, fastest and slowest rank; GB/s a rank", _COLUMNS, rows)
    path = session.save(rows, args.out)
    if session.leads:
        plots.save(figure, rows, path.with_suffix(".png"))


def figure(rows):
    """Latency over tokens: dispatch, combine, and both together."""
    unit = "us" if plots.one_device(rows) == "cuda" else "us (CPU ranks)"
    first = rows[0]
    words = [first[name] for name in ("dispatch_dtype", "output_layout", "combine_mode", "signal")]
    shape = {key: value for key, value in first.items() if key != "num_tokens"}
    picture, axes = plots.panels(1, 1, f"{plots.configuration(shape)}\n{', '.join(words)}", height=4.2)
    axis = axes.flat[0]
    tokens = [row["num_tokens"] for row in rows]
    for colour, name, label in (
        (0, "dispatch", "dispatch"),
        (1, "combine", "combine"),
        (2, "both", "dispatch + combine"),
    ):
        axis.plot(tokens, [row[f"{name}_us"] for row in rows], "o-", color=plots.COLOURS[colour], label=label)
        low, high = ([row[f"{name}_{end}_us"] for row in rows] for end in ("min", "max"))
        axis.fill_between(tokens, low, high, color=plots.COLOURS[colour], alpha=0.2, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [str(number) for number in tokens])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens a rank")
    axis.set_ylabel(unit)
    axis.legend(fontsize=8, frameon=False)
    return picture


if __name__ == "__main__":
    sys.exit(main())
