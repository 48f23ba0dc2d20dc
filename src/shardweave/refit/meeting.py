"""Where the ranks of a refit meet: a key-value store that is passed in, and turns that end one way for all.

A *turn* is one try at bringing a version to all receivers. Its outcome is one key of the store that is
written by compare-and-set, so that it is written once: whoever comes first decides, and everybody else,
a rank that was slow, failed or comes late included, reads the same. That is all the agreement there is:
no rank is in charge, and none has to live for the others to know how a turn ended.

The turn that is open is the first without an outcome. A rank that was restarted needs to know nothing more
to take part in it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import shardweave.errors
from shardweave.errors import ShardweaveError, TransportError, TransportTimeoutError
from shardweave.layout.layout import format_ranks
from shardweave.move.asking import Asker

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

COMMIT, ABORT, AGAIN = "commit", "abort", "again"
MOST_BLOB_BYTES = 1 << 28
"""The most that anybody reads of what another rank put into the store."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a turn ended, the same for everybody.

    Attributes:
        kind: ``commit``, ``abort``, or ``again``, which is an abort that is tried once more.
        rank: Who decided.
        error: Why not, unless it is a commit.
    """

    kind: str
    rank: int
    error: ShardweaveError | None = None

    def __bytes__(self) -> bytes:
        said: list[Any] = [self.kind, self.rank]
        if self.error is not None:
            e = self.error
            said += [type(e).__name__, e.rule, e.where, e.equation, e.hint]
        return json.dumps(said).encode()

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        """The outcome that ``bytes()`` wrote."""
        kind, rank, *error = json.loads(data)
        return cls(kind, rank, _error(rank, *error) if error else None)


def _error(rank: int, name: str, rule: str, where: str, equation: str, hint: str) -> ShardweaveError:
    """An error of another rank, of the class that it had there."""
    found = getattr(shardweave.errors, name, None)
    kind = found if isinstance(found, type) and issubclass(found, ShardweaveError) else TransportError
    told = where if where.startswith("rank ") else f"rank {rank}" + (f", {where}" if where else "")
    return kind(rule, where=told, equation=equation, hint=hint)


class Ended(Exception):  # noqa: N818 - no error: it says how a turn ended
    """A turn ended while this rank was waiting in it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.kind)
        self.outcome = outcome


class Meeting:
    """One rank's seat among those that meet in a store."""

    def __init__(
        self, *, store: Store, ranks: Sequence[int], rank: int, instance: str, timeout_s: float = 60.0
    ) -> None:
        """Take a seat.

        Args:
            store: Any store of torch that all ranks reach and nobody else writes to; put a ``PrefixStore``
                around one that is shared.
            ranks: All that take part, the same on each.
            rank: This one.
            instance: Of this process, so that a restarted one is told from the one before it.
            timeout_s: The longest that any wait takes.

        Attributes:
            turn: The number of the turn; -1 before the first.
            has_voted: Whether the turn may be committed without anything further from this rank.
        """
        self.ranks, self.rank, self.instance, self.timeout_s = tuple(ranks), rank, instance, timeout_s
        self.turn, self.has_voted = -1, False
        self._store: Any = store  # its stub knows no bytes
        self._asker = Asker()
        self._mine: list[str] = []

    def open(self, *, kind: str = AGAIN) -> int:
        """Take part in the turn that is open; returns its number.

        A rank takes part in a turn once, and as one process: what it said there commits it. Where it was
        interrupted, or is started again, in the middle of a turn, it ends that turn and opens the next.

        Args:
            kind: How it ends it.

        Raises:
            TransportError, TransportTimeoutError: The store does not answer.
        """
        while True:
            turn: int = self._ask(self._first)
            seat = f"{turn}/seat/{self.rank}"
            taken = self._once(seat, self.instance).decode()
            left, self.turn = self.turn == turn, turn
            if taken == self.instance and not left:
                break
            self.end(self._twice(taken), kind=kind)
        self._mine.append(seat)
        self.has_voted = False
        return turn

    def _first(self) -> int:
        turn = int(self._store.get("turn")) if self._store.check(["turn"]) else 0
        while self._store.check([f"{turn}/outcome"]):
            turn += 1
        return turn

    def _twice(self, taken: str) -> TransportError:
        return TransportError(
            "a rank takes part in a turn once, as one process",
            where=f"rank {self.rank}, turn {self.turn}",
            equation=f"process({self.instance}) comes where process({taken}) took part",
            hint="nothing, if this rank was interrupted or started again; else two processes have one rank",
        )

    def exchange(self, phase: str, value: bytes) -> dict[int, bytes]:
        """Say something and hear what every rank says. Returns on no rank before all have said it.

        Raises:
            Ended: The turn has ended instead, here also because ranks did not come in time.
            TransportError: The store does not answer.
        """
        keys = self._keys(phase)
        self.say(f"{phase}/{self.rank}", value)
        ended = self._wait(phase, keys)
        if ended is not None:
            raise Ended(ended)
        said: dict[int, bytes] = self._ask(lambda: {rank: self._store.get(key) for rank, key in keys.items()})
        return said

    def say(self, key: str, value: bytes) -> None:
        """Say something in this turn that others look up."""
        name = f"{self.turn}/{key}"
        self._ask(lambda: self._store.set(name, value))
        self._mine.append(name)

    def heard(self, key: str) -> bytes:
        """What was said in this turn; empty if nothing was."""
        name = f"{self.turn}/{key}"
        said: bytes = self._ask(lambda: self._store.get(name) if self._store.check([name]) else b"")
        return said

    def decide(self) -> Outcome:
        """Say that this rank is ready, and hear how the turn ends: a commit once every rank has said so.

        Nothing that happens to this rank from here on can end the turn otherwise: it waits, and then does
        as the outcome says.

        Raises:
            TransportError: The store does not answer, so that the outcome is not known here.
        """
        self.has_voted = True
        self.say(f"vote/{self.rank}", b"ready")
        ended = self._wait("vote", self._keys("vote"))
        return ended or self._settle(Outcome(COMMIT, self.rank))

    def end(self, error: BaseException, *, kind: str = ABORT) -> Outcome:
        """End the turn with an error, unless it has ended already; returns how it ended."""
        return self._settle(Outcome(kind, self.rank, named(error, self.rank)))

    def outcome(self) -> Outcome | None:
        """How the turn ended, if it has."""
        found = self.heard("outcome")
        return Outcome.decode(found) if found else None

    def _settle(self, wanted: Outcome) -> Outcome:
        found = self._once(f"{self.turn}/outcome", bytes(wanted).decode())
        with contextlib.suppress(ShardweaveError):  # where to begin to look for the next turn, no more
            self._ask(lambda: self._store.set("turn", str(self.turn + 1).encode()))
        return Outcome.decode(found)

    def _once(self, key: str, value: str) -> bytes:
        """Write a key that is written once; returns what was written."""
        found: bytes = self._ask(lambda: self._store.compare_set(key, "", value))
        return found

    # --- what is said once and read by its name ---

    def put(self, blob: bytes) -> str:
        """Store bytes under their digest, once; returns it."""
        name = blake2b(blob, digest_size=16).hexdigest()
        self._ask(lambda: self._store.check([f"blob/{name}"]) or self._store.set(f"blob/{name}", blob))
        return name

    def get(self, name: str) -> bytes:
        """The bytes of a digest.

        Raises:
            TransportError: They are not there, or are others.
        """
        blob: bytes = self._ask(
            lambda: self._store.get(f"blob/{name}") if self._store.check([f"blob/{name}"]) else b""
        )
        found = blake2b(blob, digest_size=16).hexdigest()
        if found != name:
            raise TransportError(
                "what a rank says of itself is in the store under its digest",
                where=f"rank {self.rank} reads",
                equation=f"blake2b({found}) != {name}",
                hint="somebody else writes to this store; put a PrefixStore around it",
            )
        return blob

    def note(self, key: str, value: bytes) -> None:
        """Leave something for whoever looks; it takes part in no decision."""
        self._ask(lambda: self._store.set(key, value))

    def clear(self) -> None:
        """Take back what this rank said in turns that are over for everybody."""
        old, self._mine = self._mine, []
        kept = f"{self.turn}/"
        for key in old:
            if key.startswith(kept):
                self._mine.append(key)
            else:
                self._ask(functools.partial(self._store.delete_key, key))

    # --- waiting ---

    def _keys(self, phase: str) -> dict[int, str]:
        """Where each rank says something in a phase."""
        return {rank: f"{self.turn}/{phase}/{rank}" for rank in self.ranks}

    def _wait(self, phase: str, keys: Mapping[int, str]) -> Outcome | None:
        """Until all keys are there, or the turn has ended; it ends here when time is up."""
        begin, wanted = time.monotonic(), list(keys.values())
        while not self._ask(lambda: self._store.check(wanted)):
            ended = self.outcome()
            if ended is None and time.monotonic() - begin > self.timeout_s:
                missing = [rank for rank, key in keys.items() if not self._ask(_there(self._store, key))]
                ended = self.end(self._late(phase, missing))
            if ended is not None:
                return ended
            # Who looks late keeps all others waiting: by a small part of the wait so far, and never long.
            time.sleep(min(max(0.0005, (time.monotonic() - begin) / 32), 0.02))
        return None

    def _late(self, phase: str, missing: list[int]) -> TransportTimeoutError:
        return TransportTimeoutError(
            "every rank of a refit does its part in time",
            where=f"rank {self.rank} waits for {format_ranks(missing)}, phase {phase!r} of turn {self.turn}",
            equation=f"{len(missing)} of {len(self.ranks)} ranks missing after timeout_s({self.timeout_s:g})",
            hint="look at the logs of these ranks: gone, stalled or never called; if slow, raise timeout_s",
        )

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return self._asker.ask(question, within_s=self.timeout_s)
        except (RuntimeError, OSError, ValueError) as error:
            late = isinstance(error, TimeoutError)
            raise (TransportTimeoutError if late else TransportError)(
                "the store of a refit answers",
                where=f"rank {self.rank}, turn {self.turn}",
                equation=f"{type(error).__name__}: {error!s:.200}",
                hint="the process that serves the store is gone or stalls; start a session with a new store. "
                "What is served is unchanged, unless this rank had voted: then its version is unknown",
            ) from error


def _there(store: Any, key: str) -> Callable[[], bool]:
    return lambda: bool(store.check([key]))


def named(error: BaseException, rank: int) -> ShardweaveError:
    """An error as one of this package's, so that it can be told to others in four parts."""
    if isinstance(error, ShardweaveError):
        return error
    return TransportError(
        "a refit is done on all ranks or on none",
        where=f"rank {rank}",
        equation=f"{type(error).__name__}: {error}"[:400],
        hint="mend what that rank reports; every receiver still serves what it served",
    )
