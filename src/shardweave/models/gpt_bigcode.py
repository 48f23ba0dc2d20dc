"""GPTBigCode, of SantaCoder and StarCoder: GPT-2 with one K and V for all heads, weights stored (out, in).

With one K and V the rows of the fused tensor are all of Q, then K, then V. With one for each head they are
Q, K and V of the first head, then of the second: another order, under the same name.

Source: transformers, ``models/gpt_bigcode``: GPTBigCodeConfig, GPTBigCodeAttention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardweave.layout import Dim
from shardweave.models.blocks import Heads, Stack
from shardweave.models.config import MATHS, RUNTIME, Config
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

_MATHS = "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 scale_attn_weights"
_RUNTIME = """
    inference_runner max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache
    validate_runner_input
"""


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    found = _heads(config, stack.hidden_size)
    yield layer_norms_block(stack, layers, NORMS)
    yield fused_attention_block(
        stack,
        layers,
        found,
        qkv="attn.c_attn",
        o="attn.c_proj",
        num_blocks=found.num_kv_heads,
        qkv_bias=True,
        o_bias=True,
    )
    size = ffn_size(config, stack.hidden_size)
    yield ffn_block(stack, layers, size, up="mlp.c_fc", down="mlp.c_proj", bias=True)


def _heads(config: Config, hidden_size: int) -> Heads:
    """The heads: ``multi_query`` decides, and a count of KV heads, which versions write beside it, agrees."""
    full = full_heads(config, hidden_size)
    found = replace(full, num_kv_heads=1) if config.flag("multi_query", missing=True) else full
    given = config.size("num_key_value_heads", missing=found.num_kv_heads, null=found.num_kv_heads)
    if given != found.num_kv_heads:
        raise config.fail(
            "multi_query says how many K and V there are: one, or one for each head",
            f"num_key_value_heads({given}) != {found.num_kv_heads}, multi_query={config.get('multi_query')}",
            "correct the one that is wrong: transformers reads multi_query only",
        )
    return found


FAMILY = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    _layers,
    shapes=frozenset({"max_position_embeddings", "multi_query", "n_inner"}),
    ignored={
        **IGNORED,
        **dict.fromkeys(_MATHS.split(), MATHS),
        **dict.fromkeys(_RUNTIME.split(), RUNTIME),
    },
    neutral={key: values for key, values in NEUTRAL.items() if key != "num_key_value_heads"},
    tied=True,
    prefix="transformer.",
    within="h",
    embedding="wte.weight",
    final="ln_f.weight",
    around=around_gpt,
    spelled=SPELLED,
)
