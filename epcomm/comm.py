"""Where a Group's communicator comes from when the caller passes none."""

import os
import sys

METHODS = ("Get_rank", "Get_size", "allgather", "bcast", "Barrier", "Ibarrier", "Split")
# Set by MPI launchers and PMI servers for every rank. SLURM_PROCID is not: a batch script has it too.
_LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
_LAUNCHED_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


class _Done:
    def Test(self):
        return True


class Alone:
    """The communicator of a group of one."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1

    def allgather(self, value):
        return [value]

    def bcast(self, value, root=0):
        return value

    def Barrier(self):
        pass

    def Ibarrier(self):
        return _Done()

    def Split(self, color=0, key=0):
        return Alone()


def default_comm():
    """COMM_WORLD when MPI runs already or a launcher's environment says so, else a group of one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return mpi.COMM_WORLD
    found = [name for name in _LAUNCHED if name in os.environ]
    if not found:
        return Alone()
    try:
        from mpi4py import MPI
    except ImportError as error:
        if any(os.environ.get(name) == "1" for name in _LAUNCHED_SIZE):
            return Alone()
        raise ImportError(
            f"started by an MPI launcher ({found[0]} is set), but mpi4py cannot be imported ({error}): "
            "install mpi4py and the MPI library of the launcher, or pass a communicator"
        ) from error
    return MPI.COMM_WORLD
