"""What a picture of a plan shows: blocks of the source, blocks of the destination, ribbons between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardweave.layout import Box, Dim, Layout, Run, Tensor
from shardweave.layout.buffer import table_of
from shardweave.layout.table import Ints
from shardweave.plan import Family, Plan
from shardweave.show.choose import drawn_dim, matching, refuse_name
from shardweave.show.model import HEADS, MOST_ROWS, Band, Row, rows_of
from shardweave.show.words import dim_names, indices, role


@dataclass(frozen=True, slots=True)
class Block:
    """What one row of a buffer is in a picture of a plan: a source or a destination."""

    buffer: str
    row: Row


@dataclass(frozen=True, slots=True)
class Ribbon:
    """Places of a source block that are copied to places of a destination block.

    Attributes:
        label: Whose elements they are.
        what: They in words.
        src, dst: Numbers of the blocks.
        src_at, src_size, dst_at, dst_size: The places.
    """

    label: str
    what: str
    src: int
    dst: int
    src_at: int
    src_size: int
    dst_at: int
    dst_size: int


@dataclass(frozen=True, slots=True)
class Section:
    """Copies of the same share of all dims but the drawn one: of the same layers, the same columns.

    Attributes:
        title: The share, empty where it is everything.
        src, dst: The blocks of both sides.
        ribbons: The copies.
        hidden: How many copies are left out.
    """

    title: str
    src: tuple[Block, ...]
    dst: tuple[Block, ...]
    ribbons: tuple[Ribbon, ...]
    hidden: int


@dataclass(frozen=True, slots=True)
class Flow:
    """A plan as sections, and how many more there are."""

    src: str
    dst: str
    sections: tuple[Section, ...]
    hidden: int


def flow(
    plan: Plan, *, select: str | None = None, head_dim: int = 0, most: int = MOST_ROWS, most_sections: int = 4
) -> Flow:
    """The copies of the tensors that a word selects on either side.

    Args:
        plan: The plan.
        select: A label, a name of a buffer or tensor, or a part of one.
        head_dim: Rows of a head, for ``q``, ``k`` and ``v``.
        most: Blocks that a side of a section draws at most.
        most_sections: Sections that are drawn at most.

    Raises:
        UnknownNameError: Nothing has that name on either side.
    """
    chosen = {tensor for layout in (plan.src, plan.dst) for tensor in _selected(layout, select)}
    families = [family for family in plan.families if family.tensor in chosen]
    if not families and select is not None:
        refuse_name(select, plan.src, plan.dst)
    names = {
        part.tensor: part.label
        for layout in (plan.dst, plan.src)
        for rule in layout.rules
        for part in rule.parts
    }
    names = {tensor: label or role(tensor) for tensor, label in names.items()}
    gathered: dict[tuple[str, ...], list[_Copies]] = {}
    sides = _Blocks(plan.src, names, head_dim), _Blocks(plan.dst, names, head_dim)
    for family in families:
        for share, copies in _shares(plan, family, sides, names[family.tensor]):
            gathered.setdefault(share, []).extend(copies)
    sections = [_section(" · ".join(share), copies, sides, most) for share, copies in gathered.items()]
    return Flow(
        plan.src.name, plan.dst.name, tuple(sections[:most_sections]), max(0, len(sections) - most_sections)
    )


def _selected(layout: Layout, select: str | None) -> Iterator[Tensor]:
    for i in matching(layout, select):
        parts = layout.rules[i].parts
        named = [part for part in parts if select in (part.label, part.tensor.name, role(part.tensor))]
        yield from (part.tensor for part in named or parts)


_Key = tuple[int, int, int]
"""A block: rule, drawn dim, class."""

_Copies = tuple[_Key, _Key, Ribbon]
"""A ribbon from a block to a block, whose numbers are not known yet."""


class _Blocks:
    """The rows of the buffers of one side, each made once."""

    def __init__(self, layout: Layout, names: Mapping[Tensor, str], head_dim: int) -> None:
        self.layout, self.names, self.head_dim = layout, names, head_dim
        self._rows: dict[tuple[int, int], tuple[Row, ...]] = {}

    def rows(self, number: int, d: int) -> tuple[Row, ...]:
        if (number, d) not in self._rows:
            rule = self.layout.rules[number]
            self._rows[number, d] = rows_of(self.layout, rule, d, head_dim=self.head_dim, names=self.names)
        return self._rows[number, d]

    def class_of(self, number: int, d: int, ranks: Ints) -> Ints:
        """The row that each of some ranks is in."""
        found = np.zeros(self.layout.mesh.size, dtype=np.int64)
        for i, row in enumerate(self.rows(number, d)):
            found[np.array(row.ranks) - self.layout.mesh.offset] = i
        return found[ranks - self.layout.mesh.offset]

    def block(self, key: _Key) -> Block:
        return Block(self.layout.rules[key[0]].name, self.rows(key[0], key[1])[key[2]])


def _shares(
    plan: Plan, family: Family, sides: tuple[_Blocks, _Blocks], label: str
) -> Iterator[tuple[tuple[str, ...], list[_Copies]]]:
    """The copies of a family by what they are of the dims that are not drawn."""
    src_rule, dst_rule = plan.src.rules[family.src_rule], plan.dst.rules[family.dst_rule]
    # The side that says more of a dim decides: one that is fused, or else cut.
    cut = any(len(set(table_of(dim))) > 1 for dim in src_rule.dims)
    d = drawn_dim(src_rule if src_rule.fused or (cut and not dst_rule.fused) else dst_rule)
    src, dst = (
        sides[0].class_of(family.src_rule, d, family.src),
        sides[1].class_of(family.dst_rule, d, family.dst),
    )
    once = np.unique(np.stack([src, dst, family.box], axis=1), axis=0)
    nouns, domain = dim_names(family.tensor), family.tensor.dims
    unit = sides[0].head_dim if label in HEADS and d >= len(family.tensor.index) else 0
    rows = [side.rows(n, d) for side, n in zip(sides, (family.src_rule, family.dst_rule), strict=True)]
    # Replicas of the source share the work of a destination; their boxes of it are told together.
    shares: dict[tuple[str, str], tuple[dict[Box, None], dict[_Copies, None]]] = {}
    for a, b, box in once.tolist():
        elements = family.elements(box)
        at, places = range(1), [(0, 1), (0, 1)]
        if domain:
            at = elements.dims[d]
            places = [
                (int(column[box, d]), (len(at) - 1) * int(step[box, d]) + 1)
                for column, step in ((family.src_at, family.src_step), (family.dst_at, family.dst_step))
            ]
        what = Band(label, nouns[d], 0, len(at), at.start, at.step, unit).what
        ribbon = Ribbon(label, what, 0, 0, *places[0], *places[1])
        boxes, copies = shares.setdefault((rows[0][a].group, rows[1][b].group), ({}, {}))
        boxes[elements] = None
        copies[(family.src_rule, d, a), (family.dst_rule, d, b), ribbon] = None
    for boxes, copies in shares.values():
        dims = [_together(box.dims[i] for box in boxes) for i in range(len(domain))]
        parts = [i for i, one in enumerate(dims) if i != d and len(one) < len(domain[i])]
        yield tuple(indices(nouns[i], dims[i]) for i in parts), list(copies)


def _together(ranges: Iterable[range]) -> Dim:
    """Ranges that may have indices in common, as one dim."""
    distinct = dict.fromkeys(ranges)
    if len(distinct) == 1:
        return Dim(Run("", r.start, len(r), r.step) for r in distinct)
    return Dim(Run("", i, 1) for i in sorted(set().union(*distinct)))


def _section(title: str, copies: Sequence[_Copies], sides: tuple[_Blocks, _Blocks], most: int) -> Section:
    keys = [sorted(found)[:most] for found in ({src for src, _, _ in copies}, {dst for _, dst, _ in copies})]
    ribbons = tuple(
        replace(ribbon, src=keys[0].index(src), dst=keys[1].index(dst))
        for src, dst, ribbon in copies
        if src in keys[0] and dst in keys[1]
    )
    blocks = [tuple(side.block(key) for key in found) for side, found in zip(sides, keys, strict=True)]
    return Section(title, blocks[0], blocks[1], ribbons, len(copies) - len(ribbons))
