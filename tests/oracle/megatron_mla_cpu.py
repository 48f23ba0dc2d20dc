"""megatron-core with latent attention on CPU processes: loads checkpoints, saves its own, predicts.

Run as a script, once a rank: ``python megatron_mla_cpu.py RANK WORLD_SIZE STORE CASES OUT``, like
``megatron_cpu.py``. A case gives a Hugging Face config, degrees and a checkpoint; with ``save`` Megatron
stores what it loaded there, with ``tokens`` rank 0 writes the logits that it predicts for them.

Three things are not Megatron's own. Its local attention kernel refuses heads of two sizes, which only
Transformer Engine's takes: a plain one without weights stands in its place. ``TELinear``, which is not
installed, is made a class that nothing is an instance of, because ``isinstance`` is asked about it. And
the router's ``te_general_gemm`` is made None, because it is read whether it could be imported or not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_cpu import replace_cuda
from rank_processes import play_all


def transformer_config(hf: dict[str, Any], *, tp: int, pp: int, ep: int) -> Any:
    """What Megatron calls the keys of a DeepSeek config."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    layers, dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
    return MLATransformerConfig(
        num_layers=layers,
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        ffn_hidden_size=hf["intermediate_size"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        num_moe_experts=hf["n_routed_experts"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_shared_expert_intermediate_size=hf["n_shared_experts"] * hf["moe_intermediate_size"],
        # A list makes Megatron store each layer on its own, even where all are alike.
        moe_layer_freq=[int(i >= dense) for i in range(layers)] if dense else 1,
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        mtp_num_layers=hf["num_nextn_predict_layers"] or None,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=hf["n_group"],
        moe_router_group_topk=hf["topk_group"],
        moe_router_topk_scaling_factor=hf["routed_scaling_factor"],
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=True,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="allgather",
        layernorm_epsilon=hf["rms_norm_eps"],
        rope_type="rope",
        rotary_base=hf["rope_theta"],
        apply_rope_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def plain_attention() -> type:
    import torch

    class PlainAttention(torch.nn.Module):
        """Causal attention over [sequence, batch, heads, size], whose V may have another size."""

        def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
            super().__init__()
            self.scale = softmax_scale

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return out.permute(2, 0, 1, 3).flatten(2)

    return PlainAttention


def build(hf: dict[str, Any], *, tp: int, pp: int, ep: int) -> Any:
    """The GPTModel of a DeepSeek config on this rank, every parameter and buffer NaN."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    multi_latent_attention.TELinear = type("TELinear", (), {})
    moe_utils.te_general_gemm = None
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
    )
    random.model_parallel_cuda_manual_seed(123)
    config = transformer_config(hf, tp=tp, pp=pp, ep=ep)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = plain_attention()
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=further if config.mtp_num_layers else None,
        vocab_size=hf["vocab_size"],
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
    )
    with torch.no_grad():
        for value in held(model).values():
            value.fill_(float("nan"))
    return model


def held(model: Any) -> dict[str, Any]:
    """The parameters and the persistent buffers."""
    import torch

    state = model.state_dict(keep_vars=True)
    return {name: value.data for name, value in state.items() if isinstance(value, torch.Tensor)}


def records(sharded: dict[str, Any]) -> list[dict[str, Any]]:
    """Megatron's own account of which box of which stored tensor this rank has."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(sharded)
    found, open_ = [], [sharded]
    while open_:
        entry = open_.pop()
        for value in entry.values() if isinstance(entry, dict) else entry:
            if isinstance(value, dict | list):
                open_.append(value)
            elif isinstance(value, ShardedTensor):
                lead = [1] * value.prepend_axis_num
                shape = [*lead, *value.local_shape]
                found.append({"key": value.key, "offset": value.global_offset, "shape": shape})
    return found


def play(case: dict[str, Any], out: Path, rank: int) -> None:
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from safetensors.torch import save_file

    degrees = {axis: case.get(axis, 1) for axis in ("tp", "pp", "ep")}
    model = build(case["config"], **degrees)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}

    def sharded() -> dict[str, Any]:
        return dict(model.sharded_state_dict(metadata=dict(metadata)))

    report = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "sharded": records(sharded()),
        "parameters": [
            [name, list(value.shape), bool(getattr(value, "shared_embedding", False))]
            for name, value in model.named_parameters()
        ],
    }
    state = dist_checkpointing.load(sharded(), case["checkpoint"], strict="raise_all")
    result = model.load_state_dict(state, strict=False)
    report["missing"] = [key for key in result.missing_keys if "_extra_state" not in key]
    if "save" in case:
        if rank == 0:
            Path(case["save"]).mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(sharded(), case["save"])
    if "tokens" in case:
        # With layers for further tokens Megatron predicts only to compute a loss, theirs first.
        tokens, seen = torch.tensor([case["tokens"]]), []
        model.output_layer.register_forward_hook(lambda _, __, output: seen.append(output[0][:, 0].clone()))
        with torch.no_grad():
            model.eval()(tokens, torch.arange(tokens.shape[1])[None], None, labels=tokens)
        report["logits"] = [logits.tolist() for logits in seen]
    values = {name: value.detach().clone().contiguous() for name, value in held(model).items()}
    save_file(values, out / f"{case['name']}.{rank}.safetensors")
    (out / f"{case['name']}.{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    replace_cuda()
    play_all(play)
