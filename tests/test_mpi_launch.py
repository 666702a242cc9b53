"""python -m mpi_launch: what ranks are told, how a job ends, and that nothing of it stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi_launch import __main__ as launch
from mpi_launch import mpirun

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.timeout(60)


def start(tmp_path, options, program, *words, module=False):
    """The launcher as a process, over a script with the text `program`."""
    (tmp_path / "script.py").write_text(program)
    # A killed launcher leaves its folder: in tmp_path.
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    for name in [name for name in environ if name.startswith(("PMI", "OMPI_", "MPI_", "EPCOMM_"))]:
        del environ[name]
    what = ["-m", "script"] if module else ["script.py"]
    return subprocess.Popen(
        [sys.executable, "-m", "mpi_launch", *options, *what, *words],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, seconds=30):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def read_pids(folder, count):
    """The process ids that the script's ranks wrote, once all of them did."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob("*.pid")]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError(f"only {len(texts)} of {count} processes have started")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


HELLO = """
import os, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
told = os.environ["EPCOMM_LOCAL_RANK"], os.environ.get("EPCOMM_DEVICE")
for line in comm.gather((comm.rank, comm.size, *told, __name__, sys.argv[1:])) or []:
    print(line)
"""


@pytest.mark.parametrize("module", [False, True])
def test_ranks_know_who_they_are(tmp_path, module):
    words = ["-n", "7", "--timeout", "x", "-m"]  # the program's own, whatever they look like
    code, out, err = finish(start(tmp_path, ["-n", "3", "--device", "cpu"], HELLO, *words, module=module))
    assert code == 0, err
    assert out.splitlines() == [str((r, 3, str(r), "cpu", "__main__", words)) for r in range(3)]


GROUP = """
import epcomm
with epcomm.Group(device="cpu") as g:
    print(f"{g.rank} {g.size} {g.device}")
"""


def test_group_of_the_started_ranks(tmp_path):
    code, out, err = finish(start(tmp_path, ["-n", "2"], GROUP))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["0 2 cpu", "1 2 cpu"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_same_script_without_the_launcher(tmp_path, ranks):
    """Under a plain mpirun, and alone."""
    (tmp_path / "script.py").write_text(GROUP)
    found = mpirun.find()
    words = mpirun.command(found, mpirun.is_open_mpi(found), ranks) if ranks > 1 else []
    words += [sys.executable, *(["-m", "mpi4py"] if ranks > 1 else []), "script.py"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}  # whole lines
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{r} {ranks} cpu" for r in range(ranks)]


def test_hostfile(tmp_path):
    open_mpi = mpirun.is_open_mpi(mpirun.find())
    (tmp_path / "hosts").write_text("localhost slots=3\n" if open_mpi else "localhost:3\n")
    code, out, err = finish(start(tmp_path, ["-n", "3", "--hostfile", "hosts"], HELLO))
    assert code == 0, err
    assert len(out.splitlines()) == 3


def test_neighbours_of_the_script_can_be_imported(tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 42\n")
    code, out, err = finish(start(tmp_path, ["-n", "1"], "import neighbour\nprint(neighbour.value)\n"))
    assert (code, out) == (0, "42\n"), err


BARRIER = "from mpi4py import MPI\n{}\nMPI.COMM_WORLD.Barrier()\nMPI.COMM_WORLD.Barrier()\n"


@pytest.mark.parametrize(
    "program, wanted",
    [
        (BARRIER.format("if MPI.COMM_WORLD.rank == 1: raise KeyError('lost')"), 1),
        (BARRIER.format("if MPI.COMM_WORLD.rank == 1: raise SystemExit(7)"), 7),
        (
            "import os\nif os.environ['EPCOMM_LOCAL_RANK'] == '1': raise KeyError('lost')\n"
            + BARRIER.format(""),
            1,
        ),
    ],
    ids=["exception", "exit code", "exception before MPI is imported"],
)
def test_one_rank_ends_the_job(tmp_path, program, wanted):
    code, _, err = finish(start(tmp_path, ["-n", "3"], program))
    assert code == wanted
    assert wanted == 7 or "KeyError: 'lost'" in err


def test_killed_rank_ends_the_job(tmp_path):
    program = BARRIER.format("import os\nif MPI.COMM_WORLD.rank == 1: os.kill(os.getpid(), 9)")
    code, _, _ = finish(start(tmp_path, ["-n", "3"], program))
    assert code not in (0, 124)


# Every rank, and a child of it in a session of its own, leaves its process id; the ranks named never end.
STUCK = """
import os, subprocess, sys, time
from pathlib import Path
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
Path(f"{rank}.pid").write_text(str(os.getpid()))
Path(f"{rank}-child.pid").write_text(str(child.pid))
print("rank", rank, "is here")
while str(rank) in sys.argv[1:]:
    time.sleep(0.1)
"""


def test_time_limit_names_the_ranks_that_ran(tmp_path):
    process = start(tmp_path, ["-n", "4", "--timeout", "6"], STUCK, "1", "3")
    pids = read_pids(tmp_path, 8)
    code, out, err = finish(process)
    assert code == 124
    assert sorted(out.splitlines()) == [f"rank {r} is here" for r in range(4)]
    told = next(line for line in err.splitlines() if "time limit" in line)
    ranks = {r: int((tmp_path / f"{r}.pid").read_text()) for r in (1, 3)}
    assert told == (
        f"mpi_launch: time limit of 6 s reached; still running: rank 1 (pid {ranks[1]}), 3 (pid {ranks[3]})"
    )
    assert_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("ranks", [1, 3])
def test_signal_ends_everything(tmp_path, number, ranks):
    program = (
        STUCK
        if ranks > 1
        else STUCK.replace("from mpi4py import MPI", "").replace("MPI.COMM_WORLD.rank", "0")
    )
    process = start(tmp_path, ["-n", str(ranks)], program, "0", "1", "2")
    pids = read_pids(tmp_path, 2 * ranks)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number, err
    assert_gone(pids)


def test_killed_launcher_leaves_no_rank(tmp_path):
    process = start(tmp_path, ["-n", "2"], STUCK, "0", "1")
    pids = read_pids(tmp_path, 4)
    process.kill()
    ranks = [int((tmp_path / f"{r}.pid").read_text()) for r in range(2)]
    try:
        assert_gone(ranks)
    finally:
        for pid in set(pids) - set(ranks):  # the children, which left their rank's session
            os.kill(pid, signal.SIGKILL)
        finish(process)


def test_folder_is_removed(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    assert launch.main(["-n", "1", str(tmp_path / "script.py")]) == 0
    assert not list((tmp_path / "tmp").iterdir())


def test_one_rank_needs_no_mpi(tmp_path, monkeypatch, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint('mpi4py' in sys.modules, os.environ['EPCOMM_LOCAL_RANK'])\nsys.exit(5)\n"
    )
    monkeypatch.setattr(mpirun, "find", lambda: None)
    assert launch.main(["-n", "1", str(script)]) == 5
    assert capfd.readouterr().out == "False 0\n"


def test_no_mpirun(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("")
    monkeypatch.setattr(mpirun, "find", lambda: None)
    assert launch.main(["-n", "2", str(tmp_path / "script.py")]) == 2
    assert "pip install epcomm[mpi]" in capsys.readouterr().err


def test_mpirun_of_another_mpi(tmp_path, monkeypatch, capfd):
    """Such an mpirun starts processes that know nothing of each other: not to be taken for groups of one."""
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nshift 2\nexec "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "script.py").write_text("print('ran')\n")
    monkeypatch.setattr(mpirun, "find", lambda: str(fake))
    assert launch.main(["-n", "3", str(tmp_path / "script.py")]) == 1
    out, err = capfd.readouterr()
    assert "3 ranks were started, but mpi4py sees 1" in err
    assert "ran" not in out


def test_mpirun_beside_the_interpreter_comes_first(tmp_path, monkeypatch):
    for folder in ("venv", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").write_text("#!/bin/sh\n")
        (tmp_path / folder / "mpiexec").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert mpirun.find() == str(tmp_path / "venv" / "mpiexec")
    (tmp_path / "venv" / "mpiexec").unlink()
    assert mpirun.find() == str(tmp_path / "path" / "mpiexec")


def test_command_of_mpich():
    assert mpirun.command("m", False, 4, None, ["A"], {}, root=True) == ["m", "-n", "4"]
    assert mpirun.command("m", False, 4, "hosts", ["A"], {}, root=True) == ["m", "-n", "4", "-f", "hosts"]


@pytest.mark.parametrize(
    "hostfile, environ, root, extra",
    [
        (None, {}, True, ["--allow-run-as-root", "--oversubscribe"]),
        (None, {}, False, ["--oversubscribe"]),
        (None, {"SLURM_JOB_ID": "1"}, False, []),
        ("hosts", {}, True, ["--allow-run-as-root", "--hostfile", "hosts"]),
    ],
)
def test_command_of_open_mpi(hostfile, environ, root, extra):
    words = mpirun.command("m", True, 4, hostfile, ["A", "B"], environ, root=root)
    assert words == ["m", "-n", "4", *extra, "--bind-to", "none", "-x", "A", "-x", "B"]


def test_default_number_of_ranks(monkeypatch):
    class Answer:
        returncode, stdout = 0, "cuda13 6\n"

    monkeypatch.setattr(launch.subprocess, "run", lambda *words, **options: Answer)
    monkeypatch.delenv("EPCOMM_DEVICE", raising=False)
    assert launch._default_ranks(None) == 6
    assert launch._default_ranks("cpu") == 2
    Answer.stdout = "none 0\n"
    assert launch._default_ranks("cuda") == 2


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "no program"),
        (["-n", "2", "-m"], "no program"),
        (["-n", "0", "x.py"], "-n: expected 1 or more"),
        (["--timeout", "0", "x.py"], "--timeout: expected more"),
        (["--timeout", "nan", "x.py"], "--timeout: expected more"),
        (["--hostfile", "nowhere", "x.py"], "--hostfile: no file nowhere"),
        (["no_such_script.py"], "no file no_such_script.py"),
    ],
)
def test_bad_command_lines(words, told, capsys):
    with pytest.raises(SystemExit) as caught:
        launch.main(words)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err
