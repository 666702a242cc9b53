"""A communicator over multiprocessing pipes, one between each two processes. It survives the death of a rank.

A collective that needs a dead rank raises as soon as the operating system reports the closed pipe, and one
that needs a silent rank raises after the timeout. The survivors can go on with `regroup`.
"""

import contextlib
import multiprocessing
import threading
import time
from multiprocessing.connection import wait


def mesh(size):
    """For each of `size` processes, its ends of the pipes: {peer: Connection}, to hand to PipeComm there."""
    ends = [{} for _ in range(size)]
    for a in range(size):
        for b in range(a + 1, size):
            ends[a][b], ends[b][a] = multiprocessing.Pipe()
    return ends


class _Links:
    """The pipes of one process. A thread reads them all: two ranks that send to each other do not block."""

    def __init__(self, ends):
        self.ends = dict(ends)
        self.arrived = threading.Condition()
        self.inbox = {}  # (sender, key) -> value
        self.gone = set()
        threading.Thread(target=self._read, daemon=True, name="pipes").start()

    def _read(self):
        open_ends = {connection: peer for peer, connection in self.ends.items()}
        while open_ends:
            for connection in wait(list(open_ends)):
                peer = open_ends[connection]
                try:
                    key, value = connection.recv()
                    with self.arrived:
                        self.inbox[peer, key] = value
                        self.arrived.notify_all()
                except (EOFError, OSError):
                    del open_ends[connection]
                    with self.arrived:
                        self.gone.add(peer)
                        self.arrived.notify_all()

    def send(self, peer, key, value):
        with contextlib.suppress(OSError):  # its process is gone; the receiving half reports that
            self.ends[peer].send((key, value))


class _Arrival:
    """The request of an Ibarrier."""

    def __init__(self, comm, key):
        self._comm, self._key, self._done = comm, key, False

    def Test(self):
        self._done = self._done or self._comm._arrived(self._key)
        return self._done


class PipeComm:
    """One rank's communicator: the part of mpi4py's protocol that epcomm uses, and `regroup`.

    Args:
        ends: this rank's element of `mesh(size)`.
        rank: this rank.
        timeout: seconds that a collective may wait.
    """

    def __init__(self, ends, rank, timeout=30.0):
        self._set_up(_Links(ends), sorted([rank, *ends]), rank, "", timeout)

    def _set_up(self, links, members, rank, name, timeout):
        self._links = links
        self._members = members  # numbers in the mesh
        self._rank = rank
        self._name = name
        self._timeout = timeout
        self._count = 0  # collectives so far

    def _sub(self, members, rank, name):
        sub = PipeComm.__new__(PipeComm)
        sub._set_up(self._links, members, rank, f"{self._name}/{name}", self._timeout)
        return sub

    def _key(self, kind):
        self._count += 1
        return f"{self._name}/{kind}{self._count}"

    def _others(self):
        return [member for member in self._members if member != self._members[self._rank]]

    def _send(self, key, value):
        for peer in self._others():
            self._links.send(peer, key, value)

    def _missing(self, key):
        """Ranks whose message has not come. Raises if one of them is gone. Called with the lock held."""
        missing = [peer for peer in self._others() if (peer, key) not in self._links.inbox]
        gone = [self._members.index(peer) for peer in missing if peer in self._links.gone]
        if gone:
            raise ConnectionError(f"rank {self._rank}: {key}: the process of ranks {gone} is gone")
        return [self._members.index(peer) for peer in missing]

    def _take(self, key):
        """The message of every other rank, by rank. Called with the lock held, when all have come."""
        return {self._members.index(peer): self._links.inbox.pop((peer, key)) for peer in self._others()}

    def _arrived(self, key):
        with self._links.arrived:
            if self._missing(key):
                return False
            self._take(key)
            return True

    def _wait(self, key):
        deadline = time.monotonic() + self._timeout
        with self._links.arrived:
            while missing := self._missing(key):
                if not self._links.arrived.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"rank {self._rank}: {key}: no message from ranks {missing}")
            return self._take(key)

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return len(self._members)

    def allgather(self, value):
        key = self._key("allgather")
        self._send(key, value)
        values = self._wait(key) | {self._rank: value}
        return [values[rank] for rank in range(len(self._members))]

    def bcast(self, value, root=0):
        return self.allgather(value if self._rank == root else None)[root]

    def Barrier(self):
        self.allgather(None)

    def Ibarrier(self):
        key = self._key("barrier")
        self._send(key, None)
        return _Arrival(self, key)

    def Split(self, color=0, key=0):
        """The communicator of the ranks with the same colour, ordered by key; None for colour None."""
        rows = self.allgather((color, key))
        if color is None:
            return None
        ranks = [rank for _, rank in sorted((k, rank) for rank, (c, k) in enumerate(rows) if c == color)]
        return self._sub([self._members[r] for r in ranks], ranks.index(self._rank), f"{self._count}.{color}")

    def regroup(self, ranks, name=""):
        """The communicator of these ranks, in this order, without asking anybody: for survivors of a death.

        All members pass the same arguments. `name` tells two communicators of the same ranks apart.
        """
        return self._sub([self._members[r] for r in ranks], ranks.index(self._rank), f"{name}{list(ranks)}")
