# cython: language_level=3
"""Memory of CUDA devices, with the surface of _memfd: pages, mapped into ranges of reserved addresses.

Three owners, each knowing its own undo: an Allocation has pages, a Reservation has addresses, a Mapping shows
an allocation's pages at some of them. A mapping keeps its reservation alive and the driver keeps pages while
they are mapped, so letting go of the objects in any order is right, and steps that were done before one
failed undo themselves. Unmapping does not wait for kernels: whoever lets go of a mapping has waited for them.

The package builds and imports without CUDA; the driver is looked for when the first Allocator is made.
"""

import fcntl

cimport cython
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy, memset

include "_driver.pxi"

_KINDS = {"fd": CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "fabric": CU_MEM_HANDLE_TYPE_FABRIC}


cdef void report(CUresult result, str call) noexcept:
    """For undoing steps: prints what cannot be raised there. A process that ends has undone everything."""
    if result != CUDA_ERROR_DEINITIALIZED:
        check(result, call)


@cython.final
cdef class Allocation:
    """Pages, `size` bytes of them."""

    cdef readonly size_t size
    cdef CUmemGenericAllocationHandle handle
    cdef int handle_type

    def __dealloc__(self):
        cdef CUresult result
        if self.size:
            with nogil:
                result = driver.cuMemRelease(self.handle)
            report(result, "cuMemRelease")

    def export(self):
        """A handle of the pages for other processes: a descriptor, which the caller closes, or 64 bytes."""
        cdef CUmemFabricHandle fabric
        cdef int descriptor = -1
        cdef CUresult result
        if self.handle_type == CU_MEM_HANDLE_TYPE_FABRIC:
            with nogil:
                result = driver.cuMemExportToShareableHandle(&fabric, self.handle, self.handle_type, 0)
            check(result, "cuMemExportToShareableHandle (fabric)")
            return (<char*>&fabric)[: sizeof(fabric)]
        with nogil:
            result = driver.cuMemExportToShareableHandle(&descriptor, self.handle, self.handle_type, 0)
        check(result, "cuMemExportToShareableHandle (file descriptor)")
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        return descriptor


@cython.final
cdef class Reservation:
    """`size` bytes of addresses from `address` on, which nothing else in the process uses."""

    cdef readonly uintptr_t address
    cdef readonly size_t size

    def __dealloc__(self):
        cdef CUresult result
        if self.size:
            with nogil:
                result = driver.cuMemAddressFree(self.address, self.size)
            report(result, "cuMemAddressFree")


@cython.final
@cython.no_gc
cdef class Mapping:
    """`size` bytes of an allocation's pages at `address`."""

    cdef readonly uintptr_t address
    cdef readonly size_t size
    cdef Reservation reservation

    def __dealloc__(self):
        cdef CUresult result
        if self.size:
            with nogil:
                result = driver.cuMemUnmap(self.address, self.size)
            report(result, "cuMemUnmap")


@cython.final
cdef class Allocator:
    """Source of the memory that ranks share, on one CUDA device.

    Args:
        index: of the device, as CUDA counts the visible ones.

    Attributes:
        granularity: bytes; sizes and offsets are multiples of it.

    Raises:
        DriverError: there is no driver, or it has no such device.
    """

    cdef readonly size_t granularity
    cdef int index
    cdef CUdevice device
    cdef CUcontext context

    def __init__(self, index):
        need_driver()
        self.index = index
        check(driver.cuDeviceGet(&self.device, self.index), f"cuDeviceGet({index})")
        cdef CUmemAllocationProp prop = self.properties(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        cdef int option = CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        cdef CUresult result = driver.cuMemGetAllocationGranularity(&self.granularity, &prop, option)
        check(result, "cuMemGetAllocationGranularity")
        with nogil:
            result = driver.cuDevicePrimaryCtxRetain(&self.context, self.device)
        check(result, "cuDevicePrimaryCtxRetain")

    def __dealloc__(self):
        cdef CUresult result
        if self.context != NULL:
            with nogil:
                result = driver.cuDevicePrimaryCtxRelease(self.device)
            report(result, "cuDevicePrimaryCtxRelease")

    cdef CUmemAllocationProp properties(self, int handle_type) noexcept:
        cdef CUmemAllocationProp prop
        memset(&prop, 0, sizeof(prop))
        prop.type = CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = handle_type
        prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.index
        return prop

    @property
    def uuid(self):
        """The device's UUID as text; CuPy's copy of it ends at the first zero byte."""
        cdef CUuuid uuid
        check(driver.cuDeviceGetUuid(&uuid, self.device), "cuDeviceGetUuid")
        digits = (<char*>&uuid)[: sizeof(uuid)].hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def reaches(self, device_uuid):
        """Whether this device can use memory of that one (a UUID as text); True for one not visible here."""
        cdef int count = 0, able = 1
        cdef CUdevice other
        cdef CUuuid uuid
        wanted = bytes.fromhex(device_uuid.replace("-", ""))
        check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount")
        for index in range(count):
            check(driver.cuDeviceGet(&other, index), f"cuDeviceGet({index})")
            check(driver.cuDeviceGetUuid(&uuid, other), "cuDeviceGetUuid")
            if (<char*>&uuid)[: sizeof(uuid)] == wanted and other != self.device:
                check(driver.cuDeviceCanAccessPeer(&able, self.device, other), "cuDeviceCanAccessPeer")
        return able != 0

    def allocate(self, nbytes, kind):
        """New zeroed pages on the device that can be exported as `kind`: "fd" or "fabric"."""
        self._whole("nbytes", nbytes)
        cdef Allocation allocation = Allocation.__new__(Allocation)
        cdef CUmemAllocationProp prop = self.properties(_KINDS[kind])
        cdef size_t size = nbytes
        cdef CUresult result
        with nogil:
            result = driver.cuMemCreate(&allocation.handle, size, &prop, 0)
        check(result, f"cuMemCreate of {size} bytes on cuda:{self.index} ({kind} handle)")
        allocation.size = size
        allocation.handle_type = prop.requestedHandleTypes
        self._zero(self.map(self.reserve(nbytes), 0, allocation))
        return allocation

    def open(self, handle, nbytes, kind):
        """The pages behind a handle that another rank exported as `kind`; closing it is the caller's."""
        cdef Allocation allocation = Allocation.__new__(Allocation)
        cdef CUmemFabricHandle fabric
        cdef void* source
        cdef CUresult result
        allocation.handle_type = _KINDS[kind]
        if allocation.handle_type == CU_MEM_HANDLE_TYPE_FABRIC:
            if len(handle) != sizeof(fabric):
                raise DriverError(f"expected a fabric handle of {sizeof(fabric)} bytes, got {len(handle)}")
            memcpy(&fabric, <const char*><bytes>handle, sizeof(fabric))
            source = &fabric
        else:
            source = <void*><uintptr_t>handle
        with nogil:
            result = driver.cuMemImportFromShareableHandle(&allocation.handle, source, allocation.handle_type)
        check(result, f"cuMemImportFromShareableHandle ({kind})")
        allocation.size = nbytes
        return allocation

    def reserve(self, nbytes, alignment=0):
        """Addresses for `nbytes` bytes, the first a multiple of `alignment` (0 = the granularity)."""
        self._whole("nbytes", nbytes)
        cdef Reservation reservation = Reservation.__new__(Reservation)
        cdef size_t size = nbytes, align = max(alignment, self.granularity)
        cdef CUdeviceptr address = 0
        cdef CUresult result
        with nogil:
            result = driver.cuMemAddressReserve(&address, size, align, 0, 0)
        check(result, f"cuMemAddressReserve of {size} bytes")
        reservation.address = address
        reservation.size = size
        return reservation

    def map(self, Reservation reservation not None, offset, Allocation allocation not None):
        """Shows the whole allocation, readable and writable, `offset` bytes into the reservation.

        An allocation may be mapped any number of times.
        """
        if offset < 0 or offset % self.granularity or offset + allocation.size > reservation.size:
            raise ValueError(
                f"offset: expected a multiple of {self.granularity} bytes that leaves room for "
                f"{allocation.size} in {reservation.size}, got {offset}"
            )
        cdef Mapping mapping = Mapping.__new__(Mapping)
        cdef CUdeviceptr address = reservation.address + <size_t>offset
        cdef CUmemAccessDesc access
        cdef CUresult result
        with nogil:
            result = driver.cuMemMap(address, allocation.size, 0, allocation.handle, 0)
        check(result, f"cuMemMap of {allocation.size} bytes")
        mapping.address = address
        mapping.size = allocation.size
        mapping.reservation = reservation
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.index
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with nogil:
            result = driver.cuMemSetAccess(address, mapping.size, &access, 1)
        check(result, f"cuMemSetAccess for cuda:{self.index}")
        return mapping

    def _whole(self, name, nbytes):
        if nbytes <= 0 or nbytes % self.granularity:
            unit = self.granularity
            raise ValueError(f"{name}: expected a positive multiple of {unit} bytes, got {nbytes}")

    cdef _zero(self, Mapping mapping):
        """Zeroes the pages and waits for it, before anybody else can see them."""
        cdef CUcontext popped
        cdef CUresult result
        check(driver.cuCtxPushCurrent(self.context), "cuCtxPushCurrent")
        with nogil:
            result = driver.cuMemsetD8(mapping.address, 0, mapping.size)
            if result == CUDA_SUCCESS:
                result = driver.cuCtxSynchronize()
        driver.cuCtxPopCurrent(&popped)
        check(result, "cuMemsetD8")
