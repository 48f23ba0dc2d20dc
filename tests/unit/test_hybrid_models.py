"""Hybrid models: names and shapes by hand, segments by hand, what is stored, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardweave.dialects import megatron
from shardweave.errors import GeometryError, ModelError
from shardweave.layout import Dim, concat, cut, whole
from shardweave.models import Block, Model, from_config
from shardweave.models.mixers import conv_segments, delta_segments, mamba_segments

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture
def tiny(data_dir: Path) -> Any:
    def read(family: str, **changes: Any) -> dict[str, Any]:
        config = json.loads((data_dir / "configs" / "tiny" / f"{family}.json").read_text()) | changes
        return {key: value for key, value in config.items() if value is not ...}

    return read


def shapes(model: Model) -> Shapes:
    return {name: tensor.shape for tensor in model.tensors for name in tensor.names()}


def named(prefix: str, of: Shapes) -> Shapes:
    return {f"{prefix}{name}": shape for name, shape in of.items()}


# 2 key heads of 5, 4 value heads of 7, 3 steps: Q and K have 10 rows each, V and z have 28.
DELTA: Shapes = {
    "conv1d.weight": (48, 1, 3),
    "A_log": (4,),
    "dt_bias": (4,),
    "norm.weight": (7,),
    "out_proj.weight": (30, 28),
}
FUSED: Shapes = DELTA | {"in_proj_qkvz.weight": (76, 30), "in_proj_ba.weight": (8, 30)}
APART: Shapes = DELTA | {
    "in_proj_qkv.weight": (48, 30),
    "in_proj_z.weight": (28, 30),
    "in_proj_b.weight": (4, 30),
    "in_proj_a.weight": (4, 30),
}
GATED: Shapes = {
    "q_proj.weight": (96, 30),
    "k_proj.weight": (16, 30),
    "v_proj.weight": (16, 30),
    "o_proj.weight": (30, 48),
    "q_norm.weight": (8,),
    "k_norm.weight": (8,),
}
ENDS: Shapes = {"model.embed_tokens.weight": (53, 30), "model.norm.weight": (30,), "lm_head.weight": (53, 30)}


def ffn(size: int) -> Shapes:
    return {"gate_proj.weight": (size, 30), "up_proj.weight": (size, 30), "down_proj.weight": (30, size)}


def experts() -> Shapes:
    found: Shapes = {"gate.weight": (5, 30), "shared_expert_gate.weight": (1, 30)}
    found |= named("shared_expert.", ffn(18))
    for expert in range(5):
        found |= named(f"experts.{expert}.", ffn(14))
    return found


def layer(number: int, mixer: Shapes, mlp: Shapes) -> Shapes:
    norms = {f"{name}_layernorm.weight": (30,) for name in ("input", "post_attention")}
    module = "self_attn." if mixer is GATED else "linear_attn."
    return named(f"model.layers.{number}.", norms | named(module, mixer) | named("mlp.", mlp))


def test_qwen3_next(tiny: Any) -> None:
    expected = dict(ENDS)
    for i in range(5):
        expected |= layer(i, GATED if i == 2 else FUSED, ffn(22) if i == 1 else experts())
    assert shapes(from_config(tiny("qwen3_next"))) == expected


def test_qwen3_5(tiny: Any) -> None:
    dense, sparse = dict(ENDS), dict(ENDS)
    for i in range(3):
        dense |= layer(i, GATED if i == 1 else APART, ffn(22))
        sparse |= layer(i, GATED if i == 0 else APART, experts())
    assert shapes(from_config(tiny("qwen3_5_text"))) == dense
    assert shapes(from_config(tiny("qwen3_5_moe_text"))) == sparse


# 4 heads of 7, 2 groups of 5: x has 28 rows, B and C have 10 each.
MAMBA: Shapes = {
    "in_proj.weight": (28 + 48 + 4, 30),
    "conv1d.weight": (48, 1, 3),
    "conv1d.bias": (48,),
    "A_log": (4,),
    "D": (4,),
    "dt_bias": (4,),
    "norm.weight": (28,),
    "out_proj.weight": (30, 28),
}


def test_nemotron_h(tiny: Any) -> None:
    attention = {name: shape for name, shape in GATED.items() if "norm" not in name} | {
        "q_proj.weight": (48, 30)
    }
    plain = {name: shape for name, shape in ffn(22).items() if "gate" not in name}
    expected: Shapes = {
        "backbone.embeddings.weight": (53, 30),
        "backbone.norm_f.weight": (30,),
        "lm_head.weight": (53, 30),
    }
    for i, mixer in enumerate((MAMBA, plain, MAMBA, attention, plain, MAMBA)):
        expected |= named(f"backbone.layers.{i}.", {"norm.weight": (30,)} | named("mixer.", mixer))
    model = from_config(tiny("nemotron_h"))
    assert shapes(model) == expected and model.num_layers == 6
    words = ["mamba", "mlp", "linear_attention", "attention", "mlp", "mamba"]
    listed = tiny("nemotron_h", hybrid_override_pattern=..., num_hidden_layers=..., layers_block_type=words)
    assert from_config(listed) == model


def test_mamba2(tiny: Any) -> None:
    model = from_config(tiny("mamba2"))
    (block,) = model.of("mamba")
    assert block.tensors["in"].shape == (2 * 60 + 2 * 28 + 12, 30)
    assert block.tensors["conv"].shape == (60 + 2 * 28, 1, 3)
    assert sorted(shapes(model))[0] == "backbone.embeddings.weight"


# --- segments -------------------------------------------------------------------------------------


def only(model: Model, kind: str) -> Block:
    (block,) = model.of(kind)
    return block


def by_hand(label: str, *stretches: tuple[int, int]) -> Dim:
    return concat(*(cut(whole(stop, label), start, stop) for start, stop in stretches))


def test_the_segments_of_fused_projections_lie_by_key_head(tiny: Any) -> None:
    """Each of two key heads has 5 rows of q and of k, 14 of v and of z; 2 of b and of a."""
    found = delta_segments(only(from_config(tiny("qwen3_next")), "delta"))
    assert found == {
        "q": by_hand("qkvz", (0, 5), (38, 43)),
        "k": by_hand("qkvz", (5, 10), (43, 48)),
        "v": by_hand("qkvz", (10, 24), (48, 62)),
        "z": by_hand("qkvz", (24, 38), (62, 76)),
        "b": by_hand("ba", (0, 2), (4, 6)),
        "a": by_hand("ba", (2, 4), (6, 8)),
    }


def test_the_segments_of_plain_projections_follow_each_other(tiny: Any) -> None:
    block = only(from_config(tiny("qwen3_5_text")), "delta")
    found = delta_segments(block)
    assert found["v"] == by_hand("qkv", (20, 48)) and found["z"] == whole(28, "z")
    assert conv_segments(block, "") == {
        "q": by_hand("", (0, 10)),
        "k": by_hand("", (10, 20)),
        "v": by_hand("", (20, 48)),
    }


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_segments_of_a_delta_net_are_all_of_its_rows_once(tiny: Any, family: str) -> None:
    block = only(from_config(tiny(family)), "delta")
    rows = sorted(row for dim in delta_segments(block).values() for row in dim)
    expected = sorted(
        row
        for role in ("qkvz", "ba", "qkv", "z", "b", "a")
        if role in block.tensors
        for row in whole(block.tensors[role].shape[0], role)
    )
    assert rows == expected


def test_the_segments_of_a_mixer_are_all_of_its_rows_once(tiny: Any) -> None:
    block = only(from_config(tiny("nemotron_h")), "mamba")
    for conv, role in ((False, "in"), (True, "conv")):
        assert concat(*mamba_segments(block, conv=conv).values()) == whole(block.tensors[role].shape[0])


# --- what Megatron stores ---------------------------------------------------------------------------


def test_layers_of_mixers_are_numbered_in_a_checkpoint(tiny: Any) -> None:
    """Megatron's class for them stacks none, alike or not; a linear layer of segments has one extra state."""
    model = from_config(tiny("mamba2"))
    with pytest.raises(GeometryError, match="all alike: False"):
        megatron.checkpoint(model)
    keys = set(megatron.checkpoint(model, layer_keys="per_layer").arrays(0))
    segments = {f"decoder.layers.1.mixer.in_proj.weight.{name}" for name in ("z", "x", "B", "C", "dt")}
    assert segments <= keys and "decoder.final_norm.weight" in keys
    assert set(megatron.variant(keys, model).arrays(0)) == keys
    found = list(megatron.extra_states(model, layer_keys="per_layer"))
    assert sorted(found) == sorted(
        f"decoder.{name}._extra_state/shard_0_1"
        for name in (
            "final_norm",
            *(f"layers.{i}.mixer.{linear}" for i in (0, 1) for linear in ("in_proj", "out_proj")),
        )
    )


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "mamba2", "llama", "deepseek_v3"])
def test_a_job_can_have_each_of_its_specs_and_no_other(tiny: Any, family: str) -> None:
    model, mesh = from_config(tiny(family)), megatron.mesh(tp=1)
    assert megatron.specs(model) == (("te", "local") if family in ("llama", "deepseek_v3") else ("te",))
    for spec in megatron.specs(model):
        assert megatron.layout(model, mesh, spec=spec).rules
    for spec in {"te", "local"} - set(megatron.specs(model)):
        with pytest.raises(GeometryError, match="Transformer Engine"):
            megatron.layout(model, mesh, spec=spec)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_next", {"linear_num_value_heads": 5}, r"5\) % linear_num_key_heads\(2\) = 1"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, r"every layer is linear_attention or"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "every layer is"),
        (
            "qwen3_next",
            {"layer_types": ["full_attention"] * 5},
            r"\[0, 1, 2, 3, 4\], full_attention_interval\(3\)",
        ),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2"),
        ("qwen3_5_text", {"num_experts": 4}, "num_experts=4"),
        ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        ("llama", {"attn_output_gate": True}, "attn_output_gate=True"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-E"}, r"unknown\('E'\)"),
        ("nemotron_h", {"num_hidden_layers": 5}, r"6 layers .* num_hidden_layers\(5\)"),
        ("nemotron_h", {"layers_block_type": ["mamba"] * 6}, "two spellings of one thing agree"),
        ("nemotron_h", {"hybrid_override_pattern": ...}, "0 layers"),
        ("nemotron_h", {"n_groups": 3}, r"heads\(4\) % groups\(3\) = 1"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias=True"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("nemotron_h", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ("mamba2", {"expand": 3}, r"expand\(3\) \* hidden_size\(30\) != num_heads\(12\) \* head_dim\(5\)"),
    ],
)
def test_what_is_not_understood_is_refused(
    tiny: Any, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        from_config(tiny(family, **changes))
