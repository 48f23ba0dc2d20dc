"""Drawings of two dims at once: the ranks of a mesh, and what ranks hold of two dims of a tensor."""

from __future__ import annotations

import math

from shardweave.layout import Dim, Layout, Mesh
from shardweave.layout.buffer import table_of
from shardweave.show.canvas import Drawing, below, beside, colour, inner_width, note, rect, text
from shardweave.show.choose import drawn_dim, matching, refuse_name
from shardweave.show.model import classes
from shardweave.show.words import indices, numbers, ranks_named, role


def area_drawing(
    layout: Layout, select: str, dims: tuple[str, str], *, title: str, width: float, columns: int = 2
) -> Drawing:
    """What each row of ranks holds of two dims at once: a frame of all of both, filled where it holds.

    Args:
        layout: The layout.
        select: What selects one buffer.
        dims: The names of the dims that go across and down.
        title: What is written above.
        width: The width of the drawing.
        columns: Frames beside each other.
    """
    number, *_ = matching(layout, select) or refuse_name(select, layout)
    rule = layout.rules[number]
    across, down = (drawn_dim(rule, dim) for dim in dims)
    kinds = list(classes(layout, rule))
    domain = rule.parts[0].tensor.dims
    wide = (width - 24 * (columns - 1)) / columns
    step_x, step_y = wide / len(domain[across]), 66 / len(domain[down])
    shapes = [text(0, 9, title, "s")]
    for i, (ranks, entry) in enumerate(kinds):
        x, y = i % columns * (wide + 24), 30 + i // columns * 112
        held = [table_of(rule.dims[d])[int(entry[d])] for d in (across, down)]
        shapes += [text(x, y + 8, ranks_named(ranks)), rect(x, y + 20, wide, 66, "track")]
        for a in held[0].runs:
            for b in held[1].runs:
                look = colour(role(rule.parts[0].tensor))
                words = [indices(name, Dim([run])) for name, run in zip(dims, (a, b), strict=True)]
                left, top = x + a.start * step_x, y + 20 + b.start * step_y
                shapes.append(rect(left, top, a.count * step_x, b.count * step_y, look, tip=", ".join(words)))
                for n in range(a.start, a.last + 1):
                    middle = x + (n + 0.5) * step_x, top + b.count * step_y / 2
                    shapes.append(text(*middle, str(n), f"m t{look}"))
    return Drawing(width, 30 + math.ceil(len(kinds) / columns) * 112 - 26, tuple(shapes))


_GROUPS = ("q", "k", "v", "gate", "up", "down", "o", "embed")


def mesh_drawing(mesh: Mesh, *, most: int = 64) -> Drawing:
    """For each factorisation, a grid of the ranks for each axis; a group shares a colour and a letter."""
    drawings: list[Drawing] = []
    drawn: set[str] = set()
    for view in (mesh.axes, *mesh.views):
        axes = [name for name, size in view if size > 1 and name not in drawn]
        drawn.update(axes)
        grids = [_axis_drawing(mesh, axis, (inner_width() - 3 * 24) / 4, most) for axis in axes]
        if grids:
            drawings.append(note(", ".join(f"{name} = {size}" for name, size in view)))
        drawings += [beside(grids[i : i + 4], gap=24) for i in range(0, len(grids), 4)]
    return below(drawings, gap=16)


def _axis_drawing(mesh: Mesh, axis: str, width: float, most: int) -> Drawing:
    groups = mesh.groups(axis)
    shown = mesh.ranks[:most]
    columns = min(len(shown), 4 if len(shown) <= 16 else 8)
    side = min(width / columns, 56)
    of = {rank: i for i, group in enumerate(groups) for rank in group}
    shapes = [
        text(0, 8, f"{axis} = {mesh.axis_size(axis)}", "s"),
        text(0, 27, f"{len(groups)} groups of {len(groups[0])}, A is {numbers(groups[0], most=3)}", "n"),
    ]
    for i, rank in enumerate(shown):
        x, y = i % columns * side, 42 + i // columns * 44
        group = of[rank]
        look = colour(_GROUPS[group % len(_GROUPS)])
        coordinate = ", ".join(
            f"{name} {at}" for name, at in mesh.coordinate(rank).items() if mesh.axis_size(name) > 1
        )
        shapes += [
            rect(x + 1, y + 1, side - 3, 41, look, tip=f"rank {rank}: {coordinate}", round_=5),
            text(x + side / 2, y + 15, str(rank), f"m s t{look}"),
            text(x + side / 2, y + 32, _letter(group), f"m t{look}"),
        ]
    height = 42 + math.ceil(len(shown) / columns) * 44
    if len(shown) < mesh.size:
        shapes.append(text(0, height + 10, f"… {mesh.size - len(shown)} more ranks", "n"))
        height += 22
    return Drawing(width, height, tuple(shapes))


def _letter(group: int) -> str:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return letters[group % 26] + (str(group // 26) if group >= 26 else "")
