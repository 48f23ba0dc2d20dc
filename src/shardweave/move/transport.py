"""What a transport is, and what all of them share: blocks as views, pulls, and a meeting of the ranks.

A transport carries blocks and decides nothing. It is given copies of a plan, the same descriptors
that the numpy reference consumes, and moves each block from a stored array of one rank to its place
in a stored array of another. Two kinds fit one protocol:

- *two-sided*: both ranks take part in a copy, one sends and one receives (``collective``).
- *one-sided*: the rank of the destination reads, from what the rank of the source has offered
  (``memory``, ``shared``, ``nixl``). An endpoint says how to reach what was offered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from shardweave.errors import TransportError, TransportTimeoutError
from shardweave.move.views import Rounds, Views
from shardweave.plan import Copy, Plan

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

Arrays = Mapping[str, "torch.Tensor"]
"""Stored arrays of one rank by name."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a transport moved, counted where it moves them.

    Attributes:
        sent: Bytes that this rank sent; 0 on one-sided transports, where readers do all of it.
        received: Bytes that arrived on this rank from others.
    """

    sent: int = 0
    received: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.sent + other.sent, self.received + other.received)


class Transport(Protocol):
    """Moves blocks between ranks.

    Attributes:
        rank: The rank that this end of it belongs to.
    """

    rank: int

    def offer(self, arrays: Mapping[str, Any]) -> bytes:
        """Let other ranks read these arrays (tensors or numpy arrays); returns this rank's endpoint.

        Empty on two-sided transports. To offer again replaces what was offered before.
        """
        ...

    def run(
        self,
        plan: Plan,
        copies: Sequence[Copy],
        *,
        src: Arrays,
        dst: Arrays,
        endpoints: Mapping[int, bytes],
    ) -> Moved:
        """Carry out one round: copies of the plan from this rank to others or from others to this rank.

        Every rank calls it for the same rounds in the same order. When it returns, what this rank
        receives in the round is in place, and what it sends may be overwritten if the transport is
        two-sided. On a one-sided transport, what was offered stays untouched until all have read it.

        Args:
            plan: The plan, for the dtypes of its two sides.
            copies: In an order that is the same on both ranks of a copy; none is local.
            src: The arrays that this rank has in the source layout.
            dst: The arrays that it has in the destination layout.
            endpoints: What each rank of the source got from ``offer``.

        Raises:
            TransportError: A peer is gone or refuses.
            TransportTimeoutError: A peer did not do its part in time.
        """
        ...

    def close(self) -> None:
        """Give back what the transport holds. What was offered can no longer be reached."""
        ...


# --- blocks -------------------------------------------------------------------------------------


def tensors(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The arrays as tensors; numpy arrays share their memory."""
    import torch

    return {
        name: array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
        for name, array in arrays.items()
    }


def wire_dtype(plan: Plan, copy: Copy) -> torch.dtype:
    """The dtype in which a block travels: that of the source. The destination casts what arrives."""
    import torch

    dtype: torch.dtype = getattr(torch, plan.src.rules[copy.family.src_rule].dtype)
    return dtype


def as_bytes(block: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous block, as a flat view."""
    import torch

    return block.reshape(-1).view(torch.uint8)


Reads = tuple[Views, Views]
"""What a rank reads in a round, and where it writes it."""


def pull(
    copies: Sequence[Copy],
    *,
    rank: int,
    dst: Arrays,
    offered: Callable[[int], Arrays],
    known: Rounds[Reads],
) -> Moved:
    """Copy what a rank receives from arrays that it can address: one pass over the bytes, no staging.

    Args:
        copies: The copies of a round.
        rank: The rank that receives.
        dst: Its arrays.
        offered: The arrays that a rank offers.
        known: Rounds that were pulled before.
    """

    def make() -> Reads:
        mine = [copy for copy in copies if copy.dst_rank == rank]
        return Views(mine, "src"), Views(mine, "dst")

    sources, targets = known.of(copies, make)
    received = 0
    for block, place in zip(sources.of(offered), targets.of(lambda _: dst), strict=True):
        place.copy_(block)
        received += block.nbytes
    return Moved(received=received)


def endpoint_of(endpoints: Mapping[int, bytes], rank: int) -> bytes:
    """The endpoint of a rank.

    Raises:
        TransportError: The rank has offered nothing.
    """
    if rank not in endpoints:
        raise TransportError(
            "every rank that is read from has offered its arrays",
            where=f"rank {rank}",
            equation=f"endpoints of ranks({', '.join(map(str, sorted(endpoints)))})",
            hint="call offer() on every rank of the source and hand the endpoints to all readers",
        )
    return endpoints[rank]


class Staging:
    """One buffer that is kept and grows to the largest round; blocks in it are aligned to ``ALIGN``."""

    ALIGN = 16

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.buffer: torch.Tensor | None = None
        self._used = 0

    def holds(self, num_bytes: int) -> bool:
        """Whether the buffer that is there has room for so many bytes."""
        return num_bytes <= (0 if self.buffer is None else self.buffer.numel())

    def begin(self, num_bytes: int) -> None:
        """Start anew with room for so many bytes; in another buffer only where this one is too small."""
        import torch

        self._used = 0
        if not self.holds(num_bytes):
            self.buffer = None  # the two are not there at the same time
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous block in the room that is left."""
        import torch

        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        block = self.part(self._used, num_bytes).view(dtype).view(tuple(shape))
        self._used += aligned(num_bytes)
        return block

    def part(self, at: int, num_bytes: int) -> torch.Tensor:
        """Bytes at a place that the caller keeps account of."""
        assert self.buffer is not None
        return self.buffer[at : at + num_bytes]


def aligned(num_bytes: int) -> int:
    """The room that a block takes in a staging buffer."""
    return -(-num_bytes // Staging.ALIGN) * Staging.ALIGN


# --- meeting ------------------------------------------------------------------------------------


class Rendezvous:
    """Where the ranks of a move meet: a key-value store that is passed in, and a bound on waiting.

    Endpoints are exchanged here, and here the ranks agree that all of them are done. A rank that
    fails says so, and all that wait or come later raise instead of waiting for it.

    >>> from torch.distributed import HashStore
    >>> Rendezvous(store=HashStore(), ranks=(3,), rank=3).exchange(b"here I am")
    {3: b'here I am'}
    """

    def __init__(self, *, store: Store, ranks: Sequence[int], rank: int, timeout_s: float = 60.0) -> None:
        """Meet in a store.

        Args:
            store: Any store of torch that all ranks reach, used by one rendezvous; put a
                ``PrefixStore`` around one that is shared.
            ranks: All that take part, the same on each.
            rank: This one.
            timeout_s: The longest that ``exchange`` waits.
        """
        self.ranks, self.rank, self.timeout_s = tuple(ranks), rank, timeout_s
        self._store: Any = store  # its stub knows no bytes
        self._turn = 0

    def exchange(self, value: bytes, *, turns: int = 1) -> dict[int, bytes]:
        """Give a value and get that of every rank. Returns on no rank before all have come.

        Args:
            value: What this rank says.
            turns: How many times ``timeout_s`` others may need before they come.

        Raises:
            TransportError: A rank failed; its message is quoted.
            TransportTimeoutError: Ranks did not come in time; they are named.
        """
        self._turn += 1
        keys = {rank: f"{self._turn}/{rank}" for rank in self.ranks}
        begin, pause = time.monotonic(), 0.001
        try:
            self._store.set(keys[self.rank], value)
            while not self._store.check(list(keys.values())):
                self._raise_failure()
                if time.monotonic() - begin > turns * self.timeout_s:
                    raise self._late([r for r, key in keys.items() if not self._store.check([key])], turns)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            self._raise_failure()
            found = {rank: self._store.get(key) for rank, key in keys.items()}
            if self._turn > 1:  # all are here, so all have read what was said before
                self._store.delete_key(f"{self._turn - 1}/{self.rank}")
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(
                "the store of a rendezvous answers",
                where=f"rank {self.rank}",
                equation=f"{type(error).__name__}: {error!s:.200}",
                hint="the process that serves the store is gone; start the move again with a new store",
            ) from error
        return found

    def fail(self, error: Exception) -> None:
        """Tell all ranks that this one failed; they raise in place of waiting. The first is quoted."""
        text = json.dumps([self.rank, f"{type(error).__name__}: {error}"[:400]])
        try:
            if not self._store.check(["failed"]):
                self._store.set("failed", text)
        except RuntimeError:
            return  # without a store nobody can be told, and the error at hand is the one to raise

    def _raise_failure(self) -> None:
        if self._store.check(["failed"]):
            rank, text = json.loads(self._store.get("failed"))
            raise TransportError(
                "a move is done on all ranks or on none",
                where=f"rank {rank}",
                equation=text,
                hint="mend what that rank reports; its destination and that of all others is incomplete",
            )

    def _late(self, ranks: list[int], turns: int) -> TransportTimeoutError:
        return TransportTimeoutError(
            "every rank of a move comes to the rendezvous in time",
            where=f"rank {self.rank} waits for {', '.join(f'rank {rank}' for rank in ranks[:8])}",
            equation=f"{len(ranks)} of {len(self.ranks)} ranks missing after "
            f"turns({turns}) * timeout_s({self.timeout_s:g})",
            hint="look at the logs of these ranks; raise timeout_s if they are only slow",
        )


def milliseconds(seconds: float) -> timedelta:
    """A timeout as torch takes it; at least a millisecond, as 0 would mean no bound."""
    return timedelta(milliseconds=max(1, round(1000 * seconds)))
