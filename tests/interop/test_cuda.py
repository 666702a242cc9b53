"""torch tensors on a GPU: whose stream a call works on, graphs, autograd, and the cost on the host."""

import time

import pytest
import torch
from ranks import on_gpus, run_ranks

from epcomm import Buffer, ExpertPool, asarray
from epcomm.torch import moe_combine, moe_dispatch

pytestmark = pytest.mark.skipif(not on_gpus(), reason="needs CUDA")

SHAPE = {"num_tokens": 64, "hidden": 256, "num_topk": 2, "num_experts": 4, "token_padding": 1}
CYCLES = 40_000_000  # of torch.cuda._sleep: some 20 ms


def _inputs(group):
    device = torch.device("cuda", group.device.index)
    x = torch.randn(64, 256, device=device).to(torch.bfloat16)
    idx = torch.arange(128, device=device).reshape(64, 2) % 4
    return x, idx


def _edits_on_a_side_stream(group, explicit):
    """Inputs written by slow work on a side stream, and edited there right after the call."""
    x, idx = _inputs(group)
    right, side = x.clone(), torch.cuda.Stream()
    with Buffer(group, **SHAPE) as buffer:
        buffer.dispatch(x, idx)
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            x.copy_(right)
            # a stream of ours is told to wait for torch's, and torch's for ours
            sent = buffer.dispatch(
                x, idx, stream=buffer.xp.cuda.Stream(non_blocking=True) if explicit else None
            )
            x.fill_(-1)
            idx.fill_(0)
            rows = sent.x.clone()
            back = buffer.combine(sent.x, sent.plan).x
        torch.cuda.synchronize()
        buffer.check()
    return bool((rows.float().sort(0)[0][-1] <= right.float().max()).all()), torch.equal(back, right + right)


@pytest.mark.parametrize("explicit", [False, True])
def test_the_callers_stream_orders_everything(explicit):
    assert run_ranks(1, _edits_on_a_side_stream, explicit) == [(True, True)]


def _pools_on_a_side_stream(group):
    """The streams of calls that take no tensor but a plan of one's."""
    x, idx = _inputs(group)
    seen = []
    with Buffer(group, **SHAPE) as buffer, ExpertPool(buffer, (8, 8), "float32") as pool:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                for plan in (buffer.plan(idx), buffer.dispatch(x, idx).plan):
                    for call in (buffer.prefetch_weight, buffer.reduce_grad):
                        call(plan, pool)
                        seen.append(buffer._last_handle == stream.cuda_stream)
        buffer.check()
    return seen


def test_pools_follow_the_plans_framework():
    assert run_ranks(1, _pools_on_a_side_stream) == [[True] * 8]


def _graph(group):
    """A step captured by torch on its capture stream, replayed with other tokens in place."""
    x, idx = _inputs(group)
    with Buffer(group, **SHAPE) as buffer:
        for _ in range(2):
            back = buffer.combine(*buffer.dispatch(x, idx)[0:4:3]).x
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sent = buffer.dispatch(x, idx)
            back = buffer.combine(sent.x, sent.plan).x
        same = []
        for value in range(5):
            x.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            same.append(bool((back == 2 * value).all()))
        buffer.check()
        del graph
    return same


def test_torchs_graphs():
    assert run_ranks(1, _graph) == [[True] * 5]


def _autograd(group):
    x, idx = _inputs(group)
    weights = torch.rand(64, 2, device=x.device, requires_grad=True)
    x.requires_grad_()
    with Buffer(group, **SHAPE) as buffer, torch.cuda.stream(torch.cuda.Stream()):
        sent = moe_dispatch(buffer, x, idx, weights)
        rows = (sent.x.float() * sent.topk_weights[:, None]).to(x.dtype)
        out = moe_combine(buffer, rows, sent.plan)
        out.float().sum().backward()
        torch.cuda.synchronize()
        buffer.check()
    tokens = torch.allclose(
        x.grad.float(), weights.sum(1, keepdim=True).expand(64, 256), rtol=0.02, atol=0.02
    )
    wanted = x.detach().float().sum(1, keepdim=True).expand(64, 2)
    return tokens, torch.allclose(weights.grad, wanted, rtol=0.02, atol=0.5)


def test_autograd_on_a_side_stream():
    assert run_ranks(1, _autograd) == [(True, True)]


def _host_cost(group):
    """Extra microseconds of a dispatch and of a combine with torch tensors instead of CuPy arrays."""
    x, idx = _inputs(group)
    weights = torch.rand(64, 2, device=x.device)
    with Buffer(group, **SHAPE) as buffer:
        costs = []
        for given in ((x, idx, weights), tuple(asarray(t) for t in (x, idx, weights))):
            sent = buffer.dispatch(*given)
            best = [float("inf")] * 2
            for _ in range(50):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    sent = buffer.dispatch(*given)
                middle = time.perf_counter()
                torch.cuda.synchronize()
                again = time.perf_counter()
                for _ in range(20):
                    buffer.combine(sent.x, sent.plan, row_weights=sent.topk_weights)
                end = time.perf_counter()
                best = [min(best[0], (middle - start) / 20), min(best[1], (end - again) / 20)]
            costs.append(best)
    return [(a - b) * 1e6 for a, b in zip(*costs, strict=True)]


def test_torch_costs_the_host_little():
    dispatch, combine = run_ranks(1, _host_cost)[0]
    print(f"dispatch {dispatch:.1f} us, combine {combine:.1f} us more than with CuPy arrays")
    assert dispatch < 10 and combine < 10
