"""CUDA memory and launches against a fake driver: failing steps undo those before; both kinds of handle."""

import ctypes
import dataclasses
import gc
import os
import sys
import threading

import numpy as np
import pytest
from fake import fake_driver, live

from epcomm.errors import DriverError, HandleError
from epcomm.runtime._launch import CudaLauncher
from epcomm.runtime._vmm import Allocator
from epcomm.runtime.handles import check_peers, handle_kind
from epcomm.runtime.mapped import MappedRange
from epcomm.runtime.symmetric import SymmetricMemory
from epcomm.testing import run_threads

GRANULE = 2 << 20


@pytest.fixture
def driver():
    with fake_driver() as library:
        yield library
        gc.collect()  # a caught exception and its frames hold each other


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def memory(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def test_allocated_pages_are_zeroed_and_shared_by_all_their_mappings(driver):
    allocator = Allocator(0)
    pages = allocator.allocate(GRANULE, "fd")
    descriptor = pages.export()
    imported = allocator.open(descriptor, GRANULE, "fd")
    os.close(descriptor)
    mapped = MappedRange(allocator, [pages, imported, pages])
    view = memory(mapped.address, 3 * GRANULE)
    assert not view.any()
    view[5] = 7
    assert view[GRANULE + 5] == view[2 * GRANULE + 5] == 7


def test_nothing_is_held_once_let_go_of_in_any_order(driver):
    before = descriptors()
    allocator = Allocator(1)
    pages = allocator.allocate(GRANULE, "fd")
    reservation = allocator.reserve(4 * GRANULE, 4 * GRANULE)
    assert reservation.address % (4 * GRANULE) == 0
    mapping = allocator.map(reservation, GRANULE, pages)
    del reservation, pages, allocator
    assert live(driver) == {"allocations": 0, "reservations": 1, "mappings": 1, "contexts": 0}
    memory(mapping.address, mapping.size)[:] = 1
    del mapping
    assert not any(live(driver).values())
    assert descriptors() == before


@pytest.mark.parametrize("kind", ["fd", "fabric"])
def test_a_failing_call_undoes_the_calls_before_it(driver, kind):
    def everything():
        allocator = Allocator(0)
        pages = allocator.allocate(GRANULE, kind)
        handle = pages.export()
        try:
            imported = allocator.open(handle, GRANULE, kind)
        finally:
            if kind == "fd":
                os.close(handle)
        MappedRange(allocator, [pages, imported])

    driver.fake_fail_nth(-1)
    before = descriptors()
    everything()
    count = driver.fake_calls()
    assert count > 15
    for failing in range(count):
        driver.fake_fail_nth(failing)
        with pytest.raises(DriverError, match=r"cu\w+.*CUDA_ERROR_OUT_OF_MEMORY \(out of memory\)"):
            everything()
        assert driver.fake_calls() == failing + 1  # nothing went on after the failure
        gc.collect()
        assert not any(live(driver).values()), f"call {failing}: {driver.fake_log().decode()}"
        assert descriptors() == before


def test_a_failing_undo_is_reported_and_not_raised(driver, monkeypatch):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(str(report.exc_value)))
    pages = Allocator(0).allocate(GRANULE, "fd")
    driver.fake_fail_name(b"cuMemRelease")
    del pages
    assert reports == ["cuMemRelease: CUDA_ERROR_OUT_OF_MEMORY (out of memory)"]


def test_sizes_and_offsets_are_checked_before_the_driver_sees_them(driver):
    allocator = Allocator(0)
    for size in (0, -GRANULE, GRANULE + 1):
        with pytest.raises(ValueError, match="multiple of 2097152"):
            allocator.allocate(size, "fd")
    pages, reservation = allocator.allocate(2 * GRANULE, "fd"), allocator.reserve(2 * GRANULE)
    for offset in (1, GRANULE, -GRANULE):
        with pytest.raises(ValueError, match="offset"):
            allocator.map(reservation, offset, pages)
    with pytest.raises(DriverError, match="64 bytes, got 3"):
        allocator.open(b"abc", GRANULE, "fabric")


def test_a_device_that_is_not_there(driver):
    with pytest.raises(DriverError, match=r"cuDeviceGet\(2\): CUDA_ERROR_INVALID_VALUE"):
        Allocator(2)


def uuid(index):
    return ["0a0a0a00-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "0b0b0b00-0b0b-0b0b-0b0b-0b0b0b0b0b0b"][index]


def test_reach(driver):
    allocator = Allocator(0)
    assert (allocator.uuid, Allocator(1).uuid) == (uuid(0), uuid(1))
    assert allocator.reaches(uuid(0)) and allocator.reaches(uuid(1)) and allocator.reaches("00" * 16)
    driver.fake_no_peer_access()
    assert allocator.reaches(uuid(0)) and not allocator.reaches(uuid(1))


# ---- all of it on ranks


def on_fake_gpus(group):
    """Gives the group's CPU device the memory of a GPU; what is mapped there is host memory after all."""
    group.device.allocator = Allocator(group.rank % 2)


def share_and_write(group):
    on_fake_gpus(group)
    symmetric = SymmetricMemory(group, 3 * GRANULE - 5)
    assert symmetric.stride == 3 * GRANULE
    assert not symmetric.array(0, (GRANULE,), np.uint8).any()
    group.barrier()
    for rank in range(group.size):
        symmetric.array(8 * group.rank, (1,), np.int64, rank)[0] = 100 * group.rank + rank
    group.barrier()
    seen = symmetric.array(0, (group.size,), np.int64).tolist()
    symmetric.close()
    return handle_kind(group), seen


@pytest.mark.parametrize("wish", ["fd", "fabric", None])
def test_symmetric_memory_by_either_handle(driver, monkeypatch, wish):
    if wish:
        monkeypatch.setenv("EPCOMM_HANDLE_TYPE", wish)
    for rank, (kind, seen) in enumerate(run_threads(3, share_and_write, timeout=10)):
        assert kind == (wish or "fd")
        assert seen == [100 * source + rank for source in range(3)]
    assert not any(live(driver).values())


def no_descriptors(group):
    on_fake_gpus(group)
    real = group.device.allocator

    class Refuses:
        granularity = real.granularity
        reserve, map, open, reaches = real.reserve, real.map, real.open, real.reaches

        def allocate(self, nbytes, kind):
            if kind == "fd" and group.rank == 1:
                raise DriverError("cuMemCreate: CUDA_ERROR_NOT_PERMITTED")
            return real.allocate(nbytes, kind)

    group.device.allocator = Refuses()
    return handle_kind(group)


def test_the_second_kind_is_taken_by_all_where_the_first_fails_on_one(driver):
    assert run_threads(3, no_descriptors, timeout=10) == ["fabric"] * 3


def no_kind(group, library):
    on_fake_gpus(group)
    group.barrier()
    library.fake_fail_name(b"cuMemExportToShareableHandle")
    with pytest.raises(HandleError) as caught:
        SymmetricMemory(group, GRANULE)
    return str(caught.value)


def test_every_kind_is_named_with_its_reason_where_none_works(driver):
    for message in run_threads(2, no_kind, driver, timeout=10):
        assert (
            "fd: " in message and "fabric: " in message and "rank 1: cuMemExportToShareableHandle" in message
        )
    gc.collect()
    assert live(driver)["allocations"] == live(driver)["mappings"] == 0


def test_devices_that_cannot_reach_each_other_are_named(driver):
    driver.fake_no_peer_access()

    def check(group):
        on_fake_gpus(group)
        group.peers = tuple(
            dataclasses.replace(peer, device=f"cuda:{rank % 2}", device_uuid=uuid(rank % 2))
            for rank, peer in enumerate(group.peers)
        )
        with pytest.raises(HandleError) as caught:
            check_peers(group)
        return str(caught.value)

    for message in run_threads(2, check, timeout=10):
        assert "rank 0 cannot map memory of cuda:1 of rank 1" in message
        assert "rank 1 cannot map memory of cuda:0 of rank 0" in message


# ---- launching

CONTEXT = 1010


@pytest.fixture
def launcher(driver):
    data = (ctypes.c_uint8 * 16)(*range(16))
    return CudaLauncher(CONTEXT, 4711, 24, 512, 100 << 10, ctypes.addressof(data), data), data


def test_a_launch_passes_the_struct_as_it_is_now(driver, launcher):
    launch, data = launcher
    driver.fake_set_current(CONTEXT)
    try:
        launch(99)
        data[3] = 77
        launch(98)
    finally:
        driver.fake_set_current(0)
    last = driver.fake_last_launch().contents
    assert (list(last.grid), list(last.block), last.shared) == ([24, 1, 1], [512, 1, 1], 100 << 10)
    assert (last.function, last.stream, last.context) == (4711, 98, CONTEXT)
    assert list(last.bytes) == [0, 1, 2, 77, *range(4, 16)]


def test_a_launch_from_a_thread_without_context(driver, launcher):
    thread = threading.Thread(target=launcher[0], args=(5,))
    thread.start()
    thread.join()
    last = driver.fake_last_launch().contents
    assert (last.stream, last.context) == (5, CONTEXT)


def test_a_refused_launch_raises(driver, launcher):
    driver.fake_fail_name(b"cuLaunchKernelEx")
    with pytest.raises(DriverError, match="cuLaunchKernelEx: CUDA_ERROR_OUT_OF_MEMORY"):
        launcher[0](0)


def test_allowed_shared_memory_only_grows(driver, launcher):
    launch, data = launcher
    assert launch.blocks_per_sm == 4
    assert driver.fake_max_shared() == 100 << 10
    CudaLauncher(CONTEXT, 4711, 1, 32, 60 << 10, ctypes.addressof(data), data)
    assert driver.fake_max_shared() == 100 << 10
    with pytest.raises(DriverError, match="cuFuncSetAttribute: 300000 bytes"):
        CudaLauncher(CONTEXT, 4711, 1, 32, 300_000, ctypes.addressof(data), data)
