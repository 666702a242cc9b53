"""A balanced step of epcomm: run and compared with the oracle, then timed operation by operation."""

from bench import check
from bench.weights import Weights
from epcomm import Buffer


class Step:
    """The main job for one shape, on one buffer.

    Args:
        group: the Group; shape: workload.Shape.
        x, topk_weights: this rank's rows and route weights, on the device.
        backward, prefetch, reduce_grad: which operations of training to run as well.
    """

    def __init__(self, group, shape, x, topk_weights, *, backward=False, prefetch=False, reduce_grad=False):
        self.group = group
        self.x, self.topk_weights = x, topk_weights
        self.backward = backward
        self.buffer = Buffer(
            group,
            num_tokens=shape.num_tokens,
            hidden=shape.hidden,
            num_topk=shape.num_topk,
            num_experts=shape.num_experts,
            num_sms=shape.num_sms,
            token_padding=shape.token_padding,
        )
        self.weights = Weights(self.buffer, shape, prefetch, reduce_grad)

    def close(self):
        """Collective; not after an exception, when the peers may never come."""
        self.weights.close()
        self.buffer.destroy()

    def check(self, topk_idx, oracle):
        """One step; what differs from the oracle (check.Oracle), as a list of texts. Collective."""
        buffer = self.buffer
        plan, received = self._forward(topk_idx)
        errors = oracle.plan_errors(plan)
        errors += oracle.dispatch_errors(received.x, received.topk_weights)
        check.run_experts(received.x, buffer.device.to_host(received.cu_seqlens), oracle.segment_experts)
        errors += oracle.combine_errors(buffer.combine(received.x, plan, zero_copy=True).x)
        if self.backward:
            gradients = buffer.dispatch(self.x, plan=plan, zero_copy=True)
            errors += oracle.dispatch_errors(gradients.x, None)
            check.run_experts(gradients.x, buffer.device.to_host(plan.cu_seqlens), oracle.segment_experts)
            back = buffer.combine(gradients.x, plan, row_weights=received.topk_weights, zero_copy=True)
            errors += oracle.combine_errors(back.x)
            errors += oracle.weight_errors(back.topk_weights)
        errors += self.weights.check(plan)
        buffer.check()
        return errors

    def time(self, topk_idx, session):
        """{operation: Timing}, and the bytes that `prefetch` and `reduce_grad` move. Collective.

        `dispatch` is with a given plan; `host` is the host time of a whole call, planning included.
        """
        buffer, x = self.buffer, self.x
        plan, received = self._forward(topk_idx)
        operations = {
            "plan": lambda: buffer.plan(topk_idx),
            "dispatch": lambda: buffer.dispatch(x, plan=plan, topk_weights=self.topk_weights, zero_copy=True),
            "combine": lambda: buffer.combine(received.x, plan, zero_copy=True),
        }
        if self.backward:
            row_weights = received.topk_weights
            operations |= {
                "dispatch_backward": lambda: buffer.dispatch(x, plan=plan, zero_copy=True),
                "combine_backward": lambda: buffer.combine(
                    received.x, plan, row_weights=row_weights, zero_copy=True
                ),
            }
        operations |= self.weights.operations(plan)
        times = {name: session.time(function) for name, function in operations.items()}
        moved = self.weights.moved(plan)
        times["host"] = session.host_time(
            lambda: buffer.dispatch(x, topk_idx, self.topk_weights, zero_copy=True)
        )
        buffer.check()
        return times, moved

    def _forward(self, topk_idx):
        plan = self.buffer.plan(topk_idx)
        return plan, self.buffer.dispatch(self.x, plan=plan, topk_weights=self.topk_weights, zero_copy=True)
