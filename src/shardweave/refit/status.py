"""What a store says of the refits in it. Reads only, and what it reads is bounded.

>>> from torch.distributed import HashStore
>>> from shardweave.refit.notes import Notes
>>> store = HashStore()
>>> notes = Notes(store.set, rank=4, role="receiver", layout="vllm, tp 2", transport="gloo", timeout_s=60.0)
>>> notes.come(publishers=(0, 1, 2, 3), receivers=(4,))
>>> found = look(store)
>>> found.members.receivers, found.notes[4].layout, found.one_version
((4,), 'vllm, tp 2', None)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import msgspec

from shardweave.errors import FormatError, ShardweaveError, TransportError
from shardweave.refit.meeting import Outcome
from shardweave.refit.notes import Note, Planned, Seats

PREFIX = "shardweave/refit"
"""Where the keys of a session begin."""
PHASES = ("hello", "ready", "vote")
"""What every rank says in a turn, in this order; see ``session``."""

MOST_BYTES = 1 << 16
"""The most that is read of a note."""
MOST_RANKS = 1 << 16
"""The most ranks that are looked for."""
_MOST_TURNS = 10_000


@dataclass(frozen=True, slots=True)
class Members:
    """Who takes part in a session, and what it was given."""

    publishers: tuple[int, ...]
    receivers: tuple[int, ...]
    transport: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Status:
    """What a store says of a session, at one moment.

    Attributes:
        members: Who takes part.
        notes: What ranks left; those that left nothing are not there.
        plans: What plans come to, by the first rank of the engine.
        turn: The turn that is open, or comes next.
        phase: What the open turn waits for: one of ``PHASES``, or empty where no rank has begun it.
        missing: The ranks that it waits for.
        last: How the turn before ended, if there was one.
        damaged: What cannot be read, by its key.
    """

    members: Members
    notes: Mapping[int, Note]
    plans: Mapping[int, Planned]
    turn: int
    phase: str
    missing: tuple[int, ...]
    last: Outcome | None
    damaged: Mapping[str, str]

    @property
    def versions(self) -> Mapping[int | None, tuple[int, ...]]:
        """The receivers by the version that they serve; ``None`` for those of which none is known."""
        found: dict[int | None, list[int]] = {}
        for rank in self.members.receivers:
            note = self.notes.get(rank)
            found.setdefault(None if note is None else note.version, []).append(rank)
        return {version: tuple(ranks) for version, ranks in found.items()}

    @property
    def one_version(self) -> int | None:
        """The version that all receivers serve, if they serve one."""
        (version, *others) = self.versions
        return None if others else version

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks whose last refit did not succeed."""
        return tuple(rank for rank, note in self.notes.items() if note.error)

    @property
    def is_well(self) -> bool:
        """Whether all receivers serve one version, no last refit failed, and all notes are readable."""
        return self.one_version is not None and not self.failed and not self.damaged


def look(store: Any) -> Status:
    """What the ranks of a session left in its store. Reads only; what it reads is bounded.

    Args:
        store: Under the session's prefix: anything with torch's ``check`` and ``get``.

    Raises:
        TransportError: No session has begun here, or the store does not answer.
        FormatError: What ranks say of the session itself is none.
    """
    try:
        return _look(store)
    except ShardweaveError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        raise TransportError(
            "the store of a refit answers",
            equation=f"{type(error).__name__}: {error!s:.200}",
            hint="look whether the process that serves it is alive and reachable from here",
        ) from error


def _look(store: Any) -> Status:
    members = _members(store)
    damaged: dict[str, str] = {}
    ranks = sorted({*members.publishers, *members.receivers})
    notes = {rank: note for rank in ranks if (note := _read(store, f"status/{rank}", Note, damaged))}
    plans = {
        rank: found
        for rank in members.receivers
        if (found := _read(store, f"status/plan/{rank}", Planned, damaged))
    }
    turn, last = _turn(store, damaged)
    phase, missing = _waiting(store, turn, ranks)
    return Status(members, notes, plans, turn, phase, missing, last, damaged)


def _members(store: Any) -> Members:
    damaged: dict[str, str] = {}
    found = _read(store, "status/members", Seats, damaged)
    if damaged:
        _not_a_note(*next(iter(damaged.items())))
    if found is None:
        raise TransportError(
            "a session has begun in the store",
            where="key 'status/members'",
            equation=f"keys under {PREFIX!r}: none",
            hint="wait for the first publish() or receive(); where the session was given a PrefixStore, name "
            "its prefix with --prefix",
        )
    sides = []
    for said in (found.publishers, found.receivers):
        if sum(count for _, count in said) > MOST_RANKS:
            _not_a_note("status/members", f"more than {MOST_RANKS} ranks")
        sides.append(tuple(chain.from_iterable(range(first, first + count) for first, count in said)))
    if not sides[1]:
        _not_a_note("status/members", "receivers(0)")
    return Members(sides[0], sides[1], found.transport, found.timeout_s)


def _not_a_note(key: str, what: str) -> NoReturn:
    raise FormatError(
        "what a rank leaves for people is readable",
        where=f"key {key!r}",
        equation=what,
        hint="look with the version of shardweave that the ranks have; nobody else writes there",
    )


def _get(store: Any, key: str) -> bytes | None:
    # Asked for a key that is not there, a store waits for it.
    return bytes(store.get(key)) if store.check([key]) else None


def _read(store: Any, key: str, kind: Any, damaged: dict[str, str]) -> Any:
    data = _get(store, key)
    if data is None:
        return None
    if len(data) > MOST_BYTES:
        damaged[key] = f"bytes({len(data)}) > {MOST_BYTES}"
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        damaged[key] = f"{error!s:.200}"
        return None


def _turn(store: Any, damaged: dict[str, str]) -> tuple[int, Outcome | None]:
    """The first turn without an outcome, as ``meeting`` finds it, and how the one before ended."""
    data = _get(store, "turn") or b"0"
    if not (data.isdigit() and len(data) < 19):
        damaged["turn"] = f"{data[:20]!r} is no number"
        return 0, None
    turn, said = int(data), None
    for turn in range(int(data), int(data) + _MOST_TURNS):
        found = _get(store, f"{turn}/outcome")
        if found is None:
            break
        said = found
    said = _get(store, f"{turn - 1}/outcome") if said is None and turn else said
    if said is None:
        return turn, None
    key = f"{turn - 1}/outcome"
    if len(said) > MOST_BYTES:
        damaged[key] = f"bytes({len(said)}) > {MOST_BYTES}"
        return turn, None
    try:
        last = Outcome.decode(said)
        if not (isinstance(last.kind, str) and isinstance(last.rank, int)):
            raise TypeError("no outcome of a turn")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        damaged[key] = f"{error!s:.200}"
        return turn, None
    return turn, last


def _waiting(store: Any, turn: int, ranks: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """What the open turn waits for, and whom."""
    for phase in PHASES:
        keys = {rank: f"{turn}/{phase}/{rank}" for rank in ranks}
        if store.check(list(keys.values())):
            continue
        missing = tuple(rank for rank, key in keys.items() if not store.check([key]))
        if phase == "hello" and len(missing) == len(ranks):
            return "", ()
        return phase, missing
    return PHASES[-1], ()
