"""The benchmarks in small: what they compute, the shape of their results, pictures, exit codes."""

import csv
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from ranks import on_gpus, run_ranks

import epcomm.__main__ as command_line
from bench import check, floors, harness, kernels, libs, plots, workload
from epcomm import reference, selftest
from epcomm.testing import run_threads

ROOT = Path(__file__).resolve().parent.parent
SHAPE = (
    "--num-tokens",
    "24",
    "--hidden",
    "256",
    "--num-topk",
    "3",
    "--num-experts",
    "12",
    "--maxvios",
    "0.5,2",
)
FEW = ("--warmup", "1", "--iters", "1")


def run_bench(group, name, words):
    module = importlib.import_module(f"bench.bench_{name}")
    return module.run(group, module.arguments(words))


def results(folder, stem):
    """The rows of the JSON, once they were found to agree with the CSV and to have a picture."""
    rows = json.loads((folder / f"{stem}.json").read_text())
    with open(folder / f"{stem}.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    for row, line in zip(rows, lines, strict=True):
        for key in set(row) - {"environment"}:
            assert line[key] == ("" if row[key] is None else str(row[key]))
    assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    return rows


# ---- the benchmarks


def test_balanced(tmp_path, capsys):
    words = (*SHAPE, *FEW, "--token-padding", "8", "--backward", "--prefetch", "--reduce-grad")
    assert run_ranks(3, run_bench, "balanced", [*words, "--out", str(tmp_path)], timeout=30) == [0, 0, 0]
    rows = results(tmp_path, "balanced")
    mine = [row for row in rows if row["lib"] == "epcomm"]
    assert [row["target_max_vio"] for row in mine] == [0.5, 2.0]
    for row in mine:
        assert row["device"] == ("cuda" if on_gpus() else "cpu")
        shape = [
            row[key] for key in ("ranks", "num_tokens", "hidden", "num_topk", "num_experts", "token_padding")
        ]
        assert shape == [3, 24, 256, 3, 12, 8]
        assert row["num_sms"] > 0
        assert row["checked"] is True
        times = ("plan", "dispatch", "combine", "floor", "combine_floor", "pad")
        times += ("dispatch_backward", "combine_backward", "prefetch", "reduce_grad")
        assert all(row[f"{name}_us"] > 0 for name in times)
        assert row["dispatch_x_floor"] == pytest.approx(row["dispatch_us"] / row["floor_us"], rel=1e-4)
        assert row["environment"]["ranks"] == 3
        assert row["environment"]["command"]
    if not on_gpus():
        printed = capsys.readouterr().out
        assert "they say nothing about GPUs" in printed
        assert "mpi: not run (not started by MPI)" in printed
        assert f"picture: {tmp_path / 'balanced.png'}" in printed


def test_a_wrong_result_is_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "run_experts", lambda *args: None)  # experts that do nothing
    words = [*SHAPE, *FEW, "--token-padding", "8", "--out", str(tmp_path)]
    assert run_threads(2, run_bench, "balanced", words) == [1, 1]
    assert [row["checked"] for row in results(tmp_path, "balanced")] == [False, False]
    assert "combined tokens are wrong" in capsys.readouterr().err
    assert run_threads(2, run_bench, "balanced", [*words, "--no-check"]) == [0, 0]
    assert [row["checked"] for row in results(tmp_path, "balanced")] == [None, None]


VS = (
    "--num-tokens",
    "24",
    "--hidden",
    "256",
    "--topk",
    "3",
    "--experts",
    "12",
    "--maxvios",
    "0.5,2",
    "--hp",
    "32",
)


def verify_comparison(folder, peer):
    rows = results(folder, "r")
    ran = [row for row in rows if "d_f_us" in row and row["d_f_us"] is not None]
    assert [row["lib"] for row in ran] == ["epcomm", "epcomm", peer, peer]
    for row in ran:
        assert row["checked"] is True
        assert (row["ep"], row["E"], row["H"], row["K"]) == (2, 12, 256, 3)
        assert row["sigma"] > 0 and row["maxvio"] >= 0 and row["target_maxvio"] in (0.5, 2.0)
        for name in ("d_f", "d_b", "c_f", "c_b"):
            logical = 24 * 3 * 256 * 2
            assert row[f"{name}_gbps"] == pytest.approx(logical / row[f"{name}_us"] / 1e3, rel=1e-4)
        assert row["plan_percent"] == pytest.approx(100 * row["plan_us"] / row["d_f_us"], rel=1e-4)
        assert all(row[key] >= 0 for key in ("solve_s", "prepare_s", "time_s", "create_s", "destroy_s"))
        off = abs(row["maxvio"] - row["target_maxvio"])
        assert row["floored"] == (off > max(0.05 * row["target_maxvio"], 0.01))
        assert (row["note"] == "floored") == row["floored"]
    assert all(row["pf_us"] > 0 and row["pf_gbps"] > 0 for row in ran[:2])
    return rows


@pytest.mark.skipif(on_gpus(), reason="CPU ranks and their MPI")
def test_comparison_beside_mpi(tmp_path):
    job = [sys.executable, "-m", "mpi_launch", "-n", "2", "--device", "cpu", "--timeout", "50"]
    job += [
        str(ROOT / "bench" / "bench_vs_deepep.py"),
        "--libs",
        "epcomm",
        "mpi",
        "deepep_v2",
        "nccl",
        *VS,
        *FEW,
    ]
    done = subprocess.run([*job, "--out", str(tmp_path / "r.csv")], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = verify_comparison(tmp_path, "mpi")
    notes = {row["lib"]: row["note"] for row in rows}
    assert notes["deepep_v2"].startswith("not installed")
    assert notes["nccl"] == "GPUs only"
    assert "gradient reduction is left out" in done.stdout
    assert "seconds" in done.stdout


@pytest.mark.skipif(not on_gpus(), reason="NCCL")
def test_comparison_beside_nccl(tmp_path):
    words = ["--libs", "epcomm", "nccl", *VS, *FEW, "--out", str(tmp_path / "r.csv")]
    assert run_ranks(2, run_bench, "vs_deepep", words, timeout=30) == [0, 0]
    for row in verify_comparison(tmp_path, "nccl")[2:]:
        assert row["permute_gbps"] > 0 and row["exchange_us"] > 0 and row["bare_exchange_us"] > 0


def test_limits(tmp_path):
    words = [*SHAPE, *FEW, "--ranks", "6", "--out", str(tmp_path)]
    assert run_ranks(2, run_bench, "limits", words, timeout=30) == [0, 0]
    rows = results(tmp_path, "limits")
    names = {row["what"] for row in rows if row["kind"] == "limit"}
    assert {"push", "pull", "local copy", "local fan-out to 3", "local stores"} <= names
    assert any(name.startswith("flag round trip") for name in names)
    if on_gpus():
        assert {"copy engine", "kernel, launched by epcomm", "kernel in a CUDA graph"} <= names
    floor_rows = [row for row in rows if row["kind"] == "floor"]
    assert [row["floor_ranks"] for row in floor_rows] == [6, 6]
    assert all(0 < row["wire_us"] <= row["dispatch_us"] for row in floor_rows)
    assert all(row["us"] > 0 for row in rows if row["kind"] == "limit")


def test_floors_of_other_routings(tmp_path):
    from bench import routing

    words = ("--num-tokens", "24", "--hidden", "256", "--num-topk", "2", "--num-experts", "12")
    trace = tmp_path / "trace.npz"
    routing.save_trace(trace, np.stack([routing.one_hot(24, 2)] * 2))
    found = {}
    for name in ("round_robin", "one_hot", str(trace)):
        out = tmp_path / "out"
        assert run_threads(2, run_bench, "limits", [*words, *FEW, "--routing", name, "--out", str(out)]) == [
            0,
            0,
        ]
        found[Path(name).name] = results(out, "limits")[-1]
    # Round robin: each token has one expert on each rank. One-hot: the planner halves both experts' tokens.
    row_mb = 512e-6
    assert found["round_robin"]["max_vio"] == 0
    assert found["round_robin"]["wire_mb"] == pytest.approx(24 * row_mb)
    assert found["one_hot"]["max_vio"] == 5
    assert found["one_hot"]["dispatch_mb"] == pytest.approx((24 + 48) * row_mb)
    assert found["trace.npz"]["wire_mb"] == found["one_hot"]["wire_mb"]


@pytest.mark.skipif(on_gpus(), reason="simulates ranks on the CPU device")
def test_planning_of_simulated_ranks(tmp_path):
    words = ["--experts", "64,128", "--num-tokens", "32", "--ranks", "2,8", "--topk", "4", *FEW]
    module = importlib.import_module("bench.bench_planning")
    assert module.main([*words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = results(tmp_path, "planning")
    assert [(row["sweep"], row["ranks"], row["num_experts"]) for row in rows] == [
        ("E", 4, 64),
        ("E", 4, 128),
        ("S", 4, 64),
        ("R", 2, 64),
        ("R", 8, 64),
    ]
    for row in rows:
        assert row["simulated"] is True
        assert row["plan_us"] > 0
        assert 1 <= row["balance"] <= 1.01 + row["ranks"] / (row["num_tokens"] * row["num_topk"])
        assert row["home_balance"] >= row["balance"]


# ---- what they stand on


def skewed_plan(ranks=3):
    shape = workload.Shape(37, 64, 4, 12, token_padding=8)
    group = types.SimpleNamespace(rank=0, size=ranks, comm=types.SimpleNamespace(bcast=lambda value: value))
    case = workload.Skews(group, shape).case(1.0)
    x = [workload.rows(rank, shape) for rank in range(ranks)]
    weights = [workload.weights(rank, shape) for rank in range(ranks)]
    case.topk_idx[1][5] = -1
    return reference.plan(case.topk_idx, 12, 37, 8), x, weights


def test_the_check_agrees_with_the_reference_and_sees_mistakes():
    plan, x, weights = skewed_plan()
    device = types.SimpleNamespace(xp=np, to_host=np.asarray)
    oracles = [check.Oracle(device, rank, plan, x, weights) for rank in range(3)]
    rows, row_weights = reference.dispatch(x, plan, weights, fill=1)
    for oracle, mine, received, received_weights in zip(oracles, plan.ranks, rows, row_weights, strict=True):
        made = types.SimpleNamespace(
            dst=mine.dst.copy(),
            num_tokens_per_expert=mine.counts,
            cu_seqlens=mine.cu_seqlens,
            experts_to_copy=plan.experts_to_copy,
            num_tokens_per_rank=plan.num_tokens_per_rank,
        )
        assert oracle.plan_errors(made) == []
        made.dst[3] += 1
        assert oracle.plan_errors(made) == ["plan.dst differs from the reference"]
        assert oracle.dispatch_errors(received, received_weights) == []
        spoilt = received.copy()
        spoilt[mine.cu_seqlens[-1] - 1, -1] = 3  # a pad row or a token's, either is wrong
        assert oracle.dispatch_errors(spoilt, received_weights) == [
            f"1 of {mine.cu_seqlens[-1]} dispatched rows are wrong"
        ]
        assert oracle.dispatch_errors(received, received_weights + 1) == [
            "dispatched route weights are wrong"
        ]
        check.run_experts(received, mine.cu_seqlens, oracle.segment_experts)
    sums, back = reference.combine(rows, plan, x[0].dtype, row_weights)
    for oracle, out, out_weights in zip(oracles, sums, back, strict=True):
        assert oracle.combine_errors(out) == []
        assert oracle.weight_errors(out_weights) == []
        out[4, 1] += 1
        assert oracle.combine_errors(out) == ["1 of 37 combined tokens are wrong"]
        assert oracle.weight_errors(-out_weights) == ["returned route weights are wrong"]


def test_round_trip_check_sees_a_lost_row():
    plan, x, _ = skewed_plan()
    ids = plan.topk_idx[1]
    out = (x[1].astype(np.float32) * (ids >= 0).sum(axis=1, keepdims=True)).astype(x[1].dtype)
    assert check.round_trip_errors(out, x[1], ids) == []
    out[7] -= x[1][7]
    assert check.round_trip_errors(out, x[1], ids) == ["1 of 37 tokens are wrong after the round trip"]


@pytest.mark.parametrize("ranks, wire_rows", [(2, 0.997), (4, 2.711), (8, 4.633)])
def test_wire_rows_of_uniform_routing(ranks, wire_rows):
    """One row per (token, other rank): (R - 1) * (1 - C(E - E/R, K) / C(E, K)) of E=256, K=8."""
    shape = workload.Shape(2048, 8, 8, 256)
    random = np.random.default_rng(0)
    topk_idx = [random.random((2048, 256)).argpartition(8, axis=1)[:, :8] for _ in range(ranks)]
    traffic = floors.Traffic.of([ids // (256 // ranks) for ids in topk_idx], ranks)
    assert traffic.wire.sum() / (2048 * ranks) == pytest.approx(wire_rows, rel=0.01)
    assert traffic.landed.sum() == 2048 * 8 * ranks
    rates = floors.Rates(wire=400.0, local=4000.0, store=3000.0)
    floor = floors.dispatch_floor(traffic, shape.row_bytes, rates)
    assert floor.wire_us == pytest.approx(traffic.wire_rows * 16 / 400e9 * 1e6)
    assert floor.local_us == pytest.approx((2048 + traffic.landed.max()) * 16 / 4000e9 * 1e6)
    assert floor.us == max(floor.wire_us, floor.local_us)
    assert floors.combine_floor(traffic, shape.row_bytes, rates).wire_us == floor.wire_us


def test_timing_is_the_median_over_batches():
    timing = harness.Timing.of([[10.0, 20.0, 30.0], [20.0, 30.0, 80.0]])  # two ranks, three batches
    assert (timing.us, timing.max_us, timing.low_us, timing.high_us) == (25.0, 30.0, 15.0, 55.0)
    assert timing.spread == pytest.approx(40 / 25)


def timed(group):
    session = harness.Session(group, "timed", warmup=2, iters=3, batches=5)
    calls = []
    timing = session.time(lambda: calls.append(0))
    return len(calls), timing.us >= 0, session.host_time(lambda: None) is None, session.agree(group.rank < 2)


def test_session_counts_its_calls():
    assert run_threads(3, timed) == [(2 + 3 * 5, True, True, False)] * 3


def test_a_picture_of_one_device_only(tmp_path):
    with pytest.raises(ValueError, match="mix devices"):
        plots.one_device([{"device": "cpu"}, {"device": "cuda"}])
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="not a results file"):
        plots.draw(tmp_path / "x.json")


def test_libraries_say_why_they_cannot_run():
    group = types.SimpleNamespace(device=types.SimpleNamespace(kind="cpu"), comm=object())
    assert libs.module("nccl").missing(group) == "GPUs only"
    assert libs.module("mpi").missing(group) == "not started by MPI"
    with pytest.raises(ValueError, match="got 'nvshmem'"):
        libs.module("nvshmem")


@pytest.mark.parametrize("file", ["limits.cu", "libs/permute.cu"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_cuda_sources_compile(file, arch):
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(kernels.source(ROOT / "bench" / file), file, [], [])
    nvrtc.compileProgram(program, [f"-arch={arch}", "--std=c++17"])
    assert not nvrtc.getProgramLog(program).strip("\n\0 ")


# ---- the command line


def test_bench_list_and_names(capsys):
    assert command_line.main(["bench", "list"]) == 0
    names = [
        line.split()[0]
        for line in capsys.readouterr().out.splitlines()
        if line and ":" not in line.split()[0]
    ]
    assert {"balanced", "limits", "planning", "vs_deepep"} <= set(names)
    assert command_line.main(["bench", "nothing"]) == 2
    assert "no 'nothing'" in capsys.readouterr().err


def test_an_installed_package_has_no_benchmarks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command_line, "_ROOT", tmp_path)
    for words in (["bench", "list"], ["plot", "x.json"]):
        assert command_line.main(words) == 2
        assert "run it from a checkout" in capsys.readouterr().err


def test_plot(tmp_path, capsys):
    module = importlib.import_module("bench.bench_planning")
    words = [
        "--experts",
        "64",
        "--num-tokens",
        "16",
        "--ranks",
        "2",
        *FEW,
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert module.main(words) == 0
    (tmp_path / "planning.png").unlink()
    assert command_line.main(["plot", str(tmp_path / "planning.json")]) == 0
    assert (tmp_path / "planning.png").is_file()
    assert command_line.main(["plot", str(tmp_path / "missing.json")]) == 2
    assert "missing.json" in capsys.readouterr().err


def test_info(capsys):
    assert command_line.main(["info"]) == 0
    text = capsys.readouterr().out
    for word in ("numpy", "memory handles, fd: works", "dispatch", "kernel cache", "GPUs"):
        assert word in text


def test_selftest(monkeypatch, capsys):
    assert command_line.main(["selftest"]) == 0
    assert "FAILED" not in capsys.readouterr().out

    def broken():
        raise OSError("no such thing")

    monkeypatch.setattr(selftest, "_checks", lambda: [("a part", broken, "mend it")])
    assert command_line.main(["selftest"]) == 1
    text = capsys.readouterr().out
    assert "FAILED   a part" in text and "no such thing" in text and "to do: mend it" in text
