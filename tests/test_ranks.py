"""The communicators and runners that the tests stand on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import Pool, run_processes, run_ranks

from epcomm.testing import ThreadComm, run_threads

SIZES = (1, 2, 3, 5, 8)


def _collectives(group):
    comm = group.comm
    rank, size = comm.Get_rank(), comm.Get_size()
    for number in range(3):
        assert comm.allgather((rank, number)) == [(r, number) for r in range(size)]
        assert comm.bcast({"from": rank}, root=size - 1) == {"from": size - 1}
    comm.Barrier()
    first, second = comm.Ibarrier(), comm.Ibarrier()
    while not second.Test():
        time.sleep(0.001)
    assert first.Test() and first.Test() and second.Test()
    part = comm.Split(rank % 2, key=-rank)
    everybody = [r for r in reversed(range(size)) if r % 2 == rank % 2]
    assert part.allgather(rank) == everybody
    assert part.Get_rank() == everybody.index(rank)
    assert part.Split(0).allgather(rank) == sorted(everybody, reverse=True)
    lonely = comm.Split(None if rank == 0 else 1)
    assert (lonely is None) == (rank == 0)
    if lonely is not None:
        assert lonely.allgather(rank) == list(range(1, size))
    return comm.allgather(bytes(300_000 + rank))[-1] == bytes(300_000 + size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_thread_comm(size):
    assert run_threads(size, _collectives) == [True] * size


@pytest.mark.parametrize("size", [1, 3, 5])
def test_pipe_comm(size):
    outcomes = run_processes(size, _collectives)
    assert [(o.result, o.error, o.killed, o.exitcode) for o in outcomes] == [(True, None, False, 0)] * size


def _ibarrier_waits(group):
    if group.rank == 1:
        time.sleep(1.0)
    request = group.comm.Ibarrier()
    early = request.Test()
    while not request.Test():
        time.sleep(0.001)
    return early


def test_ibarrier_waits_for_the_last():
    assert not run_threads(3, _ibarrier_waits)[0]
    assert not run_processes(3, _ibarrier_waits)[0].result


def _one_fails(group, error):
    group.barrier()
    if group.rank == 1:
        raise error
    group.comm.allgather(1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_first_exception_is_raised_and_releases_the_others(size):
    start = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        run_threads(size, _one_fails, KeyError("lost"))
    assert time.monotonic() - start < 5
    notes = "\n".join(caught.value.__notes__)
    assert notes.startswith("rank 1: KeyError")
    assert notes.count("EpcommError: another rank failed") == size - 1


def test_a_sub_group_is_released_too():
    def fail(group):
        part = group.comm.Split(0)
        if group.rank == 0:
            raise KeyError("lost")
        part.Ibarrier()
        part.Barrier()

    with pytest.raises(KeyError):
        run_threads(3, fail)


def test_a_rank_that_stays_away_from_a_collective():
    def stay_away(group):
        if group.rank:
            group.comm.allgather(1)

    with pytest.raises(TimeoutError, match=r"waited 1 s for ranks \[0\]"):
        run_threads(3, stay_away, timeout=1.0)


def test_exit_of_a_rank_is_no_success():
    def leave(group):
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_threads(1, leave)


def test_values_are_copies():
    comms = ThreadComm.create(1)
    value = [1]
    assert comms[0].allgather(value)[0] is not value


def _ends(group, how):
    if group.rank == 1:
        if how == "raise":
            raise KeyError("lost")
        if how == "exit":
            os._exit(7)
        return lambda: 0  # cannot be sent
    group.comm.Barrier()


@pytest.mark.parametrize("how", ["raise", "exit", "unsendable"])
def test_a_rank_process_that_ends_badly(how):
    start = time.monotonic()
    zero, one, two = run_processes(3, _ends, how)
    assert time.monotonic() - start < 20
    assert (one.killed, one.exitcode) == ((True, 7) if how == "exit" else (False, 0))
    if how == "raise":
        assert isinstance(one.error, KeyError) and "_ends" in one.error.__notes__[0]
    if how == "unsendable":
        assert "pickle" in str(one.error).lower()
    for other in (zero, two):
        assert isinstance(other.error, ConnectionError) and "ranks [1] is gone" in str(other.error)


def _hang(group):
    while group.rank == 1:
        time.sleep(1)


def test_a_rank_process_that_hangs():
    with pytest.raises(TimeoutError, match=r"ranks \[(0, )?1\] still ran"):
        run_processes(2, _hang, deadline=3)


def _device(group, factor, add=0):
    return group.rank * factor + add, group.device.kind


def _process(group):
    return os.getpid()


def test_worker_processes_stay_until_one_fails(monkeypatch):
    monkeypatch.setattr(Pool, "_current", None)
    pool = Pool.of(3, "cpu")
    try:
        first = pool.run(3, _process, (), {}, 5.0)
        assert pool.run(2, _collectives, (), {}, 5.0) == [True] * 2
        assert Pool.of(2, "cpu").run(3, _process, (), {}, 5.0) == first
        start = time.monotonic()
        with pytest.raises(KeyError, match="lost"):
            pool.run(3, _one_fails, (KeyError("lost"),), {}, 5.0)
        with pytest.raises(RuntimeError, match="rank 1: its process died"):
            Pool.of(3, "cpu").run(3, _ends, ("exit",), {}, 5.0)
        assert time.monotonic() - start < 20
        again = Pool.of(3, "cpu").run(3, _process, (), {}, 5.0)
        assert not set(again) & set(first)
    finally:
        Pool.close()


def test_run_ranks():
    kind = os.environ["EPCOMM_DEVICE"].partition(":")[0]
    for _ in range(2):
        assert run_ranks(1, _device, 3, add=1) == [(1, kind)]
    assert run_ranks(3, _device, 3, share=True) == [(0, kind), (3, kind), (6, kind)]


def test_run_ranks_after_a_failure():
    with pytest.raises(KeyError, match="lost"):
        run_ranks(2, _one_fails, KeyError("lost"), share=True)
    assert len(run_ranks(2, _device, 1, share=True)) == 2


FEW_DEVICES = """
import pytest, ranks
def f(group):
    pass
def test_many():
    ranks.run_ranks(99, f)
@pytest.mark.skip(reason="another reason")
def test_other():
    pass
"""


def test_tests_skipped_for_want_of_devices_are_listed(tmp_path):
    (tmp_path / "test_few.py").write_text(FEW_DEVICES)
    (tmp_path / "conftest.py").write_text(
        "import cupy, os\nos.environ['EPCOMM_DEVICE'] = 'cuda'\n"
        "cupy.cuda.runtime.getDeviceCount = lambda: 2\n" + Path(__file__).with_name("conftest.py").read_text()
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60
    )
    section = done.stdout.partition("skipped for want of devices")[2]
    assert "needs 99 devices: test_few.py::test_many\n1 needs 99 devices" in section, done.stdout
    assert "test_other" not in section and "2 skipped" in section
