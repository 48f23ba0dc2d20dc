"""What earlier runs found, by the content of files: a folder that can be removed at any time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["DEFAULT", "Cache", "digest", "own_digest"]

DEFAULT = ".shardweave-cache"
_PARTS = (
    "cache",
    "collectives",
    "expressions",
    "facts",
    "files",
    "finding",
    "groups",
    "many",
    "names",
    "presets",
    "reach",
    "read",
    "scopes",
    "search",
    "shapes",
    "suppress",
    "walk",
)


def digest(*parts: bytes | str) -> str:
    """A hash of parts, each told apart from the next."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        made.update(len(data).to_bytes(8, "little"))
        made.update(data)
    return made.hexdigest()


def own_digest() -> str:
    """A hash of the checks themselves: another version of them keeps nothing of the last."""
    folder = Path(__file__).parent
    return digest(*((folder / f"{name}.py").read_bytes() for name in _PARTS))


class Cache:
    """Values by name, each in a file of its own. What cannot be read or written is as if it were not there.

    Args:
        folder: Where; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def load(self, name: str) -> Any:
        """The value, or None."""
        try:
            return json.loads(self._read(f"{name}.json"))
        except (OSError, ValueError, RecursionError):
            return None

    def save(self, name: str, value: Any) -> None:
        """Keep a value of plain types. It replaces the old one whole or not at all."""
        self._write(f"{name}.json", json.dumps(value, separators=(",", ":")).encode())

    def rows(self, name: str) -> dict[str, bytes]:
        """What was kept of files, by their digests: texts that are decoded where they are asked for."""
        try:
            mark, _, data = self._read(f"{name}.rows").partition(b"\n")
        except OSError:
            return {}
        if mark.decode("latin-1") != digest(data):
            return {}
        pairs = (line.partition(b" ") for line in data.splitlines())
        return {key.decode(): row for key, _, row in pairs}

    def keep(self, name: str, rows: Mapping[str, bytes]) -> None:
        """Keep texts of one line each, by digests. They replace the old ones whole or not at all."""
        data = b"".join(b"%b %b\n" % (key.encode(), row) for key, row in rows.items())
        self._write(f"{name}.rows", b"%b\n%b" % (digest(data).encode(), data))

    def _read(self, name: str) -> bytes:
        if self.folder is None:
            raise FileNotFoundError(name)
        return (self.folder / name).read_bytes()

    def _write(self, name: str, data: bytes) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            ignore = self.folder / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n", encoding="utf-8")
            beside = self.folder / f"{name}.{os.getpid()}.tmp"
            beside.write_bytes(data)
            beside.replace(self.folder / name)
        except OSError:
            return
