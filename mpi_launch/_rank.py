"""What every rank runs around the user's program: `python -m mpi4py .../_rank.py script.py ARGS`, by path.

Tells the program its node-local rank, and marks in the launcher's folder that the program runs: a file
`R.running` with the process id, renamed to `R.finished` when the program ends. A rank that waits in
MPI_Finalize has finished.
"""

import os
import runpy
import sys
from pathlib import Path

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")


def _first(names, default):
    return next((os.environ[name] for name in names if name in os.environ), default)


def _start_mpi(size):
    """Initialise MPI now: an exception before the program's own import of it ends the job too."""
    from mpi4py import MPI

    found = MPI.COMM_WORLD.Get_size()
    if found != size:
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        sys.exit(
            f"mpi_launch: {size} ranks were started, but mpi4py sees {found}: it uses {library}, "
            "and the mpirun that was found belongs to another MPI library"
        )


def _run(words):
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def main():
    size = int(os.environ["EPCOMM_LAUNCH_SIZE"])
    rank = _first(_RANK, "0" if size == 1 else None)
    local_rank = _first(_LOCAL_RANK, "0" if size == 1 else None)
    if local_rank is not None:
        os.environ["EPCOMM_LOCAL_RANK"] = local_rank
    folder = Path(os.environ["EPCOMM_LAUNCH_DIR"])
    mark = folder / f"{rank}.running" if rank is not None and folder.is_dir() else None  # none on other hosts
    if mark:
        mark.write_text(str(os.getpid()))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # whole lines, and at once
    try:
        if "mpi4py" in sys.modules:
            _start_mpi(size)
        _run(sys.argv[1:])
    finally:
        if mark:
            mark.rename(mark.with_suffix(".finished"))


if __name__ == "__main__":
    main()
