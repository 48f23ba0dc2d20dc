"""What earlier runs found, by the content of files: a folder that can be removed at any time."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["DEFAULT", "Cache", "digest", "own_digest"]

DEFAULT = ".shardweave-cache"
_PARTS = (
    "cache",
    "collectives",
    "facts",
    "files",
    "finding",
    "groups",
    "names",
    "presets",
    "reach",
    "read",
    "scopes",
    "search",
    "shapes",
    "suppress",
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
        if self.folder is None:
            return None
        try:
            return json.loads((self.folder / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def save(self, name: str, value: Any) -> None:
        """Keep a value of plain types. It replaces the old one whole or not at all."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            ignore = self.folder / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n", encoding="utf-8")
            beside = self.folder / f"{name}.{os.getpid()}.tmp"
            beside.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
            beside.replace(self.folder / f"{name}.json")
        except OSError:
            return
