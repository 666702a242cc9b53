"""Calls of a MoECommunicator on all ranks, recorded there and compared with the oracle here."""

import os
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest

from epcomm import CombineMode, DispatchLayout, MoECommunicator, dtypes
from epcomm import reference_low_latency as oracle


def routing(kind, rank, tokens, topk, experts, seed):
    """[t, K] ids of one rank."""
    rng = np.random.default_rng([seed, rank, 11])
    if kind == "uniform":  # different experts, as far as there are enough
        order = rng.random((tokens, max(topk, experts))).argsort(axis=1)[:, :topk]
        return order % experts
    if kind == "masked":
        return np.where(rng.random((tokens, topk)) < 0.4, -1, rng.integers(0, experts, (tokens, topk)))
    if kind == "duplicates":
        return rng.integers(0, min(experts, 2), (tokens, topk)) * (experts // 2)
    if kind == "one expert":
        return np.full((tokens, topk), experts - 1)
    if kind == "last rank idle":
        return rng.integers(0, max(1, experts // 2), (tokens, topk))
    if kind == "nothing":
        return np.full((tokens, topk), -1)
    if kind == "bad ids":
        return rng.choice([-7, -1, 0, experts - 1, experts, 2**31 - 1], (tokens, topk))
    raise ValueError(kind)


KINDS = ("uniform", "masked", "duplicates", "one expert", "last rank idle", "nothing")


def rows_of(rank, call, tokens, hidden):
    """bf16 rows: rank, call and token in front, random numbers of many sizes behind."""
    rng = np.random.default_rng([rank, call, 3])
    rows = rng.standard_normal((tokens, hidden)) * np.exp2(rng.integers(-12, 4, (tokens, 1)))
    rows[:, 0] = rank * 32 + call % 32
    rows[:, 1] = np.arange(tokens)
    rows[: tokens // 8] = 0
    return rows.astype(dtypes.bfloat16)


def weights_of(rank, call, tokens, topk):
    return np.random.default_rng([rank, call, 5]).standard_normal((tokens, topk)).astype(np.float32)


def experts_of(rank, call, shape):
    """What the experts make of any row: random bf16."""
    return np.random.default_rng([rank, call, 9]).standard_normal(shape, np.float32).astype(dtypes.bfloat16)


@dataclass(frozen=True)
class Call:
    """One dispatch and combine. tokens: `t` of every rank; weighted: with topk_weights."""

    kind: str
    tokens: tuple
    weighted: bool = True
    index_dtype: type = np.int32


def calls_for(ranks, max_tokens, count, seed=0):
    """A mixture of routings with unequal t, also 0 and T."""
    rng = np.random.default_rng([ranks, max_tokens, seed])
    made = []
    for i in range(count):
        tokens = rng.integers(0, max_tokens + 1, ranks)
        tokens[i % ranks] = 0 if i % 3 == 1 else max_tokens
        kind = KINDS[(i + seed) % len(KINDS)]
        made.append(Call(kind, tuple(map(int, tokens)), i % 4 != 3, np.int64 if i % 2 else np.int32))
    return made


_inside = []  # what EPCOMM_LL_SIGNAL was, once for every rank thread inside `signal`
_entering = threading.Lock()


@contextmanager
def signal(which):
    """Communicators made inside send rows as "lines" or with "flags". Rank threads enter it side by side."""
    with _entering:
        _inside.append(_inside[0] if _inside else os.environ.get("EPCOMM_LL_SIGNAL"))
        os.environ["EPCOMM_LL_SIGNAL"] = which
    try:
        yield
    finally:
        with _entering:
            before = _inside.pop()
            if not _inside:
                os.environ.pop("EPCOMM_LL_SIGNAL")
                if before is not None:
                    os.environ["EPCOMM_LL_SIGNAL"] = before


def poison_new_memory(device):
    """What this device allocates from now on holds no zeros, so that what a kernel must write is missed."""
    empty = device.empty

    def poisoned(shape, dtype, stream=None):
        array = empty(shape, dtype, stream)
        array.view(np.uint8)[...] = 0xA5
        return array

    device.empty = poisoned


def settings_of(**changes):
    settings = dict(num_experts=10, hidden_size=64, topk=4, max_tokens_per_rank=12)
    return settings | changes


def dispatch(comm, call, number):
    """One dispatch; (what went in and came out as NumPy, output, handle)."""
    device, rank = comm.device, comm.group.rank
    xp = comm.xp
    t = call.tokens[rank]
    ids = routing(call.kind, rank, t, comm.topk, comm.num_experts, number)
    x = rows_of(rank, number, t, comm.hidden_size)
    weights = weights_of(rank, number, t, comm.topk) if call.weighted else None
    output, handle = comm.dispatch(
        xp.asarray(x),
        xp.asarray(ids.astype(call.index_dtype)),
        None if weights is None else xp.asarray(weights),
    )
    fields = {"tokens": output.tokens, "layout_range": handle.layout_range, "src_info": handle.src_info}
    fields["counts"] = (
        output.layout.num_tokens_per_expert
        if comm.output_layout is DispatchLayout.EXPERT_MAJOR
        else output.layout.num_tokens_per_rank
    )
    if comm.output_layout is DispatchLayout.RANK_MAJOR:
        fields |= {"topk_idx": output.topk_idx, "topk_weights": output.topk_weights}
    if output.quant is not None:
        fields["scales"] = output.quant.block_scales
    seen = {name: device.to_host(array) for name, array in fields.items()}
    return seen | {"ids": ids, "x": x, "weights": weights}, output, handle


def combine(comm, handle, number):
    """One combine of random expert rows; (they, the result) as NumPy."""
    rows = experts_of(comm.group.rank, number, comm._shape.expert_output_shape)
    return rows, comm.device.to_host(comm.combine(comm.xp.asarray(rows), handle))


def serve(group, settings, calls, how="lines", delay_rank=None, max_shared=None):
    """`calls` one after the other on one rank; returns what it saw of each.

    max_shared: bytes of shared memory that a block is said to have.
    """
    if max_shared is not None:
        group.device.max_shared = max_shared
    poison_new_memory(group.device)
    with signal(how):
        comm = MoECommunicator(group, **settings)
    seen = []
    with comm:
        for number, call in enumerate(calls):
            if delay_rank == group.rank:
                time.sleep(0.02)
            record, _, handle = dispatch(comm, call, number)
            record["expert_output"], record["out"] = combine(comm, handle, number)
            bad = oracle.valid_ids(record["ids"], comm.num_experts)[1]
            with pytest.raises(ValueError, match=f": {bad} expert ids") if bad else nullcontext():
                comm.check()
            seen.append(record)
    return seen


def verify(results, settings):
    """Every call of every rank, bit by bit."""
    for number in range(len(results[0])):
        verify_call([rank[number] for rank in results], settings, f"call {number}")


def verify_call(at, settings, name):
    """One call: `at` holds every rank's record."""
    rank_major = settings.get("output_layout") is DispatchLayout.RANK_MAJOR
    direct_send = settings.get("combine_mode") is CombineMode.DIRECT_SEND
    weights = None if at[0]["weights"] is None else [r["weights"] for r in at]
    received = oracle.dispatch(
        [r["x"] for r in at],
        [r["ids"] for r in at],
        weights,
        num_experts=settings["num_experts"],
        max_tokens=settings["max_tokens_per_rank"],
        rank_major=rank_major,
        quant=settings.get("quant"),
        direct_send=direct_send,
    )
    for rank, (r, want) in enumerate(zip(at, received, strict=True)):
        where = f"{name} rank {rank}"
        for field in (
            ("counts", "layout_range", "topk_idx", "topk_weights")
            if rank_major
            else ("counts", "layout_range")
        ):
            np.testing.assert_array_equal(r[field], getattr(want, field), err_msg=f"{where}: {field}")
        valid = want.src_info >= 0
        shown = slice(None) if rank_major else valid
        np.testing.assert_array_equal(
            r["src_info"][shown], want.src_info[shown], err_msg=f"{where}: src_info"
        )
        same_bits(r["tokens"][valid], want.tokens[valid], f"{where}: tokens")
        if want.scales is not None:
            same_bits(r["scales"][valid], want.scales[valid], f"{where}: scales")
    if "out" not in at[0]:
        return
    out = oracle.combine(
        [r["expert_output"] for r in at], received, weights, rank_major=rank_major, direct_send=direct_send
    )
    for rank, (r, want) in enumerate(zip(at, out, strict=True)):
        same_bits(r["out"], want, f"{name} rank {rank}: sums")


def same_bits(got, want, name):
    bits = np.dtype(f"u{want.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(bits), want.view(bits), err_msg=name)
