"""What a rank of a Megatron job owns, read off the real model. Megatron itself is not imported.

A geometry is said several times in a Megatron job: in its ``TransformerConfig``, by its process groups, by
the numbers that its layers carry, by the names of its parameters. All of them are compared with the mesh and
the model that are given, in that order, before a shape is looked at; what is missing or differs is refused.
Head counts are the global ones of the config: a rank may own no K row at all.

Source: megatron-core 0.16.1, ``TransformerConfig``, ``ProcessGroupCollection``, ``TransformerBlock``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardweave.dialects import megatron
from shardweave.dialects.megatron.mla import MTP_LAYERS
from shardweave.dialects.megatron.ranks import Stages, layers_of
from shardweave.errors import GeometryError, ModelError
from shardweave.layout import Layout, Mesh
from shardweave.models import Block, Model
from shardweave.refit.sources import Live, Source, state_of

_DEGREES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""The attribute of a ``TransformerConfig`` for each axis of a mesh."""
_GROUPS = {"tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp", "ep": "ep", "etp": "expt_tp", "edp": "expt_dp"}
"""The process group of a ``ProcessGroupCollection`` for each axis of a mesh."""
_REPLICAS = ("cp", "dp", "edp")
"""Axes on which ranks hold the same; their groups are compared where they are given."""

_MUST_BE: dict[str, tuple[object, ...]] = {
    "normalization": ("RMSNorm",),
    "heterogeneous_block_specs": (False, None),
}
"""Attributes that change what parameters mean, with the values at which the dialect describes them."""
_KINDS = ("moe", "shared", "mla", "gated_attention", "delta", "plain_mlp")
"""Kinds of blocks that a config has or has not."""


def from_megatron(
    chunks: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    model: Model,
    mesh: Mesh,
    rank: int,
    groups: Any = None,
    spec: str = "",
    experts: str = "",
    mtp_layer: str = "",
    down_proj: str = "",
) -> Source:
    """What a rank of a Megatron-Core job owns.

    Args:
        chunks: The rank's ``GPTModel``, or its virtual chunks in order; wrapped or not
            (``DistributedDataParallel``, ``Float16Module``).
        model: The model, from its Hugging Face config.
        mesh: The ranks of the job, from ``dialects.megatron.mesh()``.
        rank: This rank.
        groups: The process groups of the job by Megatron's names (a ``ProcessGroupCollection``); those that
            the model was built with by default.
        spec: Layer spec, ``"te"`` or ``"local"``; by the names of the parameters where not given.
        experts: ``"grouped"`` or ``"sequential"``; likewise.
        mtp_layer: What the layer within a layer for a further token is called; likewise.
        down_proj: How latent attention's way down is held, as for ``dialects.megatron.layout``.

    Returns:
        The layout of all ranks, and the parameters of this one under the names of its modules; with virtual
        chunks under ``model0.``, ``model1.`` and so on, as in a checkpoint.

    Raises:
        GeometryError: A degree, a position in a group or the layers of a chunk are not the mesh's; or a
            group is needed and not there; or the names leave open in which form the job has its weights.
        ModelError: The ``TransformerConfig`` is not that of the model.
        UnknownNameError: A parameter or persistent buffer is none of the model's, or one is missing.
        PlanError, DtypeError: A parameter has another shape or dtype.
        MeshError: The mesh is not a Megatron mesh, or does not have the rank.
    """
    bare = [_unwrapped(chunk) for chunk in ([chunks] if isinstance(chunks, torch.nn.Module) else chunks)]
    if not bare:
        raise GeometryError(
            "a rank of a Megatron job has a model",
            where=f"rank {rank}",
            equation="chunks(0)",
            hint="pass the model, or the list of its virtual chunks",
        )
    config = bare[0].config
    where = f"rank {rank}"
    _check_degrees(config, mesh, len(bare), where)
    _check_position(getattr(bare[0], "pg_collection", None) if groups is None else groups, mesh, rank)
    _check_model(config, model, bare, where)
    pipeline = _stages(config, model.num_layers, mesh.axis_size("pp"), len(bare))
    _check_layers(bare, pipeline, mesh.coordinate(rank)["pp"], where)

    state: dict[str, torch.Tensor] = {}
    for v, chunk in enumerate(bare):
        prefix = f"model{v}." if len(bare) > 1 else ""
        state |= {prefix + name: tensor for name, tensor in state_of(chunk).items()}
    divisor = _vocab_divisor(bare, model, mesh.axis_size("tp"), where)
    forms = itertools.product(
        [spec] if spec else megatron.specs(model),
        [experts] if experts else ["grouped", "sequential"],
        [mtp_layer] if mtp_layer else MTP_LAYERS if any(True for _ in model.of("mtp")) else MTP_LAYERS[:1],
    )
    candidates = [
        megatron.layout(
            model,
            mesh,
            spec=one,
            experts=each,
            pipeline=pipeline,
            vocab_divisor=divisor,
            mtp_layer=further,
            down_proj=down_proj,
        )
        for one, each, further in forms
    ]
    return Source(_by_names(candidates, set(state), rank), Live(state), rank)


def _unwrapped(chunk: Any) -> Any:
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    return chunk


# --- geometry -----------------------------------------------------------------------------------


def _check_degrees(config: Any, mesh: Mesh, chunks: int, where: str) -> None:
    said = {axis: getattr(config, name, None) for axis, name in _DEGREES.items()}
    vpp = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
    for axis, size in said.items():
        if size != mesh.axis_size(axis):
            raise GeometryError(
                "the degrees of a Megatron job are those of its mesh",
                where=f"{where}, TransformerConfig.{_DEGREES[axis]}",
                equation=f"{_DEGREES[axis]}({size}) != {axis}({mesh.axis_size(axis)}) of mesh {mesh}",
                hint=f"make the mesh with megatron.mesh({axis}={size}, ...), as the job was started",
            )
    if vpp != chunks:
        raise GeometryError(
            "a rank has as many chunks as its job has virtual stages",
            where=where,
            equation=f"chunks({chunks}) != virtual_pipeline_model_parallel_size({vpp})",
            hint="pass all virtual chunks of the rank, in order",
        )


def _check_position(groups: Any, mesh: Mesh, rank: int) -> None:
    """A rank stands in its process groups where the mesh says."""
    coordinate = mesh.coordinate(rank)
    for axis, name in _GROUPS.items():
        size, where = mesh.axis_size(axis), f"rank {rank}, process group {name!r}"
        group: Any = getattr(groups, name, None)
        if not hasattr(group, "size") or not hasattr(group, "rank"):
            if size > 1 and axis not in _REPLICAS:
                raise GeometryError(
                    "a rank says where it stands on every axis that cuts a weight",
                    where=where,
                    equation=f"group({type(group).__name__}), {axis}({size}) of mesh {mesh}",
                    hint="pass groups=, the ProcessGroupCollection of the job, with this rank's groups",
                )
            continue
        if (group.size(), group.rank()) != (size, coordinate[axis]):
            raise GeometryError(
                "a rank stands in its process groups where the mesh says",
                where=where,
                equation=f"rank({group.rank()}) of size({group.size()}) != coordinate({coordinate[axis]}) of "
                f"{axis}({size}) in mesh {mesh}",
                hint="give the mesh the order of the job (Megatron's is tp-cp-ep-dp-pp), and this rank",
            )


def _stages(config: Any, num_layers: int, pp: int, vpp: int) -> Stages:
    """The layers of each chunk and stage, by the config's own rules."""
    placed = getattr(config, "pipeline_model_parallel_layout", None)
    if placed is not None and pp > 1:
        # By stage, then by chunk: the kinds of layers there.
        kinds = [[[kind.name for kind in chunk] for chunk in stage] for stage in placed.layout]
        sizes = [kinds[stage][v].count("decoder") for v in range(vpp) for stage in range(pp)]
        return megatron.stages(num_layers, pp, vpp=vpp, sizes=sizes)
    ends = [
        bool(getattr(config, f"account_for_{end}_in_pipeline_split", False)) for end in ("embedding", "loss")
    ]
    if any(ends) and pp > 1:
        padded = megatron.stages(num_layers + sum(ends), pp, vpp=vpp)
        sizes = [size for chunk in padded for size in chunk]
        sizes[0] -= ends[0]
        sizes[-1] -= ends[1]
        return megatron.stages(num_layers, pp, vpp=vpp, sizes=sizes)
    return megatron.stages(
        num_layers,
        pp,
        vpp=vpp,
        first=getattr(config, "num_layers_in_first_pipeline_stage", None) if pp > 1 else None,
        last=getattr(config, "num_layers_in_last_pipeline_stage", None) if pp > 1 else None,
    )


def _check_layers(chunks: Sequence[Any], pipeline: Stages, stage: int, where: str) -> None:
    """The numbers that the layers carry are those that the stages give them."""
    for v, (chunk, stages) in enumerate(zip(chunks, layers_of(pipeline), strict=True)):
        found = [int(layer.layer_number) - 1 for layer in chunk.decoder.layers]
        if found != list(stages[stage]):
            raise GeometryError(
                "a chunk has the layers that its stage is given",
                where=f"{where}, stage {stage}, chunk {v}",
                equation=f"layers({', '.join(map(str, found))}) != "
                f"layers({', '.join(map(str, stages[stage]))})",
                hint="publish the model as Megatron built it; layers that were moved or cut out are refused",
            )


def _vocab_divisor(chunks: Sequence[Any], model: Model, tp: int, where: str) -> int:
    """Rows of the vocabulary on each rank, by the model's own padded size."""
    vocab = next(block.sizes["vocab_size"] for block in model.of("embedding"))
    padded = {int(chunk.vocab_size) for chunk in chunks}
    size = max(padded)
    if len(padded) > 1 or size < vocab or size % tp:
        raise ModelError(
            "the padded vocabulary of a model holds the vocabulary, in equal parts",
            where=f"{where}, GPTModel.vocab_size",
            equation=f"padded({', '.join(map(str, sorted(padded)))}), vocab_size({vocab}), tp({tp})",
            hint="build the model with the vocabulary of its config, padded to a multiple of tp",
        )
    return size // tp


def _by_names(candidates: Sequence[Layout], names: set[str], rank: int) -> Layout:
    """The layout whose arrays of the rank have these names; the nearest one where none has them all."""
    distances = [(len(set(one.arrays(rank)) ^ names), i) for i, one in enumerate(candidates)]
    nearest = [candidates[i] for distance, i in sorted(distances) if distance == min(distances)[0]]
    if min(distances)[0] == 0 and any(one != nearest[0] for one in nearest[1:]):
        raise GeometryError(
            "the names of a rank's parameters say in which form the job has them, or it is given",
            where=f"rank {rank}",
            equation=f"{len(nearest)} of {len(candidates)} forms have these {len(names)} names",
            hint="pass spec='te' or 'local', experts='grouped' or 'sequential', and mtp_layer= where needed",
        )
    return nearest[0]


# --- model --------------------------------------------------------------------------------------


def _check_model(config: Any, model: Model, chunks: Sequence[Any], where: str) -> None:
    """A ``TransformerConfig`` describes the model that is given."""
    for name, allowed in _MUST_BE.items():
        found = getattr(config, name, None)
        if found not in allowed:
            raise ModelError(
                "a Megatron model is of a kind that the dialect describes",
                where=f"{where}, TransformerConfig.{name}",
                equation=f"{name}({found!r}) is not one of {allowed}",
                hint="its parameters mean something else; this needs a rule in shardweave.dialects.megatron",
            )
    said: list[tuple[str, object, object]] = [("num_layers", config.num_layers, model.num_layers)]
    for chunk in chunks:
        tied = bool(chunk.share_embeddings_and_output_weights)
        said.append(("share_embeddings_and_output_weights", tied, model.tied))
    has = {kind: sum(1 for _ in model.of(kind)) for kind in _KINDS}
    further = {n for block in model.of("mtp") for _, n in block.layers}
    biased = any("router_bias" in block.tensors for block in model.of("moe"))
    for name, wanted in (
        ("num_moe_experts", has["moe"]),
        ("moe_shared_expert_intermediate_size", has["shared"]),
        ("moe_router_enable_expert_bias", biased),
        ("multi_latent_attention", has["mla"]),
        ("attention_output_gate", has["gated_attention"]),
        # These families store their norms around 0, and no other does.
        ("layernorm_zero_centered_gamma", has["delta"]),
        ("gated_linear_unit", not has["plain_mlp"]),
    ):
        said.append((f"whether {name}", bool(getattr(config, name, None)), bool(wanted)))
    said.append(("mtp_num_layers", getattr(config, "mtp_num_layers", None) or 0, len(further)))
    for block in model.blocks:
        said += _said(config, block)
    for name, theirs, ours in said:
        if theirs != ours:
            raise ModelError(
                "the config of a Megatron model is that of the Hugging Face model",
                where=f"{where}, TransformerConfig",
                equation=f"{name}({theirs}) != {ours} of the {model.family} config",
                hint="take the config that belongs to the job; head counts are global, never those of a rank",
            )


def _said(config: Any, block: Block) -> Iterator[tuple[str, object, object]]:
    """What a config says of a block: the name, what it says, and what the block has."""
    sizes = block.sizes
    if "hidden_size" in sizes:
        yield "hidden_size", config.hidden_size, sizes["hidden_size"]
    match block.kind:
        case "attention" | "gated_attention":
            yield "num_attention_heads", config.num_attention_heads, sizes["num_heads"]
            yield "num_query_groups", config.num_query_groups, sizes["num_kv_heads"]
            yield "kv_channels", config.kv_channels, sizes["head_dim"]
            yield "qk_layernorm", bool(config.qk_layernorm), "q_norm" in block.tensors
            biased = bool(config.add_qkv_bias or config.add_bias_linear)
            yield "add_qkv_bias or add_bias_linear", biased, "q_bias" in block.tensors
        case "mla":
            rope = config.qk_pos_emb_head_dim
            yield "num_attention_heads", config.num_attention_heads, sizes["num_heads"]
            yield "q_lora_rank", config.q_lora_rank or 0, sizes["q_rank"]
            yield "kv_lora_rank", config.kv_lora_rank, sizes["kv_rank"]
            yield "qk_pos_emb_head_dim", rope, sizes["rope_dim"]
            yield "qk_head_dim + qk_pos_emb_head_dim", config.qk_head_dim + rope, sizes["q_head_dim"]
            yield "v_head_dim", config.v_head_dim, sizes["v_head_dim"]
        case "delta":
            yield "linear_num_key_heads", config.linear_num_key_heads, sizes["num_k_heads"]
            yield "linear_num_value_heads", config.linear_num_value_heads, sizes["num_v_heads"]
            yield "linear_key_head_dim", config.linear_key_head_dim, sizes["k_head_dim"]
            yield "linear_value_head_dim", config.linear_value_head_dim, sizes["v_head_dim"]
            yield "linear_conv_kernel_dim", config.linear_conv_kernel_dim, sizes["kernel_size"]
        case "mamba":
            yield "mamba_num_heads", config.mamba_num_heads, sizes["num_heads"]
            yield "mamba_head_dim", config.mamba_head_dim, sizes["head_dim"]
            yield "mamba_num_groups", config.mamba_num_groups, sizes["num_groups"]
            yield "mamba_state_dim", config.mamba_state_dim, sizes["state_size"]
        case "mlp" | "plain_mlp":
            yield "ffn_hidden_size", config.ffn_hidden_size, sizes["ffn_size"]
        case "moe":
            yield "num_moe_experts", config.num_moe_experts, sizes["num_experts"]
            yield "moe_ffn_hidden_size", config.moe_ffn_hidden_size, sizes["ffn_size"]
        case "shared":
            theirs = config.moe_shared_expert_intermediate_size
            yield "moe_shared_expert_intermediate_size", theirs, sizes["ffn_size"]
