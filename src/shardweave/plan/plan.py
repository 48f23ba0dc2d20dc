"""A plan: the copies that turn one layout into another, as columns of integers.

A plan has one ``Family`` for each tensor, source buffer and destination buffer. Its boxes say
which elements are copied from where in the one buffer to where in the other; its moves say from
which rank to which. Both are data: printed, costed, simulated, stored and replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardweave.layout import Box, Layout, Tensor
from shardweave.layout.buffer import Buffer
from shardweave.layout.table import Ints


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
        return np.prod(self.count, axis=1, dtype=np.int64)

    def elements(self, box: int) -> Box:
        """The elements of a box, in the tensor's numbers."""
        return _box(self.index[box], self.index_step[box], self.count[box])


def _box(start: Ints, step: Ints, count: Ints) -> Box:
    return Box(
        tuple(
            range(int(s), int(s + (n - 1) * p + 1), int(p))
            for s, p, n in zip(start, step, count, strict=True)
        )
    )


@dataclass(frozen=True)
class Plan:
    """Everything that must be copied to turn ``src`` into ``dst``. Same input, same plan, on every rank."""

    src: Layout
    dst: Layout
    families: tuple[Family, ...]

    @property
    def num_moves(self) -> int:
        return sum(len(family.box) for family in self.families)

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied, in the destination's dtypes."""
        from shardweave.layout.dtype import itemsize

        return sum(
            int(family.numel[family.box].sum()) * itemsize(self.dst.rules[family.dst_rule].dtype)
            for family in self.families
        )

    def copies(self) -> Iterator[Copy]:
        """Every move as copies between single stored arrays: the descriptors that executors consume."""
        for family in self.families:
            yield from _copies(self, family)


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy from a stored array of one rank to a stored array of another.

    Attributes:
        family: The family that it comes from.
        src_rank, src_name, src_box: Rank, array and positions, in the array's own dims.
        dst_rank, dst_name, dst_box: The same of the destination.
        src_dims, dst_dims: For each array dim, the dim of the tensor that it is.
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

    def to_destination(self, values: Any) -> Any:
        """A source block (numpy or torch) with its dims in the destination's order, as a view.

        The block has the shape of ``src_box``, the result that of ``dst_box``. Dims that only one
        of the two arrays has are of length 1 here.
        """
        kept = [d for d in self.src_dims if d in self.dst_dims]
        dropped = tuple(slice(None) if d in self.dst_dims else 0 for d in self.src_dims)
        order = [kept.index(d) for d in self.dst_dims if d in kept]
        values = values[dropped]
        values = values.permute(order) if hasattr(values, "permute") else values.transpose(order)
        return values[tuple(slice(None) if d in kept else None for d in self.dst_dims)]


def _copies(plan: Plan, family: Family) -> Iterator[Copy]:
    src_rule, dst_rule = plan.src.rules[family.src_rule], plan.dst.rules[family.dst_rule]
    src_buffers: dict[int, Buffer] = {}
    dst_buffers: dict[int, Buffer] = {}
    for b, src_rank, dst_rank in zip(
        family.box.tolist(), family.src.tolist(), family.dst.tolist(), strict=True
    ):
        src = src_buffers.get(src_rank) or src_buffers.setdefault(src_rank, _at(plan.src, family.src_rule, src_rank))
        dst = dst_buffers.get(dst_rank) or dst_buffers.setdefault(dst_rank, _at(plan.dst, family.dst_rule, dst_rank))
        count = family.count[b].tolist()
        # A dim that is separate arrays on either side is walked one index at a time.
        walked = sorted({*src.separate, *dst.separate})
        src_ranges = _ranges(family.src_at[b], family.src_step[b], family.count[b])
        dst_ranges = _ranges(family.dst_at[b], family.dst_step[b], family.count[b])
        for turn in itertools.product(*(range(count[d]) for d in walked)):
            s, t = list(src_ranges), list(dst_ranges)
            for d, i in zip(walked, turn, strict=True):
                s[d], t[d] = s[d][i : i + 1], t[d][i : i + 1]
            yield Copy(
                family,
                src_rank,
                src.member(tuple(s[d].start for d in src.separate)),
                Box(tuple(s[d] for d in src.stacked)),
                dst_rank,
                dst.member(tuple(t[d].start for d in dst.separate)),
                Box(tuple(t[d] for d in dst.stacked)),
                src.stacked,
                dst.stacked,
            )


def _at(layout: Layout, rule: int, rank: int) -> Buffer:
    buffer = layout.rules[rule].at(layout.mesh, rank)
    assert buffer is not None, "a plan names only ranks that hold the buffer"
    return buffer


def _ranges(at: Ints, step: Ints, count: Ints) -> list[range]:
    return [
        range(a, a + (n - 1) * s + 1, s) for a, s, n in zip(at.tolist(), step.tolist(), count.tolist(), strict=True)
    ]
