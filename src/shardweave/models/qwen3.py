"""Qwen3: per-head norms of Q and K, a head dim of its own.

Source: transformers, ``models/qwen3``: Qwen3Config (head dim 128 unless given), Qwen3Attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, attention_block, heads, mlp_block, norms_block
from shardweave.models.config import Config
from shardweave.models.family import Family
from shardweave.models.qwen2 import WINDOW, check_layer_types
from shardweave.models.spec import Block


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    check_layer_types(config, len(layers))
    bias = config.flag("attention_bias")
    found = heads(config, stack.hidden_size, head_dim=128)
    yield norms_block(stack, layers)
    yield attention_block(stack, layers, found, qkv_bias=bias, o_bias=bias, qk_norm=True)
    yield mlp_block(stack, layers, config.size("intermediate_size"))


FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _layers,
    shapes=frozenset({"attention_bias", "layer_types"}),
    ignored=WINDOW,
    neutral={"use_qk_norm": (True,)},
)
