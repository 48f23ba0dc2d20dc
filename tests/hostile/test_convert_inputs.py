"""Sources and targets that are damaged, hostile or of another model: a named error, and nothing is lost.

Each case goes the whole way of a user, from a path to a target. Whatever is wrong, the source keeps
its bytes, the target is not made, and nothing that a file says is executed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from shardweave.convert import Geometry, Report, convert, open_checkpoint, prepare
from shardweave.errors import (
    AccountingError,
    DigestError,
    ExistsError,
    FormatError,
    GeometryError,
    IndexMismatchError,
    JournalError,
    MissingFileError,
    ModelError,
    OutsideError,
    PathError,
    PickleError,
    ReplicaError,
    ShardweaveError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.plan import plan

DATA = Path(__file__).parents[1] / "data"
GQA, MOE, TIED = DATA / "mc_gqa_truth_hf", DATA / "hf_qwen3moe_tiny", DATA / "hf_llama_tied_tiny"
LOCAL = Geometry(tp=2, spec="local", vocab_divisor=1)


def go(src: Path, dst: Path, *, to: str = "hf", **choices: Any) -> Report:
    return convert(prepare(src, to=to, **choices), dst, fsync=False)


def state(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (
            str(path.readlink()) if path.is_symlink() else path.is_file() and path.read_bytes(),
            path.lstat().st_mtime_ns,
        )
        for path in folder.rglob("*")
    }


def refused(error: type[ShardweaveError], match: str, src: Path, **choices: Any) -> None:
    """The conversion ends with the error, and leaves everything as it was."""
    dst = src.parent / "dst"
    before = state(src.parent)
    with pytest.raises(error, match=match):
        go(src, dst, **choices)
    assert state(src.parent) == before and not dst.exists()


@pytest.fixture
def gqa(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GQA, tmp_path / "src"))


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    """Four files and an index."""
    return Path(shutil.copytree(MOE, tmp_path / "src"))


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "mc_gqa_tp4/torch_dist", tmp_path / "src")
    shutil.copyfile(GQA / "config.json", tmp_path / "src/config.json")
    return tmp_path / "src"


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (values | changes).items() if v is not ...}))


# --- files that lie -------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [-1, -1000, 4000, 8, 3, 0])
def test_a_truncated_file(gqa: Path, keep: int) -> None:
    path = gqa / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refused(FormatError if keep < 100 and keep >= 0 else TruncatedError, "model.safetensors", gqa)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_file_of_megatron(megatron: Path, keep: int) -> None:
    path = megatron / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:keep])
    refused(TruncatedError, "__0_0.distcp", megatron)


def test_a_file_that_is_cut_after_it_was_opened(gqa: Path) -> None:
    """Between the plan and the copy; what is staged stays, and no target appears."""
    job = prepare(gqa, to="megatron", geometry=LOCAL)
    data = (gqa / "model.safetensors").read_bytes()
    (gqa / "model.safetensors").write_bytes(data[: len(data) // 2])
    dst = gqa.parent / "dst"
    with pytest.raises(TruncatedError):
        convert(job, dst, fsync=False)
    with pytest.raises(FormatError, match="was not finished"):
        open_checkpoint(dst)
    assert {path.name for path in dst.iterdir()} == {".shardweave"}


@pytest.mark.parametrize("shift", [1 << 20, 1 << 62])
def test_a_header_that_points_outside(gqa: Path, shift: int) -> None:
    def outside(header: dict[str, Any]) -> None:
        place = header["model.norm.weight"]["data_offsets"]
        header["model.norm.weight"]["data_offsets"] = [at + shift for at in place]

    edit_header(gqa / "model.safetensors", outside)
    refused(FormatError, "model", gqa)


def test_overlapping_offsets(gqa: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        keys = [key for key in header if key.endswith("input_layernorm.weight")]
        header[keys[0]]["data_offsets"] = header[keys[1]]["data_offsets"]

    edit_header(gqa / "model.safetensors", overlap)
    refused(FormatError, "leave no hole|overlap", gqa)


def test_a_header_of_other_shapes_with_the_same_bytes(gqa: Path) -> None:
    def turn(header: dict[str, Any]) -> None:
        for key, entry in header.items():
            if key.endswith("down_proj.weight"):
                entry["shape"].reverse()

    edit_header(gqa / "model.safetensors", turn)
    refused(OutsideError, r"down_proj.*stored \(96, 64\) != \(64, 96\)", gqa)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a\\..\\b.safetensors", "C:x"])
def test_an_index_that_leaves_the_folder(moe: Path, name: str) -> None:
    shutil.copyfile(moe / "model-00002-of-00004.safetensors", moe.parent / "secret.safetensors")
    path = moe / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    key = next(k for k, v in index["weight_map"].items() if v == "model-00002-of-00004.safetensors")
    index["weight_map"][key] = name
    path.write_text(json.dumps(index))
    refused(PathError, "named path", moe)


def test_a_file_that_is_a_link_out_of_the_folder(moe: Path) -> None:
    path = moe / "model-00002-of-00004.safetensors"
    path.rename(moe.parent / "elsewhere.safetensors")
    path.symlink_to(moe.parent / "elsewhere.safetensors")
    refused(PathError, "elsewhere", moe)


def test_a_missing_file_in_the_middle(moe: Path) -> None:
    (moe / "model-00002-of-00004.safetensors").unlink()
    refused(MissingFileError, "model-00002-of-00004.safetensors", moe)


def test_a_missing_file_of_megatron(megatron: Path) -> None:
    (megatron / "__2_0.distcp").unlink()
    refused(MissingFileError, r"__2_0\.distcp", megatron)


def test_a_key_that_the_index_forgot(moe: Path) -> None:
    path = moe / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    refused(IndexMismatchError, r"model\.norm\.weight", moe)


class Bomb:
    """What a pickle would call."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_pickle_with_code(megatron: Path, name: str) -> None:
    mark = megatron.parent / "executed"
    if name == ".metadata":
        (megatron / name).write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save({"args": Bomb(mark)}, megatron / name)
    refused(PickleError, "mkdir", megatron)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb works where it is executed"


def test_a_flipped_byte_is_found_by_the_digests_beside_it(gqa: Path) -> None:
    good = gqa.parent / "good"
    go(gqa, good, to="megatron", geometry=LOCAL)
    path = max(good.glob("*.distcp"), key=lambda p: p.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(path.stat().st_size // 2)
        file.write(bytes([byte ^ 4]))
    refused(DigestError, r"[0-9a-f]{32} != [0-9a-f]{32}", good)


# --- models that are others -----------------------------------------------------------------------


def test_no_config(gqa: Path) -> None:
    (gqa / "config.json").unlink()
    refused(ModelError, r"config\.json is not there.*--config", gqa)


def test_no_config_of_megatron(megatron: Path) -> None:
    (megatron / "config.json").unlink()
    refused(ModelError, "--config", megatron)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_a_config_that_is_none(gqa: Path, text: str) -> None:
    (gqa / "config.json").write_text(text)
    refused(ModelError, "JSON", gqa)


@pytest.mark.parametrize(
    "key", ["num_attention_heads", "vocab_size", "hidden_size", "num_hidden_layers", "model_type"]
)
def test_half_a_config(gqa: Path, key: str) -> None:
    edit_json(gqa / "config.json", **{key: ...})
    refused(ModelError, key, gqa)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"num_hidden_layers": 5, "layer_types": ...}, UnknownNameError, r"missing .*layers\.4"),
        ({"num_hidden_layers": 3, "layer_types": ...}, UnknownNameError, r"unexpected .*layers\.3"),
        ({"num_key_value_heads": 4}, OutsideError, "k_proj"),
        ({"num_attention_heads": 4}, OutsideError, "o_proj|q_proj"),
        ({"intermediate_size": 48}, OutsideError, "gate_proj"),
        ({"vocab_size": 160}, OutsideError, r"stored \(192, 64\) != \(160, 64\)"),
        ({"vocab_size": 208}, OutsideError, r"stored \(192, 64\) != \(208, 64\)"),
        ({"tie_word_embeddings": True}, ReplicaError, "drifted"),
        ({"model_type": "llama"}, ShardweaveError, "norm|head_dim|unexpected|use_sliding_window"),
        ({"model_type": "mamba9"}, ModelError, "mamba9"),
    ],
)
def test_the_config_of_another_model(
    gqa: Path, changes: dict[str, Any], error: type[ShardweaveError], match: str
) -> None:
    edit_json(gqa / "config.json", **changes)
    refused(error, match, gqa)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"num_hidden_layers": 5, "layer_types": ...}, OutsideError, r"stored \(4, .* != \(5, "),
        ({"num_key_value_heads": 4}, OutsideError, "linear_qkv"),
        ({"vocab_size": 200}, GeometryError, r"padded_vocab\(192\) < vocab_size\(200\)"),
    ],
)
def test_the_config_of_another_model_for_megatron(
    megatron: Path, changes: dict[str, Any], error: type[ShardweaveError], match: str
) -> None:
    edit_json(megatron / "config.json", **changes)
    refused(error, match, megatron)


def test_rows_behind_the_vocabulary_are_accounted_as_padding_by_name(megatron: Path) -> None:
    """Only the config can tell padding from words; what is left out on its word is said."""
    edit_json(megatron / "config.json", vocab_size=180)
    report = go(megatron, megatron.parent / "dst")
    rows = (192 - 180) * 64 * 4
    assert report.account.padding == {
        "embedding.word_embeddings.weight": rows,
        "output_layer.weight": rows,
    }
    found = load_file(megatron.parent / "dst/model.safetensors")["lm_head.weight"]
    assert torch.equal(found, load_file(GQA / "model.safetensors")["lm_head.weight"][:180])


def save_dcp(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    shutil.copyfile(GQA / "config.json", folder / "config.json")


def full(folder: Path) -> dict[str, torch.Tensor]:
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def test_b042_embedding_and_head_are_padded_alike(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/pull/20843: two paddings of one vocabulary are refused."""
    tensors = full(DATA / "mc_gqa_tp4/torch_dist")
    embedding = tensors["embedding.word_embeddings.weight"]
    tensors["embedding.word_embeddings.weight"] = torch.cat([embedding, torch.zeros(64, 64)])
    save_dcp(tmp_path / "src", tensors)
    refused(OutsideError, r"output_layer.*stored \(192, 64\) != \(256, 64\)", tmp_path / "src")
    tensors["output_layer.weight"] = torch.cat([tensors["output_layer.weight"], torch.ones(64, 64)])
    save_dcp(tmp_path / "alike", tensors)
    report = go(tmp_path / "alike", tmp_path / "dst")
    assert sum(report.account.padding.values()) == 2 * 64 * 64 * 4


def test_what_is_no_weight_is_left_out_by_name(tmp_path: Path) -> None:
    tensors = full(DATA / "mc_gqa_tp4/torch_dist")
    beside = {
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.rand(64),
        "chained_0.optimizer.state.param.output_layer.weight": torch.rand(192, 64),
        "rng_state.cuda": torch.zeros(17, dtype=torch.uint8),
    }
    save_dcp(tmp_path / "src", tensors | beside)
    report = go(tmp_path / "src", tmp_path / "dst")
    assert {key: size for key, size in report.account.left_out.items() if size} == {
        key: tensor.nbytes for key, tensor in beside.items()
    }
    assert set(report.account.reasons) >= set(beside)
    total = sum(path.stat().st_size for path in (tmp_path / "src").glob("*.distcp"))
    books = report.account
    assert books.total == total == books.used + sum(books.left_out.values()) + books.format
    save_dcp(tmp_path / "odd", tensors | {"optimizers.exp_avg": torch.rand(3)})
    with pytest.raises(UnknownNameError, match=r"unexpected 1 \(optimizers\.exp_avg\)"):
        go(tmp_path / "odd", tmp_path / "other")


@pytest.mark.parametrize("element", [0, 12_345])
def test_tied_copies_that_drifted(tmp_path: Path, element: int) -> None:
    """Also where only the sign of a zero or the payload of a NaN differs."""
    src = Path(shutil.copytree(TIED, tmp_path / "src"))
    tensors = load_file(src / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    at = element % embedding.numel()
    embedding.view(-1)[at] = 0.0
    head = embedding.clone()
    head.view(-1)[at] = -0.0
    save_file({**tensors, "lm_head.weight": head}, src / "model.safetensors", metadata={"format": "pt"})
    row, column = divmod(at, embedding.shape[1])
    refused(ReplicaError, rf"at \({row}, {column}\).*lm_head\.weight.*1 elements? differ", src)


# --- targets --------------------------------------------------------------------------------------


def test_source_and_target_lie_apart(gqa: Path) -> None:
    before = state(gqa.parent)
    job = prepare(gqa, to="megatron", geometry=LOCAL)
    (gqa.parent / "link").symlink_to(gqa.parent)
    for dst in (gqa, gqa / "below", gqa.parent, gqa.parent / "x/../src/y", gqa.parent / "link/src/z"):
        with pytest.raises(PathError, match="source and target lie apart"):
            convert(job, dst, force=True)
    (gqa.parent / "link").unlink()
    assert state(gqa.parent) == before


def test_a_source_of_one_file_holds_its_folder(gqa: Path) -> None:
    job = prepare(gqa / "model.safetensors", to="hf")
    with pytest.raises(PathError, match="source and target lie apart"):
        convert(job, gqa, force=True)
    convert(job, gqa.parent / "dst", fsync=False)
    assert (gqa.parent / "dst/model.safetensors").exists()


@pytest.mark.parametrize("dangling", [True, False])
def test_a_target_that_is_a_link(gqa: Path, dangling: bool) -> None:
    elsewhere = gqa.parent / "elsewhere"
    if not dangling:
        elsewhere.mkdir()
    (gqa.parent / "dst").symlink_to(elsewhere)
    before = state(gqa.parent)
    with pytest.raises(PathError, match=r"a target is a folder of its own.*elsewhere"):
        go(gqa, gqa.parent / "dst", to="megatron", geometry=LOCAL)
    assert state(gqa.parent) == before


def test_a_target_that_is_a_file(gqa: Path) -> None:
    (gqa.parent / "dst").write_text("mine")
    for force in (False, True):
        with pytest.raises(ExistsError, match="a target is a folder"):
            convert(prepare(gqa, to="hf"), gqa.parent / "dst", force=force)
    assert (gqa.parent / "dst").read_text() == "mine"


def test_a_target_that_holds_something(gqa: Path) -> None:
    (gqa.parent / "dst").mkdir()
    (gqa.parent / "dst/a").write_text("mine")
    before = state(gqa.parent)
    with pytest.raises(ExistsError, match=r"a target is empty.*it holds a.*--force"):
        go(gqa, gqa.parent / "dst")
    assert state(gqa.parent) == before


@pytest.mark.parametrize(
    ("geometry", "match"),
    [
        (Geometry(tp=3), r"% tp\(3\)|tp\(3\)"),
        (Geometry(pp=3), "without a remainder"),
        (Geometry(tp=2, ep=2), "etp"),
        (Geometry(tp=2, spec="te2"), "spec"),
        (Geometry(layer_keys="some"), "layer_keys"),
        (Geometry(pp=2, stages=(1, 2)), "explicit pipeline sizes"),
    ],
)
def test_a_geometry_that_the_model_cannot_be_cut_by(gqa: Path, geometry: Geometry, match: str) -> None:
    refused(GeometryError, match, gqa, to="megatron", geometry=geometry)


def test_a_source_that_is_written_to_while_it_is_read(gqa: Path) -> None:
    """A trainer's next step half way through: the bytes would be of two steps, so nothing is published."""
    file = gqa / "model.safetensors"
    dst = gqa.with_name("dst")
    job = prepare(gqa, to="megatron", geometry=LOCAL)
    written = False

    def train(done: int, total: int) -> None:
        nonlocal written
        if not written and done > total // 2:
            with file.open("r+b") as data:
                data.seek(-4, os.SEEK_END)
                data.write(b"step")
            os.utime(file, ns=(1, 1))
            written = True

    with pytest.raises(JournalError, match="stays as it is"):
        convert(job, dst, fsync=False, progress=train)
    assert written and {path.name for path in dst.iterdir()} == {".shardweave"}
    # The same command finds another source than the journal's; starting over converts what is there now.
    with pytest.raises(JournalError, match="source files"):
        convert(prepare(gqa, to="megatron", geometry=LOCAL), dst, fsync=False)
    convert(prepare(gqa, to="megatron", geometry=LOCAL), dst, fsync=False, force=True)
    assert open_checkpoint(dst).manifest.tensors


def test_a_target_that_leaves_a_weight_out(gqa: Path) -> None:
    """No format of ours does; a plan that does is refused before the first byte."""
    job = prepare(gqa, to="hf")
    fewer = replace(job.target.layout, rules=job.target.layout.rules[1:])
    partial = replace(job, plan=plan(job.source.layout, fewer))
    with pytest.raises(AccountingError, match=r"embed_tokens.*read 0 of 12288 elements"):
        convert(partial, gqa.parent / "dst")
    assert not (gqa.parent / "dst").exists()


def test_random_bytes_never_pass(gqa: Path) -> None:
    """A header of random flips is refused or describes the very same tensors."""
    data = (gqa / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    rng = np.random.default_rng(9)
    whole = open_checkpoint(gqa).manifest
    for _ in range(150):
        at = int(rng.integers(0, 8 + size))
        bad = bytearray(data)
        bad[at] ^= 1 << int(rng.integers(0, 8))
        (gqa / "model.safetensors").write_bytes(bytes(bad))
        try:
            found = open_checkpoint(gqa).manifest
        except ShardweaveError:
            continue
        assert found.tensors == whole.tensors
