"""What the CUDA driver of this machine offers, asked through ctypes: nothing needs to be installed.

As a program (`python mpi_launch/gpus.py`) it prints one line: the extra of epcomm that fits the driver
(`cuda12`, `cuda13`) and the number of usable GPUs, or `none 0`.
"""

import ctypes

_SM_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_OLDEST = 9  # compute capability: the kernels need Hopper's bulk copies


def probe():
    """(extra or None, number of visible GPUs of compute capability 9.0 or more).

    Calls cuInit: better in a process of its own than in one that forks later.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, 0
    version, count = ctypes.c_int(), ctypes.c_int()
    if (
        cuda.cuInit(0)
        or cuda.cuDriverGetVersion(ctypes.byref(version))
        or cuda.cuDeviceGetCount(ctypes.byref(count))
    ):
        return None, 0
    usable = sum(_compute_major(cuda, index) >= _OLDEST for index in range(count.value))
    if version.value < 12000 or not usable:
        return None, 0
    return ("cuda13" if version.value >= 13000 else "cuda12"), usable


def _compute_major(cuda, index):
    device, major = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(device), index):
        return 0
    if cuda.cuDeviceGetAttribute(ctypes.byref(major), _SM_MAJOR, device):
        return 0
    return major.value


if __name__ == "__main__":
    extra, usable = probe()
    print(extra or "none", usable)
