"""The exporter and importer of DLPack capsules, each against the other, numpy, and consumers made of
ctypes."""

import ctypes
import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

from epcomm import dtypes
from epcomm.runtime import _dlpack

ALL_DTYPES = list(dtypes.DLPACK_CODES)

api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_GetName.restype = ctypes.c_char_p
api.PyCapsule_GetName.argtypes = [ctypes.py_object]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Array(np.ndarray):
    """An array that can be referred to weakly, to see when it goes."""


def tracked(shape=(4, 6), dtype=np.float32):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype).view(Array)
    return array, weakref.ref(array)


def export(array, dtype=None):
    return _dlpack.Export(array, *dtypes.DLPACK_CODES[dtype or array.dtype])


class OldProducer:
    """A producer from before max_version: unversioned capsules only."""

    def __init__(self, array):
        self.export = export(array)

    def __dlpack__(self, stream=None):
        return self.export.__dlpack__(stream=stream)


class Capsule:
    """A producer of one given capsule."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, stream=None, max_version=None):
        return self.capsule


def view(memory, dtype):
    return np.ndarray(memory.shape, dtype, memory, -memory.lowest, memory.strides)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("producer", [export, OldProducer])
def test_round_trip_shares_memory(producer, dtype):
    array = np.arange(24, dtype=np.float32).reshape(4, 6).astype(dtype)
    memory = _dlpack.load(producer(array))
    assert memory.code == dtypes.DLPACK_CODES[dtype] and memory.device == (1, 0)
    assert memory.pointer == array.ctypes.data and memory.shape == (4, 6) and memory.strides is None
    assert memory.read_only is (False if producer is export else None)
    again = view(memory, dtype)
    again[1, 2] = 1
    assert array[1, 2] == 1


@pytest.mark.parametrize(
    "shaped",
    [
        lambda a: a.T,
        lambda a: a[1:, ::2],
        lambda a: a[::-1, ::-1],
        lambda a: a[::-2, 3:],
        lambda a: a[:, 2:3],
        lambda a: np.broadcast_to(a[:1], (3, 6)),
        lambda a: a[:0],
        lambda a: a[2:3, 3].reshape(()),
        lambda a: a.reshape(2, 2, 3, 2).transpose(2, 0, 3, 1),
    ],
)
def test_any_strides(shaped):
    source = np.arange(24, dtype=np.int32).reshape(4, 6)
    array = np.asarray(shaped(source))
    memory = _dlpack.load(export(array))
    got = view(memory, np.int32)
    assert got.shape == array.shape
    np.testing.assert_array_equal(got, array)
    assert (memory.strides is None) == array.flags.c_contiguous
    if array.size:
        first = memory.pointer + memory.lowest
        assert source.ctypes.data <= first and first + memory.nbytes <= source.ctypes.data + source.nbytes


def test_strides_that_dlpack_cannot_say():
    array = np.zeros(8, np.dtype([("a", np.int16), ("b", np.float32)]))["b"]
    with pytest.raises(BufferError, match="multiples of 4 bytes"):
        export(array).__dlpack__()


def test_numpy_consumes_what_it_knows():
    array = np.arange(6, dtype=np.float32)
    got = np.from_dlpack(export(array))
    assert got.ctypes.data == array.ctypes.data


@pytest.mark.parametrize(
    "version, name", [(None, b"dltensor"), ((0, 8), b"dltensor"), ((1, 0), b"dltensor_versioned")]
)
def test_capsule_of_the_version_asked_for(version, name):
    array, _ = tracked()
    capsule = export(array).__dlpack__(max_version=version)
    assert api.PyCapsule_GetName(capsule) == name
    memory = _dlpack.load(Capsule(capsule))
    assert memory.pointer == array.ctypes.data
    assert api.PyCapsule_GetName(capsule) == b"used_" + name
    with pytest.raises(ValueError, match="incorrect name"):
        _dlpack.load(Capsule(capsule))


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_capsule_that_nobody_consumes_lets_go(version):
    array, gone = tracked()
    capsule = export(array).__dlpack__(max_version=version)
    del array
    assert gone() is not None
    del capsule
    assert gone() is None


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_deleted_in_any_order(version):
    for order in itertools.permutations(["array", "export", "capsule", "memory", "view"]):
        array, gone = tracked()
        held = {"array": array, "export": export(array)}
        held["capsule"] = held["export"].__dlpack__(max_version=version)
        held["memory"] = _dlpack.load(Capsule(held["capsule"]))
        held["view"] = view(held["memory"], np.float32)
        del array
        for name in order:
            if "view" in held:
                np.testing.assert_array_equal(held["view"], np.arange(24).reshape(4, 6))
            del held[name]
            assert (gone() is None) == (set(held) <= {"capsule"}), (
                order
            )  # a consumed capsule owns nothing any more


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_refcounts_come_back(version):
    array, _ = tracked()
    before = sys.getrefcount(array)
    for _ in range(100):
        memory = _dlpack.load(Capsule(export(array).__dlpack__(max_version=version)))
        view(memory, np.float32)
        export(array).__dlpack__(max_version=version)
    del memory
    assert sys.getrefcount(array) == before


def test_read_only():
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    memory = _dlpack.load(export(array))
    assert memory.read_only is True
    assert not view(memory, np.float32).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        export(array).__dlpack__()


def test_copy_and_device_requests():
    array = np.arange(4, dtype=np.float32)
    copied = _dlpack.load(Capsule(export(array).__dlpack__(max_version=(1, 0), copy=True)))
    assert copied.pointer != array.ctypes.data
    np.testing.assert_array_equal(view(copied, np.float32), array)
    same = _dlpack.load(Capsule(export(array).__dlpack__(max_version=(1, 0), copy=False, dl_device=(1, 0))))
    assert same.pointer == array.ctypes.data
    with pytest.raises(BufferError, match=r"\(2, 0\)"):
        export(array).__dlpack__(dl_device=(2, 0))


def test_stream_rules_of_the_array_api():
    asked = []
    producer = _dlpack.Export(np.zeros(4, np.float32), 2, 32, asked.append)
    for stream in (None, 1, 2, 0x7F0012345678, -1):
        producer.__dlpack__(stream=stream)
    assert asked == [1, 1, 2, 0x7F0012345678]
    with pytest.raises(ValueError, match="stream"):  # 0 is ambiguous
        producer.__dlpack__(stream=0)
    with pytest.raises(TypeError, match="stream"):
        producer.__dlpack__(stream="default")


def test_producer_is_told_our_stream():
    told = []

    class Producer(Capsule):
        def __dlpack__(self, stream=None, max_version=None):
            told.append((stream, max_version))
            return super().__dlpack__()

    for stream in (None, 0, 1, 77):
        _dlpack.load(Producer(export(np.zeros(4, np.float32)).__dlpack__()), stream)
    assert told == [
        (None, (1, 1)),
        (1, (1, 1)),
        (1, (1, 1)),
        (77, (1, 1)),
    ]  # the default stream is 1 in the protocol


def test_unknown_major_version_is_refused_and_given_back():
    array, gone = tracked()
    capsule = export(array).__dlpack__(max_version=(1, 0))
    ctypes.c_uint32.from_address(api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")).value = 2
    del array
    with pytest.raises(BufferError, match="version 2"):
        _dlpack.load(Capsule(capsule))
    gc.collect()
    assert gone() is None


def test_odd_element_types_are_refused():
    for offset, value in ((21, 4), (22, 2)):  # bits, lanes in DLManagedTensor
        capsule = export(np.zeros(4, np.float32)).__dlpack__()
        kind = ctypes.c_uint8 if offset == 21 else ctypes.c_uint16
        kind.from_address(api.PyCapsule_GetPointer(capsule, b"dltensor") + offset).value = value
        with pytest.raises(BufferError, match="whole bytes"):
            _dlpack.load(Capsule(capsule))


def consume_by_hand(producer):
    """(address, deleter) of a versioned tensor, taken over from its capsule as a C consumer does."""
    capsule = producer.__dlpack__(max_version=(1, 0))
    address = api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
    api.PyCapsule_SetName(capsule, b"used_dltensor_versioned")
    return address, ctypes.c_void_p.from_address(address + 16).value


def test_deleter_from_a_thread_without_the_gil():
    array, gone = tracked()
    address, deleter = consume_by_hand(export(array))
    del array
    assert gone() is not None
    delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)  # ctypes releases the GIL around the call
    thread = threading.Thread(target=delete, args=(address,))
    thread.start()
    thread.join()
    assert gone() is None


def test_interpreter_exit():
    """Tensors that outlive the interpreter, in Python's hands and in C's, end without a crash."""
    script = """
        import ctypes, sys, test_dlpack as t
        import numpy as np
        from epcomm.runtime import _dlpack
        array = np.arange(8, dtype=np.float32)
        kept = [t.export(array), t.export(array).__dlpack__(), _dlpack.load(t.export(array))]
        kept.append(kept)  # a cycle: collected, if at all, while the interpreter ends
        sys.kept = kept    # and one that module teardown does not reach early
        address, deleter = t.consume_by_hand(t.export(array))
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit.argtypes = [ctypes.c_void_p] * 3
        assert libc.__cxa_atexit(deleter, address, None) == 0  # runs after Py_Finalize
        print("reached the end")
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(script)],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reached the end\n"


def test_pointer():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for a in (array, array[1:], array.T, array.astype(dtypes.bfloat16)):
        assert _dlpack.pointer(a) == a.ctypes.data
