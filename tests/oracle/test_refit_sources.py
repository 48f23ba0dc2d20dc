"""Sources read off real trainers: megatron-core and ``fully_shard`` on processes, transformers in this one.

What the ranks say is put together and compared, bit for bit, with what the framework's own loader or writer
knows the weights to be. Wrong descriptions of the same models are refused by name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run
from safetensors.numpy import load_file

from shardweave.dialects import hf
from shardweave.errors import ReplicaError, UnknownNameError
from shardweave.layout import parse_layout, prove
from shardweave.models import from_config
from shardweave.plan import empty, plan, simulate
from shardweave.refit.sources import from_module

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).with_name("source_ranks.py")
DATA = Path(__file__).parents[1] / "data"
WORLD_SIZE = 4

MEGATRON: dict[str, dict[str, Any]] = {
    "gqa-tp4": {"kind": "gqa", "tp": 4},
    "gqa-tp2pp2": {"kind": "gqa", "tp": 2, "pp": 2},
    "gqa-tp2pp2vpp2": {"kind": "gqa", "tp": 2, "pp": 2, "vpp": 2},
    "gqa-tp2pp2-uneven": {
        "kind": "gqa", "tp": 2, "pp": 2,
        "config": {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3},
    },
    "gqa-tp2pp2-tied": {"kind": "gqa", "tp": 2, "pp": 2, "tied": True},
    "moe-tp2ep2": {"kind": "moe", "tp": 2, "ep": 2, "etp": 1},
}  # fmt: skip
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32",
    "vocab_size": 72, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "intermediate_size": 44, "moe_intermediate_size": 14, "n_routed_experts": 10,
    "n_shared_experts": 3, "num_experts_per_tok": 4, "n_group": 5, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "q_lora_rank": 22, "kv_lora_rank": 18,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_nextn_predict_layers": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 32, "attention_bias": False,
}  # fmt: skip
FSDP2: dict[str, dict[str, Any]] = {
    "moe-dp4": {"family": "qwen3_moe", "mesh": {"dp": 4}, "config": {}},
    "moe-hsdp": {"family": "qwen3_moe", "mesh": {"replicate": 2, "shard": 2}, "config": {}},
    "tied-dp4": {"family": "qwen3", "mesh": {"dp": 4}, "config": {"tie_word_embeddings": True}},
    "dense-dp2tp2": {"family": "qwen3", "mesh": {"dp": 2, "tp": 2}, "config": {}},
}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    run(
        SCRIPT,
        [
            {
                "name": name,
                "trainer": "megatron",
                "checkpoint": str(DATA / f"mc_{case['kind']}_tp1" / "torch_dist"),
                "hf": str(DATA / f"mc_{case['kind']}_truth_hf" / "config.json"),
                **case,
            }
            for name, case in MEGATRON.items()
        ]
        + [{"name": "latent", "trainer": "latent", "config": LATENT, "tp": 2, "pp": 2}],
        folder,
        world_size=WORLD_SIZE,
        limit_s=200,
        preload="megatron.core",
    )
    return folder


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2")
    run(
        SCRIPT,
        [
            {
                "name": name,
                "trainer": "fsdp2",
                "hf": str(DATA / "configs" / "tiny" / f"{case['family']}.json"),
                "truth": str(folder / name),
                **case,
            }
            for name, case in FSDP2.items()
        ],
        folder,
        world_size=WORLD_SIZE,
        limit_s=200,
    )
    return folder


def reports(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def check(folder: Path, name: str, config: dict[str, Any], truth: dict[str, np.ndarray]) -> None:
    """The ranks state one layout, and what they hold is the truth, all of it."""
    layouts = {report["layout"] for report in reports(folder, name)}
    assert len(layouts) == 1
    layout = parse_layout(layouts.pop())
    prove(layout)
    assert all(report["live"] for report in reports(folder, name))
    state = {}
    for rank in layout.mesh.ranks:
        with np.load(folder / f"{name}.{rank}.npz") as stored:
            state[rank] = dict(stored)
    one = hf.layout(from_config(config, dtype="float32"))
    found = simulate(plan(layout, one), state, into=empty(one, np.float32, fill=np.nan))[0]
    assert found.keys() == truth.keys()
    for key, array in truth.items():
        assert found[key].tobytes() == array.tobytes(), key


def refused(folder: Path, name: str, what: str) -> list[str]:
    """What each rank says to a wrong description."""
    return [report["said"][what] for report in reports(folder, name)]


@pytest.mark.peer("megatron.core")
@pytest.mark.dist
@pytest.mark.parametrize("name", MEGATRON)
def test_a_megatron_rank_owns_what_its_loader_gave_it(megatron: Path, name: str) -> None:
    case = MEGATRON[name]
    truth = load_file(DATA / f"mc_{case['kind']}_truth_hf" / "model.safetensors")
    config = json.loads((DATA / f"mc_{case['kind']}_truth_hf" / "config.json").read_text())
    if case.get("tied"):
        truth.pop("lm_head.weight")
        config["tie_word_embeddings"] = True
    check(megatron, name, config, truth)


WRONG = {
    "half of the heads": r"ModelError: .*num_attention_heads\(\d\) != 2 of the qwen3",
    "local kv heads": r"ModelError: .*num_query_groups\(2\) != 1 of the qwen3",
    "another head dim": r"ModelError: .*kv_channels\(\d+\) != 4 of the qwen3",
    "another ffn": r"ModelError: .*ffn_hidden_size\(\d+\) != 36 of the qwen3",
    "another dtype": r"DtypeError: .*dtype\(float32\) != dtype\(bfloat16\)",
    "fewer layers": r"ModelError: .*num_layers\(4\) != 3 of the qwen3",
    "another vocabulary": r"ModelError: .*vocab_size\(1000\)",
    "another rank": r"GeometryError: .*process group 'tp': rank\(\d\) of size\(\d\) != coordinate\(\d\)",
    "no groups": r"GeometryError: .*process group 'tp': group\(NoneType\)",
    "not a spec": r"UnknownNameError: .*missing .*layer_norm_weight.*; unexpected .*input_layernorm.weight",
    "a persistent buffer": r"UnknownNameError: .*missing 0; unexpected 1 \(.*layers.0.mlp.expert_bias\)",
    "a missing norm": r"UnknownNameError: .*missing 1 \(.*layers.0.input_layernorm.weight\); unexpected 0",
    "a missing chunk": r"GeometryError: .*chunks\(1\) != virtual_pipeline_model_parallel_size\(2\)",
    "chunks in another order": r"GeometryError: .*chunk 0: layers\(\d\) != layers\(\d\)",
}


@pytest.mark.peer("megatron.core")
@pytest.mark.dist
@pytest.mark.parametrize("name", MEGATRON)
def test_a_megatron_model_described_wrongly_is_refused_by_name(megatron: Path, name: str) -> None:
    for report in reports(megatron, name):
        said = report["said"]
        assert said.pop("a wrapped model") == "accepted"
        assert said.pop("a buffer that is not") == "accepted"
        degrees = said.pop("other degrees")
        square = MEGATRON[name].get("pp") == MEGATRON[name]["tp"] and "ep" not in MEGATRON[name]
        assert square == (degrees == "accepted"), degrees
        for what, text in said.items():
            assert re.match(WRONG[what], text), f"{what}: {text}"


@pytest.mark.peer("megatron.core")
@pytest.mark.dist
def test_a_model_with_latent_attention_is_read_with_its_buffers(megatron: Path) -> None:
    """What its parameters hold is asked in test_megatron_mla; here, that all of them are found."""
    found = reports(megatron, "latent")
    assert len({report["layout"] for report in found}) == 1 and all(report["live"] for report in found)
    names: set[str] = set()
    for rank in range(WORLD_SIZE):
        with np.load(megatron / f"latent.{rank}.npz") as stored:
            names.update(stored)
    assert any(name.endswith("mlp.router.expert_bias") for name in names)
    assert any("mtp.layers.1" in name for name in names)
    for rank, report in enumerate(found):
        said = report["said"]
        # The layers for further tokens are on the last stage; its names say what the first stage cannot know.
        open_ = said["no name of the layer within"]
        assert open_ == "accepted" if rank >= 2 else "2 of 8 forms" in open_
        assert "q_lora_rank(22) != 26 of the deepseek_v3 config" in said["another rank of q"]
        assert "mtp_num_layers(2) != 0" in said["no layers for further tokens"]
        assert "moe_shared_expert_intermediate_size(42) != 28" in said["another shared expert"]


@pytest.mark.peer("transformers")
@pytest.mark.dist
@pytest.mark.parametrize("name", FSDP2)
def test_an_fsdp2_rank_owns_its_part_of_what_transformers_saved(fsdp2: Path, name: str) -> None:
    case = FSDP2[name]
    config = json.loads((DATA / "configs" / "tiny" / f"{case['family']}.json").read_text()) | case["config"]
    check(fsdp2, name, config, load_file(fsdp2 / name / "model.safetensors"))


@pytest.mark.peer("transformers")
@pytest.mark.dist
@pytest.mark.parametrize("name", FSDP2)
def test_a_sharded_module_described_wrongly_is_refused_by_name(fsdp2: Path, name: str) -> None:
    for report in reports(fsdp2, name):
        said = report["said"]
        assert "GeometryError: under fully_shard every parameter is a DTensor" in said["whole parameters"]
        assert "layers.0." in said["whole parameters"]
        assert "GeometryError: " in said["another vocabulary"] and "(54, 30)" in said["another vocabulary"]
        assert said["fewer layers"].startswith("UnknownNameError: ")
        assert said["another mesh"].startswith("MeshError: ")
        assert "dtype(float32) != dtype(bfloat16)" in said["another dtype"]


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_is_what_transformers_saves(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads((DATA / "configs" / "tiny" / f"{family}.json").read_text())
    values |= {"tie_word_embeddings": tied}
    rest = {key: value for key, value in values.items() if key != "model_type"}
    torch.manual_seed(5)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **rest))
    module.save_pretrained(tmp_path)
    model = from_config(values)
    source = from_module(torch.compile(module), model=model, rank=3)
    assert source.rank == 3 and list(source.layout.mesh.ranks) == [3]
    state = {3: {name: array.numpy() for name, array in source.arrays.items()}}
    one = hf.layout(model)
    found = simulate(plan(source.layout, one), state, into=empty(one, np.float32, fill=np.nan))[0]
    truth = load_file(tmp_path / "model.safetensors")
    assert found.keys() == truth.keys()
    assert all(found[name].tobytes() == array.tobytes() for name, array in truth.items())

    # An optimizer may move a parameter to other memory.
    first = next(iter(source.arrays))
    module.get_parameter(first).data = torch.full_like(module.get_parameter(first), 3.0)
    assert float(source.arrays[first].sum()) == 3.0 * source.arrays[first].numel()
    if tied:
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone())
        with pytest.raises(ReplicaError, match="tied weights are one tensor"):
            from_module(module, model=model)
    module.register_parameter("bias", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises((UnknownNameError, ReplicaError), match=r"bias|tied"):
        from_module(module, model=model)
