"""MoECommunicator as an object: handles, orders of calls, mistakes, settings, memory, long runs."""

import contextlib
import gc
import itertools
import time

import numpy as np
import pytest
from low_latency_harness import (
    Call,
    calls_for,
    combine,
    dispatch,
    experts_of,
    poison_new_memory,
    routing,
    rows_of,
    settings_of,
    signal,
    verify_call,
    weights_of,
)
from ranks import on_gpus, run_ranks

from epcomm import (
    CombineMode,
    DispatchLayout,
    EpcommError,
    MoECommunicator,
    PeerTimeoutError,
    QuantConfig,
    dtypes,
)
from epcomm.runtime import _fibers

LAYOUTS = tuple(DispatchLayout)
MODES = tuple(CombineMode)


# Handles and orders of calls
# ---------------------------


def orders(count):
    """All orders in which `count` dispatches, each combined once and later, can be called."""
    events = [("d", i) for i in range(count)] + [("c", i) for i in range(count)]
    for order in itertools.permutations(events):
        place = {event: at for at, event in enumerate(order)}
        starts = [place["d", i] for i in range(count)]
        if starts == sorted(starts) and all(place["d", i] < place["c", i] for i in range(count)):
            yield order


def interleaved(group, settings, calls, late):
    poison_new_memory(group.device)
    seen = []
    with MoECommunicator(group, **settings) as comm:
        for turn, order in enumerate(orders(len(calls))):
            records, handles = {}, {}
            for what, i in order:
                number = turn * len(calls) + i
                if late and group.rank == number % group.size:
                    time.sleep(0.002)
                if what == "d":
                    records[i], _, handles[i] = dispatch(comm, calls[i], number)
                else:
                    records[i]["expert_output"], records[i]["out"] = combine(comm, handles[i], number)
            again = combine(comm, handles[0], turn * len(calls))[1]
            assert again.tobytes() == records[0]["out"].tobytes(), "a second combine of a handle differs"
            seen += [records[i] for i in range(len(calls))]
        comm.check()
    return seen


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda m: m.value)
def test_any_order_of_dispatches_and_combines(layout, late):
    settings = settings_of(num_experts=6, output_layout=layout)
    calls = [Call("uniform", (5, 12, 0)), Call("masked", (12, 0, 7)), Call("duplicates", (1, 2, 3))]
    results = run_ranks(3, interleaved, settings, calls, late)
    for number in range(len(results[0])):
        verify_call([rank[number] for rank in results], settings, f"call {number}")


def far_ahead(group, how, late):
    """Nobody sends to rank `late` but rank 0, which waits for nobody: only entry words hold it back."""
    poison_new_memory(group.device)
    with signal(how), MoECommunicator(group, **settings_of(num_experts=3)) as comm:
        xp, made = comm.xp, []
        for number in range(6):
            t = 5 if group.rank == late else 0
            ids = np.zeros((t, comm.topk), np.int32)  # the expert on rank 0
            x, weights = rows_of(group.rank, number, t, 64), weights_of(group.rank, number, t, comm.topk)
            made.append(comm.dispatch(xp.asarray(x), xp.asarray(ids), xp.asarray(weights))[1])
        if group.rank == late:
            time.sleep(0.3)
        sums = []
        for number, handle in enumerate(made):
            rows = xp.full(comm._shape.expert_output_shape, number + 1, dtypes.bfloat16)
            sums.append(group.device.to_host(comm.combine(rows, handle)).astype(np.float32))
        comm.check()
        weights = [weights_of(group.rank, n, len(sums[0]), comm.topk) for n in range(6)]
        return all(
            np.allclose(got, (n + 1) * w.sum(axis=1, keepdims=True), rtol=0.02, atol=0.02)
            for n, (got, w) in enumerate(zip(sums, weights, strict=True))
        )


@pytest.mark.parametrize("how", ["lines", "flags"])
@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_waits_for_nobody_does_not_run_ahead(late, how):
    assert run_ranks(3, far_ahead, how, late) == [True] * 3


def old_results(group, settings):
    """What an early dispatch gave, looked at after many more."""
    with MoECommunicator(group, **settings) as comm:
        xp, device, t = comm.xp, group.device, 9
        ids = xp.asarray(routing("uniform", group.rank, t, comm.topk, comm.num_experts, 0).astype(np.int32))
        weights = xp.asarray(weights_of(group.rank, 0, t, comm.topk))
        output, handle = comm.dispatch(xp.asarray(rows_of(group.rank, 0, t, comm.hidden_size)), ids, weights)
        rows = xp.asarray(experts_of(group.rank, 0, comm._shape.expert_output_shape))
        tokens = device.to_host(output.tokens)
        out = device.to_host(comm.combine(rows, handle))
        ids[:], weights[:] = 0, 0  # the handle has its own
        for number in range(1, 12):
            dispatch(comm, Call("masked", (3,) * group.size), number)
        assert device.to_host(output.tokens).tobytes() == tokens.tobytes()
        del output
        gc.collect()
        assert device.to_host(comm.combine(rows, handle)).tobytes() == out.tobytes()
        comm.check()


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda m: m.value)
def test_results_and_handles_stay_what_they_were(layout, mode):
    run_ranks(2, old_results, settings_of(output_layout=layout, combine_mode=mode))


def two_communicators(group):
    """Different shapes, calls by turns; a sub-group's communicator beside them."""
    from epcomm import Group

    seen = []
    half = group.comm.Split(group.rank % 2, group.rank)
    with (
        MoECommunicator(group, **settings_of(num_experts=8)) as one,
        MoECommunicator(group, **settings_of(num_experts=4, quant=QuantConfig(), hidden_size=128)) as two,
        Group(half, device=str(group.device), timeout=group.timeout) as subgroup,
        MoECommunicator(subgroup, **settings_of(num_experts=6, topk=2)) as three,
    ):
        for number in range(4):
            handles = []
            for comm in (one, two, three):
                record, _, handle = dispatch(comm, Call("uniform", (7, 3, 12, 0)), number)
                handles.append((comm, record, handle))
            for comm, record, handle in reversed(handles):
                record["expert_output"], record["out"] = combine(comm, handle, number)
                comm.check()
            seen.append([record for _, record, _ in handles])
    return seen


def test_several_communicators():
    results = run_ranks(4, two_communicators)
    for number in range(4):
        first = [rank[number][0] for rank in results]
        verify_call(first, settings_of(num_experts=8), f"one, call {number}")
        second = [rank[number][1] for rank in results]
        settings = settings_of(num_experts=4, quant=QuantConfig(), hidden_size=128)
        verify_call(second, settings, f"two, call {number}")
        for part in (0, 1):
            third = [results[rank][number][2] for rank in (part, part + 2)]
            verify_call(third, settings_of(num_experts=6, topk=2), f"three of {part}, call {number}")


def outputs(group):
    """output_buffer and out are written and handed back; other fields are shown only where they exist."""
    with MoECommunicator(group, **settings_of(num_experts=4)) as comm:
        xp = comm.xp
        x = xp.asarray(rows_of(group.rank, 0, 5, 64))
        ids = xp.asarray(routing("uniform", group.rank, 5, 4, 4, 0))
        buffer = xp.full(comm._shape.tokens_shape, 3, dtypes.bfloat16)
        output, handle = comm.dispatch(x, ids, output_buffer=buffer)
        fresh, _ = comm.dispatch(x, ids)
        out = xp.full((5, 64), 3, dtypes.bfloat16)
        assert output.tokens is buffer
        assert comm.combine(buffer, handle, out=out) is out
        want = comm.combine(buffer, handle)
        comm.check()
        counts = group.device.to_host(fresh.layout.num_tokens_per_expert)
        mine, other = group.device.to_host(buffer), group.device.to_host(fresh.tokens)
        for expert, count in enumerate(counts):
            assert mine[expert, :count].tobytes() == other[expert, :count].tobytes()
            assert (mine[expert, count:] == 3).all(), "rows that nobody sent were written"
        assert group.device.to_host(out).tobytes() == group.device.to_host(want).tobytes()
        assert output.layout.num_tokens_per_rank is None and output.quant is None
        assert output.topk_idx is None and output.topk_weights is None
        assert comm.is_available() and not comm.is_internode_available()
    assert not comm.is_available()
    with pytest.raises(EpcommError, match="closed"):
        comm.dispatch(x, ids)


def test_given_arrays_are_used():
    run_ranks(2, outputs)


# Mistakes
# --------


def wrong_call(group, mistake, again):
    """Rank 1 makes a mistake; if `again`, it calls rightly in time, else it leaves with the error."""
    settings = settings_of(num_experts=12)
    with (
        contextlib.suppress(MemoryError),
        MoECommunicator(group, **settings) as comm,
        MoECommunicator(group, **settings) as other,
    ):
        xp = comm.xp
        x = xp.asarray(rows_of(group.rank, 0, 6, 64))
        ids = xp.asarray(routing("uniform", group.rank, 6, 4, 12, 0).astype(np.int32))
        rows = xp.asarray(experts_of(group.rank, 0, comm._shape.expert_output_shape))
        _, early = comm.dispatch(x, ids)
        _, foreign = other.dispatch(x, ids)
        if group.rank == 1:
            bad = dict(
                shape=lambda: comm.dispatch(x[:, :32], ids),
                dtype=lambda: comm.dispatch(x.astype(np.float32), ids),
                many=lambda: comm.dispatch(xp.zeros((13, 64), dtypes.bfloat16), xp.zeros((13, 4), np.int32)),
                kind=lambda: comm.dispatch([[1.0] * 64], ids),
                topk=lambda: comm.dispatch(x, ids[:, :2]),
                floats=lambda: comm.dispatch(x, ids.astype(np.float32)),
                weights=lambda: comm.dispatch(x, ids, xp.ones((6, 3), np.float32)),
                buffer=lambda: comm.dispatch(x, ids, output_buffer=xp.zeros((4, 36, 32), dtypes.bfloat16)),
                foreign=lambda: comm.combine(rows, foreign),
                handle=lambda: comm.combine(rows, None),
                rows=lambda: comm.combine(rows[:, :30], early),
                out=lambda: comm.combine(rows, early, out=xp.zeros((6, 64), np.float32)),
            )[mistake]
            with pytest.raises((ValueError, TypeError)) as told:
                bad()
            words = {"foreign": "another communicator", "handle": "DispatchHandle", "rows": "expert_output"}
            assert words.get(mistake, "expected") in str(told.value)
            if not again:
                raise MemoryError
        try:
            _, handle = comm.dispatch(x, ids)
            out = comm.combine(rows, handle)
            comm.check()
        except PeerTimeoutError as error:
            assert 1 in error.peers and "rank 1" in str(error) and f"rank {group.rank}" in str(error)
            assert not comm.is_available()
            for call in (lambda: comm.dispatch(x, ids), lambda: comm.combine(rows, early), comm.check):
                with pytest.raises(PeerTimeoutError):
                    call()
            raise MemoryError from None  # not a meeting at the end: rank 1 does not come
        return group.device.to_host(out).shape
    return "timeout" if group.rank != 1 else "mine"


MISTAKES = (
    "shape",
    "dtype",
    "many",
    "kind",
    "topk",
    "floats",
    "weights",
    "buffer",
    "foreign",
    "handle",
    "rows",
    "out",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_and_can_be_mended_in_time(mistake):
    assert run_ranks(3, wrong_call, mistake, True) == [(6, 64)] * 3


@pytest.mark.parametrize("mistake", ["shape", "foreign"])
def test_a_mistake_that_is_not_mended_times_out_elsewhere(mistake):
    assert run_ranks(3, wrong_call, mistake, False, timeout=1.5) == ["timeout", "mine", "timeout"]


def missing_combine(group, how):
    """Rank 0 never combines: who waits for its rows gives up and names it."""
    with (
        contextlib.suppress(MemoryError),
        signal(how),
        MoECommunicator(group, **settings_of(num_experts=3)) as comm,
    ):
        xp = comm.xp
        x = xp.asarray(rows_of(group.rank, 0, 6, 64))
        _, handle = comm.dispatch(x, xp.zeros((6, 4), np.int32))  # all to the expert on rank 0
        if group.rank == 0:
            raise MemoryError
        rows = xp.zeros(comm._shape.expert_output_shape, dtypes.bfloat16)
        with pytest.raises(PeerTimeoutError) as raised:
            comm.combine(rows, handle)
            comm.check()
        assert raised.value.peers == (0,) and raised.value.operation == "low-latency combine"
        raise MemoryError


@pytest.mark.parametrize("how", ["lines", "flags"])
def test_a_rank_that_never_combines_is_named(how):
    run_ranks(3, missing_combine, how, timeout=1.5)


def wrong_settings(group, change, rank):
    if group.rank == rank or rank is None:
        changed = settings_of(num_experts=6) | change
    else:
        changed = settings_of(num_experts=6)
    with pytest.raises(ValueError) as raised:
        MoECommunicator(group, **changed)
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "rank", "words"),
    [
        (dict(hidden_size=72), 1, ("hidden_size", "72", "64", "rank 1")),
        (dict(hidden_size=12), None, ("hidden_size", "multiple of 8", "12")),
        (dict(hidden_size=64, quant=QuantConfig()), None, ("hidden_size", "multiple of 128")),
        (dict(num_experts=7), None, ("num_experts", "7")),
        (dict(num_local_experts=3), 2, ("num_local_experts", "rank 2")),
        (dict(topk=33), None, ("topk", "1 to 32", "33")),
        (dict(max_tokens_per_rank=0), 0, ("max_tokens_per_rank", "positive", "rank 0")),
        (dict(max_tokens_per_rank=1 << 17), None, ("max_tokens_per_rank", "at most")),
        (dict(output_layout="rank_major"), 1, ("output_layout", "DispatchLayout", "rank 1")),
        (dict(combine_mode=None), None, ("combine_mode", "CombineMode")),
        (dict(quant="fp8"), None, ("quant", "QuantConfig")),
        (dict(quant=QuantConfig(), hidden_size=128), 0, ("quant", "rank 0")),
        (dict(num_blocks=0), 1, ("num_blocks", "rank 1")),
        (dict(hidden_size=1 << 20), None, ("hidden_size", "shared memory")),
    ],
)
def test_wrong_settings_raise_on_every_rank(change, rank, words):
    for message in run_ranks(3, wrong_settings, change, rank):
        assert all(word in message for word in words), message


def unequal_signals(group):
    with pytest.raises(ValueError, match="EPCOMM_LL_SIGNAL"):
        MoECommunicator(group, **settings_of())


def test_an_unknown_signal_is_refused(monkeypatch):
    with signal("smoke"):
        run_ranks(1, unequal_signals)


# Memory
# ------


def memory_of(group, settings):
    with MoECommunicator(group, **settings) as comm:
        return comm.memory()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda m: m.value)
@pytest.mark.parametrize(
    ("ranks", "tokens", "hidden"), [(8, 128, 7168), (2, 16, 2880), (2, 128, 7168), (1, 1, 8)]
)
def test_memory_is_what_the_rows_need(ranks, tokens, hidden, layout):
    """Not R*T*H for every expert. Small communicators are rounded up to a page of the device."""
    settings = dict(
        num_experts=256, hidden_size=hidden, topk=8, max_tokens_per_rank=tokens, output_layout=layout
    )
    bound = 4 * ranks * tokens * 128 * -(-2 * hidden // 112) + 2 * ranks * tokens * 8 * 16 + (1 << 20)
    for memory in run_ranks(ranks, memory_of, settings):
        assert memory["total"] == sum(n for name, n in memory.items() if name != "total")
        page = memory["rounding"] if tokens * hidden < 1 << 19 else 0
        assert memory["total"] - page <= bound


# Long runs
# ---------


def eager(group, settings, calls, count, how, seed):
    """Many calls, two dispatches outstanding, each compared with the first time the same call was made."""
    if not on_gpus():
        _fibers.set_schedule(seed * 64 + group.rank + 1)
    first, records = {}, []
    rng = np.random.default_rng([seed, group.rank])
    try:
        with signal(how):
            comm = MoECommunicator(group, **settings)
        with comm:
            pending = []
            for number in range(count):
                which = number * 7 % len(calls)
                if rng.random() < 0.02:
                    time.sleep(0.002)
                pending.append((which, *dispatch(comm, calls[which], which)))
                if number % 3:
                    which, record, output, handle = pending.pop(0)
                    record["expert_output"], record["out"] = combine(comm, handle, which)
                    if which not in first:
                        first[which] = record
                        records.append((which, record))
                    same(record, first[which], comm)
            comm.check()
    finally:
        if not on_gpus():
            _fibers.set_schedule(None)
    return [first[which] for which in sorted(first)]


def same(record, first, comm):
    for name in ("counts", "layout_range", "out"):
        assert record[name].tobytes() == first[name].tobytes(), name
    for expert, count in enumerate(record["counts"]):
        rows = comm.max_tokens_per_rank * expert if comm.output_layout is DispatchLayout.RANK_MAJOR else None
        got, want = (
            (r["tokens"][expert, :count] if rows is None else r["tokens"][rows : rows + count])
            for r in (record, first)
        )
        assert got.tobytes() == want.tobytes(), "tokens"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda m: m.value)
@pytest.mark.parametrize("how", ["lines", "flags"])
def test_two_thousand_calls(how, layout):
    """500 each."""
    settings = settings_of(num_experts=6, hidden_size=16, topk=3, max_tokens_per_rank=4, output_layout=layout)
    calls = calls_for(3, 4, 13)
    results = run_ranks(3, eager, settings, calls, 500, how, 1)
    for number, which in enumerate(sorted(range(len(results[0])))):
        verify_call([rank[number] for rank in results], settings, f"call {which}")
