"""Checkpoint folders of torch.distributed.checkpoint and of Megatron (``torch_dist``), read in place.

Neither torch nor Megatron is needed or imported: the index is a pickle that is read without running
it, and each chunk is a stream of ``torch.save`` whose payload is used where it lies.

The folder:
    ``.metadata``   pickle of ``torch.distributed.checkpoint.metadata.Metadata``: per key dtype, shape and
                    chunks, per chunk the place of its stream. Written last; its presence is completeness.
    ``*.distcp``    one stream of ``torch.save`` after another, each with one tensor or one object.
    ``metadata.json``, ``common.pt``   only Megatron: backend versions, and what all ranks share (args,
                    iteration, optimizer groups). Newer Megatron keeps the latter in the object
                    ``common_state/shard_0_1`` instead.

What Megatron's own loader wants (0.16.1) beyond what plain DCP wants:
    - ``metadata.json`` with ``sharded_backend`` "torch_dist": without it, "not a distributed checkpoint".
    - ``common.pt``, a dict, with every class in it on Megatron's list of safe globals. It is merged into
      what ``load`` returns; ``{}`` is enough for ``dist_checkpointing`` itself. The training script
      reads ``args``, ``checkpoint_version``, ``iteration``, ``num_floating_point_operations_so_far``,
      ``optimizer``, ``opt_param_scheduler`` and ``content_metadata`` from it.
    - Every key that the model asks for, with exactly its global shape, unless the model allows another
      (embedding and output rows: the vocabulary padding depends on TP). Other keys are ignored.
    - Objects ``<module>._extra_state/shard_<i>_<n>``: the stream of a list with one value per shard,
      ``[None]`` without TransformerEngine. The loader asks for them as it does for tensors.
    - Chunks may be cut in any way that covers the tensor; ``mcore_data``, ``planner_data`` and
      ``all_local_plans`` are not needed to load.

torch checks nothing of an index at load: a chunk that is not there leaves the caller's old values, and
so do chunks that do not cover their tensor. Here both are refused, before a byte is read.

Source: torch 2.13 ``torch/distributed/checkpoint``; megatron-core 0.16.1 ``dist_checkpointing``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final

from shardweave.errors import (
    FormatError,
    IndexMismatchError,
    MissingFileError,
    OverlapError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.store import torch_save
from shardweave.store.manifest import Extent, Manifest, StoredTensor
from shardweave.store.paths import inside
from shardweave.store.pickles import PLAIN, Allow, brief
from shardweave.store.pickles_write import to_plain
from shardweave.store.strict_json import read_json
from shardweave.store.tiling import prove_tiling
from shardweave.store.torch_index import Chunk, Index, Place
from shardweave.store.torch_save import TensorAt
from shardweave.store.tracker import newest

INDEX: Final = ".metadata"
CONFIG: Final = "metadata.json"
COMMON: Final = "common.pt"
TRACKER: Final = "latest_checkpointed_iteration.txt"
COMMON_OBJECT: Final = "common_state/shard_0_1"

_MAX_SIDE_BYTES: Final = 1 << 30

_NUMPY: Final = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): None for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): None for core in ("core", "_core")},
    **{("numpy", name): None for name in ("ndarray", "dtype")},
    ("numpy.dtypes", "UInt32DType"): None,
}

OBJECTS: Final = Allow(
    {
        **PLAIN,
        **_NUMPY,
        ("argparse", "Namespace"): None,
        ("types", "SimpleNamespace"): None,
        ("signal", "Signals"): None,
        ("pathlib", "PosixPath"): None,
        ("_io", "BytesIO"): None,
        ("torch", "device"): None,
    },
    others=True,
)
"""What ``common.pt`` and stored objects may mention. Classes of frameworks and of users stay stand-ins."""


def read(root: Path) -> Manifest:
    """What a DCP or Megatron folder holds; the payloads are not touched.

    Every stream is opened far enough to know where its payload lies, and compared with the index.

    Args:
        root: The folder with ``.metadata``, or a Megatron run folder with its tracker file.

    Returns:
        The manifest, rooted at the folder with ``.metadata``. Its ``records``: ``metadata`` (of
        metadata.json), ``common`` (of common.pt), ``planner_data`` and ``mcore_data`` (of the index), each
        where there is one, and ``objects``: by key ``{"file", "offset", "length"}``, for `read_object`.

    Raises:
        MissingFileError: No index, or files that it names are not there; all are listed.
        TruncatedError: A file ends before a stream that the index puts there.
        PickleError: The index or a stream names something outside the allow-list.
        PathError: The index names a file outside the folder.
        GapError, OverlapError, OutsideError: The chunks of a key do not tile its tensor.
        IndexMismatchError: Chunks and streams contradict each other.
        FormatError, DtypeError: Anything else that torch.distributed.checkpoint does not write.
    """
    root = _folder(Path(root))
    meta = Index(_small_file(root, INDEX), where=str(root / INDEX))
    records: dict[str, Any] = {}
    if (root / CONFIG).is_file():
        records["metadata"] = _config(root)
    if meta.planner_data is not None:
        records["planner_data"] = to_plain(meta.planner_data, where=INDEX)
        _prove_ways(records["planner_data"], where=str(root / INDEX))
    if meta.mcore_data:
        records["mcore_data"] = to_plain(meta.mcore_data, where=INDEX)
    tensors: dict[str, StoredTensor] = {}
    with _opened(root, sorted({place[0] for place in meta.places.values()})) as files:
        for key, (dtype, shape, chunks) in meta.tensors.items():
            extents = tuple(
                _extent(files, key, dtype, box, meta.place(key, box[0]), root=root)
                for box in dict.fromkeys(chunks)
                if math.prod(box[1])
            )
            tensors[key] = StoredTensor(key, dtype, shape, extents)
        records["objects"] = {
            key: dict(zip(("file", "offset", "length"), meta.place(key, None), strict=True))
            for key in meta.objects
        }
        sizes = {name: len(data) for name, data in files.items()}
    _prove_streams(meta.places, sizes, root=root)
    prove_tiling(tensors.values(), root=root)
    manifest = Manifest(root, "torch_dist", tensors, sizes, records)
    if (root / COMMON).is_file():
        with _opened(root, [COMMON]) as files:
            records["common"] = _load_object(files[COMMON], 0, len(files[COMMON]), where=COMMON)
    elif COMMON_OBJECT in records["objects"]:
        records["common"] = read_object(manifest, COMMON_OBJECT)[0]
    return manifest


def places(manifest: Manifest) -> dict[Place, str]:
    """The streams that the index of a folder lists, of all chunks and objects, each with its key.

    Raises:
        ShardweaveError: As ``read``, where the index has changed since.
    """
    root = manifest.root
    meta = Index(_small_file(root, INDEX), where=str(root / INDEX))
    return {place: key for (key, _), place in meta.places.items()}


def object_bytes(manifest: Manifest, key: str) -> bytes:
    """The ``torch.save`` stream of a stored object, as it lies in the file."""
    places = manifest.records.get("objects", {})
    if key not in places:
        raise UnknownNameError(
            "a checkpoint holds the object that is asked for",
            where=str(manifest.root),
            equation=f"object {key!r} not among {len(places)}",
            hint="take a key of the manifest's records['objects']",
        )
    place = places[key]
    with _opened(manifest.root, [place["file"]]) as files:
        data, start, stop = files[place["file"]], place["offset"], place["offset"] + place["length"]
        if stop > len(data):
            raise TruncatedError(
                "a file holds the objects that its index lists",
                where=str(manifest.root / place["file"]),
                equation=f"stop({stop}) > file({len(data)})",
                hint="read the manifest again: the file changed since",
            )
        return bytes(data[start:stop])


def read_object(manifest: Manifest, key: str) -> Any:
    """A stored object as plain values; what is no plain value becomes a dict as in `pickles_write.to_plain`.

    >>> from pathlib import Path
    >>> folder = read(Path("tests/data/dcp_fsdp2_4/dcp"))
    >>> read_object(folder, "optim.param_groups.0.betas")
    (0.9, 0.999)
    """
    data = object_bytes(manifest, key)
    return _load_object(data, 0, len(data), where=f"object {key!r}")


# --- the folder ---------------------------------------------------------------------------------


def _folder(root: Path) -> Path:
    if (root / INDEX).is_file():
        return root
    said = newest(root, TRACKER)
    if said is not None:
        name = iteration_folder(said, where=str(root / TRACKER))
        if (root / name / INDEX).is_file():
            return root / name
        raise MissingFileError(
            "a tracker file names a folder with a torch_dist checkpoint",
            where=str(root / TRACKER),
            equation=f"{name}/{INDEX} is not there",
            hint="use an earlier iteration if the save broke off",
        )
    unfinished = sorted(path.name for path in root.glob(f"*{INDEX}.tmp")) if root.is_dir() else []
    raise MissingFileError(
        "a torch_dist folder has an index",
        where=str(root),
        equation=f"{INDEX} is not there" + (f", {unfinished[0]} is" if unfinished else ""),
        hint="use an earlier iteration: this save never finished"
        if unfinished
        else f"give the folder that holds {INDEX}, a dot file",
    )


def iteration_folder(said: str, *, where: str) -> str:
    """The folder that a tracker file names.

    >>> iteration_folder("1000", where="run"), iteration_folder("release", where="run")
    ('iter_0001000', 'release')

    Raises:
        FormatError: It holds something else.
    """
    if not re.fullmatch(r"[0-9]{1,12}|release", said):
        raise FormatError(
            "a tracker file holds an iteration or 'release'",
            where=where,
            equation=f"got {said[:100]!r}",
            hint="give the folder of one iteration instead",
        )
    return said if said == "release" else f"iter_{int(said):07d}"


def _small_file(root: Path, name: str) -> bytes:
    path = inside(root, name, where=str(root))
    size = path.stat().st_size
    if size > _MAX_SIDE_BYTES:
        raise FormatError(
            "an index is small beside its tensors",
            where=str(path),
            equation=f"{size} bytes > {_MAX_SIDE_BYTES}",
            hint="torch and Megatron write no such file; fetch it again, or look at where it comes from",
        )
    return path.read_bytes()


def _config(root: Path) -> dict[str, Any]:
    config = read_json(inside(root, CONFIG, where=str(root)), where=str(root / CONFIG))
    backend = config.get("sharded_backend")
    if backend != "torch_dist":
        raise FormatError(
            "a Megatron checkpoint is of the torch_dist backend",
            where=str(root / CONFIG),
            equation=f"sharded_backend({backend!r:.80}) != 'torch_dist'",
            hint="save it once more with the Megatron that wrote it and --ckpt-format torch_dist",
        )
    return config


@contextmanager
def _opened(root: Path, names: list[str]) -> Iterator[dict[str, torch_save.Buffer]]:
    """The files, mapped; all missing ones are named at once."""
    paths = {name: inside(root, name, where=INDEX) for name in names}
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        raise MissingFileError(
            "the files that an index names are there",
            where=str(root),
            equation=f"missing {len(missing)} of {len(names)}: {', '.join(missing[:50])}",
            hint="copy the whole folder; every rank of the save wrote files of its own",
        )
    opened: dict[str, torch_save.Buffer] = {}
    try:
        for name, path in paths.items():
            with path.open("rb") as file:
                empty = not path.stat().st_size
                opened[name] = b"" if empty else mmap(file.fileno(), 0, access=ACCESS_READ)
        yield opened
    finally:
        for data in opened.values():
            if isinstance(data, mmap):
                data.close()


# --- the streams --------------------------------------------------------------------------------


def _extent(
    files: Mapping[str, torch_save.Buffer], key: str, dtype: str, box: Chunk, place: Place, *, root: Path
) -> Extent:
    name, start, length = place
    where = f"{root / name}, {key!r}"
    tensor = torch_save.load(files[name], start, length, allow=Allow({}), where=where)
    found = (tensor.dtype, tensor.shape) if type(tensor) is TensorAt else type(tensor).__name__
    if found != (dtype, box[1]):
        raise IndexMismatchError(
            "a stream holds what its index says of it",
            where=f"{where}, stream at byte {start}",
            equation=f"index says {(dtype, box[1])}, stream holds {found}",
            hint="index and files are of different saves; copy the whole folder again",
        )
    return Extent(box[0], box[1], name, tensor.start, tensor.strides)


def _load_object(data: torch_save.Buffer, start: int, length: int, *, where: str) -> Any:
    value = torch_save.load(data, start, length, allow=OBJECTS, where=where)
    return torch_save.to_plain(value, data, where=where)


def _prove_ways(ways: Any, *, where: str) -> None:
    """The way to each value, where torch wrote it down, is its key: a damaged name is another name."""
    for key, way in ways.items() if type(ways) is dict else ():
        if type(way) in (tuple, list) and ".".join(map(str, way)) != key:
            raise IndexMismatchError(
                "a key of an index is the way to its value",
                where=f"{where}, {key!r:.200}",
                equation=f"planner_data says {brief(way)}",
                hint="the index is damaged or was edited by hand; copy it again",
            )


def _prove_streams(places: Mapping[Any, Place], sizes: Mapping[str, int], *, root: Path) -> None:
    """No two streams share bytes, and none reaches past its file."""
    last = ("", 0)
    for name, start, length in sorted(places.values()):
        if start + length > sizes[name]:
            raise TruncatedError(
                "a file holds the streams that its index lists",
                where=str(root / name),
                equation=f"start({start}) + length({length}) > file({sizes[name]})",
                hint="the copy or the save of this file broke off; fetch it again",
            )
        if last[0] == name and start < last[1]:
            raise OverlapError(
                "the streams of a file share no bytes",
                where=str(root / name),
                equation=f"one ends at byte {last[1]}, the next starts at byte {start}",
                hint="the index was edited or merged by hand; write it again with torch",
            )
        last = name, start + length
