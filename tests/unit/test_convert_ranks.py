"""Checkpoints of somebody's own framework: a file of shards a rank, and a layout that a probe found.

The framework is a function that is written here array by array, and its files are written by it and by the
official writer of safetensors. What conversions make of them is compared with what the function was given,
what they write with what the function gives, bit for bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardweave.convert import convert, open_checkpoint, prepare
from shardweave.convert.check import check
from shardweave.convert.target import Zero
from shardweave.errors import (
    GeometryError,
    MissingFileError,
    ModelError,
    OutsideError,
    ReplicaError,
    ShardweaveError,
    UnknownNameError,
)
from shardweave.layout import Layout
from shardweave.models import from_config
from shardweave.store import shards
from shardweave.testing import probe_model

Arrays = Mapping[str, np.ndarray]
CONFIG = {
    "model_type": "llama",
    "dtype": "float16",
    "vocab_size": 53,
    "hidden_size": 30,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "attention_bias": False,
    "mlp_bias": False,
}


def mine(tensors: Arrays, rank: int, tp: int) -> dict[str, np.ndarray]:
    """Q, K and V of a rank as one array; gate and up as one, stored (in, out); K and V shared where few."""
    found: dict[str, np.ndarray] = {}
    kv = min(tp, 2)
    for name, x in tensors.items():
        block, _, last = name.replace("model.layers.", "blocks.").partition(".self_attn.")
        if last.startswith("q_proj"):
            k, v = (
                np.split(tensors[name.replace("q_proj", f"{one}_proj")], kv)[rank * kv // tp] for one in "kv"
            )
            found[f"{block}.qkv"] = np.concatenate([np.split(x, tp)[rank], k, v])
        elif last.startswith("o_proj"):
            found[f"{block}.o"] = np.split(x, tp, axis=1)[rank].copy()
        elif "gate_proj" in name:
            halves = (np.split(y, tp)[rank] for y in (x, tensors[name.replace("gate", "up")]))
            found[name.replace("model.layers.", "blocks.").replace("gate_proj.weight", "up")] = (
                np.concatenate(list(halves)).T.copy()
            )
        elif "down_proj" in name:
            found[name.replace("model.layers.", "blocks.")] = np.split(x, tp, axis=1)[rank].copy()
        elif "norm" in name:
            found[name.replace("model.layers.", "blocks.")] = x.copy()
        elif not last and "up_proj" not in name:
            found[name] = np.array_split(x, tp)[rank].copy()
    return found


def layout_of(tp: int, config: Mapping[str, Any] = CONFIG) -> Layout:
    return probe_model(mine, from_config(config), ranks=tp, name="mine")


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    bits = {
        name: rng.integers(0, 0x7C00, tensor.shape, np.uint16)
        for tensor in from_config(CONFIG).tensors
        for name in tensor.names()
    }
    return {name: value.view(np.float16) for name, value in bits.items()}


def saved(folder: Path, tp: int, stem: str = "rank_") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for rank in range(tp):
        save_file(mine(weights(), rank, tp), folder / f"{stem}{rank}.safetensors")
    return folder


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(found[name].view(np.uint16), array.view(np.uint16), err_msg=name)


@pytest.mark.parametrize(("tp", "stem"), [(1, "rank_"), (2, "model-tp"), (6, "mp_rank_")])
def test_read(tmp_path: Path, tp: int, stem: str) -> None:
    source = saved(tmp_path / "mine", tp, stem)
    convert(prepare(source, to="hf", layout=layout_of(tp)), tmp_path / "found", fsync=False)
    same(load_file(tmp_path / "found" / "model.safetensors"), weights())


@pytest.mark.parametrize("tp", [1, 3, 6])
def test_written(hf: Path, tmp_path: Path, tp: int) -> None:
    job = prepare(hf, to="ranks", to_layout=layout_of(tp))
    convert(job, tmp_path / "mine", fsync=False)
    for rank in range(tp):
        same(load_file(tmp_path / "mine" / f"rank_{rank}.safetensors"), mine(weights(), rank, tp))
    held = {path.name for path in (tmp_path / "mine").iterdir()}
    assert {name for name in held if "safetensors" in name} == {f"rank_{r}.safetensors" for r in range(tp)}
    checked = check(tmp_path / "mine", layout=layout_of(tp))
    assert checked.whole, checked.findings


def test_resharded(tmp_path: Path) -> None:
    source = saved(tmp_path / "two", 2)
    job = prepare(source, to="ranks", layout=layout_of(2), to_layout=layout_of(6))
    convert(job, tmp_path / "six", fsync=False)
    for rank in range(6):
        same(load_file(tmp_path / "six" / f"rank_{rank}.safetensors"), mine(weights(), rank, 6))


def test_keys_are_names_and_ranks(tmp_path: Path) -> None:
    found = open_checkpoint(saved(tmp_path / "mine", 2), layout=layout_of(2))
    assert found.format == "ranks" and found.left_out == {}
    assert {"blocks.0.qkv@0", "blocks.2.qkv@1", "model.norm.weight@1"} <= found.manifest.tensors.keys()


def test_shards_in_a_checkpoint_of_deepspeed(hf: Path, tmp_path: Path) -> None:
    """Its files hold what the framework's ranks hold, and are read where the layout is given."""
    import torch

    wanted = {"zero": Zero(stage=1, tp=2, dp=1), "to_layout": layout_of(2)}
    convert(prepare(hf, to="deepspeed", **wanted), tmp_path / "ds", fsync=False)
    files = sorted((tmp_path / "ds").rglob("mp_rank_*_model_states.pt"))
    assert len(files) == 2
    for rank, file in enumerate(files):
        module = torch.load(file, weights_only=False)["module"]
        same({name: tensor.numpy() for name, tensor in module.items()}, mine(weights(), rank, 2))
    convert(prepare(tmp_path / "ds", to="hf", layout=layout_of(2)), tmp_path / "back", fsync=False)
    same(load_file(tmp_path / "back" / "model.safetensors"), weights())
    with pytest.raises(GeometryError, match=r"ranks of mine\(3\) != stored\(2\)"):
        open_checkpoint(tmp_path / "ds", layout=layout_of(3))


def gone(folder: Path) -> None:
    (folder / "rank_0.safetensors").unlink()


def renamed(folder: Path) -> None:
    (folder / "rank_1.safetensors").rename(folder / "model-tp1.safetensors")


def one_more(folder: Path) -> None:
    arrays = load_file(folder / "rank_1.safetensors")
    save_file({**arrays, "blocks.3.qkv": np.zeros(3, np.float16)}, folder / "rank_1.safetensors")


def one_less(folder: Path) -> None:
    arrays = load_file(folder / "rank_1.safetensors")
    save_file({k: v for k, v in arrays.items() if k != "blocks.2.o"}, folder / "rank_1.safetensors")


def reshaped(folder: Path) -> None:
    arrays = load_file(folder / "rank_1.safetensors")
    save_file({**arrays, "blocks.1.o": arrays["blocks.1.o"].T.copy()}, folder / "rank_1.safetensors")


def drifted(folder: Path) -> None:
    arrays = load_file(folder / "rank_1.safetensors")
    arrays["blocks.1.input_layernorm.weight"].view(np.uint16)[3] ^= 1
    save_file(arrays, folder / "rank_1.safetensors")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (gone, MissingFileError, "1 of 2 files found, none of ranks 0"),
        (renamed, ShardweaveError, "2 ways: model-tp.*rank_"),
        (one_more, UnknownNameError, r"unexpected 1 \(blocks\.3\.qkv@1\)"),
        (one_less, UnknownNameError, r"missing 1 \(blocks\.2\.o@1\)"),
        (reshaped, OutsideError, r"blocks\.1\.o@1.*stored \(24, 30\) != \(30, 24\)"),
        (drifted, ReplicaError, r"input_layernorm"),
    ],
)
def test_files_that_are_not_as_the_layout_says_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    source = saved(tmp_path / "mine", 2)
    damage(source)
    with pytest.raises(error, match=message):
        convert(prepare(source, to="hf", layout=layout_of(2)), tmp_path / "out", fsync=False)
    assert not (tmp_path / "out").exists()


def test_a_layout_that_does_not_fit_is_refused(hf: Path, tmp_path: Path) -> None:
    source = saved(tmp_path / "mine", 2)
    with pytest.raises(GeometryError, match=r"ranks\(2\), and no layout.*--layout FILE"):
        open_checkpoint(source)
    with pytest.raises(GeometryError, match=r"ranks of mine\(3\) != stored\(2\)"):
        open_checkpoint(source, layout=layout_of(3))
    with pytest.raises(ModelError, match=r"v_proj|gate_proj"):
        open_checkpoint(source, layout=layout_of(2, CONFIG | {"intermediate_size": 48}))
    with pytest.raises(ModelError, match=r"1 are missing: lm_head\.weight"):
        open_checkpoint(source, layout=layout_of(2, CONFIG | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"config\(none\)"):
        open_checkpoint(source, layout=layout_of(2), config=Path("none"))
    with pytest.raises(GeometryError, match=r"layout\(mine\), and the checkpoint is of format hf"):
        open_checkpoint(hf, layout=layout_of(2))
    with pytest.raises(GeometryError, match=r"to=native, and layout\(mine\)"):
        prepare(hf, to="native", to_layout=layout_of(2))
    with pytest.raises(GeometryError, match="to=ranks, and no layout"):
        prepare(hf, to="ranks")


def test_a_run_that_is_stopped_goes_on(hf: Path, tmp_path: Path) -> None:
    job = prepare(hf, to="ranks", to_layout=layout_of(3))

    def stop(done: int, of: int) -> None:
        if done > of // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(job, tmp_path / "mine", fsync=False, workers=1, progress=stop)
    with pytest.raises(ShardweaveError, match="not finished"):
        open_checkpoint(tmp_path / "mine", layout=layout_of(3))
    report = convert(prepare(hf, to="ranks", to_layout=layout_of(3)), tmp_path / "mine", fsync=False)
    assert report.resumed > 0
    for rank in range(3):
        same(load_file(tmp_path / "mine" / f"rank_{rank}.safetensors"), mine(weights(), rank, 3))


@pytest.mark.parametrize(
    ("names", "of_ranks"),
    [
        (["rank_0.safetensors"], True),
        (["model-tp00.safetensors", "model-tp01.safetensors", "config.json"], True),
        (["tp-0.safetensors", "tp-1.safetensors"], True),
        (["model.safetensors"], False),
        (["rank_0.safetensors", "model.safetensors"], False),
        (["rank_0.safetensors", "model.safetensors.index.json"], False),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], False),
        (["franks_0.safetensors"], False),
        (["rank_0123456789.safetensors"], False),
        (["config.json"], False),
    ],
)
def test_which_files_are_of_ranks(names: list[str], of_ranks: bool) -> None:
    assert shards.is_of_ranks(names) == of_ranks


def test_a_native_checkpoint_is_not_taken_for_one(hf: Path, tmp_path: Path) -> None:
    convert(prepare(hf, to="native"), tmp_path / "native", fsync=False)
    assert open_checkpoint(tmp_path / "native").format == "native"
    shutil.copy(tmp_path / "native" / "rank_00000.safetensors", tmp_path / "rank_0.safetensors")
    with pytest.raises(ShardweaveError):
        open_checkpoint(tmp_path)
