"""A model with the state of its optimizer in every format, and the truth to compare conversions with.

The truth is made of random numbers by the names of Hugging Face's files. It comes into the matrix of
conversions as ``torch.distributed.checkpoint`` and ``safetensors`` themselves write it; all else is made
from that.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardweave.convert import Geometry, Zero

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 53, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 4, "tie_word_embeddings": False, "dtype": "bfloat16", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32,
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 41, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10,
    "norm_topk_prob": True, "tie_word_embeddings": False, "dtype": "bfloat16", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32,
}  # fmt: skip
MODELS = {"dense": DENSE, "moe": MOE}
STEP = 1234
STATES = ("exp_avg", "exp_avg_sq")
DECAY, NO_DECAY = (
    {
        "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay, "amsgrad": False,
        "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
        "decoupled_weight_decay": True,
    }
    for decay in (0.1, 0.0)
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A format with a layout: a row and a column of the matrix.

    Attributes:
        name: What it is called.
        format: The format.
        options: What ``prepare`` is asked for.
        state: Whether the format has a place for the optimizer's state.
        rounded: Whether its weights are rounded, with the masters beside them where it has any.
    """

    name: str
    format: str
    options: dict[str, Any] = field(default_factory=dict)
    state: bool = True
    rounded: bool = False


def _zero(stage: int, dp: int, tp: int = 1) -> dict[str, Any]:
    if stage == 3:
        return {"zero": Zero(stage=3, dp=dp, tp=tp, dtype="bfloat16")}
    return {"zero": Zero(stage=stage, dp=dp, tp=tp), "dtype": "bfloat16"}


def nodes(model: str) -> list[Node]:
    """Two layouts of every format."""
    other = Geometry(tp=2, pp=2) if model == "dense" else Geometry(tp=2, ep=2, etp=1)
    return [
        Node("hf", "hf", {"dtype": "bfloat16"}, state=False, rounded=True),
        Node("hf stacked" if model == "moe" else "hf in small files", "hf",
             {"dtype": "bfloat16", "stacked_experts": True} if model == "moe"
             else {"dtype": "bfloat16", "max_file_bytes": 4000}, state=False, rounded=True),
        Node("megatron TP1", "megatron", {"geometry": Geometry(), "dtype": "bfloat16"}, rounded=True),
        Node("megatron " + ("TP2 PP2" if model == "dense" else "TP2 EP2"), "megatron",
             {"geometry": other, "dtype": "bfloat16"}, rounded=True),
        Node("ZeRO-1 DP2", "deepspeed", _zero(1, 2), rounded=True),
        Node("ZeRO-1 DP3 TP2", "deepspeed", _zero(1, 3, 2), rounded=True),
        Node("ZeRO-2 DP3", "deepspeed", _zero(2, 3), rounded=True),
        Node("ZeRO-2 DP2 TP2", "deepspeed", _zero(2, 2, 2), rounded=True),
        Node("ZeRO-3 DP2", "deepspeed", _zero(3, 2)),
        Node("ZeRO-3 DP5", "deepspeed", _zero(3, 5)),
        Node("universal", "universal"),
        Node("dcp by groups", "dcp"),
        Node("dcp by weights", "dcp", {"keys": "flat"}),
        Node("native", "native", {"dtype": "bfloat16"}, rounded=True),
        Node("native in small files", "native", {"dtype": "bfloat16", "max_file_bytes": 4000}, rounded=True),
    ]  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of Hugging Face's files, written out by hand, in the order of the module."""
    hidden, head, heads, kv = config["hidden_size"], 4, 6, 2
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": (kv * head, hidden),
            f"{at}.self_attn.v_proj.weight": (kv * head, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
        }
        if "num_experts" in config:
            found[f"{at}.mlp.gate.weight"] = (config["num_experts"], hidden)
            ffn = config["moe_intermediate_size"]
            for expert in range(config["num_experts"]):
                found |= {
                    f"{at}.mlp.experts.{expert}.{one}_proj.weight": (ffn, hidden) for one in ("gate", "up")
                }
                found[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (hidden, ffn)
        else:
            ffn = config["intermediate_size"]
            found |= {f"{at}.mlp.{one}_proj.weight": (ffn, hidden) for one in ("gate", "up")}
            found[f"{at}.mlp.down_proj.weight"] = (hidden, ffn)
        found |= {f"{at}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


Truth = dict[str, dict[str, torch.Tensor]]


def truth(config: dict[str, Any]) -> Truth:
    """Masters and moments of every weight, by kind and name; NaNs and signed zeros among them."""
    chance = torch.Generator().manual_seed(7)
    found: Truth = {}
    for kind in ("master", *STATES):
        found[kind] = {name: torch.randn(shape, generator=chance) for name, shape in shapes(config).items()}
        for value in found[kind].values():
            value.view(-1)[0], value.view(-1)[-1] = -0.0, float("nan")
    found["exp_avg_sq"] = {name: value.square() for name, value in found["exp_avg_sq"].items()}
    found["weight"] = {name: value.bfloat16() for name, value in found["master"].items()}
    return found


def as_module(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values by the names of the module, where transformers 5 stacks the experts of a layer."""
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        layer, _, rest = name.partition(".mlp.experts.")
        if not rest:
            found[name] = value
        elif rest == "0.gate_proj.weight":
            experts = [key for key in values if key.startswith(f"{layer}.mlp.experts.")]
            count = 1 + max(int(key.split(".mlp.experts.")[1].split(".")[0]) for key in experts)
            of = [
                {one: values[f"{layer}.mlp.experts.{e}.{one}_proj.weight"] for one in ("gate", "up", "down")}
                for e in range(count)
            ]
            fused = [torch.cat([one["gate"], one["up"]]) for one in of]
            found[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(fused)
            found[f"{layer}.mlp.experts.down_proj"] = torch.stack([one["down"] for one in of])
    return found


def save_dcp(folder: Path, values: Truth) -> Path:
    """What ``get_state_dict`` gives of the module and AdamW, saved by torch."""
    by_kind = {kind: as_module(values[kind]) for kind in ("master", *STATES)}
    names = list(by_kind["master"])
    state = {
        name: {"step": torch.tensor(float(STEP)), **{kind: by_kind[kind][name] for kind in STATES}}
        for name in names
    }
    matrices = [name for name in names if by_kind["master"][name].dim() > 1]
    groups = [
        {**DECAY, "params": matrices},
        {**NO_DECAY, "params": [name for name in names if name not in matrices]},
    ]
    tree = {"model": by_kind["master"], "optim": {"state": state, "param_groups": groups}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder)
    return folder


def save_hf(folder: Path, values: Truth) -> Path:
    """The rounded weights as a file of Hugging Face."""
    folder.mkdir(parents=True)
    save_file(values["weight"], folder / "model.safetensors")
    return folder
