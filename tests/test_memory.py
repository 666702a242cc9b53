"""SymmetricMemory and the memory under it, on whatever device the tests run on."""

import gc
import os
import time
import warnings

import numpy as np
import pytest
from ranks import run_processes, run_ranks

from epcomm.errors import DriverError, PeerTimeoutError
from epcomm.runtime import _memfd
from epcomm.runtime.handles import handle_kind, share
from epcomm.runtime.mapped import MappedRange
from epcomm.runtime.symmetric import SymmetricMemory
from epcomm.testing import run_threads


def settle(group):
    """Waits for this rank's own work, then for the other ranks'."""
    device = group.device
    device.synchronize(device.handle(device.current_stream()))
    group.barrier()


def to_list(group, array):
    return group.device.to_host(array).tolist()


# ---- what is written is what the others see


def exchange(group, nbytes):
    symmetric = SymmetricMemory(group, nbytes)
    xp = group.device.xp
    dirty = bool(xp.any(symmetric.array(0, (nbytes,), np.uint8)))
    settle(group)
    for rank in range(group.size):
        symmetric.array(4 * group.rank, (1,), np.int32, rank)[:] = 1000 * group.rank + rank
    last = symmetric.array(nbytes - 4, (), np.int32, (group.rank + 1) % group.size)
    last[...] = group.rank if nbytes > 4 * group.size + 4 else last
    settle(group)
    got = to_list(group, symmetric.array(0, (group.size,), np.int32))
    from_peer = to_list(group, symmetric.array(0, (group.size,), np.int32, (group.rank + 1) % group.size))
    wrote = int(group.device.to_host(symmetric.array(nbytes - 4, (), np.int32)))
    settle(group)
    symmetric.close()
    return dirty, got, from_peer, wrote


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_write_into_each_others_chunks(ranks):
    for rank, (dirty, got, from_peer, wrote) in enumerate(run_ranks(ranks, exchange, 100_000)):
        assert not dirty
        assert got == [1000 * source + rank for source in range(ranks)]
        assert from_peer == [1000 * source + (rank + 1) % ranks for source in range(ranks)]
        assert wrote == (rank - 1) % ranks


def test_ranks_that_are_processes():
    for rank, outcome in enumerate(run_processes(3, exchange, 100_000)):
        assert outcome.error is None
        assert outcome.result[1] == [1000 * source + rank for source in range(3)]


def test_more_ranks_than_a_socket_queues_messages():
    for rank, (_, got, _, _) in enumerate(run_threads(16, exchange, 4096, timeout=20)):
        assert got == [1000 * source + rank for source in range(16)]


def reuse(group):
    """Whether a chunk is zero that may have the pages of one that was full of ones."""
    for fill in (255, 0):
        symmetric = SymmetricMemory(group, 1 << 20)
        whole = symmetric.array(0, (symmetric.nbytes,), np.uint8)
        clean = not bool(group.device.xp.any(whole))
        whole[:] = fill
        del whole
        settle(group)
        symmetric.close()
    return clean


def test_a_new_chunk_is_zero():
    assert run_ranks(2, reuse) == [True, True]


def places(group):
    symmetric = SymmetricMemory(group, 5000)
    granularity = group.device.allocator.granularity
    assert symmetric.stride == symmetric.nbytes == -(-5000 // granularity) * granularity
    assert symmetric.base % granularity == 0
    for rank in range(group.size):
        assert symmetric.pointer(rank, 24) == symmetric.base + rank * symmetric.stride + 24
        assert group.device.pointer(symmetric.array(24, (3,), np.float32, rank)) == symmetric.pointer(
            rank, 24
        )
    assert group.device.pointer(symmetric.array(0, (1,), np.uint8)) == symmetric.pointer(group.rank)
    array = symmetric.array(64, (4, 5), np.float32)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((4, 5), np.float32, True)
    end = symmetric.nbytes
    assert symmetric.array(end - 4, 1, np.float32).shape == (1,)
    for call, message in [
        (lambda: symmetric.pointer(group.size), "rank: expected 0 ... 1, got 2"),
        (lambda: symmetric.pointer(-1), "rank: expected 0 ... 1, got -1"),
        (lambda: symmetric.pointer(0, end), f"offset: expected 0 ... {end - 1}"),
        (lambda: symmetric.array(2, (1,), np.float32), "multiple of the item size 4, got 2"),
        (lambda: symmetric.array(-4, (1,), np.float32), "offset: expected 0"),
        (
            lambda: symmetric.array(end - 4, (2,), np.float32),
            f"ends at {end + 4}, behind the chunk's {end} bytes",
        ),
    ]:
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value)
    symmetric.close()
    with pytest.raises(ValueError, match="is closed"):
        symmetric.array(0, (1,), np.uint8)


def test_places_and_their_limits():
    run_ranks(2, places)


# ---- views of the same pages


def twice(group):
    """`[mine, next rank's, mine]` back to back in one range."""
    device = group.device
    nbytes = device.allocator.granularity
    chunks = share(group, nbytes)
    mine, theirs = chunks[group.rank], chunks[(group.rank + 1) % group.size]
    view = MappedRange(device.allocator, [mine, theirs, mine], alignment=4 * nbytes)
    assert (view.address % (4 * nbytes), view.size) == (0, 3 * nbytes)
    del chunks, mine, theirs  # what is mapped stays
    words = device.wrap(view.address, (3, nbytes // 4), np.int32, view)
    words[2, 7] = 10 + group.rank
    settle(group)
    got = to_list(group, words[:, 7])
    settle(group)
    return got


def test_an_allocation_lies_in_a_range_twice():
    assert run_ranks(2, twice) == [[10, 11, 10], [11, 10, 11]]


# ---- the end


def outlive(group):
    symmetric = SymmetricMemory(group, 4096)
    array = symmetric.array(0, (4,), np.int32)
    array[:] = group.rank
    settle(group)
    symmetric.close()
    symmetric.close()
    return to_list(group, array)


def test_an_array_outlives_the_memory_it_is_of():
    assert run_ranks(2, outlive) == [[0] * 4, [1] * 4]


def close_alone(group, wait):
    """Rank 0 closes while the others are busy elsewhere; returns whom it missed."""
    symmetric = SymmetricMemory(group, 4096)
    missed = None
    if group.rank > 0:
        time.sleep(0.6)
        symmetric.close(wait=False)
        return missed
    group.timeout = 0.2
    try:
        symmetric.close(wait=wait)
    except PeerTimeoutError as late:
        missed = late.peers
    symmetric.close()  # has nothing left to do or to wait for
    with pytest.raises(ValueError, match="is closed"):
        symmetric.array(0, (1,), np.uint8)
    return missed


@pytest.mark.parametrize("wait, missed", [(True, (1,)), (False, None)])
def test_closing_waits_for_the_peers_with_a_deadline_or_not_at_all(wait, missed):
    assert run_ranks(2, close_alone, wait)[0] == missed


def drop(group):
    symmetric = SymmetricMemory(group, 4096)
    settle(group)
    if group.rank == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del symmetric
            gc.collect()
        return [str(w.message) for w in caught if w.category is ResourceWarning]
    symmetric.close(wait=False)
    return None


def test_dropping_it_open_warns_and_waits_for_nobody():
    message = run_ranks(2, drop, timeout=2)[0]
    assert len(message) == 1 and "never closed" in message[0]


# ---- problems are everybody's


def differ(group):
    with pytest.raises(ValueError, match="nbytes differs between ranks") as caught:
        SymmetricMemory(group, 1 + group.rank * group.device.allocator.granularity)
    return str(caught.value)


def test_chunks_of_different_sizes_are_refused_by_all():
    first, second = run_ranks(2, differ)
    assert first == second


def nothing(group):
    with pytest.raises(ValueError, match="nbytes: expected a positive multiple"):
        SymmetricMemory(group, 0)


def test_an_empty_chunk_is_refused():
    run_ranks(2, nothing)


class Broken:
    """The CPU's allocator, one method of which fails from now on."""

    def __init__(self, method):
        for name in ("granularity", "allocate", "open", "reserve", "map", "reaches"):
            setattr(self, name, getattr(_memfd.allocator, name))
        setattr(self, method, self.fail)

    def fail(self, *args):
        raise DriverError("it is broken")


def with_broken(group, method):
    handle_kind(group)
    if group.rank == 1:
        group.device.allocator = Broken(method)
    with pytest.raises(DriverError, match="rank 1: it is broken") as caught:
        SymmetricMemory(group, 4096)
    group.barrier()  # the group still works
    return str(caught.value)


@pytest.mark.parametrize("method", ["allocate", "open", "reserve", "map"])
def test_a_failure_of_one_rank_is_raised_by_all(method):
    before = resources()
    messages = run_threads(3, with_broken, method, timeout=5)
    assert len(set(messages)) == 1
    assert resources() == before


def resources():
    gc.collect()
    with open("/proc/self/maps") as maps:
        return len(os.listdir("/proc/self/fd")), sum("memfd:epcomm " in line for line in maps)


def test_nothing_is_held_after_closing():
    before = resources()
    run_threads(3, exchange, 50_000, timeout=5)
    assert resources() == before


# ---- the CPU's memory


def test_memfds_are_sparse():
    allocator = _memfd.Allocator()
    pages = allocator.allocate(1 << 40, "fd")
    view = MappedRange(allocator, [pages])
    descriptor = pages.export()
    try:
        memory = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (1 << 40)).from_address(view.address))
        memory[-1] = 1
        assert os.fstat(descriptor).st_blocks * 512 <= 1 << 21
    finally:
        os.close(descriptor)


def test_no_rank_can_shrink_what_others_have_mapped():
    descriptor = _memfd.allocator.allocate(8192, "fd").export()
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 4096)
        with pytest.raises(DriverError, match="expected a memfd of 4096 bytes, got one of 8192"):
            _memfd.allocator.open(descriptor, 4096, "fd")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("granularity", [4096, 1 << 16, 1 << 21])
def test_granularity_and_alignment(granularity):
    allocator = _memfd.Allocator(granularity)
    for size in (0, -granularity, granularity // 2, granularity + 1):
        with pytest.raises(ValueError, match=f"positive multiple of {granularity}"):
            allocator.allocate(size, "fd")
    pages = allocator.allocate(granularity, "fd")
    for alignment in (0, granularity, 1 << 22):
        reservation = allocator.reserve(2 * granularity, alignment)
        assert reservation.address % (alignment or granularity) == 0
        mapping = allocator.map(reservation, granularity, pages)
        assert mapping.address == reservation.address + granularity
        for offset in (2 * granularity, -granularity, granularity // 2):
            with pytest.raises(ValueError, match="offset"):
                allocator.map(reservation, offset, pages)
    with pytest.raises(ValueError, match="power of two"):
        allocator.reserve(granularity, 3 * granularity)


def test_wrong_granularity():
    for granularity in (0, 100, -4096):
        with pytest.raises(ValueError, match="multiple of the page size"):
            _memfd.Allocator(granularity)
