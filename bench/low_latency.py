"""What the low-latency benchmark moves, and whether it arrived: inputs, experts, comparison, bytes."""

import numpy as np

from bench import check
from epcomm import CombineMode, DispatchLayout, dtypes
from epcomm import low_latency_layout as layout
from epcomm import quant as quantisation
from epcomm import reference_low_latency as oracle


class Case:
    """One number of tokens: every rank's inputs, and this rank's on its device.

    Args:
        comm: the MoECommunicator; every rank brings its max_tokens_per_rank tokens.
        active_ranks: only the first ones' experts are chosen; 0 = all.
        weighted: with topk_weights.
        masked: entries of each rank that are set to -1.
    """

    def __init__(self, comm, active_ranks, weighted, masked):
        self.comm, self.device, self.xp = comm, comm.device, comm.xp
        self.rank, self.ranks = comm.group.rank, comm.group.size
        tokens, topk = comm.max_tokens_per_rank, comm.topk
        experts = comm.num_local_experts * (active_ranks or self.ranks)
        mine = choose(self.rank, tokens, topk, experts, masked)
        self.ids = comm.group.comm.allgather(mine)
        self.x = [rows(rank, tokens, comm.hidden_size) for rank in range(self.ranks)]
        self.weights = np.random.default_rng([self.rank, 2]).random((tokens, topk), np.float32)
        if not weighted:
            self.weights = np.ones_like(self.weights)
        self.inputs = [self.xp.asarray(self.x[self.rank]), self.xp.asarray(mine)]
        self.inputs.append(self.xp.asarray(self.weights) if weighted else None)

    # ---- what the experts do ---------------------------------------------------------------------

    def values(self, tokens, scales):
        """Delivered rows [n, H] as float32, and with fp8 times their scales [n, H/128]."""
        if scales is None:
            return tokens.astype(np.float32)
        table = self.xp.asarray(np.arange(256, dtype=np.uint8).view(dtypes.float8_e4m3fn).astype(np.float32))
        wide = table[tokens.view(np.uint8)].reshape(*scales.shape, quantisation.BLOCK)
        return (wide * scales[..., None]).reshape(tokens.shape)

    def run_experts(self, output):
        """What combine takes, from a DispatchOutput: every expert scales its rows."""
        comm, xp = self.comm, self.xp
        made = xp.zeros(comm._shape.expert_output_shape, dtypes.bfloat16)
        scales = None if output.quant is None else output.quant.block_scales
        if comm.output_layout is DispatchLayout.EXPERT_MAJOR:
            counts = self.device.to_host(output.layout.num_tokens_per_expert)
            for e, n in enumerate(map(int, counts)):
                values = self.values(output.tokens[e, :n], None if scales is None else scales[e, :n])
                made[e, :n] = scaled(values, self.rank * comm.num_local_experts + e)
            return made
        here = (output.topk_idx >= 0).any(axis=1)
        values = self.values(output.tokens[here], None if scales is None else scales[here])
        ids, weights = output.topk_idx[here], output.topk_weights[here]
        if comm.combine_mode is CombineMode.DIRECT_SEND:
            made[here] = xp.stack([scaled(values, ids[:, k : k + 1]) for k in range(comm.topk)], axis=1)
        else:
            made[here] = weighted_sum(xp, values, ids, weights).astype(dtypes.bfloat16)
        return made

    def expected(self):
        """[t, H] bfloat16 that combine must give on this rank, bit by bit."""
        comm, ids = self.comm, self.ids[self.rank]
        x = self.x[self.rank]
        values = x.astype(np.float32)
        if comm.quant is not None:
            values = oracle.dequantize(*oracle.quantize(x, comm.quant.power_of_two_scales))
        acc = np.zeros(x.shape, np.float32)
        if comm.combine_mode is CombineMode.DIRECT_SEND:
            return self._fused(acc, values, ids).astype(dtypes.bfloat16)
        for rank in range(self.ranks):
            here = np.where(ids // comm.num_local_experts == rank, ids, -1)
            if comm.output_layout is DispatchLayout.EXPERT_MAJOR:
                partial = self._fused(np.zeros_like(acc), values, here)
            else:
                partial = weighted_sum(np, values, here, self.weights)
            has = (here >= 0).any(axis=1)
            acc[has] += partial[has].astype(dtypes.bfloat16).astype(np.float32)
        return acc.astype(dtypes.bfloat16)

    def _fused(self, acc, values, ids):
        for k in range(ids.shape[1]):
            has = ids[:, k] >= 0
            rows_k = scaled(values[has], ids[has, k : k + 1]).astype(np.float32)
            acc[has] = oracle.fma(self.weights[has, k, None], rows_k, acc[has])
        return acc

    # ---- comparison ------------------------------------------------------------------------------

    def dispatch_errors(self, output, handle):
        """What is wrong with a dispatch of this case on this rank, as a list of texts."""
        comm, xp, to_host = self.comm, self.xp, self.device.to_host
        rank_major = comm.output_layout is DispatchLayout.RANK_MAJOR
        info, ranges = to_host(handle.src_info), to_host(handle.layout_range)
        counts = output.layout.num_tokens_per_rank if rank_major else output.layout.num_tokens_per_expert
        counts = to_host(counts)
        info, ranges = (np.atleast_2d(a) for a in (info, ranges))  # one list, or one an expert
        tokens = output.tokens[None] if rank_major else output.tokens
        scales = None if output.quant is None else output.quant.block_scales
        if scales is not None and rank_major:
            scales = scales[None]
        wanted = np.array([self._senders(number, rank_major) for number in range(len(ranges))])
        errors = []
        sums = (ranges & 0xFFFFFFFF) if not rank_major else (ranges & 0xFFFFFFFF).T
        if not np.array_equal(ranges & 0xFFFFFFFF, wanted):
            errors.append("layout_range differs from the all-gathered routing")
        if not np.array_equal(sums.sum(axis=1), counts):
            errors.append("counts differ from the sums of layout_range")
        every_x = xp.asarray(np.concatenate(self.x))
        wrong = 0
        for number, row in enumerate(ranges):
            for source, entry in enumerate(row):
                first, n = int(entry) >> 32, int(entry) & 0xFFFFFFFF
                at = slice(first, first + n)
                x = every_x[xp.asarray(source * comm.max_tokens_per_rank + info[number, at].astype(np.int64))]
                got = tokens[number, at]
                if scales is None:
                    wrong += int((got.view(np.uint16) != x.view(np.uint16)).any(axis=1).sum())
                elif n:
                    wrong += self._wrong_quantised(got, scales[number, at], x.astype(np.float32))
        if wrong:
            errors.append(f"{wrong} rows differ from their source")
        return errors

    def _senders(self, number, rank_major):
        """Tokens of each source that go to list `number` of this rank."""
        local = self.comm.num_local_experts
        first = self.rank * local + (0 if rank_major else number)
        experts = np.arange(first, first + (local if rank_major else 1))
        return [int(np.isin(ids, experts).any(axis=1).sum()) for ids in self.ids]

    def _wrong_quantised(self, got, scales, x):
        xp = self.xp
        blocks = x.reshape(*scales.shape, quantisation.BLOCK)
        largest = xp.maximum(xp.abs(blocks).max(axis=-1), np.float32(quantisation.SMALLEST_AMAX))
        off = xp.abs(scales - largest / np.float32(quantisation.LARGEST)) > 1e-6 * scales
        error = xp.abs(self.values(got, scales).reshape(blocks.shape) - blocks)
        off |= (error > np.float32(16.1) * scales[..., None]).any(axis=-1)
        return int(off.any(axis=1).sum())

    def combine_difference(self, out):
        """(largest difference from what is expected, whether all is finite and bit by bit the same)."""
        got, wanted = self.device.to_host(out), self.expected()
        wide = got.astype(np.float32)
        difference = float(np.abs(wide - wanted.astype(np.float32)).max(initial=0))
        return difference, bool(np.isfinite(wide).all()) and got.tobytes() == wanted.tobytes()

    # ---- bytes -----------------------------------------------------------------------------------

    def bytes(self):
        """Bytes of this rank, by convention and direction, as {name: bytes}.

        selections: a row for every entry, wherever its expert is. wire: what this rank really stores at its
        peers: rows as they travel, and in dispatch the packets of the routing.
        """
        comm, me, peers = self.comm, self.rank, self.ranks - 1
        shape = comm._shape
        ids = self.ids[me]
        targets = np.where(ids >= 0, ids // comm.num_local_experts, -1)
        sent_rows = sum(int((targets == rank).any(axis=1).sum()) for rank in range(self.ranks) if rank != me)
        remote_entries = int(((targets >= 0) & (targets != me)).sum())
        here = [i // comm.num_local_experts == me for rank, i in enumerate(self.ids) if rank != me]
        back = sum(int((h if shape.direct_send else h.any(axis=1)).sum()) for h in here)
        row = quantisation.row_bytes(shape.hidden, shape.quant)
        packets = peers * (shape.max_tokens * layout.PIECE + shape.lists * 8) + remote_entries * layout.PIECE
        flags = 0 if shape.lines else 4
        return {
            "dispatch_selections": int((ids >= 0).sum()) * row,
            "combine_selections": int((ids >= 0).sum()) * 2 * shape.hidden,
            "dispatch_wire": sent_rows * (_on_wire(row, shape.lines) + flags) + packets,
            "combine_wire": back * (_on_wire(2 * shape.hidden, shape.lines) + flags),
        }


def _on_wire(row, lines):
    return layout.slot_bytes(row, True) if lines else row


def scaled(values, number):
    """Rows [n, H] float32 through expert `number` (a scalar, or [n, 1]), as bfloat16."""
    return check.expert(values, number).astype(dtypes.bfloat16)


def weighted_sum(xp, values, ids, weights):
    """A rank-major caller's sum of a token's experts: float32, in ascending k; without ids of -1."""
    acc = xp.zeros(values.shape, np.float32)
    for k in range(ids.shape[1]):
        term = weights[:, k : k + 1] * scaled(values, ids[:, k : k + 1]).astype(np.float32)
        acc = acc + xp.where(ids[:, k : k + 1] >= 0, term, np.float32(0))
    return acc


def choose(rank, tokens, topk, experts, masked):
    """[tokens, topk] int32: the best |N(0,1)| + 1 scores of the experts; `masked` random entries are -1."""
    rng = np.random.default_rng([rank, 1])
    scores = np.abs(rng.standard_normal((tokens, experts))) + 1
    ids = np.argsort(-scores, axis=1)[:, :topk].astype(np.int32)
    ids.reshape(-1)[rng.choice(ids.size, min(masked, ids.size), replace=False)] = -1
    return ids


def rows(rank, tokens, hidden):
    """[tokens, hidden] bfloat16 of one rank, random."""
    return (
        np.random.default_rng([rank, 3]).standard_normal((tokens, hidden), np.float32).astype(dtypes.bfloat16)
    )
