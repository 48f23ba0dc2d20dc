"""The ranks of a refit as processes that live on from turn to turn, are hurt in one, and serve in all.

Each receiver has a reader that looks at what is served all the time, under the lock that a commit takes, and
remembers everything that it ever saw.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed import TCPStore
from workers import ENVIRONMENT, PRELOADED

from shardweave.errors import PlanError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, concat, even, split, whole
from shardweave.move import Transport
from shardweave.plan import materialise
from shardweave.refit import Buffers, Publisher, Receiver, Session, Source
from shardweave.refit.transports import maker

torch.set_num_threads(1)

PUBLISHERS, RECEIVERS = (0, 1), (2, 3)
RANKS = (*PUBLISHERS, *RECEIVERS)
ROUND_BYTES = 1 << 11
"""So small that a turn has some rounds."""


def _sides() -> tuple[Layout, Layout]:
    """Fused and uneven rows, layers, and something that all hold; to columns, and rows cut otherwise."""
    layers = (("layer", whole(3)),)
    gate, up = (Tensor(f"{name}.{{layer}}", (24, 20), "float32", layers) for name in ("g", "u"))
    norm = Tensor("norm", (37,), "bfloat16")
    trainer, engine = Mesh((("tp", 2),)), Mesh((("tp", 2),), offset=2)
    fused, parts = concat(whole(24, "gate"), whole(24, "up")), (Part(gate, "gate"), Part(up, "up"))
    cut = along(trainer, "tp", lambda r: split(fused, (29, 19), r))
    src = (
        BufferRule("w.{layer}", parts, (whole(3), cut, whole(20))),
        BufferRule("norm", (Part(norm),), (whole(37),)),
    )
    columns = along(engine, "tp", lambda r: even(whole(20), 2, r))
    rows = along(engine, "tp", lambda r: split(whole(24), (7, 17), r))
    dst = (
        BufferRule("g.{layer}", (Part(gate),), (whole(3), whole(24), columns)),
        BufferRule("u.{layer}", (Part(up),), (whole(3), rows, whole(20))),
        BufferRule("norm", (Part(norm),), (whole(37),)),
    )
    return Layout("trainer", trainer, src), Layout("engine", engine, dst)


TRAINER, ENGINE = _sides()


def content(layout: Layout, version: int) -> dict[int, dict[str, torch.Tensor]]:
    """What the ranks of a layout hold of a version, cut from whole arrays: the reference."""
    whole_ones = {
        tensor: np.random.default_rng([version, *tensor.name.encode()]).standard_normal(
            [len(dim) for dim in tensor.dims]
        )
        for tensor in layout.tensors
    }
    return {
        rank: {
            name: torch.from_numpy(array).to(getattr(torch, layout.arrays(rank)[name][0].dtype))
            for name, array in arrays.items()
        }
        for rank, arrays in materialise(layout, whole_ones, fill=0).items()
    }


def digest(arrays: Mapping[str, torch.Tensor]) -> str:
    """What arrays come to, all of their bits."""
    state = blake2b(digest_size=8)
    for name in sorted(arrays):
        state.update(arrays[name].contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


@functools.lru_cache(maxsize=256)
def reference(rank: int, version: int | None) -> str:
    """What a receiver shall serve of a version; before the first, NaN."""
    if version is None:
        return digest(_empty(rank))
    return digest(content(ENGINE, version)[rank])


def _empty(rank: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(buffer.shape, torch.nan, dtype=getattr(torch, buffer.dtype))
        for name, (buffer, _) in ENGINE.arrays(rank).items()
    }


# --- what happens to a rank ---------------------------------------------------------------------

_BEFORE = ("hello", "seal", "sealed", "stage", "staged")
POINTS = {
    "publisher": (*_BEFORE, "vote", "voted"),
    "receiver": (*_BEFORE, "verify", "derive", "vote", "voted", "commit", "half", "done"),
}
"""What a rank passes in a turn, in order; ``half`` is between two arrays of a commit."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a rank at a point of its next turn.

    Attributes:
        how: ``kill``, ``stop`` or ``interrupt``, the first two ``the store`` too; ``lie`` or ``flip``, of its
            transport, for good; ``disk`` or ``memory``, which are full; or the name of an exception.
        point: One of ``POINTS``.
        number: At ``stage`` the round, or the first; for the store its process.
    """

    how: str
    point: str = "stage"
    number: int = 0


@dataclass
class Told:
    """What a rank says after a turn.

    Attributes:
        error: The class and text of what was raised.
        version: What it serves, or ``"?"`` if it does not know.
        served: What that comes to.
        seen: All that its reader saw since the last turn.
    """

    rank: int
    error: tuple[str, str] | None
    seconds: float
    version: Any = None
    served: str = ""
    seen: frozenset[str] = field(default_factory=frozenset)


class _Served:
    """A target whose commits take a lock, as everybody who reads does."""

    def __init__(self, inner: Buffers, served: Mapping[str, torch.Tensor], lock: threading.Lock) -> None:
        self.inner, self.layout, self.rank = inner, inner.layout, inner.rank
        self.served, self.lock = served, lock
        self.stage, self.discard, self.broken, self.derive = (
            inner.stage,
            inner.discard,
            inner.broken,
            inner.derive,
        )
        self.at: Callable[[str], None] = lambda point: None

    def commit(self) -> None:
        with self.lock:
            self.at("commit")
            name = sorted(self.served)[0]
            self.served[name].copy_(self.inner.stage()[name])
            self.at("half")
            self.inner.commit()
            self.at("done")


class _Hurt:
    """A transport of which a round fails, or moves nothing, or flips a bit."""

    def __init__(self, inner: Transport, member: _Member) -> None:
        self.inner, self.member, self.rank = inner, member, inner.rank
        self.offer, self.close = inner.offer, inner.close
        self.rounds = 0

    def run(self, plan: Any, copies: Any, **given: Any) -> Any:
        fault, number = self.member.fault, self.rounds
        self.rounds += 1
        if fault is None or fault.point != "stage" or fault.number > number:
            return self.inner.run(plan, copies, **given)
        if fault.how == "lie":
            return self.inner.run(plan, [], **given)
        self.member.at("stage")
        moved = self.inner.run(plan, copies, **given)
        for copy in [copy for copy in copies if copy.dst_rank == self.rank and fault.how == "flip"][-1:]:
            array = given["dst"][copy.dst_name]
            at = tuple(dim[-1] for dim in copy.dst_box.dims)
            array.view(torch.int16 if array.element_size() == 2 else torch.int32)[at] ^= 1
        return moved


class _Member:
    """One rank in its process."""

    def __init__(self, rank: int, *, transport: str, spill: str, torn: bool) -> None:
        self.rank, self.kind, self.torn, self.fault = rank, transport, torn, None
        self.lock, self.seen, self.spill = threading.Lock(), set(), spill
        self.member: Publisher | Receiver | None = None
        self.live = content(TRAINER, 0).get(rank, {})
        self.served: dict[str, torch.Tensor] = {}
        if rank in RECEIVERS:
            self.served = _empty(rank)
            threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        while True:
            with self.lock:
                self.seen.add(digest(self.served))
            time.sleep(0.002)

    def join(self, port: int) -> None:
        """Take a seat at a store."""
        inner = maker(self.kind)

        def make(**given: Any) -> Transport:
            made: Any = _Hurt(inner(**given), self)
            return made

        session = Session(
            store=TCPStore("127.0.0.1", port, None, False, wait_for_workers=False),
            publishers=PUBLISHERS,
            receivers=RECEIVERS,
            rank=self.rank,
            transport=make,
            memory_bytes=ROUND_BYTES,
        )
        if self.rank in PUBLISHERS:
            self.member = Publisher(session, Source(TRAINER, self.live, self.rank))
        else:
            inside = Buffers(
                layout=ENGINE, rank=self.rank, arrays=self.served, memory_bytes=600, spill=self.spill
            )
            if self.torn:
                inside._staged = self.served
            target: Any = _Served(inside, self.served, self.lock)
            target.at = self.at
            self.member = Receiver(session, target)
        self.hook(session)

    def hook(self, session: Any) -> None:
        """Pass by the points of a turn."""

        def around(owner: Any, name: str, before: str, after: str = "") -> None:
            work = getattr(owner, name)

            def hooked(*given: Any, **more: Any) -> Any:
                self.at(before)
                done = work(*given, **more)
                self.at(after)
                return done

            setattr(owner, name, hooked)

        around(session, "_conclude", "hello")
        around(session, "_seal", "seal", "sealed")
        around(session, "_move", "", "staged")
        around(session, "_verify", "verify")
        around(session._meeting, "decide", "vote")
        say = session._meeting.say

        def said(key: str, value: bytes) -> None:
            say(key, value)
            if key.startswith("vote/"):
                self.at("voted")

        session._meeting.say = said
        if self.served:
            target: Any = self.member.target  # type: ignore[union-attr]
            derive = target.derive

            def derived() -> None:
                self.at("derive")
                derive()

            target.derive = derived

    def at(self, point: str) -> None:
        """Come to a point; what is to happen there happens once."""
        fault = self.fault
        if fault is None or fault.point != point or fault.how in ("lie", "flip", "disk", "memory"):
            return
        self.fault = None
        if fault.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif fault.how == "kill the store":
            os.kill(fault.number, signal.SIGKILL)
        elif fault.how == "stop the store":
            os.kill(fault.number, signal.SIGSTOP)
        elif fault.how in ERRORS:
            raise ERRORS[fault.how]()

    def turn(self, version: int, timeout_s: float, fault: Fault | None) -> Told:
        """One publish or receive."""
        member = self.member
        assert member is not None
        self.set_timeout(timeout_s)
        self.fault = fault
        for name, array in content(TRAINER, version).get(self.rank, {}).items():
            self.live[name].copy_(array)
        begin, error = time.monotonic(), None
        try:
            with _limited(fault, self), _interruptible():
                member.publish(version) if isinstance(member, Publisher) else member.receive()
        except BaseException as caught:
            error = type(caught).__name__, str(caught)
        seconds, self.fault = time.monotonic() - begin, None
        told = Told(self.rank, error, seconds)
        if isinstance(member, Receiver):
            try:
                told.version = member.version
            except PlanError:
                told.version = "?"
            with self.lock:
                told.served, told.seen = digest(self.served), frozenset(self.seen)
                self.seen.clear()
        return told

    def set_timeout(self, timeout_s: float) -> None:
        session: Any = self.member.session  # type: ignore[union-attr]
        session.timeout_s = session._meeting.timeout_s = timeout_s
        if session._transport is not None:
            session._transport.inner.timeout_s = timeout_s
            session._transport.rounds = 0


ERRORS: dict[str, Callable[[], BaseException]] = {
    "MemoryError": lambda: MemoryError("no room"),
    "OSError": lambda: OSError(28, "No space left on device"),
    "RuntimeError": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    "ValueError": lambda: ValueError("size mismatch"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
}


@contextlib.contextmanager
def _limited(fault: Fault | None, member: _Member) -> Iterator[None]:
    """A disk or memory that is full for a turn, in which staging is made anew."""
    how = fault.how if fault is not None else ""
    if how not in ("disk", "memory"):
        yield
        return
    member.member.target.inner._staged = {}  # type: ignore[union-attr]
    before, zeros = resource.getrlimit(resource.RLIMIT_FSIZE), torch.zeros_like
    if how == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    else:
        torch.zeros_like = _no_memory  # type: ignore[assignment]
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        torch.zeros_like = zeros


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Between turns nobody is interrupted: what is tested is the turn and not the harness."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _no_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


def _live(pipe: Connection, rank: int, transport: str, spill: str, torn: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    member = _Member(rank, transport=transport, spill=spill, torn=torn)
    while True:
        try:
            what, given = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        pipe.send(getattr(member, what)(**given))


# --- all of them --------------------------------------------------------------------------------


def _host(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


class Crew:
    """Four ranks, and the store that they meet in."""

    def __init__(self, *, transport: str, spill: str, torn: bool = False) -> None:
        """Start them.

        Args:
            transport: Its name.
            spill: A folder in which receivers stage.
            torn: Whether receivers stage in what they serve: a mistake, to see that it is seen.
        """
        self.given = transport, spill, torn
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Connection] = {}
        self.new_store()
        for rank in RANKS:
            self.begin(rank)
        self.join(RANKS)

    def new_store(self) -> None:
        """A store, in a process of its own."""
        self.host = self.processes.pop(-1, None)
        if self.host is not None:
            self.host.kill()
            self.host.join(10)
            self.host.close()
        self.spawn(-1, _host)
        self.port = self.pipes[-1].recv()

    def join(self, ranks: Iterable[int]) -> None:
        """Seat ranks at the store."""
        for rank in ranks:
            self.ask(rank, "join", port=self.port)
        assert set(self.hear(ranks, 60.0)) == set(ranks)

    def start(self, rank: int) -> None:
        """Start a rank again."""
        self.begin(rank)
        self.join([rank])

    def begin(self, rank: int) -> None:
        self.spawn(rank, _live, rank, *self.given)

    def spawn(self, number: int, work: Callable[..., None], *given: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipes[number], child = context.Pipe()
        bare = patch.dict(sys.modules, {"__main__": ModuleType("__main__")})
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with patch.dict(os.environ, {**ENVIRONMENT, **path}), bare:
            self.processes[number] = context.Process(target=work, args=(child, *given), daemon=True)
            self.processes[number].start()
        child.close()

    def ask(self, rank: int, what: str, **given: Any) -> None:
        self.pipes[rank].send((what, given))

    def hear(self, ranks: Iterable[int], within_s: float) -> dict[int, Any]:
        """What ranks answer; those that die are left out."""
        waiting, found = {self.pipes[rank]: rank for rank in ranks}, {}
        deadline = time.monotonic() + within_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} have not ended after {within_s} s"
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except (EOFError, OSError):
                    self.bury(rank)
        return found

    def end(self, rank: int) -> None:
        """Wait until a rank has died; where it answers instead, it is killed."""
        process, pipe = self.processes[rank], self.pipes[rank]
        wait([pipe, process.sentinel], timeout=20.0)
        process.kill()
        self.bury(rank)

    def bury(self, rank: int) -> None:
        process = self.processes.pop(rank)
        process.join(10)
        assert process.exitcode is not None
        process.close()
        self.pipes.pop(rank).close()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def turn(
        self,
        version: int,
        *,
        timeout_s: float,
        faults: Mapping[int, Fault | None] | None = None,
        only: Iterable[int] = RANKS,
    ) -> None:
        """Ask ranks for a turn; ``hear`` what came of it."""
        for rank in only:
            fault = (faults or {}).get(rank)
            self.ask(rank, "turn", version=version, timeout_s=timeout_s, fault=fault)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(10)
            process.close()
        for pipe in self.pipes.values():
            pipe.close()
