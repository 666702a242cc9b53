"""The one harness of all benchmarks: timing, progress, tables and result files.

A benchmark makes one `Session` on every rank. Its timing methods are collective; rank 0 prints and writes.

Timing: a warm-up, then batches of back-to-back calls between two events (CUDA) or two readings of the
monotonic clock (CPU ranks, where a call returns when its work is done). A batch yields one time per call and
rank. Reported is the median over the batches of the mean over ranks, and the same of the maximum over ranks.
Times are in microseconds.
"""

import csv
import functools
import gc
import json
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from bench import environment

RESULTS = environment.ROOT / "bench" / "results"


@dataclass(frozen=True)
class Timing:
    """Time per call in us: `us` = median over batches of the mean over ranks, `min_us` and `max_us` = the
    same of the fastest and the slowest rank, `low_us` and `high_us` = the fastest and the slowest batch (mean
    over ranks)."""

    us: float
    min_us: float
    max_us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, times):
        """From `times[rank][batch]` in us."""
        by_batch = list(zip(*times, strict=True))
        means = [statistics.fmean(batch) for batch in by_batch]
        fastest, slowest = (statistics.median(map(end, by_batch)) for end in (min, max))
        return cls(statistics.median(means), fastest, slowest, min(means), max(means))

    def over(self, calls):
        """The time of one of `calls` equal parts."""
        return Timing(*(value / calls for value in astuple(self)))

    @property
    def spread(self):
        """(slowest - fastest batch) / median."""
        return (self.high_us - self.low_us) / self.us


class Session:
    """One run of one benchmark, as one rank sees it.

    Args:
        group: the Group whose ranks run the benchmark.
        name: file stem of the results, and the `bench` field of every row.
        warmup, iters, batches: calls before the first batch, calls in a batch, batches.
    """

    def __init__(self, group, name, *, warmup=20, iters=50, batches=5):
        self.group = group
        self.name = name
        self.warmup = warmup
        self.iters = iters
        self.batches = batches
        self.leads = group.rank == 0
        self._console = _terminal() if self.leads else None

    @functools.cached_property
    def environment(self):
        """What the run is made on (bench.environment), captured when it is first asked for."""
        return environment.capture(self.group)

    # ---- timing ----------------------------------------------------------------------------------

    def time(self, function, *, together=True, iters=None):
        """Collective. The Timing of `function()` on the current stream.

        Args:
            together: the ranks start every batch together.
            iters: calls in a batch, for a function that is much shorter or longer than the others.
        """
        iters = iters or self.iters
        for _ in range(self.warmup):
            function()
        self._settle()
        mine = []
        with _no_collections():
            for _ in range(self.batches):
                if together:
                    self.group.barrier()
                mine.append(self._batch(function, iters))
        return Timing.of(self.group.comm.allgather(mine))

    def host_time(self, function):
        """Collective. From the entry of `function()` to its return, with an idle device before it; None on
        CPU ranks, where a call returns only when its work is done."""
        if self.group.device.kind == "cpu":
            return None
        for _ in range(self.warmup):
            function()
        mine = []
        with _no_collections():
            for _ in range(self.batches):
                calls = []
                for _ in range(self.iters):
                    self._settle()
                    self.group.barrier()
                    start = time.perf_counter_ns()
                    function()
                    calls.append((time.perf_counter_ns() - start) / 1e3)
                mine.append(statistics.median(calls))
        self._settle()
        return Timing.of(self.group.comm.allgather(mine))

    def _batch(self, function, iters):
        device = self.group.device
        if device.kind == "cpu":
            start = time.perf_counter_ns()
            for _ in range(iters):
                function()
            return (time.perf_counter_ns() - start) / 1e3 / iters
        cuda = device.xp.cuda
        start, end = cuda.Event(), cuda.Event()
        start.record()
        for _ in range(iters):
            function()
        end.record()
        end.synchronize()
        return cuda.get_elapsed_time(start, end) * 1e3 / iters

    def _settle(self):
        device = self.group.device
        device.synchronize(device.handle(device.current_stream()))

    # ---- agreement -------------------------------------------------------------------------------

    def agree(self, good):
        """Collective. Whether `good` holds on every rank, so that all ranks take the same branch."""
        return all(self.group.comm.allgather(bool(good)))

    # ---- printing, rank 0 ------------------------------------------------------------------------

    def say(self, text=""):
        """Print a line on rank 0."""
        if self.leads:
            print(text, flush=True)

    def headline(self, title):
        """The head of a printed run: what is measured, on what, and what CPU times are worth."""
        if self.leads:
            self.say(f"{title}\n{environment.summary(self.environment)}")
        if self.group.device.kind == "cpu":
            self.say("CPU ranks: the times show that the program works; they say nothing about GPUs.")

    @contextmanager
    def progress(self, total):
        """A progress bar on a terminal, else a line a step. Yields `step(text)`, called before each step."""
        if not self.leads:
            yield lambda text: None
        elif self._console is None:
            done = iter(range(1, total + 1))
            yield lambda text: self.say(f"[{next(done, total):3d}/{total}] {text}")
        else:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            text = TextColumn("{task.description}")
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
            with Progress(*columns, console=self._console, transient=True) as bar:
                task = bar.add_task("", total=total)
                done = iter(range(total))
                yield lambda text: bar.update(task, completed=next(done, total), description=text)
                bar.update(task, completed=total)

    def table(self, title, columns, rows):
        """Print a table on rank 0. columns: {key: heading}; rows: dicts; what a row lacks is shown as "-"."""
        if not self.leads:
            return
        cells = [[_cell(row.get(key)) for key in columns] for row in rows]
        if self._console is None:
            print(_plain_table(title, list(columns.values()), cells), flush=True)
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for heading in columns.values():
            table.add_column(heading, justify="right", no_wrap=True)
        for line in cells:
            table.add_row(*line)
        self._console.print(table)

    # ---- results, rank 0 -------------------------------------------------------------------------

    def row(self, **fields):
        """A result row: what every row has (`device` keeps CPU times apart from GPU times), then `fields`."""
        return {
            "bench": self.name,
            "device": self.group.device.kind,
            "device_name": environment.device_name(self.group.peers[0]),
            "ranks": self.group.size,
        } | fields

    def save(self, rows, folder=RESULTS, stem=None):
        """Write `<folder>/<stem>.json` (a list of one object a row, environment included) and `.csv`.

        Returns the path of the JSON file, on every rank.
        """
        path = Path(folder) / f"{stem or self.name}.json"
        if self.leads:
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [{key: _rounded(value) for key, value in row.items()} for row in rows]
            objects = [row | {"environment": self.environment} for row in rows]
            path.write_text(json.dumps(objects, indent=1) + "\n")
            write_csv(path.with_suffix(".csv"), rows)
            self.say(f"results: {path} and .csv")
        return path


def _rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_csv(path, rows):
    """Rows (dicts of scalars) as CSV; columns in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def numbers(kind):
    """An argparse type: a comma-separated list of `kind`."""

    def parse(text):
        return [kind(word) for word in text.split(",") if word]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def add_timing_arguments(parser):
    """`--device --warmup --iters`; the defaults of the counts depend on the device (see `counts`)."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="GPUs if there are any, else CPU ranks")
    parser.add_argument("--warmup", type=int, help="calls before timing (20; 1 on CPU ranks)")
    parser.add_argument("--iters", type=int, help="calls in each of 5 timed batches (50; 1 on CPU ranks)")


def counts(args, group):
    """The Session's `warmup` and `iters` from parsed arguments and the device."""
    few = group.device.kind == "cpu"
    return {
        "warmup": (1 if few else 20) if args.warmup is None else args.warmup,
        "iters": (1 if few else 50) if args.iters is None else max(1, args.iters),
    }


@contextmanager
def _no_collections():
    # A collection of garbage in the middle of a batch would show as a slow call.
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _terminal():
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()


def _cell(value):
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def _plain_table(title, headings, cells):
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]

    def line(words):
        return "  ".join(word.rjust(width) for word, width in zip(words, widths, strict=True))

    return "\n".join([title, line(headings), line("-" * width for width in widths), *map(line, cells)])
