"""One error for all ranks of a step: the first one, by class and text, wherever it happened.

A rank that fails says so in the store, where only the first report stays, and then lets go of its
communicators. That frees whoever waits in them, with an error of the transport; each of these ranks finds the
report, lets go of its own, and raises what is reported. A rank that was killed frees its peers too; then the
first of them reports that. A rank that stands still is reported by the first that has waited long enough.

What all ranks can check by themselves is better said before the first message: ``agree`` lets all of them
raise it, and every communicator stays as it is.
"""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch

from shardweave import errors
from shardweave.errors import ShardweaveError, TransportError
from shardweave.move.asking import Asker
from shardweave.train.collectives import gather_parts
from shardweave.train.grid import Group, Groups

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "first error"
_MAX_TEXT = 2000
_MAX_BYTES = 1 << 16
"""Bounds of what is read: whoever can write to the store may have written it."""

_Text = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]


class _Report(msgspec.Struct, frozen=True):
    """An error as it is said to others."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    name: _Text
    rule: _Text
    where: _Text
    equation: _Text
    hint: _Text


class Together:
    """Around each step of one rank: if any rank fails in it, all ranks raise the first error that was.

    >>> from torch.distributed import HashStore
    >>> from shardweave.layout import Mesh
    >>> from shardweave.train.grid import connect, plan_groups
    >>> store = HashStore()
    >>> groups = connect(plan_groups({"model": Mesh((("tp", 1),))}, {}), rank=0, store=store)
    >>> with Together(store, rank=0, groups=groups):
    ...     [].pop()
    Traceback (most recent call last):
    shardweave.errors.TransportError: every rank does its part of a step: rank 0: \
IndexError: pop from empty list. hint: look at the log of that rank
    """

    def __init__(self, store: Store, *, rank: int, groups: Groups, timeout_s: float = 10.0) -> None:
        """Prepare the end of one rank; nothing is asked or written as long as all goes well.

        Args:
            store: Any store of torch that all ranks reach, with a prefix that one run has for itself.
            rank: The global rank.
            groups: All groups of the rank. The first error closes them for good.
            timeout_s: The longest to wait for the store. How long ranks wait for each other is the timeout
                of their groups.
        """
        from torch._C._distributed_c10d import PrefixStore

        self._store = PrefixStore("together", store)
        self.rank, self._groups, self._timeout_s = rank, groups, timeout_s

    def __enter__(self) -> Together:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let all ranks raise the first error.

        Raises:
            ShardweaveError: The first error of any rank, with the rank in ``where``. One that is none of this
                package's is a ``TransportError`` that names it.
        """
        if error is None:
            return
        first = self._first(error)
        self._groups.close()
        _forget(error)
        # A request to stop stays one on the rank that got it; the others have its report.
        if isinstance(error, Exception):
            raise first from error

    def _first(self, error: BaseException) -> ShardweaveError:
        """The error that all raise: this one if no other came before it."""
        mine = _encode(error, self.rank)
        try:
            found = Asker().ask(
                lambda: self._store.compare_set(_KEY, "", mine.decode()), within_s=self._timeout_s
            )
        except (RuntimeError, TimeoutError):
            # Whoever serves the store is gone as well. The report is the same, if only of this rank.
            found = mine
        return _decode(bytes(found))


def agree(error: Exception | None, *, group: Group, device: str | torch.device = "cpu") -> None:
    """Raise the same error on every rank of a group, if any of them has one. No group is closed.

    Args:
        error: What this rank found, before it sent anything; ``None`` if all is well.
        group: Who agrees; each of them calls it at the same place.
        device: Where the group sends from.

    Raises:
        ShardweaveError: That of the first rank which has one.
        TransportError, TransportTimeoutError: A rank is gone or does not come.
    """
    mine = b"" if error is None else _encode(error, group.global_rank(group.rank))
    if group.comm is None:
        if mine:
            raise _decode(mine) from error
        return
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    sizes = torch.cat(gather_parts(size, group=group)).tolist()
    if not any(sizes):
        return
    if not 0 < max(sizes) <= _MAX_BYTES or min(sizes) < 0:
        raise _unreadable(f"sizes({max(sizes)}) > {_MAX_BYTES}")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8)[: len(mine)]
    parts = gather_parts(padded.to(device), group=group)
    first = next(at for at, length in enumerate(sizes) if length)
    raise _decode(bytes(parts[first].cpu().tolist())[: sizes[first]]) from error


@contextmanager
def agreed(group: Group, *, device: str | torch.device = "cpu") -> Iterator[None]:
    """Around checks that each rank makes for itself: all ranks raise the first error, see ``agree``."""
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    agree(found, group=group, device=device)


# --- reports ------------------------------------------------------------------------------------


def _encode(error: BaseException, rank: int) -> bytes:
    if not isinstance(error, ShardweaveError):
        error = TransportError(
            "every rank does its part of a step",
            equation=f"{type(error).__name__}: {error}",
            hint="look at the log of that rank",
        )
    # A class of the caller's is said as the one of this package that it comes from.
    name = next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    # What ranks agreed on names its rank already, or all of them; whoever reports it first is no matter.
    is_named = re.match(r"all ranks\b|ranks? \d", error.where) is not None
    where = error.where if is_named else f"rank {rank}" + (f", {error.where}" if error.where else "")
    parts = (
        part.encode(errors="replace").decode() for part in (error.rule, where, error.equation, error.hint)
    )
    return msgspec.json.encode(_Report(rank, name, *(part[:_MAX_TEXT] for part in parts)))


def _decode(said: bytes) -> ShardweaveError:
    """What was reported, as an error; whatever was said, it is an error of this package."""
    try:
        if len(said) > _MAX_BYTES:
            return _unreadable(f"bytes({len(said)}) > {_MAX_BYTES}")
        report = msgspec.json.decode(said, type=_Report)
    except msgspec.DecodeError as error:
        return _unreadable(f"{error}")
    kind = vars(errors).get(report.name)
    if not (isinstance(kind, type) and issubclass(kind, ShardweaveError)):
        return _unreadable(f"name({report.name[:80]!r}) is no class of shardweave.errors")
    return kind(report.rule, where=report.where, equation=report.equation, hint=report.hint)


def _unreadable(equation: str) -> TransportError:
    return TransportError(
        "a rank reports an error in the form of this version",
        where=f"key {_KEY!r} of the store",
        equation=equation,
        hint="give each run a prefix of the store for itself, and every rank the same version",
    )


def _forget(error: BaseException) -> None:
    """Let go of what an error's frames hold: messages under way would keep a communicator, and its peers."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
    gc.collect()
