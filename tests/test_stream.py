"""Streams: resolution, the chain of calls and events, against a model of CUDA's streams."""

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import epcomm.stream as streams
from epcomm.errors import EpcommError
from epcomm.runtime.cpu import CpuDevice
from epcomm.stream import CallOrder, Event, follow, order_of, resolve

STEPS = ["object", "number", "fresh", "reuse", "capture"]


class Model:
    """CUDA's promises on streams and events: a stream's state is the set of calls that it has waited for."""

    def __init__(self):
        self.state = {0: set(), 2: set()}
        self.capturing = set()
        self.calls = []  # eager ones
        self.driver_calls = 0
        self.handles = iter(range(100, 10000))

    def create(self, handle=None):
        handle = next(self.handles) if handle is None else handle
        self.state[handle] = set()
        return handle

    def destroy(self, handle):
        del self.state[handle]

    def launch(self, handle):
        """A cross-rank kernel; asserts that all eager ones before it are over when it runs."""
        if handle in self.capturing:
            return
        assert set(self.calls) <= self.state[handle]
        self.calls.append(len(self.calls))
        self.state[handle].add(self.calls[-1])

    # what stream._Cuda offers
    def event(self, device):
        return SimpleNamespace(seen=None, captured=False)

    def record(self, device, event, handle):
        self.driver_calls += 1
        event.seen, event.captured = set(self.state[handle]), handle in self.capturing

    def wait(self, device, handle, event):
        self.driver_calls += 1
        assert event.captured == (handle in self.capturing), "a wait into or out of a capture"
        self.state[handle] |= event.seen

    def synchronize(self, event):
        assert not event.captured

    def stream(self, device):
        return Stream(self)


class Stream:
    """A stream object that destroys its stream when it is collected, as CuPy's do."""

    def __init__(self, model, handle=None, device_id=0):
        self.model, self.handle, self.device_id = model, model.create(handle), device_id

    def __cuda_stream__(self):
        return 0, self.handle

    def __del__(self):
        self.model.destroy(self.handle)


class Gpu:
    kind, index = "cuda", 0

    def __init__(self, model):
        self.model = model
        self.current = None

    def __str__(self):
        return "cuda:0"

    def current_stream(self):
        return self.current

    def handle(self, stream):
        return stream.handle

    def capturing(self, handle):
        self.model.driver_calls += 1
        return handle in self.model.capturing


@pytest.fixture
def gpu(monkeypatch):
    model = Model()
    monkeypatch.setattr(streams, "_cuda", model)
    monkeypatch.setattr(streams, "_resolved", threading.local())  # handles of the last model
    return Gpu(model)


def call(order, gpu, stream):
    handle = resolve(gpu, stream)
    with order.call(gpu, handle):
        gpu.model.launch(handle)
    return handle


def test_one_stream_costs_no_driver_call(gpu):
    order, stream = CallOrder(), Stream(gpu.model)
    call(order, gpu, stream)
    before = gpu.model.driver_calls
    for _ in range(10):
        call(order, gpu, stream)
    assert gpu.model.driver_calls == before
    gpu.current = stream
    call(order, gpu, None)
    assert gpu.model.driver_calls == before


def test_calls_on_several_streams_are_chained(gpu):
    order, a, b = CallOrder(), Stream(gpu.model), Stream(gpu.model)
    for stream in (a, b, 0, b, 1, a, order.communication_stream(gpu), b, 2, a, 2, 2):
        call(order, gpu, stream)


def test_a_stream_that_its_caller_drops_stays_until_the_next_call(gpu):
    order, other = CallOrder(), Stream(gpu.model)
    handle = call(order, gpu, Stream(gpu.model))
    resolve(gpu, other)  # the order alone keeps the dropped stream
    assert handle in gpu.model.state
    call(order, gpu, other)
    assert handle not in gpu.model.state


def test_a_destroyed_stream_known_by_number(gpu):
    order = CallOrder()
    handle = call(order, gpu, gpu.model.create())
    gpu.model.destroy(handle)
    call(order, gpu, Stream(gpu.model))
    call(order, gpu, handle := gpu.model.create())
    gpu.model.destroy(handle)
    gpu.model.create(handle)  # a new stream of the same number, which has waited for nothing
    call(order, gpu, handle)


def test_external_stream_objects_own_nothing(gpu):
    class ExternalStream(Stream):
        def __del__(self):
            pass

    order = CallOrder()
    handle = call(order, gpu, ExternalStream(gpu.model))
    gpu.model.destroy(handle)
    call(order, gpu, Stream(gpu.model))


def test_per_thread_streams_of_two_threads(gpu):
    order = CallOrder()
    model = gpu.model
    call(order, gpu, 2)
    here, model.state[2] = model.state[2], set()  # in the other thread, handle 2 is another stream
    thread = threading.Thread(target=call, args=(order, gpu, 2))
    thread.start()
    thread.join()
    assert len(model.calls) == 2
    model.state[2] = here
    call(order, gpu, 2)


def test_nothing_is_chained_into_or_out_of_a_capture(gpu):
    order, a, b, c = CallOrder(), *(Stream(gpu.model) for _ in range(3))
    call(order, gpu, a)
    gpu.model.capturing.add(b.handle)
    call(order, gpu, b)
    assert not gpu.model.state[b.handle]
    call(order, gpu, c)  # waits for a, not for b
    gpu.model.capturing.discard(b.handle)
    gpu.model.capturing.add(c.handle)  # the stream of the last call: nothing can be recorded there now
    handle = resolve(gpu, a)
    with order.call(gpu, handle):
        pass
    assert 1 not in gpu.model.state[a.handle]


def test_a_call_that_fails_on_the_host_keeps_the_chain(gpu):
    order, a, b, c = CallOrder(), *(Stream(gpu.model) for _ in range(3))
    call(order, gpu, a)
    handle = resolve(gpu, b)
    with pytest.raises(KeyError), order.call(gpu, handle):
        raise KeyError
    call(order, gpu, c)
    call(order, gpu, a)
    bad = 77  # no such stream
    with pytest.raises(KeyError, match="77"), order.call(gpu, bad):
        raise AssertionError("not reached: entering fails")
    thread = threading.Thread(target=call, args=(order, gpu, b), daemon=True)  # the lock is free again
    thread.start()
    thread.join(5)
    assert len(gpu.model.calls) == 4


def test_synchronizing_waits_for_every_call_so_far(gpu):
    order, a, waited = CallOrder(), Stream(gpu.model), []
    gpu.model.synchronize = lambda event: waited.append(event.seen)
    order.synchronize(gpu)
    assert not waited
    number = gpu.model.create()
    for stream in (a, lambda: Stream(gpu.model), 0, number, order.communication_stream(gpu), a, 2):
        call(order, gpu, stream() if callable(stream) else stream)  # some are dropped behind their call
        if stream == number:
            gpu.model.destroy(number)
        order.synchronize(gpu)
        assert waited[-1] == set(gpu.model.calls)
    call(order, gpu, a)
    gpu.model.capturing.add(a.handle)
    with pytest.raises(EpcommError, match="end the capture first"):
        order.synchronize(gpu)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3))))
def test_any_sequence_of_calls_is_in_order(steps):
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_cuda", model)
        patch.setattr(streams, "_resolved", threading.local())
        gpu, order = Gpu(model), CallOrder()
        objects = [Stream(model) for _ in range(4)]
        numbers = [model.create() for _ in range(4)]
        for what, which in steps:
            if what == "object":
                call(order, gpu, objects[which])
            elif what == "number":
                call(order, gpu, numbers[which])
            elif what == "fresh":
                call(order, gpu, Stream(model))
            elif what == "reuse":
                model.destroy(numbers[which])
                model.create(numbers[which])
            else:
                handle = model.create()
                model.capturing.add(handle)
                call(order, gpu, handle)
                model.capturing.discard(handle)


def test_event(gpu):
    problems = []

    def check():
        if problems:
            raise EpcommError(problems[0])

    a, b = Stream(gpu.model), Stream(gpu.model)
    gpu.model.launch(a.handle)
    event = Event(gpu, a.handle, [check])
    event.wait(b)
    event.synchronize()
    gpu.model.launch(b.handle)  # asserts that b waited
    problems.append("rank 1 is late")
    for method in (event.wait, event.synchronize):
        gpu.current = b
        with pytest.raises(EpcommError, match="rank 1 is late"):
            method()


def test_event_and_capture(gpu):
    a, b = Stream(gpu.model), Stream(gpu.model)
    eager = Event(gpu, a.handle)
    gpu.model.capturing.add(a.handle)
    captured = Event(gpu, a.handle)
    with pytest.raises(EpcommError, match="inside a graph capture"):
        eager.wait(a)
    with pytest.raises(EpcommError, match="outside a graph capture"):
        captured.wait(b)
    with pytest.raises(EpcommError, match="was captured"):
        captured.synchronize()
    captured.wait(a)


def test_follow(gpu):
    a, b = Stream(gpu.model), Stream(gpu.model)
    gpu.model.launch(a.handle)
    follow(gpu, b.handle, a.handle)
    gpu.model.launch(b.handle)
    before = gpu.model.driver_calls
    follow(gpu, b.handle, b.handle)
    assert gpu.model.driver_calls == before


def test_communication_stream_is_one_a_device(gpu):
    order = CallOrder()
    assert order.communication_stream(gpu) == order.communication_stream(gpu)
    assert order_of(gpu) is order_of(Gpu(gpu.model))


def test_resolve(gpu):
    stream = Stream(gpu.model)
    gpu.current = stream
    torch_like = SimpleNamespace(cuda_stream=7)
    handles = [resolve(gpu, s) for s in (None, stream, torch_like, 0, 1, 2, 9)]
    assert handles == [stream.handle, stream.handle, 7, 0, 0, 2, 9]
    for wrong in (True, -1, "0", 1.5, object()):
        with pytest.raises(TypeError, match="stream"):
            resolve(gpu, wrong)
    with pytest.raises(ValueError, match="cuda:3"):
        resolve(gpu, Stream(gpu.model, device_id=3))


def test_cpu_streams():
    device = CpuDevice()
    assert [resolve(device, s) for s in (None, 0, device.current_stream())] == [0, 0, 0]
    for wrong in (5, False, "0", SimpleNamespace(cuda_stream=7)):
        with pytest.raises(TypeError, match="CPU"):
            resolve(device, wrong)
    order = order_of(device)
    assert order is not order_of(device)
    with order.call(device, 0):
        pass
    follow(device, 0, 0)
    assert order.communication_stream(device) == 0
    seen = []
    event = Event(device, 0, [lambda: seen.append(1)])
    event.wait()
    event.synchronize()
    assert seen == [1, 1]
