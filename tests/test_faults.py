"""What goes wrong ends well: ranks that are killed, late or missing, and exceptions in the middle."""

import contextlib
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
from ranks import on_gpus, run_processes, run_ranks
from test_buffer import routing, rows_of, settings_of, step, verify

from epcomm import Buffer, EpcommError, ExpertPool, Group, PeerTimeoutError

TIMEOUT = 5.0 if on_gpus() else 2.0
SOON = TIMEOUT / 2  # seconds


def settings(**changes):
    return settings_of(num_experts=24) | changes


def inputs(group, buffer, call=0, tokens=6):
    xp = buffer.xp
    x = rows_of(group.rank, call, tokens, buffer.hidden, buffer.dtype)
    return xp.asarray(x), xp.asarray(
        routing("uniform", group.rank, tokens, buffer.num_topk, buffer.num_experts, call)
    )


def good_call(group, buffer, call=0):
    """A step whose result is known: every token names K experts, so it comes back K-fold."""
    x = buffer.xp.asarray(np.full((6, buffer.hidden), group.rank + call, np.float32).astype(buffer.dtype))
    got = buffer.dispatch(x, inputs(group, buffer, call)[1])
    out = buffer.combine(got.x, got.plan)
    buffer.check()
    assert (group.device.to_host(out.x).astype(np.float32) == buffer.num_topk * (group.rank + call)).all()
    return got


def failing(call, *args):
    """(error, seconds) of a call and the check behind it, one of which must raise PeerTimeoutError."""
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        call(*args)
        call.__self__.check()
    return caught.value, time.monotonic() - start


# ---- ranks that are killed


def die_in(seconds):
    """SIGKILL for this process, wherever it is then."""

    def kill():
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def until_a_rank_dies(group, victim, seconds):
    """Steps until `victim` is dead, which it is after `seconds`; then what the others see of it."""
    buffer = Buffer(group, **settings(num_experts=60))
    if group.rank == victim:
        die_in(seconds)
    with pytest.raises(PeerTimeoutError) as caught:
        for call in itertools.count():
            start = time.monotonic()
            good_call(group, buffer, call % 32)  # ends with check()
    assert time.monotonic() - start < group.timeout + 3 * SOON
    assert caught.value.peers == (victim,) and caught.value.rank == group.rank
    assert f"rank {victim}: its process is gone" in str(caught.value)
    with pytest.raises(PeerTimeoutError):
        buffer.check()
    start = time.monotonic()
    buffer.close()
    assert time.monotonic() - start < SOON


def outlive(group, victims, delays):
    """The first victim dies, the others go on in a smaller group, and so on with the next; returns how many
    were left at last.
    """
    comm, device, left = group.comm, str(group.device), list(range(group.size))
    for victim, seconds in zip(victims, delays, strict=True):
        until_a_rank_dies(group, left.index(victim), seconds)
        group.close()
        left.remove(victim)
        group = Group(comm.regroup(left, f"without {victim}"), device=device, timeout=group.timeout)
        tokens = [(5 * rank + victim) % 25 for rank in range(len(left))]
        seen = step(group, settings(num_experts=60), [("skewed", tokens), ("masked", tokens[::-1])])
        verify(group.gather("seen", seen), settings(num_experts=60))
    group.close()
    return len(left)


@pytest.mark.parametrize(("ranks", "seed"), [(3, 0), (3, 1), (3, 2), (5, 3), (5, 4)])
def test_survivors_name_the_dead_and_go_on_without_it(ranks, seed):
    rng = np.random.default_rng([seed, ranks])
    # On GPUs every group size compiles its kernels, and ranks that share one are slow: one death is enough.
    device, timeout, deaths = ("cuda", 20.0, 1) if on_gpus() else ("cpu", TIMEOUT, ranks - 1)
    victims = [int(rank) for rank in rng.permutation(ranks)[:deaths]]
    delays = [float(d) for d in rng.uniform(0.0, 0.2, deaths)]
    outcomes = run_processes(ranks, outlive, victims, delays, device=device, timeout=timeout)
    for rank, outcome in enumerate(outcomes):
        if rank in victims:
            assert outcome.error is None and outcome.exitcode == -signal.SIGKILL
        else:
            assert outcome.error is None and outcome.result == ranks - deaths


# ---- timeouts


def one_stays_away(group):
    with Buffer(group, **settings()) as buffer:
        x, ids = inputs(group, buffer)
        event = buffer.dispatch(x, ids, async_finish=True).event
        event.synchronize()
        if group.rank == 1:
            time.sleep(TIMEOUT + SOON)
        error, seconds = failing(buffer.dispatch, x, ids)
        if group.rank != 1:
            assert TIMEOUT - 0.1 < seconds < TIMEOUT + SOON
            assert error.operation == "plan" and error.rank == group.rank and error.peers == (1,)
            assert error.seen < error.wanted == 2
            assert f"plan on rank {group.rank}: rank 1 did not come to call 2" in str(error)
            assert (f"nothing came within {TIMEOUT:g} s" in str(error)) != ("gave up" in str(error))
        else:
            assert seconds < SOON and set(error.peers) <= {0, 2}
            assert (
                "had given up when this rank came to call 2" in str(error)
                and "rank 1 " not in str(error)[15:]
            )
        for again in (
            buffer.check,
            event.synchronize,
            event.wait,
            lambda: buffer.plan(ids),
            lambda: buffer.dispatch(x, ids),
        ):
            with pytest.raises(PeerTimeoutError) as caught:
                again()
            assert str(caught.value) == str(error)
        start = time.monotonic()
        buffer.close()  # waits for nobody, and does not raise again what has been raised
        buffer.close()
        assert time.monotonic() - start < SOON
        with pytest.raises(EpcommError, match="closed"):
            buffer.check()
        with pytest.raises(PeerTimeoutError):
            event.synchronize()
        return str(error)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_missing_rank_is_named_and_the_error_stays(ranks):
    run_ranks(ranks, one_stays_away, timeout=TIMEOUT)


def told(group):
    """Rank 1 never comes; rank 2 comes late, and learns from rank 0 that it is in vain."""
    with Buffer(group, **settings()) as buffer:
        x, ids = inputs(group, buffer)
        if group.rank == 1:
            time.sleep(TIMEOUT + SOON)
            with pytest.raises(PeerTimeoutError, match="close on rank 1: rank 0 had given up"):
                buffer.close()
            return
        if group.rank == 2:
            time.sleep(TIMEOUT - 0.5)
        error, seconds = failing(buffer.dispatch, x, ids)
        assert error.peers == (1,)
        if group.rank == 2:
            assert seconds < TIMEOUT - 0.3
            assert "rank 0 gave up" in str(error)
        buffer.close()


def test_peers_are_told():
    run_ranks(3, told, timeout=TIMEOUT)


def late_but_in_time(group, late):
    """A start skew of most of the timeout, then as much before every operation."""
    with Buffer(group, **settings()) as buffer:
        x, ids = inputs(group, buffer)

        def pause():
            if group.rank == late:
                time.sleep(0.7 * TIMEOUT)

        pause()
        plan = buffer.plan(ids)
        pause()
        got = buffer.dispatch(x, plan=plan)
        pause()
        buffer.combine(got.x, got.plan)
        pause()
    return True


def test_a_rank_that_is_late_but_in_time_holds_nobody_up_for_good():
    assert all(run_ranks(3, late_but_in_time, 1, timeout=TIMEOUT))


def after_failure(group):
    """Kernels of a dead object end where they start, whatever their arguments point at. Others' objects live
    on, and new ones can be made.
    """
    with Buffer(group, **settings()) as dead, Buffer(group, **settings()) as other:
        pool = ExpertPool(dead, (4, 8), "float32")
        x, ids = inputs(group, dead)
        plan = dead.dispatch(x, ids).plan
        dead.combine(dead.dispatch(x, plan=plan).x, plan)
        dead.prefetch_weight(plan, pool)
        dead.reduce_grad(plan, pool)
        dead.check()
        good_call(group, other, 1)
        if group.rank == 0:
            time.sleep(TIMEOUT + SOON)
        failing(dead.dispatch, x, ids)
        plan._slab[:] = 2**30  # as memory that no planner has filled
        handle = group.device.handle(group.device.current_stream())
        start = time.monotonic()
        for kernel in ("plan", "dispatch", "combine", "prefetch", "reduce_grad", "meet"):
            getattr(dead, f"_{kernel}_kernel").run(handle)
        group.device.synchronize(handle)
        assert time.monotonic() - start < SOON
        pool.close()
        good_call(group, other, 2)
        dead.close()
        with Buffer(group, **settings(hidden=32)) as new:
            for call in range(3):
                good_call(group, new, call)
                good_call(group, other, call)
    return True


def test_other_objects_of_the_group_live_on():
    assert all(run_ranks(3, after_failure, timeout=TIMEOUT))


def unnoticed(group):
    """A failure that nobody has asked for yet is raised by close, which frees everything all the same."""
    buffer = Buffer(group, **settings())
    handle = group.device.handle(group.device.current_stream())
    if group.rank == 0:
        buffer._meet_kernel.run(handle)
        with pytest.raises(PeerTimeoutError, match="close on rank 0: rank 1 did not come"):
            buffer.close()
    else:
        time.sleep(TIMEOUT + SOON)
        with pytest.raises(PeerTimeoutError, match="rank 0 had given up"):
            buffer.close()
    buffer.close()
    with pytest.raises(EpcommError, match="closed"):
        buffer.check()
    group.barrier()


def test_close_raises_what_nobody_has_seen():
    run_ranks(2, unnoticed, timeout=TIMEOUT)


def missing_in(group, operation, seed):
    """Rank 1 stays away from one operation, in a random order of threads; the others end and name it."""
    from epcomm.runtime import _fibers

    with Buffer(group, **settings(token_padding=2)) as buffer, ExpertPool(buffer, (8,), "float32") as pool:
        x, ids = inputs(group, buffer, seed, tokens=20)
        got = buffer.dispatch(x, ids)
        calls = dict(
            plan=lambda: buffer.plan(ids),
            dispatch=lambda: buffer.dispatch(x, plan=got.plan),
            combine=lambda: buffer.combine(got.x, got.plan),
            reduce_grad=lambda: buffer.reduce_grad(got.plan, pool),
        )
        buffer.check()
        if group.rank == 1:
            time.sleep(1.6)
            with pytest.raises(PeerTimeoutError):
                buffer.close()
            return
        _fibers.set_schedule(64 * seed + group.rank + 1)
        try:
            with pytest.raises(PeerTimeoutError) as caught:
                calls[operation]()
        finally:
            _fibers.set_schedule(None)
        assert caught.value.operation == operation and caught.value.peers == (1,)
        pool.close()


@pytest.mark.skipif(on_gpus(), reason="the order of fibers can be chosen on the CPU device only")
@pytest.mark.parametrize("operation", ["plan", "dispatch", "combine", "reduce_grad"])
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_missing_from_any_operation_in_any_order_of_threads(operation, seed):
    run_ranks(3, missing_in, operation, seed, timeout=1.0)


# ---- exceptions inside `with`


def exception_inside(group, where):
    with contextlib.suppress(KeyError), Buffer(group, **settings()) as buffer:
        x, ids = inputs(group, buffer)
        if group.rank == 1:
            start = time.monotonic()
            raise KeyError("mine")
        if where == "call":
            error, seconds = failing(buffer.dispatch, x, ids)
            assert error.peers == (1,) and seconds < TIMEOUT + SOON
            return "told"
        start = time.monotonic()
        with pytest.raises(
            PeerTimeoutError, match=f"close on rank {group.rank}: rank 1 did not come"
        ) as caught:
            buffer.close()
        assert caught.value.peers == (1,) and time.monotonic() - start < TIMEOUT + SOON
        return "told"
    assert time.monotonic() - start < SOON
    return "left"


@pytest.mark.parametrize("where", ["call", "close"])
def test_an_exception_inside_with_hangs_nobody(where):
    assert run_ranks(3, exception_inside, where, timeout=TIMEOUT) == ["told", "left", "told"]


def exception_after_failure(group):
    with (
        pytest.raises(KeyError) as caught,
        Buffer(group, **settings()) as buffer,
        ExpertPool(buffer, (8,), "float32"),
    ):
        if group.rank == 1:
            time.sleep(TIMEOUT + SOON)
        failing(buffer.plan, inputs(group, buffer)[1])
        start = time.monotonic()
        raise KeyError("mine")
    assert time.monotonic() - start < SOON
    return caught.value.args


def test_the_users_exception_is_the_one_that_is_seen():
    assert run_ranks(2, exception_after_failure, timeout=TIMEOUT) == [("mine",)] * 2


# ---- graphs


def replays_after_a_failure(group):
    import cupy

    with Buffer(group, **settings()) as buffer, cupy.cuda.Stream(non_blocking=True) as stream:
        x, ids = inputs(group, buffer)
        good_call(group, buffer)
        stream.begin_capture()
        got = buffer.dispatch(x, ids, zero_copy=True)
        buffer.combine(got.x, got.plan, zero_copy=True)
        with pytest.raises(EpcommError, match="captured"):
            buffer.check()
        graph = stream.end_capture()
        if group.rank == 0:
            graph.launch(stream)
            stream.synchronize()  # cannot raise
            start = time.monotonic()
            for _ in range(10):
                graph.launch(stream)
            stream.synchronize()
            assert time.monotonic() - start < SOON
        else:
            time.sleep(TIMEOUT + SOON)
            graph.launch(stream)
        with pytest.raises(PeerTimeoutError):
            buffer.check()
    cupy.zeros(4).sum().get()  # the context is as good as ever


@pytest.mark.skipif(not on_gpus(), reason="graphs are CUDA's")
def test_replays_after_a_failure_end_at_once():
    run_ranks(2, replays_after_a_failure, timeout=TIMEOUT)


def destroyed_stream(group):
    """check() and close() wait for the work of streams that their owner has destroyed since."""
    import cupy
    from cupy.cuda import runtime

    with Buffer(group, **settings()) as buffer:
        x, ids = inputs(group, buffer)
        for _ in range(20):
            buffer.dispatch(x, ids, stream=cupy.cuda.Stream(non_blocking=True))
            buffer.check()
            handle = runtime.streamCreateWithFlags(1)
            buffer.dispatch(x, ids, stream=handle)
            runtime.streamDestroy(handle)
            buffer.check()
        handle = runtime.streamCreateWithFlags(1)
        buffer.dispatch(x, ids, stream=handle)
        runtime.streamDestroy(handle)


@pytest.mark.skipif(not on_gpus(), reason="the CPU device has one stream")
def test_a_stream_may_be_destroyed_after_a_call():
    run_ranks(2, destroyed_stream)


# ---- and the results afterwards


def late_then_right(group, calls):
    with Buffer(group, **settings()) as buffer:
        if group.rank == 1:
            time.sleep(TIMEOUT + SOON)
        failing(buffer.plan, inputs(group, buffer)[1])
    return step(group, settings(), calls)


def test_a_buffer_that_is_built_again_gives_right_results():
    calls = [("skewed", [24, 3, 0]), ("masked", [5, 24, 24])]
    verify(run_ranks(3, late_then_right, calls, timeout=TIMEOUT), settings())
