"""What a rank holds of the weights, written out by hand: nothing of it comes from shardweave's layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]


def megatron(
    hf: Arrays, config: Mapping[str, Any], *, tp: int, rank: int, ep: int, etp: int, padded: int
) -> dict[str, np.ndarray]:
    """The parameters of one rank of a GPTModel of the local spec, without a pipeline; padding is NaN.

    Ranks of one stage are numbered with tp fastest; for experts with etp fastest, then ep.
    """

    def rows(array: np.ndarray, parts: int, part: int) -> np.ndarray:
        return np.split(array, parts, axis=0)[part]

    def columns(array: np.ndarray, parts: int, part: int) -> np.ndarray:
        return np.split(array, parts, axis=1)[part]

    def vocabulary(array: np.ndarray) -> np.ndarray:
        full = np.full((padded, array.shape[1]), np.nan, dtype=array.dtype)
        full[: len(array)] = array
        return rows(full, tp, rank)

    size, groups = config["head_dim"], config["num_key_value_heads"]
    per_group = config["num_attention_heads"] // groups
    held = {
        "embedding.word_embeddings.weight": vocabulary(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": vocabulary(hf["lm_head.weight"]),
    }
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (hf[f"{theirs}self_attn.{one}_proj.weight"] for one in "qkv")
        fused = []
        for group in range(groups):
            fused.append(q[group * per_group * size : (group + 1) * per_group * size])
            fused += [one[group * size : (group + 1) * size] for one in (k, v)]
        attention = {
            "linear_qkv.weight": rows(np.concatenate(fused), tp, rank),
            "linear_proj.weight": columns(hf[f"{theirs}self_attn.o_proj.weight"], tp, rank),
            "q_layernorm.weight": hf[f"{theirs}self_attn.q_norm.weight"],
            "k_layernorm.weight": hf[f"{theirs}self_attn.k_norm.weight"],
        }
        held |= {f"{ours}self_attention.{name}": array for name, array in attention.items()}
        held[f"{ours}input_layernorm.weight"] = hf[f"{theirs}input_layernorm.weight"]
        held[f"{ours}pre_mlp_layernorm.weight"] = hf[f"{theirs}post_attention_layernorm.weight"]

        def gated(module: str, parts: int, part: int) -> dict[str, np.ndarray]:
            gate, up = (rows(hf[f"{module}{one}_proj.weight"], parts, part) for one in ("gate", "up"))
            return {
                "linear_fc1.weight": np.concatenate([gate, up]),
                "linear_fc2.weight": columns(hf[f"{module}down_proj.weight"], parts, part),
            }

        if "num_experts" not in config:
            held |= {f"{ours}mlp.{k}": v for k, v in gated(f"{theirs}mlp.", tp, rank).items()}
            continue
        held[f"{ours}mlp.router.weight"] = hf[f"{theirs}mlp.gate.weight"]
        local = config["num_experts"] // ep
        for number in range(local):
            expert = rank // etp % ep * local + number
            for name, array in gated(f"{theirs}mlp.experts.{expert}.", etp, rank % etp).items():
                held[f"{ours}mlp.experts.local_experts.{number}.{name}"] = array
    return held


def stacked(hf: Arrays, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The whole weights as transformers 5 holds them in memory: the experts of a layer in two arrays."""
    held = {name: array for name, array in hf.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"] if "num_experts" in config else 0):
        module = f"model.layers.{layer}.mlp.experts"
        fused, down = [], []
        for expert in range(config["num_experts"]):
            gate, up, last = (hf[f"{module}.{expert}.{one}_proj.weight"] for one in ("gate", "up", "down"))
            fused.append(np.concatenate([gate, up]))
            down.append(last)
        held[f"{module}.gate_up_proj"], held[f"{module}.down_proj"] = np.stack(fused), np.stack(down)
    return held
