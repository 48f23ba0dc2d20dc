"""What a plan costs, counted before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardweave.layout import Layout
from shardweave.layout.dtype import itemsize
from shardweave.layout.table import Ints
from shardweave.plan.plan import Family, Plan


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
        send_imbalance: Most bytes sent by a rank over the mean of the ranks that hold anything.
        receive_imbalance: The same of bytes received, over the destination's ranks.
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
    """Count what a plan moves, between whom, and in how many pieces."""
    world = max(plan.src.mesh.ranks.stop, plan.dst.mesh.ranks.stop)
    moved: list[Ints] = []
    copies = descriptors = peak = 0
    for family in plan.families:
        num_bytes = family.numel[family.box] * itemsize(plan.dst.rules[family.dst_rule].dtype)
        moved.append(np.stack([family.src, family.dst, num_bytes]))
        number, stretches = _pieces(plan, family)
        copies += int(number[family.box].sum())
        descriptors += int((number * stretches)[family.box].sum())
        away = np.where(family.src == family.dst, 0, num_bytes)
        peak = max(peak, int(np.bincount(family.dst, weights=away, minlength=1).max(initial=0)))
    columns = np.concatenate(moved, axis=1) if moved else np.zeros((3, 0), dtype=np.int64)
    src, dst, num_bytes = columns
    key, inverse = np.unique(src * world + dst, return_inverse=True)
    total = np.zeros(len(key), dtype=np.int64)
    np.add.at(total, inverse.reshape(-1), num_bytes)
    local = src == dst
    near = ~local & (src // ranks_per_node == dst // ranks_per_node) if ranks_per_node else np.zeros_like(local)
    far = ~local & ~near
    return Cost(
        num_bytes=int(num_bytes.sum()),
        needed_bytes=needed_bytes(plan.dst),
        local_bytes=int(num_bytes[local].sum()),
        node_bytes=int(num_bytes[near].sum()),
        world_bytes=int(num_bytes[far].sum()),
        num_copies=copies,
        num_descriptors=descriptors,
        pairs=np.stack([key // world, key % world, total], axis=1),
        send_imbalance=_imbalance(src[~local], num_bytes[~local], plan.src),
        receive_imbalance=_imbalance(dst[~local], num_bytes[~local], plan.dst),
        peak_staging_bytes=peak,
    )


def needed_bytes(layout: Layout) -> int:
    """Bytes that all buffers of all ranks hold, padding excepted."""
    total = 0
    for rule in layout.rules:
        entries = layout.entries(rule)
        exists = entries.min(axis=1, initial=0) >= 0
        for part in rule.parts:
            held = exists.astype(np.int64)
            for d, dim in enumerate(rule.dims):
                label = rule.label_of(d, part.label)
                dims = (dim,) if not hasattr(dim, "axes") else dim.dims
                lengths = np.array([sum(run.count for run in one.runs if run.label == label) for one in dims])
                held = held * lengths[np.maximum(entries[:, d], 0)]
            total += int(held.sum()) * itemsize(rule.dtype)
    return total


def _imbalance(rank: Ints, num_bytes: Ints, layout: Layout) -> float:
    """Most over mean; 1.0 is even, and also where nothing moves."""
    per_rank = np.bincount(rank - layout.mesh.offset, weights=num_bytes, minlength=layout.mesh.size)
    used = per_rank[per_rank > 0]
    return float(per_rank.max() / used.mean()) if len(used) else 1.0


def _pieces(plan: Plan, family: Family) -> tuple[Ints, Ints]:
    """For each box, how many stored arrays it touches, and contiguous stretches in each of them."""
    src, dst = plan.src.rules[family.src_rule], plan.dst.rules[family.dst_rule]
    assert src.stacked is not None and dst.stacked is not None
    num_dims = family.tensor.num_dims
    walked = [d for d in range(num_dims) if d not in src.stacked or d not in dst.stacked]
    arrays = np.prod(family.count[:, walked], axis=1, dtype=np.int64)
    # The stretch grows from the innermost dim outwards while both sides are contiguous in the same order.
    length = np.ones(len(family.count), dtype=np.int64)
    growing = np.ones(len(family.count), dtype=bool)
    for d, e in zip(reversed(src.stacked), reversed(dst.stacked), strict=False):
        if d != e:
            break
        count = family.count[:, d]
        dense = (count == 1) | ((family.src_step[:, d] == 1) & (family.dst_step[:, d] == 1))
        length = np.where(growing & dense, length * count, length)
        sizes = [_lengths(rule.dims[d]) for rule in (src, dst)]
        growing &= dense & (count == min(sizes[0])) & (count == min(sizes[1])) & (len(set(sizes[0] + sizes[1])) == 1)
    return arrays, family.numel // np.maximum(arrays * length, 1)


def _lengths(dim: object) -> list[int]:
    dims = dim.dims if hasattr(dim, "axes") else (dim,)
    return [len(one) for one in dims]
