"""megatron-core on CPU processes: builds models of the fixtures and loads checkpoints into them.

Run as a script, once a rank: ``python megatron_cpu.py RANK WORLD_SIZE STORE CASES OUT``. CASES is a JSON file
with a list of cases; for each, every rank writes ``OUT/<name>.<rank>.safetensors``, its parameters after the
load, and ``OUT/<name>.<rank>.json``, where it stands and what went wrong, if anything did.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rank_processes import play_all

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 2,
            "ffn_hidden_size": 96, "vocab": 192},
    "moe": {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
            "ffn_hidden_size": 40, "vocab": 160, "num_moe_experts": 4, "moe_router_topk": 2},
}  # fmt: skip


def replace_cuda() -> None:
    """No-ops for the few torch.cuda entry points that building and loading touch."""
    import torch

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]


def build(kind: str, *, tp: int, pp: int, ep: int, vocab: int | None = None) -> Any:
    """The fixture's GPTModel on this rank, every parameter NaN."""
    sizes = dict(MODELS[kind])
    full = sizes.pop("vocab")
    if kind == "moe":
        sizes["moe_ffn_hidden_size"] = sizes["ffn_hidden_size"]
    return model_of(sizes, vocab=vocab or full, tp=tp, pp=pp, ep=ep, etp=1 if kind == "moe" else None)


def model_of(
    sizes: dict[str, Any],
    *,
    vocab: int,
    tp: int,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int | None = None,
    tied: bool = False,
    rotary_base: float = 10000.0,
) -> Any:
    """A GPTModel of the local spec on this rank, every parameter NaN; its chunks where ``vpp`` is given.

    ``sizes`` are arguments of TransformerConfig.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # Without Transformer Engine the router asks for it all the same.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    random.model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        **{
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            "use_cpu_initialization": True,
            "pipeline_dtype": torch.float32,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "bias_activation_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "qk_layernorm": True,
            **sizes,
        }
    )
    spec = get_gpt_layer_local_spec(
        num_experts=sizes.get("num_moe_experts"), qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    further = {}
    if config.mtp_num_layers:
        further = {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)}
    chunks = [
        GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab,
            max_sequence_length=32,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=rotary_base,
            vp_stage=stage,
            **further,
        )
        for stage in ([None] if vpp is None else range(vpp))
    ]
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    return chunks[0] if vpp is None else chunks


def load(case: dict[str, Any], out: Path, rank: int) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception by its own choice

    model = build(case["kind"], tp=case["tp"], pp=case["pp"], ep=case["ep"], vocab=case.get("vocab"))
    report: dict[str, Any] = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
    }
    try:
        state = dist_checkpointing.load(
            model.sharded_state_dict(metadata=case.get("metadata")),
            case["checkpoint"],
            strict=case.get("strict", "raise_all"),
        )
        result = model.load_state_dict(state, strict=False)
        report["missing"] = [key for key in result.missing_keys if "_extra_state" not in key]
        report["beside"] = sorted(
            key for key in state if not key.startswith(("decoder", "embedding", "output"))
        )
    except (Exception, CheckpointException) as error:  # the kind of refusal is the answer
        report["error"] = f"{type(error).__name__}: {error}"
    save_file(
        {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()},
        out / f"{case['name']}.{rank}.safetensors",
    )
    (out / f"{case['name']}.{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    replace_cuda()
    play_all(load)
