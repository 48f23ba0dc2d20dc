"""Tokens in files: documents one after the other, mapped into memory and never read as a whole.

Three forms are read. *Packed* is this package's own, a folder: ``tokens.bin``; ``ends.bin`` with the end of
each document; ``targets.bin`` where not every token counts; and ``tokens.json``, written last, which says
what they are. *Megatron*'s is ``NAME.bin`` beside ``NAME.idx``. A *raw* ``.bin`` is tokens and nothing else.
Files are hostile until their sizes agree; a token is compared with the vocabulary where it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import ExistsError, FormatError, MissingFileError, OutsideError, TruncatedError

Array = NDArray[Any]

DTYPES = ("uint8", "uint16", "int32", "int64")
"""What tokens are stored as."""

_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Megatron's codes of dtypes; 6 and 7 are of floats, which no token is."""
_HEAD_BYTES = len(_MAGIC) + 8 + 1 + 8 + 8


@dataclass(frozen=True)
class Document:
    """The tokens of one document or of a part of one.

    Attributes:
        ids: Token ids, (length,), int64.
        mask: Whether each counts as a target, (length,).
    """

    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]


@dataclass(frozen=True)
class Tokens:
    """Documents one after the other.

    Attributes:
        ids: All token ids, (num_tokens,), of any whole dtype.
        ends: Where each document ends, ascending, (num_documents,), int64.
        targets: Whether each token counts, (num_tokens,); all where ``None``.
        where: How messages call them.
    """

    ids: Array
    ends: NDArray[np.int64]
    targets: Array | None = None
    where: str = "tokens"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each document."""
        return np.diff(self.ends, prepend=0)

    def part(self, document: int, start: int, stop: int, *, vocab_size: int | None = None) -> Document:
        """The tokens of a document from ``start`` to ``stop``, in its own numbers.

        Raises:
            OutsideError: A token is not of the vocabulary.
        """
        begin = int(self.ends[document - 1]) if document else 0
        at = slice(begin + start, min(begin + stop, int(self.ends[document])))
        ids = np.asarray(self.ids[at]).astype(np.int64)
        if len(ids) and (ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size)):
            bad = int(ids.min() if ids.min() < 0 else ids.max())
            raise OutsideError(
                "a token is of the model's vocabulary",
                where=f"{self.where}, document {document}",
                equation=f"token({bad}) is not in 0..{'?' if vocab_size is None else vocab_size - 1}",
                hint="tokenise with the tokenizer of the model, or say the dtype that the file has",
            )
        kept = np.ones(len(ids), dtype=np.bool_) if self.targets is None else self.targets[at] != 0
        return Document(ids, kept)


def joined(documents: Iterable[Document], where: str = "tokens") -> Tokens:
    """Documents in memory as tokens."""
    listed = list(documents)
    ids = [document.ids for document in listed]
    masks = [document.mask for document in listed]
    ends = np.cumsum([len(part) for part in ids], dtype=np.int64)
    every = np.concatenate([np.zeros(0, np.int64), *ids])
    counted = np.concatenate([np.zeros(0, np.bool_), *masks])
    return Tokens(every, ends, None if counted.all() else counted, where)


# --- packed -------------------------------------------------------------------------------------


def write_packed(folder: Path, documents: Iterable[Document], *, dtype: str, about: str = "") -> Tokens:
    """Write documents as they come to a folder, which is complete with its ``tokens.json`` and not before.

    Args:
        folder: It must not hold anything.
        documents: The documents.
        dtype: What tokens are stored as.
        about: Where they come from, for people.

    Raises:
        ExistsError: The folder holds something.
        OutsideError: The dtype does not hold a token.
    """
    _refuse_what_is_there(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ends, total, every = [], 0, True
    with (folder / "tokens.bin").open("wb") as ids, (folder / "targets.bin").open("wb") as targets:
        for document in documents:
            ids.write(_cast(document.ids, dtype, str(folder)).tobytes())
            targets.write(document.mask.astype(np.uint8).tobytes())
            every = every and bool(document.mask.all())
            total += len(document.ids)
            ends.append(total)
    if every:
        (folder / "targets.bin").unlink()
    np.array(ends, dtype="<i8").tofile(folder / "ends.bin")
    said = {
        "format": "shardweave tokens",
        "version": 1,
        "dtype": dtype,
        "num_tokens": total,
        "num_documents": len(ends),
        "targets": "all" if every else "targets.bin",
        "about": about,
    }
    (folder / "tokens.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return read_packed(folder)


def read_packed(folder: Path) -> Tokens:
    """The tokens of a folder.

    Raises:
        MissingFileError, FormatError, TruncatedError: It is not a whole folder of tokens.
    """
    file = folder / "tokens.json"
    try:
        said = json.loads(file.read_bytes()[: 1 << 16])
        form = (
            said["format"],
            said["version"],
            said["dtype"] in DTYPES,
            said["targets"] in ("all", "targets.bin"),
        )
        tokens, documents = said["num_tokens"], said["num_documents"]
    except FileNotFoundError:
        raise MissingFileError(
            "a folder of tokens says what it is",
            where=str(file),
            hint="make one with shardweave tokenize; a folder without tokens.json was not finished",
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _no_tokens(file, f"{type(error).__name__}: {error}") from None
    if form != ("shardweave tokens", 1, True, True) or type(tokens) is not int or type(documents) is not int:
        raise _no_tokens(file, f"format, version, dtype, targets = {said['format']!r}, {said['version']!r}, "
                         f"{said['dtype']!r}, {said['targets']!r}")  # fmt: skip
    ids = _mapped(folder / "tokens.bin", said["dtype"], tokens)
    ends = _mapped(folder / "ends.bin", "<i8", documents)
    targets = None if said["targets"] == "all" else _mapped(folder / "targets.bin", "uint8", tokens)
    _check_ends(ends, tokens, folder / "ends.bin")
    return Tokens(ids, ends, targets, str(folder))


def read_raw(file: Path, dtype: str) -> Tokens:
    """A file of tokens and nothing else, as one document.

    Raises:
        TruncatedError: Its size is no whole number of tokens.
    """
    size, each = _size(file), np.dtype(dtype).itemsize
    if size % each:
        raise TruncatedError(
            "a file of tokens ends with a whole one",
            where=str(file),
            equation=f"bytes({size}) % {dtype}({each}) = {size % each} != 0",
            hint="say the dtype that it was written with",
        )
    count = size // each
    return Tokens(
        _mapped(file, dtype, count), np.array([count] if count else [], dtype=np.int64), None, str(file)
    )


# --- Megatron -----------------------------------------------------------------------------------


def write_megatron(prefix: Path, documents: Iterable[Document], *, dtype: str = "int32") -> Tokens:
    """Write ``PREFIX.bin`` and ``PREFIX.idx``, one sequence a document. The form holds no targets.

    Raises:
        ExistsError: One of them is there.
        OutsideError: The dtype does not hold a token.
        FormatError: Not every token counts.
    """
    data, index = _beside(prefix)
    for path in (data, index):
        if path.exists():
            raise _exists(path)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    sizes: list[int] = []
    with data.open("wb") as file:
        for document in documents:
            if not document.mask.all():
                raise FormatError(
                    "Megatron's form holds tokens that all count",
                    where=f"{data}, document {len(sizes)}",
                    equation=f"targets({int(document.mask.sum())}) != tokens({len(document.mask)})",
                    hint="write packed tokens, which hold targets",
                )
            file.write(_cast(document.ids, dtype, str(data)).tobytes())
            sizes.append(len(document.ids))
    code = next(code for code, name in _CODES.items() if name == dtype)
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]) if sizes else np.zeros(0)
    with index.open("wb") as file:
        file.write(_MAGIC + (1).to_bytes(8, "little") + code.to_bytes(1, "little"))
        file.write(len(sizes).to_bytes(8, "little") + (len(sizes) + 1).to_bytes(8, "little"))
        file.write(np.array(sizes, dtype="<i4").tobytes())
        file.write((pointers * np.dtype(dtype).itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
    return read_megatron(prefix)


def read_megatron(prefix: Path) -> Tokens:
    """The tokens of ``PREFIX.bin`` and ``PREFIX.idx``; a document is its sequences one after the other.

    Raises:
        MissingFileError, FormatError, TruncatedError: They are not whole, or contradict each other.
    """
    data, index = _beside(prefix)
    size = _size(index)
    with index.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or not head.startswith(_MAGIC):
        raise FormatError(
            "an index of Megatron begins as one",
            where=f"{index}, offset 0",
            equation=f"got {head[:9]!r} != {_MAGIC!r}",
            hint="give the .idx that was written with the .bin",
        )
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, documents = int.from_bytes(head[18:26], "little"), int.from_bytes(head[26:34], "little")
    if version != 1 or code not in _CODES:
        raise FormatError(
            "an index of Megatron is of version 1, and of whole numbers",
            where=f"{index}, offset 9",
            equation=f"version({version}), code({code}) is not one of {', '.join(map(str, _CODES))}",
            hint="write the data again with a tokenizer",
        )
    wanted = _HEAD_BYTES + 12 * sequences + 8 * documents
    if size != wanted:
        wrong = TruncatedError if size < wanted else FormatError
        raise wrong(
            "an index of Megatron has the size that its counts come to",
            where=str(index),
            equation=f"bytes({size}) != {_HEAD_BYTES} + 12 * sequences({sequences}) "
            f"+ 8 * documents({documents})",
            hint="copy the file again; indices of other modalities are not read",
        )
    sizes = np.memmap(index, "<i4", "r", _HEAD_BYTES, (sequences,)) if sequences else np.zeros(0, np.int32)
    pointers = (
        np.memmap(index, "<i8", "r", _HEAD_BYTES + 4 * sequences, (sequences,))
        if sequences
        else np.zeros(0, np.int64)
    )
    firsts = (
        np.memmap(index, "<i8", "r", _HEAD_BYTES + 12 * sequences, (documents,))
        if documents
        else np.zeros(0, np.int64)
    )
    each = np.dtype(_CODES[code]).itemsize
    stops = np.cumsum(sizes, dtype=np.int64)
    total = int(stops[-1]) if sequences else 0
    if sequences and (sizes.min() < 0 or not np.array_equal(pointers, (stops - sizes) * each)):
        raise FormatError(
            "sequences lie one after the other, each of its size",
            where=str(index),
            equation=f"pointers != sums of sizes * {each}, or a size is negative (least {int(sizes.min())})",
            hint="merge data with Megatron's own tool, which writes them so",
        )
    rising = documents and firsts[0] == 0 and firsts[-1] == sequences and bool((np.diff(firsts) >= 0).all())
    if not rising:
        raise FormatError(
            "documents begin with the first sequence and end with the last",
            where=str(index),
            equation=f"documents({documents}) are not 0 <= ... <= sequences({sequences})",
            hint="copy the file again",
        )
    ends = np.concatenate([[0], stops])[firsts[1:]].astype(np.int64)
    return Tokens(_mapped(data, _CODES[code], total), ends, None, str(data))


def _beside(prefix: Path) -> tuple[Path, Path]:
    base = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
    return base.with_name(base.name + ".bin"), base.with_name(base.name + ".idx")


# --- parts --------------------------------------------------------------------------------------


def parts_of(lengths: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """How many parts each document is cut into.

    Parts share a token: the last of one is the first of the next, so that each token but a document's first
    is predicted once. A document of one token or none has nothing to predict, and no part.

    >>> parts_of(np.array([0, 1, 2, 5, 9, 10]), 5).tolist()
    [0, 0, 1, 1, 2, 3]
    """
    return np.maximum(-(-(lengths - 1) // (sequence_length - 1)), 0)


def _mapped(file: Path, dtype: str, count: int) -> Array:
    """An array of a file, whose size is exactly that."""
    size, wanted = _size(file), count * np.dtype(dtype).itemsize
    if size != wanted or count < 0:
        wrong = TruncatedError if size < wanted else FormatError
        raise wrong(
            "a file of tokens has the size that is said of it",
            where=str(file),
            equation=f"bytes({size}) != count({count}) * {np.dtype(dtype).name}({np.dtype(dtype).itemsize})",
            hint="write it again: it was cut off, or belongs to something else",
        )
    return np.memmap(file, dtype, "r") if count else np.zeros(0, dtype=dtype)


def _size(file: Path) -> int:
    if not file.is_file():
        raise MissingFileError("the files of tokens are there", where=str(file), hint="check the path")
    return file.stat().st_size


def _check_ends(ends: Array, total: int, file: Path) -> None:
    starts_well = not len(ends) or ends[0] >= 0
    last = int(ends[-1]) if len(ends) else 0
    if not starts_well or (np.diff(ends) < 0).any() or last != total:
        raise FormatError(
            "ends of documents ascend to the end of the tokens",
            where=str(file),
            equation=f"last({last}) != num_tokens({total}), or one is before another",
            hint="write the folder again",
        )


def _cast(ids: NDArray[np.int64], dtype: str, where: str) -> Array:
    info = np.iinfo(dtype)
    if len(ids) and (ids.min() < 0 or ids.max() > info.max):
        bad = int(ids.max() if ids.max() > info.max else ids.min())
        raise OutsideError(
            "a token fits what tokens are stored as",
            where=where,
            equation=f"token({bad}) is not in 0..{info.max}",
            hint="choose a wider dtype",
        )
    return ids.astype(np.dtype(dtype).newbyteorder("<"))


def _refuse_what_is_there(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or next(_names(folder), None) is not None):
        raise _exists(folder)


def _names(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir())


def _exists(path: Path) -> ExistsError:
    return ExistsError(
        "the target of tokens is free", where=str(path), hint="choose another path, or remove it"
    )


def _no_tokens(file: Path, what: str) -> FormatError:
    return FormatError(
        "a folder of tokens says what it is, in a form that is known",
        where=str(file),
        equation=what[:300],
        hint="make it with shardweave tokenize",
    )
