"""The layer on one rank in plain NumPy and float64: what the results are compared with."""

import numpy as np


def forward_backward(x, topk_idx, router, gate, up, down, grad_out):
    """Everything that the layer computes, as a dict of float64 arrays: out, x, router, gate, up, down.

    Args:
        x, grad_out: [tokens, H]; topk_idx: [tokens, K], given, since a router's choice between two experts
            that are as good as equal may depend on the last bit.
        router: [H, E]; gate, up: [E, H, H']; down: [E, H', H].
    """
    x, router, gate, up, down, grad_out = (
        a.astype(np.float64) for a in (x, router, gate, up, down, grad_out)
    )
    chosen = np.take_along_axis(x @ router, topk_idx, axis=1)
    weights = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out, grad_x, grad_weights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    grads = {name: np.zeros_like(a) for name, a in (("gate", gate), ("up", up), ("down", down))}
    for e in range(len(gate)):
        token, k = np.nonzero(topk_idx == e)
        rows, w, grad = x[token], weights[token, k, None], grad_out[token]
        g, u = rows @ gate[e], rows @ up[e]
        sigmoid = 1 / (1 + np.exp(-g))
        inner = g * sigmoid * u
        np.add.at(out, token, w * (inner @ down[e]))
        grad_weights[token, k] = (grad * (inner @ down[e])).sum(axis=1)
        grad_inner = w * grad @ down[e].T
        grad_g = grad_inner * u * (sigmoid + g * sigmoid * (1 - sigmoid))
        grad_u = grad_inner * g * sigmoid
        grads["gate"][e], grads["up"][e] = rows.T @ grad_g, rows.T @ grad_u
        grads["down"][e] = inner.T @ (w * grad)
        np.add.at(grad_x, token, grad_g @ gate[e].T + grad_u @ up[e].T)
    grad_chosen = weights * (grad_weights - (grad_weights * weights).sum(axis=1, keepdims=True))
    grad_logits = np.zeros((len(x), router.shape[1]))
    np.put_along_axis(grad_logits, topk_idx, grad_chosen, axis=1)
    return grads | {"out": out, "x": grad_x + grad_logits @ router.T, "router": x.T @ grad_logits}


def relative_error(got, wanted):
    """||got - wanted|| / ||wanted||, over all elements."""
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted))
