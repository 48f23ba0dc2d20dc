"""What every check of `shardweave.lint` says: a finding, and the report that a run makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CODES", "CONSTRUCTIONS", "GROUPS", "READS", "REEXPORTED", "Absent", "Finding", "Report"]

CODES: Mapping[str, str] = {
    "SW001": "file that cannot be read or is no Python",
    "SW002": "comment for shardweave without a reason, or not understood",
    "SW003": "comment that allows what is not there",
    "SW101": "accessor of a global process group",
    "SW102": "predicate that reads a global process group",
    "SW103": "collection built from global process groups",
    "SW104": "accessor of a global process group handed on",
    "SW105": "call of a function that hides reads of global process groups",
    "SW106": "name that the module of the groups does not define",
    "SW107": "hasattr on an object that has every declared name",
    "SW108": "assignment to an undeclared field of a collection",
    "SW109": "read of a global process group through a name that another module hands on",
    "SW201": "collective on the default group",
    "SW202": "default group by name",
    "SW203": "default group for a message only",
    "SW300": "construction that gives the argument",
    "SW301": "construction without the argument",
    "SW302": "construction that gives None for the argument",
    "SW303": "construction that may give the argument in an unpacked one",
    "SW304": "construction that can only fail: the argument twice, or one that is not taken",
    "SW305": "construction of a subclass that does not take the argument",
    "SW306": "class in a spec, for somebody else to construct",
    "SW307": "class in a partial",
    "SW308": "class handed on, for anybody to construct",
    "SW309": "subclass that does not pass the argument on",
    "SW310": "subclass that passes the argument on",
}
"""Codes and what they are."""

GROUPS = ("SW0", "SW1", "SW2")
CONSTRUCTIONS = ("SW3",)
"""What the codes of each check begin with."""

READS: Mapping[str, str] = {"SW101": "accessor", "SW102": "predicate", "SW103": "shim"}
"""The codes that the number of reads consists of, and what one of them is called."""

REEXPORTED = "SW109"
"""A read that the number leaves out: it goes through a name that another module hands on."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place of one file that a check speaks of.

    Its identity over time is `key`, which does not change when lines move.
    """

    path: str
    """Relative to the root of the run where it lies below it, with slashes."""
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""
    end_line: int
    end_column: int
    """The first column behind the place."""
    code: str
    message: str
    """One line without a full stop."""
    qualname: str
    """The function or class around the place, ``<module>`` outside all."""
    name: str
    """What is read, called or constructed."""
    kind: str = ""
    """A word that splits findings of one code, such as ``unconditional`` or ``fallback``."""
    hint: str = ""
    """What to write instead; may be empty."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Path, qualname, code and name: what a baseline counts."""
        return self.path, self.qualname, self.code, self.name


@dataclass(frozen=True, slots=True, order=True)
class Absent:
    """A baseline's entry of which fewer are there than it allows."""

    path: str
    qualname: str
    code: str
    name: str
    count: int
    """How many fewer."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run found."""

    tool: str
    """``groups`` or ``constructors``."""
    findings: tuple[Finding, ...]
    """Sorted. All of them, those that a baseline allows too."""
    known: frozenset[int] = frozenset()
    """Indices of `findings` that the baseline allows."""
    absent: tuple[Absent, ...] = ()
    """Slack of the baseline, sorted; empty in a run over part of the tree."""
    baseline: str = ""
    """Path of the baseline; empty where there is none."""
    revision: str = ""
    """The revision of git that stands in the place of a baseline; empty where none does."""
    num_files: int = 0
    """Files that were looked at."""
    stats: Mapping[str, int] = field(default_factory=dict)
    """Further counts, by name."""

    @property
    def new(self) -> tuple[Finding, ...]:
        """The findings that no baseline allows."""
        return tuple(finding for index, finding in enumerate(self.findings) if index not in self.known)
