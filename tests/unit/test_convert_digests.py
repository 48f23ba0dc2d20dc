"""Digests of a target: each is of the bytes that are in it, and few need a second reading."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardweave.convert import FORMATS, Geometry, Zero, convert, open_checkpoint, prepare
from shardweave.convert import execute as executing
from shardweave.dialects import hf
from shardweave.models import from_config
from shardweave.store import digest, safetensors
from shardweave.store.manifest import Manifest, TensorSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": False, "hidden_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4,
    "intermediate_size": 50, "vocab_size": 77,
}  # fmt: skip
MEGATRON: dict[str, Any] = {"to": "megatron", "geometry": Geometry(tp=2, vocab_divisor=4)}
ZERO3: dict[str, Any] = {"to": "deepspeed", "zero": Zero(stage=3, dp=5, dtype="bfloat16")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of random bytes."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arrays = hf.layout(from_config(CONFIG)).arrays(0)
    manifest = safetensors.allocate(folder, [TensorSpec(n, b.dtype, b.shape) for n, (b, _) in arrays.items()])
    chance = np.random.default_rng(3)
    for tensor in manifest.tensors.values():
        (extent,) = tensor.extents
        with (folder / extent.file).open("r+b") as file:
            file.seek(extent.start)
            # Small words are numbers, so that a dtype may change.
            file.write(chance.integers(0, 1 << 14, tensor.num_bytes // 2, np.uint16).tobytes())
    safetensors.finish(manifest, fsync=False)
    return folder


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys of arrays that are read a second time for their digest."""
    found: set[str] = set()
    compute = digest.compute

    def noted(manifest: Manifest, **how: Any) -> dict[str, str]:
        found.update(how.get("keys", ()))
        return compute(manifest, **how)

    monkeypatch.setattr("shardweave.convert.carry_out.digest.compute", noted)
    return found


def check(folder: Path) -> Manifest:
    """Every array has the digest that is recorded of it, as a reading of it alone finds."""
    found = open_checkpoint(folder)
    manifest = FORMATS[found.format].as_stored(found.manifest)
    recorded = digest.read_sidecar(manifest.root)
    assert recorded == digest.compute(manifest)
    return manifest


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_cut_by_rows_is_not_read_again(
    source: Path, tmp_path: Path, read_again: set[str], workers: int
) -> None:
    convert(prepare(source, **MEGATRON), tmp_path / "out", workers=workers, fsync=False)
    stored = check(tmp_path / "out")
    cut = {key: tensor for key, tensor in stored.tensors.items() if len(tensor.extents) > 1}
    columns = {
        key for key, tensor in cut.items()
        if any(e.shape[-1] != tensor.shape[-1] for e in tensor.extents) and len(tensor.shape) > 1
    }  # fmt: skip
    assert len(columns) >= 2 and read_again >= columns
    # The largest ones are filled by all threads at once where there are several.
    rows = {key for key in cut if key not in columns}
    again = {key for key in read_again & rows if "embed" not in key and "output_layer" not in key}
    assert len(rows) > 4 and not again


def test_flat_ranges_are_not_read_again(source: Path, tmp_path: Path, read_again: set[str]) -> None:
    """ZeRO-3 cuts an array into ranges, and a range into boxes."""
    convert(prepare(source, **ZERO3), tmp_path / "out", workers=1, fsync=False)
    stored = check(tmp_path / "out")
    assert max(len(tensor.extents) for tensor in stored.tensors.values()) > 5
    assert not read_again


def test_an_array_that_is_large_is_filled_by_several(
    source: Path, tmp_path: Path, read_again: set[str]
) -> None:
    convert(prepare(source, **ZERO3), tmp_path / "out", workers=50, fsync=False)
    check(tmp_path / "out")
    assert any("embed_tokens" in key for key in read_again)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_what_was_begun_before_is_read_again(
    source: Path, tmp_path: Path, read_again: set[str], part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array of which an earlier run wrote a part has the digest of all of it."""

    class KilledError(Exception):
        pass

    def kill(done: int, total: int) -> None:
        if done > part * total:
            raise KilledError

    with pytest.raises(KilledError):
        convert(prepare(source, **ZERO3), tmp_path / "out", workers=1, fsync=False, progress=kill)
    assert not read_again
    report = convert(prepare(source, **ZERO3), tmp_path / "out", workers=1, fsync=False)
    assert report.resumed and read_again
    check(tmp_path / "out")


def test_stretches_that_do_not_follow_one_another_are_no_chain(source: Path, tmp_path: Path) -> None:
    """A chain is all of an array, in order: of a gap, or of columns, there is none."""
    job = prepare(source, **ZERO3)
    (tmp_path / "laid").mkdir()
    manifest = job.target.allocate(tmp_path / "laid")
    todo = list(executing.tasks(job.plan, manifest))
    key = next(task.tensor.key for task in todo if len(task.tensor.extents) > 4)
    of_one = [task for task in todo if task.tensor.key == key]
    large = of_one[0].tensor.num_bytes
    assert [len(chain) for chain in executing._chains(of_one, large)] == [len(of_one)]
    assert list(executing._chains(of_one[::-1], large)) == [of_one]
    for some in (of_one[1:], of_one[:-1], of_one[:2] + of_one[3:]):
        assert [len(chain) for chain in executing._chains(some, large)] == [1] * len(some)
    assert [len(chain) for chain in executing._chains(of_one, large - 1)] == [1] * len(of_one)
    by_columns = prepare(source, **MEGATRON)
    (tmp_path / "columns").mkdir()
    columns = by_columns.target.allocate(tmp_path / "columns")
    for task in executing.tasks(by_columns.plan, columns):
        if re.search(r"linear_fc2|linear_proj", task.tensor.key) and len(task.numbers) > 1:
            assert not len(executing._stretch(task))
