"""Memory of other frameworks: where it lies, a native array over it, and the order of streams around it."""

import collections
import sys
from typing import NamedTuple

import numpy as np

from . import dtypes as _dtypes
from .runtime import _dlpack
from .stream import follow

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLPack device types
ON_HOST, ON_GPU = (CPU, CUDA_HOST), (CUDA, CUDA_MANAGED)


def is_torch(x) -> bool:
    """Whether `x` is a torch tensor; torch is in sys.modules if it is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_cupy(x) -> bool:
    """Whether `x` is a cupy array; cupy is in sys.modules if it is."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def torch_stream(gpu) -> int:
    """Handle of torch's current stream of a GPU; torch is in use."""
    torch = sys.modules["torch"]
    if _dlpack.has_table(torch.Tensor):
        return _dlpack.work_stream(torch.Tensor, gpu)
    return torch.cuda.current_stream(gpu).cuda_stream


def torch_tensor(array, dtype):
    """A native array as a torch tensor of elements of `dtype`. Orders no streams; torch is in use."""
    torch = sys.modules["torch"]
    if _dlpack.has_table(torch.Tensor):
        return _dlpack.give(torch.Tensor, array, dtype)
    return torch.from_dlpack(_dlpack.Export(array, *_dtypes.DLPACK_CODES[dtype]))


def type_name(x) -> str:
    """The type of `x` for messages."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def place_name(place) -> str:
    """A DLPack (type, id) of a device as the devices of a group are called."""
    kind, index = place
    if kind in ON_HOST:
        return "cpu"
    return f"cuda:{index}" if kind in ON_GPU else f"DLPack device {kind}:{index}"


def place_of(x, name):
    """DLPack (type, id) of the device that holds `x`. TypeError if it has no DLPack."""
    try:
        kind, index = x.__dlpack_device__()
    except AttributeError:
        raise TypeError(f"{name}: expected an array, got {type_name(x)}") from None
    except (BufferError, RuntimeError, ValueError) as error:
        raise _not_shared(x, name, error) from error
    return int(kind), index


def load(x, name, stream):
    """The memory of `x`, a `_dlpack.Import`, its content ordered before `stream` (a handle, None = host)."""
    try:
        memory = _dlpack.load(x, stream)
    except (BufferError, RuntimeError) as error:
        raise _not_shared(x, name, error) from error
    if (
        memory.read_only is None
    ):  # an unversioned capsule cannot say; only torch's, of those, may be written to
        memory.read_only = not is_torch(x)
    if stream is not None and memory.work_stream is not None:
        order(memory.device[1], memory.work_stream, stream)
    return memory


def _not_shared(x, name, error):
    return ValueError(f"{name}: {type_name(x)} does not share its memory: {error}")


def element_type(memory, x, name):
    """The numpy dtype of the elements. TypeError for one that epcomm does not move."""
    dtype = _dtypes.FROM_DLPACK.get(memory.code)
    if dtype is None:
        got = getattr(x, "dtype", memory.code)
        raise TypeError(f"{name}: expected one of {', '.join(_dtypes.NAMES)}, got {got}")
    return dtype


def native(memory, dtype, stream):
    """An array over the memory: numpy, or cupy for use on `stream` with fp8 and e8m0 as uint8."""
    if not memory.on_gpu:
        return np.ndarray(memory.shape, dtype, memory, -memory.lowest, memory.strides)
    import cupy

    owner = memory if memory.work_stream == stream else Guest(memory, stream)
    chunk = cupy.cuda.UnownedMemory(memory.pointer + memory.lowest, memory.nbytes, owner, memory.device[1])
    start = cupy.cuda.MemoryPointer(chunk, -memory.lowest)
    return cupy.ndarray(memory.shape, _dtypes.storage(dtype, "cuda"), start, memory.strides)


class Guest:
    """Holds foreign memory while the host refers to it, and from then until `stream` has passed that moment.

    Frameworks reuse memory that comes back for work on their own streams, which know nothing of `stream`.
    """

    _leaving = collections.deque()  # (event, memory), about oldest first

    def __init__(self, memory, stream):
        self.memory, self.stream, self.gpu = memory, stream, memory.device[1]

    def __del__(self):
        cupy = sys.modules.get("cupy")
        if cupy is None or (self.stream > 2 and cupy.cuda.runtime.streamIsCapturing(self.stream)):
            return  # what a graph uses lives as long as the graph: that is for the caller to see to
        with cupy.cuda.Device(self.gpu):
            event = cupy.cuda.Event(disable_timing=True)
            cupy.cuda.runtime.eventRecord(event.ptr, self.stream)
        leaving = Guest._leaving
        leaving.append((event, self.memory))
        while leaving:
            entry = leaving.popleft()  # taken out before it is looked at: other threads sweep too
            if not entry[0].done:
                leaving.appendleft(entry)
                return


def order(gpu, before, after):
    """Lets stream `after` wait for what is on `before` now; handles of a GPU, 0 and 1 its default stream."""
    follow(_Gpu(gpu), after - (after == 1), before - (before == 1))


class _Gpu(NamedTuple):
    """A device, as far as the order of streams needs it."""

    index: int
    kind: str = "cuda"
