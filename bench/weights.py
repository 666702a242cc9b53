"""The expert weights and gradients of a step: pools that are filled, checked and timed.

Three bfloat16 pools (gate, up and down projection) for `prefetch_weight`; one float32 pool for `reduce_grad`,
since three of them would fill a GPU.
"""

import numpy as np

from epcomm.pool import ExpertPool


class Weights:
    """The pools of a buffer.

    Args:
        buffer: the Buffer; shape: workload.Shape with its `hp`.
        prefetch, reduce_grad: which of both operations to make pools for.
    """

    def __init__(self, buffer, shape, prefetch, reduce_grad):
        self.buffer = buffer
        up, down = (shape.hp, shape.hidden), (shape.hidden, shape.hp)
        self.pools = [ExpertPool(buffer, size, "bfloat16") for size in (up, up, down)] if prefetch else []
        self.gradients = ExpertPool(buffer, up, "float32") if reduce_grad else None

    def check(self, plan):
        """What both operations get wrong for a plan, as a list of texts. Collective."""
        errors = []
        copied = self._copied(plan)
        rank, epn = self.buffer.group.rank, self.buffer.experts_per_rank
        slots = [(slot, expert) for slot, expert in enumerate(copied[rank]) if expert >= 0]
        if self.pools:
            for number, pool in enumerate(self.pools):
                pool.slots[...] = 0
                for i in range(epn):
                    _mark(pool.local[i], rank * epn + i, number)
            self.buffer.plan(self._no_tokens())  # peers fetch only after this call of theirs
            self.buffer.prefetch_weight(plan, *self.pools)
            wrong = [
                expert
                for number, pool in enumerate(self.pools)
                for slot, expert in slots
                if not _is_marked(pool.slots[slot], expert, number)
            ]
            errors += [f"weights of expert {expert} were not fetched" for expert in wrong]
        if self.gradients is not None:
            errors += self._check_gradients(plan, copied, slots)
        return errors

    def _check_gradients(self, plan, copied, slots):
        pool, rank, epn = self.gradients, self.buffer.group.rank, self.buffer.experts_per_rank
        home = range(rank * epn, (rank + 1) * epn)
        for i, expert in enumerate(home):
            pool.local[i] = expert
        pool.slots[...] = 0
        for slot, _ in slots:
            pool.slots[slot] = rank + 1
        self.buffer.reduce_grad(plan, pool)
        errors = []
        for i, expert in enumerate(home):
            wanted = expert + sum(other + 1 for other, held in enumerate(copied) if expert in held)
            if not bool((pool.local[i] == wanted).all()):
                errors.append(f"gradient of expert {expert} is wrong")
        return errors + ([] if not bool(pool.slots.any()) else ["gradient slots were not cleared"])

    def operations(self, plan):
        """{name: function} of what there are pools for."""
        run = {}
        if self.pools:
            run["prefetch"] = lambda: self.buffer.prefetch_weight(plan, *self.pools)
        if self.gradients is not None:
            run["reduce_grad"] = lambda: self.buffer.reduce_grad(plan, self.gradients)
        return run

    def moved(self, plan):
        """{name: bytes}: weights to the largest receiver, gradients to the largest owner."""
        copied = self._copied(plan)
        owners = np.bincount(copied[copied >= 0] // self.buffer.experts_per_rank, minlength=len(copied))
        fetched = int((copied >= 0).sum(axis=1).max()) * sum(pool.nbytes for pool in self.pools)
        if self.gradients is None:
            return {"prefetch": fetched}
        return {"prefetch": fetched, "reduce_grad": int(owners.max()) * self.gradients.nbytes}

    def close(self):
        for pool in (*self.pools, *filter(None, [self.gradients])):
            pool.close()

    def _copied(self, plan):
        """[R, E/R] copied experts, -1 = idle slot, on the host."""
        return self.buffer.device.to_host(plan.experts_to_copy)

    def _no_tokens(self):
        return self.buffer.device.zeros((0, self.buffer.num_topk), np.int32)


def _mark(expert, number, projection):
    """Fills an expert's weights with a pattern of its own."""
    bits = expert.reshape(-1).view(np.uint16)
    bits[0::2], bits[1::2] = number, projection


def _is_marked(expert, number, projection):
    bits = expert.reshape(-1).view(np.uint16)
    return bool((bits[0::2] == number).all() and (bits[1::2] == projection).all())
