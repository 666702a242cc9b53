"""JAX arrays as input: shared without a copy, never written to; results are native arrays."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # GPU memory is for the ranks too

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import run_ranks

from epcomm import Buffer, asarray, dtypes, to_dlpack
from epcomm.arrays import giver, take
from epcomm.runtime.cpu import CpuDevice

CPU = CpuDevice()
HOST = jax.devices("cpu")[0]
NAMES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint8", "int32"]


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_comes_in_over_the_same_memory(name):
    x = jax.device_put(jnp.arange(1, 33).reshape(4, 8).astype(name), HOST)
    got = take(CPU, x, "x", dtypes=(dtypes.resolve(name),), shape=(None, 8))
    assert got.dtype == dtypes.resolve(x.dtype) and got.ctypes.data == x.unsafe_buffer_pointer()
    np.testing.assert_array_equal(got.view(np.uint8), np.asarray(x).view(np.uint8))
    assert asarray(x).ctypes.data == x.unsafe_buffer_pointer()


def test_jax_arrays_are_not_written_to():
    x = jnp.zeros((4, 8), jnp.float32, device=HOST)
    assert not asarray(x).flags.writeable
    with pytest.raises(ValueError, match="x: expected a writable array, got a read-only one"):
        take(CPU, x, "x", dtypes=(dtypes.float32,), shape=(4, 8), writable=True)
    assert giver(x) is None


def test_memory_outlives_the_jax_array():
    x = jnp.arange(1000.0, device=HOST)
    array = asarray(x)
    del x
    for _ in range(10):
        jnp.ones(1000, device=HOST).block_until_ready()  # would use the memory again
    np.testing.assert_array_equal(array, np.arange(1000.0))


@pytest.mark.parametrize("name", NAMES)
def test_jax_reads_what_we_give(name):
    array = CPU.empty((4, 8), dtypes.resolve(name))
    array[...] = np.arange(1, 33).reshape(4, 8)
    x = jax.dlpack.from_dlpack(to_dlpack(array))
    assert x.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(x).view(np.uint8), array.view(np.uint8))


def exchange(group):
    """Dispatch and combine with JAX inputs; what came back."""
    rng = np.random.default_rng(group.rank)
    on = HOST if group.device.kind == "cpu" else jax.devices("gpu")[group.device.index]
    x = jnp.asarray(rng.standard_normal((5, 16)), jnp.bfloat16, device=on)
    topk_idx = jnp.asarray(rng.integers(-1, 4, (5, 2)), jnp.int32, device=on)
    weights = jnp.asarray(rng.random((5, 2)), jnp.float32, device=on)
    with Buffer(group, num_tokens=5, hidden=16, num_topk=2, num_experts=4) as buffer:
        sent = buffer.dispatch(x, topk_idx, weights)
        assert type(sent.x) is buffer.xp.ndarray and type(sent.topk_weights) is buffer.xp.ndarray
        back = buffer.combine(
            jax.dlpack.from_dlpack(to_dlpack(sent.x)), sent.plan, row_weights=sent.topk_weights
        )
        buffer.check()
    sums, back_weights = (group.device.to_host(a) for a in (back.x, back.topk_weights))
    used = np.asarray(topk_idx) >= 0
    np.testing.assert_array_equal(back_weights, np.where(used, np.asarray(weights), 0))
    count = used.sum(1, keepdims=True).astype(np.float32)
    return np.abs(sums.astype(np.float32) - count * np.asarray(x, np.float32)).max()


def test_dispatch_and_combine():
    assert max(run_ranks(2, exchange)) < 0.05
