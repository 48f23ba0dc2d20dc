"""``shardweave diff``: equal across formats, and the first difference named by its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_driver import Run
from safetensors.numpy import load_file, save_file

from shardweave.convert.diff import value_of

Checkpoint = Callable[[str], tuple[Path, Path]]


@pytest.mark.parametrize(
    ("left", "right"),
    [("mc_gqa_tp1", "mc_gqa_tp4"), ("mc_gqa_tp2pp2", "mc_gqa_tp1"), ("mc_moe_ep2", "mc_moe_tp2ep2_etp1")],
)
def test_equal_whatever_ranks_wrote_them(sw: Run, checkpoint: Checkpoint, left: str, right: str) -> None:
    (a, config), (b, _) = checkpoint(left), checkpoint(right)
    done = sw("diff", a, b, "--config", config)
    assert (done.code, done.err) == (0, "")
    assert "The two hold the same." in done.out


@pytest.fixture
def truth(copy_of) -> tuple[Path, dict[str, np.ndarray]]:
    folder = copy_of("mc_gqa_truth_hf")
    (folder / "reference_logits.safetensors").unlink()
    return folder, load_file(folder / "model.safetensors")


def test_differences(sw: Run, checkpoint: Checkpoint, truth, golden, tmp_path: Path, data_dir: Path) -> None:
    src, config = checkpoint("mc_gqa_tp2pp2")
    folder, tensors = truth
    tensors["model.layers.2.self_attn.k_proj.weight"][5, 11] = np.nan
    tensors["model.layers.2.self_attn.k_proj.weight"][9, 0] = 4
    zero = tensors["model.layers.3.mlp.up_proj.weight"]
    zero[95, 63] = -0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = sw("diff", src, folder, "--config-a", config)
    assert done.code == 1
    golden("diff", done.out, tmp=tmp_path, data=data_dir)
    said = json.loads(sw("diff", src, folder, "--config", config, "--json").out)
    first, second = said["differences"]
    assert (first["tensor"], first["elements"]) == ("model.layers.2.self_attn.k_proj.weight", 2)
    assert first["index"] == [5, 11]
    assert first["a"]["key"] == "decoder.layers.self_attention.linear_qkv.weight"
    assert first["b"] == {"key": first["tensor"], "word": "0x7fc00000", "value": "nan"}
    assert (second["index"], second["b"]["word"], second["b"]["value"]) == ([95, 63], "0x80000000", -0.0)
    stored = load_file(data_dir / "mc_gqa_truth_hf" / "model.safetensors")[first["tensor"]][5, 11]
    assert first["a"]["value"] == float(stored)


def test_members_of_stacked_arrays_are_told_apart(
    sw: Run, checkpoint: Checkpoint, truth, tmp_path: Path
) -> None:
    """Both sides have all layers in one array; a layer that differs is named, and no other."""
    src, config = checkpoint("mc_gqa_tp4")
    folder, tensors = truth
    for layer in (1, 3):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][2, 3] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert sw("convert", folder, tmp_path / "b", "--to", "megatron", "--tp", "2").code == 0
    said = json.loads(sw("diff", src, tmp_path / "b", "--config-a", config, "--json").out)
    assert [(one["tensor"], one["elements"], one["index"]) for one in said["differences"]] == [
        (f"model.layers.{layer}.mlp.down_proj.weight", 1, [2, 3]) for layer in (1, 3)
    ]


def test_dtypes(sw: Run, checkpoint: Checkpoint, tmp_path: Path) -> None:
    src, config = checkpoint("mc_gqa_tp1")
    narrow = ("--to", "hf", "--config", config, "--dtype", "bfloat16")
    assert sw("convert", src, tmp_path / "b", *narrow).code == 0
    done = sw("diff", src, tmp_path / "b", "--config-a", config)
    assert done.code == 1
    assert "lm_head.weight" in done.out
    assert done.out.count("float32 in a, bfloat16 in b; values not compared") == 14
    said = json.loads(sw("diff", src, tmp_path / "b", "--config-a", config, "--json").out)
    assert len(said["dtypes"]) == 14
    assert said["differences"] == []


def test_other_tensors(sw: Run, data_dir: Path, truth) -> None:
    """One layer fewer: what is missing is named, what both have is compared."""
    folder, tensors = truth
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": config["layer_types"][:3]}
    (folder / "config.json").write_text(json.dumps(config))
    kept = {key: value for key, value in tensors.items() if ".layers.3." not in key}
    kept["model.norm.weight"] = kept["model.norm.weight"] + 1
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    whole = data_dir / "mc_gqa_truth_hf" / "model.safetensors"
    said = json.loads(sw("diff", whole, folder, "--json").out)
    assert len(said["missing"]) == 11
    assert all(".layers.3." in name for name in said["missing"])
    assert said["extra"] == []
    assert [one["tensor"] for one in said["differences"]] == ["model.norm.weight"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "int16", "uint8", "bool"])
def test_numbers_of_words(dtype: str) -> None:
    """Against torch, which decodes its own dtypes."""
    import torch

    value = torch.tensor([1.25 if "float" in dtype else 1], dtype=getattr(torch, dtype))
    size = value.element_size()
    word = int.from_bytes(bytes(value.view(torch.uint8).tolist()), "little")
    assert value_of(f"0x{word:0{2 * size}x}", dtype) == value.item()


@pytest.mark.parametrize(("word", "value"), [("0x38", 1.0), ("0xb8", -1.0), ("0x7f", float("nan"))])
def test_numbers_of_eight_bits(word: str, value: float) -> None:
    np.testing.assert_equal(value_of(word, "float8_e4m3fn"), value)
