"""What users of similar libraries report, tried here. The list, with other tests: docs/troubleshooting.md."""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from test_buffer import routing, rows_of, settings_of, step, verify
from test_faults import good_call, inputs
from test_mpi_launch import finish, start

from epcomm import Buffer, ExpertPool, Group, reference
from epcomm.runtime import args
from epcomm.testing import run_threads

ROOT = Path(__file__).resolve().parent.parent


# ---- the order of calls, and time between them


def tiny_calls(group, number):
    rng = np.random.default_rng(group.rank)
    with Buffer(group, **settings_of(num_tokens=1, hidden=8, num_experts=group.size, num_topk=1)) as buffer:
        plan = buffer.plan(buffer.xp.asarray([[(group.rank + 1) % group.size]]))
        for call in range(number):
            time.sleep(max(0.0, rng.uniform(-3e-3, 1e-3)))
            x = buffer.xp.full((1, 8), call % 200 + group.rank, np.float32).astype(buffer.dtype)
            got = buffer.dispatch(x, plan=plan)
            if call % 50 == 0:
                out = group.device.to_host(buffer.combine(got.x, plan).x)
                assert (out.astype(np.float32) == call % 200 + group.rank).all()
        buffer.check()
        return group.device.to_host(buffer._epochs[args.OP_DISPATCH]).tolist()


def test_many_tiny_calls_with_random_delays():
    """deepseek-ai/DeepEP#423"""
    for epochs in run_ranks(3, tiny_calls, 500):
        assert set(epochs) == {500}


def interleaved(group, order, asynchronous):
    """Two micro-batches in one buffer, their dispatches and combines in the given order."""
    with Buffer(group, **settings_of()) as buffer:
        sent, back = {}, {}
        for what, name in order:
            if what == "d":
                tokens = {"a": 20, "b": 13}[name]
                x = rows_of(group.rank, ord(name), tokens, 64, buffer.dtype)
                ids = routing("skewed", group.rank, tokens, 4, 16, ord(name))
                got = buffer.dispatch(buffer.xp.asarray(x), buffer.xp.asarray(ids), async_finish=asynchronous)
                sent[name] = got
            else:
                if asynchronous:
                    sent[name].event.wait()
                back[name] = buffer.combine(sent[name].x, sent[name].plan, async_finish=asynchronous)
        for combined in back.values():
            if asynchronous:
                combined.event.synchronize()
        buffer.check()
        return {name: group.device.to_host(combined.x).tobytes() for name, combined in back.items()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_order_of_two_dispatches_and_their_combines(asynchronous):
    """deepseek-ai/DeepEP#513, #580"""
    orders = [o for o in itertools.permutations(["da", "ca", "db", "cb"]) if o.index("da") < o.index("ca")]
    orders = [o for o in orders if o.index("db") < o.index("cb")]
    first, *others = [run_ranks(2, interleaved, order, asynchronous) for order in orders]
    assert len(others) == 5 and all(other == first for other in others)


def two_threads(group):
    """Which of its calls meet is not said, but none may hang or mix two of them up."""
    with Buffer(group, **settings_of()) as buffer:
        x, ids = inputs(group, buffer)
        failures = []

        def work():
            try:
                for _ in range(40):
                    got = buffer.dispatch(x, ids)
                    assert int(got.plan.num_tokens_per_rank[1 - group.rank]) == 6
                    buffer.check()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_two_threads_of_every_rank_dispatch_into_one_buffer():
    """uccl-project/uccl#986"""
    run_ranks(2, two_threads)


def several_objects(group):
    """Three buffers of different sizes, of the group and of two halves of it, used in turns."""
    half = Group(
        group.comm.Split(group.rank % 2, group.rank), device=str(group.device), timeout=group.timeout
    )
    all_of_them = (
        settings_of(),
        settings_of(num_tokens=40, hidden=200),
        settings_of(num_experts=6, num_topk=2),
    )
    with half, Buffer(group, **all_of_them[0]) as a, Buffer(half, **all_of_them[1]) as b:
        with Buffer(group, **all_of_them[2] | dict(num_experts=3 * group.size)) as c:
            for call in range(6):
                for owner, buffer in ((group, a), (half, b), (group, c))[:: 1 - 2 * (call % 2)]:
                    good_call(owner, buffer, call)
        for owner, buffer in ((half, b), (group, a)):
            good_call(owner, buffer, 7)
    return True


def test_objects_of_different_sizes_and_groups_side_by_side():
    """deepseek-ai/DeepEP#76, NVIDIA/nvshmem#68"""
    assert all(run_ranks(4, several_objects))


# ---- how a job ends

NEVER_CALLS = """
import sys, time
import numpy as np
import epcomm
group = epcomm.Group(timeout=2)
buffer = epcomm.Buffer(group, num_tokens=8, hidden=64, num_topk=2, num_experts=6)
try:
    if group.rank == 1:
        time.sleep(60 if "for ever" in sys.argv else 4)
    else:
        buffer.plan(np.zeros((3, 2), np.int32))
        buffer.check()
except epcomm.PeerTimeoutError as error:
    print(error.peers)
    if "raise" in sys.argv:
        raise
try:
    buffer.close()
except epcomm.PeerTimeoutError as error:
    print("late")
"""


@pytest.mark.parametrize("words", [("raise", "for ever"), ()], ids=["raised", "caught"])
def test_a_job_whose_rank_never_calls_ends_by_itself(tmp_path, words):
    """vllm-project/vllm#46509: the exception ends all ranks; one that is caught leaves nothing pending."""
    begin = time.monotonic()
    code, out, err = finish(start(tmp_path, ["-n", "3", "--device", "cpu"], NEVER_CALLS, *words))
    assert time.monotonic() - begin < 25
    if words:
        assert code not in (0, 124) and "PeerTimeoutError" in err and "(1,)" in out
    else:
        assert code == 0 and sorted(out.split("\n")) == ["", "(1,)", "(1,)", "late"], out + err


IN_A_NAMESPACE = """
from epcomm import Buffer, testing
from test_faults import good_call, settings
def one(group):
    with Buffer(group, **settings()) as buffer:
        good_call(group, buffer)
    return open("/proc/net/dev").read().count(":")
assert testing.run_threads(3, one) == [1] * 3  # loopback alone
"""


def test_a_host_without_a_network(tmp_path):
    """deepseek-ai/DeepEP#629"""
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "EPCOMM_DEVICE": "cpu"}
    command = ["unshare", "-rn", sys.executable, "-c", IN_A_NAMESPACE]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- sizes and counts


@pytest.mark.parametrize("hidden", [64, 1536, 2048, 3584, 5120, 7176, 16384])
def test_any_hidden(hidden):
    """deepseek-ai/DeepEP#233, #413"""
    settings = settings_of(num_tokens=6, num_experts=6, hidden=hidden, token_padding=2)
    verify(run_ranks(2, step, settings, [("skewed", [6, 1])]), settings)


@pytest.mark.parametrize("topk", [12, 16, 31])
def test_any_topk(topk):
    """deepseek-ai/DeepEP#731"""
    settings = settings_of(num_experts=34, num_topk=topk)
    verify(run_ranks(2, step, settings, [("uniform", [24, 5]), ("masked", [0, 24])]), settings)


@pytest.mark.parametrize("ranks", [6, 7])
def test_any_number_of_ranks(ranks):
    """deepseek-ai/DeepEP#541, #50"""
    settings = settings_of(num_experts=3 * ranks)
    tokens = [(7 * rank) % 25 for rank in range(ranks)]
    verify(run_ranks(ranks, step, settings, [("skewed", tokens), ("masked", tokens)]), settings)


@pytest.mark.parametrize("ranks", [16, 72])
def test_as_many_ranks_as_an_nvlink_domain_has(ranks):
    """deepseek-ai/DeepEP#50: on rank threads of the CPU device."""
    settings = settings_of(num_tokens=3, num_experts=ranks, hidden=8, num_sms=1, token_padding=1)
    tokens = [rank % 4 for rank in range(ranks)]
    verify(run_threads(ranks, step, settings, [("skewed", tokens)], timeout=60.0), settings)


def test_random_numbers_of_tokens():
    """deepseek-ai/DeepEP#604, #374, sgl-project/sglang#25397"""
    rng = np.random.default_rng(7)
    settings = settings_of(num_tokens=9, hidden=8, num_experts=6)
    kinds = rng.choice(["uniform", "skewed", "masked", "one expert", "nothing"], 200)
    counts = rng.integers(0, 10, (200, 3)) * rng.integers(0, 2, (200, 3))
    calls = [(str(kind), [int(n) for n in row]) for kind, row in zip(kinds, counts, strict=True)]
    verify(run_ranks(3, step, settings, calls), settings)


def backward(group, kind, tokens):
    """Forward and backward of a step in which ranks and experts get nothing; the gradients of weights too."""
    with Buffer(group, **settings_of(num_experts=6)) as buffer, ExpertPool(buffer, (8,), "float32") as grads:
        xp, s = buffer.xp, tokens[group.rank]
        ids = xp.asarray(routing(kind, group.rank, s, 4, 6, 0))
        x = xp.asarray(rows_of(group.rank, 0, s, 64, buffer.dtype))
        weights = xp.full((s, 4), 0.5, np.float32)
        got = buffer.dispatch(x, ids, weights)
        back = buffer.combine(got.x, got.plan)
        grad = buffer.dispatch(back.x, plan=got.plan)
        rows = buffer.combine(grad.x, got.plan, row_weights=got.topk_weights)
        grads.local[...] = 0
        grads.slots[...] = 1
        group.barrier()
        buffer.prefetch_weight(got.plan, grads)
        grads.slots[...] = 1
        buffer.reduce_grad(got.plan, grads)
        buffer.check()
        to_host = group.device.to_host
        copied = to_host(got.plan.experts_to_copy)
        sums = to_host(grads.local)[:, 0]
        home = group.rank * buffer.experts_per_rank
        assert [(copied == home + i).sum() for i in range(len(sums))] == sums.tolist()
        assert (to_host(rows.topk_weights) == np.where(to_host(ids) >= 0, 0.5, 0)).all()
        return to_host(rows.x).shape


@pytest.mark.parametrize(
    ("kind", "tokens"), [("nothing", [5, 9]), ("one expert", [0, 24]), ("uniform", [0, 0])]
)
def test_backward_where_a_rank_gets_nothing(kind, tokens):
    """InternLM/xtuner#1799"""
    assert run_ranks(2, backward, kind, tokens) == [(s, 64) for s in tokens]


# ---- numbers


def sums(group, dtype):
    with Buffer(group, **settings_of(num_experts=24, dtype=dtype, num_topk=8)) as buffer:
        x, ids = inputs(group, buffer, tokens=24)
        got = buffer.dispatch(x, ids)
        rows = buffer.xp.asarray(rows_of(group.rank, 3, buffer.row_capacity, 64, buffer.dtype))
        outs = [group.device.to_host(buffer.combine(rows, got.plan).x) for _ in range(2)]
        assert outs[0].tobytes() == outs[1].tobytes()
        buffer.check()
        return group.device.to_host(ids), group.device.to_host(rows), outs[0]


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11), ("float32", 24)])
def test_sums_are_the_same_every_time_and_near_the_exact_ones(dtype, bits):
    """NVIDIA/Megatron-LM#1603: at most two roundings to the row type, and float32 between them."""
    results = run_ranks(3, sums, dtype)
    plan = reference.plan([ids for ids, _, _ in results], 24, 24, 8)
    for rank, (ids, _, out) in enumerate(results):
        dst = plan.ranks[rank].dst.reshape(ids.shape)
        at, row = np.divmod(dst, len(results[rank][1]))  # by the rows of a receive buffer
        exact, size = np.zeros((2, *out.shape))
        for source, (_, rows, _) in enumerate(results):
            picked = np.where((at == source)[..., None], rows.astype(np.float64)[row * (at == source)], 0)
            exact += picked.sum(axis=1)
            size += np.abs(picked).sum(axis=1)
        bound = 2.0**-bits * (size + np.abs(exact)) * 1.01 + 2.0**-22 * size
        assert (np.abs(out.astype(np.float64) - exact) <= bound).all()


def zero_copy(group):
    with Buffer(group, **settings_of()) as buffer:
        x, ids = inputs(group, buffer)
        first, second = (buffer.dispatch(x, ids, zero_copy=True) for _ in range(2))
        pointer = group.device.pointer
        assert pointer(first.x) == pointer(second.x) == buffer._symmetric.pointer(group.rank)
        copied = buffer.dispatch(x, ids)
        assert pointer(copied.x) != pointer(first.x)
        used = int(copied.plan.cu_seqlens[-1])
        to_host = group.device.to_host
        assert to_host(copied.x)[:used].tobytes() == to_host(first.x)[:used].tobytes()


def test_zero_copy_is_a_view_of_the_receive_area():
    """deepseek-ai/DeepEP#655"""
    run_ranks(2, zero_copy)


# ---- the list


def test_the_list_names_tests_that_exist():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| .*?/issues/\d+.*$", text, re.M)
    assert sum(row.count("/issues/") for row in rows) >= 42
    for row in rows:
        for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", row):
            assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M), f"{file}::{test}"
    for name in ("test_user_reports.py", "test_user_reports_cuda.py"):
        here = set(re.findall(r"^def (test_\w+)\(", (ROOT / "tests" / name).read_text(), re.M))
        listed = set(re.findall(rf"`{name}::(\w+)`", text))
        assert not [test for test in here - listed if not test.startswith("test_the_")]


def test_the_messages_are_those_of_the_sources():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = text[text.index("## Messages") : text.index("## Reports")]
    folders = (ROOT / "epcomm", ROOT / "mpi_launch")
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".pyx")]
    source = "".join(path.read_text() for path in paths)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a text over several lines
    messages = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert len(messages) > 30
    for message in messages:
        parts = [part.strip(" ;:,()") for part in message.split("…")]
        missing = [part for part in parts if len(part) > 5 and part not in source]
        assert not missing, f"{message!r}: the sources do not say {missing}"
