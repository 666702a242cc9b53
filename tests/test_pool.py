"""ExpertPool, prefetch_weight and reduce_grad against plain NumPy."""

import time

import numpy as np
import pytest
from ranks import on_gpus, run_ranks
from test_buffer import routing, rows_of, settings_of

from epcomm import Buffer, EpcommError, ExpertPool, dtypes
from epcomm.testing import run_threads


def weights_of(expert, shape, dtype, call=0):
    rng = np.random.default_rng([expert, call])
    if dtype.itemsize == 1:
        return rng.integers(0, 256, shape, np.uint8)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def views(group, shape, dtype):
    """Every view shows the same pages, on this rank and on the others."""
    dtype = dtypes.resolve(dtype)
    with Buffer(group, **settings_of(num_experts=12)) as buffer, ExpertPool(buffer, shape, dtype) as pool:
        xp, per_rank, me = buffer.xp, 12 // group.size, group.rank
        storage = pool.local.dtype
        for i in range(per_rank):
            pool.local[i] = xp.asarray(weights_of(me * per_rank + i, shape, dtype).view(storage))
            pool.slots[i] = xp.asarray(weights_of(100 + me * per_rank + i, shape, dtype).view(storage))
        group.device.synchronize(group.device.handle(group.device.current_stream()))
        group.barrier()
        full = group.device.to_host(xp.ascontiguousarray(pool.full))
        compute = group.device.to_host(xp.ascontiguousarray(pool.compute))
        assert full.shape == (12 + per_rank, *shape) and compute.shape == (2 * per_rank, *shape)
        for e in range(12):
            assert full[e].tobytes() == weights_of(e, shape, dtype).tobytes()
        for i in range(per_rank):
            slot = weights_of(100 + me * per_rank + i, shape, dtype).tobytes()
            assert full[12 + i].tobytes() == compute[per_rank + i].tobytes() == slot
            assert compute[i].tobytes() == weights_of(me * per_rank + i, shape, dtype).tobytes()
        assert pool.stride % 16 == 0 and pool.stride >= pool.nbytes
        group.barrier()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((6, 24), "bfloat16"), ((5, 4), "float32"), ((3, 32), "float8_e4m3fn")]
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_views_show_the_same_pages(ranks, shape, dtype):
    run_ranks(ranks, views, shape, dtype)


def train(group, settings, shape, tokens, calls, late=None):
    """Prefetch and reduction over two pools each, with new weights and gradients in every call.

    late: a rank that comes late to every reduction.
    """
    seen = []
    with Buffer(group, **settings) as buffer:
        xp, device = buffer.xp, group.device
        experts, per_rank, me = buffer.num_experts, buffer.experts_per_rank, group.rank
        weights = [ExpertPool(buffer, shape, "bfloat16"), ExpertPool(buffer, (2, *shape), "float8_e4m3fn")]
        grads = [ExpertPool(buffer, shape, "float32"), ExpertPool(buffer, (3, *shape), "float32")]
        for call in range(calls):
            for pool in weights:
                for i in range(per_rank):
                    new = weights_of(me * per_rank + i, pool.shape, pool.dtype, call)
                    pool.local[i] = xp.asarray(new.view(pool.local.dtype))
                pool.slots[:] = xp.asarray(0x55, pool.slots.dtype) if pool.dtype.itemsize == 1 else 77
            for pool in grads:
                for i in range(per_rank):
                    pool.local[i] = xp.asarray(weights_of(1000 * me + i, pool.shape, pool.dtype, call))
            s = tokens[call % len(tokens)][me]
            plan = buffer.plan(xp.asarray(routing("skewed", me, s, buffer.num_topk, experts, call)))
            group.barrier()
            event = buffer.prefetch_weight(plan, *weights, async_finish=call % 2 == 1)
            if event is not None:
                event.wait()
            copied = device.to_host(plan.experts_to_copy)
            for slot, expert in enumerate(copied[me]):
                for pool in weights:
                    got = device.to_host(xp.ascontiguousarray(pool.slots[slot]))
                    if expert < 0:
                        assert (got.astype(np.float32) == got.reshape(-1)[0].astype(np.float32)).all()
                    else:
                        assert (
                            got.tobytes() == weights_of(int(expert), pool.shape, pool.dtype, call).tobytes()
                        )
                for pool in grads:
                    pool.slots[slot] = xp.asarray(
                        weights_of(50_000 + 1000 * me + slot, pool.shape, pool.dtype, call)
                    )
            if late == me:
                time.sleep(0.02)
            buffer.reduce_grad(plan, *grads)
            buffer.check()
            for pool in grads:
                slots = device.to_host(xp.ascontiguousarray(pool.slots))
                for slot, expert in enumerate(copied[me]):
                    left = weights_of(50_000 + 1000 * me + slot, pool.shape, pool.dtype, call)
                    assert (slots[slot] == (0 if expert >= 0 else left)).all()
                for i in range(per_rank):
                    want = weights_of(1000 * me + i, pool.shape, pool.dtype, call)
                    for r, row in enumerate(copied):
                        for slot in np.flatnonzero(row == me * per_rank + i):
                            want = want + weights_of(
                                50_000 + 1000 * r + int(slot), pool.shape, pool.dtype, call
                            )
                    assert device.to_host(xp.ascontiguousarray(pool.local[i])).tobytes() == want.tobytes()
            seen.append((copied >= 0).sum())
            group.barrier()
        for pool in weights + grads:
            pool.close()
    return seen


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_prefetch_and_reduce(ranks):
    settings = settings_of(num_experts=ranks * 3)
    tokens = [[24] * ranks, [(7 * r) % 25 for r in range(ranks)], [0] * ranks]
    seen = run_ranks(ranks, train, settings, (4, 20), tokens, 4)[0]
    assert max(seen) > 0 and min(seen) == 0  # experts were copied, and once nothing was


def test_a_piece_does_not_end_where_an_expert_ends():
    run_ranks(2, train, settings_of(num_experts=6), (3, 4104), [[24, 24]], 2)


@pytest.mark.parametrize("late", range(3))
def test_a_late_rank(late):
    """Whether it is the home of copied experts, holds copies, or neither."""
    run_ranks(3, train, settings_of(num_experts=9), (4, 20), [[24] * 3], 3, late)


def reduce_in_a_row(group, calls, late):
    """Reductions of several plans that nothing stands between, each after this rank's new gradients."""
    with Buffer(group, **settings_of(num_experts=3 * group.size)) as buffer:
        xp, me, per_rank = buffer.xp, group.rank, buffer.experts_per_rank
        plans = [
            buffer.plan(xp.asarray(routing(kind, me, 24, 4, buffer.num_experts, i)))
            for i, kind in enumerate(("skewed", "one expert", "uniform"))
        ]
        copies = [group.device.to_host(plan.experts_to_copy) for plan in plans]
        with ExpertPool(buffer, (3, 4104), "float32") as pool:  # enough for several blocks
            pool.local[...] = 0
            pool.slots[...] = 0
            wanted = np.zeros(buffer.num_experts)
            for call in range(calls):
                copied = copies[call % len(plans)]
                for slot in np.flatnonzero(copied[me] >= 0):
                    pool.slots[int(slot)] += 1 + call * (1 + me)  # added to what should have been cleared
                if late == me:
                    time.sleep(0.002)
                buffer.reduce_grad(plans[call % len(plans)], pool)
                for rank, experts in enumerate(copied):
                    np.add.at(wanted, experts[experts >= 0], 1 + call * (1 + rank))
            buffer.check()
            got = group.device.to_host(xp.ascontiguousarray(pool.local))
            return got, wanted[me * per_rank : (me + 1) * per_rank]


@pytest.mark.parametrize("late", [None, 0, 1])
def test_reductions_in_a_row(late):
    for got, wanted in run_ranks(3, reduce_in_a_row, 30, late):
        assert (got == wanted[:, None, None]).all()


def meet(group, call, passed):
    """Whether rank 1, which comes late and brings nothing, had come when a call of another rank was over."""
    with Buffer(group, **settings_of(num_experts=12)) as buffer:
        xp = buffer.xp
        ids = xp.full((0 if group.rank == 1 else 3, 4), -1, np.int32)
        plan = buffer.plan(ids)
        group.barrier()
        if group.rank == 1:
            time.sleep(0.05)
            passed.append(True)
        if call == "plan":
            buffer.plan(ids)
        else:
            buffer.dispatch(xp.zeros((ids.shape[0], 64), buffer.dtype), plan=plan)
        return bool(passed)


@pytest.mark.skipif(on_gpus(), reason="a call returns when it is over on the CPU device only")
@pytest.mark.parametrize("call", ["plan", "dispatch"])
def test_plan_and_dispatch_meet_all_ranks(call):
    """What prefetch relies on, which waits for nobody: see docs/memory.md."""
    assert run_threads(3, meet, call, []) == [True] * 3


def layers(group, steps, late):
    """Two layers share a pool, forward and backward, by the rule of docs/memory.md; returns what was fetched
    wrongly."""
    wrong = []
    with (
        Buffer(group, **settings_of(num_experts=12)) as buffer,
        ExpertPool(buffer, (4, 8), "float32") as pool,
    ):
        xp, me, per_rank = buffer.xp, group.rank, buffer.experts_per_rank
        own = xp.arange(me * per_rank, (me + 1) * per_rank, dtype=np.float32)[:, None, None]
        nothing = xp.zeros((0, 4), np.int32)
        x = xp.zeros((24, 64), buffer.dtype)

        def fetch(plan, version):
            if late == me:
                time.sleep(0.002)
            buffer.prefetch_weight(plan, pool)
            got = group.device.to_host(xp.ascontiguousarray(pool.slots))
            for slot, expert in enumerate(group.device.to_host(plan.experts_to_copy)[me]):
                if expert >= 0 and not (got[slot] == 1000 * version + expert).all():
                    wrong.append((version, int(expert)))

        for step in range(steps):
            plans = []
            for layer in range(2):
                pool.local[...] = 1000 * (2 * step + layer) + own
                ids = routing("skewed", me, 24, 4, 12, 2 * step + layer)
                plans.append(buffer.plan(xp.asarray(ids)))
                fetch(plans[-1], 2 * step + layer)
                buffer.dispatch(x, plan=plans[-1])
            for layer in (1, 0):
                pool.local[...] = 1000 * (2 * step + layer) + own
                buffer.dispatch(x, plan=plans[layer])
                fetch(plans[layer], 2 * step + layer)
                buffer.plan(nothing)
        buffer.check()
    return wrong


@pytest.mark.parametrize("late", range(3))
def test_layers_take_turns_with_a_pool(late):
    assert run_ranks(3, layers, 10, late) == [[], [], []]


def refusals(group):
    with Buffer(group, **settings_of()) as buffer, Buffer(group, **settings_of()) as other:
        xp = buffer.xp
        plan = buffer.plan(xp.asarray(routing("skewed", group.rank, 6, 4, 16, 0)))
        weights, foreign = ExpertPool(buffer, (4, 8), "bfloat16"), ExpertPool(other, (4, 8), "float32")
        with pytest.raises(TypeError, match="float32"):
            buffer.reduce_grad(plan, weights)
        with pytest.raises(ValueError, match="of this buffer"):
            buffer.prefetch_weight(plan, foreign)
        with pytest.raises(ValueError, match="pools"):
            buffer.prefetch_weight(plan)
        with ExpertPool(buffer, (4, 8), "float32") as grads, pytest.raises(ValueError, match="once"):
            buffer.reduce_grad(plan, grads, grads)
        with pytest.raises(ValueError, match="another buffer"):
            other.prefetch_weight(plan, foreign)
        weights.close()
        weights.close()
        with pytest.raises(EpcommError, match="closed"):
            buffer.prefetch_weight(plan, weights)
        foreign.close()
        with pytest.raises(ValueError, match="multiple of 16"):
            ExpertPool(buffer, (3,), "bfloat16")
        with pytest.raises(ValueError, match="shape"):
            ExpertPool(buffer, (8 + 8 * group.rank,), "bfloat16")
        buffer.check()


def test_refusals():
    run_ranks(2, refusals)


def interleaved(group, order):
    """Two buffers, two micro-batches, asynchronous calls in the given order; returns every result."""
    outs = {}
    with Buffer(group, **settings_of()) as a, Buffer(group, **settings_of(num_tokens=30)) as b:
        xp, device, sent = a.xp, group.device, {}
        for step in order:
            for name, buffer, tokens in (("a", a, 20), ("b", b, 13)):
                if step[1] != name:
                    continue
                if step[0] == "d":
                    x = rows_of(group.rank, ord(name), tokens, 64, buffer.dtype)
                    ids = routing("skewed", group.rank, tokens, 4, 16, ord(name))
                    sent[name] = buffer.dispatch(
                        xp.asarray(x), xp.asarray(ids), zero_copy=True, async_finish=True
                    )
                else:
                    got = sent[name]
                    got.event.wait()
                    outs[name] = buffer.combine(got.x, got.plan, zero_copy=True, async_finish=True)
        for name in outs:
            outs[name].event.synchronize()
        return {name: device.to_host(out.x).tobytes() for name, out in outs.items()}


def test_interleaved_calls_of_two_buffers_give_the_serial_result():
    orders = ["da ca db cb", "da db ca cb", "da db cb ca", "db da ca cb", "db da cb ca", "db cb da ca"]
    # share=False: on one GPU a rank's kernels on the communication stream, of high priority, keep the other's
    # work waiting
    results = [run_ranks(2, interleaved, order.split(), share=False) for order in orders]
    for result in results[1:]:
        assert result == results[0]


def three_in_a_row(group):
    """Asynchronous combines that nobody waits for in between are ordered, not mixed up; dropped arrays stay
    alive."""
    with Buffer(group, **settings_of()) as buffer:
        xp, device = buffer.xp, group.device
        ids = xp.asarray(routing("skewed", group.rank, 20, 4, 16, 0))
        plan = buffer.plan(ids)
        events, outs = [], []
        for call in range(3):
            x = rows_of(group.rank, call, 20, 64, buffer.dtype)
            got = buffer.dispatch(xp.asarray(x), plan=plan, async_finish=True)
            back = buffer.combine(got.x, plan, async_finish=True)
            events.append(back.event)
            outs.append(back.x)
            del got
        events[-1].synchronize()
        once = [
            device.to_host(
                buffer.combine(
                    buffer.dispatch(xp.asarray(rows_of(group.rank, c, 20, 64, buffer.dtype)), plan=plan).x,
                    plan,
                ).x
            )
            for c in range(3)
        ]
        for out, want in zip(outs, once, strict=True):
            assert device.to_host(out).tobytes() == want.tobytes()


def test_asynchronous_calls_in_a_row():
    run_ranks(2, three_in_a_row)
