"""Collectives over a group that is passed in, and their derivatives.

The ranks of a model compute one function together: the loss is the sum of what its ranks contribute, and each
contributes its own tokens and nothing twice. Every operation here has the exact adjoint of that one function
as its backward: what gathers forward sums and scatters backward, and the other way round. It follows that the
gradient of an element of a weight is the sum over the ranks that hold it, whatever the layout; no operation
divides, and none knows whether its input is "replicated".

| forward | backward |
|---|---|
| ``gather``: the parts of all ranks, joined | ``reduce_scatter`` |
| ``reduce_scatter``: the sum over ranks, cut | ``gather`` |
| ``all_reduce``: the sum over ranks | ``all_reduce`` |
| ``exchange``: a part to each rank | ``exchange`` |

On gloo, sums are taken in the order of the ranks, so that all ranks get the same bits at every run, and all
is made of messages between pairs, two to five times faster there than its rings. Devices, and groups of very
many ranks, use the collectives of their backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardweave.errors import PlanError, TransportError
from shardweave.layout.layout import format_ranks
from shardweave.move import named_error
from shardweave.train.grid import Group

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

SMALL_BYTES = 1 << 16
"""Sums of at most this size are taken by every rank of all parts: one round of messages, not two."""

_MOST_PAIRS = {"gloo": 16, "memory": 1 << 30}
"""Of backends in host memory: ranks of a group up to which a message to each is quicker than a ring."""


# --- without derivatives ------------------------------------------------------------------------


def send_parts(parts: Sequence[Tensor], into: Sequence[Tensor], *, group: Group) -> None:
    """Send a part to each rank of a group, and receive one from each.

    Args:
        parts: One contiguous tensor for each rank, in the order of the group; any may be empty.
        into: Where what each rank sends is to lie, contiguous, of the shapes that they send.
        group: The group.

    Raises:
        PlanError: There is not one part for each rank.
        TransportError, TransportTimeoutError: A rank is gone or does not come.
    """
    if len(parts) != group.size or len(into) != group.size:
        raise PlanError(
            "an exchange has a part for each rank",
            where=f"group {group.name}, rank {group.global_rank(group.rank)}",
            equation=f"parts({len(parts)}), into({len(into)}) != size({group.size})",
            hint="give an empty tensor for a rank that gets nothing",
        )
    into[group.rank].copy_(parts[group.rank])
    if group.comm is None:
        return
    with _named(group):
        if not on_host(group):
            group.comm.alltoall(list(into), list(parts)).wait()
            return
        others = [(group.rank + step) % group.size for step in range(1, group.size)]
        works = [group.comm.send([parts[at]], at, 0) for at in others if parts[at].numel()]
        works += [group.comm.recv([into[at]], at, 0) for at in reversed(others) if into[at].numel()]
        for work in works:
            work.wait()


def gather_parts(part: Tensor, *, group: Group) -> tuple[Tensor, ...]:
    """What every rank has, in the order of the group; all have one shape."""
    if group.comm is None:
        return (part,)
    part = part.contiguous()
    into = torch.empty((group.size, *part.shape), dtype=part.dtype, device=part.device)
    if _by_pairs(group):
        send_parts([part] * group.size, into.unbind(), group=group)
    else:
        with _named(group):
            group.comm._allgather_base(into.view(-1), part.view(-1)).wait()
    return into.unbind()


def sum_parts(parts: Sequence[Tensor], *, group: Group) -> Tensor:
    """The sum over ranks of the parts that they have for this one, in the order of ranks.

    Args:
        parts: One for each rank, all of one shape.
        group: The group.
    """
    if group.comm is None:
        return parts[0]
    stacked = torch.stack(list(parts))
    if not _by_pairs(group):
        found = torch.empty_like(stacked[0])
        with _named(group):
            group.comm._reduce_scatter_base(found.view(-1), stacked.view(-1)).wait()
        return found
    into = torch.empty_like(stacked)
    send_parts(stacked.unbind(), into.unbind(), group=group)
    return _in_order(into)


def sum_all(tensor: Tensor, *, group: Group) -> Tensor:
    """The sum over ranks, a new tensor of the same bits on each."""
    if group.comm is None:
        return tensor.clone()
    if not _by_pairs(group):
        found = tensor.contiguous().clone()
        with _named(group):
            group.comm.allreduce([found]).wait()
        return found
    if tensor.nbytes <= SMALL_BYTES:
        return _in_order(torch.stack(gather_parts(tensor, group=group)))
    flat = tensor.reshape(-1)
    width = -(-flat.numel() // group.size)
    padded = torch.cat((flat, flat.new_zeros(width * group.size - flat.numel())))
    mine = sum_parts(padded.view(group.size, width).unbind(), group=group)
    return torch.cat(gather_parts(mine, group=group))[: flat.numel()].view(tensor.shape)


def max_all(tensor: Tensor, *, group: Group) -> Tensor:
    """The largest over ranks, element by element."""
    return torch.stack(gather_parts(tensor, group=group)).amax(0) if group.size > 1 else tensor.clone()


def _in_order(parts: Tensor) -> Tensor:
    """The sum over the first dim, one after the other: no order of additions but that of ranks."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


# --- with derivatives ---------------------------------------------------------------------------


def gather(tensor: Tensor, dim: int, *, group: Group) -> Tensor:
    """The parts of all ranks, joined along a dim in the order of the group; all have one shape."""
    found: Tensor = tensor if group.comm is None else _Gather.apply(tensor, dim, group)
    return found


def reduce_scatter(tensor: Tensor, dim: int, *, group: Group) -> Tensor:
    """The sum over ranks, of which each gets its even part along a dim.

    Raises:
        PlanError: The dim does not divide.
    """
    if tensor.shape[dim] % group.size:
        raise PlanError(
            "what is scattered is cut evenly",
            where=f"group {group.name}, dim {dim} of shape {tuple(tensor.shape)}",
            equation=f"size({tensor.shape[dim]}) % ranks({group.size}) != 0",
            hint="pad the sequence to the multiple of its layout",
        )
    found: Tensor = tensor if group.comm is None else _ReduceScatter.apply(tensor, dim, group)
    return found


def all_reduce(tensor: Tensor, *, group: Group) -> Tensor:
    """The sum over ranks. Its gradient is the sum of the gradients that ranks have for it."""
    found: Tensor = tensor if group.comm is None else _AllReduce.apply(tensor, group)
    return found


def exchange(parts: Tensor, sizes: Sequence[int], into_sizes: Sequence[int], *, group: Group) -> Tensor:
    """Rows for each rank against rows from each.

    Args:
        parts: The rows for all ranks, one rank's after the other.
        sizes: How many are for each rank.
        into_sizes: How many come from each.
        group: The group.

    Returns:
        The rows from all ranks, one rank's after the other.
    """
    found: Tensor = (
        parts if group.comm is None else _Exchange.apply(parts, tuple(sizes), tuple(into_sizes), group)
    )
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group  # type: ignore[attr-defined]
        return torch.cat(gather_parts(tensor, group=group), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_parts(grads[0].chunk(ctx.group.size, ctx.dim), group=ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group  # type: ignore[attr-defined]
        return sum_parts(tensor.chunk(group.size, dim), group=group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.cat(gather_parts(grads[0], group=ctx.group), ctx.dim), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return sum_all(tensor, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_all(grads[0], group=ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, parts: Tensor, sizes: tuple[int, ...], into_sizes: tuple[int, ...], group: Group
    ) -> Tensor:
        ctx.sizes, ctx.into_sizes, ctx.group = sizes, into_sizes, group  # type: ignore[attr-defined]
        return _exchange_rows(parts, sizes, into_sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange_rows(grads[0], ctx.into_sizes, ctx.sizes, ctx.group), None, None, None


def _exchange_rows(
    parts: Tensor, sizes: tuple[int, ...], into_sizes: tuple[int, ...], group: Group
) -> Tensor:
    into = parts.new_empty((sum(into_sizes), *parts.shape[1:]))
    send_parts(parts.contiguous().split(list(sizes)), into.split(list(into_sizes)), group=group)
    return into


# --- errors -------------------------------------------------------------------------------------


def on_host(group: Group) -> bool:
    """Whether a group's backend sends from host memory; a group of one rank does."""
    return group.comm is None or group.comm.name() in _MOST_PAIRS


def _by_pairs(group: Group) -> bool:
    return group.size <= _MOST_PAIRS.get(group.comm.name(), 0)


@contextmanager
def _named(group: Group) -> Iterator[None]:
    """Errors of a backend by name."""
    try:
        yield
    except TransportError:
        raise  # of a group that is closed, which says so itself
    except RuntimeError as error:
        where = f"rank {group.global_rank(group.rank)}, group {group.name} of {format_ranks(group.ranks, 8)}"
        raise named_error(error, where) from error
