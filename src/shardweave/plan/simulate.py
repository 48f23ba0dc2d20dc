"""Plans carried out in numpy: the reference that every executor is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardweave.layout import Layout, Tensor
from shardweave.plan.plan import Plan

State = dict[int, dict[str, np.ndarray]]
"""Stored arrays by global rank and name."""


def materialise(layout: Layout, values: Mapping[Tensor, np.ndarray], *, fill: object = 0) -> State:
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
            dtype = next(iter(values.values())).dtype if values else np.dtype(np.float64)
            whole = np.full([len(dim) for dim in buffer.dims], fill, dtype=dtype)
            for piece in buffer.pieces():
                source = values[piece.tensor]
                index = tuple(
                    _places(piece.tensor, d, numbers) for d, numbers in enumerate(piece.box.dims)
                )
                whole[tuple(slice(r.start, r.stop) for r in piece.at.dims)] = source[np.ix_(*index)]
            for name, positions in buffer.members():
                member = whole[tuple(positions[buffer.separate.index(d)] if d in buffer.separate else slice(None)
                                     for d in range(len(buffer.dims)))]
                order = np.argsort(np.argsort(buffer.stacked))
                state[rank][name] = np.ascontiguousarray(member.transpose(np.argsort(order)))
    return state


def _places(tensor: Tensor, d: int, numbers: range) -> list[int]:
    if d >= len(tensor.index):
        return list(numbers)
    place = {number: i for i, (_, number) in enumerate(tensor.index[d][1])}
    return [place[number] for number in numbers]


def empty(layout: Layout, dtype: np.dtype | type, *, fill: object) -> State:
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
    dtype = next((a.dtype for arrays in state.values() for a in arrays.values()), np.dtype(np.float64))
    result = empty(plan.dst, dtype, fill=0) if into is None else into
    for copy in plan.copies():
        source = state[copy.src_rank][copy.src_name][tuple(_slice(r) for r in copy.src_box.dims)]
        result[copy.dst_rank][copy.dst_name][tuple(_slice(r) for r in copy.dst_box.dims)] = copy.to_destination(source)
    return result


def _slice(r: range) -> slice:
    return slice(r.start, r.stop, r.step)
