"""Bloom: a norm of the embedding, no positions, and Q, K and V of one head after the other in one tensor.

Source: transformers, ``models/bloom``: BloomConfig, BloomBlock, BloomForCausalLM.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack
from shardweave.models.config import MATHS, TOKENS, Config
from shardweave.models.family import Family
from shardweave.models.gpt_blocks import (
    NEUTRAL,
    embedding_norm_block,
    ffn_block,
    final_bias_block,
    full_heads,
    fused_attention_block,
    layer_norms_block,
)
from shardweave.models.spec import Block

_MATHS = """
    apply_residual_connection_post_layernorm attention_softmax_in_fp32 bias_dropout_fusion hidden_dropout
    layer_norm_epsilon masked_softmax_fusion offset_alibi seq_length skip_bias_add skip_bias_add_qkv
    slow_but_exact
"""


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    found = full_heads(config, stack.hidden_size)
    norms = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    yield layer_norms_block(stack, layers, norms)
    yield fused_attention_block(
        stack,
        layers,
        found,
        qkv="self_attention.query_key_value",
        o="self_attention.dense",
        num_blocks=found.num_heads,
        qkv_bias=True,
        o_bias=True,
    )
    size, up, down = 4 * stack.hidden_size, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
    yield ffn_block(stack, layers, size, up=up, down=down, bias=True)


def _around(config: Config, stack: Stack) -> Iterator[Block]:
    yield embedding_norm_block(stack, "word_embeddings_layernorm")
    yield final_bias_block(stack, "ln_f.bias")


FAMILY = Family(
    "bloom",
    "BloomForCausalLM",
    _layers,
    ignored={"unk_token_id": TOKENS, **dict.fromkeys(_MATHS.split(), MATHS)},
    # Its feed-forward is four times the hidden size, whatever a config says.
    neutral={**NEUTRAL, "n_inner": (None,)},
    tied=True,
    prefix="transformer.",
    within="h",
    embedding="word_embeddings.weight",
    final="ln_f.weight",
    around=_around,
    spelled={
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
)
