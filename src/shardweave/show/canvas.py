"""SVG as plain text: shapes, one style sheet, and drawings set beside and below each other.

Colours are classes, so that one file is right on a light and on a dark page. Sizes are in pixels at a
width of 900, what a README shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 900
"""The width of a picture."""

_MARGIN = 16

# Fill and text of each label, on a light and on a dark page. Neighbours differ in lightness too.
_PALETTE: dict[str, tuple[str, str, str, str]] = {
    "q": ("#a9cdf5", "#0b2a4f", "#2b5c94", "#eaf3fe"),
    "k": ("#f9c877", "#4a2c00", "#8f5f10", "#fff1d8"),
    "v": ("#a3dcb6", "#0d3a1f", "#2a7046", "#e3f8ea"),
    "gate": ("#d3bff2", "#2f1658", "#654a9c", "#f1e9fd"),
    "up": ("#f5bccb", "#521026", "#963f59", "#fde8ee"),
    "down": ("#cfd88f", "#333a05", "#6a7220", "#f6f9dd"),
    "o": ("#a8dfe3", "#06393d", "#23727a", "#e0f7f9"),
    "embed": ("#e3cba8", "#40290a", "#7d6238", "#faf0e0"),
    "": ("#c3cede", "#1d2a3a", "#4d5f77", "#eaf0f8"),
}
_OTHERS: tuple[tuple[str, str, str, str], ...] = (
    ("#bcd7c9", "#12352a", "#3d6b58", "#e6f5ee"),
    ("#e8c4a6", "#46260a", "#86582f", "#fcefe4"),
    ("#c5c9f2", "#1b2060", "#4b52a0", "#ebecfd"),
    ("#e2bce0", "#451143", "#82447f", "#fae8f9"),
)

_CLASSES = {f"l{label}": entry for label, entry in _PALETTE.items()} | {
    f"c{i}": entry for i, entry in enumerate(_OTHERS)
}

_SHEET = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;
font-size:13px;fill:#1f2328}
.h{font-size:16px;font-weight:600}.s{font-weight:600}.n{fill:#59636e}.m{text-anchor:middle}.e{text-anchor:end}
.page{fill:#fff;stroke:#d1d9e0}.box{fill:#f6f8fa;stroke:#d1d9e0}
.track{fill:none;stroke:#b7bfc8;stroke-dasharray:3 3}.line{stroke:#8b949e;fill:none}.tip{fill:#8b949e}
.cut{stroke:#cf222e;stroke-width:2;stroke-dasharray:5 3}.sep{stroke:#fff;stroke-opacity:.8}
.rep{fill:none;stroke:#1f2328;stroke-width:2;stroke-dasharray:5 2}
.hatch{stroke:#8b949e;stroke-width:2}.hatched{fill:url(#pad)}.flow{fill-opacity:.45}
.bad{fill:#ffcecb;stroke:#cf222e;stroke-width:2}
.good{fill:#1a7f37;font-weight:600}.wrong{fill:#cf222e;font-weight:600}
"""
_DARK = """
text{fill:#e6edf3}.n{fill:#9198a1}.page{fill:#0d1117;stroke:#3d444d}.box{fill:#151b23;stroke:#3d444d}
.track{stroke:#656c76}.line{stroke:#767d87}.sep{stroke:#0d1117}.rep{stroke:#f0f6fc}.cut{stroke:#ff7b72}
.bad{fill:#6e2421;stroke:#ff7b72}.flow{fill-opacity:.6}.good{fill:#3fb950}.wrong{fill:#ff7b72}
"""


def _colours(dark: bool) -> str:
    rules = []
    for name, entry in _CLASSES.items():
        fill, ink = entry[2:] if dark else entry[:2]
        rules.append(f".{name}{{fill:{fill}}}.t{name}{{fill:{ink}}}")
    return "".join(rules)


def colour(label: str) -> str:
    """The class of a label's colour: the same label, the same colour in every picture.

    The class for a text upon it begins with ``t``.
    """
    return f"l{label}" if label in _PALETTE else f"c{zlib.crc32(label.encode()) % len(_OTHERS)}"


def inks(label: str) -> tuple[str, str]:
    """The fill and the text colour of a label on a light page."""
    return _CLASSES[colour(label)][:2]


# --- shapes -------------------------------------------------------------------------------------


def num(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{round(value, 1):g}"


def width_of(text: str, size: float = 13) -> float:
    """The width of a text in the widest of the usual fonts; narrower ones leave some air."""
    return sum(0.36 if c in "iljtf.,:;'|()[] " else 0.9 if c in "mwMW—→" else 0.66 for c in text) * size


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text; ``y`` is its middle."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{num(x)}" y="{num(y + 4.7)}"{kind}>{escape(words, quote=False)}</text>'


def rect(x: float, y: float, w: float, h: float, style: str, *, tip: str = "", round_: float = 0) -> str:
    """A rectangle, with a tooltip."""
    corner = f' rx="{num(round_)}"' if round_ else ""
    body = f'<rect x="{num(x)}" y="{num(y)}" width="{num(w)}" height="{num(h)}" class="{style}"{corner}'
    return f"{body}><title>{escape(tip, quote=False)}</title></rect>" if tip else f"{body}/>"


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line."""
    return f'<line x1="{num(x1)}" y1="{num(y1)}" x2="{num(x2)}" y2="{num(y2)}" class="{style}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head; it goes along x or along y."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    a, b = (x2 - 7 * dx + 4 * dy, y2 - 7 * dy + 4 * dx), (x2 - 7 * dx - 4 * dy, y2 - 7 * dy - 4 * dx)
    head = " ".join(f"{num(x)},{num(y)}" for x, y in ((x2, y2), a, b))
    return line(x1, y1, x2 - 6 * dx, y2 - 6 * dy, "line") + f'<polygon points="{head}" class="tip"/>'


def ribbon(left: tuple[float, float, float], right: tuple[float, float, float], style: str, tip: str) -> str:
    """A band that flows from a side to a side; each is its x, its top and its bottom."""
    (x1, top1, bottom1), (x2, top2, bottom2) = left, right
    mid = num((x1 + x2) / 2)
    a, b, c, d, x, z = (num(value) for value in (top1, bottom1, top2, bottom2, x1, x2))
    path = f"M{x} {a}C{mid} {a} {mid} {c} {z} {c}L{z} {d}C{mid} {d} {mid} {b} {x} {b}Z"
    return f'<path d="{path}" class="flow {style}"><title>{escape(tip, quote=False)}</title></path>'


# --- drawings -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes in a rectangle from (0, 0)."""

    width: float
    height: float
    shapes: tuple[str, ...]


def below(drawings: Sequence[Drawing], *, gap: float = 18) -> Drawing:
    """Drawings below each other, at the left."""
    shapes: list[str] = []
    y = 0.0
    for one in drawings:
        shapes.append(_shifted(one, 0, y))
        y += one.height + gap
    return Drawing(max((one.width for one in drawings), default=0), max(y - gap, 0), tuple(shapes))


def beside(drawings: Sequence[Drawing], *, gap: float = 28) -> Drawing:
    """Drawings beside each other, at the top."""
    shapes: list[str] = []
    x = 0.0
    for one in drawings:
        shapes.append(_shifted(one, x, 0))
        x += one.width + gap
    return Drawing(max(x - gap, 0), max((one.height for one in drawings), default=0), tuple(shapes))


def _shifted(drawing: Drawing, x: float, y: float) -> str:
    body = "\n".join(drawing.shapes)
    return f'<g transform="translate({num(x)} {num(y)})">\n{body}\n</g>' if x or y else body


def heading(words: str, *, width: float = WIDTH - 2 * _MARGIN, note: str = "") -> Drawing:
    """A line of heading, and below it a smaller one."""
    shapes = [text(0, 10, words, "h")]
    if note:
        shapes.append(text(0, 32, note, "n"))
    return Drawing(width, 42 if note else 22, tuple(shapes))


def note(words: str) -> Drawing:
    """A line of small print."""
    return Drawing(width_of(words), 16, (text(0, 8, words, "n"),))


def inner_width() -> float:
    """What a page has inside its margins."""
    return WIDTH - 2 * _MARGIN


def page(title: str, drawing: Drawing) -> str:
    """A whole SVG file."""
    width = max(WIDTH, drawing.width + 2 * _MARGIN)
    height = drawing.height + 2 * _MARGIN
    size = f'width="{num(width)}" height="{num(height)}" viewBox="0 0 {num(width)} {num(height)}"'
    style = f"{_SHEET}{_colours(False)}\n@media (prefers-color-scheme:dark){{{_DARK}{_colours(True)}}}\n"
    pattern = (
        '<pattern id="pad" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    )
    defs = f'<defs>{pattern}<line x1="0" y1="0" x2="0" y2="7" class="hatch"/></pattern></defs>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>{escape(title, quote=False)}</title>\n<style>{style}</style>\n{defs}\n"
        f"{rect(0.5, 0.5, width - 1, height - 1, 'page', round_=8)}\n"
        f"{_shifted(drawing, _MARGIN, _MARGIN)}</svg>\n"
    )
