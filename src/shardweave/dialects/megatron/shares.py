"""Shares of matrices: rows that ranks keep of what they gather for use (GTP_remat).

After the cut over tp, the rows that a rank would have of a matrix are filled up behind the last one and cut
evenly over the ranks that share it: a share of a column-parallel weight has some of its rank's rows, one of
a row-parallel weight some rows of its rank's columns. Norms, biases and routers are not shared. Padding is of
no element, and a share may be padding alone.

Source: Megatron-LM after 0.16, ``tensor_parallel/generalized_tensor_parallelism.py``; read, and not run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardweave.dialects.megatron.parameters import Parameter, Stretch
from shardweave.errors import GeometryError
from shardweave.layout import Box
from shardweave.layout.box import intersect_range


@dataclass(frozen=True, slots=True)
class Share:
    """Which share of its matrices a rank has.

    Attributes:
        number: The share.
        count: How many there are.
        multiple: The rows of a share are a multiple of it; 0 where rows have to divide evenly.
    """

    number: int = 0
    count: int = 1
    multiple: int = 16

    def rows(self, size: int) -> range:
        """The rows of the share among so many; from row ``size`` on they are padding.

        Raises:
            GeometryError: The rows do not divide evenly, and are not filled up.

        >>> [Share(n, 3, 8).rows(42) for n in range(3)]
        [range(0, 16), range(16, 32), range(32, 48)]
        """
        if self.count == 1:
            return range(size)
        if not self.multiple and size % self.count:
            raise GeometryError(
                "ranks that share a matrix have equally many rows of it",
                equation=f"rows({size}) % shares({self.count}) = {size % self.count} != 0",
                hint="shares are filled up to a multiple of rows (16 by default) where rows do not divide",
            )
        unit = self.count * max(1, self.multiple)
        held = math.ceil(size / unit) * unit // self.count
        return range(self.number * held, (self.number + 1) * held)


def shared(parameter: Parameter, share: Share) -> Parameter:
    """What a rank has of a parameter where ranks share matrices.

    Returns:
        A matrix with the rows of the share, of which those that are no padding are of stored arrays; anything
        else as it is, a replica on every share but the first.

    Law: the elements of all shares are those of the parameter, each once.

    >>> block = Box.of((0, 0), (5, 2))
    >>> matrix = Parameter("w", (5, 2), (Stretch("w", block, block),), gathered=True)
    >>> last = shared(matrix, Share(1, 2, 4))
    >>> last.shape, [(one.box.offset, one.box.shape) for one in last.stretches]
    ((4, 2), [((4, 0), (1, 2))])
    """
    if share.count == 1:
        return parameter
    if not parameter.gathered:
        return replace(parameter, replica=parameter.replica or share.number != 0)
    rows = share.rows(parameter.shape[0])
    stretches = []
    for one in parameter.stretches:
        here = intersect_range(one.at.dims[0], rows)
        if not len(here):
            continue
        first = len(one.box.dims) - len(one.at.dims)
        low = one.box.dims[first].start + here.start - one.at.dims[0].start
        box = Box((*one.box.dims[:first], range(low, low + len(here)), *one.box.dims[first + 1 :]))
        at = Box((range(here.start - rows.start, here.stop - rows.start), *one.at.dims[1:]))
        stretches.append(Stretch(one.array, box, at))
    return replace(parameter, shape=(len(rows), *parameter.shape[1:]), stretches=tuple(stretches))
