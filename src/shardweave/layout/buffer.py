"""Buffers: what a framework stores on one rank, and the rule that says it for every rank at once.

A ``BufferRule`` gives the dims of a buffer as dims or as dims sharded along mesh axes. Ranks that
differ only on axes that a rule does not read are replicas: nobody enumerates ranks to find out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from shardweave.errors import BufferRuleError
from shardweave.layout.box import Box
from shardweave.layout.mesh import Mesh
from shardweave.layout.run import Dim
from shardweave.layout.tensor import Tensor, fill
from shardweave.layout.transform import IDENTITY, Transform


@dataclass(frozen=True, slots=True)
class Sharded:
    """A dim that differs along mesh axes: one ``Dim`` for each coordinate, the first axis fastest."""

    axes: tuple[str, ...]
    dims: tuple[Dim, ...]


def along(mesh: Mesh, axes: str | tuple[str, ...], cut: Callable[..., Dim]) -> Sharded:
    """The dim that ``cut`` gives for each coordinate on ``axes``.

    >>> from shardweave.layout import Mesh, even, whole
    >>> print(*along(Mesh((("tp", 2),)), "tp", lambda r: even(whole(6), 2, r)).dims)
    [0:3] [3:6]
    """
    names = (axes,) if isinstance(axes, str) else axes
    # The first axis varies fastest, so the product runs over the axes in reverse.
    coordinates = itertools.product(*(range(mesh.axis_size(name)) for name in reversed(names)))
    return Sharded(names, tuple(cut(*reversed(c)) for c in coordinates))


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that a buffer holds.

    Attributes:
        tensor: The tensor or family.
        label: Its label in the fused dim of the buffer; ``""`` where the buffer holds one tensor.
        replica: Whether elements of it may also be held elsewhere: by other coordinates on the axes
            that the rule reads (KV heads with more ranks than heads), or by another buffer (a tied
            embedding). Copies on axes that the rule does not read are replicas in any case.
    """

    tensor: Tensor
    label: str = ""
    replica: bool = False


@dataclass(frozen=True)
class BufferRule:
    """What one buffer holds at every coordinate of a mesh.

    Attributes:
        name: The framework's name, with a ``{placeholder}`` for each index dim that is not stacked.
        parts: The tensors that it holds; all have the same index dims.
        dims: One for each dim of the tensors, index dims first. At most one is fused over several
            tensors and names their labels; all others hold the label ``""``.
        stacked: The dims that form the stored array, outermost first; the index dims that are left
            out are separate arrays. ``None`` means the dims of one member, in order.
        local: Index dims whose numbers in the name count from 0 on each rank.
        where: The coordinates at which the buffer exists, for each axis that restricts it.
        dtype: The stored dtype; ``""`` means that of the tensors.
        transform: How stored values follow from logical ones.
    """

    name: str
    parts: tuple[Part, ...]
    dims: tuple[Dim | Sharded, ...]
    stacked: tuple[int, ...] | None = None
    local: tuple[str, ...] = ()
    where: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dtype: str = ""
    transform: Transform = IDENTITY

    def __post_init__(self) -> None:
        first = self.parts[0].tensor
        index = tuple(name for name, _ in first.index)
        if self.stacked is None:
            object.__setattr__(self, "stacked", tuple(range(len(index), first.num_dims)))
        if not self.dtype:
            object.__setattr__(self, "dtype", first.dtype)
        self._check(index)

    def _check(self, index: tuple[str, ...]) -> None:
        assert self.stacked is not None
        num_dims = self.parts[0].tensor.num_dims

        def refuse(rule: str, equation: str, hint: str) -> None:
            raise BufferRuleError(rule, where=f"buffer {self.name!r}", equation=equation, hint=hint)

        for part in self.parts:
            if tuple(name for name, _ in part.tensor.index) != index or part.tensor.num_dims != num_dims:
                refuse(
                    "the parts of a buffer have the same index dims and the same number of dims",
                    f"{part.tensor.name}: {part.tensor.num_dims} dims != {self.parts[0].tensor.name}: {num_dims} dims",
                    "fuse tensors of one kind only",
                )
        if len(self.dims) != num_dims:
            refuse(
                "a buffer says what it holds of every dim of its tensors",
                f"dims({len(self.dims)}) != index dims + shape dims({num_dims})",
                "give one dim for each index dim, then one for each dim of the shape",
            )
        missing = set(range(len(index), num_dims)) - set(self.stacked)
        if missing or len(set(self.stacked)) != len(self.stacked) or not set(self.stacked) <= set(range(num_dims)):
            refuse(
                "the stored array has every dim of a member once",
                f"stacked{self.stacked} of dims 0..{num_dims - 1}, of which {len(index)} are index dims",
                "only index dims may be left out; each then is a placeholder of the name",
            )
        labels = [part.label for part in self.parts]
        fused = [i for i, dim in enumerate(self.dims) if any(label for d in table_of(dim) for label in d.labels)]
        held = {label for i in fused for d in table_of(self.dims[i]) for label in d.labels}
        if len(set(labels)) != len(labels) or len(fused) > 1 or (held and held != set(labels)):
            refuse(
                "one dim of a buffer is fused, and it names each part of the buffer",
                f"labels in dims {fused}: {sorted(held)} != parts {labels}",
                "label the runs of the fused dim and give each part its label",
            )
        if not fused and len(self.parts) > 1:
            refuse("a buffer of several tensors has a fused dim", f"parts {labels}", "label the runs of one dim")
        axes = [axis for dim in self.dims if isinstance(dim, Sharded) for axis in dim.axes]
        axes += [axis for axis, _ in self.where]
        if len(set(axes)) != len(axes):
            refuse(
                "a mesh axis cuts one dim of a buffer",
                f"axes {axes}",
                "cut one dim by a function of all its axes, in order",
            )

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the rule reads; ranks that differ on others only are replicas."""
        cut = tuple(axis for dim in self.dims if isinstance(dim, Sharded) for axis in dim.axes)
        return cut + tuple(axis for axis, _ in self.where)

    @property
    def index(self) -> tuple[str, ...]:
        """The names of the index dims."""
        return tuple(name for name, _ in self.parts[0].tensor.index)

    def label_of(self, dim: int, label: str) -> str:
        """The label by which a part's runs are named in one dim: its own where the dim is fused."""
        return label if any(d.labels and d.labels != ("",) for d in table_of(self.dims[dim])) else ""

    def at(self, mesh: Mesh, rank: int) -> Buffer | None:
        """The buffer that a rank holds, or ``None`` where it holds none."""
        coordinate = mesh.coordinate(rank)
        if any(coordinate[axis] not in values for axis, values in self.where):
            return None
        dims: list[Dim] = []
        for dim in self.dims:
            if isinstance(dim, Dim):
                dims.append(dim)
                continue
            entry, stride = 0, 1
            for axis in dim.axes:
                entry += coordinate[axis] * stride
                stride *= mesh.axis_size(axis)
            dims.append(dim.dims[entry])
        assert self.stacked is not None
        return Buffer(self.name, self.parts, tuple(dims), self.stacked, self.local, self.dtype, self.transform)


def table_of(dim: Dim | Sharded) -> tuple[Dim, ...]:
    """A dim as the list of dims over its axes; one entry where it is not sharded."""
    return (dim,) if isinstance(dim, Dim) else dim.dims


@dataclass(frozen=True, slots=True)
class Piece:
    """One block seen from both sides.

    Attributes:
        tensor: The tensor that the elements belong to.
        box: Which elements: a box over the tensor's dims, index dims first, in the index's numbers.
        at: Where they lie: a box of the same shape over the buffer's dims, in the tensor's dim order.
    """

    tensor: Tensor
    box: Box
    at: Box


@dataclass(frozen=True, slots=True)
class Buffer:
    """What a framework stores on one rank under one name or name template. See ``BufferRule``."""

    name: str
    parts: tuple[Part, ...]
    dims: tuple[Dim, ...]
    stacked: tuple[int, ...]
    local: tuple[str, ...]
    dtype: str
    transform: Transform

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each stored array, outermost dim first, padding included."""
        return tuple(len(self.dims[i]) for i in self.stacked)

    @property
    def separate(self) -> tuple[int, ...]:
        """The index dims that are separate arrays."""
        return tuple(i for i in range(len(self.dims)) if i not in self.stacked)

    def members(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The stored arrays: name, and position on each separate index dim."""
        names = [name for name, _ in self.parts[0].tensor.index]
        for positions in itertools.product(*(range(len(self.dims[i])) for i in self.separate)):
            yield self.member(positions, names), positions

    def member(self, positions: tuple[int, ...], names: list[str] | None = None) -> str:
        """The name of the array at the given positions of the separate index dims."""
        names = names or [name for name, _ in self.parts[0].tensor.index]
        numbers = {
            names[i]: position if names[i] in self.local else self.dims[i][position][1]
            for i, position in zip(self.separate, positions, strict=True)
        }
        return fill(self.name, numbers)

    @property
    def numel(self) -> int:
        """Elements stored under all names together, padding included."""
        return math.prod(len(dim) for dim in self.dims)

    def pieces(self) -> Iterator[Piece]:
        """The blocks of the buffer in storage order of the tensor's dims; padding is in none.

        Law: the ``at`` boxes are disjoint, and with the padding they fill the buffer.
        """
        for part in self.parts:
            columns = []
            for dim in self.dims:
                label = part.label if dim.labels and dim.labels != ("",) else ""
                columns.append(
                    [
                        (range(run.start, run.last + 1, run.step), range(at, at + run.count))
                        for run, at in zip(dim.runs, dim.positions, strict=True)
                        if run.label == label
                    ]
                )
            for runs in itertools.product(*columns):
                yield Piece(part.tensor, Box(tuple(r for r, _ in runs)), Box(tuple(a for _, a in runs)))


def replicated(rule: BufferRule) -> BufferRule:
    """The same rule with every part declared a replica of what another buffer holds."""
    return replace(rule, parts=tuple(replace(part, replica=True) for part in rule.parts))
