"""`python -m epcomm info | selftest | step | bench list|NAME [ARGS] | plot RESULTS.json`"""

import argparse
import ast
import importlib
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def main(words=None):
    """Runs the command that `words` (default: the command line) ask for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m epcomm", description="Expert-parallel communication.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="devices, what they can share, versions, kernel cache")
    commands.add_parser("selftest", help="try everything in small, in less than a minute; says what to do")
    commands.add_parser("step", help="one checked step on the ranks that were started, as selftest runs it")
    bench = commands.add_parser(
        "bench", help="run a benchmark on the ranks that were started", add_help=False
    )
    bench.add_argument("name", help="a name that `bench list` gives")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="the benchmark's own; --help lists them")
    plot = commands.add_parser("plot", help="draw the picture of a benchmark's results")
    plot.add_argument("results", help="the .json file")
    args = parser.parse_args(words)
    return globals()[f"_{args.command}"](args)


def _info(args):
    from .info import report

    print(report())
    return 0


def _selftest(args):
    from .selftest import run

    return run()


def _step(args):
    from .selftest import step_on_started_ranks

    return step_on_started_ranks()


def _bench(args):
    if not _in_checkout():
        return 2
    names = {path.stem.removeprefix("bench_"): path for path in sorted((_ROOT / "bench").glob("bench_*.py"))}
    if args.name == "list":
        width = max(map(len, names))
        for name, path in names.items():
            print(f"{name:{width}}  {_summary(path)}")
        print("\non several ranks: python -m mpi_launch -n 4 -m epcomm bench NAME [ARGS]")
        return 0
    if args.name not in names:
        print(f"epcomm bench: no {args.name!r}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"bench.bench_{args.name}").main(args.arguments)


def _plot(args):
    if not _in_checkout():
        return 2
    try:
        importlib.import_module("bench.plots").draw(args.results)
    except (OSError, ValueError, ImportError) as error:
        print(f"epcomm plot: {error}", file=sys.stderr)
        return 2
    return 0


def _in_checkout():
    """Whether bench/ is beside the package; then it can be imported."""
    if (_ROOT / "bench" / "harness.py").is_file():
        if str(_ROOT) not in sys.path:
            sys.path.insert(0, str(_ROOT))
        return True
    text = (
        "the benchmarks are part of the source tree, and this is an installed package: run it from a checkout"
    )
    print(f"epcomm: {text}", file=sys.stderr)
    return False


def _summary(path):
    """The first line of a module's docstring, without importing it."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
