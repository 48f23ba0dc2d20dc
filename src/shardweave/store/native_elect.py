"""Who writes what: every box that ranks hold is written once, by one of its holders, with equal loads.

All of this is a pure function of what the ranks say that they hold, so that each of them comes to the same
answer and to the same proof of it, before a byte is written.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardweave.errors import DtypeError, FormatError, OverlapError
from shardweave.store.manifest import ITEMSIZE, Extent, StoredTensor
from shardweave.store.native import KEY, entry_key
from shardweave.store.tiling import prove_tiling

_SHARES = 64
"""A box is cut where it is more than such a part of what a rank writes: loads are then nearly equal."""
_LEAST_BYTES = 1 << 12
"""Boxes are not cut into smaller pieces: each has a row in the manifest."""

Index = tuple[int, ...]
Place = tuple[str, Index, Index]
"""The key of a tensor, and offset and size of a box of it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A box that a rank says it holds.

    Attributes:
        key: The key of the tensor.
        dtype: Its dtype.
        shape: Shape of the whole tensor.
        offset, size: The box, in the tensor's indices.
    """

    key: str
    dtype: str
    shape: Index
    offset: Index
    size: Index

    @property
    def place(self) -> Place:
        """Which box of which tensor it is."""
        return self.key, self.offset, self.size

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.size) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a box that a rank writes.

    Attributes:
        entry: The number of the box in what the rank holds.
        offset, size: The part, in the tensor's indices.
    """

    entry: int
    offset: Index
    size: Index


Shares = tuple[tuple[Share, ...], ...]
"""What each rank writes."""
Shared = tuple[tuple[tuple[int, ...], tuple[Place, ...]], ...]
"""Ranks that hold the same boxes, and these."""


def elect(held: Sequence[Sequence[Entry]]) -> Shares:
    """The writer of every box.

    Boxes with few holders are given away first; a box that is large for what a rank writes is cut along its
    outermost dim, so that several of its holders write it. Each part goes to the holder that has the least.

    Args:
        held: What each rank holds.

    Laws:
        Same input, same answer.
        The parts of a box tile it, and a rank writes parts of boxes that it holds.

    Raises:
        FormatError, DtypeError: Ranks contradict each other, or a key is none.
        OverlapError: A rank holds a box twice.
    """
    _check(held)
    boxes = [(ranks, held[ranks[0][0]][ranks[0][1]]) for ranks in _holders(held).values()]
    total = sum(entry.num_bytes for _, entry in boxes)
    grain = max(_LEAST_BYTES, total // (len(held) * _SHARES))
    loads = [0] * len(held)
    queues: dict[Index, list[tuple[int, int]]] = {}
    shares: list[list[Share]] = [[] for _ in held]
    boxes.sort(key=lambda box: (len(box[0]), -box[1].num_bytes, box[1].key, box[1].offset))
    for ranks, entry in boxes:
        if not _numel(entry.size) and _numel(entry.shape):
            continue  # of a tensor that has elements, a box without any says nothing
        numbers = dict(ranks)
        queue = queues.setdefault(tuple(numbers), [(0, rank) for rank in numbers])
        for offset, size in _cut(entry, min(len(ranks), -(-entry.num_bytes // grain))):
            while queue[0][0] != loads[queue[0][1]]:  # it was given something as a member of another set
                heapq.heapreplace(queue, (loads[queue[0][1]], queue[0][1]))
            rank = queue[0][1]
            shares[rank].append(Share(numbers[rank], offset, size))
            loads[rank] += math.prod(size) * ITEMSIZE[entry.dtype]
            heapq.heapreplace(queue, (loads[rank], rank))
    return tuple(tuple(sorted(mine, key=lambda share: (share.entry, share.offset))) for mine in shares)


def shared_by(held: Sequence[Sequence[Entry]]) -> Shared:
    """The boxes that several ranks hold, those of the same ranks together.

    >>> norm, half = Entry("model/n", "int8", (4,), (0,), (4,)), Entry("model/w", "int8", (4,), (0,), (2,))
    >>> shared_by([[norm, half], [norm]])
    (((0, 1), (('model/n', (0,), (4,)),)),)
    """
    found: dict[tuple[int, ...], list[Place]] = {}
    for place, ranks in _holders(held).items():
        if len(ranks) > 1 and _numel(place[2]):
            found.setdefault(tuple(rank for rank, _ in ranks), []).append(place)
    return tuple((ranks, tuple(sorted(found[ranks]))) for ranks in sorted(found))


def _holders(held: Sequence[Sequence[Entry]]) -> dict[Place, list[tuple[int, int]]]:
    """The ranks that hold each box, and its number in what each of them holds."""
    found: dict[Place, list[tuple[int, int]]] = {}
    for rank, entries in enumerate(held):
        for number, entry in enumerate(entries):
            found.setdefault(entry.place, []).append((rank, number))
    return found


def _numel(shape: Index) -> int:
    return math.prod(shape)


def _cut(entry: Entry, most: int) -> list[tuple[Index, Index]]:
    """A box in about equal parts along its outermost dim that has more than one index."""
    dim = next((d for d, n in enumerate(entry.size) if n > 1), None)
    if most < 2 or dim is None:
        return [(entry.offset, entry.size)]
    count, parts = entry.size[dim], []
    most = min(most, count)
    for i in range(most):
        low, high = i * count // most, (i + 1) * count // most
        parts.append(
            (
                (*entry.offset[:dim], entry.offset[dim] + low, *entry.offset[dim + 1 :]),
                (*entry.size[:dim], high - low, *entry.size[dim + 1 :]),
            )
        )
    return parts


def _check(held: Sequence[Sequence[Entry]]) -> None:
    """Keys are keys, a rank holds a box once, and all say the same of a tensor."""
    said: dict[str, tuple[int, Entry]] = {}
    for rank, entries in enumerate(held):
        seen = set()
        for entry in entries:
            if not KEY.fullmatch(entry.key) or not entry.key.isprintable():
                raise FormatError(
                    "a key is model/{name} or optim/{name}/{state}",
                    where=f"rank {rank}",
                    equation=f"key({entry.key!r:.200})",
                    hint="name weights as Hugging Face does, with the numbers of layer and expert",
                )
            first, other = said.setdefault(entry.key, (rank, entry))
            if (other.dtype, other.shape) != (entry.dtype, entry.shape):
                kind = DtypeError if other.shape == entry.shape else FormatError
                raise kind(
                    "all ranks say the same of a tensor",
                    where=f"{entry.key!r}, ranks {first} and {rank}",
                    equation=f"{other.dtype} {other.shape} != {entry.dtype} {entry.shape}",
                    hint="describe all ranks by one layout of one model",
                )
            box = entry.place
            if box in seen and _numel(entry.size):
                raise OverlapError(
                    "a rank holds a box once",
                    where=f"rank {rank}, {entry_key(*box)!r}",
                    equation="it is listed twice",
                    hint="list a tied weight once, under the name that it is stored by",
                )
            seen.add(box)


def tensors_of(
    held: Sequence[Sequence[Entry]], shares: Shares, files: Mapping[int, str]
) -> list[StoredTensor]:
    """The tensors that the shares of all ranks come to, in the order in which ranks first hold them.

    Args:
        held: What each rank holds.
        shares: What each writes.
        files: The file of each rank that writes something.
    """
    extents: dict[str, list[Extent]] = {}
    specs: dict[str, Entry] = {}
    for entries in held:
        for entry in entries:
            specs.setdefault(entry.key, entry)
            extents.setdefault(entry.key, [])
    for rank, mine in enumerate(shares):
        for share in mine:
            key = held[rank][share.entry].key
            extents[key].append(Extent(share.offset, share.size, files[rank], 0))
    return [
        StoredTensor(key, specs[key].dtype, specs[key].shape, tuple(sorted(found, key=lambda e: e.offset)))
        for key, found in extents.items()
    ]


def prove_shares(held: Sequence[Sequence[Entry]], shares: Shares, files: Mapping[int, str]) -> None:
    """Every element of every tensor is written once, by a rank that holds it; padding is of no tensor.

    Raises:
        GapError: Nobody writes a box.
        OverlapError: Two ranks write it.
        OutsideError: A box reaches beyond its tensor, as one with padding does.
    """
    prove_tiling(tensors_of(held, shares, files), root=Path("what ranks would write"))
