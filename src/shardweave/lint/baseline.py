"""What was there when the check began: a count for each place and name, that can only fall.

A line of the file is ``path::qualname CODE name count``. Lines are sorted, each stands for itself and there
is no sum, so that branches merge without conflicts; where a merge left two lines for one place, the smaller
count holds. Line numbers are no part of it: code may move, within its function and with its file.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardweave.errors import ExistsError, FormatError, MissingFileError
from shardweave.lint.finding import Absent, Finding

__all__ = ["Baseline", "Judged", "Key", "begin", "judge", "load", "save", "shrunk"]

Key = tuple[str, str, str, str]
"""Path, qualname, code and name, as in `shardweave.lint.finding.Finding.key`."""

Baseline = Mapping[Key, int]
"""How many findings of each key are allowed."""

_LINE = re.compile(
    r"(?P<path>\S.*)::(?P<qualname>\S+) (?P<code>SW\d{3}) (?P<name>\S+) (?P<count>[1-9][0-9]{0,8})"
)
_HEAD = "# What shardweave lint allows here. Counts fall and never rise: --update takes out what is gone.\n"
_NEVER = ("SW001",)
"""Codes that no baseline allows: of a file that cannot be read nothing is known."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Findings against a baseline."""

    known: frozenset[int]
    """Indices of the findings that it allows."""
    absent: tuple[Absent, ...]
    """Its slack: what it allows and is not there. Only of what was looked at."""
    moved: Mapping[str, str]
    """New paths of files that were renamed, by their old ones."""


def load(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        MissingFileError: It is not there.
        FormatError: A line is none of a baseline.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise MissingFileError(
            "the baseline is there",
            where=str(path),
            equation="found no file",
            hint="write it with --begin, once; after that it can only shrink",
        ) from None
    except UnicodeDecodeError as error:
        raise _odd(path, error.start, "bytes that are no UTF-8", "byte") from None
    found: dict[Key, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise _odd(path, number, repr(line[:80]), "line")
        key = (_path(match["path"]), match["qualname"], match["code"], match["name"])
        found[key] = min(int(match["count"]), found.get(key, int(match["count"])))
    return found


def _odd(path: Path, place: int, got: str, unit: str) -> FormatError:
    return FormatError(
        "a baseline has a line 'path::qualname CODE name count' for each entry",
        where=f"{path}, {unit} {place}",
        equation=f"got {got}",
        hint="take the line out, or the marks of a merge; --update writes the rest anew",
    )


def save(path: Path, baseline: Baseline) -> None:
    """Write a baseline, whole or not at all."""
    text = _HEAD + "".join(
        f"{_word(file)}::{qualname} {code} {name} {count}\n"
        for (file, qualname, code, name), count in sorted(baseline.items())
        if count > 0
    )
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


_ODD = re.compile(r"^[#\s]|\\|[^ -~\w]", re.ASCII)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{6}))", re.ASCII)


def _word(path: str) -> str:
    r"""A path in a line: ``\xff`` for a byte that is no UTF-8, ``\u00000a`` for what ends a line.

    >>> _word("a\n\udcff.py"), _path(_word("a\n\udcff.py")) == "a\n\udcff.py"
    ('a\\u00000a\\xff.py', True)
    """

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        if 0xDC80 <= code <= 0xDCFF:
            return f"\\x{code - 0xDC00:02x}"
        is_plain = match[0].isprintable() and match[0] not in "\\#" and not match[0].isspace()
        return match[0] if is_plain else f"\\u{code:06x}"

    return _ODD.sub(escaped, path)


def _path(word: str) -> str:
    """The path that a line means."""
    return _ESCAPED.sub(lambda m: chr(0xDC00 + int(m[1], 16)) if m[1] else chr(int(m[2], 16)), word)


def begin(path: Path, findings: Iterable[Finding]) -> Baseline:
    """Write the baseline that allows all that there is, where none is yet.

    Raises:
        ExistsError: There is one.
    """
    if path.exists():
        raise ExistsError(
            "a baseline begins once",
            where=str(path),
            equation="found the file that --begin would write",
            hint="--update takes out of it what is gone",
        )
    made: Baseline = Counter(finding.key for finding in findings if finding.code not in _NEVER)
    save(path, made)
    return made


def judge(
    findings: Sequence[Finding],
    baseline: Baseline,
    *,
    covers: Callable[[str], bool] = lambda path: True,
    is_there: Callable[[str], bool] = lambda path: False,
    never: Sequence[str] = _NEVER,
) -> Judged:
    """Tell new findings from those that a baseline allows.

    Where there are more of one key than it allows, the last ones in the file count as new.

    Args:
        findings: Sorted.
        baseline: What is allowed.
        covers: Whether the run looked at a path. What lies elsewhere is not missed.
        is_there: Whether a file of that path was looked at. The entries of one that is gone go to the new
            file that has most of their names, if it has half of them and no entries of its own.
        never: Codes that are new whatever is allowed.
    """
    covered = {key: count for key, count in baseline.items() if covers(key[0])}
    moved = _moved(findings, covered, is_there)
    left: Counter[Key] = Counter()
    origin: dict[Key, Key] = {}
    for key, count in covered.items():
        now = (moved.get(key[0], key[0]), *key[1:])
        left[now] += count
        origin[now] = key
    known = set()
    for index, finding in enumerate(findings):
        if finding.code not in never and left[finding.key] > 0:
            left[finding.key] -= 1
            known.add(index)
    absent = tuple(sorted(Absent(*origin[key], count) for key, count in left.items() if count > 0))
    return Judged(frozenset(known), absent, moved)


def _moved(
    findings: Sequence[Finding], baseline: Baseline, is_there: Callable[[str], bool]
) -> Mapping[str, str]:
    old: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    new: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    paths, now_there = {key[0] for key in baseline}, {finding.path for finding in findings}
    for key, count in baseline.items():
        if key[0] not in now_there and not is_there(key[0]):
            old[key[0]][key[1:]] += count
    for finding in findings:
        if finding.path not in paths:
            new[finding.path][finding.key[1:]] += 1
    pairs = sorted(
        (-(was & now).total(), before, after)
        for before, was in old.items()
        for after, now in new.items()
        if 2 * (was & now).total() >= max(was.total(), 1)
    )
    moved: dict[str, str] = {}
    for _, before, after in pairs:
        if before not in moved and after not in moved.values():
            moved[before] = after
    return moved


def shrunk(findings: Sequence[Finding], baseline: Baseline, judged: Judged) -> Baseline:
    """The baseline without its slack, and under the new paths of renamed files. Nothing is added."""
    gone = {(a.path, a.qualname, a.code, a.name): a.count for a in judged.absent}
    made: Counter[Key] = Counter()
    for key, count in baseline.items():
        made[(judged.moved.get(key[0], key[0]), *key[1:])] += count - gone.get(key, 0)
    return {key: count for key, count in made.items() if count > 0}
