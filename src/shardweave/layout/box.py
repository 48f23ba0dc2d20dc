"""Boxes: n-dimensional, half-open, with steps; and the flat intervals of row-major storage.

One dim of a box is a Python ``range`` with a positive step: immutable, hashable, and equal to
another exactly when both hold the same indices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardweave.errors import OutsideError


@dataclass(frozen=True, slots=True)
class Box:
    """The product of one ``range`` a dim. A box without dims is a scalar and holds one element.

    >>> a, b = Box.of((0, 0), (4, 6)), Box((range(1, 9, 2), range(3, 9)))
    >>> print(intersect(a, b))
    [1:4:2, 3:6]
    """

    dims: tuple[range, ...]

    def __post_init__(self) -> None:
        if all(dim.step == 1 and 0 <= dim.start < dim.stop for dim in self.dims):
            return  # most boxes are; a plan has many
        for i, dim in enumerate(self.dims):
            if dim.step < 1 or (dim and dim.start < 0):
                raise OutsideError(
                    "a box steps forward and starts at 0 or later",
                    where=f"dim {i} of {len(self.dims)}",
                    equation=f"start({dim.start}), step({dim.step})",
                    hint="swap the ends of a reversed range; count indices from 0",
                )
        # The two ends of a range say more than the indices do; the canonical end is one past the last.
        object.__setattr__(self, "dims", tuple(_canonical(dim) for dim in self.dims))

    @classmethod
    def of(cls, offset: Sequence[int], shape: Sequence[int]) -> Box:
        """The box of step 1 at ``offset`` with ``shape``.

        Law: its ``shape`` is the one given, and so is its ``offset`` where no dim is empty.
        """
        if min(shape, default=0) < 0:
            raise OutsideError(
                "the sizes of a box are not negative",
                where=f"box at {tuple(offset)}",
                equation=f"shape{tuple(shape)}",
                hint="an empty dim has size 0",
            )
        return cls(tuple(range(o, o + s) for o, s in zip(offset, shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """How many indices each dim has."""
        return tuple(len(dim) for dim in self.dims)

    @property
    def offset(self) -> tuple[int, ...]:
        """The first index of each dim; 0 where a dim is empty."""
        return tuple(dim.start for dim in self.dims)

    @property
    def numel(self) -> int:
        """How many elements the box has; 1 without dims."""
        return math.prod(len(dim) for dim in self.dims)

    def __contains__(self, index: Sequence[int]) -> bool:
        return len(index) == len(self.dims) and all(i in dim for i, dim in zip(index, self.dims, strict=True))

    def __str__(self) -> str:
        from shardweave.layout.notation import format_box

        return format_box(self)


def _canonical(dim: range) -> range:
    if not len(dim):
        return range(0)
    return range(dim.start, dim[-1] + 1, dim.step if len(dim) > 1 else 1)


def intersect(a: Box, b: Box) -> Box | None:
    """The elements of both boxes, or ``None`` where there are none.

    Law: ``i in intersect(a, b)`` exactly when ``i in a and i in b``.
    """
    dims = tuple(intersect_range(x, y) for x, y in zip(a.dims, b.dims, strict=True))
    return Box(dims) if all(len(dim) for dim in dims) else None


def intersect_range(a: range, b: range) -> range:
    """The indices of both ranges, ascending: the first solves two congruences, the step is their lcm.

    Law: ``i in intersect_range(a, b)`` exactly when ``i in a and i in b``.
    """
    gcd = math.gcd(a.step, b.step)
    if not len(a) or not len(b) or (b.start - a.start) % gcd:
        return range(0)
    step = a.step // gcd * b.step
    period = b.step // gcd
    turns = (b.start - a.start) // gcd * pow(a.step // gcd, -1, period) % period if period > 1 else 0
    first = a.start + turns * a.step
    low, high = max(a.start, b.start), min(a[-1], b[-1])
    first += -(-(low - first) // step) * step
    return range(first, high + 1, step) if first <= high else range(0)


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that together hold the elements of ``a`` that are not in ``b``.

    Law: the boxes and ``intersect(a, b)`` tile ``a``.
    """
    common = intersect(a, b)
    if common is None:
        return [a] if a.numel else []
    rest: list[Box] = []
    for i, (whole, inner) in enumerate(zip(a.dims, common.dims, strict=True)):
        rest += [
            Box((*common.dims[:i], outside, *a.dims[i + 1 :])) for outside in _subtract_range(whole, inner)
        ]
    return rest


def _subtract_range(a: range, inner: range) -> Iterator[range]:
    """``a`` without ``inner``, a sub-progression of ``a``."""
    first, last = a.index(inner[0]), a.index(inner[-1])
    stride = inner.step // a.step if len(inner) > 1 else 1
    pieces = [a[:first], a[last + 1 :]]
    pieces += [a[first + phase : last : stride] for phase in range(1, stride)]
    return (piece for piece in pieces if len(piece))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The flat row-major interval ``start`` to ``stop`` of an array, as boxes in storage order.

    An interval of an n-dim array is at most ``2 * n - 1`` boxes: it climbs out of the rows it starts
    in, runs over whole slabs, and climbs down into the rows it ends in.

    Law: the concatenated flat indices of the boxes are ``range(start, stop)``.

    >>> print(*flat_boxes((4, 5), 3, 17))
    [0:1, 3:5] [1:3, 0:5] [3:4, 0:2]
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise OutsideError(
            "a flat interval lies inside its array",
            where=f"array of shape {tuple(shape)}",
            equation=f"0 <= start({start}) <= stop({stop}) <= numel({numel}) does not hold",
            hint="padding at the end of a flat buffer belongs to no tensor; cut it off first",
        )
    return list(_flat_boxes(tuple(shape), start, stop))


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start == stop:
        return
    if not shape:
        yield Box(())
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    rest = shape[1:]

    def inside(index: int, low: int, high: int) -> Iterator[Box]:
        return (Box((range(index, index + 1), *box.dims)) for box in _flat_boxes(rest, low, high))

    if first == last:
        yield from inside(first, head, tail)
        return
    if head:
        yield from inside(first, head, row)
        first += 1
    if first < last:
        yield Box((range(first, last), *(range(size) for size in rest)))
    if tail:
        yield from inside(last, 0, tail)


def flat_interval(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """The flat interval that a box is in row-major storage, or ``None`` where it is not one stretch.

    Law: ``flat_interval(shape, b)`` of each box of ``flat_boxes(shape, i, j)`` are consecutive
    intervals from ``i`` to ``j``.
    """
    if not box.numel:
        return None
    inner = 1
    start = 0
    open_dim = False  # an inner dim is not whole, so every outer dim must be a single index
    for size, dim in zip(reversed(shape), reversed(box.dims), strict=True):
        if open_dim and len(dim) > 1:
            return None
        if len(dim) > 1 and dim.step != 1:
            return None
        start += dim.start * inner
        open_dim = open_dim or len(dim) < size
        inner *= size
    return start, start + box.numel


def contiguous_runs(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """How many contiguous stretches a box is in row-major storage, and how many elements each has.

    Law: the flat indices of the box in row-major order are so many stretches of that length.

    >>> contiguous_runs((4, 6), Box.of((0, 2), (4, 3)))
    (4, 3)
    """
    length = 1
    for i in reversed(range(len(shape))):
        dim = box.dims[i]
        if len(dim) > 1 and dim.step != 1:
            break
        length *= len(dim)
        if len(dim) < shape[i]:
            break
    return (box.numel // length if length else 0), length


def indices(box: Box) -> Iterator[tuple[int, ...]]:
    """Every index of a box in row-major order; for tests and small pictures.

    Law: ``set(indices(b))`` is all that is ``in b``, ``b.numel`` of them.
    """
    return itertools.product(*box.dims)
