"""The planner kernel against the oracle, every integer exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_harness import GUARD, Planners

from epcomm import plan_layout, reference
from epcomm.runtime import _fibers, args

KINDS = ["uniform", "skewed", "one expert", "one rank's experts", "last rank's experts", "masked", "nothing"]


def routing(kind, num_tokens, topk, experts, ranks, rng):
    shape = (num_tokens, topk)
    epn = experts // ranks
    if kind == "uniform":
        return rng.integers(0, experts, shape)
    if kind == "skewed":
        popularity = np.exp(np.random.default_rng(experts).normal(0, 2, experts))
        return rng.choice(experts, shape, p=popularity / popularity.sum())
    if kind == "one expert":
        return np.full(shape, experts // 2)
    if kind == "one rank's experts":
        return rng.integers(0, epn, shape)
    if kind == "last rank's experts":
        return rng.integers(experts - epn, experts, shape)
    if kind == "masked":
        return np.where(rng.random(shape) < 0.5, -1, rng.integers(0, experts, shape))
    return np.full(shape, -1)


def compare(got, ids, planners, what=""):
    want = reference.plan(ids, planners.experts, planners.num_tokens, planners.token_padding)
    for rank, mine in enumerate(got):
        for name in ("dst", "counts", "cu_seqlens"):
            np.testing.assert_array_equal(
                getattr(mine, name), getattr(want.ranks[rank], name), f"{what}: {name} of {rank}"
            )
        np.testing.assert_array_equal(
            mine.experts_to_copy, want.experts_to_copy.reshape(-1), f"{what}: rank {rank}"
        )
        np.testing.assert_array_equal(
            mine.num_tokens_per_rank, want.num_tokens_per_rank, f"{what}: rank {rank}"
        )


def run(ranks, num_tokens, topk, experts, *, kinds=KINDS, seed=0, dtype=np.int32, even=False, **how):
    """Calls in a row, one for each kind of routing, each with other numbers of tokens."""
    rng = np.random.default_rng(seed)
    with Planners(ranks, num_tokens, topk, experts, **how) as planners:
        calls = []
        for kind in kinds:
            sizes = np.full(ranks, num_tokens) if even else rng.integers(0, num_tokens + 1, ranks)
            calls.append([routing(kind, s, topk, experts, ranks, rng).astype(dtype) for s in sizes])
        for kind, ids, got in zip(kinds, calls, planners.plan(calls), strict=True):
            compare(got, ids, planners, kind)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_plan(ranks, dtype):
    run(ranks, 40, 4, 8 * ranks, dtype=dtype)


@pytest.mark.parametrize(
    ("ranks", "num_tokens", "topk", "experts", "how"),
    [
        (1, 1, 1, 1, dict(grids=1, threads=32)),  # the least of everything
        (2, 300, 32, 64, dict(grids=3)),  # the largest top-k
        (2, 64, 8, 1024, dict(grids=4)),  # many experts
        (3, 20, 3, 3, dict(token_padding=1)),  # one expert a rank
        (2, 20, 2, 6144, dict(token_padding=1, kinds=["skewed"])),  # shared memory for a few warps only
        (2, 50, 2, 10, dict(grids=[1, 4])),  # ranks with grids of their own
        (2, 600, 4, 10, dict(grids=300, threads=32, kinds=["uniform"])),  # more blocks than one scan
        (36, 10, 3, 72, dict(grids=1, threads=32)),  # more ranks than lanes
        (2, 8192, 8, 384, dict(grids=4, kinds=KINDS[1:4], even=True, token_padding=128)),
    ],
)
def test_shapes(ranks, num_tokens, topk, experts, how):
    run(ranks, num_tokens, topk, experts, **how)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_and_routing(data):
    ranks = data.draw(st.sampled_from([1, 2, 3, 5, 8]))
    run(
        ranks,
        data.draw(st.integers(1, 60)),
        data.draw(st.integers(1, 9)),
        ranks * data.draw(st.integers(1, 40)),
        kinds=data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)),
        seed=data.draw(st.integers(0, 2**32 - 1)),
        dtype=data.draw(st.sampled_from([np.int32, np.int64])),
        token_padding=data.draw(st.sampled_from([1, 3, 16, 128])),
        grids=data.draw(st.lists(st.integers(1, 4), min_size=ranks, max_size=ranks)),
        threads=data.draw(st.sampled_from([32, 96, 128])),
    )


@pytest.mark.parametrize("seed", range(1, 9))
def test_any_order_of_threads(seed):
    _fibers.set_schedule(seed)
    try:
        run(3, 40, 4, 24, grids=3, seed=seed)
    finally:
        _fibers.set_schedule(None)


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_waited_for(late):
    run(3, 30, 2, 12, delays=[0.03 * (rank == late) for rank in range(3)])


def test_epochs_may_wrap():
    ranks, start = 2, 2**32 - 3
    with Planners(ranks, 20, 2, 8) as planners:
        for rank, own in enumerate(planners.locals):
            own.epochs[:] = start
            own.scratch.view(np.uint32)[1::2] = start
            planners.chunks[rank, own.args.packets :].view(np.uint32)[1::2] = start
        rng = np.random.default_rng(0)
        calls = [[rng.integers(0, 8, (20, 2)).astype(np.int32) for _ in range(ranks)] for _ in range(6)]
        for ids, got in zip(calls, planners.plan(calls), strict=True):
            compare(got, ids, planners)
        assert [int(epoch) for own in planners.locals for epoch in own.epochs] == [3] * 4


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bad_ids_are_counted_and_act_as_minus_one(dtype):
    ids = [
        np.array([[0, 9], [8, -2]], dtype),
        np.array([[-1, 7], [np.iinfo(dtype).max, np.iinfo(dtype).min]], dtype),
    ]
    with Planners(2, 4, 2, 8) as planners:
        compare(planners.plan([ids])[0], ids, planners)
        assert [own.bad_input.tolist() for own in planners.locals] == [[3, 0, 0, 0], [2, 0, 0, 0]]


def test_a_rank_that_does_not_come_ends_the_wait_and_the_planners():
    ids = [np.zeros((4, 2), np.int32)] * 3
    with Planners(3, 4, 2, 6, timeout=0.2) as planners:
        _, missed, after = planners.plan([ids, [ids[0], None, ids[2]], [ids[0], None, ids[2]]])
        for out in missed[::2] + after[::2]:
            assert all(
                (array == GUARD).all() for array in (out.dst, out.counts, out.cu_seqlens, out.experts_to_copy)
            )
        errors = [planners.locals[rank].error for rank in (0, 2)]
        assert all(
            error.state == 1 and error.operation == args.OP_PLAN and error.wanted == 2 for error in errors
        )
        first = [error for error in errors if not error.peer_raised]
        assert first and all(error.peer == 1 and error.seen == 0 for error in first)
        assert all((own.epochs == 1).all() for own in planners.locals)


def test_too_many_experts_are_refused():
    with pytest.raises(ValueError, match="num_experts"):
        plan_layout.block_threads(20000, 2)


def test_blocks_and_threads_follow_the_shape():
    assert plan_layout.block_threads(384, 2) == 512
    assert plan_layout.shared_bytes(1024, 64, plan_layout.block_threads(1024, 64)) <= plan_layout.MAX_SHARED
    assert plan_layout.grid_blocks(1, 132) == 1
    assert plan_layout.grid_blocks(8192, 132) == 132
