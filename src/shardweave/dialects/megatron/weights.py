"""Every weight of a model in Megatron's words: its name, what it holds whole, and how ranks cut it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from shardweave.dialects.megatron import gdn, mamba, mla
from shardweave.dialects.megatron.mla import MTP_LAYERS
from shardweave.dialects.megatron.weight import Weight, fused_of, halves, rows, weight_of
from shardweave.errors import GeometryError
from shardweave.layout import Dim, Run, concat, even, pad, whole
from shardweave.models.spec import Block, Model

NUMBERED = ("mamba", "plain_mlp")
"""The kinds of blocks that only Megatron's model of mixers has, which stores each layer under its number."""


def specs(model: Model) -> tuple[str, ...]:
    """The layer specs that a job of the model can have, the usual one first.

    Law: ``layout(model, mesh, spec=one)`` is not refused for the spec of any of them.
    """
    bound = any(True for kind in gdn.TE_ONLY for _ in model.of(kind))
    return ("te",) if bound else ("te", "local")


def fused_qkv(num_heads: int, num_kv_heads: int, head_dim: int) -> Dim:
    """The rows of a fused QKV weight: for each KV group its query heads, then its K, then its V.

    Source: megatron-core 0.16.1, ``SelfAttention.get_query_key_value_tensors``.

    >>> print(fused_qkv(4, 2, 8))
    q[0:16] k[0:8] v[0:8] q[16:32] k[8:16] v[8:16]
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise GeometryError(
            "query heads fall into whole KV groups",
            equation=f"num_heads({num_heads}) % num_kv_heads({num_kv_heads}) != 0",
            hint="check num_attention_heads and num_key_value_heads of the config",
        )
    heads = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    return concat(
        *(
            even(whole(n * head_dim, label), num_kv_heads, group)
            for group in range(num_kv_heads)
            for label, n in heads.items()
        )
    )


_QKV = {"q": "q", "k": "k", "v": "v"}
_QKV_BIAS = {"q": "q_bias", "k": "k_bias", "v": "v_bias"}
_GATE_UP = {"gate": "gate", "up": "up"}
_GATE_UP_BIAS = {"gate": "gate_bias", "up": "up_bias"}


def _attention(block: Block) -> Iterator[Weight]:
    sizes = block.sizes
    fused = fused_qkv(sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"])
    yield from fused_of(block, "self_attention.linear_qkv.weight", _QKV, fused, rows)
    yield from fused_of(block, "self_attention.linear_qkv.bias", _QKV_BIAS, fused, rows)
    yield from weight_of(block, "self_attention.linear_proj.weight", "o", cut_dim=1)
    yield from weight_of(block, "self_attention.linear_proj.bias", "o_bias")
    yield from weight_of(block, "self_attention.q_layernorm.weight", "q_norm")
    yield from weight_of(block, "self_attention.k_layernorm.weight", "k_norm")


def _gated(block: Block, prefix: str) -> Iterator[Weight]:
    fused = concat(whole(block.sizes["ffn_size"], "gate"), whole(block.sizes["ffn_size"], "up"))
    yield from fused_of(block, f"{prefix}linear_fc1.weight", _GATE_UP, fused, halves)
    yield from fused_of(block, f"{prefix}linear_fc1.bias", _GATE_UP_BIAS, fused, halves)
    yield from weight_of(block, f"{prefix}linear_fc2.weight", "down", cut_dim=1)
    yield from weight_of(block, f"{prefix}linear_fc2.bias", "down_bias")


def _vocabulary(block: Block, path: str, role: str, padded: int | None) -> Iterator[Weight]:
    for weight in weight_of(block, path, role, cut_dim=0):
        size = len(weight.dims[0])
        if padded is not None and padded < size:
            raise GeometryError(
                "a padded vocabulary holds the vocabulary",
                where=f"weight {path!r}",
                equation=f"padded_vocab({padded}) < vocab_size({size})",
                hint="give the padded size that is stored, or the config of the smaller vocabulary",
            )
        yield replace(weight, dims=(pad(weight.dims[0], padded or size), *weight.dims[1:]))


def weights(
    model: Model,
    *,
    spec: str,
    stored: bool,
    padded_vocab: int | None = None,
    mtp_layer: str = MTP_LAYERS[0],
    down_proj: str = "",
) -> Iterator[Weight]:
    """Every weight of a model in Megatron's words.

    Args:
        model: The model.
        spec: The layer spec: ``"te"`` (Transformer Engine) or ``"local"``. They differ in the names of
            the norms: Transformer Engine fuses a norm into the linear layer that follows it.
        stored: Whether names are those of a checkpoint, where the local spec uses the fused names.
        padded_vocab: Rows of the stored vocabulary; ``None`` where it is not padded.
        mtp_layer: What the layer within a layer for a further token is called, one of ``MTP_LAYERS``.
        down_proj: How latent attention's way down is held, ``"replicated"`` or ``"column"``; by default
            replicated in Transformer Engine's spec and cut in the local one.
    """
    if mtp_layer not in MTP_LAYERS:
        raise GeometryError(
            "the layer within a layer for a further token has a known name",
            equation=f"mtp_layer({mtp_layer!r}) is not {' or '.join(MTP_LAYERS)}",
            hint="take the one of your version: it is part of the parameters' names",
        )
    if spec not in ("te", "local"):
        raise GeometryError(
            "a layer spec is known",
            equation=f"spec({spec!r}) is not te or local",
            hint="te for Transformer Engine's layers (the default), local for --transformer-impl local",
        )
    if model.scaled:
        raise GeometryError(
            "Megatron stores weights whose values are their own",
            where=f"model of {model.family}",
            equation="its weights are float8_e4m3fn with scales of blocks",
            hint="convert the weights to a dtype without scales first; Megatron scales otherwise",
        )
    for block in model.blocks:
        found = _weights(model, block, spec, stored, padded_vocab, down_proj)
        if all(number < model.num_layers for _, number in block.layers):
            yield from found
            continue
        within = "" if block.kind == "mtp" else f"{mtp_layer}."
        yield from (replace(weight, path=within + weight.path, further=True) for weight in found)


def _weights(
    model: Model, block: Block, spec: str, stored: bool, padded_vocab: int | None, down_proj: str
) -> Iterator[Weight]:
    match block.kind:
        case "embedding":
            yield from _vocabulary(block, "embedding.word_embeddings.weight", "embed", padded_vocab)
        case "norms":
            yield from _norms(model, block, spec, stored)
        case "attention":
            yield from _attention(block)
        case "mla":
            yield from mla.latent(block, spec, down_proj)
        case "gated_attention":
            yield from gdn.gated_attention(block)
        case "delta":
            yield from gdn.delta(block, spec, stored=stored)
        case "mamba":
            yield from mamba.mixer(block, spec, stored=stored)
        case "plain_mlp":
            yield from mamba.plain_mlp(block)
        case "mlp":
            yield from _gated(block, "mlp.")
        case "moe":
            yield from weight_of(block, "mlp.router.weight", "router")
            yield from weight_of(block, "mlp.router.expert_bias", "router_bias")
            yield from _gated(block, "mlp.experts.")
        case "shared":
            yield from _gated(block, "mlp.shared_experts.")
            yield from weight_of(block, "mlp.shared_experts.gate_weight", "router")
        case "mtp":
            yield from mla.further(block)
        case "final":
            # Megatron's model of mixers is a class of its own, with another name for its last norm.
            mixers = any(True for kind in NUMBERED for _ in model.of(kind))
            name = "final_norm" if mixers else "final_layernorm"
            yield from weight_of(block, f"decoder.{name}.weight", "norm")
        case "head":
            yield from _vocabulary(block, "output_layer.weight", "head", padded_vocab)
        case _:
            raise GeometryError(
                "Megatron has a place for every block of the model",
                where=f"layers {block.layers}",
                equation=f"block kind({block.kind!r}) is not known",
                hint="convert this model to hf; the dialect does not describe this kind of block",
            )


def _norms(model: Model, block: Block, spec: str, stored: bool) -> Iterator[Weight]:
    kinds = ("mla", "delta", "mamba", "mlp", "plain_mlp", "moe")
    having = {kind: {n for other in model.of(kind) for _, n in other.layers} for kind in kinds}
    every = {n for _, n in block.layers}
    for kind, module in ("delta", "self_attention.in_proj"), ("mamba", "mixer.in_proj"):
        yield from _on(having[kind], weight_of(block, f"{module}.layer_norm_weight", "input_norm"))
    mixers = having["delta"] | having["mamba"]
    for latent, layers in (False, every - having["mla"]), (True, every & having["mla"]):
        # In a checkpoint the local spec calls its norms as if they were fused, but not with latent attention.
        renamed = stored and not latent
        fused = not latent and (spec == "te" or renamed)
        path = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
        yield from _on(layers - mixers, weight_of(block, path, "input_norm"))
        # Transformer Engine fuses the second norm into a dense MLP; before experts there is nothing to fuse.
        dense = spec == "te" or renamed
        for kind, fused in ("mlp", dense), ("plain_mlp", dense), ("moe", spec == "local" and renamed):
            path = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
            yield from _on(layers & having[kind], weight_of(block, path, "post_attention_norm"))


def _on(layers: Container[int], found: Iterator[Weight]) -> Iterator[Weight]:
    """The weights on some of their layers, where there are any."""
    for weight in found:
        here = only(weight.layers, layers)
        if len(here):
            yield replace(weight, layers=here)


def only(dim: Dim, numbers: Container[int]) -> Dim:
    """The numbers of an index dim that are among others."""
    return Dim(Run("", n, 1) for _, n in dim if n in numbers)
