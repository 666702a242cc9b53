"""Arrays in and out on a GPU: which stream waits for which, and whose memory it is until when."""

import numpy as np
import pytest
from ranks import on_gpus, run_ranks

from epcomm import asarray, dtypes, foreign, to_dlpack
from epcomm.arrays import take
from epcomm.runtime.symmetric import SymmetricMemory

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not on_gpus(), reason="needs CUDA")

SLOW = 20_000_000  # ns; long against everything the host does meanwhile


def _fill(x, value, delay=SLOW):
    """Writes `value` to an int32 array after `delay` ns, on the current stream."""
    kernel = cupy.RawKernel(
        r"""extern "C" __global__ void fill(int* x, int n, int value, long long ns) {
            long long start, now;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
            do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < ns);
            for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = value;
        }""",
        "fill",
    )
    kernel((1,), (256,), (x, cupy.int32(x.size), cupy.int32(value), cupy.int64(delay)))


def _ready():
    """Nothing is compiled or allocated for the first time while a stream is watched."""
    x = cupy.zeros((64, 8), np.int32)
    _fill(x, 1, 0)
    x.copy()
    x[:, ::2].copy()
    cupy.cuda.runtime.deviceSynchronize()


class Foreign:
    """Another framework's array: its DLPack orders this thread's current stream before the consumer's."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)


def _producer(group, wrap):
    _ready()
    device = group.device
    theirs, ours = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros((64, 16), np.int32)
    cupy.cuda.runtime.deviceSynchronize()
    with theirs:
        _fill(x, 7)
        whole = take(device, wrap(x), "x", dtypes=(dtypes.int32,), shape=(64, 16), stream=ours.ptr)
        part = take(device, wrap(x[:, ::2]), "x", dtypes=(dtypes.int32,), shape=(64, 8), stream=ours.ptr)
    assert whole.data.ptr == x.data.ptr and part.flags.c_contiguous
    with ours:
        copy = whole.copy()
    ours.synchronize()
    return int(copy.min()), int(part.min())


def test_a_producers_stream_is_waited_for():
    assert run_ranks(1, _producer, Foreign) == [(7, 7)]


def _copy_on_the_callers_stream(group):
    """A strided array that a slow kernel writes on the caller's stream is copied behind that kernel."""
    _ready()
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros((64, 16), np.int32)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        _fill(x, 5)
    got = take(group.device, x[:, ::2], "x", dtypes=(dtypes.int32,), shape=(64, 8), stream=stream.ptr)
    stream.synchronize()
    return int(got.min())


def test_a_copy_is_made_on_the_callers_stream():
    assert run_ranks(1, _copy_on_the_callers_stream) == [5]


def _consumer(group):
    """A consumer's stream waits for the stream that is current when it asks, unless it says -1."""
    _ready()
    current, consumer = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(64, np.int32)
    cupy.cuda.runtime.deviceSynchronize()
    seen = []
    for value, stream in ((3, consumer.ptr), (4, -1)):
        with current:
            _fill(x, value)
            to_dlpack(x).__dlpack__(stream=stream, max_version=(1, 0))
        with consumer:
            copy = x.copy()
        consumer.synchronize()
        seen.append(int(copy.min()))
        cupy.cuda.runtime.deviceSynchronize()
    return seen


def test_a_consumers_stream_waits():
    assert run_ranks(1, _consumer) == [[3, 3]]  # not told to wait, it saw the value from before


def _memory_goes_back_late(group):
    """Foreign memory is held until the stream that uses it has passed the moment it was dropped."""
    _ready()
    ours = cupy.cuda.Stream(non_blocking=True)
    memory = cupy.cuda.alloc(64 * 4)
    x = cupy.ndarray((64,), np.int32, memory)
    x.fill(9)
    out, other = cupy.zeros(64, np.int32), cupy.zeros(64, np.int32)
    cupy.cuda.runtime.deviceSynchronize()
    before = len(foreign.Guest._leaving)
    taken = take(group.device, Foreign(x), "x", dtypes=(dtypes.int32,), shape=(64,), stream=ours.ptr)
    address = x.data.ptr
    with ours:
        _fill(other, 1)
        out[...] = taken
    del taken, x, memory
    held = len(foreign.Guest._leaving) - before
    again = cupy.ndarray(
        (64,), np.int32, cupy.cuda.alloc(64 * 4)
    )  # of the same pool and size, on another stream
    reused = again.data.ptr == address
    again.fill(-1)
    ours.synchronize()
    asarray(Foreign(cupy.zeros(4, np.int32)))  # dropped at once: its sweep finds the first one done
    cupy.cuda.runtime.deviceSynchronize()
    asarray(Foreign(cupy.zeros(4, np.int32)))
    return held, reused, int(out.min()), len(foreign.Guest._leaving) - before


def test_foreign_memory_goes_back_when_the_stream_has_passed():
    held, reused, value, left = run_ranks(1, _memory_goes_back_late)[0]
    assert (held, reused, value) == (1, False, 9)
    assert left <= 1


def _allocators(group):
    """Arrays of CuPy's other allocators, and of memory that was mapped by hand, are taken as they lie."""
    device, places = group.device, []
    mapped = SymmetricMemory(group, 4096)
    x = mapped.array(0, (64,), np.int32)
    places.append(take(device, x, "x", dtypes=(dtypes.int32,), shape=(64,)) is x)
    places.append(asarray(to_dlpack(x)).data.ptr == x.data.ptr)
    del x
    mapped.close()
    for allocator in (cupy.cuda.MemoryAsyncPool().malloc, cupy.cuda.malloc_managed):
        with cupy.cuda.using_allocator(allocator):
            x = cupy.arange(64, dtype=np.int32)
        for given in (x, Foreign(x)):
            got = take(device, given, "x", dtypes=(dtypes.int32,), shape=(64,))
            places.append(got.data.ptr == x.data.ptr and int(got[5]) == 5)
    return places


def test_any_allocator():
    assert run_ranks(1, _allocators) == [[True] * 6]


def _host_arrays(group):
    with pytest.raises(ValueError, match=r"x: expected an array on cuda:\d, got numpy.ndarray on cpu"):
        take(group.device, np.zeros(8, np.int32), "x", dtypes=(dtypes.int32,), shape=(8,))
    foreign = Foreign(np.zeros(8, np.int32))
    with pytest.raises(ValueError, match=r"x: expected an array on cuda:\d, got .*Foreign on cpu"):
        take(group.device, foreign, "x", dtypes=(dtypes.int32,), shape=(8,))


def test_host_arrays_are_refused_on_a_gpu():
    run_ranks(1, _host_arrays)
