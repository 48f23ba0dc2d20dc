"""Phi-3 and Phi-4: llama with Q, K and V in one tensor and gate and up in another, each one after the other.

Source: transformers, ``models/phi3``: Phi3Config, Phi3Attention, Phi3MLP.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, heads, norms_block
from shardweave.models.config import MATHS, RUNTIME, Config
from shardweave.models.family import Family
from shardweave.models.gate_up import gate_up_block
from shardweave.models.gpt_blocks import fused_attention_block
from shardweave.models.spec import Block

_IGNORED = {
    **dict.fromkeys(("embd_pdrop", "full_attn_mod", "interpolate_factor", "resid_pdrop"), MATHS),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window"), MATHS),
    "auto_map": RUNTIME,
}


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    yield norms_block(stack, layers)
    yield fused_attention_block(
        stack,
        layers,
        heads(config, stack.hidden_size, kv_missing=True),
        qkv="self_attn.qkv_proj",
        o="self_attn.o_proj",
        qkv_bias=False,
        o_bias=False,
    )
    yield gate_up_block(
        stack,
        layers,
        config.size("intermediate_size"),
        gate_up="mlp.gate_up_proj",
        down="mlp.down_proj",
        bias=False,
    )


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    _layers,
    ignored=_IGNORED,
    # Remote code has these keys, and no published model has them set.
    neutral=dict.fromkeys(("attention_bias", "lm_head_bias", "mlp_bias"), (False,)),
)
