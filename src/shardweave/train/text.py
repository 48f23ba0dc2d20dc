"""Documents from text: lines of JSON, plain text, and what makes tokens of them.

A tokenizer is the folder of a Hugging Face one (extra ``transformers``), or ``bytes``: the bytes of UTF-8 as
ids 0 to 255, and 256 at the end of a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import FormatError, MissingFileError, MissingPackageError
from shardweave.train.tokens import Document

BYTES = "bytes"
"""The name of the tokenizer of bytes."""

_MOST_LINE = 1 << 28


class Tokenizer(Protocol):
    """What makes ids of text."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end(self) -> int | None:
        """The id at the end of a document, if there is one."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any at its ends that it does not have."""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, ask: bool) -> list[int]:
        """The ids of a conversation; with ``ask``, of one in which an answer is to begin."""


class Bytes:
    """The bytes of UTF-8, and an end.

    >>> Bytes().encode("né")
    [110, 195, 169]
    """

    vocab_size, end = 257, 256

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, Any]], *, ask: bool) -> list[int]:
        """Refused: bytes have no template."""
        raise _no_template(BYTES)


class HuggingFace:
    """A tokenizer of transformers. Nothing is fetched: it is read from a folder, or from what was fetched."""

    def __init__(self, name: str) -> None:
        """From a folder, or the name of a model whose tokenizer is in the cache."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingPackageError(
                "a tokenizer of Hugging Face is read by its own package",
                where=f"tokenizer {name!r}",
                equation="package transformers is not installed",
                hint="pip install 'shardweave[transformers]', or use the tokenizer bytes",
            ) from None
        try:
            self._made: Any = AutoTokenizer.from_pretrained(
                name, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise MissingFileError(
                "a tokenizer is a folder, or is in the cache of Hugging Face",
                where=f"tokenizer {name!r}",
                equation=" ".join(str(error).split())[:200],
                hint="give the folder with tokenizer.json",
            ) from None
        self.name, self.vocab_size = name, len(self._made)
        self.end: int | None = self._made.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones around it."""
        return list(self._made.encode(text, add_special_tokens=False))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, ask: bool) -> list[int]:
        """The ids of a conversation by the tokenizer's own template."""
        if not self._made.chat_template:
            raise _no_template(self.name)
        found = self._made.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=ask)
        return list(found["input_ids"] if isinstance(found, Mapping) else found)


def tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name.

    Raises:
        MissingPackageError, MissingFileError: transformers is not installed, or the tokenizer is not there.
    """
    return Bytes() if name == BYTES else HuggingFace(name)


def read_documents(file: Path, made: Tokenizer) -> Iterator[Document]:
    """The documents of a text, one after the other.

    Args:
        file: ``.jsonl``: an object a line, with ``text``, with ``prompt`` and ``response``, or with
            ``messages``; else plain text, one document.
        made: Makes the tokens. Its end token follows each document that does not have it.

    Raises:
        MissingFileError, FormatError: It is not there, or a line is none of these.
    """
    if not file.is_file():
        raise MissingFileError("the documents of a run are there", where=str(file), hint="check the path")
    if file.suffix != ".jsonl":
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise _no_line(f"{file}, offset {error.start}", "bytes that are no UTF-8") from None
        yield _ended([(made.encode(text), True)], made)
        return
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(_MOST_LINE):
            number += 1
            if line.strip():
                yield _line(line, f"{file}, line {number}", made)


def _line(line: bytes, where: str, made: Tokenizer) -> Document:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _no_line(where, str(error)) from None
    if not isinstance(said, dict):
        raise _no_line(where, f"a {type(said).__name__}")
    kinds = [
        keys
        for keys in (("text",), ("prompt", "response"), ("messages",))
        if all(key in said for key in keys)
    ]
    if len(kinds) != 1:
        raise _no_line(where, f"keys {', '.join(map(repr, list(said)[:8]))}")
    values = [said[key] for key in kinds[0]]
    if kinds[0] == ("messages",):
        return _conversation(values[0], where, made)
    if not all(isinstance(value, str) for value in values):
        raise _no_line(where, f"{' or '.join(kinds[0])} is no text")
    if len(values) == 1:
        return _ended([(made.encode(values[0]), True)], made)
    return _ended([(made.encode(values[0]), False), (made.encode(values[1]), True)], made)


def _conversation(messages: Any, where: str, made: Tokenizer) -> Document:
    """A conversation, in which the answers count: what follows where the template asks for one."""
    well = isinstance(messages, list) and messages
    if not well or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise _no_line(where, "messages is no list of objects with role and content")
    whole = made.chat(messages, ask=False)
    mask = np.zeros(len(whole), dtype=np.bool_)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = made.chat(messages[:number], ask=True), made.chat(messages[: number + 1], ask=False)
        if whole[: len(after)] != after or after[: len(before)] != before:
            raise FormatError(
                "a conversation goes on without changing what was said",
                where=f"{where}, message {number}",
                equation=f"template(first {number + 1} messages) is no prefix of template(all)",
                hint="this template rewrites earlier messages, so that answers cannot be told apart: give "
                "prompt and response",
            )
        mask[len(before) : len(after)] = True
    return Document(np.array(whole, dtype=np.int64), mask)


def _ended(parts: Sequence[tuple[list[int], bool]], made: Tokenizer) -> Document:
    ids = [token for part, _ in parts for token in part]
    mask = [counts for part, counts in parts for _ in part]
    if made.end is not None and ids[-1:] != [made.end]:
        ids.append(made.end)
        mask.append(True)
    return Document(_int64(ids), np.array(mask, dtype=np.bool_))


def _int64(ids: Sequence[int]) -> NDArray[np.int64]:
    return np.array(ids, dtype=np.int64)


def _no_line(where: str, what: str) -> FormatError:
    return FormatError(
        "a line is an object with text, with prompt and response, or with messages",
        where=where,
        equation=f"got {what[:200]}",
        hint="correct the line, or name the file .txt where it is one document",
    )


def _no_template(name: str) -> FormatError:
    return FormatError(
        "conversations are written by the template of a tokenizer",
        where=f"tokenizer {name!r}",
        equation="chat_template is not there",
        hint="use the tokenizer of a chat model, or lines with prompt and response",
    )
