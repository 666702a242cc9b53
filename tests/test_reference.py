"""The oracle of the balanced operations against its own promises, hand-made examples and token-by-token
loops."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm import plan_layout, reference

BF16 = np.dtype(ml_dtypes.bfloat16)


@st.composite
def routings(draw, max_ranks=16, max_experts=1024, max_tokens=40):
    """(topk_idx of all ranks, num_experts, capacity, token_padding): skewed, empty, one-hot, masked, with
    duplicates."""
    ranks = draw(st.integers(1, max_ranks))
    experts = ranks * draw(st.integers(1, max(1, max_experts // ranks)))
    topk = draw(st.integers(1, 9))
    capacity = draw(st.integers(1, max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(0, capacity), min_size=ranks, max_size=ranks))
    kind = draw(st.sampled_from(["uniform", "skewed", "one-hot", "empty", "one rank's experts"]))
    if kind == "skewed":
        popularity = np.exp(rng.normal(0, draw(st.sampled_from([0.5, 2.0, 5.0])), experts))
        ids = [rng.choice(experts, (s, topk), p=popularity / popularity.sum()) for s in sizes]
    elif kind == "one-hot":
        hot = int(rng.integers(experts))
        ids = [np.full((s, topk), hot) for s in sizes]
    elif kind == "empty":
        ids = [np.full((s, topk), -1) for s in sizes]
    else:
        upper = experts if kind == "uniform" else experts // ranks
        ids = [rng.integers(0, upper, (s, topk)) for s in sizes]
    masked = draw(st.sampled_from([0.0, 0.3]))
    ids = [np.where(rng.random(a.shape) < masked, -1, a) for a in ids]
    return ids, experts, capacity, draw(st.sampled_from([1, 3, 16, 128]))


@settings(max_examples=150, deadline=None)
@given(routings())
def test_every_plan_keeps_its_promises(case):
    ids, experts, capacity, padding = case
    plan = reference.plan(ids, experts, capacity, padding)
    reference.invariants(plan)
    prefix = plan_layout.row_prefix(sum(map(len, ids)), ids[0].shape[1], experts, len(ids), padding)
    assert max(mine.cu_seqlens[-1] for mine in plan.ranks) <= prefix <= plan.row_capacity


@settings(max_examples=40, deadline=None)
@given(routings(max_ranks=5, max_experts=24, max_tokens=10))
def test_entries_of_an_expert_fill_its_shares_in_token_order(case):
    ids, experts, capacity, padding = case
    plan = reference.plan(ids, experts, capacity, padding)
    ranks, epn = len(ids), experts // len(ids)
    for expert in range(experts):
        got = [d for mine, a in zip(plan.ranks, ids, strict=True) for d in mine.dst[a.reshape(-1) == expert]]
        want = []
        for rank in range(ranks):
            held = [*range(rank * epn, (rank + 1) * epn), *plan.experts_to_copy[rank]]
            if plan.alloc[expert, rank]:
                segment = held.index(expert)
                begin = plan.ranks[rank].cu_seqlens[segment - 1] if segment else 0
                want += [rank * plan.row_capacity + begin + i for i in range(plan.alloc[expert, rank])]
        assert got == want


def test_ties_go_to_the_lower_rank_and_the_lower_expert():
    # Ranks 0 and 1 have 4 too many, ranks 2 and 3 lack 4: 0 gives to 2, then 1 to 3; each gives its lower
    # expert.
    alloc = reference.balance([4, 4, 4, 4, 0, 0, 0, 0], 4)
    assert alloc[:4].tolist() == [[0, 0, 4, 0], [4, 0, 0, 0], [0, 0, 0, 4], [0, 4, 0, 0]]
    assert not alloc[4:].any()


def test_a_giver_serves_its_largest_open_amount_from_its_largest_expert():
    # Caps 7, 7, 6: rank 1 is to get 7 and rank 2 6; 7 of the 12 go to rank 1, then 6 of the 8 to rank 2.
    alloc = reference.balance([12, 8, 0, 0, 0, 0], 3)
    assert alloc[:2].tolist() == [[5, 7, 0], [2, 0, 6]]
    assert not alloc[2:].any()


def test_a_giver_that_gave_too_much_is_refilled():
    # Caps 4: rank 2 has 7 and fills rank 1 with 4, so it lacks 1, which comes from rank 0.
    assert reference.balance([5, 0, 7], 3).tolist() == [[4, 0, 1], [0, 0, 0], [0, 4, 3]]


def test_bad_ids_act_as_minus_one_and_are_counted():
    plan = reference.plan([np.array([[0, 7], [-2, -1], [4, 0]])], 4, 3, 1)
    assert plan.bad_ids == 3
    assert plan.ranks[0].dst.tolist() == [0, -1, -1, -1, -1, 1]
    reference.invariants(plan)


@pytest.mark.parametrize(("experts", "capacity"), [(5, 3), (4, 2)])
def test_impossible_shapes_are_refused(experts, capacity):
    with pytest.raises(ValueError):
        reference.plan([np.zeros((3, 1), int)] * 2, experts, capacity, 1)


@pytest.mark.parametrize("field", ["alloc", "experts_to_copy", "dst", "counts", "cu_seqlens", "rows"])
def test_invariants_see_a_broken_plan(field):
    rng = np.random.default_rng(3)
    plan = reference.plan([rng.integers(-1, 4, (s, 2)) for s in (5, 6, 7)], 12, 7, 4)
    reference.invariants(plan)
    mine = plan.ranks[1]
    if hasattr(plan, field):
        broken = replace(plan, **{field: np.roll(getattr(plan, field), 1)})
    else:
        wrong = {
            "dst": lambda: np.roll(mine.dst, 1),
            "counts": lambda: mine.counts + 1,
            "cu_seqlens": lambda: mine.cu_seqlens + 1,
            "rows": lambda: mine.rows[::-1],
        }[field]()
        broken = replace(plan, ranks=[plan.ranks[0], replace(mine, **{field: wrong}), *plan.ranks[2:]])
    with pytest.raises(AssertionError):
        reference.invariants(broken)


@settings(max_examples=40, deadline=None)
@given(
    routings(max_ranks=6, max_experts=30, max_tokens=12),
    st.sampled_from([BF16, np.dtype("f2"), np.dtype("f4")]),
)
def test_dispatch_and_combine_equal_loops_over_tokens(case, dtype):
    ids, experts, capacity, padding = case
    plan = reference.plan(ids, experts, capacity, padding)
    ranks, topk, nvs = len(ids), ids[0].shape[1], plan.row_capacity
    rng = np.random.default_rng(capacity)
    x = [rng.normal(size=(len(a), 3)).astype(np.float32).astype(dtype) for a in ids]
    weights = [rng.random(a.shape).astype(np.float32) for a in ids]
    rows, row_weights = reference.dispatch(x, plan, weights, fill=7)
    for rank, mine in enumerate(plan.ranks):
        seen = np.zeros(nvs, bool)
        seen[mine.cu_seqlens[-1] :] = True
        assert (rows[rank][seen] == 7).all() and (row_weights[rank][seen] == 7).all()
        for source, a in enumerate(ids):
            for t in range(len(a)):
                for k in range(topk):
                    d = plan.ranks[source].dst[t * topk + k]
                    if d >= 0 and d // nvs == rank:
                        assert (rows[rank][d % nvs] == x[source][t]).all()
                        assert row_weights[rank][d % nvs] == weights[source][t, k]
                        seen[d % nvs] = True
        assert not (rows[rank][~seen] != 0).any() and not row_weights[rank][~seen].any()

    work = [rng.normal(size=(nvs, 3)).astype(np.float32).astype(dtype) for _ in range(ranks)]
    out, back = reference.combine(work, plan, dtype, row_weights)
    for source, a in enumerate(ids):
        assert out[source].dtype == dtype
        for t in range(len(a)):
            d = plan.ranks[source].dst[t * topk : (t + 1) * topk]
            acc = np.zeros(3, np.float32)
            for rank in range(ranks):
                here = [v % nvs for v in d if v >= 0 and v // nvs == rank]
                if here:
                    partial = np.zeros(3, np.float32)
                    for row in here:
                        partial += work[rank][row].astype(np.float32)
                    acc += partial.astype(dtype).astype(np.float32)
            assert out[source][t].tobytes() == acc.astype(dtype).tobytes()
            assert (back[source][t] == np.where(a[t] >= 0, weights[source][t], 0)).all()


def test_partials_are_rounded_before_they_are_added():
    # In units of the last place of 1: 1 + 0.375 rounds to 1, and 0.25 more leaves it there; the sum at once
    # would not.
    ulp = 2.0**-7
    plan = reference.plan([np.array([[0, 0, 1, 1]]), np.zeros((0, 4), int)], 2, 1, 1)
    rows = [np.zeros((plan.row_capacity, 1), BF16) for _ in range(2)]
    rows[0][:2, 0] = [1, 0.375 * ulp]
    rows[1][:2, 0] = [0.125 * ulp, 0.125 * ulp]
    out, _ = reference.combine(rows, plan, BF16)
    assert out[0].astype(float).tolist() == [[1.0]] and out[1].shape == (0, 1)


def test_max_vio():
    assert reference.max_vio([np.array([[0, 1], [2, 3]])], 4) == 0
    assert reference.max_vio([np.array([[0, 0]]), np.array([[0, -1]])], 4) == 3
    assert reference.max_vio([np.full((2, 2), -1)], 4) == 0
