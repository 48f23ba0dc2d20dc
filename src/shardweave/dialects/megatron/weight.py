"""A weight in Megatron's words, and the ways in which ranks cut one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardweave.errors import GeometryError
from shardweave.layout import IDENTITY, Dim, Part, Transform, concat, cut, even, whole
from shardweave.models.spec import Block

Cut = Callable[[Dim, int, int], Dim]
"""A way of partitioning: from a dim, the number of parts and a part, to what the part holds."""


# --- cuts ---------------------------------------------------------------------------------------


def rows(dim: Dim, parts: int, part: int) -> Dim:
    """An even cut of raw rows or columns, whatever they mean."""
    return even(dim, parts, part)


def halves(dim: Dim, parts: int, part: int) -> Dim:
    """Gate and up, stored one after the other, each cut on its own."""
    return concat(*(even(even(dim, 2, half), parts, part) for half in (0, 1)))


def by_heads(num_heads: int) -> Cut:
    """An even cut of rows or columns that are whole heads, one after the other."""

    def heads(dim: Dim, parts: int, part: int) -> Dim:
        if num_heads % parts:
            raise GeometryError(
                "tp cuts latent attention by whole heads",
                equation=f"num_heads({num_heads}) % tp({parts}) = {num_heads % parts} != 0",
                hint="choose a tp that divides the heads; Megatron asks for it too",
            )
        return even(dim, parts, part)

    return heads


@dataclass(frozen=True, slots=True)
class Segments:
    """A cut of segments that are stored one after the other, each on its own and by whole heads or groups.

    Attributes:
        names: What a checkpoint calls them, each of which it stores apart.
        sizes: Their rows.
        heads: The heads or groups that each consists of.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    heads: tuple[int, ...]

    def __call__(self, dim: Dim, parts: int, part: int) -> Dim:
        """What a part holds of the segments that lie one after the other in a dim."""
        for name, heads in zip(self.names, self.heads, strict=True):
            if heads % parts:
                raise GeometryError(
                    "tp cuts each segment of a fused weight by whole heads",
                    where=f"segment {name!r} of {', '.join(self.names)}",
                    equation=f"heads({heads}) % tp({parts}) = {heads % parts} != 0",
                    hint="choose a tp that divides the heads of every segment",
                )
        return concat(*(even(one, parts, part) for one in self.apart(dim)))

    def apart(self, dim: Dim) -> Iterator[Dim]:
        """The segments, one after the other."""
        at = 0
        for size in self.sizes:
            yield cut(dim, at, at + size)
            at += size


# --- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as Megatron knows it.

    Attributes:
        path: Its name below the layer ("self_attention.linear_qkv.weight").
        parts: The tensors that it holds.
        dims: What the whole weight holds of each dim of the shape, padding included.
        cut_dim: The dim of the shape that ranks cut; ``None`` where every rank holds it whole.
        cut: How they cut it.
        layers: The layers that have it; empty outside the layers.
        further: Whether these are layers for further tokens, which Megatron calls ``mtp`` and counts from 0.
        transform: How its values follow from the logical ones.
    """

    path: str
    parts: tuple[Part, ...]
    dims: tuple[Dim, ...]
    cut_dim: int | None = None
    cut: Cut = rows
    layers: Dim = Dim()  # noqa: RUF009 - a value, immutable
    further: bool = False
    transform: Transform = IDENTITY

    @property
    def expert(self) -> bool:
        """Whether it is one of many experts, spread along ep and cut along etp."""
        return len(self.parts[0].tensor.index) == 2

    @property
    def module(self) -> str:
        """The module that has its layers."""
        return "mtp" if self.further else "decoder"


def weight_of(block: Block, path: str, role: str, *, cut_dim: int | None = None) -> Iterator[Weight]:
    """A weight of one tensor, where the block has it."""
    if role in block.tensors:
        tensor = block.tensors[role]
        yield Weight(
            path, (Part(tensor),), tuple(whole(n) for n in tensor.shape), cut_dim, layers=block.layers
        )


def fused_of(block: Block, path: str, roles: Mapping[str, str], fused: Dim, cut: Cut) -> Iterator[Weight]:
    """A weight of several tensors fused along their rows; ``roles`` maps labels to roles."""
    present = [role for role in roles.values() if role in block.tensors]
    if not present:
        return
    if len(present) != len(roles):
        raise GeometryError(
            "the parts of a fused weight come together",
            where=f"weight {path!r}, layers {block.layers}",
            equation=f"the model has {', '.join(present)} of {', '.join(roles.values())}",
            hint="take the config of these weights; Megatron has no place for half of a fused weight",
        )
    parts = tuple(Part(block.tensors[role], label) for label, role in roles.items())
    others = tuple(whole(n) for n in parts[0].tensor.shape[1:])
    yield Weight(path, parts, (fused, *others), 0, cut, block.layers)


def segmented(weight: Weight, segments: Segments, *, stored: bool) -> Iterator[Weight]:
    """A weight of segments: one in memory, and in a checkpoint one for each segment, named after it.

    Source: megatron-core 0.16.1, ``_split_tensor_factory`` of ssm/{mamba_mixer,gated_delta_net}.py.
    """
    if not stored:
        yield replace(weight, cut_dim=0, cut=segments)
        return
    for name, rows_of, heads in zip(
        segments.names, segments.apart(weight.dims[0]), segments.heads, strict=True
    ):
        parts = tuple(part for part in weight.parts if part.label in rows_of.labels)
        one = Segments((name,), (len(rows_of),), (heads,))
        yield replace(
            weight,
            path=f"{weight.path}.{name}",
            parts=parts,
            dims=(rows_of, *weight.dims[1:]),
            cut_dim=0,
            cut=one,
        )
