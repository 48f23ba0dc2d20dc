"""shardweave's own checkpoints: safetensors files, one a writer, and a manifest that says what lies where.

A folder holds ``rank_00000.safetensors`` and so on, whose entries are boxes of logical tensors, and
``shardweave.manifest``, written last: a folder without it is no checkpoint. Keys are ``model/{name}`` and
``optim/{name}/{state}`` with the Hugging Face names; neither a rank nor an axis nor a bucket is in any of
them, so that what was saved at one layout is read at every other.

A run folder holds one such folder a step, ``step-00000100``, and a text file ``latest`` with the name of
the newest. Nothing in them is believed: sizes, names and places are proved before a byte is read, and a box
that is read whole is compared with its digest.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import xxhash

from shardweave.errors import (
    DigestError,
    DtypeError,
    FormatError,
    IndexMismatchError,
    MissingFileError,
    OutsideError,
    OverlapError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.layout import Box
from shardweave.store.manifest import ITEMSIZE, Extent, Manifest, StoredTensor
from shardweave.store.native_manifest import MOST_BYTES, About, TensorRecord, decode
from shardweave.store.paths import inside
from shardweave.store.read import Array, Reader, open_regular, read_into
from shardweave.store.safetensors_header import read_header
from shardweave.store.strict_json import read_bytes, some
from shardweave.store.tiling import prove_tiling
from shardweave.store.tracker import newest

MANIFEST = "shardweave.manifest"
"""The file that makes a folder a checkpoint."""
LATEST = "latest"
"""The file of a run folder that names the newest checkpoint."""
KEY = re.compile(r"model/(?P<name>[^/\s]+)|optim/[^/\s]+/[^/\s]+")

_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
_HASHED_BYTES = 1 << 20
_REPLACED = ".replaced-"

# --- folders ------------------------------------------------------------------------------------


def step_folder(step: int) -> str:
    """The name of the folder of a step.

    >>> step_folder(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def complete_steps(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run folder that have a manifest, by step, ascending."""
    found = []
    for path in run.iterdir() if run.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match is not None and (path / MANIFEST).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def latest(run: Path) -> Path | None:
    """The newest checkpoint of a run folder; ``None`` where there is none.

    It is the one that the file ``latest`` names. Where that one is gone, because a save was killed while it
    replaced it, it is what was to be replaced, or else the one of the highest step.

    Raises:
        FormatError: The file holds something else than a name of a step.
        PathError: It is a link that leads out of the folder.
    """
    name = newest(run, LATEST)
    if name is not None:
        if not _STEP.fullmatch(name):
            raise FormatError(
                "the file 'latest' holds the name of a step",
                where=str(run / LATEST),
                equation=f"got {name[:100]!r}",
                hint="give the folder of one step, or write its name into the file",
            )
        for path in (run / name, run / f"{_REPLACED}{name}"):
            if (path / MANIFEST).is_file():
                return path
    steps = complete_steps(run)
    return steps[-1][1] if steps else None


def replaced(folder: Path) -> Path:
    """Where a checkpoint is while another one takes its place."""
    return folder.with_name(_REPLACED + folder.name)


def put_back(run: Path) -> None:
    """Tidy up after a save that was killed while it replaced a checkpoint of its own step."""
    for path in run.glob(f"{_REPLACED}*"):
        folder = path.with_name(path.name.removeprefix(_REPLACED))
        if (folder / MANIFEST).is_file() or not (path / MANIFEST).is_file():
            shutil.rmtree(path)
        else:
            path.rename(folder)


def is_native(root: Path) -> bool:
    """Whether a folder is a checkpoint of this format, or of a run that has one."""
    if (root / MANIFEST).is_file():
        return True
    return root.is_dir() and ((root / LATEST).is_file() or bool(complete_steps(root)))


def read(root: Path, *, headers: bool = True) -> Manifest:
    """What a checkpoint holds; its tensors are not read.

    Args:
        root: The folder, or that of a run, of which the newest is read.
        headers: Whether to compare the manifest with the headers of all files, too. A rank of many that load
            can leave it out: what it reads is proved by digests.

    Returns:
        A manifest of format "native", whose ``records`` are ``about`` (an ``About``) and ``digests`` (by key,
        the xxh3_128 of each extent).

    Raises:
        MissingFileError: No manifest, or files that it names are not there.
        DigestError: The manifest is damaged.
        TruncatedError: A file is shorter than it was.
        GapError, OverlapError, OutsideError: The boxes of a tensor do not tile it, or share bytes.
        PathError: A file lies outside the folder.
        FormatError, DtypeError, IndexMismatchError: Anything else that no save writes.
    """
    root = _folder(Path(root))
    where = str(root / MANIFEST)
    body = decode(_small(root), where=where)
    names = [name for name, _ in body.files]
    if len(set(names)) != len(names):
        _refuse_manifest("a file is listed once", where, f"{len(names)} files, {len(set(names))} names")
    sizes = dict(body.files)
    tensors: dict[str, StoredTensor] = {}
    digests: dict[str, tuple[bytes, ...]] = {}
    for tensor in body.tensors:
        if not KEY.fullmatch(tensor.key) or tensor.key in tensors:
            _refuse_manifest("a key is that of a weight or of a state, and occurs once", where, tensor.key)
        if tensor.dtype not in ITEMSIZE:
            raise DtypeError(
                "a dtype is known",
                where=f"{where}, {tensor.key!r}",
                equation=f"dtype={tensor.dtype!r:.40}",
                hint="read it with the shardweave that wrote it",
            )
        tensors[tensor.key] = StoredTensor(
            tensor.key, tensor.dtype, tensor.shape, tuple(_extents(tensor, names, where))
        )
        digests[tensor.key] = tuple(extent.digest for extent in tensor.extents)
    _require_files(root, sizes)
    _prove_bytes(root, tensors.values(), sizes)
    prove_tiling(tensors.values(), root=root)
    if headers:
        _compare_headers(root, tensors, names)
    about = About(body.step, body.config, body.data, body.extras, body.software)
    return Manifest(root, "native", tensors, sizes, {"about": about, "digests": digests})


def named(manifest: Manifest) -> Manifest:
    """The same checkpoint with its weights under their Hugging Face names; states keep their keys."""
    names = {key: key.removeprefix("model/") for key in manifest.tensors}
    tensors = {names[key]: replace(tensor, key=names[key]) for key, tensor in manifest.tensors.items()}
    digests = {names[key]: found for key, found in manifest.records["digests"].items()}
    return replace(manifest, tensors=tensors, records={**manifest.records, "digests": digests})


def _folder(root: Path) -> Path:
    if (root / MANIFEST).is_file():
        return root
    found = latest(root) if root.is_dir() else None
    if found is not None:
        return found
    raise MissingFileError(
        "a checkpoint has a manifest",
        where=str(root),
        equation=f"{MANIFEST} is not there",
        hint="the save was not finished: use the one before; or correct the path",
    )


def _small(root: Path) -> bytes:
    path = inside(root, MANIFEST, where=str(root))
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > 2 * MOST_BYTES:
            _refuse_manifest(
                "a manifest is small beside its tensors", str(path), f"{size} bytes > {MOST_BYTES}"
            )
        return read_bytes(fd, 0, size, where=str(path))
    finally:
        os.close(fd)


def _extents(tensor: TensorRecord, names: Sequence[str], where: str) -> Iterator[Extent]:
    for extent in tensor.extents:
        if extent.file >= len(names):
            _refuse_manifest(
                "a box is in a file that is listed",
                f"{where}, {tensor.key!r}",
                f"file({extent.file}) >= {len(names)}",
            )
        yield Extent(extent.offset, extent.shape, names[extent.file], extent.start)


def _refuse_manifest(rule: str, where: str, equation: str) -> NoReturn:
    raise FormatError(
        rule, where=where, equation=equation, hint="do not use it: no save writes such a manifest"
    )


def _require_files(root: Path, sizes: Mapping[str, int]) -> None:
    paths = {name: inside(root, name, where=str(root / MANIFEST)) for name in sizes}
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        raise MissingFileError(
            "the files that a manifest names are there",
            where=str(root),
            equation=f"{len(missing)} of {len(sizes)} files missing: {some(missing)}",
            hint="copy the whole folder; each rank of the save wrote a file of its own",
        )
    for name, path in paths.items():
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size != sizes[name]:
            kind = TruncatedError if size < sizes[name] else FormatError
            raise kind(
                "a file is of the size that it was saved with",
                where=str(path),
                equation=f"{size} bytes != {sizes[name]}",
                hint="the copy of this file broke off, or it was written again; copy it once more",
            )


def _prove_bytes(root: Path, tensors: Iterable[StoredTensor], sizes: Mapping[str, int]) -> None:
    """No two boxes share bytes, and none reaches past its file."""
    spans = sorted(
        (extent.file, extent.start, extent.start + extent.numel * ITEMSIZE[tensor.dtype], tensor.key)
        for tensor in tensors
        for extent in tensor.extents
        if extent.numel
    )
    for name, start, stop, key in spans:
        if stop > sizes[name]:
            raise OutsideError(
                "a box lies inside its file",
                where=f"{root / name}, {key!r}",
                equation=f"bytes {start}..{stop} of {sizes[name]}",
                hint="do not use it: no save writes such a manifest",
            )
    for (name, _, stop, key), (other, start, _, second) in pairwise(spans):
        if name == other and start < stop:
            raise OverlapError(
                "the boxes of a file share no bytes",
                where=str(root / name),
                equation=f"{key!r} ends at byte {stop}, {second!r} starts at {start}",
                hint="do not use it: no save writes such a manifest",
            )


def entry_key(key: str, offset: Sequence[int], shape: Sequence[int]) -> str:
    """What a box is called in the header of its file.

    >>> entry_key("model/norm.weight", (4,), (8,))
    'model/norm.weight[4:12]'
    """
    # Not by Box: an empty one would lose its place, and with it its own name.
    return key + "[" + ", ".join(f"{low}:{low + size}" for low, size in zip(offset, shape, strict=True)) + "]"


def _compare_headers(root: Path, tensors: Mapping[str, StoredTensor], names: Sequence[str]) -> None:
    wanted: dict[str, dict[str, tuple[str, tuple[int, ...], int]]] = {name: {} for name in names}
    for tensor in tensors.values():
        for extent in tensor.extents:
            key = entry_key(tensor.key, extent.offset, extent.shape)
            wanted[extent.file][key] = tensor.dtype, extent.shape, extent.start
    for name, entries in wanted.items():
        header = read_header(inside(root, name, where=str(root)), name)
        found = {key: (t.dtype, t.shape, t.extents[0].start) for key, t in header.tensors.items()}
        if found != entries:
            key = next(key for key in {**found, **entries} if found.get(key) != entries.get(key))
            raise IndexMismatchError(
                "a manifest and the headers of its files agree",
                where=f"{root / name}, {key!r}",
                equation=f"manifest {entries.get(key)}, header {found.get(key)}",
                hint="files of two saves were mixed, or one is damaged; copy the whole folder again",
            )


# --- reading tensors ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """A box of a tensor, and where it is to go.

    Attributes:
        key: The key.
        shape: Shape of the whole tensor, as the reader has it.
        box: The box, of step 1.
        out: Words of the size of the stored dtype, of the shape of the box, with any strides.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    out: Array


def check_wanted(manifest: Manifest, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse at once what a checkpoint cannot give.

    Args:
        manifest: The checkpoint.
        wanted: The shape of each tensor by key.

    Raises:
        UnknownNameError: Tensors are not there; how many, and the first few.
        OutsideError: A tensor has another shape.
    """
    missing = [key for key in wanted if key not in manifest.tensors]
    if missing:
        raise UnknownNameError(
            "a checkpoint holds what is asked for",
            where=str(manifest.root),
            equation=f"{len(missing)} of {len(wanted)} missing: {some(map(repr, missing))}",
            hint="it is of another model, or was saved without these states; leave them out on purpose if so",
        )
    for key, shape in wanted.items():
        if manifest.tensors[key].shape != shape:
            raise OutsideError(
                "a stored tensor has the shape that the model says",
                where=f"{manifest.root}, {key!r}",
                equation=f"stored {manifest.tensors[key].shape} != {shape}",
                hint="the checkpoint is of another model",
            )


def fill(manifest: Manifest, wanted: Iterable[Wanted], *, verify: bool = True) -> None:
    """Read boxes of a checkpoint, exactly their bytes, each straight to its place.

    Args:
        manifest: From ``read``, or ``named`` of it.
        wanted: The boxes.
        verify: Whether stored boxes that are read whole are compared with their digests.

    Raises:
        UnknownNameError, OutsideError: As ``check_wanted``; nothing was read.
        DigestError: A stored box does not have its digest.
        TruncatedError, MissingFileError: A file changed since the manifest was read.
    """
    order = {key: i for i, key in enumerate(manifest.tensors)}
    ones = list(wanted)
    check_wanted(manifest, {one.key: one.shape for one in ones})
    with Reader(manifest) as reader:
        for one in sorted(ones, key=lambda one: (order[one.key], one.box.offset)):
            low = one.box.offset if one.box.numel else (0,) * len(one.shape)
            reader.fill(one.key, low, one.out)
            if verify:
                _verify(manifest, one.key, low, one.out)


def _verify(manifest: Manifest, key: str, low: Sequence[int], out: Array) -> None:
    """The digests of the extents that lie whole in what was just read."""
    digests = manifest.records["digests"][key]
    for extent, digest in zip(manifest.tensors[key].extents, digests, strict=True):
        at = [a - b for a, b in zip(extent.offset, low, strict=True)]
        ends = [a + n for a, n in zip(at, extent.shape, strict=True)]
        if not extent.numel or min((0, *at)) < 0 or any(e > n for e, n in zip(ends, out.shape, strict=True)):
            continue
        cut: list[Any] = [slice(a, e) for a, e in zip(at, ends, strict=True)]
        view: Array = out[(*cut, ...)]
        require_digest(digest, digest_of(view), where=f"{manifest.root / extent.file}, {key!r}", at=extent)


def require_digest(wanted: bytes, found: bytes, *, where: str, at: Extent) -> None:
    """Refuse bytes that do not have their digest."""
    if wanted != found:
        raise DigestError(
            "bytes have the digest that was recorded for them",
            where=f"{where}, box {Box.of(at.offset, at.shape)}",
            equation=f"{found.hex()} != {wanted.hex()}",
            hint="the file is damaged; copy it again, or use the checkpoint before",
        )


def digest_of(values: Array, write: Callable[[memoryview], None] | None = None) -> bytes:
    """The xxh3_128 of the row-major bytes of an array with any strides.

    Args:
        values: The array.
        write: Given the bytes as they go by, while they are warm.
    """
    state = xxhash.xxh3_128()
    for piece in _stretches(values):
        for at in range(0, len(piece), _HASHED_BYTES):
            state.update(piece[at : at + _HASHED_BYTES])
            if write is not None:
                write(piece[at : at + _HASHED_BYTES])
    return state.digest()


def _stretches(values: Array) -> Iterator[memoryview]:
    """The row-major bytes of an array, without a copy of all of it."""
    if values.flags.c_contiguous or values.nbytes <= _HASHED_BYTES or not values.ndim:
        yield np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        return
    row = math.prod(values.shape[1:]) * values.itemsize
    rows = max(1, _HASHED_BYTES // row)
    for at in range(0, len(values), rows):
        yield from _stretches(values[at : at + rows] if rows > 1 or row <= _HASHED_BYTES else values[at])


def verify(manifest: Manifest) -> int:
    """Compare every box of a checkpoint with its digest, in bounded memory; the bytes compared.

    Raises:
        DigestError: One differs.
    """
    boxes = sorted(
        (extent.file, extent.start, number, key)
        for key, tensor in manifest.tensors.items()
        for number, extent in enumerate(tensor.extents)
    )
    done, buffer = 0, np.empty(_HASHED_BYTES, np.uint8)
    for name, group in groupby(boxes, key=lambda box: box[0]):
        path = inside(manifest.root, name, where=str(manifest.root))
        fd = open_regular(path)
        try:
            for _, start, number, key in group:
                tensor = manifest.tensors[key]
                extent, state = tensor.extents[number], xxhash.xxh3_128()
                size = extent.numel * ITEMSIZE[tensor.dtype]
                for at in range(0, size, len(buffer)):
                    piece = buffer[: min(len(buffer), size - at)].data
                    read_into(fd, start + at, piece, where=f"{path}, {key!r}")
                    state.update(piece)
                wanted = manifest.records["digests"][key][number]
                require_digest(wanted, state.digest(), where=f"{path}, {key!r}", at=extent)
                done += size
        finally:
            os.close(fd)
    return done
