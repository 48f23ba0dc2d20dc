"""Folders that torch.distributed.checkpoint wrote from DTensors of every kind: read to the last bit.

The truth is what torch gathers of the same tensors, before they were saved.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_processes import run
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from shardweave.errors import (
    DtypeError,
    FormatError,
    GapError,
    IndexMismatchError,
    MissingFileError,
    OutsideError,
    OverlapError,
    TruncatedError,
)
from shardweave.store import hf_dcp, safetensors, torch_dcp, torch_dist
from shardweave.store.manifest import Manifest, TensorSpec
from shardweave.store.read import Reader

pytestmark = [
    pytest.mark.dist, pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage"),
]  # fmt: skip

SCRIPT = Path(__file__).with_name("dcp_ranks.py")
CASES: list[dict[str, Any]] = [
    {"name": "fsdp", "how": "fsdp", "hf": True},
    {"name": "hsdp", "how": "hsdp", "threads": 2, "flat": True, "hf": True},
    {"name": "tp", "how": "tp", "lowest": True, "hf": True},
]
NAMES = [case["name"] for case in CASES]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks of torch saved."""
    out = tmp_path_factory.mktemp("dcp")
    run(SCRIPT, CASES, out, world_size=4, limit_s=180)
    return out


def words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def assert_holds(manifest: Manifest, truth: dict[str, torch.Tensor]) -> None:
    assert manifest.tensors.keys() == truth.keys()
    with Reader(manifest) as reader:
        for key, wanted in truth.items():
            stored = manifest.tensors[key]
            assert (stored.dtype, stored.shape) == (str(wanted.dtype)[6:], tuple(wanted.shape)), key
            found = np.ascontiguousarray(reader.load(key)).reshape(-1).view(np.uint8)
            np.testing.assert_array_equal(found, words(wanted), err_msg=key)


def boxes(manifest: Manifest, key: str) -> set[tuple[int, ...]]:
    return {(*extent.offset, *extent.shape) for extent in manifest.tensors[key].extents}


# --- .metadata and .distcp ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_what_torch_gathers(name: str, saved: Path) -> None:
    manifest = torch_dist.read(saved / name / "dcp")
    truth = load_file(saved / name / "truth.safetensors")
    kinds = {(value.dtype, value.dim()) for value in truth.values()}
    assert {(torch.int64, 1), (torch.int64, 0), (torch.float64, 0), (torch.bool, 1)} <= kinds
    assert {(torch.float32, 3), (torch.bfloat16, 2), (torch.uint8, 1)} <= kinds
    assert_holds(manifest, truth)
    objects = {
        key: torch_dist.read_object(manifest, key)
        for key in manifest.records["objects"]
        if key.startswith("app.")
    }
    assert objects == {
        "app.note": "kept", "app.raw": b"\x00\x01", "app.history": [1, 2.5, None], "app.rng.1": "cpu",
    }  # fmt: skip


def test_the_cuts_are_those_of_the_ranks(saved: Path) -> None:
    up, down, experts = (f"model.1.{name}" for name in ("up.weight", "down.weight", "experts"))
    fsdp, hsdp, tp = (torch_dist.read(saved / name / "dcp") for name in NAMES)
    # Of 4 ranks the last holds no expert, and of 2 the second one.
    assert boxes(fsdp, experts) == {(i, 0, 0, 1, 5, 13) for i in range(3)}
    assert boxes(hsdp, experts) == {(0, 0, 0, 2, 5, 13), (2, 0, 0, 1, 5, 13)}
    assert boxes(fsdp, up) == {(0, 0, 6, 13), (6, 0, 6, 13), (12, 0, 6, 13), (18, 0, 4, 13)}
    # Both cut rows, tensor parallelism first, though its axis is the inner one.
    placements = json.loads((saved / "tp" / "placements.json").read_text())
    assert "(_StridedShard(dim=0, sf=2), Shard(dim=0))" in placements
    assert boxes(tp, up) == {(0, 0, 6, 13), (6, 0, 5, 13), (11, 0, 6, 13), (17, 0, 5, 13)}
    assert boxes(tp, down) == {(0, 0, 7, 11), (7, 0, 6, 11), (0, 11, 7, 11), (7, 11, 6, 11)}
    # Replicas are there once, and which of them wrote is torch's choice.
    assert {extent.file for extent in tp.tensors["model.1.seen"].extents} == {"__0_0.distcp"}
    assert {"__0_0.distcp", "__0_1.distcp"} < set(hsdp.files)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_states_are_told_apart_without_a_config(name: str, saved: Path) -> None:
    stored = torch_dist.read(saved / name / "dcp")
    manifest = torch_dcp.unnamed(stored)
    truth = load_file(saved / name / "truth.safetensors")
    names = {key.removeprefix("model."): key for key in truth if key.startswith("model.")}
    trained = {one for one in names if one.endswith(("weight", "bias", "experts"))}
    assert len(names) == 22 and len(trained) == 12
    for weight in trained:
        for state in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
            names[f"optim/{weight}/{state}"] = f"optim.state.{weight}.{state}"
    names["other/app.rng.0"] = "app.rng.0"
    assert manifest.records["keys"] == names and manifest.records["optim"] == "optim."
    assert_holds(manifest, {new: truth[old] for new, old in names.items()})
    assert torch_dcp.as_stored(manifest).tensors == stored.tensors
    groups: dict[str, set[str]] = {}
    for _, group, setting in torch_dcp.settings(manifest):
        groups.setdefault(group, set()).add(setting)
    every = {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable"}
    every |= {"differentiable", "fused", "decoupled_weight_decay"}
    # Names that begin with a number are none of groups.
    assert groups == (dict.fromkeys(trained, every) if name == "hsdp" else {"0": every | {"params"}})
    assert torch_dcp.named(stored, names).tensors == manifest.tensors


@pytest.mark.parametrize("flatten", [True, False])
def test_weights_are_told_apart_without_an_optimizer(flatten: bool, tmp_path: Path) -> None:
    weights = {"0.weight": torch.rand(3, 5), "norm.weight": torch.rand(5)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten)

    def names_of(state: dict[str, Any], name: str) -> list[str]:
        dcp.save(state, checkpoint_id=tmp_path / name, planner=planner, no_dist=True)
        manifest = torch_dcp.unnamed(torch_dist.read(tmp_path / name))
        return sorted(manifest.tensors)

    assert names_of(dict(weights), "alone") == ["0.weight", "norm.weight"]
    if flatten:
        beside = {"model": weights, "rng": torch.arange(3)}
        assert names_of(beside, "model") == ["0.weight", "norm.weight", "other/rng"]
        assert names_of({"net": weights}, "net") == ["0.weight", "norm.weight"]
        with pytest.raises(FormatError, match=r"weights are in a folder once.*'policy\.', 'value\.'"):
            names_of({"policy": weights, "value": weights}, "two")


# --- shards in safetensors files ----------------------------------------------------------------


def weights(saved: Path, name: str) -> dict[str, torch.Tensor]:
    truth = load_file(saved / name / "truth.safetensors")
    return {key.removeprefix("model."): v for key, v in truth.items() if key.startswith("model.")}


def by_torch(folder: Path, shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch's own reader fills, where it fills anything: all bytes are 0xA5 before."""
    found = {
        key: torch.full((value.numel() * value.element_size(),), 0xA5, dtype=torch.uint8)
        .view(value.dtype)
        .reshape(value.shape)
        for key, value in shapes.items()
        if value.dtype != torch.bool
    }
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return found


@pytest.mark.parametrize("kind", ["sharded", "numbered", "alone"])
@pytest.mark.parametrize("name", NAMES)
def test_shards_of_all_ranks_are_what_torch_gathers(name: str, kind: str, saved: Path) -> None:
    truth, folder = weights(saved, name), saved / name / kind
    assert hf_dcp.is_sharded(folder)
    manifest = hf_dcp.read(folder)
    assert_holds(manifest, truth)
    assert manifest.format == "hf" and manifest.records["inferred"] == truth.keys()
    assert (manifest.records["index"] is None) == (kind != "alone")
    shapes = {key: tuple(value.shape) for key, value in truth.items()}
    hf_dcp.require_shapes(manifest, shapes)
    assert not hf_dcp.read(folder, shapes=shapes).records["inferred"]
    if kind != "alone":
        assert boxes(manifest, "1.up.weight") == boxes(
            torch_dist.read(saved / name / "dcp"), "model.1.up.weight"
        )
    found = by_torch(folder, truth)
    assert all(np.array_equal(words(found[key]), words(truth[key])) for key in found)


def test_consolidated_files_are_plain_and_torch_loses_numbers_without_dims(saved: Path) -> None:
    folder = saved / "fsdp" / "consolidated"
    truth = {key: v for key, v in weights(saved, "fsdp").items() if v.is_floating_point()}
    assert_holds(hf_dcp.read(folder / "sharded"), truth)
    assert not hf_dcp.is_sharded(folder)
    manifest = safetensors.read(folder)
    lost = {key: torch.zeros_like(v) if v.dim() == 0 else v for key, v in truth.items()}
    assert_holds(manifest, lost)
    assert sum(not np.array_equal(words(lost[key]), words(truth[key])) for key in truth) == 2


# --- damage that torch does not see -------------------------------------------------------------


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """The shards of four ranks, to be damaged."""
    return Path(shutil.copytree(saved / "fsdp" / "sharded", tmp_path / "sharded"))


def of_rank(folder: Path, rank: int) -> Path:
    return folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def rewrite(path: Path, **change: Any) -> None:
    """A file with other offsets, or other tensors."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    offsets, tensors = json.loads(metadata["DCP_SHARDING_INFO"]), load_file(path)
    for key, value in change.pop("offsets", {}).items():
        offsets[key] = value
    tensors |= change.pop("tensors", {})
    text = change.pop("text", json.dumps(offsets))
    assert not change
    metadata["DCP_SHARDING_INFO"] = text
    if text is None:
        del metadata["DCP_SHARDING_INFO"]
    save_file(tensors, path, metadata)


UP = "1.up.weight"


def test_a_missing_rank_in_the_middle_leaves_what_was_there(saved: Path, folder: Path) -> None:
    truth = weights(saved, "fsdp")
    whole = {key: v for key, v in truth.items() if key == UP}
    of_rank(folder, 1).unlink()
    found = words(by_torch(folder, whole)[UP]).reshape(22, -1)
    assert (found[6:12] == 0xA5).all() and np.array_equal(found[:6], words(truth[UP]).reshape(22, -1)[:6])
    with pytest.raises(GapError, match=r"elements stored\(.*\) != prod\(shape"):
        hf_dcp.read(folder)


def test_a_missing_last_rank_makes_a_smaller_tensor(saved: Path, folder: Path) -> None:
    truth = weights(saved, "fsdp")
    of_rank(folder, 3).unlink()
    small = {UP: truth[UP][:18].contiguous()}
    assert np.array_equal(words(by_torch(folder, small)[UP]), words(small[UP])), "torch takes it for all"
    # Here too the files alone cannot tell; the model can.
    lost = {f"{n}.{what}" for n in (1, 2) for what in ("seen", "calls", "scale", "mask", "nothing")}
    manifest = hf_dcp.read(folder)
    assert manifest.tensors[UP].shape == (18, 13)
    shapes = {key: tuple(v.shape) for key, v in truth.items() if key not in lost}
    for refuse in (
        lambda: hf_dcp.read(folder, shapes=shapes),
        lambda: hf_dcp.require_shapes(manifest, shapes),
    ):
        with pytest.raises(GapError, match="reach to its end") as error:
            refuse()
        assert "files of the last ranks are missing" in error.value.hint
    with pytest.raises(OutsideError, match="outside shape"):
        hf_dcp.read(folder, shapes={UP: (17, 13)})


def test_an_empty_shard_at_the_end_tells_that_another_is_missing(folder: Path) -> None:
    # Rank 3 has none of the 3 experts, and says that they end at 3.
    of_rank(folder, 2).unlink()
    with pytest.raises(GapError):
        hf_dcp.read(folder)


def test_files_of_two_saves(saved: Path, folder: Path) -> None:
    """A save of fewer ranks into the same folder leaves the files of the others."""
    truth = weights(saved, "fsdp")
    for rank in (0, 1):
        shutil.copy(of_rank(saved / "hsdp" / "sharded", rank), of_rank(folder, rank))
    by_torch(folder, {UP: truth[UP]})  # without a word
    with pytest.raises(OverlapError, match=r"model-00001-of-00001"):
        hf_dcp.read(folder)
    shutil.copy(of_rank(saved / "fsdp" / "sharded", 0), folder / "model-00001-of-00001.safetensors")
    with pytest.raises(FormatError, match="of one save"):
        hf_dcp.read(folder)


def test_offsets_that_lie(saved: Path, folder: Path) -> None:
    truth = weights(saved, "fsdp")
    rewrite(of_rank(folder, 1), offsets={UP: {"saved_offsets": [0, 0]}})
    assert (words(by_torch(folder, {UP: truth[UP]})[UP]).reshape(22, -1)[6:12] == 0xA5).all()
    with pytest.raises(OverlapError):
        hf_dcp.read(folder)
    rewrite(of_rank(folder, 1), offsets={UP: {"saved_offsets": [7, 0]}})
    with pytest.raises(OverlapError):
        hf_dcp.read(folder)
    rewrite(of_rank(folder, 1), offsets={UP: {"saved_offsets": [22, 0]}})
    with pytest.raises(GapError):
        hf_dcp.read(folder)
    with pytest.raises(OutsideError, match=r"reach \(28, 13\), outside shape\(22, 13\)"):
        hf_dcp.read(folder, shapes={UP: (22, 13)})


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative": ({"offsets": {UP: {"saved_offsets": [-6, 0]}}}, FormatError, "one for each dim"),
    "too few": ({"offsets": {UP: {"saved_offsets": [6]}}}, FormatError, "one for each dim"),
    "huge": ({"offsets": {UP: {"saved_offsets": [1 << 60, 0]}}}, FormatError, "one for each dim"),
    "true": ({"offsets": {UP: {"saved_offsets": [True, 0]}}}, FormatError, "one for each dim"),
    "text": ({"offsets": {UP: "6, 0"}}, FormatError, "one for each dim"),
    "unknown": ({"offsets": {UP: {"saved_offsets": [6, 0], "of": 2}}}, FormatError, "one for each dim"),
    "stranger": ({"offsets": {"stranger": {"saved_offsets": [0]}}}, IndexMismatchError, "'stranger'"),
    "no json": ({"text": "{"}, FormatError, "holds one JSON object"),
    "twice": ({"text": '{"a": {}, "a": {}}'}, FormatError, "occurs once"),
    "none": ({"text": None}, FormatError, "says where its tensors begin"),
    "dtype": ({"tensors": {UP: torch.ones(6, 13, dtype=torch.int32)}}, DtypeError, "int32"),
    "dims": ({"tensors": {UP: torch.ones(6)}}, FormatError, "one for each dim"),
}


@pytest.mark.parametrize("what", WRONG)
def test_headers_that_no_save_writes(what: str, folder: Path) -> None:
    change, error, text = WRONG[what]
    rewrite(of_rank(folder, 1), **change)
    with pytest.raises(error, match=text):
        hf_dcp.read(folder)


def test_missing_numbers_and_broken_files(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "fsdp" / "numbered", tmp_path / "numbered"))
    for path in folder.glob("*-model-00002-of-00003.safetensors"):
        path.unlink()
    by_torch(folder, {"1.experts": weights(saved, "fsdp")["1.experts"]})
    with pytest.raises(MissingFileError, match="2 of 3 numbers found: 1, 3"):
        hf_dcp.read(folder)
    path = next(folder.glob("*-model-00003-of-00003.safetensors"))
    path.rename(folder / "shard-00001-model-00002-of-99999999999.safetensors")
    with pytest.raises(FormatError, match="of one save"):
        hf_dcp.read(folder)
    with pytest.raises(MissingFileError, match="no file ends in"):
        hf_dcp.read(tmp_path)
    assert not hf_dcp.is_sharded(tmp_path) and not hf_dcp.is_sharded(tmp_path / "nowhere")


def test_a_file_that_broke_off(folder: Path) -> None:
    path = of_rank(folder, 2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedError, match="shard-00003"):
        hf_dcp.read(folder)


def test_objects_make_a_file_that_nobody_can_read(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "lr": 0.1}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    with pytest.raises(FormatError):
        hf_dcp.read(tmp_path)


def test_an_index_of_other_tensors(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "fsdp" / "alone", tmp_path / "alone"))
    index = json.loads((folder / safetensors.INDEX).read_text())
    index["weight_map"][UP] = next(
        name for name in index["weight_map"].values() if name != index["weight_map"][UP]
    )
    (folder / safetensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(IndexMismatchError):
        hf_dcp.read(folder)


# --- and back -----------------------------------------------------------------------------------


def test_what_is_written_here_is_read_by_the_reader_of_torch(saved: Path, tmp_path: Path) -> None:
    truth = weights(saved, "fsdp")
    specs = [TensorSpec(key, str(v.dtype)[6:], tuple(v.shape)) for key, v in truth.items()]
    manifest = safetensors.allocate(tmp_path, specs, max_file_bytes=2000)
    assert len(manifest.files) > 2
    for key, value in truth.items():
        (extent,) = manifest.tensors[key].extents
        with (tmp_path / extent.file).open("r+b") as file:
            file.seek(extent.start)
            file.write(words(value).tobytes())
    safetensors.finish(manifest, fsync=False)
    found = by_torch(tmp_path, truth)
    assert all(np.array_equal(words(found[key]), words(truth[key])) for key in found)
