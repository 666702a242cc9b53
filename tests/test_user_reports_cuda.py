"""What users of similar libraries report of streams and allocators, tried on GPUs."""

import numpy as np
import pytest
from ranks import on_gpus, run_ranks
from test_buffer import settings_of
from test_faults import good_call, inputs

from epcomm import Buffer

pytestmark = pytest.mark.skipif(not on_gpus(), reason="streams are CUDA's")

SPIN = r"""
extern "C" __global__ void late_write(long long* ids, long long value, int n, long long ns) {
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < ns);
  for (int i = threadIdx.x; i < n; i += blockDim.x) ids[i] = value;
}
"""


def late_write(array, value, milliseconds=30):
    """A kernel on the current stream that fills an int64 array in the end."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "late_write")
    kernel((1,), (128,), (array, np.int64(value), np.int32(array.size), np.int64(milliseconds * 1e6)))


def edited_in_place(group):
    import cupy

    with Buffer(group, **settings_of()) as buffer:
        good_call(group, buffer)
        for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
            for asynchronous in (False, True):
                with stream:
                    ids = cupy.zeros((6, 4), np.int64)
                    x = cupy.ones((6, 64), np.float32).astype(buffer.dtype)
                    late_write(ids, 15)
                    got = buffer.dispatch(x, ids, async_finish=asynchronous)
                    if asynchronous:
                        got.event.wait()
                    plan = got.plan
                    assert (
                        int(plan.num_tokens_per_expert[:8].sum() + plan.num_tokens_per_expert[8:].sum()) == 24
                    )
                    assert set(plan.experts_to_copy.ravel().get().tolist()) <= {-1, 15}
        buffer.check()


def test_an_edit_on_the_callers_stream_is_seen():
    """pytorch/torchtitan#3413"""
    run_ranks(2, edited_in_place)


def pool_of_another_stream(group):
    """Results of a call on one stream never take memory that work of another stream still writes to."""
    import cupy

    other = cupy.cuda.Stream(non_blocking=True)
    with Buffer(group, **settings_of()) as buffer:
        x, ids = inputs(group, buffer, tokens=24)
        got = buffer.dispatch(x, ids)
        want = group.device.to_host(buffer.combine(got.x, got.plan).x).tobytes()
        cupy.cuda.Device().synchronize()
        for _ in range(10):
            waste = [
                cupy.empty(n, np.int64)
                for n in (buffer.row_capacity * 16, 24 * 16, buffer._plan_layout.words)
            ]
            for array in waste:
                late_write(array, -1, 5)
            del waste, array  # to the pool of the current stream, whose kernels still write there
            sent = buffer.dispatch(x, ids, stream=other)
            back = buffer.combine(sent.x, sent.plan, stream=other)
            cupy.cuda.Device().synchronize()
            assert group.device.to_host(back.x).tobytes() == want
        buffer.check()


def test_a_call_on_another_stream_has_memory_of_its_own():
    run_ranks(2, pool_of_another_stream)


def allocators(group):
    import cupy

    pools = {
        "async": cupy.cuda.MemoryAsyncPool().malloc,
        "managed": cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc,
        "none": None,
        "pool": cupy.cuda.MemoryPool().malloc,
    }
    with Buffer(group, **settings_of()) as buffer:
        outs = set()
        for allocator in pools.values():
            with cupy.cuda.using_allocator(allocator):
                x, ids = inputs(group, buffer, tokens=24)
                got = buffer.dispatch(x, ids)
                outs.add(group.device.to_host(buffer.combine(got.x, got.plan).x).tobytes())
                buffer.check()
                del got
        assert len(outs) == 1


def test_arrays_of_any_allocator():
    """pytorch/torchtitan#3865, uccl-project/uccl#839; ExpertPools and views are mapped (VMM) memory."""
    run_ranks(2, allocators)
