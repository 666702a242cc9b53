"""Ranks as threads of this process, for tests and for trying things out without MPI.

    from epcomm.testing import run_threads

    def step(group, hidden):
        ...
        return result

    results = run_threads(4, step, 256)          # one result a rank

The ranks run on the CPU device. Needs NumPy alone.
"""

import pickle
import threading
import time

from .errors import EpcommError


class _World:
    """What the ranks of one ThreadComm share. Sub-groups have their own, with the same failures."""

    def __init__(self, size, timeout, condition=None, failures=None):
        self.size = size
        self.timeout = timeout
        self.condition = condition or threading.Condition()
        self.failures = [] if failures is None else failures  # (text, exception) in the order they happened
        self.rounds = {}  # round number -> {rank: pickled value}; dropped when all ranks have read it
        self.readers = {}
        self.arrived = [0] * size  # Ibarriers that each rank has entered
        self.children = {}  # (split number, colour) -> _World

    def raise_failure(self):
        if self.failures:
            raise EpcommError(f"another rank failed: {self.failures[0][0]}")

    def fail(self, text, exception):
        with self.condition:
            self.failures.append((text, exception))
            self.condition.notify_all()


class _Arrival:
    """The request of an Ibarrier."""

    def __init__(self, world, number):
        self._world, self._number = world, number

    def Test(self):
        with self._world.condition:
            self._world.raise_failure()
            return min(self._world.arrived) >= self._number


class ThreadComm:
    """A communicator over the threads of one process: the part of mpi4py's protocol that epcomm uses.

    Values are pickled on the way, as mpi4py's lower-case methods do. When a rank fails, the collectives of
    all other ranks raise; one for which a rank does not come raises TimeoutError after `timeout` seconds.
    """

    def __init__(self, world, rank):
        self._world, self._rank = world, rank
        self._round = 0
        self._barriers = 0
        self._splits = 0

    @classmethod
    def create(cls, size, timeout=100.0):
        """The `size` communicators of one group, for one thread each."""
        world = _World(size, timeout)
        return [cls(world, rank) for rank in range(size)]

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return self._world.size

    def allgather(self, value):
        world, number = self._world, self._round
        self._round += 1
        data = pickle.dumps(value)
        with world.condition:
            values = world.rounds.setdefault(number, {})
            values[self._rank] = data
            world.condition.notify_all()
            deadline = time.monotonic() + world.timeout
            while len(values) < world.size:
                world.raise_failure()
                if not world.condition.wait(deadline - time.monotonic()):
                    missing = sorted(set(range(world.size)) - set(values))
                    raise TimeoutError(f"rank {self._rank} waited {world.timeout:g} s for ranks {missing}")
            world.readers[number] = world.readers.get(number, 0) + 1
            if world.readers[number] == world.size:
                del world.rounds[number], world.readers[number]
        return [pickle.loads(values[rank]) for rank in range(world.size)]

    def bcast(self, value, root=0):
        return self.allgather(value if self._rank == root else None)[root]

    def Barrier(self):
        self.allgather(None)

    def Ibarrier(self):
        self._barriers += 1
        with self._world.condition:
            self._world.arrived[self._rank] = self._barriers
        return _Arrival(self._world, self._barriers)

    def Split(self, color=0, key=0):
        """The communicator of the ranks with the same colour, ordered by key; None for colour None."""
        number, self._splits = self._splits, self._splits + 1
        rows = self.allgather((color, key))
        if color is None:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(rows) if c == color)
        world = self._world
        with world.condition:
            child = world.children.setdefault(
                (number, color), _World(len(members), world.timeout, world.condition, world.failures)
            )
        return ThreadComm(child, members.index((key, self._rank)))


def run_threads(ranks, function, *args, timeout=100.0, **kwargs):
    """Call `function(group, *args, **kwargs)` on `ranks` threads, a CPU Group each; return the results.

    Args:
        ranks: number of ranks.
        timeout: seconds, of the groups and of the communicator's collectives.

    Raises: the exception that a rank raised first, with the other ranks' exceptions as notes.
    """
    from .group import Group

    comms = ThreadComm.create(ranks, timeout)
    world = comms[0]._world
    results = [None] * ranks

    def body(rank):
        try:
            with Group(comms[rank], device="cpu", timeout=timeout) as group:
                results[rank] = function(group, *args, **kwargs)
        except BaseException as error:  # also SystemExit of a rank's function: it would otherwise pass unseen
            world.fail(f"rank {rank}: {type(error).__name__}: {error}", error)

    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C or a test's time limit: let the ranks go
        world.fail(f"the caller: {type(error).__name__}", error)
        raise
    if world.failures:
        first = world.failures[0][1]
        for text, _ in world.failures:
            first.add_note(text)
        raise first
    return results
