"""Every public report on formats and conversions has a test, and the lists of ``README.md`` say which.

``SHARDWEAVE_UPDATE_GOLDEN=1`` writes the lists.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("README.md")
REPORTS: dict[str, Any] = json.loads((TESTS / "data/public_reports/reports.json").read_text())
BEGIN, END = "<!-- made by test_reports.py -->", "<!-- end -->"


@cache
def every_test() -> tuple[tuple[str, str], ...]:
    """The file and name of every test that says which report it is of, or what it is of."""
    return tuple(
        (f"{path.relative_to(TESTS)}", node.name)
        for folder in ("cases", "oracle", "hostile")
        for path in sorted((TESTS / folder).glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def named(*parts: str) -> list[tuple[str, str]]:
    """The tests whose names have one of these parts, between underscores."""
    return [(file, name) for file, name in every_test() if any(f"_{part}_" in f"{name}_" for part in parts)]


def entries() -> Iterator[tuple[str, list[str]]]:
    """What has to have a test, and the parts of names that say so; one of each."""
    for report in REPORTS["reports"]:
        yield f"{report['id']} {report['name']}", [report["id"].lower()]
    for key in ("issues", "silent"):
        for entry in REPORTS[key]:
            for part in entry["tests"]:
                yield f"{entry.get('name', key)}: {entry['about']}, {part}", [part]


@pytest.mark.parametrize(("what", "parts"), list(entries()), ids=[what for what, _ in entries()])
def test_it_has_a_test(what: str, parts: list[str]) -> None:
    assert named(*parts), f"no test is named after {what}"


def lists() -> str:
    rows = []
    for kind, about in REPORTS["kinds"].items():
        rows += [f"## {about}", "", "| report | tests |", "|---|---|"]
        for report in REPORTS["reports"]:
            if report["kind"] == kind:
                what = f"{report['id']}: [{report['name']}]({report['url']})"
                rows.append(f"| {what} | {cell(report['id'].lower())} |")
        rows.append("")
    rows += ["## Further threads", "", "| threads | about | tests |", "|---|---|---|"]
    rows += [f"| {one['name']} | {one['about']} | {cell(*one['tests'])} |" for one in REPORTS["issues"]]
    rows += ["", "## What DeepSpeed 0.19.8 takes without a word", "", "| what | tests |", "|---|---|"]
    rows += [f"| {one['about']} | {cell(*one['tests'])} |" for one in REPORTS["silent"]]
    return "\n".join(rows)


def cell(*parts: str) -> str:
    found: dict[str, list[str]] = {}
    for file, name in named(*parts):
        found.setdefault(file, []).append(f"`{name.removeprefix('test_')}`")
    return "; ".join(f"[{Path(file).stem}](../{file}): {', '.join(names)}" for file, names in found.items())


def test_the_lists_are_those_of_the_tests() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n\n{lists()}\n\n{END}{after}"
    if os.environ.get("SHARDWEAVE_UPDATE_GOLDEN"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made, "run this test with SHARDWEAVE_UPDATE_GOLDEN=1"
