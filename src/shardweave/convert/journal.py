"""The journal of a conversion: what is finished, so that a killed one goes on where it was.

The journal is a text file of one JSON value a line; each says that an extent of the target is
written, with the checksums of its bytes. Nothing after a line that cannot be read counts, and an
entry counts only where the bytes still have its checksums.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class Journal:
    """Finished extents of one conversion, by key and number of the extent.

    Args:
        path: The file; made where it does not exist, else continued.
        others: Journals of other processes of the same conversion, now or earlier; read only.

    Attributes:
        done: What is recorded of each finished extent.
    """

    def __init__(self, path: Path, *, others: Iterable[Path] = ()) -> None:
        self.done: dict[tuple[str, int], dict[str, Any]] = {}
        self._lock = threading.Lock()
        for other in others:
            self.take_in(other)
        self._file = path.open("a+b")
        # The next line starts on its own, not behind one that a kill cut short.
        self._file.truncate(self.take_in(path))

    def take_in(self, path: Path) -> int:
        """Read what another journal says is finished; returns how many of its bytes count."""
        size = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    key, extent = entry["key"], entry["extent"]
                except (ValueError, KeyError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                self.done[str(key), int(extent)] = entry
                size += len(line)
        return size

    def add(self, key: str, extent: int, facts: Mapping[str, Any]) -> None:
        """Record that an extent is written. Thread-safe."""
        entry = {"key": key, "extent": extent, **facts}
        with self._lock:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
            self.done[key, extent] = entry

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
