"""What the tests of the command share: a finished run, and which texts are golden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

UPDATE = "SHARDWEAVE_UPDATE_GOLDEN"
"""Set to 1 to write golden files and the help in docs/commands.md anew."""


@dataclass(frozen=True)
class Done:
    """What a run printed and how it ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]
