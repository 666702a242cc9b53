# cython: language_level=3
"""DLPack in and out, and the cheap look at a native array that every call begins with.

NumPy (before 2.5) cannot exchange bf16 and fp8 and CuPy cannot exchange fp8, so both directions are here:
`Export` gives a native array away under any element type, `Import` takes memory from any framework. Producers
that offer the C exchange table (DLPack 1.3; torch) are read through it, which is what keeps their calls
cheap.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

from epcomm.dtypes import DLPACK_CODES

include "_dlpack.pxi"

cdef enum:
    MAX_NDIM = 16
    ALIGNMENT = 16  # bytes; what the bulk copies of the kernels ask of a row

cdef const char *VERSIONED = "dltensor_versioned"
cdef const char *UNVERSIONED = "dltensor"
cdef tuple OUR_VERSION = (1, 1)


# Native arrays
# -------------

def ready(x, tuple dtypes, tuple shape, int gpu, bint writable):
    """Whether a numpy (gpu = -1) or cupy array is right as it is: dtype, shape, GPU, C order, alignment."""
    cdef ArrayStruct *s
    cdef int d
    dtype = x.dtype
    for wanted in dtypes:
        if wanted is dtype:
            break
    else:
        if dtype not in dtypes:
            return False
    if gpu < 0:
        struct = x.__array_struct__
        s = <ArrayStruct *> PyCapsule_GetPointer(struct, NULL)
        if s.nd != len(shape) or not s.flags & ARRAY_C_CONTIGUOUS or <uintptr_t> s.data % ALIGNMENT:
            return False
        for d in range(s.nd):
            wanted = shape[d]
            if wanted is not None and s.shape[d] != <Py_ssize_t> wanted:
                return False
        return not writable or s.flags & ARRAY_WRITEABLE != 0
    data = x.data
    got = <tuple?> x.shape
    if len(got) != len(shape) or data.device_id != gpu or <uintptr_t> data.ptr % ALIGNMENT:
        return False
    if not x.flags.c_contiguous:
        return False
    for d in range(len(shape)):
        wanted = shape[d]
        if wanted is not None and got[d] != wanted:
            return False
    return True


def pointer(array):
    """Address of the first element of a numpy or cupy array."""
    struct = getattr(array, "__array_struct__", None)
    if struct is None:
        return array.data.ptr
    return <uintptr_t> (<ArrayStruct *> PyCapsule_GetPointer(struct, NULL)).data


cdef struct Described:
    DLTensor tensor
    int64_t shape[MAX_NDIM]
    int64_t strides[MAX_NDIM]
    uint64_t flags


cdef int describe(array, int code, int bits, Described *out) except -1:
    """A numpy or cupy array as a DLTensor of the given element type; the shape lives in `out`."""
    cdef DLTensor *t = &out.tensor
    cdef ArrayStruct *s
    cdef int64_t itemsize = bits // 8
    cdef int d
    t.ndim = array.ndim
    if t.ndim > MAX_NDIM:
        raise BufferError(f"expected at most {MAX_NDIM} dimensions, got {t.ndim}")
    t.dtype.code, t.dtype.bits, t.dtype.lanes = code, bits, 1
    t.shape, t.strides, t.byte_offset = out.shape, out.strides, 0
    out.flags = 0
    struct = getattr(array, "__array_struct__", None)
    if struct is not None:
        s = <ArrayStruct *> PyCapsule_GetPointer(struct, NULL)
        t.device.device_type, t.device.device_id = DL_CPU, 0
        t.data = s.data
        if not s.flags & ARRAY_WRITEABLE:
            out.flags = DL_READ_ONLY
        for d in range(t.ndim):
            out.shape[d], out.strides[d] = s.shape[d], s.strides[d]
    else:
        t.device.device_type, t.device.device_id = DL_CUDA, array.data.device_id
        t.data = <void *> <uintptr_t> array.data.ptr
        for d, (size, stride) in enumerate(zip(array.shape, array.strides)):
            out.shape[d], out.strides[d] = size, stride
    for d in range(t.ndim):
        if out.strides[d] % itemsize:
            raise BufferError(f"expected strides that are multiples of {itemsize} bytes, got {array.strides}")
        out.strides[d] //= itemsize
    return 0


# Out
# ---

cdef class Export:
    """What every DLPack consumer takes: `__dlpack__` and `__dlpack_device__` over a numpy or cupy array.

    Args:
        array: the array; it lives until the last consumer lets go of it.
        code, bits: DLPack element type, which may differ from the array's own dtype in name, not in size.
        order: on a GPU, called with the handle of the consumer's stream, to make it wait for the array's
            content.
    """

    cdef object array, order
    cdef int code, bits

    def __init__(self, array, int code, int bits, order=None):
        self.array, self.code, self.bits, self.order = array, code, bits, order

    def __dlpack_device__(self):
        cdef Described described
        describe(self.array, self.code, self.bits, &described)
        return described.tensor.device.device_type, described.tensor.device.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        cdef Described described
        cdef DLManagedTensorVersioned *versioned
        array = self.array.copy() if copy else self.array
        describe(array, self.code, self.bits, &described)
        device = described.tensor.device.device_type, described.tensor.device.device_id
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"expected dl_device {device}, where the array is, got {tuple(dl_device)}")
        if self.order is not None and stream != -1:
            if stream is not None and not isinstance(stream, int):
                raise TypeError(f"stream: expected None or an int, got {type(stream).__name__}")
            if stream is not None and stream <= 0:
                raise ValueError(f"stream: expected None, -1, 1, 2 or a stream handle, got {stream}")
            self.order(1 if stream is None else stream)
        if max_version is not None and max_version[0] >= 1:
            if copy:
                described.flags |= DL_COPIED
            versioned = new_versioned(array, &described.tensor, described.flags)
            return PyCapsule_New(versioned, VERSIONED, drop_versioned)
        if described.flags & DL_READ_ONLY:
            raise BufferError("a read-only array needs a consumer that asks for DLPack 1.0 or later")
        return PyCapsule_New(new_unversioned(array, &described.tensor), UNVERSIONED, drop_unversioned)


# In
# --

cdef DLPackExchangeAPI *exchange_table(kind) except? NULL:
    """The C exchange table of a type, NULL where it has none that we know."""
    cdef DLPackExchangeAPI *table
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    table = <DLPackExchangeAPI *> PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    return table if table.version.major == 1 else NULL


cdef class Import:
    """Memory of another framework's array, held until this object dies.

    Attributes:
        pointer: address of element (0, ..., 0).
        shape: sizes.
        strides: in bytes, None = C order.
        code: DLPack (code, bits) of the elements.
        dtype: their numpy dtype, set by `fit`.
        device: DLPack (type, id).
        on_gpu: whether the device is a GPU of CUDA.
        read_only: as the producer says, None where its capsule cannot say it; True denies writable views.
        lowest, nbytes: the bytes that the elements span, from pointer + lowest on; lowest <= 0.
        work_stream: handle of the producer's current stream, which its content is ordered on, or None where
            the producer has already ordered the content before the stream that `load` was given.
    """

    cdef object __weakref__
    cdef DLManagedTensor *unversioned
    cdef DLManagedTensorVersioned *versioned
    cdef DLTensor *tensor
    cdef readonly uintptr_t pointer
    cdef readonly tuple shape, strides
    cdef readonly object dtype, work_stream
    cdef public object read_only
    cdef readonly int64_t lowest, nbytes

    def __dealloc__(self):
        if self.unversioned != NULL and self.unversioned.deleter != NULL:
            self.unversioned.deleter(self.unversioned)
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef void *start
        start = <void *> (self.pointer + self.lowest)
        PyBuffer_FillInfo(view, self, start, self.nbytes, bool(self.read_only), flags)

    @property
    def code(self):
        return self.tensor.dtype.code, self.tensor.dtype.bits

    @property
    def itemsize(self):
        return self.tensor.dtype.bits // 8

    @property
    def device(self):
        return self.tensor.device.device_type, self.tensor.device.device_id

    @property
    def on_gpu(self):
        return self.tensor.device.device_type in (DL_CUDA, DL_CUDA_MANAGED)

    cdef int read(self, DLTensor *t) except -1:
        cdef int64_t itemsize = t.dtype.bits // 8
        cdef int64_t expected = 1, highest = 0, extent
        cdef bint in_order = True
        cdef int d
        if t.dtype.lanes != 1 or t.dtype.bits % 8:
            got = f"{t.dtype.bits} bits in {t.dtype.lanes} lanes"
            raise BufferError(f"expected elements of whole bytes, got {got}")
        self.tensor = t
        self.pointer = <uintptr_t> t.data + t.byte_offset
        self.shape = tuple([t.shape[d] for d in range(t.ndim)])
        for d in range(t.ndim - 1, -1, -1):
            if t.strides != NULL and t.shape[d] > 1:
                if t.strides[d] != expected:
                    in_order = False
                extent = t.strides[d] * (t.shape[d] - 1)
                if extent < 0:
                    self.lowest += extent * itemsize
                else:
                    highest += extent * itemsize
            expected *= t.shape[d]
        if expected == 0:
            in_order, self.lowest = True, 0
        self.nbytes = expected * itemsize if in_order else highest - self.lowest + itemsize
        if not in_order:
            self.strides = tuple([t.strides[d] * itemsize for d in range(t.ndim)])
        if self.pointer == 0 and self.nbytes:
            raise BufferError(f"expected memory, got a null pointer for shape {self.shape}")
        return 0


def load(x, stream=None):
    """Take `x` in through DLPack.

    Args:
        x: an object with the C exchange table or with `__dlpack__`.
        stream: handle of the stream that will use the memory, which the producer lets wait; None = host.

    Raises:
        BufferError: the producer cannot give its memory away.
    """
    cdef Import out = Import.__new__(Import)
    cdef DLPackExchangeAPI *table = exchange_table(type(x))
    cdef void *work
    if table != NULL:
        if getattr(x, "requires_grad", False):
            raise BufferError("it requires gradient, pass x.detach()")
        table.managed_from_object(<void *> x, &out.versioned)
        out.read(&out.versioned.dl_tensor)
        out.read_only = out.versioned.flags & DL_READ_ONLY != 0
        if out.tensor.device.device_type == DL_CUDA:
            table.current_work_stream(DL_CUDA, out.tensor.device.device_id, &work)
            out.work_stream = <uintptr_t> work
        return out
    if stream == 0:
        stream = 1  # the legacy default stream has this number in the protocol
    try:
        capsule = x.__dlpack__(stream=stream, max_version=OUR_VERSION)
    except TypeError:  # a producer from before max_version
        capsule = x.__dlpack__(stream=stream)
    if PyCapsule_IsValid(capsule, VERSIONED):
        out.versioned = <DLManagedTensorVersioned *> PyCapsule_GetPointer(capsule, VERSIONED)
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
        if out.versioned.version.major != 1:
            raise BufferError(f"expected a DLPack 1 capsule, got version {out.versioned.version.major}")
        out.read_only = out.versioned.flags & DL_READ_ONLY != 0
        out.read(&out.versioned.dl_tensor)
    else:
        out.unversioned = <DLManagedTensor *> PyCapsule_GetPointer(capsule, UNVERSIONED)
        PyCapsule_SetName(capsule, "used_dltensor")
        out.read(&out.unversioned.dl_tensor)
    return out


def fit(x, tuple dtypes, tuple shape, int gpu, stream, bint writable):
    """The memory of `x` if nothing has to be done about it, else None.

    That is: a type with the C exchange table, one of these numpy dtypes, this shape (None = any size), in
    host memory (gpu = -1) or on this GPU with `stream` current in its framework, C order, aligned.
    """
    cdef Import out
    cdef DLTensor *t
    cdef int d
    if exchange_table(type(x)) == NULL:
        return None
    try:
        out = load(x)
    except (BufferError, RuntimeError):
        return None
    t = out.tensor
    if (
        t.ndim != len(shape) or out.strides is not None or out.pointer % ALIGNMENT
        or writable and out.read_only
        or t.device.device_type != (DL_CPU if gpu < 0 else DL_CUDA)
        or gpu >= 0 and (t.device.device_id != gpu or out.work_stream != stream)
    ):
        return None
    for d in range(t.ndim):
        wanted = shape[d]
        if wanted is not None and t.shape[d] != <int64_t> wanted:
            return None
    for wanted in dtypes:
        code, bits = <tuple> DLPACK_CODES[wanted]
        if t.dtype.code == <int> code and t.dtype.bits == <int> bits:
            out.dtype = wanted
            return out
    return None


# The kind of array that came
# ---------------------------

def has_table(kind):
    """Whether a type offers the C exchange table."""
    return exchange_table(kind) != NULL


def give(kind, array, dtype):
    """A numpy or cupy array as an array of `kind`, a type with the C exchange table. Orders no streams."""
    cdef Described described
    cdef void *result = NULL
    code, bits = <tuple> DLPACK_CODES[dtype]
    describe(array, code, bits, &described)
    exchange_table(kind).managed_to_object(new_versioned(array, &described.tensor, described.flags), &result)
    found = <object> result
    Py_DECREF(found)  # the reference that came with the pointer
    return found


def work_stream(kind, int gpu):
    """Handle of the current stream of a GPU in the framework of `kind`, a type with the C exchange table."""
    cdef void *work
    exchange_table(kind).current_work_stream(DL_CUDA, gpu, &work)
    return <uintptr_t> work
