"""torch_dist and DCP folders: read where they lie, laid out byte for byte, against torch's own reader."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import math
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import types
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardweave.errors import (
    DtypeError,
    ExistsError,
    FormatError,
    GapError,
    MissingFileError,
    OutsideError,
    OverlapError,
    PickleError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.store import pickles, pickles_write, torch_dist, torch_save
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, StoredTensor, TensorSpec
from shardweave.store.tiling import prove_tiling
from shardweave.store.torch_dist_write import allocate, finish

DATA = Path(__file__).parents[1] / "data"
MEGATRON = ["mc_gqa_tp1", "mc_gqa_tp2pp2", "mc_gqa_tp4", "mc_moe_tp1", "mc_moe_ep2", "mc_moe_tp2ep2_etp1"]
DTYPES = sorted(ITEMSIZE)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assemble(manifest: Manifest, key: str) -> bytes:
    """A tensor's row-major bytes, gathered with plain file reads; bytes never written are 0xAA."""
    tensor = manifest.tensors[key]
    item = ITEMSIZE[tensor.dtype]
    out = np.full((*tensor.shape, item), 0xAA, dtype=np.uint8)
    for extent in tensor.extents:
        strides = extent.strides or tuple(math.prod(extent.shape[d + 1 :]) for d in range(len(extent.shape)))
        words = np.memmap(manifest.root / extent.file, dtype=np.uint8, mode="r")[extent.start :]
        box = np.lib.stride_tricks.as_strided(
            words, (*extent.shape, item), (*(s * item for s in strides), 1), writeable=False
        )
        out[tuple(slice(o, o + s) for o, s in zip(extent.offset, extent.shape, strict=True))] = box
    return out.tobytes()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def values(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of any dtype with arbitrary bytes (0 and 1 for bool)."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    count = math.prod(shape) * ITEMSIZE[dtype]
    top = 2 if dtype == "bool" else 256
    data = np.random.default_rng(seed).integers(0, top, count, dtype=np.uint8)
    return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


def fill(manifest: Manifest, tensors: dict[str, torch.Tensor], part: slice = slice(None)) -> None:
    pairs = [(tensor.key, extent) for tensor in manifest.tensors.values() for extent in tensor.extents]
    for key, extent in pairs[part]:
        box = tensors[key][tuple(slice(o, o + s) for o, s in zip(extent.offset, extent.shape, strict=True))]
        with (manifest.root / extent.file).open("r+b") as file:
            file.seek(extent.start)
            file.write(raw(box))


class TestRead:
    @pytest.mark.parametrize("name", MEGATRON)
    def test_a_megatron_folder_is_what_torch_reads_from_it(self, name: str) -> None:
        folder = DATA / name / "torch_dist"
        manifest = torch_dist.read(folder)
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {k: e for k, e in entries.items() if isinstance(e, dcp.TensorStorageMetadata)}
        state = {k: torch.full(e.size, math.nan, dtype=e.properties.dtype) for k, e in tensors.items()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        assert manifest.format == "torch_dist" and manifest.tensors.keys() == state.keys()
        for key, value in state.items():
            assert manifest.tensors[key].shape == tuple(value.shape)
            assert assemble(manifest, key) == raw(value), key
        assert manifest.records["objects"].keys() == entries.keys() - tensors.keys()
        assert manifest.records["metadata"]["sharded_backend"] == "torch_dist"
        assert manifest.records["common"] == {}
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
        assert manifest.files == sizes

    def test_an_fsdp2_folder_is_its_truth(self) -> None:
        """Model and optimizer, uneven shards, an empty shard, scalars."""
        manifest = torch_dist.read(DATA / "dcp_fsdp2_4/dcp")
        truth = load_file(DATA / "dcp_fsdp2_4/truth.safetensors")
        names = {key.replace("optim.", "optim.state."): value for key, value in truth.items()}
        assert manifest.tensors.keys() == names.keys() and len(names) == 48
        for key, value in names.items():
            assert manifest.tensors[key].shape == tuple(value.shape)
            assert assemble(manifest, key) == raw(value), key
        assert [e.shape for e in manifest.tensors["model.1.e"].extents] == [(1, 10, 51)] * 3
        assert torch_dist.read_object(manifest, "optim.param_groups.0.betas") == (0.9, 0.999)
        assert torch_dist.read_object(manifest, "optim.param_groups.0.params")[1] == "1.e"
        assert manifest.records["planner_data"]["model.0.weight"] == ("model", "0.weight")

    def test_torch_is_not_imported(self) -> None:
        code = (
            "import sys; from pathlib import Path; from shardweave.store.torch_dist import read\n"
            f"m = read(Path({str(DATA / 'mc_moe_ep2/torch_dist')!r})); assert len(m.tensors) == 12\n"
            "assert not {'torch', 'megatron'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype_as_torch_saves_it(self, tmp_path: Path, dtype: str) -> None:
        state = {"a": values(dtype, (3, 5)), "b": values(dtype, (), 1)}
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        manifest = torch_dist.read(tmp_path)
        for key, value in state.items():
            assert manifest.tensors[key].dtype == dtype
            assert assemble(manifest, key) == raw(value)

    def test_what_torch_saves_transposed_is_read_by_its_strides(self, tmp_path: Path) -> None:
        whole = torch.arange(35.0).reshape(5, 7)
        # torch drops what a view leaves out, and keeps the order of the dims.
        dcp.save({"t": whole.t(), "p": torch.nn.Parameter(whole)}, checkpoint_id=tmp_path, no_dist=True)
        manifest = torch_dist.read(tmp_path)
        assert manifest.tensors["t"].extents[0].strides == (1, 7)
        assert assemble(manifest, "t") == raw(whole.t()) and assemble(manifest, "p") == raw(whole)

    def test_a_run_folder_leads_to_its_last_iteration(self, tmp_path: Path) -> None:
        (tmp_path / "iter_0000042").symlink_to(DATA / "mc_gqa_tp1/torch_dist")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("42\n")
        assert torch_dist.read(tmp_path).root == tmp_path / "iter_0000042"
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("43")
        with pytest.raises(MissingFileError, match=r"iter_0000043/\.metadata is not there"):
            torch_dist.read(tmp_path)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("../42")
        with pytest.raises(FormatError, match="an iteration or 'release'"):
            torch_dist.read(tmp_path)

    def test_a_save_that_never_finished_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(MissingFileError, match="dot file"):
            torch_dist.read(tmp_path)
        (tmp_path / ".metadata.tmp").touch()
        with pytest.raises(MissingFileError, match="never finished"):
            torch_dist.read(tmp_path)

    def test_another_backend_is_named(self, tmp_path: Path) -> None:
        dcp.save({"a": torch.ones(2, 3)}, checkpoint_id=tmp_path, no_dist=True)
        (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
        with pytest.raises(FormatError, match="'zarr'"):
            torch_dist.read(tmp_path)

    def test_an_object_that_is_not_there(self) -> None:
        with pytest.raises(UnknownNameError, match="object 'x'"):
            torch_dist.read_object(torch_dist.read(DATA / "dcp_fsdp2_4/dcp"), "x")


class TestCommon:
    """What all ranks share, with classes that this process must not import."""

    def test_args_and_foreign_classes_become_plain(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = types.ModuleType("their_trainer")
        kind = enum.Enum("Attention", {"flash": 3}, module=module.__name__)
        config = type("Config", (), {"__module__": module.__name__})
        module.Attention, module.Config = kind, config  # type: ignore[attr-defined]
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module.__name__, module)
            instance = config()
            instance.lr = 0.5
            args = argparse.Namespace(
                tp=2, dtype=torch.bfloat16, path=Path("a/b"), attention=kind.flash, config=instance
            )
            value = {"args": args, "iteration": 7, "rng": [torch.arange(5), np.arange(3, dtype=np.uint32)]}
            dcp.save({"a": torch.ones(2, 3)}, checkpoint_id=tmp_path, no_dist=True)
            torch.save(value, tmp_path / "common.pt")
        common = torch_dist.read(tmp_path).records["common"]
        assert module.__name__ not in sys.modules
        assert common["iteration"] == 7
        assert common["args"] == {
            "$class": "argparse:Namespace",
            "state": {
                "tp": 2,
                "dtype": {"$global": "torch:bfloat16"},
                "path": {"$class": "pathlib:PosixPath", "args": ["a", "b"]},
                "attention": {"$class": "their_trainer:Attention", "args": [3]},
                "config": {"$class": "their_trainer:Config", "state": {"lr": 0.5}},
            },
        }
        tensor, array = common["rng"]
        assert tensor == {"$leaf": "int64", "shape": (5,), "data": raw(torch.arange(5))}
        assert array["$class"].endswith("multiarray:_reconstruct")
        assert array["state"][-1] == np.arange(3, dtype=np.uint32).tobytes()

    def test_what_was_read_is_written_back(self, tmp_path: Path) -> None:
        """Classes are written by name alone; torch builds the same objects from both files."""
        args = argparse.Namespace(path=Path("a/b"), size=torch.Size([2, 3]), raw=b"\x00\xff", ids={4, 5})
        value = {"args": args, "rng": np.arange(3, dtype=np.uint32), "t": values("bfloat16", (3, 2))}
        stream = io.BytesIO()
        torch.save(value, stream)
        data = stream.getvalue()
        loaded = torch_save.load(data, 0, len(data), allow=torch_dist.OBJECTS, where="test")
        again = torch_save.stream(torch_save.to_plain(loaded, data, where="test"))
        back = torch.load(io.BytesIO(again), weights_only=False)
        assert vars(back["args"]) == {**vars(args), "size": (2, 3)}
        assert np.array_equal(back["rng"], value["rng"]) and raw(back["t"]) == raw(value["t"])

    def test_a_common_state_inside_the_checkpoint(self, tmp_path: Path) -> None:
        stream = io.BytesIO()
        torch.save([{"iteration": 9}], stream)
        finish(allocate(tmp_path, [], records={"objects": {torch_dist.COMMON_OBJECT: stream.getvalue()}}))
        assert torch_dist.read(tmp_path).records["common"] == {}
        (tmp_path / "common.pt").unlink()
        assert torch_dist.read(tmp_path).records["common"] == {"iteration": 9}


class TestFrame:
    """What stands around a payload makes it a stream that torch and zipfile both accept."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (7, 2, 3)])
    def test_torch_loads_it(self, dtype: str, shape: tuple[int, ...]) -> None:
        value = values(dtype, shape)
        payload = raw(value)
        head, tail = torch_save.frame(dtype, shape, zlib.crc32(payload))
        assert len(head) % torch_save.ALIGNMENT == 0
        stream = io.BytesIO(head + payload + tail)
        for weights_only in (True, False):
            loaded = torch.load(stream, weights_only=weights_only)
            assert loaded.dtype == value.dtype and loaded.shape == value.shape
            assert loaded.is_contiguous() and not loaded.requires_grad and raw(loaded) == payload
            stream.seek(0)
        assert zipfile.ZipFile(stream).testzip() is None

    def test_torch_does_not_check_the_crc_and_zipfile_does(self) -> None:
        head, tail = torch_save.frame("float32", (3,), 12345)
        stream = io.BytesIO(head + bytes(12) + tail)
        assert torch.equal(torch.load(stream, weights_only=True), torch.zeros(3))
        assert zipfile.ZipFile(stream).testzip() == "archive/data/0"

    def test_beyond_four_gigabytes(self, tmp_path: Path) -> None:
        """Sparse files of 5 GB, with the sizes and positions that need 64 bits."""
        shape = (5, 1 << 28)
        head, tail = torch_save.frame("float32", shape, 0x1234)
        size = 4 * math.prod(shape)
        path = tmp_path / "one.pt"
        with path.open("wb") as file:
            file.write(head)
            file.seek(len(head) + 4 * (4 * (1 << 28) + 77))
            file.write(np.float32(3.5).tobytes())
            file.seek(len(head) + size)
            file.write(tail)
        loaded = torch.load(path, mmap=True, weights_only=True)
        assert loaded.shape == shape and loaded[4, 77] == 3.5
        records = zipfile.ZipFile(path).infolist()
        assert (records[-1].file_size, records[-1].CRC) == (size, 0x1234)

        folder = tmp_path / "folder"
        folder.mkdir()
        specs = [TensorSpec("big", "float32", shape), TensorSpec("after", "float32", (3,))]
        manifest = allocate(folder, specs, records={}, max_file_bytes=1 << 40)
        with (folder / "__0_0.distcp").open("r+b") as file:
            file.seek(manifest.tensors["after"].extents[0].start)
            file.write(raw(torch.tensor([1.0, 2.0, 3.0])))
        finish(manifest, {manifest.tensors["big"].extents[0]: 0x1234}, fsync=False)
        assert torch_dist.read(folder).tensors == manifest.tensors
        state = {"after": torch.full((3,), math.nan)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        assert state["after"].tolist() == [1.0, 2.0, 3.0]


SPECS = [
    TensorSpec("a", "float32", (7, 5), (((0, 0), (3, 5)), ((3, 0), (4, 2)), ((3, 2), (4, 3)))),
    TensorSpec("b", "float64", ()),
    TensorSpec("empty", "uint8", (3, 0, 2)),
    TensorSpec("d", "bfloat16", (4, 3, 5), (((0, 0, 0), (1, 3, 5)), ((1, 0, 0), (3, 3, 5)))),
]
TENSORS = {spec.key: values(spec.dtype, spec.shape, seed=9) for spec in SPECS}


class TestWrite:
    def test_torch_reads_it(self, tmp_path: Path) -> None:
        manifest = allocate(tmp_path, SPECS, records={}, max_file_bytes=3000)
        assert len(manifest.files) == 2
        assert not (tmp_path / ".metadata").exists()
        fill(manifest, TENSORS)
        finish(manifest)
        state = {key: torch.zeros_like(value) for key, value in TENSORS.items()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        for key, value in TENSORS.items():
            assert raw(state[key]) == raw(value), key
        back = torch_dist.read(tmp_path)
        assert back.tensors == manifest.tensors and back.files == manifest.files
        dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
        assert raw(torch.load(tmp_path / "whole.pt")["d"]) == raw(TENSORS["d"])

    def test_each_stream_is_a_zip_of_its_own_with_the_right_crc(self, tmp_path: Path) -> None:
        manifest = allocate(tmp_path, SPECS, records={})
        fill(manifest, TENSORS)
        known = manifest.tensors["a"].extents[1]
        crc = zlib.crc32(raw(TENSORS["a"][3:7, 0:2]))
        finish(manifest, {known: crc})
        streams = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
        assert len(streams) == 6
        for index, place in streams.items():
            data = (tmp_path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            archive = zipfile.ZipFile(io.BytesIO(data))
            assert archive.testzip() is None and place.offset % 64 == 0, index
        assert all(e.start % 64 == 0 for tensor in manifest.tensors.values() for e in tensor.extents)

    def test_processes_fill_it_in_any_order(self, tmp_path: Path) -> None:
        manifest = allocate(tmp_path, SPECS, records={}, max_file_bytes=3000)
        context = multiprocessing.get_context("fork")
        workers = [
            context.Process(target=fill, args=(manifest, TENSORS, slice(start, None, 3)))
            for start in (2, 0, 1)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
            assert worker.exitcode == 0
        finish(pickle.loads(pickle.dumps(manifest)))
        back = torch_dist.read(tmp_path)
        assert all(assemble(back, key) == raw(value) for key, value in TENSORS.items())

    def test_all_ranks_come_to_the_same_layout(self, tmp_path: Path) -> None:
        made = []
        for name in ("x", "y"):
            (tmp_path / name).mkdir()
            made.append(allocate(tmp_path / name, SPECS, records={}, max_file_bytes=3000))
        assert made[0].tensors == made[1].tensors and made[0].files == made[1].files

    def test_finish_again_changes_nothing(self, tmp_path: Path) -> None:
        manifest = allocate(tmp_path, SPECS, records={"common": {"iteration": 3}})
        fill(manifest, TENSORS)
        finish(manifest)
        first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        finish(manifest)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
        assert first.keys() == {"__0_0.distcp", ".metadata", "common.pt", "metadata.json"}

    def test_records_and_objects_go_from_folder_to_folder(self, tmp_path: Path) -> None:
        source = torch_dist.read(DATA / "dcp_fsdp2_4/dcp")
        objects = {key: torch_dist.object_bytes(source, key) for key in source.records["objects"]}
        records = {"planner_data": source.records["planner_data"], "objects": objects}
        finish(allocate(tmp_path, [], records=records))
        back = torch_dist.read(tmp_path)
        assert back.records["planner_data"] == source.records["planner_data"]
        for key in objects:
            assert torch_dist.read_object(back, key) == torch_dist.read_object(source, key)
        # torch rebuilds the nested state dict from the planner's record.
        dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
        assert torch.load(tmp_path / "whole.pt")["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)

    def test_a_folder_with_a_checkpoint_is_left_alone(self, tmp_path: Path) -> None:
        with pytest.raises(MissingFileError, match="existing folder"):
            allocate(tmp_path / "none", SPECS, records={})
        for name in (".metadata", "__0_0.distcp", "metadata.json", "common.pt"):
            (tmp_path / name).touch()
            with pytest.raises(ExistsError, match=name):
                allocate(tmp_path, SPECS, records={})
            (tmp_path / name).unlink()
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("spec", "error", "says"),
        [
            (TensorSpec("k", "float32", (8, 4), (((0, 0), (4, 4)),)), GapError, r"'k', box \[4:8, 0:4\]"),
            (
                TensorSpec("k", "int8", (4, 4), (((0, 0), (3, 4)), ((2, 0), (2, 4)))),
                OverlapError,
                r"'k'.*\(0, 0\).*\(2, 0\)",
            ),
            (TensorSpec("k", "int8", (4, 4), (((1, 0), (4, 4)),)), OutsideError, "'k'"),
            (TensorSpec("k", "int8", (4, 4), (((0, -1), (4, 5)),)), OutsideError, "'k'"),
            (TensorSpec("k", "int8", (4, 4), (((0,), (4,)),)), OutsideError, "'k'"),
            (TensorSpec("k", "int3", (4, 4)), DtypeError, "int3"),
            (TensorSpec("a", "int8", (4, 4)), FormatError, "given twice"),
        ],
    )
    def test_what_cannot_be_stored_is_refused_before_a_file_exists(
        self, tmp_path: Path, spec: TensorSpec, error: type[Exception], says: str
    ) -> None:
        with pytest.raises(error, match=says):
            allocate(tmp_path, [SPECS[0], spec], records={})
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "records",
        [
            {"args": {}},
            {"objects": {"x": {"file": "__0_0.distcp", "offset": 0, "length": 4}}},
            {"objects": {"a": torch_save.stream([None])}},
            {"objects": {"x": b"not a stream"}},
            {"common": {"x": object()}},
        ],
    )
    def test_records_without_a_place_are_refused(self, tmp_path: Path, records: dict[str, Any]) -> None:
        with pytest.raises((FormatError, PickleError)):
            allocate(tmp_path, SPECS, records=records)
        assert not list(tmp_path.iterdir())

    def test_a_file_that_changed_its_size_or_went_is_noticed(self, tmp_path: Path) -> None:
        manifest = allocate(tmp_path, SPECS, records={})
        path = tmp_path / "__0_0.distcp"
        os.truncate(path, manifest.files[path.name] - 1)
        with pytest.raises(TruncatedError, match=r"__0_0\.distcp.*size"):
            finish(manifest)
        path.unlink()
        with pytest.raises(MissingFileError, match="gone"):
            finish(manifest)
        assert not (tmp_path / ".metadata").exists()


@st.composite
def cut_tensors(draw: st.DrawFn) -> StoredTensor:
    """A tensor cut in two again and again, with some pieces lost and perhaps one too many."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 9))):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, count in enumerate(size) if count > 1]
        if not dims:
            boxes.append((offset, size))
            continue
        d = draw(st.sampled_from(dims))
        at = draw(st.integers(1, size[d] - 1))
        boxes.append((offset, (*size[:d], at, *size[d + 1 :])))
        behind = (*offset[:d], offset[d] + at, *offset[d + 1 :])
        boxes.append((behind, (*size[:d], size[d] - at, *size[d + 1 :])))
    kept = [box for box in boxes if draw(st.integers(0, 4))]
    if draw(st.booleans()):
        offset = tuple(draw(st.integers(0, count - 1)) for count in shape)
        kept.append((offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))))
    return StoredTensor("w", "int8", shape, tuple(Extent(o, s, "f", 0) for o, s in kept))


@given(cut_tensors())
def test_tiling_is_counted_by_hand(tensor: StoredTensor) -> None:
    times = np.zeros(tensor.shape, dtype=int)
    for extent in tensor.extents:
        times[tuple(slice(o, o + s) for o, s in zip(extent.offset, extent.shape, strict=True))] += 1
    try:
        prove_tiling([tensor], root=Path())
    except OverlapError:
        assert (times > 1).any()
    except GapError as error:
        assert (times <= 1).all() and (times == 0).any()
        if tensor.shape:
            box = re.search(r"box \[(.*?)\]", error.where)
            assert box is not None
            ends = [part.split(":") for part in box[1].split(", ")]
            assert (times[tuple(slice(int(low), int(high)) for low, high in ends)] == 0).all()
    else:
        assert (times == 1).all()


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False), st.text(), st.binary()
)
KEYS = st.one_of(st.text(), st.integers(-(2**63), 2**63), st.tuples(st.text(), st.integers(0, 9)))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.sets(KEYS),
        st.frozensets(KEYS),
    ),
)
PLAIN = pickles.Allow(pickles.PLAIN)


class TestPickles:
    @given(TREES)
    def test_python_reads_what_is_dumped(self, value: Any) -> None:
        data = pickles_write.dump(value)
        assert pickle.loads(data) == value
        assert pickles.load(data, allow=PLAIN, where="test") == value

    @given(TREES, st.integers(2, 5))
    def test_what_python_dumps_is_read(self, value: Any, protocol: int) -> None:
        assert pickles.load(pickle.dumps(value, protocol), allow=PLAIN, where="test") == value

    def test_types_survive(self) -> None:
        value = [1, 1.0, True, (1,), [1], {1}, frozenset({1}), b"a", "a", 1 + 2j]
        back = pickles.load(pickles_write.dump(value), allow=PLAIN, where="test")
        assert [type(x) for x in back] == [type(x) for x in value]

    def test_ordered_and_default_dicts_are_dicts(self) -> None:
        ordered = collections.OrderedDict(b=1, a=2)
        ordered._metadata = {"version": 1}  # type: ignore[attr-defined]  # as torch hangs it on state dicts
        default = collections.defaultdict(list, x=[1])
        for protocol in (2, 5):
            data = pickle.dumps([ordered, default], protocol)
            back = pickles.load(data, allow=PLAIN, where="test")
            assert back == [{"b": 1, "a": 2}, {"x": [1]}] and list(back[0]) == ["b", "a"]
            assert all(type(x) is dict for x in back)

    def test_cycles_are_read_and_have_no_plain_form(self) -> None:
        value: list[Any] = []
        value.append(value)
        back = pickles.load(pickle.dumps(value), allow=PLAIN, where="test")
        assert back[0] is back
        with pytest.raises(PickleError, match="cycle"):
            pickles_write.to_plain(back, where="test")

    @given(TREES)
    def test_the_plain_form_gives_the_value_back(self, value: Any) -> None:
        plain = pickles_write.to_plain(value, where="test")
        assert pickles_write.from_plain(plain) == value
        assert plain == value or "$" in repr(value)

    @pytest.mark.parametrize("key", ["$global", "$class", "$leaf", "$$global", "$"])
    def test_a_record_of_a_file_cannot_pose_as_a_global(self, key: str) -> None:
        value = {key: "os:system", "args": [{key: "os:system"}]}
        again = pickles_write.from_plain(
            pickles_write.to_plain(value, where="test"), leaf=lambda leaf: leaf["no"]
        )
        assert again == value
        assert pickle.loads(pickles_write.dump(again)) == value
