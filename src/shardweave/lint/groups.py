"""Reads of process groups that come from the state of a module, in any tree of code."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardweave.lint.cache import Cache, digest, own_digest
from shardweave.lint.files import find, read
from shardweave.lint.finding import READS, REEXPORTED, Finding, Report
from shardweave.lint.presets import PRESETS, Preset

__all__ = ["Options", "check"]


@dataclass(frozen=True, slots=True)
class Options:
    """What to look for."""

    presets: tuple[Preset, ...] = tuple(PRESETS.values())
    exclude: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ("SW203",)
    """Beginnings of codes that are left out."""
    select: tuple[str, ...] = ()
    """Beginnings of codes that are kept, whatever `ignore` says; all where empty."""

    def wants(self, code: str) -> bool:
        """Whether findings of a code are reported."""
        if self.select:
            return code.startswith(self.select)
        return not code.startswith(self.ignore) if self.ignore else True


def check(
    paths: Iterable[Path], *, root: Path = Path(), options: Options | None = None, cache: Path | None = None
) -> Report:
    """Look at the Python files below some paths.

    Args:
        paths: Files and folders.
        root: What paths are reported relative to.
        options: What to look for; every preset by default.
        cache: A folder for what files said, so that the next run reads only what changed.

    Returns:
        All findings, sorted.

    Raises:
        MissingFileError: A path is not there.
    """
    options = options or Options()
    sources = find(paths, root=root, exclude=options.exclude)
    read(sources)
    kept = Cache(cache)
    key = digest(
        own_digest(),
        repr(options),
        *(part for s in sources for part in (s.path, s.module, s.package, s.text)),
    )
    stored = kept.load("groups") if cache is not None else None
    if isinstance(stored, dict) and stored.get("key") == key:
        findings = tuple(Finding(*values) for values in stored["findings"])
        return Report("groups", findings, num_files=len(sources), stats=_stats(findings, stored["allowed"]))
    # Neither is needed where nothing changed, which is to be quick.
    from shardweave.lint.search import Search
    from shardweave.lint.suppress import suppressed

    was = gc.isenabled()
    gc.disable()  # trees are many small objects in no circles; collecting among them doubles the time
    try:
        findings, allowed = suppressed(
            Search(sources, options, kept).findings(),
            ((source.path, source.text) for source in sources),
            judged=lambda code: code.startswith(("SW1", "SW2")) and options.wants(code),
        )
        findings = tuple(sorted(finding for finding in findings if options.wants(finding.code)))
    finally:
        if was:
            gc.enable()
    kept.save(
        "groups",
        {
            "key": key,
            "allowed": allowed,
            "findings": [[getattr(f, name) for name in Finding.__slots__] for f in findings],
        },
    )
    return Report("groups", findings, num_files=len(sources), stats=_stats(findings, allowed))


def _stats(findings: Sequence[Finding], allowed: int) -> Mapping[str, int]:
    reads = [finding for finding in findings if finding.code in READS]
    counts = Counter(finding.code for finding in findings)
    return {
        "reads": len(reads),
        "read_files": len({finding.path for finding in reads}),
        "reads_through_reexports": counts[REEXPORTED],
        "unconditional": sum(finding.kind == "unconditional" for finding in reads),
        "fallback": sum(finding.kind == "fallback" for finding in reads),
        "allowed_by_comments": allowed,
        **dict(sorted(counts.items())),
    }
