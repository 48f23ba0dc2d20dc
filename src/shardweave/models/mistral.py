"""Mistral: llama without biases, with a sliding window, which is maths only.

Source: transformers, ``models/mistral``: MistralConfig, MistralAttention.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, attention_block, heads, mlp_block, norms_block
from shardweave.models.config import MATHS, Config
from shardweave.models.family import Family
from shardweave.models.spec import Block


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    yield norms_block(stack, layers)
    yield attention_block(stack, layers, heads(config, stack.hidden_size))
    yield mlp_block(stack, layers, config.size("intermediate_size"))


FAMILY = Family("mistral", "MistralForCausalLM", _layers, ignored={"sliding_window": MATHS})
