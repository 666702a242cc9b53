"""What users do wrong: a mistake is told where it is made, nothing is sent, and the next call is right."""

import copy
import gc
import os
import threading

import ml_dtypes
import numpy as np
import pytest
from ranks import on_gpus, run_ranks
from test_buffer import routing, rows_of, settings_of
from test_faults import good_call, inputs

from epcomm import Buffer, EpcommError, ExpertPool, Group, buffer_settings, dtypes, reference
from epcomm.plan import Plan

# ---- settings


def construct(group, changes):
    with pytest.raises((TypeError, ValueError)) as caught:
        Buffer(group, **settings_of() | (changes if group.rank == 1 else {}))
    with Buffer(group, **settings_of()) as buffer:
        good_call(group, buffer)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        (name, value, TypeError)
        for name in ("num_tokens", "num_topk", "num_sms")
        for value in (True, "8", 8.0, [8])
    ]
    + [
        ("hidden", np.float64(64), TypeError),
        ("num_experts", None, TypeError),
        ("token_padding", np.True_, TypeError),
    ]
    + [
        (name, -8, ValueError)
        for name in ("num_tokens", "hidden", "num_topk", "num_experts", "token_padding", "num_sms")
    ]
    + [
        (name, 2**70, ValueError)
        for name in ("num_tokens", "hidden", "num_topk", "num_experts", "token_padding")
    ]
    + [("num_topk", float("nan"), TypeError), ("dtype", None, TypeError), ("dtype", "bf16", TypeError)]
    + [("dtype", object(), TypeError), ("dtype", ml_dtypes.float8_e4m3fn, ValueError)],
    ids=str,
)
def test_a_wrong_setting_is_told_to_all(name, value, kind):
    for found, message in run_ranks(2, construct, {name: value}):
        assert found is kind and message.startswith(f"Buffer: rank 1: {name}:"), message


def numpy_settings(group):
    settings = {name: np.int64(value) for name, value in settings_of().items()}
    with Buffer(group, **settings, num_sms=np.int32(2**31 - 1), dtype=np.float16) as buffer:
        assert type(buffer.num_tokens) is int and buffer.dtype == np.float16
        assert buffer.num_sms == group.device.num_sms
        good_call(group, buffer)
    with Buffer(group, **settings_of(), dtype=ml_dtypes.bfloat16) as buffer:
        assert buffer.dtype == dtypes.bfloat16


def test_numpy_integers_and_dtype_classes_are_as_good():
    run_ranks(2, numpy_settings)


def largest(group):
    """The error names the largest legal value."""
    settings = settings_of(num_experts=448, num_topk=8, hidden=8, token_padding=128)
    with pytest.raises(ValueError, match="num_tokens: .* at most [0-9]+ fit") as caught:
        Buffer(group, **settings | dict(num_tokens=2**28))
    most = int(str(caught.value).split()[-2])
    given = buffer_settings.Settings(**settings | dict(num_tokens=most, dtype="bfloat16", num_sms=None))
    assert buffer_settings.agree(group, given).num_tokens == most
    with pytest.raises(ValueError, match=f"at most {most} fit"):
        buffer_settings.agree(group, given._replace(num_tokens=most + 1))


def test_the_largest_num_tokens_is_named():
    run_ranks(1, largest)


def no_group(group):
    for wrong in (None, 3, group.comm):
        with pytest.raises(TypeError, match="group: expected a Group, got"):
            Buffer(wrong, **settings_of())
    with Group(group.comm, device=str(group.device)) as closed:
        pass
    with pytest.raises(EpcommError, match="the group is closed"):
        Buffer(closed, **settings_of())


def test_a_buffer_needs_an_open_group():
    run_ranks(1, no_group)


# ---- calls


def calls_of(buffer, xp):
    """(call, error, words) of wrong calls."""
    x, ids = xp.zeros((6, 64), buffer.dtype), xp.zeros((6, 4), np.int32)
    weights, plan = xp.ones((6, 4), np.float32), buffer.plan(ids)
    got = buffer.dispatch(x, plan=plan, zero_copy=True)
    rows = buffer.row_capacity
    spare = xp.zeros((rows + 1, 64), buffer.dtype)
    flat = spare.reshape(-1)

    def dispatch(x=x, ids=ids, *args, **kwargs):
        return lambda: buffer.dispatch(x, ids, *args, **kwargs)

    def combine(x=got.x, plan=plan, **kwargs):
        return lambda: buffer.combine(x, plan, **kwargs)

    for bad in (None, [[1.0] * 64], "x", 3, x.shape):
        yield dispatch(bad), TypeError, "x: expected an array"
    for bad in (x[0], x[:, :63], x[None], xp.zeros((), buffer.dtype), x[:5], xp.zeros((0, 64), buffer.dtype)):
        yield dispatch(bad), ValueError, r"x: expected shape \(6, 64\), got"
    for bad in (np.float32, np.float16, np.int16, np.int8, np.bool_, np.float64, np.uint8):
        yield dispatch(xp.zeros((6, 64), bad)), TypeError, "x: expected dtype bfloat16, got"
    for bad in (np.int16, np.uint32, np.float32, np.bool_):
        yield dispatch(x, ids.astype(bad)), TypeError, "topk_idx: expected dtype int32 or int64, got"
    for bad in (ids[0], ids[:, :3], ids[None]):
        yield dispatch(x, bad), ValueError, r"topk_idx: expected shape \(any, 4\)"
    yield (
        dispatch(xp.zeros((25, 64), buffer.dtype), xp.zeros((25, 4), np.int32)),
        ValueError,
        "at most 24 tokens",
    )
    for bad in (weights[:5], weights[:, :3], weights[0]):
        yield dispatch(x, ids, bad), ValueError, "topk_weights: expected shape"
    yield dispatch(x, ids, weights.astype(np.float64)), TypeError, "topk_weights: expected dtype float32"
    yield dispatch(x, ids, plan=plan), ValueError, "exactly one of topk_idx and plan"
    yield dispatch(x, None), ValueError, "exactly one of topk_idx and plan"
    yield dispatch(x, None, plan=3), TypeError, "plan: expected a Plan, got int"
    yield dispatch(x[:5], None, plan=plan), ValueError, r"x: expected shape \(6, 64\)"
    most = 24 * buffer.group.size
    for bad in (-1, most + 1):
        yield dispatch(total_tokens=bad), ValueError, f"total_tokens: expected 0 to {most}"
    for bad in (True, 6.0, "6", float("nan")):
        yield dispatch(total_tokens=bad), TypeError, "total_tokens: expected an int"
    yield dispatch(out=spare[: rows - 1]), ValueError, f"out: expected at least {rows} rows"
    yield dispatch(out=spare[:, :32]), ValueError, "out: expected shape"
    yield dispatch(out=spare.astype(np.float32)), TypeError, "out: expected dtype"
    yield (
        dispatch(out=flat[1 : 1 + 64 * rows].reshape(rows, 64)),
        ValueError,
        "out: expected C order from an address",
    )
    yield dispatch(out=xp.zeros((rows, 128), buffer.dtype)[:, ::2]), ValueError, "out: expected C order"
    yield dispatch(out=spare, zero_copy=True), ValueError, "exclude each other"
    yield dispatch(out=got.x), ValueError, "out: expected memory of your own"
    yield dispatch(got.x[3:9]), ValueError, "x: it lies in the buffer's receive area"
    yield combine(None), TypeError, "x: expected an array"
    yield combine(got.x[:, :32]), ValueError, "x: expected shape"
    yield combine(plan=None), TypeError, "plan: expected a Plan"
    yield combine(plan=buffer.plan(ids)), ValueError, "not been dispatched"
    yield combine(got.x.copy(), zero_copy=True), ValueError, "own view"
    yield combine(row_weights=xp.zeros((rows - 1,), np.float32)), ValueError, "row_weights: expected shape"
    yield combine(row_weights=xp.zeros((rows,), np.float16)), TypeError, "row_weights: expected dtype"
    yield combine(out=x[:5]), ValueError, "out: expected shape"
    yield combine(out=x.astype(np.float32)), TypeError, "out: expected dtype"
    yield combine(out=got.x[rows - 6 :]), ValueError, "out: it overlaps"
    yield combine(spare[:rows], out=spare[1:7]), ValueError, "out: it overlaps"
    if xp is np:
        frozen = np.zeros((rows, 64), buffer.dtype)
        frozen.flags.writeable = False
        yield dispatch(out=frozen), ValueError, "out: expected a writable array"
        yield dispatch(np.zeros((6, 64), ">f4")), TypeError, "x: expected dtype"
        for bad in ("elsewhere", 1, True, object()):
            yield dispatch(stream=bad), TypeError, "stream"


def wrong_calls(group):
    with Buffer(group, **settings_of()) as buffer:
        count = 0
        for call, kind, words in calls_of(buffer, buffer.xp):
            with pytest.raises(kind, match=words):
                call()
            count += 1
        good_call(group, buffer)
        return count


def test_a_wrong_call_sends_nothing():
    """All ranks make the same mistakes; had one been sent, the good call behind them would not match."""
    for count in run_ranks(2, wrong_calls):
        assert count > 50


def unusual_inputs(group):
    """Arrays that are taken as they are or copied, never misread."""
    with Buffer(group, **settings_of()) as buffer:
        xp, device, s = buffer.xp, group.device, 6
        x = xp.asarray(rows_of(group.rank, 0, s, 64, buffer.dtype))
        ids = xp.asarray(routing("uniform", group.rank, s, 4, 16, 0))
        bytes_ = xp.zeros(x.nbytes + 2, np.uint8)
        misaligned = bytes_[2:].view(buffer.dtype).reshape(s, 64)
        misaligned[...] = x
        wide = xp.zeros((s, 128), buffer.dtype)
        wide[:, ::2] = x
        inputs = [
            x,
            misaligned,
            wide[:, ::2],
            x[::-1].copy()[::-1],
            xp.asfortranarray(x),
            x.T.copy().T,
            x.T.T,
        ]
        want = None
        for call, array in enumerate(inputs):
            spread = xp.zeros((2 * s, 8), np.int64)
            spread[::2, 1::2] = ids
            got = buffer.dispatch(array, spread[::2, 1::2])
            out = device.to_host(buffer.combine(got.x, got.plan).x).tobytes()
            want = want or out
            assert out == want, call
        one = xp.broadcast_to(x[:1], (s, 64))  # rows at the same place
        got = buffer.dispatch(one, ids)
        out = device.to_host(buffer.combine(got.x, got.plan).x).astype(np.float32)
        assert (out == 4 * device.to_host(x[:1]).astype(np.float32)).all()
        if xp is np:
            x.flags.writeable = False
            assert buffer.combine(buffer.dispatch(x, ids).x, buffer._live_plan).x.tobytes() == want
        buffer.check()


def test_strided_misaligned_and_read_only_input_is_never_misread():
    run_ranks(2, unusual_inputs)


def huge_ids(group):
    with Buffer(group, **settings_of()) as buffer:
        ids = routing("uniform", group.rank, 6, 4, 16, 0).astype(np.int64)
        ids[0, 0], ids[1, 1], ids[2, 2], ids[3, 3] = 2**32, -(2**63), 2**63 - 1, 2**32 + 5
        plan = buffer.plan(buffer.xp.asarray(ids))
        with pytest.raises(ValueError, match="4 expert ids"):
            buffer.check()
        return ids, group.device.to_host(plan.dst)


def test_64_bit_ids_are_not_cut():
    results = run_ranks(2, huge_ids)
    ids = [np.where((ids < 0) | (ids >= 16), -1, ids) for ids, _ in results]
    plan = reference.plan(ids, 16, 24, 8)
    for rank, (_, dst) in enumerate(results):
        np.testing.assert_array_equal(dst, plan.ranks[rank].dst)


def too_few_tokens(group):
    """A total_tokens that is too small cuts rows off: nothing is written behind them, and check() tells."""
    with Buffer(group, **settings_of(token_padding=1)) as buffer:
        x, ids = inputs(group, buffer, tokens=20)
        right = buffer.dispatch(x, ids, total_tokens=20 * group.size)
        buffer.check()
        out = buffer.xp.full((right.x.shape[0], 64), 5, buffer.dtype)
        buffer.dispatch(x, ids, total_tokens=2, out=out)
        with pytest.raises(ValueError, match="total_tokens of 1 dispatches was too small"):
            buffer.check()
        used = buffer._step_rows(2)
        assert (group.device.to_host(out[used:]).astype(np.float32) == 5).all()
        good_call(group, buffer)


def test_a_total_that_is_too_small_is_told():
    run_ranks(2, too_few_tokens)


def unlike_calls(group, how):
    """Ranks that come to the same call with different things: all finish it, and are told."""
    with Buffer(group, **settings_of(num_experts=24)) as buffer:
        xp, odd = buffer.xp, group.rank == 1
        x, ids = inputs(group, buffer, tokens=20)
        weights = xp.ones((20, 4), np.float32)
        plans = [buffer.plan(ids), buffer.plan(ids)]
        got = [buffer.dispatch(x, None, weights, plan=plan) for plan in plans]
        buffer.check()
        if how == "weights of dispatch":
            buffer.dispatch(x, None, None if odd else weights, plan=plans[0])
        elif how == "plan of dispatch":
            buffer.dispatch(x, plan=plans[odd])
        elif how == "weights of combine":
            buffer.combine(got[0].x, plans[0], row_weights=None if odd else got[0].topk_weights)
        elif how == "plan of combine":
            buffer.combine(got[odd].x, plans[odd])
        with pytest.raises(
            ValueError, match="another rank came to a call with another plan, or with weights"
        ):
            buffer.check()
        buffer.check()
        good_call(group, buffer)


@pytest.mark.parametrize(
    "how", ["weights of dispatch", "plan of dispatch", "weights of combine", "plan of combine"]
)
def test_ranks_that_do_not_mean_the_same_call_are_told(how):
    run_ranks(3, unlike_calls, how)


# ---- plans and lifetimes


def dead_objects(group):
    buffer, other = Buffer(group, **settings_of()), Buffer(group, **settings_of())
    x, ids = inputs(group, buffer)
    got = buffer.dispatch(x, ids, zero_copy=True)
    pool = ExpertPool(buffer, (8,), "float32")
    for call in (lambda: other.dispatch(x, plan=got.plan), lambda: other.combine(x, got.plan)):
        with pytest.raises(ValueError, match="plan: it belongs to another buffer"):
            call()
    with pytest.raises(ValueError, match="stale"):
        buffer.combine(got.x, copy.copy(got.plan))
    buffer.check()
    buffer.destroy()
    buffer.destroy()
    for call in (
        lambda: buffer.plan(ids),
        lambda: buffer.dispatch(x, ids),
        lambda: buffer.dispatch(x, plan=got.plan),
        lambda: buffer.combine(got.x, got.plan),
        lambda: buffer.prefetch_weight(got.plan, pool),
        lambda: buffer.reduce_grad(got.plan, pool),
        buffer.check,
    ):
        with pytest.raises(EpcommError, match=f"Buffer on rank {group.rank} is closed"):
            call()
    group.device.to_host(got.x + 1)  # views stay good for as long as somebody has them
    assert got.plan.cu_seqlens.shape == (2 * 16 // group.size,)
    pool.close()
    pool.close()
    assert buffer.memory()["total"] > 0
    good_call(group, other)
    other.close()


def test_objects_after_their_end():
    run_ranks(2, dead_objects)


def collected(group):
    """Buffers, plans and results go in any order, also while calls are under way and without a close."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with Buffer(group, **settings_of()) as buffer:
            for call in range(5):
                loop = [inputs(group, buffer, call), buffer]
                loop.append(loop)
                x, ids = loop[0]
                got = buffer.dispatch(x, ids, async_finish=True)
                loop.append(got)
                back = buffer.combine(got.x, got.plan, async_finish=True)
                plan = got.plan
                del loop, x, ids, got
                back.event.synchronize()
                assert isinstance(plan, Plan)
                good_call(group, buffer, call)
    finally:
        gc.set_threshold(*before)


def test_garbage_collection_in_the_middle():
    run_ranks(2, collected)


# ---- threads and processes


def threads_on_one_buffer(group, number, steps):
    """Every thread finds its own rows again. Between ranks, the order of the calls is the user's to keep."""
    with Buffer(group, **settings_of(num_experts=16)) as buffer:
        failures = []

        def work(own):
            try:
                for call in range(steps):
                    x = buffer.xp.full((6, 64), own + call % 3, buffer.dtype)
                    got = buffer.dispatch(x, inputs(group, buffer, call)[1])
                    out = group.device.to_host(buffer.combine(got.x, got.plan).x).astype(np.float32)
                    assert (out == 4 * (own + call % 3)).all()
                    buffer.check()
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(8 * own,)) for own in range(number)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not failures
    return True


def test_threads_may_share_a_buffer():
    assert run_ranks(1, threads_on_one_buffer, 4, 25) == [True]


def closed_by_another_thread(group):
    """A call that comes while another thread closes either works or says that the buffer is closed."""
    for round in range(10):
        buffer = Buffer(group, **settings_of())
        x, ids = inputs(group, buffer)
        ends = []

        def work(buffer=buffer, x=x, ids=ids, ends=ends):
            try:
                while True:
                    buffer.dispatch(x, ids)
            except BaseException as error:
                ends.append(error)

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        threading.Event().wait(0.002 * round)
        buffer.close()
        for worker in workers:
            worker.join(20)
        assert len(ends) == 2 and all(isinstance(e, EpcommError) and "closed" in str(e) for e in ends), ends


def test_closing_while_other_threads_call():
    run_ranks(1, closed_by_another_thread)


def forked(group):
    with Buffer(group, **settings_of()) as buffer:
        x, ids = inputs(group, buffer)
        got = buffer.dispatch(x, ids)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in (
                    lambda: buffer.dispatch(x, ids),
                    lambda: buffer.combine(got.x, got.plan),
                    buffer.check,
                ):
                    with pytest.raises(EpcommError, match="a forked child cannot use it"):
                        call()
                with pytest.raises(EpcommError, match="forked child"):
                    group.barrier()
                buffer.close()
                group.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        good_call(group, buffer)


@pytest.mark.skipif(on_gpus(), reason="CUDA itself does not survive a fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_that_nothing_is_its_own():
    run_ranks(1, forked)
