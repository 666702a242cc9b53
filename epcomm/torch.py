"""Dispatch and combine for torch: autograd functions over a Buffer.

    plan = buffer.plan(topk_idx)
    rows = moe_dispatch(buffer, x, topk_weights=topk_weights, plan=plan)
    y = experts(rows.x, rows.cu_seqlens) * rows.topk_weights[:, None]
    out = moe_combine(buffer, y, plan)

Gradients reach the tokens and the route weights: the backward of dispatch is combine, that of combine is
dispatch with the same plan. Backward passes are collective as the forward passes are: all ranks run them, in
the same order. Works on torch's current stream. Importing this module imports torch; nothing else here does.
"""

import torch
from torch.autograd.function import once_differentiable

from .buffer import Dispatched

__all__ = ["moe_combine", "moe_dispatch"]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, plan, total_tokens, x, topk_weights):
        ctx.buffer, ctx.plan = buffer, plan
        weights = None if topk_weights is None else topk_weights.detach()
        sent = buffer.dispatch(x.detach(), topk_weights=weights, plan=plan, total_tokens=total_tokens)
        ctx.mark_non_differentiable(sent.cu_seqlens)
        return sent.x, sent.topk_weights, sent.cu_seqlens

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, grad_row_weights, _):
        weights = grad_row_weights.detach() if ctx.needs_input_grad[4] else None
        grads = ctx.buffer.combine(grad_rows.detach(), ctx.plan, row_weights=weights)
        return None, None, None, grads.x, grads.topk_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, plan, x):
        ctx.buffer, ctx.plan, ctx.total_tokens = buffer, plan, plan.total_tokens
        return buffer.combine(x.detach(), plan).x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows = ctx.buffer.dispatch(grad.detach(), plan=ctx.plan, total_tokens=ctx.total_tokens).x
        return None, None, rows


def moe_dispatch(buffer, x, topk_idx=None, topk_weights=None, *, plan=None, total_tokens=None) -> Dispatched:
    """`Buffer.dispatch` with gradients. Collective, and so is its backward.

    Args:
        buffer: the Buffer.
        x: [s, hidden] tensor of the buffer's dtype.
        topk_idx: [s, K] expert ids, to be planned now; or
        plan: a Plan of this buffer. Exactly one of both.
        topk_weights: [s, K] float32 route weights that travel with the rows, or None. The same choice on all
            ranks, and also whether they require a gradient.
        total_tokens: as in `Buffer.dispatch`.

    Returns:
        Dispatched: x [rows, hidden] and topk_weights [rows] with gradients, cu_seqlens, plan; event is None.
        Pad rows are zero and rows behind the last segment undefined, in x and in the gradient that
        `moe_combine` hands to the experts; gradients of both are not looked at.

    Raises:
        ValueError, TypeError, PeerTimeoutError: as `Buffer.dispatch`.
    """
    if (topk_idx is None) == (plan is None):
        raise ValueError("moe_dispatch: expected exactly one of topk_idx and plan")
    if plan is None:
        plan = buffer.plan(topk_idx)
    rows, row_weights, cu_seqlens = _Dispatch.apply(buffer, plan, total_tokens, x, topk_weights)
    return Dispatched(rows, row_weights, cu_seqlens, plan, None)


def moe_combine(buffer, x, plan):
    """`Buffer.combine` with gradients. Collective, and so is its backward.

    Args:
        buffer: the Buffer.
        x: [rows, hidden] tensor of the buffer's dtype, as many rows as `moe_dispatch` gave for this plan.
        plan: the Plan.

    Returns:
        [s, hidden] tensor, the unweighted sum of every token's rows.

    Raises:
        ValueError, TypeError, PeerTimeoutError: as `Buffer.combine`.
    """
    rows = buffer._step_rows(plan.total_tokens)
    if x.shape[0] != rows:
        raise ValueError(f"x: expected the {rows} rows of this plan's moe_dispatch, got {x.shape[0]}")
    return _Combine.apply(buffer, plan, x)
