"""Which mpirun there is, and the command line that it wants."""

import os
import shutil
import subprocess
import sys

_NAMES = ("mpirun", "mpiexec")
_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # they tell mpirun how many ranks a host may have


class LaunchError(Exception):
    """The job cannot be started; the text is for the user."""


def find():
    """Path of mpirun, or None: first beside the interpreter (wheels put it there), then on PATH."""
    beside = os.path.dirname(sys.executable)
    for path in (beside, None):
        for name in _NAMES:
            found = shutil.which(name, path=path)
            if found:
                return found
    return None


def is_open_mpi(mpirun):
    """True for Open MPI's mpirun, False for MPICH and what descends from it."""
    answer = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    if answer.returncode != 0:
        raise LaunchError(
            f"{mpirun} --version failed ({answer.returncode}): {(answer.stderr or answer.stdout).strip()}"
        )
    return "Open MPI" in answer.stdout or "OpenRTE" in answer.stdout


def command(mpirun, open_mpi, ranks, hostfile=None, exports=(), environ=os.environ, root=None):
    """The arguments up to the program that every rank runs.

    Args:
        exports: names of environment variables that ranks on other hosts need too.
        root: whether the job runs as root (None: ask the system).
    """
    words = [mpirun, "-n", str(ranks)]
    if (
        not open_mpi
    ):  # Hydra: no quarrel with root or with more ranks than cores, and exports the whole environment
        return words + (["-f", hostfile] if hostfile else [])
    if os.geteuid() == 0 if root is None else root:
        words.append("--allow-run-as-root")
    if hostfile:
        words += ["--hostfile", hostfile]
    elif not any(name in environ for name in _SCHEDULERS):
        words.append("--oversubscribe")
    words += ["--bind-to", "none"]  # as MPICH: two ranks would else get one core each for all their threads
    for name in exports:
        words += ["-x", name]
    return words
