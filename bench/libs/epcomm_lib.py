"""epcomm: balanced dispatch and combine, zero copy, with the weights of the copied experts fetched in every
step.
"""

from epcomm import Buffer


def missing(group):
    """Why this library cannot run here, or None."""
    return None


class Library:
    """See bench.libs. Three pools (gate, up, down projection) stand for the experts' weights."""

    def __init__(self, group, shape):
        self.group = group
        self.shape = shape
        self.buffer = Buffer(
            group,
            num_tokens=shape.num_tokens,
            hidden=shape.hidden,
            num_topk=shape.num_topk,
            num_experts=shape.num_experts,
            num_sms=shape.num_sms,
            token_padding=shape.token_padding,
        )
        self.pools = []
        if shape.hp:
            from epcomm.pool import ExpertPool

            sizes = ((shape.hp, shape.hidden), (shape.hp, shape.hidden), (shape.hidden, shape.hp))
            self.pools = [ExpertPool(self.buffer, size, "bfloat16") for size in sizes]

    def load(self, topk_idx, x, topk_weights):
        self.topk_idx, self.x, self.topk_weights = topk_idx, x, topk_weights
        self.dispatch_forward()
        self.buffer.check()

    def operations(self):
        run = {
            "plan": lambda: self.buffer.plan(self.topk_idx),
            "d_f": self.dispatch_forward,
            "d_b": self.dispatch_backward,
            "c_f": lambda: self.buffer.combine(self.rows, self.plan, zero_copy=True),
            "c_b": lambda: self.buffer.combine(
                self.rows, self.plan, row_weights=self.row_weights, zero_copy=True
            ),
        }
        return run | {"pf": self.prefetch} if self.pools else run

    def dispatch_forward(self):
        self.plan = self.buffer.plan(self.topk_idx)
        received = self.buffer.dispatch(
            self.x, plan=self.plan, topk_weights=self.topk_weights, zero_copy=True
        )
        self.rows, self.row_weights = received.x, received.topk_weights
        self.prefetch()

    def dispatch_backward(self):
        self.buffer.dispatch(self.x, plan=self.plan, zero_copy=True)
        self.prefetch()

    def prefetch(self):
        if self.pools:
            self.buffer.prefetch_weight(self.plan, *self.pools)

    def round_trip(self):
        self.dispatch_forward()
        return self.buffer.combine(self.rows, self.plan, zero_copy=True).x

    def figures(self, session):
        """How many experts the largest receiver fetches, and the bytes of their weights."""
        copied = int((self.group.device.to_host(self.plan.experts_to_copy) >= 0).sum(axis=1).max())
        expert_bytes = 3 * self.shape.hp * self.shape.row_bytes
        return {"copied_experts": copied} | (
            {"prefetched_mb": copied * expert_bytes / 1e6} if self.pools else {}
        )

    def close(self):
        for pool in self.pools:
            pool.close()
        self.buffer.destroy()
