"""Which communicator and which device a Group takes when it is told nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import device_count, on_gpus, run_ranks

import epcomm
from epcomm import choice

LAUNCHER = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def _python(code, *arguments, **environment):
    unwanted = (*LAUNCHER, *SIZE, "EPCOMM_DEVICE")
    clean = {name: value for name, value in os.environ.items() if name not in unwanted}
    root = str(Path(epcomm.__file__).parents[1])
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [*arguments, "-c", code] if arguments else [sys.executable, "-c", code]
    return subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=False, timeout=60
    )


ALONE = """
import sys
sys.modules["mpi4py"] = None        # as if it were not installed
from epcomm.group import Group
with Group(device="cpu") as group:
    group.barrier()
    group.agree("x", {"a": 1})
    assert group.comm.Split().allgather(group.comm.bcast(5)) == [5]
    print(group)
"""


def test_a_script_runs_alone_without_mpi():
    done = _python(ALONE, SLURM_PROCID="1", SLURM_NTASKS="4", RANK="3", WORLD_SIZE="4", LOCAL_RANK="3")
    assert done.stdout == "<Group rank 0 of 1 on cpu>\n", done.stderr
    assert _python(ALONE, PMI_RANK="0", PMI_SIZE="1").returncode == 0


@pytest.mark.parametrize("name", LAUNCHER)
def test_a_launched_script_wants_mpi4py(name):
    done = _python(ALONE, **{name: "0"})
    assert f"({name} is set), but mpi4py cannot be imported" in done.stderr


def test_mpi_that_runs_already_is_used():
    pytest.importorskip("mpi4py")
    code = "from mpi4py import MPI; from epcomm.group import Group; "
    code += "print(Group(device='cpu').comm == MPI.COMM_WORLD)"
    assert _python(code).stdout == "True\n"


UNDER_MPI = """
from mpi4py import MPI
from epcomm.errors import PeerTimeoutError
from epcomm.group import Group
import time
with Group(device="cpu", timeout=20) as group:
    assert group.comm == MPI.COMM_WORLD and group.alive((group.rank + 1) % group.size)
    assert group.gather("x", group.rank) == [0, 1, 2]
    try:
        group.agree("Buffer", {"hidden": group.rank // 2})
    except ValueError as error:
        assert str(error) == "Buffer: hidden differs between ranks: 0 on ranks 0, 1; 1 on rank 2", error
    with Group(group.comm.Split(group.rank % 2), device="cpu") as part:
        assert part.size == 2 - group.rank % 2
    if group.rank == 2:
        time.sleep(100)
    try:
        group.barrier(timeout=2)
    except PeerTimeoutError as error:
        assert error.peers == (2,), error
        open(f"{folder}/rank{group.rank}", "w").close()
        time.sleep(0.5)
        raise
"""


def test_under_mpirun(tmp_path):
    pytest.importorskip("mpi4py")
    mpirun = Path(sys.executable).with_name("mpirun")
    code = f"folder = {str(tmp_path)!r}\n" + UNDER_MPI
    start = time.monotonic()
    done = _python(code, str(mpirun), "-n", "3", sys.executable, "-m", "mpi4py")
    assert sorted(os.listdir(tmp_path)) == ["rank0", "rank1"], done.stdout + done.stderr
    assert done.returncode != 0 and time.monotonic() - start < 50  # the silent rank ended with the others


# ---- which device


def test_device_requests(monkeypatch):
    monkeypatch.delenv("EPCOMM_DEVICE", raising=False)
    asked = [choice.requested(device) for device in ("cpu", "cuda", "cuda:2", 3, None)]
    assert asked == [("cpu", None), ("cuda", None), ("cuda", 2), ("cuda", 3), (None, None)]
    monkeypatch.setenv("EPCOMM_DEVICE", "cuda:1")
    assert choice.requested(None) == ("cuda", 1) and choice.requested("cpu") == ("cpu", None)
    monkeypatch.setenv("EPCOMM_DEVICE", "tpu")
    with pytest.raises(ValueError, match="EPCOMM_DEVICE"):
        choice.requested(None)


@pytest.mark.parametrize(
    "index, count, boot_ids, local_ranks, chosen",
    [
        (None, 4, "aaaa", [None] * 4, [0, 1, 2, 3]),
        (None, 2, "aaaa", [None] * 4, [0, 1, 0, 1]),
        (None, 1, "aaa", [None] * 3, [0, 0, 0]),  # every rank sees one device, as under Ray
        (None, 4, "abab", [None] * 4, [0, 0, 1, 1]),
        (None, 4, "aabb", ["1", "0", "0", "1"], [1, 0, 0, 1]),
        (None, 8, "aa", ["6", "7"], [6, 7]),  # a sub-group of a larger launch
        (None, 4, "aaa", ["2", "2", "2"], [0, 1, 2]),  # inherited by children of one rank
        (None, 4, "aa", ["1", None], [0, 1]),
        (None, 4, "aa", ["1", "x"], [0, 1]),
        (3, 4, "aa", ["0", "1"], [3, 3]),
    ],
)
def test_the_gpu_of_a_rank(monkeypatch, index, count, boot_ids, local_ranks, chosen):
    monkeypatch.setattr(choice, "_gpu_count", lambda: count)
    monkeypatch.setenv("LOCAL_RANK", "3")
    found = []
    for rank in range(len(boot_ids)):
        monkeypatch.setattr(choice, "_automatic", None)
        found.append(choice.gpu_index(index, rank, boot_ids, local_ranks))
    assert found == chosen


def test_a_process_stays_on_its_gpu(monkeypatch):
    monkeypatch.setattr(choice, "_gpu_count", lambda: 4)
    monkeypatch.setattr(choice, "_automatic", None)
    assert choice.gpu_index(None, 2, "aaaa", [None] * 4) == 2
    assert choice.gpu_index(None, 1, "aa", [None] * 2) == 2  # the sub-group of ranks 0 and 2
    assert choice.gpu_index(1, 1, "aa", [None] * 2) == 1
    with pytest.raises(ValueError, match="cuda:4 was asked for, and 4 GPUs are visible"):
        choice.gpu_index(4, 0, "a", [None])


def _devices(group):
    return [(peer.device, peer.device_uuid, peer.bus_id) for peer in group.peers]


def test_peers_know_each_others_devices():
    first, second = run_ranks(2, _devices)
    assert first == second
    if on_gpus():
        devices = min(2, device_count())
        assert [device for device, _, _ in first] == ["cuda:0", f"cuda:{devices - 1}"]
        assert len({uuid for _, uuid, _ in first}) == len({bus for _, _, bus in first}) == devices
        assert all(len(uuid) == 36 for _, uuid, _ in first)
    else:
        assert first == [("cpu", "", "")] * 2
