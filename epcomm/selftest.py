"""Tries everything in small: `python -m epcomm selftest`. Under a minute; every failure says what to do."""

import importlib.util
import subprocess
import sys
import time

import numpy as np

_STEP_SECONDS = 25  # time limit of a job of several processes


class _Skip(Exception):
    """A check that this machine has no use for; the text says why."""


def run():
    """Runs all checks, one line each; returns the exit code: 0 unless one failed."""
    failed = 0
    for name, check, advice in _checks():
        start = time.perf_counter()
        try:
            state, text = "ok", check()
        except _Skip as reason:
            state, text = "skipped", str(reason)
        except Exception as error:
            failed += 1
            state, text = "FAILED", f"{type(error).__name__}: {error}\n         to do: {advice}"
        print(f"{state:8} {name} ({time.perf_counter() - start:.1f} s): {text}", flush=True)
    print("selftest: all is well" if not failed else f"selftest: {failed} failed")
    return 1 if failed else 0


def _checks():
    """(name, function that returns what it found or raises, what to do if it raises)."""
    return (
        ("extensions", _extensions, "build them: pip install -e . (needs a C++ compiler)"),
        ("shared memory of CPU ranks", _cpu_memory, "does this container forbid memfds, or hide /proc?"),
        ("balanced step on 3 CPU ranks", _cpu_step, "report this with the output of python -m epcomm info"),
        ("several processes over MPI", _mpi_step, "try python -m mpi_launch -n 2 -m epcomm step"),
        ("CUDA", _cuda, "it needs a driver for CUDA 12.8 or later and epcomm[cuda12] or epcomm[cuda13]"),
        ("memory that GPUs can share", _cuda_memory, "is this container allowed to share GPU memory?"),
        (
            "balanced step on a GPU",
            _cuda_step,
            "is NVRTC there, the kernel cache writable? python -m epcomm info",
        ),
        (
            "balanced step on all GPUs",
            _all_gpus_step,
            "peer access? python -m epcomm info, nvidia-smi topo -m",
        ),
    )


def step_on_started_ranks():
    """One checked step on the ranks that a launcher started, or on one; returns the exit code."""
    from .group import Group

    with Group(timeout=_STEP_SECONDS) as group:
        text = step(group)
        if group.rank == 0:
            print(text)
    return 0


def step(group):
    """Collective. A small step (plan, dispatch, combine) with unequal ranks, compared with the reference.

    Returns: a sentence. Raises: RuntimeError naming what differs.
    """
    from . import reference
    from .buffer import Buffer
    from .dtypes import bfloat16

    ranks, topk, hidden, capacity, experts = group.size, 3, 264, 40, 4 * group.size
    random = np.random.default_rng(7)
    sizes = [capacity - 5 * rank % capacity for rank in range(ranks)]
    topk_idx = [random.integers(-1, experts, (s, topk)) ** 2 // experts for s in sizes]  # low ids are popular
    x = [random.standard_normal((s, hidden)).astype(bfloat16) for s in sizes]
    weights = [random.random((s, topk), np.float32) for s in sizes]
    plan = reference.plan(topk_idx, experts, capacity, token_padding=8)
    rows, row_weights = reference.dispatch(x, plan, weights)
    sums, _ = reference.combine(rows, plan, bfloat16)

    device, me = group.device, group.rank
    settings = {"num_tokens": capacity, "hidden": hidden, "num_topk": topk, "num_experts": experts}
    with Buffer(group, **settings, token_padding=8) as buffer:
        mine = [device.xp.asarray(values[me]) for values in (x, topk_idx, weights)]
        received = buffer.dispatch(*mine)
        combined = buffer.combine(received.x, received.plan)
        buffer.check()
        end = plan.ranks[me].cu_seqlens[-1]
        found = {
            "plan": (received.plan.dst, plan.ranks[me].dst),
            "dispatched rows": (received.x[:end], rows[me][:end]),
            "dispatched weights": (received.topk_weights[:end], row_weights[me][:end]),
            "sums": (combined.x, sums[me]),
        }
        wrong = [name for name, pair in found.items() if not np.array_equal(device.to_host(pair[0]), pair[1])]
        group.agree("step", {}, f"{' and '.join(wrong)} differ from the reference" if wrong else None)
    return (
        f"{sum(sizes)} tokens on {ranks} rank{'s' if ranks > 1 else ''} of {device}, equal to the reference"
    )


def _extensions():
    from .runtime import _fibers, _memfd

    return f"{len(_fibers.kernels())} kernels for the CPU; {_memfd.__name__} is there"


def _cpu_memory():
    from .info import handle_kinds
    from .runtime.cpu import CpuDevice

    return _require(handle_kinds(CpuDevice()))


def _cpu_step():
    from .testing import run_threads

    return run_threads(3, step, timeout=_STEP_SECONDS)[0]


def _mpi_step():
    from mpi_launch import mpirun

    if mpirun.find() is None or importlib.util.find_spec("mpi4py") is None:
        raise _Skip("MPI is not installed (pip install epcomm[mpi]): ranks as processes cannot be started")
    return _launch(2, "cpu")


def _cuda():
    _require_gpus()
    import cupy

    version = cupy.cuda.runtime.driverGetVersion()
    names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(_gpus())]
    return f"{', '.join(names)}; driver for CUDA {version // 1000}.{version % 1000 // 10}"


def _cuda_memory():
    _require_gpus()
    from .choice import make
    from .info import handle_kinds

    return _require(handle_kinds(make("cuda", 0)))


def _cuda_step():
    _require_gpus()
    from .comm import Alone
    from .group import Group

    with Group(Alone(), device="cuda:0", timeout=_STEP_SECONDS) as group:
        return step(group)


def _all_gpus_step():
    _require_gpus()
    if _gpus() == 1:
        raise _Skip("there is one")
    return _launch(_gpus(), "cuda")


def _launch(ranks, device):
    """`step` on processes."""
    words = ["-n", str(ranks), "--device", device, "--timeout", str(_STEP_SECONDS), "-m", "epcomm", "step"]
    job = subprocess.run([sys.executable, "-m", "mpi_launch", *words], capture_output=True, text=True)
    if job.returncode:
        lines = (job.stderr or job.stdout).strip().splitlines()
        raise RuntimeError(f"exit code {job.returncode}: {' | '.join(lines[-4:])}")
    return job.stdout.strip().splitlines()[-1]


def _require(kinds):
    """The kinds of handles that work, as text; one of them must."""
    if "works" not in kinds.values():
        raise RuntimeError("; ".join(f"{kind}: {state}" for kind, state in kinds.items()))
    return "; ".join(f"{kind} {state}" for kind, state in kinds.items())


def _gpus():
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


def _require_gpus():
    if importlib.util.find_spec("cupy") is None:
        raise _Skip("CuPy is not installed; the CPU device needs none")
    from mpi_launch import gpus

    if gpus.probe()[1] == 0:
        raise _Skip("no usable GPU (compute capability 9.0 or more, driver for CUDA 12 or later)")
