"""Pictures as SVG: plain text, no dependency, right on light and dark pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardweave.layout import PAD, Layout, Mesh
from shardweave.plan import Plan
from shardweave.show.canvas import (
    Drawing,
    arrow,
    below,
    colour,
    heading,
    inner_width,
    line,
    note,
    page,
    rect,
    ribbon,
    text,
    width_of,
)
from shardweave.show.flow import Block, Section, flow
from shardweave.show.grids import mesh_drawing
from shardweave.show.model import MOST_ROWS, Band, Panel, Row, overview, panels
from shardweave.show.words import short, span

_BAR = 28
_GAP = 7
_GUTTER = 210


def layout_picture(
    layout: Layout,
    *,
    select: str | None = None,
    dim: str | None = None,
    head_dim: int = 0,
    most: int = MOST_ROWS,
) -> str:
    """Who holds what of the buffers that a word selects.

    Args:
        layout: The layout.
        select: A label, a name of a buffer or tensor, or a part of one; all buffers by default.
        dim: The dim to draw, by name: ``layers``, ``experts``, ``rows``, ``columns``. By default the
            fused one, else the last one that is cut.
        head_dim: Rows of a head, to tell the heads of ``q``, ``k`` and ``v`` apart.
        most: Rows that are drawn at most for a buffer.

    Raises:
        UnknownNameError: Nothing has that name.
    """
    found = panels(layout, select=select, dim=dim, head_dim=head_dim, most=most)
    drawn, alike = overview(found) if select is None else (found, ())
    drawings = [panel_drawing(panel, width=inner_width()) for panel in drawn]
    drawings += [note(f"{panel.title}: whole on all ranks") for panel in alike]
    marks = legend(drawn)
    return page(
        f"{layout.name}: {select or 'all buffers'}", below([*drawings, marks] if marks.shapes else drawings)
    )


def plan_picture(
    plan: Plan, select: str | None = None, *, title: str = "", head_dim: int = 0, most: int = MOST_ROWS
) -> str:
    """Where the elements of the tensors that a word selects go: sources left, destinations right.

    Args:
        plan: The plan.
        select: A label, a name of a buffer or tensor on either side, or a part of one.
        title: What is written above.
        head_dim: Rows of a head, for ``q``, ``k`` and ``v``.
        most: Blocks that are drawn at most on a side.

    Raises:
        UnknownNameError: Nothing has that name on either side.
    """
    found = flow(plan, select=select, head_dim=head_dim, most=most)
    title = title or f"{found.src} to {found.dst}: {select or 'all tensors'}"
    drawings = [
        heading(title),
        *(section_drawing(section, found.src, found.dst) for section in found.sections),
    ]
    if found.hidden:
        drawings.append(note(f"… {found.hidden} more sections"))
    return page(title, below(drawings))


def mesh_picture(mesh: Mesh) -> str:
    """The ranks of a mesh, and which of them form a group along each axis."""
    title = f"mesh {mesh}"
    return page(title, below([heading(title), mesh_drawing(mesh)]))


# --- panels -------------------------------------------------------------------------------------


def panel_drawing(panel: Panel, *, width: float, gutter: float = _GUTTER, scale: float = 0) -> Drawing:
    """The rows of a panel as bars.

    Args:
        panel: The panel.
        width: The width of the drawing.
        gutter: What of it is for the names of rows.
        scale: Pixels a place; by default the widest row fills the width.
    """
    tail = max((width_of(_missing(row)) for row in panel.rows if row.missing), default=0)
    scale = scale or (width - gutter - tail - 2) / panel.size
    shapes: list[str] = []
    y = 0.0
    if panel.title:
        shapes.append(text(0, 9, panel.title, "s"))
        y += 22
    if panel.subtitle:
        shapes.append(text(0, y + 7, panel.subtitle, "n"))
        y += 22
    y += 8 if panel.cuts else 0
    for group, rows in itertools.groupby(enumerate(panel.rows), lambda one: one[1].group):
        if group:
            shapes.append(text(0, y + 9, group, "n"))
            y += 22
        for number, row in rows:
            shapes += _row_shapes(panel, row, y, width, gutter, scale)
            y += _BAR + _GAP
            if panel.hidden and number == len(panel.rows) // 2 - 1:
                shapes.append(text(gutter, y + 7, f"… {panel.hidden} more rows", "n"))
                y += 24
        y += 4 if group else 0
    for at in panel.cuts:
        shapes.append(
            line(gutter + at * scale, y - _GAP - _BAR - 6, gutter + at * scale, y - _GAP + 6, "cut")
        )
    return Drawing(width, y - _GAP + (8 if panel.cuts else 0), tuple(shapes))


def _row_shapes(panel: Panel, row: Row, y: float, width: float, gutter: float, scale: float) -> list[str]:
    shapes = [text(gutter - 12, y + _BAR / 2, row.name, "e")] if row.name else []
    if panel.placed or not row.bands:
        shapes.append(
            rect(gutter, y + 0.5, (panel.size if panel.placed else panel.size / 3) * scale, _BAR - 1, "track")
        )
    if not row.bands:
        shapes.append(text(gutter + 10, y + _BAR / 2, "nothing", "n"))
    end = 0
    for at, band in panel.places(row):
        shapes += band_shapes(band, gutter + at * scale, y, scale, row.name)
        end = at + band.count
    if row.bands and row.missing:
        shapes.append(text(gutter + end * scale + 8, y + _BAR / 2, _missing(row).strip(), "n"))
    return shapes


def _missing(row: Row) -> str:
    return f"   no {', no '.join(row.missing)}"


def band_shapes(
    band: Band, x: float, y: float, scale: float, who: str = "", *, height: float = _BAR
) -> list[str]:
    """A band: its colour, its heads or experts told apart, and its words where they fit."""
    w = band.count * scale
    tip = f"{who}: {band.what}" + (", held by other rows too" if band.replica else "")
    if band.label is PAD:
        shapes = [rect(x, y, w, height, "box"), rect(x, y, w, height, "hatched", tip=tip)]
        if width_of(band.what) + 10 < w:
            shapes += [
                rect(
                    x + w / 2 - width_of(band.what) / 2 - 4, y + 4, width_of(band.what) + 8, height - 8, "box"
                )
            ]
            shapes += [text(x + w / 2, y + height / 2, band.what, "n m")]
        return shapes
    look = colour(band.label)
    shapes = [rect(x, y, w, height, look, tip=tip)]
    cells = [(n, x + a * scale, (b - a) * scale) for n, a, b in band.cells]
    if len(cells) > 1 and min(cell[2] for cell in cells[:-1]) >= 12:
        shapes += [line(left, y, left, y + height, "sep") for _, left, _ in cells[1:]]
    words = [f"{band.label}{n}" if band.label else str(n) for n, _, _ in cells]
    middle = y + height / 2
    whole = max((wide for _, _, wide in cells), default=0)
    if cells and all(
        width_of(word) + 4 <= wide or wide < whole for word, (_, _, wide) in zip(words, cells, strict=True)
    ):
        shapes += [
            text(left + wide / 2, middle, word, f"m t{look}")
            for word, (_, left, wide) in zip(words, cells, strict=True)
            if width_of(word) + 2 <= wide
        ]
    else:
        brief = span("", band.start, band.stop).strip()
        choice = (band.what, f"{band.label} {brief}".strip(), brief, band.label)
        fitting = [word for word in choice if word and width_of(word) + 6 <= w]
        shapes += [text(x + w / 2, middle, fitting[0], f"m t{look}")] if fitting else []
    if band.replica:
        shapes.append(rect(x + 1.5, y + 1.5, max(w - 3, 1), height - 3, "rep"))
    else:
        shapes.append(line(x + w, y, x + w, y + height, "sep"))
    return shapes


def legend(found: Sequence[Panel]) -> Drawing:
    """What the marks of panels mean, as far as they have them."""
    bands = [band for panel in found for row in panel.rows for band in row.bands]
    marks = [
        ("rep", "held by several rows: replicas", any(band.replica for band in bands)),
        ("hatched", "padding, belongs to no tensor", any(band.label is PAD for band in bands)),
        ("track", "held by others", any(panel.placed and len(panel.rows) > 1 for panel in found)),
    ]
    shapes: list[str] = []
    x = 0.0
    for style, words, there in marks:
        if there:
            shapes += [rect(x + 1.5, 2, 22, 16, style), text(x + 32, 10, words, "n")]
            x += width_of(words) + 52
    return Drawing(x, 20 if shapes else 0, tuple(shapes))


# --- plans --------------------------------------------------------------------------------------

_SIDE = 150
_LEAST = 22


class _Stack:
    """The blocks of one side, one above the other: from places of a block to heights on the page."""

    def __init__(self, blocks: Sequence[Block], per_place: float) -> None:
        self.blocks = blocks
        self.tops: list[list[tuple[int, int, float, float]]] = []
        y = 0.0
        for block in blocks:
            bands = []
            for band in block.row.bands:
                height = max(_LEAST, band.count * per_place)
                bands.append((band.at, band.count, y, height))
                y += height
            self.tops.append(bands)
            y += 14
        self.height = max(y - 14, 0)

    def y(self, block: int, place: float) -> float:
        """The height of a place; of one past the end too."""
        for at, count, top, height in self.tops[block]:
            if place <= at + count:
                return top + (place - at) / count * height
        return self.height


def section_drawing(section: Section, src: str, dst: str, *, height: float = 250) -> Drawing:
    """The blocks of both sides as columns, and a ribbon for each copy."""
    width = inner_width()
    places = max(sum(block.row.size for block in side) for side in (section.src, section.dst))
    per_place = height / max(places, 1)
    stacks = _Stack(section.src, per_place), _Stack(section.dst, per_place)
    total = max(stack.height for stack in stacks)
    left, right = _GUTTER, width - _GUTTER - _SIDE
    top = 28.0
    offsets = [top + (total - stack.height) / 2 for stack in stacks]
    shapes = [
        text(left + _SIDE / 2, 8, src, "s m"),
        text(right + _SIDE / 2, 8, dst, "s m"),
        text(0, 8, section.title, "s"),
        arrow(left + _SIDE + 34, 14, right - 34, 14),
    ]
    for one in section.ribbons:
        ends = (
            (left + _SIDE, one.src, one.src_at, one.src_size),
            (right, one.dst, one.dst_at, one.dst_size),
        )
        a, b = (
            (x, stack.y(block, at) + offset, stack.y(block, at + size) + offset)
            for (x, block, at, size), stack, offset in zip(ends, stacks, offsets, strict=True)
        )
        who = f"{_who(section.src[one.src])} to {_who(section.dst[one.dst])}: {one.what}"
        shapes.append(ribbon(a, b, colour(one.label), who))
    for stack, offset, x, at, align in zip(
        stacks, offsets, (left, right), (left - 12, right + _SIDE + 12), ("e", ""), strict=True
    ):
        for block, bands in zip(stack.blocks, stack.tops, strict=True):
            for band, (_, _, y, tall) in zip(block.row.bands, bands, strict=True):
                shapes += _block_shapes(band, x, y + offset, tall, _who(block))
            if bands:
                middle = (bands[0][2] + bands[-1][2] + bands[-1][3]) / 2 + offset
                named = short(block.buffer)
                right_lines = (named, block.row.name) if block.row.name else (named,)
                lines = (block.row.name or named,) if align else right_lines
                for i, words in enumerate(lines):
                    shapes.append(
                        text(
                            at,
                            middle + (i - (len(lines) - 1) / 2) * 16,
                            words,
                            f"{align} {'n' if i else ''}".strip(),
                        )
                    )
    if section.hidden:
        shapes.append(text(width / 2, top + total + 14, f"… {section.hidden} more copies", "n m"))
    return Drawing(width, top + total + (24 if section.hidden else 0), tuple(shapes))


def _who(block: Block) -> str:
    return f"{short(block.buffer)} {block.row.name}".strip()


def _block_shapes(band: Band, x: float, y: float, height: float, who: str) -> list[str]:
    tip = f"{who}: {band.what}"
    if band.label is PAD:
        return [rect(x, y, _SIDE, height, "box"), rect(x, y, _SIDE, height, "hatched", tip=tip)]
    look = colour(band.label)
    shapes = [rect(x, y, _SIDE, height, look, tip=tip), line(x, y + height, x + _SIDE, y + height, "sep")]
    if width_of(band.what) + 6 <= _SIDE:
        shapes.append(text(x + _SIDE / 2, y + height / 2, band.what, f"m t{look}"))
    if band.replica:
        shapes.append(rect(x + 1.5, y + 1.5, _SIDE - 3, height - 3, "rep"))
    return shapes
