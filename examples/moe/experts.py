"""SwiGLU experts over segments of rows: y = (silu(x gate) * (x up)) down, times the row's route weight.

Segment i of the rows belongs to the i-th expert of the weights: a rank's own experts, then its copies, as
`ExpertPool.compute` has them. Pad rows are zeros and stay zeros. Products are made in float32, since NumPy
has no others; on GPUs a grouped GEMM with the row type does all segments at once.
"""

from itertools import pairwise


def segments(ends, weights):
    """(index, rows of the segment, its matrices in float32) of every segment that has rows."""
    for i, (start, end) in enumerate(pairwise([0, *ends])):
        if start < end:
            yield i, slice(start, end), [each[i].astype("float32") for each in weights]


def forward(xp, rows, ends, weights):
    """Weighted outputs [rows, H] of the row type, and what backward needs.

    Args:
        rows: the Dispatched with x [rows, H] and topk_weights [rows] float32.
        ends: the end of each segment, a list; rows behind the last one are not looked at, nor written.
        weights: gate and up [segments, H, H'], down [segments, H', H].
    """
    y, kept = xp.empty_like(rows.x), {}
    for i, here, (gate, up, down) in segments(ends, weights):
        x = rows.x[here].astype(xp.float32)
        g, u = x @ gate, x @ up
        out = (g * sigmoid(xp, g) * u) @ down
        y[here] = (out * rows.topk_weights[here, None]).astype(y.dtype)
        kept[i] = g, u
    return y, kept


def backward(xp, rows, ends, weights, kept, grad_y, grads):
    """Gradients of rows.x [rows, H], of its type, and of rows.topk_weights [rows].

    Args:
        rows, ends, weights: as in forward; kept: what it returned.
        grad_y: [rows, H], the gradient of forward's result.
        grads: like weights, float32: the gradients of the weights are added to it.
    """
    grad_x, grad_row_weights = xp.empty_like(rows.x), xp.zeros_like(rows.topk_weights)
    for i, here, (gate, up, down) in segments(ends, weights):
        g, u = kept[i]
        s = sigmoid(xp, g)
        x, w, grad = rows.x[here].astype(xp.float32), rows.topk_weights[here, None], grad_y[here]
        grad = grad.astype(xp.float32)
        grad_inner = grad @ down.T
        grad_row_weights[here] = (grad_inner * g * s * u).sum(axis=1)
        grad_inner *= w
        grad_g, grad_u = grad_inner * u * s * (1 + g * (1 - s)), grad_inner * g * s
        grad_x[here] = (grad_g @ gate.T + grad_u @ up.T).astype(grad_x.dtype)
        for each, grad_of_it in zip(
            grads, (x.T @ grad_g, x.T @ grad_u, (g * s * u).T @ (grad * w)), strict=True
        ):
            each[i] += grad_of_it
    return grad_x, grad_row_weights


def sigmoid(xp, x):
    return 1 / (1 + xp.exp(-x))
