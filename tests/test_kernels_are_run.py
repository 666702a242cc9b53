"""The CPU device runs the kernels of kernels_cu, nothing that stands in for them: wrong constants are seen.

A copy of the package gets three of them, one each in plan, dispatch and combine. Each spoils something that
nothing else is computed from, so the results must differ from the oracle's in three places and nowhere else.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_buffer import settings_of, step

from epcomm import dtypes, reference
from epcomm.testing import run_threads

ROOT = Path(__file__).resolve().parent.parent
CORRUPTIONS = [
    (
        "plan_balance.cuh",
        "experts_to_copy[rank * epn + slot] = -1",
        "experts_to_copy[rank * epn + slot] = -7",
    ),
    ("dispatch.cu", "a.row_weights[row] = 0.f", "a.row_weights[row] = 0.5f"),  # of pad rows
    ("combine.cu", "f32 weight = 0.f", "f32 weight = 0.25f"),  # of masked entries
]
SPOILT = ["combine: topk_weights", "dispatch: topk_weights", "plan: experts_to_copy"]


def differences():
    """Names of the results that differ from the oracle's."""
    settings, found = settings_of(), set()
    results = run_threads(2, step, settings, [("masked", [24, 7]), ("skewed", [3, 24])])
    for call in range(2):
        at = [rank[call] for rank in results]
        plan = reference.plan([r["topk_idx"] for r in at], 16, 24, 8)
        rows, weights = reference.dispatch([r["x"] for r in at], plan, [r["weights"] for r in at])
        sums, weights_back = reference.combine(rows, plan, dtypes.bfloat16, weights)
        for rank, r in enumerate(at):
            own, used = plan.ranks[rank], int(plan.ranks[rank].cu_seqlens[-1])
            pairs = {
                "plan: dst": (r["plan"]["dst"], own.dst),
                "plan: cu_seqlens": (r["plan"]["cu_seqlens"], own.cu_seqlens),
                "plan: experts_to_copy": (r["plan"]["experts_to_copy"], plan.experts_to_copy),
                "dispatch: x": (r["rows"][:used], rows[rank][:used]),
                "dispatch: topk_weights": (r["row_weights"][:used], weights[rank][:used]),
                "combine: x": (r["out"], sums[rank]),
                "combine: topk_weights": (r["weights_back"], weights_back[rank]),
            }
            found |= {name for name, (got, want) in pairs.items() if not np.array_equal(got, want)}
    return sorted(found)


def corrupted_copy(folder):
    """A copy of the package and its tests, built from kernels with wrong constants."""
    leave = shutil.ignore_patterns("__pycache__", "_fibers*.so", "_fibers.cpp", "interop")
    for name in ("epcomm", "kernels_cu", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    for name in ("setup.cfg", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    for name, right, wrong in CORRUPTIONS:
        path = folder / "kernels_cu" / name
        assert path.read_text().count(right) == 1, (
            f"{name}: {right!r} is there no more: corrupt something else"
        )
        path.write_text(path.read_text().replace(right, wrong))
    # Only the extension with the kernels, and compiled faster.
    heading = "[[tool.setuptools.ext-modules]]"
    head, *extensions = (ROOT / "pyproject.toml").read_text().split(heading)
    (kernels,) = (text for text in extensions if '"epcomm.runtime._fibers"' in text)
    settings = head + heading + kernels.partition("\n[tool.")[0].replace('"-O2"', '"-O1"')
    (folder / "pyproject.toml").write_text(settings.replace(', "mpi_launch"', ""))
    run(folder, "-W", "ignore", "-c", "from setuptools import setup; setup()", "build_ext", "--inplace")
    return folder


def run(folder, *words, returncode=0):
    path = os.pathsep.join((str(folder), str(folder / "tests")))
    environ = os.environ | {"PYTHONPATH": path, "EPCOMM_DEVICE": "cpu"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_wrong_constants_are_seen_where_they_are_and_nowhere_else(tmp_path):
    assert differences() == []
    folder = corrupted_copy(tmp_path)
    program = "import json, test_kernels_are_run as t; print(json.dumps(t.differences()))"
    assert json.loads(run(folder, "-c", program)) == SPOILT
    suite = run(
        folder,
        "-m",
        "pytest",
        "-q",
        "tests/test_buffer.py",
        "-k",
        "steps_equal_the_oracle and 2",
        returncode=1,
    )
    assert "experts_to_copy" in suite and "1 failed" in suite
