"""Where everything of a MoECommunicator lies, and what its settings must be."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import quant
from .layout import Areas, align
from .runtime import args

PIECE = 16  # bytes that a lane moves
LINE = 128  # bytes of a line, of which 112 are data
LINE_DATA = 112
MAX_TOKENS = 1 << 16  # a packet has 16 bits for an index within a source, and 16 for an expert of a rank


@dataclass(frozen=True)
class Shape:
    """What a communicator is made for, as numbers.

    Attributes:
        ranks, num_experts, hidden, topk, max_tokens: `R, E, H, K, T`.
        rank_major, direct_send: the layout and the combine mode.
        quant: QuantConfig or None.
        lines: rows travel as lines, else with a flag each.
    """

    ranks: int
    num_experts: int
    hidden: int
    topk: int
    max_tokens: int
    rank_major: bool
    direct_send: bool
    quant: quant.QuantConfig | None
    lines: bool

    @property
    def local_experts(self):
        """Experts of a rank."""
        return self.num_experts // self.ranks

    @property
    def rows(self):
        """Rows of an expert (expert-major), or of a rank (rank-major): R*T."""
        return self.ranks * self.max_tokens

    @cached_property
    def tokens_shape(self):
        """Shape of what dispatch delivers."""
        return (self.rows, self.hidden) if self.rank_major else (self.local_experts, self.rows, self.hidden)

    @cached_property
    def expert_output_shape(self):
        """Shape of what combine takes."""
        if not self.rank_major:
            return (self.local_experts, self.rows, self.hidden)
        return (self.rows, self.topk, self.hidden) if self.direct_send else (self.rows, self.hidden)

    @property
    def lists(self):
        """Lists of rows on a rank: its experts, or one."""
        return 1 if self.rank_major else self.local_experts


def slot_bytes(row_bytes, lines) -> int:
    """Bytes of the slot that a row of `row_bytes` travels into."""
    return -(-row_bytes // LINE_DATA) * LINE if lines else align(row_bytes, LINE)


def areas(shape: Shape) -> Areas:
    """The symmetric areas, all of them twice, by parity of the epoch (docs/low_latency.md)."""
    rows, peers_rows = shape.rows, (shape.ranks - 1) * shape.max_tokens
    combine_slots = shape.max_tokens * shape.topk if shape.direct_send else rows
    return Areas(
        dispatch_slots=2 * peers_rows * slot_bytes(quant.row_bytes(shape.hidden, shape.quant), shape.lines),
        dispatch_flags=0 if shape.lines else 2 * 4 * peers_rows,
        masks=2 * rows * PIECE,
        entries=2 * rows * shape.topk * PIECE,
        lengths=2 * shape.ranks * shape.lists * 8,
        combine_slots=2 * combine_slots * slot_bytes(2 * shape.hidden, shape.lines),
        combine_flags=0 if shape.lines else 2 * 4 * rows,
    )


class SlabLayout:
    """The arrays of one dispatch, in one allocation.

    `fields[name]` is (offset in bytes, shape, dtype).

    For combine: rows [R, T, K], the rows here of each source's tokens, -1 = none: with direct send each at
    its k, else in ascending k in front; weights [R, T, K] beside them, where this rank applies them; targets
    [T, K], the ranks of the own entries; route_weights [T, K], their weights.

    For the caller: counts, layout_range, src_info; rank-major topk_idx and topk_weights; fp8 block_scales.
    """

    def __init__(self, shape: Shape):
        rows, topk, lists = shape.rows, shape.topk, () if shape.rank_major else (shape.local_experts,)
        self.fields = {}
        self.nbytes = 0
        self._add("rows", (rows, topk), np.int32)
        if not (shape.rank_major or shape.direct_send):
            self._add("weights", (rows, topk), np.float32)
        self._add("targets", (shape.max_tokens, topk), np.int32)
        self._add("route_weights", (shape.max_tokens, topk), np.float32)
        self._add("counts", lists or (shape.ranks,), np.int32)
        self._add("layout_range", (*lists, shape.ranks), np.int64)
        self._add("src_info", (*lists, rows), np.int32)
        if shape.rank_major:
            self._add("topk_idx", (rows, topk), np.int32)
            self._add("topk_weights", (rows, topk), np.float32)
        if shape.quant is not None:
            self._add("block_scales", (*shape.tokens_shape[:-1], shape.hidden // quant.BLOCK), np.float32)

    def _add(self, name, shape, dtype):
        self.fields[name] = (self.nbytes, shape, np.dtype(dtype))
        self.nbytes += align(int(np.prod(shape)) * np.dtype(dtype).itemsize, 128)

    def offsets(self) -> args.LowLatencySlab:
        """The offsets for the kernels; fields that there are not are 0 and not used."""
        return args.LowLatencySlab(**{name: offset for name, (offset, _, _) in self.fields.items()})


@dataclass(frozen=True)
class Shared:
    """A dispatch block's shared memory: offsets in bytes, and 32-token words of the table's window."""

    counts: int
    masks: int
    places: int
    table: int
    words: int
    nbytes: int


def shared(shape: Shape, limit) -> Shared:
    """Shared memory of low_latency_dispatch within `limit` bytes.

    Raises:
        ValueError: it does not fit.
    """
    lists = shape.ranks * shape.lists
    counts = align(quant.row_bytes(shape.hidden, shape.quant), 128)
    masks = counts + 4 * lists
    places = masks + 2 * 4 * shape.ranks
    table = places + 2 * 4 * shape.ranks * shape.topk
    a_word = 4 * (lists + 32 * shape.ranks)
    if combine_shared(shape) > limit:
        raise ValueError(
            f"hidden_size {shape.hidden}: a row must fit into the {limit} bytes of shared memory of a block"
        )
    words = min(-(-shape.max_tokens // 32), (limit - table - 4 * lists) // a_word)
    if words < 1:
        need = table + 4 * lists + a_word
        raise ValueError(
            f"hidden_size {shape.hidden} and {lists} lists of rows need {need} bytes of shared memory, a "
            f"block has {limit}"
        )
    return Shared(counts, masks, places, table, words, table + 4 * lists + words * a_word)


def combine_shared(shape: Shape) -> int:
    """Bytes of shared memory of low_latency_combine: with rank-local reduce the own sum of a token."""
    return 0 if shape.direct_send else 2 * shape.hidden


def problem(group, *, num_experts, hidden_size, topk, max_tokens_per_rank, num_local_experts, quantised):
    """What is wrong with a communicator's settings (positive ints) on this rank, or None."""
    multiple = quant.BLOCK if quantised else 8
    if hidden_size % multiple:
        return f"hidden_size: expected a multiple of {multiple}, got {hidden_size}"
    if topk > args.MAX_topk:
        return f"topk: expected 1 to {args.MAX_topk}, got {topk}"
    if num_experts % group.size:
        return f"num_experts: expected a multiple of the {group.size} ranks, got {num_experts}"
    local = num_experts // group.size
    if num_local_experts not in (None, local):
        return f"num_local_experts: expected None or {local} (num_experts / ranks), got {num_local_experts!r}"
    if local > 1 << 16:
        return f"num_experts: expected at most {1 << 16} on a rank, got {local}"
    most = min(MAX_TOKENS, (2**31 - 1) // max(num_experts, group.size * topk))
    if max_tokens_per_rank > most:
        return f"max_tokens_per_rank: expected at most {most} with these experts, got {max_tokens_per_rank}"
    return None
