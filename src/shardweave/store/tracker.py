"""The small file in a folder of saves that names the newest of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from shardweave.store.paths import inside
from shardweave.store.read import open_regular

MOST_BYTES: Final = 4096
"""What is read of it. The names of folders that file systems know are shorter."""


def newest(root: Path, file: str) -> str | None:
    """What such a file says, without the space around it; None where it is not there.

    Raises:
        PathError: It is a link that leads out of the folder.
        FormatError: It cannot be opened.
    """
    if not (root / file).is_file():
        return None
    fd = open_regular(inside(root, file, where=str(root)))
    try:
        return text_of(os.read(fd, MOST_BYTES))
    finally:
        os.close(fd)


def text_of(data: bytes) -> str:
    """What the bytes of such a file say."""
    return data.decode("utf-8", "replace").strip()
