"""Folders of safetensors files with shards of tensors, by torch.distributed.checkpoint, read in place.

``HuggingFaceStorageWriter(save_distributed=True)`` has each rank write what it holds, and no index:

    ``shard-RRRRR-model-xxxxx-of-yyyyy.safetensors``   of rank R - 1; a tensor is in the files xxxxx
    ``__metadata__``   ``DCP_SHARDING_INFO``: JSON, ``{name: {"saved_offsets": [...]}}``, where in the whole
                    tensor the box begins that the file holds

Without ``save_distributed`` one process writes ``model-xxxxx-of-yyyyy.safetensors`` and an index. Their
headers have offsets too, all zero. Consolidated files have none, and are read as any folder of Hugging Face.

No file says how large a tensor is: torch takes the end of the box that reaches furthest. So where the files
of the last ranks are gone, what is left looks whole; and a gap in the middle torch does not see, but leaves
there what the caller had. Here boxes are proved to tile their tensor, and its shape is what the model says.

A folder of this kind is not written: files of whole tensors are read by the same reader of torch, on any
number of ranks, and by everybody else (`safetensors.allocate`).

Source: torch 2.13 ``torch/distributed/checkpoint/hf_storage.py``, ``filesystem.py`` and ``_hf_utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardweave.errors import (
    DtypeError,
    FormatError,
    GapError,
    IndexMismatchError,
    MissingFileError,
    OutsideError,
)
from shardweave.store.manifest import Extent, Manifest, StoredTensor
from shardweave.store.paths import inside
from shardweave.store.safetensors import INDEX
from shardweave.store.safetensors_header import SHARDS, Header, read_header
from shardweave.store.strict_json import is_text_map, parse_json, read_json, some
from shardweave.store.tiling import prove_tiling

OFFSETS: Final = "saved_offsets"
"""What the place of a box is called in the header of its file."""

_NAME = re.compile(r"(?:shard-(?P<rank>\d{5,})-)?model-(?P<number>\d{5,})-of-(?P<count>\d{5,})", re.ASCII)
_SUFFIX = ".safetensors"
_MOST = 1 << 48


def is_sharded(root: Path) -> bool:
    """Whether a folder is one of this kind, by the name and the header of its first safetensors file.

    Raises:
        FormatError and its kin: The file is damaged.
    """
    names = _names(root) if root.is_dir() else []
    if not names:
        return False
    match = _NAME.fullmatch(names[0].removesuffix(_SUFFIX))
    return match is not None and (match["rank"] is not None or SHARDS in _header(root, names[0]).metadata)


def read(root: Path, *, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Manifest:
    """What the files of all ranks hold together; only headers are read.

    Args:
        root: The folder.
        shapes: The whole shape of tensors by key, as the model says. Where there is none here, the shape is
            inferred from the boxes, which cannot tell that the last of them are missing.

    Returns:
        A manifest of format "hf". Its ``records`` are those of `safetensors.read`, and ``inferred``, the keys
        whose shape nothing but the boxes themselves says.

    Raises:
        MissingFileError: No files, or of none of the ranks a file with one of the numbers.
        GapError: The boxes of a tensor do not cover it: files of ranks are missing.
        OverlapError: They overlap, as where files of two saves are mixed.
        OutsideError: A box reaches outside the shape that was given.
        IndexMismatchError: The offsets, or the index, are of other tensors than the file.
        TruncatedError, DtypeError, FormatError: Anything else that torch does not write.
    """
    root = Path(root)
    names = _names(root)
    _check_names(root, names)
    headers = {name: _header(root, name) for name in names}
    boxes: dict[str, list[tuple[str, Extent]]] = {}
    for name, header in headers.items():
        offsets = _offsets(root / name, header)
        for key, tensor in header.tensors.items():
            extent = tensor.extents[0]
            box = Extent(offsets[key], extent.shape, name, extent.start)
            boxes.setdefault(key, []).append((tensor.dtype, box))
    known = shapes or {}
    tensors = {key: _tensor(key, found, known.get(key), root) for key, found in boxes.items()}
    prove_tiling(tensors.values(), root=root)
    index = _index(root, tensors) if (root / INDEX).is_file() else None
    return Manifest(
        root=root,
        format="hf",
        tensors=tensors,
        files={name: header.size for name, header in headers.items()},
        records={
            "index": INDEX if index is not None else None,
            "index_metadata": index or {},
            "metadata": {name: dict(header.metadata) for name, header in headers.items()},
            "overlaid": {},
            "stray": [],
            "inferred": frozenset(tensors) - frozenset(known),
        },
    )


def require_shapes(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare shapes that were inferred with those of the model.

    Raises:
        GapError: What is stored is the beginning of a larger tensor: files of the last ranks are missing.
        OutsideError: It is of another shape.
    """
    for key in sorted(manifest.records["inferred"] & shapes.keys()):
        _require_shape(manifest.tensors[key], shapes[key], manifest.root)


# --- files --------------------------------------------------------------------------------------


def _names(root: Path) -> list[str]:
    found = root.iterdir() if root.is_dir() else ()
    return sorted(path.name for path in found if path.name.endswith(_SUFFIX))


def _header(root: Path, name: str) -> Header:
    return read_header(inside(root, name, where=str(root)), name, shards=True)


def _check_names(root: Path, names: Sequence[str]) -> None:
    """All files are of one save: sharded or not, and numbered up to one number."""
    if not names:
        raise MissingFileError(
            "a sharded folder holds the safetensors files of its ranks",
            where=str(root),
            equation=f"no file ends in {_SUFFIX}",
            hint="give the folder that they are in; a consolidated save has them in sharded/",
        )
    found = {name: _NAME.fullmatch(name.removesuffix(_SUFFIX)) for name in names}
    odd = [name for name, match in found.items() if match is None]
    matches = [match for match in found.values() if match is not None]
    kinds = {("shard-" if match["rank"] else "") + f"model-*-of-{match['count']}" for match in matches}
    if odd or len(kinds) != 1:
        raise FormatError(
            "the files of a sharded folder are of one save",
            where=str(root),
            equation=f"they are named {some([*sorted(kinds), *odd])}",
            hint="torch reads all files of a folder as one; move those of another save away",
        )
    count, present = int(matches[0]["count"]), {int(match["number"]) for match in matches}
    if len(present) != count or min(present) < 1 or max(present) > count:
        raise MissingFileError(
            "a set of numbered files is complete",
            where=str(root),
            equation=f"{len(present)} of {count} numbers found: {some(map(str, sorted(present)))}",
            hint="copy the missing files; torch would read the folder without their tensors",
        )


def _offsets(path: Path, header: Header) -> dict[str, tuple[int, ...]]:
    """Where the boxes of a file begin, each for a tensor that it holds."""
    where = f"{SHARDS} in {path}"
    if SHARDS not in header.metadata:
        raise FormatError(
            "a file of a sharded folder says where its tensors begin",
            where=str(path),
            equation=f"{SHARDS} is not in its header",
            hint="torch would take them for beginnings of tensors; move a file of another save away",
        )
    found = parse_json(header.metadata[SHARDS].encode(), where=where)
    if found.keys() != header.tensors.keys():
        odd = sorted(found.keys() ^ header.tensors.keys())
        raise IndexMismatchError(
            "offsets are those of the tensors of the file",
            where=where,
            equation=f"{len(odd)} keys are in one of both only: {some(map(repr, odd))}",
            hint="the file was edited by hand; save it again",
        )
    return {key: _offset(entry, header.tensors[key], where=where) for key, entry in found.items()}


def _offset(entry: Any, tensor: StoredTensor, *, where: str) -> tuple[int, ...]:
    offset = entry.get(OFFSETS) if isinstance(entry, dict) and entry.keys() == {OFFSETS} else None
    if (
        not isinstance(offset, list)
        or len(offset) != len(tensor.shape)
        or not all(type(at) is int and 0 <= at < _MOST for at in (*offset, *tensor.shape))
    ):
        raise FormatError(
            "the place of a box is a list of indices, one for each dim",
            where=f"{tensor.key!r}, {where}",
            equation=f"got {entry!r:.100} for shape{tensor.shape}",
            hint="the file was edited by hand; save it again",
        )
    return tuple(offset)


def _tensor(
    key: str, found: Sequence[tuple[str, Extent]], shape: tuple[int, ...] | None, root: Path
) -> StoredTensor:
    (dtype, first), *others = found
    for other, box in others:
        if other != dtype or len(box.shape) != len(first.shape):
            raise DtypeError(
                "the shards of a tensor have one dtype and equally many dims",
                where=f"{root}, {key!r}",
                equation=f"{dtype} {first.shape} in {first.file!r}, {other} {box.shape} in {box.file!r}",
                hint="files of two saves are mixed; torch takes the dtype of whichever it sees first",
            )
    ends = [[o + n for o, n in zip(box.offset, box.shape, strict=True)] for _, box in found]
    reach = tuple(map(max, zip(*ends, strict=True)))
    extents = tuple(box for _, box in found if box.numel)
    tensor = StoredTensor(key, dtype, reach, extents)
    if shape is not None:
        _require_shape(tensor, shape, root)
    return tensor


def _require_shape(tensor: StoredTensor, shape: tuple[int, ...], root: Path) -> None:
    reach = tensor.shape
    if reach == shape:
        return
    if len(reach) == len(shape) and all(a <= b for a, b in zip(reach, shape, strict=True)):
        raise GapError(
            "the shards of a tensor reach to its end",
            where=f"{root}, {tensor.key!r}",
            equation=f"they reach {reach} of shape{shape}",
            hint="files of the last ranks are missing; torch would take what is left for all: copy them too",
        )
    raise OutsideError(
        "the shards of a tensor lie inside it",
        where=f"{root}, {tensor.key!r}",
        equation=f"they reach {reach}, outside shape{shape}",
        hint="the config is of another model, or files of another save are among these",
    )


def _index(root: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The index that one process writes with its files, compared with them; its metadata."""
    found = read_json(inside(root, INDEX, where=str(root)), where=str(root / INDEX))
    weights, metadata = found.get("weight_map"), found.get("metadata", {})
    held = {key: {extent.file for extent in tensor.extents} for key, tensor in tensors.items()}
    if not isinstance(weights, dict) or not is_text_map(weights) or not isinstance(metadata, dict):
        weights, metadata = {}, {}
    if weights.keys() != held.keys() or not all(files <= {weights[key]} for key, files in held.items()):
        raise IndexMismatchError(
            "an index and the headers of its files agree",
            where=str(root / INDEX),
            equation=f"{len(weights)} keys listed, {len(held)} held; or in other files",
            hint="index and files are of different saves; save the checkpoint again",
        )
    return metadata
