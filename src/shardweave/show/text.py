"""Pictures for the terminal: readable in 80 columns and without colour; colours only help.

Everything here returns what ``rich`` prints. A ``rich.console.Console`` leaves the colours out where
``NO_COLOR`` is set or the output is no terminal; ``plain`` always does.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardweave.layout import PAD, Layout, Mesh
from shardweave.plan import Cost, Plan
from shardweave.plan import cost as cost_of
from shardweave.show.canvas import inks
from shardweave.show.flow import Block, Section, flow
from shardweave.show.model import MOST_ROWS, Band, Panel, Row, overview, panels
from shardweave.show.words import numbers, short, size

WIDTH = 80
_MOST_NAME = 28


def layout_picture(
    layout: Layout,
    *,
    select: str | None = None,
    width: int = WIDTH,
    dim: str | None = None,
    head_dim: int = 0,
    most: int = MOST_ROWS,
) -> Text:
    """Who holds what of the buffers that a word selects, a line for each set of ranks.

    Args:
        layout: The layout.
        select: A label, a name of a buffer or tensor, or a part of one; all buffers by default.
        width: Columns.
        dim: The dim to draw, by name: ``layers``, ``experts``, ``rows``, ``columns``. By default the
            fused one, else the last one that is cut.
        head_dim: Rows of a head, to count ``q``, ``k`` and ``v`` in heads.
        most: Rows that are drawn at most for a buffer.

    Raises:
        UnknownNameError: Nothing has that name.

    >>> from shardweave.layout import BufferRule, Mesh, Part, Tensor, along, even, pad, whole
    >>> tp2 = Mesh((("tp", 2),))
    >>> rows = along(tp2, "tp", lambda r: even(pad(whole(27), 16), 2, r))
    >>> rule = BufferRule("embed", (Part(Tensor("embed.weight", (27,), "float32")),), (rows,))
    >>> print(layout_picture(Layout("mine", tp2, (rule,)), width=66))
    embed
    mine · elements across
      tp 0 (rank 0) │embed elements 0-15    ·························
      tp 1 (rank 1) ························│embed 16-26     │///////│
    <BLANKLINE>
    / padding   · held by others
    """
    found = panels(layout, select=select, dim=dim, head_dim=head_dim, most=most)
    drawn, alike = overview(found) if select is None else (found, ())
    lines: list[Text] = []
    for panel in drawn:
        lines += [Text(panel.title, "bold"), Text(panel.subtitle, "dim"), *_rows(panel, width), Text()]
    if alike:
        lines += _wrapped("whole on all ranks: ", [panel.title for panel in alike], width)
    lines += _legend(drawn)
    while not lines[-1].plain:
        lines.pop()
    return _joined(lines)


def plan_picture(
    plan: Plan, select: str | None = None, *, width: int = WIDTH, head_dim: int = 0, most: int = MOST_ROWS
) -> Text:
    """Where the elements of the tensors that a word selects go: before, after, and an arrow for each copy.

    Args:
        plan: The plan.
        select: A label, a name of a buffer or tensor on either side, or a part of one.
        width: Columns.
        head_dim: Rows of a head, for ``q``, ``k`` and ``v``.
        most: Blocks that are drawn at most on a side.

    Raises:
        UnknownNameError: Nothing has that name on either side.
    """
    found = flow(plan, select=select, head_dim=head_dim, most=most)
    lines = [Text(f"{found.src} ──▶ {found.dst}: {select or 'all tensors'}", "bold")]
    for section in found.sections:
        lines += _section(section, width)
    if found.hidden:
        lines.append(Text(f"… {found.hidden} more sections", "dim"))
    return _joined(lines)


def cost_table(cost: Plan | Cost) -> Table:
    """What a plan moves, between whom, and in how many pieces."""
    if isinstance(cost, Plan):
        cost = cost_of(cost)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    ratio = cost.num_bytes / cost.needed_bytes if cost.needed_bytes else 1.0
    table.add_row("bytes copied", size(cost.num_bytes), f"{ratio:.3f} of what is needed")
    for name, value in (
        ("on its rank", cost.local_bytes),
        ("in its node", cost.node_bytes),
        ("further", cost.world_bytes),
    ):
        share = value / cost.num_bytes if cost.num_bytes else 0.0
        table.add_row(f"  {name}", size(value), f"{share:.1%}")
    table.add_row("copies", f"{cost.num_copies:,}", "strided, one for each box and pair of arrays")
    table.add_row("contiguous stretches", f"{cost.num_descriptors:,}", "for a transport without strides")
    table.add_row("pairs of ranks", f"{len(cost.pairs):,}", "")
    table.add_row("busiest sender", f"{cost.send_imbalance:.2f}", "times the mean")
    table.add_row("busiest receiver", f"{cost.receive_imbalance:.2f}", "times the mean")
    table.add_row("staging", size(cost.peak_staging_bytes), "the most that a rank receives of one tensor")
    return table


def mesh_table(mesh: Mesh, *, most: int = 4) -> Table:
    """The groups along each axis of a mesh."""
    table = Table("axis", "size", "groups", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, n in mesh.sizes.items():
        groups = [f"{{{numbers(group)}}}" for group in mesh.groups(name)]
        more = f" … {len(groups)} in all" if len(groups) > most else ""
        table.add_row(name, str(n), " ".join(groups[:most]) + more)
    return table


def plain(picture: RenderableType, *, width: int = WIDTH) -> str:
    """A picture as characters only, without blanks at the ends of lines."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(Group(picture))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


# --- panels -------------------------------------------------------------------------------------


def _rows(panel: Panel, width: int) -> Iterator[Text]:
    names = _names([row.name for row in panel.rows])
    grouped = any(row.group for row in panel.rows)
    lead = "    " if grouped else "  "
    taken = (
        len(lead)
        + max(map(len, names), default=0)
        + max((len(_missing(row)) for row in panel.rows), default=0)
    )
    scale = max(width - taken - 2, 8) / panel.size
    number = itertools.count(1)
    for group, rows in itertools.groupby(zip(panel.rows, names, strict=True), lambda one: one[0].group):
        if group:
            yield Text(f"  {group}", "dim")
        for row, name in rows:
            yield Text.assemble(f"{lead}{name} ", _bar(panel, row, scale), (_missing(row), "dim"))
            if panel.hidden and next(number) == len(panel.rows) // 2:
                yield Text(f"{lead}… {panel.hidden} more rows", "dim")


def _names(names: Sequence[str]) -> list[str]:
    """Names of one length, shortened where they are long."""
    cut = [name if len(name) <= _MOST_NAME else name[: _MOST_NAME - 1] + "…" for name in names]
    return [name.ljust(max(map(len, cut))) for name in cut]


def _missing(row: Row) -> str:
    return f" no {', no '.join(row.missing)}" if row.missing and row.bands else ""


def _bar(panel: Panel, row: Row, scale: float) -> Text:
    """A row as characters: each band begins with a line, and a thin band is nothing else."""
    if not row.bands and not panel.placed:
        return Text("nothing", "dim")
    bar, end = Text(), round(panel.size * scale)
    for at, band in panel.places(row):
        bar.append("·" * (round(at * scale) - len(bar)), "dim")
        bar.append_text(_band(band, max(round((at + band.count) * scale) - len(bar), 1)))
    bar.truncate(end)
    return bar.append("·" * (end - len(bar)), "dim") if panel.placed and len(bar) < end else bar.append("│")


def _band(band: Band, room: int) -> Text:
    if band.label is PAD:
        return Text("│" + "/" * (room - 1))
    fill, ink = inks(band.label)
    mark = "*" if band.replica else ""
    words = next((word for word in _choice(band) if len(word + mark) < room), "")
    return Text("│" + (words + mark)[: room - 1].ljust(room - 1), f"{ink} on {fill}")


def _choice(band: Band) -> tuple[str, ...]:
    what = band.what
    label = band.label or ""
    rest = what.removeprefix(f"{label} ").partition(" ")[2]
    return what, f"{label} {rest}".strip(), label or rest


def _legend(found: Sequence[Panel]) -> list[Text]:
    bands = [band for panel in found for row in panel.rows for band in row.bands]
    marks = [
        ("* held by several rows: replicas", any(band.replica for band in bands)),
        ("/ padding", any(band.label is PAD for band in bands)),
        ("· held by others", any(panel.placed and len(panel.rows) > 1 for panel in found)),
    ]
    words = [mark for mark, there in marks if there]
    return [Text("   ".join(words), "dim")] if words else []


def _wrapped(lead: str, names: Sequence[str], width: int) -> list[Text]:
    lines = [lead.rstrip()]
    for name in names:
        if len(lines) > 1 and len(lines[-1]) + len(name) + 2 <= width:
            lines[-1] += f", {name}"
        else:
            lines.append(f"  {name}")
    return [Text(line) for line in lines]


def _joined(lines: Sequence[Text]) -> Text:
    return Text("\n").join(lines)


# --- plans --------------------------------------------------------------------------------------


def _section(section: Section, width: int) -> Iterator[Text]:
    if section.title:
        yield Text(section.title, "bold")
    for words, blocks in (("before", section.src), ("after", section.dst)):
        rows = tuple(replace(block.row, name=_who(block), group="", missing=()) for block in blocks)
        panel = Panel("", "", rows, size=max((row.size for row in rows), default=1))
        yield Text(f"  {words}", "dim")
        yield from _rows(panel, width)
    yield Text("  copies", "dim")
    sources = _names([_who(section.src[one.src]) for one in section.ribbons])
    whats = _names([one.what for one in section.ribbons])
    for one, source, what in zip(section.ribbons, sources, whats, strict=True):
        fill, ink = inks(one.label)
        target = _who(section.dst[one.dst])
        yield Text.assemble(f"  {source}  ", (what, f"{ink} on {fill}"), f" ──▶ {target}")
    if section.hidden:
        yield Text(f"  … {section.hidden} more copies", "dim")


def _who(block: Block) -> str:
    return block.row.name or short(block.buffer)
