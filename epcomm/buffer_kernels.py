"""The kernels of a Buffer: for each operation its argument struct, with the fields that never change set,
and its launcher.
"""

from . import layout, plan_layout
from .buffer_settings import ROW_DTYPES
from .endpoint import Operation
from .runtime import args


def plan(buffer, grid, scratch) -> Operation:
    """plan.cu. `scratch`: zeroed array of plan_layout.scratch_bytes."""
    device, experts, ranks = buffer.device, buffer.num_experts, buffer.group.size
    threads = plan_layout.block_threads(experts, ranks, min(device.max_threads, 32 * plan_layout.MAX_WARPS))
    a = args.PlanArgs(
        world=buffer._world,
        epochs=buffer._epochs_of(args.OP_PLAN),
        packets=buffer._areas["packets"],
        scratch=device.pointer(scratch),
        topk=buffer.num_topk,
        experts=experts,
        row_capacity=buffer.row_capacity,
        token_padding=buffer.token_padding,
    )
    shared = plan_layout.shared_bytes(experts, ranks, threads)
    launch = device.launcher(
        "plan", a, grid=grid, block=threads, shared=shared, shape=dict(topk=buffer.num_topk)
    )
    return Operation(a, launch)


def dispatch(buffer) -> Operation:
    """dispatch.cu."""
    device, areas = buffer.device, buffer._areas
    stage = layout.align(buffer.row_bytes, 128)
    send_warps, threads = _dispatch_warps(
        buffer.num_sms, device.max_threads // 32, device.max_shared // (stage + 8)
    )
    a = args.DispatchArgs(
        world=buffer._world,
        epochs=buffer._epochs_of(args.OP_DISPATCH),
        receive=areas["receive"],
        records=areas["records"],
        flags=areas["dispatch_flags"],
        capacity=buffer.num_tokens,
        row_capacity=buffer.row_capacity,
        row_bytes=buffer.row_bytes,
        topk=buffer.num_topk,
        segments=2 * buffer.experts_per_rank,
        token_padding=buffer.token_padding,
        ranks=buffer.group.size,
        send_warps=send_warps,
    )
    shared = layout.align(send_warps * 8, 128) + send_warps * stage
    shape = dict(topk=buffer.num_topk, row_bytes=buffer.row_bytes, ranks=buffer.group.size)
    launch = device.launcher("dispatch", a, grid=buffer.num_sms, block=threads, shared=shared, shape=shape)
    return Operation(a, launch)


def combine(buffer, consumed) -> Operation:
    """combine.cu. `consumed`: zeroed counters, one a half ring of tokens."""
    device, areas = buffer.device, buffer._areas
    produce_warps, threads = _combine_warps(buffer.num_sms, device.max_threads // 32)
    shape = dict(
        topk=buffer.num_topk,
        row_bytes=buffer.row_bytes,
        ranks=buffer.group.size,
        dtype=ROW_DTYPES[buffer.dtype],
    )
    a = args.CombineArgs(
        world=buffer._world,
        epochs=buffer._epochs_of(args.OP_COMBINE),
        consumed=device.pointer(consumed),
        ring=areas["ring"],
        ring_weights=areas["ring_weights"],
        flags=areas["combine_flags"],
        credits=areas["credits"],
        capacity=buffer.num_tokens,
        row_capacity=buffer.row_capacity,
        ring_tokens=buffer.ring_tokens,
        produce_warps=produce_warps,
        **shape,
    )
    return Operation(a, device.launcher("combine", a, grid=buffer.num_sms, block=threads, shape=shape))


def prefetch(buffer) -> Operation:
    """prefetch.cu."""
    device = buffer.device
    a = args.PrefetchArgs(
        world=buffer._world, experts=buffer.num_experts, experts_per_rank=buffer.experts_per_rank
    )
    return Operation(a, device.launcher("prefetch", a, grid=buffer._weight_sms, block=device.max_threads))


def reduce_grad(buffer, blocks_done) -> Operation:
    """reduce_grad.cu. `blocks_done`: a zeroed counter."""
    device = buffer.device
    a = args.ReduceGradArgs(
        world=buffer._world,
        epochs=buffer._epochs_of(args.OP_REDUCE_GRAD),
        blocks_done=device.pointer(blocks_done),
        left=buffer._areas["left"],
        experts_per_rank=buffer.experts_per_rank,
    )
    shared = 4 * (buffer.num_experts + buffer.experts_per_rank + 1)
    launch = device.launcher(
        "reduce_grad", a, grid=buffer._weight_sms, block=device.max_threads // 2, shared=shared
    )
    return Operation(a, launch)


def _dispatch_warps(grid, warps, rows_in_shared):
    """(send warps, threads) of a dispatch block. About 320 send warps in the whole grid fill the wire
    whatever its size; more only compete with arriving rows (measured on H200). Each needs one row of
    shared memory; 16 warps expand.
    """
    send = max(1, min(round(320 / grid), warps // 2, rows_in_shared))
    return send, 32 * (send + min(16, warps - send))


def _combine_warps(grid, warps):
    """(produce warps, threads) of a combine block. Few SMs need all the loads in flight they can get, many
    need fewer; consumers read one row more, so they are slightly more (measured on H200).
    """
    warps = min(warps, 32 if grid <= 96 else 20)
    return max(1, warps * 15 // 32), 32 * warps
