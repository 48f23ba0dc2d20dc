"""Strided views as blocks: what two views of flat storage, which is all that a checkpoint says, come to.

A view of a flat tensor is an offset and a stride for each of its axes. Where strides are those of the tensor,
as DeepSpeed writes them, a pair of views is one block, and all of them are told in columns. Others say more
with fewer words: blocks at equal distances, rows of steps, a whole that was flattened. Their axes are told
apart by the sizes of the tensor and of the shard, and they come to several blocks. What moves an element to
another dim, as a transposed shard does, is no block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from shardweave.errors import BufferRuleError, FormatError, OutsideError, OverlapError
from shardweave.layout.table import Ints

Axis = tuple[int, int, int]
"""A count and two strides: of the tensor, and of the shard."""


@dataclass(slots=True)
class Views:
    """Pairs of views as they were read, one entry a pair; numbers are in one list, told apart by ``axes``."""

    rank: list[int] = field(default_factory=list)
    axes: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rank)

    def key(self) -> object:
        """What the views say, to be compared and hashed."""
        columns = self.rank, self.axes, self.numbers, self.holders, self.scale
        return tuple(tuple(column) for column in columns)

    def add(self, rank: int, shape: object, source: Sequence[object], dest: Sequence[object]) -> bool:
        """Take a pair of views, or say that it is none."""
        strides, others = source[1], dest[1]
        if not (isinstance(shape, list | tuple) and isinstance(strides, list | tuple)):
            return False
        if not isinstance(others, list | tuple) or not len(shape) == len(strides) == len(others):
            return False
        numbers = [*shape, source[0], *strides, dest[0], *others]
        if not set(map(type, numbers)) <= {int} or len(shape) > 64:
            return False
        self.rank.append(rank)
        self.axes.append(len(shape))
        self.numbers += numbers
        return True


def blocks_of_views(
    views: Views, shape: tuple[int, ...], shards: Sequence[tuple[int, ...]], *, most: int, name: str
) -> tuple[Ints, Ints, Ints, Ints]:
    """The blocks of views of a tensor and of shards of it.

    Returns:
        First index, first place and size of each block, and the pair of views that it is of. Empty views are
        no block.

    Raises:
        OutsideError: A view begins before the begin or reaches past the end.
        OverlapError: A view runs into itself.
        BufferRuleError: A view is no block of the tensor at a place of the shard.
        FormatError: A number is too large, or blocks are too many.
    """
    dims = len(shape)
    try:
        numbers = np.array(views.numbers, dtype=np.int64)
    except OverflowError:
        _too_large(name, "a number of a view is 2**63 or more")
    axes = np.array(views.axes, dtype=np.int64)
    begin = np.cumsum(3 * axes + 2) - (3 * axes + 2)
    rows = np.flatnonzero(axes == dims)
    table = numbers[begin[rows, None] + np.arange(3 * dims + 2)]
    count, source, dest = table[:, :dims], table[:, dims : 2 * dims + 1], table[:, 2 * dims + 1 :]
    ranks = np.array(views.rank, dtype=np.int64)
    strides = _strides(np.array([shape], dtype=np.int64).reshape(1, dims))
    sizes = np.array(shards, dtype=np.int64).reshape(len(shards), dims)
    others = _strides(sizes)
    _check_signs(views, numbers, begin, axes, name)
    one = count == 1
    plain = ((one | (source[:, 1:] == strides)) & (one | (dest[:, 1:] == others[ranks[rows]]))).all(axis=1)
    full = (count > 0).all(axis=1)
    chosen = np.flatnonzero(plain & full)
    blocks = [
        (
            _coordinates(source[chosen, 0], strides),
            _coordinates(dest[chosen, 0], others[ranks[rows[chosen]]]),
            count[chosen],
            rows[chosen],
        )
    ]
    told = np.zeros(len(views), dtype=np.bool_)
    told[rows[plain | ~full]] = True
    total = len(chosen)
    for row in np.flatnonzero(~told).tolist():
        n, start = int(axes[row]), int(begin[row])
        words = views.numbers[start : start + 3 * n + 2]
        if 0 in words[:n]:
            continue
        found = _expand(
            list(zip(words[:n], words[n + 1 : 2 * n + 1], words[2 * n + 2 :], strict=True)),
            (words[n], words[2 * n + 1]),
            (shape, shards[views.rank[row]]),
            most - total,
            f"map of {name}, rank {views.rank[row]}, view {_shown(words, n)}",
        )
        total += len(found[0])
        blocks.append((*found, np.full(len(found[0]), row, dtype=np.int64)))
    index, at, size, row_of = (np.concatenate(each) for each in zip(*blocks, strict=True))
    return index, at, size, row_of


def _check_signs(views: Views, numbers: Ints, begin: Ints, axes: Ints, name: str) -> None:
    if not len(numbers) or int(numbers.min()) >= 0:
        return
    first = int(np.argmax(numbers < 0))
    row = int(np.searchsorted(begin, first, "right")) - 1
    words = views.numbers[int(begin[row]) : int(begin[row]) + 3 * int(axes[row]) + 2]
    raise OutsideError(
        "sizes, offsets and strides of a view are not negative",
        where=f"map of {name}, rank {views.rank[row]}",
        equation=_shown(words, int(axes[row])),
        hint="the description is damaged; a reversed view is no block",
    )


def _strides(shapes: Ints) -> Ints:
    """Row-major strides of shapes, one row each; where a dim is empty, nothing is asked of them."""
    strides = np.ones_like(shapes)
    for d in range(shapes.shape[1] - 2, -1, -1):
        strides[:, d] = strides[:, d + 1] * np.maximum(shapes[:, d + 1], 1)
    return np.maximum(strides, 1)


def _coordinates(offset: Ints, strides: Ints) -> Ints:
    """The index that each offset is in its tensor; past the end it is past the end of the first dim."""
    found = np.empty((len(offset), strides.shape[1]), dtype=np.int64)
    left = offset
    for d in range(strides.shape[1]):
        found[:, d], left = np.divmod(left, np.broadcast_to(strides[:, d], left.shape))
    return found


def _expand(
    axes: list[Axis],
    offsets: tuple[int, int],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    most: int,
    where: str,
) -> tuple[Ints, Ints, Ints]:
    """The blocks of one pair of views, whose axes are not those of the tensor."""
    axes = [axis for axis in axes if axis[0] > 1]
    for side, what in enumerate(("tensor", "shard")):
        last = offsets[side] + sum((axis[0] - 1) * axis[1 + side] for axis in axes)
        if last >= math.prod(shapes[side]):
            raise OutsideError(
                f"a view lies inside its {what}",
                where=where,
                equation=f"last({last}) >= numel({math.prod(shapes[side])})",
                hint="it would read its neighbour in memory; the description is damaged",
            )
        inner = 0
        for axis in sorted(axes, key=lambda axis: axis[1 + side]):
            if axis[1 + side] <= inner:
                raise OverlapError(
                    "the axes of a view do not run into one another",
                    where=where,
                    equation=f"stride({axis[1 + side]}) in the {what} <= reach({inner}) of axes inside it",
                    hint="one element would overwrite another; the description is damaged",
                )
            inner += (axis[0] - 1) * axis[1 + side]
    for side in (0, 1):
        axes = _told_apart(axes, offsets[side], shapes[side], side, where)
    dims = len(shapes[0])
    sides = [[_dim_of(axis[1 + side], shapes[side], where) for axis in axes] for side in (0, 1)]
    size = [1] * dims
    walked: list[tuple[int, int, int, int]] = []
    for (n, _, _), (d, step), (e, other) in zip(axes, *sides, strict=True):
        if d != e:
            _no_block(where, f"dim {d} of the tensor is dim {e} of the shard")
        if step == other == 1 and size[d] == 1:
            size[d] = n
        else:
            walked.append((n, d, step, other))
    total = math.prod(n for n, _, _, _ in walked)
    if total > most:
        _too_large(where, f"a view is {total} blocks, of {most} that are left")
    index = np.tile(np.array(_place(offsets[0], shapes[0]), dtype=np.int64), (total, 1)).reshape(total, dims)
    at = np.tile(np.array(_place(offsets[1], shapes[1]), dtype=np.int64), (total, 1)).reshape(total, dims)
    inner = total
    for n, d, step, other in walked:
        inner //= n
        turn = np.arange(total) // inner % n
        index[:, d] += turn * step
        at[:, d] += turn * other
    return index, at, np.tile(np.array(size, dtype=np.int64), (total, 1)).reshape(total, dims)


def _told_apart(axes: list[Axis], offset: int, shape: tuple[int, ...], side: int, where: str) -> list[Axis]:
    """The axes, with those cut that run over the end of a dim and on in the next one outside it."""
    found: list[Axis] = []
    left = sorted(axes, key=lambda axis: axis[1 + side])
    first = _place(offset, shape)
    reach = list(first)
    while left:
        axis = left.pop(0)
        d, step = _dim_of(axis[1 + side], shape, where)
        if reach[d] + (axis[0] - 1) * step < shape[d]:
            reach[d] += (axis[0] - 1) * step
            found.append(axis)
            continue
        turns = shape[d] // step
        if shape[d] % step or axis[0] % turns or turns == axis[0] or first[d] >= step or turns < 2:
            _no_block(where, f"dim {d} of size {shape[d]} is left at its end")
        outer = (axis[0] // turns, axis[1] * turns, axis[2] * turns)
        left = sorted([(turns, axis[1], axis[2]), outer, *left], key=lambda axis: axis[1 + side])
    return found


def _dim_of(stride: int, shape: tuple[int, ...], where: str) -> tuple[int, int]:
    """The dim that a stride goes along, and how many indices it goes."""
    step = 1
    best: tuple[int, int] | None = None
    for d in reversed(range(len(shape))):
        if shape[d] > 1 and stride >= step:
            best = d, step
        step *= shape[d]
    if best is None or stride % best[1]:
        _no_block(where, f"stride({stride}) goes along no dim of {shape}")
    return best[0], stride // best[1]


def _place(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        offset, place = divmod(offset, size)
        found.append(place)
    return tuple(reversed(found))


def _shown(words: Sequence[int], axes: int) -> str:
    shape, strides, others = words[:axes], words[axes + 1 : 2 * axes + 1], words[2 * axes + 2 :]
    return (
        f"shape{tuple(shape)} source({words[axes]}, {tuple(strides)}) "
        f"dest({words[2 * axes + 1]}, {tuple(others)})"
    )


def _no_block(where: str, equation: str) -> NoReturn:
    raise BufferRuleError(
        "a view is blocks of a tensor, each dim of it a dim of the shard",
        where=where,
        equation=equation,
        hint="a transposed or diagonal view is not said by a map of blocks; store the shard as it is cut",
    )


def _too_large(where: str, equation: str) -> NoReturn:
    raise FormatError(
        "the blocks of an affine map can be counted",
        where=where,
        equation=equation,
        hint="a damaged or hostile description can say anything; write blocks as large as they are",
    )
