"""Expert exchange over NCCL send/recv: permute, exchange counts, grouped send/recv, group by expert; and
back.

What one writes by hand with CuPy, written well: rows for the own rank never leave the permute kernel, the
counts travel while rows are permuted, own kernels use all SMs. There is no balancing and one row per (token,
expert) travels. Pad rows between the groups are left as they are.
"""

import os
from pathlib import Path

import numpy as np

from bench.kernels import load_module

_COUNT_BLOCK = 512
_MOVE_BLOCK = 1024
_SUM_BLOCK = 768


def missing(group):
    """Why this library cannot run here, or None."""
    if group.device.kind != "cuda":
        return "GPUs only"
    try:
        from cupy.cuda import nccl
    except ImportError:
        return "CuPy finds no NCCL"
    return None if nccl.available else "CuPy finds no NCCL"


class Library:
    """See bench.libs. Rows go to `store`, in three areas (`permute.cu`); the grouped area comes first."""

    def __init__(self, group, shape):
        from cupy.cuda import nccl

        # The same SM budget for all; what the user sets goes first. Read when the communicator is made.
        if shape.num_sms:
            os.environ.setdefault("NCCL_MAX_CTAS", str(shape.num_sms))
        self.nccl = nccl
        self.group = group
        self.shape = shape
        self.xp = group.device.xp
        self.epn = shape.num_experts // group.size
        self.comm = nccl.NcclCommunicator(group.size, self._unique_id(), group.rank)
        self.kernels = load_module(group.device, Path(__file__).with_name("permute.cu"))
        self._allocate()

    def _unique_id(self):
        return self.group.comm.bcast(self.nccl.get_unique_id() if self.group.rank == 0 else None)

    def _allocate(self):
        xp, shape, ranks = self.xp, self.shape, self.group.size
        entries = shape.num_tokens * shape.num_topk
        # A token has at most min(topk, epn) different experts on one rank.
        most = shape.num_tokens * min(shape.num_topk, self.epn)
        self.send_area = ranks * most + (shape.token_padding - 1) * self.epn
        self.receive_area = self.send_area + entries
        rows = self.receive_area + (ranks - 1) * most
        self.store = xp.empty((rows, shape.hidden), self.group.device.xp.dtype("bfloat16"))
        self.store_weights = xp.empty((rows,), np.float32)
        self.position = xp.empty((entries,), np.int32)
        self.target = xp.empty(((ranks - 1) * most,), np.int32)
        self.counts = xp.zeros(
            (2, shape.num_experts), np.uint32
        )  # sent by expert; received by (source, expert)
        self.cursor, self.staged, self.grouped = xp.empty((3, shape.num_experts), np.uint32)
        self.ends = xp.empty((self.epn,), np.uint32)
        self.out = xp.empty((shape.num_tokens, shape.hidden), self.store.dtype)
        self.out_weights = xp.empty((shape.num_tokens, shape.num_topk), np.float32)
        self.host_counts = self._pinned((2, shape.num_experts))
        self.counts_came = xp.cuda.Event()

    def _pinned(self, shape):
        import cupyx

        return cupyx.empty_pinned(shape, np.uint32)

    def load(self, topk_idx, x, topk_weights):
        self.topk_idx = self.xp.asarray(topk_idx, np.int32)
        self.x = self.xp.asarray(x)
        self.topk_weights = self.xp.asarray(topk_weights, np.float32)
        self.plan()

    def operations(self):
        return {
            "plan": self.plan,
            "d_f": self.plan_and_dispatch,
            "d_b": self.dispatch,
            "c_f": self.combine,
            "c_b": lambda: self.combine(weights=True),
        }

    def round_trip(self):
        self.plan_and_dispatch()
        return self.combine().copy()

    def figures(self, session):
        """The exchange beside bare grouped send/recv of the same bytes, and the permute's rate of bytes read
        and written.
        """
        permute = session.time(self._permute).us
        exchange = session.time(lambda: self._exchange(weights=True)).us
        bare = session.time(self._exchange).us
        entries = int(self.host_counts[0].sum())
        moved = (self.shape.num_tokens + entries) * self.shape.row_bytes
        return {
            "permute_us": permute,
            "permute_gbps": moved / permute / 1e3,
            "exchange_us": exchange,
            "bare_exchange_us": bare,
        }

    # ---- the steps

    def plan(self):
        self._begin_plan()
        self._finish_plan()

    def plan_and_dispatch(self):
        self._begin_plan()
        self._permute(weights=True)  # runs while the counts come to the host
        self._finish_plan()
        self._exchange(weights=True)
        self._regroup(weights=True)

    def dispatch(self):
        self._permute()
        self._exchange()
        self._regroup()

    def combine(self, weights=False):
        """[s, H]; with `weights` also the weights of the rows, in `out_weights`."""
        received = self.store[self.receive_area :]
        weights_received = self.store_weights[self.receive_area :] if weights else None
        self._move(received, self.store, weights_received, self.store_weights if weights else None, gathers=1)
        self._exchange(weights, backwards=True)
        self._launch(
            "sum_rows",
            _SUM_BLOCK,
            (
                self.store,
                self.store_weights if weights else np.uintp(0),
                self.position,
                *self._token_sizes(),
                self.out,
                self.out_weights if weights else np.uintp(0),
            ),
        )
        return self.out

    def _begin_plan(self):
        entries, experts = np.int32(self.position.size), np.int32(self.shape.num_experts)
        sent, received = self.counts
        sent.fill(0)
        self._launch(
            "count_entries", _COUNT_BLOCK, (self.topk_idx, entries, experts, sent), shared=4 * int(experts)
        )
        nbytes = 4 * self.epn
        self.nccl.groupStart()
        for peer in range(self.group.size):
            self._send(sent.data.ptr + peer * nbytes, nbytes, peer)
            self._receive(received.data.ptr + peer * nbytes, nbytes, peer)
        self.nccl.groupEnd()
        self.counts.get(out=self.host_counts, blocking=False)
        self.counts_came.record()
        self._launch(
            "lay_out",
            _MOVE_BLOCK,
            (
                *(sent, received, np.int32(self.group.rank), np.int32(self.group.size), experts),
                *(np.int32(self.shape.token_padding), np.int32(self.send_area)),
                *(self.cursor, self.staged, self.grouped, self.ends),
            ),
            shared=4 * _MOVE_BLOCK,
            blocks=1,
        )
        self._launch("place_entries", _COUNT_BLOCK, (self.topk_idx, entries, self.cursor, self.position))

    def _finish_plan(self):
        self._launch(
            "target_rows",
            _COUNT_BLOCK,
            (
                *(self.counts[1], self.staged, self.grouped, np.int32(self.group.rank)),
                *(np.int32(self.group.size), np.int32(self.shape.num_experts), self.target),
            ),
        )
        self.counts_came.synchronize()
        by_rank = self.host_counts.reshape(2, self.group.size, self.epn).sum(axis=2).astype(np.int64)
        by_rank[:, self.group.rank] = 0
        self.sent, self.received = by_rank.tolist()
        self.send_begin, self.receive_begin = (np.cumsum(by_rank, axis=1) - by_rank).tolist()
        self.num_received = sum(self.received)

    def _permute(self, weights=False):
        self._launch(
            "permute_rows",
            _MOVE_BLOCK,
            (
                *(self.x, self.topk_weights if weights else np.uintp(0), self.position, *self._token_sizes()),
                *(self.store, self.store_weights),
            ),
        )

    def _exchange(self, weights=False, backwards=False):
        """Grouped send/recv of the rows to send; backwards, of the rows received."""
        areas = [(self.store, self.shape.row_bytes)]
        if weights:
            areas.append((self.store_weights, 4))
        self.nccl.groupStart()
        for array, row in areas:
            there = array.data.ptr + self.send_area * row
            here = array.data.ptr + self.receive_area * row
            for peer in range(self.group.size):
                out = (there + self.send_begin[peer] * row, self.sent[peer] * row, peer)
                back = (here + self.receive_begin[peer] * row, self.received[peer] * row, peer)
                self._send(*(back if backwards else out))
                self._receive(*(out if backwards else back))
        self.nccl.groupEnd()

    def _regroup(self, weights=False):
        received = self.store[self.receive_area :]
        weights_received = self.store_weights[self.receive_area :] if weights else None
        self._move(self.store, received, self.store_weights if weights else None, weights_received, gathers=0)

    def _move(self, to, of, to_weights, of_weights, gathers):
        if self.num_received:
            args = (
                *(
                    to,
                    of,
                    _or_null(to_weights),
                    _or_null(of_weights),
                    self.target,
                    np.int32(self.num_received),
                ),
                *(np.int32(self.shape.row_bytes // 16), np.int32(gathers)),
            )
            self._launch("move_rows", _MOVE_BLOCK, args)

    # ---- small parts

    def _token_sizes(self):
        return (
            np.int32(self.shape.num_tokens),
            np.int32(self.shape.num_topk),
            np.int32(self.shape.row_bytes // 16),
        )

    def _launch(self, name, block, args, shared=0, blocks=None):
        self.kernels.get_function(name)(
            (blocks or self.group.device.num_sms,), (block,), args, shared_mem=shared
        )

    def _send(self, pointer, nbytes, peer):
        if nbytes:
            self.comm.send(pointer, nbytes, self.nccl.NCCL_UINT8, peer, self._stream())

    def _receive(self, pointer, nbytes, peer):
        if nbytes:
            self.comm.recv(pointer, nbytes, self.nccl.NCCL_UINT8, peer, self._stream())

    def _stream(self):
        return self.xp.cuda.get_current_stream().ptr

    def close(self):
        self.group.device.synchronize(self._stream())
        self.comm.destroy()
        self.store = self.store_weights = None
        self.xp.get_default_memory_pool().free_all_blocks()


def _or_null(array):
    return np.uintp(0) if array is None else array
