"""Run a test's function on some ranks: threads on the CPU device, worker processes on GPUs.

The function is a module-level `f(group, *args, **kwargs)`; on GPUs it travels by name, its arguments and
result pickled.
"""

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait

import pytest
from pipe_comm import PipeComm, mesh

from epcomm.group import Group
from epcomm.testing import run_threads

DEADLINE = 100.0  # seconds for one run on processes; the kernels' own timeouts are far shorter


def on_gpus():
    """Whether this test run is on GPUs (EPCOMM_DEVICE=cuda)."""
    return os.environ.get("EPCOMM_DEVICE", "").startswith("cuda")


def device_count():
    """Number of devices that ranks can be spread over; the CPU device is never short of ranks."""
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


def run_ranks(ranks, function, *args, timeout=5.0, share=None, **kwargs):
    """Results of `function(group, *args, **kwargs)` on every rank, or the exception that a rank raised first.

    Args:
        timeout: the groups' timeout in seconds.
        share: with fewer GPUs than ranks, let ranks share GPUs (slow) instead of skipping the test. None: as
            EPCOMM_TEST_SHARE_GPUS=1 says, then with a timeout for the milliseconds that a hop between them
            takes.
    """
    if not on_gpus():
        return run_threads(ranks, function, *args, timeout=timeout, **kwargs)
    if share is None and ranks > device_count() and os.environ.get("EPCOMM_TEST_SHARE_GPUS") == "1":
        share, timeout = True, max(timeout, 30.0)
    if ranks > device_count() and not share:
        pytest.skip(f"needs {ranks} devices")
    return Pool.of(max(ranks, device_count())).run(ranks, function, args, kwargs, timeout)


@dataclass
class Outcome:
    """How a rank of `run_processes` ended.

    Attributes:
        result: what the function returned, or None.
        error: the exception that it raised, or None.
        killed: the process ended without telling (a signal, os._exit).
        exitcode: of the process; negative = the signal.
    """

    result: object = None
    error: BaseException | None = None
    killed: bool = False
    exitcode: int | None = None


def run_processes(ranks, function, *args, device="cpu", timeout=5.0, deadline=DEADLINE, **kwargs):
    """`function(group, *args, **kwargs)` on fresh processes over PipeComm; returns an Outcome a rank.

    For tests in which ranks die. On "cuda", ranks share the GPUs there are. Raises TimeoutError if a rank
    still runs after `deadline` seconds.
    """
    workers = _start(ranks, device)
    outcomes = [Outcome() for _ in workers]
    try:
        for worker in workers:
            worker.send((range(ranks), "", function, args, kwargs, timeout))
        for rank, reply in _replies(workers, deadline):
            if reply is None:
                outcomes[rank].killed = True
            else:
                outcomes[rank].result, outcomes[rank].error = reply
        for rank, worker in enumerate(workers):
            worker.connection.close()
            worker.process.join(5)
            outcomes[rank].exitcode = worker.process.exitcode
        return outcomes
    finally:
        _stop(workers)


class Pool:
    """Worker processes that stay between tests, one a GPU: it takes seconds to get ready for CUDA."""

    _current = None

    @classmethod
    def of(cls, size, device="cuda"):
        if cls._current is None or len(cls._current.workers) < size:
            cls.close()
            cls._current = cls(size, device)
        return cls._current

    @classmethod
    def close(cls):
        if cls._current is not None:
            _stop(cls._current.workers)
            cls._current = None

    def __init__(self, size, device):
        self.workers = _start(size, device)
        self.runs = 0

    def run(self, ranks, function, args, kwargs, timeout):
        self.runs += 1
        try:
            for worker in self.workers[:ranks]:
                worker.send((range(ranks), f"run{self.runs}", function, args, kwargs, timeout))
            replies = dict(_replies(self.workers[:ranks], DEADLINE, grace=2.0))
            _raise_cause(replies)
            return [replies[rank][0] for rank in range(ranks)]
        except BaseException:
            self.close()  # peers of a failed rank are in the middle of something: the next test gets new ones
            raise


@dataclass
class _Worker:
    process: multiprocessing.Process
    connection: object

    def send(self, task):
        with contextlib.suppress(OSError):  # it died already: _replies tells
            self.connection.send(task)


def _start(size, device):
    context = multiprocessing.get_context("spawn")
    ends = mesh(size)
    workers = []
    count = device_count() if device == "cuda" else 0
    for rank in range(size):
        name = f"cuda:{rank % count}" if count else device
        mine, theirs = multiprocessing.Pipe()
        process = context.Process(target=_serve, args=(theirs, ends[rank], rank, name), daemon=True)
        process.start()
        theirs.close()
        workers.append(_Worker(process, mine))
    for connections in ends:  # while a copy is open here, nobody learns that a rank died
        for connection in connections.values():
            connection.close()
    return workers


def _stop(workers):
    for worker in workers:
        worker.connection.close()
        worker.process.kill()
    for worker in workers:
        worker.process.join()


def _raise_cause(replies):
    """Raises the failure that came first; that the pipe to a failed rank broke is a consequence."""
    errors = [
        RuntimeError(f"rank {rank}: its process died") if reply is None else reply[1]
        for rank, reply in replies.items()
        if reply is None or reply[1] is not None
    ]
    if errors:
        raise next((error for error in errors if not isinstance(error, ConnectionError)), errors[0])


def _replies(workers, deadline, grace=None):
    """(rank, (result, error)) as workers answer, (rank, None) for one that died; or TimeoutError.

    With `grace`, only the answers of so many seconds more once a rank has failed.
    """
    failed = False
    end = time.monotonic() + deadline
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    while pending:
        ready = wait(list(pending), max(0.0, end - time.monotonic()))
        if not ready and failed:
            return
        if not ready:
            raise TimeoutError(f"ranks {sorted(pending.values())} still ran after {deadline:g} s")
        for connection in ready:
            rank = pending.pop(connection)
            try:
                reply = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                reply = None
            if grace is not None and not failed and (reply is None or reply[1] is not None):
                failed, end = True, time.monotonic() + grace
            yield rank, reply


def _serve(connection, ends, rank, device):
    """A worker process: runs tasks until the pipe closes or one fails."""
    comm = PipeComm(ends, rank)
    error = None
    while error is None:
        try:
            ranks, name, function, args, kwargs, timeout = connection.recv()
        except EOFError:
            return
        result, error = _perform(comm.regroup(ranks, name), device, timeout, function, args, kwargs)
        try:
            reply = pickle.dumps((result, error))
            pickle.loads(reply)
        except Exception as unsendable:
            error = error or unsendable
            reply = pickle.dumps((None, RuntimeError("".join(traceback.format_exception(error)))))
        connection.send_bytes(reply)


def _perform(comm, device, timeout, function, args, kwargs):
    try:
        with Group(comm, device=device, timeout=timeout) as group:
            return function(group, *args, **kwargs), None
    except BaseException as error:
        error.add_note(f"rank {comm.Get_rank()}:\n{traceback.format_exc()}")
        return None, error
