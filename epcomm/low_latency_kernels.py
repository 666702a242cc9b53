"""The kernels of a MoECommunicator: argument structs with the fields that never change set, and launchers."""

from . import low_latency_layout as layout
from .endpoint import Operation
from .runtime import args


def dispatch(communicator, shape, shared, slab) -> Operation:
    """low_latency_dispatch.cu. `shared`: its layout.Shared; `slab`: the SlabLayout."""
    device, areas, quant = communicator.device, communicator._areas, shape.quant
    constants = _constants(shape) | dict(
        experts=shape.num_experts,
        fp8=int(quant is not None),
        power_of_two=int(quant is not None and quant.power_of_two_scales),
    )
    a = args.LowLatencyDispatchArgs(
        world=communicator._world,
        epochs=communicator._epochs_of(args.OP_LL_DISPATCH),
        at=slab.offsets(),
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
    grid = dict(grid=communicator.num_blocks, block=device.max_threads, shared=shared.nbytes)
    return Operation(a, device.launcher("low_latency_dispatch", a, **grid, shape=constants))


def combine(communicator, shape, slab) -> Operation:
    """low_latency_combine.cu."""
    device, areas, constants = communicator.device, communicator._areas, _constants(shape)
    a = args.LowLatencyCombineArgs(
        world=communicator._world,
        epochs=communicator._epochs_of(args.OP_LL_COMBINE),
        at=slab.offsets(),
        slots=areas["combine_slots"],
        flags=areas["combine_flags"],
        capacity=shape.max_tokens,
        **constants,
    )
    shared = layout.combine_shared(shape)
    grid = dict(grid=communicator.num_blocks, block=device.max_threads, shared=shared)
    return Operation(a, device.launcher("low_latency_combine", a, **grid, shape=constants))


def _constants(shape):
    return dict(
        hidden=shape.hidden,
        topk=shape.topk,
        ranks=shape.ranks,
        lines=int(shape.lines),
        rank_major=int(shape.rank_major),
        direct_send=int(shape.direct_send),
    )
