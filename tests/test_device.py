"""The parts of a Device that its users build on, on whatever device the tests run on."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from ranks import on_gpus, run_ranks

from epcomm.runtime import args


def arrays(group):
    device = group.device
    xp, handle = device.xp, device.handle(device.current_stream())
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int64):
        zeros = device.zeros((3, 5), dtype)
        assert isinstance(zeros, xp.ndarray) and zeros.dtype == dtype and device.pointer(zeros) % 16 == 0
        assert not device.to_host(zeros).astype(np.float32).any()
        assert device.empty((0, 4), dtype).shape == (0, 4)
    source = xp.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (source, source[:, ::2], source.T, source[1:1]):
        target = device.empty(view.shape, np.int32)
        device.copy(target, view, handle)
        device.synchronize(handle)
        assert np.array_equal(device.to_host(target), device.to_host(view))
    assert device.capturing(handle) is False


def test_arrays_and_copies():
    run_ranks(1, arrays)


class Owner:
    pass


def foreign(group):
    device = group.device
    base = device.zeros((8, 4), np.int32)
    owner = Owner()
    gone = weakref.ref(owner)
    view = device.wrap(device.pointer(base) + 16, (7, 4), np.int32, owner)[1:]
    del owner
    gc.collect()
    assert gone() is not None
    view[0, 2] = 9
    assert device.to_host(base)[2, 2] == 9
    del view
    gc.collect()
    assert gone() is None


def test_an_array_over_foreign_memory_keeps_its_owner():
    run_ranks(1, foreign)


def host_memory(group):
    device = group.device
    handle = device.handle(device.current_stream())
    memory = device.host_visible(100)
    assert memory.view.shape == (100,) and not memory.view.any()
    seen = device.wrap(memory.pointer, (25,), np.int32, memory)
    device.copy(seen, device.xp.arange(25, dtype=np.int32), handle)  # the device writes
    device.synchronize(handle)
    assert memory.view.view(np.int32).tolist() == list(range(25))
    memory.view.view(np.int32)[3] = 77  # the host writes
    assert int(device.to_host(seen)[3]) == 77
    record = args.ErrorRecord.from_buffer(memory.view)
    assert record.state == 0


def test_host_and_device_see_the_same_memory():
    run_ranks(1, host_memory)


def refusals(group):
    device = group.device
    for keywords, message in [
        (dict(name="despatch"), "no kernel is called 'despatch'"),
        (dict(shared=device.max_shared + 1), "bytes of shared memory, a block has at most"),
    ]:
        keywords = dict(name="dispatch", grid=1, block=32, shared=0) | keywords
        with pytest.raises(ValueError, match=message):
            device.launcher(keywords.pop("name"), args.DispatchArgs(), **keywords)


def test_what_a_launcher_refuses():
    run_ranks(1, refusals)


def too_many_blocks(group):
    device = group.device
    shape = dict(topk=2, row_bytes=256, ranks=1)
    keywords = dict(block=1024, shared=device.max_shared, shape=shape)
    device.launcher("dispatch", args.DispatchArgs(), grid=device.num_sms, **keywords)
    with pytest.raises(ValueError, match=f"only {device.num_sms} run at once on {device}"):
        device.launcher("dispatch", args.DispatchArgs(), grid=device.num_sms + 1, **keywords)


@pytest.mark.skipif(not on_gpus(), reason="the CPU runs any number of blocks at once")
def test_blocks_that_cannot_all_run_at_once_are_refused():
    run_ranks(1, too_many_blocks)


def test_gpus_before_hopper_are_refused(monkeypatch):
    cuda = pytest.importorskip("epcomm.runtime.cuda")

    class Ampere:
        attributes = {}
        compute_capability = "80"

        def __init__(self, index):
            pass

    monkeypatch.setattr(cuda.cupy.cuda, "Device", Ampere)
    monkeypatch.setattr(cuda.runtime, "getDeviceProperties", lambda index: {"name": b"A100"})
    with pytest.raises(ValueError, match=r"cuda:3 \(A100\) has compute capability 8.0; the kernels need 9.0"):
        cuda.CudaDevice(3)
