"""Latent attention and layers for further tokens in megatron-core: what it holds, stores, reads and predicts.

Weights go from Hugging Face through a conversion into real models on CPU, at several geometries, and back
from checkpoints that Megatron wrote itself. Compared are bits, names and boxes; and at last the logits with
those of transformers, so that every row is seen to mean in Megatron what it means there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_processes import run
from safetensors.numpy import load_file, save_file

from shardweave.convert import Geometry, convert, prepare
from shardweave.dialects import hf, megatron
from shardweave.dialects.megatron.parameters import parameters
from shardweave.layout import Box, intersect, prove
from shardweave.models import Model, from_config
from shardweave.plan import empty, plan, simulate

pytestmark = [pytest.mark.peer("megatron.core"), pytest.mark.timeout(420)]

SCRIPT = Path(__file__).with_name("megatron_mla_cpu.py")

# No two sizes that meet in one tensor are equal; rows are even because Megatron cuts them evenly.
COMMON: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32",
    "vocab_size": 72, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "intermediate_size": 44, "moe_intermediate_size": 14, "n_routed_experts": 10,
    "n_shared_experts": 3, "num_experts_per_tok": 4, "n_group": 5, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "q_lora_rank": 22, "kv_lora_rank": 18,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_nextn_predict_layers": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 32, "attention_bias": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "further": COMMON,
    "plain": COMMON | {"q_lora_rank": None, "num_nextn_predict_layers": 0},
    "sparse": COMMON | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 1},
}
GEOMETRIES: dict[str, tuple[str, dict[str, int]]] = {
    "further tp1": ("further", {}),
    "further tp2pp2": ("further", {"tp": 2, "pp": 2}),
    "further tp2ep2": ("further", {"tp": 2, "ep": 2}),
    "plain tp2": ("plain", {"tp": 2}),
    "plain pp2ep2": ("plain", {"pp": 2, "ep": 2}),
    "sparse pp2": ("sparse", {"pp": 2}),
}
TOKENS = [5, 71, 3, 40, 40, 12, 66, 0, 9, 31, 58]


def weights_of(model: Model) -> dict[str, np.ndarray]:
    """Random weights near 1 / sqrt(width), norms near 1, so that a forward pass is no noise."""
    rng = np.random.default_rng(17)
    found = {}
    for tensor in model.tensors:
        for name in tensor.names():
            value = rng.standard_normal(tensor.shape) / np.sqrt(tensor.shape[-1])
            found[name] = (value + name.endswith("norm.weight")).astype(np.float32)
    return found | {name: found[of] for name, of in model.copies.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, conversions, and what a world of four ranks made of them; importing Megatron costs most."""
    at = tmp_path_factory.mktemp("mla")
    for kind, config in CONFIGS.items():
        source = at / f"{kind} hf"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        save_file(weights_of(from_config(config)), source / "model.safetensors", metadata={"format": "pt"})
        geometry = Geometry(tp=2, ep=2, etp=1, spec="local", vocab_divisor=1)
        convert(prepare(source, to="megatron", geometry=geometry), at / f"{kind} mc", fsync=False)
    cases: list[dict[str, Any]] = [
        {"name": name, "config": CONFIGS[kind], "checkpoint": str(at / f"{kind} mc"), **degrees}
        for name, (kind, degrees) in GEOMETRIES.items()
    ]
    for case in cases:
        if case["name"] in ("further tp2pp2", "plain tp2", "sparse pp2"):
            case["save"] = str(at / f"{case['name']} saved")
        if case["name"] in ("further tp1", "plain tp2"):
            case["tokens"] = TOKENS
    run(SCRIPT, cases, at, world_size=4, limit_s=360, preload="megatron.core")
    return at


def live(name: str) -> tuple[Model, Any, Any]:
    kind, degrees = GEOMETRIES[name]
    model = from_config(CONFIGS[kind])
    inner = degrees.get("tp", 1) * degrees.get("pp", 1)
    mesh = megatron.mesh(**{"etp": 1, "dp": 4 // inner, **degrees})
    return model, mesh, megatron.layout(model, mesh, spec="local", experts="sequential", vocab_divisor=1)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_rank_holds_what_the_layout_says(folder: Path, name: str) -> None:
    """Names, shapes and bits, of parameters and of the correction bias, which is a buffer."""
    model, mesh, layout = live(name)
    prove(layout)
    source = weights_of(model)
    result = simulate(
        plan(hf.layout(model), layout), {0: source}, into=empty(layout, np.float32, fill=np.nan)
    )
    for rank in mesh.ranks:
        said = json.loads((folder / f"{name}.{rank}.json").read_text())
        coordinate = mesh.coordinate(rank)
        assert {axis: said[axis] for axis in ("tp", "pp", "ep")} == {
            axis: coordinate[axis] for axis in ("tp", "pp", "ep")
        }
        assert not said["missing"]
        real = load_file(folder / f"{name}.{rank}.safetensors")
        assert sorted(real) == sorted(result[rank])
        for key, value in real.items():
            assert value.tobytes() == result[rank][key].tobytes(), (rank, key)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_shards_are_megatrons(folder: Path, name: str) -> None:
    """The boxes that ranks would write, gate and up apart, are the boxes of Megatron's own account."""
    model, mesh, _ = live(name)
    layer_keys = "stacked" if megatron.layers_alike(model) else "per_layer"
    ours = {
        (key, Box.of(shard.offset, shard.shape))
        for key, shards in megatron.shards(model, mesh, spec="local", layer_keys=layer_keys).items()
        for shard in shards
    }
    theirs = {
        (record["key"], Box.of(record["offset"], record["shape"]))
        for rank in mesh.ranks
        for record in json.loads((folder / f"{name}.{rank}.json").read_text())["sharded"]
    }
    assert {key for key, _ in ours} == {key for key, _ in theirs}
    for key, box in theirs - ours:
        assert "linear_fc1.weight" in key
        assert any(key == other and intersect(box, shard) == box for other, shard in ours), (key, str(box))
    assert sum(box.numel for _, box in ours) == sum(box.numel for _, box in theirs)


@pytest.mark.parametrize("name", ["further tp2pp2", "plain tp2", "sparse pp2"])
def test_what_megatron_saved_comes_back_bit_by_bit(folder: Path, name: str, tmp_path: Path) -> None:
    kind, _ = GEOMETRIES[name]
    config = folder / f"{kind} hf/config.json"
    for source in (folder / f"{name} saved", folder / f"{kind} mc"):
        target = tmp_path / source.name
        report = convert(prepare(source, to="hf", config=config), target, fsync=False)
        assert report.written_bytes == report.needed_bytes
        found, expected = (
            load_file(target / "model.safetensors"),
            load_file(config.parent / "model.safetensors"),
        )
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].tobytes() == value.tobytes(), key


def predicted(folder: Path, name: str) -> np.ndarray:
    """Megatron's logits: of the layers for further tokens, in order, then its own."""
    tp = GEOMETRIES[name][1].get("tp", 1)
    parts = [json.loads((folder / f"{name}.{rank}.json").read_text())["logits"] for rank in range(tp)]
    return np.concatenate([np.array(part) for part in parts], axis=-1)


def loaded(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # The other ways to run experts want rows of 16 bytes.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("name", ["further tp1", "plain tp2"])
def test_a_row_means_in_megatron_what_it_means_in_transformers(folder: Path, name: str) -> None:
    """The same weights predict the same logits: no head, half of a rotation or expert is another one."""
    import torch

    model = loaded(folder / f"{GEOMETRIES[name][0]} hf")
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(predicted(folder, name)[-1], expected, rtol=0, atol=2e-5)


@pytest.mark.peer("transformers")
def test_layers_for_further_tokens_predict_what_they_do_in_transformers(folder: Path) -> None:
    """Loaded by its own reader of them, which knows their names and which half of eh_proj comes first."""
    import torch
    from transformers.modeling_layers import MtpModel

    main = loaded(folder / "further hf")
    # Its pattern of their names has DeepSeek-V3's number of layers in it.
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[45]\."]
    further = MtpModel.from_pretrained(main)
    found, tokens = [], torch.tensor([TOKENS])
    with torch.no_grad():
        hidden = main.model(tokens).last_hidden_state
        positions = torch.arange(len(TOKENS))[None]
        rotation = further.rotary_emb(hidden, position_ids=positions)
        for layer in further.layers:
            # Each looks one token further on; Megatron fills the end with token 0.
            tokens = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
            hidden = layer(further.embed_tokens(tokens), hidden, rotation, None, positions, None)
            found.append(further.shared_head(hidden)[0].numpy())
    np.testing.assert_allclose(predicted(folder, "further tp1")[:-1], np.stack(found), rtol=0, atol=2e-5)


def test_a_wrong_rule_is_seen(folder: Path) -> None:
    """A way down that is held whole, as Transformer Engine does, is not what the local spec holds."""
    model, mesh, _ = live("further tp2ep2")
    wrong = megatron.layout(
        model, mesh, spec="local", experts="sequential", vocab_divisor=1, down_proj="replicated"
    )
    real = load_file(folder / "further tp2ep2.0.safetensors")
    shapes: Mapping[str, tuple[int, ...]] = {name: b.shape for name, (b, _) in wrong.arrays(0).items()}
    differ = {
        name.rpartition(".self_attention.")[2] for name, value in real.items() if shapes[name] != value.shape
    }
    assert differ == {"linear_q_down_proj.weight", "linear_kv_down_proj.weight"}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_parameters_are_in_the_order_of_real_modules(folder: Path, name: str) -> None:
    """The order that flat buckets of an optimizer follow; a router's bias is a buffer and not in them."""
    kind, degrees = GEOMETRIES[name]
    mesh = megatron.mesh(**degrees, etp=1, dp=4 // degrees.get("tp", 1) // degrees.get("pp", 1))
    form = {"spec": "local", "experts": "sequential", "layer_keys": "per_layer"}
    model = from_config(CONFIGS[kind])
    for rank in range(4):
        said = json.loads((folder / f"{name}.{rank}.json").read_text())["parameters"]
        (found,) = parameters(model, mesh, rank, **form)
        assert [[one.name, list(one.shape), one.shared] for one in found] == said
