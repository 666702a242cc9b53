"""MoECommunicator: few tokens to their experts and back at the least latency, one kernel each way, safe in CUDA graphs."""

import enum
import itertools
import os

import numpy as np

from . import dtypes
from . import low_latency_layout as layout
from .arrays import giver, take
from .endpoint import Endpoint, Operation
from .errors import HandleError
from .quant import QuantConfig, row_dtype
from .runtime import args

_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_WEIGHT_DTYPES = (np.dtype(np.float32),)
_OUTPUT_DTYPES = (dtypes.bfloat16,)
_ids = itertools.count()


class MoEMode(enum.Enum):
    """What a communicator is made for. (For many tokens there is Buffer.)"""

    LOW_LATENCY = "low_latency"


class DispatchLayout(enum.Enum):
    """Where rows lie after dispatch.

    EXPERT_MAJOR: `[local_experts, R*T, H]`, a row for each expert that a token names here. RANK_MAJOR: `[R*T, H]`, one row a token, and
    beside it which of this rank's experts it names.
    """

    EXPERT_MAJOR = "expert_major"
    RANK_MAJOR = "rank_major"


class CombineMode(enum.Enum):
    """Who sums a token's rows.

    RANK_LOCAL_REDUCE: each rank its own (rounded to bf16), the source the ranks' sums: one row a rank on the wire. DIRECT_SEND: the source
    all of them, with one rounding: one row an expert on the wire.
    """

    RANK_LOCAL_REDUCE = "rank_local_reduce"
    DIRECT_SEND = "direct_send"


class _Slab:
    """The arrays of one dispatch; views are made when somebody asks."""

    __slots__ = ("_array", "_fields", "_give", "_views")

    def __init__(self, array, fields, give):
        self._array = array
        self._fields = fields
        self._give = give
        self._views = {}

    def view(self, name):
        """The array of a field, in the kind of the caller's arrays; None if this layout has no such field."""
        if name not in self._fields:
            return None
        if name not in self._views:
            offset, shape, dtype = self._fields[name]
            nbytes = int(np.prod(shape)) * dtype.itemsize
            array = self._array[offset : offset + nbytes].view(dtype).reshape(shape)
            self._views[name] = array if self._give is None else self._give(array)
        return self._views[name]


class DispatchLayoutInfo:
    """How many rows came. Device arrays, read from the device only when you ask for their content."""

    __slots__ = ("_slab", "kind")

    def __init__(self, kind, slab):
        self.kind = kind
        self._slab = slab

    @property
    def num_tokens_per_expert(self):
        """[local_experts] int32: rows of each local expert, from row 0 on; None in RANK_MAJOR."""
        return self._slab.view("counts") if self.kind is DispatchLayout.EXPERT_MAJOR else None

    @property
    def num_tokens_per_rank(self):
        """[R] int32: rows from each rank r, from row r*T on; None in EXPERT_MAJOR."""
        return self._slab.view("counts") if self.kind is DispatchLayout.RANK_MAJOR else None


class DispatchQuant:
    """What is needed to read quantised rows."""

    __slots__ = ("_slab", "format")

    def __init__(self, format, slab):
        self.format = format
        self._slab = slab

    @property
    def block_scales(self):
        """[..., H/128] float32: element = tokens * scale of its 128 columns."""
        return self._slab.view("block_scales")


class DispatchOutput:
    """What `MoECommunicator.dispatch` delivers.

    Attributes:
        tokens: [local_experts, R*T, H] or [R*T, H], bfloat16, or float8_e4m3fn under a QuantConfig (on CuPy its bits as uint8). Rows that
            nobody sent are not written.
        layout: DispatchLayoutInfo.
        quant: DispatchQuant, or None for bfloat16.
        topk_idx: RANK_MAJOR: [R*T, K] int32, global expert ids; -1 = not on this rank, or no row. Else None.
        topk_weights: RANK_MAJOR: [R*T, K] float32; 0 = not on this rank, or no row. Else None.
    """

    __slots__ = ("_topk_idx", "_topk_weights", "layout", "quant", "tokens")

    def __init__(self, tokens, layout, quant, topk_idx, topk_weights):
        self.tokens = tokens
        self.layout = layout
        self.quant = quant
        self._topk_idx = topk_idx
        self._topk_weights = topk_weights

    @property
    def topk_idx(self):
        return self._topk_idx.view("topk_idx") if type(self._topk_idx) is _Slab else self._topk_idx

    @property
    def topk_weights(self):
        return self._topk_weights.view("topk_weights") if type(self._topk_weights) is _Slab else self._topk_weights


class DispatchHandle:
    """What combine needs of a dispatch; it owns its memory, so any number may be outstanding and each may be combined more than once.

    num_tokens: tokens that this rank dispatched.
    """

    __slots__ = ("_communicator", "_pointer", "_slab", "num_tokens")

    def __init__(self, communicator, slab, pointer, num_tokens):
        self._communicator = communicator
        self._slab = slab
        self._pointer = pointer
        self.num_tokens = num_tokens

    @property
    def layout_range(self):
        """[local_experts, R] int64, or [R] in RANK_MAJOR: first row << 32 | number of rows from each source rank."""
        return self._slab.view("layout_range")

    @property
    def src_info(self):
        """[local_experts, R*T] int32, or [R*T] in RANK_MAJOR: each row's token index at its source. EXPERT_MAJOR: defined for the rows
        that came; RANK_MAJOR: -1 for the others."""
        return self._slab.view("src_info")


class MoECommunicator(Endpoint):
    """Low-latency dispatch and combine between the ranks of a group. Collective: all ranks make the same calls in the same order.

    Args:
        group: the Group; all its ranks construct the communicator with the same settings.
        num_experts: over all ranks, a multiple of the group's size; rank r holds experts r*E/R ... (r+1)*E/R - 1.
        hidden_size: columns of a row, a multiple of 8; of 128 with `quant`.
        topk: entries of a token, 1 to 32.
        max_tokens_per_rank: most tokens of a rank in a call (T).
        num_local_experts: None, or num_experts / ranks.
        mode: MoEMode.LOW_LATENCY.
        output_layout: DispatchLayout of `tokens`.
        combine_mode: CombineMode.
        quant: QuantConfig: rows travel and arrive as fp8; None: as bf16.
        num_blocks: most blocks (SMs) of a kernel; None = a block a token and one more, as far as the device has SMs.

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
        numbers = dict(num_experts=num_experts, hidden_size=hidden_size, topk=topk, max_tokens_per_rank=max_tokens_per_rank)
        kinds = dict(mode=(mode, MoEMode), output_layout=(output_layout, DispatchLayout), combine_mode=(combine_mode, CombineMode))
        signal = os.environ.get("EPCOMM_LL_SIGNAL") or "lines"
        problem = _problem(kinds, quant, signal) or layout.problem(
            group, **numbers, num_local_experts=num_local_experts, quantised=quant is not None, num_blocks=num_blocks
        )
        shape = None
        if problem is None:
            rank_major, direct_send = output_layout is DispatchLayout.RANK_MAJOR, combine_mode is CombineMode.DIRECT_SEND
            shape = layout.Shape(group.size, num_experts, hidden_size, topk, max_tokens_per_rank, rank_major, direct_send, quant, signal == "lines")
            try:
                shared = layout.shared(shape, group.device.max_shared)
            except ValueError as error:
                problem = str(error)
        settings = numbers | {name: str(value) for name, (value, _) in kinds.items()} | dict(quant=repr(quant), EPCOMM_LL_SIGNAL=signal)
        group.agree("MoECommunicator", settings, problem)

        device = group.device
        self._id = next(_ids)
        self.num_experts, self.hidden_size, self.topk, self.max_tokens_per_rank = num_experts, hidden_size, topk, max_tokens_per_rank
        self.num_local_experts = shape.local_experts
        self.mode, self.output_layout, self.combine_mode, self.quant = mode, output_layout, combine_mode, quant
        self.num_blocks = min(max_tokens_per_rank + 1, device.num_sms, num_blocks or device.num_sms)
        grids = dict.fromkeys((args.OP_LL_DISPATCH, args.OP_LL_COMBINE), self.num_blocks)
        try:
            super().__init__(group, layout.areas(shape), grids)
        except HandleError as error:
            if self._hosts(group) == 1:
                raise
            text = "ranks on several hosts need fabric handles in one NVLink domain; RDMA between hosts is not supported"
            raise HandleError(f"{text}: {error}") from error
        self._shape = shape
        self._tokens_dtype = dtypes.storage(row_dtype(quant), device.kind)
        self._slab_layout = layout.SlabLayout(shape)
        self._dispatch_kernel = self._make_dispatch(shared)
        self._combine_kernel = self._make_combine()
        device.synchronize(device.handle(device.current_stream()))
        group.barrier()

    # -- kernels: the fields that never change, and the launchers ------------------------------------------------------------

    def _make_dispatch(self, shared):
        device, areas, shape = self.device, self._areas, self._shape
        quant = shape.quant
        constants = dict(
            hidden=shape.hidden,
            topk=shape.topk,
            experts=shape.num_experts,
            ranks=shape.ranks,
            lines=int(shape.lines),
            rank_major=int(shape.rank_major),
            direct_send=int(shape.direct_send),
            fp8=int(quant is not None),
            power_of_two=int(quant is not None and quant.power_of_two_scales),
        )
        a = args.LowLatencyDispatchArgs(
            world=self._world,
            epochs=self._epochs_of(args.OP_LL_DISPATCH),
            at=self._slab_layout.offsets(),
            slots=areas["dispatch_slots"],
            flags=areas["dispatch_flags"],
            masks=areas["masks"],
            entries=areas["entries"],
            counts=areas["lengths"],
            capacity=shape.max_tokens,
            bitmap_words=shared.words,
            shared_counts=shared.counts,
            shared_masks=shared.masks,
            shared_places=shared.places,
            shared_table=shared.table,
            **constants,
        )
        grid = dict(grid=self.num_blocks, block=device.max_threads, shared=shared.nbytes)
        return Operation(a, device.launcher("low_latency_dispatch", a, **grid, shape=constants))

    def _make_combine(self):
        device, areas, shape = self.device, self._areas, self._shape
        constants = dict(
            hidden=shape.hidden,
            topk=shape.topk,
            ranks=shape.ranks,
            lines=int(shape.lines),
            rank_major=int(shape.rank_major),
            direct_send=int(shape.direct_send),
        )
        a = args.LowLatencyCombineArgs(
            world=self._world,
            epochs=self._epochs_of(args.OP_LL_COMBINE),
            at=self._slab_layout.offsets(),
            slots=areas["combine_slots"],
            flags=areas["combine_flags"],
            capacity=shape.max_tokens,
            **constants,
        )
        grid = dict(grid=self.num_blocks, block=device.max_threads, shared=layout.combine_shared(shape))
        return Operation(a, device.launcher("low_latency_combine", a, **grid, shape=constants))

    # -- operations ----------------------------------------------------------------------------------------------------------

    def dispatch(self, x, topk_idx, topk_weights=None, *, output_buffer=None, stream=None):
        """Sends every token's row to the ranks of its experts. Collective; nothing waits for the host.

        Args:
            x: [t, H] bfloat16, t from 0 to max_tokens_per_rank, different on every rank.
            topk_idx: [t, K] int32 or int64 global expert ids; -1 = no expert. Other ids outside the experts act as -1 and make `check()` raise.
                A token may name an expert twice: it gets one row there.
            topk_weights: [t, K] float32; None = 1.
            output_buffer: array for `tokens`, of their shape and dtype; None = a new one.
            stream: stream to work on; None = the current one.

        Returns:
            (DispatchOutput, DispatchHandle). Rows of one source are contiguous and in token order, so the order is always the same. In a
            graph capture keep both for as long as the graph: their memory is part of it.

        Raises:
            ValueError, TypeError: bad input; nothing has been sent and no peer is held up if the call is made again in time.
            PeerTimeoutError: an earlier call's peer did not come.
        """
        device, shape, kernel = self.device, self._shape, self._dispatch_kernel
        _, handle = self._streams(stream, False)
        self._refuse_cold(kernel, handle)
        give = giver(x)
        rows = take(device, x, "x", dtypes=_OUTPUT_DTYPES, shape=(None, shape.hidden), stream=handle)
        num_tokens = rows.shape[0]
        if num_tokens > shape.max_tokens:
            raise ValueError(f"x: expected at most {shape.max_tokens} tokens (max_tokens_per_rank), got {num_tokens}")
        entries = (num_tokens, shape.topk)
        topk_idx = take(device, topk_idx, "topk_idx", dtypes=_INDEX_DTYPES, shape=entries, stream=handle)
        if topk_weights is not None:
            topk_weights = take(device, topk_weights, "topk_weights", dtypes=_WEIGHT_DTYPES, shape=entries, stream=handle)
        if output_buffer is None:
            tokens = device.empty(shape.tokens_shape, self._tokens_dtype)
        else:
            wanted = (row_dtype(self.quant),)
            tokens = take(device, output_buffer, "output_buffer", dtypes=wanted, shape=shape.tokens_shape, stream=handle, writable=True)
        memory = device.empty((self._slab_layout.nbytes,), np.uint8)
        pointer = device.pointer(memory)
        with self._call(handle, handle):
            a = kernel.args
            a.x = device.pointer(rows)
            a.topk_idx = device.pointer(topk_idx)
            a.topk_weights = None if topk_weights is None else device.pointer(topk_weights)
            a.tokens = device.pointer(tokens)
            a.slab = pointer
            a.num_tokens = num_tokens
            a.index_bytes = topk_idx.itemsize
            self._launch(kernel, handle)
        slab = _Slab(memory, self._slab_layout.fields, give)
        if output_buffer is not None:
            tokens = output_buffer
        elif give is not None:
            tokens = give(tokens, row_dtype(self.quant))
        beside = slab if shape.rank_major else None
        quant = None if self.quant is None else DispatchQuant(self.quant.format, slab)
        output = DispatchOutput(tokens, DispatchLayoutInfo(self.output_layout, slab), quant, beside, beside)
        return output, DispatchHandle(self._id, slab, pointer, num_tokens)

    def combine(self, expert_output, handle, *, out=None, stream=None):
        """Brings the experts' rows back to their tokens, weighted and summed in a fixed order (docs/low_latency.md). Collective.

        Args:
            expert_output: bfloat16. EXPERT_MAJOR: [local_experts, R*T, H]. RANK_MAJOR: [R*T, H], each row weighted and summed over this
                rank's experts by the caller; with DIRECT_SEND [R*T, K, H], one unweighted row an entry.
            handle: the DispatchHandle of this communicator's dispatch, the same one on all ranks.
            out: [t, H] array for the result; None = a new one.
            stream: stream to work on; None = the current one.

        Returns:
            [t, H] bfloat16; a token without experts gives zeros.

        Raises:
            ValueError, TypeError: bad input, or a handle of another communicator; nothing has been sent.
            PeerTimeoutError: an earlier call's peer did not come.
        """
        device, shape, kernel = self.device, self._shape, self._combine_kernel
        _, stream_handle = self._streams(stream, False)
        self._refuse_cold(kernel, stream_handle)
        if not isinstance(handle, DispatchHandle):
            raise TypeError(f"handle: expected a DispatchHandle, got {type(handle).__name__}")
        if handle._communicator != self._id:
            raise ValueError("handle: it belongs to another communicator")
        give = giver(expert_output)
        wanted = shape.expert_output_shape
        rows = take(device, expert_output, "expert_output", dtypes=_OUTPUT_DTYPES, shape=wanted, stream=stream_handle)
        wanted = (handle.num_tokens, shape.hidden)
        if out is None:
            target = device.empty(wanted, dtypes.bfloat16)
        else:
            target = take(device, out, "out", dtypes=_OUTPUT_DTYPES, shape=wanted, stream=stream_handle, writable=True)
        with self._call(stream_handle, stream_handle):
            a = kernel.args
            a.x = device.pointer(rows)
            a.out = device.pointer(target)
            a.slab = handle._pointer
            a.num_tokens = handle.num_tokens
            self._launch(kernel, stream_handle)
        if out is not None:
            return out
        return target if give is None else give(target)

    # -- what there is -------------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Whether the communicator can be used: not closed, and no call of it has failed."""
        return self._symmetric is not None and not self._alarm[0]

    def is_internode_available(self) -> bool:
        """Whether the ranks run on several hosts (then fabric handles reach across them) and the communicator can be used."""
        return self.is_available() and self._hosts(self.group) > 1

    @staticmethod
    def _hosts(group):
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
