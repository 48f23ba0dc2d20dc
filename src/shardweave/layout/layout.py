"""A layout: which element of which tensor lives where on which rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import BufferRuleError, UnknownNameError
from shardweave.layout.buffer import Buffer, BufferRule, Part, Sharded, table_of
from shardweave.layout.mesh import Mesh
from shardweave.layout.table import Ints
from shardweave.layout.tensor import Tensor


@dataclass(frozen=True)
class Layout:
    """Tensors on a mesh: one rule for each buffer, valid at every coordinate.

    Attributes:
        name: What the layout is called in messages and pictures ("megatron", "vllm").
        mesh: The ranks.
        rules: The buffers.
    """

    name: str
    mesh: Mesh
    rules: tuple[BufferRule, ...]

    def __post_init__(self) -> None:
        views = (self.mesh.axes, *self.mesh.views)
        if self.name != self.name.strip() or not self.name.isprintable():
            raise BufferRuleError(
                "the name of a layout is one line",
                where=f"layout {self.name!r}",
                equation=f"name({self.name!r})",
                hint="leave out line breaks and outer blanks",
            )
        for rule in self.rules:
            for axis in rule.axes:
                self.mesh.axis_size(axis)
            for axis, values in rule.where:
                for value in values:
                    self.mesh.where({axis: value})
            if not any(set(rule.axes) <= {name for name, _ in view} for view in views):
                raise BufferRuleError(
                    "the axes that cut a buffer belong to one factorisation of the mesh",
                    where=f"buffer {rule.name!r}",
                    equation=f"axes({', '.join(rule.axes)}) on mesh {self.mesh}",
                    hint="cut experts along the expert axes only, dense weights along the dense ones only",
                )
            for dim in rule.dims:
                if isinstance(dim, Sharded):
                    size = math.prod(self.mesh.axis_size(axis) for axis in dim.axes)
                    if size != len(dim.dims):
                        raise BufferRuleError(
                            "a sharded dim says what each coordinate holds",
                            where=f"buffer {rule.name!r}, axes {', '.join(dim.axes)}",
                            equation=f"coordinates({size}) != dims({len(dim.dims)})",
                            hint="build it with along(mesh, axes, cut)",
                        )

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the layout holds, in order of first appearance."""
        return tuple(dict.fromkeys(part.tensor for rule in self.rules for part in rule.parts))

    @cached_property
    def holders(self) -> dict[Tensor, tuple[tuple[int, Part], ...]]:
        """For each tensor, the rules that hold it, by number, and the part that it is in each."""
        found: dict[Tensor, list[tuple[int, Part]]] = {}
        for i, rule in enumerate(self.rules):
            for part in rule.parts:
                found.setdefault(part.tensor, []).append((i, part))
        return {tensor: tuple(parts) for tensor, parts in found.items()}

    def buffers(self, rank: int) -> Iterator[Buffer]:
        """The buffers of a global rank, in order of the rules; empty ones included."""
        for rule in self.rules:
            buffer = rule.at(self.mesh, rank)
            if buffer is not None:
                yield buffer

    def arrays(self, rank: int) -> dict[str, tuple[Buffer, tuple[int, ...]]]:
        """The stored arrays of a rank by name: the buffer, and the position on its separate index dims.

        Raises:
            UnknownNameError: Two buffers of the rank claim one name.
        """
        found: dict[str, tuple[Buffer, tuple[int, ...]]] = {}
        for buffer in self.buffers(rank):
            for name, positions in buffer.members():
                if name in found:
                    raise UnknownNameError(
                        "a name means one array of a rank",
                        where=f"layout {self.name!r}, rank {rank}",
                        equation=f"{name!r} comes from {found[name][0].name!r} and from {buffer.name!r}",
                        hint="number layers and experts so that names do not collide",
                    )
                found[name] = (buffer, positions)
        return found

    def key(self, rank: int, name: str) -> str:
        """What an array of a rank is called among those of all: its name, and the rank where there are more.

        >>> from shardweave.layout import Mesh, whole
        >>> Layout("whole", Mesh(()), ()).key(0, "norm.weight")
        'norm.weight'
        >>> Layout("cut", Mesh((("tp", 2),)), ()).key(1, "norm.weight")
        'norm.weight@1'
        """
        return name if self.mesh.size == 1 else f"{name}@{rank}"

    def stored(self) -> dict[str, tuple[Buffer, tuple[int, ...]]]:
        """The arrays of all ranks by ``key``: the buffer, and the position on its separate index dims.

        Raises:
            UnknownNameError: As ``arrays``.
        """
        return {
            self.key(rank, name): found
            for rank in self.mesh.ranks
            for name, found in self.arrays(rank).items()
        }

    def exists(self, rule: BufferRule) -> NDArray[np.bool_]:
        """For each rank of the mesh, whether the buffer of a rule exists there."""
        mask = np.ones(self.mesh.size, dtype=np.bool_)
        for axis, values in rule.where:
            mask &= np.isin(self.mesh.columns[axis], values)
        return mask

    def entries(self, rule: BufferRule) -> Ints:
        """For each rank of the mesh, the entry of each sharded dim of a rule; one column a dim.

        Rows of ranks on which the buffer does not exist are -1.
        """
        columns = np.zeros((self.mesh.size, len(rule.dims)), dtype=np.int64)
        for d, dim in enumerate(rule.dims):
            stride = 1
            for axis in dim.axes if isinstance(dim, Sharded) else ():
                columns[:, d] += self.mesh.columns[axis] * stride
                stride *= self.mesh.axis_size(axis)
        columns[~self.exists(rule)] = -1
        return columns

    def ranks_of(self, rule: BufferRule, dim: int, entry: int) -> Ints:
        """The global ranks that hold one entry of a sharded dim; for messages."""
        entries = self.entries(rule)
        return np.flatnonzero(entries[:, dim] == entry) + self.mesh.offset

    def __str__(self) -> str:
        from shardweave.layout.notation import format_layout

        return format_layout(self)


def format_ranks(ranks: Sequence[int] | Ints, most: int = 8) -> str:
    """A list of ranks, shortened for a message."""
    head = ", ".join(str(int(rank)) for rank in ranks[:most])
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {head}" if len(ranks) <= most else f"{word} {head}, ... {len(ranks)} in all"


def num_entries(rule: BufferRule) -> tuple[int, ...]:
    """How many entries each dim of a rule has over its axes."""
    return tuple(len(table_of(dim)) for dim in rule.dims)
