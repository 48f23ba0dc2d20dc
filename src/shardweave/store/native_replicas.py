"""Whether ranks that say that they hold the same box do, before one of them writes it for all.

Ranks that hold the same boxes tell each other one digest of all of these, which is short however many there
are. Only where two differ do they tell each other one of each box, so that the first is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardweave.errors import ReplicaError
from shardweave.layout.layout import format_ranks
from shardweave.store import native
from shardweave.store.native import entry_key
from shardweave.store.native_agree import Agreed, Exchange, together
from shardweave.store.native_elect import Place
from shardweave.store.native_held import check_values
from shardweave.store.native_manifest import DIGEST_BYTES
from shardweave.store.read import Array


def compare(agreed: Agreed, rank: int, *, exchange: Exchange, words: Callable[[Any], Array]) -> None:
    """Refuse a box that several ranks hold with different bytes, on all ranks.

    Args:
        agreed: What all ranks hold, and the values of this one.
        rank: This one.
        exchange: How ranks hear of each other.
        words: Makes values an array of words.

    Raises:
        ReplicaError: Two ranks hold different bytes of a box, or one changed meanwhile.
        FormatError: Values are of another dtype than was said.
    """
    if not agreed.shared:
        return
    numbers = {entry.place: i for i, entry in enumerate(agreed.entries[rank])}

    def digest(place: Place) -> bytes:
        number = numbers[place]
        entry, values = agreed.entries[rank][number], words(agreed.held[number].values)
        check_values(values, entry.dtype, entry.size, where=repr(entry.key))
        return native.digest_of(values)

    def of_each(ranks: Sequence[int], boxes: Sequence[Place]) -> bytes:
        return b"".join(map(digest, boxes)) if rank in ranks else b""

    def of_all() -> bytes:
        mine = (of_each(*one) for one in agreed.shared if rank in one[0])
        return b"".join(native.digest_of(np.frombuffer(each, np.uint8)) for each in mine)

    said = [_digests(data) for data in together(exchange, of_all)]
    # All ranks see the same, so all go on or all come to the same end.
    differ = (one for one in agreed.shared if len({next(said[r]) for r in one[0]}) > 1)
    ranks, boxes = next(differ, ((), ()))
    if not ranks:
        return
    told = [list(_digests(data)) for data in together(exchange, lambda: of_each(ranks, boxes))]
    for i, box in enumerate(boxes):
        has = Counter(told[r][i] for r in ranks)
        if len(has) > 1:
            most = next(r for r in ranks if told[r][i] == max(has, key=has.__getitem__))
            others = [r for r in ranks if told[r][i] != told[most][i]]
            raise ReplicaError(
                "ranks that hold the same elements hold the same bytes",
                where=f"{entry_key(*box)!r}, {format_ranks([most])} against {format_ranks(others)}",
                equation=f"xxh3({told[most][i].hex()[:16]}) != xxh3({told[others[0]][i].hex()[:16]})",
                hint="say which part each rank holds, or give it a name of its own on each; a replica that "
                "drifted apart missed a reduction",
            )
    raise ReplicaError(
        "what is saved stands still until save returns",
        where=format_ranks(ranks),
        equation=f"{len(boxes)} boxes differed, and are the same when they are looked at once more",
        hint="no step may run until save has returned on its rank",
    )


def _digests(data: bytes) -> Iterator[bytes]:
    return (data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES))
