"""Every script of examples/ runs as its first lines say, alone and with what an installed package has."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import device_count, on_gpus

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 80
LIBRARIES = {"epcomm", "numpy", "ml_dtypes", "cupy", "torch", "jax"}

# Script: (the package that it needs beside epcomm's own, a pattern that every line of output matches).
# What a rank prints begins with "rank N"; other lines are rank 0's.
EXAMPLES = {
    "hello": (None, r"rank \d on .*: 1024 rows, copies of experts \[\d?\], right"),
    "decode_graph": (None, r"rank \d: 20 steps, (one graph|the same step, eager), right"),
    "low_latency_fp8": (None, r"rank \d: 1(12|24) rows received as FP8_E4M3, right"),
    "two_groups": (None, r"rank \d of 2, \d of 2 in its pair: right"),
    "routing_trace": (None, r"made_up\.npz: .* MaxVio 4\.91|rows a rank, .*: +\[\d+, \d+\], .*"),
    "torch_layer": ("torch", r"rank \d on .*: 3 steps, sums and gradients as of the dense layer"),
    "jax_inputs": ("jax", r"rank \d on .*: (numpy|cupy) in between, JAX back, right"),
}
LAYER = "moe_layer"  # longer, with parts of its own


def start(ranks, *words, folder):
    """Output of `python -m mpi_launch -n RANKS WORDS`; the job's errors fail the test."""
    done = subprocess.run(
        [sys.executable, "-m", "mpi_launch", "-n", str(ranks), "--timeout", "100", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def need(package):
    """Skips where a package is missing, or cannot use the GPUs of this run."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    if not on_gpus():
        return
    asks = {"torch": "torch.zeros(1, device='cuda')", "jax": "jax.devices('cuda')"}
    done = subprocess.run([sys.executable, "-c", f"import {package}; {asks[package]}"], capture_output=True)
    if done.returncode:
        pytest.skip(f"needs {package} with CUDA")


def test_the_table_is_complete():
    assert {path.stem for path in (ROOT / "examples").iterdir() if path.suffix == ".py"} == {*EXAMPLES, LAYER}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    package, pattern = EXAMPLES[name]
    if package:
        need(package)
    if on_gpus() and device_count() < 2:
        pytest.skip("needs 2 devices")
    out, err = start(2, str(ROOT / "examples" / f"{name}.py"), folder=tmp_path)
    lines = out.splitlines()
    assert lines and all(re.fullmatch(pattern, line) for line in lines), out
    assert sorted(re.findall(r"^rank (\d)", out, re.M)) in (["0", "1"], [])
    assert "Warning" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short_and_stands_alone(name):
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert len(source.splitlines()) < MOST_LINES
    tree = ast.parse(source)
    assert f"python -m mpi_launch -n 2 examples/{name}.py" in ast.get_docstring(tree)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    top = {module.partition(".")[0] for module in modules}
    assert top <= LIBRARIES | sys.stdlib_module_names
    assert not [module for module in modules if re.match(r"epcomm\.(?!torch|testing)", module)]


def test_a_trace_is_read(tmp_path):
    """Any file that np.savez wrote; one recorded on other ranks is refused in words."""
    import numpy as np

    path = tmp_path / "trace.npz"
    np.savez(path, topk_idx=np.array([[[0, -1], [0, 2]], [[0, 1], [0, 3]], [[0, 1], [-1, -1]]]))
    example = str(ROOT / "examples" / "routing_trace.py")
    if not on_gpus() or device_count() >= 3:
        out, _ = start(3, example, str(path), folder=tmp_path)
        assert out.splitlines()[1:] == [
            "rows a rank, experts at home: [7, 2, 0], the fullest has 2.33 of the mean",
            "rows a rank, balanced:        [3, 3, 3], with 2 copies of experts",
        ]
    with pytest.raises(AssertionError, match=r"trace\.npz was recorded on 3 ranks: start 3, not 1"):
        start(1, example, str(path), folder=tmp_path)


@pytest.mark.parametrize("ranks", [1, 3])
def test_moe_layer_computes(ranks, tmp_path):
    """Forward and backward equal one rank's in float64, on one rank and on several."""
    if on_gpus() and device_count() < ranks:
        pytest.skip(f"needs {ranks} devices")
    out, _ = start(ranks, str(ROOT / "examples" / f"{LAYER}.py"), folder=tmp_path)
    assert re.fullmatch(r"OK: largest relative errors \S+ in float32, \S+ in bfloat16", out.splitlines()[-1])
