"""Paths that files name stay inside the folder of these files, and a folder to write into is empty.

Index files and metadata come from outside. A name in them is trusted only after it was read as a
plain relative path and after every symbolic link on the way was followed.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardweave.errors import ExistsError, PathError

_DRIVE = re.compile(r"[A-Za-z]:")
_LONGEST = 255
_BROKEN = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def check_name(name: str, *, where: str) -> None:
    """Refuse a name that is not a plain relative path with forward slashes.

    One name has one spelling: ``a//b``, ``./a`` and ``a/`` are refused beside ``..``, absolute paths,
    drive letters, backslashes, control characters and what no file system names a file, so that two names
    never mean one file.

    Args:
        name: The path as the file spells it.
        where: The file that names it, for the message.

    Raises:
        PathError: With the name and the reason.

    >>> check_name("model-00001-of-00002.safetensors", where="index")
    >>> check_name("../secret", where="index")
    Traceback (most recent call last):
    ...
    shardweave.errors.PathError: a named path is plain and relative: index: '../secret' has a '..'...
    """
    parts = name.split("/")
    if _BROKEN.search(name):
        reason = "has a NUL, a control character or half a surrogate pair"
    elif "\\" in name:
        reason = "has a backslash"
    elif name.startswith("/") or _DRIVE.match(name):
        reason = "is absolute"
    elif ".." in parts:
        reason = "has a '..' part"
    elif "" in parts or "." in parts:
        reason = "has an empty or '.' part"
    elif max(len(part.encode()) for part in parts) > _LONGEST:
        reason = f"has a part of more than {_LONGEST} bytes"
    else:
        return
    raise PathError(
        "a named path is plain and relative",
        where=where,
        equation=f"{name[:200]!r} {reason}",
        hint="do not use this checkpoint unless you know who wrote the name; correct it by hand if you do",
    )


def inside(root: Path, name: str, *, where: str) -> Path:
    """The path of ``name`` in ``root``, proved to end inside ``root`` after all links are followed.

    A Hugging Face hub cache is the one layout whose links lead out by design: files of
    ``<repo>/snapshots/<revision>/`` are links to ``<repo>/blobs/``, and those are accepted.

    Args:
        root: The folder that must not be left.
        name: A relative path with forward slashes. It does not have to exist.
        where: The file that names it, for the message.

    Raises:
        PathError: The name is no plain relative path, or a link leads outside.
    """
    check_name(name, where=where)
    allowed = [root.resolve()]
    if allowed[0].parent.name == "snapshots":
        allowed.append(allowed[0].parent.parent / "blobs")
    try:
        target = (root / name).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, or a name that no file can have
        target, reason = None, str(error)
    else:
        reason = f"{name[:200]!r} leads to {str(target)!r}"
    if target is None or not any(target.is_relative_to(folder) for folder in allowed):
        raise PathError(
            "a named path stays inside its folder",
            where=where,
            equation=reason,
            hint="replace the link by the file itself, or read the folder that it leads to",
        )
    return root / name


def require_empty(root: Path) -> None:
    """Refuse to write a checkpoint into a folder that holds something.

    Raises:
        ExistsError: The folder holds something.
    """
    if any(root.iterdir()):
        raise ExistsError(
            "the folder to write into is empty",
            where=str(root),
            equation="it holds something",
            hint="write into a new folder; files of two saves must not mix",
        )
