"""What was read of files, kept by the digest of their bytes, so that only what changed is read again."""

from __future__ import annotations

import ast
import gc
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardweave.lint.cache import Cache, digest
from shardweave.lint.class_rows import ClassRow, Field, Init, Parameter, Shape, Site
from shardweave.lint.classes import read_classes
from shardweave.lint.facts import Facts
from shardweave.lint.files import Source
from shardweave.lint.many import each
from shardweave.lint.read import read_facts

__all__ = ["OWN", "FileIndex", "load"]

OWN = "cls()"
"""Among words: a class that constructs itself, under no name."""

_PARTS = (
    "cache",
    "class_cache",
    "class_rows",
    "class_syntax",
    "classes",
    "expressions",
    "facts",
    "files",
    "many",
    "reach",
    "read",
    "scopes",
    "shapes",
    "walk",
)
"""The code that decides what an entry holds: another version of it keeps nothing of the last."""


@dataclass(slots=True, eq=False)
class FileIndex:
    """A file's classes, and its sites as a text that is decoded where a name of interest is in it."""

    facts: Facts
    classes: list[ClassRow]
    words: bytes
    """Last names of what its sites use, with spaces between: most files have none of interest."""
    sites: bytes
    """JSON."""
    renamed: list[tuple[str, str]]
    """Last names of values, and the other name that the file gives them."""

    def decode(self) -> list[Site]:
        """The sites."""
        return [_site(row) for row in json.loads(self.sites)]


def load(sources: Sequence[Source], *, cache: Cache) -> dict[str, FileIndex]:
    """The index of each file, from the cache where its bytes are known; by path.

    A file that is no Python gets a `problem` and no index.

    Args:
        sources: The files, read.
        cache: What earlier runs found.
    """
    sound = [source for source in sources if not source.problem]
    kept = cache.rows("constructors")
    own = _own() if cache.folder is not None else ""
    keys = {
        source.path: digest(own, source.module, source.package, source.text) if own else source.path
        for source in sound
    }
    unread = [source for source in sound if keys[source.path] not in kept]
    was_on = gc.isenabled()
    # Trees hold no circles, and looking for them takes as long as parsing.
    gc.disable()
    try:
        made = each(_row, unread, sizes=[len(source.text) for source in unread])
        fresh = {keys[source.path]: row for source, row in zip(unread, made, strict=True)}
        rows = {source.path: fresh.get(key) or kept[key] for source in sound for key in [keys[source.path]]}
        found: dict[str, FileIndex] = {}
        for source in sound:
            head, words, sites = rows[source.path].split(b"\t")
            entry = json.loads(head)
            if "problem" in entry:
                source.problem = entry["problem"]
            else:
                found[source.path] = _index(entry, words, sites)
    finally:
        if was_on:
            gc.enable()
    if fresh:
        # Another run may look at another part of the tree: what it left is kept unless it is most of it.
        used = {keys[source.path]: rows[source.path] for source in sound}
        cache.keep("constructors", {**(kept if len(kept) <= 4 * len(used) else {}), **used})
    return found


def _own() -> str:
    folder = Path(__file__).parent
    return digest(*((folder / f"{name}.py").read_bytes() for name in _PARTS))


def _row(source: Source) -> bytes:
    """What a file says, as a line with tabs: its classes and names, words of its sites, and these."""
    try:
        with warnings.catch_warnings():
            # Python warns of odd escapes in other people's texts; that is not our matter.
            warnings.simplefilter("ignore")
            tree = ast.parse(source.text)
        facts = read_facts(tree, package=source.package, module=source.module, text=source.text)
        classes, sites = read_classes(tree, facts, text=source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        problem = f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)
        return json.dumps({"problem": problem}).encode() + b"\t\t"
    renamed = {
        (_last(value), key.rpartition(".")[2])
        for key, values in facts.exports.items()
        for value in values
        if value and _last(value) != key.rpartition(".")[2]
    }
    head = {
        "exports": {key: values for key, values in facts.exports.items() if any(values)},
        "names": [key for key, values in facts.exports.items() if not any(values)],
        "stars": facts.stars,
        "public": facts.public,
        "dynamic": facts.is_dynamic,
        "classes": classes,
        "renamed": sorted(renamed),
    }
    lasts = {_last(value) for site in sites for value in site.values}
    words = sorted(word for word in lasts if word.isidentifier())
    words += [OWN] * any(site.form == "cls" for site in sites)
    said = (json.dumps(part, separators=(",", ":")) for part in (head, sites))
    return f"\t{' '.join(words)}\t".join(said).encode()


def _last(value: str) -> str:
    return value.rpartition(":")[2].rpartition(".")[2]


def _index(entry: dict[str, Any], words: bytes, sites: bytes) -> FileIndex:
    exports = {**entry["exports"], **{name: [""] for name in entry["names"]}}
    facts = Facts(exports, entry["stars"], entry["public"], entry["dynamic"], [], [], {}, {})
    classes = [_class(row) for row in entry["classes"]]
    return FileIndex(facts, classes, words, sites, [(a, b) for a, b in entry["renamed"]])


def _class(row: Sequence[Any]) -> ClassRow:
    qualname, line, bases, options, fields, init, new, methods, chains = row
    return ClassRow(
        qualname, line, bases, options, [Field(*part) for part in fields],
        _init(init), _init(new), methods, [_site(part) for part in chains],
    )  # fmt: skip


def _init(row: Sequence[Any] | None) -> Init | None:
    return None if row is None else Init(row[0], [Parameter(*part) for part in row[1]])


def _site(row: Sequence[Any]) -> Site:
    form, line, column, end_line, end_column, qualname, values, shape, *rest = row
    return Site(form, line, column, end_line, end_column, qualname, values, Shape(*shape), *rest)
