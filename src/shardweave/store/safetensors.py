"""Hugging Face folders of safetensors files: read without loading, laid out without values.

A folder is one file, or several with an index that maps every key to its file. Nothing in the format
proves that the index, the headers and the bytes agree, and common loaders check one direction at
most, so ``read`` proves both before it returns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardweave.errors import ExistsError, FormatError, IndexMismatchError, MissingFileError
from shardweave.store.manifest import Manifest, StoredTensor, TensorSpec
from shardweave.store.paths import inside
from shardweave.store.safetensors_header import (
    METADATA,
    Header,
    check_spec,
    create,
    read_header,
    render_header,
)
from shardweave.store.strict_json import is_text_map, is_utf8, read_json, some
from shardweave.store.sync import sync

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PT_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""What transformers wants to find in each file's header."""

_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-\d{5,}-of-(?P<count>\d{5,12})\.safetensors", re.ASCII)


# --- reading ------------------------------------------------------------------------------------


def read(root: Path) -> Manifest:
    """What a folder of safetensors files, or one such file, holds; only headers are read.

    With an index, the index decides: each key is read from the file it names. A key that lies in
    further listed files too is an overlay and is reported in ``records["overlaid"]``. Without an
    index the folder must hold ``model.safetensors``, one single file, or one complete set
    ``<name>-0000i-of-0000n``. Other safetensors files are in ``records["stray"]`` and not read,
    except that without an index none of them may hold a key of the checkpoint a second time.

    Args:
        root: A folder, or a path of a ``.safetensors`` file.

    Returns:
        A manifest of format "hf" whose records are ``index`` (its name or None), ``index_metadata``,
        ``metadata`` (by file), ``overlaid`` (other files by key) and ``stray`` (file names).

    Raises:
        MissingFileError: Files are missing; all of them are named.
        IndexMismatchError: Index and headers contradict each other; all keys are counted.
        TruncatedError: A file ends before the bytes that its header promises.
        DtypeError: A dtype is unknown or smaller than a byte.
        PathError: The index names a path outside the folder.
        FormatError: Anything else that breaks the format.
    """
    root = Path(root)
    if root.is_dir():
        names = _names(root)
        files = [name for name in names if name.endswith(".safetensors")]
        index = _choose_index(root, [name for name in names if name.endswith(_INDEX_SUFFIX)])
        return _read_indexed(root, index, files) if index else _read_plain(root, files)
    if not root.exists():
        raise MissingFileError(
            "a checkpoint exists", where=str(root), hint="correct the path, or mount the disk that it is on"
        )
    if root.suffix != ".safetensors":
        raise FormatError(
            "a checkpoint of this format is a folder or a .safetensors file",
            where=str(root),
            equation=f"suffix({root.suffix!r}) is not '.safetensors'",
            hint=f"give the folder that holds {SINGLE} or {INDEX}",
        )
    path = root.resolve() if root.is_symlink() else root
    return _manifest(path.parent, {path.name: read_header(path, path.name)}, stray=[])


def _choose_index(root: Path, indexes: Sequence[str]) -> str | None:
    if INDEX in indexes or not indexes:
        return INDEX if indexes else None
    if len(indexes) > 1:
        raise FormatError(
            "it is clear which index of a folder counts",
            where=str(root),
            equation=f"{len(indexes)} indexes and none is {INDEX}: {some(indexes)}",
            hint=f"rename the one that counts to {INDEX}",
        )
    return indexes[0]


def _read_plain(root: Path, files: Sequence[str]) -> Manifest:
    """A folder without an index: its files must themselves say which of them belong together."""
    sets: dict[tuple[str, str], list[str]] = {}
    for name in files:
        if match := _SHARD.fullmatch(name):
            sets.setdefault((match["stem"], match["count"]), []).append(name)
    if SINGLE in files and not sets:
        used = [SINGLE]
    elif len(sets) == 1 and SINGLE not in files:
        (stem, count), numbered = sets.popitem()
        used = _complete_set(root, stem, count, numbered)
    elif len(files) == 1:
        used = list(files)
    elif not files:
        raise MissingFileError(
            "the folder of a checkpoint holds its safetensors files",
            where=str(root),
            equation=f"neither {SINGLE} nor {INDEX} found",
            hint="give the folder that holds them; a hub cache has them in snapshots/<revision>/",
        )
    else:
        raise FormatError(
            "without an index it is clear which files belong together",
            where=str(root),
            equation=f"{len(files)} files: {some(files)}",
            hint=f"restore {INDEX}, or give the path of one file",
        )
    headers = {name: read_header(inside(root, name, where=str(root)), name) for name in files}
    twice = {
        key: names
        for key, names in _holders(headers).items()
        if len(names) > 1 and not set(names).isdisjoint(used)
    }
    if twice:
        raise IndexMismatchError(
            "a tensor lies in one file, or an index says which one counts",
            where=str(root),
            equation=some(f"{key!r} in {' and '.join(names)}" for key, names in twice.items()),
            hint=f"restore {INDEX}, or move the file that does not belong to the checkpoint away",
        )
    stray = [name for name in files if name not in used]
    return _manifest(root, {name: headers[name] for name in used}, stray=stray)


def _complete_set(root: Path, stem: str, count: str, files: Sequence[str]) -> list[str]:
    number, width = int(count), len(count)
    expected = (f"{stem}-{i:0{width}d}-of-{count}.safetensors" for i in range(1, number + 1))
    if len(files) < number:
        missing = list(islice((name for name in expected if name not in files), 100))
        raise MissingFileError(
            "a set of numbered files is complete",
            where=str(root),
            equation=f"{len(files)} of {number} files found, missing {some(missing, limit=100)}",
            hint="copy or download the missing files; do not load the checkpoint partially",
        )
    if set(files) != set(islice(expected, len(files) + 1)):
        raise FormatError(
            "a set of numbered files counts from 1 to its number, each once",
            where=str(root),
            equation=f"{len(files)} files for a set of {number}: {some(files)}",
            hint="move files of another save away, or restore the index",
        )
    return sorted(files)


def _read_indexed(root: Path, index: str, files: Sequence[str]) -> Manifest:
    weight_map, metadata = _read_index(root, index)
    listed = sorted(set(weight_map.values()))
    paths = {name: inside(root, name, where=str(root / index)) for name in listed}
    _require_files(root, index, listed)
    if SINGLE in files and SINGLE not in paths:
        raise FormatError(
            "a folder holds one checkpoint",
            where=str(root),
            equation=f"{SINGLE} lies beside {index}, which lists only {some(listed)}",
            hint="loaders disagree about which one counts; move the one away that does not",
        )
    headers = {name: read_header(path, name) for name, path in paths.items()}
    holders = _holders(headers)
    _require_agreement(root / index, weight_map, headers, holders)
    overlaid = {
        key: [name for name in names if name != weight_map[key]]
        for key, names in holders.items()
        if len(names) > 1
    }
    kept = {
        name: Header(h.size, h.metadata, {k: t for k, t in h.tensors.items() if weight_map[k] == name})
        for name, h in headers.items()
    }
    total = sum(tensor.num_bytes for header in kept.values() for tensor in header.tensors.values())
    claimed = metadata.get("total_size", total)
    # Older writers recorded a float; an exact one is not a lie.
    if isinstance(claimed, bool) or claimed != total:
        raise IndexMismatchError(
            "an index gives the true size of its tensors",
            where=str(root / index),
            equation=f"metadata.total_size={claimed!r:.100} != sum of tensor bytes={total}",
            hint="index and files are of different revisions; download both again",
        )
    stray = [name for name in files if name not in paths]
    return _manifest(root, kept, stray=stray, index=index, index_metadata=metadata, overlaid=overlaid)


def _read_index(root: Path, index: str) -> tuple[dict[str, str], dict[str, Any]]:
    found = read_json(inside(root, index, where=str(root)), where=str(root / index))
    weight_map, metadata = found.get("weight_map"), found.get("metadata", {})
    if not isinstance(weight_map, dict) or not is_text_map(weight_map) or not weight_map:
        wrong = "'weight_map' from keys to file names"
    elif not isinstance(metadata, dict):
        wrong = "'metadata' as an object, if at all"
    else:
        return weight_map, metadata
    raise FormatError(
        f"an index holds {wrong}",
        where=str(root / index),
        equation=f"top-level keys: {some(map(repr, found))}",
        hint="write the index again with the software that saved the checkpoint",
    )


def _require_files(root: Path, index: str, listed: Sequence[str]) -> None:
    """All listed files are there under exactly their listed spelling, on any file system."""
    folders = {folder: _names(root / folder) for folder in {name.rpartition("/")[0] for name in listed}}
    missing = []
    for name in listed:
        folder, _, last = name.rpartition("/")
        if last in folders[folder]:
            continue
        alike = [other for other in folders[folder] if other.casefold() == last.casefold()]
        missing.append(f"{name} (the folder holds {alike[0]!r}, which differs in case)" if alike else name)
    if missing:
        raise MissingFileError(
            "the files that an index lists are there",
            where=str(root / index),
            equation=f"{len(missing)} of {len(listed)} files missing: {some(missing, limit=1000)}",
            hint="copy or download the missing files; do not load the checkpoint partially",
        )


def _require_agreement(
    index: Path,
    weight_map: Mapping[str, str],
    headers: Mapping[str, Header],
    holders: Mapping[str, Sequence[str]],
) -> None:
    lost = [
        f"{key!r} not in {name}" + (f", but in {' and '.join(holders[key])}" if key in holders else "")
        for key, name in weight_map.items()
        if key not in headers[name].tensors
    ]
    unlisted = [
        f"{key!r} of {' and '.join(names)}" for key, names in holders.items() if key not in weight_map
    ]
    faults = []
    if lost:
        faults.append(f"{len(lost)} listed but not held: {some(lost)}")
    if unlisted:
        faults.append(f"{len(unlisted)} held but not listed: {some(unlisted)}")
    if faults:
        raise IndexMismatchError(
            "an index and the headers of its files agree",
            where=str(index),
            equation=f"index entries={len(weight_map)}, keys in headers={len(holders)}; {'; '.join(faults)}",
            hint="download index and files of one revision again; loading would leave tensors out",
        )


def _holders(headers: Mapping[str, Header]) -> dict[str, list[str]]:
    """The files that hold each key."""
    holders: dict[str, list[str]] = {}
    for name, header in headers.items():
        for key in header.tensors:
            holders.setdefault(key, []).append(name)
    return holders


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _manifest(
    root: Path,
    headers: Mapping[str, Header],
    *,
    stray: Sequence[str],
    index: str | None = None,
    index_metadata: Mapping[str, Any] | None = None,
    overlaid: Mapping[str, Sequence[str]] | None = None,
) -> Manifest:
    return Manifest(
        root=root,
        format="hf",
        tensors={key: tensor for header in headers.values() for key, tensor in header.tensors.items()},
        files={name: header.size for name, header in headers.items()},
        records={
            "index": index,
            "index_metadata": dict(index_metadata or {}),
            "metadata": {name: dict(header.metadata) for name, header in headers.items()},
            "overlaid": dict(overlaid or {}),
            "stray": list(stray),
        },
    )


# --- writing ------------------------------------------------------------------------------------


def allocate(
    root: Path,
    tensors: Sequence[TensorSpec],
    *,
    max_file_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] = PT_METADATA,
) -> Manifest:
    """Lay out a folder: files of full size with their headers, whose tensors read as zeros.

    The split depends on the list of tensors alone, so all ranks that hold the same list make the
    same files: tensors go into a file in the given order until the next would exceed
    ``max_file_bytes`` of tensor bytes. A larger tensor has a file of its own. The caller writes each
    tensor's row-major bytes at ``extents[0].start`` of its file and then calls ``finish``.

    Args:
        root: An existing folder without safetensors files.
        tensors: What to store, each as one whole box.
        max_file_bytes: Tensor bytes in a file.
        metadata: Text pairs in each file's header; transformers wants ``{"format": "pt"}``.

    Returns:
        The manifest, equal to what ``read`` returns after ``finish`` but for the index records.

    Raises:
        MissingFileError: The folder does not exist.
        ExistsError: The folder already holds a checkpoint. Nothing was written.
        DtypeError, FormatError: The format cannot hold the tensors. Nothing was written.
    """
    root = Path(root)
    _require_room(root)
    _require_specs(tensors, max_file_bytes, metadata)
    groups = files_of(tensors, max_file_bytes=max_file_bytes)
    heads = {name: render_header(group, metadata, name) for name, group in groups.items()}
    create(root, heads)
    return _manifest(root, {name: header for name, (_, header) in heads.items()}, stray=[])


def files_of(tensors: Sequence[TensorSpec], *, max_file_bytes: int) -> dict[str, list[TensorSpec]]:
    """Which tensors ``allocate`` puts into which file, without writing anything.

    >>> specs = [TensorSpec(key, "uint8", (4,)) for key in "abc"]
    >>> [(name, len(group)) for name, group in files_of(specs, max_file_bytes=8).items()]
    [('model-00001-of-00002.safetensors', 2), ('model-00002-of-00002.safetensors', 1)]
    """
    groups: list[list[TensorSpec]] = [[]]
    room = max_file_bytes
    for spec in tensors:
        if spec.num_bytes > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(spec)
        room -= spec.num_bytes
    count = len(groups)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
    return dict(zip(names, groups, strict=True))


def finish(manifest: Manifest, *, fsync: bool = True) -> None:
    """Seal a folder that ``allocate`` laid out: headers proved intact, everything on disk, index last.

    Whether the payload was filled in nobody can tell from the files: write into a folder of a
    temporary name and rename it afterwards.

    Args:
        manifest: As ``allocate`` returned it.
        fsync: Wait until the disk has everything. Only tests should not.

    Raises:
        TruncatedError, FormatError: A file or header is no longer as it was laid out.
    """
    root = manifest.root
    found: dict[str, StoredTensor] = {}
    for name in manifest.files:
        path = inside(root, name, where=str(root))
        found |= read_header(path, name).tensors
        if fsync:
            sync(path)
    changed = [key for key in {**found, **manifest.tensors} if found.get(key) != manifest.tensors.get(key)]
    if changed:
        raise FormatError(
            "headers stay as they were laid out",
            where=str(root),
            equation=f"{len(changed)} tensors changed: {some(map(repr, changed))}",
            hint="write each tensor at its extent's start and no byte elsewhere",
        )
    if len(manifest.files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in found.values())},
            "weight_map": {key: tensor.extents[0].file for key, tensor in found.items()},
        }
        temporary = root / f"{INDEX}.tmp"
        temporary.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if fsync:
            sync(temporary)
        temporary.replace(root / INDEX)
    if fsync:
        sync(root)


def _require_room(root: Path) -> None:
    if not root.is_dir():
        raise MissingFileError(
            "the folder to write into exists", where=str(root), hint="create the folder first"
        )
    present = [name for name in _names(root) if name.endswith((".safetensors", _INDEX_SUFFIX))]
    if present:
        raise ExistsError(
            "the folder to write into holds no safetensors files",
            where=str(root),
            equation=f"it holds {some(present)}",
            hint="write into a new folder; files of two saves must not mix",
        )


def _require_specs(tensors: Sequence[TensorSpec], max_file_bytes: int, metadata: Mapping[str, str]) -> None:
    if max_file_bytes < 1:
        raise FormatError(
            "a file has room for tensors",
            equation=f"max_file_bytes={max_file_bytes} < 1",
            hint="give a positive number of bytes",
        )
    if not all(is_utf8(text) for pair in metadata.items() for text in pair):
        raise FormatError(
            f"{METADATA} maps text to text",
            equation=f"metadata={dict(metadata)!r:.200}",
            hint="turn keys and values into strings",
        )
    keys = set()
    for spec in tensors:
        check_spec(spec)
        if spec.key in keys:
            raise FormatError(
                "a key occurs once",
                where=repr(spec.key),
                equation=f"{len(tensors)} tensors, {len({s.key for s in tensors})} keys",
                hint="store each tensor once and under its own key",
            )
        keys.add(spec.key)
