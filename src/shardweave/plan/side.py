"""A layout as columns: its ranks by what they hold, and the runs of its buffers, each made once."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardweave.layout import BufferRule, Layout
from shardweave.layout.buffer import axes_of
from shardweave.layout.layout import num_entries
from shardweave.layout.table import Atoms, Ints, Table, within
from shardweave.layout.tables import Tables


@dataclass(frozen=True, slots=True)
class Classes:
    """The ranks of one buffer by what they hold: those with the same entry in every dim are a class.

    Attributes:
        entry: The entry of each class in each dim, ``(num_classes, num_dims)``.
        weight: The class of entries ``e`` is ``e @ weight``.
        of_rank: The class of each rank of the mesh; -1 where the buffer does not exist.
        ranks: Global ranks, class after class, ascending in each.
        first: Where the ranks of each class begin, and one past the end.
    """

    entry: Ints
    weight: Ints
    of_rank: Ints
    ranks: Ints
    first: Ints

    @property
    def size(self) -> Ints:
        """The number of ranks of each class."""
        return self.first[1:] - self.first[:-1]


@dataclass(frozen=True, slots=True)
class Held:
    """Who holds what of one dim: the table cut into atoms, and the sets of entries that hold them.

    Attributes:
        atoms: The atoms.
        group: For each atom, the number of the set of entries that hold it.
        entry: The entries of each set, set after set.
        first: Where the entries of each set begin, and one past the end.
    """

    atoms: Atoms
    group: Ints
    entry: Ints
    first: Ints

    @property
    def shared(self) -> bool:
        """Whether some index is held more than once, so that its place depends on who is asked."""
        return len(self.atoms.holders) > len(self.atoms.pieces)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one part of a buffer over all its dims, to be found by position.

    Entries of all dims are numbered in one sequence; those of dim ``d`` begin at ``base[d]``.

    Attributes:
        base: The number of the first entry of each dim.
        length: For each entry, its positions, those of padding and of other parts included.
        held: For each entry, the positions that are of this part.
        rows: All runs, by entry and position.
        key: ``entry * span + at`` of each run, ascending.
        span: More than any position.
    """

    base: Ints
    length: Ints
    held: Ints
    rows: Table
    key: Ints
    span: int

    def find(self, entry: Ints, at: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """The run that each position lies in, and whether there is one."""
        if not len(self.key):
            return np.zeros_like(at), np.zeros(at.shape, dtype=np.bool_)
        found = np.searchsorted(self.key, entry * self.span + at, "right") - 1
        row = np.maximum(found, 0)
        inside = (
            (found >= 0) & (self.rows.entry[row] == entry) & (at < self.rows.at[row] + self.rows.count[row])
        )
        return row, inside


class Side:
    """One side of a plan. Equal dims and equal cuts, which layouts have many of, share their columns."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.tables = Tables()
        self._held: dict[int, Held] = {}
        # By number of the rule, and by what the columns follow from, which several rules share.
        self._classes_of: dict[int, Classes] = {}
        self._classes: dict[object, Classes] = {}
        self._runs_of: dict[tuple[int, str], Runs] = {}
        self._runs: dict[tuple[int, ...], Runs] = {}

    def table(self, number: int, dim: int, label: str) -> Table:
        """The runs of the part ``label`` in one dim of rule ``number``; equal dims give the same object."""
        rule = self.layout.rules[number]
        return self.tables.table(rule.dims[dim], rule.label_of(dim, label))

    def held(self, rows: Table) -> Held:
        """Who holds what of a table of this side."""
        if id(rows) not in self._held:
            self._held[id(rows)] = _held(self.tables.atoms(rows))
        return self._held[id(rows)]

    def classes(self, number: int) -> Classes:
        """The ranks of rule ``number`` by what they hold."""
        found = self._classes_of.get(number)
        if found is None:
            rule = self.layout.rules[number]
            key = tuple(axes_of(dim) for dim in rule.dims), rule.where
            if key not in self._classes:
                self._classes[key] = _classes(self.layout, rule)
            found = self._classes_of[number] = self._classes[key]
        return found

    def runs(self, number: int, label: str) -> Runs:
        """The runs of the part ``label`` of rule ``number``."""
        found = self._runs_of.get((number, label))
        if found is None:
            rule = self.layout.rules[number]
            tables = [self.table(number, d, label) for d in range(len(rule.dims))]
            lengths = [self.tables.lengths(dim) for dim in rule.dims]
            key = tuple(id(columns) for columns in (*tables, *lengths))
            if key not in self._runs:
                self._runs[key] = _runs(tables, lengths)
            found = self._runs_of[number, label] = self._runs[key]
        return found


def _classes(layout: Layout, rule: BufferRule) -> Classes:
    sizes = num_entries(rule)
    num = math.prod(sizes)
    weight = np.cumprod((1, *sizes), dtype=np.int64)[:-1]
    of_rank = np.where(layout.exists(rule), layout.entries(rule) @ weight, -1)
    order = np.argsort(of_rank, kind="stable")
    return Classes(
        entry=np.arange(num)[:, None] // weight % np.array(sizes, dtype=np.int64),
        weight=weight,
        of_rank=of_rank,
        ranks=order + layout.mesh.offset,
        first=np.searchsorted(of_rank[order], np.arange(num + 1), "left"),
    )


def _runs(tables: list[Table], lengths: list[Ints]) -> Runs:
    base = np.cumsum([0, *(len(each) for each in lengths)], dtype=np.int64)[:-1]
    length = _joined(lengths)
    entry = _joined([rows.entry + first for rows, first in zip(tables, base, strict=True)])
    rows = Table(entry, *(_joined([getattr(rows, name) for rows in tables]) for name in Table.__slots__[1:]))
    span = 1 + int(length.max(initial=0))
    held = np.bincount(entry, weights=rows.count, minlength=len(length)).astype(np.int64)
    return Runs(base, length, held, rows, entry * span + rows.at, span)


def _joined(columns: list[Ints]) -> Ints:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)


def _held(found: Atoms) -> Held:
    entry = found.holders.entry
    if len(found.holders) == len(found.pieces):
        number = 1 + int(entry.max(initial=-1))
        return Held(found, entry, np.arange(number), np.arange(number + 1))
    # Sets of entries are compared as tuples; only dims with replicas along the axis that cuts them get here.
    bounds = found.first.tolist()
    sets: dict[tuple[int, ...], int] = {}
    group = np.array(
        [
            sets.setdefault(tuple(sorted(set(entry[a:b].tolist()))), len(sets))
            for a, b in itertools.pairwise(bounds)
        ]
    )
    sizes = np.array([len(members) for members in sets])
    first = np.concatenate([[0], np.cumsum(sizes)])
    return Held(found, group, np.array([e for members in sets for e in members]), first)


def every_pair(first: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """The members of chosen lists that lie one after the other: who chose, and the member's place.

    List ``c`` is ``first[c]`` to ``first[c + 1]``.

    >>> every_pair(np.array([0, 2, 5]), np.array([1, 0]))
    (array([0, 0, 0, 1, 1]), array([2, 3, 4, 0, 1]))
    """
    counts = first[chosen + 1] - first[chosen]
    return np.repeat(np.arange(len(chosen)), counts), np.repeat(first[chosen], counts) + within(counts)


def tally(key: Ints, span: int) -> tuple[Ints, Ints, Ints]:
    """The distinct keys ascending, where each is first, and how often it occurs. Keys are below ``span``.

    >>> tally(np.array([2, 0, 2]), 3)
    (array([0, 2]), array([1, 0]), array([1, 2]))
    """
    if span > 8 * len(key) + 1024:
        return np.unique(key, return_index=True, return_counts=True)
    # Most keys occur, so counting them is cheaper than sorting.
    number = np.bincount(key, minlength=span)
    first = np.zeros(span, dtype=np.int64)
    first[key[::-1]] = np.arange(len(key) - 1, -1, -1)
    found = np.flatnonzero(number)
    return found, first[found], number[found]
