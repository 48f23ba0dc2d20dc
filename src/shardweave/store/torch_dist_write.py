"""Checkpoint folders of torch.distributed.checkpoint and of Megatron, laid out first and filled later.

``allocate`` decides the place of every payload from dtypes and shapes alone, so that any number of
processes can write them in any order, each byte once. ``finish`` then closes each payload to a stream that
``torch.load`` reads, with its CRC, and writes the index last: a folder without it is unfinished.

What is written is what `torch_dist` describes; neither torch nor Megatron is imported.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardweave.errors import (
    DtypeError,
    ExistsError,
    FormatError,
    MissingFileError,
    OutsideError,
)
from shardweave.store import torch_index, torch_save
from shardweave.store.crc import crc32
from shardweave.store.laid_out import open_laid_out
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, StoredTensor, TensorSpec
from shardweave.store.pickles_write import from_plain
from shardweave.store.sync import sync
from shardweave.store.tiling import prove_tiling
from shardweave.store.torch_dist import COMMON, CONFIG, INDEX
from shardweave.store.torch_index import Place

MEGATRON_CONFIG: Final[Mapping[str, Any]] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""``metadata.json`` as megatron-core 0.16.1 wants it."""

_RECORDS: Final = ("metadata", "common", "objects", "planner_data", "mcore_data")
_PIECE: Final = 16 << 20
_THREAD_PAYS: Final = 1 << 20


def allocate(
    root: Path,
    tensors: Sequence[TensorSpec],
    *,
    records: Mapping[str, Any],
    max_file_bytes: int = 5_000_000_000,
) -> Manifest:
    """Lay out a folder: ``.distcp`` files of full size in which every payload has its place.

    The layout depends on the arguments alone, so all ranks that hold the same list come to the same
    one. The caller writes the row-major bytes of each extent at its ``start`` and then calls ``finish``.

    Args:
        root: An existing folder without a checkpoint.
        tensors: What to store, and the boxes it is cut into; they must cover their tensor once.
        records: As `torch_dist.read` returns them, all of them optional: ``metadata`` (metadata.json;
            ``None`` for a folder of plain torch.distributed.checkpoint, without the files of Megatron),
            ``common`` (common.pt), ``planner_data``, ``mcore_data``, and ``objects``: by key the *bytes* of a
            ``torch.save`` stream, from `torch_dist.object_bytes` or `torch_save.stream`.
        max_file_bytes: A file ends before the stream that would exceed it; a larger one is alone.

    Returns:
        The manifest; its ``records`` are the given ones.

    Raises:
        MissingFileError: The folder does not exist.
        ExistsError: It already holds a checkpoint. Nothing was written.
        GapError, OverlapError, OutsideError: The boxes of a tensor do not tile it. Nothing was written.
        DtypeError, FormatError: The format cannot hold the tensors or records. Nothing was written.
    """
    root = Path(root)
    _require_room(root)
    _check_records(records, {spec.key for spec in tensors})
    stored: dict[str, StoredTensor] = {}
    files: dict[str, int] = {}
    name, end = "", 0
    for spec in tensors:
        extents = []
        for offset, shape in _boxes(spec):
            head, tail = torch_save.frame_sizes(spec.dtype, shape)
            start = -(-end // torch_save.ALIGNMENT) * torch_save.ALIGNMENT
            length = head + math.prod(shape) * ITEMSIZE[spec.dtype] + tail
            if not name or start + length > max_file_bytes:
                name, start = f"__{len(files)}_0.distcp", 0
            extents.append(Extent(offset, shape, name, start + head))
            files[name] = end = start + length
        if spec.key in stored:
            raise FormatError(
                "a key is stored once",
                where=repr(spec.key),
                equation="it is given twice",
                hint="tied tensors are one tensor; name the second key in the model instead",
            )
        stored[spec.key] = StoredTensor(spec.key, spec.dtype, spec.shape, tuple(extents))
    prove_tiling(stored.values(), root=root)
    for name, size in files.items():
        with (root / name).open("xb") as file:
            file.truncate(size)
    return Manifest(root, "torch_dist", stored, files, dict(records))


def finish(manifest: Manifest, checksums: Mapping[Extent, int] | None = None, *, fsync: bool = True) -> None:
    """Seal a folder that ``allocate`` laid out: streams closed, records written, index last.

    It may be called again after it broke off.

    Args:
        manifest: As ``allocate`` returned it.
        checksums: ``zlib.crc32`` of extents' bytes where the caller has them; the others are read once.
        fsync: Wait until the disk has everything before the index appears.

    Raises:
        MissingFileError, TruncatedError: A file is no longer as it was laid out.
    """
    root, known = manifest.root, checksums or {}
    extents: dict[str, list[tuple[StoredTensor, Extent]]] = {name: [] for name in manifest.files}
    for tensor in manifest.tensors.values():
        for extent in tensor.extents:
            extents[extent.file].append((tensor, extent))
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for name, pairs in extents.items():
            with open_laid_out(root, name, manifest.files[name]) as file:
                close = partial(_close, file.fileno(), known)
                # A thread pays where there is a CRC to compute; handing over a small job costs more.
                spread = manifest.files[name] > _THREAD_PAYS * len(pairs)
                done = pool.map(close, pairs) if spread else map(close, pairs)
                for (tensor, extent), (start, length) in zip(pairs, done, strict=True):
                    places[tensor.key, extent.offset] = name, start, length
                if fsync:
                    os.fsync(file.fileno())

    objects: Mapping[str, bytes] = manifest.records.get("objects", {})
    name, at, blob = f"__{len(manifest.files)}_0.distcp", 0, bytearray()
    for key, data in objects.items():
        places[key, None] = name, at, len(data)
        blob += data
        at += len(data)
    index = torch_index.render(
        {
            key: (tensor.dtype, tensor.shape, [(e.offset, e.shape) for e in tensor.extents])
            for key, tensor in manifest.tensors.items()
        },
        list(objects),
        places,
        planner_data=from_plain(manifest.records.get("planner_data")),
        mcore_data=from_plain(manifest.records.get("mcore_data")),
    )
    config = manifest.records.get("metadata", MEGATRON_CONFIG)
    of_megatron = {} if config is None else {
        COMMON: torch_save.stream(manifest.records.get("common", {})),
        CONFIG: json.dumps(dict(config)).encode(),
    }  # fmt: skip
    side = {**({name: bytes(blob)} if objects else {}), **of_megatron, f"{INDEX}.tmp": index}
    for name, data in side.items():
        with (root / name).open("wb") as file:
            file.write(data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
    (root / f"{INDEX}.tmp").replace(root / INDEX)
    if fsync:
        sync(root)


def _close(
    descriptor: int, known: Mapping[Extent, int], pair: tuple[StoredTensor, Extent]
) -> tuple[int, int]:
    """Write what stands around one payload; returns first byte and length of the whole stream."""
    tensor, extent = pair
    stop = extent.start + extent.numel * ITEMSIZE[tensor.dtype]
    crc = known.get(extent)
    if crc is None:
        crc = 0
        for at in range(extent.start, stop, _PIECE):
            crc = crc32(os.pread(descriptor, min(_PIECE, stop - at), at), crc)
    head, tail = torch_save.frame(tensor.dtype, extent.shape, crc)
    os.pwrite(descriptor, head, extent.start - len(head))
    os.pwrite(descriptor, tail, stop)
    return extent.start - len(head), stop + len(tail) - (extent.start - len(head))


def _boxes(spec: TensorSpec) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
    if spec.dtype not in ITEMSIZE:
        raise DtypeError(
            "a tensor to store has a dtype of known width",
            where=repr(spec.key),
            equation=f"dtype {spec.dtype} has no known width",
            hint=f"known are {', '.join(ITEMSIZE)}",
        )
    for offset, shape in spec.chunks or (((0,) * len(spec.shape), spec.shape),):
        fits = len(offset) == len(shape) == len(spec.shape) and all(
            o >= 0 and s >= 0 and o + s <= full for o, s, full in zip(offset, shape, spec.shape, strict=True)
        )
        if not fits:
            raise OutsideError(
                "a chunk lies inside its tensor",
                where=repr(spec.key),
                equation=f"offset{offset} + size{shape} is not in shape{spec.shape}",
                hint="cut the boxes from the tensor's own shape",
            )
        if math.prod(shape):
            yield offset, shape


def _require_room(root: Path) -> None:
    if not root.is_dir():
        raise MissingFileError(
            "a checkpoint is laid out in an existing folder", where=str(root), hint="create it first"
        )
    taken = [path.name for path in root.iterdir() if path.name in (INDEX, CONFIG, COMMON)]
    taken += [path.name for path in root.glob("*.distcp")]
    if taken:
        raise ExistsError(
            "a checkpoint is laid out in a folder that holds none",
            where=str(root),
            equation=f"it holds {', '.join(sorted(taken)[:10])}",
            hint="give another folder, or remove the old checkpoint",
        )


def _check_records(records: Mapping[str, Any], keys: set[str]) -> None:
    unknown = sorted(set(records) - set(_RECORDS))
    objects = records.get("objects", {})
    odd = [key for key, data in objects.items() if type(data) is not bytes or key in keys]
    if unknown or odd:
        raise FormatError(
            "records are among those that the format has",
            equation=f"unknown {unknown}" if unknown else f"object {odd[0]!r} is no stream, or a tensor too",
            hint=f"known are {', '.join(_RECORDS)}; objects are bytes, see torch_dist.object_bytes",
        )
    for key, data in objects.items():
        torch_save.records(data, 0, len(data), where=f"object {key!r}")
    torch_save.stream(records.get("common", {}))
    json.dumps(dict(records.get("metadata", MEGATRON_CONFIG) or {}))
