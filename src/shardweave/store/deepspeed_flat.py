"""How ZeRO lays weights one after another, and which part of that a data-parallel rank has.

At stages 1 and 2 a group of weights is one flat array, padded at its end and cut into equal ranges, so that
a weight may straddle ranks. At stage 3 each weight is cut into equal ranges of its own, the last one
padded, and a rank keeps its ranges of the weights of a *sub-group* one after another.

Source: deepspeed 0.19.8 ``runtime/zero/stage_1_and_2.py`` (its constructor), ``runtime/zero/stage3.py``
(``_create_fp16_sub_groups``), ``runtime/zero/partition_parameters.py``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from shardweave.store.manifest import ITEMSIZE

START_ALIGNMENT: Final = 2
"""Ranges of a flat group start at a multiple of so many elements, four bytes of 16 bits."""
WEIGHT_ALIGNMENT_BYTES: Final = 16
"""Where ``parameter_alignment`` is on, weights start at a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval of a weight in the flat range of a rank, in elements.

    Attributes:
        number: The weight, as its place in the group.
        start, stop: The interval of the weight.
        at: Its first element in the range.
    """

    number: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """A group of weights one after another, in equal ranges over data-parallel ranks (stages 1 and 2).

    >>> group = FlatGroup.of([7, 5, 9], dp=2)
    >>> group.range_numel, group.padding(1), [str(piece) for piece in group.pieces(0)][-1]
    (12, 3, 'Piece(number=1, start=0, stop=5, at=7)')
    """

    numels: tuple[int, ...]
    starts: tuple[int, ...]
    paddings: tuple[int, ...]
    range_numel: int

    @classmethod
    def of(cls, numels: Sequence[int], *, dp: int, alignment: int = 1) -> FlatGroup:
        """The group of weights of so many elements; weights start at multiples of ``alignment``."""
        starts, paddings, end = list[int](), list[int](), 0
        for number, numel in enumerate(numels):
            starts.append(end)
            end += numel
            paddings.append(-end % alignment if number + 1 < len(numels) else 0)
            end += paddings[-1]
        return cls(
            tuple(numels), tuple(starts), tuple(paddings), -(-end // (START_ALIGNMENT * dp)) * START_ALIGNMENT
        )

    @property
    def numel(self) -> int:
        """Elements up to the end of the last weight."""
        return self.starts[-1] + self.numels[-1] if self.numels else 0

    def padding(self, rank: int) -> int:
        """Elements at the end of a rank's range that lie behind the last weight."""
        return min(max((rank + 1) * self.range_numel - self.numel, 0), self.range_numel)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What the range of a rank holds, in order."""
        low, high = rank * self.range_numel, (rank + 1) * self.range_numel
        for number in range(max(bisect_right(self.starts, low) - 1, 0), len(self.numels)):
            start = self.starts[number]
            if start >= high:
                return
            begin, end = max(low, start), min(high, start + self.numels[number])
            if begin < end:
                yield Piece(number, begin - start, end - start, begin - low)


@dataclass(frozen=True, slots=True)
class SlicedGroup:
    """A sub-group of weights, each in equal ranges over data-parallel ranks (stage 3).

    >>> [str(piece) for piece in SlicedGroup((7, 3), 4).pieces(3)]
    ['Piece(number=0, start=6, stop=7, at=0)']
    """

    numels: tuple[int, ...]
    dp: int

    @property
    def range_numel(self) -> int:
        """Elements that each rank has."""
        return sum(sliced(numel, self.dp) for numel in self.numels)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What the range of a rank holds, in order."""
        slots = [sliced(numel, self.dp) for numel in self.numels]
        for number, (numel, slot, at) in enumerate(
            zip(self.numels, slots, accumulate(slots, initial=0), strict=False)
        ):
            start, stop = rank * slot, min((rank + 1) * slot, numel)
            if start < stop:
                yield Piece(number, start, stop, at)


def sliced(numel: int, dp: int) -> int:
    """Elements of a weight that each rank has at stage 3, padding included."""
    return -(-numel // dp)


def sub_groups(numels: Sequence[int], *, dp: int, size: int) -> list[range]:
    """How stage 3 cuts a group: a sub-group ends with the weight that reaches ``size`` elements of a rank.

    >>> sub_groups([40, 40, 10, 40], dp=2, size=30)
    [range(0, 2), range(2, 4)]
    """
    slots = [sliced(numel, dp) for numel in numels]
    if size >= sum(slots):
        return [range(len(numels))]
    found, begin, held = [], 0, 0
    for number, slot in enumerate(slots):
        held += slot
        if held >= size or number + 1 == len(slots):
            found.append(range(begin, number + 1))
            begin, held = number + 1, 0
    return found


def round_robin(count: int, dp: int) -> list[int]:
    """The order of weights in a flat group where ``round_robin_gradients`` is on.

    >>> round_robin(5, 2)
    [0, 2, 4, 1, 3]
    """
    return [number for rank in range(min(dp, count)) for number in range(rank, count, dp)]


def weight_alignment(dtype: str) -> int:
    """Elements to a multiple of which weights start where ``parameter_alignment`` is on."""
    return WEIGHT_ALIGNMENT_BYTES // math.gcd(WEIGHT_ALIGNMENT_BYTES, ITEMSIZE[dtype])
