"""Constructors that fail on one rank raise on all, hold nothing, and leave the group as good as it was."""

import itertools
import os
import time

import numpy as np
import pytest
from ranks import run_ranks
from test_faults import SOON, TIMEOUT, good_call, settings

from epcomm import Buffer, EpcommError, ExpertPool, MoECommunicator
from epcomm.testing import run_threads


def broken(device, method, only):
    """Makes a method of the device fail; `only(args)` says for which calls."""
    original = getattr(device, method)

    def fail(*args, **kwargs):
        if only(args):
            raise MemoryError("it is broken")
        return original(*args, **kwargs)

    setattr(device, method, fail)
    return lambda: delattr(device, method)


def make(group, kind):
    if kind is MoECommunicator:
        return kind(group, num_experts=24, hidden_size=64, topk=4, max_tokens_per_rank=6)
    return kind(group, **settings())


def constructor_fails(group, kind, method, word):
    device, count = group.device, itertools.count()

    def only(args):
        return args[0] == word if isinstance(word, str) else next(count) == word

    mend = broken(device, method, only) if group.rank == 1 else lambda: None
    start = time.monotonic()
    with pytest.raises(EpcommError, match=f"{kind.__name__}: rank 1: MemoryError: it is broken"):
        make(group, kind)
    assert time.monotonic() - start < SOON + 1
    mend()
    make(group, kind).close()  # the group still works
    return True


@pytest.mark.parametrize(
    ("kind", "method", "word"),
    [(Buffer, "host_visible", 0), (Buffer, "synchronize", 0)]
    + [(Buffer, "zeros", call) for call in (0, 3, 6, 7)]
    + [
        (Buffer, "launcher", name)
        for name in ("plan", "dispatch", "combine", "prefetch", "reduce_grad", "meet")
    ]
    + [
        (MoECommunicator, "launcher", name)
        for name in ("low_latency_dispatch", "low_latency_combine", "meet")
    ],
)
def test_a_constructor_that_fails_on_one_rank_raises_on_all(kind, method, word):
    before = resources()
    assert all(run_threads(3, constructor_fails, kind, method, word, timeout=TIMEOUT + 3))
    assert resources() == before


def resources():
    """Descriptors, and mappings of shared memory."""
    with open("/proc/self/maps") as maps:
        return len(os.listdir("/proc/self/fd")), sum("memfd:epcomm" in line for line in maps)


def pool_fails(group, method, shape):
    with Buffer(group, **settings()) as buffer:
        mend = broken(group.device, method, lambda args: True) if group.rank == 1 and method else lambda: None
        with pytest.raises(
            (EpcommError, TypeError, ValueError), match="rank 1: .*(it is broken|shape|int|iterable)"
        ):
            ExpertPool(buffer, shape if group.rank == 1 else (4, 8), "float32")
        mend()
        pool = ExpertPool(buffer, np.int64(8), "float32")
        pool.close()
        good_call(group, buffer)
    return True


@pytest.mark.parametrize(
    ("method", "shape"), [("wrap", (4, 8)), (None, None), (None, (4, 1.5)), (None, (3,)), (None, (-4, 8))]
)
def test_a_pool_that_fails_on_one_rank_raises_on_all(method, shape):
    before = resources()
    assert all(run_threads(3, pool_fails, method, shape, timeout=TIMEOUT + 3))
    assert resources() == before


def pool_of_a_closed_buffer(group):
    buffer = Buffer(group, **settings())
    buffer.close()
    with pytest.raises(EpcommError, match="closed"):
        ExpertPool(buffer, (8,), "float32")


def test_a_pool_of_a_closed_buffer_is_refused():
    run_ranks(2, pool_of_a_closed_buffer)
