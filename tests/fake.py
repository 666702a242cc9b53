"""The fake CUDA driver (fake_driver.c), compiled once and put in the place of libcuda.so.1."""

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from epcomm.errors import DriverError
from epcomm.runtime import _launch, _vmm

HERE = Path(__file__).parent
LIVE = ("allocations", "reservations", "mappings", "contexts")


class Launched(ctypes.Structure):
    """What the last cuLaunchKernelEx got."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("_stream", ctypes.c_uint64),
        ("_attributes", ctypes.c_uint64), ("_count", ctypes.c_uint),
        ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("bytes", ctypes.c_uint8 * 16),
        ("context", ctypes.c_uint64),
    ]  # fmt: skip


@functools.cache
def _library():
    path = Path(tempfile.mkdtemp(prefix="epcomm-fake-")) / "libcuda.so"
    include = HERE.parent / "epcomm" / "runtime"
    command = [
        "cc",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{include}",
        "-o",
        path,
        HERE / "fake_driver.c",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.fake_log.restype = ctypes.c_char_p
    library.fake_last_launch.restype = ctypes.POINTER(Launched)
    library.fake_set_current.argtypes = [ctypes.c_uint64]
    return str(path), library


@contextlib.contextmanager
def fake_driver():
    """The library, with its own state reset, while epcomm's tables point at it."""
    path, library = _library()
    _vmm._load(path)
    _launch._load(path)
    library.fake_reset()
    try:
        yield library
    finally:
        for module in (_vmm, _launch):
            with contextlib.suppress(DriverError):  # no real one here
                module._load()


def live(library):
    """How many of each thing the driver holds."""
    return {name: library.fake_live(kind) for kind, name in enumerate(LIVE)}
