"""The proof that the chunks of a stored tensor tile it, whatever the format.

No format's own reader checks it when it loads. Files are hostile until proved otherwise, so the
sweep has a bound, which no saver's way of cutting comes near.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shardweave.errors import FormatError, GapError, OutsideError, OverlapError
from shardweave.layout import Box
from shardweave.store.manifest import Extent, StoredTensor

_MAX_PAIRS = 1 << 30


def prove_tiling(tensors: Iterable[StoredTensor], *, root: Path) -> None:
    """Each element of each tensor lies in exactly one extent; ``root`` is for the message.

    Raises:
        OutsideError: An extent reaches outside its tensor, or has negative strides or a negative start.
        GapError, OverlapError: With the key and a box.
        FormatError: So many chunks so entangled that no saver cuts them, and proving would take minutes.
    """
    for tensor in tensors:
        for extent in tensor.extents:
            _check_inside(tensor, extent, root)
        if (both := _overlap(tensor, root)) is not None:
            raise OverlapError(
                "an element is stored once",
                where=f"{root}, {tensor.key!r}",
                equation=" and ".join(f"chunk at {e.offset} of shape {e.shape} in {e.file!r}" for e in both),
                hint="nobody can say which of the two is right; save the checkpoint again",
            )
        stored, needed = sum(extent.numel for extent in tensor.extents), math.prod(tensor.shape)
        if stored != needed:
            raise GapError(
                "the chunks of a tensor cover it",
                where=f"{root}, {tensor.key!r}, box {_gap(tensor)}",
                equation=f"elements stored({stored}) != prod(shape{tensor.shape})({needed})",
                hint="find the missing files or save again; a partial load would leave the rest as it was",
            )


def strides_of(extent: Extent) -> tuple[int, ...]:
    """Element strides of an extent in its file."""
    if extent.strides is not None:
        return extent.strides
    return tuple(math.prod(extent.shape[d + 1 :]) for d in range(len(extent.shape)))


def _check_inside(tensor: StoredTensor, extent: Extent, root: Path) -> None:
    strides = strides_of(extent)
    dims = {len(tensor.shape), len(extent.offset), len(extent.shape), len(strides)}
    negative = min((*extent.offset, *extent.shape, *strides, extent.start, 0)) < 0
    ends = zip(extent.offset, extent.shape, tensor.shape, strict=False)
    if len(dims) > 1 or negative or any(o + n > size for o, n, size in ends):
        raise OutsideError(
            "a chunk lies inside its tensor, with strides and start that are not negative",
            where=f"{root}, {tensor.key!r} in {extent.file!r}",
            equation=f"chunk at {extent.offset} of shape {extent.shape}, strides {strides}, "
            f"start({extent.start}) in shape{tensor.shape}",
            hint="do not use it: the checkpoint is damaged, or its manifest was made by hand",
        )


def _overlap(tensor: StoredTensor, root: Path) -> tuple[Extent, Extent] | None:
    """Two extents that share an element: a sweep along the dim that tells most of them apart."""
    extents, rank = [extent for extent in tensor.extents if extent.numel], len(tensor.shape)
    if len(extents) < 2:
        return None
    if not rank:
        return extents[0], extents[1]
    low = np.array([extent.offset for extent in extents], dtype=np.int64)
    high = low + np.array([extent.shape for extent in extents], dtype=np.int64)
    dim = max(range(rank), key=lambda d: len(np.unique(low[:, d])))
    order = np.argsort(low[:, dim], kind="stable")
    low, high = low[order], high[order]
    stop = np.searchsorted(low[:, dim], high[:, dim])
    pairs = int((stop - np.arange(len(stop)) - 1).sum())
    if pairs > _MAX_PAIRS:
        raise FormatError(
            "chunks are told apart by one of their dims",
            where=f"{root}, {tensor.key!r}",
            equation=f"{len(extents)} chunks, {pairs} pairs to compare > {_MAX_PAIRS}",
            hint="no known software cuts tensors so; look at where the index comes from",
        )
    for i, end in enumerate(stop):
        near = slice(i + 1, end)
        hit = np.flatnonzero(((low[near] < high[i]) & (low[i] < high[near])).all(axis=1))
        if len(hit):
            return extents[order[i]], extents[order[i + 1 + hit[0]]]
    return None


def _gap(tensor: StoredTensor) -> Box:
    """A box that no extent touches, of a tensor whose extents are disjoint and too few.

    Halves the tensor at an edge of an extent and goes on in a half that is not full.
    """
    rank = len(tensor.shape)
    low = np.array([extent.offset for extent in tensor.extents], dtype=np.int64).reshape(-1, max(rank, 1))
    high = low + np.array([extent.shape for extent in tensor.extents], dtype=np.int64).reshape(low.shape)
    first, last = [0] * rank, list(tensor.shape)
    while len(low):
        edges = [np.unique(np.concatenate([low[:, d], high[:, d]])) for d in range(rank)]
        inner = [e[(e > first[d]) & (e < last[d])] for d, e in enumerate(edges)]
        d = max(range(rank), key=lambda d: len(inner[d]))
        cut = int(inner[d][len(inner[d]) // 2])
        left = low, np.minimum(high, [cut if k == d else 1 << 62 for k in range(rank)])
        full = (cut - first[d]) * math.prod(
            b - a for k, (a, b) in enumerate(zip(first, last, strict=True)) if k != d
        )
        if int(np.maximum(left[1] - left[0], 0).prod(axis=1).sum()) < full:
            last[d], high = cut, left[1]
        else:
            first[d], low = cut, np.maximum(low, [cut if k == d else 0 for k in range(rank)])
        kept = (low < high).all(axis=1)
        low, high = low[kept], high[kept]
    return Box.of(first, [b - a for a, b in zip(first, last, strict=True)])
