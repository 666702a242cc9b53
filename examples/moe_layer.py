"""A MoE layer that really computes, forward and backward, against the same layer on one rank in float64.

    python -m mpi_launch -n 2 examples/moe_layer.py

The layer is in examples/moe/layer.py. The router is skewed, so each step copies experts to other ranks, and
their gradients back. Prints relative errors, ||got - wanted|| / ||wanted||, of the result and of all
gradients; exits with 1 if one is too large: above 1e-5 in float32 and 1e-2 in bfloat16, which keeps 8 bits.
"""

import sys

import numpy as np
from moe import reference
from moe.layer import MoELayer

import epcomm

TOKENS, HIDDEN, INNER, TOPK = 128, 64, 96, 4
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def inputs(rank, num_tokens):
    """x and grad_out of a rank, [num_tokens, H] float32."""
    rng = np.random.default_rng([1, rank])
    return rng.standard_normal((2, num_tokens, HIDDEN), np.float32)


def parameters(num_experts):
    """Router, gate, up and down of all experts, float32. Logits of low ids vary most: these win often."""
    rng = np.random.default_rng(2)
    spread = 0.3 / np.sqrt(1 + np.arange(num_experts, dtype=np.float32))
    router = rng.standard_normal((HIDDEN, num_experts), np.float32) * spread
    shapes = [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
    return router, *(rng.standard_normal((num_experts, *shape), np.float32) / 12 for shape in shapes)


def errors(group, dtype):
    """Relative errors of one step by name, and how many experts were copied."""
    num_experts = 8 * group.size
    tokens = [max(0, TOKENS - 19 * rank) for rank in range(group.size)]  # each rank has its own number
    shape = {"num_tokens": TOKENS, "hidden": HIDDEN, "num_topk": TOPK, "num_experts": num_experts}
    with (
        epcomm.Buffer(group, **shape, dtype=dtype, token_padding=16) as buffer,
        MoELayer(buffer, INNER) as layer,
    ):
        xp = buffer.xp
        own = slice(group.rank * buffer.experts_per_rank, (group.rank + 1) * buffer.experts_per_rank)
        router, *weights = parameters(num_experts)
        weights = [each.astype(buffer.dtype) for each in weights]
        layer.router = xp.asarray(router)
        for pool, each in zip(layer.weights, weights, strict=True):
            pool.local[...] = xp.asarray(each[own])
        x, grad_out = (each.astype(buffer.dtype) for each in inputs(group.rank, tokens[group.rank]))

        out, saved = layer.forward(xp.asarray(x))
        grad_x, grad_router = layer.backward(saved, xp.asarray(grad_out))
        buffer.check()  # raises what went wrong on the device

        to_host = group.device.to_host
        topk_idx, plan = saved.topk_idx, saved.rows.plan
        every = group.comm.allgather((x, to_host(topk_idx), grad_out, to_host(grad_router)))
        x, topk_idx, grad_out = (np.concatenate(each) for each in list(zip(*every, strict=True))[:3])
        wanted = reference.forward_backward(x, topk_idx, router, *weights, grad_out)
        first = sum(tokens[: group.rank])
        mine = slice(first, first + tokens[group.rank])
        pairs = {"out": (out, wanted["out"][mine]), "x": (grad_x, wanted["x"][mine])}
        pairs |= {
            name: (pool.local, wanted[name][own])
            for name, pool in zip(("gate", "up", "down"), layer.grads, strict=True)
        }
        found = {name: reference.relative_error(to_host(got), want) for name, (got, want) in pairs.items()}
        found["router"] = reference.relative_error(sum(each[3] for each in every), wanted["router"])
        return found, int((plan.experts_to_copy >= 0).sum())


def main():
    with epcomm.Group() as group:
        worst = {}
        for dtype in TOLERANCE:
            found, copied = errors(group, dtype)
            ranks = group.comm.allgather(found)
            found = {name: max(each[name] for each in ranks) for name in found}
            worst[dtype] = max(found.values())
            if group.rank == 0:
                figures = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
                print(f"{dtype} on {group.size} x {group.device.kind}, {copied} experts copied: {figures}")
        wrong = [dtype for dtype, error in worst.items() if not error <= TOLERANCE[dtype]]
        if group.rank == 0:
            figures = ", ".join(f"{error:.1e} in {dtype}" for dtype, error in worst.items())
            print(f"{'wrong' if wrong else 'OK'}: largest relative errors {figures}", flush=True)
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
