"""What a check found, for people and for machines; SARIF is in `sarif`.

JSON, SARIF and GitLab's format list all findings; the others count those that the baseline allows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from shardweave import __version__
from shardweave.lint.finding import CODES, READS, REEXPORTED, Absent, Finding, Report
from shardweave.lint.marks import fingerprint, fingerprints, level
from shardweave.lint.sarif import as_sarif
from shardweave.lint.shown import allows, code_span, one_line

__all__ = [
    "FORMATS",
    "SCHEMA",
    "as_github",
    "as_gitlab",
    "as_json",
    "as_junit",
    "as_markdown",
    "as_sarif",
    "as_stats",
    "as_text",
]

SCHEMA = 1
"""Version of the JSON form. It grows when a key changes its meaning or goes; new keys do not count."""

_SHOWN = 100
"""Findings that Markdown lists, whose readers limit its size."""
_FILES = 20
"""Files that statistics list."""


def as_text(report: Report) -> str:
    """``path:line:column CODE message`` a line, as editors follow it, and what they come to."""
    lines = []
    for finding in report.new:
        lines.append(f"{_place(finding)} {finding.code} {one_line(finding.message)}")
        if finding.hint:
            lines.append(f"    {one_line(finding.hint)}")
    lines += [f"{one_line(absent.path)}: {_absent(absent, report)}" for absent in report.absent]
    return "\n".join([*lines, *tally(report), summary(report)]) + "\n"


def as_json(report: Report) -> str:
    """All of it as one JSON object."""
    marks = fingerprints(report.findings)
    return (
        json.dumps(
            {
                "schema": SCHEMA,
                "tool": f"shardweave lint {report.tool}",
                "version": __version__,
                "baseline": report.baseline or None,
                "revision": report.revision or None,
                "num_files": report.num_files,
                "num_findings": len(report.findings),
                "num_new": len(report.new),
                "counts": dict(sorted(Counter(f.code for f in report.findings).items())),
                "stats": dict(report.stats),
                "findings": [
                    asdict(finding)
                    | {"level": level(finding.code), "known": n in report.known, "fingerprint": marks[n]}
                    for n, finding in enumerate(report.findings)
                ],
                "absent": [asdict(absent) for absent in report.absent],
            },
            indent=2,
        )
        + "\n"
    )


def as_github(report: Report) -> str:
    """Workflow commands, which GitHub shows beside the lines of a change.

    It shows ten of a kind for each step, so that the summary comes with them.
    """
    words = {"error": "error", "warning": "warning", "note": "notice"}
    lines = []
    for finding in report.new:
        where = {
            "file": finding.path,
            "line": str(finding.line),
            "endLine": str(finding.end_line),
            "col": str(finding.column),
            "endColumn": str(finding.end_column),
            "title": f"{finding.code} {finding.name}",
        }
        # New findings fail the run: none is less than an error, but for those that are notes.
        word = words["note" if level(finding.code) == "note" else "error"]
        properties = ",".join(f"{name}={_property(value)}" for name, value in where.items())
        text = finding.message + (f"\n{finding.hint}" if finding.hint else "")
        lines.append(f"::{word} {properties}::{_data(text)}")
    for absent in report.absent:
        lines.append(f"::notice file={_property(absent.path)}::{_data(_absent(absent, report))}")
    return "\n".join([*lines, *tally(report), summary(report)]) + "\n"


def _data(text: str) -> str:
    text = "".join(c if c in "\r\n" else one_line(c) for c in text)
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_gitlab(report: Report) -> str:
    """A code quality report of GitLab, which tells new entries from old ones by their fingerprints."""
    severities = {"error": "critical", "warning": "major", "note": "info"}
    marks = fingerprints(report.findings)
    entries: list[dict[str, Any]] = [
        {
            "description": f"{finding.code} {one_line(finding.message)}",
            "check_name": finding.code,
            "fingerprint": marks[number],
            "severity": "info" if number in report.known else severities[level(finding.code)],
            "location": {"path": finding.path, "lines": {"begin": finding.line, "end": finding.end_line}},
        }
        for number, finding in enumerate(report.findings)
    ]
    for absent in report.absent:
        key = ("absent", absent.path, absent.qualname, absent.code, absent.name)
        entries.append(
            {
                "description": _absent(absent, report),
                "check_name": absent.code,
                "fingerprint": fingerprint(key),
                "severity": "info",
                "location": {"path": absent.path, "lines": {"begin": 1}},
            }
        )
    return json.dumps(entries, indent=2) + "\n"


def as_junit(report: Report) -> str:
    """JUnit XML: a failed test for each new finding, one that passes where there is none."""
    from xml.sax.saxutils import escape, quoteattr  # it loads a client of HTTP, which takes longer than a run

    new = report.new
    suite = f"name={quoteattr(f'shardweave lint {report.tool}')} tests={quoteattr(str(max(1, len(new))))}"
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        f'<testsuite {suite} failures="{len(new)}" errors="0">',
    ]
    if not new:
        lines.append(f'  <testcase classname="shardweave.lint" name={quoteattr(report.tool)}/>')
    for finding in new:
        name = f"{finding.code} {finding.qualname} {finding.name} at {finding.line}:{finding.column}"
        lines.append(f"  <testcase classname={_attribute(finding.path)} name={_attribute(name)}>")
        text = f"{_place(finding)} {finding.code} {one_line(finding.message)}\n{one_line(finding.hint)}"
        message = f"message={_attribute(finding.message)}"
        lines.append(f'    <failure type="{finding.code}" {message}>{escape(text.rstrip())}</failure>')
        lines.append("  </testcase>")
    return "\n".join([*lines, "</testsuite>"]) + "\n"


def _attribute(text: str) -> str:
    from xml.sax.saxutils import quoteattr

    return quoteattr(one_line(text))


def as_markdown(report: Report) -> str:
    """A summary for a page of a CI, such as ``$GITHUB_STEP_SUMMARY``."""
    new = report.new
    lines = [f"### shardweave lint {report.tool}: {summary(report)}", ""]
    for line in tally(report):
        lines += [line, ""]
    if report.findings:
        lines += ["| code | | new | all |", "|---|---|---:|---:|"]
        every, fresh = (Counter(f.code for f in some) for some in (report.findings, new))
        lines += [
            f"| {code} | {CODES.get(code, '')} | {fresh[code]} | {every[code]} |" for code in sorted(every)
        ]
    if new:
        lines += ["", "| place | code | |", "|---|---|---|"]
        for finding in new[:_SHOWN]:
            lines.append(f"| {code_span(_place(finding))} | {finding.code} | {code_span(finding.message)} |")
        if len(new) > _SHOWN:
            lines.append(f"| and {len(new) - _SHOWN} more | | |")
    if report.absent:
        gone = "The baseline allows what is no longer there; take it out with `--update`:"
        lines += ["", "No longer there, or less often:" if report.revision else gone, ""]
        lines += [
            f"- {code_span(absent.path)}: {_absent(absent, report)}" for absent in report.absent[:_SHOWN]
        ]
    return "\n".join(lines) + "\n"


def as_stats(report: Report) -> str:
    """Counts by code, by kind and by file, known findings included."""
    lines = [summary(report), ""]
    by_code = Counter(finding.code for finding in report.findings)
    by_kind = Counter((finding.code, finding.kind) for finding in report.findings if finding.kind)
    for code in sorted(by_code):
        lines.append(f"{by_code[code]:7}  {code}  {CODES.get(code, '')}".rstrip())
        for (of, kind), count in sorted(by_kind.items()):
            if of == code:
                lines.append(f"{count:11}  {kind}")
    lines += [
        f"{count:7}  {name.replace('_', ' ')}"
        for name, count in sorted(report.stats.items())
        if name not in by_code and name not in {kind for _, kind in by_kind}
    ]
    files = Counter(finding.path for finding in report.findings)
    if files:
        lines += ["", f"{len(files):7}  files with findings, of {report.num_files}"]
        most = sorted(files.items(), key=lambda item: (-item[1], item[0]))
        lines += [f"{count:11}  {one_line(path)}" for path, count in most[:_FILES]]
        if len(most) > _FILES:
            lines.append(f"{sum(count for _, count in most[_FILES:]):11}  in {len(most) - _FILES} more")
    return "\n".join(lines) + "\n"


def summary(report: Report) -> str:
    """What a run comes to, in one line.

    >>> summary(Report("groups", (), num_files=3))
    'nothing found in 3 files'
    """
    new, known = len(report.new), len(report.known)
    files = f"in {report.num_files} file{'s' * (report.num_files != 1)}"
    if not report.findings:
        text = f"nothing found {files}"
    elif report.revision:
        text = f"{new} new {files}, {known} as in {one_line(report.revision)}"
    elif report.baseline:
        text = f"{new} new {files}, {known} known by {one_line(report.baseline)}"
    else:
        text = f"{new} found {files}"
    slack = sum(absent.count for absent in report.absent)
    return text + (f", {slack} fewer than {allows(report)}" if slack else "")


def tally(report: Report) -> list[str]:
    """The number of reads, known ones included, and those through re-exports on a line of their own."""
    counts = Counter(finding.code for finding in report.findings)
    kinds = ", ".join(_times(counts[code], name) for code, name in READS.items() if counts[code])
    lines = []
    for codes, what, rest in (
        (tuple(READS), "read", f": {kinds}"),
        ((REEXPORTED,), "more read", " through a name that another module hands on"),
    ):
        paths = [finding.path for finding in report.findings if finding.code in codes]
        if paths:
            lines.append(f"{_times(len(paths), what)} in {_times(len(set(paths)), 'file')}{rest}")
    return lines


def _times(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def _place(finding: Finding) -> str:
    return f"{one_line(finding.path)}:{finding.line}:{finding.column}"


def _absent(absent: Absent, report: Report) -> str:
    times = f"{absent.count} time{'s' * (absent.count != 1)}"
    name, where = one_line(absent.name), one_line(absent.qualname)
    return f"{absent.code} {name} in {where} is there {times} less than {allows(report)}"


FORMATS: Mapping[str, Callable[[Report], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
    "gitlab": as_gitlab,
    "junit": as_junit,
    "stats": as_stats,
    "markdown": as_markdown,
}
"""Forms by the names that a command may give them."""
