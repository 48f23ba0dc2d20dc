"""The proof of an affine map: every place of every shard filled once, every element held as it is declared.

Two sums of boxes say it, each by one sort of their corners (``region.balance``). The blocks of a rank are its
shard. And of the ranks that are declared to hold a region, each holds that region, and the regions of all
sets are the tensor: so each element is held by the ranks of one set, and by no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import (
    BufferRuleError,
    GapError,
    HolderError,
    OutsideError,
    OverlapError,
    TransformError,
)
from shardweave.layout.mesh import MOST_RANKS
from shardweave.layout.region import balance
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


@dataclass(frozen=True, slots=True)
class Proof:
    """The rules of a map; what they refuse says where."""

    shape: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]
    name: str

    def check_shapes(self) -> None:
        """The sizes can be counted, and shards have the dims of their tensor."""
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
                raise BufferRuleError(
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

    def check_pieces(self, pieces: Pieces, sets: Sequence[tuple[int, ...]]) -> None:
        """Every place and every element is said once; no block is empty, and sets are ascending."""
        self._check_scales(pieces)
        self._check_inside(pieces)
        self._check_filled(pieces)
        self._check_holders(pieces, sets)

    def _check_scales(self, pieces: Pieces) -> None:
        bad = ~(np.isfinite(pieces.scale) & (np.abs(np.frexp(pieces.scale)[0]) == 0.5))
        if bad.any():
            row = int(np.argmax(bad))
            raise TransformError(
                "a scale is a power of two, so that every bit of a value can be had back",
                where=self._piece(pieces, row),
                equation=f"scale({pieces.scale[row]})",
                hint="store the values unscaled; another scale rounds, and 0, inf and nan lose them",
            )

    def _check_inside(self, pieces: Pieces) -> None:
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

    def _check_filled(self, pieces: Pieces) -> None:
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

    def _check_holders(self, pieces: Pieces, sets: Sequence[tuple[int, ...]]) -> None:
        """For each set of ranks, every rank of it holds the same region; and the regions tile the tensor."""
        sizes = np.array([len(ranks) for ranks in sets], dtype=np.int64)
        used = np.unique(pieces.holders)
        members = np.array([rank for i in used.tolist() for rank in sets[i]], dtype=np.int64)
        of_set = np.repeat(used, sizes[used])
        span = len(self.shards)
        if ((members < 0) | (members >= span)).any() or not sizes[used].all():
            rows = np.flatnonzero(~np.isin(pieces.holders, self._sound(sets, used)))
            raise HolderError(
                "the holders of a block are ranks of the map, one at least",
                where=self._piece(pieces, int(rows[0])),
                equation=f"holders({_some(sets[int(pieces.holders[rows[0]])])}) against ranks 0..{span - 1}",
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
        sets: Sequence[tuple[int, ...]],
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
            ranks = sets[key // scales]
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

    def _sound(self, sets: Sequence[tuple[int, ...]], used: Ints) -> list[int]:
        span = len(self.shards)
        return [i for i in used.tolist() if len(sets[i]) and all(0 <= rank < span for rank in sets[i])]

    def _refuse_holders(
        self, pieces: Pieces, sets: Sequence[tuple[int, ...]], row: int, what: str, place: Ints, rank: int
    ) -> NoReturn:
        held = sets[int(pieces.holders[row])]
        raise HolderError(
            "a block is held by exactly the ranks that are declared for it",
            where=f"map of {self.name}, rank {rank}, element {tuple(place.tolist())}",
            equation=f"declared ({_some(held)}), but {what}",
            hint="a holder of another part, or with another scale, is a block of its own",
        )

    def _refuse_cover(
        self, pieces: Pieces, sets: Sequence[tuple[int, ...]], place: Ints, number: int
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
        held = "; ".join(
            f"rank {pieces.rank[i]} declares ({_some(sets[pieces.holders[i]])})" for i in rows[:4]
        )
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


def _some(ranks: Sequence[int], most: int = 8) -> str:
    head = ", ".join(str(rank) for rank in ranks[:most])
    return head if len(ranks) <= most else f"{head}, ... {len(ranks)} in all"


def _first_difference(place: Ints, corners: Ints, other: Ints, others: Ints) -> tuple[Ints, int]:
    """The first corner that two lists do not have alike, and by how much the first one has more."""
    order = np.lexsort(np.concatenate([place, other]).T[::-1])
    rows, number = np.concatenate([place, other])[order], np.concatenate([corners, -others])[order]
    new = np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)]
    first = np.flatnonzero(new)
    total = np.add.reduceat(number, first)
    row = int(np.argmax(total != 0))
    return rows[first[row]], int(total[row])
