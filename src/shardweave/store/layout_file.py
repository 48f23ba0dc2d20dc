"""A layout in a file of its own, in the notation of layouts: who holds what in a framework of somebody's own.

A probe writes one (``shardweave probe --config CONFIG --out FILE``), and what reads a checkpoint of ranks
that says nothing of its layout is given it. The file is text, to be read and compared by people; it may also
be written by hand.

A file is hostile until it is proved otherwise. Its size is bounded before it is read, what it describes
before anything is made of it, and the layout is proved: every element of every tensor once, none outside.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from shardweave.errors import ExistsError, FormatError, WriteError
from shardweave.layout import BufferRule, Dim, Layout, Tensor, format_layout, parse_layout, prove
from shardweave.layout.buffer import table_of
from shardweave.store.read import open_regular

MOST_BYTES: Final = 4 << 20
MOST_RANKS: Final = 1 << 14
MOST_ARRAYS: Final = 1 << 21
"""Arrays of all ranks together."""
_MOST_AXES: Final = 16
_MOST_RULES: Final = 1 << 12
_MOST_BLOCKS: Final = 1 << 12
_MOST_COORDINATES: Final = 1 << 14
_MOST_ELEMENTS: Final = 1 << 53


def read_layout(path: Path) -> Layout:
    """The layout that a file holds, proved.

    Law: ``read_layout(path) == layout`` after ``write_layout(layout, path)``.

    Raises:
        MissingFileError: There is no such file.
        FormatError: It is no regular file, no text, or describes more than is plausible.
        NotationError: It is not the notation of a layout.
        GapError, OverlapError and their kin: What it says is no layout of its tensors.
    """
    fd = open_regular(path)
    try:
        # One byte more, so that a file that grew since is seen as one that is too large.
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(MOST_BYTES + 1)
    finally:
        os.close(fd)
    _at_most(path, "bytes", len(data), MOST_BYTES)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(
            "a layout is text",
            where=f"{path}, byte {error.start}",
            equation=error.reason,
            hint="give the file that shardweave probe --out wrote",
        ) from None
    _check_text(path, text)
    layout = parse_layout(text)
    _check(path, layout)
    prove(layout)
    return layout


def write_layout(layout: Layout, path: Path) -> None:
    """Write a layout to a new file: the whole of it appears there, or nothing.

    Raises:
        ExistsError: There is something at the path.
        FormatError: It is larger than what ``read_layout`` reads.
        WriteError: The disk refuses.
    """
    data = format_layout(layout).encode()
    _at_most(path, "bytes", len(data), MOST_BYTES)
    _check(path, layout)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_bytes(data)
        try:
            os.link(aside, path)  # unlike a rename, this does not replace what is there
        finally:
            aside.unlink()
    except FileExistsError:
        raise ExistsError(
            "a layout is written to a new file",
            where=str(path),
            equation="there is something at the path",
            hint="give another path, or remove that",
        ) from None
    except OSError as error:
        raise WriteError(
            "a file can be written",
            where=str(path),
            equation=error.strerror or str(error),
            hint="check the folder, its rights and the space on its disk",
        ) from error


# --- bounds -------------------------------------------------------------------------------------


def _at_most(path: Path, what: str, found: int, most: int) -> None:
    if found > most:
        _refuse(path, f"{what}({found if what != 'bytes' else f'{found} or more'}) > {most}")


def _refuse(path: Path, equation: str) -> NoReturn:
    raise FormatError(
        "a layout in a file is of a size that a model and its ranks have",
        where=str(path),
        equation=equation,
        hint="give the file that shardweave probe --out wrote; a damaged or hostile text can say anything",
    )


def _check_text(path: Path, text: str) -> None:
    """What would cost much already when it is parsed: a column of all ranks is made for each axis."""
    where = 0
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "mesh":
            axes = rest.partition("@")[0]
            _at_most(path, "axes", axes.count("="), _MOST_AXES)
            for view in axes.split("|"):
                _at_most(path, "ranks", math.prod(_number(axis) for axis in view.split(",")), MOST_RANKS)
        elif word == "where":
            where += rest.count(",") + 1
    _at_most(path, "coordinates", where, _MOST_COORDINATES)


def _number(axis: str) -> int:
    """The size of an axis, or more than there may be; what is no size is for the parser to refuse."""
    digits = axis.partition("=")[2].strip()
    return (int(digits) if len(digits) < 10 else MOST_RANKS + 1) if digits.isdecimal() else 1


def _check(path: Path, layout: Layout) -> None:
    """What would cost much to prove, or to list."""
    _at_most(path, "ranks", layout.mesh.size, MOST_RANKS)
    _at_most(path, "buffers", len(layout.rules), _MOST_RULES)
    arrays, blocks = 0, dict[Tensor, int]()
    for tensor in layout.tensors:
        _at_most(path, f"elements of {tensor.name!r:.80}", tensor.numel, _MOST_ELEMENTS)
        runs = [run for _, dim in tensor.index for run in dim.runs]
        last = max((run.last for run in runs), default=0)
        _at_most(path, f"numbers of {tensor.name!r:.80}", last, MOST_ARRAYS)
        blocks[tensor] = math.prod(len(dim.runs) for _, dim in tensor.index)
    for rule in layout.rules:
        assert rule.stacked is not None
        separate = [table_of(dim) for d, dim in enumerate(rule.dims) if d not in rule.stacked]
        arrays += layout.mesh.size * math.prod(max(map(len, entries)) for entries in separate)
        held = math.prod(sum(len(dim.runs) for dim in table_of(each)) for each in rule.dims)
        for part in rule.parts:
            blocks[part.tensor] += held
        for dim in _all_dims(rule):
            last = max((run.last for run in dim.runs), default=0)
            _at_most(path, f"indices of {rule.name!r:.80}", max(last, len(dim)), _MOST_ELEMENTS)
    _at_most(path, "arrays", arrays, MOST_ARRAYS)
    for tensor, count in blocks.items():
        _at_most(path, f"blocks of {tensor.name!r:.80}", count, _MOST_BLOCKS)


def _all_dims(rule: BufferRule) -> Iterator[Dim]:
    for each in (*rule.dims, *(printed for _, printed in rule.numbers)):
        yield from table_of(each)
