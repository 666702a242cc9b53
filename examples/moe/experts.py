"""SwiGLU experts over segments of rows: y = (silu(x gate) * (x up)) down, times the row's route weight.

Segment i of the rows belongs to the i-th expert of the weights: a rank's own experts, then its copies, as
`ExpertPool.compute` has them. Pad rows are zeros and stay zeros. Products are made in float32, since NumPy
has no others; on GPUs a grouped GEMM with the row type does all segments at once.
"""

from itertools import pairwise


def segments(ends, *weights):
    """(index, rows of the segment, its matrices in float32) of every segment that has rows."""
    for i, (start, end) in enumerate(pairwise([0, *ends])):
        if start < end:
            yield i, slice(start, end), [each[i].astype("float32") for each in weights]


def forward(xp, x, row_weights, ends, weights):
    """Weighted outputs [rows, H] of the row type, and what backward needs.

    Args:
        x: [rows, H] as dispatch delivers them; row_weights: [rows] float32.
        ends: the end of each segment, a list; rows behind the last one are not looked at, nor written.
        weights: gate and up [segments, H, H'], down [segments, H', H].
    """
    y = xp.empty_like(x)
    kept = {}
    for i, rows, (gate, up, down) in segments(ends, *weights):
        g, u = x[rows].astype(xp.float32) @ gate, x[rows].astype(xp.float32) @ up
        y[rows] = ((silu(xp, g) * u) @ down * row_weights[rows, None]).astype(y.dtype)
        kept[i] = g, u
    return y, kept


def backward(xp, x, row_weights, ends, weights, kept, grad_y, grads):
    """Gradients of x [rows, H], of the row type, and of row_weights [rows]; those of the weights go into
    `grads`.

    Args:
        grad_y: [rows, H], the gradient of forward's result.
        grads: like weights, float32: added to.
    """
    grad_x, grad_row_weights = xp.empty_like(x), xp.zeros_like(row_weights)
    for i, rows, (gate, up, down) in segments(ends, *weights):
        g, u = kept[i]
        inputs, grad_out = x[rows].astype(xp.float32), grad_y[rows].astype(xp.float32)
        act, sigmoid = silu(xp, g), 1 / (1 + xp.exp(-g))
        grad_inner = grad_out @ down.T
        grad_row_weights[rows] = (grad_inner * act * u).sum(axis=1)
        grad_inner *= row_weights[rows, None]
        grad_g = grad_inner * u * sigmoid * (1 + g * (1 - sigmoid))
        grad_u = grad_inner * act
        grad_x[rows] = (grad_g @ gate.T + grad_u @ up.T).astype(x.dtype)
        grads[0][i] += inputs.T @ grad_g
        grads[1][i] += inputs.T @ grad_u
        grads[2][i] += (act * u).T @ (grad_out * row_weights[rows, None])
    return grad_x, grad_row_weights


def silu(xp, x):
    """x * sigmoid(x)."""
    return x / (1 + xp.exp(-x))
