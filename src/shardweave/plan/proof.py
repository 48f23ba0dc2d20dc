"""The proof of a plan, made from its columns alone and not from how they were found.

A plan is right when every copy reads an element where the source holds it, writes it where the
destination wants it, and every wanted element is written exactly once. The first two are
look-ups of positions in dims; the third is volume and disjointness: boxes that lie inside the
wanted elements, do not overlap, and have their volume together, are the wanted elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardweave.errors import GapError, HolderError, OverlapError
from shardweave.layout import Box, BufferRule, Dim, Layout, Part
from shardweave.layout.box import subtract
from shardweave.layout.buffer import table_of
from shardweave.layout.layout import format_ranks
from shardweave.layout.table import Ints, table
from shardweave.layout.tiling import find_overlap
from shardweave.plan.plan import Family, Plan


def prove_plan(plan: Plan) -> None:
    """Prove that a plan fills its destination exactly once, with the right elements.

    Raises:
        HolderError: A copy reads or writes a position that does not hold the element.
        OverlapError: An element is written twice.
        GapError: An element is wanted and never written.
    """
    for family in plan.families:
        _check_side(family, plan.src, family.src_rule, "src")
        _check_side(family, plan.dst, family.dst_rule, "dst")
    for number, rule in enumerate(plan.dst.rules):
        for part in rule.parts:
            families = [f for f in plan.families if f.dst_rule == number and f.tensor == part.tensor]
            _check_once(plan.dst, rule, part, families)


def _check_side(family: Family, layout: Layout, number: int, side: str) -> None:
    """Every box lies, on every rank that it is read from or written to, where the rank holds it."""
    rule = layout.rules[number]
    part = next(part for part in rule.parts if part.tensor == family.tensor)
    ranks: Ints = getattr(family, side)
    at, stride = getattr(family, f"{side}_at"), getattr(family, f"{side}_step")
    # Boxes go with classes of ranks; each pair is checked once.
    entries = layout.entries(rule)[ranks - layout.mesh.offset]
    if len(entries) and entries.size and int(entries.min()) < 0:
        bad = int(np.argmax(entries.min(axis=1) < 0))
        raise HolderError(
            "a plan names only ranks that have the buffer",
            where=f"layout {layout.name!r}, buffer {rule.name!r}, rank {int(ranks[bad])}",
            equation="the buffer does not exist there",
            hint="make the plan again from the same layouts",
        )
    for d, dim in enumerate(rule.dims):
        dims = table_of(dim)
        pairs = family.box * len(dims) + (entries[:, d] if len(dims) > 1 else 0)
        first = np.unique(pairs, return_index=True)[1] if len(dims) > 1 else np.unique(family.box, return_index=True)[1]
        box = family.box[first]
        entry = entries[first, d]
        ok = _holds(
            dims,
            rule.label_of(d, part.label),
            entry,
            at[box, d],
            stride[box, d],
            family.count[box, d],
            family.index[box, d],
            family.index_step[box, d],
        )
        if not bool(np.all(ok)):
            row = int(first[int(np.argmin(ok))])
            b = int(family.box[row])
            raise HolderError(
                "a plan reads and writes an element where the rank holds it",
                where=(
                    f"layout {layout.name!r}, buffer {rule.name!r}, tensor {family.tensor.name!r}, "
                    f"box {family.elements(b)}, rank {int(ranks[row])}"
                ),
                equation=(
                    f"dim {d}: positions {int(at[b, d])} step {int(stride[b, d])} of {dims[int(entries[row, d])]} "
                    f"are not indices {family.elements(b).dims[d]}"
                ),
                hint="make the plan again from the same layouts; do not edit its columns",
            )


def _holds(
    dims: Sequence[Dim], label: str, entry: Ints, at: Ints, stride: Ints, count: Ints, index: Ints, step: Ints
) -> np.ndarray:
    """Whether positions ``at + i * stride`` of each dim are indices ``index + i * step`` of ``label``."""
    rows = table(dims, label)
    if not len(rows):
        return np.zeros(len(at), dtype=bool)
    span = 1 + max(int((rows.at + rows.count).max()), int(at.max(initial=0)))
    keys = rows.entry * span + rows.at
    order = np.argsort(keys)
    found = np.searchsorted(keys[order], entry * span + at, "right") - 1
    run = order[np.maximum(found, 0)]
    skip = at - rows.at[run]
    inside = (found >= 0) & (rows.entry[run] == entry) & (skip + stride * (count - 1) < rows.count[run])
    right = rows.start[run] + skip * rows.step[run] == index
    return inside & right & ((count == 1) | (stride * rows.step[run] == step))


def _check_once(layout: Layout, rule: BufferRule, part: Part, families: Sequence[Family]) -> None:
    """Each rank's copies into one part of one buffer are disjoint and have the volume that it wants."""
    entries = layout.entries(rule)
    exists = entries.min(axis=1, initial=0) >= 0
    wanted = exists.astype(np.int64)
    for d, dim in enumerate(rule.dims):
        label = rule.label_of(d, part.label)
        lengths = np.array([sum(r.count for r in one.runs if r.label == label) for one in table_of(dim)])
        wanted = wanted * lengths[np.maximum(entries[:, d], 0)]
    rank = np.concatenate([f.dst for f in families]) if families else np.zeros(0, dtype=np.int64)
    volume = np.concatenate([f.numel[f.box] for f in families]) if families else rank
    written = np.zeros(layout.mesh.size, dtype=np.int64)
    np.add.at(written, rank - layout.mesh.offset, volume)
    if families:
        at, step, count = (
            np.concatenate([getattr(f, name)[f.box] for f in families]) for name in ("dst_at", "dst_step", "count")
        )
        pair = find_overlap(*_intervals(rank, at, step, count))
        if pair is not None:
            i, j = pair
            raise OverlapError(
                "an element of the destination is written once",
                where=f"layout {layout.name!r}, buffer {rule.name!r}, tensor {part.tensor.name!r}, rank {int(rank[i])}",
                equation=f"copy at {at[i].tolist()} and copy at {at[j].tolist()} of sizes {count[i].tolist()} and {count[j].tolist()} overlap",
                hint="a source holds the element twice without declaring replicas",
            )
    if not np.array_equal(written, wanted):
        short = np.flatnonzero(written != wanted)
        r = int(short[0])
        raise GapError(
            "every element of the destination is written",
            where=(
                f"layout {layout.name!r}, buffer {rule.name!r}, tensor {part.tensor.name!r}, "
                f"{format_ranks(short + layout.mesh.offset)}{_first_gap(layout, rule, part, r, families)}"
            ),
            equation=f"rank {r + layout.mesh.offset}: written {int(written[r])} of {int(wanted[r])} elements",
            hint="the source does not hold these elements, or the plan was cut short",
        )


def _first_gap(layout: Layout, rule: BufferRule, part: Part, rank: int, families: Sequence[Family]) -> str:
    buffer = rule.at(layout.mesh, rank + layout.mesh.offset)
    left = [piece.at for piece in buffer.pieces() if piece.tensor == part.tensor] if buffer else []
    for f in families:
        for b in f.box[f.dst == rank + layout.mesh.offset].tolist():
            done = Box(
                tuple(
                    range(a, a + (n - 1) * s + 1, s)
                    for a, s, n in zip(f.dst_at[b].tolist(), f.dst_step[b].tolist(), f.count[b].tolist(), strict=True)
                )
            )
            left = [rest for box in left for rest in subtract(box, done)]
    return f", buffer box {left[0]}" if left else ""


def _intervals(group: Ints, at: Ints, step: Ints, count: Ints) -> tuple[Ints, Ints, Ints]:
    """Strided boxes as plain ones, by the change of variable ``x -> (x mod L) * span + x div L``."""
    low, high = at.copy(), at + count
    rows = np.arange(len(group))
    for d in range(at.shape[1]):
        stepped = count[:, d] > 1
        period = int(np.lcm.reduce(np.where(stepped, step[:, d], 1))) if len(rows) else 1
        if period == 1:
            continue
        span = 1 + int((at[:, d] + count[:, d] * step[:, d]).max()) // period
        stride = np.where(count[:, d] > 1, step[:, d], period)
        phases = np.minimum(period // stride, count[:, d])
        origin = np.repeat(np.arange(len(rows)), phases)
        phase = np.arange(len(origin)) - np.repeat(np.cumsum(phases) - phases, phases)
        first = at[origin, d] + phase * stride[origin]
        turns = period // stride[origin]
        number = -((phase - count[origin, d]) // turns)
        low, high, rows = low[origin], high[origin], rows[origin]
        at, step, count = at[origin], step[origin], count[origin]
        low[:, d] = first % period * span + first // period
        high[:, d] = low[:, d] + number
    return group[rows], low, high
