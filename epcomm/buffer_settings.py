"""What a Buffer's settings must be, and what is wrong with them."""

from . import dtypes, plan_layout
from .runtime import args

ROW_DTYPES = {
    dtypes.bfloat16: args.DTYPE_BF16,
    dtypes.float16: args.DTYPE_F16,
    dtypes.float32: args.DTYPE_F32,
}


def problem(group, *, num_tokens, hidden, num_topk, num_experts, dtype, num_sms, token_padding):
    """What is wrong with a buffer's settings on this rank, or None."""
    for name, value in (("num_tokens", num_tokens), ("hidden", hidden), ("num_experts", num_experts)):
        if not isinstance(value, int) or value < 1:
            return f"{name}: expected a positive int, got {value!r}"
    if hidden % 8:
        return f"hidden: expected a multiple of 8, got {hidden}"
    if not isinstance(num_topk, int) or not 1 <= num_topk <= args.MAX_topk:
        return f"num_topk: expected 1 to {args.MAX_topk}, got {num_topk!r}"
    if num_experts % group.size:
        return f"num_experts: expected a multiple of the {group.size} ranks, got {num_experts}"
    if not isinstance(token_padding, int) or token_padding < 1:
        return f"token_padding: expected a positive int, got {token_padding!r}"
    if num_sms is not None and (not isinstance(num_sms, int) or num_sms < 1):
        return f"num_sms: expected None or a positive int, got {num_sms!r}"
    try:
        dtype = dtypes.resolve(dtype)
    except TypeError as error:
        return str(error)
    if dtype not in ROW_DTYPES:
        return f"dtype: expected one of {', '.join(sorted(d.name for d in ROW_DTYPES))}, got {dtype.name}"
    widest = (group.device.max_shared - 256) // 128 * 128 // dtype.itemsize
    if hidden > widest:
        return f"hidden: a row must fit into a block's shared memory: at most {widest} columns of {dtype.name}, got {hidden}"
    rows = plan_layout.row_capacity(num_tokens, num_topk, num_experts, group.size, token_padding)
    if rows * group.size >= 2**31:
        return f"num_tokens: {group.size} receive buffers of {rows} rows exceed the 2**31 - 1 places that a plan can name"
    try:
        plan_layout.block_threads(num_experts, group.size)
    except ValueError as error:
        return str(error)
    return None
