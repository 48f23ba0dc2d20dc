"""Reads of global groups replaced where that is safe, with the formatting of the file kept.

It is safe where the group is at hand and cannot be unset: an argument of the function around the read, or a
field that the class sets in its ``__init__``. A group that may be None is never put in: collectives take None
for the default group, and nobody would see the mistake. What else there is becomes a patch to look through.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from shardweave.errors import MissingPackageError
from shardweave.lint.finding import REEXPORTED, Finding

if TYPE_CHECKING:
    from shardweave.lint.rewrite import Rewritten

__all__ = ["Fixes", "fix", "write"]


@dataclass(frozen=True, slots=True)
class Fixes:
    """What a rewrite of some files comes to."""

    files: Mapping[str, Rewritten]
    """By the paths of the findings; only files with findings."""

    @property
    def done(self) -> tuple[Finding, ...]:
        """The reads that are gone."""
        return tuple(finding for file in self.files.values() for finding in file.done)

    @property
    def left(self) -> tuple[tuple[Finding, str], ...]:
        """The reads that are still there, and why."""
        return tuple(pair for file in self.files.values() for pair in file.left)

    def patch(self) -> str:
        """The changes as a unified diff that ``git apply`` takes, below remarks for its reader."""
        lines: list[str] = []
        for path, file in self.files.items():
            for remark in file.remarks:
                lines.append(f"# {path}: {remark}\n")
            for finding, why in file.left:
                lines.append(f"# {path}:{finding.line}: by hand: {finding.name}, {why}\n")
        for path, file in self.files.items():
            old, new = (text.decode(file.encoding) for text in (file.before, file.after))
            if old != new:
                lines += _diff(path, old, new)
        return "".join(lines)


def fix(findings: Sequence[Finding], *, root: Path, review: bool = False) -> Fixes:
    """Replace reads; nothing is written.

    Args:
        findings: What `shardweave.lint.groups.check` found.
        root: What the paths of the findings are relative to.
        review: Whether to change signatures too and to take groups that may be unset: changes that
            somebody has to look through. New parameters are keyword-only.

    Raises:
        MissingPackageError: libcst is not installed.
    """
    try:
        from shardweave.lint.rewrite import rewrite
    except ImportError as error:
        raise MissingPackageError(
            "rewriting code needs libcst",
            equation=str(error),
            hint="pip install libcst, or 'shardweave[lint]'",
        ) from None
    by_file: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.code in ("SW101", REEXPORTED):
            by_file.setdefault(finding.path, []).append(finding)
    return Fixes(
        {path: rewrite((root / path).read_bytes(), by_file[path], review=review) for path in sorted(by_file)}
    )


def write(fixes: Fixes, *, root: Path) -> int:
    """Write the files that changed, each whole or not at all; how many there are."""
    count = 0
    for path, file in fixes.files.items():
        if file.before == file.after:
            continue
        place = Path(os.path.realpath(root / path))
        fresh = place.with_name(f".{place.name}.{uuid4().hex}")
        try:
            fresh.write_bytes(file.after)
            fresh.chmod(place.stat().st_mode & 0o7777)
            fresh.replace(place)
        finally:
            fresh.unlink(missing_ok=True)
        count += 1
    return count


_LINES = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")


def _diff(path: str, old: str, new: str) -> Iterable[str]:
    before, after = (_LINES.findall(text) for text in (old, new))
    for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"):
        yield line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n"
