"""Megatron-LM's recorded arguments as a config: the families, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardweave.dialects.megatron.args import config_of
from shardweave.errors import ModelError
from shardweave.models import from_config

GQA: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 8, "ffn_hidden_size": 96, "vocab_size": 192,
    "max_position_embeddings": 32, "swiglu": True, "normalization": "RMSNorm", "norm_epsilon": 1e-5,
    "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "qk_layernorm": True, "num_experts": None,
}  # fmt: skip


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    model = from_config(config, dtype="float32")
    return {name: tensor.shape for tensor in model.tensors for name in tensor.names()}


@pytest.mark.parametrize(
    ("fixture", "changes"),
    [
        ("mc_gqa_truth_hf", {}),
        (
            "mc_moe_truth_hf",
            {"hidden_size": 48, "num_attention_heads": 4, "kv_channels": 12, "vocab_size": 160,
             "ffn_hidden_size": 40, "num_experts": 4, "moe_ffn_hidden_size": 40,
             "moe_router_topk": 2, "moe_layer_freq": 1},
        ),
    ],
)  # fmt: skip
def test_arguments_describe_the_fixture(data_dir: Path, fixture: str, changes: dict[str, Any]) -> None:
    truth = json.loads((data_dir / fixture / "config.json").read_text())
    found = config_of(GQA | changes)
    assert _shapes(found) == _shapes(truth)
    assert found["model_type"] == truth["model_type"] and found["architectures"] == truth["architectures"]
    assert found["tie_word_embeddings"] == truth["tie_word_embeddings"]


def test_families() -> None:
    assert config_of(GQA | {"qk_layernorm": False})["model_type"] == "llama"
    assert config_of(GQA | {"qk_layernorm": False, "add_qkv_bias": True})["model_type"] == "qwen2"
    moe = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "qk_layernorm": False}
    assert config_of(GQA | moe)["model_type"] == "mixtral"
    assert (
        config_of(GQA | {"group_query_attention": False, "num_query_groups": 1})["num_key_value_heads"] == 8
    )
    assert config_of(GQA | moe | {"qk_layernorm": True, "moe_layer_freq": [0, 1, 1, 0]})[
        "mlp_only_layers"
    ] == [0, 3]
    # Every n-th layer counts from the first: layers 0 and 3 of 4 are sparse.
    assert config_of(GQA | moe | {"qk_layernorm": True, "moe_layer_freq": 3})["mlp_only_layers"] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swiglu": False}, "swiglu"),
        ({"normalization": "LayerNorm"}, "normalization"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"multi_latent_attention": True}, "multi_latent_attention"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"add_qkv_bias": True}, "add_qkv_bias"),
        ({"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [1, 1]}, "moe_layer_freq"),
        (
            {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": 2, "qk_layernorm": False},
            "moe_layer_freq",
        ),
        ({"num_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 8}, "shared_expert"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as error:
        config_of(GQA | changes)
    assert "--config" in error.value.hint


def test_a_missing_argument_is_refused() -> None:
    for name in ("swiglu", "add_bias_linear", "kv_channels", "num_query_groups", "normalization"):
        with pytest.raises(ModelError, match=name):
            config_of({k: v for k, v in GQA.items() if k != name})


def test_a_checkpoint_with_recorded_arguments_needs_no_config(data_dir: Path, tmp_path: Path) -> None:
    """A real checkpoint with a ``common.pt`` as Megatron-LM writes it: arguments in a namespace."""
    import argparse
    import shutil

    import torch

    from shardweave.convert import open_checkpoint, prepare

    source = tmp_path / "iter_0000002"
    shutil.copytree(data_dir / "mc_gqa_tp2pp2" / "torch_dist", source)
    (source / "common.pt").unlink()
    torch.save({"args": argparse.Namespace(**GQA), "iteration": 2}, source / "common.pt")
    opened = open_checkpoint(source)
    assert opened.config["model_type"] == "qwen3"
    job = prepare(source, to="hf")
    truth = prepare(
        data_dir / "mc_gqa_tp2pp2" / "torch_dist",
        to="hf",
        config=data_dir / "mc_gqa_truth_hf" / "config.json",
    )
    assert job.target == truth.target and job.plan.num_bytes == truth.plan.num_bytes
