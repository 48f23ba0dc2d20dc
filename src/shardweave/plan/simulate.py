"""Plans carried out in numpy: the reference that every executor is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardweave.layout import Dim, Layout, Tensor
from shardweave.plan.plan import Plan

State = dict[int, dict[str, NDArray[Any]]]
"""Stored arrays by global rank and name."""


def materialise(layout: Layout, values: Mapping[Tensor, NDArray[Any]], *, fill: object = 0) -> State:
    """The stored arrays of every rank, cut from whole tensors by the pieces of each buffer.

    Args:
        layout: The layout.
        values: The whole of each tensor, index dims first, in order of the index.
        fill: What padding holds.
    """
    state: State = {}
    for rank in layout.mesh.ranks:
        state[rank] = {}
        for buffer in layout.buffers(rank):
            dtype = values[buffer.parts[0].tensor].dtype
            held = np.full([len(dim) for dim in buffer.dims], fill, dtype=dtype)
            for piece in buffer.pieces():
                index = (place_of(dim, r) for dim, r in zip(piece.tensor.dims, piece.box.dims, strict=True))
                held[tuple(_slice(r) for r in piece.at.dims)] = values[piece.tensor][np.ix_(*index)]
            # Separate index dims outermost, then the stored array in its own order.
            arrays = held.transpose((*buffer.separate, *buffer.stacked))
            for name, positions in buffer.members():
                state[rank][name] = np.array(arrays[positions], order="C")
    return state


def place_of(dim: Dim, numbers: range) -> NDArray[np.int64]:
    """Where in a dim of a tensor some of its numbers are, each of which it takes once."""
    held = np.array([number for _, number in dim], dtype=np.int64)
    order = np.argsort(held, kind="stable")
    found: NDArray[np.int64] = order[np.searchsorted(held[order], np.asarray(numbers, dtype=np.int64))]
    return found


def empty(layout: Layout, dtype: DTypeLike, *, fill: object) -> State:
    """The stored arrays of every rank, prefilled."""
    return {
        rank: {
            name: np.full(buffer.shape, fill, dtype=dtype)
            for name, (buffer, _) in layout.arrays(rank).items()
        }
        for rank in layout.mesh.ranks
    }


def simulate(plan: Plan, state: State, *, into: State | None = None) -> State:
    """The destination's arrays after the plan, from the source's.

    Args:
        plan: The plan.
        state: The arrays of the source's ranks.
        into: Arrays of the destination's ranks to write to; new ones filled with zeros by default.
    """
    if into is None:
        into = empty(plan.dst, next(a.dtype for arrays in state.values() for a in arrays.values()), fill=0)
    for copy in plan.copies():
        source = state[copy.src_rank][copy.src_name][tuple(_slice(r) for r in copy.src_box.dims)]
        target = into[copy.dst_rank][copy.dst_name]
        target[tuple(_slice(r) for r in copy.dst_box.dims)] = copy.to_destination(source)
    return into


def _slice(r: range) -> slice:
    return slice(r.start, r.stop, r.step)
