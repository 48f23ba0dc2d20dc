"""Falcon: Q, K and V in one tensor, in one of three orders, and layer norms, of which there are one or two.

The rows of ``query_key_value`` are

- of a new decoder (40B, 180B, 11B): for each KV head its queries, its K and its V;
- with ``multi_query`` (7B): all queries, then the one K and the one V;
- with neither (RW): for each head its query, its K and its V.

Attention beside the feed-forward (``parallel_attn``) has one norm for both, or two where
``num_ln_in_parallel_attn`` says so, as it does in a new decoder where it is not given; attention before the
feed-forward has a norm for each. Norms have biases, whatever ``bias`` says of the projections.

Source: transformers, ``models/falcon``: FalconConfig, FalconAttention (``_split_heads``), FalconDecoderLayer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardweave.layout import Dim
from shardweave.models.blocks import Heads, Stack
from shardweave.models.config import MATHS, RUNTIME, Config
from shardweave.models.family import Family
from shardweave.models.gpt_blocks import (
    NEUTRAL,
    ffn_block,
    final_bias_block,
    full_heads,
    fused_attention_block,
    layer_norms_block,
)
from shardweave.models.spec import Block

_MATHS = """
    activation alibi apply_residual_connection_post_layernorm hidden_dropout layer_norm_epsilon
"""
_IGNORED = {
    **dict.fromkeys(_MATHS.split(), MATHS),
    "auto_map": RUNTIME,
    "ff_factor": "is the feed-forward size over the hidden size, which are given",
}


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    bias = config.flag("bias", missing=False)
    found, num_blocks = _heads(config, stack.hidden_size)
    yield layer_norms_block(stack, layers, _norms(config))
    yield fused_attention_block(
        stack,
        layers,
        found,
        qkv="self_attention.query_key_value",
        o="self_attention.dense",
        num_blocks=num_blocks,
        qkv_bias=bias,
        o_bias=bias,
    )
    four = 4 * stack.hidden_size
    ffn_size = config.size("ffn_hidden_size", missing=four, null=four)
    yield ffn_block(stack, layers, ffn_size, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", bias=bias)


def _heads(config: Config, hidden_size: int) -> tuple[Heads, int]:
    """The heads, and how many blocks of rows have Q, K and V each."""
    every = full_heads(config, hidden_size)
    heads = every.num_heads
    if not config.flag("new_decoder_architecture"):
        if config.flag("multi_query", missing=True):
            return Heads(heads, 1, every.head_dim), 1
        return every, heads
    kv_heads = config.size("num_kv_heads", missing=heads, null=heads)
    if heads % kv_heads:
        raise config.fail(
            "query heads fall into equal groups that share K and V",
            f"num_attention_heads({heads}) % num_kv_heads({kv_heads}) = {heads % kv_heads} != 0",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    return Heads(heads, kv_heads, every.head_dim), kv_heads


def _norms(config: Config) -> Mapping[str, str]:
    """The norms of a layer by role."""
    both = 2 if config.flag("new_decoder_architecture") else 1
    if not config.flag("parallel_attn", missing=True):
        return {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    match config.size("num_ln_in_parallel_attn", missing=both, null=both):
        case 1:
            return {"input_norm": "input_layernorm"}
        case 2:
            return {"input_norm": "ln_attn", "post_attention_norm": "ln_mlp"}
        case number:
            raise config.fail(
                "attention beside a feed-forward has one norm or two",
                f"num_ln_in_parallel_attn={number} is not 1 or 2",
                "take the config that belongs to the weights",
            )


FAMILY = Family(
    "falcon",
    "FalconForCausalLM",
    _layers,
    shapes=frozenset(
        {
            "bias",
            "ffn_hidden_size",
            "multi_query",
            "new_decoder_architecture",
            "num_kv_heads",
            "num_ln_in_parallel_attn",
            "parallel_attn",
        }
    ),
    ignored=_IGNORED,
    neutral=NEUTRAL,
    tied=True,
    prefix="transformer.",
    embedding="word_embeddings.weight",
    within="h",
    final="ln_f.weight",
    around=lambda config, stack: iter([final_bias_block(stack, "ln_f.bias")]),
    spelled={"n_embed": "hidden_size"},
)
