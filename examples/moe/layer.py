"""A MoE layer spread over the ranks of a group, with its backward pass."""

from typing import NamedTuple

import epcomm

from . import experts, router


class Saved(NamedTuple):
    """What backward needs of forward. rows: the Dispatched; ends: the end of each of its segments, a list."""

    x: object
    topk_idx: object
    topk_weights: object
    rows: epcomm.Dispatched
    ends: list
    inner: dict


class MoELayer:
    """Top-k router and SwiGLU experts: out[t] = sum over k of w[t, k] * expert(topk_idx[t, k], x[t]).

    Every rank brings its own tokens and has E / R experts at home. Calls are collective.

    Args:
        buffer: the epcomm.Buffer; its hidden, num_topk, num_experts and dtype are the layer's.
        inner: inner size of an expert (H').

    Attributes:
        router: [H, E] float32, the same on all ranks; set it before the first step.
        weights: pools gate and up [H, H'], down [H', H]; write this rank's experts to `.local`.
        grads: float32 pools like them. After backward `.local` holds the gradients of this rank's experts,
            from the tokens of all ranks, added up until they are zeroed.
    """

    def __init__(self, buffer, inner):
        hidden = buffer.hidden
        shapes = [(hidden, inner), (hidden, inner), (inner, hidden)]
        self.buffer, self.router = buffer, None
        self.weights = [epcomm.ExpertPool(buffer, shape, buffer.dtype) for shape in shapes]
        self.grads = [epcomm.ExpertPool(buffer, shape, "float32") for shape in shapes]

    def forward(self, x):
        """out [s, H] for tokens x [s, H], both of the buffer's dtype; and what backward needs."""
        buffer, xp = self.buffer, self.buffer.xp
        topk_idx, topk_weights = router.forward(xp, x, self.router, buffer.num_topk)
        plan = buffer.plan(topk_idx)
        buffer.prefetch_weight(plan, *self.weights)  # before dispatch, by which peers know that it is over
        rows = buffer.dispatch(x, topk_weights=topk_weights, plan=plan)  # a copy: backward needs the rows
        ends = rows.cu_seqlens.tolist()  # waits for the device; a grouped GEMM reads rows.cu_seqlens there
        y, inner = experts.forward(xp, rows, ends, [pool.compute for pool in self.weights])
        out = buffer.combine(y, plan).x
        return out, Saved(x, topk_idx, topk_weights, rows, ends, inner)

    def backward(self, saved, grad_out):
        """Gradients of x [s, H] and of the router [H, E], float32, the router's from this rank's tokens
        alone; those of the experts go to `grads`.

        Args:
            saved: of forward. Another forward in between fetches other experts into the slots: then prefetch
                those of this plan again before.
            grad_out: [s, H] of the buffer's dtype.
        """
        buffer, xp, plan = self.buffer, self.buffer.xp, saved.rows.plan
        weights, grads = ([pool.compute for pool in pools] for pools in (self.weights, self.grads))
        grad_y = buffer.dispatch(grad_out, plan=plan, zero_copy=True).x  # used up before the next dispatch
        grad_rows, grad_row_weights = experts.backward(
            xp, saved.rows, saved.ends, weights, saved.inner, grad_y, grads
        )
        back = buffer.combine(grad_rows, plan, row_weights=grad_row_weights)
        buffer.reduce_grad(plan, *self.grads)  # adds up the copies' gradients at home and clears the slots
        through_router, grad_router = router.backward(
            xp, saved.x, self.router, saved.topk_idx, saved.topk_weights, back.topk_weights
        )
        return back.x.astype(xp.float32) + through_router, grad_router

    def update(self, rate):
        """Gradient descent of this rank's experts: after reduce_grad, and before the next step's plan."""
        for pool, grads in zip(self.weights, self.grads, strict=True):
            pool.local[...] -= (rate * grads.local).astype(pool.dtype)
            grads.local[...] = 0

    def close(self):
        """Frees the pools. Collective."""
        for pool in (*self.weights, *self.grads):
            pool.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:  # after an exception the peers may never come
            self.close()
