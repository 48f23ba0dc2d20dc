"""The code that is looked at: its files, and the modules that they are."""

# Thousands of files a second: paths are texts here.
# ruff: noqa: PTH100, PTH110, PTH114, PTH118, PTH119, PTH120, PTH123

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from shardweave.errors import MissingFileError

__all__ = ["Source", "covers", "find", "read", "shown"]

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "__pypackages__"})
_DEEPEST = 4
_LARGEST = 16 << 20
"""Bytes of a file: its tree takes many times as much memory, and nobody writes such files by hand."""


@dataclass(slots=True, eq=False)
class Source:
    """A file of the tree."""

    path: str
    """As it is reported."""
    place: str
    """Where it is read."""
    module: str = ""
    package: str = ""
    """What relative imports begin at."""
    text: bytes = b""
    problem: str = ""
    """Why it cannot be read; empty where it can."""
    folder: str = field(default="", repr=False)


def shown(place: str, root: str) -> str:
    """A path as it is reported: relative to the root where it lies below it, with slashes."""
    relative = os.path.relpath(place, root)
    if relative.startswith(os.pardir):
        relative = place
    return relative.replace(os.sep, "/")


def covers(paths: Iterable[Path], *, root: Path) -> Callable[[str], bool]:
    """Whether a reported path is one of some paths, or lies below one."""
    tops = [shown(os.path.abspath(path), os.path.abspath(root)) for path in paths]
    return lambda path: any(top == "." or path == top or path.startswith(f"{top}/") for top in tops)


def find(paths: Iterable[Path], *, root: Path, exclude: Sequence[str] = ()) -> list[Source]:
    """The Python files below some paths, in the order of their paths, each once.

    Folders are entered unless they are hidden, environments or caches; a link to a folder is not, so that
    nothing is counted twice and nothing goes in circles. A path that is named is always taken.

    Args:
        paths: Files and folders.
        root: What paths are reported relative to.
        exclude: Patterns of a shell; one matches a path, or a folder around it.

    Raises:
        MissingFileError: A path is not there.
    """
    base = os.path.abspath(root)
    found: dict[str, Source] = {}
    for path in paths:
        if path.is_dir():
            places: Iterable[str] = _walk(os.path.abspath(path))
        elif path.exists():
            places = [os.path.abspath(path)]
        else:
            raise MissingFileError(
                "the code that is checked is there",
                where=str(path),
                equation="found nothing of that name",
                hint="name a file or a folder",
            )
        top = os.path.abspath(path)
        short = shown(top, base)
        for place in places:
            below = place[len(top) :].replace(os.sep, "/")
            reported = short + below if short != "." else below.lstrip("/")
            real = os.path.realpath(place) if os.path.islink(place) else place
            if real not in found and not any(_matches(reported, pattern) for pattern in exclude):
                found[real] = Source(reported, place, folder=os.path.dirname(place))
    return sorted(found.values(), key=lambda source: source.path)


def _walk(top: str) -> Iterable[str]:
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        )
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith(".#"):  # the lock of an editor
                yield os.path.join(folder, name)


def _matches(path: str, pattern: str) -> bool:
    pattern = pattern.rstrip("/")
    parts = path.split("/")
    return any(fnmatch("/".join(parts[: index + 1]), pattern) for index in range(len(parts))) or (
        "/" not in pattern and any(fnmatch(part, pattern) for part in parts)
    )


def _bytes(place: str) -> bytes:
    """What a file holds. A pipe is not waited for, and what no person wrote is not parsed."""
    number = os.open(place, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(number, "rb") as file:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if about.st_size > _LARGEST:
            raise OSError(errno.EFBIG, f"its {about.st_size:,} bytes are more than are read, {_LARGEST:,}")
        return file.read()


def read(sources: Sequence[Source]) -> None:
    """Read the files, and say which module each of them is.

    A folder with ``__init__.py`` is a package, and so is one inside a package. Whether the folder around a
    package belongs to its name, as a namespace, is told by how the files import it.
    """
    for source in sources:
        try:
            source.text = _bytes(source.place)
        except FileNotFoundError:
            link = "a link that leads nowhere" if os.path.islink(source.place) else "gone since it was listed"
            source.problem = f"it is {link}"
        except OSError as error:
            source.problem = error.strerror or str(error)
    packages: dict[str, str] = {}
    tops: dict[str, str] = {}

    def package(folder: str) -> str:
        if folder not in packages:
            packages[folder] = ""
            parent, name = os.path.split(folder)
            outer = package(parent) if parent != folder else ""
            if name.isidentifier() and (outer or os.path.exists(os.path.join(folder, "__init__.py"))):
                if not outer:
                    tops.setdefault(folder, _spaces(folder, sources))
                    outer = tops[folder]
                packages[folder] = f"{outer}.{name}" if outer else name
        return packages[folder]

    for source in sources:
        source.package = package(source.folder)
        stem = os.path.basename(source.place)[: -len(".py")] if source.place.endswith(".py") else ""
        if stem == "__init__":
            source.module = source.package
        else:
            source.module = f"{source.package}.{stem}" if source.package else stem


def _spaces(folder: str, sources: Sequence[Source]) -> str:
    """The namespaces around a package, told by absolute imports of it."""
    inner = os.path.basename(folder)
    found: list[str] = []
    outer = os.path.dirname(folder)
    for _ in range(_DEEPEST):
        name = os.path.basename(outer)
        if not name.isidentifier():
            break
        text = ".".join([name, *found, inner]).encode()
        word = re.compile(rb"^\s*(?:from|import)\s+" + re.escape(text) + rb"\b", re.MULTILINE)
        if not any(text in source.text and word.search(source.text) for source in sources):
            break
        found.insert(0, name)
        outer = os.path.dirname(outer)
    return ".".join(found)
