"""GPT-J: one norm a layer, attention without biases, a feed-forward and a head with biases.

Source: transformers, ``models/gptj``: GPTJConfig, GPTJBlock, GPTJForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, attention_block
from shardweave.models.config import Config
from shardweave.models.family import Family
from shardweave.models.gpt_blocks import (
    IGNORED,
    NEUTRAL,
    ROTARY,
    SPELLED,
    around_with_head_bias,
    ffn_block,
    ffn_size,
    full_heads,
    layer_norms_block,
)
from shardweave.models.spec import Block


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    yield layer_norms_block(stack, layers, {"input_norm": "ln_1"})
    yield _renamed(attention_block(stack, layers, full_heads(config, stack.hidden_size)))
    size = ffn_size(config, stack.hidden_size)
    yield ffn_block(stack, layers, size, up="mlp.fc_in", down="mlp.fc_out", bias=True)


def _renamed(block: Block) -> Block:
    """The same block under the names that GPT-J gives to it."""
    names = (("self_attn.", "attn."), ("o_proj", "out_proj"))
    tensors = dict(block.tensors)
    for old, new in names:
        tensors = {
            role: replace(tensor, name=tensor.name.replace(old, new)) for role, tensor in tensors.items()
        }
    return replace(block, tensors=tensors)


FAMILY = Family(
    "gptj",
    "GPTJForCausalLM",
    _layers,
    shapes=frozenset({"n_inner"}),
    ignored={**IGNORED, **ROTARY},
    neutral=NEUTRAL,
    prefix="transformer.",
    within="h",
    embedding="wte.weight",
    final="ln_f.weight",
    around=around_with_head_bias,
    spelled=SPELLED,
    buffers=("attn.bias", "attn.masked_bias"),
)
