"""What a check found, in every form: texts stay texts, formats keep their own rules.

SARIF is checked twice: against its published schema, and against rules of its text that no schema has,
sections 3.13 (log), 3.14 (run), 3.27 (result), 3.30 (region) and 3.49 (rule).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import jsonschema
import pytest

from shardweave.lint.finding import CODES, Absent, Finding, Report
from shardweave.lint.junit import read_junit
from shardweave.lint.marks import fingerprints
from shardweave.lint.report import (
    FORMATS,
    as_github,
    as_gitlab,
    as_json,
    as_junit,
    as_markdown,
    as_sarif,
    as_stats,
    as_text,
)


def finding(path: str = "pkg/a.py", line: int = 3, **changes: Any) -> Finding:
    values: dict[str, Any] = {
        "path": path,
        "line": line,
        "column": 5,
        "end_line": line,
        "end_column": 42,
        "code": "SW101",
        "message": "get_tensor_model_parallel_group reads a global process group",
        "qualname": "Layer.forward",
        "name": "get_tensor_model_parallel_group",
        "kind": "unconditional",
        "hint": "take the group as an argument",
    }
    return Finding(**values | changes)


PLAIN = Report(
    "groups", (finding(), finding(line=9), finding("pkg/b c.py", kind="fallback", code="SW106")), num_files=7
)
RATCHET = Report(
    "groups",
    PLAIN.findings,
    known=frozenset({0}),
    absent=(Absent("pkg/gone.py", "f", "SW103", "use_mpu_process_groups", 2),),
    baseline="baseline.txt",
    num_files=7,
    stats={"default-group collectives": 4},
)
EMPTY = Report("groups", (), num_files=2)
NASTY = "x%0A\n::error::\x1b[2J,:|`<b>&\"'\r]]>\u4e2d"
HOSTILE = Report(
    "groups",
    (finding(NASTY, message=NASTY, qualname=NASTY, name=NASTY, hint=NASTY), finding("/abs/\udcff.py")),
    absent=(Absent(NASTY, NASTY, "SW101", NASTY, 1),),
    baseline=NASTY,
    num_files=1,
)
every = pytest.mark.parametrize(
    "report", [PLAIN, RATCHET, EMPTY, HOSTILE], ids=["plain", "ratchet", "empty", "hostile"]
)


def test_text() -> None:
    assert as_text(RATCHET) == (
        "pkg/a.py:9:5 SW101 get_tensor_model_parallel_group reads a global process group\n"
        "    take the group as an argument\n"
        "pkg/b c.py:3:5 SW106 get_tensor_model_parallel_group reads a global process group\n"
        "    take the group as an argument\n"
        "pkg/gone.py: SW103 use_mpu_process_groups in f is there 2 times less than the baseline allows\n"
        "2 reads in 1 file: 2 accessors\n"
        "2 new in 7 files, 1 known by baseline.txt, 2 fewer than the baseline allows\n"
    )
    assert as_text(EMPTY) == "nothing found in 2 files\n"


@every
@pytest.mark.parametrize("form", ["text", "github", "markdown"])
def test_no_text_of_the_code_breaks_a_line_or_is_a_command(report: Report, form: str) -> None:
    lines = FORMATS[form](report).splitlines()
    assert all(line.isprintable() for line in lines)
    commands = [line for line in lines if line.startswith("::")]
    assert len(commands) == (len(report.new) + len(report.absent) if form == "github" else 0)
    if form == "markdown":
        cells = [line.count("|") for line in lines if line.startswith(("| `", "| <code>"))]
        assert cells == [4] * len(report.new)


@every
@pytest.mark.parametrize("form", FORMATS)
def test_every_form_is_unicode_that_can_be_written(report: Report, form: str) -> None:
    FORMATS[form](report).encode("utf-8")


# --- machines -----------------------------------------------------------------------------------


def test_json_has_everything_and_a_version() -> None:
    plain = json.loads(as_json(RATCHET))
    assert (plain["schema"], plain["tool"], plain["num_files"]) == (1, "shardweave lint groups", 7)
    assert (plain["num_findings"], plain["num_new"]) == (3, 2)
    assert plain["counts"] == {"SW101": 2, "SW106": 1}
    assert [f["known"] for f in plain["findings"]] == [True, False, False]
    assert (
        plain["findings"][0].items()
        >= {"path": "pkg/a.py", "line": 3, "column": 5, "kind": "unconditional"}.items()
    )
    assert plain["absent"][0]["count"] == 2
    assert plain["stats"] == {"default-group collectives": 4}


def test_fingerprints_differ_and_do_not_move_with_lines() -> None:
    here = fingerprints(PLAIN.findings)
    assert len(set(here)) == 3
    moved = [finding(line=103), finding(line=109), finding("pkg/b c.py", line=4, code="SW106")]
    assert fingerprints(moved) == here
    assert fingerprints([finding(qualname="Layer.backward")])[0] not in here


def test_github() -> None:
    first, *_, absent, reads, end = as_github(RATCHET).splitlines()
    assert first == (
        "::error file=pkg/a.py,line=9,endLine=9,col=5,endColumn=42,"
        "title=SW101 get_tensor_model_parallel_group::"
        "get_tensor_model_parallel_group reads a global process group%0Atake the group as an argument"
    )
    assert absent.startswith("::notice file=pkg/gone.py::SW103 ")
    assert reads == "2 reads in 1 file: 2 accessors"
    assert end.startswith("2 new in 7 files")
    note = Report("groups", (finding(code="SW203"),))
    assert as_github(note).startswith("::notice ")


def github_command(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as GitHub's runner reads it."""
    match = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert match is not None
    undo = (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%"))

    def plain(text: str, pairs: Any) -> str:
        for code, character in pairs:
            text = text.replace(code, character)
        return text

    properties = dict(part.split("=", 1) for part in match[2].split(","))
    return match[1], {k: plain(v, undo) for k, v in properties.items()}, plain(match[3], (*undo[:2], undo[4]))


def test_github_reads_back_what_was_meant() -> None:
    tame = NASTY.replace("\x1b", "")
    report = Report("groups", (finding(tame, message=tame, name=tame, hint=""),))
    _, properties, message = github_command(as_github(report).splitlines()[0])
    assert properties["file"] == tame
    assert properties["line"] == "3"
    assert message == tame


@every
def test_gitlab(report: Report) -> None:
    entries = json.loads(as_gitlab(report))
    assert len({entry["fingerprint"] for entry in entries}) == len(entries)
    for entry in entries:
        assert {"description", "check_name", "fingerprint", "severity", "location"} == entry.keys()
        assert entry["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert entry["location"]["lines"]["begin"] >= 1
    if report is RATCHET:
        assert [entry["severity"] for entry in entries] == ["info", "major", "critical", "info"]


@every
def test_junit_is_read_by_our_own_reader(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "lint.xml"
    path.write_text(as_junit(report), encoding="utf-8")
    assert ElementTree.parse(path).getroot().tag == "testsuite"
    made = read_junit(path).observations
    assert len([o for o in made if str(o.outcome) == "failed"]) == len(report.new)
    assert len(made) == max(1, len(report.new))


def test_markdown_and_statistics() -> None:
    page = as_markdown(RATCHET)
    assert "\n2 reads in 1 file: 2 accessors\n" in page
    assert "| SW101 | accessor of a global process group | 1 | 2 |" in page
    assert "| `pkg/a.py:9:5` | SW101 |" in page
    many = Report("groups", tuple(finding(line=n + 1) for n in range(250)), num_files=1)
    assert "| and 150 more | | |" in as_markdown(many)
    stats = as_stats(RATCHET).splitlines()
    assert "      2  SW101  accessor of a global process group" in stats
    assert "          2  unconditional" in stats
    assert "      4  default-group collectives" in stats
    assert "      2  files with findings, of 7" in stats


# --- SARIF --------------------------------------------------------------------------------------

_LEVELS = ("none", "note", "warning", "error")
_RESULT: Mapping[str, type] = {
    "ruleId": str,
    "ruleIndex": int,
    "level": str,
    "message": dict,
    "locations": list,
    "partialFingerprints": dict,
    "baselineState": str,
    "properties": dict,
    "occurrenceCount": int,
}
_STATES = ("new", "unchanged", "updated", "absent")


def exactly(value: object, kinds: Mapping[str, type], *, needed: str = "") -> dict[str, Any]:
    """An object with these keys only, each of its type, and those that are needed."""
    assert isinstance(value, dict)
    assert value.keys() <= kinds.keys(), value.keys() - kinds.keys()
    assert set(needed.split()) <= value.keys()
    for key, kind in kinds.items():
        if key in value:
            assert isinstance(value[key], kind) and not (kind is int and isinstance(value[key], bool)), key
    return value


def check_message(value: object) -> None:
    assert exactly(value, {"text": str, "markdown": str, "id": str}, needed="text")["text"]


def check_artifact(value: object) -> None:
    place = exactly(value, {"uri": str, "uriBaseId": str, "index": int})
    uri = place["uri"]
    assert re.fullmatch(r"(?:%[0-9A-Fa-f]{2}|[A-Za-z0-9._~/:-])+", uri), (
        "a URI has no other characters (RFC 3986)"
    )
    if "uriBaseId" in place:
        assert not urlsplit(uri).scheme and not uri.startswith("/"), "relative to a base (3.4.4)"
    else:
        assert urlsplit(uri).scheme == "file"


def check_location(value: object) -> None:
    location = exactly(value, {"physicalLocation": dict, "logicalLocations": list, "id": int})
    physical = exactly(
        location["physicalLocation"], {"artifactLocation": dict, "region": dict}, needed="artifactLocation"
    )
    check_artifact(physical["artifactLocation"])
    if "region" in physical:
        region = exactly(
            physical["region"], dict.fromkeys(("startLine", "startColumn", "endLine", "endColumn"), int)
        )
        assert min(region.values()) >= 1
        start = region["startLine"], region["startColumn"]
        assert (region["endLine"], region["endColumn"]) >= start
    for logical in location["logicalLocations"]:
        exactly(logical, {"fullyQualifiedName": str, "name": str, "kind": str})


def check_sarif(text: str) -> dict[str, Any]:
    """A SARIF log that keeps the rules of SARIF 2.1.0, in what this tool writes of it."""
    log = exactly(json.loads(text), {"$schema": str, "version": str, "runs": list}, needed="version runs")
    assert log["version"] == "2.1.0"
    for one in log["runs"]:
        run = exactly(
            one,
            {
                "tool": dict,
                "results": list,
                "columnKind": str,
                "automationDetails": dict,
                "originalUriBaseIds": dict,
            },
            needed="tool",
        )
        assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
        exactly(run["automationDetails"], {"id": str, "guid": str})
        for base in run["originalUriBaseIds"].values():
            check_message(exactly(base, {"uri": str, "description": dict})["description"])
        driver = exactly(
            exactly(run["tool"], {"driver": dict, "extensions": list}, needed="driver")["driver"],
            {"name": str, "semanticVersion": str, "version": str, "rules": list, "informationUri": str},
            needed="name",
        )
        assert re.fullmatch(r"\d+\.\d+\.\d+(?:[-+].*)?", driver["semanticVersion"])
        for rule in driver["rules"]:
            exactly(rule, {"id": str, "shortDescription": dict, "defaultConfiguration": dict}, needed="id")
            check_message(rule["shortDescription"])
            assert exactly(rule["defaultConfiguration"], {"level": str})["level"] in _LEVELS
        ids = [rule["id"] for rule in driver["rules"]]
        assert len(set(ids)) == len(ids), "rules are unique"
        for result in run["results"]:
            exactly(
                result,
                _RESULT,
                needed="message",
            )
            check_message(result["message"])
            assert ids[result["ruleIndex"]] == result["ruleId"]
            assert result["level"] in _LEVELS
            assert result.get("baselineState", "new") in _STATES
            assert result.get("occurrenceCount", 1) >= 1
            assert all(isinstance(mark, str) for mark in result["partialFingerprints"].values())
            for location in result["locations"]:
                check_location(location)
    return log


@functools.cache
def schema() -> Any:
    """A validator of the schema that OASIS publishes."""
    path = Path(__file__).parents[1] / "data" / "sarif" / "sarif-schema-2.1.0.json"
    read = json.loads(path.read_bytes())
    jsonschema.Draft4Validator.check_schema(read)
    return jsonschema.Draft4Validator(read)


@every
def test_sarif_keeps_its_published_schema(report: Report) -> None:
    log = json.loads(as_sarif(report))
    assert [error.json_path for error in schema().iter_errors(log)] == []
    assert log["$schema"] == schema().schema["id"], "it names the schema that it keeps"


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (lambda log: log.update(version="2.0.0"), "$.version"),
        (lambda log: log["runs"][0].pop("tool"), "$.runs[0]"),
        (lambda log: log["runs"][0]["results"][0].update(level="fatal"), "$.runs[0].results[0].level"),
        (lambda log: log["runs"][0]["results"][0].update(kind=1), "$.runs[0].results[0].kind"),
        (lambda log: log["runs"][0]["results"][0].update(other=1), "$.runs[0].results[0]"),
    ],
)
def test_the_schema_sees_a_damaged_log(damage: Any, where: str) -> None:
    log = json.loads(as_sarif(RATCHET))
    damage(log)
    assert where in {error.json_path for error in schema().iter_errors(log)}


@every
def test_sarif_keeps_the_rules(report: Report) -> None:
    log = check_sarif(as_sarif(report))
    (run,) = log["runs"]
    assert len(run["results"]) == len(report.findings) + len(report.absent)
    marks = [result["partialFingerprints"]["shardweaveBaselineKey/v1"] for result in run["results"]]
    assert len(set(marks)) == len(marks)


def test_sarif_says_what_the_baseline_says() -> None:
    def states(report: Report) -> list[str | None]:
        return [result.get("baselineState") for result in json.loads(as_sarif(report))["runs"][0]["results"]]

    assert states(PLAIN) == [None, None, None], "all results have a state or none has (3.27.24)"
    assert states(RATCHET) == ["unchanged", "new", "new", "absent"]
    result = json.loads(as_sarif(PLAIN))["runs"][0]["results"][2]
    assert result["level"] == "error"
    artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert unquote(artifact["uri"]) == "pkg/b c.py"


@pytest.mark.parametrize(
    "damage",
    [
        lambda log: log.update(version="2.0.0"),
        lambda log: log["runs"][0].pop("tool"),
        lambda log: log["runs"][0]["results"][0].pop("message"),
        lambda log: log["runs"][0]["results"][0].update(ruleIndex=1),
        lambda log: log["runs"][0]["results"][0].update(level="fatal"),
        lambda log: log["runs"][0]["results"][0].update(other=1),
        lambda log: log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"].update(
            startLine=0
        ),
        lambda log: log["runs"][0]["results"][0]["locations"][0]["physicalLocation"][
            "artifactLocation"
        ].update(uri="a b.py"),
        lambda log: log["runs"][0]["tool"]["driver"].pop("name"),
    ],
)
def test_the_rules_see_a_damaged_log(damage: Any) -> None:
    log = json.loads(as_sarif(RATCHET))
    damage(log)
    with pytest.raises(AssertionError):
        check_sarif(json.dumps(log))


def test_every_code_has_a_title_for_its_rule() -> None:
    report = Report("groups", tuple(finding(code=code) for code in CODES))
    rules = json.loads(as_sarif(report))["runs"][0]["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted(CODES)
    assert all(rule["shortDescription"]["text"].lower() == CODES[rule["id"]].lower() for rule in rules)
