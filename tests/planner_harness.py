"""Runs the planner kernel alone on CPU ranks: threads of this process, with all chunks in one array."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from epcomm import plan_layout
from epcomm.runtime import args
from epcomm.runtime.cpu import CpuDevice

GUARD = -12345  # stands in outputs that the kernel has not written


class Planners:
    """The planners of all ranks.

    Args:
        grids: blocks of every rank's launches, or one number for all.
        threads: of a block; None = what the layout gives for 128.
        delays: for every rank, seconds that it comes late to every call.
    """

    def __init__(
        self,
        ranks,
        num_tokens,
        topk,
        experts,
        *,
        token_padding=16,
        grids=2,
        threads=None,
        timeout=20.0,
        delays=None,
    ):
        self.ranks, self.num_tokens, self.topk, self.experts = ranks, num_tokens, topk, experts
        self.token_padding = token_padding
        self.delays = delays or [0] * ranks
        self.device = device = CpuDevice()
        self.row_capacity = plan_layout.row_capacity(num_tokens, topk, experts, ranks, token_padding)
        words = ranks * (1 + args.NUM_OPERATIONS)
        packets = plan_layout.align_up(4 * (args.CONTROL_RAISED_BY + words), 128)
        stride = packets + plan_layout.align_up(plan_layout.packets_bytes(experts, ranks), 128)
        self.chunks = device.zeros((ranks, stride), np.uint8)
        threads = threads or plan_layout.block_threads(experts, ranks, 128)
        shared = plan_layout.shared_bytes(experts, ranks, threads)
        self.pool = ThreadPoolExecutor(ranks)
        self.locals = []
        for rank, grid in enumerate(np.broadcast_to(grids, ranks)):
            record = device.zeros((ctypes.sizeof(args.ErrorRecord) + 4 * words,), np.uint8)
            own = SimpleNamespace(
                error=args.ErrorRecord.from_buffer(record),
                bad_input=device.zeros((args.NUM_BAD_INPUTS,), np.uint32),
                epochs=device.zeros((grid,), np.uint32),
                scratch=device.zeros((plan_layout.scratch_bytes(experts, grid),), np.uint8),
            )
            own.args = args.PlanArgs(
                world=args.World(
                    base=device.pointer(self.chunks),
                    stride=stride,
                    control=0,
                    error=ctypes.addressof(own.error),
                    bad_input=device.pointer(own.bad_input),
                    timeout_ns=int(timeout * 1e9),
                    rank=rank,
                    ranks=ranks,
                ),
                epochs=device.pointer(own.epochs),
                packets=packets,
                scratch=device.pointer(own.scratch),
                topk=topk,
                experts=experts,
                row_capacity=self.row_capacity,
                token_padding=token_padding,
            )
            own.launch = device.launcher("plan", own.args, grid=int(grid), block=threads, shared=shared)
            self.locals.append(own)

    def plan(self, calls):
        """Calls in a row on all ranks, which wait for each other only inside the kernel.

        Args:
            calls: for every call, each rank's [s, topk] int32 or int64 array; None: the rank does not come.

        Returns:
            For every call, each rank's outputs. What the kernel left alone is GUARD.
        """
        waiting = [
            self.pool.submit(
                lambda own, ids, delay: [self._run(own, each, delay) for each in ids], own, ids, delay
            )
            for own, ids, delay in zip(self.locals, zip(*calls, strict=True), self.delays, strict=True)
        ]
        return list(zip(*(each.result() for each in waiting), strict=True))

    def _run(self, own, ids, delay):
        if ids is None:
            return None
        time.sleep(delay)
        segments = 2 * self.experts // self.ranks
        sizes = dict(
            dst=ids.size,
            num_tokens_per_rank=self.ranks,
            counts=segments,
            cu_seqlens=segments,
            experts_to_copy=self.experts,
        )
        out = {name: self.device.empty((size + 32,), np.int32) for name, size in sizes.items()}
        for name, array in out.items():
            array[:] = GUARD
            setattr(own.args, name, self.device.pointer(array))
        own.args.topk_idx = self.device.pointer(ids)
        own.args.num_tokens = len(ids)
        own.args.index_bytes = ids.itemsize
        own.launch(0)
        for name, size in sizes.items():
            assert (out[name][size:] == GUARD).all(), f"{name}: written behind its end"
            out[name] = out[name][:size]
        return SimpleNamespace(**out)

    def close(self):
        self.pool.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
