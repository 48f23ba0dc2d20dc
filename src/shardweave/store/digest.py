"""Digests of stored tensors that survive another cut of the same tensor.

A digest is xxh3_128 over the row-major bytes of the full tensor. It does not depend on how files,
chunks or ranks cut the tensor, so a source and its resharded copy are compared without reading both
at once. It guards against damage, not against an attacker.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardweave.errors import DigestError, FormatError
from shardweave.store.manifest import Manifest
from shardweave.store.paths import inside
from shardweave.store.read import Reader
from shardweave.store.strict_json import read_json, some

SIDECAR = "shardweave.digests.json"
ALGORITHM = "xxh3_128"

_MAX_BYTES = 2 << 20
_HEX = re.compile(r"[0-9a-f]{32}")


def of_array(array: NDArray[Any]) -> str:
    """The digest of an array's row-major bytes.

    >>> of_array(np.arange(6, dtype="<u2").reshape(2, 3)) == of_array(np.arange(6, dtype="<u2"))
    True
    """
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def compute(
    manifest: Manifest, *, keys: Iterable[str] | None = None, max_bytes: int = _MAX_BYTES, workers: int = 1
) -> dict[str, str]:
    """The digest of each tensor, read in slabs.

    Args:
        manifest: Of any format.
        keys: Which tensors; all by default.
        max_bytes: Memory for a slab; every worker has one.
        workers: Threads; reading and hashing run without the interpreter's lock.

    Raises:
        ShardweaveError: As ``Reader.iter_rows``.
    """
    wanted = list(manifest.tensors if keys is None else keys)

    def share(first: int) -> dict[str, str]:
        digests = {}
        with Reader(manifest) as reader:
            for key in wanted[first::workers]:
                state = xxhash.xxh3_128()
                for _, slab in reader.iter_rows(key, max_bytes=max_bytes):
                    state.update(slab.reshape(-1).view(np.uint8).data)
                digests[key] = state.hexdigest()
        return digests

    with ThreadPoolExecutor(max_workers=workers) as pool:
        found = {key: value for part in pool.map(share, range(workers)) for key, value in part.items()}
    return {key: found[key] for key in wanted}


def verify(
    manifest: Manifest,
    digests: Mapping[str, str] | None = None,
    *,
    max_bytes: int = _MAX_BYTES,
    workers: int = 1,
) -> None:
    """Compare every tensor with its recorded digest, in place and in bounded memory.

    Args:
        manifest: Of any format.
        digests: By key; the folder's sidecar by default.
        max_bytes: Memory for a slab; every worker has one.
        workers: Threads.

    Raises:
        DigestError: Tensors differ, or the records and the tensors are not of the same keys. All are
            named, with their files.
    """
    recorded = read_sidecar(manifest.root) if digests is None else digests
    strangers = [f"{key!r} has no tensor" for key in recorded if key not in manifest.tensors]
    strangers += [f"{key!r} has no record" for key in manifest.tensors if key not in recorded]
    if strangers:
        raise DigestError(
            "digests and tensors are of the same keys",
            where=str(manifest.root),
            equation=some(strangers),
            hint="restore the files, or the digests, that belong together; or record digests anew",
        )
    found = compute(manifest, max_bytes=max_bytes, workers=workers)
    wrong = [key for key, digest in found.items() if digest != recorded[key]]
    if wrong:
        files = {key: " and ".join(sorted({e.file for e in manifest.tensors[key].extents})) for key in wrong}
        raise DigestError(
            "bytes have the digest that was recorded for them",
            where=str(manifest.root),
            equation=some(f"{key!r} in {files[key]}: {recorded[key]} != {found[key]}" for key in wrong),
            hint="these files are damaged or were written again; restore them from their source",
        )


def write_sidecar(root: Path, digests: Mapping[str, str]) -> None:
    """Write digests beside the tensors, on disk and at once; digests that were there are replaced."""
    text = json.dumps({"algorithm": ALGORITHM, "tensors": dict(digests)}, indent=1, ensure_ascii=False)
    temporary = root / f"{SIDECAR}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(root / SIDECAR)


def read_sidecar(root: Path) -> dict[str, str]:
    """The digests recorded in a folder.

    Raises:
        MissingFileError: There is no sidecar.
        FormatError: It is not as ``write_sidecar`` writes it.
    """
    found = read_json(inside(root, SIDECAR, where=str(root)), where=str(root / SIDECAR))
    tensors = found.get("tensors")
    if (
        found.get("algorithm") != ALGORITHM
        or not isinstance(tensors, dict)
        or not all(isinstance(digest, str) and _HEX.fullmatch(digest) for digest in tensors.values())
    ):
        raise FormatError(
            "recorded digests are 32 hex digits by key, of a known algorithm",
            where=str(root / SIDECAR),
            equation=f"algorithm={found.get('algorithm')!r:.40}, expected {ALGORITHM!r}",
            hint="compute and write them again from a checkpoint that you trust",
        )
    return tensors
