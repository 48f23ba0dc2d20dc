"""A family: what one ``model_type`` means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardweave.errors import ModelError
from shardweave.layout import Dim
from shardweave.models.blocks import HEAD, Stack
from shardweave.models.config import IGNORED, NEUTRAL, SHAPES, Config, Keys
from shardweave.models.spec import Block


@dataclass(frozen=True)
class Family:
    """What one ``model_type`` means.

    Attributes:
        model_type: The value of ``model_type`` in its configs.
        architecture: The only architecture that has these tensors.
        renamed: What configs call it as well.
        layers: The blocks of its layers, from a config, the decoder, and all its layer numbers.
        shapes: Keys that decide tensors, beyond those that do in every family; neutral or ignored elsewhere.
        ignored: Keys that change no tensor, and why, beyond those of every family.
        neutral: Keys that are understood at these values only; they override those of every family.
        copies: What files hold once more in each layer for a further token: name in the layer to block kind.
        tied: Whether head and embedding are one where the config does not say.
        num_layers: The number of decoder layers, from a config.
        prefix: What the decoder's names start with in files.
        embedding: What follows in the name of the embedding.
        final: What follows in the name of the norm after the last layer.
        within: What the list of layers is called.
        around: The blocks outside the layers beside embedding, last norm and head: positions, a norm of the
            embedding, biases of the last norm and the head.
        spelled: Keys that are another spelling of a key of every family: theirs to ours.
        buffers: What files of old versions also hold and is no weight, such as masks: names in a layer.
        buffers_once: The same outside the layers: what follows the prefix.
        head: The name of the output head, which is outside the prefix.
    """

    model_type: str
    architecture: str
    layers: Callable[[Config, Stack, Dim], Iterator[Block]]
    shapes: frozenset[str] = frozenset()
    ignored: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    tied: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    num_layers: Callable[[Config], int] = lambda config: config.size("num_hidden_layers")
    prefix: str = "model."
    embedding: str = "embed_tokens.weight"
    final: str = "norm.weight"
    within: str = "layers"
    around: Callable[[Config, Stack], Iterator[Block]] = lambda config, stack: iter(())
    spelled: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    buffers_once: tuple[str, ...] = ()
    head: str = HEAD
    renamed: tuple[str, ...] = ()

    @property
    def keys(self) -> Keys:
        """All keys that are understood in a config of this family."""
        neutral = {key: values for key, values in NEUTRAL.items() if key not in self.shapes}
        ignored = {key: reason for key, reason in IGNORED.items() if key not in self.shapes}
        return Keys(SHAPES | self.shapes, {**ignored, **self.ignored}, {**neutral, **self.neutral})

    def respelled(self, values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """The config with its keys spelled as in every family.

        Raises:
            ModelError: A key is given in both spellings, with two values.
        """
        if not values.keys() & self.spelled.keys():
            return values
        found = {key: value for key, value in values.items() if key not in self.spelled}
        for theirs, ours in self.spelled.items():
            if theirs in values and found.setdefault(ours, values[theirs]) != values[theirs]:
                raise ModelError(
                    "two spellings of one key agree",
                    where=where,
                    equation=f"{theirs}({values[theirs]!r:.60}) != {ours}({found[ours]!r:.60})",
                    hint="keep the one that is right",
                )
        return found
