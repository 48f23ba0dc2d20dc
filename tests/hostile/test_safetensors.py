"""Safetensors files and folders that lie: refused by a named error, or read as the package reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardweave.errors import (
    DtypeError,
    FormatError,
    IndexMismatchError,
    MissingFileError,
    PathError,
    ShardweaveError,
    TruncatedError,
)
from shardweave.store.manifest import ITEMSIZE
from shardweave.store.read import load
from shardweave.store.safetensors import INDEX, SINGLE, read
from shardweave.store.safetensors_header import DTYPES, MAX_HEADER_BYTES


def file_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def save(path: Path, *keys: str, value: int = 0) -> int:
    """Tensors of 3 float32 each; returns their bytes."""
    safetensors.numpy.save_file({key: np.full(3, value, np.float32) for key in keys}, path)
    return 12 * len(keys)


def save_index(root: Path, weight_map: dict[str, str], **metadata: Any) -> None:
    (root / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


# --- one file -----------------------------------------------------------------------------------

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:"
    + b"4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345678\n\n"
)
F32 = entry("F32", [2, 3], 0, 24)
BAD_FILES = {
    "size against shape": (
        file_bytes({"w": entry("F32", [2, 3], 0, 20)}, bytes(20)),
        FormatError,
        "= 24 bytes",
    ),
    "pointer": (POINTER, FormatError, r"git-lfs pointer.*file size=\d+, first bytes=b'version https"),
    "text": (
        b"<!DOCTYPE html>".ljust(135),
        FormatError,
        r"header that readers accept.*size=135.*b'<!DOCTYPE html>",
    ),
    "pickle": (b"\x80\x02}q\x00." + bytes(60), FormatError, "header that readers accept"),
    "zip": (b"PK\3\4" + bytes(60), FormatError, "header that readers accept"),
    "absurd header": (
        b"\x40\x9d\xdf\x07" + bytes(4) + b"{}",
        FormatError,
        "length=132095296 of at most 100000000",
    ),
    "header beyond file": ((1000).to_bytes(8, "little") + b'{"a', TruncatedError, r"1000 > file size=11"),
    "empty": (b"", TruncatedError, "file size=0"),
    "seven bytes": (bytes(7), TruncatedError, "file size=7"),
    "no header": (bytes(8), FormatError, "holds one JSON object"),
    "cut data": (file_bytes({"w": F32}, bytes(23)), TruncatedError, "promises"),
    "behind": (file_bytes({"w": F32}, bytes(25)), FormatError, "ends with its last tensor"),
    "bad json": (file_bytes(b'{"w":'), FormatError, "holds one JSON object"),
    "list": (file_bytes(b"[]"), FormatError, "header that readers accept"),
    "space first": (file_bytes(b" {}"), FormatError, "header that readers accept"),
    "not utf-8": (file_bytes(b'{"\xff":1}'), FormatError, "holds one JSON object"),
    "half a pair in a key": (
        file_bytes(b'{"\\udc00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        FormatError,
        "holds one JSON object",
    ),
    "half a pair": (file_bytes(b'{"__metadata__":{"a":"\\ud800"}}'), FormatError, "holds one JSON object"),
    "deep": (file_bytes(b'{"a":' + b"[" * 100_000), FormatError, "holds one JSON object"),
    "nested": (file_bytes(b'{"a":' + b"[" * 400 + b"]" * 400 + b"}"), FormatError, "described by"),
    "nan": (file_bytes(b'{"w":NaN}'), FormatError, "NaN is no JSON"),
    "twice": (
        file_bytes(b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":1}', b"x"),
        FormatError,
        "key='w'",
    ),
    "twice inside": (
        file_bytes(b'{"w":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        FormatError,
        "key='dtype'",
    ),
    "dtype": (file_bytes({"w": entry("F7", [2], 0, 2)}, b"xx"), DtypeError, "'w'.*'F7' not in"),
    "dtype list": (file_bytes({"w": entry(["F32"], [2], 0, 2)}, b"xx"), DtypeError, "tensor is known"),  # type: ignore[arg-type]
    "sub-byte": (file_bytes({"w": entry("F4", [4], 0, 2)}, b"xx"), DtypeError, "at least a byte wide"),
    "negative": (file_bytes({"w": entry("U8", [-2, -3], 0, 6)}, bytes(6)), FormatError, "a shape is a list"),
    "float": (file_bytes({"w": entry("U8", [2.0], 0, 2)}, bytes(2)), FormatError, "a shape is a list"),
    "bool": (file_bytes({"w": entry("U8", [True], 0, 1)}, bytes(1)), FormatError, "a shape is a list"),
    "minus zero": (
        file_bytes(b'{"w":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        FormatError,
        "a shape is a list",
    ),
    "huge": (file_bytes({"w": entry("U8", [2**63], 0, 1)}, b"x"), FormatError, "a shape is a list"),
    "digits": (file_bytes(b'{"w":' + b"9" * 5000 + b"}"), FormatError, "holds one JSON object"),
    "65 dims": (file_bytes({"w": entry("U8", [1] * 65, 0, 1)}, b"x"), FormatError, "at most 64"),
    "overflow": (file_bytes({"w": entry("F64", [2**32, 2**32], 0, 0)}), FormatError, "63 bits"),
    "overflow to 0": (file_bytes({"w": entry("F64", [2**62, 8, 0], 0, 0)}), FormatError, "63 bits"),
    "text shape": (file_bytes({"w": entry("U8", "3", 0, 3)}, b"xxx"), FormatError, "a shape is a list"),  # type: ignore[arg-type]
    "offsets swapped": (file_bytes({"w": entry("U8", [3], 3, 0)}, b"xxx"), FormatError, "span"),
    "three offsets": (
        file_bytes({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"xx"),
        FormatError,
        "two whole",
    ),
    "offsets outside": (file_bytes({"w": entry("U8", [3], 9, 12)}, b"xxx"), FormatError, "hole"),
    "hole": (
        file_bytes({"v": entry("U8", [2], 0, 2), "w": entry("U8", [2], 3, 5)}, bytes(5)),
        FormatError,
        "hole: 'w'.*3 != .*2",
    ),
    "overlap": (
        file_bytes({"v": entry("U8", [3], 0, 3), "w": entry("U8", [3], 2, 5)}, bytes(5)),
        FormatError,
        "overlap: 'w'.*2 != .*3",
    ),
    "same bytes": (
        file_bytes({"v": entry("U8", [3], 0, 3), "w": entry("U8", [3], 0, 3)}, bytes(3)),
        FormatError,
        "overlap",
    ),
    "extra field": (
        file_bytes({"w": {**entry("U8", [1], 0, 1), "scale": 3}}, b"x"),
        FormatError,
        "described by",
    ),
    "missing field": (file_bytes({"w": {"dtype": "U8", "shape": [1]}}, b"x"), FormatError, "described by"),
    "number entry": (file_bytes({"w": 3}), FormatError, "described by"),
    "metadata number": (file_bytes({"__metadata__": {"step": 3}}), FormatError, "text to text"),
    "metadata null": (file_bytes({"__metadata__": None}), FormatError, "text to text"),
    "shards of torch": (
        file_bytes({"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "w": entry("U8", [1], 0, 1)}, b"x"),
        FormatError,
        "shards",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_b128_a_bad_file_is_named(tmp_path: Path, name: str) -> None:
    data, error, words = BAD_FILES[name]
    path = tmp_path / SINGLE
    path.write_bytes(data)
    with pytest.raises(error, match=words) as caught:
        read(tmp_path)
    assert type(caught.value) is error and str(path) in str(caught.value) and len(str(caught.value)) < 1500


def test_b128_five_kinds_of_bad_files_have_five_errors(tmp_path: Path) -> None:
    messages = set()
    for name in ("size against shape", "pointer", "cut data", "bad json", "dtype"):
        (tmp_path / SINGLE).write_bytes(BAD_FILES[name][0])
        with pytest.raises(ShardweaveError) as caught:
            read(tmp_path)
        messages.add((type(caught.value), caught.value.rule))
    assert len(messages) == 5


def test_b128_metadata_alone_is_valid(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(safetensors.numpy.save({}, {"format": "pt"}))
    manifest = read(tmp_path)
    assert manifest.tensors == {} and manifest.records["metadata"] == {SINGLE: {"format": "pt"}}


def test_b127_the_longest_header_is_read_and_a_longer_one_refused(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    for length, error in ((MAX_HEADER_BYTES, None), (MAX_HEADER_BYTES + 1, FormatError)):
        path.write_bytes(file_bytes(b"{}".ljust(length)))
        if error:
            with pytest.raises(error, match=f"length={length}"):
                read(tmp_path)
        else:
            assert read(tmp_path).tensors == {}
            with safetensors.safe_open(path, "np") as file:
                assert list(file.keys()) == []


def test_zero_sizes_and_scalars_between_tensors(tmp_path: Path) -> None:
    header = {
        "none": entry("F32", [0, 2**40], 2, 2), "w": entry("U8", [2], 0, 2), "s": entry("I64", [], 2, 10),
        "first": entry("U8", [0], 0, 0), "last": entry("BF16", [3, 0], 10, 10),
    }  # fmt: skip
    data = file_bytes(header, bytes(range(10)))
    (tmp_path / SINGLE).write_bytes(data)
    manifest = read(tmp_path)
    assert set(manifest.tensors) == set(header) == {key for key, _ in safetensors.deserialize(data)}
    assert load(manifest, "s").tobytes() == bytes(range(2, 10)) and load(manifest, "s").shape == ()
    assert load(manifest, "last").shape == (3, 0)


def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(FormatError, match="regular file"):
        read(tmp_path)
    with pytest.raises(FormatError, match="regular file"):
        read(tmp_path / SINGLE)
    with pytest.raises(FormatError, match=r"folder or a \.safetensors file"):
        (tmp_path / "model.bin").write_bytes(b"")
        read(tmp_path / "model.bin")
    with pytest.raises(MissingFileError):
        read(tmp_path / "nowhere")


# --- folders with an index ----------------------------------------------------------------------


def test_b123_index_and_headers_are_proved_both_ways(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", "x", "unlisted")
    save(tmp_path / "b.safetensors", "y")
    save_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    with pytest.raises(IndexMismatchError) as caught:
        read(tmp_path)
    text = str(caught.value)
    assert "index entries=3, keys in headers=3" in text
    assert (
        "2 listed but not held: 'y' not in a.safetensors, but in b.safetensors, 'z' not in b.safetensors;"
        in text
    )
    assert "1 held but not listed: 'unlisted' of a.safetensors" in text


def test_b124_all_missing_files_are_named(tmp_path: Path) -> None:
    save(tmp_path / "b.safetensors", "y")
    save(tmp_path / "D.safetensors", "v")
    names = {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors", "v": "d.safetensors"}
    save_index(tmp_path, names)
    with pytest.raises(MissingFileError) as caught:
        read(tmp_path)
    text = str(caught.value)
    assert "3 of 4 files missing: a.safetensors, c.safetensors, d.safetensors" in text
    assert "the folder holds 'D.safetensors', which differs in case" in text
    save(tmp_path / "a.safetensors", "x")
    save(tmp_path / "d.safetensors", "v")
    (tmp_path / "c.safetensors").write_bytes(b"")
    with pytest.raises(TruncatedError, match=r"c\.safetensors"):
        read(tmp_path)


def test_files_that_differ_in_case_alone_are_two_files(tmp_path: Path) -> None:
    save(tmp_path / "A.safetensors", "x", value=1)
    save(tmp_path / "a.safetensors", "y", value=2)
    if len(list(tmp_path.iterdir())) < 2:
        pytest.skip("this file system does not tell cases apart")
    save_index(tmp_path, {"x": "A.safetensors", "y": "a.safetensors"}, total_size=24.0)
    manifest = read(tmp_path)
    assert load(manifest, "x")[0] == 1 and load(manifest, "y")[0] == 2


def test_b125_the_index_chooses_among_copies_and_strays_are_ignored(tmp_path: Path) -> None:
    save(tmp_path / "base.safetensors", "w", "v", value=1)
    save(tmp_path / "overlay.safetensors", "w", value=2)
    save(tmp_path / "stray.safetensors", "w", "u", value=3)
    (tmp_path / "broken.safetensors").write_bytes(b"?")
    save_index(tmp_path, {"w": "overlay.safetensors", "v": "base.safetensors"}, total_size=24)
    manifest = read(tmp_path)
    assert (load(manifest, "w") == 2).all() and (load(manifest, "v") == 1).all()
    assert set(manifest.tensors) == {"w", "v"} and set(manifest.files) == {
        "base.safetensors",
        "overlay.safetensors",
    }
    assert manifest.records["overlaid"] == {"w": ["base.safetensors"]}
    assert manifest.records["stray"] == ["broken.safetensors", "stray.safetensors"]


def test_a_second_whole_model_beside_the_index_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", "w")
    save(tmp_path / SINGLE, "w")
    save_index(tmp_path, {"w": "a.safetensors"})
    with pytest.raises(FormatError, match="holds one checkpoint"):
        read(tmp_path)


@pytest.mark.parametrize("claim", [11, 13, 0, True, "12", None, 12.5])
def test_a_lying_total_size_is_refused(tmp_path: Path, claim: Any) -> None:
    save_index(tmp_path, {"w": "a.safetensors"}, total_size=claim)
    assert save(tmp_path / "a.safetensors", "w") == 12
    with pytest.raises(IndexMismatchError, match="sum of tensor bytes=12"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "sub/../../a.safetensors", "link.safetensors", "a\0"]
)
def test_an_index_cannot_name_a_file_outside(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    save(tmp_path / "a.safetensors", "w")
    (root / "link.safetensors").symlink_to("../a.safetensors")
    save_index(root, {"w": name})
    with pytest.raises(PathError, match=INDEX):
        read(root)


def test_an_index_may_name_a_subfolder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    save(tmp_path / "sub" / "a.safetensors", "w", value=4)
    save_index(tmp_path, {"w": "sub/a.safetensors"})
    assert (load(read(tmp_path), "w") == 4).all()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map":{}}', '{"weight_map":[]}', '{"weight_map":{"w":3}}',
     '{"weight_map":{"w":"a.safetensors"},"metadata":[]}',
     '{"weight_map":{"w":"a.safetensors","w":"b.safetensors"}}', '{"weight_map":{"w":"a.safetensors"'],
)  # fmt: skip
def test_a_bad_index_is_named(tmp_path: Path, text: str) -> None:
    save(tmp_path / "a.safetensors", "w")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match=INDEX):
        read(tmp_path)


def test_an_index_of_another_name_counts_if_it_is_alone(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", "w", value=1)
    save(tmp_path / "b.safetensors", "w", value=2)
    save_index(tmp_path, {"w": "b.safetensors"})
    (tmp_path / INDEX).rename(tmp_path / "unet.safetensors.index.json")
    assert (load(read(tmp_path), "w") == 2).all()
    (tmp_path / "vae.safetensors.index.json").write_text('{"weight_map":{"w":"a.safetensors"}}')
    with pytest.raises(FormatError, match="which index of a folder counts"):
        read(tmp_path)


# --- folders without an index -------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["model", "pytorch-model.v2", "a-00001-of-00002"])
def test_b129_a_set_without_index_is_read_if_complete(tmp_path: Path, stem: str) -> None:
    names = [f"{stem}-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    for i, name in enumerate(names):
        save(tmp_path / name, f"t{i}", value=i)
    save(tmp_path / "expected.safetensors", "logits")
    manifest = read(tmp_path)
    assert list(manifest.files) == names and manifest.records["stray"] == ["expected.safetensors"]
    assert [load(manifest, f"t{i}")[0] for i in range(4)] == [0, 1, 2, 3]
    (tmp_path / names[1]).unlink()
    with pytest.raises(MissingFileError, match=f"3 of 4 files found, missing {names[1]}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["a", "b"], FormatError, "which files belong together"),
        (["a-00001-of-00001", "b-00001-of-00001"], FormatError, "which files belong together"),
        (["model", "model-00001-of-00001"], FormatError, "which files belong together"),
        (["m-00001-of-00002"], MissingFileError, "missing m-00002-of-00002"),
        (["m-00000-of-00002", "m-00001-of-00002"], FormatError, "counts from 1"),
        (["m-00001-of-00002", "m-000001-of-00002"], FormatError, "counts from 1"),
        (["m-00001-of-999999999999"], MissingFileError, "1 of 999999999999 files found"),
        ([], MissingFileError, "holds its safetensors files"),
    ],
)
def test_an_unclear_set_is_refused(
    tmp_path: Path, names: list[str], error: type[Exception], words: str
) -> None:
    for i, name in enumerate(names):
        save(tmp_path / f"{name}.safetensors", f"t{i}")
    with pytest.raises(error, match=words):
        read(tmp_path)


@pytest.mark.parametrize("names", [["m-00001-of-00002", "m-00002-of-00002"], ["model", "adapter"]])
def test_b125_without_index_a_key_twice_is_an_error(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        save(tmp_path / f"{name}.safetensors", "w")
    with pytest.raises(IndexMismatchError, match=r"'w' in .*safetensors and .*safetensors"):
        read(tmp_path)


def test_one_file_of_any_name_is_read(tmp_path: Path) -> None:
    save(tmp_path / "weights.safetensors", "w", value=5)
    assert (load(read(tmp_path), "w") == 5).all()
    assert read(tmp_path / "weights.safetensors") == read(tmp_path)


# --- any bytes ----------------------------------------------------------------------------------

SEED = file_bytes(
    b'{"__metadata__":{"format":"pt"},"a.b":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    b'"c":{"dtype":"I16","shape":[],"data_offsets":[8,10]},'
    b'"d":{"dtype":"U8","shape":[0,3],"data_offsets":[10,10]},'
    b'"e":{"dtype":"BF16","shape":[1,3],"data_offsets":[10,16]}}   ',
    bytes(range(16)),
)
SNIPPETS = [
    b"0", b"1", b"-", b"-0", b"8", b"10", b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n",
    b"\\u0061", b"\\ud800", b"1e1", b"2.0", b"true", b"null", b"18446744073709551616", b"F64", b"BOOL", b"F4",
    b"c", b"a.b", b"shape", b"dtype", b"\xff", b"\xc3\xa9", b"\0", b"__metadata__", b'"x":"y",',
]  # fmt: skip


def agrees_with_the_package(path: Path, data: bytes) -> bool:
    """Whether the bytes were accepted; where they are, the package must read the very same."""
    path.write_bytes(data)
    try:
        manifest = read(path)
    except ShardweaveError:
        return False
    theirs = dict(safetensors.deserialize(data))
    assert set(manifest.tensors) == set(theirs)
    for key, tensor in theirs.items():
        ours = manifest.tensors[key]
        assert (ours.shape, ours.dtype) == (tuple(tensor["shape"]), DTYPES[tensor["dtype"]])
        assert load(manifest, key).tobytes() == bytes(tensor["data"])
    with safetensors.safe_open(path, "np") as file:
        assert manifest.records["metadata"][path.name] == (file.metadata() or {})
    return True


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """The seed with a few bytes replaced, taken out or put in; the length is mostly set right again."""
    text = bytearray(SEED[8:])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text) - 1))
        width = draw(st.integers(0, 4))
        text[at : at + width] = draw(st.sampled_from(SNIPPETS) | st.binary(max_size=3))
    tail = len(SEED) - 8 - int.from_bytes(SEED[:8], "little")
    length = max(len(text) - tail, 0) if draw(st.integers(0, 9)) else draw(st.integers(0, 2**64 - 1))
    return length.to_bytes(8, "little") + bytes(text)


@settings(max_examples=400)
@given(data=mutants())
@example(data=SEED)
@example(data=file_bytes(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'))
@example(data=file_bytes(b'{"a":{"dtype":"U8","shape":[0,9223372036854775807,3],"data_offsets":[0,0]}}'))
def test_mutated_files_are_refused_or_read_as_the_package_does(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    agrees_with_the_package(tmp_path_factory.getbasetemp() / "mutant.safetensors", data)


ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", "X", 3]),
        "shape": st.lists(
            st.integers(-1, 4) | st.sampled_from([2**62, 2**63, 2**64, 1.0, True, None]), max_size=3
        ),
        "data_offsets": st.lists(st.integers(-1, 30), min_size=1, max_size=3),
    }
)


@settings(max_examples=200)
@given(header=st.dictionaries(st.text(max_size=3), ENTRIES, max_size=3), size=st.integers(0, 40))
def test_random_headers_are_refused_or_read_as_the_package_does(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    agrees_with_the_package(path, file_bytes(json.dumps(header).encode(), bytes(size)))


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)), max_size=5
    ),
    names=st.lists(
        st.text(max_size=4).filter(lambda key: key != "__metadata__"), min_size=5, max_size=5, unique=True
    ),
    order=st.randoms(use_true_random=False),
)
def test_right_headers_in_any_order_are_accepted(
    tmp_path_factory: pytest.TempPathFactory, shapes: Any, names: list[str], order: Any
) -> None:
    header, end = [], 0
    for name, (code, shape) in zip(names, shapes, strict=False):
        start, end = end, end + int(np.prod(shape, dtype=int)) * ITEMSIZE[DTYPES[code]]
        header.append((name, entry(code, shape, start, end)))
    order.shuffle(header)
    data = file_bytes(dict(header), bytes(i % 251 for i in range(end)))
    assert agrees_with_the_package(tmp_path_factory.getbasetemp() / "right.safetensors", data)
