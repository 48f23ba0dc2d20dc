"""The arrays of a rank seen from the model: which elements of which tensor lie where in each.

>>> from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, even, pad, whole
>>> mesh, weight = Mesh((("tp", 2),)), Tensor("layers.{layer}.w", (5, 4), "float32", (("layer", whole(2)),))
>>> rows = along(mesh, "tp", lambda r: even(pad(whole(5), 2), 2, r))
>>> rule = BufferRule("layers.{layer}.w", (Part(weight),), (whole(2), rows, whole(4)))
>>> layout = Layout("small", mesh, (rule,))
>>> held = held_arrays(layout, 1)["layers.1.w"]
>>> held.shape, [(part.name, str(part.box), str(part.at)) for part in held.parts]
((3, 4), [('layers.1.w', '[3:5, 0:4]', '[0:2, 0:4]')])
>>> print(*held.padding)
[2:3, 0:4]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor as Array

from shardweave.errors import PlanError
from shardweave.layout import Box, Buffer, Layout, Tensor, subtract
from shardweave.layout.tensor import fill


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A block of one member of a tensor in an array.

    Attributes:
        tensor: The tensor or family.
        name: The name of the member, layers and experts filled in.
        shape: Its global shape.
        box: Which elements of the member.
        at: Where they lie in the array, in its own order of dims.
        order: For each dim of the member, the dim of the array that it lies along.
    """

    tensor: Tensor
    name: str
    shape: tuple[int, ...]
    box: Box
    at: Box
    order: tuple[int, ...]

    def view(self, array: Array) -> Array:
        """These elements in the array, a view in the order of dims of the member."""
        found = array[tuple(slice(r.start, r.stop, r.step) for r in self.at.dims)]
        extra = [i for i in range(found.dim()) if i not in self.order]
        return (
            found.permute(*extra, *self.order).reshape(self.box.shape) if extra else found.permute(self.order)
        )


@dataclass(frozen=True)
class Held:
    """An array of a rank.

    Attributes:
        name: Its name there.
        buffer: The buffer that it is of.
        positions: Its position on the separate index dims of the buffer.
    """

    name: str
    buffer: Buffer
    positions: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, padding included."""
        return self.buffer.shape

    @cached_property
    def parts(self) -> tuple[HeldPart, ...]:
        """What it holds, one block for each member, in order; padding is in none."""
        at_separate = dict(zip(self.buffer.separate, self.positions, strict=True))
        found: list[HeldPart] = []
        for piece in self.buffer.pieces():
            dims = list(zip(piece.box.dims, piece.at.dims, strict=True))
            if any(position not in dims[d][1] for d, position in at_separate.items()):
                continue
            num_index = len(piece.tensor.index)
            for numbers in itertools.product(*(range(len(dims[d][0])) for d in range(num_index))):
                places = [(r[i], a[i]) for (r, a), i in zip(dims[:num_index], numbers, strict=True)]
                if any(places[d][1] != position for d, position in at_separate.items()):
                    continue
                stored = {d: range(place, place + 1) for d, (_, place) in enumerate(places)}
                stored |= {d: dims[d][1] for d in range(num_index, len(dims))}
                found.append(
                    HeldPart(
                        tensor=piece.tensor,
                        name=fill(
                            piece.tensor.name,
                            {n: at for (n, _), (at, _) in zip(piece.tensor.index, places, strict=True)},
                        ),
                        shape=piece.tensor.shape,
                        box=Box(piece.box.dims[num_index:]),
                        at=Box(tuple(stored[d] for d in self.buffer.stacked)),
                        order=tuple(self.buffer.stacked.index(d) for d in range(num_index, len(dims))),
                    )
                )
        return tuple(found)

    @cached_property
    def padding(self) -> tuple[Box, ...]:
        """The boxes of the array that hold nothing."""
        left = [Box.of((0,) * len(self.shape), self.shape)]
        if sum(part.at.numel for part in self.parts) == left[0].numel:
            return ()
        for part in self.parts:
            left = [rest for box in left for rest in subtract(box, part.at)]
        return tuple(left)

    def check(self, shape: Sequence[int]) -> None:
        """Refuse an array of another shape.

        Raises:
            PlanError: With both shapes.
        """
        if tuple(shape) != self.shape:
            raise PlanError(
                "an array has the shape that its layout says",
                where=f"array {self.name!r}",
                equation=f"shape{tuple(shape)} != shape{self.shape}",
                hint="make the arrays of a rank from the layout that is passed along with them",
            )


def held_arrays(layout: Layout, rank: int) -> dict[str, Held]:
    """The arrays of a rank by name, in order of the layout's rules."""
    return {name: Held(name, buffer, positions) for name, (buffer, positions) in layout.arrays(rank).items()}
