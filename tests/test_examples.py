"""Every script of examples/ runs as its first lines say, alone and with what an installed package has."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import device_count, on_gpus

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES_FOLDER = ROOT / "examples"
MOST_LINES = 100
LIBRARIES = {"epcomm", "numpy", "ml_dtypes", "matplotlib", "cupy", "torch", "jax"}
PARTS = EXAMPLES_FOLDER / "moe"  # what several scripts share


class Example(NamedTuple):
    """A pattern that every line of output matches, the package that it needs beside epcomm's own, its
    arguments and the files that it leaves. What a rank prints begins with "rank N"; other lines are rank 0's.
    """

    pattern: str
    needs: str | None = None
    words: tuple = ()
    files: tuple = ()


_ERROR = r"[\d.]+e-\d+"
EXAMPLES = {
    "hello": Example(r"rank \d on .*: 1024 rows, copies of experts \[\d?\], right"),
    "decode_graph": Example(r"rank \d: 20 steps, (one graph|the same step, eager), right"),
    "low_latency_fp8": Example(r"rank \d: 1(12|24) rows received as FP8_E4M3, right"),
    "two_groups": Example(r"rank \d of 2, \d of 2 in its pair: right"),
    "routing_trace": Example(r"made_up\.npz: .* MaxVio 4\.91|rows a rank, .*: +\[\d+, \d+\], .*"),
    "moe_layer": Example(
        rf"\w+ on 2 x \w+, [1-9] experts copied: out {_ERROR}, x {_ERROR}, gate .*, router {_ERROR}|"
        rf"OK: largest relative errors {_ERROR} in float32, {_ERROR} in bfloat16"
    ),
    "train_tiny_moe": Example(
        rf"step +\d+: loss (4\.9|4\.[0-3]|3\.)\d+ on 2 ranks, .* on one|"
        rf"OK: losses differ by at most {_ERROR}, allowed {_ERROR}",
        words=("20",),
        files=("train_tiny_moe.png",) if importlib.util.find_spec("matplotlib") else (),
    ),
    "torch_layer": Example(
        r"rank \d on .*: 3 steps, sums and gradients as of the dense layer", needs="torch"
    ),
    "jax_inputs": Example(r"rank \d on .*: (numpy|cupy) in between, JAX back, right", needs="jax"),
}


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
    assert {path.stem for path in EXAMPLES_FOLDER.glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, tmp_path):
    example = EXAMPLES[name]
    if example.needs:
        need(example.needs)
    if on_gpus() and device_count() < 2:
        pytest.skip("needs 2 devices")
    out, err = start(2, str(EXAMPLES_FOLDER / f"{name}.py"), *example.words, folder=tmp_path)
    lines = out.splitlines()
    assert lines and all(re.fullmatch(example.pattern, line) for line in lines), out
    assert sorted(re.findall(r"^rank (\d)", out, re.M)) in (["0", "1"], [])
    assert "Warning" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(example.files)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_says_how_it_is_started(name):
    docstring = ast.get_docstring(ast.parse((EXAMPLES_FOLDER / f"{name}.py").read_text()))
    assert f"python -m mpi_launch -n 2 examples/{name}.py" in docstring


@pytest.mark.parametrize(
    "path",
    [*(EXAMPLES_FOLDER / f"{name}.py" for name in EXAMPLES), *sorted(PARTS.glob("*.py"))],
    ids=lambda path: str(path.relative_to(EXAMPLES_FOLDER)),
)
def test_example_is_short_and_stands_alone(path):
    source = path.read_text()
    assert len(source.splitlines()) < MOST_LINES
    tree = ast.parse(source)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(node.module)
    top = {module.partition(".")[0] for module in modules}
    assert top <= LIBRARIES | sys.stdlib_module_names | {PARTS.name}
    assert not [module for module in modules if re.match(r"epcomm\.(?!torch|testing)", module)]


def test_a_trace_is_read(tmp_path):
    """Any file that np.savez wrote; one recorded on other ranks is refused in words."""
    import numpy as np

    path = tmp_path / "trace.npz"
    np.savez(path, topk_idx=np.array([[[0, -1], [0, 2]], [[0, 1], [0, 3]], [[0, 1], [-1, -1]]]))
    example = str(EXAMPLES_FOLDER / "routing_trace.py")
    if not on_gpus() or device_count() >= 3:
        out, _ = start(3, example, str(path), folder=tmp_path)
        assert out.splitlines()[1:] == [
            "rows a rank, experts at home: [7, 2, 0], the fullest has 2.33 of the mean",
            "rows a rank, balanced:        [3, 3, 3], with 2 copies of experts",
        ]
    with pytest.raises(AssertionError, match=r"trace\.npz was recorded on 3 ranks: start 3, not 1"):
        start(1, example, str(path), folder=tmp_path)


@pytest.mark.parametrize("ranks", [1, 3])
def test_moe_layer_on_any_number_of_ranks(ranks, tmp_path):
    if on_gpus() and device_count() < ranks:
        pytest.skip(f"needs {ranks} devices")
    out, _ = start(ranks, str(EXAMPLES_FOLDER / "moe_layer.py"), folder=tmp_path)
    assert re.fullmatch(EXAMPLES["moe_layer"].pattern.rpartition("|")[2], out.splitlines()[-1])


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Scripts of examples/ as modules, run in this process as a group of one."""
    monkeypatch.syspath_prepend(str(EXAMPLES_FOLDER))
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module
    for name in [name for name in sys.modules if name.partition(".")[0] in {*EXAMPLES, PARTS.name}]:
        del sys.modules[name]


def test_a_wrong_gradient_ends_with_an_exit_code(alone, monkeypatch, capfd):
    layer = alone("moe_layer")
    assert layer.main() == 0
    assert re.search(r"^OK: largest relative errors", capfd.readouterr().out, re.M)
    monkeypatch.setattr(alone("moe.experts"), "sigmoid", lambda xp, x: xp.ones_like(x))
    assert layer.main() == 1
    assert re.search(r"^wrong: largest relative errors", capfd.readouterr().out, re.M)


def test_losses_that_drift_apart_end_with_an_exit_code(alone, monkeypatch, capfd):
    script = alone("train_tiny_moe")
    assert script.main(steps=3) == 0
    step, calls = alone("moe.language_model").LanguageModel.step, []

    def drifts(self, context, target, batch, rate):
        calls.append(rate)
        return step(self, context, target, batch, rate * (1 + 1e-3 * (len(calls) > 3)))

    monkeypatch.setattr(alone("moe.language_model").LanguageModel, "step", drifts)
    assert script.main(steps=3) == 1
    assert re.search(r"^wrong: losses differ by at most", capfd.readouterr().out, re.M)
