"""JSON from outside, read strictly: what readers would understand differently is refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardweave.errors import FormatError
from shardweave.store.read import open_regular, read_into

_MAX_BYTES = 1 << 30


def read_json(path: Path, *, where: str) -> dict[str, Any]:
    """The JSON object that a file consists of, see ``parse_json``.

    Raises:
        MissingFileError, FormatError: No such file, not regular, larger than a GiB, or no JSON object.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > _MAX_BYTES:
            raise FormatError(
                "a JSON file is of a sane size",
                where=where,
                equation=f"size={size} > {_MAX_BYTES}",
                hint="download the file again",
            )
        return parse_json(read_bytes(fd, 0, size, where=where), where=where)
    finally:
        os.close(fd)


def parse_json(text: bytes, *, where: str) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no key twice, no NaN, starting at the first byte.

    Negative numbers come as -1: they are wrong in every place of the format, -0 included.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise FormatError(
                "a key occurs once in a JSON object",
                where=where,
                equation=f"key={key[:200]!r}",
                hint="readers disagree about which one counts; save the file again",
            )
        for key, value in pairs:
            key.encode()
            if isinstance(value, str):
                value.encode()
        return found

    def number(digits: str) -> int:
        return -1 if digits.startswith("-") else int(digits)

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        if not text.startswith(b"{"):
            raise ValueError(f"starts with {text[:16]!r}")
        found: dict[str, Any] = json.loads(
            text.decode(), object_pairs_hook=unique, parse_int=number, parse_constant=refuse
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(
            "a JSON file holds one JSON object",
            where=where,
            equation=f"{len(text)} bytes: {str(error)[:200]}",
            hint="the file is damaged or of another format; download it again",
        ) from None
    return found


def read_bytes(fd: int, start: int, count: int, *, where: str) -> bytes:
    """Bytes of a file, all of them or an error."""
    buffer = bytearray(count)
    read_into(fd, start, memoryview(buffer), where=where)
    return bytes(buffer)


def is_utf8(value: Any) -> bool:
    """Whether a value is text that UTF-8 can write: no half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_text_map(value: Any) -> bool:
    """Whether a JSON value is an object of strings."""
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


def some(items: Iterable[str], *, limit: int = 8) -> str:
    """The first of many names, and how many more there are."""
    names = list(items)
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
