# Declarations of _dlpack.h.

cdef extern from "_dlpack.h":
    enum: DL_CPU, DL_CUDA, DL_CUDA_MANAGED, DL_READ_ONLY, DL_COPIED, ARRAY_C_CONTIGUOUS, ARRAY_WRITEABLE
    ctypedef struct DLDevice:
        int32_t device_type, device_id
    ctypedef struct DLDataType:
        uint8_t code, bits
        uint16_t lanes
    ctypedef struct DLPackVersion:
        uint32_t major, minor
    ctypedef struct DLTensor:
        void *data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct DLManagedTensor:
        DLTensor dl_tensor
        void (*deleter)(DLManagedTensor *) noexcept
    ctypedef struct DLManagedTensorVersioned:
        DLPackVersion version
        void (*deleter)(DLManagedTensorVersioned *) noexcept
        uint64_t flags
        DLTensor dl_tensor
    ctypedef struct DLPackExchangeAPI:
        DLPackVersion version
        int (*managed_from_object)(void *, DLManagedTensorVersioned **) except -1
        int (*managed_to_object)(DLManagedTensorVersioned *, void **) except -1
        int (*current_work_stream)(int32_t, int32_t, void **) except -1
    ctypedef struct ArrayStruct:
        int nd, itemsize, flags
        Py_ssize_t *shape
        Py_ssize_t *strides
        void *data
    DLManagedTensorVersioned *new_versioned(object, const DLTensor *, uint64_t) except NULL
    DLManagedTensor *new_unversioned(object, const DLTensor *) except NULL
    void drop_versioned(PyObject *) noexcept
    void drop_unversioned(PyObject *) noexcept
    object PyCapsule_New(void *, const char *, void (*)(PyObject *) noexcept)
