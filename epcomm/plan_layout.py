"""Sizes that follow from a plan's shapes: rows of a receive buffer, and what the planner kernel needs."""

MAX_SHARED = 200 * 1024  # bytes of shared memory that the planner's tables may take of a block
MAX_WARPS = 16


def align_up(value, multiple):
    """`value` (number or array) rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def row_capacity(num_tokens, topk, experts, ranks, token_padding):
    """Rows of a rank's receive buffer, `NvS`: holds any plan of steps with up to `num_tokens` tokens a rank.

    A rank gets at most `num_tokens * topk` tokens in at most `2 * experts / ranks` segments.
    """
    return align_up(num_tokens * topk + (token_padding - 1) * 2 * (experts // ranks), token_padding)


def row_prefix(total_tokens, topk, experts, ranks, token_padding):
    """Leading rows of a receive buffer that hold any plan of a step with `total_tokens` tokens in all."""
    return row_capacity(-(-total_tokens * topk // ranks), 1, experts, ranks, token_padding)


def grid_blocks(num_tokens, num_sms):
    """Blocks of the planner: they wait for each other, so no more than `num_sms`; 32 tokens each or more."""
    return max(1, min(num_sms, -(-num_tokens // 32)))


def block_threads(experts, ranks, threads=32 * MAX_WARPS):
    """Threads of a block: `threads`, or as many warps as have room for their tables in shared memory.

    Raises:
        ValueError: not even one warp has room: too many experts.
    """
    warps = threads // 32
    while warps and shared_bytes(experts, ranks, 32 * warps) > MAX_SHARED:
        warps -= 1
    if not warps:
        raise ValueError(f"num_experts: {experts} are more than the planner's tables hold")
    return 32 * warps


def shared_bytes(experts, ranks, threads):
    """Shared memory of a block, as plan.cu carves it: words for every expert and warp, expert, and rank."""
    return 4 * (experts * (threads // 32 + 5) + 6 * ranks)


def packets_bytes(experts, ranks):
    """The planner's area in a chunk: two slots of [ranks, experts + 1] packets of 8 bytes {count, epoch}."""
    return 2 * ranks * (experts + 1) * 8


def scratch_bytes(experts, blocks):
    """Local memory, zeroed once: packets {count, epoch} of every block and expert, twice."""
    return 2 * blocks * experts * 8
