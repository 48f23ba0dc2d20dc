"""Processes that carry out one conversion together: what they say to each other, and one error for all.

Each process does a part of the work that follows from its rank alone, so little has to be said. They *meet*
between the parts: process 0 hears what each has to say, and all hear what it makes of it. While they work,
each leaves a sign of life in the store now and then, with the number of bytes that it has done. Process 0
watches the signs of all, the others that of process 0; whoever is silent for too long is taken for gone.

How a conversion ends is one key of the store, written by compare-and-set: the first error, or that all is
written and may be published. So no error is said by some and not by others, and nothing is published after
one. There is no process group, and nothing here imports torch: the store is given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from shardweave import errors
from shardweave.errors import GeometryError, ShardweaveError, TransportError, TransportTimeoutError
from shardweave.move.asking import Asker

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PREFIX: Final = "shardweave/convert"
_OUTCOME: Final = f"{_PREFIX}/outcome"
_SEALED: Final = b"sealed"
_MAX_TEXT: Final = 2000
_MAX_BYTES: Final = 1 << 16
"""Bounds of what is read: whoever can write to the store may have written it."""

_Text = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
Decide = Callable[[Sequence[bytes]], bytes]


class Company:
    """The processes of one conversion, as one of them sees them.

    It is entered around all that a process does for the conversion, ``prepare`` included. An error of any of
    them then ends the block of each of them with that error, by class and text.

    Attributes:
        rank: Which process this is. Process 0 makes the target; the others fill a part of it.
        size: How many there are.
        done_elsewhere: Bytes that the others have done; known to process 0.
        speaks: Whether the error that all raise was reported by this process.

    >>> from torch.distributed import HashStore
    >>> with Company(HashStore(), rank=0, size=1) as alone:
    ...     alone.meet(b"here", decide=b"".join)
    b'here'
    """

    def __init__(
        self,
        store: Store | None,
        *,
        rank: int,
        size: int,
        timeout_s: float = 60.0,
        serves: bool = False,
    ) -> None:
        """Prepare; nothing is asked or written before the block is entered.

        Args:
            store: Any store of torch that all processes reach; ``None`` for a process alone.
            rank: Of this process, from 0.
            size: How many processes there are.
            timeout_s: How long a process may be silent. It is silent while it starts, and when it is gone.
            serves: Whether the store ends with this process; then it leaves last.

        Raises:
            GeometryError: There is no such rank, or no store for several.
        """
        if not 0 <= rank < size or (store is None and size > 1) or timeout_s <= 0:
            raise GeometryError(
                "processes that convert together are numbered from 0 and meet in a store",
                equation=f"rank({rank}), size({size}), timeout_s({timeout_s:g})"
                + (", without a store" if store is None else ""),
                hint="start them with torchrun, or give each its RANK and all the same WORLD_SIZE",
            )
        self.rank, self.size, self.done_elsewhere = rank, size, 0
        self.speaks = False
        self._store: Any = store
        self._timeout_s, self._serves = timeout_s, serves
        # Several signs within the bound: one that comes late is no reason to give somebody up.
        self._every_s = min(1.0, timeout_s / 5)
        self._asker, self._watcher = Asker(), Asker()
        self._turn = self._done = self._signs = 0
        self._all_came = False
        self._error: ShardweaveError | None = None
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def leads(self) -> bool:
        """Whether this process makes the target."""
        return self.rank == 0

    # --- what a conversion calls ----------------------------------------------------------------

    def meet(
        self,
        said: bytes = b"",
        *,
        decide: Decide = lambda said: b"",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Wait for all processes; what process 0 makes of what each of them says, on all of them.

        Args:
            said: What this process says; a few bytes.
            decide: Called on process 0 with what each says, in the order of their ranks.
            meanwhile: Called now and then while this process waits.

        Raises:
            ShardweaveError: The first error of any process.
            TransportTimeoutError: One of them did not come, or is silent.
        """
        if self.size == 1:
            return decide([said])
        turn, self._turn = f"{_PREFIX}/{self._turn}", self._turn + 1
        names = [f"{turn}/{rank}" for rank in range(self.size)]
        begin = time.monotonic()
        self._ask(lambda: self._store.set(names[self.rank], said))
        if self.leads:
            self._ask(lambda: self._store.add(f"{turn}/came", 1))
            self._wait(lambda: int(self._store.add(f"{turn}/came", 0)) >= self.size, names, begin, meanwhile)
            decided = decide([bytes(one) for one in self._ask(lambda: self._store.multi_get(names))])
            self._ask(lambda: self._store.set(f"{turn}/decided", decided))
        else:
            self._ask(lambda: self._store.add(f"{turn}/came", 1))
            key = f"{turn}/decided"
            self._wait(lambda: bool(self._store.check([key])), names[:1], begin, meanwhile)
            decided = bytes(self._ask(lambda: self._store.get(key)))
        self._all_came = True
        return decided

    def tell(self, done: int) -> None:
        """Note how many bytes this process has done.

        Raises:
            ShardweaveError: The first error of another process.
        """
        self._done = done
        self.check()

    def check(self) -> None:
        """Raise the first error of another process, if one is known."""
        if self._error is not None:
            raise self._error

    def seal(self) -> None:
        """Decide that the target is published; from here on no other process can end the conversion.

        Raises:
            ShardweaveError: The first error of any process, if one was before.
        """
        if self.size > 1:
            found = bytes(self._ask(lambda: self._store.compare_set(_OUTCOME, "", _SEALED.decode())))
            if found != _SEALED:
                raise _decode(found)

    # --- the block ------------------------------------------------------------------------------

    def __enter__(self) -> Company:
        if self.size > 1:
            self._thread = threading.Thread(target=self._watch, name="shardweave-company", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave, and let all raise the first error.

        Raises:
            ShardweaveError: The first error of any process, with its rank in ``where``.
        """
        if self._thread is None:
            return
        first = self._report(error) if error is not None else None
        self._leave()
        # A request to stop stays one on the process that got it; the others have its report.
        if first is not None and isinstance(error, Exception):
            raise first from error

    def _report(self, error: BaseException) -> ShardweaveError:
        """The error that all raise: this one if no other came before it."""
        if self._error is not None and error is self._error:
            return self._error
        mine = _encode(error, self.rank)
        try:
            found = bytes(self._compare_set("", mine))
            if found == _SEALED and self.leads:
                found = bytes(self._compare_set(_SEALED.decode(), mine))
        except ShardweaveError:
            found = mine  # whoever serves the store is gone as well; the report is the same
        if found == _SEALED:
            found = mine
        self.speaks = found == mine
        return _decode(found)

    def _compare_set(self, expected: str, wanted: bytes) -> bytes:
        return bytes(self._ask(lambda: self._store.compare_set(_OUTCOME, expected, wanted.decode())))

    def _leave(self) -> None:
        """End the signs. Who serves the store waits until all others that are there know how it ended."""
        key, end = f"{_PREFIX}/left", time.monotonic() + self._timeout_s
        try:
            left = int(self._ask(lambda: self._store.add(key, 1)))
            while self._serves and left < self.size - len(self._silent()) and time.monotonic() < end:
                time.sleep(0.02)
                left = int(self._ask(lambda: self._store.add(key, 0)))
        except ShardweaveError:
            pass  # it is gone: nobody can be told anything
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    # --- the store ------------------------------------------------------------------------------

    def _ask(self, question: Callable[[], Any]) -> Any:
        return self._bounded(self._asker, question)

    def _bounded(self, asker: Asker, question: Callable[[], Any]) -> Any:
        """What the store answers, within the bound."""
        try:
            return asker.ask(question, within_s=self._timeout_s)
        except (RuntimeError, TimeoutError) as error:
            kind = TransportTimeoutError if isinstance(error, TimeoutError) else TransportError
            raise kind(
                "processes that convert together reach their store",
                where="all ranks",
                equation=f"it does not answer, timeout_s({self._timeout_s:g})",
                hint="the process that serves it, rank 0 or torchrun, is gone: see its log, then run the "
                "same command again, which goes on",
            ) from error

    def _wait(
        self,
        holds: Callable[[], bool],
        names: Sequence[str],
        begin: float,
        meanwhile: Callable[[], None],
    ) -> None:
        pause_s = 0.002
        while not self._ask(holds):
            self.check()
            if not self._all_came and time.monotonic() - begin > self._timeout_s:
                absent = [i for i, name in enumerate(names) if not self._is_there(name)]
                raise self._gone(absent or [0], "did not come")
            meanwhile()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def _is_there(self, name: str) -> bool:
        return bool(self._ask(lambda: self._store.check([name])))

    def _gone(self, ranks: Sequence[int], what: str) -> TransportTimeoutError:
        names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return TransportTimeoutError(
            "every process of a conversion does its part",
            where=f"rank{'s' if len(ranks) > 1 else ''} {names}",
            equation=f"{what} within timeout_s({self._timeout_s:g})",
            hint="see the log of that process, then run the same command again, which goes on; "
            "raise --timeout where processes are only slow",
        )

    # --- signs of life --------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self._bounded(self._watcher, self._look)
                silent = self._silent()
                if silent and self._error is None:
                    self._error = self._report(self._gone(silent, "gave no sign of life"))
            except ShardweaveError as error:
                # Nobody can be told, and nobody else may be there to say it.
                self.speaks = self.speaks or self._error is None
                self._error = self._error or error
                return
            self._stop.wait(self._every_s)

    def _look(self) -> None:
        """Leave a sign, and look for those of others and for the outcome."""
        self._signs += 1
        self._store.set(f"{_PREFIX}/sign/{self.rank}", f"{self._signs} {self._done}")
        if self._error is None and self._store.check([_OUTCOME]):
            found = bytes(self._store.get(_OUTCOME))
            if found != _SEALED:
                self._error = _decode(found)
        if not self._all_came:
            return
        others = range(1, self.size) if self.leads else range(1)
        signs = self._store.multi_get([f"{_PREFIX}/sign/{rank}" for rank in others])
        done = 0
        for rank, sign in zip(others, map(bytes, signs), strict=True):
            if rank not in self._seen or self._seen[rank][0] != sign:
                self._seen[rank] = sign, time.monotonic()
            _, _, count = sign.partition(b" ")
            done += int(count) if count.isdigit() else 0
        self.done_elsewhere = done

    def _silent(self) -> list[int]:
        """Who has given no sign for too long."""
        now = time.monotonic()
        return [rank for rank, (_, at) in sorted(self._seen.items()) if now - at > self._timeout_s]


# --- reports ------------------------------------------------------------------------------------


def _encode(error: BaseException, rank: int) -> bytes:
    if not isinstance(error, ShardweaveError):
        error = TransportError(
            "every process of a conversion does its part",
            equation=f"{type(error).__name__}: {error}",
            hint="see the log of that process, then run the same command again, which goes on",
        )
    # A class of the caller's is said as the one of this package that it comes from.
    name = next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    named = error.where.startswith(("rank ", "ranks ", "all ranks"))
    where = error.where if named else f"rank {rank}" + (f", {error.where}" if error.where else "")
    parts = [name, error.rule, where, error.equation, error.hint]
    return msgspec.json.encode([part.encode(errors="replace").decode()[:_MAX_TEXT] for part in parts])


def _decode(said: bytes) -> ShardweaveError:
    """What was reported, as an error; whatever was said, it is an error of this package."""
    try:
        if len(said) > _MAX_BYTES:
            return _unreadable(f"bytes({len(said)}) > {_MAX_BYTES}")
        name, rule, where, equation, hint = msgspec.json.decode(
            said, type=tuple[_Text, _Text, _Text, _Text, _Text]
        )
    except msgspec.DecodeError as error:
        return _unreadable(f"{error}")
    kind = vars(errors).get(name)
    if not (isinstance(kind, type) and issubclass(kind, ShardweaveError)):
        return _unreadable(f"name({name[:80]!r}) is no class of shardweave.errors")
    return kind(rule, where=where, equation=equation, hint=hint)


def _unreadable(equation: str) -> TransportError:
    return TransportError(
        "a process reports an error in the form of this version",
        where=f"all ranks, key {_OUTCOME!r} of the store",
        equation=equation,
        hint="give each conversion a store of its own, and every process the same version",
    )


ALONE: Final = Company(None, rank=0, size=1)
"""The company of a process that converts by itself."""
