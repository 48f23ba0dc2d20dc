"""The picture of a bridge: two grids of one job, and the rows that go between their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardweave.layout import Mesh
from shardweave.plan import Plan
from shardweave.show.canvas import (
    Drawing,
    arrow,
    below,
    colour,
    heading,
    inner_width,
    page,
    rect,
    ribbon,
    text,
)

_BOX = 218.0
_LEAST = 46.0
_GAP = 14.0
_LABELS = ("q", "k", "v", "up", "o", "gate", "down", "embed")
"""Colours of ranks, so that one that is in both grids is known again."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows that go from one rank to another.

    Attributes:
        src, dst: The ranks.
        count: How many.
    """

    src: int
    dst: int
    count: int


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """How many rows each rank sends to each, by sender and receiver.

    Args:
        plan: From the rows of one grid to those of another; each row a line of the first dim.
    """
    found: dict[tuple[int, int], int] = {}
    for family in plan.families:
        for box, src, dst in zip(family.box.tolist(), family.src.tolist(), family.dst.tolist(), strict=True):
            found[src, dst] = found.get((src, dst), 0) + int(family.count[box, 0])
    return tuple(Lane(src, dst, count) for (src, dst), count in sorted(found.items()))


def bridge_picture(plan: Plan, *, names: tuple[str, str], title: str, note: str = "") -> str:
    """Both grids with their ranks, and a band for the rows that go from each rank to each.

    A rank has one colour on both sides; a band has that of the rank that it comes from. Rows that stay on
    their rank are drawn too: they are not sent.

    Args:
        plan: From the rows of one grid to those of another.
        names: What the two grids are called.
        title: What is written above.
        note: What is written below it.
    """
    return page(title, below([heading(title, note=note), bridge_drawing(plan, names=names)]))


def bridge_drawing(plan: Plan, *, names: tuple[str, str], height: float = 440) -> Drawing:
    """The same as a drawing."""
    found = lanes(plan)
    rows = sum(lane.count for lane in found)
    meshes = plan.src.mesh, plan.dst.mesh
    sent = [_sum(found, "src"), _sum(found, "dst")]
    stacks = [
        _stack(mesh.ranks, counts, height / max(rows, 1)) for mesh, counts in zip(meshes, sent, strict=True)
    ]
    total = max(end for stack in stacks for _, end in stack.values())
    left, right, top = 0.0, inner_width() - _BOX, 56.0
    shapes = []
    for x, mesh, name in zip((left, right), meshes, names, strict=True):
        shapes += [text(x, 9, name, "s"), text(x, 30, _degrees(mesh), "n")]
    shapes.append(arrow(left + _BOX + 30, 14, right - 30, 14))
    offsets = [top + (total - max(end for _, end in stack.values())) / 2 for stack in stacks]
    # Where on each box the next band begins: bands are in the middle of a box that is higher than they are.
    per_row = [_per_row(stack, counts) for stack, counts in zip(stacks, sent, strict=True)]
    at = [
        {
            rank: offset + (start + end) / 2 - scale * counts.get(rank, 0) / 2
            for rank, (start, end) in stack.items()
        }
        for stack, counts, offset, scale in zip(stacks, sent, offsets, per_row, strict=True)
    ]
    words = []
    for lane in found:
        ends = []
        for side, (x, rank) in enumerate(((left + _BOX, lane.src), (right, lane.dst))):
            begin = at[side][rank]
            at[side][rank] = begin + lane.count * per_row[side]
            ends.append((x, begin, at[side][rank]))
        stays = lane.src == lane.dst
        tip = f"{lane.count} rows of rank {lane.src} " + ("stay on it" if stays else f"to rank {lane.dst}")
        shapes.append(ribbon(ends[0], ends[1], colour(_label(lane.src)), tip))
        x, y = ends[1][0] - 12, (ends[1][1] + ends[1][2]) / 2
        words.append(text(x, y, f"{lane.count} stay" if stays else str(lane.count), "e"))
    for x, mesh, stack, counts, offset, verb in zip(
        (left, right), meshes, stacks, sent, offsets, ("has", "wants"), strict=True
    ):
        for rank, (start, end) in stack.items():
            look = colour(_label(rank))
            both = rank in meshes[0].ranks and rank in meshes[1].ranks
            coordinate = ", ".join(_coordinate(mesh, rank)) or "alone"
            middle = offset + (start + end) / 2
            shapes += [
                rect(x, offset + start, _BOX, end - start, look, tip=f"rank {rank}: {coordinate}", round_=5),
                text(x + 12, middle - 9, f"rank {rank}" + (", in both" if both else ""), f"s t{look}"),
                text(x + 12, middle + 10, coordinate, f"t{look}"),
                text(x + _BOX - 12, middle, f"{verb} {counts.get(rank, 0)}", f"e t{look}"),
            ]
    return Drawing(inner_width(), top + total, (*shapes, *words))


def _sum(found: Sequence[Lane], side: str) -> dict[int, int]:
    counts: dict[int, int] = {}
    for lane in found:
        rank = getattr(lane, side)
        counts[rank] = counts.get(rank, 0) + lane.count
    return counts


def _stack(ranks: Sequence[int], counts: Mapping[int, int], per_row: float) -> dict[int, tuple[float, float]]:
    """For each rank the top and the bottom of its box."""
    found, y = {}, 0.0
    for rank in ranks:
        tall = max(_LEAST, counts.get(rank, 0) * per_row)
        found[rank] = (y, y + tall)
        y += tall + _GAP
    return found


def _per_row(stack: Mapping[int, tuple[float, float]], counts: Mapping[int, int]) -> float:
    """The height of a row, the same on all ranks of a side: what the fullest box leaves for each."""
    heights = [(end - start) / counts[rank] for rank, (start, end) in stack.items() if counts.get(rank)]
    return min(heights, default=0)


def _label(rank: int) -> str:
    return _LABELS[rank % len(_LABELS)]


def _coordinate(mesh: Mesh, rank: int) -> list[str]:
    sizes = dict(mesh.axes)
    return [f"{name} {at}" for name, at in mesh.coordinate(rank).items() if sizes.get(name, 1) > 1]


def _degrees(mesh: Mesh) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.axes if size > 1) or "one rank"
    return f"{sizes}: ranks {mesh.ranks[0]}-{mesh.ranks[-1]}"
