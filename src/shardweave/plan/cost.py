"""What a plan costs, counted before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardweave.layout import Layout
from shardweave.layout.dtype import itemsize
from shardweave.layout.table import Ints
from shardweave.plan.plan import Family, Plan
from shardweave.plan.side import Side


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of a plan.

    Attributes:
        num_bytes: Bytes copied, in the destination's dtypes.
        needed_bytes: Bytes that the destination's buffers hold, padding excepted. A plan never
            copies more: ``num_bytes == needed_bytes``.
        local_bytes: Bytes that stay on their rank.
        node_bytes: Bytes between ranks of one node; 0 where nodes are not known.
        world_bytes: All other bytes.
        num_copies: Strided copies, one a box, rank and stored array.
        num_descriptors: Contiguous stretches that these are: what a transport without strides needs.
        pairs: Source rank, destination rank and bytes of every pair, ``(num_pairs, 3)``.
        send_imbalance: Most bytes sent by a rank over the mean over the source's ranks.
        receive_imbalance: Most bytes received by a rank over the mean over the destination's ranks.
        peak_staging_bytes: The most that a rank receives of one family, which bounds staging where
            families are received one after the other.
    """

    num_bytes: int
    needed_bytes: int
    local_bytes: int
    node_bytes: int
    world_bytes: int
    num_copies: int
    num_descriptors: int
    pairs: Ints
    send_imbalance: float
    receive_imbalance: float
    peak_staging_bytes: int


def cost(plan: Plan, *, ranks_per_node: int | None = None) -> Cost:
    """Count what a plan moves, between whom, and in how many pieces.

    Laws: ``num_bytes == needed_bytes``, and it is ``local_bytes + node_bytes + world_bytes``.
    """
    src_side, dst_side = Side(plan.src), Side(plan.dst)
    moved = [np.zeros((3, 0), dtype=np.int64)]
    copies = descriptors = peak = 0
    for family in plan.families:
        num_bytes = family.numel[family.box] * itemsize(plan.dst.rules[family.dst_rule].dtype)
        moved.append(np.stack([family.src, family.dst, num_bytes]))
        arrays, stretches = _pieces(family, src_side, dst_side)
        copies += int(arrays.sum())
        descriptors += int((arrays * stretches).sum())
        away = np.where(family.src == family.dst, 0, num_bytes)
        peak = max(peak, int(_per_rank(family.dst, away, plan.dst).max(initial=0)))
    src, dst, num_bytes = np.concatenate(moved, axis=1)
    span = max(plan.src.mesh.ranks.stop, plan.dst.mesh.ranks.stop)
    pair, which = np.unique(src * span + dst, return_inverse=True)
    total = np.zeros(len(pair), dtype=np.int64)
    np.add.at(total, which, num_bytes)
    local = src == dst
    near = ~local & (src // (ranks_per_node or 1) == dst // (ranks_per_node or 1))
    return Cost(
        num_bytes=int(num_bytes.sum()),
        needed_bytes=needed_bytes(plan.dst),
        local_bytes=int(num_bytes[local].sum()),
        node_bytes=int(num_bytes[near].sum()),
        world_bytes=int(num_bytes[~local & ~near].sum()),
        num_copies=copies,
        num_descriptors=descriptors,
        pairs=np.stack([pair // span, pair % span, total], axis=1),
        send_imbalance=_imbalance(src[~local], num_bytes[~local], plan.src),
        receive_imbalance=_imbalance(dst[~local], num_bytes[~local], plan.dst),
        peak_staging_bytes=peak,
    )


def needed_bytes(layout: Layout) -> int:
    """Bytes that all buffers of all ranks hold, padding excepted."""
    side, total = Side(layout), 0
    for number, rule in enumerate(layout.rules):
        classes = side.classes(number)
        for part in rule.parts:
            runs = side.runs(number, part.label)
            held = np.prod(runs.held[runs.base + classes.entry], axis=1)
            total += int((held * classes.size).sum()) * itemsize(rule.dtype)
    return total


def _per_rank(rank: Ints, num_bytes: Ints, layout: Layout) -> Ints:
    """The bytes of each rank of a layout."""
    total = np.zeros(layout.mesh.size, dtype=np.int64)
    np.add.at(total, rank - layout.mesh.offset, num_bytes)
    return total


def _imbalance(rank: Ints, num_bytes: Ints, layout: Layout) -> float:
    """Most over mean; 1.0 is even, and also where nothing moves."""
    per_rank = _per_rank(rank, num_bytes, layout)
    return float(per_rank.max() / per_rank.mean()) if per_rank.any() else 1.0


def _pieces(family: Family, src: Side, dst: Side) -> tuple[Ints, Ints]:
    """For each move, how many pairs of stored arrays it touches, and contiguous stretches in each pair."""
    sides = (src, family.src_rule, family.src), (dst, family.dst_rule, family.dst)
    src_order, dst_order = (side.layout.rules[number].stacked or () for side, number, _ in sides)
    src_length, dst_length = (_lengths(*one) for one in sides)
    walked = [d for d in range(family.tensor.num_dims) if d not in src_order or d not in dst_order]
    count, numel = family.count[family.box], family.numel[family.box]
    arrays = np.prod(count[:, walked], axis=1, dtype=np.int64)
    dense = (count == 1) | ((family.src_step == 1) & (family.dst_step == 1))[family.box]
    whole = dense & (count == src_length) & (count == dst_length)
    # The stretch grows from the innermost dim outwards, while both arrays go on in the same order.
    stretch, growing = np.ones_like(numel), np.ones(len(numel), dtype=np.bool_)
    for d, e in zip(reversed(src_order), reversed(dst_order), strict=False):
        if d != e:
            break
        stretch *= np.where(growing & dense[:, d], count[:, d], 1)
        growing &= whole[:, d]
    return arrays, numel // np.maximum(arrays * stretch, 1)


def _lengths(side: Side, number: int, rank: Ints) -> Ints:
    """The sizes of the dims of a buffer on each of some ranks, padding and other parts included."""
    classes = side.classes(number)
    runs = side.runs(number, side.layout.rules[number].parts[0].label)
    length: Ints = runs.length[runs.base + classes.entry[classes.of_rank[rank - side.layout.mesh.offset]]]
    return length
