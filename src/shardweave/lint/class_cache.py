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
from shardweave.lint.read import read_facts

__all__ = ["FileIndex", "load"]

_PARTS = (
    "class_cache",
    "class_rows",
    "class_syntax",
    "classes",
    "facts",
    "files",
    "reach",
    "read",
    "scopes",
    "shapes",
)
"""The code that decides what an entry holds: another version of it keeps nothing of the last."""


@dataclass(slots=True, eq=False)
class FileIndex:
    """A file's classes, and its sites as a text that is decoded where a name of interest is in it."""

    facts: Facts
    classes: list[ClassRow]
    sites: str
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
    loaded = cache.load("constructors")
    kept: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
    own = _own() if cache.folder is not None else ""
    found: dict[str, FileIndex] = {}
    fresh: dict[str, Any] = {}
    was_on = gc.isenabled()
    # Trees hold no circles, and looking for them takes as long as parsing.
    gc.disable()
    try:
        for source in sources:
            if source.problem:
                continue
            key = digest(own, source.module, source.package, source.text) if own else source.path
            entry = kept.get(key)
            if entry is None:
                entry = _entry(source)
            fresh[key] = entry
            if "problem" in entry:
                source.problem = entry["problem"]
            else:
                found[source.path] = _index(entry)
    finally:
        if was_on:
            gc.enable()
    if fresh.keys() - kept.keys():
        # Another run may look at another part of the tree: what it left is kept unless it is most of it.
        cache.save("constructors", {**(kept if len(kept) <= 4 * len(fresh) else {}), **fresh})
    return found


def _own() -> str:
    folder = Path(__file__).parent
    return digest(*((folder / f"{name}.py").read_bytes() for name in _PARTS))


def _entry(source: Source) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            # Python warns of odd escapes in other people's texts; that is not our matter.
            warnings.simplefilter("ignore")
            tree = ast.parse(source.text)
        facts = read_facts(tree, package=source.package, module=source.module, text=source.text)
        classes, sites = read_classes(tree, facts, text=source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        return {"problem": f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)}
    renamed = {
        (_last(value), key.rpartition(".")[2])
        for key, values in facts.exports.items()
        for value in values
        if value and _last(value) != key.rpartition(".")[2]
    }
    exports = {key: values for key, values in facts.exports.items() if any(values)}
    names = [key for key, values in facts.exports.items() if not any(values)]
    return {
        "exports": exports,
        "names": names,
        "stars": facts.stars,
        "public": facts.public,
        "dynamic": facts.is_dynamic,
        "classes": classes,
        "sites": json.dumps(sites, separators=(",", ":"), ensure_ascii=False),
        "renamed": sorted(renamed),
    }


def _last(value: str) -> str:
    return value.rpartition(":")[2].rpartition(".")[2]


def _index(entry: dict[str, Any]) -> FileIndex:
    exports = {**entry["exports"], **{name: [""] for name in entry["names"]}}
    facts = Facts(exports, entry["stars"], entry["public"], entry["dynamic"], [], [], {}, {})
    classes = [_class(row) for row in entry["classes"]]
    return FileIndex(facts, classes, entry["sites"], [(a, b) for a, b in entry["renamed"]])


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
