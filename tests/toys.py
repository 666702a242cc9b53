"""The toy kernels of tests/kernels/toys.cpp, compiled once a session with the system's C++ compiler."""

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from epcomm.runtime import kernel_dir

SOURCE = Path(__file__).parent / "kernels" / "toys.cpp"


def compile_toys(target, *flags):
    """Compile toys.cpp; raises with the compiler's output if it does not compile without warnings."""
    command = [
        os.environ.get("CXX", "g++"),
        "-std=c++17",
        "-ffp-contract=off",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    command += [*flags, f"-I{kernel_dir()}", str(SOURCE), "-o", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return target


@functools.cache
def library():
    """The toys as a ctypes library (calls release the GIL)."""
    with tempfile.TemporaryDirectory() as folder:
        lib = ctypes.CDLL(str(compile_toys(Path(folder) / "toys.so", "-O2", "-fPIC", "-shared")))
    lib.toy_error.restype = ctypes.c_char_p
    return lib


class ToyArgs(ctypes.Structure):
    """As in toys.cpp."""

    _fields_ = [
        ("in_", ctypes.c_void_p), ("out", ctypes.c_void_p), ("peer", ctypes.c_void_p),
        ("n", ctypes.c_int32), ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32), ("wrong", ctypes.c_int32),
    ]  # fmt: skip


def aligned(count, dtype=np.uint32):
    """Zeros at a multiple of 128 bytes."""
    raw = np.zeros(count * np.dtype(dtype).itemsize + 128, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def launch(
    name, *, grid=1, block=64, shared=1024, in_=None, out=None, peer=None, n=0, rank=0, ranks=1, wrong=0
):
    """Run a toy kernel; RuntimeError with the runtime's message if that fails, ValueError if it cannot
    start."""
    pointers = [None if x is None else x.ctypes.data for x in (in_, out, peer)]
    status = library().toy_launch(
        name.encode(),
        grid,
        block,
        ctypes.c_size_t(shared),
        ctypes.byref(ToyArgs(*pointers, n, rank, ranks, wrong)),
    )
    if status != 0:
        raise (ValueError if status == 1 else RuntimeError)(library().toy_error().decode())


def set_schedule(seed):
    """As _fibers.set_schedule, for the toys."""
    library().toy_schedule(ctypes.c_uint64(seed or 0))
