"""Streams of many tensors: laid out first, filled by others, and read by torch in the end."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from filling import fill
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import (
    ExistsError,
    GapError,
    MissingFileError,
    OutsideError,
    PickleError,
    TruncatedError,
)
from shardweave.store import crc, laid_out, torch_archive, torch_save
from shardweave.store.laid_out import LaidOut
from shardweave.store.manifest import TensorSpec
from shardweave.store.pickles import Global, Instance
from shardweave.store.torch_archive import Bytes, Part, View, constant
from shardweave.store.torch_dist import OBJECTS


def written(value: object, contents: dict[Bytes, bytes]) -> bytes:
    archive = torch_archive.lay_out(value)
    data = [storage.data if storage.data is not None else contents[storage] for storage in archive.storages]
    out = bytearray(archive.num_bytes)
    for at, piece in archive.around([zlib.crc32(part) for part in data]):
        out[at : at + len(piece)] = piece
    for start, part in zip(archive.starts, data, strict=True):
        out[start : start + len(part)] = part
    return bytes(out)


def test_torch_reads_what_was_laid_out() -> None:
    """Views of one storage, strides, an empty storage, known bytes, a dtype without a typed storage."""
    flat, empty, small = Bytes(24), Bytes(0), Bytes(8)
    value = {
        "views": [View(flat, "float32", (2, 2)), View(flat, "float32", (2,), offset=4)],
        "columns": View(flat, "float32", (2, 3), strides=(1, 2)),
        "none": View(empty, "bfloat16", (0,)),
        "step": constant(b"\0\0\x80?", "float32"),
        "narrow": View(small, "float8_e4m3fn", (4, 2)),
        "ordered": Instance(Global("collections", "OrderedDict"), ([["a", View(flat, "float32", (6,))]],)),
        "plain": (1, [2.5, None], "three"),
    }
    content = os.urandom(24)
    data = written(value, {flat: content, empty: b"", small: bytes(range(8))})
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    found = torch.load(io.BytesIO(data), weights_only=True)
    expected = torch.frombuffer(bytearray(content), dtype=torch.float32)
    assert torch.equal(found["views"][0].view(torch.int32), expected[:4].view(2, 2).view(torch.int32))
    assert torch.equal(found["views"][1].view(torch.int32), expected[4:].view(torch.int32))
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][1].untyped_storage().data_ptr()
    assert torch.equal(
        found["columns"].contiguous().view(torch.int32),
        expected.view(3, 2).t().contiguous().view(torch.int32),
    )
    assert found["none"].shape == (0,) and found["none"].dtype == torch.bfloat16
    assert found["step"].item() == 1.0 and found["step"].shape == ()
    assert found["narrow"].view(torch.uint8).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert type(found["ordered"]) is OrderedDict and found["plain"] == (1, [2.5, None], "three")


def test_the_reader_finds_each_view_where_it_was_laid_out() -> None:
    flat, other = Bytes(40), Bytes(12)
    value = {
        "a": View(flat, "float32", (2, 3)),
        "b": View(flat, "float32", (4,), offset=6),
        "c": View(other, "bfloat16", (6,)),
    }
    archive = torch_archive.lay_out(value)
    data = written(value, {flat: bytes(40), other: bytes(12)})
    assert len(data) == archive.num_bytes
    found = torch_save.load(data, 0, len(data), allow=OBJECTS, where="here")
    first, second = archive.starts
    assert [found[key].start for key in "abc"] == [first, first + 24, second]
    assert all(start % torch_save.ALIGNMENT == 0 for start in archive.starts)


def test_many_records_need_a_wide_directory() -> None:
    """A zip directory counts to 65,534 without its wider form."""
    count = 65_540
    whole = torch_save.Zip()
    for number in range(count):
        whole.record(f"data/{number}", b"\x01")
    data = whole.close()
    assert len(torch_save.records(data, 0, len(data), where="here")) == count
    with zipfile.ZipFile(io.BytesIO(data)) as archive:  # torch takes half a minute to read so many
        assert len(archive.namelist()) == count and archive.read(f"archive/data/{count - 1}") == b"\x01"


def test_what_no_archive_can_hold_is_refused() -> None:
    flat = Bytes(8)
    with pytest.raises(OutsideError, match=r"offset\(1\), last\(2\)"):
        torch_archive.lay_out(View(flat, "float32", (2,), offset=1))
    with pytest.raises(OutsideError, match="lies inside its storage"):
        torch_archive.lay_out(View(flat, "float32", (2, 2), strides=(0, 2)))
    with pytest.raises(PickleError, match="have one dtype"):
        torch_archive.lay_out([View(flat, "float32", (2,)), View(flat, "int32", (2,))])
    with pytest.raises(PickleError, match=r"storages known\(0\)"):
        torch_archive.stream(View(flat, "float32", (2,)))
    with pytest.raises(PickleError, match="only plain values"):
        torch_archive.lay_out({"x": object()})


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(0, 3000))
def test_checksums_of_neighbours_join(first: bytes, second: bytes, gap: int) -> None:
    joined = crc.combine(crc.zeros(gap, zlib.crc32(first)), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + bytes(gap) + second)


# --- files -------------------------------------------------------------------------------------------

SPECS = [TensorSpec("a", "float32", (5, 3)), TensorSpec("b", "int64", ()), TensorSpec("c", "float32", (0, 4))]


def cut() -> list[LaidOut]:
    """Array `a` in two ranges of two files with padding between and behind, and `b` in both."""
    parts = [(Part("a", 0, 7, 0),), (Part("a", 7, 15, 4),)]
    return [
        LaidOut(
            f"tag/{number}.pt",
            torch_archive.lay_out(
                {
                    "flat": View(Bytes(40, part), "float32", (10,)),
                    "count": View(Bytes(8, (Part("b", 0, 1, 0, copy=number > 0),)), "int64", ()),
                }
            ),
        )
        for number, part in enumerate(parts)
    ]


def arrays() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(15.0).view(5, 3) + 0.5, "b": torch.tensor(2**53 + 1), "c": torch.empty(0, 4)}


def test_files_hold_ranges_zeros_and_copies(tmp_path: Path) -> None:
    manifest = laid_out.create(tmp_path, SPECS, cut(), format="test", records={})
    assert {extent.file for extent in manifest.tensors["a"].extents} == {"tag/0.pt", "tag/1.pt"}
    checksums = fill(manifest, arrays())
    for again in (checksums, None):  # sealing is repeatable, with and without what the caller knows
        laid_out.seal(manifest, cut(), again)
        for number in range(2):
            path = tmp_path / f"tag/{number}.pt"
            assert zipfile.ZipFile(path).testzip() is None
            found = torch.load(path, weights_only=True)
            expected = torch.zeros(10)
            values = arrays()["a"].flatten()[7 * number : 7 + 8 * number]
            expected[number : number + len(values)] = values
            assert torch.equal(found["flat"], expected)
            assert found["count"].item() == 2**53 + 1


def test_a_wrong_checksum_is_seen_in_the_archive(tmp_path: Path) -> None:
    """The archive says of an extent what the caller says, so that the check of a zip file finds an error."""
    manifest = laid_out.create(tmp_path, SPECS, cut(), format="test", records={})
    checksums = fill(manifest, arrays())
    known = {extent: checksums.get(extent, 0) for extent in manifest.tensors["a"].extents}
    known[manifest.tensors["a"].extents[0]] ^= 1
    laid_out.seal(manifest, cut(), known)
    assert zipfile.ZipFile(tmp_path / "tag/0.pt").testzip() == "archive/data/0"


def test_nothing_is_written_where_files_do_not_hold_the_arrays(tmp_path: Path) -> None:
    first, second = cut()
    with pytest.raises(GapError, match=r"elements stored\(7\)"):
        laid_out.create(tmp_path, SPECS, [first], format="test", records={})
    assert not list(tmp_path.iterdir())
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag/1.pt").touch()
    with pytest.raises(ExistsError, match=r"holds tag/1\.pt"):
        laid_out.create(tmp_path, SPECS, [first, second], format="test", records={})
    assert not (tmp_path / "tag/0.pt").exists()


def test_files_that_changed_are_not_sealed(tmp_path: Path) -> None:
    manifest = laid_out.create(tmp_path, SPECS, cut(), format="test", records={})
    fill(manifest, arrays())
    with (tmp_path / "tag/1.pt").open("ab") as file:
        file.write(b"x")
    with pytest.raises(TruncatedError, match=r"size\(\d+\) != \d+"):
        laid_out.seal(manifest, cut())
    (tmp_path / "tag/1.pt").unlink()
    with pytest.raises(MissingFileError, match="it is gone"):
        laid_out.seal(manifest, cut())
