"""Many dims as columns of integers: who overlaps whom, and who holds what.

Both are answered on intervals after one change of variable: where runs have steps, an index ``x``
becomes the key ``(x mod L, x div L)`` with ``L`` a common multiple of the steps. In keys every run
is a few plain intervals, so that sorting is all that is needed: O(n log n) in runs, never in
indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardweave.errors import CutError
from shardweave.layout.run import Dim

Ints = NDArray[np.int64]

_MOST_PHASES = 1 << 20
_FEW_PAIRS = 1 << 10


@dataclass(frozen=True, slots=True)
class Table:
    """The runs of one tensor in a list of dims, one row a run.

    Attributes:
        entry: Which dim of the list the run is in.
        start, count, step: The run.
        at: Storage position of the run's first index in its dim.
        stride: Distance in storage between neighbouring indices of the run; 1 unless a run was cut
            into phases.
    """

    entry: Ints
    start: Ints
    count: Ints
    step: Ints
    at: Ints
    stride: Ints

    def __len__(self) -> int:
        return len(self.entry)

    def __getitem__(self, rows: NDArray[np.bool_] | Ints) -> Table:
        return Table(*(getattr(self, name)[rows] for name in self.__slots__))


def table(dims: Sequence[Dim], label: str) -> Table:
    """The runs with ``label`` in each dim of a list, as columns."""
    rows = [
        (entry, run.start, run.count, run.step, at, 1)
        for entry, dim in enumerate(dims)
        for run, at in zip(dim.runs, dim.positions, strict=True)
        if run.label == label
    ]
    return Table(*np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, 6).T))


@dataclass(frozen=True, slots=True)
class Join:
    """Common stretches of two tables: ``count`` indices ``start, start + step, ...`` held by both.

    ``row_a`` and ``row_b`` are rows of the tables; ``at_a`` and ``stride_a`` say where the stretch
    lies in the storage of the first, and so for the second.
    """

    row_a: Ints
    row_b: Ints
    start: Ints
    step: Ints
    count: Ints
    at_a: Ints
    stride_a: Ints
    at_b: Ints
    stride_b: Ints

    def __len__(self) -> int:
        return len(self.row_a)

    def __getitem__(self, rows: NDArray[np.bool_] | Ints) -> Join:
        return Join(*(getattr(self, name)[rows] for name in self.__slots__))


def join(a: Table, b: Table) -> Join:
    """Every common stretch of a run of ``a`` and a run of ``b``.

    Law: the pairs (storage in a, storage in b) listed by the stretches are exactly the pairs of
    positions that hold the same index.
    """
    parts: list[Join] = []
    for step_a in sorted(set(a.step.tolist())):
        for step_b in sorted(set(b.step.tolist())):
            rows_a, rows_b = np.flatnonzero(a.step == step_a), np.flatnonzero(b.step == step_b)
            parts.append(_join_steps(a, rows_a, b, rows_b))
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Join(*(none for _ in Join.__slots__))
    if len(parts) == 1:
        return parts[0]
    return Join(*(np.concatenate([getattr(part, name) for part in parts]) for name in Join.__slots__))


def _join_steps(a: Table, rows_a: Ints, b: Table, rows_b: Ints) -> Join:
    period = math.lcm(int(a.step[rows_a[0]]), int(b.step[rows_b[0]]))
    from_a, x = _phases(a[rows_a], period)
    from_b, y = _phases(b[rows_b], period)
    span = 1 + max(_most(x.start + x.step * x.count), _most(y.start + y.step * y.count)) // period
    low_a, low_b = _keys(x.start, period, span), _keys(y.start, period, span)
    i, j = _overlaps(low_a, low_a + x.count, low_b, low_b + y.count)
    low = np.maximum(low_a[i], low_b[j])
    count = np.minimum(low_a[i] + x.count[i], low_b[j] + y.count[j]) - low
    skip_a, skip_b = low - low_a[i], low - low_b[j]
    return Join(
        row_a=rows_a[from_a[i]],
        row_b=rows_b[from_b[j]],
        start=x.start[i] + skip_a * period,
        step=np.full(len(i), period, dtype=np.int64),
        count=count,
        at_a=x.at[i] + skip_a * x.stride[i],
        stride_a=x.stride[i],
        at_b=y.at[j] + skip_b * y.stride[j],
        stride_b=y.stride[j],
    )


def _phases(rows: Table, period: int) -> tuple[Ints, Table]:
    """Each run as runs of step ``period``, a multiple of its step; and the row that each came from."""
    turns = period // rows.step
    if len(rows) and int(turns.max()) == 1:
        return np.arange(len(rows)), rows
    phases = np.minimum(turns, rows.count)
    if int(phases.sum()) - len(rows) > _MOST_PHASES:
        raise CutError(
            "the steps of two dims have a small common multiple",
            where=f"runs with steps {', '.join(str(step) for step in np.unique(rows.step))}",
            equation=f"lcm({period}) cuts {len(rows)} runs into {int(phases.sum())} phases > {_MOST_PHASES}",
            hint="describe the interleaving by blocks instead of steps",
        )
    origin = np.repeat(np.arange(len(rows)), phases)
    phase = within(phases)
    count = -((phase - rows.count[origin]) // turns[origin])
    source = rows[origin]
    return origin, Table(
        entry=source.entry,
        start=source.start + phase * source.step,
        count=count,
        step=np.full(len(origin), period, dtype=np.int64),
        at=source.at + phase * source.stride,
        stride=source.stride * turns[origin],
    )


def _keys(start: Ints, period: int, span: int) -> Ints:
    return start if period == 1 else start % period * span + start // period


def _most(values: Ints) -> int:
    return int(values.max()) if len(values) else 0


def within(counts: Ints) -> Ints:
    """``0..counts[0]-1, 0..counts[1]-1, ...`` as one column."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


def _overlaps(low_a: Ints, high_a: Ints, low_b: Ints, high_b: Ints) -> tuple[Ints, Ints]:
    """All pairs of overlapping intervals, each once.

    Either the second begins inside the first, or the first begins inside the second and not at its
    beginning.
    """
    if len(low_a) * len(low_b) <= _FEW_PAIRS:
        # Comparing a few intervals costs less than sorting them.
        found = np.nonzero((low_a[:, None] < high_b) & (low_b < high_a[:, None]))
        return found[0], found[1]
    order_a, order_b = np.argsort(low_a, kind="stable"), np.argsort(low_b, kind="stable")
    sorted_a, sorted_b = low_a[order_a], low_b[order_b]
    first, last = np.searchsorted(sorted_b, low_a, "left"), np.searchsorted(sorted_b, high_a, "left")
    i = np.repeat(np.arange(len(low_a)), last - first)
    j = order_b[np.repeat(first, last - first) + within(last - first)]
    first, last = np.searchsorted(sorted_a, low_b, "right"), np.searchsorted(sorted_a, high_b, "left")
    last = np.maximum(first, last)
    k = np.repeat(np.arange(len(low_b)), last - first)
    m = order_a[np.repeat(first, last - first) + within(last - first)]
    i, j = np.concatenate([i, m]), np.concatenate([j, k])
    order = np.lexsort((j, i))
    return i[order], j[order]


@dataclass(frozen=True, slots=True)
class Atoms:
    """The indices of a table cut where the set of holders changes.

    Attributes:
        pieces: One row an atom; ``entry`` is the atom's own number and ``at`` is 0, so that a join
            with ``pieces`` gives positions inside the atom.
        first: Row of ``holders`` at which the holders of each atom begin, and one past the end.
        holders: One row for each pair of atom and holder: the run of the table that holds the atom,
            cut to it.
    """

    pieces: Table
    first: Ints
    holders: Table


def atoms(rows: Table) -> Atoms:
    """Cut the indices of a table where the set of holders changes.

    Law: the atoms are disjoint, and together they hold the indices of the table.
    """
    if not len(rows):
        return Atoms(rows, np.zeros(1, dtype=np.int64), rows)
    if int(rows.step.max()) == 1:
        held = rows[np.argsort(rows.start, kind="stable")]
        ends = np.maximum.accumulate(held.start + held.count)
        if not (held.start[1:] < ends[:-1]).any():
            return Atoms(_numbered(held.start, held.count, held.step), np.arange(len(rows) + 1), held)
    period = math.lcm(*(int(step) for step in np.unique(rows.step)))
    _, x = _phases(rows, period)
    span = 1 + _most(x.start + x.step * x.count) // period
    low = _keys(x.start, period, span)
    edges = np.unique(np.concatenate([low, low + x.count]))
    atom, row = _overlaps(edges[:-1], edges[1:], low, low + x.count)
    skip = edges[atom] - low[row]
    used, atom = np.unique(atom, return_inverse=True)
    held = x[row]
    size = (edges[1:] - edges[:-1])[used]
    holders = Table(
        entry=held.entry,
        start=held.start + skip * period,
        count=size[atom],
        step=held.step,
        at=held.at + skip * held.stride,
        stride=held.stride,
    )
    first = np.searchsorted(atom, np.arange(len(used) + 1), "left")
    pieces = _numbered(holders.start[first[:-1]], size, np.full(len(used), period, dtype=np.int64))
    return Atoms(pieces, first, holders)


def _numbered(start: Ints, count: Ints, step: Ints) -> Table:
    n = len(start)
    return Table(np.arange(n), start, count, step, np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64))
