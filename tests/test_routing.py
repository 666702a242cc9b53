"""The benchmarks' routing generator."""

import time

import numpy as np
import pytest

from bench import routing
from epcomm.reference import max_vio


def test_draws_are_different_experts_reproducible_and_differ_by_rank():
    ids = routing.Draws([50, 0, 70], 4, 12, 3).topk_idx(1.0)
    assert [a.shape for a in ids] == [(50, 4), (0, 4), (70, 4)] and ids[0].dtype == np.int32
    for a in ids:
        assert ((a >= 0) & (a < 12)).all()
        assert (np.diff(np.sort(a, axis=1), axis=1) > 0).all()
    assert (ids[0] != ids[2][:50]).any()
    again = routing.Draws([50, 0, 70], 4, 12, 3).topk_idx(1.0)
    assert all((a == b).all() for a, b in zip(ids, again, strict=True))


def test_first_draws_follow_the_popularity():
    draws = routing.Draws(200_000, 3, 8, 1)
    first = np.bincount(draws.topk_idx(0.7)[0][:, 0], minlength=8) / 200_000
    popularity = np.exp(0.7 * np.random.default_rng(routing.POPULARITY_SEED).standard_normal(8))
    assert np.abs(first - popularity / popularity.sum()).max() < 0.006  # 5 standard deviations


def test_popularity_is_shared_by_ranks_and_shapes():
    hottest = [np.bincount(a.reshape(-1)).argmax() for a in routing.Draws(500, 2, 16, 4).topk_idx(2.0)]
    assert len(set(hottest)) == 1
    assert np.bincount(routing.Draws(100, 1, 16, 1).topk_idx(2.0)[0].reshape(-1)).argmax() == hottest[0]


@pytest.mark.parametrize("wanted", [0.3, 1, 5, 10, 20])
def test_solver_hits_the_wanted_max_vio(wanted):
    draws = routing.Draws(4096, 8, 384, 2)
    solution = draws.solve(wanted)
    measured = max_vio(draws.topk_idx(solution.sigma), 384)
    assert measured == pytest.approx(solution.max_vio)
    assert solution.reached and abs(measured - wanted) <= max(0.02 * wanted, 0.005)
    assert "out of reach" not in str(solution)


@pytest.mark.parametrize("wanted", [0.0, 16.0])
def test_solver_says_what_is_out_of_reach(wanted):
    solution = routing.Draws(1024, 8, 128, 2).solve(wanted)
    assert not solution.reached
    assert "out of reach" in str(solution)
    assert solution.max_vio == pytest.approx(
        15 if wanted else 0.2, abs=0.15
    )  # 128 / 8 - 1; the blur of the draws


def test_solve_is_fast():
    started = time.process_time()
    routing.Draws(8192, 8, 384, 2).solve(1.0)
    assert time.process_time() - started < 3  # about 0.3 s on an idle machine


def test_too_many_draws_are_refused():
    with pytest.raises(ValueError, match="topk"):
        routing.Draws(10, 9, 8, 1)


@pytest.mark.parametrize(
    ("topk", "experts", "ranks"), [(1, 4, 4), (8, 384, 2), (8, 16, 2), (5, 15, 3), (6, 256, 8)]
)
def test_round_robin_is_even(topk, experts, ranks):
    num_tokens = experts * 2
    ids = [routing.round_robin(num_tokens, topk, experts, ranks, rank) for rank in range(ranks)]
    assert max_vio(ids, experts) == 0
    assert (np.diff(np.sort(ids[0], axis=1), axis=1) > 0).all()


def test_one_hot_is_the_worst():
    assert max_vio([routing.one_hot(10, 4)], 64) == 64 / 4 - 1


def test_traces_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    ids, weights = rng.integers(-1, 9, (2, 5, 3)), rng.random((2, 5, 3)).astype(np.float32)
    routing.save_trace(tmp_path / "a.npz", ids, weights)
    routing.save_trace(tmp_path / "b.npz", ids)
    routing.save_trace(tmp_path / "c.npy", ids.astype(np.int32))
    got, got_weights = routing.load_trace(tmp_path / "a.npz")
    assert (got == ids).all() and (got_weights == weights).all()
    for name in ("b.npz", "c.npy"):
        got, got_weights = routing.load_trace(tmp_path / name)
        assert (got == ids).all() and got_weights is None


def test_unusable_traces_are_refused(tmp_path):
    ids = np.zeros((2, 5, 3), int)
    np.savez(tmp_path / "a.npz", ids=ids)
    np.save(tmp_path / "b.npy", ids[0])
    np.save(tmp_path / "c.npy", ids * 0.5)
    np.savez(tmp_path / "d.npz", topk_idx=ids, topk_weights=np.zeros((2, 5)))
    for name in ("a.npz", "b.npy", "c.npy", "d.npz"):
        with pytest.raises(ValueError, match="topk_"):
            routing.load_trace(tmp_path / name)
    with pytest.raises(ValueError, match="topk_idx alone"):
        routing.save_trace(tmp_path / "e.npy", ids, np.zeros(ids.shape))
