"""CodeGen: GPT-J with Q, V and K in one tensor, cut for the four devices that it was first trained on.

The rows are four blocks, and each has its quarter of Q, then of V, then of K, by whole heads.

Source: transformers, ``models/codegen``: CodeGenConfig, CodeGenAttention.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack
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
    fused_attention_block,
    layer_norms_block,
)
from shardweave.models.spec import Block

_BLOCKS = 4


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    found = full_heads(config, stack.hidden_size)
    if found.num_heads % _BLOCKS:
        raise config.fail(
            "each of CodeGen's four blocks of rows has whole heads",
            f"num_attention_heads({found.num_heads}) % {_BLOCKS} = {found.num_heads % _BLOCKS} != 0",
            "correct the count of heads, or take the config that belongs to the weights",
        )
    yield layer_norms_block(stack, layers, {"input_norm": "ln_1"})
    yield fused_attention_block(
        stack,
        layers,
        found,
        qkv="attn.qkv_proj",
        o="attn.out_proj",
        num_blocks=_BLOCKS,
        order="qvk",
        qkv_bias=False,
        o_bias=False,
    )
    size = ffn_size(config, stack.hidden_size)
    yield ffn_block(stack, layers, size, up="mlp.fc_in", down="mlp.fc_out", bias=True)


FAMILY = Family(
    "codegen",
    "CodeGenForCausalLM",
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
    buffers=("attn.causal_mask",),
)
