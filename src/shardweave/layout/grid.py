"""Block scales: which blocks of a grid a dim holds, where it holds each of them whole.

A weight that is quantised in blocks has one scale for each block of rows and columns. The scales of a
shard are a shard of the scales exactly where no block is cut; then they follow from the weight's own cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardweave.errors import CutError
from shardweave.layout.run import PAD, Dim, Run


def on_grid(dim: Dim, block: int, sizes: Mapping[str, int]) -> Dim:
    """The blocks that a dim holds, in its order.

    Args:
        dim: Rows or columns of weights.
        block: Rows or columns of a block; blocks are counted from the first row of each tensor.
        sizes: By label, how many there are in all: the last block of a tensor may be a part of one.

    Law: ``on_grid(whole(n), b, {"": n}) == whole(ceil(n / b))``; an index ``i`` of the dim is in block
    ``i // b`` of the result, at the place that ``i``'s own place has in blocks.

    Raises:
        CutError: A block is cut, or one that is not full is followed by another.

    >>> from shardweave.layout import concat, even, whole
    >>> print(on_grid(even(whole(1024), 2, 1), 128, {"": 1024}))
    [4:8]
    >>> print(on_grid(concat(whole(1536, "q"), whole(576, "kv")), 128, {"q": 1536, "kv": 576}))
    q[0:12] kv[0:5]
    """
    if block == 1:
        return dim
    found = []
    for i, run in enumerate(dim.runs):
        begin, end = run.start, run.start + run.count
        size = end if run.label is PAD else sizes[run.label]
        whole_blocks = begin % block == 0 and (end % block == 0 or (end == size and i == len(dim.runs) - 1))
        if not whole_blocks or (run.step != 1 and run.count > 1):
            raise CutError(
                "a cut of a weight with block scales is along its blocks",
                where=f"run {Dim([run])} of {size}",
                equation=f"start({begin}) % block({block}) = {begin % block}, "
                f"end({end}) % block({block}) = {end % block}",
                hint="choose degrees whose shares are multiples of the block, or convert the weights to a "
                "dtype without scales first",
            )
        found.append(Run(run.label, begin // block, -(-end // block) - begin // block))
    return Dim(found)
