"""GPT-2: learned positions, norms with biases, and weights stored (in, out).

Q, K and V are the columns of one tensor, one after the other.

Source: transformers, ``models/gpt2``: GPT2Config, GPT2Block, GPT2LMHeadModel; ``pytorch_utils.Conv1D``.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack
from shardweave.models.config import MATHS, Config
from shardweave.models.family import Family
from shardweave.models.gpt_blocks import (
    IGNORED,
    NEUTRAL,
    NORMS,
    SPELLED,
    around_gpt,
    ffn_block,
    ffn_size,
    full_heads,
    fused_attention_block,
    layer_norms_block,
)
from shardweave.models.spec import Block

_ATTENTION = dict.fromkeys(
    ("reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx", "scale_attn_weights"), MATHS
)


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    yield layer_norms_block(stack, layers, NORMS)
    yield fused_attention_block(
        stack,
        layers,
        full_heads(config, stack.hidden_size),
        qkv="attn.c_attn",
        o="attn.c_proj",
        qkv_bias=True,
        o_bias=True,
        conv=True,
    )
    size = ffn_size(config, stack.hidden_size)
    yield ffn_block(stack, layers, size, up="mlp.c_fc", down="mlp.c_proj", bias=True, conv=True)


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _layers,
    shapes=frozenset({"max_position_embeddings", "n_inner"}),
    ignored={**IGNORED, **_ATTENTION},
    neutral=NEUTRAL,
    tied=True,
    prefix="transformer.",
    within="h",
    embedding="wte.weight",
    final="ln_f.weight",
    around=around_gpt,
    spelled=SPELLED,
    buffers=("attn.bias", "attn.masked_bias"),
)
