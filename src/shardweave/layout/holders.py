"""Who of several holders of an element comes first: the layout without its replicas."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardweave.layout.buffer import BufferRule, Part, Sharded, table_of
from shardweave.layout.layout import Layout
from shardweave.layout.run import PAD, Dim, Run
from shardweave.layout.tensor import Tensor


def first_holders(layout: Layout) -> Layout:
    """The same arrays, with every element in the first array that holds it only.

    What an array holds again is padding in it, an array that holds nothing else is left out: copies on other
    ranks, buffers declared replicas of another one, heads that several ranks have.

    Laws:
        Its arrays are arrays of ``layout``, and positions in them mean the same element or none.
        No part of it is a replica, and it holds every element that ``layout`` holds, once.

    >>> from shardweave.layout import Mesh, Tensor, along, whole
    >>> k = Tensor("k", (4, 3), "float32")
    >>> mesh = Mesh((("tp", 2),))
    >>> rows = along(mesh, "tp", lambda rank: whole(4))
    >>> twice = BufferRule("k", (Part(k, replica=True),), (rows, whole(3)))
    >>> for dim in first_holders(Layout("twice", mesh, (twice,))).rules[0].dims[0].dims:
    ...     print(dim)
    [0:4]
    pad[4]
    """
    owned = {part.tensor for rule in layout.rules for part in rule.parts if not part.replica}
    before: dict[Tensor, list[list[set[int]]]] = {}
    rules = []
    for rule in layout.rules:
        kept = [
            part
            for part in rule.parts
            if not part.replica or (part.tensor not in owned and _is_first(rule, part, before))
        ]
        if kept:
            rules.append(_first(layout, rule, kept))
    return replace(layout, rules=tuple(rules))


def _is_first(rule: BufferRule, part: Part, before: dict[Tensor, list[list[set[int]]]]) -> bool:
    """Whether no buffer before holds any of a part that only replicas hold."""
    held = [
        {n for each in table_of(dim) for label, n in each if label == rule.label_of(d, part.label)}
        for d, dim in enumerate(rule.dims)
    ]
    known = before.setdefault(part.tensor, [])
    if any(all(a & b for a, b in zip(held, other, strict=True)) for other in known):
        return False
    known.append(held)
    return True


def _first(layout: Layout, rule: BufferRule, kept: Collection[Part]) -> BufferRule:
    """A rule with some of its parts, each element where the coordinates are lowest."""
    view = next(
        view
        for view in (layout.mesh.axes, *layout.mesh.views)
        if set(rule.axes) <= {name for name, _ in view}
    )
    where = {axis: values[:1] for axis, values in rule.where}
    where |= {name: (0,) for name, size in view if size > 1 and name not in rule.axes}
    gone = {part.label for part in rule.parts if part not in kept}
    shared = {part.label for part in kept if part.replica}
    dims, printed = list(rule.dims), dict(rule.numbers)
    for d, dim in enumerate(rule.dims):
        tables = table_of(dim)
        if d in rule.fused and gone:
            tables = tuple(_masked(entry, gone, set()) for entry in tables)
        if isinstance(dim, Sharded) and shared:
            labels = shared if d in rule.fused else {""}
            if d in (rule.stacked or ()):
                seen: set[tuple[str, int]] = set()
                tables = tuple(_masked(entry, set(), seen, labels) for entry in tables)
            else:
                places = _first_places(tables)
                tables = tuple(_at(entry, at) for entry, at in zip(tables, places, strict=True))
                name = rule.index[d]
                if name in printed:
                    numbers = zip(table_of(printed[name]), places, strict=True)
                    printed[name] = Sharded(dim.axes, tuple(_at(entry, at) for entry, at in numbers))
        dims[d] = Sharded(dim.axes, tables) if isinstance(dim, Sharded) else tables[0]
    return replace(
        rule,
        parts=tuple(replace(part, replica=False) for part in kept),
        dims=tuple(dims),
        numbers=tuple((name, printed[name]) for name, _ in rule.numbers),
        where=tuple(where.items()),
    )


def _masked(dim: Dim, gone: Collection[str], seen: set[tuple[str, int]], shared: Collection[str] = ()) -> Dim:
    """A dim with padding in place of some labels, and of what was seen before of others."""
    runs: list[Run] = []
    for run in dim.runs:
        if run.label is PAD or run.label not in {*gone, *shared}:
            runs.append(run)
        elif run.label in gone:
            runs.append(Run(PAD, 0, run.count))
        else:
            for number in range(run.start, run.last + 1, run.step):
                new = (run.label, number) not in seen
                seen.add((run.label, number))
                runs.append(Run(run.label, number, 1) if new else Run(PAD, 0, 1))
    return Dim(runs)


def _first_places(tables: Collection[Dim]) -> list[list[int]]:
    """For each entry of a dim of members, the positions of those that no entry before it has."""
    seen: set[int] = set()
    places = []
    for entry in tables:
        places.append([at for at, (_, number) in enumerate(entry) if number not in seen])
        seen |= {number for _, number in entry}
    return places


def _at(dim: Dim, places: Collection[int]) -> Dim:
    return Dim(Run("", dim[at][1], 1) for at in places)
