"""The proof of a plan, made from its columns alone and not from how they were found.

A plan is right when every copy reads an element where the source holds it, writes it where the
destination wants it, and every wanted element is written exactly once. The first two are
look-ups of positions in dims; the third is volume and disjointness: boxes that lie inside the
wanted elements, do not overlap, and have their volume together, are the wanted elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from shardweave.errors import GapError, HolderError, OutsideError, OverlapError, PlanError, TransformError
from shardweave.layout import Box, BufferRule, Part, subtract
from shardweave.layout.buffer import table_of
from shardweave.layout.dtype import itemsize
from shardweave.layout.layout import format_ranks
from shardweave.layout.table import Ints, within
from shardweave.layout.tiling import find_overlap
from shardweave.plan.plan import BOX_COLUMNS, MOVE_COLUMNS, Family, Plan, box_of
from shardweave.plan.side import Side, tally


def prove_plan(plan: Plan) -> None:
    """Prove that a plan fills its destination exactly once, with the right elements.

    Law: whoever drops, doubles or changes one move or one box of a plan is refused, unless what is
    left is another right plan.

    Raises:
        PlanError: The columns do not fit together, or name what is not there.
        TransformError, DtypeError: The two sides store other functions of the values, or an unknown dtype.
        OutsideError: A copy reaches outside a buffer.
        HolderError: A copy reads or writes a position that does not hold the element.
        OverlapError: An element is written twice.
        GapError: An element is wanted and never written.
    """
    prove_columns(plan, Side(plan.src), Side(plan.dst))


def prove_columns(plan: Plan, src: Side, dst: Side) -> None:
    """``prove_plan`` with the columns of both layouts at hand."""
    targets = [_Target(number, part, []) for number, rule in enumerate(plan.dst.rules) for part in rule.parts]
    by_part = {(target.number, target.part.tensor): target for target in targets}
    for family in plan.families:
        _check_columns(family)
        src_part = _part(family, plan.src.rules, family.src_rule)
        dst_part = _part(family, plan.dst.rules, family.dst_rule)
        _check_values(family, plan.src.rules[family.src_rule], plan.dst.rules[family.dst_rule])
        _check_side(family, src, src_part, "src")
        writes = _check_side(family, dst, dst_part, "dst")
        by_part[family.dst_rule, family.tensor].writes.append(writes)
    _check_disjoint(dst, targets)
    for target in targets:
        _check_volume(dst, target)


_PLACES = ("index", "src_at", "dst_at")


@dataclass(frozen=True, slots=True)
class _Writes:
    """The copies of one family as pairs of a box and a class of ranks.

    Attributes:
        family: The family.
        box: The box of each pair.
        rank_class: The class of each pair.
        move: One of its moves.
        number: The number of its moves.
    """

    family: Family
    box: Ints
    rank_class: Ints
    move: Ints
    number: Ints


@dataclass(frozen=True, slots=True)
class _Target:
    """One part of one buffer of the destination, and what is written to it."""

    number: int
    part: Part
    writes: list[_Writes]


def _part(family: Family, rules: tuple[BufferRule, ...], number: int) -> Part:
    """The part of a buffer that a family is about."""
    if 0 <= number < len(rules):
        for part in rules[number].parts:
            if part.tensor == family.tensor:
                return part
    raise PlanError(
        "a plan names a buffer for each tensor that holds it",
        where=f"tensor {family.tensor.name!r}",
        equation=f"buffer {number} of {len(rules)} does not hold it",
        hint="make the plan again from the same layouts",
    )


def _check_values(family: Family, src: BufferRule, dst: BufferRule) -> None:
    for rule in (src, dst):
        itemsize(rule.dtype)
    if src.transform != dst.transform:
        raise TransformError(
            "both sides store the same function of the logical values",
            where=f"tensor {family.tensor.name!r}, buffers {src.name!r} and {dst.name!r}",
            equation=f"{src.transform} != {dst.transform}",
            hint="apply the transform on the way, as a step of its own; a plan moves bytes",
        )


def _check_columns(family: Family) -> None:
    shape = len(family.count), family.tensor.num_dims
    boxes = [getattr(family, name) for name in BOX_COLUMNS]
    moves = [getattr(family, name) for name in MOVE_COLUMNS]
    fits = all(column.shape == shape for column in boxes)
    fits &= all(column.shape == (len(family.box),) for column in moves)
    if not fits or not _between(family.box, 0, shape[0]):
        raise PlanError(
            "the columns of a plan fit together",
            where=f"tensor {family.tensor.name!r}",
            equation=f"boxes of shape {shape}, moves {family.box.shape} of boxes {_ends(family.box)}",
            hint="make the plan again; do not edit its columns",
        )
    least = np.stack(boxes).min(axis=(1, 2), initial=1)
    if (least < [0 if name in _PLACES else 1 for name in BOX_COLUMNS]).any():
        raise OutsideError(
            "boxes have at least one index, steps of at least one and places from 0 on",
            where=f"tensor {family.tensor.name!r}",
            equation=", ".join(f"min({name}) = {n}" for name, n in zip(BOX_COLUMNS, least, strict=True)),
            hint="make the plan again; do not edit its columns",
        )


def _between(values: Ints, low: int, high: int) -> bool:
    return not len(values) or (low <= int(values.min()) and int(values.max()) < high)


def _ends(values: Ints) -> str:
    return f"{values.min()}..{values.max()}" if len(values) else "none"


def _check_side(family: Family, side: Side, part: Part, which: str) -> _Writes:
    """Every box lies, on every rank that it is read from or written to, where the rank holds it."""
    number: int = getattr(family, f"{which}_rule")
    ranks: Ints = getattr(family, which)
    at, stride = getattr(family, f"{which}_at"), getattr(family, f"{which}_step")
    layout, rule = side.layout, side.layout.rules[number]
    classes, runs = side.classes(number), side.runs(number, part.label)

    def where(move: int) -> str:
        return (
            f"layout {layout.name!r}, buffer {rule.name!r}, tensor {family.tensor.name!r}, "
            f"box {family.elements(int(family.box[move]))}, "
            f"from rank {family.src[move]} to rank {family.dst[move]}"
        )

    place = ranks - layout.mesh.offset
    inside = (place >= 0) & (place < layout.mesh.size)
    rank_class = classes.of_rank[np.where(inside, place, 0)]
    here = inside & (rank_class >= 0)
    if not here.all():
        stranger = int(np.argmin(here))
        raise HolderError(
            "a plan names only ranks that have the buffer",
            where=where(stranger),
            equation=f"{which}({ranks[stranger]}) has no {rule.name!r}",
            hint="make the plan again from the same layouts",
        )
    # Ranks of a class hold the same, so each pair of a box and a class is looked at once.
    num_classes = len(classes.entry)
    pair, move, number_of = tally(family.box * num_classes + rank_class, len(family.count) * num_classes)
    box, rank_class = pair // num_classes, pair % num_classes
    entry = runs.base + classes.entry[rank_class]
    at, stride, count = at[box], stride[box], family.count[box]
    length = runs.length[entry]
    outside = (at >= length) | (count - 1 > (length - 1 - at) // stride)
    if outside.any():
        row, d = (int(i) for i in np.argwhere(outside)[0])
        raise OutsideError(
            "a copy lies inside its buffer",
            where=where(move[row]),
            equation=(
                f"dim {d} of {which}: {_range(at[row, d], stride[row, d], count[row, d])} is not inside "
                f"[0:{length[row, d]}]"
            ),
            hint="make the plan again from the same layouts; do not edit its columns",
        )
    run, found = runs.find(entry, at)
    if len(runs.key):
        skip = at - runs.rows.at[run]
        step = runs.rows.step[run]
        found &= skip + stride * (count - 1) < runs.rows.count[run]
        found &= runs.rows.start[run] + skip * step == family.index[box]
        found &= (count == 1) | (stride * step == family.index_step[box])
    if not found.all():
        row, d = (int(i) for i in np.argwhere(~found)[0])
        held = table_of(rule.dims[d])[int(classes.entry[rank_class[row], d])]
        raise HolderError(
            "a plan reads and writes an element where the rank holds it",
            where=where(move[row]),
            equation=(
                f"dim {d} of {which}: {_range(at[row, d], stride[row, d], count[row, d])} of {held} "
                f"are not the indices "
                f"{_range(family.index[box[row], d], family.index_step[box[row], d], count[row, d])}"
            ),
            hint="make the plan again from the same layouts; do not edit its columns",
        )
    return _Writes(family, box, rank_class, move, number_of)


def _check_disjoint(side: Side, targets: list[_Target]) -> None:
    """No two copies into one buffer of one rank have an element of a part in common."""
    copies: list[_Copies] = []
    groups: list[Ints] = []
    boxes: list[tuple[Ints, Ints]] = []
    most = max((target.part.tensor.num_dims for target in targets), default=0)
    for t, target in enumerate(targets):
        if not target.writes:
            continue
        alike = all(_is_alike(side, target.number, writes) for writes in target.writes)
        # Where all ranks of each class get the same boxes, one rank stands for its class.
        chosen = [
            (writes.box, writes.rank_class, writes.move)
            if alike
            else (
                writes.family.box,
                writes.family.dst - side.layout.mesh.offset,
                np.arange(len(writes.family.box)),
            )
            for writes in target.writes
        ]
        # Steps become plain intervals in one and the same change of variable for all that meet in a buffer.
        at, step, count = (
            np.concatenate(
                [
                    getattr(writes.family, name)[box]
                    for writes, (box, _, _) in zip(target.writes, chosen, strict=True)
                ]
            )
            for name in ("dst_at", "dst_step", "count")
        )
        row, low, high = _intervals(at, step, count)
        family = np.repeat(np.arange(len(chosen)), [len(box) for box, _, _ in chosen])
        owner, move = (np.concatenate([one[k] for one in chosen]) for k in (1, 2))
        groups.append(t * side.layout.mesh.size + owner[row])
        boxes.append((low, high))
        copies.append(_Copies(target, family[row], move[row]))
    if not copies:
        return
    # One question for the whole plan: boxes of fewer dims are a single place in those that they lack.
    group = np.concatenate(groups)
    lows, highs = np.zeros((len(group), most), dtype=np.int64), np.ones((len(group), most), dtype=np.int64)
    end = 0
    for low, high in boxes:
        start, end = end, end + len(low)
        lows[start:end, : low.shape[1]], highs[start:end, : low.shape[1]] = low, high
    pair = find_overlap(group, lows, highs)
    if pair is not None:
        _refuse_overlap(side, copies, *pair)


@dataclass(frozen=True, slots=True)
class _Copies:
    """The plain boxes that are written to one target: the writes and the move that each is of."""

    target: _Target
    family: Ints
    move: Ints


def _is_alike(side: Side, number: int, writes: _Writes) -> bool:
    """Whether each box goes to all ranks of a class or to none, once each."""
    if not np.array_equal(writes.number, side.classes(number).size[writes.rank_class]):
        return False
    family = writes.family
    rank = family.dst - side.layout.mesh.offset
    size = side.layout.mesh.size
    return len(tally(family.box * size + rank, len(family.count) * size)[0]) == len(family.box)


def _refuse_overlap(side: Side, boxes: list[_Copies], *pair: int) -> NoReturn:
    ends = np.cumsum([len(one.move) for one in boxes])
    copies = []
    for i in pair:
        place = int(np.searchsorted(ends, i, "right"))
        one, row = boxes[place], i - int(ends[place])
        copies.append((one.target, one.target.writes[int(one.family[row])].family, int(one.move[row])))
    target, family, move = copies[0]
    raise OverlapError(
        "an element of the destination is written once",
        where=(
            f"layout {side.layout.name!r}, buffer {side.layout.rules[target.number].name!r}, "
            f"tensor {target.part.tensor.name!r}, rank {family.dst[move]}"
        ),
        equation=" and ".join(
            f"box {f.elements(int(f.box[m]))} from rank {f.src[m]} to {_written(f, int(f.box[m]))}"
            for _, f, m in copies
        )
        + " overlap",
        hint="make the plan again; a source that holds an element twice declares replicas",
    )


def _check_volume(side: Side, target: _Target) -> None:
    """Disjoint copies inside the wanted elements of a rank are all of them when they have their volume."""
    layout, rule = side.layout, side.layout.rules[target.number]
    classes, runs = side.classes(target.number), side.runs(target.number, target.part.label)
    wanted = np.prod(runs.held[runs.base + classes.entry], axis=1)[classes.of_rank]
    wanted[classes.of_rank < 0] = 0
    written = np.zeros(layout.mesh.size, dtype=np.int64)
    for writes in target.writes:
        family = writes.family
        np.add.at(written, family.dst - layout.mesh.offset, family.numel[family.box])
    if np.array_equal(written, wanted):
        return
    short = np.flatnonzero(written != wanted)
    rank = int(short[0]) + layout.mesh.offset
    raise GapError(
        "every element of the destination is written",
        where=(
            f"layout {layout.name!r}, buffer {rule.name!r}, tensor {target.part.tensor.name!r}, "
            f"{format_ranks(short + layout.mesh.offset)}, {_first_gap(side, target, rank)}"
        ),
        equation=f"rank {rank}: written {written[short[0]]} of {wanted[short[0]]} elements",
        hint="the source does not hold these elements, or the plan was cut short",
    )


def _first_gap(side: Side, target: _Target, rank: int) -> str:
    buffer = side.layout.rules[target.number].at(side.layout.mesh, rank)
    pieces = [piece for piece in buffer.pieces() if piece.tensor == target.part.tensor] if buffer else []
    done = [
        _written(writes.family, box)
        for writes in target.writes
        for box in writes.family.box[writes.family.dst == rank].tolist()
    ]
    for piece in pieces:
        left = [piece.at]
        for box in done:
            left = [rest for one in left for rest in subtract(one, box)]
        if left:
            return f"box {piece.box}, of which {left[0]} of the buffer is not written"
    return "nothing is missing"


def _written(family: Family, box: int) -> Box:
    """Where a box is written to, in the dims of the destination's buffer."""
    return box_of(family.dst_at[box], family.dst_step[box], family.count[box])


def _range(at: int, step: int, count: int) -> str:
    return str(Box((range(int(at), int(at) + (int(count) - 1) * int(step) + 1, int(step)),)))


def _intervals(at: Ints, step: Ints, count: Ints) -> tuple[Ints, Ints, Ints]:
    """Strided boxes as plain ones, by the change of variable ``x -> (x mod L) * span + x div L``.

    Returns:
        The box that each plain one is of, and its first places and one past its last ones.
    """
    row, low, high = np.arange(len(at)), at, at + count
    for d in np.flatnonzero(((step != 1) & (count > 1)).any(axis=0)):
        period = int(np.lcm.reduce(np.where(count[:, d] > 1, step[:, d], 1)))
        span = 1 + int((at[:, d] + count[:, d] * step[:, d]).max()) // period
        # A run of step s is period / s runs of step period; one of a single index is itself.
        turns = period // np.where(count[:, d] > 1, step[:, d], period)
        phases = np.minimum(turns, count[:, d])
        origin, phase = np.repeat(np.arange(len(at)), phases), within(phases)
        first = at[origin, d] + phase * step[origin, d]
        number = -((phase - count[origin, d]) // turns[origin])
        row, low, high = row[origin], low[origin], high[origin]
        at, step, count = at[origin], step[origin], count[origin]
        low[:, d] = first % period * span + first // period
        high[:, d] = low[:, d] + number
    return row, low, high
