"""Rows made of other rows, and back: several of each on one rank, those of several ranks on each.

Every move here has its adjoint beside it, and both directions read places in a fixed order: nothing is added
into places that are shared, so that all sums have the same bits at every run.

| move | adjoint |
|---|---|
| ``spread``: the source of each row | ``join``: the sum of the rows of each source |
| ``collect``: the rows of all ranks | ``deliver``: the sum over ranks, each its own rows |

``weighted`` is ``join`` with a weight for each row, and has a derivative for these too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from shardweave.train.collectives import send_parts
from shardweave.train.grid import Group

# --- on one rank --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fan:
    """Sources and the rows that are made of them, seen from both sides.

    One bijection as two lists, so that both directions gather and nothing is added into shared places.

    Attributes:
        source: The source of each row; rows are in order of targets, and of sources within each.
        rows: The rows of each source, one source's after the other, in order of targets.
        offsets: Where in ``rows`` those of each source begin.
        sizes: How many rows each target has.
    """

    source: Tensor
    rows: Tensor
    offsets: Tensor
    sizes: tuple[int, ...]


def marks_of(targets: Tensor, count: int) -> Tensor:
    """Which targets each source names, ``(sources, count)``, of those that it names, ``(sources, k)``."""
    return torch.zeros(len(targets), count, dtype=torch.bool, device=targets.device).scatter_(
        1, targets, True
    )


def make_fan(marks: Tensor) -> Fan:
    """A row for each mark of a mask ``(sources, targets)``.

    >>> fan = make_fan(marks_of(torch.tensor([[0, 1], [1, 1]]), 2))
    >>> spread(torch.tensor([[10.0], [20.0]]), fan).flatten(), fan.sizes
    (tensor([10., 10., 20.]), (1, 2))
    >>> join(torch.tensor([[1.0], [2.0], [4.0]]), fan).flatten()
    tensor([3., 4.])
    """
    counts, of_source = marks.sum(0), marks.sum(1)
    before = counts.cumsum(0) - counts
    places = marks.cumsum(0, dtype=torch.int32) + (before - 1)
    return Fan(
        marks.T.nonzero()[:, 1],
        places.masked_select(marks),
        of_source.cumsum(0) - of_source,
        tuple(counts.tolist()),
    )


def spread(sources: Tensor, fan: Fan) -> Tensor:
    """The source of each row."""
    found: Tensor = _Spread.apply(sources, fan)
    return found


def join(rows: Tensor, fan: Fan) -> Tensor:
    """The sum of the rows of each source; 0 where it has none."""
    found: Tensor = _Join.apply(rows, fan)
    return found


def weighted(rows: Tensor, weights: Tensor, fan: Fan) -> Tensor:
    """The weighted sum of the rows of each source; weights are in the order of ``fan.rows``."""
    found: Tensor = _Weighted.apply(rows, weights, fan)
    return found


class _Spread(torch.autograd.Function):
    """The source of each row."""

    @staticmethod
    def forward(ctx: FunctionCtx, sources: Tensor, fan: Fan) -> Tensor:
        ctx.fan = fan  # type: ignore[attr-defined]
        return sources.index_select(0, fan.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _joined(grads[0], ctx.fan), None


class _Join(torch.autograd.Function):
    """The sum of the rows of each source."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, fan: Fan) -> Tensor:
        ctx.fan = fan  # type: ignore[attr-defined]
        return _joined(rows, fan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.fan.source), None


class _Weighted(torch.autograd.Function):
    """The weighted sum of the rows of each source; weights are in the order of ``fan.rows``."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weights: Tensor, fan: Fan) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.fan = fan  # type: ignore[attr-defined]
        return _joined(rows, fan, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        grad_rows = grads[0].index_select(0, ctx.fan.source)
        grad_weights = torch.linalg.vecdot(rows, grad_rows).index_select(0, ctx.fan.rows)
        by_row = torch.empty_like(weights)
        by_row[ctx.fan.rows] = weights
        return grad_rows.mul_(by_row[:, None]), grad_weights, None


def _joined(rows: Tensor, fan: Fan, weights: Tensor | None = None) -> Tensor:
    """The sum of the rows of each source, in their order; 0 where it has none."""
    return functional.embedding_bag(
        fan.rows, rows.contiguous(), fan.offsets, per_sample_weights=weights, mode="sum"
    )


# --- over ranks ---------------------------------------------------------------------------------


def collect(rows: Tensor, sizes: Sequence[int], *, group: Group) -> Tensor:
    """The rows of all ranks, of which each may have another number, in the order of the group."""
    found: Tensor = rows if group.comm is None else _Collect.apply(rows, tuple(sizes), group)
    return found


def deliver(rows: Tensor, sizes: Sequence[int], *, group: Group) -> Tensor:
    """The sum over ranks of rows for all of them, of which each gets its own."""
    found: Tensor = rows if group.comm is None else _Deliver.apply(rows, tuple(sizes), group)
    return found


def _collected(rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
    into = rows.new_empty((sum(sizes), *rows.shape[1:]))
    send_parts([rows.contiguous()] * group.size, into.split(list(sizes)), group=group)
    return into


def _delivered(rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
    into = rows.new_empty((group.size, sizes[group.rank], *rows.shape[1:]))
    send_parts(rows.contiguous().split(list(sizes)), into.unbind(), group=group)
    total = into[0]
    for part in into[1:]:
        total += part  # in the order of ranks: the same bits at every run
    return total


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group  # type: ignore[attr-defined]
        return _collected(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _delivered(grads[0], ctx.sizes, ctx.group), None, None


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group  # type: ignore[attr-defined]
        return _delivered(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _collected(grads[0], ctx.sizes, ctx.group), None, None
