"""The door for arrays: what a caller passes becomes an array of the group's device, or an error that says why not."""

import numpy as np

from epcomm import dtypes as _dtypes

ALIGNMENT = 16  # bytes; what the bulk copies of the kernels ask of a row


def take(device, x, name, *, dtypes, shape, stream=0, writable=False):
    """`x` as a contiguous, 16-byte aligned array of `device` (cupy or numpy), the same memory where that is possible.

    Args:
        device: the group's device; arrays elsewhere are refused.
        x: the caller's array.
        name: what the caller calls it, for messages.
        dtypes: tuple of the numpy dtypes that are allowed. On CUDA fp8 and e8m0 are taken and returned as uint8.
        shape: tuple of the sizes that are wanted, None = any.
        stream: handle of the stream that will use the array; a copy, where one is needed, is made on it.
        writable: the array is written to: read-only, non-contiguous or misaligned memory is then an error, since a
            copy would lose the result.

    Raises:
        TypeError: not an array, or of another dtype.
        ValueError: another shape, another device, or not writable as asked.
    """
    xp = device.xp
    if not isinstance(x, xp.ndarray):
        raise _not_an_array(device, x, name)
    if device.kind == "cuda":
        dtypes = tuple(_dtypes.storage(dtype, "cuda") for dtype in dtypes)
        if x.data.device_id != device.index:
            raise ValueError(f"{name}: expected an array on {device}, got one on cuda:{x.data.device_id}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(d.name for d in dtypes)}, got {x.dtype.name}")
    if x.shape != shape:
        _check_shape(x.shape, name, shape)
    if x.flags.c_contiguous and device.pointer(x) % ALIGNMENT == 0:
        if writable and device.kind == "cpu" and not x.flags.writeable:
            raise ValueError(f"{name}: expected a writable array, got a read-only one")
        return x
    if writable:
        raise ValueError(f"{name}: expected a contiguous array aligned to {ALIGNMENT} bytes, got strides {x.strides} "
                         f"at {device.pointer(x):#x}")
    copy = device.empty(x.shape, x.dtype)
    device.copy(copy, x, stream)
    return copy


def giver(x):
    """How results are handed back in the kind of `x`: None = as they are, else a function of a native array."""
    return None


def _check_shape(got, name, wanted):
    if len(got) != len(wanted) or any(w is not None and g != w for g, w in zip(got, wanted, strict=True)):
        text = ", ".join("any" if w is None else str(w) for w in wanted)
        raise ValueError(f"{name}: expected shape ({text}{',' if len(wanted) == 1 else ''}), got {tuple(got)}")


def _not_an_array(device, x, name):
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    if isinstance(x, np.ndarray) or type(x).__module__.partition(".")[0] == "cupy":
        where = "host memory" if isinstance(x, np.ndarray) else f"cuda:{x.data.device_id}"
        return ValueError(f"{name}: expected an array on {device}, got {kind} in {where}")
    return TypeError(f"{name}: expected an array, got {kind}")
