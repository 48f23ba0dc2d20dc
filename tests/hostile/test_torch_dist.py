"""torch_dist folders from people who mean harm, or from disks that lost bytes.

The files are damaged with torch's own classes and Python's own pickle and zipfile, never with the
code under test. Whatever comes, the answer is a manifest or a ShardweaveError, and nothing runs.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardweave.errors import (
    DtypeError,
    FormatError,
    GapError,
    IndexMismatchError,
    MissingFileError,
    OutsideError,
    OverlapError,
    PathError,
    PickleError,
    ShardweaveError,
    TruncatedError,
)
from shardweave.store import pickles, pickles_write, torch_dist, torch_save
from shardweave.store.manifest import Extent, StoredTensor
from shardweave.store.tiling import prove_tiling

DATA = Path(__file__).parents[1] / "data"
SHAPE = (8, 4)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ran: list[str] = []
watching = False


def watch(event: str, args: tuple[Any, ...]) -> None:
    if watching and event in ("os.system", "subprocess.Popen", "exec", "pickle.find_class", "os.posix_spawn"):
        ran.append(f"{event} {args!r:.80}")


sys.addaudithook(watch)


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    """Python itself reports every code object, command and unpickled name while a test reads."""
    ran.clear()
    yield
    assert ran == []


def read(folder: Path) -> Any:
    global watching
    watching = True
    try:
        return torch_dist.read(folder)
    finally:
        watching = False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint in two files, whose parts the tests replace."""
    rows = torch.arange(32.0).reshape(SHAPE)
    index = Metadata(
        {
            "w": TensorStorageMetadata(
                TensorProperties(dtype=torch.float32),
                torch.Size(SHAPE),
                [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([4, 4])) for at in (0, 4)],
            )
        },
        storage_data={},
    )
    for rank in (0, 1):
        data = saved(rows[4 * rank : 4 * rank + 4].clone())
        (tmp_path / f"__{rank}_0.distcp").write_bytes(data)
        index.storage_data[MetadataIndex("w", [4 * rank, 0])] = _StorageInfo(
            f"__{rank}_0.distcp", 0, len(data)
        )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    (tmp_path / "common.pt").write_bytes(saved({"iteration": 3}))
    assert len(torch_dist.read(tmp_path).tensors["w"].extents) == 2
    return tmp_path


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def change(folder: Path, edit: Callable[[Metadata], Any]) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(edit(index) or index))


def place(index: Metadata, row: int = 0) -> _StorageInfo:
    return index.storage_data[MetadataIndex("w", [row, 0])]


def rezip(data: bytes, change: Callable[[zipfile.ZipFile, dict[str, bytes]], None]) -> bytes:
    """A stream with its records written anew by Python's zipfile."""
    old = zipfile.ZipFile(io.BytesIO(data))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as new:
        change(new, {name: old.read(name) for name in old.namelist()})
    return stream.getvalue()


def replace_stream(folder: Path, data: bytes) -> None:
    (folder / "__0_0.distcp").write_bytes(data)
    change(folder, lambda index: setattr(place(index), "length", len(data)))


def replace_pickle(folder: Path, data: bytes) -> None:
    def write(new: zipfile.ZipFile, records: dict[str, bytes]) -> None:
        for name, record in {**records, "archive/data.pkl": data}.items():
            new.writestr(name, record)

    replace_stream(folder, rezip((folder / "__0_0.distcp").read_bytes(), write))


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class Hidden:
    """A dict whose one value is the harm."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter([("k", self.state)])


def attacks(target: Path) -> dict[str, bytes]:
    command = f"touch {target}"
    code = f"open({str(target)!r}, 'w')"
    objects = {
        "os.system": Calls(os.system, command),
        "eval": Calls(builtins.eval, code),
        "exec": Calls(builtins.exec, code),
        "getattr": Calls(builtins.getattr, "x", "upper"),
        "open": Calls(builtins.open, str(target), "w"),
        "__import__": Calls(builtins.__import__, "this"),
        "Popen": Calls(subprocess.Popen, ["touch", str(target)]),
        "partial": Calls(functools.partial, os.system, command),
        "torch.load": Calls(torch.load, str(target)),
        "torch.hub": Calls(torch.hub.load, "a/b", "c"),
        "inside a list of a dict": {"a": [Hidden(Calls(os.system, command))]},
    }
    streams = {f"{name}, protocol {p}": pickle.dumps(o, p) for name, o in objects.items() for p in (2, 4)}
    line = f"S'{command}'\n".encode()
    return streams | {
        "protocol 0": b"cos\nsystem\n(" + line + b"tR.",
        "INST": b"\x80\x02(" + line + b"ios\nsystem\n.",
        "OBJ": b"\x80\x02(cos\nsystem\n" + line + b"o.",
        "EXT1": b"\x80\x02\x82\x01.",
        "a text called": b"\x80\x02X\x09\x00\x00\x00os.system)R.",
        "two dots": b"\x80\x04\x8c\x02os\x8c\x0bpath.os.system\x93\x8c\x02ls\x85R.",
        "state on a class": b"\x80\x02cpathlib\nPosixPath\n}X\x01\x00\x00\x00xK\x01sb.",
        "class as a dict": b"\x80\x02cpathlib\nPosixPath\nX\x01\x00\x00\x00xK\x01s.",
    }


ATTACKS = sorted(attacks(Path("unused")))


@pytest.mark.parametrize("name", ATTACKS)
class TestCode:
    def check(self, folder: Path, name: str) -> None:
        with pytest.raises(PickleError) as caught:
            read(folder)
        assert not (folder / "pwned").exists()
        asked = name.split(",")[0]
        if asked in ("os.system", "eval", "exec", "open", "partial", "getattr"):
            assert asked.removeprefix("os.") in str(caught.value)

    def test_in_the_index(self, folder: Path, name: str) -> None:
        (folder / ".metadata").write_bytes(attacks(folder / "pwned")[name])
        self.check(folder, name)

    def test_in_a_tensor(self, folder: Path, name: str) -> None:
        replace_pickle(folder, attacks(folder / "pwned")[name])
        self.check(folder, name)

    def test_in_common_pt(self, folder: Path, name: str) -> None:
        data = attacks(folder / "pwned")[name]
        with zipfile.ZipFile(folder / "common.pt", "w") as archive:
            archive.writestr("common/data.pkl", data)
            archive.writestr("common/version", b"3\n")
        self.check(folder, name)


class TestBombs:
    """Small files that would take all memory or time elsewhere."""

    @pytest.mark.parametrize(
        "data",
        [
            b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo index of two billion: fine for a dict
            b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes of eight exabytes
            b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # and a bytearray
            b"\x80\x02X\xff\xff\xff\xff.",
            b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
            b"\x80\x02\x8b\xff\xff\xff\x7f.",  # an integer of two billion bytes
            b"\x80\x02" + b"(" * 100_000 + b"t" * 99_999 + b".",
            b"\x80\x02)" + b"\x85" * 100_000 + b"}h\x00s.",
            b"\x80\x02}q\x00)" + b"\x85" * 1_000_000 + b"Ns.",  # a deep tuple as a key
        ],
    )
    def test_sizes(self, data: bytes) -> None:
        start = time.monotonic()
        try:
            value = pickles.load(data, allow=pickles.Allow(pickles.PLAIN), where="test")
        except PickleError:
            value = None
        assert not value and time.monotonic() - start < 5

    def test_one_list_passed_to_many_calls(self) -> None:
        count = 20_000
        items = b"]q\x00(" + b"K\x01" * count + b"e0"
        calls = b"c__builtin__\nset\nh\x00\x85R0" * count
        start = time.monotonic()
        with pytest.raises(PickleError, match="far longer than the pickle"):
            pickles.load(
                b"\x80\x02" + items + calls + b"N.", allow=pickles.Allow(pickles.PLAIN), where="test"
            )
        assert time.monotonic() - start < 10

    def test_keys_chosen_to_collide(self) -> None:
        prime = 2**61 - 1
        with pytest.raises(PickleError, match="key"):
            data = pickle.dumps({prime * 2**20 * k: 0 for k in range(100)}, 2)
            pickles.load(data, allow=pickles.Allow(pickles.PLAIN), where="test")

    def test_a_billion_laughs(self, folder: Path) -> None:
        laugh: Any = "ha"
        for _ in range(40):
            laugh = [laugh] * 10
        (folder / "common.pt").write_bytes(saved(laugh))
        with pytest.raises(PickleError, match="parts > 10000000"):
            read(folder)

    @pytest.mark.parametrize("part", ["size", "relative_path", "fqn", "transform_descriptors"])
    def test_a_value_that_is_endless_to_print(self, folder: Path, part: str) -> None:
        laugh: Any = (1, 2)
        for _ in range(400):
            laugh = (laugh, laugh)

        def edit(index: Metadata) -> None:
            if part == "size":
                index.state_dict_metadata["w"].size = laugh
            elif part == "fqn":
                entry = MetadataIndex("v", [0, 0])
                index.storage_data[entry] = place(index)
                object.__setattr__(entry, "fqn", laugh)
            else:
                setattr(place(index), part, laugh)

        change(folder, edit)
        start = time.monotonic()
        with pytest.raises(FormatError):
            read(folder)
        assert time.monotonic() - start < 5

    def test_chunks_staggered_in_every_dim(self) -> None:
        """Cutting boxes at each other's edges would make a thousand million of these two thousand."""
        count = 2000
        boxes = [((i, count - 1 - i, 2 * i), (count, count, 1)) for i in range(count)]
        extents = tuple(Extent(offset, shape, "f", 0) for offset, shape in boxes)
        start = time.monotonic()
        with pytest.raises(GapError, match="'w'"):
            prove_tiling([StoredTensor("w", "int8", (2 * count,) * 3, extents)], root=Path("folder"))
        nested = tuple(Extent((0, 0, 0), (i + 1, count - i, 7), "f", 0) for i in range(count))
        with pytest.raises(OverlapError, match="'w'"):
            prove_tiling([StoredTensor("w", "int8", (2 * count,) * 3, nested)], root=Path("folder"))
        assert time.monotonic() - start < 20

    def test_a_deep_tree(self, folder: Path) -> None:
        with zipfile.ZipFile(folder / "common.pt", "w") as archive:
            archive.writestr("common/data.pkl", b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".")
        with pytest.raises(PickleError, match="depth > 100"):
            read(folder)


class TestTruncated:
    def test_anywhere_in_a_file(self, folder: Path) -> None:
        path = folder / "__1_0.distcp"
        data = path.read_bytes()
        for size in range(0, len(data), 3):
            path.write_bytes(data[:size])
            with pytest.raises(TruncatedError, match=r"__1_0\.distcp"):
                read(folder)

    def test_a_stream_anywhere(self, folder: Path) -> None:
        """The index knows the shorter length, so only the stream itself can tell."""
        data = (folder / "__0_0.distcp").read_bytes()
        for size in range(0, len(data), 7):
            replace_stream(folder, data[:size])
            with pytest.raises(FormatError):
                read(folder)

    @pytest.mark.parametrize("name", [".metadata", "common.pt"])
    def test_a_side_file_anywhere(self, folder: Path, name: str) -> None:
        data = (folder / name).read_bytes()
        for size in range(0, len(data), 5):
            (folder / name).write_bytes(data[:size])
            with pytest.raises((PickleError, FormatError)):
                read(folder)

    def test_all_missing_files_are_listed(self, folder: Path) -> None:
        for rank in (0, 1):
            (folder / f"__{rank}_0.distcp").unlink()
        with pytest.raises(MissingFileError, match=r"missing 2 of 2: __0_0\.distcp, __1_0\.distcp"):
            read(folder)


def chunks(*boxes: tuple[int, int, int, int]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(box[:2]), torch.Size(box[2:])) for box in boxes]


class TestLies:
    def test_half_a_tensor(self, folder: Path) -> None:
        """torch loads this one and leaves rows 4 to 7 at whatever the caller had there."""

        def edit(index: Metadata) -> None:
            index.state_dict_metadata["w"].chunks.pop()
            index.storage_data.pop(MetadataIndex("w", [4, 0]))

        change(folder, edit)
        target = {"w": torch.full(SHAPE, 7.0)}
        dcp.load(target, checkpoint_id=folder, no_dist=True)
        assert target["w"][4:].eq(7).all()
        with pytest.raises(GapError, match=r"'w', box \[4:8, 0:4\].*stored\(16\).*\(8, 4\)\)\(32\)"):
            read(folder)

    @pytest.mark.parametrize(
        ("boxes", "error"),
        [
            (chunks((0, 0, 4, 4), (3, 0, 4, 4)), OverlapError),
            (chunks((0, 0, 4, 4), (5, 0, 4, 4)), OutsideError),
            (chunks((0, 0, 4, 4), (4, 1, 4, 4)), OutsideError),
            ([ChunkStorageMetadata(torch.Size([0]), torch.Size([32]))], OutsideError),
            (chunks((0, 0, 4, 4), (4, 0, 4, 2)), IndexMismatchError),
            (chunks((0, 0, 4, 4)), IndexMismatchError),
            ([], IndexMismatchError),
        ],
    )
    def test_chunks(self, folder: Path, boxes: list[ChunkStorageMetadata], error: type[Exception]) -> None:
        def edit(index: Metadata) -> None:
            index.state_dict_metadata["w"].chunks = boxes
            if error in (OverlapError, OutsideError):
                second = boxes[-1].offsets
                index.storage_data[MetadataIndex("w", second)] = index.storage_data.pop(
                    MetadataIndex("w", [4, 0])
                )

        change(folder, edit)
        with pytest.raises(error, match="'w'"):
            read(folder)

    def test_the_same_chunk_twice_is_a_replica(self, folder: Path) -> None:
        change(folder, lambda index: index.state_dict_metadata["w"].chunks.extend(chunks((4, 0, 4, 4))))
        assert len(read(folder).tensors["w"].extents) == 2

    def test_chunks_without_a_stream(self, folder: Path) -> None:
        change(folder, lambda index: index.storage_data.pop(MetadataIndex("w", [4, 0])) and None)
        with pytest.raises(IndexMismatchError, match=r"'w'.*\(4, 0\) has none"):
            read(folder)

    @pytest.mark.parametrize(
        ("field", "value", "error"),
        [
            ("offset", -1, FormatError), ("offset", 64, TruncatedError), ("offset", 2**70, TruncatedError),
            ("offset", 1.5, FormatError), ("offset", None, FormatError), ("offset", True, FormatError),
            ("length", -5, FormatError), ("length", 0, FormatError), ("length", 2**63, TruncatedError),
            ("length", 100, FormatError), ("length", "9", FormatError),
            ("relative_path", "../outside", PathError), ("relative_path", "/etc/passwd", PathError),
            ("relative_path", "a/../../b", PathError), ("relative_path", "x\x00", PathError),
            ("relative_path", "none", MissingFileError), ("relative_path", 3, FormatError),
            ("relative_path", ".", PathError), ("relative_path", "", PathError),
            ("transform_descriptors", ["zstd"], FormatError),
        ],
    )  # fmt: skip
    def test_places(self, folder: Path, field: str, value: Any, error: type[Exception]) -> None:
        change(folder, lambda index: setattr(place(index), field, value))
        with pytest.raises(error):
            read(folder)

    def test_a_link_that_leads_outside(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        outside = tmp_path_factory.mktemp("outside") / "secret"
        shutil.move(folder / "__0_0.distcp", outside)
        (folder / "__0_0.distcp").symlink_to(outside)
        with pytest.raises(PathError):
            read(folder)

    def test_two_chunks_of_one_stream(self, folder: Path) -> None:
        change(folder, lambda index: index.storage_data.update({MetadataIndex("w", [4, 0]): place(index)}))
        with pytest.raises(OverlapError, match="share no bytes"):
            read(folder)

    @pytest.mark.parametrize(
        ("size", "error"),
        [
            ((8, 5), GapError), ((8, 4, 1), OutsideError), ((7, 4), OutsideError), ((2**40, 4), GapError),
            ((2**62, 2**62), FormatError), ((-8, 4), FormatError), ((8.0, 4), FormatError),
        ],
    )  # fmt: skip
    def test_shapes(self, folder: Path, size: tuple[int, ...], error: type[Exception]) -> None:
        def edit(index: Metadata) -> None:
            index.state_dict_metadata["w"].size = size

        change(folder, edit)
        with pytest.raises(error):
            read(folder)

    def test_dtypes(self, folder: Path) -> None:
        def edit(index: Metadata, dtype: Any) -> None:
            index.state_dict_metadata["w"].properties.dtype = dtype

        change(folder, lambda index: edit(index, torch.bfloat16))
        with pytest.raises(IndexMismatchError, match=r"bfloat16.*float32"):
            read(folder)
        change(folder, lambda index: edit(index, torch.complex128))
        with pytest.raises(DtypeError, match="complex128"):
            read(folder)

    def test_an_object_in_place_of_a_tensor(self, folder: Path) -> None:
        replace_stream(folder, saved([1, 2]))
        with pytest.raises(IndexMismatchError, match="list"):
            read(folder)

    @pytest.mark.parametrize(
        ("storage", "offset", "shape", "strides"),
        [
            (16, 1, (4, 4), (4, 1)),  # past the end by one
            (16, 0, (4, 4), (5, 1)),
            (16, -1, (4, 4), (4, 1)),
            (16, 0, (4, 4), (-4, 1)),
            (16, 0, (-4, -4), (4, 1)),
            (16, 0, (4, 4), (4,)),
            (16, 0, (2**40, 2**40), (0, 0)),
            (16, 0, (4, 4), (2**63, 1)),
            (16, 0, (4.0, 4), (4, 1)),
            (17, 0, (4, 4), (4, 1)),  # the storage is longer than its record
            (15, 0, (4, 4), (4, 1)),
            (-16, 0, (4, 4), (4, 1)),
            (2**62, 0, (4, 4), (4, 1)),
        ],
    )
    def test_what_a_tensor_says_of_itself(
        self, folder: Path, storage: Any, offset: Any, shape: Any, strides: Any
    ) -> None:
        key = pickles.Stored(("storage", pickles.Global("torch", "FloatStorage"), "0", "cpu", storage))
        call = pickles.Instance(
            pickles.Global("torch._utils", "_rebuild_tensor_v2"), (key, offset, shape, strides, False, {})
        )
        replace_pickle(folder, pickles_write.dump(call))
        with pytest.raises((PickleError, FormatError)):
            read(folder)


class TestZip:
    @pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_compressed_records(self, folder: Path, method: int) -> None:
        def write(new: zipfile.ZipFile, records: dict[str, bytes]) -> None:
            for name, record in records.items():
                new.writestr(name, record, compress_type=method if name.endswith("data/0") else 0)

        replace_stream(folder, rezip((folder / "__0_0.distcp").read_bytes(), write))
        with pytest.raises(FormatError, match=rf"data/0'.*method\({method}\)"):
            read(folder)

    @pytest.mark.parametrize("name", ["archive/data/0", "archive/data.pkl", "elsewhere/x", "top"])
    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_a_record_twice_or_elsewhere(self, folder: Path, name: str) -> None:
        def write(new: zipfile.ZipFile, records: dict[str, bytes]) -> None:
            for old, record in [*records.items(), (name, b"x")]:
                new.writestr(old, record)

        replace_stream(folder, rezip((folder / "__0_0.distcp").read_bytes(), write))
        with pytest.raises(FormatError, match="twice or outside"):
            read(folder)

    @pytest.mark.parametrize("gone", ["archive/data/0", "archive/data.pkl"])
    def test_a_record_that_is_not_there(self, folder: Path, gone: str) -> None:
        def write(new: zipfile.ZipFile, records: dict[str, bytes]) -> None:
            for name, record in records.items():
                if name != gone:
                    new.writestr(name, record)

        replace_stream(folder, rezip((folder / "__0_0.distcp").read_bytes(), write))
        with pytest.raises(FormatError, match="no record"):
            read(folder)

    def test_big_endian(self, folder: Path) -> None:
        def write(new: zipfile.ZipFile, records: dict[str, bytes]) -> None:
            for name, record in {**records, "archive/byteorder": b"big"}.items():
                new.writestr(name, record)

        replace_stream(folder, rezip((folder / "__0_0.distcp").read_bytes(), write))
        with pytest.raises(FormatError, match="big"):
            read(folder)

    def test_something_behind_the_end(self, folder: Path) -> None:
        data = (folder / "__0_0.distcp").read_bytes()
        for tail in (b"x", b"PK\x05\x06" + bytes(18)):
            replace_stream(folder, data + tail)
            with pytest.raises(FormatError):
                read(folder)

    def test_an_older_torch_file(self, folder: Path) -> None:
        stream = io.BytesIO()
        torch.save(torch.ones(4, 4), stream, _use_new_zipfile_serialization=False)
        replace_stream(folder, stream.getvalue())
        with pytest.raises(FormatError, match="starts with"):
            read(folder)

    def test_every_single_byte_of_a_stream(self, folder: Path) -> None:
        """Each byte turned over: refused, or not one of those that say where the payload lies."""
        path = folder / "__0_0.distcp"
        data = path.read_bytes()
        good = read(folder).tensors["w"]
        refused = 0
        for at in range(len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            try:
                assert read(folder).tensors["w"] == good, at
            except ShardweaveError:
                refused += 1
        # Payload, padding, times and CRCs carry no structure; the rest does.
        assert refused > 350


def flips(data: bytes) -> st.SearchStrategy[bytes]:
    edit = st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255))

    def apply(edits: list[tuple[int, int]]) -> bytes:
        out = bytearray(data)
        for at, value in edits:
            out[at] = value
        return bytes(out)

    return st.lists(edit, min_size=1, max_size=4).map(apply)


INDEX = (DATA / "mc_gqa_tp1/torch_dist/.metadata").read_bytes()
SHARED = saved({"iteration": 3, "rng": torch.arange(4), "ids": {1, 2}, "path": Path("a/b")})


class TestFlips:
    settings = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

    @settings
    @given(data=flips(INDEX))
    def test_the_index(self, tmp_path: Path, data: bytes) -> None:
        for path in (DATA / "mc_gqa_tp1/torch_dist").iterdir():
            target = tmp_path / path.name
            if path.suffix == ".distcp" and not target.exists():
                target.write_bytes(path.read_bytes())
        (tmp_path / ".metadata").write_bytes(data)
        with contextlib.suppress(ShardweaveError):
            assert read(tmp_path).format == "torch_dist"
        assert ran == []

    @settings
    @given(data=flips(SHARED))
    def test_common_pt(self, folder: Path, data: bytes) -> None:
        (folder / "common.pt").write_bytes(data)
        with contextlib.suppress(ShardweaveError):
            assert "common" in read(folder).records
        assert ran == []

    @given(data=st.binary(max_size=200))
    def test_any_bytes_as_a_pickle(self, data: bytes) -> None:
        for head in (b"\x80\x02", b"\x80\x04"):
            with contextlib.suppress(PickleError):
                pickles.load(head + data + b".", allow=torch_dist.OBJECTS, where="test")

    @given(data=st.binary(max_size=300))
    def test_any_bytes_as_a_stream(self, data: bytes) -> None:
        for stream in (data, b"PK\x03\x04" + data + b"PK\x05\x06" + data[:18].ljust(18, b"\0")):
            with pytest.raises(FormatError):
                torch_save.records(stream, 0, len(stream), where="test")
