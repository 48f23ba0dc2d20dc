"""What a rank holds, as boxes of logical tensors: read off a layout, with nothing guessed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardweave.errors import FormatError, OutsideError, TransformError
from shardweave.layout import IDENTITY, Box, Buffer, Layout, Piece
from shardweave.store.manifest import ITEMSIZE


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a logical tensor that a rank holds, and its values.

    Attributes:
        key: ``model/{name}`` or ``optim/{name}/{state}``.
        shape: Shape of the whole tensor.
        dtype: Its dtype by torch's name.
        box: Which elements, of step 1; without padding.
        values: An array (numpy or torch) of the shape of the box, with any strides.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    values: Any

    def part(self, offset: Sequence[int], size: Sequence[int]) -> Any:
        """The values of a part of the box, as a view."""
        at = [a - b for a, b in zip(offset, self.box.offset, strict=True)]
        return self.values[(*(slice(a, a + n) for a, n in zip(at, size, strict=True)), ...)]

    def check(self) -> None:
        """Refuse what is no such box.

        Raises:
            OutsideError: The box has steps or leaves its tensor, or the values are of another shape.
        """
        shape = tuple(self.values.shape)
        inside = len(self.box.dims) == len(self.shape) and all(
            (dim.step == 1 or len(dim) < 2) and dim.stop <= size
            for dim, size in zip(self.box.dims, self.shape, strict=False)
        )
        if not inside or shape != self.box.shape or self.dtype not in ITEMSIZE:
            raise OutsideError(
                "what a rank holds is a box of its tensor, of step 1 and without padding",
                where=repr(self.key),
                equation=f"box {self.box} of shape {self.shape}, values {shape}, dtype {self.dtype}",
                hint="cut padding off, and give values of the shape of the box",
            )


def check_values(values: Any, dtype: str, shape: tuple[int, ...], *, where: str) -> None:
    """Refuse words that are of another dtype or shape than was said of them.

    Raises:
        FormatError: They are.
    """
    if values.shape != shape or values.itemsize != ITEMSIZE[dtype]:
        raise FormatError(
            "values have the dtype and the shape that was said of them",
            where=where,
            equation=f"{values.dtype} {values.shape} != {dtype} {shape}",
            hint="say the dtype of the tensor that is held",
        )


def held_of(
    layout: Layout, rank: int, arrays: Mapping[str, Any], *, key: str = "model/{name}", dtype: str = ""
) -> Iterator[Held]:
    """The boxes that a rank holds of every tensor of a layout; padding is in none.

    Args:
        layout: The layout.
        rank: A global rank of its mesh.
        arrays: The stored arrays of the rank by name, numpy's or torch's. The values of a box are a view.
        key: The key, with ``{name}`` for the name of the tensor: ``optim/{name}/exp_avg`` for a state that is
            cut as the weight is.
        dtype: The dtype of the arrays; that of the layout by default.

    Law: over all ranks the boxes are the layout: of what ``materialise`` makes of whole tensors, each box has
    the values that the tensor has there.

    Raises:
        TransformError: Stored values are not the logical ones.
        OutsideError: An array has another shape than its buffer.

    >>> import numpy as np
    >>> from shardweave.layout import BufferRule, Mesh, Part, Tensor, along, even, whole
    >>> t, mesh = Tensor("norm.{layer}", (6,), "float32", (("layer", whole(2)),)), Mesh((("tp", 2),))
    >>> rows = along(mesh, "tp", lambda r: even(whole(6), 2, r))
    >>> rule = BufferRule("norm.{layer}", (Part(t),), (whole(2), rows))
    >>> arrays = {"norm.0": np.zeros(3), "norm.1": np.ones(3)}
    >>> [(one.key, str(one.box)) for one in held_of(Layout("x", mesh, (rule,)), 1, arrays)]
    [('model/norm.0', '[3:6]'), ('model/norm.1', '[3:6]')]
    """
    for buffer in layout.buffers(rank):
        if buffer.transform != IDENTITY:
            raise TransformError(
                "what is saved is the logical value",
                where=f"layout {layout.name!r}, buffer {buffer.name!r}",
                equation=f"transform({buffer.transform.kind})",
                hint="save from a layout that stores values as they are",
            )
        for piece in buffer.pieces():
            for one in _members(buffer, piece, arrays, rank):
                yield Held(key.format(name=one.key), one.shape, dtype or one.dtype, one.box, one.values)


def _members(buffer: Buffer, piece: Piece, arrays: Mapping[str, Any], rank: int) -> Iterator[Held]:
    tensor, index = piece.tensor, [name for name, _ in piece.tensor.index]
    count = len(index)
    separate, stacked = buffer.separate, buffer.stacked
    # Dims of the array that are dims of a member, in the array's order; then where each is in the tensor's.
    kept = [d for d in stacked if d >= count]
    order = [kept.index(d) for d in range(count, tensor.num_dims)]
    boxes = list(_dense(piece.box.dims[count:], piece.at.dims[count:]))
    turns = [list(zip(piece.box.dims[d], piece.at.dims[d], strict=True)) for d in range(count)]
    for turn in itertools.product(*turns):
        name = tensor.member({index[d]: number for d, (number, _) in enumerate(turn)})
        stored = buffer.member(tuple(turn[d][1] for d in separate))
        array = arrays[stored]
        if tuple(array.shape) != buffer.shape:
            raise OutsideError(
                "an array has the shape that its layout says",
                where=f"rank {rank}, array {stored!r}",
                equation=f"{tuple(array.shape)} != {buffer.shape}",
                hint="describe the ranks by the layout that made their arrays",
            )
        for box, at in boxes:
            cut = tuple(turn[d][1] if d < count else at[d - count] for d in stacked)
            values = array[(*cut, ...)]
            if order != sorted(order):
                values = values.permute(order) if hasattr(values, "permute") else values.transpose(order)
            yield Held(name, tensor.shape, buffer.dtype, box, values)


def _dense(box: Sequence[range], at: Sequence[range]) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """A box with its place, as boxes of step 1."""
    columns = []
    for dim, place in zip(box, at, strict=True):
        if dim.step == 1 or len(dim) < 2:
            columns.append([(dim, slice(place.start, place.stop))])
        else:
            columns.append([(range(n, n + 1), slice(p, p + 1)) for n, p in zip(dim, place, strict=True)])
    for one in itertools.product(*columns):
        yield Box(tuple(dim for dim, _ in one)), tuple(place for _, place in one)
