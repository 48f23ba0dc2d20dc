"""What the rules of all kinds of blocks read: the deployment, and the few ways in which buffers are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardweave.errors import ModelError
from shardweave.layout import (
    IDENTITY,
    BufferRule,
    Dim,
    Mesh,
    Part,
    Sharded,
    Tensor,
    Transform,
    along,
    even,
    take,
    whole,
)
from shardweave.models import Block

Where = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class World:
    """The deployment that the rules of all blocks read.

    Attributes:
        ends_everywhere: The kinds of ends of the model that every pipeline stage holds.
        names: What vLLM calls otherwise than the files: a part of a name, and what replaces it.
    """

    mesh: Mesh
    layers: tuple[range, ...]
    ends_everywhere: frozenset[str]
    names: tuple[tuple[str, str], ...]
    tied: bool
    expert_parallel: bool
    placement: str
    redundant: int
    vocab_multiple: int
    expert_multiple: int
    dtype: str

    @property
    def tp(self) -> int:
        """The ranks that cut linear layers."""
        return self.mesh.axis_size("tp")

    @property
    def moe(self) -> int:
        """The ranks of a stage, over which experts are spread."""
        return self.tp * self.mesh.axis_size("dp")

    def index(self, block: Block) -> Sharded:
        """The layers of a block on each stage."""
        numbers = [number for _, number in block.layers]
        return along(
            self.mesh,
            "pp",
            lambda p: take(block.layers, [i for i, n in enumerate(numbers) if n in self.layers[p]]),
        )

    def over_tp(self, rule: Callable[[int], Dim]) -> Sharded:
        """The dim that a rule gives for each of these ranks."""
        return along(self.mesh, "tp", rule)

    def share(self, size: int) -> Sharded:
        """An even share of rows or columns."""
        return self.over_tp(lambda r: even(whole(size), self.tp, r))

    def over_moe(self, rule: Callable[[int], Dim]) -> Sharded:
        """The dim that a rule gives for each of the ranks of a stage."""
        return along(self.mesh, ("tp", "dp"), lambda t, d: rule(d * self.tp + t))

    def only(self, kind: str, *stages: int) -> Where:
        """The pipeline stages that hold an end of the model."""
        pp = self.mesh.axis_size("pp")
        if kind in self.ends_everywhere or pp == 1:
            return ()
        return (("pp", tuple(sorted({s % pp for s in stages}))),)

    def rule(
        self,
        name: str,
        parts: Sequence[Part],
        *dims: Dim | Sharded,
        stacked: tuple[int, ...] | None = None,
        where: Where = (),
        dtype: str = "",
        transform: Transform = IDENTITY,
    ) -> BufferRule:
        """A buffer under vLLM's name, in the engine's dtype unless another is given."""
        for old, new in self.names:
            name = name.replace(old, new)
        return BufferRule(
            name,
            tuple(parts),
            dims,
            stacked=stacked,
            where=where,
            dtype=dtype or self.dtype,
            transform=transform,
        )


def held_whole(block: Block, role: str, world: World) -> BufferRule:
    """A tensor that every rank of its stage holds whole."""
    tensor = block.tensors[role]
    return world.rule(tensor.name, [Part(tensor)], world.index(block), *tensor.dims[1:])


def renamed(tensor: Tensor, *names: tuple[str, str]) -> str:
    """The name of a fused buffer, from that of the first tensor in it."""
    for old, new in names:
        if old in tensor.name:
            return tensor.name.replace(old, new)
    raise ModelError(
        "the name of a fused buffer follows from that of its first tensor",
        where=f"tensor {tensor.name!r}",
        equation=f"no {' or '.join(old for old, _ in names)} in the name",
        hint="vLLM stores models with other names in modules of their own",
    )
