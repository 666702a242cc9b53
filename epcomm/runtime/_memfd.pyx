# cython: language_level=3
"""Memory of CPU ranks, with the surface of _vmm: memfds, mapped into ranges of reserved addresses.

Three owners, each knowing its own undo: an Allocation has pages (a sealed memfd: sparse, zeroed, gone with
its last descriptor and mapping), a Reservation has addresses, a Mapping shows an allocation's pages at some
of them. A mapping keeps its reservation alive and pages outlive their allocation while they are mapped, so
letting go of the objects in any order is right.
"""

import fcntl
import mmap
import os

cimport cython
from libc.stdint cimport uintptr_t
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED,
    PROT_NONE, PROT_READ, PROT_WRITE, mmap as c_mmap, munmap,
)
from posix.unistd cimport close as c_close

from ..errors import DriverError

# No peer can pull the pages from under the others.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

cdef int RESERVED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE


def _failed(call, OSError error, detail):
    return DriverError(f"{call}: {error.strerror} ({detail})")


@cython.final
cdef class Allocation:
    """Pages, `size` bytes of them."""

    cdef readonly size_t size
    cdef int fd

    def __cinit__(self):
        self.fd = -1

    def __dealloc__(self):
        if self.fd >= 0:
            c_close(self.fd)

    def export(self):
        """A new file descriptor of the pages; the caller closes it."""
        try:
            return os.dup(self.fd)
        except OSError as error:
            raise _failed("dup", error, f"descriptor {self.fd}") from None


@cython.final
cdef class Reservation:
    """`size` bytes of addresses from `address` on, which nothing else in the process uses."""

    cdef readonly uintptr_t address
    cdef readonly size_t size

    def __dealloc__(self):
        if self.size:
            munmap(<void*>self.address, self.size)


@cython.final
@cython.no_gc
cdef class Mapping:
    """`size` bytes of an allocation's pages at `address`."""

    cdef readonly uintptr_t address
    cdef readonly size_t size
    cdef Reservation reservation

    def __dealloc__(self):
        if self.size:  # the addresses stay reserved
            c_mmap(<void*>self.address, self.size, PROT_NONE, RESERVED | MAP_FIXED, -1, 0)


@cython.final
cdef class Allocator:
    """Source of the memory that CPU ranks share.

    Args:
        granularity: bytes; sizes and offsets are multiples of it. A multiple of the page size.
    """

    cdef readonly size_t granularity

    def __init__(self, granularity=mmap.PAGESIZE):
        if granularity <= 0 or granularity % mmap.PAGESIZE:
            raise ValueError(
                f"granularity: expected a multiple of the page size {mmap.PAGESIZE}, got {granularity}"
            )
        self.granularity = granularity

    def reaches(self, device_uuid):
        """Whether the device can use memory of that one: the CPU uses all that it can map."""
        return True

    def _whole(self, name, nbytes):
        if nbytes <= 0 or nbytes % self.granularity:
            unit = self.granularity
            raise ValueError(f"{name}: expected a positive multiple of {unit} bytes, got {nbytes}")

    def allocate(self, nbytes, kind):
        """New zeroed pages that can be exported as `kind`, which is "fd" on the CPU."""
        self._whole("nbytes", nbytes)
        if kind != "fd":
            raise DriverError(f"memory of the CPU device is exported as a file descriptor, not as {kind!r}")
        cdef Allocation allocation = Allocation.__new__(Allocation)
        try:
            allocation.fd = os.memfd_create("epcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(allocation.fd, nbytes)
            fcntl.fcntl(allocation.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise _failed("memfd_create", error, f"{nbytes} bytes") from None
        allocation.size = nbytes
        return allocation

    def open(self, handle, nbytes, kind):
        """The pages behind a handle that another rank exported as `kind`; closing it is the caller's."""
        cdef Allocation allocation = Allocation.__new__(Allocation)
        try:
            size = os.fstat(handle).st_size
            allocation.fd = os.dup(handle)
        except OSError as error:
            raise _failed("dup", error, f"descriptor {handle}") from None
        if size != nbytes:
            raise DriverError(f"expected a memfd of {nbytes} bytes, got one of {size}")
        allocation.size = nbytes
        return allocation

    def reserve(self, nbytes, alignment=0):
        """Addresses for `nbytes` bytes, the first a multiple of `alignment` (0 = the granularity)."""
        self._whole("nbytes", nbytes)
        cdef size_t size = nbytes, align = max(alignment, self.granularity), head
        if align & (align - 1):
            raise ValueError(f"alignment: expected a power of two, got {align}")
        cdef size_t spare = align - <size_t>mmap.PAGESIZE
        cdef Reservation reservation = Reservation.__new__(Reservation)
        cdef void* start = c_mmap(NULL, size + spare, PROT_NONE, RESERVED, -1, 0)
        if start == MAP_FAILED:
            raise DriverError(f"mmap: no {size + spare} bytes of free addresses")
        head = (align - <uintptr_t>start % align) % align
        if head:
            munmap(start, head)
        if spare - head:
            munmap(<char*>start + head + size, spare - head)
        reservation.address = <uintptr_t>start + head
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
        cdef uintptr_t address = reservation.address + <size_t>offset
        cdef Mapping mapping = Mapping.__new__(Mapping)
        cdef int access = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_FIXED
        if c_mmap(<void*>address, allocation.size, access, flags, allocation.fd, 0) == MAP_FAILED:
            raise DriverError(f"mmap: cannot map {allocation.size} bytes at {address:#x}")
        mapping.address = address
        mapping.size = allocation.size
        mapping.reservation = reservation
        return mapping


allocator = Allocator()
