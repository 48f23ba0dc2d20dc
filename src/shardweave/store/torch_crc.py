"""The CRCs of what torch saved, compared while a checkpoint is read; torch itself does not look at them.

A record of a ``torch.save`` stream has a CRC of its bytes. Which streams lie in which files follows from the
kind of the folder: an index says it, or a file is one stream. Folders without such files have nothing to
compare here.

CRCs tell damage. They do not tell a file of another save, which has right ones of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import ACCESS_READ, mmap
from typing import Final

from shardweave.store import torch_dist, torch_save
from shardweave.store.manifest import Manifest
from shardweave.store.paths import inside

Stream = tuple[str, int, int]
"""File, first byte and length of a stream of ``torch.save``."""
_SUFFIX: Final = ".pt"


def streams(manifest: Manifest) -> dict[Stream, str]:
    """The streams in the files of a checkpoint, in the order of places, with the keys that they have.

    >>> from pathlib import Path
    >>> folder = torch_dist.read(Path("tests/data/dcp_fsdp2_4/dcp"))
    >>> len(streams(folder)) >= len(folder.tensors)
    True
    """
    root, found = manifest.root, dict[Stream, str]()
    if any(name.endswith(".distcp") for name in manifest.files):
        found |= torch_dist.places(manifest)
        if (root / torch_dist.COMMON).is_file():
            found[torch_dist.COMMON, 0, (root / torch_dist.COMMON).stat().st_size] = ""
    found |= {(name, 0, size): "" for name, size in manifest.files.items() if name.endswith(_SUFFIX)}
    return dict(sorted(found.items()))


def verify(
    manifest: Manifest,
    *,
    skip: Collection[str] = (),
    part: tuple[int, int] = (0, 1),
    workers: int = 1,
) -> int:
    """Compare the records of all streams with their CRCs, in place and in bounded memory.

    Args:
        manifest: Of any format, under stored keys or others.
        skip: Keys of arrays that need not be compared: nobody reads them, or their digests are compared.
            A record is left out where the arrays in it are all of these.
        part: Which part of how many, where several processes share the work.
        workers: Threads; reading and summing run without the interpreter's lock.

    Returns:
        How many bytes were compared. Records without a CRC are not: torch can be told to compute none.

    Raises:
        DigestError: A record differs; with its file, its key where an index has one, and its name.
        ShardweaveError: As the store of the format, where a file has changed since.
    """
    number, count = part
    keys = streams(manifest)
    mine = list(keys)[number::count]
    needed, left = _starts(manifest, skip)
    files: dict[str, list[Stream]] = {}
    for stream in mine:
        files.setdefault(stream[0], []).append(stream)

    def is_skipped(name: str, begin: int, size: int) -> bool:
        return _within(left.get(name, ()), begin, size) and not _within(needed.get(name, ()), begin, size)

    def compare(name: str) -> int:
        compared = 0
        path = inside(manifest.root, name, where=str(manifest.root))
        if not path.stat().st_size:
            return 0
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            for stream in files[name]:
                key = keys[stream]
                where = f"{manifest.root / name}" + (f", {key!r}" if key else "")
                compared += torch_save.verify(
                    data, *stream[1:], where=where, skip=lambda at, size: is_skipped(name, at, size)
                )
        return compared

    with ThreadPoolExecutor(max_workers=workers) as pool:
        return sum(pool.map(compare, files))


def _starts(
    manifest: Manifest, skip: Collection[str]
) -> tuple[Mapping[str, Sequence[int]], Mapping[str, Sequence[int]]]:
    """The first bytes of extents by file: of arrays that are needed, and of those that are not."""
    needed: dict[str, list[int]] = {}
    left: dict[str, list[int]] = {}
    for key, tensor in manifest.tensors.items():
        for extent in tensor.extents:
            (left if key in skip else needed).setdefault(extent.file, []).append(extent.start)
    for found in (*needed.values(), *left.values()):
        found.sort()
    return needed, left


def _within(starts: Sequence[int], begin: int, size: int) -> bool:
    at = bisect_left(starts, begin)
    return at < len(starts) and starts[at] < begin + size
