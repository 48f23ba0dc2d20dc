"""What a recording saw of the places that an inventory lists."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardweave.errors import FormatError
from shardweave.lint.constructors import DIRECT, Inventory
from shardweave.lint.finding import Finding

__all__ = ["Construction", "Joined", "join", "read_recording"]

STATES = ("given", "none", "missing")


@dataclass(frozen=True, slots=True)
class Construction:
    """Constructions of one class from one place, with one state of the argument."""

    cls: str
    """Dotted name of the class that was constructed."""
    state: str
    """What arrived at the recorded ``__init__``: ``given``, ``none`` or ``missing``."""
    frames: tuple[tuple[str, int, str], ...]
    """File, line and function of the place and of its callers."""
    count: int


@dataclass(frozen=True, slots=True)
class Joined:
    """An inventory beside a recording."""

    seen: tuple[Mapping[str, int], ...]
    """For each finding how often each state was seen; empty where none was.

    A place that hands the class on cannot be told from others that do: it has what was constructed of that
    class where nothing in the code names it.
    """
    elsewhere: tuple[Construction, ...]
    """Constructions from no place that names the class."""

    def surprises(self, inventory: Inventory) -> list[int]:
        """Indices of findings whose argument is missing or None in the code and was given in the run."""
        return [
            index
            for index, (finding, seen) in enumerate(zip(inventory.findings, self.seen, strict=True))
            if finding.kind in ("missing", "none", "not-accepted") and seen.get("given")
        ]


def read_recording(path: Path, *, inventory: Inventory) -> list[Construction]:
    """The constructions of a file that ``python -m shardweave.lint.record`` wrote.

    Args:
        path: The file.
        inventory: What it has to be about.

    Raises:
        FormatError: It is no such file, or is about another class or argument.
        OSError: It cannot be read.
    """
    try:
        held = json.loads(path.read_bytes())
        if held["schema"] != 1:
            raise ValueError("schema")
        cls, argument = str(held["class"]).replace(":", "."), held["argument"]
        rows = [
            Construction(
                str(row["class"]).replace(":", ".").replace(".<locals>", ""),
                row["state"],
                tuple((str(file), int(line), str(function)) for file, line, function in row["frames"]),
                int(row["count"]),
            )
            for row in held["constructions"]
        ]
        if any(row.state not in STATES for row in rows):
            raise ValueError("state")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            "a recording is what python -m shardweave.lint.record wrote",
            where=str(path),
            equation=f"{type(error).__name__}: {error}",
            hint="record it again",
        ) from None
    if argument != inventory.argument or not any(_same(cls, name) for name in inventory.family):
        raise FormatError(
            "a recording is about the same class and argument",
            where=str(path),
            equation=f"recorded {argument} of {cls}, asked for {inventory.argument} of {inventory.cls}",
            hint="record with the --class and --arg that are asked for",
        )
    return rows


def join(inventory: Inventory, constructions: list[Construction]) -> Joined:
    """Say of each finding what was seen of it.

    Args:
        inventory: The findings.
        constructions: Of `read_recording`.
    """
    seen: list[Counter[str]] = [Counter() for _ in inventory.findings]
    elsewhere = []
    for made in constructions:
        at = next((n for n, f in enumerate(inventory.findings) if _is_at(f, made)), None)
        if at is not None:
            seen[at][made.state] += made.count
            continue
        if not any(_same(made.cls, name) for name in inventory.family):
            continue  # of a class that the run made, or of another tree
        elsewhere.append(made)
        for n, finding in enumerate(inventory.findings):
            if finding.kind in ("spec", "partial", "partial-bound", "escape") and _same(
                finding.name, made.cls
            ):
                seen[n][made.state] += made.count
    ordered = [{state: counts[state] for state in STATES if counts[state]} for counts in seen]
    return Joined(tuple(ordered), tuple(elsewhere))


def _is_at(finding: Finding, made: Construction) -> bool:
    if finding.kind not in DIRECT or not made.frames:
        return False
    file, line, _ = made.frames[0]
    place = file.replace("\\", "/")
    return finding.line <= line <= finding.end_line and (
        place == finding.path or place.endswith("/" + finding.path.lstrip("./"))
    )


def _same(first: str, second: str) -> bool:
    """Whether two dotted names may be of one class: a tree may begin further in than its import names do."""
    return first == second or first.endswith("." + second) or second.endswith("." + first)
