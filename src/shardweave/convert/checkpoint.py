"""A checkpoint that is understood, and the state of an optimizer in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardweave.layout import Buffer, Layout, Tensor
from shardweave.models import Model
from shardweave.store.manifest import Manifest, StoredTensor
from shardweave.store.native_manifest import About


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is understood.

    Attributes:
        manifest: What its files hold.
        model: The logical tensors.
        layout: Which stored array holds what. Its ranks are those whose shards are stored; a format that
            stores whole tensors has one. An array is stored under ``layout.key(rank, name)``.
        config: The Hugging Face config that describes the model; empty for a plain one.
        left_out: Stored keys that are not in the layout, with the reason.
        read: Stored keys beside the layout that were read nevertheless.
        buffers: The names of tensors that are no parameters, as far as the format says it.
        only: Patterns of which part of the model it is, each further ones of the part before; empty if whole.
        in_part: Keys of arrays that hold something of the model besides that part.
    """

    manifest: Manifest
    model: Model
    layout: Layout
    config: Mapping[str, Any]
    left_out: Mapping[str, str]
    read: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    only: tuple[tuple[str, ...], ...] = ()
    in_part: frozenset[str] = frozenset()

    @property
    def format(self) -> str:
        """The name of the format, as commands use it."""
        return self.manifest.format

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """The stored arrays of the layout, by key."""
        return {key: self.manifest.tensors[key] for key in self.layout.stored()}


def buffers(layout: Layout) -> Iterator[tuple[int, Buffer]]:
    """The buffers of a layout on every rank that has them, in order of the rules."""
    for rule in layout.rules:
        for rank in layout.mesh.ranks:
            buffer = rule.at(layout.mesh, rank)
            if buffer is not None:
                yield rank, buffer


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that an optimizer updates.

    Attributes:
        name: Its name in files of Hugging Face, each expert on its own.
        shape: Its shape.
        states: Which states it has.
    """

    name: str
    shape: tuple[int, ...]
    states: frozenset[str]


Settings = Callable[[About, int, Collection[Weight]], Mapping[str, Mapping[str, Any]]]
"""The settings of weights by name, in torch's words, from what a run recorded and the updates it made."""


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer in a checkpoint.

    Attributes:
        layout: Which stored array has which state of which weight.
        weights: The weights that it is of, by name.
        counts: How many updates were made of each weight; of none where no state counts them.
        settings: The settings of each weight by its name, by the words of torch; empty where none are known.
        grouped: Whether weights of one group, and no others, share one mapping of settings. Else weights with
            equal settings are a group.
        ordered: Whether weights are in ``settings`` in the order in which their module has them.
        read: Stored keys of the counts and the settings.
    """

    layout: Layout
    weights: Mapping[str, Weight]
    counts: Mapping[str, int]
    settings: Mapping[str, Mapping[str, Any]]
    read: frozenset[str] = frozenset()
    grouped: bool = False
    ordered: bool = False

    @cached_property
    def _families(self) -> Mapping[str, Sequence[tuple[str, Tensor]]]:
        """The states that there are, by the name of the tensor that they are of."""
        found: dict[str, list[tuple[str, Tensor]]] = {}
        for tensor in self.layout.tensors:
            name, _, state = tensor.name.removeprefix("optim/").rpartition("/")
            found.setdefault(name, []).append((state, tensor))
        return found

    def states_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """The states of a weight or a family of them, each with the members that have it.

        Layers that are not all alike are several families of one name.
        """
        return {
            state: one
            for state, one in self._families.get(tensor.name, ())
            if all(
                {n for _, n in few} <= {n for _, n in all_}
                for (_, few), (_, all_) in zip(one.index, tensor.index, strict=True)
            )
        }
