"""Which device a rank drives: what was asked for, what is there, which GPU of the host."""

import operator
import os
import re

from .errors import DriverError

_automatic = None  # the GPU given to the first Group of this process; later ones and sub-groups stay on it


def requested(device):
    """The (kind, index or None) that `device` asks for; kind None = nobody said. ValueError, TypeError."""
    said = "device"
    if device is None:
        device = os.environ.get("EPCOMM_DEVICE", "").strip() or None
        said = "EPCOMM_DEVICE"
    if device is None:
        return None, None
    if isinstance(device, str):
        match = re.fullmatch(r"(cpu)|cuda(?::(\d+))?", device)
        if match is None:
            raise ValueError(f'{said}: expected "cpu", "cuda" or "cuda:N", got {device!r}')
        return ("cpu", None) if match[1] else ("cuda", None if match[2] is None else int(match[2]))
    try:
        index = None if isinstance(device, bool) else operator.index(device)
    except TypeError:
        index = None
    if index is None:
        raise TypeError(f'{said}: expected None, "cpu", "cuda", "cuda:N" or an int, got {device!r}')
    if index < 0:
        raise ValueError(f"{said}: a GPU index is 0 or more, got {index}")
    return "cuda", index


def gpu_usable():
    """Whether CuPy is installed and finds a GPU. An installed CuPy that cannot be imported is an error."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        return False
    return cupy.cuda.is_available()


def _gpu_count():
    """Number of visible GPUs; raises DriverError with the reason where CUDA cannot be used."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise DriverError(f"CUDA cannot be used: {type(error).__name__}: {error}") from error
    if count == 0:
        raise DriverError("CUDA cannot be used: no GPU is visible")
    return count


def make(kind, index):
    """The Device object of a kind; each kind's module is imported only when it is used."""
    if kind == "cpu":
        from .runtime.cpu import CpuDevice

        return CpuDevice()
    from .runtime.cuda import CudaDevice

    return CudaDevice(index)


def gpu_index(index, rank, boot_ids, local_ranks):
    """The GPU of `rank`: `index` if one was asked for, else by the rank's number among the ranks of its host.

    Args:
        boot_ids, local_ranks: one a rank; local_ranks are the launcher's EPCOMM_LOCAL_RANK texts or None.
    """
    global _automatic
    count = _gpu_count()
    if index is None:
        if _automatic is None:
            _automatic = _local_rank(rank, boot_ids, local_ranks) % count
        index = _automatic
    if index >= count:
        raise ValueError(f"device: cuda:{index} was asked for, and {count} GPUs are visible")
    return index


def _local_rank(rank, boot_ids, local_ranks):
    here = [r for r, boot_id in enumerate(boot_ids) if boot_id == boot_ids[rank]]
    given = [local_ranks[r] for r in here]
    # The launcher's numbers count only if they number these ranks: those that children inherited do not.
    valid = all(text is not None and text.isdecimal() for text in given)
    if valid and len(set(map(int, given))) == len(given):
        return int(local_ranks[rank])
    return here.index(rank)
