"""A small SVG writer: boxes, words and arrows, the same text on every machine."""

from html import escape

INK, GREY, PALE = "#1f2328", "#6e7781", "#eaeef2"
EXPERTS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb5566", "#44aa99"]
_DEFINITIONS = """\
<defs>
<pattern id="copy" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line x1="0" y1="0" x2="0" y2="6" stroke="white" stroke-width="2.4"/>
</pattern>
<pattern id="pad" width="5" height="5" patternUnits="userSpaceOnUse">
<circle cx="2.5" cy="2.5" r="0.9" fill="#8c959f"/>
</pattern>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#1f2328"/>
</marker>
</defs>"""


class Picture:
    """A picture of `width` x `height` pixels; y grows downwards. `save` writes it."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        self._body = []

    def box(self, x, y, width, height, fill="white", text="", stroke=INK, size=12):
        """A rectangle with a text in its middle; a text with several lines may be given."""
        self._add("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, stroke_width=1)
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            middle = y + height / 2 + size * (0.36 + 1.25 * (i - (len(lines) - 1) / 2))
            self.text(x + width / 2, middle, line, size=size, anchor="middle", fill=_ink_on(fill))

    def hatch(self, x, y, width, height, pattern):
        """A pattern over a rectangle: "copy" or "pad"."""
        self._add("rect", x=x, y=y, width=width, height=height, fill=f"url(#{pattern})")

    def text(self, x, y, text, size=12, anchor="start", fill=INK, weight="normal"):
        """Words that begin, end ("end") or have their middle ("middle") at x, on the line y."""
        style = {"font_size": size, "text_anchor": anchor, "fill": fill, "font_weight": weight}
        self._add("text", escape(text), x=x, y=y, **style)

    def title(self, text, x=20):
        """What the picture, or a part of it, shows."""
        self.text(x, 24, text, size=14, weight="bold")

    def note(self, x, y, text, anchor="start"):
        """Small grey words."""
        self.text(x, y, text, size=11, anchor=anchor, fill=GREY)

    def line(self, x1, y1, x2, y2, stroke=INK, dash=None, tip=False, width=1.4):
        """A line; `tip` makes it an arrow, `dash` a dashed one ("4 3")."""
        more = {"stroke_dasharray": dash} if dash else {}
        more |= {"marker_end": "url(#tip)"} if tip else {}
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=width, **more)

    def save(self, path):
        """Writes the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif">'
        )
        ground = f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        path.write_text("\n".join([head, _DEFINITIONS, ground, *self._body, "</svg>", ""]))

    def _add(self, tag, content=None, **attributes):
        words = " ".join(f'{key.replace("_", "-")}="{_number(value)}"' for key, value in attributes.items())
        self._body.append(f"<{tag} {words}/>" if content is None else f"<{tag} {words}>{content}</{tag}>")


def _number(value):
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def _ink_on(fill):
    """Black or white, whichever can be read on a colour."""
    if not fill.startswith("#"):
        return INK
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "white"
