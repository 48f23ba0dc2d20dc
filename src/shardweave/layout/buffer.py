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
from typing import NoReturn

from shardweave.errors import BufferRuleError
from shardweave.layout.box import Box
from shardweave.layout.mesh import Mesh
from shardweave.layout.run import PAD, Dim
from shardweave.layout.tensor import Tensor, fill, placeholders
from shardweave.layout.transform import IDENTITY, Transform


@dataclass(frozen=True, slots=True)
class Sharded:
    """A dim that differs along mesh axes: one ``Dim`` for each coordinate, the first axis fastest."""

    axes: tuple[str, ...]
    dims: tuple[Dim, ...]


def along(mesh: Mesh, axes: str | tuple[str, ...], cut: Callable[..., Dim]) -> Sharded:
    """The dim that ``cut`` gives for each coordinate on ``axes``.

    Law: a rank at coordinates ``c`` on ``axes`` holds ``cut(*c)``.

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
        numbers: For index dims that are numbered otherwise in the name than in the model: the number
            printed at each position. Frameworks count the layers and experts of a rank from 0.
        where: The coordinates at which the buffer exists, for each axis that restricts it.
        dtype: The stored dtype; ``""`` means that of the tensors.
        transform: How stored values follow from logical ones.
    """

    name: str
    parts: tuple[Part, ...]
    dims: tuple[Dim | Sharded, ...]
    stacked: tuple[int, ...] | None = None
    numbers: tuple[tuple[str, Dim | Sharded], ...] = ()
    where: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dtype: str = ""
    transform: Transform = IDENTITY

    def __post_init__(self) -> None:
        first = self.parts[0].tensor if self.parts else None
        if first is None:
            self._refuse("a buffer holds a tensor", "parts()", "give at least one part")
        if self.stacked is None:
            object.__setattr__(self, "stacked", tuple(range(len(first.index), first.num_dims)))
        if not self.dtype:
            object.__setattr__(self, "dtype", first.dtype)
        self._check_dims(first)
        self._check_names()
        self._check_labels()
        self._check_axes()

    def _refuse(self, rule: str, equation: str, hint: str) -> NoReturn:
        raise BufferRuleError(rule, where=f"buffer {self.name!r}", equation=equation, hint=hint)

    def _check_dims(self, first: Tensor) -> None:
        assert self.stacked is not None
        for tensor in (part.tensor for part in self.parts):
            if [name for name, _ in tensor.index] != list(self.index) or tensor.num_dims != first.num_dims:
                self._refuse(
                    "the parts of a buffer have the same index dims and the same number of dims",
                    f"{tensor.name}: {tensor.num_dims} dims != {first.name}: {first.num_dims} dims",
                    "fuse tensors of one kind only",
                )
        if len(self.dims) != first.num_dims:
            self._refuse(
                "a buffer says what it holds of every dim of its tensors",
                f"dims({len(self.dims)}) != index dims + shape dims({first.num_dims})",
                "give one dim for each index dim, then one for each dim of the shape",
            )
        shape_dims = set(range(len(first.index), first.num_dims))
        once = len(set(self.stacked)) == len(self.stacked)
        if not (once and shape_dims <= set(self.stacked) <= set(range(first.num_dims))):
            self._refuse(
                "the stored array has every dim of a member once",
                f"stacked{self.stacked} of {first.num_dims} dims, the first {len(first.index)} index dims",
                "only index dims may be left out; each then is a placeholder of the name",
            )

    def _check_names(self) -> None:
        assert self.stacked is not None
        separate = [name for i, name in enumerate(self.index) if i not in self.stacked]
        if sorted(placeholders(self.name)) != sorted(separate):
            self._refuse(
                "the name of a buffer has one placeholder for each index dim that is not stacked",
                f"placeholders({', '.join(placeholders(self.name))}) "
                f"!= separate index dims({', '.join(separate)})",
                "write the name as 'layers.{layer}.weight', or stack the dim",
            )
        for name, printed in self.numbers:
            dim = self.dims[self.index.index(name)] if name in separate else Dim()
            sizes = [[len(d) for d in table_of(each)] for each in (printed, dim)]
            if sizes[0] != sizes[1] or axes_of(printed) != axes_of(dim):
                self._refuse(
                    "numbers in a name are given for each position of a separate index dim",
                    f"numbers of {name!r} over axes({', '.join(axes_of(printed))}) "
                    f"!= index dim over axes({', '.join(axes_of(dim))})",
                    "give one number for each layer or expert that the rank holds",
                )
        if not self.name or any(c.isspace() for c in self.name):
            self._refuse("the name of a buffer is a word", f"name({self.name!r})", "write it without blanks")
        for i, name in enumerate(self.index):
            if name in separate and any(run.label is PAD for d in table_of(self.dims[i]) for run in d.runs):
                self._refuse(
                    "an array of its own holds a member of its family",
                    f"index dim {name!r} has padding and is not stacked",
                    "leave the padding out, or stack the dim",
                )

    def _check_labels(self) -> None:
        labels = [part.label for part in self.parts]
        held = {label for i in self.fused for d in table_of(self.dims[i]) for label in d.labels}
        named = set(labels) == held and "" not in held if self.fused else len(labels) == 1
        if len(self.fused) > 1 or len(set(labels)) != len(labels) or not named:
            self._refuse(
                "one dim of a buffer of several tensors is fused, and its labels are those of the parts",
                f"labels in dims {list(self.fused)}: {sorted(held)} != parts {labels}",
                "label the runs of the fused dim and give each part its label",
            )

    def _check_axes(self) -> None:
        if len(set(self.axes)) != len(self.axes):
            self._refuse(
                "a mesh axis cuts one dim of a buffer",
                f"axes({', '.join(self.axes)})",
                "cut one dim by a function of all its axes, in order",
            )
        for axis, values in self.where:
            if not values or len(set(values)) != len(values):
                self._refuse(
                    "a buffer exists somewhere on each axis that restricts it, each coordinate said once",
                    f"axis {axis!r}: coordinates({', '.join(str(v) for v in values)})",
                    "leave out the rule of a buffer that nobody has",
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

    @cached_property
    def fused(self) -> tuple[int, ...]:
        """The dim whose runs are labelled by part; none where all runs are of the only tensor at hand."""
        return tuple(i for i, dim in enumerate(self.dims) if any(any(d.labels) for d in table_of(dim)))

    def label_of(self, dim: int, label: str) -> str:
        """The label by which a part's runs are named in one dim: its own where the dim is fused."""
        return label if dim in self.fused else ""

    def at(self, mesh: Mesh, rank: int) -> Buffer | None:
        """The buffer that a rank holds, or ``None`` where it holds none."""
        coordinate = mesh.coordinate(rank)
        if any(coordinate[axis] not in values for axis, values in self.where):
            return None

        def here(dim: Dim | Sharded) -> Dim:
            entry, stride = 0, 1
            for axis in axes_of(dim):
                entry += coordinate[axis] * stride
                stride *= mesh.axis_size(axis)
            return table_of(dim)[entry]

        assert self.stacked is not None
        dims = tuple(here(dim) for dim in self.dims)
        numbers = tuple((name, here(dim)) for name, dim in self.numbers)
        return Buffer(self.name, self.parts, dims, self.stacked, numbers, self.dtype, self.transform)


def table_of(dim: Dim | Sharded) -> tuple[Dim, ...]:
    """A dim as the list of dims over its axes; one entry where it is not sharded."""
    return (dim,) if isinstance(dim, Dim) else dim.dims


def axes_of(dim: Dim | Sharded) -> tuple[str, ...]:
    """The mesh axes that a dim is sharded along."""
    return dim.axes if isinstance(dim, Sharded) else ()


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
    numbers: tuple[tuple[str, Dim], ...]
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
        for positions in itertools.product(*(range(len(self.dims[i])) for i in self.separate)):
            yield self.member(positions), positions

    def member(self, positions: tuple[int, ...]) -> str:
        """The name of the array at the given positions of the separate index dims."""
        names = [name for name, _ in self.parts[0].tensor.index]
        printed = dict(self.numbers)
        numbers = {
            names[i]: printed.get(names[i], self.dims[i])[position][1]
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
            columns = []  # the fused dim names every run, the others name none
            for dim in self.dims:
                columns.append(
                    [
                        (range(run.start, run.last + 1, run.step), range(at, at + run.count))
                        for run, at in zip(dim.runs, dim.positions, strict=True)
                        if run.label in ("", part.label)
                    ]
                )
            for runs in itertools.product(*columns):
                yield Piece(part.tensor, Box(tuple(r for r, _ in runs)), Box(tuple(a for _, a in runs)))


def replicated(rule: BufferRule) -> BufferRule:
    """The same rule with every part declared a replica of what another buffer holds.

    Law: ``replicated(rule)`` holds what ``rule`` holds, and owns nothing of it.
    """
    return replace(rule, parts=tuple(replace(part, replica=True) for part in rule.parts))
