"""What a Buffer's settings must be, and what is wrong with them."""

from typing import NamedTuple

import numpy as np

from . import dtypes, plan_layout
from .group import Group
from .integers import positive
from .runtime import args

ROW_DTYPES = {
    dtypes.bfloat16: args.DTYPE_BF16,
    dtypes.float16: args.DTYPE_F16,
    dtypes.float32: args.DTYPE_F32,
}
_MOST_PLACES = 2**31 - 1  # a plan names a place, of any rank, in an int32


class Settings(NamedTuple):
    """What a Buffer is made with. num_sms alone may differ between ranks."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: np.dtype
    num_sms: int | None
    token_padding: int


def agree(group, given: Settings) -> Settings:
    """The settings as ints and dtypes, once all ranks have found theirs good and the same. Collective.

    Raises:
        TypeError, ValueError: on every rank.
    """
    if not isinstance(group, Group):
        raise TypeError(f"group: expected a Group, got {type(group).__name__}")
    problem, clean, same = None, None, {}
    try:
        clean = Settings(*map(_clean, Settings._fields, given))
        _check(group, **clean._asdict())
        same = clean._asdict() | {"dtype": clean.dtype.name}
        del same["num_sms"]
    except Exception as error:
        problem = error
    group.agree("Buffer", same, problem)
    return clean


def _clean(name, value):
    if name == "dtype":
        return dtypes.resolve(value)
    return None if name == "num_sms" and value is None else positive(name, value)


def _check(group, *, num_tokens, hidden, num_topk, num_experts, dtype, token_padding, num_sms):
    if hidden % 8:
        raise ValueError(f"hidden: expected a multiple of 8, got {hidden}")
    if num_topk > args.MAX_topk:
        raise ValueError(f"num_topk: expected 1 to {args.MAX_topk}, got {num_topk}")
    if num_experts % group.size:
        raise ValueError(f"num_experts: expected a multiple of the {group.size} ranks, got {num_experts}")
    if dtype not in ROW_DTYPES:
        names = ", ".join(sorted(known.name for known in ROW_DTYPES))
        raise ValueError(f"dtype: expected one of {names}, got {dtype.name}")
    widest = (group.device.max_shared - 256) // 128 * 128 // dtype.itemsize
    if hidden > widest:
        raise ValueError(
            f"hidden: a row must fit into a block's shared memory: at most {widest} columns of "
            f"{dtype.name}, got {hidden}"
        )
    plan_layout.block_threads(num_experts, group.size)
    rows = plan_layout.row_capacity(num_tokens, num_topk, num_experts, group.size, token_padding)
    if rows * group.size > _MOST_PLACES:
        pads = (token_padding - 1) * 2 * (num_experts // group.size)
        most = (_MOST_PLACES // group.size // token_padding * token_padding - pads) // num_topk
        name, advice = "num_tokens", f"at most {most} fit"
        if most < 1:
            name, advice = "token_padding", "not one token fits"
        raise ValueError(
            f"{name}: {group.size} receive buffers of {rows} rows exceed the 2**31 - 1 places that a plan "
            f"can name: {advice}"
        )
