"""Buffer: balanced expert parallelism (training and prefill)."""

import itertools
from typing import NamedTuple

import numpy as np

from . import buffer_kernels, buffer_settings, dtypes, foreign, layout, plan_layout
from .arrays import giver, take
from .endpoint import Endpoint
from .integers import integer
from .layout import Areas
from .plan import Plan, PlanLayout
from .pool import ExpertPool
from .runtime import args

_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_WEIGHT_DTYPES = (np.dtype(np.float32),)
_ids = itertools.count()


class Dispatched(NamedTuple):
    """What `Buffer.dispatch` returns.

    Attributes:
        x: [rows, hidden] received rows, grouped by segment (see Plan.cu_seqlens); pad rows are zero, rows
            behind the last segment are undefined.
        topk_weights: [rows] float32, or None.
        cu_seqlens: plan.cu_seqlens.
        plan: the Plan.
        event: an Event, or None for a call without async_finish.
    """

    x: object
    topk_weights: object
    cu_seqlens: object
    plan: Plan
    event: object


class Combined(NamedTuple):
    """What `Buffer.combine` returns: x [s, hidden], topk_weights [s, K] float32 or None, event or None."""

    x: object
    topk_weights: object
    event: object


class Buffer(Endpoint):
    """Balanced dispatch and combine between the ranks of a group.

    Args:
        group: the Group; all its ranks construct the buffer with the same settings.
        num_tokens: most tokens a rank brings to one call (S).
        hidden: columns of a row, a multiple of 8.
        num_topk: experts a token names (K), 1 to 32.
        num_experts: experts over all ranks (E), a multiple of the group's size.
        dtype: of a row: "bfloat16", "float16" or "float32".
        num_sms: SMs that dispatch, combine, prefetch_weight and reduce_grad may use; None = for each enough
            that neither the wire nor the stores starve.
        token_padding: rows of an expert's segment are padded to a multiple of this.

    Raises:
        ValueError: a setting is out of range, or the ranks disagree; on every rank, naming field and rank.
    """

    def __init__(
        self,
        group,
        *,
        num_tokens,
        hidden,
        num_topk,
        num_experts,
        dtype="bfloat16",
        num_sms=None,
        token_padding=128,
    ):
        given = buffer_settings.Settings(
            num_tokens, hidden, num_topk, num_experts, dtype, num_sms, token_padding
        )
        settings = buffer_settings.agree(group, given)
        num_tokens, hidden, num_topk, num_experts, self.dtype, num_sms, token_padding = settings
        ranks, device = group.size, group.device
        self._id = next(_ids)
        self.num_tokens, self.hidden, self.num_topk, self.num_experts = (
            num_tokens,
            hidden,
            num_topk,
            num_experts,
        )
        self.token_padding = token_padding
        self.experts_per_rank = num_experts // ranks
        self.row_bytes = hidden * self.dtype.itemsize
        self.row_capacity = plan_layout.row_capacity(num_tokens, num_topk, num_experts, ranks, token_padding)
        weight_sms = num_sms
        if num_sms is None:
            num_sms = layout.default_num_sms(ranks, num_experts, num_topk, device.num_sms)
            weight_sms = max(num_sms, layout.PULL_SMS)
        self.num_sms, self._weight_sms = min(num_sms, device.num_sms), min(weight_sms, device.num_sms)
        self.ring_tokens = layout.ring_tokens(
            num_tokens, self.row_bytes, self.row_capacity * self.row_bytes, ranks
        )

        plan_grid = plan_layout.grid_blocks(num_tokens, device.num_sms)
        halves = -(-num_tokens // (self.ring_tokens // 2))
        areas = Areas(
            receive=self.row_capacity * self.row_bytes,
            records=ranks * num_tokens * layout.align(2 * num_topk, 4) * 4,
            dispatch_flags=ranks * num_tokens * 4,
            ring=(ranks - 1) * self.ring_tokens * self.row_bytes,
            ring_weights=(ranks - 1) * self.ring_tokens * num_topk * 4,
            combine_flags=ranks * num_tokens * 4,
            credits=halves * ranks * 4,
            packets=plan_layout.packets_bytes(num_experts, ranks),
            left=ranks * 4,
        )
        grids = dict.fromkeys((args.OP_DISPATCH, args.OP_COMBINE), self.num_sms)
        grids |= {args.OP_PLAN: plan_grid, args.OP_REDUCE_GRAD: self._weight_sms}
        super().__init__(group, areas, grids)
        self._plan_layout = PlanLayout(ranks, num_tokens, num_topk, num_experts)
        self._num_plans = 0
        self._live_plan = None  # the plan of the last dispatch: its rows are the ones in the receive area
        self._live_weights = None  # the plan of the last dispatch with zero_copy_weights
        self._complete(lambda: self._prepare(plan_grid, halves))

    def _prepare(self, plan_grid, halves):
        """What is this rank's own: arrays and kernels."""
        device = self.device
        self._rows_view = self._symmetric.array(
            self._areas["receive"], (self.row_capacity, self.hidden), self.dtype
        )
        self._receive_begin = device.pointer(self._rows_view)
        self._receive_end = self._receive_begin + self._rows_view.nbytes
        self._weights_view = device.zeros((self.row_capacity,), np.float32)
        self._scratch = device.zeros((plan_layout.scratch_bytes(self.num_experts, plan_grid),), np.uint8)
        self._counters = device.zeros((halves + 1,), np.uint32)
        self._plan_kernel = buffer_kernels.plan(self, plan_grid, self._scratch)
        self._dispatch_kernel = buffer_kernels.dispatch(self)
        self._combine_kernel = buffer_kernels.combine(self, self._counters[:halves])
        self._prefetch_kernel = buffer_kernels.prefetch(self)
        self._reduce_grad_kernel = buffer_kernels.reduce_grad(self, self._counters[halves:])
        device.synchronize(device.handle(device.current_stream()))

    # operations
    # ----------

    def plan(self, topk_idx, *, stream=None) -> Plan:
        """Decides where every entry of this step goes. Collective; nothing waits for the host.

        Args:
            topk_idx: [s, K] int32 or int64 expert ids, s <= num_tokens; -1 = no expert, other ids outside the
                experts act as -1 and make `check()` raise. A token may name an expert twice.
            stream: stream to work on; None = the current one.

        Returns:
            The Plan. It may be used for any number of dispatches and combines.
        """
        caller, handle = self._streams(stream, False, topk_idx)
        indices = self._take_topk(topk_idx, caller)
        with self._call(caller, handle):
            plan = self._plan(indices, caller, handle)
            self._keep(handle, False, stream, indices, plan)
        plan._of_torch = foreign.is_torch(topk_idx)
        return plan

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        *,
        plan=None,
        total_tokens=None,
        out=None,
        zero_copy=False,
        zero_copy_weights=False,
        async_finish=False,
        stream=None,
    ) -> Dispatched:
        """Sends every token's row to the ranks that hold its experts, grouped by expert there. Collective.

        Args:
            x: [s, hidden] rows of the buffer's dtype.
            topk_idx: [s, K] expert ids, to be planned now; or
            plan: a Plan of this buffer with num_tokens = s. Exactly one of both.
            topk_weights: [s, K] float32 route weights that travel with the rows, or None; the same choice on
                all ranks.
            total_tokens: the sum of s over all ranks, where the host knows it: the result then has the step's
                rows instead of the buffer's capacity.
            out: [rows or more, hidden] array to write the received rows into; its first rows are returned.
            zero_copy: return a view of the buffer's receive area; the next dispatch overwrites it.
            zero_copy_weights: likewise a view of the received weights; the next dispatch with
                zero_copy_weights overwrites it.
            async_finish: work on the communication stream, after what is on `stream` by now; results may be
                used after `event.wait()`.
            stream: the caller's stream; None = the current one.

        Raises:
            ValueError, TypeError: bad input; nothing has been sent and no peer is held up if the call is made
                again in time.
            PeerTimeoutError: an earlier call's peer did not come.
        """
        device = self.device
        caller, handle = self._streams(stream, async_finish, x)
        if (topk_idx is None) == (plan is None):
            raise ValueError("dispatch: expected exactly one of topk_idx and plan")
        if plan is None:
            indices = self._take_topk(topk_idx, caller)
            num_tokens = indices.shape[0]
        else:
            self._check_plan(plan)
            num_tokens = plan.num_tokens
        give = giver(x, None if async_finish else handle)
        rows = take(device, x, "x", dtypes=(self.dtype,), shape=(num_tokens, self.hidden), stream=caller)
        pointer = device.pointer(rows)
        if num_tokens and self._receive_begin <= pointer < self._receive_end:
            raise ValueError(
                "x: it lies in the buffer's receive area, which this dispatch writes to: pass a copy"
            )
        num_rows = self._step_rows(total_tokens)
        if topk_weights is not None:
            topk_weights = take(
                device,
                topk_weights,
                "topk_weights",
                dtypes=_WEIGHT_DTYPES,
                shape=(num_tokens, self.num_topk),
                stream=caller,
            )
            if zero_copy_weights and self._overlap(topk_weights, self._weights_view):
                raise ValueError(
                    "topk_weights: they lie where this dispatch writes the received weights: pass a copy"
                )
        if out is not None:
            if zero_copy:
                raise ValueError("dispatch: out and zero_copy exclude each other")
            target = take(
                device,
                out,
                "out",
                dtypes=(self.dtype,),
                shape=(None, self.hidden),
                stream=caller,
                writable=True,
            )
            if target.shape[0] < num_rows:
                raise ValueError(f"out: expected at least {num_rows} rows, got {target.shape[0]}")
            target = target[:num_rows]
            if self._overlap(target, self._rows_view):
                raise ValueError(
                    "out: expected memory of your own, got the buffer's receive area "
                    "(zero_copy returns a view of it)"
                )
        with self._call(caller, handle):
            if plan is None:
                plan = self._plan(indices, caller, handle)
                plan._of_torch = foreign.is_torch(topk_idx)
            weights = None
            if topk_weights is not None:
                weights = (
                    self._weights_view
                    if zero_copy_weights
                    else device.empty((self.row_capacity,), np.float32, caller)
                )
            a = self._dispatch_kernel.args
            a.x = pointer
            a.topk_weights = None if weights is None else device.pointer(topk_weights)
            a.row_weights = None if weights is None else device.pointer(weights)
            a.dst = plan._dst_pointer
            a.num_tokens_per_rank = plan._pointer("num_tokens_per_rank")
            a.counts = plan._pointer("num_tokens_per_expert")
            a.cu_seqlens = plan._pointer("cu_seqlens")
            a.rows = plan._pointer("rows")
            a.num_tokens = num_tokens
            a.with_weights = weights is not None  # an empty array's address may be null
            a.choice = 2 * plan._number + a.with_weights
            a.result_rows = num_rows
            self._launch(self._dispatch_kernel, handle)
            plan.dispatched, plan.total_tokens = True, total_tokens
            self._live_plan = plan
            if weights is self._weights_view:
                self._live_weights = plan
            received = self._rows_view if num_rows == self.row_capacity else self._rows_view[:num_rows]
            if not zero_copy:
                if out is None:
                    target = device.empty(received.shape, self.dtype, caller)
                device.copy(target, received, handle)
                received = target
            event = self._keep(handle, async_finish, stream, rows, topk_weights, received, weights, plan)
        if weights is not None and num_rows < self.row_capacity:
            weights = weights[:num_rows]
        cu_seqlens = plan.cu_seqlens
        if give is not None:
            received, weights, cu_seqlens = give(received), give(weights), give(cu_seqlens)
        return Dispatched(received if out is None else out[:num_rows], weights, cu_seqlens, plan, event)

    def combine(
        self,
        x,
        plan,
        *,
        row_weights=None,
        out=None,
        zero_copy=False,
        zero_copy_weights=False,
        async_finish=False,
        stream=None,
    ) -> Combined:
        """Brings every token's rows back and sums them, unweighted. Collective. The backward of dispatch, and
        its mirror.

        A rank's rows of a token are summed in float32 in ascending k and rounded once to the row type; these
        partial sums are added in ascending rank order in float32 and rounded once. Same input, same bits.

        Args:
            x: [rows, hidden] rows of the buffer's dtype, laid out as dispatch delivered them; read where they
                lie.
            plan: the Plan of that dispatch.
            row_weights: [rows] float32 or None: one value a row, brought back to [s, K] (the gradient of the
                route weights); the same choice on all ranks.
            out: [s, hidden] array to write the sums into.
            zero_copy: assert that x is this buffer's live view, as the last dispatch returned it. A stale
                view, or a part of one, is refused in any case.
            zero_copy_weights: likewise for row_weights, of the last dispatch with zero_copy_weights.
            async_finish, stream: as in dispatch.

        Raises:
            ValueError, TypeError: bad input; nothing has been sent.
            PeerTimeoutError: an earlier call's peer did not come.
        """
        device = self.device
        caller, handle = self._streams(stream, async_finish, x)
        self._check_plan(plan)
        if not plan.dispatched:
            raise ValueError(
                "combine: the plan has not been dispatched yet, so no rank knows which rows it holds of "
                "which token"
            )
        give = giver(x, None if async_finish else handle)
        rows = take(device, x, "x", dtypes=(self.dtype,), shape=(None, self.hidden), stream=caller)
        self._check_view("x", rows, self._rows_view, self._live_plan is plan, zero_copy)
        if row_weights is not None:
            row_weights = take(
                device,
                row_weights,
                "row_weights",
                dtypes=_WEIGHT_DTYPES,
                shape=(rows.shape[0],),
                stream=caller,
            )
            live = self._live_weights is plan
            self._check_view("row_weights", row_weights, self._weights_view, live, zero_copy_weights)
        shape = (plan.num_tokens, self.hidden)
        if out is None:
            target = device.empty(shape, self.dtype, caller)
        else:
            target = take(device, out, "out", dtypes=(self.dtype,), shape=shape, stream=caller, writable=True)
            if self._overlap(target, rows) or (
                row_weights is not None and self._overlap(target, row_weights)
            ):
                raise ValueError("out: it overlaps the rows or weights that are being combined")
        weights = None
        if row_weights is not None:
            weights = device.empty((plan.num_tokens, self.num_topk), np.float32, caller)
        with self._call(caller, handle):
            a = self._combine_kernel.args
            a.x = device.pointer(rows)
            a.row_weights = None if weights is None else device.pointer(row_weights)
            a.out = device.pointer(target)
            a.topk_weights = None if weights is None else device.pointer(weights)
            a.dst = plan._dst_pointer
            a.num_tokens_per_rank = plan._pointer("num_tokens_per_rank")
            a.rows = plan._pointer("rows")
            a.num_tokens = plan.num_tokens
            a.x_rows = rows.shape[0]
            a.with_weights = weights is not None
            a.choice = 2 * plan._number + a.with_weights
            self._launch(self._combine_kernel, handle)
            event = self._keep(handle, async_finish, stream, rows, row_weights, target, weights, plan)
        if give is not None:
            target, weights = give(target), give(weights)
        return Combined(target if out is None else out, weights, event)

    def prefetch_weight(self, plan, *pools, async_finish=False, stream=None):
        """Pulls the experts that the plan copies to this rank into the prefetch slots of each pool, in one
        launch.

        Waits for no peer. So weights may be changed only after a plan or dispatch that is later than the last
        prefetch, and before the plan or dispatch that the next prefetch follows: prefetch before a step's
        dispatch, update before the next step's plan (docs/memory.md).

        Args:
            plan: a Plan of this buffer.
            pools: ExpertPools of this buffer, at most 32.
            async_finish, stream: as in dispatch; for a plan of torch's topk_idx the current stream is
                torch's.

        Returns:
            An Event with async_finish, else None.
        """
        return self._over_pools(self._prefetch_kernel, plan, pools, async_finish, stream)

    def reduce_grad(self, plan, *pools, async_finish=False, stream=None):
        """Adds the gradients of copied experts to their homes, and clears the slots they lay in. Collective.

        home = home + slots of the ranks that held a copy, in ascending rank, in float32. Home rows of experts
        that nobody copied, and slots that the plan left idle, are not touched. Done when the own experts have
        all gradients of copies and the own slots are zero.

        Args:
            plan: a Plan of this buffer, the same step's on all ranks.
            pools: different float32 ExpertPools of this buffer, at most 32, in the same order on all ranks.
            async_finish, stream: as in prefetch_weight.

        Returns:
            An Event with async_finish, else None.
        """
        for pool in pools:
            if isinstance(pool, ExpertPool) and pool.dtype != dtypes.float32:
                raise TypeError(f"reduce_grad: expected pools of float32, got {pool.dtype.name}")
        if len(set(map(id, pools))) < len(pools):
            raise ValueError("reduce_grad: expected every pool once, since its slots are cleared")
        return self._over_pools(self._reduce_grad_kernel, plan, pools, async_finish, stream)

    # helpers
    # -------

    def _plan(self, topk_idx, caller, handle):
        plan = Plan(self, topk_idx.shape[0], caller)
        a = self._plan_kernel.args
        a.topk_idx = self.device.pointer(topk_idx)
        a.index_bytes = topk_idx.dtype.itemsize
        a.num_tokens = plan.num_tokens
        a.dst = plan._dst_pointer
        a.num_tokens_per_rank = plan._pointer("num_tokens_per_rank")
        a.counts = plan._pointer("num_tokens_per_expert")
        a.cu_seqlens = plan._pointer("cu_seqlens")
        a.experts_to_copy = plan._pointer("experts_to_copy")
        self._launch(self._plan_kernel, handle)
        self._num_plans = plan._number = self._num_plans % 2**30 + 1
        return plan

    def _over_pools(self, kernel, plan, pools, async_finish, stream):
        self._check_plan(plan)
        if stream is None and plan._of_torch and self.device.kind == "cuda":
            stream = foreign.torch_stream(self.device.index)
        caller, handle = self._streams(stream, async_finish)
        if not 1 <= len(pools) <= args.MAX_POOLS:
            raise ValueError(f"pools: expected 1 to {args.MAX_POOLS}, got {len(pools)}")
        for pool in pools:
            if not isinstance(pool, ExpertPool) or pool.buffer is not self:
                raise ValueError(f"pools: expected ExpertPools of this buffer, got {pool!r}")
        with self._call(caller, handle):
            for pool in pools:
                pool._require_open()
            a = kernel.args
            a.experts_to_copy = plan._pointer("experts_to_copy")
            a.num_pools = len(pools)
            for i, pool in enumerate(pools):
                a.pools[i] = pool._descriptor
            self._launch(kernel, handle)
            return self._keep(handle, async_finish, stream, plan, pools)

    def _take_topk(self, topk_idx, caller):
        topk_idx = take(
            self.device,
            topk_idx,
            "topk_idx",
            dtypes=_INDEX_DTYPES,
            shape=(None, self.num_topk),
            stream=caller,
        )
        if topk_idx.shape[0] > self.num_tokens:
            raise ValueError(
                f"topk_idx: expected at most {self.num_tokens} tokens (num_tokens), got {topk_idx.shape[0]}"
            )
        return topk_idx

    def _check_plan(self, plan):
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
        if plan._buffer_id != self._id:
            raise ValueError("plan: it belongs to another buffer")

    def _check_view(self, name, array, view, live, asserted):
        """A view that dispatch returned is good as a whole, and for the plan that it was made with last."""
        begins, offset = self.device.pointer(view), self.device.pointer(array)
        if begins <= offset < begins + view.nbytes:
            if offset != begins:
                raise ValueError(
                    f"{name}: a part of this buffer's view: rows count from its start, "
                    "pass all of it or a copy"
                )
            if not live:
                raise ValueError(f"{name}: a stale view: a later dispatch of this buffer has overwritten it")
        elif asserted:
            raise ValueError(f"{name}: expected this buffer's own view (zero copy), got other memory")

    def _step_rows(self, total_tokens):
        if total_tokens is None:
            return self.row_capacity
        if type(total_tokens) is not int:
            total_tokens = integer("total_tokens", total_tokens)
        most = self.group.size * self.num_tokens
        if not 0 <= total_tokens <= most:
            raise ValueError(f"total_tokens: expected 0 to {most} (ranks * num_tokens), got {total_tokens}")
        rows = plan_layout.row_prefix(
            total_tokens, self.num_topk, self.num_experts, self.group.size, self.token_padding
        )
        return min(rows, self.row_capacity)

    def _local_bytes(self):
        arrays = (self._weights_view, self._scratch, self._counters)
        return super()._local_bytes() + sum(array.nbytes for array in arrays)

    def _close_views(self):
        self._rows_view = None
