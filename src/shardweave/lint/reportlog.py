"""Test results from a report log of pytest: one JSON object a line, written while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardweave.errors import FormatError, TruncatedError
from shardweave.lint.results import Observation, Outcome, Part, message_in, outcome_of, signature_of

__all__ = ["MOST_BYTES", "read_report_log"]

MOST_BYTES = 2 << 30
_MOST_LINE = 64 << 20
_REPORTS = frozenset({"TestReport", "SubtestReport", "SubTestReport"})


def read_report_log(path: Path, *, rank: int | None = None, killed: bool = False) -> Part:
    """The results in a file of ``pytest --report-log``.

    A test that began and of which nothing more is said is `Outcome.HUNG`: it did not end in time, or its
    process died in it.

    Args:
        path: The file.
        rank: The rank that wrote it.
        killed: Whether a run that was killed is read for what it says until then.

    Raises:
        TruncatedError: The run did not reach its end, and ``killed`` is not given.
        FormatError: It is no report log, or larger than anything of that kind.
    """
    if (size := path.stat().st_size) > MOST_BYTES:
        raise _error(path, 0, f"size({size}) > {MOST_BYTES}")
    log = _Log(path)
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MOST_LINE + 1):
            number += 1
            if len(line) > _MOST_LINE:
                raise _error(path, number, f"length > {_MOST_LINE}")
            if line.isspace():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):  # the last one
                    if killed:
                        break
                    raise _truncated(path, f"line {number} breaks off") from None
                raise _error(path, number, str(error)) from None
            log.take(entry, number)
    if not (log.finished or killed):
        raise _truncated(path, f"SessionFinish is missing after line {number}")
    return Part(
        path=str(path),
        observations=tuple(log.observations()),
        rank=rank,
        uncollected=tuple(log.uncollected),
    )


def _error(path: Path, line: int, equation: str) -> FormatError:
    return FormatError(
        "a report log has one JSON object a line, each with its $report_type",
        where=f"{path}:{line}" if line else str(path),
        equation=equation,
        hint="write it anew, with pytest --report-log=FILE of the plugin pytest-reportlog",
    )


def _truncated(path: Path, equation: str) -> TruncatedError:
    return TruncatedError(
        "a report log ends with SessionFinish",
        where=str(path),
        equation=equation,
        hint="the run was killed: run it again, or give --killed to count what was running as hung "
        "and what never ran as lost",
    )


class _Log:
    """The entries of one log, test by test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished = False
        self.uncollected: list[str] = []
        self._collected: list[Observation] = []
        self._seen: dict[str, tuple[Outcome, str]] = {}
        self._open: dict[str, None] = {}  # began, and not torn down yet

    def take(self, entry: object, line: int) -> None:
        """One entry. Types that are not known belong to other plugins, and say nothing of results."""
        if not isinstance(entry, dict) or not isinstance(entry.get("$report_type"), str):
            raise _error(self.path, line, "$report_type is missing")
        kind = entry["$report_type"]
        if kind == "SessionStart":
            self.finished = False  # a log may hold several sessions, one behind the other
        elif kind == "SessionFinish":
            self.finished = True
        elif kind in _REPORTS:
            self._test(entry, line)
        elif kind == "CollectReport":
            self._collect(entry, line)

    def observations(self) -> list[Observation]:
        """All tests, each with the worst of its phases."""
        hung = (Outcome.HUNG, "it began and did not end")
        told = [Observation(name, *self._seen[name]) for name in self._seen if name not in self._open]
        return [*self._collected, *told, *(Observation(name, *hung) for name in self._open)]

    def _fields(self, entry: Mapping[str, Any], line: int) -> tuple[str, str]:
        node, outcome = entry.get("nodeid"), entry.get("outcome")
        if not isinstance(node, str) or not isinstance(outcome, str):
            raise _error(self.path, line, f"nodeid and outcome of a {entry['$report_type']} are no texts")
        return node, outcome

    def _collect(self, entry: Mapping[str, Any], line: int) -> None:
        node, outcome = self._fields(entry, line)
        if outcome == "failed":
            message = _message(entry.get("longrepr"))
            self._collected.append(Observation(node or "<session>", Outcome.ERROR, signature_of(message)))
            self.uncollected.append(Observation(node, Outcome.ERROR).key)
        elif outcome == "skipped":
            # The tests below are not known; the module stands for them.
            self._collected.append(Observation(node, Outcome.SKIPPED))

    def _test(self, entry: Mapping[str, Any], line: int) -> None:
        node, word = self._fields(entry, line)
        when, message = entry.get("when"), ""
        if when == "setup":
            self._open[node] = None
        elif when != "call":  # torn down, or pytest-xdist speaks for a process that is gone
            self._open.pop(node, None)
        if word == "passed":
            outcome = Outcome.PASSED
        elif word == "rerun":
            return  # the last try counts, and it is still to come
        elif word == "skipped":
            outcome = Outcome.XFAILED if isinstance(entry.get("wasxfail"), str) else Outcome.SKIPPED
        elif word == "failed":
            text = _message(entry.get("longrepr"))
            phase = Outcome.ERROR if when in ("setup", "teardown") else Outcome.FAILED
            outcome, message = outcome_of(phase, text), signature_of(text)
        else:
            raise _error(self.path, line, f"outcome({word[:40]!r}) is not passed, failed, skipped or rerun")
        if node not in self._seen or outcome > self._seen[node][0]:
            self._seen[node] = outcome, message


def _message(longrepr: object) -> str:
    """The message of a failure, which pytest gives in one of several forms."""
    if isinstance(longrepr, dict):
        crash = longrepr.get("reprcrash")
        if isinstance(crash, dict) and isinstance(crash.get("message"), str):
            return str(crash["message"])
        inner = longrepr.get("longrepr")
        return message_in(inner) if isinstance(inner, str) else ""
    return message_in(longrepr) if isinstance(longrepr, str) else ""
