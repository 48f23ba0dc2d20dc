"""Qwen3-Next and Qwen3.5: gated delta nets, and attention with an output gate in every fourth layer.

Qwen3-Next fuses the projections of a delta net by key head; Qwen3.5 stores them one after the other. All
norms but that of the delta net are stored around 0.

Source: transformers, ``models/qwen3_next``, ``models/qwen3_5``, ``models/qwen3_5_moe``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardweave.layout import Dim
from shardweave.models.blocks import Stack, alike, heads, mlp_block, moe_block, norms_block, shared_block
from shardweave.models.config import MATHS, RUNTIME, Config
from shardweave.models.family import Family
from shardweave.models.mixers import Delta, delta_block, gated_attention_block
from shardweave.models.qwen2 import WINDOW
from shardweave.models.qwen3_moe import ROUTING
from shardweave.models.spec import Block

_LINEAR, _FULL = "linear_attention", "full_attention"
_INTERVAL = 4
_HEAD_DIM = 256


def _next_layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    yield from _mixers(config, stack, layers, fused=True)
    num_experts = config.size("num_experts", least=0)
    step = config.size("decoder_sparse_step", missing=1)
    dense = set(config.numbers("mlp_only_layers", len(layers)))
    sparse = [num_experts > 0 and i not in dense and (i + 1) % step == 0 for i in range(len(layers))]
    for is_sparse, held in alike(sparse).items():
        if is_sparse:
            yield from _experts(config, stack, held)
        else:
            yield mlp_block(stack, held, config.size("intermediate_size"))


def _dense_layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    yield from _mixers(config, stack, layers, fused=False)
    yield mlp_block(stack, layers, config.size("intermediate_size"))


def _sparse_layers(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    yield from _mixers(config, stack, layers, fused=False)
    yield from _experts(config, stack, layers)


def _mixers(config: Config, stack: Stack, layers: Dim, *, fused: bool) -> Iterator[Block]:
    yield norms_block(stack, layers)
    for kind, held in alike(_kinds(config, len(layers))).items():
        if kind == _LINEAR:
            yield delta_block(stack, held, _delta(config), fused=fused)
        else:
            found = heads(config, stack.hidden_size, head_dim=_HEAD_DIM)
            yield gated_attention_block(stack, held, found, bias=config.flag("attention_bias"))


def _kinds(config: Config, num_layers: int) -> Sequence[str]:
    """What mixes the tokens in each layer: as listed, or attention in the last of every few layers."""
    given, interval = config.get("layer_types"), config.size("full_attention_interval", missing=_INTERVAL)
    attention = list(range(interval - 1, num_layers, interval))
    derived = [_FULL if i in attention else _LINEAR for i in range(num_layers)]
    if given is None:
        return derived
    if not isinstance(given, Sequence) or len(given) != num_layers or set(given) - {_LINEAR, _FULL}:
        raise config.fail(
            f"every layer is {_LINEAR} or {_FULL}",
            f"layer_types={given!r:.60} with num_hidden_layers({num_layers})",
            "list one for each layer, or leave layer_types out",
        )
    if "full_attention_interval" in config.values and list(given) != derived:
        raise config.fail(
            "two spellings of one thing agree",
            f"layer_types has attention in {[i for i, kind in enumerate(given) if kind == _FULL]}, "
            f"full_attention_interval({interval}) in {attention}",
            "keep the one that is right",
        )
    return given


def _delta(config: Config) -> Delta:
    found = Delta(
        config.size("linear_num_key_heads"),
        config.size("linear_num_value_heads"),
        config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"),
        config.size("linear_conv_kernel_dim"),
    )
    if found.num_v_heads % found.num_k_heads:
        raise config.fail(
            "value heads fall into equal groups that share a key head",
            f"linear_num_value_heads({found.num_v_heads}) % linear_num_key_heads({found.num_k_heads}) "
            f"= {found.num_v_heads % found.num_k_heads} != 0",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    return found


def _experts(config: Config, stack: Stack, layers: Dim) -> Iterator[Block]:
    ffn_size = config.size("moe_intermediate_size")
    yield moe_block(stack, layers, num_experts=config.size("num_experts"), ffn_size=ffn_size)
    shared = shared_block(
        stack, layers, config.size("shared_expert_intermediate_size"), module="mlp.shared_expert"
    )
    gate = stack.each(layers, "mlp.shared_expert_gate.weight", 1, stack.hidden_size)
    yield replace(shared, tensors={**shared.tensors, "router": gate})


_SHAPES = frozenset(
    {
        "attention_bias",
        "full_attention_interval",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    }
)
_SPARSE = frozenset({"moe_intermediate_size", "num_experts", "shared_expert_intermediate_size"})
_IGNORED = {
    "mamba_ssm_dtype": RUNTIME,
    "mtp_use_dedicated_embeddings": RUNTIME,
    "output_gate_type": MATHS,
}
# transformers builds no layers for further tokens; files call theirs mtp, and are refused with them.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True, None),
    "mtp_num_hidden_layers": (0, 1, None),
}

FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _next_layers,
    shapes=_SHAPES | _SPARSE | {"decoder_sparse_step", "mlp_only_layers"},
    ignored={**WINDOW, **ROUTING, **_IGNORED},
    neutral=_NEUTRAL,
)
DENSE = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", _dense_layers, shapes=_SHAPES, ignored=_IGNORED, neutral=_NEUTRAL
)
SPARSE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _sparse_layers,
    shapes=_SHAPES | _SPARSE,
    ignored={**ROUTING, **_IGNORED},
    neutral=_NEUTRAL,
)
