"""Conversions against the real peers: safetensors, transformers, megatron-core and torch's own loader.

What a target must hold is said by files that the peers wrote, or built here row by row. Nothing is
compared with what shardweave itself reads back.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_processes import run as run_ranks
from safetensors.torch import load_file, safe_open, save_file

from shardweave.convert import Geometry, Report, convert, prepare
from shardweave.errors import DtypeError, GeometryError
from shardweave.models import from_config

SCRIPT = Path(__file__).with_name("megatron_cpu.py")
DATA = Path(__file__).parents[1] / "data"
Tensors = Mapping[str, torch.Tensor]

# By fixture: tp, pp, ep, and how many ranks it was saved from.
FIXTURES = {
    "mc_gqa_tp1": (1, 1, 1, 1),
    "mc_gqa_tp2pp2": (2, 2, 1, 4),
    "mc_gqa_tp4": (4, 1, 1, 4),
    "mc_moe_tp1": (1, 1, 1, 1),
    "mc_moe_ep2": (1, 1, 2, 2),
    "mc_moe_tp2ep2_etp1": (2, 1, 2, 4),
}


def truth_of(fixture: str) -> Path:
    return DATA / f"mc_{fixture.split('_')[1]}_truth_hf"


def local(**degrees: int) -> Geometry:
    """As the fixtures' models are built: local spec, no padding of the vocabulary."""
    return Geometry(**{"spec": "local", "vocab_divisor": 1, **degrees})  # type: ignore[arg-type]


def run(src: Path, dst: Path, **choices: Any) -> Report:
    return convert(prepare(src, **choices), dst, fsync=False)


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype), key
        words = {2: torch.int16, 4: torch.int32}[value.element_size()]
        assert torch.equal(found[key].view(words), value.view(words)), key


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder as transformers finds them: by the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {}
    for key, name in weight_map.items():
        with safe_open(folder / name, "pt") as file:
            found[key] = file.get_tensor(key)
    return found


def dcp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a torch_dist folder, read by torch into memory that says NaN."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.full(tuple(entry.size), math.nan).to(entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def chunks(folder: Path) -> dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]]:
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        key: {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
        for key, entry in entries.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }


# --- Megatron to Hugging Face ---------------------------------------------------------------------


@pytest.mark.parametrize("fixture", FIXTURES)
def test_a_megatron_checkpoint_exports_the_truth_bit_for_bit(fixture: str, tmp_path: Path) -> None:
    truth = truth_of(fixture)
    report = run(DATA / fixture / "torch_dist", tmp_path / "hf", to="hf", config=truth / "config.json")
    same(hf_tensors(tmp_path / "hf"), load_file(truth / "model.safetensors"))
    size = sum(tensor.nbytes for tensor in load_file(truth / "model.safetensors").values())
    assert report.written_bytes == report.needed_bytes == report.account.used == size
    assert all("_extra_state" in key for key in report.account.left_out)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("fixture", ["mc_gqa_tp4", "mc_moe_tp2ep2_etp1"])
@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 90_000])
def test_transformers_loads_the_export_strictly(fixture: str, max_file_bytes: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    truth = truth_of(fixture)
    config = truth / "config.json"
    folder = tmp_path / "hf"
    run(DATA / fixture / "torch_dist", folder, to="hf", config=config, max_file_bytes=max_file_bytes)
    assert (folder / "model.safetensors").exists() == (max_file_bytes > 1_000_000)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    reference = load_file(truth / "reference_logits.safetensors")
    with torch.no_grad():
        logits = model(reference["input_ids"]).logits
    assert torch.allclose(logits, reference["logits"], rtol=0, atol=2e-6)


def test_small_files_hold_what_fits_and_an_index_of_all(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    source, config = DATA / "mc_gqa_tp4/torch_dist", truth_of("mc_gqa_tp4") / "config.json"
    run(source, folder, to="hf", config=config, max_file_bytes=60_000)
    truth = load_file(truth_of("mc_gqa_tp4") / "model.safetensors")
    same(hf_tensors(folder), truth)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in truth.values())
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
    assert set(index["weight_map"].values()) == set(names) and len(names) > 8
    for name in names:
        sizes = [tensor.nbytes for tensor in load_file(folder / name).values()]
        assert sum(sizes) <= 60_000 or len(sizes) == 1


# --- Hugging Face to Megatron ---------------------------------------------------------------------

# By case: the fixture whose weights it has, the geometry that it is written for, and the one that loads it.
LOADS: dict[str, tuple[str, Geometry, dict[str, Any]]] = {
    "gqa tp4": ("mc_gqa_tp4", local(tp=4), {"tp": 4, "pp": 1, "ep": 1}),
    "gqa pp2": ("mc_gqa_tp1", local(pp=2), {"tp": 1, "pp": 2, "ep": 1}),
    "gqa tp2pp2": ("mc_gqa_tp2pp2", local(tp=2, pp=2), {"tp": 2, "pp": 2, "ep": 1}),
    "gqa tp4 as tp2pp2": ("mc_gqa_tp2pp2", local(tp=4), {"tp": 2, "pp": 2, "ep": 1}),
    "moe tp2ep2": ("mc_moe_tp2ep2_etp1", local(tp=2, ep=2, etp=1), {"tp": 2, "pp": 1, "ep": 2}),
    "moe tp2ep2 as tp1": ("mc_moe_tp1", local(tp=2, ep=2, etp=1), {"tp": 1, "pp": 1, "ep": 1}),
    "gqa per layer": (
        "mc_gqa_tp2pp2",
        local(tp=2, pp=2, layer_keys="per_layer"),  # type: ignore[arg-type]
        {"tp": 2, "pp": 2, "ep": 1, "metadata": {"non_homogeneous_layers": True}},
    ),
    "moe per layer": (
        "mc_moe_tp2ep2_etp1",
        local(tp=2, ep=2, etp=1, layer_keys="per_layer"),  # type: ignore[arg-type]
        {"tp": 2, "pp": 1, "ep": 2, "metadata": {"non_homogeneous_layers": True}},
    ),
    "moe singleton": (
        "mc_moe_tp2ep2_etp1",
        local(tp=2, ep=2, etp=1, layer_keys="singleton"),  # type: ignore[arg-type]
        {"tp": 2, "pp": 1, "ep": 2, "metadata": {"singleton_local_shards": True}},
    ),
    "gqa padded": (
        "mc_gqa_tp4",
        Geometry(tp=4, spec="local", vocab_divisor=128),
        {"tp": 4, "pp": 1, "ep": 1, "vocab": 512},
    ),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case converted from Hugging Face and loaded by megatron-core, in one world of four ranks."""
    out = tmp_path_factory.mktemp("loaded")
    cases = []
    for name, (fixture, geometry, asked) in LOADS.items():
        run(truth_of(fixture), out / name, to="megatron", geometry=geometry)
        cases.append({"name": name, "kind": fixture.split("_")[1], "checkpoint": str(out / name), **asked})
    run_ranks(SCRIPT, cases, out, world_size=4, limit_s=240, preload="megatron.core")
    return out


@pytest.mark.peer("megatron.core")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LOADS)
def test_megatron_loads_what_its_own_checkpoint_gave_it(loaded: Path, name: str) -> None:
    """Strictly: no key of the job is missing, the empty objects included, and none is left over."""
    fixture, _, asked = LOADS[name]
    ranks = FIXTURES[fixture][-1]
    for rank in range(4):
        said = json.loads((loaded / f"{name}.{rank}.json").read_text())
        assert said.get("error") is None and not said["missing"]
        expected = load_file(DATA / fixture / "local" / f"rank{rank % ranks}.safetensors")
        if name == "gqa pp2":
            expected = stage_of_two(expected, said["pp"])
        if "vocab" in asked:
            expected |= padded(DATA / fixture / "local", asked["vocab"], rank)
        same(load_file(loaded / f"{name}.{rank}.safetensors"), expected)


def stage_of_two(whole: Tensors, stage: int) -> dict[str, torch.Tensor]:
    """What a stage holds of a model of four layers, each stage counting its layers from 0."""
    found = {}
    for key, value in whole.items():
        match = re.search(r"layers\.(\d+)\.", key)
        if match is None:
            if stage == (0 if key.startswith("embedding") else 1):
                found[key] = value
        elif int(match[1]) // 2 == stage:
            found[key.replace(match[0], f"layers.{int(match[1]) % 2}.")] = value
    return found


def padded(folder: Path, rows: int, rank: int) -> dict[str, torch.Tensor]:
    """The shard of four of each vocabulary weight, zero rows behind the real ones."""
    found = {}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        whole = torch.cat([load_file(folder / f"rank{r}.safetensors")[key] for r in range(4)])
        full = torch.cat([whole, torch.zeros(rows - len(whole), whole.shape[1])])
        found[key] = full[rank * rows // 4 : (rank + 1) * rows // 4]
    return found


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_chunks_are_those_that_megatron_cuts(fixture: str, tmp_path: Path) -> None:
    tp, pp, ep, _ = FIXTURES[fixture]
    geometry = local(tp=tp, pp=pp, ep=ep, **({"etp": 1} if "moe" in fixture else {}))
    run(truth_of(fixture), tmp_path / "mc", to="megatron", geometry=geometry)
    assert chunks(tmp_path / "mc") == chunks(DATA / fixture / "torch_dist")
    same(dcp_tensors(tmp_path / "mc"), dcp_tensors(DATA / fixture / "torch_dist"))


def test_megatron_to_megatron_of_another_geometry(tmp_path: Path) -> None:
    source, config = DATA / "mc_gqa_tp4/torch_dist", truth_of("mc_gqa_tp4") / "config.json"
    report = run(source, tmp_path / "mc", to="megatron", config=config, geometry=local(tp=2, pp=2))
    assert chunks(tmp_path / "mc") == chunks(DATA / "mc_gqa_tp2pp2/torch_dist")
    same(dcp_tensors(tmp_path / "mc"), dcp_tensors(source))
    assert report.written_bytes == report.needed_bytes


def test_padding_is_zero_and_does_not_leave_megatron(tmp_path: Path) -> None:
    truth = truth_of("mc_gqa_tp4")
    report = run(truth, tmp_path / "mc", to="megatron", geometry=Geometry(tp=2, vocab_divisor=128))
    stored, weights = dcp_tensors(tmp_path / "mc"), load_file(truth / "model.safetensors")
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        assert stored[key].shape == (256, 64)
        assert torch.equal(stored[key][:192], weights[name]) and not stored[key][192:].any()
    assert report.written_bytes - report.needed_bytes == 2 * (256 - 192) * 64 * 4
    back = run(tmp_path / "mc", tmp_path / "hf", to="hf")
    same(hf_tensors(tmp_path / "hf"), weights)
    assert sum(back.account.padding.values()) == 2 * (256 - 192) * 64 * 4


# --- models whose layers differ -------------------------------------------------------------------

UNLIKE: dict[str, dict[str, Any]] = {
    "moe": {
        "model_type": "qwen3_moe", "vocab_size": 56, "hidden_size": 20, "num_hidden_layers": 5,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 28,
        "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
        "mlp_only_layers": [3], "tie_word_embeddings": False,
    },
    "nas": {
        "model_type": "nemotron-nas", "vocab_size": 56, "hidden_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 12, "head_dim": 4, "tie_word_embeddings": False, "hidden_act": "silu",
        "block_configs": [
            {"attention": {"n_heads_in_group": 6}, "ffn": {"intermediate_size": 40}},
            {"attention": {"n_heads_in_group": 3}, "ffn": {"intermediate_size": 32}},
            {"attention": {"n_heads_in_group": 6}, "ffn": {"no_op": True}},
        ],
    },
}  # fmt: skip


def write_hf(
    folder: Path, config: dict[str, Any], dtypes: Mapping[str, torch.dtype] | None = None
) -> dict[str, torch.Tensor]:
    """A folder of random weights, written by safetensors."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for tensor in from_config(config, dtype="float32").tensors:
        for name in tensor.names():
            dtype = next((d for part, d in (dtypes or {}).items() if part in name), torch.float32)
            tensors[name] = torch.randn(tensor.shape, generator=generator).to(dtype)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def by_hand(hf: Tensors, layer: int, kv_heads: int, heads: int, head_dim: int) -> dict[str, torch.Tensor]:
    """One layer in Megatron's words, stacked row by row."""
    prefix, found = f"model.layers.{layer}.", {}
    q, k, v = (hf[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkv")
    rows = []
    for group in range(kv_heads):
        for head in range(heads // kv_heads):
            rows += [q[(group * (heads // kv_heads) + head) * head_dim + i] for i in range(head_dim)]
        rows += [k[group * head_dim + i] for i in range(head_dim)]
        rows += [v[group * head_dim + i] for i in range(head_dim)]
    found["self_attention.linear_qkv.weight"] = torch.stack(rows)
    found["self_attention.linear_proj.weight"] = hf[f"{prefix}self_attn.o_proj.weight"]
    found["self_attention.linear_qkv.layer_norm_weight"] = hf[f"{prefix}input_layernorm.weight"]
    for name in ("q", "k"):
        if f"{prefix}self_attn.{name}_norm.weight" in hf:
            found[f"self_attention.{name}_layernorm.weight"] = hf[f"{prefix}self_attn.{name}_norm.weight"]
    norm = f"{prefix}post_attention_layernorm.weight"
    if f"{prefix}mlp.gate_proj.weight" in hf:
        gate, up = (hf[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up"))
        found["mlp.linear_fc1.weight"] = torch.stack([*gate, *up])
        found["mlp.linear_fc2.weight"] = hf[f"{prefix}mlp.down_proj.weight"]
        found["mlp.linear_fc1.layer_norm_weight"] = hf[norm]
    elif f"{prefix}mlp.gate.weight" in hf:
        experts = [f"{prefix}mlp.experts.{e}." for e in range(len(hf[f"{prefix}mlp.gate.weight"]))]
        found["mlp.router.weight"] = hf[f"{prefix}mlp.gate.weight"]
        found["mlp.experts.experts.linear_fc1.weight"] = torch.stack(
            [torch.stack([*hf[f"{e}gate_proj.weight"], *hf[f"{e}up_proj.weight"]]) for e in experts]
        )
        found["mlp.experts.experts.linear_fc2.weight"] = torch.stack(
            [hf[f"{e}down_proj.weight"] for e in experts]
        )
        found["pre_mlp_layernorm.weight"] = hf[norm]
    return found


@pytest.mark.parametrize("kind", UNLIKE)
def test_unlike_layers_have_keys_of_their_own(kind: str, tmp_path: Path) -> None:
    config = UNLIKE[kind]
    tensors = write_hf(tmp_path / "src", config)
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    geometry = Geometry(tp=2, vocab_divisor=4, **({"ep": 3, "etp": 1} if kind == "moe" else {}))
    run(tmp_path / "src", tmp_path / "mc", to="megatron", geometry=geometry)
    expected = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        kv_heads = 2 if kind == "moe" else len(tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]) // 4
        for path, value in by_hand(tensors, layer, kv_heads, heads, head_dim).items():
            expected[f"decoder.layers.{layer}.{path}"] = value
    same(dcp_tensors(tmp_path / "mc"), expected)
    report = run(tmp_path / "mc", tmp_path / "hf", to="hf")
    same(hf_tensors(tmp_path / "hf"), tensors)
    assert not report.account.padding
    with pytest.raises(GeometryError, match="layers that are stacked in one tensor are all alike"):
        prepare(tmp_path / "src", to="megatron", geometry=Geometry(layer_keys="stacked"))


# --- Hugging Face to Hugging Face -----------------------------------------------------------------


def test_experts_are_stacked_in_order(tmp_path: Path) -> None:
    source = DATA / "hf_qwen3moe_tiny"
    tensors = hf_tensors(source)
    report = run(source, tmp_path / "hf", to="hf", stacked_experts=True)
    expected = {key: value for key, value in tensors.items() if ".experts." not in key}
    for prefix in sorted({key.split(".experts.")[0] for key in tensors if ".experts." in key}):
        number = len({key.split(".")[5] for key in tensors if key.startswith(f"{prefix}.experts.")})
        both, down = [], []
        for e in range(number):
            one = f"{prefix}.experts.{e}."
            both.append(torch.stack([*tensors[f"{one}gate_proj.weight"], *tensors[f"{one}up_proj.weight"]]))
            down.append(tensors[f"{one}down_proj.weight"])
        expected[f"{prefix}.experts.gate_up_proj"] = torch.stack(both)
        expected[f"{prefix}.experts.down_proj"] = torch.stack(down)
    same(hf_tensors(tmp_path / "hf"), expected)
    assert report.written_bytes == sum(tensor.nbytes for tensor in tensors.values())
    run(tmp_path / "hf", tmp_path / "back", to="hf", max_file_bytes=30_000)
    same(hf_tensors(tmp_path / "back"), tensors)


def test_a_tied_head_is_stored_once_however_it_came(tmp_path: Path) -> None:
    source = DATA / "hf_llama_tied_tiny"
    tensors = hf_tensors(source)
    assert "lm_head.weight" not in tensors
    shutil.copytree(source, tmp_path / "both")
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(both, tmp_path / "both/model.safetensors", metadata={"format": "pt"})
    report = run(tmp_path / "both", tmp_path / "hf", to="hf")
    same(hf_tensors(tmp_path / "hf"), tensors)
    assert report.account.replica == tensors["model.embed_tokens.weight"].nbytes


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "megatron"])
@pytest.mark.parametrize(
    ("source", "target"), [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")]
)
def test_values_are_rounded_as_torch_rounds(to: str, source: str, target: str, tmp_path: Path) -> None:
    """Every bit pattern that rounding can meet: ties, denormals, infinities, NaNs."""
    dtype = getattr(torch, source)
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 88,
        "tie_word_embeddings": False,
    }  # fmt: skip
    tensors = write_hf(tmp_path / "src", config, {"": dtype})
    rng = np.random.default_rng(3)
    words = {torch.float32: np.uint32, torch.bfloat16: np.uint16}[dtype]
    for key, value in tensors.items():
        bits = rng.integers(0, np.iinfo(words).max, value.numel(), words, endpoint=True)
        if dtype == torch.float32:
            bits[::3] &= 0xFFFF8000  # exactly between two bfloat16 values, or on one
            bits[1::97] = rng.choice(
                [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 1, 0x80000001], len(bits[1::97])
            )
        signed = bits.view(np.int32 if words is np.uint32 else np.int16)
        tensors[key] = torch.from_numpy(signed.copy()).view(dtype).reshape(value.shape)
    save_file(tensors, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    wanted = {key: value.to(getattr(torch, target)) for key, value in tensors.items()}
    geometry = local(tp=2) if to == "megatron" else None
    run(tmp_path / "src", tmp_path / "dst", to=to, geometry=geometry, dtype=target)
    if to == "megatron":
        run(tmp_path / "dst", tmp_path / "hf", to="hf")
    found = hf_tensors(tmp_path / ("hf" if to == "megatron" else "dst"))
    same(found, wanted)
    assert json.loads((tmp_path / "dst/config.json").read_text())["dtype"] == target


def test_parts_of_one_weight_in_two_dtypes_do_not_lose_values_unasked(tmp_path: Path) -> None:
    config = {**UNLIKE["moe"], "mlp_only_layers": [], "decoder_sparse_step": 1}
    tensors = write_hf(tmp_path / "src", config, {"k_proj": torch.float32, "": torch.bfloat16})
    with pytest.raises(DtypeError, match=r"k_proj.*float32 does not fit in bfloat16"):
        prepare(tmp_path / "src", to="megatron", geometry=local(tp=2))
    run(tmp_path / "src", tmp_path / "mc", to="megatron", geometry=local(tp=2), dtype="bfloat16")
    run(tmp_path / "mc", tmp_path / "hf", to="hf")
    same(hf_tensors(tmp_path / "hf"), {key: value.bfloat16() for key, value in tensors.items()})
