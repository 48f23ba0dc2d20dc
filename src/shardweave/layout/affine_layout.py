"""Affine maps and layouts, each from the other.

A map says of each rank which block is where; a layout says it of a dim. Where a map cuts one dim, and all
that frameworks make do, it is one rule with that dim sharded along the axis. Where ranks hold blocks that are
cut in several dims, each rank's shard is a product of dims of its own, and a rule of its own says it. A shard
that is no product is no buffer of a layout, and is refused.
"""

from __future__ import annotations

import itertools
import math
from typing import NoReturn

import numpy as np

from shardweave.errors import BufferRuleError, GeometryError, OverlapError
from shardweave.layout.affine import AffineMap, Pieces, blocks_of
from shardweave.layout.buffer import BufferRule, Part, Sharded, axes_of, table_of
from shardweave.layout.layout import Layout
from shardweave.layout.mesh import Mesh
from shardweave.layout.region import MOST_CORNERS, cut
from shardweave.layout.run import Dim, Run, whole
from shardweave.layout.table import Ints, within
from shardweave.layout.tensor import Tensor
from shardweave.layout.transform import IDENTITY, Transform


def layout_of(
    found: AffineMap, tensor: Tensor, mesh: Mesh, *, axis: str = "tp", transform: Transform | None = None
) -> Layout:
    """The layout that a map describes, with one buffer of the tensor's name.

    Law: ``map_of(layout_of(m, t, mesh), t) == m``.

    Args:
        found: The map.
        tensor: What it is a map of: a tensor of its shape, or a family whose members have it.
        mesh: The ranks; those that differ on other axes only are replicas.
        axis: The axis whose coordinates are the ranks of the map.
        transform: What stored values are of logical ones; by default the map's one scale.

    Raises:
        GeometryError: The shape or the number of ranks is another one.
        BufferRuleError: A shard is no product of dims, or has several scales.

    >>> model = AffineMap(
    ...     (6, 4), [(2, 4), (4, 4)],
    ...     Pieces(*(np.array(c) for c in (
    ...         [0, 1, 1], [[2, 0], [0, 0], [4, 0]], [[0, 0], [0, 0], [2, 0]],
    ...         [[2, 4]] * 3, [0, 1, 1], [1.0] * 3
    ...     ))),
    ...     [(0,), (1,)],
    ... )
    >>> layout = layout_of(model, Tensor("w", (6, 4), "float32"), Mesh((("tp", 2),)))
    >>> print(*layout.rules[0].dims[0].dims, sep=" | ")
    [2:4] | [0:2] [4:6]
    """
    index = len(tensor.index)
    stacked = len(found.shape) == tensor.num_dims and index > 0
    wanted = tuple(len(dim) for dim in tensor.dims) if stacked else tensor.shape
    if found.shape != wanted:
        raise GeometryError(
            "a map is of the tensor that it is used for, by shape and not by size",
            where=f"tensor {tensor.name!r}",
            equation=f"shape of the map{found.shape} != shape of the tensor{wanted}",
            hint="a transposed or flattened weight is another tensor; take the map of this one",
        )
    if mesh.axis_size(axis) != found.num_ranks:
        raise GeometryError(
            "a map has the ranks of the axis that it is over",
            where=f"tensor {tensor.name!r}",
            equation=f"ranks of the map({found.num_ranks}) != {axis}({mesh.axis_size(axis)})",
            hint="a map is of the degree that the checkpoint was written at; describe its mesh with that",
        )
    if stacked:
        for (name, numbers), size in zip(tensor.index, found.shape, strict=False):
            if numbers != whole(size):
                _refuse(tensor.name, "an index dim of a map counts from 0", f"{name}({numbers})")
    first = 0 if stacked else index
    told = tuple(range(tensor.num_dims)) if stacked else None
    value = _transform(found, tensor.name) if transform is None else transform
    cuts = _cut_dims(found)
    if not found.pieces and cuts:
        _refuse(tensor.name, "a tensor without elements is not cut", f"shards{found.shards}")
    if len(cuts) > 1:
        rules = tuple(
            _rule_of_rank(found, tensor, axis, rank, first=first, stacked=told, value=value)
            for rank in range(found.num_ranks)
        )
        return Layout("affine", mesh, rules)
    dims: list[Dim | Sharded] = list(tensor.dims)
    for d in cuts:
        dims[first + d] = Sharded((axis,), tuple(_runs(found.of_rank(r), d) for r in range(found.num_ranks)))
    part = Part(tensor, replica=found.shared and bool(cuts))
    rule = BufferRule(_template(tensor, stacked), (part,), tuple(dims), stacked=told, transform=value)
    return Layout("affine", mesh, (rule,))


def _template(tensor: Tensor, stacked: bool) -> str:
    """The name of the buffer: the tensor's, without the numbers that are places in one array."""
    if not stacked:
        return tensor.name
    name = tensor.name
    for word, _ in tensor.index:
        name = name.replace(f"{{{word}}}", "")
    return ".".join(part for part in name.split(".") if part)


def _transform(found: AffineMap, name: str) -> Transform:
    scales = np.unique(found.pieces.scale).tolist()
    if len(scales) > 1:
        _refuse(name, "a buffer stores one function of the values", f"scales({', '.join(map(str, scales))})")
    return Transform("scale", scales[0]) if scales else IDENTITY


def _cut_dims(found: AffineMap) -> list[int]:
    """The dims in which some shard, or some block of one, is not the whole dim in its order."""
    shape = np.array(found.shape, dtype=np.int64)
    shards = np.array(found.shards, dtype=np.int64).reshape(found.num_ranks, len(shape))
    pieces = found.pieces
    cuts = (shards != shape).any(axis=0)
    cuts |= ((pieces.index != 0) | (pieces.at != 0) | (pieces.count != shape)).any(axis=0)
    return np.flatnonzero(cuts).tolist()


def _runs(pieces: Pieces, dim: int) -> Dim:
    columns = (pieces.index[:, dim].tolist(), pieces.count[:, dim].tolist())
    return Dim(Run("", start, count) for start, count in zip(*columns, strict=True))


def _rule_of_rank(
    found: AffineMap,
    tensor: Tensor,
    axis: str,
    rank: int,
    *,
    first: int,
    stacked: tuple[int, ...] | None,
    value: Transform,
) -> BufferRule:
    """The buffer of one rank, whose shard is a product of dims of its own."""
    pieces = found.of_rank(rank)
    owned = {found.sets[i][0] == rank for i in np.unique(pieces.holders).tolist()}
    if len(owned) > 1:
        _refuse(
            tensor.name,
            "a buffer is a replica of what others hold or the owner of what it holds",
            f"rank {rank} owns a part of its shard and shares the rest, in several cut dims",
        )
    dims: list[Dim | Sharded] = list(tensor.dims)
    for d, size in enumerate(found.shards[rank]):
        dims[first + d] = _product_dim(pieces, d, size, f"{tensor.name!r}, rank {rank}")
    part = Part(tensor, replica=owned == {False})
    name = _template(tensor, stacked is not None)
    return BufferRule(name, (part,), tuple(dims), stacked=stacked, where=((axis, (rank,)),), transform=value)


def _product_dim(pieces: Pieces, dim: int, size: int, name: str) -> Dim:
    """One dim of a shard, where what it holds at a place does not depend on the places in other dims."""
    if not pieces:
        return Dim((Run("", 0, size),))
    low, high = pieces.at[:, dim], pieces.at[:, dim] + pieces.count[:, dim]
    edges = np.unique(np.concatenate([low, high]))
    begin, end = np.searchsorted(edges, low), np.searchsorted(edges, high)
    if int((end - begin).sum()) > MOST_CORNERS:
        _refuse(name, "a shard falls into few stretches", f"{int((end - begin).sum())} > {MOST_CORNERS}")
    cell = np.repeat(begin, end - begin) + within(end - begin)
    shift = np.repeat(pieces.index[:, dim] - low, end - begin)
    told = np.unique(np.column_stack([cell, shift]), axis=0)
    if len(told) != len(edges) - 1:
        _refuse(name, "a shard is a product of dims", f"dim {dim} holds other indices beside other places")
    sizes = np.diff(edges).tolist()
    starts = (edges[:-1] + told[:, 1]).tolist()
    return Dim(Run("", start, count) for start, count in zip(starts, sizes, strict=True))


def map_of(layout: Layout, tensor: Tensor, *, axis: str = "tp") -> AffineMap:
    """What a layout says of a tensor, or of a member of a family, as a map over the ranks of one axis.

    Index dims that are separate arrays are left out, as every member has the same map; stacked ones are the
    first dims of the map.

    Law: ``map_of(layout_of(m, t, mesh), t) == m``.

    Raises:
        BufferRuleError: The layout says what no map can say: fused tensors, padding, transposed storage,
            another transform than a scale, a dim that is cut along other axes.
        OverlapError: A rank holds an element twice.
        GapError: Some element is held by no rank.
    """
    num_ranks = layout.mesh.axis_size(axis)
    shards: list[tuple[int, ...] | None] = [None] * num_ranks
    shape: tuple[int, ...] = ()
    columns: list[tuple[Ints, Ints, Ints, Ints]] = []
    scales: list[float] = [1.0] * num_ranks
    seen: list[object] = [None] * num_ranks
    for number, _ in layout.holders.get(tensor, ()):
        rule = layout.rules[number]
        dims = _storage(rule, tensor, axis)
        shape = tuple(len(tensor.dims[d]) for d in dims)
        allowed = dict(rule.where).get(axis, range(num_ranks))
        for rank in allowed:
            held = tuple(table_of(rule.dims[d])[rank if axes_of(rule.dims[d]) else 0] for d in dims)
            told = held, rule.transform
            if seen[rank] is not None and seen[rank] != told:
                _refuse(
                    tensor.name,
                    "a rank has one shard of a tensor",
                    f"rank {rank} has {rule.name!r} and another",
                )
            if seen[rank] is not None:
                continue
            seen[rank] = told
            shards[rank] = tuple(len(dim) for dim in held)
            scales[rank] = rule.transform.constant if rule.transform != IDENTITY else 1.0
            runs = [_plain_runs(dim, tensor.name, rank) for dim in held]
            if math.prod(len(one) for one in runs) > MOST_CORNERS:
                _refuse(tensor.name, "a shard falls into few blocks", f"more than {MOST_CORNERS}")
            index, at, count = blocks_of(runs)
            columns.append((np.full(len(index), rank, dtype=np.int64), index, at, count))
    missing = [rank for rank, shard in enumerate(shards) if shard is None]
    if missing:
        _refuse(tensor.name, "every rank has a shard, if an empty one", f"rank {missing[0]} has none")
    ranks, index, at, count = (np.concatenate(each) for each in zip(*columns, strict=True))
    row, low, high, alike = cut(np.zeros(len(ranks), dtype=np.int64), index, index + count)
    ranks, at = ranks[row], at[row] + low - index[row]
    holders, sets = _holders(ranks, alike, tensor.name)
    scale = np.array(scales, dtype=np.float64)[ranks]
    pieces = Pieces(ranks, low, at, high - low, holders, scale)
    return AffineMap(shape, [shard for shard in shards if shard is not None], pieces, sets, name=tensor.name)


def _storage(rule: BufferRule, tensor: Tensor, axis: str) -> tuple[int, ...]:
    """The dims of the tensor that one stored array has."""
    dims = rule.stacked or ()
    value = rule.transform
    if len(rule.parts) > 1 or rule.fused:
        _refuse(tensor.name, "a map is of one tensor", f"buffer {rule.name!r} is fused of {len(rule.parts)}")
    if list(dims) != sorted(dims):
        _refuse(tensor.name, "a map has the dims of the tensor in their order", f"stored as dims{dims}")
    if value != IDENTITY and value.kind != "scale":
        _refuse(tensor.name, "a map knows values and scales of them", f"transform({value.kind})")
    for d in dims:
        if axes_of(rule.dims[d]) not in ((), (axis,)):
            _refuse(
                tensor.name,
                "a map is over the ranks of one axis",
                f"dim {d} is cut along {', '.join(axes_of(rule.dims[d]))}, and not along {axis} alone",
            )
        if d < len(tensor.index) and tensor.dims[d] != whole(len(tensor.dims[d])):
            _refuse(tensor.name, "an index dim of a map counts from 0", f"index({tensor.dims[d]})")
    return dims


def _plain_runs(dim: Dim, name: str, rank: int) -> list[tuple[int, int, int]]:
    """The runs of a dim as ``(index, at, count)``; those with steps are single indices here."""
    found: list[tuple[int, int, int]] = []
    for run, at in zip(dim.runs, dim.positions, strict=True):
        if run.label is None:
            _refuse(name, "a map has no padding", f"rank {rank} has {run.count} places of padding")
        if run.step == 1:
            found.append((run.start, at, run.count))
        elif len(found) + run.count > MOST_CORNERS:
            _refuse(name, "a shard falls into few blocks", f"more than {MOST_CORNERS}")
        else:
            found += [(run.start + i * run.step, at + i, 1) for i in range(run.count)]
    return found


def _holders(rank: Ints, number: Ints, name: str) -> tuple[Ints, list[tuple[int, ...]]]:
    """The set of ranks that hold each block, where equal blocks share a number."""
    order = np.lexsort((rank, number))
    ranks, numbers = rank[order], number[order]
    twice = (ranks[1:] == ranks[:-1]) & (numbers[1:] == numbers[:-1])
    if twice.any():
        raise OverlapError(
            "a rank holds each element of a map once",
            where=f"map of {name!r}, rank {ranks[int(np.argmax(twice))]}",
            equation="an element is at two places of its shard",
            hint="a map names ranks as holders, and not places; leave the second copy out",
        )
    first = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]]) if len(numbers) else numbers
    known: dict[tuple[int, ...], int] = {}
    bounds = [*first.tolist(), len(numbers)]
    members = ranks.tolist()
    of_block = np.array(
        [known.setdefault(tuple(members[a:b]), len(known)) for a, b in itertools.pairwise(bounds)],
        dtype=np.int64,
    )
    return of_block[number], list(known)


def _refuse(name: str, rule: str, equation: str) -> NoReturn:
    raise BufferRuleError(
        rule,
        where=f"tensor {name}",
        equation=equation,
        hint="a map has blocks of one tensor, a layout products of dims; say it in the other of the two",
    )
