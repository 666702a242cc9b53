"""The door for arrays: a caller's array becomes one of the group's device, and results go back in its kind.

Everything with DLPack comes in. No framework is imported here: one that the caller uses is in `sys.modules`.

Streams on a GPU follow the array API. A call with torch tensors and no stream of its own works on torch's
current stream (`caller_stream`), so there is nothing to wait for. In all other cases the producer's current
stream is waited for by the stream that uses the array, and the stream that made a result by the consumer's
current stream.
"""

import sys

import numpy as np

from . import dtypes as _dtypes
from . import foreign
from .runtime import _dlpack
from .stream import resolve as _resolve

ALIGNMENT = 16  # bytes; what the bulk copies of the kernels ask of a row


# For the operations
# ------------------


def caller_stream(device, x, stream=None) -> int:
    """Handle of the stream that a call with `x` works on: `stream`, else the current one of its framework."""
    if stream is None and device.kind == "cuda" and foreign.is_torch(x):
        return foreign.torch_stream(device.index)
    return _resolve(device, stream)


def take(device, x, name, *, dtypes, shape, stream=0, writable=False):
    """`x` as a contiguous, 16-byte aligned array of `device` (cupy or numpy), sharing memory if possible.

    Args:
        device: the group's device; arrays elsewhere are refused.
        x: a numpy or cupy array, or anything with DLPack.
        name: what the caller calls it, for messages.
        dtypes: tuple of the numpy dtypes that are allowed. On CUDA fp8 and e8m0 come back as uint8, and uint8
            is taken for them.
        shape: tuple of the sizes that are wanted, None = any.
        stream: handle of the stream that will use the array; a copy, where one is needed, is made on it.
        writable: the array is written to: read-only, non-contiguous or misaligned memory is then an error,
            since a copy would lose the result.

    Returns:
        The array. On a GPU an input of another framework that needs nothing done to it is a `_dlpack.Import`
        instead: it has what operations ask of an input (shape, dtype, nbytes, `device.pointer`), and CuPy's
        wrapping would be most of the cost of the call.

    Raises:
        TypeError: not an array, or of another dtype.
        ValueError: another shape or device, memory that its owner does not share, or not writable as asked.
    """
    gpu = device.index if device.kind == "cuda" else -1
    if isinstance(x, device.xp.ndarray):
        if _dlpack.ready(x, dtypes, shape, gpu, writable):
            return x
        array, dtype = x, x.dtype
        place = (foreign.CPU, 0) if gpu < 0 else (foreign.CUDA, x.data.device_id)
        read_only = gpu < 0 and not x.flags.writeable
    else:
        memory = _dlpack.fit(x, dtypes, shape, gpu, stream, writable)
        if memory is not None:
            if memory.on_gpu and not writable and memory.work_stream == stream:
                return memory
            return foreign.native(memory, memory.dtype, stream)
        if not _dlpack.has_table(type(x)):  # ask first: a producer on another device does not know our stream
            _check_place(device, foreign.place_of(x, name), x, name)
        memory = foreign.load(x, name, stream if gpu >= 0 else None)
        place, dtype = memory.device, foreign.element_type(memory, x, name)
        array, read_only = None, memory.read_only
    _check_place(device, place, x, name)
    if dtype not in dtypes and dtype not in [_dtypes.storage(wanted, device.kind) for wanted in dtypes]:
        raise TypeError(f"{name}: expected dtype {' or '.join(d.name for d in dtypes)}, got {dtype}")
    if array is None:
        array = foreign.native(memory, dtype, stream)
    if writable and read_only:
        raise ValueError(f"{name}: expected a writable array, got a read-only one")
    if _dlpack.ready(array, (array.dtype,), shape, gpu, writable):
        return array
    _check_shape(array.shape, name, shape)
    if writable:
        raise ValueError(
            f"{name}: expected C order from an address that is a multiple of {ALIGNMENT} bytes, "
            f"got shape {array.shape}, strides of {array.strides} bytes, address {_dlpack.pointer(array):#x}"
        )
    return _copy(device, array, stream)


def giver(x, stream=None):
    """How results are handed back in the kind of `x`.

    Args:
        x: the caller's array.
        stream: on a GPU, handle of the stream that makes the results, which the current stream of the
            caller's framework then waits for; None = nothing waits, the caller gets an event.

    Returns:
        None where results stay as they are (numpy, cupy; JAX, whose arrays must not change), else a function
        of (native array or None, dtype=None); dtype says what the elements of a uint8 array are.
    """
    if not foreign.is_torch(x):
        return None

    ordered = stream is None

    def give(array, dtype=None):
        nonlocal ordered
        if array is None:
            return None
        if not ordered and not isinstance(array, np.ndarray):
            gpu = array.data.device_id
            current = foreign.torch_stream(gpu)
            if current != stream:
                foreign.order(gpu, stream, current)
            ordered = True  # for all results of the call
        return foreign.torch_tensor(array, dtype or array.dtype)

    return give


# For everybody
# -------------


def asarray(x):
    """`x` as NumPy (host memory; ml_dtypes for bf16 and fp8) or CuPy (GPU memory), over the same pages.

    Args:
        x: a numpy or cupy array, which is returned as it is, or anything with DLPack. On a GPU the current
            CuPy stream waits for its content.

    Returns:
        The array. What its owner declares read-only is read-only in NumPy; CuPy has no such arrays, so do not
        write there. On CuPy, which has no fp8, fp8 and e8m0 elements are uint8 bits.

    Raises:
        TypeError: not an array, or of a type that epcomm does not move.
        ValueError: its owner does not share the memory, or it lies neither in host nor in CUDA memory.
    """
    if isinstance(x, np.ndarray) or foreign.is_cupy(x):
        return x
    kind, gpu = foreign.place_of(x, "x")
    if kind in foreign.ON_GPU:
        import cupy

        stream = cupy.cuda.get_current_stream(gpu).ptr
    elif kind in foreign.ON_HOST:
        stream = None
    else:
        where = foreign.place_name((kind, gpu))
        raise ValueError(f"x: expected host or CUDA memory, got {foreign.type_name(x)} on {where}")
    memory = foreign.load(x, "x", stream)
    return foreign.native(memory, foreign.element_type(memory, x, "x"), stream)


def to_dlpack(x, *, dtype=None):
    """`x` for a consumer of DLPack: an object with `__dlpack__` and `__dlpack_device__`, over the same pages.

    Args:
        x: a numpy or cupy array, or anything with DLPack; all dtypes that epcomm moves, also those that numpy
            and cupy refuse.
        dtype: what the elements of a uint8 array are: "float8_e4m3fn", "float8_e5m2" or "float8_e8m0fnu".

    Returns:
        The object. It and whatever consumes it keep the memory alive. On a GPU the consumer's stream waits
        for the CuPy stream that is current when the consumer asks.

    Raises:
        TypeError: a dtype that epcomm does not move, or that is not what the array holds.
    """
    array = asarray(x)
    found = _dtypes.resolve(array.dtype)
    wanted = found if dtype is None else _dtypes.resolve(dtype)
    if wanted != found and (found != _dtypes.uint8 or wanted.itemsize != 1):
        raise TypeError(f"dtype: expected {found.name}, which the array holds, got {wanted.name}")
    code, bits = _dtypes.DLPACK_CODES[wanted]
    if isinstance(array, np.ndarray):
        return _dlpack.Export(array, code, bits)
    gpu = array.data.device_id
    cuda = sys.modules["cupy"].cuda

    def order(consumer):
        foreign.order(gpu, cuda.get_current_stream(gpu).ptr, consumer)

    return _dlpack.Export(array, code, bits, order)


# Checks
# ------


def _check_place(device, place, x, name):
    kind, index = place
    if kind not in (foreign.ON_GPU if device.kind == "cuda" else foreign.ON_HOST) or (
        device.kind == "cuda" and index != device.index
    ):
        where = foreign.place_name(place)
        raise ValueError(f"{name}: expected an array on {device}, got {foreign.type_name(x)} on {where}")


def _check_shape(got, name, wanted):
    if len(got) != len(wanted) or any(w is not None and g != w for g, w in zip(got, wanted, strict=True)):
        text = ", ".join("any" if w is None else str(w) for w in wanted) + "," * (len(wanted) == 1)
        raise ValueError(f"{name}: expected shape ({text}), got {tuple(got)}")


def _copy(device, array, stream):
    """A contiguous copy, made on `stream`."""
    copy = device.empty(array.shape, array.dtype, stream)
    bits = np.dtype(f"u{array.dtype.itemsize}")
    device.copy(copy.view(bits), array.view(bits), stream)
    return copy
