"""What a test run came to: an outcome and a signature for each test, over all ranks that ran it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["BAD", "Observation", "Outcome", "Part", "Result", "Run", "joined", "outcome_of", "signature_of"]


class Outcome(IntEnum):
    """How a test ended, from best to worst: over several ranks the largest counts."""

    PASSED = 0
    XFAILED = 1
    """It failed, as its author expects."""
    SKIPPED = 2
    FAILED = 3
    ERROR = 4
    """Set-up, tear-down or collection failed."""
    CRASHED = 5
    """The process that ran it is gone."""
    HUNG = 6
    """It ran into a time limit, or it started and nobody heard of it again."""

    def __str__(self) -> str:
        return self.name.lower()


BAD = frozenset({Outcome.FAILED, Outcome.ERROR, Outcome.CRASHED, Outcome.HUNG})
"""Outcomes that make a run red."""


@dataclass(frozen=True, slots=True)
class Observation:
    """How one test ended in one report."""

    id: str
    """As the report writes it."""
    outcome: Outcome
    signature: str = ""
    """What failed, free of what changes from run to run; empty where nothing did."""

    @property
    def key(self) -> str:
        """The test, the same for every format of reports.

        >>> Observation("tests/unit/test_a.py::TestB::test_c[x/y]", Outcome.PASSED).key
        'tests.unit.test_a.TestB.test_c[x/y]'
        >>> Observation("tests.unit.test_a.TestB::test_c[x/y]", Outcome.PASSED).key
        'tests.unit.test_a.TestB.test_c[x/y]'
        """
        head, bracket, params = self.id.partition("[")
        path, *names = head.split("::")
        path = path.replace("\\", "/").removesuffix(".py").replace("/", ".")
        return ".".join([path, *names] if path else names) + bracket + params


@dataclass(frozen=True, slots=True)
class Part:
    """One report: what one process, usually one rank, says of a run."""

    path: str
    observations: tuple[Observation, ...]
    rank: int | None = None
    """``None`` where the report does not belong to a rank."""
    uncollected: tuple[str, ...] = ()
    """Keys of modules and folders whose tests could not be collected."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one test ended in a run: the worst over the ranks that ran it."""

    id: str
    outcome: Outcome
    signature: str
    ranks: tuple[int, ...]
    """The ranks that ran it, ascending; empty where reports have no ranks."""
    worst: tuple[int, ...]
    """Those of them with this outcome."""

    @property
    def bad(self) -> bool:
        """Whether it makes a run red."""
        return self.outcome in BAD

    @property
    def only_on(self) -> tuple[int, ...]:
        """The ranks on which it is bad, where it is not on all that ran it."""
        return self.worst if self.bad and len(self.worst) < len(self.ranks) else ()


@dataclass(frozen=True, slots=True)
class Run:
    """A test run: the results of all its tests, by `Observation.key`."""

    name: str
    results: Mapping[str, Result]
    uncollected: frozenset[str] = frozenset()
    ranks: tuple[int, ...] = ()
    files: tuple[str, ...] = field(default=(), compare=False)

    @property
    def counts(self) -> dict[Outcome, int]:
        """How many tests ended in which way; only what occurs, best first."""
        ended = [result.outcome for result in self.results.values()]
        return {outcome: ended.count(outcome) for outcome in Outcome if outcome in ended}

    def uncollected_above(self, key: str) -> str | None:
        """The module or folder above a test that could not be collected, if there is one.

        >>> Run("head", {}, frozenset({"tests.test_a"})).uncollected_above("tests.test_a.test_b")
        'tests.test_a'
        >>> Run("head", {}, frozenset({"tests.test_a"})).uncollected_above("tests.test_ab.test_b")
        """
        plain, dot = key.partition("[")[0], "."
        while dot:
            plain, dot, _ = plain.rpartition(".")
            if plain in self.uncollected:
                return plain
        return None


def joined(name: str, parts: Sequence[Part]) -> Run:
    """All reports of a run as one: of each test the worst outcome.

    A test that one report has twice, as pytest writes it where its tear-down fails after it failed
    itself, counts once, with the worst.
    """
    seen: dict[str, dict[int, Observation]] = {}
    for number, part in enumerate(parts):
        place = number if part.rank is None else part.rank
        for observation in part.observations:
            places = seen.setdefault(observation.key, {})
            if place not in places or observation.outcome > places[place].outcome:
                places[place] = observation
    ranked = bool(parts) and all(part.rank is not None for part in parts)
    return Run(
        name=name,
        results={key: _worst(seen[key], ranked) for key in sorted(seen)},
        uncollected=frozenset(key for part in parts for key in part.uncollected),
        ranks=tuple(sorted(part.rank for part in parts if part.rank is not None)),
        files=tuple(part.path for part in parts),
    )


def _worst(places: Mapping[int, Observation], ranked: bool) -> Result:
    outcome = max(observation.outcome for observation in places.values())
    worst = sorted(place for place, observation in places.items() if observation.outcome is outcome)
    return Result(
        id=places[worst[0]].id,
        outcome=outcome,
        signature=_one(places[place].signature for place in worst),
        ranks=tuple(sorted(places)) if ranked else (),
        worst=tuple(worst) if ranked else (),
    )


def _one(signatures: Iterable[str]) -> str:
    """Ranks may fail for several reasons; which rank had which is no part of it."""
    return " | ".join(sorted(set(signatures)))


# --- signatures ---------------------------------------------------------------------------------

_MOST = 400
_SEEN = 20_000
"""Characters of a message that are looked at."""

# Each pattern looks at a bounded stretch from each place, so that no message takes long.
_NORMAL: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.ASCII), text)
    for pattern, text in (
        (r"\x1b\[[0-9;]{0,20}[A-Za-z]", ""),
        (r"\s+", " "),
        (r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b", "<uuid>"),
        (r"\b0x[0-9a-fA-F]{6,}\b", "<address>"),
        (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
        (r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b", "<time>"),
        (r"""(?:/private)?(?:/tmp|/var/tmp|/var/folders|/dev/shm)/[^\s'":,;)\]}>]*""", "<tmp>"),
        (r"""[A-Za-z]:\\[^\s'":,;]{0,200}\\Temp\\[^\s'":,;)\]}>]*""", "<tmp>"),
        (r"""[^\s'"(\[{<]{0,200}/pytest-of-[^\s'":,;)\]}>]*""", "<tmp>"),
        (r"(\blocalhost|\b\d{1,3}(?:\.\d{1,3}){3}|\[::1?\]):\d{2,5}\b", r"\1:<port>"),
        (r"(?i)(\bport['\"]?\s*[=:]?\s*)\d{2,5}\b", r"\1<port>"),
        (r"(?i)(\bp?pid['\"]?\s*[=:]?\s*)\d+\b", r"\1<pid>"),
        (r"(?i)((?<![A-Za-z])rank['\"]?\s*[=:#]?\s*)\d+\b", r"\1<rank>"),
        (r"\bgw\d+\b", "<worker>"),
        (r"\b(cuda|xpu|hpu|npu):\d+\b", r"\1:<rank>"),
        (
            r"\b\d+(?:\.\d+)?(?:e-?\d+)?\s*(?:ns|us|µs|ms|s|sec|secs|seconds?|milliseconds?|minutes?)\b",
            "<duration>",
        ),
    )
)


def signature_of(message: str) -> str:
    """A message of a failure without what changes from run to run.

    Addresses, ports, ranks, process ids, times and temporary paths become words; all else stays, numbers of
    an assertion too, and so the same text means the same failure.

    >>> signature_of("RuntimeError: [rank3] timed out after 12.5s at 127.0.0.1:29511, <T at 0x7f3a2b1c9d00>")
    'RuntimeError: [rank<rank>] timed out after <duration> at 127.0.0.1:<port>, <T at <address>>'
    >>> signature_of("assert 1.4142 == 1.7320")
    'assert 1.4142 == 1.7320'
    """
    text = message[:_SEEN]
    for pattern, normal in _NORMAL:
        text = pattern.sub(normal, text)
    text = text.strip()
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def message_in(text: str) -> str:
    r"""The message in a traceback as pytest prints it: its ``E`` lines, else its last line.

    >>> message_in("a.py:1: in <module>\n    import b\nE   ModuleNotFoundError: No module named 'b'\n")
    "ModuleNotFoundError: No module named 'b'"
    """
    lines = text[-_SEEN:].splitlines()
    told = [line[1:].strip() for line in lines if line.startswith("E ")]
    if told:
        return "\n".join(told)
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


_HUNG = re.compile(r"\bTimeout (?:\(?>|after )|from pytest-timeout|timed out and (?:is|was) killed", re.ASCII)
_CRASHED = re.compile(
    r"^(?:node down|worker '[^']*' crashed while running)|\bNot properly terminated\b", re.ASCII
)


def outcome_of(outcome: Outcome, message: str) -> Outcome:
    """What a failure is, seen by its message: a time limit and a lost process are outcomes of their own.

    >>> str(outcome_of(Outcome.FAILED, "Failed: Timeout (>2.0s) from pytest-timeout."))
    'hung'
    """
    if outcome in BAD:
        if _HUNG.search(message[:_SEEN]):
            return Outcome.HUNG
        if _CRASHED.search(message[:_SEEN]):
            return Outcome.CRASHED
    return outcome
