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

import numpy as np

from shardweave.layout.affine_proof import Pieces, Proof
from shardweave.layout.region import merged
from shardweave.layout.table import Ints

__all__ = ["AffineMap", "Pieces", "blocks_of"]


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
        OutsideError: A block reaches outside the tensor or its shard, or sizes cannot be counted.
        BufferRuleError: A shard has other dims than the tensor.
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
        proof = Proof(self.shape, self.shards, name)
        proof.check_shapes()
        pieces, kept = _sorted_sets(pieces[np.all(pieces.count != 0, axis=1)], sets)
        proof.check_pieces(pieces, kept)
        put(self, "pieces", _merged(pieces))
        put(self, "sets", kept)

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
