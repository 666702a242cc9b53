"""A MoE layer spread over the ranks of a group, with its backward pass."""

import epcomm

from . import experts, router


class MoELayer:
    """Top-k router and SwiGLU experts: out[t] = sum over k of w[t, k] * expert(topk_idx[t, k], x[t]).

    Every rank brings its own tokens and has E / R experts at home. Calls are collective.

    Args:
        buffer: the epcomm.Buffer; its hidden, num_topk, num_experts and dtype are the layer's.
        inner: inner size of an expert (H').

    Attributes:
        router: [H, E] float32, the same on all ranks; set it before the first step.
        weights: pools gate and up [H, H'], down [H', H]; write this rank's experts to `.local`.
        grads: float32 pools like them; after backward `.local` holds the gradients of this rank's experts,
            added up over all tokens of all ranks until you zero it.
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
        buffer.prefetch_weight(
            plan, *self.weights
        )  # before dispatch: peers' later calls then know it is over
        rows = buffer.dispatch(x, topk_weights=topk_weights, plan=plan)  # a copy: backward needs the rows
        ends = rows.cu_seqlens.tolist()  # waits for the device; a grouped GEMM reads rows.cu_seqlens there
        y, kept = experts.forward(xp, rows.x, rows.topk_weights, ends, self._compute(self.weights))
        out = buffer.combine(y, plan).x
        return out, (x, topk_idx, topk_weights, rows, ends, kept)

    def backward(self, saved, grad_out):
        """Gradients of x [s, H] float32 and of this rank's tokens for the router [H, E]; the experts' go to
        `grads`.

        Args:
            saved: of forward; no other forward in between, which would fetch other experts into the slots:
                where there is one, prefetch this plan's again.
            grad_out: [s, H] of the buffer's dtype.
        """
        buffer, xp = self.buffer, self.buffer.xp
        x, topk_idx, topk_weights, rows, ends, kept = saved
        plan = rows.plan
        grad_y = buffer.dispatch(grad_out, plan=plan, zero_copy=True).x  # used up before the next dispatch
        grad_rows, grad_row_weights = experts.backward(
            xp,
            rows.x,
            rows.topk_weights,
            ends,
            self._compute(self.weights),
            kept,
            grad_y,
            self._compute(self.grads),
        )
        back = buffer.combine(grad_rows, plan, row_weights=grad_row_weights)
        buffer.reduce_grad(plan, *self.grads)  # adds up the copies' gradients at home and clears the slots
        through_router, grad_router = router.backward(
            xp, x, self.router, topk_idx, topk_weights, back.topk_weights
        )
        return back.x.astype(xp.float32) + through_router, grad_router

    def update(self, rate):
        """A step of gradient descent of the own experts, between a step's reduce_grad and the next plan."""
        for pool, grads in zip(self.weights, self.grads, strict=True):
            pool.local[...] -= (rate * grads.local).astype(pool.dtype)
            grads.local[...] = 0

    @staticmethod
    def _compute(pools):
        return [pool.compute for pool in pools]

    def close(self):
        """Frees the pools. Collective."""
        for pool in (*self.weights, *self.grads):
            pool.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:  # after an exception the peers may never come
            self.close()
