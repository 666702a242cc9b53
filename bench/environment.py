"""What a measurement was made on: machine, devices, versions, state of the checkout, command."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = (
    *("epcomm", "numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x"),
    *("mpi4py", "mpich", "openmpi", "torch", "deep_ep"),
)


def capture(group):
    """The environment as a flat dict of JSON values; the devices are those of all ranks, in rank order."""
    devices = [device_name(peer) for peer in group.peers]
    found = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(_command()),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "ranks": group.size,
        "devices": devices,
        "python": platform.python_version(),
    }
    found |= _versions() | _checkout()
    if group.device.kind == "cuda":
        found |= _cuda()
    return found


def summary(environment):
    """One line for the head of a printed run."""
    devices = environment["devices"]
    kinds = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    parts = [kinds]
    if "driver" in environment:
        parts.append(f"driver {environment['driver']}, CUDA {environment['cuda_runtime']}")
    if "commit" in environment:
        parts.append(f"commit {environment['commit'][:10]}{' + changes' if environment['dirty'] else ''}")
    return "; ".join(parts)


def device_name(peer):
    """The product name of a rank's GPU, or "CPU rank"; peer: an element of Group.peers."""
    return peer.device_name if peer.device_uuid else "CPU rank"


def _command():
    # orig_argv holds "python -m mpi4py script": what the launcher started, so that it can be typed again.
    return [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]


def _cpu_model():
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return names[0] if names else platform.machine()


def _versions():
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "mpi4py.MPI" in sys.modules:
        versions["mpi"] = sys.modules["mpi4py.MPI"].Get_library_version().splitlines()[0].strip()
    return versions


def _checkout():
    def git(*words):
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}  # an unpacked archive has no history


def _cuda():
    import cupy

    def dotted(number):
        return f"{number // 1000}.{number % 1000 // 10}"

    runtime = cupy.cuda.runtime
    found = {
        "cuda_driver": dotted(runtime.driverGetVersion()),
        "cuda_runtime": dotted(runtime.runtimeGetVersion()),
    }
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        found["driver"] = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text).group(1)
    except (OSError, AttributeError):
        found["driver"] = found["cuda_driver"]
    return found
