"""Pictures of result files. What all of them share; each benchmark has a `figure(rows)` made of these."""

import importlib.util
import json
from pathlib import Path

COLOURS = ("#3b6ea5", "#d98032", "#5f9a55", "#8c5a9e", "#b84a4a", "#7a7a7a")
_HATCHES = ("", "///", "...", "xxx")


def draw(path):
    """The picture of a results file (.json), written beside it as .png. Returns its path, or None.

    Raises:
        ValueError: not a results file, or its rows mix devices.
    """
    path = Path(path)
    try:
        rows = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict) or "bench" not in rows[0]:
        raise ValueError(f"{path}: not a results file of bench/ (a list of rows with a 'bench' field)")
    figure = importlib.import_module(f"bench.bench_{rows[0]['bench']}").figure
    return save(figure, rows, path.with_suffix(".png"))


def save(figure, rows, path):
    """Write the picture `figure(rows)`, and say where it is; without matplotlib say that instead."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed (pip install epcomm[bench])", flush=True)
        return None
    figure(rows).savefig(path, dpi=130)
    print(f"picture: {path}", flush=True)
    return path


def panels(rows, columns, title, height=3.6):
    """A picture of `rows` x `columns` panels and its 2-d array of axes."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5.2 * columns, height * rows + 0.9), layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    picture.suptitle(title, fontsize=10)
    return picture, axes


def one_device(rows):
    """The rows' device kind.

    Raises:
        ValueError: there are several: CPU times and GPU times do not belong into one picture.
    """
    kinds = {row["device"] for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"the rows mix devices ({', '.join(sorted(kinds))}): plot them apart")
    return kinds.pop()


def configuration(row):
    """One line that says what was measured, and on what."""
    names = (
        ("num_tokens", "S"),
        ("hidden", "H"),
        ("num_topk", "K"),
        ("num_experts", "E"),
        ("num_sms", "SMs"),
    )
    words = [f"{short}={row[key]}" for key, short in names if row.get(key) is not None]
    where = f"{row['ranks']} x {row['device_name']}"
    return f"{where}: {' '.join(words)}" + (
        " (times say nothing about GPUs)" if row["device"] == "cpu" else ""
    )


def stacked_bars(axis, rows, parts, group, floor=None):
    """One bar a row with its sum on top; rows of one `group` value side by side, the libraries in one order.

    Args:
        parts: {label: field}, drawn from the bottom up in the order of COLOURS; a missing field counts 0.
            Libraries differ by hatching.
        group: field of the x axis.
        floor: field of a line over each group: what the machine allows.
    """
    unit = "us" if one_device(rows) == "cuda" else "us (CPU ranks)"
    libraries, groups = distinct(rows, "lib"), distinct(rows, group)
    width = 0.8 / len(libraries)
    for row in rows:
        number = libraries.index(row["lib"])
        at = groups.index(row[group]) + (number - (len(libraries) - 1) / 2) * width
        bottom = 0.0
        for colour, field in zip(COLOURS, parts.values(), strict=False):
            value = row.get(field) or 0.0
            style = {"color": colour, "hatch": _HATCHES[number % 4], "edgecolor": "white", "linewidth": 0.5}
            axis.bar(at, value, width * 0.92, bottom, **style)
            bottom += value
        if bottom:
            axis.annotate(f"{bottom:.0f}", (at, bottom), ha="center", va="bottom", fontsize=7)
        if floor and row.get(floor):
            middle = groups.index(row[group])
            axis.plot(
                [middle - 0.42, middle + 0.42], [row[floor]] * 2, color="black", linewidth=1, linestyle="--"
            )
    axis.set_xticks(range(len(groups)), [f"{value:.3g}" for value in groups])
    axis.set_ylabel(unit)
    axis.margins(y=0.1)


def legend(picture, labels, libraries, floor=False):
    """One legend below all panels: the parts of `stacked_bars`, the libraries, and the floor's line."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = [Patch(color=colour, label=label) for colour, label in zip(COLOURS, labels, strict=False)]
    for number, library in enumerate(libraries):
        entries.append(Patch(facecolor="lightgrey", hatch=_HATCHES[number % 4], label=library))
    if floor:
        entries.append(Line2D([], [], color="black", linestyle="--", label="floor"))
    picture.legend(handles=entries, loc="outside lower center", ncols=len(entries), fontsize=8, frameon=False)


def distinct(rows, key):
    """The different values of a field, in the order of their first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))
