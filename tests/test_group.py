"""Group: rendezvous, agreement, failures that reach every rank, liveness."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
import types

import pytest
from ranks import run_processes

from epcomm import peers
from epcomm.errors import DriverError, EpcommError, PeerTimeoutError
from epcomm.group import Group
from epcomm.testing import ThreadComm, run_threads

SIZES = (1, 2, 3, 5, 8)


def _describe(group):
    group.barrier()
    return repr(group), group.rank, group.size, str(group.device), group.gather("test", group.rank * 10)


@pytest.mark.parametrize("size", SIZES)
def test_ranks(size):
    expected = [
        (f"<Group rank {rank} of {size} on cpu>", rank, size, "cpu", [10 * r for r in range(size)])
        for rank in range(size)
    ]
    assert run_threads(size, _describe) == expected


# ---- agreement


def _agree(group, settings, problems=None):
    with pytest.raises((ValueError, TypeError, EpcommError)) as caught:
        group.agree("Buffer", settings[group.rank], problems and problems[group.rank])
    group.agree("Buffer", {"hidden": 1})  # the group goes on
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "settings, problems, kind, text",
    [
        ([{"hidden": 7168}, {"hidden": 7168}, {"hidden": 4096}], None, ValueError,
         "Buffer: hidden differs between ranks: 7168 on ranks 0, 1; 4096 on rank 2"),
        ([{"a": 1, "b": (2, "x")}, {"a": 2, "b": (2, "y")}, {"a": 1, "b": (2, "x")}], None, ValueError,
         "Buffer: a differs between ranks: 1 on ranks 0, 2; 2 on rank 1; b differs between ranks: (2, "),
        ([{"a": 1}, {}, {"a": 1}], None, ValueError,
         "Buffer: a differs between ranks: 1 on ranks 0, 2; absent on rank 1"),
        ([{}] * 3, [None, "num_topk: 40 > 32", None], ValueError, "Buffer: rank 1: num_topk: 40 > 32"),
        ([{}] * 3, ["x", None, TypeError("y")], ValueError, "Buffer: rank 0: x; rank 2: y"),
        ([{}] * 3, [None, TypeError("y"), None], TypeError, "Buffer: rank 1: y"),
        ([{}] * 3, [None, DriverError("no memory"), None], DriverError, "Buffer: rank 1: no memory"),
        ([{}] * 3, [None, PeerTimeoutError("late"), None], PeerTimeoutError, "Buffer: rank 1: late"),
        ([{}] * 3, [None, None, MemoryError("z")], EpcommError, "Buffer: rank 2: MemoryError: z"),
        ([{}] * 3, [None, None, UnicodeError("u")], ValueError, "Buffer: rank 2: u"),
        ([{}, {"f": lambda: 0}, {}], None, TypeError, "Buffer: rank 1: cannot be sent"),
    ],
)  # fmt: skip
def test_agree_raises_on_every_rank(settings, problems, kind, text):
    for found, message in run_threads(3, _agree, settings, problems):
        assert found is kind
        assert message.startswith(text)


def test_ranks_that_make_different_calls():
    def differ(group):
        group.agree(["Buffer", "MoECommunicator"][group.rank], {})

    with pytest.raises(ValueError, match="'Buffer' on rank 0; 'MoECommunicator' on rank 1"):
        run_threads(2, differ)


def _construct(group, arguments):
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises((ValueError, TypeError, EpcommError)) as caught:
        Group(group.comm, **({"device": "cpu"} | arguments[group.rank]))
    group.barrier()
    assert len(os.listdir("/proc/self/fd")) <= fds + 2
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "arguments, kind, text",
    [
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": -1.5}, ValueError, "timeout"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"timeout": float("inf")}, ValueError, "timeout"),
        ({"timeout": "5"}, TypeError, "timeout"),
        ({"timeout": True}, TypeError, "timeout"),
        ({"device": "gpu"}, ValueError, "device"),
        ({"device": "cuda:x"}, ValueError, "device"),
        ({"device": -1}, ValueError, "device"),
        ({"device": 1.5}, TypeError, "device"),
        ({"device": True}, TypeError, "device"),
        ({"device": "cuda"}, ValueError, "device differs between ranks: 'cpu' on ranks 0, 2; 'cuda' on"),
    ],
)
def test_a_wrong_argument_of_one_rank_reaches_all(arguments, kind, text):
    for found, message in run_threads(3, _construct, [{}, arguments, {}]):
        assert found is kind
        assert message.startswith("Group: ") and text in message
        assert "rank 1" in message


def test_threads_cannot_drive_gpus():
    for kind, message in run_threads(2, _construct, [{"device": "cuda"}] * 2):
        assert kind is ValueError and "threads of one process" in message


def test_not_a_communicator():
    with pytest.raises(TypeError, match="int is no communicator, it has no Get_rank, .*Ibarrier"):
        Group(3)
    barrier_only = types.SimpleNamespace(Get_rank=id, Get_size=id, allgather=id, bcast=id, Barrier=id)
    with pytest.raises(TypeError, match="it has no Ibarrier, Split"):
        Group(barrier_only)


# ---- late and dead ranks


def _one_is_late(group):
    if group.rank == 1:
        time.sleep(3.0)
        return None
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        group.agree("Buffer", {})
    assert 1.0 <= time.monotonic() - start < 2.5
    with pytest.raises(PeerTimeoutError):  # the ranks' collectives do not match any more
        group.barrier()
    return caught.value


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_late_rank_is_named(size):
    errors = run_threads(size, _one_is_late, timeout=1.0)
    for rank in set(range(size)) - {1}:
        assert errors[rank].peers == (1,) and errors[rank].rank == rank and errors[rank].operation == "Buffer"
        assert f"rank {rank} of {size} waited 1 s for rank 1 (" in str(errors[rank])


def test_a_late_rank_in_another_process_is_named():
    first, second = run_processes(2, _late_process, timeout=1.0)
    assert second.error is None and first.error.peers == (1,)
    assert f"pid {second.result} cpu" in str(first.error)


def _late_process(group):
    if group.rank == 1:
        time.sleep(3.0)
        return os.getpid()
    group.agree("Buffer", {})


def test_barrier_timeout_argument():
    def one_second(group):
        if group.rank == 0:
            with pytest.raises(PeerTimeoutError, match=r"barrier: .* waited 0\.1 s"):
                group.barrier(timeout=0.1)
        with pytest.raises(ValueError, match="timeout"):
            group.barrier(timeout=-1)

    run_threads(2, one_second)


def _one_dies(group):
    assert all(group.alive(rank) for rank in range(group.size))
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while group.alive(1):
        time.sleep(0.01)
    start = time.monotonic()
    with pytest.raises((ConnectionError, PeerTimeoutError), match="gone"):
        group.barrier()
    assert time.monotonic() - start < group.timeout + 1
    with Group(group.comm.regroup([0, 2]), device="cpu", timeout=2) as survivors:
        return group.alive(1), survivors.gather("ranks", group.rank)


def test_a_killed_process():
    outcomes = run_processes(3, _one_dies, timeout=2.0)
    assert outcomes[1].killed and outcomes[1].exitcode == -signal.SIGKILL
    assert [outcomes[rank].result for rank in (0, 2)] == [(False, [0, 2])] * 2


def test_alive_tells_processes_apart():
    me = peers.here(0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = dataclasses.replace(me, pid=child.pid, pid_start=peers.process_start(child.pid))
    try:
        assert peers.alive(me, me) is True
        assert peers.alive(me, peer) is True
        assert peers.alive(me, dataclasses.replace(peer, pid_start=peer.pid_start - 1)) is False  # reused
        assert peers.alive(me, dataclasses.replace(peer, boot_id="another host")) is None
        assert peers.alive(me, dataclasses.replace(peer, pid_namespace=1)) is None
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert peers.alive(me, peer) is False  # ended, and not yet waited for
    child.wait()
    assert peers.alive(me, peer) is False


# ---- several groups


def _sub_groups(group):
    comm = group.comm
    color = group.rank % 2
    with Group(comm, device="cpu") as twin, Group(comm.Split(color, -group.rank), device="cpu") as part:
        twin.agree("A", {})
        part.agree("B", {"color": color})
        members = part.gather("ranks", group.rank)
        group.barrier()
        part.close()
        twin.barrier()
        return part.rank, part.size, members


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_groups_live_side_by_side(size):
    for rank, (part_rank, part_size, members) in enumerate(run_threads(size, _sub_groups)):
        assert members == [r for r in reversed(range(size)) if r % 2 == rank % 2]
        assert members[part_rank] == rank and part_size == len(members)


# ---- lifetime


def test_close_is_idempotent_and_the_group_is_dead_then():
    comm = ThreadComm.create(1)[0]
    with Group(comm, device="cpu") as group:
        group.barrier()
    group.close()
    assert repr(group) == "<Group rank 0 of 1, closed>"
    with pytest.raises(EpcommError, match="closed"):
        group.barrier()
    comm.Barrier()


def test_a_dropped_group_warns():
    group = Group(ThreadComm.create(1)[0], device="cpu")
    with pytest.warns(ResourceWarning, match="Group rank 0 of 1 on cpu> was never closed"):
        del group
