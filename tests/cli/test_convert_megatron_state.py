"""The state of Megatron's optimizer through ``shardweave convert``, to every format that keeps one and back.

The source are flat buckets; the truth is what Megatron itself saved of the same training as whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_driver import Run

from shardweave.store import torch_dist, torch_dist_write, torch_save
from shardweave.store.manifest import TensorSpec
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


def saved_by_torch(folder: Path, out: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """A folder of torch.distributed.checkpoint, loaded and saved again by torch with a change."""
    reader = dcp.FileSystemReader(folder)
    told = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(one.size, dtype=one.properties.dtype) if hasattr(one, "size") else None
        for key, one in told.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    edit(state)
    dcp.save(state, checkpoint_id=out, no_dist=True)


def rounded(state: dict[str, Any]) -> None:
    for key in [key for key in state if key.startswith("model.model.") or key == "model.lm_head.weight"]:
        state[key] = state[key].bfloat16()


def amsgrad(state: dict[str, Any]) -> None:
    for key in [key for key in state if key.endswith(".exp_avg_sq")]:
        state[key.replace(".exp_avg_sq", ".max_exp_avg_sq")] = state[key].clone()


def decaying_norms(state: dict[str, Any]) -> None:
    for key in [key for key in state if key.startswith("optim.param_groups.")]:
        if key.endswith(("_mult", ".is_expert_parallel", ".is_decoupled_lr")):
            del state[key]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (rounded, "has a master of every weight in float32"),
        (amsgrad, "has the states of Adam"),
        (decaying_norms, "does not decay weights with one dim"),
    ],
)
def test_what_megatron_has_no_place_for_is_refused_before_a_byte(
    sw: Run,
    config: Path,
    data_dir: Path,
    tmp_path: Path,
    edit: Callable[[dict[str, Any]], None],
    says: str,
) -> None:
    source = data_dir / "mc_opt_tp1dp2_fully_reshardable/torch_dist"
    assert sw("convert", source, tmp_path / "dcp", "--config", config, "--to", "dcp").code == 0
    saved_by_torch(tmp_path / "dcp", tmp_path / "edited", edit)
    done = sw("convert", tmp_path / "edited", tmp_path / "out", "--config", config, *BACK)
    assert done.code == 1 and says in done.err and "--weights-only" in done.err
    assert not (tmp_path / "out").exists()
    alone = sw("convert", tmp_path / "edited", tmp_path / "out", "--config", config, "--weights-only", *BACK)
    assert alone.code == 0


def test_what_a_run_needs_beside_the_state_goes_along(
    sw: Run, config: Path, data_dir: Path, tmp_path: Path
) -> None:
    """Objects by the bytes of their streams, common state as it is; extra states are the target's own."""
    source = data_dir / "mc_opt_tp1dp2_fully_reshardable/torch_dist"
    manifest = torch_dist.read(source)
    streams = {
        "rng_state/shard_0.0_1.1": torch_save.stream([{"random_rng_state": (3, (1, 2, 624), None)}]),
        "rerun_state_machine_state/shard_0_1": torch_save.stream([{"mode": "disabled"}]),
    }
    scheduler = {"max_lr": 0.01, "num_steps": 8, "lr_decay_style": "cosine"}
    common = {**manifest.records["common"], "opt_param_scheduler": scheduler, "iteration": 2}
    objects = {key: torch_dist.object_bytes(manifest, key) for key in manifest.records["objects"]}
    (tmp_path / "source").mkdir()
    specs = [TensorSpec(key, one.dtype, one.shape) for key, one in manifest.tensors.items()]
    records = {"common": common, "objects": objects | streams}
    laid = torch_dist_write.allocate(tmp_path / "source", specs, records=records)
    with Reader(manifest) as reader:
        for key, one in laid.tensors.items():
            with (laid.root / one.extents[0].file).open("r+b") as file:
                file.seek(one.extents[0].start)
                file.write(reader.load(key).tobytes())
    torch_dist_write.finish(laid, fsync=False)
    assert sw("convert", laid.root, tmp_path / "out", "--config", config, *BACK).code == 0
    out = torch_dist.read(tmp_path / "out")
    assert {key: torch_dist.object_bytes(out, key) for key in streams} == streams
    assert out.records["common"]["opt_param_scheduler"] == scheduler
    assert out.records["common"]["iteration"] == 2
