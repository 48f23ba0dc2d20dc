"""Which shared weights a rank reads in a step, in order: what they cost follows from this alone.

A step reads a weight once for each microbatch and each of its uses: on the way forward, once more on the way
back where a graph needs its values, and, where layers are computed once more, a time between the two. Each is
a fetch; each use ends in one sum of gradients. This is the order of ``decoder.py`` and ``mtp.py`` as data;
that it is theirs is what ``tests/dist/test_train_traffic.py`` counts, byte by byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from shardweave.layout import Layout, Mesh
from shardweave.train.arrays import held_arrays
from shardweave.train.decoder import EMBEDDING, HEAD
from shardweave.train.gathered import shared_weights
from shardweave.train.grid import Group, GroupPlan, Over
from shardweave.train.maths import Maths, maths
from shardweave.train.mtp import with_heads
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import ReducePlan, reduce_plan
from shardweave.train.runtime import GRID, check_heads, layout_at
from shardweave.train.schedule import stages_of

_OF_LAYER = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The weights of a layer in the order in which they are used, those of one operation together."""


@dataclass(frozen=True, slots=True)
class Use:
    """Weights that are whole at the same time.

    Attributes:
        names: In the order in which they are read.
        reads_back: Whether the way back needs their values: not those of an embedding, which only looks up.
        layer: The layer that they are used in, anew where layers are computed once more; none for others.
        at_once: Whether the way back has them at the same time too, and not one after the other.
    """

    names: tuple[str, ...]
    reads_back: bool = True
    layer: int | None = None
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class SharedSize:
    """What a rank has of a weight that lies in shares.

    Attributes:
        group: The name of the ranks that share it.
        ranks: How many there are.
        own: Elements of the model that are in this rank's share.
        share: Elements of a share, padding included.
        whole: Elements of all shares, without padding.
        empty: How many of the ranks hold nothing but padding.
    """

    group: str
    ranks: int
    own: int
    share: int
    whole: int
    empty: int

    @property
    def padding(self) -> int:
        """Elements that all shares together are filled up with."""
        return self.share * self.ranks - self.whole


@dataclass(frozen=True)
class Planned:
    """A model on the ranks of some degrees, before there is any.

    Attributes:
        maths: What is computed.
        parallel: The degrees.
        chunks: The layers of each stretch of each stage.
        multiple: As ``build`` takes it.
    """

    maths: Maths
    parallel: Parallel
    chunks: Sequence[Sequence[Sequence[int]]]
    multiple: int = 1
    _plans: dict[int, ReducePlan] = field(default_factory=dict, repr=False, compare=False)
    _sizes: dict[int, dict[str, SharedSize]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks."""
        return self.parallel.mesh

    @cached_property
    def groups(self) -> GroupPlan:
        """The groups by name. Which of them need a communicator is not asked."""
        names = self.parallel.groups.items()
        over = {name: axes if isinstance(axes, Over) else Over(tuple(axes)) for name, axes in names}
        return GroupPlan({GRID: self.mesh}, {GRID: over}, ())

    @cached_property
    def layout(self) -> Layout:
        """What ranks hold."""
        return layout_at(self.maths, self.parallel, self.chunks, multiple=self.multiple)

    @cached_property
    def whole(self) -> Layout:
        """What they would hold if none shared a weight: what they compute with."""
        return layout_at(self.maths, self.parallel, self.chunks, shared=False)

    def plan(self, rank: int) -> ReducePlan:
        """How the gradients of a rank are summed, and who has its state."""
        if rank not in self._plans:
            self._plans[rank] = reduce_plan(self.layout, rank)
        return self._plans[rank]

    def sizes(self, rank: int) -> dict[str, SharedSize]:
        """The weights of a rank that lie in shares, by name."""
        if rank not in self._sizes:
            self._sizes[rank] = self._sizes_of(rank)
        return self._sizes[rank]

    def _sizes_of(self, rank: int) -> dict[str, SharedSize]:
        of: dict[tuple[str, ...], Group] = {}
        named = (self.parallel.dense_axes, "shares"), (self.parallel.expert_axes, "expert_shares")
        for axes, name in named:
            ranks = self.groups.ranks(rank, GRID, name) or (rank,)
            of[axes] = Group(name, ranks, ranks.index(rank))
        held, found = held_arrays(self.layout, rank), {}
        for name, shared in shared_weights(self.layout, self.whole, rank, of).items():
            shape = held[name].shape
            rest = prod(size for d, size in enumerate(shape) if d != shared.dim)
            lengths = shared.lengths(shape[shared.dim])
            found[name] = SharedSize(
                shared.group.name,
                shared.group.size,
                lengths[shared.group.rank] * rest,
                prod(shape),
                shared.size * rest,
                lengths.count(0),
            )
        return found

    def uses(self, rank: int, *, depth: int) -> tuple[tuple[Use, ...], ...]:
        """What a rank uses of a microbatch, see ``uses``."""
        stage = self.mesh.coordinate(rank)["pp"]
        return uses(
            self.maths,
            self.chunks[stage],
            self.sizes(rank),
            is_first=stage == 0,
            is_last=stage == self.parallel.pp - 1,
            depth=depth,
        )


def planned(
    config: Mapping[str, Any],
    parallel: Parallel,
    *,
    dtype: str = "",
    stage_sizes: Sequence[int] | None = None,
    mtp: int = 0,
    multiple: int = 1,
) -> Planned:
    """A model on some degrees; arguments are those of ``build``.

    Raises:
        ModelError, GeometryError: As ``build`` raises them.
    """
    found = with_heads(maths(config, dtype=dtype), mtp)
    check_heads(found, parallel.tp)
    chunks = stages_of(found.num_layers, stages=parallel.pp, virtual=parallel.vp, sizes=stage_sizes)
    return Planned(found, parallel, chunks, multiple)


def uses(
    found: Maths,
    chunks: Sequence[Sequence[int]],
    names: Collection[str],
    *,
    is_first: bool,
    is_last: bool,
    depth: int,
) -> tuple[tuple[Use, ...], ...]:
    """What a stage uses of a microbatch in each of its stretches, on the way forward.

    Args:
        found: What is computed.
        chunks: The layers of each stretch.
        names: The weights that lie in shares; others are not listed.
        is_first: Whether it is the first stage.
        is_last: Whether it is the last one.
        depth: Heads for further tokens that are computed.
    """
    listed = []
    for number, layers in enumerate(chunks):
        here = [Use((EMBEDDING,), reads_back=False)] if is_first and not number else []
        for layer in layers:
            here += _of_layer(layer)
        if is_last and number == len(chunks) - 1:
            head = Use((EMBEDDING if found.model.tied else HEAD,))
            here.append(head)
            for layer in range(found.num_layers, found.num_layers + depth):
                here.append(Use((EMBEDDING,), reads_back=False))
                here.append(Use((f"model.layers.{layer}.eh_proj.weight",)))
                here += [*_of_layer(layer), head]
        listed.append(tuple(kept for use in here if (kept := _only(use, names)).names))
    return tuple(listed)


def _of_layer(layer: int) -> Iterator[Use]:
    for those in _OF_LAYER:
        full = tuple(f"model.layers.{layer}.{name}.weight" for name in those)
        yield Use(full, layer=layer, at_once="experts" in those[0])


def _only(use: Use, names: Collection[str]) -> Use:
    kept = tuple(name for name in use.names if name in names)
    return Use(kept, use.reads_back, use.layer, use.at_once)


def counts(listed: Sequence[Sequence[Use]], *, recompute: bool) -> Mapping[str, tuple[int, int]]:
    """For each weight how often a microbatch fetches it and sums gradients of it.

    >>> layer = Use(("q",), layer=0), Use(("o",), layer=0)
    >>> counts([(Use(("e",), reads_back=False), *layer, Use(("e",)))], recompute=True)
    {'e': (3, 2), 'q': (3, 1), 'o': (3, 1)}
    """
    found: dict[str, tuple[int, int]] = {}
    for use in (use for chunk in listed for use in chunk):
        for name in use.names:
            fetches, sums = found.get(name, (0, 0))
            again = recompute and use.layer is not None
            found[name] = fetches + 1 + use.reads_back + again, sums + 1
    return found
