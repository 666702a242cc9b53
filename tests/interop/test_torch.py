"""torch tensors in and out of every operation; the autograd functions against a dense layer."""

import itertools
import subprocess
import sys
import time
import timeit
import weakref

import numpy as np
import pytest
import torch
from ranks import run_ranks

from epcomm import Buffer, MoECommunicator, QuantConfig, asarray, dtypes, to_dlpack
from epcomm.arrays import caller_stream, giver, take
from epcomm.runtime import _dlpack
from epcomm.runtime.cpu import CpuDevice
from epcomm.torch import moe_combine, moe_dispatch

CPU = CpuDevice()
TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}


class OldTensor(torch.Tensor):
    """A tensor as torch had it before the C exchange table."""

    __dlpack_c_exchange_api__ = None


def tensor(name, shape=(4, 8)):
    bits = torch.arange(np.prod(shape) * 8, dtype=torch.uint8) % 100
    dtype = TORCH_DTYPES[name]
    return bits[: np.prod(shape) * dtype.itemsize].clone().view(dtype).reshape(shape)


# Tensors through the door
# ------------------------


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("kind", [torch.Tensor, OldTensor])
def test_every_dtype_shares_memory_both_ways(name, kind):
    x = tensor(name).as_subclass(kind)
    got = take(CPU, x, "x", dtypes=(dtypes.resolve(name),), shape=(None, 8), writable=True)
    assert got.ctypes.data == x.data_ptr() and got.dtype == dtypes.resolve(TORCH_DTYPES[name])
    assert asarray(x).ctypes.data == x.data_ptr()
    back = giver(x)(got)
    assert type(back) is torch.Tensor and back.dtype == x.dtype and back.data_ptr() == x.data_ptr()
    consumed = torch.from_dlpack(to_dlpack(got))
    assert consumed.dtype == x.dtype and consumed.data_ptr() == x.data_ptr()


def test_bytes_become_fp8_on_the_way_out():
    bits = np.array([0x38, 0xB8], np.uint8)
    give = giver(torch.zeros(1))
    assert give(bits, dtypes.float8_e4m3fn).float().tolist() == [1, -1]
    assert give(None) is None
    assert torch.from_dlpack(to_dlpack(bits, dtype="float8_e4m3fn")).float().tolist() == [1, -1]


@pytest.mark.parametrize("kind", [torch.Tensor, OldTensor])
def test_strides_and_offsets(kind):
    base = torch.arange(16 * 16, dtype=torch.float32).reshape(16, 16).as_subclass(kind)
    for x in (base[:, ::2], base.T[:, :8], base[1:, 3:11], base.flatten()[1:9].reshape(1, 8), base[:0, :8]):
        got = take(CPU, x, "x", dtypes=(dtypes.float32,), shape=(None, 8))
        assert got.flags.c_contiguous and got.ctypes.data % 16 == 0
        np.testing.assert_array_equal(got, x.numpy())
        np.testing.assert_array_equal(asarray(x), x.numpy())


@pytest.mark.parametrize("kind", [torch.Tensor, OldTensor])
def test_what_torch_does_not_share(kind):
    def refused(x):
        return pytest.raises(ValueError, match=f"x: .*{type(x).__name__} does not share its memory: ")

    def try_take(x):
        take(CPU, x, "x", dtypes=(dtypes.float32,), shape=(None, 8))

    needs_gradient = torch.zeros(4, 8).as_subclass(kind).requires_grad_()
    with refused(needs_gradient) as error:
        try_take(needs_gradient)
    assert "gradient" in str(error.value) and "detach" in str(error.value)
    try_take(needs_gradient.detach())
    with pytest.raises((TypeError, ValueError), match="x: "):
        try_take(torch.zeros(4, 8).to_sparse())
    with pytest.raises((TypeError, ValueError), match="x: "):
        try_take(torch.zeros(4, 8, device="meta").as_subclass(kind))
    with pytest.raises(TypeError, match="x: expected one of .*, got torch.float64"):
        try_take(torch.zeros(4, 8, dtype=torch.float64).as_subclass(kind))


def test_lifetimes_in_any_order():
    for order in itertools.permutations(["tensor", "array", "back"]):
        x = torch.arange(6.0)
        held = {"tensor": x, "array": asarray(x)}
        held["back"] = giver(x)(held["array"])
        tensor_gone, memory_gone = weakref.ref(x), weakref.ref(held["array"].base)
        del x
        for name in order:
            del held[name]
            assert all(float(rest[5]) == 5 for rest in held.values())
            assert (memory_gone() is None) == (not held.keys() & {"array", "back"})
        assert tensor_gone() is None


def test_results_keep_the_native_memory():
    array = np.arange(8, dtype=np.float32).view(type("Array", (np.ndarray,), {}))
    gone = weakref.ref(array)
    back = giver(torch.zeros(1))(array)
    del array
    assert gone() is not None and back.sum() == 28
    piece = back[2:4]
    del back
    assert gone() is not None
    del piece
    assert gone() is None


def test_streams_are_not_torchs_on_the_cpu():
    assert caller_stream(CPU, torch.zeros(1)) == 0


def test_torch_tensors_cost_little_more_than_native_arrays():
    native = CPU.empty((64, 128), dtypes.bfloat16)
    x = torch.zeros(64, 128, dtype=torch.bfloat16)

    def cost(call):
        return min(timeit.repeat(call, number=500, repeat=30, timer=time.thread_time)) / 500

    def take_it(array):
        take(CPU, array, "x", dtypes=(dtypes.bfloat16,), shape=(None, 128))

    def extra():
        """What a call costs more, over its bound: it takes up to three arrays and gives up to three."""
        usual = cost(lambda: take_it(native))
        more = (
            3 * (cost(lambda: take_it(x)) - usual) + cost(lambda: giver(x)) + 3 * cost(lambda: give(native))
        )
        # The bound is for a core that does nothing else: a native array costs 0.4 us there.
        return more / (10e-6 * max(1, usual / 0.5e-6))

    give = giver(x)
    assert min(extra() for _ in range(4)) < 1  # others on the core can only make it more


def test_interpreter_exit_with_tensors_alive():
    script = """
import numpy as np, sys, torch
from epcomm import asarray
from epcomm.arrays import giver
x = torch.arange(8.0)
sys.kept = [asarray(x), giver(x)(np.zeros(4, np.float32))]
sys.kept.append(sys.kept)
print("reached the end")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "reached the end\n"), done.stderr


# The layer
# ---------


def dense(x, topk_idx, topk_weights, w1, w2):
    """Every token through its experts, one after the other: the layer without any communication."""
    out = torch.zeros_like(x)
    for k in range(topk_idx.shape[1]):
        for expert in range(w1.shape[0]):
            chosen = (topk_idx[:, k] == expert).nonzero().squeeze(1)
            y = torch.tanh(x[chosen] @ w1[expert]) @ w2[expert]
            out = out.index_add(0, chosen, y * topk_weights[chosen, k : k + 1])
    return out


def experts_of(plan, rank):
    """Expert ids of this rank's segments: its own, then the copied ones (-1 = idle)."""
    copied = asarray(plan.experts_to_copy)[rank].tolist()
    return list(range(rank * len(copied), (rank + 1) * len(copied))) + copied


class Layer(torch.nn.Module):
    """An MoE layer whose ranks all hold all experts; each computes those that the plan gives it."""

    def __init__(self, buffer, w1, w2):
        super().__init__()
        self.buffer = buffer
        self.w1, self.w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)

    def forward(self, x, topk_idx, topk_weights, total_tokens=None):
        rank = self.buffer.group.rank
        sent = moe_dispatch(self.buffer, x, topk_idx, topk_weights, total_tokens=total_tokens)
        counts = asarray(sent.plan.num_tokens_per_expert).tolist()
        ends = sent.cu_seqlens.tolist()
        y, first = torch.zeros_like(sent.x), 0
        for expert, count, end in zip(experts_of(sent.plan, rank), counts, ends, strict=True):
            if count:
                rows = slice(first, first + count)
                computed = torch.tanh(sent.x[rows] @ self.w1[expert]) @ self.w2[expert]
                computed = computed * sent.topk_weights[rows, None]
                y = torch.cat([y[: rows.start], computed.to(y.dtype), y[rows.stop :]])
            first = end
        return moe_combine(self.buffer, y, sent.plan)


def problem(ranks, tokens, topk=3, experts=6, hidden=8, inner=5, seed=0, dtype=torch.float32):
    """Everybody's inputs: skewed, so that experts are copied; with -1 and with experts named twice."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    inputs = []
    for rank in range(ranks):
        s = tokens[rank]
        topk_idx = (torch.rand(s, topk, generator=random) ** 3 * (experts + 1)).long() - 1
        inputs.append(
            (normal(s, hidden).to(dtype), topk_idx, torch.rand(s, topk, generator=random), normal(s, hidden))
        )
    return inputs, normal(experts, hidden, inner).to(dtype) / 2, normal(experts, inner, hidden).to(dtype) / 2


def settings(tokens, topk=3, experts=6, hidden=8, dtype="float32", token_padding=4):
    return dict(
        num_tokens=max(max(tokens), 1),
        hidden=hidden,
        num_topk=topk,
        num_experts=experts,
        dtype=dtype,
        token_padding=token_padding,
    )


def place(group):
    """The torch device of a rank."""
    return torch.device("cpu") if group.device.kind == "cpu" else torch.device("cuda", group.device.index)


def run_layer(group, ranks, tokens, hint, dtype):
    """Output and gradients of one rank's part, as numpy."""
    inputs, w1, w2 = problem(ranks, tokens, dtype=TORCH_DTYPES[dtype])
    x, topk_idx, topk_weights, direction, w1, w2 = (t.to(place(group)) for t in (*inputs[group.rank], w1, w2))
    x, topk_weights = x.requires_grad_(), topk_weights.requires_grad_()
    with Buffer(group, **settings(tokens, dtype=dtype)) as buffer:
        layer = Layer(buffer, w1, w2)
        for _ in range(2):  # the second step accumulates: gradients double
            out = layer(x, topk_idx, topk_weights, sum(tokens) if hint else None)
            (out.float() * direction).sum().backward()
        buffer.check()
    assert type(out) is torch.Tensor and out.dtype == x.dtype
    found = out, x.grad / 2, topk_weights.grad / 2, layer.w1.grad, layer.w2.grad
    return [np.zeros(()) if grad is None else grad.detach().float().cpu().numpy() for grad in found]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("ranks, tokens", [(1, [5]), (2, [7, 3]), (3, [4, 0, 9])])
@pytest.mark.parametrize("hint", [False, True], ids=["capacity", "step"])
def test_layer_equals_the_dense_one(ranks, tokens, hint, dtype, tolerance):
    got = run_ranks(ranks, run_layer, ranks, tokens, hint, dtype)
    inputs, w1, w2 = problem(ranks, tokens, dtype=TORCH_DTYPES[dtype])
    w1, w2 = w1.float().requires_grad_(), w2.float().requires_grad_()
    for rank, (x, topk_idx, topk_weights, direction) in enumerate(inputs):
        x, topk_weights = x.float().requires_grad_(), topk_weights.requires_grad_()
        out = dense(x, topk_idx, topk_weights, w1, w2)
        (out * direction).sum().backward()
        for found, wanted in zip(got[rank], (out, x.grad, topk_weights.grad), strict=False):
            np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=tolerance, atol=tolerance)
    for i, weight in ((3, w1), (4, w2)):
        total = sum(got[rank][i] for rank in range(ranks)) / 2
        np.testing.assert_allclose(total, weight.grad.numpy(), rtol=tolerance * 4, atol=tolerance * 4)


def run_differences(group, ranks, tokens, steps):
    """Derivatives of this rank's share of the loss, a direction a step: (by autograd, by differences)."""
    inputs, w1, w2 = problem(ranks, tokens, seed=1)
    x, topk_idx, topk_weights, direction, w1, w2 = (t.to(place(group)) for t in (*inputs[group.rank], w1, w2))
    pairs = []
    with Buffer(group, **settings(tokens)) as buffer:
        layer = Layer(buffer, w1, w2)

        def loss(x, topk_weights):
            return (layer(x, topk_idx, topk_weights) * direction).sum()

        leaves = x.clone().requires_grad_(), topk_weights.clone().requires_grad_()
        grads = torch.autograd.grad(loss(*leaves), leaves)
        for step in range(steps):
            random = torch.Generator().manual_seed(10 * step + group.rank)
            noise = [torch.randn(leaf.shape, generator=random).to(leaf.device) for leaf in leaves]
            noise[step % 2].zero_()  # tokens alone, weights alone, in turn
            h = 1e-2
            with torch.no_grad():
                up = loss(x + h * noise[0], topk_weights + h * noise[1])
                down = loss(x - h * noise[0], topk_weights - h * noise[1])
            exact = sum((g * n).sum() for g, n in zip(grads, noise, strict=True))
            pairs.append((float(exact), float((up - down) / (2 * h))))
    return pairs


def test_finite_differences():
    results = run_ranks(3, run_differences, 3, [6, 2, 5], 6)
    for step in zip(*results, strict=True):
        exact, measured = (sum(values) for values in zip(*step, strict=True))
        assert abs(exact) > 0.1  # a gradient that is lost would show
        assert measured == pytest.approx(exact, rel=2e-3, abs=2e-3)


def run_misuse(group):
    with Buffer(group, **settings([4])) as buffer:
        on = {"device": place(group)}
        x = torch.ones(4, 8, requires_grad=True, **on)
        idx = torch.zeros(4, 3, dtype=torch.int64, **on)
        with pytest.raises(ValueError, match="exactly one of topk_idx and plan"):
            moe_dispatch(buffer, x)
        with pytest.raises(ValueError, match="x: .*requires gradient"):
            buffer.dispatch(x, idx)
        sent = moe_dispatch(buffer, x, idx)  # no route weights
        assert sent.topk_weights is None
        with pytest.raises(ValueError, match=rf"x: expected the {sent.x.shape[0]} rows .* got 3"):
            moe_combine(buffer, sent.x[:3], sent.plan)
        out = moe_combine(buffer, sent.x, sent.plan)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        assert torch.equal(grad, torch.full((4, 8), 18.0, **on))
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
        rows = torch.empty(buffer.row_capacity + 1, 8, **on)
        got = buffer.dispatch(x.detach(), idx, out=rows)
        assert got.x.data_ptr() == rows.data_ptr() and type(got.x) is torch.Tensor
        target = torch.empty(4, 8, **on)
        assert buffer.combine(rows, got.plan, out=target).x is target
        with pytest.raises(ValueError, match="out: expected C order"):
            buffer.combine(rows, got.plan, out=torch.empty(8, 4, **on).T)


def test_misuse():
    run_ranks(1, run_misuse)


def run_low_latency(group):
    """Dispatch as fp8 and combine, tensors all the way."""
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(3, 128, generator=generator).to(torch.bfloat16).to(place(group))
    idx = torch.tensor([[0, 2], [3, 1], [2, -1]], device=place(group))
    with MoECommunicator(
        group, num_experts=4, hidden_size=128, topk=2, max_tokens_per_rank=4, quant=QuantConfig()
    ) as moe:
        output, handle = moe.dispatch(x, idx)
        rows = output.tokens.float() * output.quant.block_scales
        counts = output.layout.num_tokens_per_expert
        valid = torch.arange(rows.shape[1], device=place(group)) < counts[:, None]
        rows = torch.where(valid[..., None], rows, 0).to(torch.bfloat16)
        target = torch.empty_like(x)
        back = moe.combine(rows, handle, out=target)
        moe.check()
    kinds = [type(t) is torch.Tensor for t in (output.tokens, output.quant.block_scales, counts, back)]
    wanted = x.float() * (idx >= 0).sum(1, keepdim=True)
    return (
        kinds,
        output.tokens.dtype,
        back is target,
        torch.allclose(back.float(), wanted, rtol=0.1, atol=0.02),
    )


def test_low_latency_gives_tensors_of_fp8():
    assert run_ranks(2, run_low_latency) == [([True] * 4, torch.float8_e4m3fn, True, True)] * 2


def test_no_torch_unless_asked():
    script = (
        "import sys, epcomm.arrays, epcomm.buffer, epcomm.group; print({'torch', 'jax'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "set()\n"


def test_the_table_is_what_makes_it_cheap():
    assert _dlpack.has_table(torch.Tensor) and not _dlpack.has_table(OldTensor)
