"""Whole tensors from what ranks hold, every replica compared on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import GapError, ReplicaError
from shardweave.layout import Buffer, Layout, Piece, Tensor
from shardweave.plan.simulate import State, place_of

_NOBODY = -1


def assemble(layout: Layout, state: State) -> dict[Tensor, NDArray[Any]]:
    """The whole of each tensor, from the stored arrays of every rank.

    An element that several ranks hold, or one rank in several places, is compared bit by bit: NaNs
    with their payloads, and the sign of zero. Padding is not looked at.

    Law: ``assemble(layout, materialise(layout, values))`` is ``values``, for every proved layout.

    Args:
        layout: Where the state is.
        state: The stored arrays by rank and name.

    Raises:
        ReplicaError: Two holders of an element differ; names the tensor, the element and the ranks.
        GapError: An element is held by nobody.
    """
    shapes = {tensor: [len(dim) for dim in tensor.dims] for tensor in layout.tensors}
    owner = {tensor: np.full(shape, _NOBODY) for tensor, shape in shapes.items()}
    whole: dict[Tensor, NDArray[Any]] = {}
    for rank in layout.mesh.ranks:
        for buffer in layout.buffers(rank):
            held = _held(buffer, state[rank])
            for piece in buffer.pieces():
                values = whole.setdefault(piece.tensor, np.zeros(shapes[piece.tensor], held.dtype))
                _merge(piece, held, values, owner[piece.tensor], rank)
    for tensor, ranks in owner.items():
        if (ranks == _NOBODY).any():
            index = tuple(int(i) for i in np.argwhere(ranks == _NOBODY)[0])
            raise GapError(
                "every element of a tensor is held by some rank",
                where=f"layout {layout.name!r}, tensor {tensor.name!r}, element {_named(tensor, index)}",
                equation=f"missing {int((ranks == _NOBODY).sum())} of {tensor.numel} elements",
                hint="prove the layout before its state is assembled",
            )
    return whole


def _held(buffer: Buffer, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """A buffer with its dims in the tensors' order, put together from its stored arrays."""
    members = [arrays[name] for name, _ in buffer.members()]
    lead = [len(buffer.dims[d]) for d in buffer.separate]
    dtype = members[0].dtype if members else np.dtype(np.uint8)
    stacked = np.array(members, dtype=dtype).reshape(*lead, *buffer.shape)
    return stacked.transpose(np.argsort((*buffer.separate, *buffer.stacked)))


def _merge(piece: Piece, held: NDArray[Any], values: NDArray[Any], owner: NDArray[Any], rank: int) -> None:
    index = np.ix_(*(place_of(dim, r) for dim, r in zip(piece.tensor.dims, piece.box.dims, strict=True)))
    mine = held[tuple(slice(r.start, r.stop) for r in piece.at.dims)]
    known = owner[index] != _NOBODY
    different = known & (_words(mine) != _words(values[index]))
    if different.any():
        at = tuple(int(i) for i in np.argwhere(different)[0])
        element = tuple(int(places.reshape(-1)[i]) for places, i in zip(index, at, strict=True))
        raise ReplicaError(
            "replicas hold the same bytes",
            where=f"tensor {piece.tensor.name!r}, element {_named(piece.tensor, element)}",
            equation=f"{mine[at]!r} on rank {rank} != {values[element]!r} on rank {owner[element]}, "
            f"{int(different.sum())} elements differ",
            hint="the copies drifted apart; find out which is right before anything is saved",
        )
    values[index] = mine
    owner[index] = np.where(known, owner[index], rank)


def _words(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _named(tensor: Tensor, places: tuple[int, ...]) -> tuple[int, ...]:
    """An element in the tensor's own numbers: those of layers and experts, not their places."""
    return tuple(dim[place][1] for dim, place in zip(tensor.dims, places, strict=True))
