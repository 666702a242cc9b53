"""JAX arrays as input: a router in JAX, rows and weights handed over without a copy, the result back in JAX.

    python -m mpi_launch -n 2 examples/jax_inputs.py

JAX's arrays must not change, so epcomm's results are CuPy or NumPy arrays; `from_dlpack` makes JAX arrays of
them, over the same memory. Not of results of zero-copy calls, nor of an `out=` that is used again: JAX relies
on content that stays.
"""

import jax
import jax.numpy as jnp

import epcomm

TOKENS, HIDDEN, TOPK = 64, 256, 2


@jax.jit
def router(x, w):
    topk_weights, topk_idx = jax.lax.top_k(jax.nn.softmax(x.astype(jnp.float32) @ w), TOPK)
    return topk_idx, topk_weights  # [s, K] int32, [s, K] float32


def main():
    with (
        epcomm.Group() as group,
        epcomm.Buffer(
            group, num_tokens=TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=4 * group.size
        ) as buffer,
        # JAX's arrays must lie on the group's device.
        jax.default_device(jax.local_devices(backend=group.device.kind)[group.device.index]),
    ):
        x = jax.random.normal(jax.random.key(group.rank), (TOKENS, HIDDEN), jnp.bfloat16)
        w = jax.random.normal(jax.random.key(99), (HIDDEN, buffer.num_experts))
        topk_idx, topk_weights = router(x, w)

        got = buffer.dispatch(x, topk_idx, topk_weights)
        rows = jax.dlpack.from_dlpack(epcomm.to_dlpack(got.x))
        row_weights = jax.dlpack.from_dlpack(epcomm.to_dlpack(got.topk_weights))
        y = (rows * row_weights[:, None]).astype(jnp.bfloat16)  # experts that do nothing but weigh
        back = jax.dlpack.from_dlpack(epcomm.to_dlpack(buffer.combine(y, got.plan).x))

        wanted = x * topk_weights.sum(axis=1, keepdims=True)
        buffer.check()
        assert jnp.allclose(back.astype(jnp.float32), wanted, rtol=0.02, atol=0.02)
        print(f"rank {group.rank} on {group.device}: {type(got.x).__module__} in between, JAX back, right")


if __name__ == "__main__":
    main()
