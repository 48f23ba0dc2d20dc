"""Cutting a box into slabs that follow one another in row-major storage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from shardweave.layout import Box


def slabs(offset: Sequence[int], shape: Sequence[int], most: int) -> Iterator[Box]:
    """The box at ``offset`` as boxes of at most ``most`` elements, in storage order.

    Law: the row-major bytes of the slabs, one after the other, are those of the box.

    >>> [str(slab) for slab in slabs((0, 4), (2, 6), 4)]
    ['[0:1, 4:8]', '[0:1, 8:10]', '[1:2, 4:8]', '[1:2, 8:10]']
    """
    if not math.prod(shape):
        return
    inner = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    cut = next((d for d, n in enumerate(inner) if n <= most), len(shape) - 1)
    outer = itertools.product(*(range(o, o + n) for o, n in zip(offset[:cut], shape[:cut], strict=True)))
    if not shape:
        yield Box(())
        return
    step = max(1, most // inner[cut])
    for index in outer:
        for start in range(0, shape[cut], step):
            size = (*(1 for _ in index), min(step, shape[cut] - start), *shape[cut + 1 :])
            yield Box.of((*index, offset[cut] + start, *offset[cut + 1 :]), size)
