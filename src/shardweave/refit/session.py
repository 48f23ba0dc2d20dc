"""Turns: how a version gets from publishers to receivers, all of them or none.

A turn has five steps, and an outcome that is decided once (see ``meeting``):

1. *hello*: who is there, which version is offered, which is served, which layouts. Every rank concludes
   the same world of it, plans and proves it where it is new, and refuses it where it is not sound.
2. *seal*: publishers say what the content that they are about to send comes to, and what replicas of it
   come to; receivers have room.
3. *stage*: the copies, into arrays that nobody serves.
4. *verify*: what arrived comes to what was sealed; the engine derives what it makes of it.
5. *vote*: once every rank is ready the turn is committed, and receivers serve what they staged.

Whatever fails before the last vote ends the turn for all ranks with one error, and everybody still serves
what they served. Every wait has the session's bound.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from shardweave import __version__
from shardweave.errors import DigestError, GeometryError, PlanError, ShardweaveError, TransportError
from shardweave.layout import Layout
from shardweave.move import MEMORY_BYTES, Schedule, Transport, replay, schedule
from shardweave.move.executor import Progress
from shardweave.refit import replicas, values, verify
from shardweave.refit.meeting import ABORT, AGAIN, COMMIT, Ended, Meeting, Outcome, named
from shardweave.refit.notes import Notes, described
from shardweave.refit.sources import Source
from shardweave.refit.target import Target
from shardweave.refit.transports import Maker, maker
from shardweave.refit.waiting import uninterrupted
from shardweave.refit.world import Hello, Way, World, Worlds, decode_hello, encode_hello, manifest_of

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    Arrays = Mapping[str, torch.Tensor]

_MOST_SCHEDULES = 16
_NO_MOVE = (0, 0)


@dataclass(frozen=True, slots=True)
class Refit:
    """What bringing a version to all receivers came to on one rank.

    Attributes:
        version: The version that all receivers serve now.
        turn: The number of the turn that was committed.
        changed: Whether any receiver had to receive; a version that all serve already moves nothing.
        tries: Turns that it took; more than one where content changed on its way.
        bytes_sent, bytes_received: With other ranks, as the transport counted them.
        num_copies: Copies that this rank took part in.
        seconds: How long each step took here, with the wait for others; by name.
    """

    version: int
    turn: int
    changed: bool
    tries: int = 1
    bytes_sent: int = 0
    bytes_received: int = 0
    num_copies: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """What one rank brings to a turn.

    Attributes:
        version: What a publisher offers, and what a receiver serves; the session counts it up on commit.
        source: What a publisher has.
        target: Where a receiver puts it.
        origin: As in ``Hello``.
        subset, allow_casts: Of a receiver, as in ``Hello``.
        in_doubt: Of a receiver: it cannot know which version it serves, or serves none whole.
        published: Of a publisher: what its version came to when it was published before, by way.
        sealed: Of a publisher: what it comes to in this turn.
        way: Of a receiver: how content came to its engine, where it did.
    """

    version: int | None
    source: Source | None = None
    target: Target | None = None
    origin: str = ""
    subset: bool = False
    allow_casts: bool = False
    in_doubt: bool = False
    published: Mapping[str, verify.Sums] = field(default_factory=dict)
    sealed: dict[str, verify.Sums] = field(default_factory=dict)
    way: Way | None = None

    @property
    def layout(self) -> Layout:
        """The layout that the rank holds its part of, or wants it of."""
        side = self.source or self.target
        assert side is not None
        return side.layout

    @property
    def arrays(self) -> Arrays:
        """What a publisher has; nothing of a receiver."""
        return {} if self.source is None else self.source.arrays


@dataclass(frozen=True, slots=True)
class _Brought:
    """What one rank has done of a turn before its vote.

    Attributes:
        done: What it comes to once the turn is committed.
        origin: Whose version it is.
        is_staged: Whether this rank has staged something to serve.
    """

    done: Refit
    origin: str
    is_staged: bool


class Session:
    """One rank's seat in the refits between some publishers and some receivers."""

    def __init__(
        self,
        *,
        store: Store,
        publishers: Sequence[int],
        receivers: Sequence[int],
        rank: int,
        transport: str | Maker = "gloo",
        timeout_s: float = 60.0,
        memory_bytes: int = MEMORY_BYTES,
        retries: int = 2,
        ranks_per_node: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Take a seat. Nothing is waited for before the first turn.

        Args:
            store: Any store of torch that all ranks reach; keys begin with ``shardweave/refit``.
            publishers: The global ranks that publish, the same on each rank.
            receivers: Those that receive. A rank is one or the other.
            rank: This one.
            transport: ``"gloo"``, ``"nccl"``, ``"shared"``, ``"nixl"`` or ``"nixl-cuda"``, or what makes one.
            timeout_s: The longest that this rank waits for others at any point. A rank that is gone is found
                out by then.
            memory_bytes: The most that a rank sends and receives at once, the same on each.
            retries: How often a version is tried again whose content changed on its way.
            ranks_per_node: For choosing near sources among replicas.
            progress: Told of the bytes that this rank moved.

        Raises:
            GeometryError: A rank is in both roles or in neither, or nobody is in one.
        """
        from torch._C._distributed_c10d import PrefixStore

        self.rank, self.timeout_s, self.memory_bytes, self.retries = rank, timeout_s, memory_bytes, retries
        self._store = PrefixStore("shardweave/refit", store)
        self._instance = secrets.token_hex(8)
        self._progress, self._maker = progress, maker(transport)
        self._shared_options = (transport if isinstance(transport, str) else "own", memory_bytes, __version__)
        self._transport: Transport | None = None
        self._notes: Notes | None = None  # for people
        self._group = -1
        self._schedules: dict[str, Schedule] = {}
        self._landing: dict[str, torch.Tensor] = {}
        self._worlds = Worlds(ranks_per_node=ranks_per_node)
        self._meeting = Meeting(
            store=self._store, ranks=(), rank=rank, instance=self._instance, timeout_s=timeout_s
        )
        self.change(publishers=publishers, receivers=receivers)

    def change(self, *, publishers: Sequence[int], receivers: Sequence[int]) -> None:
        """Go on with other ranks from the next turn. Every rank that takes part in it calls this.

        Plans between a source and an engine that stay are kept.

        Raises:
            GeometryError: A rank is in both roles or in neither, or nobody is in one.
        """
        self.publishers, self.receivers = tuple(sorted(publishers)), tuple(sorted(receivers))
        everybody = sorted({*publishers, *receivers})
        if set(publishers) & set(receivers) or not publishers or not receivers or self.rank not in everybody:
            raise GeometryError(
                "a rank of a refit publishes or receives, and there are both kinds",
                where=f"rank {self.rank}",
                equation=f"publishers({self.publishers}), receivers({self.receivers})",
                hint="number the ranks of trainer and engines through, such as publishers=range(8), "
                "receivers=range(8, 12); a process that is both copies with shardweave.move",
            )
        said = (self.publishers, self.receivers, self._worlds.ranks_per_node, *self._shared_options)
        self._options = blake2b(repr(said).encode(), digest_size=8).hexdigest()
        self._meeting.ranks = tuple(everybody)
        self._close_transport()

    def close(self) -> None:
        """Give back what the session holds. Others find out at their next turn."""
        self._close_transport()
        self._schedules.clear()
        self._landing.clear()

    def run(self, part: Part) -> Refit:
        """Turns until one is committed, or one ends for good; called by ``Publisher`` and ``Receiver``.

        Raises:
            ShardweaveError: Why the version is not served; the same class on every rank.
        """
        notes = self._come(part)
        for tries in itertools.count(1):
            clock = _Clock()
            try:
                done = self._turn(part, clock, last=tries > self.retries)
                if not isinstance(done, Refit) and done.kind != AGAIN:
                    assert done.error is not None
                    raise done.error
            except ShardweaveError as error:
                turn = self._meeting.turn
                notes.failed(error, turn=turn, version=part.version, in_doubt=part.in_doubt)
                raise
            if isinstance(done, Refit):
                done = replace(done, tries=tries, seconds=clock.seconds)
                notes.succeeded(done, part.way)
                return done
        raise AssertionError("it is tried again for ever")

    def _come(self, part: Part) -> Notes:
        """The notes of this rank, which say from here on that it is there."""
        if self._notes is None:
            self._notes = Notes(
                self._meeting.note,
                rank=self.rank,
                role="receiver" if part.source is None else "publisher",
                layout=described(part.layout),
                transport=str(self._shared_options[0]),
                timeout_s=self.timeout_s,
            )
        self._notes.come(publishers=self.publishers, receivers=self.receivers)
        return self._notes

    # --- a turn ---

    def _turn(self, part: Part, clock: _Clock, *, last: bool) -> Refit | Outcome:
        """One turn: what it came to, or how it ended instead."""
        meeting, brought, failure = self._meeting, None, None
        turn = meeting.open(kind=ABORT if last else AGAIN)
        try:
            brought = self._bring(part, clock, turn)
            with clock("vote"):
                outcome = meeting.decide()
        except Ended as ended:
            outcome = ended.outcome
        except BaseException as error:
            failure = error
            again = isinstance(error, DigestError) and not last
            outcome = self._tell(part, error, AGAIN if again else ABORT, brought)
        if outcome.kind == COMMIT:
            assert brought is not None  # a commit has the vote of every rank
            with clock("commit"):
                self._commit(part, brought)
        else:
            self._clean(part)
            if failure is None:
                outcome = self._explained(part, outcome)
            elif outcome.error is not None and outcome.error is not failure:
                outcome.error.__cause__ = failure
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        return brought.done if outcome.kind == COMMIT and brought is not None else outcome

    def _bring(self, part: Part, clock: _Clock, turn: int) -> _Brought:
        """A turn up to the vote."""
        meeting = self._meeting
        with clock("hello"):
            world = self._conclude(part)
        meeting.clear()  # all are in this turn, so nobody reads what was said in earlier ones
        if not world.ways:
            self._check_content(part)
            return _Brought(Refit(world.version, turn, False), world.origin, is_staged=False)
        with clock("seal"):
            steps = [self._schedule(way) for way in world.ways]
            mine = part.way = next((way for way in world.ways if self.rank in way.engine.mesh.ranks), None)
            copies = sum(len(s.local) + sum(map(len, s.rounds)) for s in steps)
            if world.is_new_group:
                self._make_transport(turn)
            landed = self._room(part.target, mine)
            endpoints = self._seal(part, world.ways, steps)
        with clock("stage"):
            moved = self._move(part, steps, landed, endpoints)
        if mine is not None and part.target is not None:
            with clock("verify"):
                self._verify(mine, landed)
            with clock("derive"):
                values.apply(mine.steps, self.rank, landed, part.target.stage())
                part.target.derive()
        done = Refit(world.version, turn, True, 1, *moved, copies)
        return _Brought(done, world.origin, is_staged=mine is not None)

    def _tell(self, part: Part, error: BaseException, kind: str, brought: _Brought | None) -> Outcome:
        """End the turn for everybody with an error of this rank, unless it has ended; how it ended."""
        try:
            return self._meeting.end(error, kind=kind)
        except ShardweaveError:  # without a store nobody can be told, and nobody tells this rank
            part.in_doubt |= self._meeting.has_voted and brought is not None and brought.is_staged
            return Outcome(ABORT, self.rank, named(error, self.rank))

    def _commit(self, part: Part, brought: _Brought) -> None:
        """Serve what was staged. All others do."""
        if not brought.is_staged or part.target is None:
            return
        with uninterrupted():  # half of it would be a mixture
            part.in_doubt = True
            try:
                part.target.commit()
            except Exception as error:
                raise TransportError(
                    "what was staged is served without fail",
                    where=f"rank {self.rank}, version {brought.done.version}",
                    equation=f"{type(error).__name__}: {error}"[:400],
                    hint="the other receivers serve it: stop serving here, mend what is reported, and "
                    "receive again",
                ) from error
            part.version, part.origin, part.in_doubt = brought.done.version, brought.origin, False

    def _clean(self, part: Part) -> None:
        # Messages of a turn that broke off may still be under way: they must not meet those of the next.
        self._close_transport()
        if part.target is not None:
            part.target.discard()

    def _conclude(self, part: Part) -> World:
        """Say who is here, hear who is, and conclude what the turn is about."""
        mine = Hello(
            self._instance,
            self._options,
            self._meeting.put(manifest_of(part.layout)),
            None if part.in_doubt else part.version,
            self._group,
            part.subset,
            part.allow_casts,
            part.origin,
        )
        said = self._meeting.exchange("hello", encode_hello(mine))
        hellos = {rank: decode_hello(data, rank) for rank, data in said.items()}
        return self._worlds.conclude(
            {rank: hellos[rank] for rank in self.publishers},
            {rank: hellos[rank] for rank in self.receivers},
            self._meeting.get,
        )

    def _schedule(self, way: Way) -> Schedule:
        if way.key not in self._schedules:
            while len(self._schedules) >= _MOST_SCHEDULES:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[way.key] = schedule(way.plan, rank=self.rank, memory_bytes=self.memory_bytes)
        return self._schedules[way.key]

    def _room(self, target: Target | None, way: Way | None) -> Arrays:
        """Where this rank lands what it receives: in the target's staging, or beside it before a step."""
        import torch

        if target is None or way is None:
            return {}
        staged, landed = target.stage(), {}
        for name, (buffer, _) in way.plan.dst.arrays(self.rank).items():
            dtype, shape = getattr(torch, buffer.dtype), buffer.shape
            for array in (staged.get(name), self._landing.get(name)):
                if array is not None and array.dtype == dtype and tuple(array.shape) == shape:
                    landed[name] = array
                    break
            else:
                device = next(iter(staged.values())).device
                landed[name] = self._landing[name] = torch.zeros(shape, dtype=dtype, device=device)
        return landed

    def _seal(self, part: Part, ways: Sequence[Way], steps: Sequence[Schedule]) -> dict[int, bytes]:
        """Say what is going to be sent, and hear that everybody is ready; the endpoints to read from."""
        meeting, endpoint = self._meeting, b""
        sources = list(dict.fromkeys(way.plan.src for way in ways))
        shared: dict[str, str] = {}
        if part.source is not None:
            assert self._transport is not None
            endpoint = self._transport.offer(part.arrays)
            taken = replicas.take(sources, self.rank, part.arrays)
            meeting.say(f"shared/{self.rank}", replicas.encode(taken))
            shared = replicas.digests(taken)
            self._check_content(part)
            for way, mine in zip(ways, steps, strict=True):
                part.sealed[way.key] = sums = verify.sums(mine, part.arrays, side="src")
                for peer in {peer for peer, _ in sums}:
                    theirs = {pair: found for pair, found in sums.items() if pair[0] == peer}
                    meeting.say(f"seal/{way.key}/{self.rank}/{peer}", verify.encode(theirs))
        digests = [each.digest for each in steps]
        said = meeting.exchange("ready", json.dumps([digests, meeting.put(endpoint), shared]).encode())
        ready = {rank: json.loads(text) for rank, text in said.items()}
        for rank, (others, *_) in ready.items():
            if others != digests:
                raise PlanError(
                    "all ranks of a refit have the same plans",
                    where=f"rank {self.rank} and rank {rank}",
                    equation=f"digests({digests}) != digests({others})",
                    hint="install the same versions of shardweave and numpy on all ranks",
                )
        if pair := replicas.differing({rank: shared for rank, (*_, shared) in ready.items()}):
            a, b = ((rank, meeting.heard(f"shared/{rank}")) for rank in pair)
            replicas.refuse(sources, a, b)
        senders = {
            copy.src_rank
            for each in steps
            for copies in each.rounds
            for copy in copies
            if copy.dst_rank == self.rank
        }
        return {rank: meeting.get(ready[rank][1]) for rank in senders}

    def _move(
        self, part: Part, steps: Sequence[Schedule], landed: Arrays, endpoints: Mapping[int, bytes]
    ) -> tuple[int, int]:
        assert self._transport is not None
        sent = received = 0
        for each in steps:
            report = replay(
                each,
                transport=self._transport,
                src=part.arrays,
                dst=landed,
                endpoints=endpoints,
                progress=self._progress,
            )
            sent, received = sent + report.bytes_sent, received + report.bytes_received
        return sent, received

    def _verify(self, way: Way, landed: Arrays) -> None:
        """Whether what landed comes to what its publishers sealed."""
        got = verify.sums(self._schedules[way.key], landed, side="dst")
        sealed = {
            peer: verify.decode(self._meeting.heard(f"seal/{way.key}/{peer}/{self.rank}"))
            for peer in {peer for peer, _ in got}
        }
        verify.check(self.rank, got, sealed)

    def _check_content(self, part: Part) -> None:
        """A version has one content: what was published under its number before is what is there now."""
        for key, sums in part.published.items():
            steps = self._schedules.get(key)
            if steps is not None and verify.sums(steps, part.arrays, side="src") != sums:
                raise PlanError(
                    "a version has one content",
                    where=f"rank {self.rank}, version {part.version}",
                    equation="what is published now is not what was published under this number",
                    hint="count the version up whenever the weights change",
                )

    def _explained(self, part: Part, outcome: Outcome) -> Outcome:
        """Where content did not arrive as it was sealed: whether it is what changed since."""
        if outcome.kind != ABORT or not isinstance(outcome.error, DigestError) or part.source is None:
            return outcome
        for key, sums in part.sealed.items():
            if verify.sums(self._schedules[key], part.arrays, side="src") != sums:
                error = DigestError(
                    "what is published does not change while it is read",
                    where=f"rank {self.rank}, version {part.version}",
                    equation="the content of the source changed between its seal and the end of the turn",
                    hint="call publish() between two steps, and let it return before the next begins",
                )
                return Outcome(ABORT, self.rank, error)
        return outcome

    # --- transports ---

    def _make_transport(self, turn: int) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._close_transport()
        self._transport = self._maker(
            store=PrefixStore(f"group/{turn}", self._store),
            ranks=self._meeting.ranks,
            rank=self.rank,
            timeout_s=self.timeout_s,
        )
        self._group = turn

    def _close_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport, self._group = None, -1


class _Clock:
    """How long the steps of a turn take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] = time.perf_counter() - begin
