"""The proof of a layout: every element of every tensor held, once or by declared replicas.

A rule holds, over all its coordinates, the product of what its dims hold over their axes, because
each axis cuts one dim. So the proof of a rule is one sort for each dim, and never looks at ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from shardweave.errors import GapError, OutsideError, OverlapError
from shardweave.layout.box import Box, intersect, subtract
from shardweave.layout.buffer import BufferRule, Part
from shardweave.layout.layout import Layout, format_ranks
from shardweave.layout.run import Dim, Run
from shardweave.layout.table import Table, join, table
from shardweave.layout.tables import Tables
from shardweave.layout.tensor import Tensor


def prove(layout: Layout, tensors: Iterable[Tensor] | None = None, *, tables: Tables | None = None) -> None:
    """Prove that a layout holds every element of its tensors, and of ``tensors`` where given.

    Laws, for every tensor:
        No gap: each element is held by some rank.
        No overlap: of several coordinates or buffers that hold an element, all but one declare it a
        replica; coordinates of one buffer share its declaration.
        Nothing outside: a buffer names no index that its tensor does not have.
        Padding is not counted: it belongs to no tensor.

    Args:
        layout: The layout.
        tensors: Tensors that it must hold beside those that it names.
        tables: Where the tables of its dims are kept, for a caller that goes on with them.

    Raises:
        GapError, OverlapError, OutsideError: With the tensor, the box and the ranks.
    """
    union = _Unions(layout, tables or Tables())
    for tensor in dict.fromkeys((*layout.tensors, *(tensors or ()))):
        _prove_tensor(layout, tensor, union)


def _prove_tensor(layout: Layout, tensor: Tensor, union: _Unions) -> None:
    domain = tensor.dims
    left = [Box(ranges) for ranges in itertools.product(*(_ranges(dim) for dim in domain))]
    owned: list[tuple[int, Box]] = []
    for i, part in layout.holders.get(tensor, ()):
        rule = layout.rules[i]
        held = (union.of(rule, part, d, dim) for d, dim in enumerate(domain))
        boxes = [Box(ranges) for ranges in itertools.product(*held)]
        left = [] if left == boxes else [rest for piece in left for rest in _subtract_all(piece, boxes)]
        if part.replica:
            continue
        for box in boxes:
            for j, other in owned:
                common = intersect(box, other)
                if common is not None:
                    raise OverlapError(
                        "an element is owned by one buffer",
                        where=f"layout {layout.name!r}, tensor {tensor.name!r}, box {common}",
                        equation=f"held by buffer {layout.rules[j].name!r} and by buffer {rule.name!r}",
                        hint="declare the copy a replica (Part(replica=True)), or cut the buffers apart",
                    )
        owned += [(i, box) for box in boxes]
    if left:
        raise GapError(
            "every element of a tensor is held by some rank",
            where=f"layout {layout.name!r}, tensor {tensor.name!r}, box {left[0]}",
            equation=f"missing {sum(box.numel for box in left)} of {tensor.numel} elements",
            hint="compare the sizes of the cuts with the tensor's shape; a remainder is often dropped",
        )


class _Unions:
    """What rules hold of a dim over all coordinates, as ranges; what is equal is looked at once."""

    def __init__(self, layout: Layout, tables: Tables) -> None:
        self.layout, self.tables = layout, tables
        self.known: dict[tuple[int, Dim, bool], list[range]] = {}

    def of(self, rule: BufferRule, part: Part, d: int, domain: Dim) -> list[range]:
        rows = self.tables.table(rule.dims[d], rule.label_of(d, part.label))
        key = id(rows), domain, part.replica
        if key not in self.known:
            self.known[key] = self._union(rule, part, d, rows, domain)
        return self.known[key]

    def _union(self, rule: BufferRule, part: Part, d: int, rows: Table, domain: Dim) -> list[range]:
        layout = self.layout
        _check_inside(layout, rule, part, d, rows, domain)
        found = self.tables.atoms(rows)
        counts = np.diff(found.first)
        if not part.replica and len(counts) and int(counts.max()) > 1:
            atom = int(np.argmax(counts > 1))
            first, second = (int(e) for e in found.holders.entry[found.first[atom] : found.first[atom] + 2])
            raise OverlapError(
                "an element is held by one coordinate on the axes that cut it",
                where=(
                    f"layout {layout.name!r}, tensor {part.tensor.name!r}, dim {d}, "
                    f"indices {_range(found.pieces, atom)}"
                ),
                equation=(
                    f"held by {format_ranks(layout.ranks_of(rule, d, first))} "
                    f"and by {format_ranks(layout.ranks_of(rule, d, second))}"
                ),
                hint="declare the part a replica (Part(replica=True)) where the copies are meant to agree",
            )
        if int(found.pieces.count.sum()) == len(domain):  # atoms are disjoint and inside: all of it
            return _ranges(domain)
        order = np.argsort(found.pieces.start, kind="stable")
        return _ranges(Dim(_run(found.pieces, int(k)) for k in order))


def _check_inside(layout: Layout, rule: BufferRule, part: Part, d: int, rows: Table, domain: Dim) -> None:
    if len(domain.runs) == 1 and domain.runs[0].step == 1:
        last = rows.start + (rows.count - 1) * rows.step
        inside = (rows.start >= domain.runs[0].start) & (last <= domain.runs[0].last)
    else:
        common = join(rows, table((domain,), ""))
        matched = np.bincount(common.row_a, weights=common.count, minlength=len(rows))
        inside = matched.astype(np.int64) == rows.count
    if inside.all():
        return
    row = int(np.argmin(inside))
    raise OutsideError(
        "a buffer holds only elements that its tensor has",
        where=(
            f"layout {layout.name!r}, buffer {rule.name!r}, tensor {part.tensor.name!r}, dim {d}, "
            f"{format_ranks(layout.ranks_of(rule, d, int(rows.entry[row])))}"
        ),
        equation=f"indices {_range(rows, row)} are not all in {domain}",
        hint="padding is written with pad(), so that it belongs to no tensor",
    )


def _run(rows: Table, i: int) -> Run:
    return Run("", int(rows.start[i]), int(rows.count[i]), int(rows.step[i]))


def _range(rows: Table, i: int) -> str:
    return str(Dim((_run(rows, i),)))


def _ranges(dim: Dim) -> list[range]:
    return [range(run.start, run.last + 1, run.step) for run in dim.runs]


def _subtract_all(piece: Box, boxes: Sequence[Box]) -> list[Box]:
    left = [piece]
    for box in boxes:
        left = [rest for one in left for rest in subtract(one, box)]
    return left
