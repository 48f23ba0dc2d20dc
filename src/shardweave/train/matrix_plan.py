"""Which matrices of the model ranks hold parts of, who has which block, and who owns each: by arithmetic.

All of it follows from the layout, on every rank alike. The owner of a matrix is who has most of it already,
as long as that does not give it more than about its share of the work. ``matrices.py`` sends blocks to owners
and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardweave.errors import GapError
from shardweave.layout import Box, BufferRule, Layout, intersect
from shardweave.layout.buffer import table_of
from shardweave.train.arrays import Held, HeldPart
from shardweave.train.grid import Ranks
from shardweave.train.muon import Muon
from shardweave.train.reduction import Bucket, Fragment, ReducePlan

Choose = Callable[[str, tuple[int, ...]], object]
"""The settings of an array by its name and shape; matrices are those of arrays that get a ``Muon``."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a matrix.

    Attributes:
        box: Which rows and columns.
        ranks: Who has the state of it, ascending.
        sender: Which of them sends it to the owner, who may be one of them.
    """

    box: Box
    ranks: Ranks
    sender: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the model.

    Attributes:
        name: Its name.
        shape: Its rows and columns.
        settings: How it is made orthogonal.
        dtype: In which dtype.
        blocks: Its blocks; they are all of it, each element once.
        owner: The rank that does it.
    """

    name: str
    shape: tuple[int, ...]
    settings: Muon
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    owner: int

    @property
    def cost(self) -> int:
        """What it costs to make it orthogonal, up to a factor that all matrices have in common."""
        return _cost(self.shape)


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The matrices of the ranks that hold parts of each other's.

    Attributes:
        ranks: These ranks.
        matrices: Their matrices.
        places: For each block that this rank has the state of, by the numbers of matrix and block, where.

    Law: the blocks of a matrix are all of its elements, each once: proved when made.
    """

    ranks: Ranks
    matrices: tuple[Matrix, ...]
    places: Mapping[tuple[int, int], Place]

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends in an update: its blocks to their owners, and results to who needs them."""
        total = 0
        for matrix in self.matrices:
            for block in matrix.blocks:
                size = block.box.numel * matrix.dtype.itemsize
                total += size * (block.sender == rank != matrix.owner)
                total += size * (len(block.ranks) - (rank in block.ranks)) * (matrix.owner == rank)
        return total

    def cost(self, rank: int) -> int:
        """What a rank computes, in the unit of ``Matrix.cost``."""
        return sum(matrix.cost for matrix in self.matrices if matrix.owner == rank)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies in what a rank has of a bucket.

    Attributes:
        bucket: The number of the bucket.
        places: The stretch of it that a box of an array takes up.
        shape: The shape of that box.
        index: What the block is of it.
        order: For rows and columns, the dim of the array.
    """

    bucket: int
    places: slice
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    order: tuple[int, ...]

    def view(self, flats: Sequence[Tensor]) -> Tensor:
        """The block, a view."""
        found = flats[self.bucket][self.places].view(self.shape)[self.index]
        extra = [d for d in range(found.dim()) if d not in self.order]
        return found.permute(*extra, *self.order)[(0,) * len(extra)]


# --- who has what -------------------------------------------------------------------------------


class _Key(NamedTuple):
    """A matrix where it is held: by which rule, on which of the places that have it, and its name."""

    rule: int
    place: tuple[int, ...]
    name: str


class _Found(NamedTuple):
    """What is known of a matrix while its parts are looked for."""

    shape: tuple[int, ...]
    settings: Muon
    dtype: torch.dtype
    blocks: dict[Box, Ranks]
    holders: set[int]


class _Piece(NamedTuple):
    held: Held
    part: HeldPart
    box: Box
    fragment: Fragment
    common: Box


def plan_matrices(plan: ReducePlan, choose: Choose, *, sharded: bool) -> MatrixPlan:
    """What ranks hold of matrices, and who does which.

    Args:
        plan: Of this rank; those of others are made like it.
        choose: The settings of arrays.
        sharded: Whether replicas share the state.

    Raises:
        PlanError: An array that is to be updated by Muon holds no matrices.
        GapError: Some ranks that hold a matrix treat it in another way.
    """
    layout, me = plan.layout, plan.rank
    found: dict[_Key, _Found] = {}
    mates = _Mates(layout)
    known, left = {me}, [me]
    while left:
        rank = left.pop()
        if rank != me and not mates.stands(rank):
            continue  # all that it holds, the first of its replicas says
        peer = plan if rank == me else plan.peer(rank)
        rules = mates.rules(rank)
        for bucket in peer.buckets:
            if bucket.over[0] != rank and rank != me:
                continue
            names = []
            for held in bucket.arrays:
                settings = choose(held.name, held.shape)
                if isinstance(settings, Muon):
                    settings.rule(held)  # refuses what is no matrix, also where this rank has no state of it
                    names.append(held.name)
            for number in {rules[name] for name in names}:
                more = set(mates.of(number, rank)) - known
                known |= more
                left += sorted(more)
            if names and bucket.over[0] == rank:
                _note(found, bucket, choose, rules, mates, rank, sharded=sharded)
    ordered = sorted(found.items())
    owners = _owners([one for _, one in ordered], sorted(known))
    matrices = []
    for number, ((key, one), owner) in enumerate(zip(ordered, owners, strict=True)):
        blocks = tuple(
            Block(box, ranks, owner if owner in ranks else ranks[number % len(ranks)])
            for box, ranks in sorted(one.blocks.items(), key=lambda item: (item[0].offset, item[0].shape))
        )
        _prove(key.name, one.shape, blocks, layout)
        matrices.append(Matrix(key.name, one.shape, one.settings, one.dtype, blocks, owner))
    return MatrixPlan(
        tuple(sorted(known)),
        tuple(matrices),
        _places(plan, choose, [key for key, _ in ordered], matrices, mates, sharded=sharded),
    )


def _note(
    found: dict[_Key, _Found],
    bucket: Bucket,
    choose: Choose,
    rules: Mapping[str, int],
    mates: _Mates,
    rank: int,
    *,
    sharded: bool,
) -> None:
    """Add what the ranks of a bucket hold."""
    wide = torch.promote_types(getattr(torch, bucket.dtype), torch.float32)
    for start, stop, ranks in _stretches(bucket, sharded=sharded):
        for piece in _pieces(bucket, start, stop, choose):
            settings = choose(piece.held.name, piece.held.shape)
            assert isinstance(settings, Muon)
            number = rules[piece.held.name]
            key = _Key(number, mates.place(number, rank), piece.part.name)
            dtype = wide if settings.ns_dtype is None else getattr(torch, settings.ns_dtype)
            one = found.setdefault(key, _Found(piece.part.shape, settings, dtype, {}, set()))
            one.blocks[piece.box] = ranks
            one.holders.update(bucket.over)


def _places(
    plan: ReducePlan,
    choose: Choose,
    keys: Sequence[_Key],
    matrices: Sequence[Matrix],
    mates: _Mates,
    *,
    sharded: bool,
) -> dict[tuple[int, int], Place]:
    """Where this rank has its blocks."""
    numbers = {key: number for number, key in enumerate(keys)}
    blocks = [{block.box: at for at, block in enumerate(matrix.blocks)} for matrix in matrices]
    rules, found = mates.rules(plan.rank), {}
    for at, bucket in enumerate(plan.buckets):
        for start, stop, ranks in _stretches(bucket, sharded=sharded):
            if plan.rank not in ranks:
                continue
            for piece in _pieces(bucket, start, stop, choose):
                rule = rules[piece.held.name]
                number = numbers[_Key(rule, mates.place(rule, plan.rank), piece.part.name)]
                origin = zip(piece.common.dims, piece.fragment.box.dims, strict=True)
                found[number, blocks[number][piece.box]] = Place(
                    bucket=at,
                    places=piece.fragment.places,
                    shape=piece.fragment.box.shape,
                    index=tuple(slice(r[0] - own[0], r[-1] - own[0] + 1, r.step) for r, own in origin),
                    order=piece.part.order,
                )
    return found


def _stretches(bucket: Bucket, *, sharded: bool) -> Iterator[tuple[int, int, Ranks]]:
    """The stretches of a bucket that have a state of their own, and the ranks that have it."""
    if not sharded:
        yield 0, bucket.numel, bucket.over
        return
    for at, rank in enumerate(bucket.over):
        yield bucket.cuts[at], bucket.cuts[at + 1], (rank,)


def _pieces(bucket: Bucket, start: int, stop: int, choose: Choose) -> Iterator[_Piece]:
    """What of matrices lies in a stretch of a bucket; padding does not."""
    for fragment in bucket.fragments(start, stop):
        held = fragment.held
        if not isinstance(choose(held.name, held.shape), Muon):
            continue
        for part in held.parts:
            common = intersect(part.at, fragment.box)
            if common is None:
                continue
            box = []
            for numbers, d in zip(part.box.dims, part.order, strict=True):
                first = part.at.dims[d].index(common.dims[d][0])
                box.append(numbers[first : first + len(common.dims[d])])
            yield _Piece(held, part, Box(tuple(box)), fragment, common)


class _Mates:
    """Which ranks hold parts of the same matrices."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._rules: dict[int, dict[str, int]] = {}
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Ranks] = {}

    def rules(self, rank: int) -> Mapping[str, int]:
        """The numbers of the rules that the arrays of a rank follow, by name."""
        if rank not in self._rules:
            found = self._rules[rank] = {}
            for number, rule in enumerate(self._layout.rules):
                buffer = rule.at(self._layout.mesh, rank)
                if buffer is not None:
                    found |= {name: number for name, _ in buffer.members()}
        return self._rules[rank]

    def place(self, number: int, rank: int) -> tuple[int, ...]:
        """The coordinates that say which of the places of a rule a rank is in."""
        coordinate = self._layout.mesh.coordinate(rank)
        return tuple(coordinate[axis] for axis, _ in self._layout.rules[number].where)

    def stands(self, rank: int) -> bool:
        """Whether a rank is the first of those that hold something."""
        mesh = self._layout.mesh
        coordinate = mesh.coordinate(rank)
        return any(
            mesh.where({axis: coordinate[axis] for axis in rule.axes})[0] == rank
            for rule in self._layout.rules
            if all(coordinate[axis] in values for axis, values in rule.where)
        )

    def of(self, number: int, rank: int) -> Ranks:
        """The ranks of the same place that hold parts of what a rank holds by a rule."""
        rule, mesh = self._layout.rules[number], self._layout.mesh
        entries, place = self._layout.entries(rule), self.place(number, rank)
        mine = tuple(int(entry) for entry in entries[rank - mesh.offset, : len(rule.index)])
        if (number, place, mine) not in self._known:
            same = self._layout.exists(rule)
            for (axis, _), at in zip(rule.where, place, strict=True):
                same &= mesh.columns[axis] == at
            for d, entry in enumerate(mine):
                same &= np.array(_shares(rule, d, entry))[entries[:, d]]
            self._known[number, place, mine] = tuple((np.flatnonzero(same) + mesh.offset).tolist())
        return self._known[number, place, mine]


def _shares(rule: BufferRule, d: int, entry: int) -> list[bool]:
    """For each coordinate of an index dim, whether it has numbers in common with one of them."""
    held = [{number for label, number in dim if label is not None} for dim in table_of(rule.dims[d])]
    return [not held[entry].isdisjoint(other) for other in held]


def _owners(found: Sequence[_Found], ranks: Sequence[int]) -> list[int]:
    """An owner for each matrix: who has most of it, while he has about his share of the work, or less."""
    load = dict.fromkeys(ranks, 0)
    total = sum(_cost(one.shape) for one in found)
    most = max([total * 9 // (8 * len(ranks)), *(_cost(one.shape) for one in found)])
    owners = [0] * len(found)
    for number in sorted(range(len(found)), key=lambda n: (-_cost(found[n].shape), n)):
        one, cost = found[number], _cost(found[number].shape)
        has = dict.fromkeys(one.holders, 0)
        for box, holders in one.blocks.items():
            for rank in holders:
                has[rank] += box.numel
        home = min(has, key=lambda rank: (-has[rank], load[rank], rank))
        if load[home] + cost > most:
            home = min(has, key=lambda rank: (load[rank], -has[rank], rank))
        owners[number] = home
        load[home] += cost
    return owners


def _cost(shape: tuple[int, ...]) -> int:
    rows, columns = shape
    return rows * columns * min(rows, columns)


def _prove(name: str, shape: tuple[int, ...], blocks: Sequence[Block], layout: Layout) -> None:
    """Refuse blocks that are not all of a matrix; that none overlap, the reduce plan has proved."""
    numel = sum(block.box.numel for block in blocks)
    if numel != shape[0] * shape[1]:
        raise GapError(
            "what makes a matrix orthogonal has all of it",
            where=f"layout {layout.name!r}, matrix {name!r}",
            equation=f"elements of its parts({numel}) != rows({shape[0]}) * columns({shape[1]})",
            hint="let every rank choose Muon for all arrays that hold a part of a matrix, by name",
        )
