"""The order of calls and its events on a GPU."""

import pytest
from ranks import on_gpus, run_ranks

from epcomm.stream import Event, resolve

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not on_gpus(), reason="needs CUDA")


def _slow_writer():
    return cupy.RawKernel(
        r"""extern "C" __global__ void slow(int* x, int value, long long ns) {
            long long start, now;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
            do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < ns);
            *x = value;
        }""",
        "slow",
    )


def _order_on_a_gpu(group, kinds):
    """Slow writes of 0, 1, 2 ... on streams of the given kinds: only in order does the last one win."""
    runtime, device, order = cupy.cuda.runtime, group.device, group.order
    kernel, x = _slow_writer(), cupy.zeros(1, "int32")
    kernel((1,), (1,), (x, cupy.int32(0), cupy.int64(0)))
    runtime.deviceSynchronize()
    for number, kind in enumerate(kinds):
        raw = runtime.streamCreateWithFlags(runtime.streamNonBlocking) if kind == "raw" else None
        stream = {
            "object": lambda: cupy.cuda.Stream(non_blocking=True),
            "raw": lambda raw=raw: raw,
            "legacy": lambda: 0,
            "per-thread": lambda: 2,
            "communication": lambda: order.communication_stream(device),
        }[kind]()
        handle = resolve(device, stream)
        del stream
        with order.call(device, handle), cupy.cuda.ExternalStream(handle):
            duration = 1_000_000 * (len(kinds) - number)
            kernel((1,), (1,), (x, cupy.int32(number), cupy.int64(duration)))
        event = Event(device, handle)
        if raw is not None:
            runtime.streamDestroy(raw)
    event.synchronize()
    result = int(x[0])
    runtime.deviceSynchronize()
    return result, int(x[0])


def test_order_on_a_gpu():
    kinds = ["object", "raw", "object", "legacy", "raw", "per-thread", "communication", "object", "raw"]
    assert run_ranks(1, _order_on_a_gpu, kinds) == [(8, 8)]


def _capture_on_a_gpu(group):
    device, order = group.device, group.order
    kernel, x = _slow_writer(), cupy.zeros(1, "int32")
    eager, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)

    def launch(stream, value):
        handle = resolve(device, stream)
        with order.call(device, handle), cupy.cuda.ExternalStream(handle):
            kernel((1,), (1,), (x, cupy.int32(value), cupy.int64(1000)))
        return handle

    launch(eager, 1)
    other.begin_capture()
    launch(other, 2)
    captured = Event(device, other.ptr)
    captured.wait(other)
    graph = other.end_capture()
    launch(eager, 3)
    graph.launch(other)
    other.synchronize()
    eager.synchronize()
    return int(x[0])


def test_capture_on_a_gpu():
    assert run_ranks(1, _capture_on_a_gpu)[0] in (2, 3)
