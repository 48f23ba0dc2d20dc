"""The journal of a conversion: what is finished, so that a killed one goes on where it was.

The journal is a text file of one JSON value a line. The first line says what is being converted;
each other line says that an extent of the target is written, with the digest of its bytes. A line
that was cut short by a kill is ignored, and so is an entry whose bytes do not have its digest.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shardweave.errors import JournalError

NAME = "journal.jsonl"


class Journal:
    """Finished extents of one conversion, by key and number of the extent.

    Args:
        folder: Where the conversion is staged.
        identity: What is converted, from where and how. A journal of another identity is refused.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        path = folder / NAME
        self.done: dict[tuple[str, int], dict[str, Any]] = {}
        self._lock = threading.Lock()
        if path.exists():
            # Cut off what a kill left half written, so that the next line starts on its own.
            size = self._read(path, identity)
            self._file = path.open("r+b")
            self._file.truncate(size)
            self._file.seek(size)
        else:
            self._file = path.open("wb")
            self._write({"identity": dict(identity)})

    def _read(self, path: Path, identity: Mapping[str, Any]) -> int:
        data = path.read_bytes()
        size = data.rfind(b"\n") + 1
        lines = data[:size].splitlines()
        try:
            entries = [json.loads(line) for line in lines]
            found = entries[0]["identity"] if entries else dict(identity)
            self.done = {(e["key"], e["extent"]): e for e in entries[1:]}
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(
                "a journal is readable", where=str(path), equation=repr(error), hint="start over with --force"
            ) from error
        if not entries:
            self.done = {}
            return 0
        different = [k for k in {**found, **identity} if found.get(k) != identity.get(k)]
        if different:
            k = different[0]
            raise JournalError(
                "an unfinished conversion is continued with the same source and options",
                where=str(path.parent),
                equation=f"{k}: {found.get(k)!r} then, {identity.get(k)!r} now",
                hint="run the same command as before, or start over with --force",
            )
        return size

    def add(self, key: str, extent: int, **facts: Any) -> None:
        """Record that an extent is written. Thread-safe."""
        entry = {"key": key, "extent": extent, **facts}
        with self._lock:
            self._write(entry)
            self.done[key, extent] = entry

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until the disk has the journal."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def describes(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the journal in a folder is of this conversion."""
    path = folder / NAME
    if not path.exists():
        return False
    with path.open("rb") as file:
        line = file.readline()
    try:
        return bool(json.loads(line)["identity"] == dict(identity))
    except (ValueError, KeyError, TypeError):
        return False
