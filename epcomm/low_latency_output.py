"""What low-latency dispatch hands out: the tokens, what is known of them, the handle for combine."""

import enum
import math


class DispatchLayout(enum.Enum):
    """Where rows lie after dispatch.

    EXPERT_MAJOR: `[local_experts, R*T, H]`, a row for each expert that a token names here.
    RANK_MAJOR: `[R*T, H]`, one row a token, and beside it which of this rank's experts it names.
    """

    EXPERT_MAJOR = "expert_major"
    RANK_MAJOR = "rank_major"


class Slab:
    """The arrays of one dispatch, in one allocation; views are made when somebody asks.

    Args:
        array: the allocation, uint8.
        fields: {name: (offset in bytes, shape, dtype)}.
        give: what turns a view into the caller's kind of array, or None.
    """

    __slots__ = ("_array", "_fields", "_give", "_views")

    def __init__(self, array, fields, give):
        self._array = array
        self._fields = fields
        self._give = give
        self._views = {}

    def view(self, name):
        """The array of a field; None if there is no such field."""
        if name not in self._fields:
            return None
        if name not in self._views:
            offset, shape, dtype = self._fields[name]
            nbytes = math.prod(shape) * dtype.itemsize
            array = self._array[offset : offset + nbytes].view(dtype).reshape(shape)
            self._views[name] = array if self._give is None else self._give(array)
        return self._views[name]


class DispatchLayoutInfo:
    """How many rows came, as device arrays: nothing is copied to the host.

    Attributes:
        kind: the DispatchLayout.
    """

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
    """What is needed to read quantised rows.

    Attributes:
        format: the DispatchDataType.
    """

    __slots__ = ("_slab", "format")

    def __init__(self, format, slab):
        self.format = format
        self._slab = slab

    @property
    def block_scales(self):
        """[..., H/128] float32 beside tokens: a value is its element times the scale of its 128 columns."""
        return self._slab.view("block_scales")


class DispatchOutput:
    """What `MoECommunicator.dispatch` delivers.

    Attributes:
        tokens: [local_experts, R*T, H] or [R*T, H], bfloat16, or float8_e4m3fn under a QuantConfig (on CuPy
            its bits as uint8). Rows that nobody sent are not written.
        layout: DispatchLayoutInfo.
        quant: DispatchQuant, or None for bfloat16.
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
        """RANK_MAJOR: [R*T, K] int32 global expert ids, -1 = not on this rank, or no row; else None."""
        found = self._topk_idx
        return found.view("topk_idx") if type(found) is Slab else found

    @property
    def topk_weights(self):
        """RANK_MAJOR: [R*T, K] float32, 0 = not on this rank, or no row; else None."""
        found = self._topk_weights
        return found.view("topk_weights") if type(found) is Slab else found


class DispatchHandle:
    """What combine needs of a dispatch.

    It owns its memory: any number of handles may be outstanding, and each may be combined more than once.

    Attributes:
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
        """[local_experts, R] int64, in RANK_MAJOR [R]: first row << 32 | rows, of each source rank."""
        return self._slab.view("layout_range")

    @property
    def src_info(self):
        """[local_experts, R*T] int32, in RANK_MAJOR [R*T]: each row's token index at its source.

        Of rows that nobody sent: undefined in EXPERT_MAJOR, -1 in RANK_MAJOR.
        """
        return self._slab.view("src_info")
