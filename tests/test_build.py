"""The source tree as a package: a wheel through an sdist, what it holds and needs, what rebuilds what."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTENSIONS = {e["name"]: e for e in SETTINGS["tool"]["setuptools"]["ext-modules"]}
KERNELS = sorted(
    path for path in (ROOT / "kernels_cu").rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp")
)


def run(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source_tree(folder):
    """A copy of what belongs to the package, without anything that was built."""
    leave = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in ("epcomm", "kernels_cu", "mpi_launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    for name in ("pyproject.toml", "setup.cfg", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    for pyx in (folder / "epcomm").rglob("*.pyx"):
        for generated in (pyx.with_suffix(".c"), pyx.with_suffix(".cpp")):
            generated.unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return source_tree(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    """Built as pip does from a published sdist: what the sdist lacks, the wheel cannot have."""
    out = tmp_path_factory.mktemp("dist")
    build_sdist = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-W", "ignore", "-c", build_sdist, str(out), cwd=tree)
    (sdist,) = out.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*pip, "-w", str(out), str(sdist))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with the wheel, NumPy and ml_dtypes (lent by this one), no more."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    interpreter = folder / "bin" / "python"
    site = Path(run(interpreter, "-c", "import site; print(site.getsitepackages()[0])").strip())
    for name in ("numpy", "ml_dtypes"):
        package = Path(find_spec(name).submodule_search_locations[0])
        for part in package.parent.glob(f"{name}*"):  # with the libraries beside it
            (site / part.name).symlink_to(part)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(interpreter),
        "install",
        "--no-index",
        "--no-deps",
        str(wheel),
    )
    return interpreter


def build_in_place(folder):
    """What the build prints."""
    program = "from setuptools import setup; setup()"
    return run(sys.executable, "-W", "ignore", "-c", program, "build_ext", "--inplace", cwd=folder)


def in_wheel(python, program, folder):
    """Output of `program` in the environment, run where no source tree is near."""
    environ = {"PATH": "", "HOME": str(folder)}
    return run(str(python), "-c", program, cwd=folder, env=environ)


@pytest.mark.timeout(300)
def test_wheel_has_all_and_only_what_runs(python, tmp_path):
    program = "import epcomm, pathlib; print(pathlib.Path(epcomm.__file__).parent)"
    package = Path(in_wheel(python, program, tmp_path).strip())
    assert ROOT not in package.parents
    found = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    found = {name for name in found if "__pycache__" not in name}
    wanted = {str(path.relative_to(ROOT)) for path in KERNELS}
    for pattern in ("*.py", "*.pyi", "py.typed"):
        wanted |= {str(path.relative_to(ROOT / "epcomm")) for path in (ROOT / "epcomm").rglob(pattern)}
    extensions = {name for name in found if name.endswith(".so")}
    assert {re.sub(r"\.cpython.*", "", name) for name in extensions} == {
        name.removeprefix("epcomm.").replace(".", "/") for name in EXTENSIONS
    }
    assert found - extensions == wanted
    launcher = {path.name for path in (package.parent / "mpi_launch").glob("*.py")}
    assert launcher == {path.name for path in (ROOT / "mpi_launch").glob("*.py")}


@pytest.mark.timeout(300)
def test_installed_package_runs_alone(python, tmp_path):
    """A whole step where there is no CuPy, no MPI and no torch; the kernels are those inside the package."""
    program = """
import importlib.util, sys
for name in ("cupy", "mpi4py", "torch", "Cython", "setuptools"):
    assert importlib.util.find_spec(name) is None, name
import numpy as np
import epcomm
from epcomm.runtime import kernel_dir
assert kernel_dir().parent == __import__("pathlib").Path(epcomm.__file__).parent, kernel_dir()
with epcomm.Group() as group, epcomm.Buffer(
    group, num_tokens=16, hidden=64, num_topk=2, num_experts=8, dtype="float32"
) as buffer:
    x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    got = buffer.dispatch(x, np.arange(32).reshape(16, 2) % 8)
    back = buffer.combine(got.x, got.plan)
    assert (back.x == 2 * x).all()
print(group.size, group.device)
"""
    assert in_wheel(python, program, tmp_path) == "1 cpu\n"


@pytest.mark.timeout(300)
def test_installed_launcher(python, tmp_path):
    environ = {"PATH": "", "HOME": str(tmp_path)}
    (tmp_path / "script.py").write_text("import epcomm\nprint(epcomm.Group().size)\n")
    assert run(str(python), "-m", "mpi_launch", "-n", "1", "script.py", cwd=tmp_path, env=environ) == "1\n"
    done = subprocess.run(
        [python, "-m", "mpi_launch", "-n", "2", "script.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "pip install epcomm[mpi]" in done.stderr


def test_import_loads_nothing_heavy():
    """Not even where CuPy, mpi4py and torch are installed."""
    program = "import sys, epcomm; print(*{'cupy', 'mpi4py', 'torch', 'jax'} & set(sys.modules))"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    assert run(sys.executable, "-c", program, env=environ) == "\n"


def test_every_source_rebuilds_its_extension():
    listed = {name: {*e["sources"], *e.get("depends", ())} for name, e in EXTENSIONS.items()}
    kernels = {name for name in listed["epcomm.runtime._fibers"] if name.startswith("kernels_cu/")}
    assert kernels == {str(path.relative_to(ROOT)) for path in KERNELS}
    runtime = ROOT / "epcomm" / "runtime"
    for pyx in runtime.glob("*.pyx"):
        files = listed[f"epcomm.runtime.{pyx.stem}"]
        text = pyx.read_text()
        for pxi in re.findall(r'^include "(.+)"', text, re.M):
            text += (runtime / pxi).read_text()
            assert f"epcomm/runtime/{pxi}" in files
        for header in re.findall(r'extern from "(.+)"', text):
            assert f"epcomm/runtime/{header}" in files, pyx.name
    assert len(listed) == len(list(runtime.glob("*.pyx")))


def test_touched_kernel_rebuilds(tree, tmp_path):
    """Only when it is newer: the second build in a row compiles nothing."""
    small = tmp_path / "small"
    shutil.copytree(tree, small)
    # The real rule over a tiny extension: the whole one takes too long for a test.
    (small / "kernels_cu" / "cpu" / "kernels.cpp").write_text('#include "../args.h"\n')
    for name in set(EXTENSIONS) - {"epcomm.runtime._fibers"}:
        (small / f"{name.replace('.', '/')}.pyx").write_text("")
    (small / "epcomm/runtime/_fibers.pyx").write_text("")

    def compiled():
        return [line for line in build_in_place(small).splitlines() if "kernels.cpp" in line]

    assert compiled()
    assert not compiled()
    built = next((small / "epcomm/runtime").glob("_fibers*.so")).stat().st_mtime
    os.utime(small / "kernels_cu" / "dispatch.cu", (built + 1, built + 1))
    assert compiled()
