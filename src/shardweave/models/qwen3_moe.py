"""Qwen3-MoE: Qwen3 attention, and layers that are sparse or dense by rule.

Source: transformers, ``models/qwen3_moe``: Qwen3MoeDecoderLayer for the rule, Qwen3MoeConfig.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, alike, attention_block, heads, mlp_block, moe_block, norms_block
from shardweave.models.config import MATHS, Config
from shardweave.models.family import Family
from shardweave.models.qwen2 import WINDOW
from shardweave.models.spec import Block

ROUTING = dict.fromkeys(("norm_topk_prob", "num_experts_per_tok", "router_aux_loss_coef"), MATHS)


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    bias = config.flag("attention_bias")
    yield norms_block(stack, layers)
    yield attention_block(
        stack, layers, heads(config, stack.hidden_size), qkv_bias=bias, o_bias=bias, qk_norm=True
    )
    num_experts = config.size(config.spelled("num_experts", "num_local_experts"), least=0)
    step = config.size("decoder_sparse_step", missing=1)
    dense = set(config.numbers("mlp_only_layers", len(layers)))
    sparse = [num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(len(layers))]
    for is_sparse, held in alike(sparse).items():
        if is_sparse:
            ffn_size = config.size("moe_intermediate_size")
            yield moe_block(stack, held, num_experts=num_experts, ffn_size=ffn_size)
        else:
            yield mlp_block(stack, held, config.size("intermediate_size"))


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _layers,
    shapes=frozenset(
        {
            "attention_bias",
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "num_experts",
            "num_local_experts",
        }
    ),
    ignored={**WINDOW, **ROUTING},
    neutral={"use_qk_norm": (True,)},
)
