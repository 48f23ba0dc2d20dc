"""The state of Megatron's optimizer through ``shardweave convert``, to every format that keeps one and back.

The source are flat buckets; the truth is what Megatron itself saved of the same training as whole tensors.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_driver import Run

from shardweave.store import torch_dist
from shardweave.store.read import Reader

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "intermediate_size": 40, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
BACK = ("--to", "megatron", "--spec", "local", "--tp", "2", "--vocab-divisor", "1")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def arrays(folder: Path) -> dict[str, np.ndarray]:
    manifest = torch_dist.read(folder)
    with Reader(manifest) as reader:
        return {key: reader.load(key) for key in manifest.tensors}


def groups(folder: Path) -> list[dict[str, object]]:
    return list(torch_dist.read(folder).records["common"]["optimizer"]["optimizer"]["param_groups"])


@pytest.mark.parametrize("by", ["megatron", "native", "dcp"])
def test_flat_buckets_become_what_megatron_saves_whole(
    sw: Run, config: Path, data_dir: Path, tmp_path: Path, by: str
) -> None:
    source, out = data_dir / "mc_opt_tp1dp2_dp_reshardable/torch_dist", tmp_path / "out"
    truth = data_dir / "mc_opt_tp1dp2_fully_reshardable/torch_dist"
    if by == "megatron":
        assert sw("convert", source, out, "--config", config, *BACK).code == 0
    else:
        there = sw("convert", source, tmp_path / by, "--config", config, "--to", by)
        back = sw("convert", tmp_path / by, out, *BACK)
        assert (there.code, back.code) == (0, 0), there.err + back.err
    found, expected = arrays(out), arrays(truth)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        if by == "dcp" and not key.startswith("optimizer."):
            # Such a folder has weights in full precision, which are the masters.
            values = expected[f"optimizer.state.param.{key}"]
        assert found[key].tobytes() == values.tobytes(), key
    for mine, theirs in zip(groups(out), groups(truth), strict=True):
        assert mine["step"] == theirs["step"] == 2
        assert {key: mine[key] for key in theirs} == theirs


def test_the_state_goes_only_where_it_can(sw: Run, config: Path, data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "mc_opt_tp2dp2_fully_reshardable/torch_dist"
    done = sw("convert", source, tmp_path / "hf", "--config", config, "--to", "hf")
    assert done.code == 0 and "optim/" in done.out
    back = sw("convert", tmp_path / "hf", tmp_path / "back", *BACK)
    assert back.code == 0
    found, expected = arrays(tmp_path / "back"), arrays(source)
    assert not any(key.startswith("optimizer.") for key in found)
    assert all(values.tobytes() == expected[key].tobytes() for key, values in found.items())
    assert "optimizer" not in torch_dist.read(tmp_path / "back").records["common"]
