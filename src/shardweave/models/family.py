"""A family: what one ``model_type`` means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from shardweave.layout import Dim
from shardweave.models.blocks import Stack
from shardweave.models.config import IGNORED, NEUTRAL, SHAPES, Config, Keys
from shardweave.models.spec import Block


@dataclass(frozen=True)
class Family:
    """What one ``model_type`` means.

    Attributes:
        model_type: The value of ``model_type`` in its configs.
        architecture: The only architecture that has these tensors.
        layers: The blocks of its layers, from a config, the decoder, and all its layer numbers.
        shapes: Keys that decide tensors, beyond those that do in every family; neutral elsewhere or not.
        ignored: Keys that change no tensor, and why, beyond those of every family.
        neutral: Keys that are understood at these values only; they override those of every family.
        copies: What files hold once more in each layer for a further token: name in the layer to block kind.
        tied: Whether head and embedding are one where the config does not say.
        num_layers: The number of decoder layers, from a config.
        prefix: What the decoder's names start with in files.
        embedding: What follows in the name of the embedding.
        final: What follows in the name of the norm after the last layer.
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

    @property
    def keys(self) -> Keys:
        """All keys that are understood in a config of this family."""
        neutral = {key: values for key, values in NEUTRAL.items() if key not in self.shapes}
        return Keys(SHAPES | self.shapes, {**IGNORED, **self.ignored}, {**neutral, **self.neutral})
