"""What the ranks of a refit leave in its store for people; ``status`` reads it.

A note takes part in no decision: one that cannot be written is not written, one that is missing, old or
damaged changes nothing but what is shown. Each rank leaves one when it comes for the first time and one at
the end of each refit, some hundred bytes; the first rank of each engine adds what the plan comes to.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from shardweave.errors import ShardweaveError
from shardweave.layout import Layout
from shardweave.plan import cost

if TYPE_CHECKING:
    from shardweave.refit.session import Refit
    from shardweave.refit.world import Way

# Bounds of what is read: whoever can write to the store may have written it.
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Turn = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Stretches = Annotated[list[tuple[Rank, Count]], msgspec.Meta(max_length=4096)]


class Seats(msgspec.Struct, frozen=True):
    """Who takes part, as stretches of ranks; every rank leaves the same."""

    publishers: Stretches
    receivers: Stretches
    transport: Text
    timeout_s: Amount


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank did last.

    Attributes:
        role: What it is.
        host, pid: Where it runs.
        layout: The dialect and the mesh of its layout.
        time: When the note was left, in seconds since the epoch, by the clock of its host.
        version: Of a receiver: what it serves. Of a publisher: what it last brought to all receivers.
        turn, changed, tries, bytes_sent, bytes_received, num_copies, seconds: Of the last refit that
            succeeded, as in ``Refit``; the turn is -1 before there is one.
        error: Why the last refit did not succeed; empty if it did.
        failed_turn: The turn in which that was.
        offered: The version that it was about, where the rank knows it.
    """

    role: Literal["publisher", "receiver"]
    host: Text
    pid: Count
    layout: Text
    time: Amount
    version: Count | None = None
    turn: Turn = -1
    changed: bool = False
    tries: Count = 0
    bytes_sent: Count = 0
    bytes_received: Count = 0
    num_copies: Count = 0
    seconds: Annotated[dict[Text, Amount], msgspec.Meta(max_length=16)] = {}
    error: Text = ""
    failed_turn: Turn = -1
    offered: Count | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes that crossed between this rank and others."""
        return self.bytes_sent + self.bytes_received

    @property
    def bytes_per_s(self) -> float:
        """While they were moved, with the waiting for other ranks that this took; 0 where nothing was."""
        stage = self.seconds.get("stage", 0.0)
        return self.bytes_moved / stage if stage else 0.0


class Planned(msgspec.Struct, frozen=True):
    """What the plan to one engine comes to.

    Attributes:
        first_rank, num_ranks: The engine.
        source, engine: The two layouts, as ``Note.layout``.
        families: Tensors, a family over layers and experts being one.
        copies: Strided copies over all ranks.
        bytes, needed_bytes: What is copied, and what the engine holds.
        send_imbalance, receive_imbalance: The busiest rank over the mean.
        steps: Buffers whose values are converted after landing.
    """

    first_rank: Rank
    num_ranks: Count
    source: Text
    engine: Text
    families: Count
    copies: Count
    bytes: Count
    needed_bytes: Count
    send_imbalance: Amount
    receive_imbalance: Amount
    steps: Count


def described(layout: Layout) -> str:
    """A layout in a few words: its dialect, and the axes that are no 1.

    >>> from shardweave.layout import Mesh
    >>> described(Layout("vllm", Mesh((("tp", 2), ("dp", 1)), offset=8), ()))
    'vllm, tp 2'
    """
    axes = [f"{name} {size}" for name, size in layout.mesh.sizes.items() if size > 1]
    return _shortened(", ".join([layout.name, *axes]))


class Notes:
    """What one rank leaves. Nothing here fails a refit or waits longer than the store does."""

    def __init__(
        self,
        put: Callable[[str, bytes], object],
        *,
        rank: int,
        role: Literal["publisher", "receiver"],
        layout: str,
        transport: str,
        timeout_s: float,
    ) -> None:
        """Prepare the notes of a rank; nothing is written yet.

        Args:
            put: Puts a value under a key into the session's store, under its own prefix.
            rank: The rank.
            role: What it is.
            layout: Its layout, as ``described``.
            transport: The name of the transport.
            timeout_s: The session's bound.
        """
        self._put_value, self._rank = put, rank
        self._transport, self._timeout_s = transport, timeout_s
        host = _shortened(socket.gethostname())
        self._note = Note(role=role, host=host, pid=os.getpid(), layout=layout, time=time.time())
        self._come: object = None
        self._planned: str = ""

    def come(self, *, publishers: Sequence[int], receivers: Sequence[int]) -> None:
        """Say who takes part, where that is new."""
        if self._come == (publishers, receivers):
            return
        said = Seats(stretches(publishers), stretches(receivers), self._transport, self._timeout_s)
        self._put("members", said)
        if self._come is None:
            self._put(str(self._rank), self._note)
        self._come = publishers, receivers

    def succeeded(self, done: Refit, way: Way | None) -> None:
        """A refit was committed.

        Args:
            done: What it came to.
            way: How content came to this rank's engine, where it did.
        """
        kept = {name: getattr(self._note, name) for name in ("role", "host", "pid", "layout")}
        told = {name: getattr(done, name) for name in done.__slots__}
        self._note = Note(**kept, time=time.time(), **told)
        self._put(str(self._rank), self._note)
        if way is not None and way.engine.mesh.ranks[0] == self._rank and way.key != self._planned:
            self._planned = way.key
            self._put(f"plan/{self._rank}", _planned(way))

    def failed(self, error: ShardweaveError, *, turn: int, version: int | None, in_doubt: bool) -> None:
        """A refit ended for good with an error.

        Args:
            error: Why.
            turn: The turn in which that was.
            version: What a publisher offered, and what a receiver serves.
            in_doubt: A receiver cannot know what it serves.
        """
        is_publisher = self._note.role == "publisher"
        self._note = msgspec.structs.replace(
            self._note,
            version=self._note.version if is_publisher else None if in_doubt else version,
            offered=version if is_publisher else None,
            time=time.time(),
            error=_shortened(f"{type(error).__name__}: {error}"),
            failed_turn=turn,
        )
        self._put(str(self._rank), self._note)

    def _put(self, key: str, said: msgspec.Struct) -> None:
        # A store that is gone ends the turn by itself, with the right error.
        with contextlib.suppress(ShardweaveError):
            self._put_value(f"status/{key}", msgspec.json.encode(said))


def _planned(way: Way) -> Planned:
    found = cost(way.plan)
    return Planned(
        first_rank=way.engine.mesh.offset,
        num_ranks=way.engine.mesh.size,
        source=described(way.plan.src),
        engine=described(way.engine),
        families=len({family.tensor for family in way.plan.families}),
        copies=found.num_copies,
        bytes=found.num_bytes,
        needed_bytes=found.needed_bytes,
        send_imbalance=found.send_imbalance,
        receive_imbalance=found.receive_imbalance,
        steps=len(way.steps),
    )


def _shortened(text: str, most: int = 2000) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def stretches(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ranks as first ranks and counts.

    >>> stretches((0, 1, 2, 7, 9, 10))
    [(0, 3), (7, 1), (9, 2)]
    """
    found: list[tuple[int, int]] = []
    for rank in ranks:
        if found and sum(found[-1]) == rank:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((rank, 1))
    return found
