"""DeepEP v2: expanded dispatch and reduced combine of `deep_ep.ElasticBuffer`. Needs torch and deep_ep.

Arrays go in through DLPack. CuPy and torch both work on the default stream, which waits for DeepEP's own
stream, so the events of the harness stand around its work.
"""

import importlib.util
import socket


def missing(group):
    """Why this library cannot run here, or None."""
    absent = [name for name in ("torch", "deep_ep") if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed ({', '.join(absent)})"
    return None if group.device.kind == "cuda" else "GPUs only"


class Library:
    """See bench.libs. Its planning cannot be called alone: it is what a dispatch without a handle takes
    longer.
    """

    def __init__(self, group, shape):
        import deep_ep
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.group = group
        self.shape = shape
        self.device = torch.device("cuda", group.device.index)
        torch.cuda.set_device(self.device)
        address, port = group.comm.bcast(_free_address() if group.rank == 0 else None)
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://{address}:{port}",
            rank=group.rank,
            world_size=group.size,
            device_id=self.device,
        )
        ranks = dist.new_group(list(range(group.size)))
        dist.barrier(ranks)  # the first collective makes the NCCL communicator that DeepEP borrows
        self.buffer = deep_ep.ElasticBuffer(
            ranks,
            num_max_tokens_per_rank=shape.num_tokens,
            hidden=shape.hidden,
            num_topk=shape.num_topk,
            deterministic=False,
            allow_hybrid_mode=True,
            allow_multiple_reduction=True,
            prefer_overlap_with_compute=False,
            explicitly_destroy=True,
        )

    def load(self, topk_idx, x, topk_weights):
        self.topk_idx = self._tensor(topk_idx).to(self.torch.int64)
        self.x = self._tensor(x)
        self.topk_weights = self._tensor(topk_weights)
        self.dispatch_forward()

    def _tensor(self, array):
        return self.torch.from_dlpack(array)

    def operations(self):
        return {
            "d_f": self.dispatch_forward,
            "d_b": self.dispatch_backward,
            "c_f": self.combine,
            "c_b": lambda: self.combine(self.row_weights),
        }

    def dispatch_forward(self):
        self.rows, _, self.row_weights, self.handle, _ = self.buffer.dispatch(
            self.x,
            topk_idx=self.topk_idx,
            topk_weights=self.topk_weights,
            num_experts=self.shape.num_experts,
            num_max_tokens_per_rank=self.shape.num_tokens,
            expert_alignment=self.shape.token_padding,
            num_sms=self.shape.num_sms or 0,
            do_handle_copy=True,
            do_cpu_sync=False,
            do_expand=True,
        )

    def dispatch_backward(self):
        self.buffer.dispatch(
            self.x,
            handle=self.handle,
            num_experts=self.shape.num_experts,
            num_max_tokens_per_rank=self.shape.num_tokens,
            expert_alignment=self.shape.token_padding,
            num_sms=self.shape.num_sms or 0,
            do_cpu_sync=False,
            do_expand=True,
            do_zero_padding=True,
        )

    def combine(self, row_weights=None):
        out, _, _ = self.buffer.combine(
            self.rows, handle=self.handle, topk_weights=row_weights, num_sms=self.shape.num_sms or 0
        )
        return out

    def round_trip(self):
        self.dispatch_forward()
        return self.group.device.xp.from_dlpack(self.combine())

    def figures(self, session):
        return {}

    def close(self):
        self.rows = self.handle = None
        self.buffer.destroy()
        self.dist.destroy_process_group()
        self.torch.cuda.empty_cache()


def _free_address():
    """(host, port) for torch's rendezvous; the port is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()
