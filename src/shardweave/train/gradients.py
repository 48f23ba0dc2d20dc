"""The gradient of each array summed over the ranks that hold it, and the norms and counts that follow.

Whom a gradient is summed over, in which buckets and whose part of them is whose, the plan says
(``reduction.py``). Sums are taken in the order of ranks, and what is measured of them counts every element of
the model once: so all ranks get the same bits, at every run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from shardweave.errors import PlanError, ReplicaError, UnknownNameError
from shardweave.layout.layout import format_ranks
from shardweave.train.collectives import gather_parts, send_parts, sum_all
from shardweave.train.grid import Group, Groups, Ranks
from shardweave.train.reduction import Bucket, ReducePlan

_CHUNK = 1 << 17
"""Elements that are widened at once on a processor: they stay in its caches."""


# --- sums ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradients:
    """Gradients summed over all holders.

    Attributes:
        plan: Of what they are.
        flats: For each bucket, all of it, or this rank's part where ``sharded``. Padding is 0.
        sharded: Which of both.
    """

    plan: ReducePlan
    flats: tuple[Tensor, ...]
    sharded: bool

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """For each bucket this rank's part."""
        if self.sharded:
            return self.flats
        own = (self.plan.own(bucket) for bucket in self.plan.buckets)
        return tuple(flat[start:stop] for flat, (start, stop) in zip(self.flats, own, strict=True))

    def arrays(self) -> dict[str, Tensor]:
        """The gradient of each array by name, views of the flats.

        Raises:
            PlanError: They are sharded, so that no rank has whole ones.
        """
        if self.sharded:
            raise PlanError(
                "whole gradients are those that every holder has",
                where=f"rank {self.plan.rank}",
                equation="sharded(True)",
                hint="sum them with sharded=False",
            )
        return {
            held.name: flat[start:stop].view(held.shape)
            for bucket, flat in zip(self.plan.buckets, self.flats, strict=True)
            for held, start, stop in zip(bucket.arrays, bucket.starts, bucket.starts[1:], strict=False)
        }


def sum_gradients(
    grads: Mapping[str, Tensor | None],
    plan: ReducePlan,
    groups: Groups,
    *,
    sharded: bool = False,
    accumulate: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
) -> Gradients:
    """Sum the gradients of each array over the ranks that hold it, in the order of ranks.

    Every rank calls it at the same time. What a rank has no gradient of counts as zeros there.

    Args:
        grads: By name of the array; what is missing or ``None`` is 0.
        plan: This rank's plan.
        groups: The groups of this rank; those that the plan needs are found by their ranks.
        sharded: Leave each rank with its own part of the buckets only: half of the messages.
        accumulate: The narrowest dtype in which sums are taken; ``None`` for that of the arrays.
        device: Where sums are made.

    Raises:
        UnknownNameError: A gradient of an array that the plan does not have, or ranks without a group.
        PlanError: A gradient has another shape than its array.
    """
    strange = sorted(set(grads) - set(plan.arrays))
    if strange:
        raise UnknownNameError(
            "gradients are those of the arrays of a rank",
            where=f"rank {plan.rank}, layout {plan.layout.name!r}",
            equation=f"{', '.join(strange[:3])} not among {len(plan.arrays)} arrays",
            hint="give gradients under the names of the layout's arrays",
        )
    flats = []
    for bucket in plan.buckets:
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        dtype = torch.promote_types(dtype, accumulate) if accumulate is not None else dtype
        flat = _flatten(grads, bucket, dtype, device)
        over, ends = group_of(groups, bucket.over), group_of(groups, bucket.ends)
        if sharded:
            flat = scatter_sum(flat, bucket.cuts, group=over)
        elif over.size > 1:
            flat = sum_all(flat, group=over)
        flats.append(sum_all(flat, group=ends) if ends.size > 1 else flat)
    return Gradients(plan, tuple(flats), sharded)


def _flatten(
    grads: Mapping[str, Tensor | None], bucket: Bucket, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    flat = torch.empty(bucket.numel, dtype=dtype, device=device)
    for held, start, stop in zip(bucket.arrays, bucket.starts, bucket.starts[1:], strict=False):
        grad, into = grads.get(held.name), flat[start:stop].view(held.shape)
        if grad is None:
            into.zero_()
            continue
        held.check(tuple(grad.shape))
        into.copy_(grad.detach())
        for hole in held.padding:  # nothing depends on it, and it shall not depend on anything
            into[tuple(slice(r.start, r.stop, r.step) for r in hole.dims)] = 0
    return flat


def scatter_sum(flat: Tensor, cuts: tuple[int, ...], *, group: Group) -> Tensor:
    """This rank's stretch of the sum over ranks, taken in their order: the same bits at every run."""
    if group.size == 1:
        return flat
    parts = [flat[a:b] for a, b in itertools.pairwise(cuts)]
    into = [torch.empty_like(parts[group.rank]) for _ in parts]
    send_parts(parts, into, group=group)
    total = into[0]
    for part in into[1:]:
        total += part
    return total


def gather_stretches(part: Tensor, cuts: tuple[int, ...], *, group: Group) -> Tensor:
    """A bucket from the stretches of all ranks."""
    if group.size == 1:
        return part
    flat = part.new_empty(cuts[-1])
    send_parts([part] * group.size, [flat[a:b] for a, b in itertools.pairwise(cuts)], group=group)
    return flat


def group_of(groups: Groups, ranks: Ranks) -> Group:
    """The group of this rank that has these ranks; one of its own where it is alone.

    Raises:
        UnknownNameError: No group of these ranks was planned.
    """
    if ranks == (groups.rank,):
        return Group("alone", ranks, 0)
    for grid, names in groups.plan.names.items():
        for name in names:
            group = groups.find(grid, name)
            if group is not None and group.ranks == ranks:
                return group
    raise UnknownNameError(
        "ranks that gradients are summed over have a group",
        where=f"rank {groups.rank}",
        equation=f"{format_ranks(ranks)} are no group of {', '.join(groups.plan.names)}",
        hint="plan a group over the axes that the layout's rules do not read",
    )


# --- counts -------------------------------------------------------------------------------------


def measure(gradients: Gradients, groups: Groups) -> tuple[float, int]:
    """The norm of all gradients and the number of zeros in them: every element of the model once.

    Replicas count once and padding not at all, on any topology; all ranks get the same bits. Squares are
    summed as doubles, so that the norm of narrower gradients is finite exactly where they all are.
    """
    squares, zeros = 0.0, 0
    for bucket, part in zip(gradients.plan.buckets, gradients.parts, strict=True):
        if gradients.plan.counts(bucket) and part.numel():
            for some in part.split(_CHUNK) if part.device.type == "cpu" else (part,):
                squares += float(torch.linalg.vector_norm(some, dtype=torch.float64)) ** 2
                zeros += some.numel() - int(torch.count_nonzero(some))
            zeros -= bucket.num_padding(*gradients.plan.own(bucket))
    device = gradients.flats[0].device if gradients.flats else "cpu"
    mine = torch.tensor([squares, float(zeros)], dtype=torch.float64, device=device)
    total = sum_all(mine, group=group_of(groups, tuple(gradients.plan.layout.mesh.ranks)))
    return float(total[0]) ** 0.5, int(total[1])


def grad_norm(gradients: Gradients, groups: Groups) -> float:
    """The norm of all gradients. Law: where all are 1 it is ``sqrt(N)``, N the elements of the model."""
    return measure(gradients, groups)[0]


def count_zeros(gradients: Gradients, groups: Groups) -> int:
    """How many elements of the model have the gradient 0."""
    return measure(gradients, groups)[1]


def weight_norm(weights: Mapping[str, Tensor], plan: ReducePlan, groups: Groups) -> float:
    """The norm of all weights of the model, every element once: to be looked at.

    Every rank calls it at the same time. Law: it is the same on all ranks and, but for rounding, at every
    layout.

    Args:
        weights: The arrays of this rank, by name.
        plan: Its plan.
        groups: Its groups.
    """
    parts = []
    for bucket in plan.buckets:
        like = weights[bucket.arrays[0].name]
        flat = _flatten(weights, bucket, torch.promote_types(like.dtype, torch.float32), like.device)
        parts.append(flat[slice(*plan.own(bucket))].clone())
    return measure(Gradients(plan, tuple(parts), sharded=True), groups)[0]


def check_replicas(arrays: Mapping[str, Tensor], plan: ReducePlan, groups: Groups) -> None:
    """Compare what ranks hold that shall be equal, to the bit: parameters, or gradients after their sum.

    Every rank calls it at the same time, and all ranks that hold an array get the same error.

    Raises:
        ReplicaError: The array and the ranks that have other bytes than the first.
    """
    for bucket in plan.buckets:
        digests = torch.tensor([_digest(arrays[held.name]) for held in bucket.arrays])
        for ranks in (bucket.over, bucket.ends):
            group = group_of(groups, ranks)
            said = torch.stack(gather_parts(digests.to(arrays[bucket.arrays[0].name].device), group=group))
            different = (said != said[0]).any(-1).cpu().numpy()
            if different.any():
                first = int(different.any(0).argmax())
                others = [ranks[i] for i in np.flatnonzero(different[:, first])]
                raise ReplicaError(
                    "replicas hold the same bytes",
                    where=f"array {bucket.arrays[first].name!r}",
                    equation=f"bytes of {format_ranks(others)} != bytes of rank {ranks[0]}",
                    hint="a gradient was summed over some of its holders only, or a rank changed its copy",
                )


def _digest(array: Tensor) -> tuple[int, int]:
    data = array.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = blake2b(data, digest_size=16).digest()
    low, high = (int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:]))
    return low, high
