"""Blocks of copies as views of arrays, worked out once for a round that is carried out many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from shardweave.layout import Box
from shardweave.plan import Copy

if TYPE_CHECKING:
    import torch

    from shardweave.move.transport import Arrays

_MOST_ROUNDS = 256

T = TypeVar("T")


def source_block(copy: Copy, arrays: Arrays) -> torch.Tensor:
    """What a copy reads, as a view whose dims are in the destination's order."""
    block: torch.Tensor = copy.to_destination(arrays[copy.src_name][slices(copy.src_box)])
    return block


def target_block(copy: Copy, arrays: Arrays) -> torch.Tensor:
    """What a copy writes, as a view."""
    return arrays[copy.dst_name][slices(copy.dst_box)]


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of an array."""
    return tuple(slice(dim.start, dim.stop, dim.step) for dim in box.dims)


class Place(NamedTuple):
    """A block of an array: shape, strides and first element, in elements of the array's memory.

    Attributes:
        array: Which of several arrays.
    """

    array: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int

    def of(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """The block as a view."""
        return arrays[self.array].as_strided(self.shape, self.strides, self.begin)


class Views:
    """The blocks of some copies on one side, each a view of its array.

    To slice and permute takes longer than to make a view of known shape and strides. So where blocks lie in
    their arrays is kept, as long as the arrays have the same form; their memory may change, and is not kept.
    """

    def __init__(self, copies: Sequence[Copy], side: Literal["src", "dst"]) -> None:
        self.copies, self._block = tuple(copies), source_block if side == "src" else target_block
        names = [(c.src_rank, c.src_name) if side == "src" else (c.dst_rank, c.dst_name) for c in self.copies]
        self._names = tuple(dict.fromkeys(names))
        numbers = {name: i for i, name in enumerate(self._names)}
        self._array = [numbers[name] for name in names]
        self._form: list[tuple[object, ...]] = []
        self._places: list[Place] = []

    def of(self, held: Callable[[int], Arrays]) -> list[torch.Tensor]:
        """The blocks, in the order of the copies.

        Args:
            held: The arrays of a rank.
        """
        arrays = self.arrays(held)
        return [place.of(arrays) for place in self.places(arrays)]

    def arrays(self, held: Callable[[int], Arrays]) -> list[torch.Tensor]:
        """The arrays that the blocks are of, each once."""
        ranks = {rank: held(rank) for rank in dict.fromkeys(rank for rank, _ in self._names)}
        return [ranks[rank][name] for rank, name in self._names]

    def places(self, arrays: Sequence[torch.Tensor]) -> list[Place]:
        """Where the blocks are in these arrays; the same list as long as the arrays have the same form."""
        form = [(a.shape, a.stride(), a.storage_offset(), a.dtype, a.device) for a in arrays]
        if form != self._form:
            blocks = [
                self._block(copy, {self._names[i][1]: arrays[i]})
                for copy, i in zip(self.copies, self._array, strict=True)
            ]
            self._form, self._places = (
                list(form),
                [
                    Place(i, tuple(block.shape), block.stride(), int(block.storage_offset()))
                    for block, i in zip(blocks, self._array, strict=True)
                ],
            )
        return self._places


class Rounds(Generic[T]):
    """What was made of rounds, for the next time. A round is known by being the same tuple of copies."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Sequence[Copy], T]] = {}

    def of(self, copies: Sequence[Copy], make: Callable[[], T]) -> T:
        """What was made of a round before, or is made now."""
        known, found = self._kept.get(id(copies), (None, None))
        if known is copies and found is not None:
            return found
        made = make()
        if isinstance(copies, tuple):  # what can change is not known by what it was
            while len(self._kept) >= _MOST_ROUNDS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[id(copies)] = copies, made
        return made

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
