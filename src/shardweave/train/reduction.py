"""Which ranks the gradient of each array is summed over: the plan, and its proof.

The ranks compute one function together, so the gradient of an element of a weight is the sum over the ranks
that hold it. Who they are follows from the layout alone: ranks that agree on the axes that a rule reads, and
where two stages hold one tensor (a tied embedding), the same place of the other stage. ``reduce_plan`` writes
this down and proves it against what ranks really hold, so that a sum that misses a holder or takes one twice
is an error when the model is built, and not a slightly wrong loss.

Arrays of the same ranks travel together, in buckets. A bucket is cut evenly over its ranks, at rows: the cuts
say who counts an element for norms, and whose the state of the optimizer is where that is sharded.
``gradients.py`` takes the sums.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import GapError, HolderError, OverlapError, ShardweaveError
from shardweave.layout import Box, BufferRule, Dim, Layout, cut, flat_boxes, intersect
from shardweave.layout.buffer import table_of
from shardweave.layout.dtype import itemsize
from shardweave.layout.layout import format_ranks
from shardweave.layout.table import join, table
from shardweave.train.arrays import Held, held_arrays
from shardweave.train.grid import Ranks

BUCKET_BYTES = 1 << 26
"""What is sent at once, about."""


# --- plans --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reduction:
    """Whom the gradient of an array is summed over.

    Attributes:
        held: The array.
        over: The ranks of this rank's place that hold its elements, ascending.
        ends: This rank and its likes in the other places that do: the stages that share a tied embedding.
    """

    held: Held
    over: Ranks
    ends: Ranks


@dataclass(frozen=True, slots=True)
class Fragment:
    """A box of an array, and where its elements are in a stretch of the bucket, in row-major order."""

    held: Held
    box: Box
    places: slice


@dataclass(frozen=True)
class Bucket:
    """Arrays that are summed over the same ranks, one after the other.

    Attributes:
        over, ends: As in ``Reduction``.
        dtype: Of the arrays, by torch's name.
        arrays: The arrays in order, the same on all these ranks.
        cuts: Where the part of each rank of ``over`` begins, and the end.
    """

    over: Ranks
    ends: Ranks
    dtype: str
    arrays: tuple[Held, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each array begins, and the end."""
        return (0, *itertools.accumulate(int(np.prod(held.shape)) for held in self.arrays))

    @property
    def numel(self) -> int:
        """The elements of all arrays."""
        return self.starts[-1]

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Where the part of each rank of ``over`` begins, and the end: even but for whole rows."""
        return tuple(self._row(self.numel * k // len(self.over)) for k in range(len(self.over) + 1))

    def _row(self, at: int) -> int:
        """The nearest place that is between two rows of an array."""
        i = bisect_right(self.starts, at) - 1
        if i == len(self.arrays):
            return at
        shape = self.arrays[i].shape
        row = shape[-1] if len(shape) > 1 else 1
        return self.starts[i] + (at - self.starts[i] + row // 2) // row * row

    def slices(self, start: int, stop: int) -> Iterator[tuple[Held, slice, slice]]:
        """The arrays in a stretch of the bucket: each with its places there, and its own, counted through."""
        for held, first, last in zip(self.arrays, self.starts, self.starts[1:], strict=False):
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield held, slice(low - start, high - start), slice(low - first, high - first)

    def fragments(self, start: int, stop: int) -> Iterator[Fragment]:
        """A stretch of the bucket as boxes of its arrays, in order."""
        for held, places, inside in self.slices(start, stop):
            at = places.start
            for box in flat_boxes(held.shape, inside.start, inside.stop):
                yield Fragment(held, box, slice(at, at + box.numel))
                at += box.numel

    def num_padding(self, start: int, stop: int) -> int:
        """How many places of a stretch hold no element of the model."""
        return sum(
            common.numel
            for fragment in self.fragments(start, stop)
            for hole in fragment.held.padding
            if (common := intersect(hole, fragment.box)) is not None
        )


@dataclass(frozen=True)
class ReducePlan:
    """How the gradients of a rank are summed.

    Attributes:
        layout: What all ranks hold.
        rank: The rank.
        arrays: A reduction for each of its arrays, by name.
        buckets: The arrays in the order in which they are summed.
        bucket_bytes: What is sent at once, about.

    Laws:
        The ranks that an array is summed over are those that hold its elements, each once: proved when made.
        Every element of the model lies in the part of one rank of its holders, and of one of the places.
    """

    layout: Layout
    rank: int
    arrays: Mapping[str, Reduction]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int = BUCKET_BYTES

    def peer(self, rank: int) -> ReducePlan:
        """The plan that another rank has, where it is made in the same way; it was proved over there."""
        return _planned(self.layout, rank, self.bucket_bytes, proves=False)

    def own(self, bucket: Bucket) -> tuple[int, int]:
        """The stretch of a bucket that is this rank's part."""
        at = bucket.over.index(self.rank)
        return bucket.cuts[at], bucket.cuts[at + 1]

    def counts(self, bucket: Bucket) -> bool:
        """Whether this rank stands for its part: the first of the places that hold it does."""
        return self.rank == bucket.ends[0]

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: {len(self.arrays)} arrays in {len(self.buckets)} buckets"]
        for bucket in self.buckets:
            ends = f", then {format_ranks(bucket.ends)}" if len(bucket.ends) > 1 else ""
            size = f"{len(bucket.arrays)} of {bucket.numel} {bucket.dtype}"
            lines.append(f"  {size}: over {format_ranks(bucket.over)}{ends}")
        return "\n".join(lines)


def reduce_plan(layout: Layout, rank: int, *, bucket_bytes: int = BUCKET_BYTES) -> ReducePlan:
    """The plan of a rank, proved against the layout.

    Args:
        layout: What all ranks hold.
        rank: The global rank.
        bucket_bytes: What is sent at once, about; an array is never divided over two buckets.

    Raises:
        GapError: A rank holds an element and its gradient would be left out.
        OverlapError: A gradient would be taken twice, or ranks hold parts of each other's arrays.
        HolderError: A rank would be summed over that does not hold the elements.

    >>> from shardweave.layout import Mesh, Part, Tensor, along, even, whole
    >>> mesh = Mesh((("tp", 2), ("dp", 2)))
    >>> w, n = Tensor("w", (6, 5), "float32"), Tensor("n", (5,), "float32")
    >>> rows = along(mesh, "tp", lambda r: even(whole(6), 2, r))
    >>> rules = BufferRule("w", (Part(w),), (rows, whole(5))), BufferRule("n", (Part(n),), (whole(5),))
    >>> print(reduce_plan(Layout("small", mesh, rules), 1))
    rank 1: 2 arrays in 2 buckets
      1 of 15 float32: over ranks 1, 3
      1 of 5 float32: over ranks 0, 1, 2, 3
    """
    return _planned(layout, rank, bucket_bytes, proves=True)


def _planned(layout: Layout, rank: int, bucket_bytes: int, *, proves: bool) -> ReducePlan:
    numbers = {tensor: i for i, tensor in enumerate(layout.tensors)}
    rules = {rule.at(layout.mesh, rank): rule for rule in layout.rules}
    found: list[tuple[tuple[Any, ...], Reduction]] = []
    relations = _Relations(layout)
    for held in held_arrays(layout, rank).values():
        places = _places(layout, held, rules[held.buffer], rank)
        sums = {other: _replicas(layout, rule, other) for other, rule in places.items()}
        if proves:
            _prove(layout, held, rank, sums, relations)
        tensors = tuple(numbers[part.tensor] for part in held.buffer.parts)
        found.append(((tensors, held.positions), Reduction(held, sums[rank], tuple(sorted(sums)))))
    # The order of tensors in the layout, which is that of all ranks, whatever their rules are called.
    arrays = [reduction for _, reduction in sorted(found, key=lambda item: item[0])]
    buckets = tuple(_buckets(arrays, bucket_bytes))
    return ReducePlan(layout, rank, {a.held.name: a for a in arrays}, buckets, bucket_bytes)


def _replicas(layout: Layout, rule: BufferRule, rank: int) -> Ranks:
    """The ranks that hold of a rule what a rank does: those that agree on the axes that it reads."""
    coordinate = layout.mesh.coordinate(rank)
    return tuple(layout.mesh.where({axis: coordinate[axis] for axis in rule.axes}).tolist())


def _places(layout: Layout, held: Held, rule: BufferRule, rank: int) -> dict[int, BufferRule]:
    """A rank, and its likes where else a rule says that the array exists, with their rules."""
    mesh, found = layout.mesh, {rank: rule}
    coordinate = mesh.coordinate(rank)
    for i in sorted({i for part in held.buffer.parts for i, _ in layout.holders[part.tensor]}):
        other = layout.rules[i]
        view = next(v for v in (mesh.axes, *mesh.views) if set(other.axes) <= {name for name, _ in v})
        for values in itertools.product(*(values for _, values in other.where)):
            there = {name: coordinate[name] for name, _ in view}
            there |= dict(zip((axis for axis, _ in other.where), values, strict=True))
            like = mesh.rank(there)
            buffer = other.at(mesh, like)
            if (
                buffer is not None
                and buffer.dims == held.buffer.dims
                and buffer.stacked == held.buffer.stacked
            ):
                found.setdefault(like, other)
    return found


def _buckets(arrays: list[Reduction], bucket_bytes: int) -> Iterator[Bucket]:
    alike: dict[tuple[Ranks, Ranks, str], list[Held]] = {}
    for array in arrays:
        alike.setdefault((array.over, array.ends, array.held.buffer.dtype), []).append(array.held)
    for (over, ends, dtype), members in alike.items():
        size = itemsize(dtype)
        some: list[Held] = []
        for held in members:
            if some and sum(int(np.prod(one.shape)) for one in (*some, held)) * size > bucket_bytes:
                yield Bucket(over, ends, dtype, tuple(some))
                some = []
            some.append(held)
        yield Bucket(over, ends, dtype, tuple(some))


# --- proof --------------------------------------------------------------------------------------


class _Relations:
    """What coordinates of a dim share with the dim of an array; what is equal is looked at once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._known: dict[tuple[Dim, int, str, str, bool], tuple[NDArray[np.bool_], NDArray[np.bool_]]] = {}

    def of(
        self, mine: Dim, label: str, rule: BufferRule, d: int, other: str, *, separate: bool
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """For each coordinate, whether it shares an index with ``mine``, and whether it is ``mine``."""
        key = mine, id(rule.dims[d]), label, other, separate
        if key not in self._known:
            theirs = table_of(rule.dims[d])
            a, b = table((mine,), label), table(theirs, other)
            common = np.bincount(b.entry[join(a, b).row_b], minlength=len(theirs)) > 0
            same = common if separate else np.array([dim == mine for dim in theirs])
            self._known[key] = common, same & common
        return self._known[key]


def _prove(layout: Layout, held: Held, rank: int, sums: Mapping[int, Ranks], relations: _Relations) -> None:
    """Compare the ranks that are summed over with those that hold the elements, found from the dims alone."""
    summed = np.zeros(layout.mesh.size, dtype=np.int64)
    for over in sums.values():
        np.add.at(summed, np.array(over) - layout.mesh.offset, 1)
    for part in held.buffer.parts:
        holds = np.zeros(layout.mesh.size, dtype=np.int64)
        for i, other in layout.holders[part.tensor]:
            rule = layout.rules[i]
            entries = layout.entries(rule)
            common = layout.exists(rule)
            same = common & (rule.stacked == held.buffer.stacked)
            for d, dim in enumerate(held.buffer.dims):
                mine, separate = dim, d in held.buffer.separate
                if separate:
                    position = held.positions[held.buffer.separate.index(d)]
                    mine = cut(dim, position, position + 1)
                labels = _label(held, d, part.label), rule.label_of(d, other.label)
                both = separate and d not in (rule.stacked or ())
                shares, equal = relations.of(mine, labels[0], rule, d, labels[1], separate=both)
                common &= shares[entries[:, d]]
                same &= equal[entries[:, d]]
            if (common & ~same).any():
                ranks = np.flatnonzero(common & ~same) + layout.mesh.offset
                _refuse(
                    OverlapError,
                    layout,
                    held,
                    "ranks that hold an element hold the same array",
                    f"{format_ranks(ranks)} hold other parts that overlap with that of rank {rank}",
                )
            holds += same
        if not holds.any():
            continue  # padding only: nobody's gradient
        _compare(layout, held, holds, summed)


def _compare(layout: Layout, held: Held, holds: NDArray[np.int64], summed: NDArray[np.int64]) -> None:
    said = format_ranks(np.flatnonzero(summed) + layout.mesh.offset)
    for wrong, error, rule in (
        (holds > summed, GapError, "a gradient is summed over all ranks that hold its elements"),
        ((summed > 0) & (holds == 0), HolderError, "a gradient is summed over ranks that hold its elements"),
        ((summed > holds) | (holds > 1), OverlapError, "a gradient is summed over each holder once"),
    ):
        if wrong.any():
            ranks = format_ranks(np.flatnonzero(wrong) + layout.mesh.offset)
            holders = format_ranks(np.flatnonzero(holds) + layout.mesh.offset)
            equation = f"held by {holders}, summed over {said}: differs at {ranks}"
            _refuse(error, layout, held, rule, equation)


def _refuse(error: type[ShardweaveError], layout: Layout, held: Held, rule: str, equation: str) -> NoReturn:
    raise error(
        rule,
        where=f"layout {layout.name!r}, array {held.name!r}",
        equation=equation,
        hint="cut along axes so that each element is on the ranks that differ on axes the rule does not read",
    )


def _label(held: Held, d: int, label: str) -> str:
    """The label by which a part's runs are named in a dim of its buffer."""
    return label if any(held.buffer.dims[d].labels) else ""
