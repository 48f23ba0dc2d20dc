"""Megatron's latent attention, and its layers for further tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardweave.dialects.megatron.weight import Weight, by_heads, weight_of
from shardweave.errors import GeometryError
from shardweave.models.spec import Block

MTP_LAYERS = ("transformer_layer", "mtp_model_layer")
"""What versions of Megatron call the layer within a layer for a further token, that of 0.16.1 first."""


def latent(block: Block, spec: str, down_proj: str) -> Iterator[Weight]:
    """Latent attention: down to short vectors, up by heads.

    Source: megatron-core 0.16.1, ``MLASelfAttention``: where ``linear_q_down_proj`` is ``TELinear`` it is
    duplicated, else it is cut and its output gathered. Transformer Engine fuses the norms into the way up.
    """
    biases = [role for role in block.tensors if role.endswith("_bias")]
    if biases:
        raise GeometryError(
            "Megatron has a place for every tensor of latent attention",
            where=f"tensor {block.tensors[biases[0]].name!r}",
            equation=f"the model has {', '.join(biases)}, and Megatron builds these layers without a bias",
            hint="convert this model to hf",
        )
    if down_proj not in ("", "replicated", "column"):
        raise GeometryError(
            "the way down is replicated or cut by rows",
            equation=f"down_proj({down_proj!r}) is not 'replicated' or 'column'",
            hint="leave it out: Transformer Engine's layers are replicated, local ones are cut",
        )
    down_cut = 0 if (down_proj or ("replicated" if spec == "te" else "column")) == "column" else None
    cut = by_heads(block.sizes["num_heads"])
    attention, up = "self_attention.", "layer_norm_weight"
    rules = [
        ("linear_q_proj.weight", "q", 0),
        ("linear_q_down_proj.weight", "q_a", down_cut),
        (f"linear_q_up_proj.{up}" if spec == "te" else "q_layernorm.weight", "q_a_norm", None),
        ("linear_q_up_proj.weight", "q_b", 0),
        ("linear_kv_down_proj.weight", "kv_a", down_cut),
        (f"linear_kv_up_proj.{up}" if spec == "te" else "kv_layernorm.weight", "kv_a_norm", None),
        ("linear_kv_up_proj.weight", "kv_b", 0),
        ("linear_proj.weight", "o", 1),
    ]
    for path, role, cut_dim in rules:
        for weight in weight_of(block, attention + path, role, cut_dim=cut_dim):
            yield weight if role in ("q_a", "kv_a") else replace(weight, cut=cut)


def further(block: Block) -> Iterator[Weight]:
    """What a layer for a further token has around a layer.

    Source: megatron-core 0.16.1, ``MultiTokenPredictionLayer``.
    """
    yield from weight_of(block, "enorm.weight", "embed_norm")
    yield from weight_of(block, "hnorm.weight", "hidden_norm")
    yield from weight_of(block, "eh_proj.weight", "proj", cut_dim=0)
    yield from weight_of(block, "final_layernorm.weight", "norm")
