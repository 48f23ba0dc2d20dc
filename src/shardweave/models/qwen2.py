"""Qwen2 and Qwen2.5: biases on Q, K and V, always, and on nothing else.

Source: transformers, ``models/qwen2``: Qwen2Config, Qwen2Attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, attention_block, heads, mlp_block, norms_block
from shardweave.models.config import MATHS, Config
from shardweave.models.family import Family
from shardweave.models.spec import Block

WINDOW = dict.fromkeys(("max_window_layers", "sliding_window", "use_sliding_window"), MATHS)


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    check_layer_types(config, len(layers))
    yield norms_block(stack, layers)
    yield attention_block(stack, layers, heads(config, stack.hidden_size), qkv_bias=True)
    yield mlp_block(stack, layers, config.size("intermediate_size"))


def check_layer_types(config: Config, num_layers: int) -> None:
    """Refuse layers that are not softmax attention, windowed or not: the two have the same tensors."""
    types = config.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.fail(
            "every layer has a type",
            f"layer_types={types!r} does not list num_hidden_layers({num_layers})",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    plain = ("full_attention", "sliding_attention")
    for layer, kind in enumerate(types):
        if kind not in plain:
            raise config.fail(
                "every layer is softmax attention",
                f"layer_types[{layer}]={kind!r} is not one of {', '.join(plain)}",
                "use a model of plain attention: the tensors of other layers are not described here",
            )


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _layers, shapes=frozenset({"layer_types"}), ignored=WINDOW)
