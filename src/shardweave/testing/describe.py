"""From element numbers to dims: what an array of a rank is, read off what lies in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import ProbeError
from shardweave.layout import PAD, Dim, Run, whole
from shardweave.layout.table import Ints
from shardweave.testing.found import Found, labels_of
from shardweave.testing.markers import PADDING, Shape


def locate(elements: Ints, shapes: Sequence[Shape]) -> tuple[Ints, Ints]:
    """The tensor that each element number belongs to, and its flat index there."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    owner = np.searchsorted(ends, elements, side="right")
    return owner, elements - np.concatenate([[0], ends])[owner]


@dataclass(frozen=True)
class _Body:
    """The part of a result that is no padding: which positions of each axis, and what is there."""

    keep: tuple[NDArray[np.bool_], ...]
    owner: Ints
    coordinates: tuple[Ints, ...]


def describe(
    results: Sequence[Ints | None],
    shapes: Mapping[str, Shape],
    *,
    flat: bool,
    aliased: tuple[int, ...],
    name: str,
) -> Found:
    """The finding for one array, from the element numbers that each rank got."""
    held = np.concatenate([r.ravel() for r in results if r is not None] or [np.zeros(0, dtype=np.int64)])
    owners = np.unique(locate(held[held != PADDING], tuple(shapes.values()))[0])
    names = [name for i, name in enumerate(shapes) if i in owners] or list(shapes)[:1]
    sources = tuple((name, shapes[name]) for name in names)
    try:
        ranks, order = _product(results, shapes, names)
        return Found(sources, ranks, order, aliased=aliased, name=name)
    except ProbeError:
        if not flat:
            raise
    labels = labels_of(names)
    rows: list[tuple[Dim, ...] | None] = []
    for elements in results:
        if elements is None:
            rows.append(None)
            continue
        owner, local = locate(np.maximum(elements, 0).ravel(), tuple(shapes.values()))
        rows.append(
            (_dim(np.where(elements.ravel() == PADDING, PADDING, owner), local, shapes, names, labels),)
        )
    return Found(sources, tuple(rows), (0,), flat=True, aliased=aliased, name=name)


def _no_product(where: str, why: str) -> ProbeError:
    return ProbeError(
        "what a rank gets is a product of what it holds of each dim",
        where=where,
        equation=why,
        hint="flat=True describes it by flat row-major indices",
    )


def _product(
    results: Sequence[Ints | None], shapes: Mapping[str, Shape], names: list[str]
) -> tuple[tuple[tuple[Dim, ...] | None, ...], tuple[int, ...]]:
    num_dims = {len(shapes[name]) for name in names}
    if len(num_dims) > 1:
        raise _no_product("all ranks", f"tensors of {sorted(num_dims)} dims in one array")
    n = num_dims.pop()
    bodies: list[_Body | None] = []
    axis_of: dict[int, int] = {}
    fused: int | None = None
    for rank, elements in enumerate(results):
        if elements is not None and elements.ndim != n:
            raise _no_product(f"rank {rank}", f"array of {elements.ndim} dims, tensor of {n}")
        body = None if elements is None else _body(rank, elements, tuple(shapes.values()))
        bodies.append(body)
        if body is None:
            continue
        for d, column in enumerate(body.coordinates):
            axes = _varies(column)
            if len(axes) > 1 or (axes and axis_of.setdefault(d, axes[0]) != axes[0]):
                raise _no_product(f"rank {rank}, dim {d}", f"its indices vary along axes {axes}")
        axes = _varies(body.owner)
        if len(axes) > 1 or (axes and fused not in (None, axes[0])):
            raise _no_product(f"rank {rank}", f"the tensors vary along axes {axes}")
        fused = axes[0] if axes else fused
    if len(set(axis_of.values())) < len(axis_of):
        raise _no_product("all ranks", f"two dims lie along one axis: {axis_of}")
    order = _complete(axis_of, n)
    ranks: list[tuple[Dim, ...] | None] = []
    labels = labels_of(names)
    fused_dim = order[fused] if fused is not None else None
    if fused_dim is None and len(names) > 1:
        # Every rank holds one tensor only: any one dim can carry the labels.
        fused_dim = next(iter(axis_of), 0)
    for elements, body in zip(results, bodies, strict=True):
        if elements is None:
            ranks.append(None)
        elif body is not None:
            dims = [Dim()] * n
            for a, d in enumerate(order):
                at = tuple(slice(None) if axis == a else 0 for axis in range(n))
                owner = np.full(len(body.keep[a]), PADDING, dtype=np.int64)
                local = np.zeros(len(body.keep[a]), dtype=np.int64)
                owner[body.keep[a]], local[body.keep[a]] = body.owner[at], body.coordinates[d][at]
                dims[d] = _dim(owner, local, shapes, names, labels if d == fused_dim else None)
            ranks.append(tuple(dims))
        else:
            ranks.append(_unseen(elements.shape, order, [shapes[name] for name in names], axis_of))
    return tuple(ranks), order


def _body(rank: int, elements: Ints, shapes: Sequence[Shape]) -> _Body | None:
    there = elements != PADDING
    axes = range(elements.ndim)
    keep = tuple(there.any(axis=tuple(a for a in axes if a != axis)) for axis in axes)
    body = elements[np.ix_(*keep)] if keep else elements
    if not there.any():
        return None
    if (body == PADDING).any():
        position = [int(i) for i in np.argwhere(body == PADDING)[0]]
        raise _no_product(f"rank {rank}, position {position} without padding", "padding among elements")
    owner, local = locate(body, shapes)
    strides = np.array(
        [[math.prod(shape[d + 1 :]) for d in range(body.ndim)] for shape in _fit(shapes, body.ndim)]
    )
    sizes = np.array([list(shape) for shape in _fit(shapes, body.ndim)])
    columns = tuple(local // strides[owner, d] % sizes[owner, d] for d in range(body.ndim))
    return _Body(keep, owner, columns)


def _fit(shapes: Sequence[Shape], n: int) -> list[Shape]:
    # Tensors with other dims are not in this array; their rows of the lookup are never read.
    return [shape if len(shape) == n else (1,) * n for shape in shapes]


def _varies(column: Ints) -> list[int]:
    return [a for a in range(column.ndim) if bool((column != column.take([0], axis=a)).any())]


def _complete(axis_of: dict[int, int], n: int) -> tuple[int, ...]:
    """The dim along each axis; dims that never vary take the axes that are left, their own if they can."""
    order = dict(zip(axis_of.values(), axis_of, strict=True))
    left = [d for d in range(n) if d not in axis_of]
    for d in [d for d in left if d not in order]:
        order[d] = d
        left.remove(d)
    order.update(zip([a for a in range(n) if a not in order], left, strict=True))
    return tuple(order[a] for a in range(n))


def _dim(
    owner: Ints, local: Ints, shapes: Mapping[str, Shape], names: list[str], labels: Sequence[str] | None
) -> Dim:
    """The dim of a column of indices; without labels the tensors are not told apart."""
    numbers = list(shapes)
    word = {
        numbers.index(name): label for name, label in zip(names, labels or [""] * len(names), strict=True)
    }
    parted = (np.diff(owner) != 0) if labels else (np.diff(owner == PADDING) != 0)
    if not len(owner):
        return Dim()
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(local) != 1) | parted]))
    stops = [*starts[1:], len(owner)]
    return Dim(
        Run(PAD, 0, int(stop - start))
        if owner[start] == PADDING
        else Run(word[int(owner[start])], int(local[start]), int(stop - start))
        for start, stop in zip(starts, stops, strict=True)
    )


def _unseen(
    stored: Shape, order: tuple[int, ...], shapes: Sequence[Shape], axis_of: Mapping[int, int]
) -> tuple[Dim, ...]:
    """The dims of an array without elements: nothing, or padding along what its size does not explain."""
    dims = [Dim()] * len(stored)
    for a, d in enumerate(order):
        explained = all(shape[d] == stored[a] for shape in shapes)
        dims[d] = whole(stored[a]) if explained else Dim((Run(PAD, 0, stored[a]),))
    if dims and all(dim.labels for dim in dims):
        # All sizes are the tensor's, and still nothing of it is here.
        d = next(iter(axis_of), 0)
        dims[d] = Dim((Run(PAD, 0, len(dims[d])),))
    return tuple(dims)
