"""The low-latency benchmark in small: what it prints, its exit code, the shape of its results."""

import itertools

import pytest
from ranks import on_gpus, run_ranks
from test_bench import results, run_bench

from bench import low_latency
from epcomm.testing import run_threads

SHAPE = ("--num-tokens", "6", "--hidden", "256", "--num-topk", "3", "--num-experts", "12")


@pytest.mark.parametrize(
    ("layout", "mode", "dtype"),
    list(
        itertools.product(
            ("expert_major", "rank_major"), ("rank_local_reduce", "direct_send"), ("bf16", "fp8_e4m3")
        )
    ),
)
def test_every_variant_passes_its_check(layout, mode, dtype, capsys):
    words = ["--output-layout", layout, "--combine-mode", mode, "--dispatch-dtype", dtype, "--cuda-graph"]
    assert run_ranks(2, run_bench, "low_latency", [*SHAPE, *words, "--check"], timeout=30) == [0, 0]
    if not on_gpus():
        printed = capsys.readouterr().out
        assert "[dispatch] OK" in printed and "rank 0 0, rank 1 0" in printed
        assert "CPU ranks have none" in printed and printed.rstrip().endswith("PASS")


def test_no_weights_and_few_active_ranks():
    words = [*SHAPE, "--no-weights", "--num-active-ranks", "2", "--num-blocks", "2"]
    assert run_ranks(3, run_bench, "low_latency", words, timeout=30) == [0, 0, 0]


def test_experts_that_do_not_fit_are_refused():
    words = ["--num-topk", "5", "--num-experts", "12", "--num-active-ranks", "1"]
    with pytest.raises(ValueError, match="top-5 does not fit"):
        run_threads(3, run_bench, "low_latency", words)


@pytest.mark.parametrize("broken", ["experts", "nan", "rows"])
def test_a_wrong_result_is_the_exit_code(broken, monkeypatch, capsys):
    run_experts, rows = low_latency.Case.run_experts, low_latency.rows
    draws = itertools.count()

    def altered(self, output):
        made = run_experts(self, output)
        made[...] = float("nan") if broken == "nan" else 1
        return made

    if broken == "rows":  # the ranks believe in other rows than those that were sent
        monkeypatch.setattr(low_latency, "rows", lambda rank, *shape: rows(next(draws), *shape))
    else:
        monkeypatch.setattr(low_latency.Case, "run_experts", altered)
    assert run_threads(2, run_bench, "low_latency", SHAPE) == [1, 1]
    seen = capsys.readouterr()
    assert seen.out.rstrip().endswith("FAIL")
    assert ("rows differ from their source" if broken == "rows" else "sums differ") in seen.err


def test_times(tmp_path):
    words = [*SHAPE[2:], "--num-tokens", "1,5", "--bench", "--cuda-graph", "--pairs-per-graph", "2"]
    words += ["--bench-warmup", "1", "--bench-iters", "2", "--skew-us", "50", "--out", str(tmp_path)]
    assert run_ranks(2, run_bench, "low_latency", words, timeout=30) == [0, 0]
    rows = results(tmp_path, "low_latency")
    assert [row["num_tokens"] for row in rows] == [1, 5]
    for row in rows:
        assert row["graph"] is on_gpus()
        for name in ("dispatch", "combine", "both"):
            assert 0 < row[f"{name}_min_us"] <= row[f"{name}_us"] <= row[f"{name}_max_us"]
        for name in ("dispatch", "combine"):
            row_bytes = 3 * 256 * 2 * row["num_tokens"]
            assert row[f"{name}_selections_bytes"] == row_bytes
            rate = row_bytes / row[f"{name}_us"] / 1e3
            assert row[f"{name}_selections_gbps"] == pytest.approx(rate, rel=1e-4)
            assert row[f"all_{name}_wire_gbps"] == pytest.approx(2 * row[f"{name}_wire_gbps"], rel=1e-4)
        assert (row["host_dispatch_us"] is None) is not on_gpus()


def bytes_of(group, **settings):
    from epcomm import MoECommunicator

    shape = dict(num_experts=4, hidden_size=256, topk=2, max_tokens_per_rank=3)
    with MoECommunicator(group, **shape | settings) as comm:
        return low_latency.Case(comm, 0, True, 0).bytes(), low_latency.choose(group.rank, 3, 2, 4, 0)


def test_bytes_on_the_wire():
    """One row a remote rank there and back, in lines of 112 bytes; masks, entries and lengths beside."""
    results = run_ranks(2, bytes_of)
    there = []
    for rank, (found, ids) in enumerate(results):
        remote = ids // 2 != rank
        there.append(int(remote.any(axis=1).sum()))
        packets = 3 * 16 + int(remote.sum()) * 16 + 2 * 8
        assert found["dispatch_wire"] == there[rank] * 5 * 128 + packets
        assert found["dispatch_selections"] == found["combine_selections"] == 6 * 512
    assert [found["combine_wire"] for found, _ in results] == [there[1] * 5 * 128, there[0] * 5 * 128]
