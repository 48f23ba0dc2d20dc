"""Damage that ``dcp.load`` takes without a word, and what becomes of it here.

A real folder of four ranks is damaged in one way, with torch's own classes. First torch loads it, into
tensors that were filled with a value that cannot be right; then it is read here.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardweave.errors import (
    DigestError,
    GapError,
    IndexMismatchError,
    MissingFileError,
    OutsideError,
    OverlapError,
    TruncatedError,
)
from shardweave.store import digest, torch_crc, torch_dcp, torch_dist

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")

DATA = Path(__file__).parents[1] / "data" / "dcp_fsdp2_4"
KEY = "model.1.a.weight"  # 77 rows on 4 ranks: 20, 20, 20 and 17
BEFORE = -7.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "dcp", tmp_path / "dcp"))


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    return load_file(DATA / "truth.safetensors")[KEY]


def change(folder: Path, edit: Callable[[Metadata], Any]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    edit(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def by_torch(
    folder: Path, shape: tuple[int, ...] = (77, 51), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    state = {KEY: torch.full(shape, BEFORE, dtype=dtype)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[KEY]


def at(row: int) -> MetadataIndex:
    return MetadataIndex(KEY, torch.Size([row, 0]))


def stream(value: torch.Tensor) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def replace_stream(folder: Path, row: int, value: torch.Tensor) -> None:
    """Another tensor in place of a chunk, in a file of its own."""
    data = stream(value)
    (folder / "__9_0.distcp").write_bytes(data)

    def edit(index: Metadata) -> None:
        place = index.storage_data[at(row)]
        place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(data)

    change(folder, edit)


def test_nothing_is_wrong_with_the_folder(folder: Path, truth: torch.Tensor) -> None:
    assert truth.shape == (77, 51) and not bool((truth == BEFORE).any())
    assert torch.equal(by_torch(folder), truth)
    rows = sorted(
        (extent.offset[0], extent.shape[0]) for extent in torch_dist.read(folder).tensors[KEY].extents
    )
    assert rows == [(0, 20), (20, 20), (40, 20), (60, 17)]


def test_a_chunk_that_the_index_lost(folder: Path, truth: torch.Tensor) -> None:
    def lose(index: Metadata) -> None:
        del index.state_dict_metadata[KEY].chunks[1]
        del index.storage_data[at(20)]

    change(folder, lose)
    found = by_torch(folder)
    assert bool((found[20:40] == BEFORE).all()) and torch.equal(found[40:], truth[40:])
    with pytest.raises(GapError, match=rf"{KEY}.*\[20:40, 0:51\].*elements stored\(2907\)"):
        torch_dist.read(folder)


def test_a_shape_that_is_larger_than_its_chunks(folder: Path) -> None:
    change(folder, lambda index: setattr(index.state_dict_metadata[KEY], "size", torch.Size([80, 51])))
    assert bool((by_torch(folder, (80, 51))[77:] == BEFORE).all())
    with pytest.raises(GapError, match=r"\[77:80, 0:51\]"):
        torch_dist.read(folder)


def test_chunks_that_overlap(folder: Path, truth: torch.Tensor) -> None:
    other = torch.full((20, 51), 3.0)

    def move(index: Metadata) -> None:
        index.state_dict_metadata[KEY].chunks[1] = ChunkStorageMetadata(
            torch.Size([10, 0]), torch.Size([20, 51])
        )
        index.state_dict_metadata[KEY].chunks.append(
            ChunkStorageMetadata(torch.Size([30, 0]), torch.Size([10, 51]))
        )
        place = index.storage_data.pop(at(20))
        index.storage_data[at(10)] = place
        index.storage_data[at(30)] = index.storage_data[at(40)]

    change(folder, move)
    replace_stream(folder, 10, other)
    found = by_torch(folder)  # rows 10 to 20 are of whichever came last
    assert torch.equal(found[10:20], other[:10]) or torch.equal(found[10:20], truth[10:20])
    assert torch.equal(found[20:30], other[10:])
    with pytest.raises((OverlapError, IndexMismatchError)):
        torch_dist.read(folder)


def test_a_dtype_that_lies(folder: Path, truth: torch.Tensor) -> None:
    whole = torch.full((20, 51), (1 << 24) + 1, dtype=torch.int64)
    replace_stream(folder, 20, whole)
    assert bool((by_torch(folder)[20:40] == float(1 << 24)).all()), "rounded"
    with pytest.raises(IndexMismatchError, match=r"index says .*float32.*stream holds .*int64"):
        torch_dist.read(folder)


def test_a_dtype_that_nobody_asked_for(folder: Path, truth: torch.Tensor) -> None:
    """Torch casts into whatever the caller has; here what is stored has its own dtype and no other."""
    assert torch.equal(by_torch(folder, dtype=torch.bfloat16), truth.bfloat16())
    assert by_torch(folder, dtype=torch.int64).unique().numel() < 5
    assert torch_dist.read(folder).tensors[KEY].dtype == "float32"


def test_a_chunk_of_another_shape(folder: Path, truth: torch.Tensor) -> None:
    replace_stream(folder, 20, torch.full((25, 51), 3.0))
    assert bool((by_torch(folder)[20:40] == 3.0).all()), "the first rows of it"
    with pytest.raises(IndexMismatchError, match=r"\(25, 51\)"):
        torch_dist.read(folder)


def test_a_chunk_outside_its_tensor(folder: Path) -> None:
    change(folder, lambda index: setattr(index.state_dict_metadata[KEY], "size", torch.Size([70, 51])))
    by_torch(folder, (70, 51))
    with pytest.raises(OutsideError, match=r"offset\(60, 0\) \+ size\(17, 51\) is not in shape\(70, 51\)"):
        torch_dist.read(folder)


def test_a_key_that_nobody_asks_for(folder: Path) -> None:
    """Torch says nothing of what it does not load; here it is one of the names, and none is lost."""

    def add(index: Metadata) -> None:
        entry = index.state_dict_metadata[KEY]
        index.state_dict_metadata["surprise"] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size([20, 51]),
            [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([20, 51]))],
        )  # fmt: skip
        assert entry.chunks
        index.storage_data[MetadataIndex("surprise", torch.Size([0, 0]))] = index.storage_data[at(20)]

    change(folder, add)
    by_torch(folder)
    with pytest.raises(
        OverlapError, match="share no bytes"
    ):  # two keys for one stream are no save of torch's
        torch_dist.read(folder)
    data = stream(torch.ones(20, 51))
    (folder / "__9_0.distcp").write_bytes(data)

    def move(index: Metadata) -> None:
        place = pickle.loads(pickle.dumps(index.storage_data[at(20)]))
        place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(data)
        index.storage_data[MetadataIndex("surprise", torch.Size([0, 0]))] = place

    change(folder, move)
    by_torch(folder)
    assert "other/surprise" in torch_dcp.unnamed(torch_dist.read(folder)).tensors


def test_a_byte_that_flipped(folder: Path, truth: torch.Tensor) -> None:
    manifest = torch_dist.read(folder)
    digests = digest.compute(manifest)
    stored = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert 0.5 * stored < torch_crc.verify(manifest) < stored
    extent = max(manifest.tensors[KEY].extents, key=lambda extent: extent.offset)
    path = folder / extent.file
    data = bytearray(path.read_bytes())
    data[extent.start + 3] ^= 0x40
    path.write_bytes(data)
    found = by_torch(folder)
    assert not torch.equal(found, truth) and torch.equal(found[:60], truth[:60])
    manifest = torch_dist.read(folder)  # what holds it is as it was
    with pytest.raises(DigestError, match=rf"{KEY}.*{path.name}"):
        digest.verify(manifest, digests)
    with pytest.raises(DigestError, match=rf"{path.name}.*{KEY}"):
        torch_crc.verify(manifest)


def test_a_save_without_crcs(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch_crc.verify(torch_dist.read(tmp_path)) == 0


def test_a_file_of_another_save(folder: Path, truth: torch.Tensor) -> None:
    """A rank's file of the step before has the CRCs of its own bytes: only digests can tell."""
    replace_stream(folder, 20, torch.full((20, 51), 3.0))
    assert bool((by_torch(folder)[20:40] == 3.0).all())
    before = digest.compute(torch_dist.read(DATA / "dcp"))
    torch_crc.verify(torch_dist.read(folder))
    with pytest.raises(DigestError, match=KEY):
        digest.verify(torch_dist.read(folder), before)


@pytest.mark.parametrize("what", ["gone", "short"])
def test_what_torch_refuses_too(what: str, folder: Path) -> None:
    path = folder / "__1_0.distcp"
    data = path.read_bytes()
    path.unlink()
    if what == "short":
        path.write_bytes(data[: len(data) // 100])
    with pytest.raises(CheckpointException):
        by_torch(folder)
    with pytest.raises(MissingFileError if what == "gone" else TruncatedError, match="__1_0"):
        torch_dist.read(folder)
