"""A plan: the copies that turn one layout into another, as columns of integers.

A plan has one ``Family`` for each tensor, source buffer and destination buffer. Its boxes say
which elements are copied from where in the one buffer to where in the other; its moves say from
which rank to which. Both are data: printed, costed, simulated, stored and replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardweave.layout import Box, Layout, Tensor
from shardweave.layout.buffer import Buffer
from shardweave.layout.dtype import itemsize
from shardweave.layout.table import Ints

BOX_COLUMNS = ("count", "index", "index_step", "src_at", "src_step", "dst_at", "dst_step")
MOVE_COLUMNS = ("box", "src", "dst")


@dataclass(frozen=True)
class Family:
    """The copies of one tensor between two buffer rules.

    Boxes are rows of ``(num_boxes, num_dims)`` columns, in the dims of the tensor, index dims
    first. Box ``b`` copies ``count[b]`` elements in each dim: those with the numbers
    ``index + i * index_step``, from positions ``src_at + i * src_step`` of the source buffer's
    dims to ``dst_at + i * dst_step`` of the destination buffer's.

    Moves are ``(num_moves,)`` columns: box ``box[m]`` is copied from rank ``src[m]`` to ``dst[m]``.

    Attributes:
        tensor: The tensor.
        src_rule, dst_rule: Numbers of the buffer rules in the two layouts.
    """

    tensor: Tensor
    src_rule: int
    dst_rule: int
    count: Ints
    index: Ints
    index_step: Ints
    src_at: Ints
    src_step: Ints
    dst_at: Ints
    dst_step: Ints
    box: Ints
    src: Ints
    dst: Ints

    @cached_property
    def numel(self) -> Ints:
        """Elements of each box."""
        numel: Ints = np.prod(self.count, axis=1, dtype=np.int64)
        return numel

    def elements(self, box: int) -> Box:
        """The elements of a box, in the tensor's numbers."""
        return box_of(self.index[box], self.index_step[box], self.count[box])


def box_of(at: Ints, step: Ints, count: Ints) -> Box:
    """One row of three columns as a box."""
    return Box(tuple(_ranges(at, step, count)))


@dataclass(frozen=True)
class Plan:
    """Everything that must be copied to turn ``src`` into ``dst``. Same input, same plan, on every rank."""

    src: Layout
    dst: Layout
    families: tuple[Family, ...]

    @property
    def num_moves(self) -> int:
        """Boxes copied from a rank to a rank."""
        return sum(len(family.box) for family in self.families)

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied, in the destination's dtypes."""
        return sum(
            int(family.numel[family.box].sum()) * itemsize(self.dst.rules[family.dst_rule].dtype)
            for family in self.families
        )

    def copies(self, families: Iterable[Family] | None = None) -> Iterator[Copy]:
        """Every move as copies between single stored arrays: the descriptors that executors consume.

        Args:
            families: Some of the plan's families; all by default.
        """
        for family in self.families if families is None else families:
            yield from _copies(self, family)


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy from a stored array of one rank to a stored array of another.

    Attributes:
        family: The family that it comes from.
        src_rank, src_name, src_box: Rank, array and positions, in the array's own dims.
        dst_rank, dst_name, dst_box: The same of the destination.
        src_dims, dst_dims: For each array dim, the dim of the tensor that it is.
        elements: Which elements of the tensor these are, in its dims and numbers.
    """

    family: Family
    src_rank: int
    src_name: str
    src_box: Box
    dst_rank: int
    dst_name: str
    dst_box: Box
    src_dims: tuple[int, ...]
    dst_dims: tuple[int, ...]
    elements: Box

    def to_destination(self, block: Any) -> Any:
        """A source block (numpy or torch) with its dims in the destination's order, as a view.

        The block has the shape of ``src_box``, the result that of ``dst_box``. Dims that only one of
        the two arrays has are of length 1 here.
        """
        return _rearrange(block, self.src_dims, self.dst_dims)

    def to_source(self, block: Any) -> Any:
        """The inverse of ``to_destination``: a destination block in the source's order, as a view."""
        return _rearrange(block, self.dst_dims, self.src_dims)


def _rearrange(block: Any, from_dims: tuple[int, ...], to_dims: tuple[int, ...]) -> Any:
    kept = [d for d in from_dims if d in to_dims]
    # The ellipsis keeps a view where no dim is left, and numpy would give a number.
    block = block[(*(slice(None) if d in to_dims else 0 for d in from_dims), ...)]
    order = [kept.index(d) for d in to_dims if d in kept]
    block = block.permute(order) if hasattr(block, "permute") else block.transpose(order)
    return block[(*(slice(None) if d in kept else None for d in to_dims), ...)]


def _copies(plan: Plan, family: Family) -> Iterator[Copy]:
    src_buffers = _buffers(plan.src, family.src_rule, family.src)
    dst_buffers = _buffers(plan.dst, family.dst_rule, family.dst)
    src_names, dst_names = _Names(), _Names()
    moves = zip(family.box.tolist(), family.src.tolist(), family.dst.tolist(), strict=True)
    for box, src_rank, dst_rank in moves:
        (src, src_separate), (dst, dst_separate) = src_buffers[src_rank], dst_buffers[dst_rank]
        src_places = _ranges(family.src_at[box], family.src_step[box], family.count[box])
        dst_places = _ranges(family.dst_at[box], family.dst_step[box], family.count[box])
        elements = _ranges(family.index[box], family.index_step[box], family.count[box])
        # A dim that is separate arrays on either side is walked one index at a time.
        walked = sorted({*src_separate, *dst_separate})
        for turn in itertools.product(*(range(len(src_places[d])) for d in walked)):
            s, t, e = list(src_places), list(dst_places), list(elements)
            for d, i in zip(walked, turn, strict=True):
                s[d], t[d], e[d] = s[d][i : i + 1], t[d][i : i + 1], e[d][i : i + 1]
            yield Copy(
                family,
                src_rank,
                src_names.member(src, tuple(s[d].start for d in src_separate)),
                Box(tuple(s[d] for d in src.stacked)),
                dst_rank,
                dst_names.member(dst, tuple(t[d].start for d in dst_separate)),
                Box(tuple(t[d] for d in dst.stacked)),
                src.stacked,
                dst.stacked,
                Box(tuple(e)),
            )


def _buffers(layout: Layout, number: int, ranks: Ints) -> dict[int, tuple[Buffer, tuple[int, ...]]]:
    """The buffer of each rank that a family names, and its separate dims."""
    found = {rank: layout.rules[number].at(layout.mesh, rank) for rank in np.unique(ranks).tolist()}
    return {rank: (buffer, buffer.separate) for rank, buffer in found.items() if buffer is not None}


class _Names:
    """Names of arrays, each made once: a stacked array is written to once an expert."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], str] = {}

    def member(self, buffer: Buffer, positions: tuple[int, ...]) -> str:
        key = id(buffer), positions
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = buffer.member(positions)
        return name


def _ranges(at: Ints, step: Ints, count: Ints) -> list[range]:
    columns = zip(at.tolist(), step.tolist(), count.tolist(), strict=True)
    return [range(a, a + (n - 1) * s + 1, s) for a, s, n in columns]
