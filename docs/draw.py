"""Draws the pictures of these pages: `python docs/draw.py [FOLDER]` writes docs/pictures/*.svg.

Where a picture shows a plan, the reference planner made it.
"""

import sys
from pathlib import Path

import numpy as np
from svg import EXPERTS, GREY, INK, PALE, Picture

from epcomm import plan_layout, reference

RANKS, PER_RANK, PADDING = 4, 2, 8
TOKENS = np.array([70, 18, 14, 10, 22, 26, 8, 24])  # of each expert, over all ranks: 24 tokens a rank, K = 2
ALLOC = reference.balance(TOKENS, RANKS)  # [E, R]
NVLINK = "#b35900"


def balanced():
    """Rows of each rank before and after."""
    p = Picture(720, 300)
    home = np.zeros_like(ALLOC)
    for expert, tokens in enumerate(TOKENS):
        home[expert, expert // PER_RANK] = tokens
    _bars(p, 60, "every expert at home", home)
    _bars(p, 400, "balanced for this step", ALLOC)
    p.box(60, 272, 14, 14, "#8c959f")
    p.text(80, 283, "home expert")
    p.box(180, 272, 14, 14, "#8c959f")
    p.hatch(180, 272, 14, 14, "copy")
    p.text(200, 283, "copy of another rank's expert, for this step; the number is the expert's id")
    return p


def _bars(p, left, title, alloc):
    floor, scale = 235, 2.0
    p.title(title, left)
    mean = TOKENS.sum() / RANKS
    for rank in range(RANKS):
        x, y = left + 70 * rank, floor
        for expert in np.flatnonzero(alloc[:, rank]):
            height = float(scale * alloc[expert, rank])
            y -= height
            p.box(x, y, 52, height, EXPERTS[expert], str(expert), size=11)
            if expert // PER_RANK != rank:
                p.hatch(x, y, 52, height, "copy")
                p.box(x + 19, y + height / 2 - 8, 14, 16, EXPERTS[expert], str(expert), size=11)
        p.text(x + 26, y - 6, f"{alloc[:, rank].sum()} rows", size=11, anchor="middle")
        p.text(x + 26, floor + 16, f"rank {rank}", size=12, anchor="middle")
    y = floor - scale * mean
    p.line(left - 8, y, left + 70 * RANKS - 8, y, GREY, dash="4 3", width=1.0)
    p.text(left - 12, y + 4, f"{mean:g}", size=11, anchor="end", fill=GREY)


def segments():
    """The receive buffer of one rank."""
    p = Picture(720, 250)
    rank = 1
    experts = [rank * PER_RANK + i for i in range(PER_RANK)]
    copies = [int(e) for e in np.flatnonzero(ALLOC[:, rank]) if e // PER_RANK != rank]
    names = [f"home {e}" for e in experts] + [f"slot {i}" for i in range(PER_RANK)]
    experts += copies + [-1] * (PER_RANK - len(copies))
    counts = [int(ALLOC[e, rank]) if e >= 0 else 0 for e in experts]
    p.title(f"receive buffer of rank {rank}, token_padding = {PADDING}")
    capacity = plan_layout.row_capacity(24, 2, RANKS * PER_RANK, RANKS, PADDING)
    x, top, scale, end = 20.0, 70, 680 / capacity, 0
    for name, expert, count in zip(names, experts, counts, strict=True):
        padded = -(-count // PADDING) * PADDING
        end += padded
        if padded:
            p.box(x, top, scale * count, 60, EXPERTS[expert], f"expert {expert}\n{count} rows")
            p.box(x + scale * count, top, scale * (padded - count), 60, "white")
            p.hatch(x + scale * count, top, scale * (padded - count), 60, "pad")
            p.text(x + scale * padded / 2, top - 8, name, anchor="middle")
        x += scale * padded
        if padded:
            p.line(x, top + 60, x, top + 78)
            p.text(x, top + 92, str(end), anchor="middle")
    p.box(x, top, 700 - x, 60, "white", stroke=GREY)
    p.text((x + 700) / 2, top + 34, "undefined", anchor="middle", fill=GREY)
    p.text(700, top + 92, f"row_capacity = {capacity}", anchor="end", fill=GREY)
    p.text(20, 188, f"num_tokens_per_expert = {counts}")
    p.text(20, 208, f"cu_seqlens = {np.cumsum([-(-c // PADDING) * PADDING for c in counts]).tolist()}")
    p.text(20, 228, f"experts_to_copy[{rank}] = {experts[PER_RANK:]}")
    p.box(330, 215, 14, 14, "white")
    p.hatch(330, 215, 14, 14, "pad")
    p.text(350, 227, "pad rows: zeros. A slot that is idle has no rows.")
    return p


def dispatch():
    """One token's way out."""
    p = Picture(720, 330)
    p.title("dispatch: token t of rank 0 names experts a, b (rank 1) and c (rank 0)")
    _rank_box(p, 20, 45, 280, 270, "rank 0")
    p.box(40, 85, 90, 24, EXPERTS[0], "x[t]")
    p.note(40, 78, "your array")
    p.note(170, 78, "receive buffer")
    p.box(170, 85, 110, 24, EXPERTS[0], "row for c")
    p.line(130, 97, 168, 97, tip=True)
    _rank_box(p, 400, 45, 300, 270, "rank 1")
    p.note(560, 78, "receive buffer")
    p.box(560, 85, 120, 24, EXPERTS[0], "row for a: primary")
    p.box(560, 150, 120, 24, EXPERTS[0], "row for b: duplicate", size=11)
    p.line(85, 109, 85, 140)
    p.line(85, 140, 490, 140, NVLINK, width=2.2)
    p.line(490, 140, 490, 97, NVLINK, width=2.2)
    p.line(490, 97, 558, 97, NVLINK, tip=True, width=2.2)
    p.text(350, 133, "1  the row, once", anchor="middle", fill=NVLINK, weight="bold")
    p.line(620, 109, 620, 148, tip=True, dash="4 3")
    p.text(548, 130, "4", anchor="end", weight="bold")
    p.text(554, 130, "local copy", size=11)
    p.box(420, 200, 130, 44, PALE, "record: rows of\na and b, weights", size=11)
    p.box(420, 265, 130, 28, PALE, "flag = epoch", size=11)
    p.line(190, 222, 418, 222, NVLINK, tip=True, width=2.2)
    p.text(350, 215, "2  a record", anchor="middle", fill=NVLINK, weight="bold")
    p.line(190, 279, 418, 279, NVLINK, tip=True, width=2.2)
    p.text(350, 272, "3  a flag", anchor="middle", fill=NVLINK, weight="bold")
    p.text(40, 226, "its places (plan.dst)", size=11)
    p.text(40, 283, "1 and 2 are complete", size=11)
    return p


def combine():
    """One token's way back."""
    p = Picture(720, 300)
    p.title("combine: token t of rank 1 has rows on ranks 0, 1 and 2")
    for rank, y in ((0, 50), (2, 190)):
        _rank_box(p, 20, y, 300, 90, f"rank {rank}")
        p.box(40, y + 34, 80, 18, EXPERTS[rank], "row", size=11)
        p.box(40, y + 58, 80, 18, EXPERTS[rank], "row", size=11)
        p.box(210, y + 44, 90, 24, EXPERTS[rank], "sum of both")
        p.line(120, y + 43, 208, y + 54, tip=True)
        p.line(120, y + 67, 208, y + 58, tip=True)
    _rank_box(p, 400, 50, 300, 230, "rank 1, the token's home")
    ring = {0: 84, 2: 224}
    for rank, y in ring.items():
        p.box(420, y, 100, 24, EXPERTS[rank], f"ring of rank {rank}", size=11)
        p.line(300, y + 22 if rank == 0 else y + 22, 418, y + 12, NVLINK, tip=True, width=2.2)
        p.text(360, y - 2, "a row, a flag", anchor="middle", fill=NVLINK, weight="bold", size=11)
    p.box(420, 154, 100, 24, EXPERTS[1], "own rows", size=11)
    p.box(590, 154, 90, 24, "white", "out[t]")
    for y in (96, 166, 236):
        p.line(520, y, 588, 166, tip=True)
    p.text(600, 110, "in rank order,", size=11)
    p.text(600, 125, "float32, rounded", size=11)
    p.text(600, 140, "once", size=11)
    return p


def chunks():
    """Symmetric memory: who sees what at which address."""
    p = Picture(720, 290)
    p.title("symmetric memory: one chunk a rank, all chunks mapped back to back on every rank")
    for row, me in enumerate((0, 1)):
        y = 56 + 70 * row
        p.text(20, y + 24, f"process of rank {me}")
        for rank in range(3):
            own = " (own)" if rank == me else ""
            p.box(180 + 160 * rank, y, 160, 40, EXPERTS[rank], f"chunk of rank {rank}{own}")
        p.note(180, y - 5, "base")
        p.note(340, y - 5, "base + stride")
    p.text(20, 204, "inside a chunk")
    names = [
        "receive",
        "records",
        "flags",
        "ring",
        "weights",
        "flags",
        "credits",
        "packets",
        "left",
        "control",
    ]
    widths = [130, 62, 46, 70, 60, 46, 52, 58, 60, 56]
    x = 60
    for name, width in zip(names, widths, strict=True):
        p.box(x, 216, width, 30, PALE, name, size=11)
        x += width
    owners = (("dispatch", 179), ("combine", 412), ("plan", 555), ("reduce_grad", 614), ("all", 672))
    for name, middle in owners:
        p.note(middle, 262, name, anchor="middle")
    p.note(60, 281, "An area has the same offset on every rank: base + rank * stride + offset.")
    return p


def pool():
    """The four views of an ExpertPool."""
    p = Picture(720, 275)
    p.title("ExpertPool on rank 1 of 3, two experts a rank: four views of the same pages")
    cells = [(str(e), EXPERTS[e]) for e in range(6)] + [("slot 0", "white"), ("slot 1", "white")]
    views = (
        ("full [E + E/R]", range(8), 0),
        ("local [E/R]", (2, 3), 2),
        ("slots [E/R]", (6, 7), 6),
        ("compute [2 E/R]", (2, 3, 6, 7), 2),
    )
    for row, (name, members, first) in enumerate(views):
        y = 50 + 48 * row
        p.text(20, y + 20, name)
        for i, member in enumerate(members):
            text, fill = cells[member]
            p.box(140 + 70 * (first + i), y, 70, 32, fill, text)
    p.note(140, 248, "Experts 0, 1, 4 and 5 lie on ranks 0 and 2. prefetch_weight fills the slots.")
    p.note(140, 264, "compute[i] holds the weights for segment i of a plan.")
    return p


def layouts():
    """The two layouts of low latency."""
    p = Picture(720, 250)
    p.title("low latency: what rank 0 of two holds; two experts a rank, T = 4")
    p.text(20, 52, "EXPERT_MAJOR [2, 8, H]: a row for each expert that a token names")
    for row, cells in enumerate((("0.0", "0.2", "1.0", "1.1", "1.3"), ("0.1", "0.2", "1.3"))):
        y = 62 + 32 * row
        p.text(20, y + 17, f"expert {row}")
        for i in range(8):
            _cell(p, 90 + 50 * i, y, cells[i] if i < len(cells) else None)
        p.text(500, y + 17, f"num_tokens_per_expert[{row}] = {len(cells)}", size=11)
    p.text(
        20,
        164,
        "RANK_MAJOR [8, H]: a row for each token that names an expert here, at most T a source",
        size=12,
    )
    cells = ["0.0", "0.1", "0.2", None, "1.0", "1.1", "1.3", None]
    for i, cell in enumerate(cells):
        _cell(p, 90 + 50 * i, 174, cell)
    p.text(500, 191, "num_tokens_per_rank = [3, 3]", size=11)
    p.note(90, 226, "r.t: token t of rank r")
    p.box(250, 214, 14, 14, "white")
    p.hatch(250, 214, 14, 14, "pad")
    p.note(270, 226, "not written")
    return p


def _cell(p, x, y, text):
    p.box(x, y, 50, 24, EXPERTS[4 if text[0] == "0" else 3] if text else "white", text or "", size=11)
    if not text:
        p.hatch(x, y, 50, 24, "pad")


def _rank_box(p, x, y, width, height, title):
    p.box(x, y, width, height, "#f6f8fa", stroke=GREY)
    p.text(x + 10, y + 18, title, weight="bold", fill=INK)


PICTURES = (balanced, segments, dispatch, combine, chunks, pool, layouts)


def main():
    folder = Path(*sys.argv[1:] or [Path(__file__).resolve().parent / "pictures"])
    for draw in PICTURES:
        draw().save(folder / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()
