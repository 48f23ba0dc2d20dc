"""Segments of fused projections against transformers: its own modules, computed from rows as we name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardweave.layout import Dim
from shardweave.models import Block, from_config
from shardweave.models.mixers import conv_segments, delta_segments, mamba_segments

pytestmark = pytest.mark.peer("transformers")


def parts(data_dir: Path, family: str, kind: str, **changes: Any) -> tuple[Block, Any]:
    """Our block, and the first layer that it stands for of a model of transformers with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((data_dir / "configs" / "tiny" / f"{family}.json").read_text()) | changes
    values = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    (block,) = from_config(config).of(kind)
    decoder = model.backbone if family == "mamba2" else model.model
    return block, decoder.layers[next(n for _, n in block.layers)]


def rows(dim: Dim, weights: dict[str, Any]) -> Any:
    """The rows that a dim names, one by one."""
    import torch

    return torch.stack([weights[str(label)][index] for label, index in dim])


@pytest.mark.parametrize("value_heads", [4, 2, 6])
def test_projections_of_qwen3_next_fall_apart_as_we_say(data_dir: Path, value_heads: int) -> None:
    import torch

    block, layer = parts(data_dir, "qwen3_next", "delta", linear_num_value_heads=value_heads)
    module = layer.linear_attn
    weights = {"qkvz": module.in_proj_qkvz.weight, "ba": module.in_proj_ba.weight}
    x = torch.randn(2, 5, 30)
    theirs = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    for name, their in zip("qkvzba", theirs, strict=True):
        ours = x @ rows(delta_segments(block)[name], weights).T
        torch.testing.assert_close(ours.flatten(), their.flatten(), rtol=1e-5, atol=1e-5)


def test_qwen3_next_and_qwen3_5_compute_the_same_of_the_same_segments(data_dir: Path) -> None:
    """The two store projections in different orders, and are otherwise one module."""
    import torch

    fused, layer = parts(data_dir, "qwen3_next", "delta")
    apart, other = parts(data_dir, "qwen3_5_text", "delta")
    theirs, ours = layer.linear_attn, other.linear_attn
    weights = {"qkvz": theirs.in_proj_qkvz.weight, "ba": theirs.in_proj_ba.weight}
    target = {"qkv": ours.in_proj_qkv, "z": ours.in_proj_z, "b": ours.in_proj_b, "a": ours.in_proj_a}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(float("nan"))
        for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "out_proj.weight"):
            ours.get_parameter(name).copy_(theirs.get_parameter(name))
        for name, dim in delta_segments(apart).items():
            for place, row in zip(dim, rows(delta_segments(fused)[name], weights), strict=True):
                target[str(place[0])].weight[place[1]] = row
    x = torch.randn(2, 5, 30)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    # The same where the channels of the convolution are those of the projection.
    assert list(conv_segments(apart, "qkv")) == ["q", "k", "v"]
    assert all(delta_segments(apart)[name] == dim for name, dim in conv_segments(apart, "qkv").items())


def test_the_output_gate_is_beside_each_query_head(data_dir: Path) -> None:
    """With gates of 0 the output is half of that of plain attention with the other rows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    block, layer = parts(data_dir, "qwen3_next", "gated_attention")
    config = json.loads((data_dir / "configs" / "tiny" / "qwen3.json").read_text())
    values = {key: value for key, value in config.items() if key != "model_type"}
    values["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    plain = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **values)).model.layers[0].self_attn
    )
    gated, d = layer.self_attn, block.sizes["head_dim"]
    with torch.no_grad():
        for role in ("k_proj", "v_proj", "o_proj"):
            getattr(plain, role).weight.copy_(getattr(gated, role).weight)
        for role in ("q_norm", "k_norm"):
            getattr(plain, role).weight.copy_(1 + getattr(gated, role).weight)
        for head in range(block.sizes["num_heads"]):
            first = 2 * head * d
            plain.q_proj.weight[head * d : (head + 1) * d] = gated.q_proj.weight[first : first + d]
            gated.q_proj.weight[first + d : first + 2 * d] = 0
    x, ones = torch.randn(2, 5, 30), torch.ones(2, 5, d)
    positions = (ones, torch.zeros_like(ones))  # no rotation
    found, expected = (module(x, positions, None)[0] for module in (gated, plain))
    torch.testing.assert_close(found, expected / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["nemotron_h", "mamba2"])
def test_projections_of_a_mixer_are_in_the_order_that_we_say(data_dir: Path, family: str) -> None:
    """Without a gate or without x nothing comes out; without B or without C the same, what D lets through."""
    import torch

    block, layer = parts(data_dir, family, "mamba")
    module, x = layer.mixer, torch.randn(2, 5, 30)
    weight = module.in_proj.weight.detach().clone()
    torch.nn.init.zeros_(module.conv1d.bias)
    seen = {}
    for name, dim in mamba_segments(block).items():
        with torch.no_grad():
            module.in_proj.weight.copy_(weight)
            module.in_proj.weight[[row for _, row in dim]] = 0
            seen[name] = module(x)
    assert not seen["z"].any() and not seen["x"].any()
    torch.testing.assert_close(seen["B"], seen["C"])
    with torch.no_grad():
        module.in_proj.weight.copy_(weight)
        whole = module(x)
        conv = module.conv1d.weight.detach().clone()
        for name, dim in mamba_segments(block, conv=True).items():
            module.conv1d.weight.copy_(conv)
            module.conv1d.weight[[row for _, row in dim]] = 0
            torch.testing.assert_close(module(x), seen[name])
    assert all((whole - seen[name]).abs().max() > 1e-3 for name in ("B", "dt"))
