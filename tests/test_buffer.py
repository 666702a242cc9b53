"""Buffer against the oracle: plan, dispatch and combine on every rank count, routing and row type."""

import contextlib
import time

import numpy as np
import pytest
from ranks import run_ranks

from epcomm import Buffer, PeerTimeoutError, dtypes, layout, reference


def routing(kind, rank, num_tokens, topk, experts, seed):
    """[s, K] ids of one rank."""
    rng = np.random.default_rng([seed, rank])
    if kind == "uniform":
        return rng.random((num_tokens, experts)).argsort(axis=1)[:, :topk]
    if kind == "skewed":
        return np.minimum(rng.geometric(0.3, (num_tokens, topk)) - 1, experts - 1)
    if kind == "one expert":
        return np.full((num_tokens, topk), experts // 2)
    if kind == "masked":
        return np.where(
            rng.random((num_tokens, topk)) < 0.5, -1, rng.integers(0, experts, (num_tokens, topk))
        )
    if kind == "nothing":
        return np.full((num_tokens, topk), -1)
    raise ValueError(kind)


def rows_of(rank, call, num_tokens, hidden, dtype):
    """Rows that differ for every rank, call and token, random bits below."""
    rng = np.random.default_rng([rank, call, 7])
    rows = rng.standard_normal((num_tokens, hidden)).astype(np.float32)
    rows[:, 0] = rank * 64 + call
    if hidden > 1:
        rows[:, 1] = np.arange(num_tokens)
    return rows.astype(dtype)


def step(
    group, settings, calls, index_dtype=np.int32, ring_tokens=None, zero_copy=True, delay_rank=None, seed=0
):
    """`calls` steps of plan, dispatch, expert work and combine on one rank; returns what it saw, for the
    oracle."""
    original = layout.ring_tokens
    if ring_tokens is not None:
        layout.ring_tokens = lambda *a: ring_tokens
    try:
        buffer = Buffer(group, **settings)
    finally:
        layout.ring_tokens = original
    seen = []
    with buffer:
        device, xp = group.device, buffer.xp
        for call, (kind, tokens) in enumerate(calls):
            s = tokens[group.rank]
            topk_idx = routing(kind, group.rank, s, buffer.num_topk, buffer.num_experts, seed + call)
            x = rows_of(group.rank, call, s, buffer.hidden, buffer.dtype)
            weights = np.random.default_rng([group.rank, call]).random((s, buffer.num_topk), np.float32)
            if delay_rank == group.rank:
                time.sleep(0.02)
            poison(buffer)
            got = buffer.dispatch(
                xp.asarray(x),
                xp.asarray(topk_idx.astype(index_dtype)),
                xp.asarray(weights),
                zero_copy=zero_copy,
                total_tokens=sum(tokens) if call % 2 else None,
            )
            plan = got.plan
            rows, row_weights = device.to_host(got.x), device.to_host(got.topk_weights)
            back = buffer.combine(got.x, plan, row_weights=got.topk_weights, zero_copy=zero_copy)
            buffer.check()
            seen.append(
                dict(
                    topk_idx=topk_idx,
                    x=x,
                    weights=weights,
                    rows=rows,
                    row_weights=row_weights,
                    out=device.to_host(back.x),
                    weights_back=device.to_host(back.topk_weights),
                    plan={
                        name: device.to_host(getattr(plan, name))
                        for name in (
                            "dst",
                            "num_tokens_per_rank",
                            "num_tokens_per_expert",
                            "cu_seqlens",
                            "experts_to_copy",
                        )
                    },
                )
            )
    return seen


def poison(buffer):
    """Rows and weights of the receive area that a dispatch must overwrite."""
    buffer._rows_view[:] = -77
    buffer._weights_view[:] = -77


def verify(results, settings):
    """Every call of every rank, exactly."""
    for call in range(len(results[0])):
        at = [rank[call] for rank in results]
        plan = reference.plan(
            [r["topk_idx"] for r in at],
            settings["num_experts"],
            settings["num_tokens"],
            settings.get("token_padding", 128),
        )
        dtype = dtypes.resolve(settings.get("dtype", "bfloat16"))
        rows, row_weights = reference.dispatch([r["x"] for r in at], plan, [r["weights"] for r in at])
        full = [np.where(np.isnan(r.astype(np.float32)), 0, r.astype(np.float32)).astype(dtype) for r in rows]
        out, weights_back = reference.combine(full, plan, dtype, row_weights)
        for rank, r in enumerate(at):
            want = plan.ranks[rank]
            for name in ("dst", "cu_seqlens"):
                np.testing.assert_array_equal(
                    r["plan"][name], getattr(want, name), err_msg=f"call {call} rank {rank} {name}"
                )
            for name in ("experts_to_copy", "num_tokens_per_rank"):
                np.testing.assert_array_equal(
                    r["plan"][name], getattr(plan, name), err_msg=f"call {call} rank {rank} {name}"
                )
            np.testing.assert_array_equal(r["plan"]["num_tokens_per_expert"], want.counts)
            used = int(want.cu_seqlens[-1])
            assert r["rows"][:used].tobytes() == rows[rank][:used].tobytes(), f"call {call} rank {rank}: rows"
            np.testing.assert_array_equal(r["row_weights"][:used], row_weights[rank][:used])
            assert r["out"].tobytes() == out[rank].tobytes(), f"call {call} rank {rank}: sums"
            np.testing.assert_array_equal(r["weights_back"], weights_back[rank])


def settings_of(**changes):
    return dict(num_tokens=24, hidden=64, num_topk=4, num_experts=16, token_padding=8) | changes


KINDS = ("uniform", "skewed", "one expert", "masked", "nothing")


def unequal(ranks, most=24):
    """Token counts that differ by rank, with an empty rank and a full one."""
    return [(r * 7 + 5) % most for r in range(ranks - 1)] + [most] if ranks > 1 else [most]


def calls_of(ranks, kinds=KINDS):
    calls = [(kind, unequal(ranks)) for kind in kinds]
    return calls + [("uniform", [0] * ranks), ("skewed", list(reversed(unequal(ranks))))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_steps_equal_the_oracle(ranks):
    settings = settings_of(num_experts=2 * ranks * 4)
    verify(run_ranks(ranks, step, settings, calls_of(ranks)), settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("zero_copy", [True, False])
def test_row_types(dtype, zero_copy):
    settings = settings_of(num_experts=12, dtype=dtype, hidden=72)
    verify(run_ranks(3, step, settings, calls_of(3), zero_copy=zero_copy, index_dtype=np.int64), settings)


@pytest.mark.parametrize(
    "changes",
    [
        dict(hidden=8),
        dict(hidden=200),
        dict(hidden=1000),
        dict(hidden=2880),
        dict(hidden=7168),
        dict(num_topk=1),
        dict(num_topk=9),
        dict(num_topk=32),
        dict(num_topk=22, num_experts=60),
        dict(num_experts=3),
        dict(token_padding=1),
        dict(token_padding=128),
        dict(num_tokens=1),
    ],
    ids=str,
)
def test_shapes(changes):
    settings = settings_of(num_experts=48) | changes
    most = settings["num_tokens"]
    calls = [("skewed", [most, most // 2, 0]), ("masked", [most] * 3)]
    verify(run_ranks(3, step, settings, calls), settings)


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_a_ring_of_two_tokens_gives_the_same_bits(ranks):
    """Two halves of one token each: every chunk needs a credit."""
    rng = np.random.default_rng(ranks)
    calls = [("skewed", [int(t) for t in rng.integers(0, 25, ranks)]) for _ in range(4)]
    settings = settings_of(num_experts=2 * ranks)
    for ring in (2, 6):
        verify(run_ranks(ranks, step, settings, calls, ring_tokens=ring), settings)


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_changes_nothing(late):
    settings = settings_of(num_experts=12)
    verify(run_ranks(3, step, settings, calls_of(3), delay_rank=late), settings)


def reuse(group, settings, tokens):
    """One plan dispatched three times, another plan made in between; the backward pair with row weights."""
    with Buffer(group, **settings) as buffer:
        xp, s = buffer.xp, tokens[group.rank]
        ids = routing("skewed", group.rank, s, buffer.num_topk, buffer.num_experts, 1)
        other = routing("uniform", group.rank, s, buffer.num_topk, buffer.num_experts, 2)
        plan = buffer.plan(xp.asarray(ids))
        outs = []
        for call in range(3):
            x = rows_of(group.rank, call, s, buffer.hidden, buffer.dtype)
            got = buffer.dispatch(xp.asarray(x), plan=plan)
            buffer.plan(xp.asarray(other))
            outs.append((ids, x, group.device.to_host(buffer.combine(got.x, plan).x)))
        buffer.check()
        return outs


def test_a_plan_survives_other_plans():
    settings, tokens = settings_of(num_experts=12), [24, 3, 11]
    results = run_ranks(3, reuse, settings, tokens)
    for call in range(3):
        at = [rank[call] for rank in results]
        plan = reference.plan([r[0] for r in at], 12, 24, 8)
        rows, _ = reference.dispatch([r[1] for r in at], plan)
        out, _ = reference.combine(rows, plan, dtypes.bfloat16)
        for rank in range(3):
            assert at[rank][2].tobytes() == out[rank].tobytes()


def wrong_settings(group, change, rank):
    settings = settings_of() | (change if rank in (None, group.rank) else {})
    try:
        Buffer(group, **settings)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("change", "rank", "words"),
    [
        (dict(num_experts=15), None, ["num_experts", "15"]),
        (dict(hidden=60), None, ["hidden", "60"]),
        (dict(num_topk=33), 1, ["num_topk", "33", "rank 1"]),
        (dict(hidden=128), 1, ["hidden", "128", "64", "rank"]),
        (dict(num_tokens=0), 0, ["num_tokens", "rank 0"]),
        (dict(dtype="int32"), None, ["dtype", "int32"]),
        (dict(token_padding=0), None, ["token_padding"]),
        (dict(num_tokens=2**30), None, ["num_tokens", "2**31"]),
        (dict(hidden=2**20), None, ["hidden", "shared memory"]),
    ],
    ids=str,
)
def test_wrong_settings_raise_on_every_rank(change, rank, words):
    for message in run_ranks(2, wrong_settings, change, rank):
        assert message is not None
        for word in words:
            assert word in message, message


def wrong_call(group, mistake, again):
    """Rank 1 makes a mistake; if `again`, it repeats the call rightly in time, else it leaves with the
    error."""
    with contextlib.suppress(MemoryError), Buffer(group, **settings_of(num_experts=24)) as buffer:
        xp = buffer.xp
        x = xp.asarray(rows_of(group.rank, 0, 6, 64, buffer.dtype))
        ids = xp.asarray(routing("uniform", group.rank, 6, 4, 24, 0))
        if group.rank == 1:
            bad = dict(
                shape=lambda: buffer.dispatch(x[:, :32], ids),
                dtype=lambda: buffer.dispatch(x.astype(np.float32), ids),
                many=lambda: buffer.dispatch(xp.zeros((25, 64), buffer.dtype), xp.zeros((25, 4), np.int32)),
                both=lambda: buffer.dispatch(x, ids, plan=3),
                kind=lambda: buffer.dispatch([[1.0] * 64], ids),
                topk=lambda: buffer.dispatch(x, ids[:, :2]),
                weights=lambda: buffer.dispatch(x, ids, xp.ones((6, 3), np.float32)),
            )[mistake]
            with pytest.raises((ValueError, TypeError)):
                bad()
            if not again:
                raise MemoryError
        try:
            got = buffer.dispatch(x, ids)
            buffer.check()
        except PeerTimeoutError as error:
            assert 1 in error.peers and "rank 1" in str(error) and f"rank {group.rank}" in str(error)
            with pytest.raises(PeerTimeoutError):
                buffer.plan(ids)
            return "timeout"
        return group.device.to_host(buffer.combine(got.x, got.plan).x).astype(np.float32)
    return "mine"


@pytest.mark.parametrize("mistake", ["shape", "dtype", "many", "both", "kind", "topk", "weights"])
def test_a_mistake_is_told_and_can_be_mended_in_time(mistake):
    for out in run_ranks(3, wrong_call, mistake, True):
        assert isinstance(out, np.ndarray) and out.shape == (6, 64)


def test_a_mistake_that_is_not_mended_times_out_elsewhere():
    assert run_ranks(3, wrong_call, "shape", False, timeout=2.0) == ["timeout", "mine", "timeout"]


def bad_ids(group):
    with Buffer(group, **settings_of()) as buffer:
        ids = routing("uniform", group.rank, 6, 4, 16, 0)
        ids[0, 0], ids[1, 1], ids[2, 2] = 16, -2, 2**31 - 1
        plan = buffer.plan(buffer.xp.asarray(ids))
        with pytest.raises(ValueError, match="3 expert ids"):
            buffer.check()
        buffer.check()
        return ids, group.device.to_host(plan.dst)


def test_ids_out_of_range_act_as_masked_and_are_counted():
    results = run_ranks(2, bad_ids)
    plan = reference.plan([ids for ids, _ in results], 16, 24, 8)
    for rank, (_, dst) in enumerate(results):
        np.testing.assert_array_equal(dst, plan.ranks[rank].dst)


def stale_view(group):
    with Buffer(group, **settings_of()) as buffer:
        xp = buffer.xp
        x, ids = (
            xp.asarray(rows_of(group.rank, 0, 6, 64, buffer.dtype)),
            xp.asarray(routing("uniform", group.rank, 6, 4, 16, 0)),
        )
        with pytest.raises(ValueError, match="not been dispatched"):
            buffer.combine(x, buffer.plan(ids))
        first = buffer.dispatch(x, ids, zero_copy=True)
        second = buffer.dispatch(x, ids, zero_copy=True)
        with pytest.raises(ValueError, match="stale"):
            buffer.combine(first.x, first.plan)
        with pytest.raises(ValueError, match="own view"):
            buffer.combine(second.x.copy(), second.plan, zero_copy=True)
        buffer.combine(second.x, second.plan, zero_copy=True)
        short = buffer.combine(second.x[:1].copy(), second.plan)
        try:
            buffer.check()
        except ValueError as error:
            return short.x.shape, str(error)


def test_views_and_short_rows():
    for shape, message in run_ranks(2, stale_view):
        assert shape == (6, 64) and "rows lay outside" in message


def memory_of(group):
    with Buffer(group, num_tokens=8192, hidden=7168, num_topk=8, num_experts=384, token_padding=1) as buffer:
        return buffer.memory()


@pytest.mark.parametrize("ranks", [2, 8])
def test_memory_beside_the_receive_area_is_small(ranks):
    for sizes in run_ranks(ranks, memory_of):
        receive = sizes["receive"]
        assert receive == 8192 * 8 * 7168 * 2
        assert sizes["total"] == sum(v for k, v in sizes.items() if k != "total")
        assert sizes["total"] - receive < 0.15 * receive
        assert ranks < 8 or sizes["ring"] <= (ranks - 1) * 16 * 2**20
