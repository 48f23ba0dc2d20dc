"""What the formats of other tools want to know of a finding: how bad it is, and who it is over time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from shardweave.lint.finding import Finding

__all__ = ["fingerprint", "fingerprints", "level"]

_ERRORS = frozenset({"SW001", "SW106", "SW107", "SW108", "SW304"})
"""Code that can only fail, or never does what it says."""
_NOTES = frozenset({"SW203", "SW300", "SW305", "SW310"})
"""Nothing has to be done."""


def level(code: str) -> str:
    """``error``, ``warning`` or ``note``.

    >>> level("SW106"), level("SW101"), level("SW203")
    ('error', 'warning', 'note')
    """
    return "error" if code in _ERRORS else "note" if code in _NOTES else "warning"


def fingerprint(key: Iterable[str], occurrence: int = 0) -> str:
    """32 hexadecimal digits for a key of a baseline; the same as long as the key is.

    >>> fingerprint(("a.py", "f", "SW101", "get_x_group"))
    '8a256a411310c84018f9849772cae22c'
    """
    text = "\0".join((*key, str(occurrence)))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def fingerprints(findings: Sequence[Finding]) -> list[str]:
    """A fingerprint for each finding, all different; those of one key are told apart by their order."""
    seen: dict[tuple[str, ...], int] = {}
    made: list[str] = []
    for finding in findings:
        occurrence = seen.get(finding.key, 0)
        seen[finding.key] = occurrence + 1
        made.append(fingerprint(finding.key, occurrence))
    return made
