"""From two layouts to the copies between them.

Because each mesh axis cuts one dim of a buffer, what two buffers have in common is a product:
the common stretches of each dim, found by one sort a dim, for all coordinates at once. The cost
is in runs of dims, and the result in boxes; the number of layers, experts and names does not
matter, and that of ranks only in the moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardweave.errors import DtypeError, PlanError
from shardweave.layout import BufferRule, Layout, Part, Tensor
from shardweave.layout.dtype import itemsize, lossless
from shardweave.layout.proof import prove
from shardweave.layout.table import Ints, Table, join
from shardweave.plan.balance import MOST_PARTS, Candidates, Loads, deal, stretch
from shardweave.plan.plan import BOX_COLUMNS, Family, Plan
from shardweave.plan.proof import prove_columns
from shardweave.plan.side import Classes, Held, Side, every_pair


def plan(
    src: Layout,
    dst: Layout,
    *,
    ranks_per_node: int | None = None,
    allow_casts: bool = False,
) -> Plan:
    """The copies that fill every buffer of ``dst`` from the buffers of ``src``.

    Both layouts are proved first, and the plan itself before it is returned. Ranks of the two
    meshes are global: a rank that is in both is the same process, and copies to itself where it
    can. Among replicas the source is chosen by locality, then in turn; where a box has fewer
    readers than replicas, it is cut along its outermost dim, so that all of them serve it.

    Laws:
        Same input, same plan.
        Every element of every destination buffer is copied to exactly once; padding never.
        ``simulate(plan(a, b), materialise(a, x)) == materialise(b, x)``.

    Args:
        src: Where the state is.
        dst: Where it shall be. Its tensors may be fewer than the source's.
        ranks_per_node: Ranks that share a node, for locality; ``None`` where it does not matter.
        allow_casts: Whether a destination may store values in a dtype that cannot hold them all.

    Raises:
        PlanError: The destination needs a tensor that the source does not have, or that its buffers
            have only together with replicas.
        DtypeError, TransformError: Values would change in a way that was not allowed.
        GapError, OverlapError, OutsideError, HolderError: A proof failed.
    """
    if ranks_per_node is not None and ranks_per_node < 1:
        raise PlanError(
            "a node has ranks",
            equation=f"ranks_per_node({ranks_per_node}) < 1",
            hint="use None where nodes do not matter",
        )
    missing = [tensor for tensor in dst.tensors if tensor not in src.holders]
    if missing:
        raise PlanError(
            "the source has every tensor of the destination",
            where=f"from layout {src.name!r} to layout {dst.name!r}",
            equation=f"missing {len(missing)} of {len(dst.tensors)}: {'; '.join(map(str, missing[:3]))}",
            hint="describe both sides with one model, so that names, layers and shapes agree",
        )
    src_side, dst_side = Side(src), Side(dst)
    for side in (src_side, dst_side):
        prove(side.layout, tables=side.tables)
    planner = _Planner(src_side, dst_side, Loads(src.mesh.ranks, ranks_per_node))
    families = []
    for tensor in dst.tensors:
        sources = planner.sources(tensor)
        for dst_rule, dst_part in dst.holders[tensor]:
            for src_rule, src_part in sources:
                if not allow_casts:
                    _check_cast(src.rules[src_rule], dst.rules[dst_rule], tensor)
                families.append(planner.family(tensor, src_rule, src_part, dst_rule, dst_part))
    result = Plan(src, dst, tuple(family for family in families if len(family.box)))
    prove_columns(result, src_side, dst_side)
    return result


def _check_cast(src: BufferRule, dst: BufferRule, tensor: Tensor) -> None:
    if not lossless(src.dtype, dst.dtype):
        raise DtypeError(
            "the destination's dtype holds every value of the source's",
            where=f"tensor {tensor.name!r}, buffers {src.name!r} and {dst.name!r}",
            equation=f"{src.dtype} does not fit in {dst.dtype}",
            hint="keep the dtype, or allow casts (allow_casts=True; --dtype on the command line)",
        )


@dataclass(frozen=True, slots=True)
class _Common:
    """What a dim of a source buffer and a dim of a destination buffer have in common.

    Attributes:
        held: Who holds what of the source's dim.
        columns: One row for each name in ``_COLUMNS``, one column for each common stretch.
    """

    held: Held
    columns: Ints


# Where a stretch lies in the source is said within its atom, and in the first holder's dim.
_COLUMNS = (*BOX_COLUMNS, "skip", "skip_step", "atom", "group", "dst_entry")


class _Planner:
    """Two layouts as columns, and what their dims have in common; each pair of dims is joined once."""

    def __init__(self, src: Side, dst: Side, loads: Loads) -> None:
        self.src, self.dst, self.loads = src, dst, loads
        self.commons: dict[tuple[int, int], _Common] = {}
        self.candidates: dict[object, Candidates] = {}

    def sources(self, tensor: Tensor) -> list[tuple[int, Part]]:
        """The buffers to read a tensor from: its owners, or else one replica that has all of it."""
        holders = self.src.layout.holders[tensor]
        owners = [(i, part) for i, part in holders if not part.replica]
        if sum(self._volume(i, part) for i, part in owners) == tensor.numel:
            return owners
        for i, part in holders:
            if self._volume(i, part) == tensor.numel:
                return [(i, part)]
        raise PlanError(
            "the owners of a tensor hold all of it, or one replica does",
            where=f"layout {self.src.layout.name!r}, tensor {tensor.name!r}",
            equation=", ".join(
                f"{self.src.layout.rules[i].name!r} {'replica' if part.replica else 'owner'} "
                f"{self._volume(i, part)} of {tensor.numel}"
                for i, part in holders
            ),
            hint="declare the buffers that share the tensor between them owners (replica=False)",
        )

    def _volume(self, number: int, part: Part) -> int:
        """The elements that a rule holds over all its coordinates: a product, as each axis cuts one dim."""
        held = (self.src.held(self.src.table(number, d, part.label)) for d in range(part.tensor.num_dims))
        return math.prod(int(one.atoms.pieces.count.sum()) for one in held)

    def common(self, src: Table, dst: Table) -> _Common:
        """What two dims have in common."""
        key = id(src), id(dst)
        if key not in self.commons:
            held = self.src.held(src)
            atoms = held.atoms
            found = join(atoms.pieces, dst)
            holder = atoms.first[found.row_a]
            rows = atoms.holders
            columns = (
                found.count,
                found.start,
                found.step,
                rows.at[holder] + found.at_a * rows.stride[holder],
                found.stride_a * rows.stride[holder],
                found.at_b,
                found.stride_b,
                found.at_a,
                found.stride_a,
                found.row_a,
                held.group[found.row_a],
                dst.entry[found.row_b],
            )
            self.commons[key] = _Common(held, np.stack(columns))
        return self.commons[key]

    def candidates_of(self, held: Sequence[Held], classes: Classes) -> Candidates:
        """The source ranks of each combination of one set of entries a dim, the first dim fastest."""
        # Where nothing is shared, set number e is entry e, whatever the entries hold.
        key = (*((one.shared, id(one) if one.shared else len(one.first)) for one in held), id(classes))
        if key not in self.candidates:
            total = math.prod(len(one.first) - 1 for one in held)
            group = digits = np.arange(total)
            code = np.zeros_like(group)
            for one, weight in zip(held, classes.weight, strict=True):
                size = len(one.first) - 1
                who, place = every_pair(one.first, (digits % size)[group])
                group, code = group[who], code[who] + one.entry[place] * weight
                digits = digits // size
            who, place = every_pair(classes.first, code)
            group = group[who]
            first = np.searchsorted(group, np.arange(total + 1), "left")
            self.candidates[key] = Candidates(classes.ranks[place], group, first)
        return self.candidates[key]

    def family(
        self, tensor: Tensor, src_number: int, src_part: Part, dst_number: int, dst_part: Part
    ) -> Family:
        """The copies of one tensor from one buffer to another."""
        dims = range(tensor.num_dims)
        commons = [
            self.common(
                self.src.table(src_number, d, src_part.label), self.dst.table(dst_number, d, dst_part.label)
            )
            for d in dims
        ]
        src_classes, dst_classes = self.src.classes(src_number), self.dst.classes(dst_number)

        held = [one.held for one in commons]
        boxes = _product([one.columns for one in commons])
        column = dict(zip(_COLUMNS, boxes, strict=True))

        # Moves: every box to every rank of its destination's class.
        box, place = every_pair(dst_classes.first, column["dst_entry"] @ dst_classes.weight)
        num_bytes = np.prod(column["count"], axis=1) * itemsize(self.dst.layout.rules[dst_number].dtype)
        axis, width = _cut_along(column["count"])
        weight = np.cumprod([1, *(len(one.first) - 1 for one in held)], dtype=np.int64)[:-1]
        dealt = deal(
            self.candidates_of(held, src_classes),
            group=(column["group"] @ weight)[box],
            dst=dst_classes.ranks[place],
            num_bytes=num_bytes[box],
            width=width[box],
            loads=self.loads,
        )
        box, dst = box[dealt.move], dst_classes.ranks[place[dealt.move]]

        shared = [d for d, one in enumerate(held) if one.shared]
        if shared or dealt.parts.max(initial=1) > 1:
            # A part of a box is a box, and so is a box in each of the places where its holders have it.
            entry = src_classes.entry[src_classes.of_rank[dealt.src - self.src.layout.mesh.offset]]
            key = (box * (MOST_PARTS + 1) + dealt.parts) * MOST_PARTS + dealt.part
            for d in shared:
                key = key * (1 + int(src_classes.entry[:, d].max())) + entry[:, d]
            _, move, number = np.unique(key, return_index=True, return_inverse=True)
            whole, box = box[move], number
            column = dict(zip(_COLUMNS, boxes[:, whole], strict=True))
            for d in shared:
                rows = held[d].atoms.holders
                holder = _holder(held[d], column["atom"][:, d], entry[move, d])
                column["src_at"][:, d] = rows.at[holder] + column["skip"][:, d] * rows.stride[holder]
                column["src_step"][:, d] = column["skip_step"][:, d] * rows.stride[holder]
            low, high = stretch(width[whole], dealt.part[move], dealt.parts[move])
            if tensor.num_dims:
                cut = np.arange(len(whole)), axis[whole]
                column["count"][cut] = high - low
                for at, step in (("index", "index_step"), ("src_at", "src_step"), ("dst_at", "dst_step")):
                    column[at][cut] += low * column[step][cut]
        columns = [column[name] for name in BOX_COLUMNS] + [box, dealt.src, dst]
        return Family(tensor, src_number, dst_number, *columns)


def _product(columns: list[Ints]) -> Ints:
    """Every combination of one stretch a dim: ``(columns, boxes, dims)``, the last dim fastest."""
    sizes = [rows.shape[1] for rows in columns]
    boxes = np.empty((len(_COLUMNS), math.prod(sizes), len(sizes)), dtype=np.int64)
    after = boxes.shape[1]
    for d, (rows, size) in enumerate(zip(columns, sizes, strict=True)):
        after //= max(size, 1)
        boxes[:, :, d] = rows[:, np.arange(boxes.shape[1]) // max(after, 1) % max(size, 1)]
    return boxes


def _cut_along(count: Ints) -> tuple[Ints, Ints]:
    """Where each box is cut for several replicas: its outermost dim of more than one index, and the size."""
    if not count.shape[1]:
        return np.zeros(len(count), dtype=np.int64), np.ones(len(count), dtype=np.int64)
    axis = np.argmax(count > 1, axis=1)
    return axis, count[np.arange(len(count)), axis]


def _holder(held: Held, atom: Ints, entry: Ints) -> Ints:
    """The row of each atom's holders that is in an entry; the first one where the entry holds it twice."""
    atoms = held.atoms
    span = 1 + int(atoms.holders.entry.max(initial=0))
    owner = np.repeat(np.arange(len(atoms.pieces)), np.diff(atoms.first))
    return np.searchsorted(owner * span + atoms.holders.entry, atom * span + entry, "left")
