"""What goes through the door for arrays, what is copied there, and what is refused in which words."""

import time
import timeit
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from epcomm import asarray, dtypes, foreign, stream, to_dlpack
from epcomm.arrays import giver, take
from epcomm.runtime import _dlpack
from epcomm.runtime.cpu import CpuDevice

CPU = CpuDevice()
BF16, F32, E4M3, E5M2 = dtypes.bfloat16, dtypes.float32, dtypes.float8_e4m3fn, dtypes.float8_e5m2


def take_rows(x, dtypes=(BF16, F32), shape=(None, 8), **kw):
    return take(CPU, x, "x", dtypes=dtypes, shape=shape, **kw)


def rows(num_rows=4, dtype=BF16):
    array = CPU.empty((num_rows, 8), dtype)
    array[...] = np.arange(num_rows * 8).reshape(num_rows, 8)
    return array


class Foreign:
    """Another framework's array: DLPack and nothing else."""

    def __init__(self, array, place=None, version=True):
        self.producer = _dlpack.Export(array, *dtypes.DLPACK_CODES[array.dtype])
        self.place = place
        self.dtype = array.dtype
        self.version = version

    def __dlpack_device__(self):
        return self.place or self.producer.__dlpack_device__()

    def __dlpack__(self, stream=None, max_version=None):
        assert self.place is None, "asked for memory on a device where it cannot be used"
        return self.producer.__dlpack__(stream=stream, max_version=max_version if self.version else None)


# In
# --


def test_native_arrays_pass_as_they_are():
    for x in (rows(), rows(0), rows(3, F32)):
        assert take_rows(x) is x
        assert take_rows(x, shape=x.shape) is x
        assert take_rows(x, writable=True) is x


@pytest.mark.parametrize("dtype", list(dtypes.DLPACK_CODES), ids=lambda d: d.name)
def test_foreign_memory_is_shared_not_copied(dtype):
    source = rows(dtype=dtype)
    got = take_rows(Foreign(source), dtypes=(dtype,))
    assert got.ctypes.data == source.ctypes.data and got.dtype == dtype
    np.testing.assert_array_equal(got.view(np.uint8), source.view(np.uint8))


@pytest.mark.parametrize(
    "made",
    [
        lambda a: a[:, ::2],
        lambda a: a[::2, :8],
        lambda a: a[:, 8:0:-1],
        lambda a: np.asfortranarray(a[:, :8]),
        lambda a: a.reshape(-1)[1:17].reshape(2, 8),  # in C order, 2 or 4 bytes off
    ],
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("wrap", [lambda a: a, Foreign], ids=["native", "foreign"])
def test_strided_and_misaligned_input_is_copied(made, dtype, wrap):
    base = CPU.empty((6, 16), dtype)
    base[...] = np.arange(96).reshape(6, 16)
    x = made(base)
    got = take_rows(wrap(x))
    assert not np.shares_memory(got.view(np.uint8), base.view(np.uint8))
    assert got.flags.c_contiguous and got.ctypes.data % 16 == 0
    np.testing.assert_array_equal(got, x)
    with pytest.raises(
        ValueError, match=r"x: expected C order from an address that is a multiple of 16 bytes"
    ):
        take_rows(wrap(x), writable=True)


def test_read_only_arrays_are_read_and_never_written():
    x = rows()
    x.flags.writeable = False
    assert take_rows(x) is x
    assert not take_rows(Foreign(x)).flags.writeable
    for given in (
        x,
        Foreign(x),
        Foreign(rows(), version=False),
    ):  # an unversioned capsule cannot say that it may be written to
        take_rows(given)
        with pytest.raises(ValueError, match="x: expected a writable array, got a read-only one"):
            take_rows(given, writable=True)
    y = rows()
    take_rows(Foreign(y), writable=True)[0, 0] = 55
    assert y[0, 0] == 55


@pytest.mark.parametrize("wrap", [lambda a: a, Foreign], ids=["native", "foreign"])
def test_refusals_name_argument_expected_and_got(wrap):
    for shape, wanted, text in [
        ((4, 8), (None, 16), r"x: expected shape \(any, 16\), got \(4, 8\)"),
        ((4, 8), (3, 8), r"x: expected shape \(3, 8\), got \(4, 8\)"),
        ((4, 8), (None,), r"x: expected shape \(any,\), got \(4, 8\)"),
        ((32,), (None, 8), r"x: expected shape \(any, 8\), got \(32,\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            take_rows(wrap(np.zeros(shape, BF16)), shape=wanted)
    with pytest.raises(TypeError, match="x: expected dtype bfloat16 or float32, got int32"):
        take_rows(wrap(np.zeros((4, 8), np.int32)))
    with pytest.raises(TypeError, match="x: expected dtype float8_e4m3fn, got float8_e5m2"):
        take_rows(wrap(np.zeros((4, 8), E5M2)), dtypes=(E4M3,))


def test_dtypes_that_epcomm_does_not_move():
    with pytest.raises(TypeError, match="x: expected dtype bfloat16 or float32, got float64"):
        take_rows(np.zeros((4, 8)))
    with pytest.raises(TypeError, match="x: expected dtype bfloat16 or float32, got >f4"):
        take_rows(np.zeros((4, 8), ">f4"))
    strange = Foreign(rows())
    strange.producer, strange.dtype = _dlpack.Export(np.zeros((4, 8)), 2, 64), "some.float64"
    with pytest.raises(TypeError, match="x: expected one of bfloat16, .*, got some.float64"):
        take_rows(strange)


@pytest.mark.parametrize("what", [[[1, 2]], 3.0, "rows", None, memoryview(b"12")])
def test_things_that_are_no_arrays(what):
    with pytest.raises(TypeError, match=f"x: expected an array, got builtins.{type(what).__name__}"):
        take_rows(what)


@pytest.mark.parametrize(
    "place, name", [((2, 1), "cuda:1"), ((13, 0), "cuda:0"), ((4, 2), "DLPack device 4:2")]
)
def test_arrays_elsewhere_are_refused_with_both_devices(place, name):
    with pytest.raises(ValueError, match=f"x: expected an array on cpu, got {__name__}.Foreign on {name}"):
        take_rows(Foreign(rows(), place))
    if name.startswith("DLPack"):
        with pytest.raises(
            ValueError, match=f"expected host or CUDA memory, got {__name__}.Foreign on {name}"
        ):
            asarray(Foreign(rows(), place))


def test_pinned_host_memory_is_host_memory():
    x = Foreign(rows())
    x.__class__ = type("Pinned", (Foreign,), {"__dlpack_device__": lambda self: (3, 0)})
    assert take_rows(x).shape == (4, 8)


def test_a_producer_that_cannot_share():
    class Refuses(Foreign):
        def __dlpack__(self, stream=None, max_version=None):
            raise BufferError("it is sparse")

    with pytest.raises(ValueError, match="x: .*Refuses does not share its memory: it is sparse"):
        take_rows(Refuses(rows()))


def test_native_arrays_cost_next_to_nothing():
    x = rows(64)
    kinds, shape = (BF16,), (None, 8)

    def call():
        take(CPU, x, "x", dtypes=kinds, shape=shape)

    best = min(timeit.repeat(call, number=2000, repeat=20, timer=time.thread_time)) / 2000
    assert best < 2e-6  # 0.4 us on an idle core


# On CUDA, as far as it goes without touching memory
# --------------------------------------------------


@pytest.fixture(scope="module")
def gpu():
    cupy = pytest.importorskip("cupy")
    return SimpleNamespace(kind="cuda", index=1, xp=cupy, __str__=lambda: "cuda:1")


def at(cupy, address, shape, dtype, index=1, strides=None):
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, index)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def test_cupy_arrays(gpu):
    x = at(gpu.xp, 1 << 40, (4, 8), BF16)
    assert take(gpu, x, "x", dtypes=(BF16,), shape=(None, 8)) is x
    with pytest.raises(ValueError, match="expected shape"):
        take(gpu, x, "x", dtypes=(BF16,), shape=(5, 8))
    with pytest.raises(ValueError, match="on cuda:0"):
        take(gpu, at(gpu.xp, 1 << 40, (4, 8), BF16, index=0), "x", dtypes=(BF16,), shape=(None, 8))
    for off in (at(gpu.xp, (1 << 40) + 8, (4, 8), BF16), at(gpu.xp, 1 << 40, (4, 8), BF16, strides=(2, 16))):
        with pytest.raises(ValueError, match="multiple of 16"):
            take(gpu, off, "x", dtypes=(BF16,), shape=(None, 8), writable=True)
    with pytest.raises(ValueError, match="got numpy.ndarray on cpu"):
        take(gpu, rows(), "x", dtypes=(BF16,), shape=(None, 8))


def test_fp8_is_bytes_on_cupy(gpu):
    bits = at(gpu.xp, 1 << 40, (4, 8), np.uint8)
    assert take(gpu, bits, "x", dtypes=(E4M3,), shape=(None, 8)) is bits
    with pytest.raises(TypeError, match="expected dtype bfloat16, got uint8"):
        take(gpu, bits, "x", dtypes=(BF16,), shape=(None, 8))
    producer = to_dlpack(bits, dtype="float8_e8m0fnu")
    assert producer.__dlpack_device__() == (2, 1)
    memory = _dlpack.load(
        SimpleNamespace(__dlpack__=lambda stream, max_version: producer.__dlpack__(stream=-1))
    )
    assert memory.code == (14, 8) and memory.pointer == 1 << 40 and memory.device == (2, 1)


# Out
# ---


def test_native_results_stay():
    assert giver(rows()) is None and giver(Foreign(rows())) is None


@pytest.mark.parametrize("dtype", list(dtypes.DLPACK_CODES), ids=lambda d: d.name)
def test_asarray_and_to_dlpack_share_pages(dtype):
    x = rows(dtype=dtype)
    assert asarray(x) is x
    there = to_dlpack(x)
    assert there.__dlpack_device__() == (1, 0)
    back = asarray(there)
    assert back.dtype == dtype and back.ctypes.data == x.ctypes.data
    x[0, 0] = 1
    assert back[0, 0] == 1


def test_to_dlpack_names_the_elements_of_bytes():
    bits = np.array([0x38, 0xB8], np.uint8)
    np.testing.assert_array_equal(asarray(to_dlpack(bits, dtype="float8_e4m3fn")), np.array([1, -1], E4M3))
    np.testing.assert_array_equal(asarray(to_dlpack(bits, dtype=ml_dtypes.float8_e5m2)), bits.view(E5M2))
    for x, dtype in (
        (bits, "bfloat16"),
        (np.zeros(4, np.float32), "int32"),
        (np.zeros(4, E4M3), "float8_e5m2"),
    ):
        with pytest.raises(
            TypeError, match=f"dtype: expected {x.dtype.name}, which the array holds, got {dtype}"
        ):
            to_dlpack(x, dtype=dtype)
    with pytest.raises(TypeError, match="expected one of bfloat16"):
        to_dlpack(np.zeros(4))


def test_names_of_dtypes():
    other = type("dtype", (), {"__str__": lambda self: "torch.bfloat16"})()
    for given in ("bfloat16", BF16, ml_dtypes.bfloat16, other):
        assert dtypes.resolve(given) == BF16
    for given in ("float64", "bf16", np.float64, ">f4", np.dtype(">f4"), 3, None):
        with pytest.raises(TypeError, match="dtype: expected one of bfloat16, float16, .* got"):
            dtypes.resolve(given)


def test_order_of_streams(monkeypatch):
    """One stream waits for an event of the other, unless they are the same one; 0 and 1 are."""
    calls = []

    class Recorder:
        def event(self, device):
            return f"event of {device.index}"

        def record(self, device, event, handle):
            calls.append(("record", handle))

        def wait(self, device, handle, event):
            calls.append(("wait", handle, event))

    monkeypatch.setattr(stream, "_cuda", Recorder())
    foreign.order(3, 7, 9)
    assert calls == [("record", 7), ("wait", 9, "event of 3")]
    calls.clear()
    for same in ((7, 7), (0, 1), (1, 0), (1, 1)):
        foreign.order(3, *same)
    assert calls == []
    foreign.order(3, 1, 7)
    foreign.order(3, 7, 1)
    assert [call[:2] for call in calls] == [("record", 0), ("wait", 7), ("record", 7), ("wait", 0)]


def test_exports_of_a_gpu_wait_on_the_consumers_stream(gpu, monkeypatch):
    ordered = []
    monkeypatch.setattr(gpu.xp.cuda, "get_current_stream", lambda index: SimpleNamespace(ptr=70 + index))
    monkeypatch.setattr(foreign, "order", lambda *streams: ordered.append(streams))
    producer = to_dlpack(at(gpu.xp, 1 << 40, (4, 8), F32))
    for consumer in (None, 1, 2, 55, -1):
        producer.__dlpack__(stream=consumer, max_version=(1, 0))
    assert ordered == [(1, 71, 1), (1, 71, 1), (1, 71, 2), (1, 71, 55)]
