"""From two layouts to the copies between them.

Because each mesh axis cuts one dim of a buffer, what two buffers have in common is a product:
the common stretches of each dim, found by one sort a dim, for all coordinates at once. The cost
is in runs of dims, and the result in boxes; the number of layers, experts and names does not
matter, and that of ranks only in the moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardweave.errors import DtypeError, PlanError, TransformError
from shardweave.layout import BufferRule, Layout, Part, Tensor
from shardweave.layout.buffer import table_of
from shardweave.layout.dtype import itemsize, lossless
from shardweave.layout.layout import num_entries
from shardweave.layout.proof import prove
from shardweave.layout.table import Atoms, Ints, Join, Table, atoms, join, table
from shardweave.plan.balance import Loads, choose
from shardweave.plan.plan import Family, Plan
from shardweave.plan.proof import prove_plan


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
    can. Among replicas the source is chosen by locality, then by least load.

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
        PlanError: The destination needs a tensor that the source does not have.
        DtypeError, TransformError: Values would change in a way that was not allowed.
        GapError, OverlapError, OutsideError, HolderError: A proof failed.
    """
    missing = [tensor for tensor in dst.tensors if tensor not in src.holders]
    if missing:
        raise PlanError(
            "the source has every tensor of the destination",
            where=f"from layout {src.name!r} to layout {dst.name!r}",
            equation=f"missing {len(missing)} of {len(dst.tensors)}: {'; '.join(str(t) for t in missing[:3])}",
            hint="describe both sides with one model, so that names, layers and shapes agree",
        )
    prove(src, dst.tensors)
    prove(dst)
    space = _Space(src, dst)
    loads = Loads(max(src.mesh.ranks.stop, dst.mesh.ranks.stop), ranks_per_node)
    families = []
    for tensor in dst.tensors:
        for dst_rule, dst_part in dst.holders[tensor]:
            for src_rule, src_part in _sources(src, tensor):
                _check_values(src.rules[src_rule], dst.rules[dst_rule], tensor, allow_casts)
                families.append(space.family(tensor, src_rule, src_part, dst_rule, dst_part, loads))
    result = Plan(src, dst, tuple(family for family in families if len(family.box)))
    prove_plan(result)
    return result


def _sources(src: Layout, tensor: Tensor) -> list[tuple[int, Part]]:
    """The buffers to read a tensor from: its owners, or a replica where all holders are replicas."""
    holders = list(src.holders[tensor])
    return [(i, part) for i, part in holders if not part.replica] or holders[:1]


def _check_values(src: BufferRule, dst: BufferRule, tensor: Tensor, allow_casts: bool) -> None:
    if src.transform != dst.transform:
        raise TransformError(
            "both sides store the same function of the logical values",
            where=f"tensor {tensor.name!r}, buffers {src.name!r} and {dst.name!r}",
            equation=f"{src.transform} != {dst.transform}",
            hint="apply the transform on the way, as a step of its own; a plan moves bytes",
        )
    if not allow_casts and not lossless(src.dtype, dst.dtype):
        raise DtypeError(
            "the destination's dtype holds every value of the source's",
            where=f"tensor {tensor.name!r}, buffers {src.name!r} and {dst.name!r}",
            equation=f"{src.dtype} does not fit in {dst.dtype}",
            hint="keep the dtype, or allow casts (allow_casts=True; --dtype on the command line)",
        )


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The ranks of each class of a rule: ranks with the same entry in every dim hold the same."""

    stride: Ints
    order: Ints
    first: Ints

    def count(self, code: Ints) -> Ints:
        return self.first[code + 1] - self.first[code]


class _Space:
    """Joins and rank classes of two layouts, each computed once; dialects share dims among buffers."""

    def __init__(self, src: Layout, dst: Layout) -> None:
        self.src, self.dst = src, dst
        self.joins: dict[tuple[int, str, int, str], tuple[Atoms, Table, Join]] = {}
        self.classes: dict[tuple[int, ...], _Ranks] = {}

    def join(self, a: object, label_a: str, b: object, label_b: str) -> tuple[Atoms, Table, Join]:
        key = (id(a), label_a, id(b), label_b)
        if key not in self.joins:
            held = atoms(table(table_of(a), label_a))  # type: ignore[arg-type]
            wanted = table(table_of(b), label_b)  # type: ignore[arg-type]
            self.joins[key] = held, wanted, join(held.pieces, wanted)
        return self.joins[key]

    def ranks(self, layout: Layout, rule: BufferRule) -> _Ranks:
        key = (id(layout), *(id(dim) for dim in rule.dims), hash(rule.where))
        if key not in self.classes:
            sizes = num_entries(rule)
            stride = np.cumprod((1, *sizes[:-1]), dtype=np.int64)
            entries = layout.entries(rule)
            code = np.where(entries[:, 0] < 0, -1, entries @ stride) if len(sizes) else np.zeros(len(entries), np.int64)
            order = np.argsort(code, kind="stable")
            first = np.searchsorted(code[order], np.arange(int(np.prod(sizes, dtype=np.int64)) + 1), "left")
            self.classes[key] = _Ranks(stride, order + layout.mesh.offset, first)
        return self.classes[key]

    def family(
        self, tensor: Tensor, src_number: int, src_part: Part, dst_number: int, dst_part: Part, loads: Loads
    ) -> Family:
        src_rule, dst_rule = self.src.rules[src_number], self.dst.rules[dst_number]
        per_dim = [
            self.join(
                src_rule.dims[d],
                src_rule.label_of(d, src_part.label),
                dst_rule.dims[d],
                dst_rule.label_of(d, dst_part.label),
            )
            for d in range(tensor.num_dims)
        ]
        src_ranks, dst_ranks = self.ranks(self.src, src_rule), self.ranks(self.dst, dst_rule)

        # Boxes: every combination of one common stretch a dim.
        sizes = [len(common) for _, _, common in per_dim]
        total = int(np.prod(sizes, dtype=np.int64))
        pick = np.unravel_index(np.arange(total), sizes) if sizes else ()

        def column(name: str) -> Ints:
            columns = [getattr(common, name)[rows] for (_, _, common), rows in zip(per_dim, pick, strict=True)]
            return np.stack(columns, axis=1) if columns else np.zeros((total, 0), dtype=np.int64)

        count, index, index_step = column("count"), column("start"), column("step")
        within, within_step, dst_at, dst_step = column("at_a"), column("stride_a"), column("at_b"), column("stride_b")
        atom, row = column("row_a"), column("row_b")

        # Moves: every box to every rank of its destination class.
        wanted = [rows.entry for _, rows, _ in per_dim]
        dst_code = _code([entry[row[:, d]] for d, entry in enumerate(wanted)], dst_ranks.stride, total)
        fan_out = dst_ranks.count(dst_code)
        box = np.repeat(np.arange(total), fan_out)
        dst = dst_ranks.order[np.repeat(dst_ranks.first[dst_code], fan_out) + _within(fan_out)]

        # Candidates: for each distinct combination of atoms, every holder and every rank of its class.
        atom_sizes = [len(held.pieces) for held, _, _ in per_dim]
        atom_stride = np.cumprod((1, *atom_sizes[:-1]), dtype=np.int64) if atom_sizes else np.zeros(0, np.int64)
        groups, group = np.unique(_code(list(atom.T), atom_stride, total), return_inverse=True)
        holder, source, candidates = self._candidates(
            groups, atom_sizes, [held for held, _, _ in per_dim], src_ranks
        )
        num_bytes = np.prod(count, axis=1, dtype=np.int64) * itemsize(dst_rule.dtype)
        chosen = choose(group[box], dst, num_bytes[box], source, candidates, loads)

        # A box read from two holders at different places is two boxes.
        rows, box = np.unique(np.stack([box, *holder[chosen].T]), axis=1, return_inverse=True) if (
            holder.shape[1] and len(box)
        ) else (np.arange(total)[None, :], box)
        original = rows[0]
        src_at = np.empty((len(original), tensor.num_dims), dtype=np.int64)
        src_step = np.empty_like(src_at)
        for d, (held, _, _) in enumerate(per_dim):
            h = rows[1 + d] if len(rows) > 1 else held.first[atom[original, d]]
            src_at[:, d] = held.holders.at[h] + within[original, d] * held.holders.stride[h]
            src_step[:, d] = within_step[original, d] * held.holders.stride[h]
        return Family(
            tensor,
            src_number,
            dst_number,
            count[original],
            index[original],
            index_step[original],
            src_at,
            src_step,
            dst_at[original],
            dst_step[original],
            box.reshape(-1),
            source[chosen],
            dst,
        )

    def _candidates(
        self, groups: Ints, sizes: list[int], held: list[Atoms], ranks: _Ranks
    ) -> tuple[Ints, Ints, Ints]:
        """For each group of atoms: the holder rows, the rank, and where the group's candidates begin.

        Holder rows are left out, as zero columns, where every atom has one holder.
        """
        atom = [groups // stride % size for size, stride in zip(sizes, _strides(sizes), strict=True)]
        single = all(len(one.holders) == len(one.pieces) for one in held)
        turns = [one.first[a + 1] - one.first[a] for one, a in zip(held, atom, strict=True)]
        combos = np.prod(turns, axis=0, dtype=np.int64) if turns else np.ones(len(groups), dtype=np.int64)
        group = np.repeat(np.arange(len(groups)), combos)
        combo = _within(combos)
        holder = np.zeros((len(group), len(held)), dtype=np.int64)
        for d, (one, a) in enumerate(zip(held, atom, strict=True)):
            turn = turns[d][group]
            holder[:, d] = one.first[a[group]] + combo % turn
            combo = combo // turn
        code = _code([one.holders.entry[holder[:, d]] for d, one in enumerate(held)], ranks.stride, len(group))
        fan = ranks.count(code)
        source = ranks.order[np.repeat(ranks.first[code], fan) + _within(fan)]
        group = np.repeat(group, fan)
        holder = np.zeros((len(group), 0), dtype=np.int64) if single else np.repeat(holder, fan, axis=0)
        return holder, source, np.searchsorted(group, np.arange(len(groups) + 1), "left")


def _strides(sizes: list[int]) -> list[int]:
    return [int(n) for n in np.cumprod((1, *sizes[:-1]), dtype=np.int64)] if sizes else []


def _code(digits: list[Ints], stride: Ints, total: int) -> Ints:
    code = np.zeros(total, dtype=np.int64)
    for digit, weight in zip(digits, stride, strict=True):
        code += digit * weight
    return code


def _within(counts: Ints) -> Ints:
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
