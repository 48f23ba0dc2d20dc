"""An inventory of constructors as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import asdict
from typing import Any

from shardweave import __version__
from shardweave.lint.constructors import KINDS, Inventory
from shardweave.lint.recorded import Joined
from shardweave.lint.shown import code_span, one_line

__all__ = ["SCHEMA", "as_json", "as_text"]

SCHEMA = 1
"""Version of the JSON form. It grows when a key changes its meaning or goes; new keys do not count."""

_SHOWN = 100
"""Places that Markdown lists, whose readers limit its size."""
_QUIET = frozenset(
    (
        "keyword",
        "positional",
        "supplied",
        *(f"super-{kind}" for kind in ("keyword", "positional", "supplied")),
    )
)
"""Kinds with which nothing is to be done."""


def as_text(
    inventory: Inventory,
    joined: Joined | None = None,
    *,
    every: bool = False,
    unwanted: Set[int] = frozenset(),
) -> str:
    """A line for each place where something may be to do, and a table.

    Args:
        inventory: What was found.
        joined: What a recording saw of it.
        every: List the places that give the argument too.
        unwanted: Indices of findings that are not listed. Those that comments allow are not either.
    """
    lines = []
    surprises = set(joined.surprises(inventory)) if joined is not None else set()
    for index, finding in enumerate(inventory.findings):
        if (finding.kind in _QUIET and not every) or index in unwanted or index in inventory.allowed:
            continue
        place = f"{one_line(finding.path)}:{finding.line}:{finding.column}"
        lines.append(f"{place} {finding.code} {one_line(finding.message)}")
        lines.append(f"    {one_line(finding.hint)}")
        if joined is not None:
            lines.append(f"    {_seen(joined, index, surprises)}")
    if joined is not None:
        for made in joined.elsewhere:
            file, line, function = made.frames[0] if made.frames else ("?", 0, "?")
            lines.append(
                one_line(
                    f"{file}:{line}: {function} constructed {made.cls} {made.count} times, unnamed there:"
                )
                + f" {inventory.argument} {made.state}"
            )
    lines += [f"{one_line(reason)}" for reason in inventory.unread]
    if lines:
        lines.append("")
    return "\n".join([*lines, *_table(inventory), *_apart(inventory, unwanted)]) + "\n"


def as_markdown(inventory: Inventory, *, every: bool = False, unwanted: Set[int] = frozenset()) -> str:
    """A summary for a page of a CI: the table, and a row for each place where something may be to do.

    Args:
        inventory: What was found.
        every: List the places that give the argument too.
        unwanted: Indices of findings that are not listed. Those that comments allow are not either.
    """
    name, cls = code_span(inventory.argument), code_span(inventory.cls)
    lines = [f"### shardweave lint constructors: {name} of {cls}", ""]
    kinds = list(inventory.counts())
    if kinds:
        lines += [f"| | {' | '.join(kinds)} |", f"|---|{'---:|' * len(kinds)}"]
        rows = [(code_span(member), inventory.counts(member)) for member in inventory.family]
        for head, counts in (*rows, *([("all", inventory.counts())] if len(rows) > 1 else [])):
            lines.append(f"| {head} | {' | '.join(str(counts.get(kind, 0)) for kind in kinds)} |")
    else:
        lines.append(f"Nobody constructs it in {inventory.num_files} files.")
    listed = [
        finding
        for index, finding in enumerate(inventory.findings)
        if (every or finding.kind not in _QUIET) and index not in unwanted and index not in inventory.allowed
    ]
    if listed:
        lines += ["", "| place | code | | to do |", "|---|---|---|---|"]
        for finding in listed[:_SHOWN]:
            place = code_span(f"{finding.path}:{finding.line}:{finding.column}")
            said, hint = code_span(finding.message), code_span(finding.hint)
            lines.append(f"| {place} | {finding.code} | {said} | {hint} |")
        if len(listed) > _SHOWN:
            lines.append(f"| and {len(listed) - _SHOWN} more | | | |")
    for line in _apart(inventory, unwanted):
        lines += ["", line]
    return "\n".join(lines) + "\n"


def _apart(inventory: Inventory, unwanted: Set[int]) -> list[str]:
    """How many of the table are not listed for another reason than their kind."""
    allowed, ignored = len(inventory.allowed), len(unwanted - inventory.allowed)
    said = [f"{allowed} allowed by comments"] if allowed else []
    said += [f"{ignored} left out by the settings"] if ignored else []
    return [f"not listed: {', '.join(said)}"] if said else []


def _seen(joined: Joined, index: int, surprises: Set[int]) -> str:
    seen = joined.seen[index]
    if not seen:
        return "not seen in the recorded run"
    said = ", ".join(f"{state} {count}" for state, count in seen.items())
    return f"seen in the recorded run: {said}" + (": given on the way" if index in surprises else "")


def _table(inventory: Inventory) -> list[str]:
    kinds = [kind for kind in KINDS if any(f.kind == kind for f in inventory.findings)]
    last = [name.rpartition(".")[2] for name in inventory.family]
    rows = [["", *kinds]]
    for name, short in zip(inventory.family, last, strict=True):
        counts = inventory.counts(name)
        rows.append([name if last.count(short) > 1 else short, *(str(counts.get(kind, 0)) for kind in kinds)])
    if len(inventory.family) > 1:
        counts = inventory.counts()
        rows.append(["all", *(str(counts[kind]) for kind in kinds)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{inventory.argument} of {inventory.cls}, which {inventory.init} takes"]
    if kinds:
        for head, *cells in rows:
            shown = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            lines.append(f"{head:<{widths[0]}}{shown}".rstrip())
    else:
        lines.append(f"nobody constructs it in {inventory.num_files} files")
    if inventory.apart:
        lines.append(f"do not reach it: {', '.join(inventory.apart)}")
    return lines


def as_json(inventory: Inventory, joined: Joined | None = None) -> str:
    """All of it as one JSON object.

    Args:
        inventory: What was found.
        joined: What a recording saw of it.
    """
    findings: list[dict[str, Any]] = [asdict(finding) for finding in inventory.findings]
    for index, finding in enumerate(findings):
        finding["allowed"] = index in inventory.allowed
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": "shardweave lint constructors",
        "version": __version__,
        "class": inventory.cls,
        "argument": inventory.argument,
        "init": inventory.init,
        "family": list(inventory.family),
        "apart": list(inventory.apart),
        "num_files": inventory.num_files,
        "unread": list(inventory.unread),
        "counts": inventory.counts(),
        "counts_by_class": {name: inventory.counts(name) for name in inventory.family},
        "findings": findings,
    }
    if joined is not None:
        surprises = set(joined.surprises(inventory))
        for index, finding in enumerate(findings):
            finding["seen"] = dict(joined.seen[index])
            finding["given_on_the_way"] = index in surprises
        made["elsewhere"] = [asdict(construction) for construction in joined.elsewhere]
    return json.dumps(made, indent=2) + "\n"
