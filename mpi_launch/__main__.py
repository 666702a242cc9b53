"""The command line: `python -m mpi_launch [options] (script.py | -m module) [ARGS ...]`."""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from . import gpus, job, mpirun

_HERE = Path(__file__).resolve().parent


def _parse(words):
    parser = argparse.ArgumentParser(
        prog="python -m mpi_launch",
        usage="%(prog)s [-n N] [--device cuda|cpu] [--hostfile FILE] [--timeout S] "
        "(script.py | -m module) [ARGS ...]",
        description="Run a Python program on N ranks through MPI. An exception on one rank ends the job.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", type=int, metavar="N", help="number of ranks (default: one a GPU, without GPUs 2)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="what the ranks run on (sets EPCOMM_DEVICE)"
    )
    parser.add_argument("--hostfile", help="hosts to run on, in the format of the MPI library")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end the job after S seconds, with exit code 124"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.module is not None:
        options.program = ["-m", *options.module] if options.module else []
    if not options.program:
        parser.error("no program: name a script, or -m and a module")
    if options.n is not None and options.n < 1:
        parser.error(f"-n: expected 1 or more, got {options.n}")
    if options.timeout is not None and not options.timeout > 0:
        parser.error(f"--timeout: expected more than 0 seconds, got {options.timeout:g}")
    if options.hostfile is not None and not os.path.isfile(options.hostfile):
        parser.error(f"--hostfile: no file {options.hostfile}")
    if options.program[0] != "-m" and not os.path.exists(options.program[0]):
        parser.error(f"no file {options.program[0]}")
    return options


def _default_ranks(device):
    if (device or os.environ.get("EPCOMM_DEVICE", "")).startswith("cpu"):
        return 2
    # In a process of its own, since this one forks.
    answer = subprocess.run([sys.executable, gpus.__file__], capture_output=True, text=True)
    return int(answer.stdout.split()[1]) or 2 if answer.returncode == 0 else 2


def _command(ranks, hostfile, exports):
    """The command up to the user's program."""
    start = [sys.executable, str(_HERE / "_rank.py")]
    if ranks == 1 and not hostfile:
        return start
    found = mpirun.find()
    if found is None:
        raise mpirun.LaunchError(
            f"{ranks} ranks need MPI, and no mpirun is beside {sys.executable} or on PATH: "
            "pip install epcomm[mpi]"
        )
    if importlib.util.find_spec("mpi4py") is None:
        raise mpirun.LaunchError(
            f"{found} is there, but {sys.executable} has no mpi4py: pip install epcomm[mpi]"
        )
    # Through mpi4py's runner an exception calls MPI_Abort; without it the other ranks would wait for ever.
    start[1:1] = ["-m", "mpi4py"]
    return mpirun.command(found, mpirun.is_open_mpi(found), ranks, hostfile, exports) + start


def main(words=None):
    """Start the job that the command line `words` describes; returns its exit code."""
    options = _parse(words)
    ranks = options.n if options.n is not None else _default_ranks(options.device)
    variables = {"EPCOMM_DEVICE": options.device} if options.device else {}
    exports = [*variables, "EPCOMM_LAUNCH_DIR", "EPCOMM_LAUNCH_SIZE"]
    exports += [name for name in os.environ if name.startswith("EPCOMM_") and name not in exports]
    try:
        command = _command(ranks, options.hostfile, exports)
    except mpirun.LaunchError as error:
        print(f"mpi_launch: {error}", file=sys.stderr)
        return 2
    return job.run(command + options.program, ranks, options.timeout, variables)


if __name__ == "__main__":
    sys.exit(main())
