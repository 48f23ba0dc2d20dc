"""Whether ranks that say that they hold the same box do, before one of them writes it for all.

Ranks that hold the same boxes tell each other one digest of all of these, which is short however many there
are. Only where two differ do they tell each other one of each box, so that the first is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardweave.errors import ReplicaError
from shardweave.store import native
from shardweave.store.native import entry_key
from shardweave.store.native_agree import Agreed, Exchange, together
from shardweave.store.native_elect import Place
from shardweave.store.read import Array

_DIGEST_BYTES = 16


def compare(agreed: Agreed, rank: int, *, exchange: Exchange, words: Callable[[Any], Array]) -> None:
    """Refuse a box that several ranks hold with different bytes, on all ranks.

    Args:
        agreed: What all ranks hold, and the values of this one.
        rank: This one.
        exchange: How ranks hear of each other.
        words: Makes values an array of words.

    Raises:
        ReplicaError: Two ranks hold different bytes of a box.
    """
    if not agreed.shared:
        return
    numbers = {entry.place: i for i, entry in enumerate(agreed.entries[rank])}

    def of_each(ranks: Sequence[int], boxes: Sequence[Place]) -> bytes:
        if rank not in ranks:
            return b""
        return b"".join(native.digest_of(words(agreed.held[numbers[box]].values)) for box in boxes)

    def of_all() -> bytes:
        mine = (of_each(*one) for one in agreed.shared if rank in one[0])
        return b"".join(native.digest_of(np.frombuffer(each, np.uint8)) for each in mine)

    said = [_digests(data) for data in together(exchange, of_all)]
    # All ranks see the same, so all go on or all come to the same end.
    differ = (one for one in agreed.shared if len({next(said[r]) for r in one[0]}) > 1)
    ranks, boxes = next(differ, ((), ()))
    if not ranks:
        return
    first = ranks[0]
    told = [list(_digests(data)) for data in together(exchange, lambda: of_each(ranks, boxes))]
    pairs = ((i, r) for i in range(len(boxes)) for r in ranks if told[r][i] != told[first][i])
    i, other = next(pairs, (0, first))
    where, differs = f"{entry_key(*boxes[i])!r}, ranks {first} and {other} of {len(ranks)} with it", "!="
    if other == first:
        where, differs = f"{len(boxes)} boxes of ranks {ranks}", "changed while they were compared:"
    raise ReplicaError(
        "ranks that hold the same elements hold the same bytes",
        where=where,
        equation=f"xxh3({told[first][i].hex()[:16]}) {differs} xxh3({told[other][i].hex()[:16]})",
        hint="say which part each rank holds, or give it a name of its own on each; a replica that drifted "
        "apart missed a reduction",
    )


def _digests(data: bytes) -> Iterator[bytes]:
    return (data[at : at + _DIGEST_BYTES] for at in range(0, len(data), _DIGEST_BYTES))
