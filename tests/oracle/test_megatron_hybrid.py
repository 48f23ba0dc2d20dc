"""Delta nets, gated attention and mixers: what transformers computes of a layer, megatron-core computes too.

Random weights of a transformers module go, by layouts of ours and a plan between them, into Megatron's own
modules on one and on two ranks. Names and shapes are those that Megatron builds, what it would store is what
we say that it stores, and the output is that of transformers: every row means there what it means here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_processes import run
from safetensors.numpy import load_file, save_file

from shardweave.dialects import hf, megatron
from shardweave.dialects.megatron.weight import Segments
from shardweave.errors import GeometryError
from shardweave.layout import Layout, Tensor, even, prove
from shardweave.models import Model, from_config
from shardweave.plan import empty, materialise, plan, simulate
from shardweave.refit.values import landing

pytestmark = [pytest.mark.peer("megatron.core"), pytest.mark.peer("transformers"), pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("megatron_hybrid_cpu.py")
# name: family, kind of block, layer, changes of the tiny config
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "delta, fused": ("qwen3_next", "delta", 0, {}),
    "delta, apart": ("qwen3_5_text", "delta", 2, {"linear_num_value_heads": 6}),
    "gated attention": ("qwen3_next", "gated_attention", 2, {}),
    "mixer": ("nemotron_h", "mamba", 2, {}),
    "mixer, a head a group": ("nemotron_h", "mamba", 0, {"n_groups": 4}),
}


def config(name: str) -> dict[str, Any]:
    family, _, _, changes = CASES[name]
    tiny = Path(__file__).parents[1] / "data" / "configs" / "tiny" / f"{family}.json"
    return json.loads(tiny.read_text()) | {"num_attention_heads": 6} | changes


def peer(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Random weights of a transformers model, the layer's input and what the layer makes of it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, kind, layer, _ = CASES[name]
    values = {key: value for key, value in config(name).items() if key != "model_type"}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
        decoder = model.model.layers[layer]
        module = {"delta": "linear_attn", "gated_attention": "self_attn", "mamba": "mixer"}[kind]
        x, ones = torch.randn(2, 7, 30), torch.ones(2, 7, 8)
        given = (x, (ones, torch.zeros_like(ones)), None) if kind == "gated_attention" else (x,)
        found = getattr(decoder, module)(*given)
    y = found[0] if isinstance(found, tuple) else found
    save_file({"x": x.numpy(), "y": y.numpy()}, folder / f"{name}.safetensors")
    prefix = from_config(config(name)).blocks[0].tensors["embed"].name.partition("embed")[0]
    return {key.replace("model.", prefix, 1): value.numpy() for key, value in model.state_dict().items()}


def logical(model: Model, state: dict[str, np.ndarray], kind: str) -> dict[Tensor, np.ndarray]:
    """The tensors of the blocks of a kind, index dims first."""
    tensors = (tensor for block in model.of(kind) for tensor in block.tensors.values())
    return {tensor: np.stack([state[name] for name in tensor.names()]) for tensor in tensors}


def only(layout: Layout, tensors: Any) -> Layout:
    """The buffers of some tensors."""
    kept = (rule for rule in layout.rules if all(part.tensor in tensors for part in rule.parts))
    return Layout(layout.name, layout.mesh, tuple(kept))


def stored(name: str, state: dict[str, np.ndarray], tp: int) -> dict[int, dict[str, np.ndarray]]:
    """What the ranks hold of the layer, below its module: moved by a plan, then shifted where we say so."""
    model, (_, kind, layer, _) = from_config(config(name)), CASES[name]
    values = logical(model, state, kind)
    target = only(megatron.layout(model, megatron.mesh(tp=tp, etp=1, dp=2 // tp)), values)
    prove(target)
    source = only(hf.layout(model), values)
    landed, steps = landing(source, target)
    moved = simulate(
        plan(source, landed), materialise(source, values), into=empty(landed, np.float32, fill=np.nan)
    )
    for step in steps:
        for rank in target.mesh.ranks:
            for array in step.arrays(rank):
                moved[rank][array] = step.final.transform.apply(moved[rank][array])
    prefix = f"decoder.layers.{layer}.{'mixer' if kind == 'mamba' else 'self_attention'}."
    return {
        rank: {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
        for rank, arrays in moved.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("hybrid")
    cases = []
    for name, (_, kind, layer, _) in CASES.items():
        state = peer(name, at)
        for tp in (1, 2):
            for rank, arrays in stored(name, state, tp).items():
                save_file(
                    {key: np.ascontiguousarray(value) for key, value in arrays.items()},
                    at / f"{name} tp{tp}.{rank}.in.safetensors",
                )
            prefix = f"decoder.layers.{layer}.{'mixer' if kind == 'mamba' else 'self_attention'}."
            cases.append(
                {"name": f"{name} tp{tp}", "kind": kind, "tp": tp, "config": config(name),
                 "input": f"{name}.safetensors", "prefix": prefix}
            )  # fmt: skip
    run(SCRIPT, cases, at, world_size=2, limit_s=200, preload="megatron.core")
    return at


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_megatron_computes_what_transformers_does(folder: Path, name: str, tp: int) -> None:
    expected = load_file(folder / f"{name}.safetensors")["y"]
    assert np.abs(expected).max() > 0.1
    for rank in range(2):
        report = json.loads((folder / f"{name} tp{tp}.{rank}.json").read_text())
        assert not report["missing"] and not report["unexpected"]
        found = load_file(folder / f"{name} tp{tp}.{rank}.out.safetensors")["y"]
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_stores_each_segment_on_its_own(folder: Path, name: str, tp: int) -> None:
    """Keys, whole shapes, and the boxes that ranks write, by Megatron's own account."""
    model, (_, kind, layer, _) = from_config(config(name)), CASES[name]
    prefix = f"decoder.layers.{layer}.{'mixer' if kind == 'mamba' else 'self_attention'}."
    layout = megatron.checkpoint(model, layer_keys="per_layer")
    prove(layout)
    norm = "layer_norm_weight"  # of Transformer Engine's fused layers, which are not built here
    ours = {
        key: buffer.shape
        for key, (buffer, _) in layout.arrays(0).items()
        if key.startswith(prefix) and not key.endswith(norm)
    }
    found: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for rank in range(2):
        for entry in json.loads((folder / f"{name} tp{tp}.{rank}.json").read_text())["sharded"]:
            assert tuple(entry["global"]) == ours[entry["key"]]
            found.setdefault(entry["key"], set()).add((tuple(entry["offset"]), tuple(entry["shape"])))
    assert found.keys() == ours.keys()
    mesh = megatron.mesh(tp=tp, etp=1, dp=2 // tp)
    shards = megatron.shards(model, mesh, layer_keys="per_layer", padded_vocab=64)
    for key, boxes in found.items():
        assert boxes == {(shard.offset, shard.shape) for shard in shards[key]}, key


@pytest.mark.parametrize("name", ["delta, apart", "mixer"])
def test_a_cut_through_segments_is_seen(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cut evenly whatever they are, as Megatron's own resharding takes them, are as many, and others."""
    monkeypatch.setattr(Segments, "__call__", lambda _, dim, parts, part: even(dim, parts, part))
    for rank, arrays in stored(name, peer(name, folder), 2).items():
        right = load_file(folder / f"{name} tp2.{rank}.in.safetensors")
        assert {key: array.shape for key, array in arrays.items()} == {k: a.shape for k, a in right.items()}
        wrong = {key for key, array in arrays.items() if not np.array_equal(array, right[key])}
        assert wrong == {"in_proj.weight", "conv1d.weight"} | {key for key in right if key == "conv1d.bias"}


@pytest.mark.parametrize(
    ("family", "changes", "degrees", "message"),
    [
        ("qwen3_next", {"linear_num_key_heads": 2}, {"tp": 4, "etp": 1}, r"heads\(2\) % tp\(4\) = 2"),
        ("nemotron_h", {"n_groups": 2}, {"tp": 4}, r"heads\(2\) % tp\(4\) = 2"),
        ("nemotron_h", {"use_bias": True}, {}, r"use_bias\(True\)"),
        ("nemotron_h", {"use_conv_bias": False}, {}, r"use_conv_bias\(False\)"),
    ],
)
def test_what_megatron_cannot_hold_is_refused(
    family: str, changes: dict[str, Any], degrees: dict[str, int], message: str
) -> None:
    tiny = Path(__file__).parents[1] / "data" / "configs" / "tiny" / f"{family}.json"
    model = from_config(json.loads(tiny.read_text()) | changes)
    with pytest.raises(GeometryError, match=message):
        megatron.layout(model, megatron.mesh(**degrees))


def test_there_are_no_local_delta_nets_and_mixers() -> None:
    for name in ("delta, fused", "mixer"):
        with pytest.raises(GeometryError, match=r"spec\('local'\) != 'te'"):
            megatron.layout(from_config(config(name)), megatron.mesh(tp=1), spec="local")
