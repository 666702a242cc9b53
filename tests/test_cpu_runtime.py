"""The CPU device: what kernels may rely on, how mistakes are told, and that seeded schedules find them."""

import ctypes
import mmap
import os
import subprocess
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
from toys import aligned, compile_toys, launch, set_schedule

from epcomm.runtime import _fibers, args
from epcomm.runtime.cpu import CpuDevice

SEEDS = range(1, 31)


@pytest.fixture(autouse=True)
def first_in_first_out():
    yield
    set_schedule(None)
    _fibers.set_schedule(None)


# ---- the vocabulary


@pytest.mark.parametrize("grid,block", [(1, 32), (3, 96), (2, 1024)])
def test_every_thread_knows_its_place(grid, block):
    out = aligned(grid * block * 6)
    launch("identity", grid=grid, block=block, out=out)
    b, t = np.divmod(np.arange(grid * block), block)
    wanted = np.stack([b, t, b * 0 + grid, b * 0 + block, t % 32, t // 32 * 100 + block // 32], 1)
    np.testing.assert_array_equal(out.reshape(-1, 6), wanted)


@pytest.mark.parametrize("seed", [None, 5])
def test_warp_collectives(seed):
    set_schedule(seed)
    x = aligned(128)
    x[:] = np.random.default_rng(1).integers(0, 100, 128)
    out = aligned(128 * 10)
    launch("collectives", grid=2, in_=x, out=out)
    lane = np.arange(32)
    for w, v in enumerate(x.astype(np.int64).reshape(4, 32)):
        got = out.reshape(4, 32, 10)[w].astype(np.int64)
        np.testing.assert_array_equal(got[:, 0], v[v % 32])
        np.testing.assert_array_equal(got[:, 1], v[lane ^ 5])
        np.testing.assert_array_equal(got[:, 2], np.where(lane < 3, v, np.roll(v, 3)))
        np.testing.assert_array_equal(got[:, 3], ((v % 3 == 0) << lane).sum())
        np.testing.assert_array_equal(got[:, 4], ((v[:, None] % 4 == v % 4) << lane).sum(1))
        np.testing.assert_array_equal(got[:, 5].astype(np.uint32).view(np.int32), v.max() - 50)
        np.testing.assert_array_equal(got[:, 6], (v == 7).any() + 2)
        np.testing.assert_array_equal(got[:, 7], v[1])
        np.testing.assert_array_equal(got[:, 8].astype(np.uint32).view(np.float32), v[lane ^ 1])
        np.testing.assert_array_equal(got[:, 9], (1 << lane) - 1)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_barriers(seed):
    set_schedule(seed)
    out = aligned(256)
    launch("rotate", grid=2, block=128, out=out, n=7)
    np.testing.assert_array_equal(out.reshape(2, 128), [np.roll(np.arange(128), -7)] * 2)
    launch("rotate_warp", grid=2, block=128, out=out, n=3)
    np.testing.assert_array_equal(out.reshape(8, 32), [np.roll(np.arange(32), -3)] * 8)
    # block_any sees the last thread only in the warp that is left with it.
    launch("leavers", grid=2, block=128, out=out)
    rounds = np.arange(128) // 32 + 1
    np.testing.assert_array_equal(out.reshape(2, 128), [rounds * 2 + (rounds == 4)] * 2)
    launch("named", block=128, out=out)
    lanes = (np.arange(32) + 1) % 32
    np.testing.assert_array_equal(out[32:128].reshape(3, 32), [w * 1000 + lanes for w in (1, 2, 3)])


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_atomics_across_blocks(seed):
    set_schedule(seed)
    out = aligned(8)
    out[5] = 42
    launch("counters", grid=3, block=64, out=out)
    assert out.tolist()[:6] == [3 * 64 * 2, 0, 99, 2**32 - 1, 42, 7]


def run_rows(seed, wrong, n=12):
    set_schedule(seed)
    x = aligned(n * 64)
    x[:] = np.arange(1, n * 64 + 1)
    out, peer = aligned(n * 64 + 2), aligned(64)
    launch("rows", grid=2, in_=x, out=out, peer=peer, n=n, wrong=wrong)
    rows = x.reshape(n, 64)
    sums = [rows[b::2].sum(dtype=np.uint32) for b in range(2)]
    return np.array_equal(out[: n * 64], x) and out[n * 64 :].tolist() == sums


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_bulk_copies(seed):
    assert run_rows(seed, wrong=0)
    out, x = aligned(64), aligned(32)
    x[:] = np.arange(32)
    launch("late_load", in_=x, out=out)
    np.testing.assert_array_equal(out, np.tile(x, 2))


# ---- mistakes


@pytest.mark.parametrize("wrong", [1, 2, 3], ids=["mbarrier_wait", "row_wait_read", "row_wait"])
def test_a_missing_wait_is_seen_under_seeds(wrong):
    def fails(seed):
        try:
            return not run_rows(seed, wrong)
        except RuntimeError as error:
            assert wrong == 1 and "mbarrier" in str(error)  # the next use of the mbarrier may tell
            return True

    assert sum(fails(seed) for seed in SEEDS) >= len(SEEDS) // 2


@pytest.mark.parametrize(
    "wrong,message",
    [(4, "row_store of 256 bytes that no row_wait"), (5, "row_store"), (6, "row_load that no mbarrier_wait")],
)
def test_copies_left_under_way_are_an_error_under_every_seed(wrong, message):
    for seed in SEEDS:
        with pytest.raises(RuntimeError, match=message):
            run_rows(seed, wrong, n=4)


@pytest.mark.parametrize("kernel,block", [("rotate", 64), ("rotate_warp", 32)])
def test_a_missing_barrier_is_seen_under_seeds(kernel, block):
    right, seen = aligned(block), 0
    launch(kernel, block=block, out=right, n=3)
    for seed in SEEDS:
        set_schedule(seed)
        out = aligned(block)
        launch(kernel, block=block, out=out, n=3, wrong=1)
        seen += not np.array_equal(out, right)
    assert seen >= len(SEEDS) // 2


MISUSES = [
    (
        0,
        r"deadlock.*block 0: 31 threads \(first: thread 0\) at warp_sync of warp 0, which waits for 32 lanes"
        r".*block 0: 2 threads \(first: thread 3\) exited",
    ),
    (
        1,
        r"deadlock.*96 threads \(first: thread 0\) at block_sync, which waits for 128 live threads.*"
        r"32 threads \(first: thread 32\) at named_sync 4, which waits for 96",
    ),
    (
        2,
        r"deadlock.*64 threads \(first: thread 0\) at mbarrier_wait, shared offset 0: phase 0, "
        r"1 arrivals and 0 bytes pending",
    ),
    (3, r"thread 1: the lanes of this warp are at different warp collectives"),
    (4, r"block 0, thread 0: 16-byte access at .*, which is not a multiple of 16"),
    (5, r"row_load: addresses .* not multiples of 16"),
    (6, r"row_load: 32 bytes at .* not in this block's 1024 bytes of shared memory"),
    (7, r"block 0: wrote behind its shared memory, at offset 1029"),
    (8, r"the stack of block 0, thread 40 has overflown"),
    (9, r"named_sync\(2, 32\): others wait there for 64 threads"),
    (10, r"mbarrier at shared offset 0: more arrivals than its count of 1"),
    (11, r"named_sync\(16, 32\): ids are 1 to 15"),
    (12, r"named_sync\(1, 256\): ids are 1 to 15, threads a multiple of 32 up to the block's"),
]  # fmt: skip


@pytest.mark.parametrize("case,message", MISUSES)
def test_misuse_is_named_and_the_next_launch_works(case, message):
    with pytest.raises(RuntimeError, match="(?s)kernel misuse.*" + message):
        launch("misuse", block=128 if case == 1 else 64, in_=aligned(64), out=aligned(64), n=case)
    out = aligned(64)
    launch("rotate", out=out, n=1)
    np.testing.assert_array_equal(out, np.roll(np.arange(64), -1))


@pytest.mark.parametrize(
    "grid,block,shared",
    [(0, 32, 0), (1, 0, 0), (1, 33, 0), (1, 1056, 0), (1, 32, 1 << 20), (1 << 20, 1024, 0)],
)
def test_impossible_launches_are_refused(grid, block, shared):
    with pytest.raises(ValueError, match="cannot launch"):
        launch("identity", grid=grid, block=block, shared=shared)


# ---- schedules


def order(n=3):
    out = aligned(1 + 96 * n)
    launch("order", block=96, out=out, n=n)
    return out[1:].tolist()


def test_schedules():
    assert order() == list(range(96)) * 3
    orders = {}
    for seed in (1, 2, 1):
        set_schedule(seed)
        orders.setdefault(seed, []).append([order(), order()])
    assert orders[1][0] == orders[1][1]  # the same seed, the same series
    assert orders[1][0] != orders[2][0] and orders[1][0][0] != orders[1][0][1]
    assert sorted(orders[1][0][0]) == sorted(list(range(96)) * 3)
    set_schedule(None)
    assert order() == list(range(96)) * 3
    for bad in (0, -1, 1 << 63):
        with pytest.raises(ValueError, match="seed"):
            _fibers.set_schedule(bad)


# ---- ranks


def talk(ranks, n, block=64):
    peer, out = aligned(ranks * 65536, np.uint8), aligned(ranks)
    errors = []

    def rank(r):
        try:
            launch("talk", block=block, out=out[r:], peer=peer, n=n, rank=r, ranks=ranks)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and out.tolist() == [0] * ranks


@pytest.mark.parametrize("ranks,seed", [(2, None), (3, 1), (3, 2), (8, None)])
def test_rank_threads_talk(ranks, seed):
    set_schedule(seed)
    start = time.monotonic()
    talk(ranks, 50)
    assert time.monotonic() - start < 20  # more ranks than cores still get on


def test_rank_processes_talk():
    launch("identity", out=aligned(64 * 6))  # compiled before the fork
    with mmap.mmap(-1, 2 * 65536 + 128) as memory:
        base = np.frombuffer(memory, np.uint8)
        peer, out = base[: 2 * 65536], base[2 * 65536 :].view(np.uint32)
        child = os.fork()
        if child == 0:
            try:
                launch("talk", out=out[1:], peer=peer, n=100, rank=1, ranks=2)
            finally:
                os._exit(0)
        launch("talk", out=out, peer=peer, n=100, rank=0, ranks=2)
        os.waitpid(child, 0)
        assert out[:2].tolist() == [0, 0]
        del base, peer, out


def mapped_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * mmap.PAGESIZE


def test_stacks_go_with_their_thread():
    def rank():
        launch("identity", grid=4, block=128, out=aligned(512 * 6))

    def once():
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join()

    once()
    before = mapped_bytes()
    for _ in range(20):
        once()
    # Far less than the stacks of 20 launches; the last thread may still be ending when join() returns.
    assert mapped_bytes() - before < 2 * 512 * 65536


# ---- sanitizers


def toys_program(folder, *flags):
    return compile_toys(folder / "toys", "-DTOYS_MAIN", "-g", "-O1", *flags)


def run_program(*command):
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)


def sanitized(folder, *flags):
    try:
        program = toys_program(folder, *flags)
    except RuntimeError as error:
        if "cannot find" in str(error):
            pytest.skip("the sanitizer's library is not installed")
        raise
    return program


def test_kernels_are_clean_under_asan_and_ubsan(tmp_path):
    program = sanitized(tmp_path, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    done = run_program(program)
    assert done.returncode == 0, done.stderr


def test_tsan_finds_a_missing_barrier_and_nothing_else(tmp_path):
    program = sanitized(tmp_path, "-fsanitize=thread")
    done = run_program(program)
    assert done.returncode == 0, done.stderr
    done = run_program(program, "race")
    assert "data race" in done.stderr and "rotate_body" in done.stderr


def test_portable_switch(tmp_path):
    done = run_program(toys_program(tmp_path, "-DSIMT_UCONTEXT"))
    assert done.returncode == 0, done.stderr


# ---- the device


def test_argument_structs_have_the_compiled_sizes():
    structs = {
        "".join(part.capitalize() for part in name.split("_")) + "Args": size
        for name, size in _fibers.kernels().items()
    }
    assert structs and {name: ctypes.sizeof(getattr(args, name)) for name in structs} == structs


def test_launcher_checks_its_arguments():
    device = CpuDevice()
    with pytest.raises(ValueError, match="no kernel is called 'nonsense'"):
        device.launcher("nonsense", args.DispatchArgs(), grid=1, block=32)
    with pytest.raises(
        TypeError, match=f"expected arguments of {ctypes.sizeof(args.DispatchArgs)} bytes, got World"
    ):
        device.launcher("dispatch", args.World(), grid=1, block=32)
    with pytest.raises(ValueError, match="shared memory"):
        device.launcher("dispatch", args.DispatchArgs(), grid=1, block=32, shared=1 << 20)
    with pytest.raises(ValueError, match="cannot launch 1 blocks of 31 threads"):
        device.launcher("dispatch", args.DispatchArgs(), grid=1, block=31)(0)


class Owner:
    """Somebody who holds memory."""


@pytest.mark.parametrize(
    "shape,dtype", [((3, 5), np.float32), ((), np.int64), ((0, 4), np.uint8), ((7,), "bfloat16")]
)
def test_arrays(shape, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype) if isinstance(dtype, str) else dtype)
    device = CpuDevice()
    for make in (device.empty, device.zeros):
        array = make(shape, dtype)
        assert (
            array.shape == shape
            and array.dtype == dtype
            and (array.size == 0 or device.pointer(array) % 128 == 0)
        )
    assert not array.any()
    owner = Owner()
    owner.memory = array
    view = device.wrap(device.pointer(array), shape, dtype, owner)
    assert view.shape == shape and view.dtype == dtype and view.flags.writeable
    view[...] = 3
    assert (array == 3).all()
    gone = weakref.ref(owner)
    del owner
    assert gone() is not None
    del view
    assert gone() is None


def test_streams_and_host_memory():
    device = CpuDevice()
    stream = device.current_stream()
    assert (device.handle(stream), device.capturing(0), str(device)) == (0, False, "cpu")
    stream.synchronize()
    device.synchronize(0)
    pointer, view = device.host_visible(100)
    assert view.ctypes.data == pointer and view.shape == (100,) and not view.any()
    target = device.zeros((4,), np.int32)
    device.copy(target, np.arange(4), 0)
    assert target.tolist() == [0, 1, 2, 3] and device.to_host(target) is not target
