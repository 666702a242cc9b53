"""Buffers and pools beyond 4 GiB and 2^31 elements, what objects hold, and that they give it back.

CPU ranks have sparse memory: only pages that are touched exist. On GPUs it is real.
"""

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
import test_pool
from ranks import on_gpus, run_ranks
from test_buffer import routing, rows_of, settings_of

from epcomm import Buffer, ExpertPool, MoECommunicator, dtypes, reference
from epcomm.runtime import _memfd
from epcomm.testing import run_threads

MIB = 2**20


def resident_mib():
    """Memory of this process that has pages."""
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


LARGE = dict(num_tokens=40960, hidden=7168, num_topk=8, num_experts=24, token_padding=1)


def last_rows(group, tokens):
    """A step whose plan is moved to the end of a receive area of 4.4 GiB: rows are where dst says."""
    with Buffer(group, **LARGE) as buffer:
        xp, me = buffer.xp, group.rank
        assert buffer.memory()["receive"] > 2**32 and buffer.row_capacity * buffer.hidden > 2**31
        ids = routing("skewed", me, tokens, 8, 24, 0)
        x = rows_of(me, 0, tokens, 7168, buffer.dtype)
        weights = np.random.default_rng(me).random((tokens, 8), np.float32)
        plan = buffer.plan(xp.asarray(ids))
        most = -(-tokens * 8 * group.size // group.size)  # rows of the fullest rank
        shift = buffer.row_capacity - most
        plan.dst[...] += shift
        got = buffer.dispatch(
            xp.asarray(x), topk_weights=xp.asarray(weights), plan=plan, zero_copy=True, zero_copy_weights=True
        )
        rows, row_weights = (
            group.device.to_host(got.x[shift:]),
            group.device.to_host(got.topk_weights[shift:]),
        )
        back = buffer.combine(
            got.x, plan, row_weights=got.topk_weights, zero_copy=True, zero_copy_weights=True
        )
        buffer.check()
        out, weights_back = group.device.to_host(back.x), group.device.to_host(back.topk_weights)
        return (ids, x, weights), (rows, row_weights, out, weights_back)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_last_rows_of_a_buffer_beyond_4_gib(ranks):
    before = resident_mib()
    results = run_ranks(ranks, last_rows, 24, timeout=20.0)
    assert on_gpus() or resident_mib() - before < 256
    ids, x, weights = zip(*(given for given, _ in results), strict=True)
    plan = reference.plan(ids, LARGE["num_experts"], 24, token_padding=1)
    rows, row_weights = reference.dispatch(x, plan, weights)
    out, weights_back = reference.combine(rows, plan, x[0].dtype, row_weights)
    for rank, (_, got) in enumerate(results):
        used = int(plan.ranks[rank].cu_seqlens[-1])
        assert got[0][:used].tobytes() == rows[rank][:used].tobytes()
        assert got[1][:used].tobytes() == row_weights[rank][:used].tobytes()
        assert got[2].tobytes() == out[rank].tobytes()
        assert got[3].tobytes() == weights_back[rank].tobytes()


def far_apart(group, *args):
    """Pools whose experts lie 1 GiB apart."""
    group.device.allocator = _memfd.Allocator(4 << 30)
    with Buffer(group, **settings_of(num_experts=4)) as buffer, ExpertPool(buffer, (8,), "bfloat16") as pool:
        assert pool.stride >= 1 << 30
    return test_pool.train(group, *args)


def test_experts_far_apart():
    """Offsets beyond 4 GiB in every view, and more than 2^31 elements between the first and the last."""
    before = resident_mib()
    seen = run_threads(2, far_apart, settings_of(num_experts=8), (4, 20), [[24, 24]], 2, timeout=20.0)
    assert min(seen[0]) > 0 and resident_mib() - before < 256


ELEMENTS = 2**31 + 4096


def ranges():
    """Where a large expert is looked at: its start, end, and around 2^31 and 2^32 bytes and 2^31 elements."""
    return [slice(at, at + 4096) for at in (0, 2**29 - 2048, 2**30 - 2048, 2**31 - 2048, ELEMENTS - 4096)]


def large_expert(group):
    """One expert a rank, of 8 GiB; expert 0 is copied to rank 1. Returns what is wrong."""
    with Buffer(group, **settings_of(num_experts=2, num_topk=1)) as buffer:
        xp, wrong = buffer.xp, []
        with ExpertPool(buffer, ELEMENTS, "float32") as pool:
            marks = [xp.arange(4096, dtype=np.float32) + 10_000 * i for i in range(len(ranges()))]
            for here, mark in zip(ranges(), marks, strict=True):
                pool.local[0, here] = mark + group.rank
            pool.slots[...] = -1
            plan = buffer.plan(xp.zeros((24, 1), np.int32))
            buffer.prefetch_weight(plan, pool)
            for here, mark in zip(ranges(), marks, strict=True):
                if group.rank == 1 and not bool((pool.slots[0, here] == mark).all()):
                    wrong.append(("prefetch", here))
                pool.slots[0, here] = mark
            buffer.reduce_grad(plan, pool)
            for here, mark in zip(ranges(), marks, strict=True):
                added = mark if group.rank == 0 else 1
                if not bool((pool.local[0, here] == mark + added).all()):
                    wrong.append(("sum", here))
                if not bool((pool.slots[0, here] == (mark if group.rank == 0 else 0)).all()):
                    wrong.append(("slot", here))
            buffer.check()
        return wrong


@pytest.mark.skipif(not on_gpus(), reason="moves 16 GiB, which CPU ranks would have to hold")
def test_an_expert_of_more_than_2_31_elements():
    assert run_ranks(2, large_expert, timeout=20.0) == [[], []]


# what objects hold, and give back
# --------------------------------


def shared_bytes():
    """Bytes of memory that ranks share which this process has mapped, counting every mapping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "memfd:epcomm " in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def memory_and_truth(group):
    """buffer.memory(), what is mapped for it, and for its pool's pages."""
    before = shared_bytes()
    with Buffer(group, **settings_of(num_tokens=300, hidden=200)) as buffer:
        mapped = shared_bytes() - before
        sizes = buffer.memory()
        plan = buffer.plan(np.zeros((7, 4), np.int32))
        with ExpertPool(buffer, (8, 100), "bfloat16") as pool:
            pool_mapped = shared_bytes() - before - mapped
            return sizes, mapped, pool_mapped, pool.stride, plan._slab.nbytes


def test_memory_tells_what_is_allocated():
    """On one CPU rank everything is mapped once, but a pool's pages three times: full, slots and compute."""
    ((sizes, mapped, pool_mapped, stride, plan_bytes),) = run_threads(1, memory_and_truth)
    assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total")
    assert sizes["total"] - sizes["local"] == mapped
    assert pool_mapped == (16 + 16 + 16 + 16 + 16) * stride  # E + E/R, R * E/R, 2 E/R
    words = 1 + 2 * 16 + 2 * 16 + 16 + 300 * 4  # each array up to a multiple of 4
    assert 0 <= plan_bytes - 4 * (words + 7 * 4) < 5 * 16


def memory_of_a_gpu(group):
    """buffer.memory()["total"], and what a GPU has less of for the second of two equal buffers."""
    settings = settings_of(num_tokens=8192, hidden=4096)
    Buffer(group, **settings).close()  # kernels are loaded
    before = device_memory(group)
    with Buffer(group, **settings) as buffer:
        return buffer.memory()["total"], device_memory(group) - before


@pytest.mark.skipif(not on_gpus(), reason="CPU ranks have no memory of their own")
def test_memory_is_what_a_gpu_has_less_of():
    for told, held in run_ranks(1, memory_of_a_gpu, timeout=20.0):
        assert abs(held - told) < 8 * MIB < told / 20


def device_memory(group):
    """Bytes of a GPU in use, or (descriptors, shared bytes, address space in MiB) of a CPU rank's process."""
    gc.collect()
    if group.device.kind == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()
        free, total = cupy.cuda.runtime.memGetInfo()
        return total - free
    size = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
    return len(os.listdir("/proc/self/fd")), shared_bytes(), int(size) / 1024


def buffer_cycle(group):
    with Buffer(group, **settings_of(num_tokens=1000, hidden=512)) as buffer:
        x = buffer.xp.zeros((3, 512), buffer.dtype)
        got = buffer.dispatch(x, buffer.xp.zeros((3, 4), np.int32), zero_copy=True)
        with ExpertPool(buffer, (512, 64), "bfloat16") as pool:
            buffer.prefetch_weight(got.plan, pool, async_finish=True).wait()
        buffer.combine(got.x, got.plan, zero_copy=True)


def communicator_cycle(group):
    settings = dict(num_experts=8, hidden_size=512, topk=2, max_tokens_per_rank=64)
    with MoECommunicator(group, **settings) as communicator:
        x = group.device.xp.zeros((3, 512), dtypes.bfloat16)
        tokens, handle = communicator.dispatch(x, group.device.xp.zeros((3, 2), np.int32))
        communicator.combine(tokens.tokens, handle)


def cycles(group, cycle, counts):
    """Memory in use after some cycles of making an object, using and destroying it, and after more."""
    seen = []
    for count in counts:
        for _ in range(count):
            cycle(group)
        group.barrier()  # all ranks have destroyed theirs
        if group.rank == 0:
            seen.append(device_memory(group))
        group.barrier()
    return seen


@pytest.mark.parametrize("cycle", [buffer_cycle, communicator_cycle])
def test_cycles_leave_nothing(cycle):
    before, after = run_ranks(2, cycles, cycle, (20, 200), timeout=20.0)[0]
    if on_gpus():
        assert after - before < 2 * MIB
    else:
        assert after[:2] == before[:2] and before[1] == 0
        assert after[2] - before[2] < 64  # the addresses of a handful of cycles
