"""Allocations made visible side by side."""


class MappedRange:
    """One range of addresses in which allocations lie back to back, in the given order.

    The pages are mapped until the range is let go of; the allocations may go before. An allocation may lie in
    several ranges, and several times in one.

    Args:
        allocator: of the device that will use the addresses.
        allocations: of any sizes that are multiples of its granularity.
        alignment: of the first address, in bytes; a power of two; 0 = the granularity.

    Attributes:
        address: of the first byte.
        size: bytes.
    """

    def __init__(self, allocator, allocations, alignment=0):
        self.size = sum(allocation.size for allocation in allocations)
        reservation = allocator.reserve(self.size, alignment)
        self.address = reservation.address
        self._mappings = []
        offset = 0
        for allocation in allocations:
            self._mappings.append(allocator.map(reservation, offset, allocation))
            offset += allocation.size
