"""Mixtral: every layer sparse; in its files gate, up and down are called w1, w3 and w2.

Source: transformers, ``models/mixtral``: MixtralConfig; ``conversion_mapping`` for the names in files.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, attention_block, heads, moe_block, norms_block
from shardweave.models.config import MATHS, Config
from shardweave.models.family import Family
from shardweave.models.spec import Block

_ROUTING = dict.fromkeys(("num_experts_per_tok", "router_aux_loss_coef", "router_jitter_noise"), MATHS)


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    yield norms_block(stack, layers)
    yield attention_block(stack, layers, heads(config, stack.hidden_size))
    yield moe_block(
        stack,
        layers,
        num_experts=config.size(config.spelled("num_local_experts", "num_experts")),
        ffn_size=config.size("intermediate_size"),
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    _layers,
    shapes=frozenset({"num_experts", "num_local_experts"}),
    ignored={"sliding_window": MATHS, **_ROUTING},
)
