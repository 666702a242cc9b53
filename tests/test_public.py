"""What users rely on: the public names, their signatures and docstrings, and an import that costs nothing."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import epcomm

SIGNATURES = {
    "Group": "(comm=None, *, device=None, timeout=100.0)",
    "Buffer": "(group, *, num_tokens, hidden, num_topk, num_experts, dtype='bfloat16', num_sms=None, "
    "token_padding=128)",
    "Buffer.plan": "(topk_idx, *, stream=None)",
    "Buffer.dispatch": "(x, topk_idx=None, topk_weights=None, *, plan=None, total_tokens=None, out=None, "
    "zero_copy=False, zero_copy_weights=False, async_finish=False, stream=None)",
    "Buffer.combine": "(x, plan, *, row_weights=None, out=None, zero_copy=False, zero_copy_weights=False, "
    "async_finish=False, stream=None)",
    "Buffer.prefetch_weight": "(plan, *pools, async_finish=False, stream=None)",
    "Buffer.reduce_grad": "(plan, *pools, async_finish=False, stream=None)",
    "Buffer.check": "()",
    "Buffer.memory": "()",
    "Buffer.destroy": "()",
    "ExpertPool": "(buffer, shape, dtype)",
    "MoECommunicator": "(group, *, num_experts, hidden_size, topk, max_tokens_per_rank, "
    "num_local_experts=None, mode=MoEMode.LOW_LATENCY, output_layout=DispatchLayout.EXPERT_MAJOR, "
    "combine_mode=CombineMode.RANK_LOCAL_REDUCE, quant=None, num_blocks=None)",
    "MoECommunicator.dispatch": "(x, topk_idx, topk_weights=None, *, output_buffer=None, stream=None)",
    "MoECommunicator.combine": "(expert_output, handle, *, out=None, stream=None)",
    "MoECommunicator.is_available": "()",
    "MoECommunicator.is_internode_available": "()",
    "MoECommunicator.check": "()",
    "MoECommunicator.memory": "()",
    "MoECommunicator.destroy": "()",
    "QuantConfig": "(format=DispatchDataType.FP8_E4M3, *, power_of_two_scales=False)",
    "asarray": "(x)",
    "to_dlpack": "(x, *, dtype=None)",
}
FIELDS = {
    "Dispatched": ("x", "topk_weights", "cu_seqlens", "plan", "event"),
    "Combined": ("x", "topk_weights", "event"),
    "DispatchOutput": ("tokens", "layout", "quant", "topk_idx", "topk_weights"),
}
COMM_PROTOCOL = ("Get_rank", "Get_size", "allgather", "bcast", "Barrier", "Ibarrier", "Split")
CONTEXT_MANAGERS = ("Group", "Buffer", "ExpertPool", "MoECommunicator")
OWNERS_WITH_BOTH_NAMES = ("Buffer", "MoECommunicator")


def shape_of(signature):
    """Names, kinds and defaults; annotations are not compared."""
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    owner, _, method = name.partition(".")
    found = getattr(epcomm, owner)
    found = getattr(found, method) if method else found
    space = {n: getattr(epcomm, n) for n in epcomm.__all__}  # what defaults are made of
    exec(f"def wanted{SIGNATURES[name]}: pass", space)
    assert shape_of(inspect.signature(found)) == shape_of(inspect.signature(space["wanted"]))


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_results(name):
    kind = getattr(epcomm, name)
    fields = getattr(kind, "_fields", None) or tuple(inspect.signature(kind).parameters)
    assert fields == FIELDS[name]


@pytest.mark.parametrize("name", CONTEXT_MANAGERS)
def test_owners_are_context_managers(name):
    kind = getattr(epcomm, name)
    assert hasattr(kind, "__enter__") and hasattr(kind, "__exit__") and hasattr(kind, "close")
    if name in OWNERS_WITH_BOTH_NAMES:
        assert kind.destroy is kind.close


def modules():
    """All modules that can be imported without a framework."""
    names = ["epcomm"] + [m.name for m in pkgutil.walk_packages(epcomm.__path__, "epcomm.")]
    return [importlib.import_module(n) for n in names if n not in ("epcomm.torch", "epcomm.__main__")]


def undocumented(owner, name):
    """Names at and below `owner` that a user sees and that say nothing."""
    if not inspect.getdoc(owner):
        yield name
    if inspect.isclass(owner):
        for key, value in vars(owner).items():
            if key.startswith("_"):
                continue
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if key in COMM_PROTOCOL or re.search(rf"\b{key}\b", owner.__doc__ or ""):
                continue  # mpi4py documents the one, an "Attributes:" section the other
            if (inspect.isfunction(value) or isinstance(value, property)) and not inspect.getdoc(value):
                yield f"{name}.{key}"


def test_every_public_name_has_a_docstring():
    missing = []
    for module in modules():
        missing += undocumented(module, module.__name__)
        for key, value in vars(module).items():
            here = getattr(value, "__module__", None) == module.__name__
            if not key.startswith("_") and here and (inspect.isclass(value) or inspect.isroutine(value)):
                missing += undocumented(value, f"{module.__name__}.{key}")
    assert not missing


def test_all_names_can_be_had():
    assert sorted(epcomm.__all__) == list(epcomm.__all__)
    for name in epcomm.__all__:
        assert getattr(epcomm, name).__name__ == name
        assert name in dir(epcomm)
    with pytest.raises(AttributeError, match="no attribute 'Bufer'"):
        epcomm.Bufer  # noqa: B018


def run_fresh(script):
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_import_is_quick_and_loads_nothing_that_is_not_asked_for():
    script = """
import json, sys, time
start = time.process_time()
import epcomm
took = time.process_time() - start
heavy = [n for n in ("numpy", "torch", "jax", "cupy", "mpi4py.MPI") if n in sys.modules]
import epcomm.buffer, epcomm.group, epcomm.arrays, epcomm.testing, epcomm.reference
later = [n for n in ("torch", "jax", "cupy", "mpi4py.MPI") if n in sys.modules]
print(json.dumps([took, heavy, later]))
"""
    runs = [run_fresh(script) for _ in range(3)]
    assert all(heavy == [] and later == [] for _, heavy, later in runs)
    assert min(took for took, _, _ in runs) < 0.3


def test_arrays_of_the_cpu_device_need_no_framework():
    script = """
import json, sys, numpy, epcomm
epcomm.asarray(epcomm.to_dlpack(numpy.zeros(4, epcomm.dtypes.bfloat16)))
print(json.dumps([n for n in ("torch", "jax", "cupy") if n in sys.modules]))
"""
    assert run_fresh(script) == []
    assert epcomm.asarray(np.zeros(3, np.float32)).dtype == np.float32


def test_stubs_name_what_the_extensions_have():
    runtime = Path(epcomm.__file__).parent / "runtime"
    stubs = list(runtime.glob("*.pyi"))
    assert stubs and (runtime.parent / "py.typed").exists()
    for stub in stubs:
        module = importlib.import_module(f"epcomm.runtime.{stub.stem}")
        definitions = (ast.FunctionDef, ast.ClassDef)
        written = {n.name: n for n in ast.parse(stub.read_text()).body if isinstance(n, definitions)}
        there = {n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
        assert set(written) == {n for n in there if not n.startswith("_")}
        for name, node in written.items():
            members = [n.name for n in node.body if isinstance(n, definitions)]
            missing = [m for m in members if not hasattr(getattr(module, name), m)]
            assert set(missing) <= {"__buffer__"}  # C has that slot; Python shows it from 3.12 on
