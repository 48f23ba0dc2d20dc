"""What a conversion knows of a format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.convert.checkpoint import Checkpoint, OptimizerState, Settings
from shardweave.convert.masters import Masters
from shardweave.convert.target import Target, Wanted
from shardweave.layout import Layout
from shardweave.models import Model
from shardweave.store.manifest import Manifest, StoredTensor


def whole_shapes(stored: Mapping[str, StoredTensor], manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
    """The shapes of arrays that are whole tensors."""
    return {key: tensor.shape for key, tensor in stored.items()}


@dataclass(frozen=True, slots=True)
class Format:
    """A format as functions: one of these is all that tells formats apart.

    Attributes:
        name: The name that commands use.
        holds: Which files a folder of it has, for messages.
        recognise: Whether a folder looks like one, from its path and the names in it.
        read: What its files hold; the manifest's ``format`` is ``name``, or that of what it turned out to be.
        layout: Which stored array holds what, from the stored weights, the model, the manifest, and the
            layout that the user gave.
        target: What to write, from the source, the state of the optimizer and what else is asked for;
            ``None`` where it is only read.
        shapes: The shapes of weights that no config describes, by name.
        beside: What begins the keys of what is no weight.
        config: The config of the model that the files themselves record.
        named: The manifest under the names of the model that a config describes, or of one that none does.
        as_stored: What ``named`` was made from, under the stored keys.
        states: The state of an optimizer in it; ``None`` where the format has no place for one.
        masters: Which weights a target has in full precision; see ``convert.masters``.
        buffers: The names of what is no parameter, where the files say it.
        home: The folder where the config of a checkpoint lies.
        takes_states: Whether a target takes the state of an optimizer.
        takes_part: Whether a target may have a part of a model, as it stores whole tensors under their names.
        takes_layout: Whether ``layout`` heeds the layout that the user gave; else one is refused.
    """

    name: str
    holds: str
    recognise: Callable[[Path, Collection[str]], bool]
    read: Callable[[Path], Manifest]
    layout: Callable[[Mapping[str, StoredTensor], Model, Manifest, Layout | None], Layout]
    target: Callable[[Checkpoint, OptimizerState | None, Wanted], Target] | None
    shapes: Callable[[Mapping[str, StoredTensor], Manifest], Mapping[str, tuple[int, ...]]] = whole_shapes
    beside: tuple[str, ...] = ()
    config: Callable[[Manifest], Mapping[str, Any] | None] = lambda manifest: None
    named: Callable[[Manifest, Mapping[str, Any] | None], Manifest] = lambda manifest, config: manifest
    as_stored: Callable[[Manifest], Manifest] = lambda manifest: manifest
    states: Callable[[Checkpoint, Settings | None], OptimizerState | None] | None = None
    masters: Callable[[Wanted], Masters] = lambda wanted: "only"
    buffers: Callable[[Manifest], Collection[str]] = lambda manifest: ()
    home: Callable[[Manifest], Path] = lambda manifest: manifest.root
    takes_states: bool = False
    takes_part: bool = False
    takes_layout: bool = False
