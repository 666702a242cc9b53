"""A MoE layer of torch over epcomm, trained for a few steps, checked against the same layer on one process.

    python -m mpi_launch -n 2 examples/torch_layer.py

Each rank holds E / R experts, matrices in an ExpertPool. A step fetches its copies of experts before they
run; the gradients of the copies go home after the backward pass.
"""

import torch

import epcomm
from epcomm.torch import moe_combine, moe_dispatch

TOKENS, HIDDEN, TOPK, STEPS = 64, 32, 2, 3


def tensor(array):
    """A torch tensor over the same memory."""
    return torch.from_dlpack(epcomm.to_dlpack(array))


class MoE(torch.nn.Module):
    def __init__(self, buffer, device):
        super().__init__()
        self.buffer = buffer
        self.router = torch.nn.Linear(buffer.hidden, buffer.num_experts, bias=False, device=device)
        self.weights = epcomm.ExpertPool(buffer, (buffer.hidden, buffer.hidden), "float32")
        self.grads = epcomm.ExpertPool(buffer, (buffer.hidden, buffer.hidden), "float32")
        self.experts = tensor(self.weights.compute).requires_grad_()  # own experts, then the slots of copies
        self.experts.grad = tensor(self.grads.compute)  # backward adds into it

    def forward(self, x):
        topk_weights, topk_idx = self.router(x).softmax(dim=1).topk(self.buffer.num_topk)
        self.plan = self.buffer.plan(topk_idx)
        self.buffer.prefetch_weight(self.plan, self.weights)
        rows = moe_dispatch(self.buffer, x, topk_weights=topk_weights, plan=self.plan)
        ends = rows.cu_seqlens.tolist()  # waits for the device; a grouped GEMM reads rows.cu_seqlens there
        parts = [rows.x[a:b] @ w for a, b, w in zip([0, *ends], ends, self.experts, strict=False)]
        parts.append(rows.x[ends[-1] :] * 0)  # rows behind the last segment: combine does not look at them
        return moe_combine(self.buffer, torch.cat(parts) * rows.topk_weights[:, None], self.plan)

    def dense(self, x, experts):
        """The same on one process, with all experts [E, H, H]."""
        topk_weights, topk_idx = self.router(x).softmax(dim=1).topk(self.buffer.num_topk)
        return torch.einsum("tk,th,tkhj->tj", topk_weights, x, experts[topk_idx])


def main():
    shape = {"num_tokens": TOKENS, "hidden": HIDDEN, "num_topk": TOPK, "dtype": "float32"}
    with epcomm.Group() as group, epcomm.Buffer(group, num_experts=4 * group.size, **shape) as buffer:
        torch.manual_seed(0)  # the router is the same on all ranks
        layer = MoE(buffer, device=str(group.device))
        torch.manual_seed(group.rank)
        own = slice(buffer.experts_per_rank)
        with torch.no_grad():
            layer.experts[own].normal_(std=HIDDEN**-0.5)
        group.barrier()  # before others read them
        for _ in range(STEPS):
            x = torch.randn(TOKENS, HIDDEN, device=str(group.device))
            y = layer(x)
            everybody = tensor(layer.weights.full)[: buffer.num_experts].clone().requires_grad_()
            dense = layer.dense(x, everybody)
            torch.testing.assert_close(y, dense, atol=1e-5, rtol=1e-4)
            y.square().sum().backward()
            buffer.reduce_grad(layer.plan, layer.grads)  # clears the slots
            wanted = torch.autograd.grad(dense.square().sum(), everybody)[0].cpu()
            wanted = sum(group.comm.allgather(wanted)).chunk(group.size)[group.rank]
            torch.testing.assert_close(layer.experts.grad[own].cpu(), wanted, atol=1e-4, rtol=1e-4)
            with torch.no_grad():
                layer.experts[own] -= 1e-3 * layer.experts.grad[own]
                layer.experts.grad[own] = 0
        buffer.check()
        print(f"rank {group.rank} on {group.device}: {STEPS} steps, sums and gradients as of the dense layer")
        layer.weights.close()
        layer.grads.close()


if __name__ == "__main__":
    main()
