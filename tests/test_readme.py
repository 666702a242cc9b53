"""What the first screen of the README promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_script(tmp_path):
    """The script there runs as it is, and is the ten lines that it looks like."""
    (script,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in script.splitlines() if line.strip()]) == 10
    (tmp_path / "step.py").write_text(script)
    (command,) = re.findall(r"`python (-m mpi_launch .* step\.py)`", README)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [re.sub("on .*:", "on X:", line) for line in lines] == [
        f"rank {r} on X: right is True" for r in range(2)
    ]


def test_commands_are_there():
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"(?m)(?:^|`)make (\w+)", README))
    assert {"bench", "test"} <= commands
    assert commands <= set(re.findall(r"^(\w+):", makefile, re.M))


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
