"""Element types: their names, their NumPy dtypes, their DLPack codes, and what stands for them on a device.

NumPy has bf16 and fp8 through ml_dtypes. CuPy has bf16 the same way but no fp8: there fp8 and e8m0 arrays are
uint8 arrays of the same bits (`storage`).
"""

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float16 = np.dtype(np.float16)
float32 = np.dtype(np.float32)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
float8_e8m0fnu = np.dtype(ml_dtypes.float8_e8m0fnu)
uint8 = np.dtype(np.uint8)
int32 = np.dtype(np.int32)
int64 = np.dtype(np.int64)

# Every type that goes in or out, with its DLPack (code, bits) of dlpack.h 1.1.
DLPACK_CODES = {
    bfloat16: (4, 16),
    float16: (2, 16),
    float32: (2, 32),
    float8_e4m3fn: (10, 8),
    float8_e5m2: (12, 8),
    float8_e8m0fnu: (14, 8),
    uint8: (1, 8),
    int32: (0, 32),
    int64: (0, 64),
}
FROM_DLPACK = {code: dtype for dtype, code in DLPACK_CODES.items()}

_BY_NAME = {dtype.name: dtype for dtype in DLPACK_CODES}
NAMES = tuple(sorted(_BY_NAME))
_CUPY_HAS_NOT = frozenset((float8_e4m3fn, float8_e5m2, float8_e8m0fnu))


def resolve(dtype) -> np.dtype:
    """The NumPy dtype of a name ("bfloat16"), a NumPy or ml_dtypes type, or another framework's dtype object.

    Raises:
        TypeError: not one of the types that epcomm moves.
    """
    if isinstance(dtype, str):
        found = _BY_NAME.get(dtype)
    else:
        try:
            found = np.dtype(dtype)
        except TypeError:  # another framework's object: torch.bfloat16
            found = _BY_NAME.get(str(dtype).rpartition(".")[2])
    if found not in DLPACK_CODES:
        raise TypeError(f"dtype: expected one of {', '.join(NAMES)}, got {dtype}")
    return found


def storage(dtype: np.dtype, kind: str) -> np.dtype:
    """The dtype of the array that carries `dtype` on a device of this kind ("cuda" or "cpu")."""
    return uint8 if kind == "cuda" and dtype in _CUPY_HAS_NOT else dtype
