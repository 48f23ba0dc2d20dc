"""Llama 1 to 3, and what is built like them.

Source: transformers, ``models/llama``: LlamaConfig, LlamaAttention, LlamaMLP.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, attention_block, heads, mlp_block, norms_block
from shardweave.models.config import Config
from shardweave.models.family import Family
from shardweave.models.spec import Block


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    bias = config.flag("attention_bias")
    found = heads(config, stack.hidden_size, kv_missing=True)
    yield norms_block(stack, layers)
    yield attention_block(stack, layers, found, qkv_bias=bias, o_bias=bias)
    yield mlp_block(stack, layers, config.size("intermediate_size"), bias=config.flag("mlp_bias"))


FAMILY = Family("llama", "LlamaForCausalLM", _layers, shapes=frozenset({"attention_bias", "mlp_bias"}))
