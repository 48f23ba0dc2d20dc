"""The tables of a layout's dims, each made once: layouts have many dims that are equal."""

from __future__ import annotations

import numpy as np

from shardweave.layout.buffer import Sharded, table_of
from shardweave.layout.run import Dim
from shardweave.layout.table import Atoms, Ints, Table, atoms, table


class Tables:
    """Tables, atoms and lengths of dims. Equal dims give the same objects, so that ``is`` compares them."""

    def __init__(self) -> None:
        self._rows: dict[tuple[tuple[Dim, ...], str], Table] = {}
        self._lengths: dict[tuple[int, ...], Ints] = {}
        self._atoms: dict[int, Atoms] = {}
        # Hashing a dim walks its runs; the object itself, kept alive here, is the faster key.
        self._seen: dict[tuple[int, str], tuple[Dim | Sharded, Table, Ints]] = {}

    def table(self, dim: Dim | Sharded, label: str) -> Table:
        """The runs with ``label`` in each entry of a dim."""
        return self._of(dim, label)[1]

    def lengths(self, dim: Dim | Sharded) -> Ints:
        """The number of positions in each entry of a dim, whatever they hold."""
        return self._of(dim, "")[2]

    def atoms(self, rows: Table) -> Atoms:
        """``atoms(rows)`` of a table from here."""
        if id(rows) not in self._atoms:
            self._atoms[id(rows)] = atoms(rows)
        return self._atoms[id(rows)]

    def _of(self, dim: Dim | Sharded, label: str) -> tuple[Dim | Sharded, Table, Ints]:
        key = id(dim), label
        found = self._seen.get(key)
        if found is None:
            dims = table_of(dim)
            rows = self._rows.get((dims, label))
            if rows is None:
                rows = self._rows[dims, label] = table(dims, label)
            sizes = tuple(len(one) for one in dims)
            lengths = self._lengths.setdefault(sizes, np.array(sizes, dtype=np.int64))
            found = self._seen[key] = dim, rows, lengths
        return found
