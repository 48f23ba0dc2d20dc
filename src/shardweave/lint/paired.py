"""Two test runs compared as sets of (test, outcome, failure signature).

Counts of failures say little: two runs with two failures each may differ in both, and a run that
lost ten tests looks better than it is. Each test is compared with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from shardweave.errors import FormatError
from shardweave.lint.results import Outcome, Result, Run

__all__ = ["Difference", "Pairing", "Verdict", "compare"]


class Verdict(StrEnum):
    """What became of a test, worst first."""

    REGRESSED = "REGRESSED"
    """It is bad and was not, or it hangs or crashes where it only failed; a new test that is bad too."""
    LOST = "LOST"
    """It says less than it did: it is gone, was not collected, is skipped or expected to fail, or ran on
    fewer ranks."""
    FLAKY = "FLAKY"
    """It differs, and it differed between runs of the base too: this proves nothing, in no direction."""
    CHANGED = "CHANGED"
    """It is bad as before, for another reason."""
    NEW = "NEW"
    """It runs, and it did not."""
    FIXED = "FIXED"
    """It was bad and is good."""
    REMOVED = "REMOVED"
    """It is gone, as was said beforehand."""


_WORSE = (Verdict.REGRESSED, Verdict.LOST)
_STRICT = (*_WORSE, Verdict.FLAKY, Verdict.CHANGED)


@dataclass(frozen=True, slots=True)
class Difference:
    """One test that is not as it was."""

    key: str
    verdict: Verdict
    base: Result | None
    head: Result | None
    detail: str
    """Why, in a few words."""

    @property
    def id(self) -> str:
        """The test as the newer report writes it."""
        shown = self.head or self.base
        return shown.id if shown is not None else self.key


@dataclass(frozen=True, slots=True)
class Pairing:
    """What became of all tests between two runs."""

    base: Run
    head: Run
    differences: tuple[Difference, ...]
    """Worst first, then by key."""
    same: int
    """Tests that ended as before."""
    same_bad: int
    """Those of them that are bad."""
    flaky: frozenset[str]
    """Keys of the tests that differ between runs of the base."""
    unused_removed: tuple[str, ...] = ()
    """Patterns of tests meant to go that no test needed."""

    def of(self, verdict: Verdict) -> tuple[Difference, ...]:
        """The differences of one kind."""
        return tuple(difference for difference in self.differences if difference.verdict is verdict)

    @property
    def counts(self) -> dict[Verdict, int]:
        """How many differences there are of each kind; only what occurs, worst first."""
        return {verdict: len(found) for verdict in Verdict if (found := self.of(verdict))}

    def worse(self, *, strict: bool = False) -> bool:
        """Whether the head is worse than the base; strictly, whether that is not excluded."""
        return any(difference.verdict in (_STRICT if strict else _WORSE) for difference in self.differences)


def compare(base: Run, head: Run, *, repeats: Sequence[Run] = (), removed: Sequence[str] = ()) -> Pairing:
    """What became of each test from the base to the head.

    Args:
        base: The run before the change.
        head: The run after it.
        repeats: Further runs of the base; tests that differ among them and the base are flaky.
        removed: Patterns of ids of tests that were taken out on purpose.

    Raises:
        FormatError: The base has no test, so that there is nothing to compare with.

    >>> from shardweave.lint.results import Observation, Part, joined
    >>> ran = lambda name, *bad: joined(name, [Part(name, tuple(
    ...     Observation(test, Outcome.FAILED if test in bad else Outcome.PASSED) for test in "abc"))])
    >>> for difference in compare(ran("base", "a", "b"), ran("head", "a", "c")).differences:
    ...     print(difference.verdict, difference.id)
    REGRESSED c
    FIXED b
    """
    for run in (base, *repeats):
        if not run.results:
            raise FormatError(
                "a run that others are compared with has tests",
                where=run.name,
                equation="tests(0)",
                hint="look at why it ran none: a wrong path, a filter, or all of it not collected",
            )
    bases = (base, *repeats)
    flaky = frozenset(
        key
        for key in sorted({key for run in bases for key in run.results})
        if len({_state(run.results.get(key)) for run in bases}) > 1
    )
    differences: list[Difference] = []
    used: set[str] = set()
    same = same_bad = 0
    for key in sorted({*base.results, *head.results}):
        was, now = base.results.get(key), head.results.get(key)
        verdict, detail = _judge(key, was, now, head)
        if key in flaky:
            verdict, detail = _flaky(key, now, bases, verdict, detail)
        if verdict is Verdict.LOST and now is None and was is not None:
            matching = [pattern for pattern in removed if any(fnmatchcase(n, pattern) for n in (was.id, key))]
            if matching:
                used.update(matching)
                verdict, detail = Verdict.REMOVED, "as was said"
        if verdict is None:
            same += 1
            same_bad += now is not None and now.bad
        else:
            differences.append(Difference(key, verdict, was, now, detail))
    order = list(Verdict)
    differences.sort(key=lambda difference: (order.index(difference.verdict), difference.key))
    return Pairing(
        base=base,
        head=head,
        differences=tuple(differences),
        same=same,
        same_bad=same_bad,
        flaky=flaky,
        unused_removed=tuple(pattern for pattern in removed if pattern not in used),
    )


_SEVERITY = {Outcome.FAILED: 1, Outcome.ERROR: 1, Outcome.CRASHED: 2, Outcome.HUNG: 3}
"""How bad an outcome is; a failure and an error are equally so, a hang costs everybody's time."""


def _state(result: Result | None) -> tuple[Outcome, str] | None:
    return None if result is None else (result.outcome, result.signature)


def _judge(key: str, was: Result | None, now: Result | None, head: Run) -> tuple[Verdict | None, str]:
    """What became of one test, if anything did, without regard to flakiness."""
    if was is None and now is not None:
        return (Verdict.REGRESSED if now.bad else Verdict.NEW), f"new, {now.outcome}{_only(now)}"
    assert was is not None
    if now is None:
        above = head.uncollected_above(key)
        if above is None:
            return Verdict.LOST, f"was {was.outcome}, is gone"
        shown = head.results[above].id if above in head.results else above or "<session>"
        return Verdict.LOST, f"was {was.outcome}, {shown} was not collected"
    change = f"{was.outcome} -> {now.outcome}{_only(now)}"
    if _SEVERITY.get(now.outcome, 0) > _SEVERITY.get(was.outcome, 0):
        return Verdict.REGRESSED, change
    if now.outcome in (Outcome.SKIPPED, Outcome.XFAILED) and was.outcome not in (
        now.outcome,
        Outcome.SKIPPED,
    ):
        return Verdict.LOST, change
    if len(now.ranks) < len(was.ranks):
        gone = ", ".join(str(rank) for rank in was.ranks if rank not in now.ranks)
        return (
            Verdict.LOST,
            f"{change}, ran on {len(was.ranks)} ranks and now on {len(now.ranks)}, not on {gone}",
        )
    if was.bad and not now.bad:
        return Verdict.FIXED, change
    if was.outcome is not now.outcome:
        return (
            Verdict.CHANGED if now.bad else Verdict.NEW if was.outcome is Outcome.SKIPPED else Verdict.FIXED
        ), change
    if now.bad and was.signature != now.signature:
        return Verdict.CHANGED, f"{now.outcome} as before, for another reason{_only(now)}"
    if now.bad and len(now.worst) > len(was.worst):
        more = ", ".join(str(rank) for rank in now.worst if rank not in was.worst)
        return Verdict.REGRESSED, f"{now.outcome} on rank {more} too"
    return None, ""


def _only(result: Result) -> str:
    return f", only on rank {', '.join(map(str, result.only_on))}" if result.only_on else ""


def _flaky(
    key: str, now: Result | None, bases: Sequence[Run], verdict: Verdict | None, detail: str
) -> tuple[Verdict | None, str]:
    """What a difference of a test that differs between runs of the base is worth."""
    states = [_state(run.results.get(key)) for run in bases]
    if _state(now) in states:
        return (None, "") if verdict is None else (Verdict.FLAKY, f"{detail}, as in a run of the base")
    if verdict is Verdict.LOST:
        return verdict, detail  # no run of the base did without it
    return Verdict.FLAKY, f"{detail or 'as in the first run'}, unproven: no run of the base did this"
