"""What epcomm finds on this machine: `python -m epcomm info`."""

import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "mpi4py", "mpich", "rich", "matplotlib")


def report():
    """The text: versions, launcher, devices, peer access, memory handles that work, kernel cache."""
    lines = ["versions"]
    lines += [f"  {name} {version}" for name, version in versions().items()]
    lines += ["launcher", f"  {_launcher()}"]
    lines += ["CPU device", *(f"  {line}" for line in _cpu())]
    lines += ["GPUs", *(f"  {line}" for line in _gpus())]
    lines += ["kernel cache", f"  {_cache()}"]
    return "\n".join(lines)


def versions():
    """{package: version} of epcomm, Python and what is installed of the packages that epcomm may use."""
    found = {"Python": f"{platform.python_version()} on {platform.system()} {platform.release()}"}
    for name in ("epcomm", *_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "epcomm":
                found[name] = f"not installed, imported from {Path(__file__).resolve().parent}"
    return found


def handle_kinds(device):
    """{kind: "works" or the reason why not}: a granule is allocated, exported, opened again and mapped."""
    from .runtime.handles import KINDS
    from .runtime.mapped import MappedRange

    allocator = device.allocator
    found = {}
    for kind in KINDS if device.kind == "cuda" else ("fd",):
        descriptor = None
        try:
            own = allocator.allocate(allocator.granularity, kind)
            handle = own.export()
            descriptor = handle if kind == "fd" else None
            MappedRange(allocator, [own, allocator.open(handle, allocator.granularity, kind)])
            found[kind] = "works"
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"
        finally:
            if descriptor is not None:
                os.close(descriptor)
    return found


def _launcher():
    try:
        from mpi_launch import mpirun
    except ImportError:
        return "mpi_launch is not installed"
    found = mpirun.find()
    if found is None:
        return "no mpirun: several ranks need one (pip install epcomm[mpi])"
    return f"{found} ({'Open MPI' if mpirun.is_open_mpi(found) else 'MPICH or a relative'})"


def _cpu():
    try:
        from .runtime import _fibers
        from .runtime.cpu import CpuDevice
    except ImportError as error:
        return [f"not usable: {error}"]
    lines = [f"{len(os.sched_getaffinity(0))} cores; kernels: {', '.join(sorted(_fibers.kernels()))}"]
    return lines + _kinds(CpuDevice())


def _gpus():
    from . import choice

    try:
        count = choice._gpu_count()
    except Exception as error:
        return [str(error)]
    import cupy

    runtime = cupy.cuda.runtime
    driver, toolkit = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    lines = [f"driver for CUDA {_dotted(driver)}, runtime {_dotted(toolkit)}"]
    for index in range(count):
        properties = runtime.getDeviceProperties(index)
        name = properties["name"].decode()
        lines.append(
            f"cuda:{index}  {name}, compute capability {properties['major']}.{properties['minor']}, "
            f"{properties['multiProcessorCount']} SMs, {properties['totalGlobalMem'] / 2**30:.1f} GiB"
        )
        try:
            lines += [f"        {line}" for line in _kinds(choice.make("cuda", index))]
        except Exception as error:
            lines.append(f"        not usable: {error}")
    if count > 1:
        lines.append("peer access (row can map memory of column)")
        lines.append("      " + " ".join(f"{peer:>3}" for peer in range(count)))
        for index in range(count):
            cells = [_access(runtime, index, peer) for peer in range(count)]
            lines.append(f"  {index:>3} " + " ".join(f"{cell:>3}" for cell in cells))
    return lines


def _access(runtime, index, peer):
    if index == peer:
        return "-"
    return "yes" if runtime.deviceCanAccessPeer(index, peer) else "no"


def _kinds(device):
    return [f"memory handles, {kind}: {state}" for kind, state in handle_kinds(device).items()]


def _cache():
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    files = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    return f"{folder} (CuPy's): {len(files)} files, {size / 1e6:.1f} MB"


def _dotted(number):
    return f"{number // 1000}.{number % 1000 // 10}"
