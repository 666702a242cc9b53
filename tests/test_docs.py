"""The pages say what is so: code runs, names exist, links lead somewhere, all variables are listed."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import epcomm

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TEXTS = [ROOT / "README.md", *PAGES]
VARIABLE = re.compile(r"EPCOMM_[A-Z_]+")


def named(path):
    return str(path.relative_to(ROOT))


def blocks(language):
    """(page:line, code) of every block of a language."""
    for path in TEXTS:
        text = path.read_text()
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
            line = text[: match.start()].count("\n") + 1
            yield pytest.param(match[1], id=f"{named(path)}:{line}")


@pytest.mark.parametrize("code", list(blocks("python")))
def test_code(code, tmp_path):
    """A block that imports something claims to run by itself: it does, on two CPU ranks. Others are parts."""
    compile(code, "a block of the documentation", "exec")
    if not re.search(r"^(import|from) ", code, re.M):
        return
    for package in ("torch", "jax"):
        if re.search(rf"\b(import|from) ({package}|epcomm\.{package})\b", code):
            pytest.importorskip(package)
    (tmp_path / "block.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "mpi_launch", "-n", "2", "--device", "cpu", "--timeout", "60", "block.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=70,
    )
    assert done.returncode == 0, done.stderr


def anchors(path):
    """What links may point to in a page: its headings as GitHub turns them into anchors."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_links(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def test_every_page_and_picture_is_used():
    toctrees = re.findall(r"```\{toctree\}(.*?)```", (DOCS / "index.md").read_text(), re.S)
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in PAGES} - {"index"}
    assert pages <= set(" ".join(toctrees).split())
    shown = set(re.findall(r"pictures/(\w+)\.svg", "".join(path.read_text() for path in PAGES)))
    assert shown == {path.stem for path in (DOCS / "pictures").iterdir()}


def test_every_example_is_shown():
    shown = re.findall(r"literalinclude\} \.\./examples/(\w+)\.py", (DOCS / "examples.md").read_text())
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def test_pictures_are_what_the_script_draws(tmp_path):
    words = [sys.executable, str(DOCS / "draw.py"), str(tmp_path)]
    subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=60)
    for path in (DOCS / "pictures").iterdir():
        assert (tmp_path / path.name).read_text() == path.read_text(), f"run docs/draw.py: {path.name}"


def attribute_exists(owner, name):
    """Whether a class has an attribute, or its docstring tells of one that instances have."""
    return hasattr(owner, name) or re.search(rf"\b{name}\b", inspect.getdoc(owner) or "")


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_names_exist(path):
    """`Buffer.dispatch`, `epcomm.asarray` and their like in code spans."""
    wrong = []
    for span in re.findall(r"`([^`\n]+)`", path.read_text()):
        for owner, name in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)", span):
            found = getattr(epcomm, owner, None)
            if found is not None and not attribute_exists(found, name):
                wrong.append(f"{owner}.{name}")
        for name in re.findall(r"\bepcomm\.([A-Za-z_]\w*)", span):
            if not hasattr(epcomm, name) and importlib.util.find_spec(f"epcomm.{name}") is None:
                wrong.append(f"epcomm.{name}")
    assert not wrong


def test_every_variable_is_listed():
    """What the sources read of the environment is what the page lists."""
    folders = [ROOT / name for name in ("epcomm", "mpi_launch", "kernels_cu", "tests")]
    paths = [path for folder in folders for path in folder.rglob("*")]
    text = "".join(path.read_text() for path in paths if path.suffix in (".py", ".pyx", ".h", ".cuh"))
    read = set(re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)['\"](EPCOMM_[A-Z_]+)", text))
    assert read and read == set(VARIABLE.findall((DOCS / "environment.md").read_text()))


def test_html(tmp_path):
    """The command of `make docs`. Needs the extra `docs`."""
    pytest.importorskip("sphinx")
    (line,) = re.findall(r"^\t\$\(PY\) -m (sphinx .*)$", (ROOT / "Makefile").read_text(), re.M)
    words = [word.replace("docs/_build/html", str(tmp_path / "html")) for word in line.split()]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(path.relative_to(DOCS).with_suffix(".html")) for path in PAGES}
    assert pages <= {str(path.relative_to(tmp_path / "html")) for path in (tmp_path / "html").rglob("*.html")}
