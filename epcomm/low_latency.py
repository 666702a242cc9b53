"""MoECommunicator: few tokens to their experts and back at the least latency, safe in CUDA graphs."""

import enum
import itertools
import os

import numpy as np

from . import dtypes, low_latency_kernels
from . import low_latency_layout as layout
from .arrays import giver, take
from .endpoint import Endpoint
from .errors import HandleError
from .group import Group
from .integers import positive
from .low_latency_output import (
    DispatchHandle,
    DispatchLayout,
    DispatchLayoutInfo,
    DispatchOutput,
    DispatchQuant,
    Slab,
)
from .quant import QuantConfig, row_dtype
from .runtime import _dlpack, args

_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_WEIGHT_DTYPES = (np.dtype(np.float32),)
_BF16 = (dtypes.bfloat16,)
_ids = itertools.count()


class MoEMode(enum.Enum):
    """What a communicator is made for. (For many tokens there is Buffer.)"""

    LOW_LATENCY = "low_latency"


class CombineMode(enum.Enum):
    """Who sums a token's rows.

    RANK_LOCAL_REDUCE: each rank its own, rounded to bf16, then the source the ranks' sums: one row a rank on
    the wire. DIRECT_SEND: the source all of them, with one rounding: one row an entry on the wire.
    """

    RANK_LOCAL_REDUCE = "rank_local_reduce"
    DIRECT_SEND = "direct_send"


class MoECommunicator(Endpoint):
    """Low-latency dispatch and combine. Collective: all ranks make the same calls in the same order.

    Args:
        group: the Group; all its ranks construct the communicator with the same settings.
        num_experts: over all ranks (E), a multiple of R; rank r holds experts r*E/R to (r+1)*E/R - 1.
        hidden_size: columns of a row (H), a multiple of 8; of 128 with `quant`.
        topk: entries of a token (K), 1 to 32.
        max_tokens_per_rank: most tokens of a rank in a call (T).
        num_local_experts: None, or num_experts / ranks.
        mode: MoEMode.LOW_LATENCY.
        output_layout: DispatchLayout of the tokens.
        combine_mode: CombineMode.
        quant: QuantConfig: rows travel and arrive as fp8; None: as bf16.
        num_blocks: most blocks (SMs) of a kernel; None = one a token and one more, as far as there are.

    Raises:
        ValueError: a setting is out of range, or the ranks disagree; on every rank, naming field and rank.
        HandleError: the ranks cannot map each other's memory.
    """

    def __init__(
        self,
        group,
        *,
        num_experts,
        hidden_size,
        topk,
        max_tokens_per_rank,
        num_local_experts=None,
        mode=MoEMode.LOW_LATENCY,
        output_layout=DispatchLayout.EXPERT_MAJOR,
        combine_mode=CombineMode.RANK_LOCAL_REDUCE,
        quant=None,
        num_blocks=None,
    ):
        if not isinstance(group, Group):
            raise TypeError(f"group: expected a Group, got {type(group).__name__}")
        device = group.device
        numbers = dict(
            num_experts=num_experts,
            hidden_size=hidden_size,
            topk=topk,
            max_tokens_per_rank=max_tokens_per_rank,
        )
        kinds = dict(mode=(mode, MoEMode), output_layout=(output_layout, DispatchLayout))
        kinds["combine_mode"] = (combine_mode, CombineMode)
        signal = os.environ.get("EPCOMM_LL_SIGNAL") or "lines"
        problem = _problem(kinds, quant, signal)
        try:
            numbers = {name: positive(name, value) for name, value in numbers.items()}
            num_blocks = None if num_blocks is None else positive("num_blocks", num_blocks)
        except (TypeError, ValueError) as error:
            problem = problem or error
        num_experts, hidden_size, topk, max_tokens_per_rank = numbers.values()
        problem = problem or layout.problem(
            group,
            **numbers,
            num_local_experts=num_local_experts,
            quantised=quant is not None,
        )
        shape = shared = None
        if problem is None:
            shape = layout.Shape(
                group.size,
                num_experts,
                hidden_size,
                topk,
                max_tokens_per_rank,
                rank_major=output_layout is DispatchLayout.RANK_MAJOR,
                direct_send=combine_mode is CombineMode.DIRECT_SEND,
                quant=quant,
                lines=signal == "lines",
            )
            try:
                shared = layout.shared(shape, device.max_shared)
            except ValueError as error:
                problem = str(error)
        settings = numbers | {name: str(value) for name, (value, _) in kinds.items()}
        group.agree("MoECommunicator", settings | dict(quant=repr(quant), EPCOMM_LL_SIGNAL=signal), problem)

        self._id = next(_ids)
        self.num_experts, self.num_local_experts = num_experts, shape.local_experts
        self.hidden_size, self.topk, self.max_tokens_per_rank = hidden_size, topk, max_tokens_per_rank
        self.mode, self.output_layout, self.combine_mode, self.quant = (
            mode,
            output_layout,
            combine_mode,
            quant,
        )
        self.num_blocks = min(max_tokens_per_rank + 1, device.num_sms, num_blocks or device.num_sms)
        grids = dict.fromkeys((args.OP_LL_DISPATCH, args.OP_LL_COMBINE), self.num_blocks)
        try:
            super().__init__(group, layout.areas(shape), grids)
        except HandleError as error:
            if _num_hosts(group) == 1:
                raise
            raise HandleError(
                "ranks on several hosts need fabric handles, so one NVLink domain; RDMA between hosts is not "
                f"supported: {error}"
            ) from error
        self._shape = shape
        self._row_dtype = row_dtype(quant)
        self._stored_dtype = dtypes.storage(self._row_dtype, device.kind)
        self._row_dtypes = (self._row_dtype,)
        self._ndarray, self._gpu = device.xp.ndarray, device.index if device.kind == "cuda" else -1
        self._slab_layout = layout.SlabLayout(shape)
        self._complete(lambda: self._make_kernels(shared))

    def _make_kernels(self, shared):
        self._dispatch_kernel = low_latency_kernels.dispatch(self, self._shape, shared, self._slab_layout)
        self._combine_kernel = low_latency_kernels.combine(self, self._shape, self._slab_layout)

    # -- operations ----------------------------------------------------------------------------------------

    def dispatch(self, x, topk_idx, topk_weights=None, *, output_buffer=None, stream=None):
        """Sends every token's row to the ranks of its experts. Collective; nothing waits for the host.

        Rows of one source are contiguous and in token order, so the same input gives the same rows. In a
        capture, keep both results for as long as the graph: their memory is part of it.

        Args:
            x: [t, H] bfloat16, t from 0 to max_tokens_per_rank, another t on every rank if need be.
            topk_idx: [t, K] int32 or int64 global expert ids; -1 = no expert. Other ids outside the experts
                act as -1 and make `check()` raise. A token may name an expert twice: it has one row there.
            topk_weights: [t, K] float32; None = 1.
            output_buffer: array for the tokens, of their shape and dtype; None = a new one.
            stream: stream to work on; None = the current one.

        Returns:
            (DispatchOutput, DispatchHandle).

        Raises:
            ValueError, TypeError: bad input; nothing has been sent and no peer is held up if the call is made
                again in time.
            PeerTimeoutError: an earlier call's peer did not come.
        """
        device, shape, kernel = self.device, self._shape, self._dispatch_kernel
        _, handle = self._streams(stream, False, x)
        self._refuse_cold(kernel, handle)
        give = giver(x, handle)
        rows = self._take(x, "x", _BF16, (None, shape.hidden), handle)
        num_tokens = rows.shape[0]
        if num_tokens > shape.max_tokens:
            raise ValueError(
                f"x: expected at most {shape.max_tokens} tokens (max_tokens_per_rank), got {num_tokens}"
            )
        wanted = (num_tokens, shape.topk)
        topk_idx = self._take(topk_idx, "topk_idx", _INDEX_DTYPES, wanted, handle)
        if topk_weights is not None:
            topk_weights = self._take(topk_weights, "topk_weights", _WEIGHT_DTYPES, wanted, handle)
        source = device.pointer(rows)
        if output_buffer is None:
            tokens = device.empty(shape.tokens_shape, self._stored_dtype, handle)
            target = device.pointer(tokens)
        else:
            tokens = self._take(
                output_buffer, "output_buffer", self._row_dtypes, shape.tokens_shape, handle, writable=True
            )
            target = device.pointer(tokens)
            if target < source + rows.nbytes and source < target + tokens.nbytes:
                raise ValueError("output_buffer: it overlaps x, which is read at the same time")
        memory = device.empty(self._slab_layout.nbytes, np.uint8, handle)
        pointer = device.pointer(memory)
        with self._call(handle, handle):
            a = kernel.args
            a.x = source
            a.topk_idx = device.pointer(topk_idx)
            a.topk_weights = None if topk_weights is None else device.pointer(topk_weights)
            a.tokens = target
            a.slab = pointer
            a.num_tokens = num_tokens
            a.index_bytes = topk_idx.itemsize
            self._launch(kernel, handle)
        beside = None if give is None else giver(x)  # tokens have ordered the streams
        slab = Slab(memory, self._slab_layout.fields, beside)
        if output_buffer is not None:
            tokens = output_buffer
        elif give is not None:
            tokens = give(tokens, self._row_dtype)
        routed = slab if shape.rank_major else None
        quant = None if self.quant is None else DispatchQuant(self.quant.format, slab)
        output = DispatchOutput(tokens, DispatchLayoutInfo(self.output_layout, slab), quant, routed, routed)
        return output, DispatchHandle(self._id, slab, pointer, num_tokens)

    def combine(self, expert_output, handle, *, out=None, stream=None):
        """Brings the experts' rows back to their tokens, weighted and summed in a fixed order. Collective.

        Args:
            expert_output: bfloat16. EXPERT_MAJOR: [local_experts, R*T, H]. RANK_MAJOR: [R*T, H], rows that
                the caller has weighted and summed over this rank's experts; with DIRECT_SEND [R*T, K, H], one
                unweighted row an entry.
            handle: the DispatchHandle of a dispatch of this communicator, the same one on all ranks.
            out: [t, H] array for the result; None = a new one.
            stream: stream to work on; None = the current one.

        Returns:
            [t, H] bfloat16; a token without experts gives zeros.

        Raises:
            ValueError, TypeError: bad input, or a handle of another communicator; nothing has been sent.
            PeerTimeoutError: an earlier call's peer did not come.
        """
        device, shape, kernel = self.device, self._shape, self._combine_kernel
        _, on = self._streams(stream, False, expert_output)
        self._refuse_cold(kernel, on)
        if not isinstance(handle, DispatchHandle):
            raise TypeError(f"handle: expected a DispatchHandle, got {type(handle).__name__}")
        if handle._communicator != self._id:
            raise ValueError("handle: it belongs to another communicator")
        give = giver(expert_output, on)
        wanted = shape.expert_output_shape
        rows = self._take(expert_output, "expert_output", _BF16, wanted, on)
        source = device.pointer(rows)
        wanted = (handle.num_tokens, shape.hidden)
        if out is None:
            sums = device.empty(wanted, dtypes.bfloat16, on)
            target = device.pointer(sums)
        else:
            sums = self._take(out, "out", _BF16, wanted, on, writable=True)
            target = device.pointer(sums)
            if target < source + rows.nbytes and source < target + sums.nbytes:
                raise ValueError("out: it overlaps expert_output, which is read at the same time")
        with self._call(on, on):
            a = kernel.args
            a.x = source
            a.out = target
            a.slab = handle._pointer
            a.num_tokens = handle.num_tokens
            self._launch(kernel, on)
        if out is not None:
            return out
        return sums if give is None else give(sums)

    def _take(self, x, name, dtypes, shape, handle, writable=False):
        """`take`, with a look first at what needs nothing: this is the path of every call."""
        if type(x) is self._ndarray and _dlpack.ready(x, dtypes, shape, self._gpu, writable):
            return x
        return take(self.device, x, name, dtypes=dtypes, shape=shape, stream=handle, writable=writable)

    # -- what there is -------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Whether the communicator can be used: not closed, and no call of it has failed."""
        return self._symmetric is not None and not self._alarm[0]

    def is_internode_available(self) -> bool:
        """Whether it reaches several hosts: the ranks run there, and fabric handles span them."""
        return self.is_available() and _num_hosts(self.group) > 1


def _num_hosts(group):
    return len({peer.boot_id for peer in group.peers})


def _problem(kinds, quant, signal):
    for name, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            return f"{name}: expected one of {', '.join(map(str, kind))}, got {value!r}"
    if quant is not None and not isinstance(quant, QuantConfig):
        return f"quant: expected None or a QuantConfig, got {quant!r}"
    if signal not in ("lines", "flags"):
        return f"EPCOMM_LL_SIGNAL: expected lines or flags, got {signal!r}"
    return None
