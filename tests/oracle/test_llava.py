"""LLaVA as transformers saves and loads it: its tensors, and conversions that give the bits back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vision_cells import CONFIG, changed, theirs

from shardweave.convert import Geometry, convert, open_checkpoint, prepare
from shardweave.dialects import hf
from shardweave.errors import GeometryError, ModelError, ShardweaveError, UnknownNameError
from shardweave.layout import prove
from shardweave.models import from_config

pytestmark = pytest.mark.peer("transformers")

CASES: dict[str, dict[str, Any]] = {
    "qwen3": changed({}),
    "tied by the whole": changed({"tie_word_embeddings": True}),
    "tied by the language model": changed({}, {}, {"tie_word_embeddings": True}),
    "qwen2": changed({}, {}, {"model_type": "qwen2", "head_dim": ..., "hidden_size": 24}),
    "llama": changed({}, {}, {"model_type": "llama", "head_dim": 6, "attention_bias": True}),
    "two layers": changed({"vision_feature_layer": [-2, 1]}),
    "no biases in the projector": changed({"multimodal_projector_bias": False}),
    "one channel": changed({}, {"num_channels": 1}),
}
CASES["qwen2"]["text_config"].pop("head_dim")


def saved(
    config: dict[str, Any], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """What transformers writes."""
    theirs(config, dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    stored = saved(CASES[name], tmp_path)
    model = from_config(tmp_path)
    ours = {each: tensor.shape for tensor in model.tensors for each in tensor.names()}
    assert ours == {each: tuple(value.shape) for each, value in stored.items()}
    assert {each.dtype for each in model.tensors} == {"bfloat16"}
    assert hf.variant(stored, model) == hf.layout(model)
    prove(hf.layout(model))
    described = from_config(CASES[name], dtype="bfloat16")
    assert described.tensors == model.tensors and described.aliases == model.aliases
    assert bool(model.aliases) == model.tied == name.startswith("tied")


@pytest.mark.parametrize("name", ["qwen3", "tied by the language model"])
def test_conversions_give_the_bits_back(name: str, tmp_path: Path) -> None:
    wanted = saved(CASES[name], tmp_path / "hf")
    folders = [tmp_path / each for each in ("hf", "native", "dcp", "back")]
    for src, dst, form in zip(folders, folders[1:], ("native", "dcp", "hf"), strict=False):
        convert(prepare(src, to=form), dst, fsync=False)
        assert open_checkpoint(dst).model.family == "llava"
    files = list((tmp_path / "back").glob("*.safetensors"))
    found = {key: value for file in files for key, value in load_file(file).items()}
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(found[key].view(torch.int16), value.view(torch.int16)) for key, value in wanted.items()
    )

    from transformers import LlavaForConditionalGeneration

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    model, told = LlavaForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(told.values()), told
    assert all(
        torch.equal(value, model.get_parameter(key))
        for key, value in theirs(CASES[name], torch.bfloat16).named_parameters()
    )


def test_files_of_transformers_4(tmp_path: Path) -> None:
    """The tower lies one module deeper there, with positions that are no weights."""
    wanted = saved(CASES["qwen3"], tmp_path / "new")
    old = {key.replace("vision_tower.", "vision_tower.vision_model."): value for key, value in wanted.items()}
    assert old.keys() != wanted.keys()
    old["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(25)[None]
    (tmp_path / "old").mkdir()
    save_file(old, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "old" / "config.json").write_text((tmp_path / "new" / "config.json").read_text())
    opened = open_checkpoint(tmp_path / "old")
    assert list(opened.left_out) == ["vision_tower.vision_model.embeddings.position_ids"]
    convert(prepare(tmp_path / "old", to="hf"), tmp_path / "back", fsync=False)
    found = load_file(next((tmp_path / "back").glob("*.safetensors")))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    old["vision_tower.post_layernorm.bias"] = old.pop("vision_tower.vision_model.post_layernorm.bias")
    save_file(old, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnknownNameError, match=r"vision_tower\.post_layernorm\.bias"):
        open_checkpoint(tmp_path / "old")


@pytest.mark.parametrize(
    "form", [("megatron", {"geometry": Geometry(tp=1)}), ("megatron", {"geometry": Geometry(tp=2)})], ids=str
)
def test_what_cuts_a_decoder_refuses_a_tower(form: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    saved(CASES["qwen3"], tmp_path / "hf")
    with pytest.raises(GeometryError, match="vision_"):
        prepare(tmp_path / "hf", to=form[0], **form[1])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (changed({"a_gate": 1}), "a_gate=1"),
        (changed({"rope_theta": 1.0}), "rope_theta=1.0"),
        (changed({"use_image_newline_parameter": True}), "use_image_newline_parameter=True"),
        (changed({"architectures": ["LlavaNextForConditionalGeneration"]}), "LlavaNext"),
        (changed({"text_config": ...}), "text_config=None"),
        (changed({"vision_config": ...}), "vision_config=None"),
        (changed({"dtype": ...}), "dtype=None"),
        (changed({"multimodal_projector_bias": "yes"}), "multimodal_projector_bias='yes'"),
        (changed({"tie_word_embeddings": "yes"}), "tie_word_embeddings='yes'"),
        (changed({}, {}, {"a_gate": 1}), "a_gate=1"),
        (changed({}, {}, {"model_type": "nothing"}), "model_type='nothing'"),
        (changed({}, {}, {"hidden_size": None}), "hidden_size=None"),
        (changed({}, {"a_gate": 1}), "vision_config: a_gate=1"),
        (changed({}, {"rms_norm_eps": 1e-6}), "vision_config: rms_norm_eps"),
        (changed({}, {"model_type": "clip_vision_model"}), "model_type='clip_vision_model'"),
        (changed({}, {"vision_use_head": True}), "vision_use_head(True)"),
        (changed({}, {"num_attention_heads": 7}), "hidden_size(24) % num_attention_heads(7) = 3"),
        (changed({}, {"patch_size": 23}), "image_size(22) < patch_size(23)"),
        (changed({}, {"patch_size": [4, 4]}), "patch_size=[4, 4]"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        from_config(config)
    assert said in str(caught.value)


def test_a_head_that_nobody_mentions_is_refused() -> None:
    """A missing key means that there is one."""
    tower = {key: value for key, value in CONFIG["vision_config"].items() if key != "vision_use_head"}
    with pytest.raises(ModelError, match="not given, which means True"):
        from_config({**CONFIG, "vision_config": tower})


def test_a_refusal_names_the_part() -> None:
    with pytest.raises(ShardweaveError, match="text_config"):
        from_config(changed({}, {}, {"model_type": "nothing"}))
