"""Zero copy: which views of a buffer's areas are handed out, how long they are good, and what is refused."""

import numpy as np
import pytest
from ranks import run_ranks
from test_buffer import routing, rows_of, settings_of

from epcomm import Buffer


def inputs(group, buffer, call, tokens=12):
    """x, topk_idx and topk_weights of this rank."""
    xp = buffer.xp
    ids = routing("skewed", group.rank, tokens, buffer.num_topk, buffer.num_experts, call)
    weights = np.random.default_rng([group.rank, call]).random((tokens, buffer.num_topk), np.float32)
    return (
        xp.asarray(rows_of(group.rank, call, tokens, buffer.hidden, buffer.dtype)),
        xp.asarray(ids.astype(np.int32)),
        xp.asarray(weights),
    )


def host(group, *arrays):
    return [group.device.to_host(array).tobytes() for array in arrays]


def weights_apart_from_rows(group):
    """Either of both without the other; a view of weights outlives dispatches that bring no weights there."""
    with Buffer(group, **settings_of()) as buffer:
        first, second = inputs(group, buffer, 0), inputs(group, buffer, 1)
        pointer = group.device.pointer

        copied = buffer.dispatch(*first)
        wanted = buffer.combine(copied.x, copied.plan, row_weights=copied.topk_weights)
        rows = buffer.dispatch(*first, zero_copy=True)
        assert pointer(rows.x) != pointer(copied.x)
        assert pointer(rows.topk_weights) != pointer(
            buffer.dispatch(*first, zero_copy_weights=True).topk_weights
        )

        view = buffer.dispatch(*first, zero_copy_weights=True)
        x = view.x.copy()
        others = [
            buffer.dispatch(*second[:2]),
            buffer.dispatch(*second, zero_copy=True),
            buffer.dispatch(second[0], plan=view.plan),  # as in a backward pass
        ]
        back = buffer.combine(x, view.plan, row_weights=view.topk_weights, zero_copy_weights=True)
        assert host(group, back.x, back.topk_weights) == host(group, wanted.x, wanted.topk_weights)

        with pytest.raises(
            ValueError, match="row_weights: a stale view"
        ):  # it is the first plan's, not this one's
            buffer.combine(others[0].x, others[0].plan, row_weights=view.topk_weights)
        last = buffer.dispatch(*second, zero_copy_weights=True)
        for asserted in (True, False):
            with pytest.raises(ValueError, match="row_weights: a stale view"):
                buffer.combine(x, view.plan, row_weights=view.topk_weights, zero_copy_weights=asserted)
        with pytest.raises(ValueError, match="row_weights: expected this buffer's own view"):
            buffer.combine(last.x, last.plan, row_weights=last.topk_weights.copy(), zero_copy_weights=True)
        buffer.combine(last.x, last.plan, row_weights=last.topk_weights, zero_copy_weights=True)
        buffer.check()


def test_weights_apart_from_rows():
    run_ranks(2, weights_apart_from_rows)


def parts(group):
    """A part of a view lies elsewhere than the plan says, so it is refused wherever it begins."""
    with Buffer(group, **settings_of()) as buffer:
        got = buffer.dispatch(*inputs(group, buffer, 0), zero_copy=True, zero_copy_weights=True)
        for asserted in (True, False):
            with pytest.raises(ValueError, match="x: a part of this buffer's view"):
                buffer.combine(got.x[1:], got.plan, zero_copy=asserted)
            with pytest.raises(ValueError, match="row_weights: a part of this buffer's view"):
                buffer.combine(
                    got.x[4:].copy(), got.plan, row_weights=got.topk_weights[4:], zero_copy_weights=asserted
                )
        ends = int(got.cu_seqlens[-1])
        whole, leading = (buffer.combine(got.x[:rows], got.plan, zero_copy=True) for rows in (None, ends))
        buffer.check()
        assert host(group, whole.x) == host(group, leading.x)


def test_parts_of_a_view():
    run_ranks(2, parts)


def foreign(group):
    """Another buffer's live view is memory like any other, but not this buffer's view."""
    with Buffer(group, **settings_of()) as buffer, Buffer(group, **settings_of()) as other:
        given = inputs(group, buffer, 0)
        there = other.dispatch(*given, zero_copy=True, zero_copy_weights=True)
        here = buffer.dispatch(*given)
        with pytest.raises(ValueError, match="x: expected this buffer's own view"):
            buffer.combine(there.x, here.plan, zero_copy=True)
        with pytest.raises(ValueError, match="row_weights: expected this buffer's own view"):
            buffer.combine(here.x, here.plan, row_weights=there.topk_weights, zero_copy_weights=True)
        with pytest.raises(ValueError, match="plan: it belongs to another buffer"):
            buffer.combine(there.x, there.plan)
        results = [buffer.combine(got.x, here.plan, row_weights=got.topk_weights) for got in (here, there)]
        buffer.check()
        assert host(group, *results[0][:2]) == host(group, *results[1][:2])


def test_views_of_another_buffer():
    run_ranks(2, foreign)


def in_place(group):
    """Experts that write their results over their input: no copy of rows in a whole step."""
    with Buffer(group, **settings_of()) as buffer:
        x, ids, weights = inputs(group, buffer, 0)
        got = buffer.dispatch(x, ids, weights, zero_copy=True, zero_copy_weights=True)
        got.x[...] = got.x * 2
        got.topk_weights[...] = got.topk_weights + 1
        back = buffer.combine(
            got.x, got.plan, row_weights=got.topk_weights, zero_copy=True, zero_copy_weights=True
        )
        buffer.check()
        copied = buffer.dispatch(x * 2, ids)
        wanted = buffer.combine(copied.x, copied.plan)
        assert host(group, back.x) == host(group, wanted.x)
        assert host(group, back.topk_weights) == host(group, weights + 1)


def test_in_place():
    run_ranks(2, in_place)
