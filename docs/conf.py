"""Settings of Sphinx: `make docs`. Nothing is downloaded, warnings are errors (-W in the Makefile)."""

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]

project = _PROJECT["name"]
version = release = _PROJECT["version"]
copyright = f"the {project} authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {version}"
html_show_sourcelink = False
html_copy_source = False
pygments_style = "friendly"

myst_heading_anchors = 3  # links to headings, as on GitHub
suppress_warnings = ["myst.header"]  # a page may begin below another's level where it is included

default_role = "code"  # docstrings mark code with one backquote, as Markdown does
autodoc_mock_imports = ["torch", "cupy"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_use_rtype = False


def _take_stars_as_they_are(app, what, name, obj, options, lines):
    """`[E, *shape]` and `2 * E` in docstrings are no emphasis; what is between backquotes is left alone."""
    for i, line in enumerate(lines):
        parts = line.split("`")
        parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]
        lines[i] = "`".join(parts)


def setup(app):
    app.connect("autodoc-process-docstring", _take_stars_as_they_are, priority=100)  # before napoleon
