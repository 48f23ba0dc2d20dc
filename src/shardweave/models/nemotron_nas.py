"""Nemotron-NAS (DeciLM): llama whose layers differ: in KV heads, in feed-forward size, in having either.

A layer without attention has no input norm, one without feed-forward no post-attention norm.

Source: DeciLM's remote code (``block_configs``), and vLLM's ``nemotron_nas``; megatron-core's
``heterogeneous_config`` for the size that a feed-forward multiplier means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardweave.layout import Dim
from shardweave.models.blocks import (
    Heads,
    Stack,
    alike,
    attention_block,
    grouped,
    mlp_block,
    norms_block,
    query_heads,
)
from shardweave.models.config import MATHS, RUNTIME, Config, Keys
from shardweave.models.family import Family
from shardweave.models.spec import Block

_LINEAR: dict[str, tuple[object, ...]] = {"replace_with_linear": (False, None), "sparsify": (None,)}
_BLOCK = Keys(frozenset({"attention", "ffn"}), neutral={"parallel_blocks": (None,)})
_ATTENTION = Keys(
    frozenset({"n_heads_in_group", "no_op", "num_key_value_heads"}),
    dict.fromkeys(
        ("num_sink_tokens", "unshifted_sink", "use_prefill_window_in_sink_attention", "window_length"), MATHS
    ),
    {**_LINEAR, "llama4": (None,), "mamba": (None,)},
)
_FFN = Keys(
    frozenset({"ffn_mult", "intermediate_size", "no_op"}),
    {"hidden_act": MATHS},
    {**_LINEAR, "gated": (True,), "moe": (None,)},
)


def _layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    num_heads, head_dim = query_heads(config, stack.hidden_size)
    blocks = config.get("block_configs")
    if not isinstance(blocks, Sequence) or len(blocks) != len(layers):
        raise config.fail(
            "every layer has a block config",
            f"len(block_configs)({len(blocks) if isinstance(blocks, Sequence) else blocks}) "
            f"!= num_hidden_layers({len(layers)})",
            "list one for each layer",
        )
    parts = [config.part(value, _BLOCK, f"block_configs[{i}]") for i, value in enumerate(blocks)]
    attentions = [
        _attention(part.part(part.get("attention"), _ATTENTION, "attention"), num_heads, head_dim)
        for part in parts
    ]
    ffns = [_ffn(part.part(part.get("ffn"), _FFN, "ffn"), stack.hidden_size) for part in parts]

    has = [(found is not None, size is not None) for found, size in zip(attentions, ffns, strict=True)]
    for (attention, ffn), held in alike(has).items():
        if attention or ffn:
            yield norms_block(stack, held, attention=attention, ffn=ffn)
    bias = config.flag("attention_bias")
    for found, held in alike(attentions).items():
        if found is not None:
            yield attention_block(stack, held, found, qkv_bias=bias, o_bias=bias)
    for size, held in alike(ffns).items():
        if size is not None:
            yield mlp_block(stack, held, size, bias=config.flag("mlp_bias"))


def _attention(config: Config, num_heads: int, head_dim: int) -> Heads | None:
    if config.flag("no_op"):
        return None
    given = config.get("num_key_value_heads")
    if given is not None and config.get("n_heads_in_group") is None:
        return grouped(config, Heads(num_heads, config.size("num_key_value_heads"), head_dim))
    group = config.size("n_heads_in_group")
    if num_heads % group or given not in (None, num_heads // group):
        raise config.fail(
            "query heads fall into equal groups that share K and V",
            f"num_attention_heads({num_heads}) is not n_heads_in_group({group}) "
            f"* num_key_value_heads({num_heads // group if given is None else given})",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    return Heads(num_heads, num_heads // group, head_dim)


def _ffn(config: Config, hidden_size: int) -> int | None:
    if config.flag("no_op"):
        return None
    multiplier = config.get("ffn_mult")
    if multiplier is None:
        return config.size("intermediate_size")
    if type(multiplier) not in (int, float) or not 0 < multiplier < 1024:
        raise config.fail(
            "a feed-forward multiplier is a small positive number",
            f"ffn_mult={multiplier!r}",
            "give it as in the model's own config, or give intermediate_size",
        )
    size = ffn_size(multiplier, hidden_size)
    if config.get("intermediate_size") not in (None, size):
        raise config.fail(
            "a feed-forward has one size",
            f"intermediate_size({config.get('intermediate_size')}) != {size} of ffn_mult({multiplier})",
            "keep the one that is right",
        )
    return size


def ffn_size(multiplier: float, hidden_size: int) -> int:
    """The feed-forward size that a multiplier means: two thirds of it, up to a multiple of 256.

    >>> ffn_size(2.625, 8192)
    14336
    """
    return -(-int(2 * multiplier * hidden_size / 3) // 256) * 256


FAMILY = Family(
    "nemotron-nas",
    "DeciLMForCausalLM",
    _layers,
    shapes=frozenset({"attention_bias", "block_configs", "mlp_bias"}),
    ignored={"auto_map": RUNTIME, "block_return_only_hidden_states": RUNTIME},
    neutral={
        "intermediate_size": (None,),
        "num_key_value_heads": (None,),
        "o_proj_bias": (False,),
        "position_embedding_type": ("rope",),
    },
)
