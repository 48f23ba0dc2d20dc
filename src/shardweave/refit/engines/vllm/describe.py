"""Which layout a running vLLM engine has, from its own config; what is not understood is refused."""

from __future__ import annotations

import os
from typing import Any

from shardweave.dialects import vllm
from shardweave.errors import GeometryError, ModelError
from shardweave.layout import Layout
from shardweave.models import Model, from_config


def model_of(config: Any) -> Model:
    """The logical tensors of the model that an engine serves.

    Args:
        config: The ``VllmConfig`` of a worker.

    Raises:
        ModelError: The engine serves something that these rules do not describe: quantised weights, adapters,
            a family that is unknown, or a head that the checkpoint untied.
    """
    model = config.model_config
    _refuse(
        model.quantization is not None,
        f"quantization({model.quantization!r})",
        "serve in the trainer's dtype, and quantise the checkpoint that is kept (docs/refit-vllm.md)",
    )
    _refuse(config.lora_config is not None, "lora_config is set", "adapters wrap modules; serve without them")
    _refuse(
        model.word_embeddings_untied_by_checkpoint,
        "the config ties the head to the embedding, the checkpoint does not",
        "set tie_word_embeddings in the config to what the checkpoint holds",
    )
    values = model.hf_config.to_dict()
    # The dtype of the weights, which may not be the one that the engine stores them in.
    return from_config(values, dtype="" if values.get("dtype") else _dtype(config))


def layout_of(config: Any, model: Model, module: Any, *, first_rank: int) -> Layout:
    """The layout of all ranks of an engine while its weights are loaded.

    Args:
        config: The ``VllmConfig`` of a worker.
        model: What it serves.
        module: The engine's model, which knows what its expert kernel made of the config.
        first_rank: The global rank of its first worker.

    Raises:
        GeometryError: A kind of parallelism, or a placement, that these rules do not describe.
        ModelError: As in ``dialects.vllm.layout``.
    """
    parallel = config.parallel_config
    for name in ("enable_eplb", "enable_elastic_ep"):
        _refuse_geometry(bool(getattr(parallel, name, False)), f"{name}(True)", "experts would move")
    pcp = getattr(parallel, "prefill_context_parallel_size", 1)
    _refuse_geometry(pcp > 1, f"prefill_context_parallel_size({pcp}) > 1", "its ranks are not described")
    offload = getattr(config, "offload_config", None)
    offloaded = getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0) or getattr(
        getattr(offload, "prefetch", None), "offload_group_size", 0
    )
    _refuse_geometry(bool(offloaded), "weights are offloaded", "serve with all weights on the device")
    partition = os.environ.get("VLLM_PP_LAYER_PARTITION")
    mesh = vllm.mesh(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dp=parallel.data_parallel_size,
        offset=first_rank,
    )
    spread = bool(parallel.enable_expert_parallel) and any(True for _ in model.of("moe"))
    return vllm.layout(
        model,
        mesh,
        expert_parallel=spread,
        placement=_placement_of(module) if spread else "linear",
        layer_partition=[int(size) for size in partition.split(",")] if partition else None,
        expert_multiple=_expert_multiple_of(module),
        dtype=_dtype(config),
    )


def rank_of(config: Any, *, worker_rank: int, first_rank: int) -> int:
    """The global rank of a worker: those of a data parallel replica are a stretch."""
    parallel = config.parallel_config
    return int(first_rank + parallel.data_parallel_index * parallel.world_size + worker_rank)


def _expert_multiple_of(module: Any) -> int:
    """What the expert kernel of a model pads the rows of a rank's experts to; 1 where it does not.

    Source: vllm 0.32.0, fused_moe/config.py: FusedMoEConfig keeps the size before and after rounding up.
    """
    for part in module.modules():
        config = getattr(part, "moe_config", None)
        rounded = getattr(config, "intermediate_size_per_partition", None)
        plain = getattr(config, "intermediate_size_per_partition_unpadded", rounded)
        if rounded is not None and rounded != plain:
            return int(rounded)
    return 1


def _placement_of(module: Any) -> str:
    """How the experts of a model are placed; vLLM decides it by the kernel that it takes.

    Source: vllm 0.32.0, fused_moe/expert_map_manager.py: ExpertMapManager.placement_strategy.
    """
    managers = (getattr(part, "expert_map_manager", None) for part in module.modules())
    return next((str(manager.placement_strategy) for manager in managers if manager is not None), "linear")


def addresses_stay(config: Any) -> bool:
    """Whether something holds addresses of weights: compiled or captured code, or a pool for sleeping."""
    compilation = config.compilation_config
    captured = getattr(compilation.cudagraph_mode, "name", "NONE") != "NONE"
    compiled = getattr(compilation.mode, "name", "NONE") != "NONE"
    return captured or compiled or bool(config.model_config.enable_sleep_mode)


def _dtype(config: Any) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def _refuse(broken: bool, equation: str, hint: str) -> None:
    if broken:
        raise ModelError(
            "a refit knows what an engine makes of its weights",
            where="vLLM config",
            equation=equation,
            hint=hint,
        )


def _refuse_geometry(broken: bool, equation: str, hint: str) -> None:
    if broken:
        raise GeometryError(
            "a refit knows where an engine holds its weights",
            where="vLLM config",
            equation=equation,
            hint=hint,
        )
