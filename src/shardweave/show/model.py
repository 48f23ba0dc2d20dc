"""What a picture shows, before it is drawn: a row for each set of ranks that hold the same.

A ``Panel`` is of one buffer and one of its dims: a row is what some ranks store of that dim, as bands
in storage order. Where other dims differ between ranks as well (layers along the pipeline, experts),
the rows are grouped by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardweave.layout import PAD, BufferRule, Dim, Layout, Mesh, Sharded, Tensor, whole
from shardweave.layout.buffer import axes_of, table_of
from shardweave.layout.table import Ints, atoms, table
from shardweave.show.choose import drawn_dim, matching, refuse_name
from shardweave.show.words import dim_names, indices, numbers, ranks_named, role, span

MOST_ROWS = 16

HEADS = ("q", "k", "v")
_SCALAR = (whole(1),)
_SHAPE = ("row", "column", "element")


# --- what is drawn ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of a stored dim: ``count`` places from ``at``, holding indices from ``start``.

    Attributes:
        label: Whose indices they are, ``PAD`` for nobody's.
        noun: What the indices count ("rows", "experts").
        at, count: Where the stretch lies in storage.
        start, step: The indices that lie there.
        unit: Indices that belong together and are told apart in the picture: the rows of a head, one
            expert. 0 where there are none.
        replica: Whether other rows hold the same indices.
    """

    label: str | None
    noun: str
    at: int
    count: int
    start: int
    step: int = 1
    unit: int = 0
    replica: bool = False

    @property
    def stop(self) -> int:
        """One past the last index."""
        return self.start + (self.count - 1) * self.step + 1

    @property
    def what(self) -> str:
        """The band in words.

        >>> Band("q", "rows", 0, 1024, 0, unit=128).what, Band("q", "rows", 0, 1088, 1088, unit=128).what
        ('q heads 0-7', 'q 8.5 heads from 8.5')
        """
        if self.label is PAD:
            return f"pad {self.count}"
        lead = f"{self.label} " if self.label else ""
        if self.unit < 2 or self.step > 1:
            return lead + span(self.noun, self.start, self.stop, self.step)
        first, size = self.start / self.unit, self.count / self.unit
        if first * 8 % 1 or size * 8 % 1:
            return lead + span(self.noun, self.start, self.stop)
        if first % 1 or size % 1:
            return f"{lead}{size:g} {'head' if size == 1 else 'heads'} from {first:g}"
        return lead + span("heads", int(first), int(first + size))

    @property
    def cells(self) -> tuple[tuple[int, int, int], ...]:
        """The units of the band: number, and first and one past last place, counted from ``at``."""
        if self.label is PAD or self.step > 1 or not self.unit:
            return ()
        inside = range(self.start // self.unit, -(-self.stop // self.unit))
        return tuple(
            (n, max(n * self.unit - self.start, 0), min((n + 1) * self.unit - self.start, self.count))
            for n in inside
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What some ranks hold: all of ``ranks`` the same.

    Attributes:
        name: The ranks in words: ``tp 0 (ranks 0, 2)``.
        ranks: The ranks.
        bands: What they store, in storage order.
        group: What they hold of the other dims, where that differs between rows.
        missing: Labels of the buffer that they hold nothing of.
    """

    name: str
    ranks: tuple[int, ...]
    bands: tuple[Band, ...]
    group: str = ""
    missing: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Places that are stored."""
        return sum(band.count for band in self.bands)


@dataclass(frozen=True, slots=True)
class Panel:
    """The rows of one buffer.

    Attributes:
        title: The buffer.
        subtitle: The layout, and what else is to be known of the buffer.
        rows: The rows that are drawn.
        hidden: How many rows are left out after the first half of those drawn.
        placed: Whether a band is drawn where its indices lie in the whole dim, and not where they
            are stored. It is so where the buffer holds one tensor.
        size: Places or indices that the widest row spans.
        origin, end: Where bands are drawn where their indices lie, the first index and one past the last.
        cuts: Places at which the picture marks a cut.
    """

    title: str
    subtitle: str
    rows: tuple[Row, ...]
    hidden: int = 0
    placed: bool = False
    size: int = 1
    origin: int = 0
    end: int = 0
    cuts: tuple[int, ...] = ()

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The labels of its bands, in order of first appearance."""
        return tuple(dict.fromkeys(band.label for row in self.rows for band in row.bands))

    def places(self, row: Row) -> Iterator[tuple[int, Band]]:
        """Where each band of a row is drawn; where indices are apart, each is a band of its own."""
        end = self.end - self.origin
        for band in row.bands:
            if not self.placed or band.label is PAD:
                # Padding has no index: it follows what it pads, the end of the dim where that is elsewhere.
                at = end if self.placed else band.at
                end = at + band.count
                yield at, band
                continue
            for i in range(band.count if band.step > 1 else 1):
                one = replace(band, at=band.at + i, count=1, start=band.start + i * band.step, step=1)
                yield band.start - self.origin + i * band.step, one if band.step > 1 else band
            end = band.stop - self.origin

    def width(self) -> int:
        """Places that the widest row spans."""
        return max([at + band.count for row in self.rows for at, band in self.places(row)], default=1)


# --- layouts ------------------------------------------------------------------------------------


def panels(
    layout: Layout,
    *,
    select: str | None = None,
    dim: str | None = None,
    head_dim: int = 0,
    most: int = MOST_ROWS,
) -> tuple[Panel, ...]:
    """The panels of the buffers that a word selects; all of them where there is no word.

    Args:
        layout: The layout.
        select: A label, a name of a buffer or tensor, or a part of one.
        dim: The dim to draw, by name; see ``drawn_dim``.
        head_dim: Rows of a head, for buffers of ``q``, ``k`` and ``v``.
        most: Rows that a panel draws at most.

    Raises:
        UnknownNameError: Nothing has that name.
    """
    found = matching(layout, select)
    if not found and select is not None:
        refuse_name(select, layout)
    return tuple(
        panel(layout, layout.rules[i], drawn_dim(layout.rules[i], dim), head_dim=head_dim, most=most)
        for i in found
    )


def overview(found: Sequence[Panel]) -> tuple[tuple[Panel, ...], tuple[Panel, ...]]:
    """The panels that are worth drawing among all of a layout, and those that all ranks hold whole."""
    alike = [len(one.rows) == 1 and len(one.rows[0].bands) == 1 for one in found]
    drawn = tuple(one for one, same in zip(found, alike, strict=True) if not same)
    return drawn, tuple(one for one, same in zip(found, alike, strict=True) if same)


def panel(layout: Layout, rule: BufferRule, d: int, *, head_dim: int = 0, most: int = MOST_ROWS) -> Panel:
    """The rows of one buffer in one of its dims."""
    rows = rows_of(layout, rule, d, head_dim=head_dim)
    tensor = rule.parts[0].tensor
    placed, runs = d not in rule.fused, (tensor.dims or _SCALAR)[d].runs
    origin = min((run.start for run in runs), default=0) if placed else 0
    end = max((run.last + 1 for run in runs), default=0) if placed else 0
    everything = Panel(rule.name, "", rows, placed=placed, origin=origin, end=end)
    size = max(everything.width(), end - origin, 1)
    alike = [
        indices(name, table_of(rule.dims[i])[0])
        for i, name in enumerate(dim_names(tensor))
        if i != d and len(set(table_of(rule.dims[i]))) == 1
    ]
    where = [
        f"only on {axis} {numbers(at)}" for axis, at in rule.where if layout.mesh.axis_size(axis) > len(at)
    ]
    hidden = max(0, len(rows) - most)
    if hidden:
        rows = (*rows[: most // 2], *rows[len(rows) - (most - most // 2) :])
    said = [layout.name, f"{dim_names(tensor)[d]} across", *alike, *where]
    return replace(everything, subtitle=" · ".join(said), rows=rows, hidden=hidden, size=size)


def drawing(
    title: str, rows: Mapping[str, Dim], *, noun: str = "rows", head_dim: int = 0, placed: bool = False
) -> Panel:
    """A panel of dims that belong to no layout: the steps of a composition.

    Args:
        title: What is written above.
        rows: What is drawn, by the name of the row.
        noun: What the indices count.
        head_dim: Rows of a head, for ``q``, ``k`` and ``v``.
        placed: Whether bands are drawn where their indices lie, not where they are stored.

    >>> from shardweave.layout import even, whole
    >>> panel = drawing("two halves", {f"rank {r}": even(whole(8, "q"), 2, r) for r in range(2)})
    >>> [row.bands[0].what for row in panel.rows]
    ['q rows 0-3', 'q rows 4-7']
    """
    labels = tuple(dict.fromkeys(label for dim in rows.values() for label in dim.labels))
    held = _bands(tuple(rows.values()), labels, {label: label for label in labels}, noun, head_dim)
    found = tuple(
        Row(name, (r,), bands, missing=_missing(bands, labels))
        for r, (name, bands) in enumerate(zip(rows, held, strict=True))
    )
    panel = Panel(title, "", found, placed=placed)
    return replace(panel, size=panel.width())


def rows_of(
    layout: Layout, rule: BufferRule, d: int, *, head_dim: int = 0, names: Mapping[Tensor, str] | None = None
) -> tuple[Row, ...]:
    """The rows of a buffer in one of its dims, group after group, in order of their first ranks.

    Args:
        layout: The layout.
        rule: The buffer.
        d: The dim.
        head_dim: Rows of a head, for ``q``, ``k`` and ``v``.
        names: What tensors are called, where not by their labels.
    """
    tensor = rule.parts[0].tensor
    nouns = dim_names(tensor)
    dims: tuple[Dim | Sharded, ...] = rule.dims or _SCALAR
    tables = [table_of(dim) for dim in dims]
    others = [i for i, one in enumerate(tables) if i != d and len(set(one)) > 1]
    names = names or {}
    shown = {part.label: names.get(part.tensor) or part.label or role(part.tensor) for part in rule.parts}
    if d not in rule.fused:
        # An index dim is of all parts alike; its bands are of no label.
        alone = len(rule.parts) == 1 and d >= len(tensor.index)
        shown = {"": shown[rule.parts[0].label] if alone else ""}
    labels = tuple(shown.values())
    bands = _bands(tables[d], tuple(shown), shown, nouns[d], head_dim)
    groups: dict[str, list[Row]] = {}
    for ranks, entry in classes(layout, rule):
        held = bands[int(entry[d]) if len(entry) else 0]
        group = ", ".join(
            _coordinate(layout.mesh, axes_of(dims[i]), ranks)
            + f": {indices(nouns[i], tables[i][int(entry[i])])}"
            for i in others
        )
        name = _coordinate(layout.mesh, axes_of(dims[d]), ranks)
        named = ranks_named(ranks)
        if len(ranks) == layout.mesh.size:
            named = f"all {len(ranks)} ranks" if len(ranks) > 1 else ""
        row = Row(f"{name} ({named})" if name else named, ranks, held, group, _missing(held, labels))
        groups.setdefault(group, []).append(row)
    return tuple(row for rows in groups.values() for row in rows)


def classes(layout: Layout, rule: BufferRule) -> Iterator[tuple[tuple[int, ...], Ints]]:
    """The ranks that have a buffer, those that hold the same together, with the entry of each dim."""
    entries = layout.entries(rule)
    for i, dim in enumerate(rule.dims):
        # Equal dims under different coordinates count as one.
        first: dict[Dim, int] = {}
        same = np.array([first.setdefault(one, k) for k, one in enumerate(table_of(dim))], dtype=np.int64)
        entries[:, i] = np.where(entries[:, i] < 0, -1, same[entries[:, i]])
    here = layout.exists(rule)
    ranks = np.flatnonzero(here)
    kinds, of_rank = np.unique(entries[here], axis=0, return_inverse=True)
    found = [
        (tuple((ranks[of_rank.reshape(-1) == k] + layout.mesh.offset).tolist()), kind)
        for k, kind in enumerate(kinds)
    ]
    yield from sorted(found, key=lambda one: one[0])


def _coordinate(mesh: Mesh, axes: Sequence[str], ranks: Sequence[int]) -> str:
    """Where ranks lie on some axes, in words; axes that they cover are left out."""
    words = []
    for axis in axes:
        on = np.unique(mesh.columns[axis][np.array(ranks) - mesh.offset]).tolist()
        if len(on) < mesh.axis_size(axis):
            words.append(f"{axis} {numbers(on)}")
    return " ".join(words)


def _bands(
    dims: Sequence[Dim], labels: Sequence[str], shown: Mapping[str, str], noun: str, head_dim: int
) -> list[tuple[Band, ...]]:
    """The bands of each of a list of dims, cut where it changes whether others hold the same."""
    distinct = list(dict.fromkeys(dims))
    held: list[list[Band]] = [[] for _ in distinct]
    for e, dim in enumerate(distinct):
        for run, at in zip(dim.runs, dim.positions, strict=True):
            if run.label is PAD:
                held[e].append(Band(PAD, noun, at, run.count, 0))
    for label in labels:
        unit = 1 if noun.removesuffix("s") not in _SHAPE else head_dim if shown[label] in HEADS else 0
        rows = table(distinct, label)
        found = atoms(rows)
        several = np.repeat(np.diff(found.first) > 1, np.diff(found.first))
        parts = found.holders
        if len(parts) and int(parts.stride.max()) > 1:
            # Mixed steps fall into phases; the runs themselves are easier to look at.
            parts, several = rows, np.zeros(len(rows), dtype=np.bool_)
        columns = (parts.entry, parts.at, parts.count, parts.start, parts.step, several)
        for entry, at, count, start, step, replica in zip(*(c.tolist() for c in columns), strict=True):
            held[entry].append(
                Band(shown[label], noun, at, count, start, step if count > 1 else 1, unit, replica)
            )
    joined = dict(zip(distinct, (_joined(bands) for bands in held), strict=True))
    return [joined[dim] for dim in dims]


def _joined(bands: list[Band]) -> tuple[Band, ...]:
    """Bands in storage order, neighbours that go on in one another as one."""
    done: list[Band] = []
    for band in sorted(bands, key=lambda b: b.at):
        last = done[-1] if done else None
        goes_on = (
            last is not None
            and last.label is not PAD
            and (last.label, last.replica, last.step, 1) == (band.label, band.replica, band.step, last.step)
            and (last.stop, last.at + last.count) == (band.start, band.at)
        )
        if last is not None and goes_on:
            done[-1] = replace(last, count=last.count + band.count)
        else:
            done.append(band)
    return tuple(done)


def _missing(bands: Sequence[Band], labels: Sequence[str]) -> tuple[str, ...]:
    held = {band.label for band in bands}
    return tuple(label for label in labels if label not in held)
