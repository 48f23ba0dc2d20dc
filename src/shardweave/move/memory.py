"""Ranks in one process: the reference that every other transport is compared with."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from shardweave.move.transport import Arrays, Moved, Reads, endpoint_of, pull, tensors
from shardweave.move.views import Rounds
from shardweave.plan import Copy, Plan


class MemoryTransport:
    """One-sided: ranks, as threads or one after the other, read each other's arrays.

    >>> import numpy as np
    >>> table = {}
    >>> MemoryTransport(table, rank=2).offer({"w": np.zeros(3)})
    b'2'
    """

    def __init__(self, table: MutableMapping[int, Arrays], *, rank: int) -> None:
        """One rank's end.

        Args:
            table: What each rank offers; the same object on every rank.
            rank: This rank.
        """
        self.rank, self._table = rank, table
        self._known: Rounds[Reads] = Rounds()

    def offer(self, arrays: Mapping[str, Any]) -> bytes:
        """See ``Transport.offer``."""
        self._table[self.rank] = tensors(arrays)
        return str(self.rank).encode()

    def run(
        self,
        plan: Plan,
        copies: Sequence[Copy],
        *,
        src: Arrays,
        dst: Arrays,
        endpoints: Mapping[int, bytes],
    ) -> Moved:
        """See ``Transport.run``."""
        return pull(
            copies,
            rank=self.rank,
            dst=dst,
            offered=lambda rank: self._table[int(endpoint_of(endpoints, rank))],
            known=self._known,
        )

    def close(self) -> None:
        """See ``Transport.close``."""
        self._table.pop(self.rank, None)
        self._known.clear()
