"""The model that Megatron-LM's recorded arguments describe, as a Hugging Face config.

Megatron-LM stores its command line in every checkpoint. Where it describes a model of a family
that is known here, no config has to be given; where it does not, the argument that says so is
named. What an argument means is taken from Megatron-LM; nothing is taken from shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardweave.errors import ModelError

_MUST_BE: Mapping[str, tuple[object, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, 1, None),
    "rotary_interleaved": (False, None),
    "use_rope_scaling": (False, None),
    "multi_latent_attention": (False, None),
    "apply_layernorm_1p": (False, None),
    "add_bias_linear": (False,),
    "squared_relu": (False, None),
    "attention_output_gate": (False, None),
    "mtp_num_layers": (None, 0),
    "heterogeneous_layers_config_path": (None,),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_router_score_function": ("softmax", None),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_pre_softmax": (False, None),
}
"""Arguments that change the maths, with the values at which the model is of a known family."""


def config_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face config of the model that Megatron-LM arguments describe.

    Args:
        args: The recorded arguments by name.

    Raises:
        ModelError: An argument is missing, or describes a model of no known family.

    Source: Megatron-LM, ``arguments.py``.
    """
    for name, allowed in _MUST_BE.items():
        required = None not in allowed
        if (required or name in args) and args.get(name) not in allowed:
            raise ModelError(
                "recorded arguments describe a model of a known family",
                where=f"Megatron argument {name}",
                equation=f"{name}({args.get(name, 'not recorded')!r}) is not one of {allowed}",
                hint="describe the model with --config config.json",
            )
    experts = args.get("num_experts") or 0
    config = {
        "vocab_size": _size(args, "vocab_size"),
        "hidden_size": _size(args, "hidden_size"),
        "num_hidden_layers": _size(args, "num_layers"),
        "num_attention_heads": _size(args, "num_attention_heads"),
        "num_key_value_heads": _size(
            args, "num_query_groups" if args.get("group_query_attention") else "num_attention_heads"
        ),
        "head_dim": _size(args, "kv_channels"),
        "intermediate_size": _size(args, "ffn_hidden_size"),
        "max_position_embeddings": _size(args, "max_position_embeddings"),
        "rms_norm_eps": float(args.get("norm_epsilon") or 1e-5),
        "rope_theta": float(args.get("rotary_base") or 10000),
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "hidden_act": "silu",
    }
    norms, biases = bool(args.get("qk_layernorm")), bool(args.get("add_qkv_bias"))
    if biases and (norms or experts):
        raise ModelError(
            "recorded arguments describe a model of a known family",
            where="Megatron arguments qk_layernorm, add_qkv_bias, num_experts",
            equation=f"qk_layernorm({norms}), add_qkv_bias({biases}), num_experts({experts})",
            hint="describe the model with --config config.json",
        )
    if experts:
        return config | _moe(args, experts, norms)
    return config | _dense(norms, biases)


def _dense(norms: bool, biases: bool) -> dict[str, Any]:
    if norms:
        return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
    if biases:
        return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
    }


def _moe(args: Mapping[str, Any], experts: int, norms: bool) -> dict[str, Any]:
    ffn = (
        _size(args, "moe_ffn_hidden_size")
        if args.get("moe_ffn_hidden_size")
        else _size(args, "ffn_hidden_size")
    )
    top = _size(args, "moe_router_topk")
    layers = _size(args, "num_layers")
    frequency = args.get("moe_layer_freq", 1)
    # Megatron: every n-th layer from the first, or one 0 or 1 for each layer.
    sparse = (
        [i % frequency == 0 for i in range(layers)]
        if isinstance(frequency, int)
        else [bool(f) for f in frequency]
    )
    if len(sparse) != layers:
        raise ModelError(
            "the pattern of sparse layers has one entry a layer",
            where="Megatron argument moe_layer_freq",
            equation=f"entries({len(sparse)}) != num_layers({layers})",
            hint="describe the model with --config config.json",
        )
    if norms:
        return {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "num_experts": experts,
            "num_experts_per_tok": top,
            "moe_intermediate_size": ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, one in enumerate(sparse) if not one],
            "norm_topk_prob": True,
        }
    if not all(sparse):
        raise ModelError(
            "recorded arguments describe a model of a known family",
            where="Megatron argument moe_layer_freq",
            equation=f"{sparse.count(False)} dense layers among sparse ones, without qk_layernorm",
            hint="describe the model with --config config.json",
        )
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts,
        "num_experts_per_tok": top,
        "intermediate_size": ffn,
    }


def _size(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    if type(value) is not int or value < 1:
        raise ModelError(
            "recorded arguments give every size",
            where=f"Megatron argument {name}",
            equation=f"{name}({value!r}) is not a positive number",
            hint="describe the model with --config config.json",
        )
    return value
