"""Files of ``torch.save`` that are laid out first, filled by anybody in any order, and sealed in the end.

A writer says as archives what each file will hold. ``create`` makes the files at full size and says as a
`Manifest` where the bytes of each array go; ``seal`` writes what stands around them, with right CRCs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardweave.errors import ExistsError, MissingFileError, TruncatedError
from shardweave.store import crc
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, StoredTensor, TensorSpec, run_extents
from shardweave.store.paths import check_name, inside
from shardweave.store.sync import sync
from shardweave.store.tiling import prove_tiling
from shardweave.store.torch_archive import Archive, Bytes, Part

_PIECE: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A file with one archive, whose storages say which arrays go into them."""

    name: str
    archive: Archive


def create(
    root: Path,
    specs: Sequence[TensorSpec],
    files: Iterable[LaidOut],
    *,
    format: str,
    records: Mapping[str, Any],
) -> Manifest:
    """Make the files, at full size and still without anything in them.

    Args:
        root: An existing folder.
        specs: The arrays. Their own boxes say nothing here: where they are cut, the files say.
        files: Without those that hold no array.
        format: Name of the format, for the manifest.
        records: The manifest's records.

    Raises:
        ExistsError: One of the files is there.
        PathError: The name of an array makes no plain path.
        GapError, OverlapError: The files do not hold each element of each array once. Nothing was written.
    """
    found: dict[str, list[Extent]] = {spec.key: [] for spec in specs}
    of_key = {spec.key: spec for spec in specs}
    sizes: dict[str, int] = {}
    for file in files:
        check_name(file.name, where=str(root))
        sizes[file.name] = file.archive.num_bytes
        for start, part in _parts(file):
            if not part.copy:
                found[part.key] += _extents(of_key[part.key], part, file.name, start)
    tensors = {
        spec.key: StoredTensor(spec.key, spec.dtype, spec.shape, tuple(found[spec.key])) for spec in specs
    }
    prove_tiling(tensors.values(), root=root)
    for name in sizes:
        if (root / name).exists():
            raise ExistsError(
                "a checkpoint is laid out in a folder that holds none",
                where=str(root),
                equation=f"it holds {name}",
                hint="give another folder, or remove the old checkpoint",
            )
    for name, size in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("xb") as opened:
            opened.truncate(size)
    return Manifest(root, format, tensors, sizes, dict(records))


def _parts(file: LaidOut) -> Iterable[tuple[int, Part]]:
    """Each part of a file, and its first byte there."""
    for storage, start in zip(file.archive.storages, file.archive.starts, strict=True):
        for part in storage.parts:
            yield start + part.at, part


def _extents(spec: TensorSpec | StoredTensor, part: Part, name: str, start: int) -> list[Extent]:
    return list(run_extents(spec.shape, part.start, part.stop, name, start, spec.dtype))


def seal(
    manifest: Manifest,
    files: Iterable[LaidOut],
    checksums: Mapping[Extent, int] | None = None,
    *,
    fsync: bool = True,
) -> None:
    """Write what stands around the bytes of the arrays, and the copies of arrays that several files hold.

    It may be called again after it broke off.

    Args:
        manifest: As ``create`` returned it, its arrays written.
        files: The same as there.
        checksums: ``zlib.crc32`` of extents' bytes where the caller has them; the others are read once.
        fsync: Wait until the disk has everything.

    Raises:
        MissingFileError, TruncatedError: A file is no longer as it was laid out.
    """
    known = dict(checksums or {})
    for file in files:
        with open_laid_out(manifest.root, file.name, manifest.files[file.name]) as opened:
            descriptor, crcs = opened.fileno(), []
            for storage, start in zip(file.archive.storages, file.archive.starts, strict=True):
                if storage.data is not None:
                    os.pwrite(descriptor, storage.data, start)
                    crcs.append(crc.crc32(storage.data))
                else:
                    crcs.append(_crc_of(storage, start, file.name, descriptor, manifest, known))
            for at, data in file.archive.around(crcs):
                os.pwrite(descriptor, data, at)
            if fsync:
                os.fsync(descriptor)


def _crc_of(
    storage: Bytes,
    start: int,
    name: str,
    descriptor: int,
    manifest: Manifest,
    known: dict[Extent, int],
) -> int:
    """The CRC of a storage: of what was filled in, as the caller knows it, and of the zeros between."""
    total = end = 0
    for part in storage.parts:
        total = crc.zeros(part.at - end, total)
        tensor = manifest.tensors[part.key]
        itemsize, homes = ITEMSIZE[tensor.dtype], _extents(tensor, part, name, start + part.at)
        end = part.at + (part.stop - part.start) * itemsize
        if part.copy:
            _copy(tensor, manifest, descriptor, start + part.at)
            homes = list(tensor.extents)
        for extent in homes:
            size = extent.numel * itemsize
            if extent not in known:
                with open_laid_out(manifest.root, extent.file, manifest.files[extent.file]) as opened:
                    known[extent] = _read(opened.fileno(), extent.start, size)
            total = crc.combine(total, known[extent], size)
    return crc.zeros(storage.num_bytes - end, total)


def _read(descriptor: int, start: int, num_bytes: int) -> int:
    total = 0
    for at in range(start, start + num_bytes, _PIECE):
        total = crc.crc32(os.pread(descriptor, min(_PIECE, start + num_bytes - at), at), total)
    return total


def _copy(tensor: StoredTensor, manifest: Manifest, descriptor: int, start: int) -> None:
    """An array, stored row-major from its first element to its last elsewhere, once more."""
    for extent in tensor.extents:
        stop = extent.start + extent.numel * ITEMSIZE[tensor.dtype]
        with open_laid_out(manifest.root, extent.file, manifest.files[extent.file]) as opened:
            for at in range(extent.start, stop, _PIECE):
                data = os.pread(opened.fileno(), min(_PIECE, stop - at), at)
                os.pwrite(descriptor, data, start)
                start += len(data)


def open_laid_out(root: Path, name: str, size: int) -> io.FileIO:
    """A file to write into, if it still is as it was laid out.

    Raises:
        MissingFileError, TruncatedError: It is not.
    """
    path = inside(root, name, where=str(root))
    if not path.is_file():
        raise MissingFileError(
            "files stay as they were laid out",
            where=str(path),
            equation="it is gone",
            hint="allocate the folder anew and write its payloads again",
        )
    if path.stat().st_size != size:
        raise TruncatedError(
            "files stay as they were laid out",
            where=str(path),
            equation=f"size({path.stat().st_size}) != {size}",
            hint="write each extent at its start and no byte elsewhere; allocate the folder anew",
        )
    return io.FileIO(path, "r+")


def write_beside(root: Path, files: Mapping[str, bytes], *, last: str, fsync: bool = True) -> None:
    """Small files whose bytes are known, ``last`` of them all at the end and by one rename."""
    folders = {root}
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        folders |= {path.parent, path.parent.parent} if "/" in name else {path.parent}
        temporary = path.with_name(f".{path.name}.tmp") if name == last else path
        with temporary.open("wb") as file:
            file.write(data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
    if fsync:
        for folder in sorted(folders):
            sync(folder)
    path = root / last
    path.with_name(f".{path.name}.tmp").replace(path)
    if fsync:
        sync(root)
