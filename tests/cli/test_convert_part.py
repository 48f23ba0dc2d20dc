"""``--only``: a part of a model, which says so, with the states that it has."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_driver import Run
from safetensors.numpy import load_file

from shardweave.convert import open_checkpoint, states
from shardweave.convert.part import FILE
from shardweave.store.read import Reader

MOE = "hf_qwen3moe_tiny"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "intermediate_size": 40, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
"""Of what Megatron trained in mc_opt_*."""


def arrays(folder: Path) -> dict[str, np.ndarray]:
    source = open_checkpoint(folder)
    state = states(source)
    keys = [*source.layout.stored(), *(state.layout.stored() if state is not None else ())]
    with Reader(source.manifest) as reader:
        return {key: reader.load(key).copy() for key in keys}


@pytest.mark.parametrize("to", ["hf", "native", "dcp", "universal"])
@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.1.*"],
        ["*.experts.{0,2}.*"],
        ["*norm*", "lm_head*"],
        ["model.layers.[0-1].self_attn.?_proj*"],
    ],
)
def test_what_matches_and_nothing_else(
    sw: Run, data_dir: Path, tmp_path: Path, to: str, patterns: list[str]
) -> None:
    whole = {
        key: value
        for file in (data_dir / MOE).glob("model*.safetensors")
        for key, value in load_file(file).items()
    }
    plain = [p.replace("{0,2}", one) for p in patterns for one in ("[02]",)]
    wanted = {key for key in whole if any(fnmatch.fnmatchcase(key, p) for p in plain)}
    assert 0 < len(wanted) < len(whole)
    flags = [word for pattern in patterns for word in ("--only", pattern)]
    done = sw("convert", data_dir / MOE, tmp_path / "out", "--to", to, *flags)
    assert (done.code, done.err) == (0, "")
    assert f"part    {len(wanted)} tensors: {', '.join(patterns)}" in done.out
    assert "not asked for" in done.out
    # Through the file formats and back, as one file under the names of Hugging Face.
    assert sw("convert", tmp_path / "out", tmp_path / "back", "--to", "hf").code == 0
    found = {k: v for file in (tmp_path / "back").glob("*.safetensors") for k, v in load_file(file).items()}
    assert found.keys() == wanted
    for key, values in found.items():
        assert values.tobytes() == whole[key].tobytes(), key


def test_a_part_says_that_it_is_one(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert sw("convert", data_dir / MOE, out, "--to", "hf", "--only", "model.layers.1.*").code == 0
    assert not (out / "config.json").exists()
    said = json.loads((out / FILE).read_text())
    assert said["only"] == [["model.layers.1.*"]]
    assert said["config"]["model_type"] == "qwen3_moe"
    checked = sw("check", out)
    assert checked.code == 0 and "a part:" in checked.out
    # It is proved to be that part: with a tensor less it is none.
    files = {file: load_file(file) for file in out.glob("*.safetensors")}
    ((file, tensors),) = files.items()
    del tensors["model.layers.1.mlp.gate.weight"]
    from safetensors.numpy import save_file

    save_file(tensors, file)
    (out / "shardweave.digests.json").unlink()
    again = sw("check", out)
    assert again.code == 1 and "missing 1 (model.layers.1.mlp.gate.weight)" in again.err
    # As tensors that nobody describes they are what they are.
    assert sw("check", out, "--config", "none").code == 0
    (out / FILE).write_text('{"only": [], "config": 3}')
    assert "says which part it is" in sw("check", out).err


def test_a_part_of_a_part_and_a_comparison_with_the_whole(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert sw("convert", data_dir / MOE, first, "--to", "native", "--only", "model.layers.*").code == 0
    done = sw("convert", first, second, "--to", "dcp", "--only", "*.self_attn.*", "--json")
    assert json.loads(done.out)["part"]["only"] == [["model.layers.*"], ["*.self_attn.*"]]
    said = json.loads(sw("diff", second, data_dir / MOE, "--json").out)
    names = {k for file in (data_dir / MOE).glob("model*.safetensors") for k in load_file(file)}
    attention = {name for name in names if ".self_attn." in name}
    assert said["compared"]["tensors"] == len(attention) and not said["differences"] and not said["missing"]
    assert set(said["extra"]) == names - attention


def test_states_go_with_their_weights(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    """Out of fused rows of a Megatron checkpoint; its counts and settings of the rest are dropped."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    source = data_dir / "mc_opt_tp2dp2_fully_reshardable/torch_dist"
    assert sw("convert", source, tmp_path / "whole", "--to", "native", "--config", config).code == 0
    only = ("--only", "model.layers.1.self_attn.{q,v}_proj.weight", "--only", "model.norm.weight")
    done = sw("convert", source, tmp_path / "part", "--to", "native", "--config", config, *only)
    assert done.code == 0 and "of 3 weights" in done.out
    whole, part = arrays(tmp_path / "whole"), arrays(tmp_path / "part")
    names = (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.norm.weight",
    )
    assert {key for key in part if not key.startswith("optim/")} == set(names)
    assert part.keys() == {key for key in whole if any(name in key for name in names)}
    for key, values in part.items():
        assert values.tobytes() == whole[key].tobytes(), key
    state = states(open_checkpoint(tmp_path / "part"))
    assert state is not None and set(state.settings) == set(state.counts) == set(names)
    before = states(open_checkpoint(tmp_path / "whole"))
    assert before is not None and all(state.settings[name] == before.settings[name] for name in names)
    # On to torch, which asks for the groups of what is there.
    assert sw("convert", tmp_path / "part", tmp_path / "dcp", "--to", "dcp").code == 0
    assert sw("diff", tmp_path / "dcp", tmp_path / "part").code == 0


def test_a_part_of_a_model_that_nobody_describes(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    source, only = data_dir / "ds_zero2" / "step2", ("--only", "blocks.1.up.*")
    assert sw("convert", source, tmp_path / "part", "--to", "universal", "--config", "none", *only).code == 0
    folders = {path.name for path in (tmp_path / "part").rglob("zero/*") if path.is_dir()}
    assert folders == {"blocks.1.up.weight", "blocks.1.up.bias"}
    # What it is a part of is nobody's model, so that no config has to be said again.
    said = json.loads(sw("check", tmp_path / "part", "--json").out)
    assert said["whole"] and "a part: blocks.1.up.*" in json.dumps(said["steps"])
    (path,) = (tmp_path / "part").rglob("blocks.1.up.weight/exp_avg.pt")
    from safetensors.torch import load_file as load

    truth = load(data_dir / "ds_zero2" / "truth.safetensors")["exp_avg.blocks.1.up.weight"]
    assert torch.equal(torch.load(path, weights_only=False)["param"], truth)


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (("hf", "--only", "model.layer.1.*"), 1, "near are model.layers.*"),
        (("hf", "--only", "*norm*", "--only", "nothing"), 1, "pattern 'nothing': 0 of"),
        (("megatron", "--only", "*norm*"), 2, "write one of hf, universal, dcp, native"),
        (("deepspeed", "--only", "*norm*"), 2, "to=deepspeed, and only(*norm*)"),
        (("ranks", "--only", "*norm*"), 2, "to=ranks, and only(*norm*)"),
        (("hf", "--only", "*.experts.0.*", "--stacked-experts"), 2, "choose all experts of a layer"),
        (("hf", "--only", "{0..9}{0..9}{0..9}{0..9}"), 2, "alternatives(10000)"),
        (("hf", "--only", "{a{b}}"), 2, "braces do not nest"),
    ],
)
def test_what_is_refused(
    sw: Run, data_dir: Path, tmp_path: Path, flags: tuple[str, ...], code: int, text: str
) -> None:
    done = sw("convert", data_dir / MOE, tmp_path / "out", "--to", *flags)
    assert done.code == code and text in done.err, done.err
    assert not (tmp_path / "out").exists()


def test_a_part_goes_where_parts_go(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    assert sw("convert", data_dir / MOE, tmp_path / "part", "--to", "hf", "--only", "*norm*").code == 0
    done = sw("convert", tmp_path / "part", tmp_path / "out", "--to", "megatron")
    assert done.code == 2 and "the source is a part of a model" in done.err


def test_layers_in_one_array_are_chosen_alike(sw: Run, data_dir: Path, tmp_path: Path) -> None:
    """Megatron stacks layers: those of which other tensors are chosen cannot be told apart in one reading."""
    source, config = data_dir / "mc_moe_tp1" / "torch_dist", data_dir / "mc_moe_truth_hf" / "config.json"
    only = ("--only", "model.layers.0.self_attn.q*", "--only", "model.layers.1.self_attn.*")
    done = sw("convert", source, tmp_path / "out", "--to", "hf", "--config", config, *only)
    assert done.code == 2 and "such as native" in done.err
    assert sw("convert", source, tmp_path / "native", "--to", "native", "--config", config).code == 0
    assert sw("convert", tmp_path / "native", tmp_path / "out", "--to", "hf", *only).code == 0
    truth = {
        k: v
        for file in (data_dir / "mc_moe_truth_hf").glob("*.safetensors")
        for k, v in load_file(file).items()
    }
    found = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert all(values.tobytes() == truth[key].tobytes() for key, values in found.items()) and found
