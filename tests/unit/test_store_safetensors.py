"""The safetensors store beside the safetensors package and transformers; reading and digests beside numpy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import (
    DigestError,
    DtypeError,
    ExistsError,
    FormatError,
    GapError,
    MissingFileError,
    OutsideError,
    OverlapError,
    PathError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.store import digest, paths
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, StoredTensor, TensorSpec
from shardweave.store.read import Reader, iter_rows, load
from shardweave.store.safetensors import INDEX, SINGLE, allocate, finish, read
from shardweave.store.safetensors_header import DTYPES, MAX_HEADER_BYTES

NO_NUMPY = ("bfloat16", *(name for name in ITEMSIZE if name.startswith("float8")))


def noise(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def torch_tensor(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bits at all, NaNs and negative zeros among them; bools stay bools."""
    out = torch.empty(shape, dtype=getattr(torch, dtype))
    data = noise(seed, out.nbytes)
    out.view(-1).view(torch.uint8)[:] = torch.from_numpy(data % 2 if dtype == "bool" else data)
    return out


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def fill(manifest: Manifest, values: dict[str, bytes]) -> None:
    for key, data in values.items():
        (extent,) = manifest.tensors[key].extents
        with (manifest.root / extent.file).open("r+b") as file:
            file.seek(extent.start)
            file.write(data)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New arrays come full of 0xA5, so that an element that was never read is seen."""
    empty = np.empty

    def poison(*args: Any, **options: Any) -> Any:
        array = empty(*args, **options)
        array.reshape(-1).view(np.uint8)[...] = 0xA5
        return array

    monkeypatch.setattr(np, "empty", poison)


# --- beside the package -------------------------------------------------------------------------


def test_the_package_and_we_know_the_same_dtypes(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "?", "shape": [], "data_offsets": [0, 0]}}).encode()
    with pytest.raises(safetensors.SafetensorError) as refusal:
        safetensors.deserialize(len(header).to_bytes(8, "little") + header)
    theirs = set(
        str(refusal.value).split("expected one of ")[1].split(" at line")[0].replace("`", "").split(", ")
    )
    assert theirs - {"F4", "F6_E2M3", "F6_E3M2"} == set(DTYPES)


@pytest.mark.usefixtures("poisoned")
def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    tensors = {name: torch_tensor(name, 3, 5, seed=i) for i, name in enumerate(DTYPES.values())}
    tensors |= {"scalar": torch_tensor("float64"), "none": torch_tensor("int16", 4, 0, 3)}
    safetensors.torch.save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt", "ü": "\n"})
    manifest = read(tmp_path)
    assert manifest.format == "hf" and manifest.root == tmp_path
    assert manifest.files == {SINGLE: (tmp_path / SINGLE).stat().st_size}
    assert manifest.records["metadata"] == {SINGLE: {"format": "pt", "ü": "\n"}}
    assert set(manifest.tensors) == set(tensors)
    for key, tensor in tensors.items():
        stored, array = manifest.tensors[key], load(manifest, key)
        assert (stored.dtype, stored.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        assert array.shape == stored.shape and array.tobytes() == raw(tensor)
        words = f"uint{8 * ITEMSIZE[stored.dtype]}"
        assert array.dtype.name == (words if stored.dtype in NO_NUMPY else stored.dtype)


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    tensors = {name: torch_tensor(name, 3, i + 1, seed=i) for i, name in enumerate(DTYPES.values())}
    tensors |= {"scalar": torch_tensor("float64"), "none": torch_tensor("int16", 4, 0, 3)}
    specs = [TensorSpec(key, str(t.dtype)[6:], tuple(t.shape)) for key, t in tensors.items()]
    manifest = allocate(tmp_path, specs)
    fill(manifest, {key: raw(tensor) for key, tensor in tensors.items()})
    finish(manifest)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert read(tmp_path) == manifest
    with safetensors.safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for key, tensor in tensors.items():
            found = file.get_tensor(key)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape) and raw(found) == raw(tensor)


@pytest.mark.parametrize(
    ("folder", "files"), [("hf_qwen3moe_tiny", 4), ("hf_llama_tied_tiny", 1)], ids=["four files", "one file"]
)
def test_reads_folders_of_transformers(data_dir: Path, folder: str, files: int) -> None:
    manifest = read(data_dir / folder)
    assert len(manifest.files) == files and manifest.records["stray"] == ["expected.safetensors"]
    expected = {}
    for name in manifest.files:
        expected |= safetensors.torch.load_file(data_dir / folder / name)
    assert set(expected) == set(manifest.tensors) and len(expected) > 10
    with Reader(manifest) as reader:
        for key, tensor in expected.items():
            assert reader.load(key).tobytes() == raw(tensor)


@pytest.mark.peer("transformers")
def test_transformers_runs_a_model_that_we_laid_out(data_dir: Path, tmp_path: Path) -> None:
    import transformers

    source = read(data_dir / "hf_qwen3moe_tiny")
    specs = [TensorSpec(key, t.dtype, t.shape) for key, t in source.tensors.items()]
    manifest = allocate(tmp_path, specs, max_file_bytes=250_000)
    assert len(manifest.files) == 3
    fill(manifest, {key: load(source, key).tobytes() for key in source.tensors})
    finish(manifest)
    shutil.copy(source.root / "config.json", tmp_path)
    expected = safetensors.torch.load_file(source.root / "expected.safetensors")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(expected["input_ids"]).logits, expected["logits"])


# --- laying out ---------------------------------------------------------------------------------


def test_the_split_follows_the_list_alone(tmp_path: Path) -> None:
    sizes = [60, 40, 8, 92, 300, 0, 100, 12]
    specs = [TensorSpec(f"t{i}", "uint8", (size,)) for i, size in enumerate(sizes)]
    manifest = allocate(tmp_path, specs, max_file_bytes=100)
    names = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    assert list(manifest.files) == names
    assert {key: t.extents[0].file for key, t in manifest.tensors.items()} == {
        "t0": names[0], "t1": names[0], "t2": names[1], "t3": names[1], "t4": names[2],
        "t5": names[3], "t6": names[3], "t7": names[4],
    }  # fmt: skip
    finish(manifest, fsync=False)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes) and set(index["weight_map"]) == {
        s.key for s in specs
    }
    found = read(tmp_path)
    assert found.tensors == manifest.tensors and found.files == manifest.files
    assert not list(tmp_path.glob("*.tmp"))


def test_data_is_aligned_and_keeps_the_given_order_where_it_can(tmp_path: Path) -> None:
    mixed, plain = tmp_path / "mixed", tmp_path / "plain"
    mixed.mkdir(), plain.mkdir()
    manifest = allocate(mixed, [TensorSpec("b", "uint8", (3,)), TensorSpec("a", "float32", (5,))])
    assert list(manifest.tensors) == ["a", "b"]
    for tensor in manifest.tensors.values():
        assert tensor.extents[0].start % ITEMSIZE[tensor.dtype] == 0
    assert manifest.tensors["a"].extents[0].start % 64 == 0
    manifest = allocate(plain, [TensorSpec("b", "bfloat16", (3,)), TensorSpec("a", "bfloat16", (5,))])
    assert list(manifest.tensors) == ["b", "a"]
    assert manifest.tensors["a"].extents[0].start - manifest.tensors["b"].extents[0].start == 6


def test_a_folder_without_tensors(tmp_path: Path) -> None:
    manifest = allocate(tmp_path, [], metadata={"made": "today"})
    finish(manifest)
    assert read(tmp_path) == manifest and manifest.tensors == {}
    with safetensors.safe_open(tmp_path / SINGLE, "np") as file:
        assert list(file.keys()) == [] and file.metadata() == {"made": "today"}


@pytest.mark.parametrize(
    ("specs", "error", "words"),
    [
        ([("a", "uint8", (2,)), ("a", "uint8", (3,))], FormatError, "key occurs once: 'a'"),
        ([("a", "float4", (2,))], DtypeError, "dtype='float4'"),
        ([("__metadata__", "uint8", (2,))], FormatError, "the format's own"),
        ([("a\ud800", "uint8", (2,))], FormatError, "a key is text"),
        ([("a", "uint8", (2, -3))], FormatError, "a shape is a list"),
        ([("a", "uint8", (2, True))], FormatError, "a shape is a list"),
        ([("a", "float64", (2**31, 2**31))], FormatError, "63 bits"),
        ([("a", "uint8", (2,), (((0,), (1,)), ((1,), (1,))))], FormatError, "whole"),
        ([("k" * MAX_HEADER_BYTES, "uint8", (2,))], FormatError, "longer than readers accept"),
    ],
    ids=["twice", "dtype", "reserved", "surrogate", "negative", "bool", "overflow", "chunks", "header"],
)
def test_refuses_to_write_what_readers_refuse(
    tmp_path: Path, specs: list[tuple[Any, ...]], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        allocate(tmp_path, [TensorSpec(*spec) for spec in specs])
    assert list(tmp_path.iterdir()) == []


def test_refuses_bad_places_and_options(tmp_path: Path) -> None:
    spec = TensorSpec("a", "uint8", (2,), (((0,), (2,)),))
    with pytest.raises(MissingFileError, match="folder to write into exists"):
        allocate(tmp_path / "none", [spec])
    with pytest.raises(FormatError, match="max_file_bytes=0 < 1"):
        allocate(tmp_path, [spec], max_file_bytes=0)
    with pytest.raises(FormatError, match="text to text"):
        allocate(tmp_path, [spec], metadata={"step": 3})  # type: ignore[dict-item]
    allocate(tmp_path, [spec])
    with pytest.raises(ExistsError, match=SINGLE):
        allocate(tmp_path, [spec])


def test_finish_notices_payload_in_the_wrong_place(tmp_path: Path) -> None:
    manifest = allocate(tmp_path, [TensorSpec("a", "uint8", (20,)), TensorSpec("b", "uint8", (30,))])
    path = tmp_path / SINGLE
    good = path.read_bytes()
    path.write_bytes(good.replace(b"[20]", b"[21]").replace(b"[30]", b"[29]"))
    with pytest.raises(FormatError, match="span"):
        finish(manifest)
    path.write_bytes(good.replace(b'"a"', b'"c"'))
    with pytest.raises(FormatError, match="2 tensors changed: 'c', 'a'"):
        finish(manifest)
    path.write_bytes(good[:-1])
    with pytest.raises(TruncatedError):
        finish(manifest)


# --- reading through any manifest ---------------------------------------------------------------


def cut_tensor(
    root: Path, array: np.ndarray[Any, Any], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Manifest:
    """An array stored as boxes in two files, every other box with its dims reversed in the file."""
    extents, blobs = [], {"a.bin": b"#" * 5, "sub/b.bin": b"#" * 3}
    for i, (offset, shape) in enumerate(boxes):
        box = array[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        name = ("a.bin", "sub/b.bin")[i % 2]
        strides = None
        if i % 3 == 1:
            strides = tuple(s // array.itemsize for s in np.empty(shape, array.dtype, order="F").strides)
        extents.append(Extent(offset, shape, name, len(blobs[name]), strides))
        blobs[name] += box.tobytes("F" if strides else "C") + b"#" * 7
    (root / "sub").mkdir(exist_ok=True)
    for name, blob in blobs.items():
        (root / name).write_bytes(blob)
    tensor = StoredTensor("w", array.dtype.name, array.shape, tuple(extents))
    return Manifest(root, "torch_dist", {"w": tensor}, {name: len(blob) for name, blob in blobs.items()})


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        rest = (*size[:dim], size[dim] - at, *size[dim + 1 :])
        boxes += [
            (offset, (*size[:dim], at, *size[dim + 1 :])),
            ((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), rest),
        ]
    return shape, draw(st.permutations(boxes))


@given(
    tiling=tilings(),
    max_bytes=st.integers(1, 300),
    buffer=st.sampled_from([1, 10, 1 << 20]),
    row=st.sampled_from([1, 10, 1 << 14]),
)
def test_any_cut_reads_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, tiling: Any, max_bytes: int, buffer: int, row: int
) -> None:
    shape, boxes = tiling
    array = noise(7, *shape, 4).view(np.uint32).reshape(shape)
    manifest = cut_tensor(tmp_path_factory.mktemp("cut"), array, boxes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardweave.store.read._BUFFER_BYTES", buffer)
        patch.setattr("shardweave.store.read._ROW_BYTES", row)
        assert np.array_equal(load(manifest, "w"), array)
        slabs = list(iter_rows(manifest, "w", max_bytes=max_bytes))
    assert b"".join(slab.tobytes() for _, slab in slabs) == array.tobytes()
    for offset, slab in slabs:
        assert 0 < slab.nbytes <= max(max_bytes, 4)
        assert np.array_equal(
            slab, array[tuple(slice(o, o + n) for o, n in zip(offset, slab.shape, strict=True))]
        )
    assert digest.compute(manifest, max_bytes=max_bytes) == {"w": xxhash.xxh3_128_hexdigest(array.tobytes())}


GRID = [((0, 0), (2, 5)), ((0, 5), (2, 2)), ((2, 0), (3, 1)), ((2, 1), (3, 6))]


@pytest.mark.usefixtures("poisoned")
def test_a_box_is_read_alone_and_every_element_comes_from_a_file(tmp_path: Path) -> None:
    array = noise(3, 5, 7)
    manifest = cut_tensor(tmp_path, array, GRID)
    with Reader(manifest) as reader:
        assert np.array_equal(reader.load("w"), array)
        assert np.array_equal(reader.load_box("w", (1, 4), (3, 2)), array[1:4, 4:6])
        assert reader.load_box("w", (5, 0), (0, 7)).shape == (0, 7)
        for offset, shape in [((1, 4), (5, 2)), ((-1, 0), (2, 2)), ((0,), (5,)), ((2, 2), (-1, 3))]:
            with pytest.raises(OutsideError, match=r"tensor shape=\(5, 7\)"):
                reader.load_box("w", offset, shape)
        with pytest.raises(UnknownNameError, match="'v'"):
            reader.load("v")


@pytest.mark.parametrize(
    ("boxes", "error"),
    [
        (GRID[:3], GapError),
        ([*GRID, GRID[1]], OverlapError),
        ([*GRID[:3], ((2, 0), (3, 6))], OverlapError),  # sizes add up: one column is twice there, one never
        ([*GRID[:3], ((2, 2), (3, 6))], OutsideError),
    ],
    ids=["gap", "twice", "shifted", "outside"],
)
def test_boxes_that_do_not_tile_are_refused(tmp_path: Path, boxes: list[Any], error: type[Exception]) -> None:
    manifest = cut_tensor(tmp_path, noise(3, 5, 8), GRID)
    good = manifest.tensors["w"].extents[0]
    extents = tuple(Extent(offset, shape, good.file, 0) for offset, shape in boxes)
    bad = Manifest(tmp_path, "torch_dist", {"w": StoredTensor("w", "uint8", (5, 7), extents)}, manifest.files)
    with pytest.raises(error, match="'w'"):
        load(bad, "w")


def test_scalars_and_rows_of_a_repeated_storage(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(1, 13)))
    expanded = StoredTensor("e", "uint16", (3, 4), (Extent((0, 0), (3, 4), "x", 2, (0, 1)),))
    scalar = StoredTensor("s", "float32", (), (Extent((), (), "x", 4),))
    twice = StoredTensor("t", "uint8", (), (Extent((), (), "x", 4), Extent((), (), "x", 5)))
    huge = StoredTensor("h", "uint8", (1 << 40, 3), (Extent((0, 0), (1 << 40, 3), "x", 0, (0, 1)),))
    back = StoredTensor("n", "uint8", (3,), (Extent((0,), (3,), "x", 4, (-1,)),))
    manifest = Manifest(
        tmp_path, "torch_dist", {t.key: t for t in (expanded, scalar, twice, huge, back)}, {"x": 12}
    )
    row = np.frombuffer(bytes(range(3, 11)), "<u2")
    assert np.array_equal(load(manifest, "e"), np.stack([row] * 3))
    assert load(manifest, "s").tobytes() == bytes([5, 6, 7, 8])
    with pytest.raises(OverlapError):
        load(manifest, "t")
    with pytest.raises(FormatError, match="is not larger than the files"):
        load(manifest, "h")
    with pytest.raises(OutsideError, match="not negative"):
        load(manifest, "n")


def short_reads(limit: int) -> Callable[..., int]:
    preadv = os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        return preadv(fd, [buffers[0][:limit]], offset)

    return short


@pytest.mark.usefixtures("poisoned")
def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = noise(3, 5, 7)
    manifest = cut_tensor(tmp_path, array, GRID)
    monkeypatch.setattr(os, "preadv", short_reads(2))
    assert np.array_equal(load(manifest, "w"), array)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = cut_tensor(tmp_path, noise(3, 5, 7), GRID)
    with Reader(manifest) as reader:
        reader.load("w")
        os.truncate(tmp_path / "a.bin", 20)
        with pytest.raises(TruncatedError, match=r"'w' in 'a.bin'.*wanted"):
            reader.load("w")
    with pytest.raises(TruncatedError, match=r"of a file of 20 bytes"):
        load(manifest, "w")


def test_a_tensor_5_gb_into_a_sparse_file(tmp_path: Path) -> None:
    specs = [TensorSpec("hole", "uint8", (5_000_000_000,)), TensorSpec("end", "int64", (1,))]
    manifest = allocate(tmp_path, specs, max_file_bytes=6_000_000_000)
    start = manifest.tensors["end"].extents[0].start
    assert start > 5_000_000_000 and (tmp_path / SINGLE).stat().st_blocks < 100
    fill(manifest, {"end": b"\1\2\3\4\5\6\7\xff"})
    finish(manifest)
    assert load(read(tmp_path), "end").tobytes() == b"\1\2\3\4\5\6\7\xff"
    offset, slab = next(iter_rows(manifest, "hole", max_bytes=1000))
    assert offset == (0,) and slab.nbytes == 1000
    with safetensors.safe_open(tmp_path / SINGLE, "np") as file:
        assert file.get_tensor("end").tobytes() == b"\1\2\3\4\5\6\7\xff"


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardweave.store.read._MAX_OPEN", 2)
    specs = [TensorSpec(f"t{i}", "uint8", (10,)) for i in range(5)]
    manifest = allocate(tmp_path, specs, max_file_bytes=10)
    fill(manifest, {f"t{i}": bytes([i] * 10) for i in range(5)})
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.exists() else None
    with Reader(manifest) as reader:
        for i in (0, 1, 2, 3, 4, 0):
            assert (reader.load(f"t{i}") == i).all()
        if before is not None:
            assert len(list(descriptors.iterdir())) - before == 2


# --- digests ------------------------------------------------------------------------------------


def test_digests_survive_another_cut_and_find_damage(tmp_path: Path) -> None:
    array = noise(3, 5, 7)
    manifest = cut_tensor(tmp_path, array, GRID)
    other = tmp_path / "other"
    other.mkdir()
    whole = allocate(other, [TensorSpec("w", "uint8", (5, 7)), TensorSpec("x", "float32", (2,))])
    fill(whole, {"w": array.tobytes()})
    assert digest.compute(whole, keys=["w"]) == digest.compute(manifest, max_bytes=3)
    assert digest.of_array(array.T.copy().T) == digest.compute(manifest)["w"] != digest.of_array(array.T)

    digest.write_sidecar(other, digest.compute(whole))
    for workers in (1, 2, 5):
        assert list(digest.compute(whole, workers=workers).items()) == list(digest.compute(whole).items())
        digest.verify(whole, workers=workers)
    assert set(digest.read_sidecar(other)) == {"w", "x"}
    fill(whole, {"w": array.tobytes()[:-1] + bytes([array[-1, -1] ^ 1])})
    with pytest.raises(DigestError, match=rf"'w' in {SINGLE}: [0-9a-f]{{32}} != [0-9a-f]{{32}}\. hint"):
        digest.verify(whole, workers=2)


def test_digests_and_tensors_must_be_the_same_set(tmp_path: Path) -> None:
    manifest = cut_tensor(tmp_path, noise(3, 5, 7), GRID)
    good = digest.compute(manifest)
    with pytest.raises(DigestError, match="'v' has no tensor"):
        digest.verify(manifest, {**good, "v": good["w"]})
    with pytest.raises(DigestError, match="'w' has no record"):
        digest.verify(manifest, {})
    with pytest.raises(MissingFileError, match=digest.SIDECAR):
        digest.verify(manifest)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"algorithm":"md5","tensors":{}}', '{"algorithm":"xxh3_128","tensors":{"a":"xyz"}}',
     '{"algorithm":"xxh3_128","tensors":{"a":"' + "0" * 32 + '","a":"' + "1" * 32 + '"}}'],
)  # fmt: skip
def test_a_bad_sidecar_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / digest.SIDECAR).write_text(text)
    with pytest.raises(FormatError):
        digest.read_sidecar(tmp_path)


# --- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "C:x", "c:/x", "a\\b",
     "..\\x", "a\0b", "a\nb", "\ud800", "leave/x", "leave", "loop"],
)  # fmt: skip
def test_paths_that_leave_are_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "leave").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    with pytest.raises(PathError, match=r"index\.json"):
        paths.inside(root, name, where="index.json")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Path]:
    """A hub cache: files of a snapshot are links to blobs."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    yield snapshot


def test_paths_that_stay_are_kept(tmp_path: Path, hub: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    for name in ("a.safetensors", "b/c.d", "..a", "a..b", "名前 1"):
        assert paths.inside(tmp_path, name, where="x") == tmp_path / name
        assert paths.inside(tmp_path / "alias", name, where="x") == tmp_path / "alias" / name
    allocate(hub.parent.parent / "blobs", [TensorSpec("a", "uint8", (2,))])
    (hub / SINGLE).symlink_to(f"../../blobs/{SINGLE}")
    assert set(read(hub).tensors) == {"a"} and load(read(hub), "a").tobytes() == b"\0\0"
    assert load(read(hub / SINGLE), "a").tobytes() == b"\0\0"
    (tmp_path / "real" / "link.safetensors").symlink_to(hub / SINGLE)
    assert load(read(tmp_path / "real" / "link.safetensors"), "a").tobytes() == b"\0\0"
    plain = hub.parent.parent / "plain" / "c0ffee"
    plain.mkdir(parents=True)
    (plain / SINGLE).symlink_to(f"../../blobs/{SINGLE}")
    with pytest.raises(PathError, match="leads to"):
        read(plain)
    (hub / "other").symlink_to("../../../real")
    with pytest.raises(PathError):
        paths.inside(hub, "other", where="x")
