"""Affine maps: one tensor over the ranks of one axis, as blocks of the tensor at places of each rank's shard.

A map says which ranks hold each block, so that a reader of one shard knows where else its bytes are. It is
the form in which checkpoints carry layouts as data (``dialects/affine.py`` reads DeepSpeed's), and here it
is columns: what is proved and merged is never an element and never a pair of blocks.

A map that exists is right. Every element of the tensor is held, by exactly the ranks that are declared for
it; every shard is filled, each of its places once. And it has one form: blocks as large as holders and scale
allow, so that maps are equal exactly when they say the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import GapError, HolderError, OutsideError, OverlapError, TransformError
from shardweave.layout.mesh import MOST_RANKS
from shardweave.layout.region import balance, merged
from shardweave.layout.table import Ints

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """The blocks of a map, one row a block; columns of ``(n,)`` or ``(n, dims)``.

    Attributes:
        rank: Whose shard the block is in.
        index: Its first index in the tensor.
        at: Its first place in the shard.
        count: Its size, the same on both sides.
        holders: The number of the set of ranks that hold it.
        scale: What the shard holds it multiplied by.
    """

    rank: Ints
    index: Ints
    at: Ints
    count: Ints
    holders: Ints
    scale: Floats

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, rows: NDArray[np.bool_] | Ints) -> Pieces:
        return Pieces(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, eq=False, slots=True)
class AffineMap:
    """Which block of one tensor is at which place of which rank's shard. Proved and merged on construction.

    Attributes:
        shape: The shape of the tensor.
        shards: The shape of each rank's shard; a rank that holds nothing has an empty one.
        pieces: The blocks, by rank and place; none is empty.
        sets: The sets of ranks that hold a block, each ascending.

    Laws:
        Two maps are equal exactly when each rank has the same shape, the same elements at the same places,
        the same scales, and every element the same holders.
        No two blocks with the same holders and scale make one block.

    Args:
        shape: The shape of the tensor.
        shards: The shape of each rank's shard.
        pieces: The blocks in any order, however they are cut.
        sets: The sets of ranks that ``pieces.holders`` numbers.
        name: What the map is of, for messages.

    Raises:
        OutsideError: A block reaches outside the tensor or its shard.
        GapError: An element is held by no rank, or a place of a shard is not filled.
        OverlapError: A place is filled twice, or an element is held by ranks that do not declare it together.
        HolderError: The ranks declared for a block are not those that hold it.
        TransformError: A scale is not a power of two, so that values could not be had back.
    """

    shape: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]
    pieces: Pieces
    sets: tuple[tuple[int, ...], ...]

    def __init__(
        self,
        shape: Sequence[int],
        shards: Sequence[Sequence[int]],
        pieces: Pieces,
        sets: Sequence[Sequence[int]],
        *,
        name: str = "a tensor",
    ) -> None:
        put = object.__setattr__
        put(self, "shape", tuple(shape))
        put(self, "shards", tuple(tuple(shard) for shard in shards))
        proof = _Proof(self.shape, self.shards, name)
        proof.check_shapes()
        pieces = pieces[np.all(pieces.count != 0, axis=1)]
        proof.check_scales(pieces)
        proof.check_inside(pieces)
        proof.check_filled(pieces)
        proof.check_holders(pieces, sets)
        found = _sorted_sets(pieces, sets)
        put(self, "pieces", _merged(found[0]))
        put(self, "sets", found[1])

    @property
    def num_ranks(self) -> int:
        """The ranks of the axis."""
        return len(self.shards)

    @property
    def shared(self) -> bool:
        """Whether some element is held by several ranks."""
        return any(len(ranks) > 1 for ranks in self.sets)

    def of_rank(self, rank: int) -> Pieces:
        """The blocks in the shard of one rank, by place."""
        low, high = np.searchsorted(self.pieces.rank, (rank, rank + 1))
        return self.pieces[np.arange(low, high)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AffineMap):
            return NotImplemented
        same = (self.shape, self.shards, self.sets) == (other.shape, other.shards, other.sets)
        return same and all(
            np.array_equal(getattr(self.pieces, name), getattr(other.pieces, name))
            for name in Pieces.__slots__
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.shards, self.sets, self.pieces.index.tobytes()))

    def __repr__(self) -> str:
        return f"AffineMap(shape={self.shape}, shards={self.shards}, {len(self.pieces)} pieces)"


def _sorted_sets(pieces: Pieces, sets: Sequence[Sequence[int]]) -> tuple[Pieces, tuple[tuple[int, ...], ...]]:
    """The pieces with the sets that they name in one order, each once."""
    named = [tuple(sorted(set(sets[i]))) for i in np.unique(pieces.holders).tolist()]
    kept = tuple(sorted(set(named)))
    number = {ranks: i for i, ranks in enumerate(kept)}
    table = np.zeros(1 + int(pieces.holders.max(initial=0)), dtype=np.int64)
    table[np.unique(pieces.holders)] = [number[ranks] for ranks in named]
    holders = table[pieces.holders]
    return Pieces(pieces.rank, pieces.index, pieces.at, pieces.count, holders, pieces.scale), kept


def _merged(pieces: Pieces) -> Pieces:
    """The pieces as large as they can be. What moves alike and is held alike is one region of a shard."""
    shift = pieces.index - pieces.at
    scale, number = np.unique(pieces.scale, return_inverse=True)
    alike = np.column_stack([pieces.rank, pieces.holders, number, shift])
    order = np.lexsort(alike.T[::-1])
    new = np.ones(len(order), dtype=np.int64)
    new[1:] = (alike[order][1:] != alike[order][:-1]).any(axis=1)
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.cumsum(new) - 1
    first = order[np.flatnonzero(new)]
    group, low, high = merged(group, pieces.at, pieces.at + pieces.count)
    row = first[group]
    order = np.lexsort((*low.T[::-1], pieces.rank[row]))
    row, low, high = row[order], low[order], high[order]
    return Pieces(
        pieces.rank[row], low + shift[row], low, high - low, pieces.holders[row], scale[number[row]]
    )


@dataclass(frozen=True, slots=True)
class _Proof:
    """The rules of a map; what they refuse says where."""

    shape: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]
    name: str

    def check_shapes(self) -> None:
        for what, shape in (
            ("the tensor", self.shape),
            *((f"the shard of rank {r}", s) for r, s in enumerate(self.shards)),
        ):
            numel = math.prod(shape)
            if min(shape, default=0) < 0 or numel >= 1 << 63 or max(shape, default=0) >= 1 << 63:
                raise OutsideError(
                    "sizes are not negative, and elements can be counted",
                    where=f"map of {self.name}, {what}",
                    equation=f"shape{shape}",
                    hint="the description is damaged; take it from the checkpoint again",
                )
            if len(shape) != len(self.shape):
                raise OutsideError(
                    "a shard has the dims of its tensor",
                    where=f"map of {self.name}, {what}",
                    equation=f"shape{shape} has {len(shape)} dims, shape{self.shape} has {len(self.shape)}",
                    hint="flat shards are ranges of a buffer and no blocks: undo the flattening first",
                )
        if not 1 <= len(self.shards) <= MOST_RANKS:
            raise HolderError(
                "a map is over ranks that can be listed",
                where=f"map of {self.name}",
                equation=f"ranks({len(self.shards)}) is not in 1..{MOST_RANKS}",
                hint="the description is damaged; take it from the checkpoint again",
            )

    def check_scales(self, pieces: Pieces) -> None:
        bad = ~(np.isfinite(pieces.scale) & (np.abs(np.frexp(pieces.scale)[0]) == 0.5))
        if bad.any():
            row = int(np.argmax(bad))
            raise TransformError(
                "a scale is a power of two, so that every bit of a value can be had back",
                where=self._piece(pieces, row),
                equation=f"scale({pieces.scale[row]})",
                hint="store the values unscaled; another scale rounds, and 0, inf and nan lose them",
            )

    def check_inside(self, pieces: Pieces) -> None:
        shards = np.array(self.shards, dtype=np.int64).reshape(len(self.shards), len(self.shape))
        sizes = np.broadcast_to(np.array(self.shape, dtype=np.int64), pieces.index.shape)
        known = (pieces.rank >= 0) & (pieces.rank < len(self.shards))
        if not known.all():
            row = int(np.argmin(known))
            raise HolderError(
                "a block is in the shard of a rank of the map",
                where=f"map of {self.name}",
                equation=f"rank({pieces.rank[row]}) is not in 0..{len(self.shards) - 1}",
                hint="give one shard a rank",
            )
        for what, first, size in (
            ("tensor", pieces.index, sizes),
            ("shard", pieces.at, shards[pieces.rank]),
        ):
            # Written so that nothing can overflow.
            inside = (pieces.count > 0) & (first >= 0) & (first <= size - pieces.count)
            if not inside.all():
                row = int(np.argmin(inside.all(axis=1)))
                raise OutsideError(
                    f"a block lies inside its {what}",
                    where=self._piece(pieces, row),
                    equation=(
                        f"first{tuple(first[row].tolist())} + count{tuple(pieces.count[row].tolist())} "
                        f"against shape{tuple(size[row].tolist())}"
                    ),
                    hint="the description and the shards are not of one checkpoint, or it is damaged",
                )

    def check_filled(self, pieces: Pieces) -> None:
        ranks, dims = len(self.shards), len(self.shape)
        shards = np.array(self.shards, dtype=np.int64).reshape(ranks, dims)
        group, place, number = balance(
            np.concatenate([np.arange(ranks), pieces.rank]),
            np.concatenate([np.zeros_like(shards), pieces.at]),
            np.concatenate([shards, pieces.at + pieces.count]),
            np.concatenate([np.full(ranks, -1), np.ones(len(pieces), dtype=np.int64)]),
        )
        if not len(group):
            return
        where = f"map of {self.name}, rank {group[0]}, place {tuple(place[0].tolist())} of its shard"
        if number[0] > 0:
            raise OverlapError(
                "each place of a shard is filled once",
                where=where,
                equation=f"filled {number[0] + 1} times",
                hint="one block would overwrite the other; the description is damaged",
            )
        raise GapError(
            "each place of a shard is filled",
            where=where,
            equation="filled 0 times",
            hint="what is not described cannot be moved; the description is cut short",
        )

    def check_holders(self, pieces: Pieces, sets: Sequence[Sequence[int]]) -> None:
        """For each set of ranks, every rank of it holds the same region; and the regions tile the tensor."""
        sizes = np.array([len(set(ranks)) for ranks in sets], dtype=np.int64)
        used = np.unique(pieces.holders)
        members = np.array([rank for i in used.tolist() for rank in sorted(set(sets[i]))], dtype=np.int64)
        of_set = np.repeat(used, sizes[used])
        span = len(self.shards)
        if ((members < 0) | (members >= span)).any() or not sizes[used].all():
            rows = np.flatnonzero(~np.isin(pieces.holders, self._sound(sets, used)))
            raise HolderError(
                "the holders of a block are ranks of the map, one at least",
                where=self._piece(pieces, int(rows[0])),
                equation=f"holders{tuple(sets[int(pieces.holders[rows[0]])])} against ranks 0..{span - 1}",
                hint="the description and the shards are not of one checkpoint, or it is damaged",
            )
        declared = of_set * span + members
        own = pieces.holders * span + pieces.rank
        strange = ~np.isin(own, declared)
        if strange.any():
            row = int(np.argmax(strange))
            self._refuse_holders(
                pieces, sets, row, f"rank {pieces.rank[row]} holds it", pieces.index[row], pieces.rank[row]
            )
        # One region a set and scale, as its first rank holds it.
        scales, number = np.unique(pieces.scale, return_inverse=True)
        region = pieces.holders * len(scales) + number
        first = np.full(1 + int(pieces.holders.max(initial=0)), -1)
        first[of_set[::-1]] = members[::-1]
        group, place, corners = balance(
            region * span + pieces.rank,
            pieces.index,
            pieces.index + pieces.count,
            np.ones(len(pieces), dtype=np.int64),
        )
        self._check_alike(pieces, sets, group, place, corners, first=first, scales=len(scales))
        lead = pieces[pieces.rank == first[pieces.holders]]
        whole = np.array([self.shape], dtype=np.int64).reshape(1, len(self.shape))
        _, place, corners = balance(
            np.zeros(1 + len(lead), dtype=np.int64),
            np.concatenate([np.zeros_like(whole), lead.index]),
            np.concatenate([whole, lead.index + lead.count]),
            np.concatenate([[-1], np.ones(len(lead), dtype=np.int64)]),
        )
        if len(place):
            self._refuse_cover(pieces, sets, place[0], int(corners[0]))

    def _check_alike(
        self,
        pieces: Pieces,
        sets: Sequence[Sequence[int]],
        group: Ints,
        place: Ints,
        corners: Ints,
        *,
        first: Ints,
        scales: int,
    ) -> None:
        """Every rank of a set has the corners of the set's first one."""
        span = len(self.shards)
        found = np.flatnonzero(np.r_[True, group[1:] != group[:-1]]) if len(group) else group
        size = np.diff(np.append(found, len(group)))
        region = group[found] // span
        begin = {key: row for row, key in enumerate(group[found].tolist())}
        for key in np.unique(region).tolist():
            ranks = sorted(set(sets[key // scales]))
            rows = [begin.get(key * span + rank, -1) for rank in ranks]
            lead = slice(found[rows[0]], found[rows[0]] + size[rows[0]]) if rows[0] >= 0 else slice(0, 0)
            for rank, row in zip(ranks[1:], rows[1:], strict=True):
                mine = slice(found[row], found[row] + size[row]) if row >= 0 else slice(0, 0)
                if np.array_equal(place[lead], place[mine]) and np.array_equal(corners[lead], corners[mine]):
                    continue
                told, held = _first_difference(place[lead], corners[lead], place[mine], corners[mine])
                # What is left first of the one and not of the other is held by the one alone.
                who = ranks[0] if held > 0 else rank
                other = rank if held > 0 else ranks[0]
                row = int(np.argmax((pieces.rank == who) & (pieces.holders == key // scales)))
                self._refuse_holders(
                    pieces, sets, row, f"rank {who} holds it and rank {other} does not so", told, who
                )

    def _sound(self, sets: Sequence[Sequence[int]], used: Ints) -> list[int]:
        span = len(self.shards)
        return [i for i in used.tolist() if len(sets[i]) and all(0 <= rank < span for rank in sets[i])]

    def _refuse_holders(
        self, pieces: Pieces, sets: Sequence[Sequence[int]], row: int, what: str, place: Ints, rank: int
    ) -> NoReturn:
        held = tuple(sorted(set(sets[int(pieces.holders[row])])))
        raise HolderError(
            "a block is held by exactly the ranks that are declared for it",
            where=f"map of {self.name}, rank {rank}, element {tuple(place.tolist())}",
            equation=f"declared {held}, but {what}",
            hint="a holder of another part, or with another scale, is a block of its own",
        )

    def _refuse_cover(
        self, pieces: Pieces, sets: Sequence[Sequence[int]], place: Ints, number: int
    ) -> NoReturn:
        where = f"map of {self.name}, element {tuple(place.tolist())}"
        if number < 0:
            raise GapError(
                "every element of a tensor is held by some rank",
                where=where,
                equation="held by no rank",
                hint="the tensor cannot be made of these shards; the description is wrong or cut short",
            )
        rows = np.flatnonzero(
            ((pieces.index <= place) & (place < pieces.index + pieces.count)).all(axis=1)
        ).tolist()
        held = "; ".join(f"rank {pieces.rank[i]} declares {tuple(sets[pieces.holders[i]])}" for i in rows[:4])
        raise OverlapError(
            "ranks that hold an element declare it together, and each holds it once",
            where=where,
            equation=held,
            hint="copies that are meant to agree name all their ranks as holders",
        )

    def _piece(self, pieces: Pieces, row: int) -> str:
        return (
            f"map of {self.name}, rank {pieces.rank[row]}, block at {tuple(pieces.at[row].tolist())} of its "
            f"shard"
        )


def _first_difference(place: Ints, corners: Ints, other: Ints, others: Ints) -> tuple[Ints, int]:
    """The first corner that two lists do not have alike, and by how much the first one has more."""
    order = np.lexsort(np.concatenate([place, other]).T[::-1])
    rows, number = np.concatenate([place, other])[order], np.concatenate([corners, -others])[order]
    new = np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)]
    first = np.flatnonzero(new)
    total = np.add.reduceat(number, first)
    row = int(np.argmax(total != 0))
    return rows[first[row]], int(total[row])


def blocks_of(runs: Sequence[Sequence[tuple[int, int, int]]]) -> tuple[Ints, Ints, Ints]:
    """The blocks of a product of runs ``(index, at, count)``, one list a dim, the last dim fastest.

    >>> index, at, count = blocks_of([[(0, 0, 2), (6, 2, 2)], [(0, 0, 5)]])
    >>> index.tolist(), at.tolist(), count.tolist()
    ([[0, 0], [6, 0]], [[0, 0], [2, 0]], [[2, 5], [2, 5]])
    """
    columns = [np.array(one, dtype=np.int64).reshape(-1, 3) for one in runs]
    total = math.prod(len(one) for one in columns)
    blocks = np.empty((3, total, len(columns)), dtype=np.int64)
    after = total
    for d, one in enumerate(columns):
        after //= max(len(one), 1)
        blocks[:, :, d] = one[np.arange(total) // max(after, 1) % max(len(one), 1)].T
    return blocks[0], blocks[1], blocks[2]
