"""A tiny language model with one MoE layer: the next character from the last few."""

import numpy as np

import epcomm

from .layer import MoELayer

CONTEXT, EMBEDDING, INNER, TOPK, EXPERTS = 8, 8, 64, 2, 24
HIDDEN = CONTEXT * EMBEDDING


class LanguageModel:
    """logits = (x + MoE(x)) head, with x the embeddings of the last CONTEXT characters side by side.

    Args:
        group: the epcomm.Group, whose size divides EXPERTS.
        vocabulary: how many characters there are.
        num_tokens: most positions of this rank in a batch.
    """

    def __init__(self, group, vocabulary, num_tokens):
        self.group, self.vocabulary = group, vocabulary
        settings = {"hidden": HIDDEN, "num_topk": TOPK, "num_experts": EXPERTS, "token_padding": 1}
        self.buffer = epcomm.Buffer(group, num_tokens=num_tokens, dtype="float32", **settings)
        self.moe = MoELayer(self.buffer, INNER)
        self.xp = self.buffer.xp
        self._initialise(np.random.default_rng(0))

    def _initialise(self, rng):
        """The same numbers for every number of ranks."""

        def normal(*shape, scale):
            return rng.standard_normal(shape, np.float32) * np.float32(scale)

        own = slice(self.group.rank * self.buffer.experts_per_rank, None)
        for pool in self.moe.weights:
            values = normal(EXPERTS, *pool.shape, scale=pool.shape[0] ** -0.5)[own][: len(pool.local)]
            pool.local[...] = self.xp.asarray(values)
        self.moe.router = self.xp.asarray(normal(HIDDEN, EXPERTS, scale=0.5 * HIDDEN**-0.5))
        self.embedding = self.xp.asarray(normal(self.vocabulary, EMBEDDING, scale=1))
        self.head = self.xp.asarray(normal(HIDDEN, self.vocabulary, scale=HIDDEN**-0.5))

    def step(self, context, target, batch, rate):
        """Forward, backward and gradient descent. Collective; the same on every rank but for its positions.

        Args:
            context: [s, CONTEXT] characters before this rank's positions; target: [s] the characters there.
            batch: positions of all ranks.
            rate: of learning.

        Returns:
            The mean loss of the batch, in nats.
        """
        xp = self.xp
        seen = self._one_hot(context.reshape(-1))
        x = (seen @ self.embedding).reshape(-1, HIDDEN)
        y, saved = self.moe.forward(x)
        h = x + y
        logits = h @ self.head
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - xp.log(xp.exp(logits).sum(axis=1, keepdims=True))
        wanted = self._one_hot(target)
        loss = -(log_p * wanted).sum() / batch

        grad_logits = (xp.exp(log_p) - wanted) / batch
        grad_h = grad_logits @ self.head.T
        grad_x, grad_router = self.moe.backward(saved, grad_h)
        grad_x += grad_h
        grad_embedding = seen.T @ grad_x.reshape(-1, EMBEDDING)
        dense = [loss, grad_embedding, h.T @ grad_logits, grad_router]
        loss, *grads = self._sum_over_ranks(dense)
        for parameter, grad in zip((self.embedding, self.head, self.moe.router), grads, strict=True):
            parameter -= rate * xp.asarray(grad)
        self.moe.update(rate)
        return float(loss)

    def _one_hot(self, characters):
        return self.xp.eye(self.vocabulary, dtype=self.xp.float32)[self.xp.asarray(characters)]

    def _sum_over_ranks(self, arrays):
        """Sums in the order of the ranks, the same bits on all of them."""
        every = self.group.comm.allgather([self.group.device.to_host(each) for each in arrays])
        return [sum(parts) for parts in zip(*every, strict=True)]

    def close(self):
        """Frees the memory. Collective."""
        self.moe.close()
        self.buffer.close()
