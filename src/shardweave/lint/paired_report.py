"""A comparison of two test runs for people and for machines."""

from __future__ import annotations

import json
from typing import Any

from shardweave.lint.paired import Difference, Pairing, Verdict
from shardweave.lint.results import Result, Run
from shardweave.lint.shown import code_span, one_line

__all__ = ["SCHEMA", "as_json", "as_markdown", "as_text"]

SCHEMA = 1
"""Version of the JSON form. It grows when a key changes its meaning or goes; new keys do not count."""

_SHOWN = 200
"""Differences of one kind that Markdown lists, whose readers limit its size."""


def as_text(pairing: Pairing, *, strict: bool = False) -> str:
    """All differences, worst first, and what they come to, as lines."""
    lines = [f"{run.name}: {_counted(run)}" for run in (pairing.base, pairing.head)]
    for verdict, count in pairing.counts.items():
        lines += ["", f"{verdict} {count}"]
        for difference in pairing.of(verdict):
            lines.append(f"  {one_line(difference.id)}  {one_line(difference.detail)}")
            lines += [f"      {line}" for line in _reasons(difference)]
    rank_only = _rank_only(pairing)
    if rank_only:
        lines += ["", f"bad on some ranks only, in the head {len(rank_only)}"]
        lines += [f"  {one_line(result.id)}  rank {_ranks(result.only_on)}" for result in rank_only]
    lines += [f"nothing was removed by {one_line(pattern)!r}" for pattern in pairing.unused_removed]
    lines += ["", _summary(pairing, strict)]
    return "\n".join(lines) + "\n"


def as_json(pairing: Pairing, *, strict: bool = False) -> str:
    """All of it as one JSON object."""
    return (
        json.dumps(
            {
                "schema": SCHEMA,
                "tool": "shardweave lint paired",
                "worse": pairing.worse(strict=strict),
                "strict": strict,
                "counts": {str(verdict): count for verdict, count in pairing.counts.items()},
                "same": pairing.same,
                "same_bad": pairing.same_bad,
                "base": _run(pairing.base),
                "head": _run(pairing.head),
                "flaky": sorted(pairing.flaky),
                "rank_only": [
                    {"id": result.id, "ranks": list(result.only_on)} for result in _rank_only(pairing)
                ],
                "unused_removed": list(pairing.unused_removed),
                "differences": [
                    {
                        "id": difference.id,
                        "key": difference.key,
                        "verdict": str(difference.verdict),
                        "detail": difference.detail,
                        "base": _result(difference.base),
                        "head": _result(difference.head),
                    }
                    for difference in pairing.differences
                ],
            },
            indent=2,
        )
        + "\n"
    )


def as_markdown(pairing: Pairing, *, strict: bool = False) -> str:
    """A summary for a page of a CI."""
    lines = [f"### {_summary(pairing, strict)}", "", "| run | tests | |", "|---|---:|---|"]
    for words, run in (("base", pairing.base), ("head", pairing.head)):
        ended = ", ".join(f"{count} {outcome}" for outcome, count in run.counts.items())
        lines.append(f"| {words} | {len(run.results)} | {ended} |")
    for verdict, count in pairing.counts.items():
        lines += ["", f"**{verdict}** {count}", ""]
        for difference in pairing.of(verdict)[:_SHOWN]:
            reasons = "".join(f"<br>{code_span(line)}" for line in _reasons(difference))
            lines.append(f"- {code_span(difference.id)}: {code_span(difference.detail)}{reasons}")
        if count > _SHOWN:
            lines.append(f"- and {count - _SHOWN} more")
    if rank_only := _rank_only(pairing):
        lines += ["", f"**Bad on some ranks only** {len(rank_only)}", ""]
        lines += [f"- {code_span(r.id)}: rank {_ranks(r.only_on)}" for r in rank_only[:_SHOWN]]
    return "\n".join(lines) + "\n"


def _counted(run: Run) -> str:
    ended = ", ".join(f"{count} {outcome}" for outcome, count in run.counts.items())
    ranks = f" on {len(run.ranks)} ranks" if len(run.ranks) > 1 else ""
    return f"{len(run.results)} test{'s' * (len(run.results) != 1)}{ranks}{': ' * bool(ended)}{ended}"


def _reasons(difference: Difference) -> list[str]:
    """The signatures that a reader wants to see: of a failure that is there, with the one that was."""
    was = difference.base.signature if difference.base is not None else ""
    now = difference.head.signature if difference.head is not None else ""
    if difference.verdict is Verdict.CHANGED and was != now:
        return [f"was {one_line(was)}", f"is  {one_line(now)}"]
    return [one_line(now)] if now and difference.head is not None and difference.head.bad else []


def _rank_only(pairing: Pairing) -> list[Result]:
    return [result for result in pairing.head.results.values() if result.only_on]


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _summary(pairing: Pairing, strict: bool) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in pairing.counts.items())
    as_before = f"{pairing.same} as before" + (
        f", {pairing.same_bad} of them bad" if pairing.same_bad else ""
    )
    words = "worse" if pairing.worse(strict=strict) else "no worse"
    return f"{words}: {', '.join(filter(None, (counts, as_before)))}"


def _run(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "files": list(run.files),
        "ranks": list(run.ranks),
        "tests": len(run.results),
        "outcomes": {str(outcome): count for outcome, count in run.counts.items()},
        "uncollected": sorted(run.uncollected),
    }


def _result(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    return {
        "outcome": str(result.outcome),
        "signature": result.signature,
        "ranks": list(result.ranks),
        "worst_ranks": list(result.worst),
    }
