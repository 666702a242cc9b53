"""Group: the ranks that communicate, the device that this rank drives, and who the peers are."""

import dataclasses
import logging
import math
import numbers
import os
import pickle
import time
import warnings
import weakref

from . import choice, errors, peers
from .comm import METHODS, default_comm
from .errors import EpcommError, PeerTimeoutError
from .stream import order_of

_log = logging.getLogger("epcomm")


def _seconds(timeout):
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout: expected seconds as a number, got {timeout!r}")
    seconds = float(timeout)
    if not (math.isfinite(seconds) and 0 < seconds <= 1e9):
        raise ValueError(f"timeout: expected seconds above 0 (at most 1e9), got {timeout!r}")
    return seconds


def _ranks(ranks):
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _spread(values):
    """`7168 on ranks 0, 1; 4096 on rank 2`, or None if all values (one a rank) are equal."""
    groups = []
    for rank, value in enumerate(values):
        for known, ranks in groups:
            if known == value:
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    if len(groups) == 1:
        return None
    return "; ".join(f"{value!r} on {_ranks(ranks)}" for value, ranks in groups)


_open = weakref.WeakSet()


def _forget_all():
    """In a forked child: its parent's communicators and sockets are not to be used from there."""
    for group in list(_open):
        group._failure = EpcommError("the group is the parent process's: a forked child cannot use it")


os.register_at_fork(after_in_child=_forget_all)


class _Absent:
    def __repr__(self):
        return "absent"

    def __eq__(self, other):
        return isinstance(other, _Absent)

    __hash__ = None


class Group:
    """The ranks of a communicator, one device each. Collective.

    Args:
        comm: an mpi4py communicator, or anything with its Get_rank, Get_size, allgather, bcast, Barrier,
            Ibarrier and Split. None: MPI.COMM_WORLD if the program was started by an MPI launcher (or mpi4py
            runs already), else this process alone, with no need of MPI. The group uses the communicator and
            does not own it.
        device: "cpu", "cuda", "cuda:N" or a GPU's index. None: what EPCOMM_DEVICE says, else a GPU if CuPy
            finds one, else the CPU. Without an index, the GPU is the rank's number within its host modulo the
            visible GPUs; all groups of a process stay on the GPU of the first, so make the first group from
            all ranks of a host.
        timeout: seconds that any wait for a peer may last; may differ between ranks.

    Attributes: rank, size, device (the Device), timeout (float), comm, peers (a Peer a rank), order (the
        CallOrder of this process's device).

    Raises (on every rank, if one rank has a reason): ValueError, TypeError, DriverError; PeerTimeoutError if
        a rank does not come within the timeout.
    """

    def __init__(self, comm=None, *, device=None, timeout=100.0):
        self._closed = True  # nothing to warn about until all is well
        if comm is None:
            comm = default_comm()
        missing = [name for name in METHODS if not callable(getattr(comm, name, None))]
        if missing:
            raise TypeError(f"comm: {type(comm).__name__} is no communicator, it has no {', '.join(missing)}")
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.timeout = 100.0
        self.peers = ()
        self._failure = None
        self._entered = 0  # host barriers
        self._progress = os.memfd_create("epcomm-progress")
        try:
            self._set_up(device, timeout)
        except BaseException:
            os.close(self._progress)
            raise
        self._closed = False
        _open.add(self)

    def _set_up(self, device, timeout):
        problem = kind = index = None
        me = peers.here(self._progress)
        try:
            self.timeout = _seconds(timeout)
            kind, index = choice.requested(device)
            kind = kind or ("cuda" if choice.gpu_usable() else "cpu")
        except Exception as error:
            problem = error
        found = self.gather("Group", (me, os.environ.get("EPCOMM_LOCAL_RANK")), {"device": kind}, problem)
        self.peers = tuple(peer for peer, _ in found)
        processes = [peer.process for peer in self.peers]
        if kind == "cuda" and len(set(processes)) < self.size:
            raise ValueError("Group: ranks that are threads of one process need device='cpu'")

        self.device = problem = None
        try:
            if kind == "cuda":
                hosts = [peer.boot_id for peer in self.peers]
                index = choice.gpu_index(index, self.rank, hosts, [text for _, text in found])
            self.device = choice.make(kind, index)
            me = dataclasses.replace(me, **peers.describe(self.device))
        except Exception as error:
            problem = error
        self.peers = tuple(self.gather("Group", me, problem=problem))
        self.order = order_of(self.device)
        shared = [r for r, peer in enumerate(self.peers) if peer.device_uuid == me.device_uuid]
        if kind == "cuda" and len(shared) > 1 and shared[0] == self.rank:
            _log.warning("%s share one GPU (%s): slow, for tests only", _ranks(shared), me.device_uuid)

    # ---- collectives on the host, all bounded by the timeout

    def barrier(self, timeout=None):
        """Wait for all ranks. Raises PeerTimeoutError after `timeout` seconds (None: the group's timeout)."""
        self._arrive("barrier", self.timeout if timeout is None else _seconds(timeout))

    def agree(self, what, settings, problem=None):
        """Collective: all ranks go on, or all raise. For constructors: a failure of one rank hangs nobody.

        Args:
            what: who asks, the start of messages: "Buffer".
            settings: field name -> value, to be equal on all ranks. Values need `==` and are pickled.
            problem: this rank's reason to stop: a sentence (all ranks raise ValueError) or an exception (all
                ranks raise its kind if it is ValueError, TypeError or an error of epcomm, else EpcommError).
        """
        self.gather(what, None, settings, problem)

    def gather(self, what, value, settings=None, problem=None):
        """`agree` that also returns the `value` of every rank (a list; pickled on the way)."""
        name, text = _portable(problem)
        data = None
        if problem is None:
            try:
                data = pickle.dumps((value, settings or {}))
            except Exception as error:  # raised here alone, it would leave the others waiting
                name, text, problem = "TypeError", f"cannot be sent to the other ranks: {error}", error
        self._arrive(what, self.timeout)
        try:
            rows = self.comm.allgather((what, name, text, data))
        except BaseException as error:
            self._failure = _lasting(what, error)
            raise
        failed = [rank for rank, row in enumerate(rows) if row[1]]
        if failed:
            message = "; ".join(f"rank {rank}: {rows[rank][2]}" for rank in failed)
            kind = {"ValueError": ValueError, "TypeError": TypeError}.get(rows[failed[0]][1])
            kind = kind or getattr(errors, rows[failed[0]][1], EpcommError)
            raise kind(f"{what}: {message}") from (problem if isinstance(problem, BaseException) else None)
        differ = _spread([row[0] for row in rows])
        if differ:
            raise ValueError(f"the ranks do not make the same call: {differ}")
        values, asked = zip(*(pickle.loads(row[3]) for row in rows), strict=True)
        differ = []
        for field in dict.fromkeys(field for settings in asked for field in settings):
            spread = _spread([settings.get(field, _Absent()) for settings in asked])
            if spread:
                differ.append(f"{field} differs between ranks: {spread}")
        if differ:
            raise ValueError(f"{what}: " + "; ".join(differ))
        return list(values)

    def _arrive(self, what, timeout):
        """Barrier with a deadline. After a failure the ranks' collectives do not match: the group is dead."""
        if self._failure is not None:
            raise self._failure
        self._entered += 1
        os.pwrite(self._progress, self._entered.to_bytes(8, "little"), 0)
        try:
            request = self.comm.Ibarrier()
            start = time.monotonic()
            pause = 0.0
            while not request.Test():
                if time.monotonic() - start > timeout:
                    raise self._late(what, timeout)
                time.sleep(pause)
                pause = min(pause + 20e-6, 2e-3)
        except BaseException as error:
            self._failure = _lasting(what, error)
            raise

    def _late(self, what, timeout):
        """The error that names who did not come: processes that are gone, else ranks that are behind."""
        gone = [rank for rank in range(len(self.peers)) if self.alive(rank) is False]
        behind = []
        if not gone and self.peers:
            me = self.peers[self.rank]
            counts = [peers.barriers_entered(me, peer) for peer in self.peers]
            behind = [r for r, count in enumerate(counts) if count is not None and count < self._entered]
        message = f"{what}: rank {self.rank} of {self.size} waited {timeout:g} s for "
        if gone:
            where = "; ".join(str(self.peers[r]) for r in gone)
            message += f"{_ranks(gone)}, whose process is gone ({where})"
        elif behind:
            where = "; ".join(str(self.peers[r]) for r in behind)
            message += f"{_ranks(behind)} ({where})"
        else:
            message += "another rank (which one cannot be told)"
        return PeerTimeoutError(message, operation=what, rank=self.rank, peers=gone or behind)

    def alive(self, rank):
        """Whether the process of a rank still runs: True, False, or None if this host cannot tell."""
        return peers.alive(self.peers[self.rank], self.peers[rank])

    # ---- lifetime

    def close(self):
        """Give up what the group holds. Not collective; any number of times. The communicator stays."""
        if not self._closed:
            self._closed = True
            os.close(self._progress)
            self._failure = self._failure or EpcommError("the group is closed")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __del__(self):
        if not getattr(self, "_closed", True):
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __repr__(self):
        if self._closed:
            return f"<Group rank {self.rank} of {self.size}, closed>"
        return f"<Group rank {self.rank} of {self.size} on {self.device}>"


def _lasting(what, error):
    """What later collectives raise once `error` has broken one off."""
    return error if isinstance(error, Exception) else EpcommError(f"{what}: was interrupted by {error!r}")


def _portable(problem):
    """An exception or sentence as (kind, text) that every rank can raise; ("", "") for None."""
    if problem is None:
        return "", ""
    if isinstance(problem, str):
        return "ValueError", problem
    for kind in type(problem).__mro__:
        if kind in (ValueError, TypeError) or getattr(errors, kind.__name__, None) is kind:
            return kind.__name__, str(problem)
    return "EpcommError", f"{type(problem).__name__}: {problem}"
