"""Writes small folders of ChatGLM and Yuan 2, row by row, as their own code reads them: ``python FILE DATA``.

transformers has no class for these two, so what stands in a file is said here a row at a time, with nothing
but torch and safetensors. A row starts with a number that says what it is of: hundreds say the role, then
come the head and the row in it. Where the rows of a fused tensor lie follows ``modeling_chatglm.py`` of
chatglm2-6b (SelfAttention: all queries, all K, all V, where queries share K and V; MLP: two chunks, the first
through the activation) and ``yuan_hf_model.py`` of Yuan-2.0 (YuanAttention: rows of Q, then of K, read as
heads of twice the size, query before key).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

CHATGLM = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "ffn_hidden_size": 22,
    "hidden_size": 30,
    "kv_channels": 8,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 6,
    "num_layers": 2,
    "padded_vocab_size": 53,
    "post_layer_norm": True,
    "rmsnorm": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
YUAN = {
    "model_type": "yuan",
    "architectures": ["YuanForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 53,
}
Q, K, V, GATE, UP = 100, 200, 300, 400, 500


def rest(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def row(what: float, columns: int) -> torch.Tensor:
    return torch.cat([torch.tensor([what]), torch.randn(columns - 1)])


def stacked(rows: list[float], columns: int) -> torch.Tensor:
    return torch.stack([row(what, columns) for what in rows])


def chatglm() -> dict[str, torch.Tensor]:
    found = {"transformer.embedding.word_embeddings.weight": rest(53, 30)}
    found["transformer.rotary_pos_emb.inv_freq"] = rest(2)
    for layer in range(2):
        at = f"transformer.encoder.layers.{layer}."
        rows = []
        for role, heads in ((Q, 6), (K, 2), (V, 2)):
            for head in range(heads):
                for i in range(8):
                    rows.append(role + 10.0 * head + i)
        found[at + "self_attention.query_key_value.weight"] = stacked(rows, 30)
        found[at + "self_attention.query_key_value.bias"] = torch.tensor(rows)
        found[at + "self_attention.dense.weight"] = rest(30, 48)
        rows = [GATE + i for i in range(22)] + [UP + i for i in range(22)]
        found[at + "mlp.dense_h_to_4h.weight"] = stacked(rows, 30)
        found[at + "mlp.dense_4h_to_h.weight"] = rest(30, 22)
        found[at + "input_layernorm.weight"] = rest(30)
        found[at + "post_attention_layernorm.weight"] = rest(30)
    found["transformer.encoder.final_layernorm.weight"] = rest(30)
    found["transformer.output_layer.weight"] = rest(53, 30)
    return found


def yuan() -> dict[str, torch.Tensor]:
    embedding = rest(53, 24)
    # A tied head is stored under both names.
    found = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    for layer in range(2):
        at = f"model.layers.{layer}."
        both = []
        for head in range(6):
            for role in (Q, K):
                for i in range(4):
                    both.append(role + 10.0 * head + i)
        found[at + "self_attn.q_proj.weight"] = stacked(both[:24], 24)
        found[at + "self_attn.k_proj.weight"] = stacked(both[24:], 24)
        found[at + "self_attn.v_proj.weight"] = stacked(
            [V + 10.0 * head + i for head in range(6) for i in range(4)], 24
        )
        found[at + "self_attn.o_proj.weight"] = rest(24, 24)
        found[at + "self_attn.rotary_emb.inv_freq"] = rest(2)
        found[at + "self_attn.lf_gate.conv1.weight"] = rest(12, 24, 2, 1)
        found[at + "self_attn.lf_gate.conv1.bias"] = rest(12)
        found[at + "self_attn.lf_gate.conv2.weight"] = rest(24, 12, 2, 1)
        found[at + "self_attn.lf_gate.conv2.bias"] = rest(24)
        found[at + "self_attn.lf_gate.output_layernorm.weight"] = rest(24)
        # The half that goes through the activation is called up.
        found[at + "mlp.up_proj.weight"] = stacked([GATE + float(i) for i in range(22)], 24)
        found[at + "mlp.gate_proj.weight"] = stacked([UP + float(i) for i in range(22)], 24)
        found[at + "mlp.down_proj.weight"] = rest(24, 22)
        found[at + "input_layernorm.weight"] = rest(24)
        found[at + "post_attention_layernorm.weight"] = rest(24)
    found["model.norm.weight"] = rest(24)
    return found


def main(data: Path) -> None:
    torch.manual_seed(11)
    for name, config, tensors in ("chatglm", CHATGLM, chatglm()), ("yuan", YUAN, yuan()):
        folder = data / f"hf_{name}_tiny"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
