"""Folders with a safetensors file for each rank, as somebody's own framework saves what its ranks hold.

A file is named by its rank, ``rank_3.safetensors`` or ``model-tp3.safetensors``, and has the arrays of the
rank under the names of the framework. Nothing in it says which part of which tensor an array is: a layout
does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from shardweave.errors import FormatError, MissingFileError
from shardweave.store.manifest import Manifest, StoredTensor, TensorSpec
from shardweave.store.paths import inside, require_empty
from shardweave.store.safetensors import PT_METADATA
from shardweave.store.safetensors_header import Header, check_spec, create, read_header, render_header
from shardweave.store.strict_json import some
from shardweave.store.sync import sync

FORMAT: Final = "ranks"
_FILE = re.compile(
    r"(?P<stem>(?:[\w.-]+[_.-])?(?:mp_rank|tp_rank|rank|tp|shard)[_.-]?)(?P<rank>\d{1,6})\.safetensors",
    re.ASCII,
)


def stems(names: Collection[str]) -> dict[str, dict[int, str]]:
    """The files of ranks among some names, by what stands before the rank.

    >>> stems(["rank_0.safetensors", "rank_1.safetensors", "model-00001-of-00002.safetensors"])
    {'rank_': {0: 'rank_0.safetensors', 1: 'rank_1.safetensors'}}
    >>> list(stems(["model-tp00.safetensors", "model.safetensors"]))
    ['model-tp']
    """
    found: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        if match := _FILE.fullmatch(name):
            found.setdefault(match["stem"], {}).setdefault(int(match["rank"]), name)
    return found


def is_of_ranks(names: Collection[str]) -> bool:
    """Whether files of a folder are named by ranks, and no other safetensors file lies beside them."""
    files = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
    return bool(files) and sum(map(len, stems(files).values())) == len(files)


def read(root: Path) -> Manifest:
    """What the files of ranks hold; only headers are read.

    Returns:
        A manifest of format "ranks" with the keys ``{name}@{rank}``, or ``{name}`` where there is one rank;
        its record ``ranks`` is how many there are.

    Raises:
        MissingFileError: A rank below the highest has no file.
        FormatError and its kin: The files are of two sets, or a file breaks the format of safetensors.
    """
    names = {path.name for path in root.iterdir()}
    sets = stems(names)
    if len(sets) != 1:
        raise FormatError(
            "the files of all ranks are named alike",
            where=str(root),
            equation=f"{len(sets)} ways: {some(f'{stem}*.safetensors' for stem in sets)}",
            hint="move the files away that are of another save",
        )
    (files,) = sets.values()
    lost = [rank for rank in range(max(files) + 1) if rank not in files]
    if lost:
        raise MissingFileError(
            "every rank has its file",
            where=str(root),
            equation=f"{len(files)} of {max(files) + 1} files found, none of ranks {some(map(str, lost))}",
            hint="copy or download the missing files; ranks are counted from 0",
        )
    tensors: dict[str, StoredTensor] = {}
    sizes: dict[str, int] = {}
    for rank, name in sorted(files.items()):
        header = read_header(inside(root, name, where=str(root)), name)
        sizes[name] = header.size
        for array, tensor in header.tensors.items():
            key = _key(array, rank, len(files))
            tensors[key] = replace(tensor, key=key)
    return Manifest(root, FORMAT, tensors, sizes, {"ranks": len(files)})


def _key(name: str, rank: int, ranks: int) -> str:
    return name if ranks == 1 else f"{name}@{rank}"


def allocate(root: Path, tensors: Sequence[TensorSpec], *, ranks: int) -> Manifest:
    """Lay out a folder: a file of full size with its header for each rank.

    Args:
        root: An existing folder that holds nothing.
        tensors: The arrays of all ranks, with keys as ``read`` gives them.
        ranks: How many ranks there are; one without arrays has a file without arrays.

    Returns:
        The manifest; the caller writes the bytes of each array at its place and then calls ``finish``.

    Raises:
        ExistsError: The folder holds something.
        DtypeError, FormatError: The format cannot hold the arrays. Nothing was written.
    """
    require_empty(root)
    of_rank: dict[int, list[TensorSpec]] = {rank: [] for rank in range(ranks)}
    for spec in tensors:
        name, rank = _name(spec.key, ranks)
        of_rank[rank].append(replace(spec, key=name))
    heads: dict[str, tuple[bytes, Header]] = {}
    found: dict[str, StoredTensor] = {}
    for rank, specs in of_rank.items():
        file = f"rank_{rank}.safetensors"
        for spec in specs:
            check_spec(spec)
        heads[file] = render_header(specs, PT_METADATA, file)
        for name, tensor in heads[file][1].tensors.items():
            key = _key(name, rank, ranks)
            found[key] = replace(tensor, key=key)
    sizes = create(root, heads)
    return Manifest(root, FORMAT, {spec.key: found[spec.key] for spec in tensors}, sizes, {"ranks": ranks})


def _name(key: str, ranks: int) -> tuple[str, int]:
    if ranks == 1:
        return key, 0
    name, _, rank = key.rpartition("@")
    return name, int(rank)


def finish(manifest: Manifest, *, fsync: bool = True) -> None:
    """Seal a folder that ``allocate`` laid out: headers are read again, and the disk is waited for.

    Raises:
        TruncatedError, FormatError: A file or header is no longer as it was laid out.
    """
    held: Mapping[str, StoredTensor] = read(manifest.root).tensors
    if held != dict(manifest.tensors):
        raise FormatError(
            "files are finished as they were laid out",
            where=str(manifest.root),
            equation="their headers differ from what was laid out",
            hint="let nothing else write to a target while it is made",
        )
    if fsync:
        for name in manifest.files:
            sync(manifest.root / name)
        sync(manifest.root)
