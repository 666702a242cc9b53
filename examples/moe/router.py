"""Top-k router: which experts a token goes to, and with which weights."""


def forward(xp, x, matrix, topk):
    """The K experts with the largest logits; their weights are the softmax of these K logits.

    Args:
        x: [s, H] tokens; matrix: [H, E] float32.

    Returns:
        topk_idx [s, K] int32, topk_weights [s, K] float32.
    """
    logits = x.astype(xp.float32) @ matrix
    topk_idx = xp.argsort(-logits, axis=1)[:, :topk].astype(xp.int32)
    chosen = xp.take_along_axis(logits, topk_idx, axis=1)
    weights = xp.exp(chosen - chosen[:, :1])
    return topk_idx, weights / weights.sum(axis=1, keepdims=True)


def backward(xp, x, matrix, topk_idx, topk_weights, grad_weights):
    """From the gradient of the weights [s, K] to those of x [s, H] and of the matrix [H, E], both float32."""
    inner = (grad_weights * topk_weights).sum(axis=1, keepdims=True)
    grad_logits = xp.zeros((x.shape[0], matrix.shape[1]), xp.float32)
    xp.put_along_axis(grad_logits, topk_idx, topk_weights * (grad_weights - inner), axis=1)
    return grad_logits @ matrix.T, x.astype(xp.float32).T @ grad_logits
