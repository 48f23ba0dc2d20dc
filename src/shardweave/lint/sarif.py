"""Findings as SARIF 2.1.0, which GitHub, GitLab, Azure and editors read.

The identity of a result over time is the key of the baseline, so that moved lines are no new results;
what the baseline says of it is the state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from shardweave import __version__
from shardweave.lint.finding import CODES, Absent, Finding, Report
from shardweave.lint.marks import fingerprint, fingerprints, level
from shardweave.lint.shown import allows, one_line

__all__ = ["FINGERPRINT", "as_sarif"]

FINGERPRINT = "shardweaveBaselineKey/v1"
_ROOT = "%SRCROOT%"
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_sarif(report: Report) -> str:
    """A SARIF log with one run. Known findings are ``unchanged``, slack of the baseline is ``absent``."""
    used = sorted({finding.code for finding in report.findings} | {absent.code for absent in report.absent})
    index = {code: number for number, code in enumerate(used)}
    marks = fingerprints(report.findings)
    state: Mapping[bool, str] = {True: "unchanged", False: "new"}
    results = [
        _result(
            finding,
            index,
            marks[number],
            state[number in report.known] if report.baseline or report.revision else "",
        )
        for number, finding in enumerate(report.findings)
    ]
    results += [_absent(absent, index, report) for absent in report.absent]
    run = {
        "tool": {
            "driver": {
                "name": "shardweave lint",
                "semanticVersion": __version__,
                "rules": [_rule(code, CODES.get(code, code)) for code in used],
            }
        },
        "automationDetails": {"id": f"shardweave-lint/{report.tool}/"},
        "originalUriBaseIds": {_ROOT: {"description": {"text": "The folder that the check ran on"}}},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [run],
    }
    return json.dumps(log, indent=2) + "\n"


def _rule(code: str, title: str) -> dict[str, Any]:
    return {
        "id": code,
        "shortDescription": {"text": f"{title[:1].upper()}{title[1:]}"},
        "defaultConfiguration": {"level": level(code)},
    }


def _result(finding: Finding, index: Mapping[str, int], mark: str, state: str) -> dict[str, Any]:
    text = one_line(finding.message) + (f". {one_line(finding.hint)}" if finding.hint else "")
    made: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": level(finding.code),
        "message": {"text": text},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": _artifact(finding.path),
                    "region": {
                        "startLine": finding.line,
                        "startColumn": finding.column,
                        "endLine": finding.end_line,
                        "endColumn": finding.end_column,
                    },
                },
                "logicalLocations": [{"fullyQualifiedName": finding.qualname}],
            }
        ],
        "partialFingerprints": {FINGERPRINT: mark},
        "properties": {"name": finding.name, "kind": finding.kind},
    }
    return made | ({"baselineState": state} if state else {})


def _absent(absent: Absent, index: Mapping[str, int], report: Report) -> dict[str, Any]:
    key = absent.path, absent.qualname, absent.code, absent.name
    return {
        "ruleId": absent.code,
        "ruleIndex": index[absent.code],
        "level": "note",
        "message": {
            "text": f"{one_line(absent.name)} in {one_line(absent.qualname)} is there less often than "
            f"{allows(report)}, by {absent.count}"
        },
        "locations": [
            {
                "physicalLocation": {"artifactLocation": _artifact(absent.path)},
                "logicalLocations": [{"fullyQualifiedName": absent.qualname}],
            }
        ],
        "partialFingerprints": {FINGERPRINT: fingerprint(("absent", *key))},
        "baselineState": "absent",
        "occurrenceCount": absent.count,
    }


def _artifact(path: str) -> dict[str, str]:
    """Where a file is: below the root of the run, or as an absolute URI."""
    uri = quote(path.encode("utf-8", "surrogateescape"), safe="/-._~")
    if PurePosixPath(path).is_absolute():
        return {"uri": f"file://{uri}"}
    return {"uri": uri, "uriBaseId": _ROOT}
