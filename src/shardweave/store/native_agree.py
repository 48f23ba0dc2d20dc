"""Agreement of ranks that save: who writes what, and what went wrong, the same on all of them.

Ranks hear of each other in rounds. What is agreed is computed by each of them from what all said, and proved,
before the first byte is written; an error of one rank is heard by all in the same round and raised by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from shardweave import errors
from shardweave.errors import FormatError, ShardweaveError, WriteError
from shardweave.store import native
from shardweave.store.native_elect import Entry, Shared, Shares, elect, prove_shares, shared_by
from shardweave.store.native_held import Held

Exchange = Callable[[bytes], Sequence[bytes]]
"""Tells all ranks what each has to say, in the order of the ranks; each takes part in each round."""


def alone(data: bytes) -> list[bytes]:
    """The exchange of a single rank."""
    return [data]


def together(exchange: Exchange, work: Callable[[], bytes]) -> list[bytes]:
    """One round: what the work of every rank returns, or the error of one of them, on all ranks.

    Raises:
        ShardweaveError: The error of the first rank that had one, with its rank.
    """
    failed: BaseException | None = None
    try:
        said = b"+" + work()
    except Exception as error:
        failed = error
        said = b"-" + _pack_error(error)
    found = [bytes(data) for data in exchange(said)]
    for rank, data in enumerate(found):
        if not data.startswith(b"+"):
            raise _unpack_error(data[1:], rank) from failed
    return [data[1:] for data in found]


def _pack_error(error: Exception) -> bytes:
    if isinstance(error, OSError) and not isinstance(error, ShardweaveError):
        error = WriteError(
            "the target can be written",
            where=str(error.filename or ""),
            equation=error.strerror or str(error),
            hint="make room or mend the rights, and save again; the checkpoint before is as it was",
        )
    if isinstance(error, ShardweaveError):
        return msgspec.msgpack.encode(
            (type(error).__name__, error.rule, error.where, error.equation, error.hint)
        )
    text = f"{type(error).__name__}: {error}"
    return msgspec.msgpack.encode(
        ("ShardweaveError", "every rank saves without an error", "", text, "see the log of that rank")
    )


def _unpack_error(data: bytes, rank: int) -> ShardweaveError:
    name, rule, where, equation, hint = msgspec.msgpack.decode(data, type=tuple[str, str, str, str, str])
    kind = getattr(errors, name, ShardweaveError)
    where = f"rank {rank}, {where}" if where else f"rank {rank}"
    found: ShardweaveError = kind(rule, where=where, equation=equation, hint=hint)
    return found


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks hold and which of them writes what.

    Attributes:
        held: What this rank holds.
        entries: What each rank holds.
        shares: What each rank writes.
        shared: What several ranks hold.
        digests: Of what each rank said; as long as they are the same, so is the rest.
    """

    held: list[Held]
    entries: list[list[Entry]]
    shares: Shares
    shared: Shared
    digests: list[bytes]


def agree(
    held: Iterable[Held],
    *,
    exchange: Exchange,
    first: Callable[[], None] = lambda: None,
    before: Agreed | None = None,
    choices: Mapping[str, Any] = MappingProxyType({}),
) -> Agreed:
    """Tell each other what ranks hold, elect who writes it, and prove it, before a byte is written.

    Args:
        held: What this rank holds.
        exchange: How ranks hear of each other.
        first: What else each rank does in the first round; an error of it is one of all ranks.
        before: What was agreed last time, from which the rest is taken where nothing has changed.
        choices: What decides which rounds there are; the same on all ranks.

    Raises:
        GapError, OverlapError, OutsideError: The ranks do not hold every element once, or hold padding.
        FormatError, DtypeError: They contradict each other.
    """
    ones: list[Held] = []
    packed = b""

    def say() -> bytes:
        nonlocal packed
        for one in held:
            one.check()
            ones.append(one)
        packed = msgspec.msgpack.encode([entry_of(one) for one in ones])
        first()
        return msgspec.msgpack.encode((native.digest_of(np.frombuffer(packed, np.uint8)), dict(choices)))

    heard = [
        msgspec.msgpack.decode(data, type=tuple[bytes, dict[str, Any]]) for data in together(exchange, say)
    ]
    for rank, (_, chosen) in enumerate(heard):
        if chosen != heard[0][1]:
            raise FormatError(
                "ranks that save together choose the same",
                where=f"ranks 0 and {rank}",
                equation=f"{heard[0][1]} != {chosen}",
                hint="make the savers of all ranks alike, and call them alike",
            )
    digests = [digest for digest, _ in heard]
    if before is not None and before.digests == digests:
        return replace(before, held=ones)
    found = together(exchange, lambda: packed)
    decided: list[Agreed] = []

    def decide() -> bytes:
        entries = [msgspec.msgpack.decode(data, type=list[Entry]) for data in found]
        shares = elect(entries)
        prove_shares(entries, shares, files_of(shares))
        decided.append(Agreed(ones, entries, shares, shared_by(entries), digests))
        return b""

    # It is the same on all ranks, but one of them may be out of memory.
    together(exchange, decide)
    return decided[0]


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def files_of(shares: Shares) -> dict[int, str]:
    """The file of each rank that writes something."""
    return {rank: file_of(rank) for rank, mine in enumerate(shares) if mine}


def entry_of(one: Held) -> Entry:
    """What a rank says of a box that it holds."""
    return Entry(one.key, one.dtype, one.shape, one.box.offset, one.box.shape)
