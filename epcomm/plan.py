"""Plan: what the planner decided for one routing, as arrays that stay on the device."""

import math

import numpy as np

from .layout import align


class PlanLayout:
    """Where a plan's arrays lie in its one allocation of int32. Every array starts on 16 bytes."""

    def __init__(self, ranks, num_tokens, num_topk, num_experts):
        experts_per_rank = num_experts // ranks
        self.shapes = {
            "num_tokens_per_rank": (ranks,),
            "num_tokens_per_expert": (2 * experts_per_rank,),
            "cu_seqlens": (2 * experts_per_rank,),
            "experts_to_copy": (ranks, experts_per_rank),
            "rows": (ranks, num_tokens, num_topk),
        }
        self.offsets = {}  # in bytes
        self.slices = {}
        self.words = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            self.offsets[name] = 4 * self.words
            self.slices[name] = slice(self.words, self.words + size)
            self.words += align(size, 4)
        self.num_topk = num_topk  # dst, whose length is the step's, comes last


class Plan:
    """The placement of every entry of a step. Made by `Buffer.plan` or `Buffer.dispatch`; reusable.

    A plan owns its arrays (one allocation on the device): other plans made in between, and later dispatches,
    leave it alone. All arrays are int32; segments are this rank's home experts in ascending id, then its
    prefetch slots.

    Attributes:
        num_tokens: tokens of this rank in the step (s), known to the host.
        dst: [s * K], entry (t, k) at t * K + k: rank * row_capacity + row of that rank's receive buffer; -1 =
            no expert.
        num_tokens_per_rank: [R], every rank's s.
        num_tokens_per_expert: [2 * E/R], true rows of each segment, without padding.
        cu_seqlens: [2 * E/R], padded end row of each segment: segment i is rows cu_seqlens[i-1] ...
            cu_seqlens[i] - 1 (from 0 for the first), of which the first num_tokens_per_expert[i] hold tokens
            and the rest are zero.
        experts_to_copy: [R, E/R], the expert in each rank's prefetch slots, ascending; -1 = idle.
        row_capacity: rows of a receive buffer (NvS).
        dispatched: whether a dispatch has delivered the rows' places to their ranks, which combine needs.
        total_tokens: what the last of these dispatches was told, or None.
    """

    def __init__(self, buffer, num_tokens, stream):
        layout = buffer._plan_layout
        self._buffer_id = buffer._id
        self._number = 0  # of the plan kernel's launch, the same on all ranks
        self._layout = layout
        self._ranks = buffer.group.size
        self._rank = buffer.group.rank
        self.num_tokens = num_tokens
        self.row_capacity = buffer.row_capacity
        self.dispatched = False
        self.total_tokens = None
        self._of_torch = False  # made of torch's topk_idx: then torch's current stream is the caller's
        words = layout.words + num_tokens * layout.num_topk
        self._slab = buffer.device.empty((words,), np.int32, stream)
        self._arrays = {}
        self._address = buffer.device.pointer(self._slab)

    def _pointer(self, name):
        return self._address + self._layout.offsets[name]

    def _array(self, name):
        array = self._arrays.get(name)
        if array is None:
            flat = self._slab[self._layout.slices[name]]
            array = self._arrays[name] = flat.reshape(self._layout.shapes[name])
        return array

    @property
    def _dst_pointer(self):
        return self._address + 4 * self._layout.words

    @property
    def dst(self):
        return self._slab[self._layout.words :]

    @property
    def num_tokens_per_rank(self):
        return self._array("num_tokens_per_rank")

    @property
    def num_tokens_per_expert(self):
        return self._array("num_tokens_per_expert")

    @property
    def cu_seqlens(self):
        return self._array("cu_seqlens")

    @property
    def experts_to_copy(self):
        return self._array("experts_to_copy")

    @property
    def cu_seqlens_full(self):
        """The padded ends in global expert order, [E + E/R]. All E experts, of which those of other ranks
        are empty, then the prefetch slots. Computed on the current stream at each access.
        """
        ends = self.cu_seqlens
        per_rank = ends.shape[0] // 2
        full = ends[[0]].repeat(per_rank * (self._ranks + 1))
        first = self._rank * per_rank
        full[:first] = 0
        full[first : first + per_rank] = ends[:per_rank]
        full[first + per_rank : self._ranks * per_rank] = ends[per_rank - 1]
        full[self._ranks * per_rank :] = ends[per_rank:]
        return full

    def __repr__(self):
        return (
            f"Plan(num_tokens={self.num_tokens}, rank={self._rank} of {self._ranks}, "
            f"row_capacity={self.row_capacity})"
        )
