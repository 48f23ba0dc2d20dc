"""Falcon, Phi-3, ChatGLM and Yuan: names and shapes as they are published, written out by hand; and refusals.

transformers has no class for ChatGLM and Yuan 2. Their names and shapes stand here as the models' own code
builds them, line by line; the modules say which code that is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardweave.errors import ModelError
from shardweave.models import FAMILIES, Model, from_config
from shardweave.models.gpt_blocks import qkv_segments

Shapes = Mapping[str, tuple[int, ...]]


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    found = [(name, tensor.shape) for tensor in model.tensors for name in tensor.names()]
    assert len(dict(found)) == len(found), "two tensors have one name"
    return dict(found)


@pytest.fixture
def tiny(data_dir: Path) -> Any:
    def read(family: str, **changes: Any) -> dict[str, Any]:
        config = json.loads((data_dir / "configs" / "tiny" / f"{family}.json").read_text()) | changes
        return {key: value for key, value in config.items() if value is not ...}

    return read


def chatglm(*, qkv: int, qkv_bias: bool, bias: bool) -> Shapes:
    found: dict[str, tuple[int, ...]] = {"transformer.embedding.word_embeddings.weight": (53, 30)}
    for layer in range(3):
        at = f"transformer.encoder.layers.{layer}"
        found[f"{at}.input_layernorm.weight"] = (30,)
        found[f"{at}.self_attention.query_key_value.weight"] = (qkv, 30)
        if qkv_bias:
            found[f"{at}.self_attention.query_key_value.bias"] = (qkv,)
        found[f"{at}.self_attention.dense.weight"] = (30, 48)
        found[f"{at}.post_attention_layernorm.weight"] = (30,)
        found[f"{at}.mlp.dense_h_to_4h.weight"] = (44, 30)
        found[f"{at}.mlp.dense_4h_to_h.weight"] = (30, 22)
        if bias:
            found[f"{at}.self_attention.dense.bias"] = (30,)
            found[f"{at}.mlp.dense_h_to_4h.bias"] = (44,)
            found[f"{at}.mlp.dense_4h_to_h.bias"] = (30,)
    found["transformer.encoder.final_layernorm.weight"] = (30,)
    found["transformer.output_layer.weight"] = (53, 30)
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, chatglm(qkv=80, qkv_bias=True, bias=False)),
        ({"add_qkv_bias": False}, chatglm(qkv=80, qkv_bias=False, bias=False)),
        ({"add_qkv_bias": False, "add_bias_linear": True}, chatglm(qkv=80, qkv_bias=True, bias=True)),
        ({"multi_query_attention": False}, chatglm(qkv=144, qkv_bias=True, bias=False)),
        ({"architectures": ["ChatGLMModel"]}, chatglm(qkv=80, qkv_bias=True, bias=False)),
    ],
)
def test_chatglm(tiny: Any, changes: dict[str, Any], expected: Shapes) -> None:
    assert shapes(from_config(tiny("chatglm", **changes))) == expected


# The configs of chatglm3-6b, glm-4-9b and Yuan2-2B as they are published, without paths and versions.
CHATGLM3 = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "original_rope": True,
    "padded_vocab_size": 65024,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 8192,
    "use_cache": True,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GLM4 = CHATGLM3 | {
    "classifier_dropout": None,
    "eos_token_id": [151329, 151336, 151338],
    "num_hidden_layers": 40,
    "num_layers": 40,
    "padded_vocab_size": 151552,
    "rope_ratio": 500,
    "seq_length": 131072,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}
FALCON = {
    "model_type": "falcon",
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "bias": False,
    "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-05,
    "num_attention_heads": 71,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_kv_heads": 71,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 65024,
}
FALCON40 = FALCON | {
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
PHI3 = {
    "model_type": "phi3",
    "torch_dtype": "bfloat16",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "rope_scaling": None,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
YUAN2 = {
    "model_type": "yuan",
    "architectures": ["YuanForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_yuan.YuanConfig"},
    "causal_mask": True,
    "dropout": 0.1,
    "eod_token": 77185,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "model_max_length": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "rms_norm_eps": 1e-06,
    "sep_token": 77187,
    "tokenizer_class": "YuanTokenizer",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_flash_attention": True,
    "use_loss_mask": False,
    "vocab_size": 135040,
}


@pytest.mark.parametrize(
    ("config", "numel"),
    [
        # 12,487,168,064 bytes in the index of its files, 64 of which are 32 frequencies.
        (CHATGLM3, 6_243_584_000),
        (GLM4, 9_399_951_360),
        (FALCON, 6_921_720_704),
        (FALCON40, 41_303_293_952),
        (PHI3, 3_821_079_552),
        # By hand: projections, feed-forward, norms, two convolutions with their biases; embedding and norm.
        (YUAN2, 24 * (4 * 2048**2 + 3 * 2048 * 8192 + 3 * 2048 + 8 * 1024**2 + 3072) + 2048 * 135041),
    ],
    ids=["chatglm3-6b", "glm-4-9b", "falcon-7b", "falcon-40b", "phi-3-mini", "yuan2-2b"],
)
def test_published_configs_are_understood_and_their_sizes_are_published(
    config: dict[str, Any], numel: int
) -> None:
    assert from_config(config).numel == numel


def yuan(layer: int, *, shared: bool) -> Shapes:
    attention: dict[str, tuple[int, ...]] = {"v_proj.weight": (36, 36), "o_proj.weight": (36, 36)}
    if shared:
        attention |= {"qk_proj.weight": (36, 36), "qk_weight": (2, 36), "qk_bias": (2, 36)}
    else:
        attention |= {"q_proj.weight": (36, 36), "k_proj.weight": (36, 36)}
        attention |= {"lf_gate.conv1.weight": (18, 36, 2, 1), "lf_gate.conv1.bias": (18,)}
        attention |= {"lf_gate.conv2.weight": (36, 18, 2, 1), "lf_gate.conv2.bias": (36,)}
        attention["lf_gate.output_layernorm.weight"] = (36,)
    of = {f"self_attn.{name}": shape for name, shape in attention.items()}
    of |= {"input_layernorm.weight": (36,), "post_attention_layernorm.weight": (36,)}
    of |= {"mlp.up_proj.weight": (22, 36), "mlp.gate_proj.weight": (22, 36), "mlp.down_proj.weight": (36, 22)}
    return {f"model.layers.{layer}.{name}": shape for name, shape in of.items()}


@pytest.mark.parametrize("shared", [False, True])
def test_yuan(tiny: Any, shared: bool) -> None:
    model = from_config(tiny("yuan", use_shareqk=shared))
    expected = {name: shape for layer in range(3) for name, shape in yuan(layer, shared=shared).items()}
    assert shapes(model) == expected | {"model.embed_tokens.weight": (53, 36), "model.norm.weight": (36,)}
    assert model.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    (mlp,) = model.of("mlp")
    assert mlp.tensors["gate"].name.endswith("mlp.up_proj.weight"), "the half with the activation"


def test_frequencies_of_rotary_embeddings_are_no_weights(tiny: Any) -> None:
    assert from_config(tiny("chatglm")).buffers == {"transformer.rotary_pos_emb.inv_freq"}
    assert from_config(tiny("yuan")).buffers == {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(3)
    }


@pytest.mark.parametrize(
    ("family", "changes", "rows"),
    [
        # heads of 6 rows: 6 queries, 2 KV heads
        ("falcon", {}, {"q": [*range(18), *range(30, 48)], "k": [*range(18, 24), *range(48, 54)]}),
        (
            "falcon",
            {"new_decoder_architecture": False, "multi_query": True},
            {"q": [*range(36)], "k": [*range(36, 42)], "v": [*range(42, 48)]},
        ),
        (
            "falcon",
            {"new_decoder_architecture": False},
            {"k": [18 * head + 6 + row for head in range(6) for row in range(6)]},
        ),
        # heads of 8 rows
        ("phi3", {}, {"q": [*range(48)], "k": [*range(48, 64)], "v": [*range(64, 80)]}),
        ("chatglm", {}, {"q": [*range(48)], "k": [*range(48, 64)], "v": [*range(64, 80)]}),
        (
            "chatglm",
            {"multi_query_attention": False},
            {"v": [24 * head + 16 + row for head in range(6) for row in range(8)]},
        ),
    ],
)
def test_rows_of_q_k_and_v(
    tiny: Any, family: str, changes: dict[str, Any], rows: dict[str, list[int]]
) -> None:
    """As ``_split_heads`` of Falcon and the ``split`` and ``view`` of the other two read them."""
    (block,) = from_config(tiny(family, **changes)).of("fused_attention")
    segments = qkv_segments(block)
    for role, expected in rows.items():
        assert [row for _, row in segments[role]] == expected


@pytest.mark.parametrize(
    ("family", "changes", "equation"),
    [
        ("falcon", {"num_kv_heads": 4}, r"num_attention_heads\(6\) % num_kv_heads\(4\) = 2"),
        ("falcon", {"hidden_size": 38}, r"hidden_size\(38\) % num_attention_heads\(6\) = 2"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, r"num_ln_in_parallel_attn=3 is not 1 or 2"),
        ("falcon", {"num_key_value_heads": 2}, r"num_key_value_heads=2 is not None"),
        ("phi3", {"attention_bias": True}, r"attention_bias=True is not False"),
        ("phi3", {"num_key_value_heads": 4}, r"num_attention_heads\(6\) % num_key_value_heads\(4\) = 2"),
        ("chatglm", {"multi_query_group_num": 4}, r"multi_query_group_num\(4\) = 2"),
        ("chatglm", {"rmsnorm": False}, r"rmsnorm=False is not True"),
        ("chatglm", {"pre_seq_len": 128}, r"pre_seq_len=128 is not None"),
        ("chatglm", {"quantization_bit": 4}, r"quantization_bit=4 is not 0"),
        ("chatglm", {"tie_word_embeddings": True}, r"tie_word_embeddings=True is not False"),
        ("chatglm", {"vocab_size": 54}, r"padded_vocab_size\(53\) != vocab_size\(54\)"),
        ("chatglm", {"architectures": ["ChatGLMForSequenceClassification"]}, "ChatGLMForSequence"),
        ("yuan", {"num_attention_heads": 5}, r"hidden_size\(36\) % num_attention_heads\(5\) = 1"),
        ("yuan", {"num_key_value_heads": 2}, r"num_key_value_heads=2 is not None"),
        ("yuan", {"lf_conv2d_group": 2}, r"lf_conv2d_group=2"),
    ],
)
def test_refusals(tiny: Any, family: str, changes: dict[str, Any], equation: str) -> None:
    with pytest.raises(ModelError, match=equation):
        from_config(tiny(family, **changes))


def test_the_published_configs_are_of_all_families_here() -> None:
    assert {"chatglm", "falcon", "phi3", "yuan"} <= set(FAMILIES)
