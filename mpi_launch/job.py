"""A running job: waits for it, ends it at a time limit or a signal, and lets nothing of it stay behind."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMED_OUT = 124  # exit code, as of timeout(1)
_GRACE = 3.0  # seconds between the polite end and SIGKILL
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signalled(BaseException):
    def __init__(self, number):
        self.number = number


def run(words, ranks, timeout=None, variables=None):
    """Run command `words`; returns its exit code, TIMED_OUT, or 128 + the signal that this process got.

    Args:
        ranks: number of ranks, for the message at the time limit.
        timeout: seconds, None = no limit.
        variables: environment variables beside this process's own.
    """
    folder = Path(tempfile.mkdtemp(prefix="epcomm-launch-"))
    ours = {"EPCOMM_LAUNCH_DIR": str(folder), "EPCOMM_LAUNCH_SIZE": str(ranks)}
    mark = f"EPCOMM_LAUNCH_DIR={folder}".encode()
    libc = ctypes.CDLL(None)

    def die_with_launcher():  # also when this process is killed and can clean up nothing
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    before = {number: signal.signal(number, _raise) for number in _SIGNALS}
    process = None
    try:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the job in order.
        process = subprocess.Popen(
            words,
            env={**os.environ, **(variables or {}), **ours},
            start_new_session=True,
            preexec_fn=die_with_launcher,
        )
        code = process.wait(timeout)
        return code if code >= 0 else 128 - code
    except subprocess.TimeoutExpired:
        print(
            f"mpi_launch: time limit of {timeout:g} s reached; {_who(folder, ranks)}",
            file=sys.stderr,
            flush=True,
        )
        return TIMED_OUT
    except _Signalled as caught:
        print(
            f"mpi_launch: {signal.Signals(caught.number).name}: ending the job", file=sys.stderr, flush=True
        )
        return 128 + caught.number
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if process is not None and process.poll() is None:
            _end(process)
        _sweep(mark)
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number, frame):
    raise _Signalled(number)


def _who(folder, ranks):
    """Which ranks were still running, in words, from the marks that the ranks left."""
    running, unknown = [], []
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            pid = int((folder / f"{rank}.running").read_text())
            if Path(f"/proc/{pid}").exists():
                running.append(f"{rank} (pid {pid})")
            continue
        if not (folder / f"{rank}.finished").exists():
            unknown.append(str(rank))
    text = (
        f"still running: rank {', '.join(running)}" if running else "no rank of this host was still running"
    )
    return text + (f"; not started, or on another host: rank {', '.join(unknown)}" if unknown else "")


def _end(process):
    """End mpirun and, through it, the ranks of all hosts."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
        return
    process.kill()
    process.wait()


def _sweep(mark):
    """Kill every process of this host that was started with `mark` in its environment."""
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline:
        found = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _has(pid, mark)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _has(pid, mark):
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
