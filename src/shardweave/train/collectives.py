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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        for work in _post(parts, into, group=group, tag=0):
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


def _in_order(parts: Tensor | Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The sum of parts, one after the other: no order of additions but that of ranks."""
    total = parts[0].to(parts[0].dtype if dtype is None else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


# --- under way ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """What was begun and is not there yet. Nobody may change what was given to it before ``wait`` returns.

    Attributes:
        group: The group.
        works: What to wait for.
        end: Makes the result, from what has then come.
        sent: What is kept until it is through.
    """

    group: Group
    works: Sequence[Any]
    end: Callable[[], Tensor]
    sent: Sequence[Tensor] = ()

    def wait(self) -> Tensor:
        """The result, when all is there."""
        with _named(self.group):
            for work in self.works:
                work.wait()
        return self.end()


def begin_fetch(part: Tensor, dim: int, lengths: Sequence[int], *, group: Group, tag: int) -> Pending:
    """Begin to join the parts of all ranks along a dim, of which each counts a length.

    Args:
        part: What this rank has; what it has beyond its length is padding, and stays here.
        dim: The dim.
        lengths: How much of it each rank gives.
        group: The group.
        tag: Of the messages: what is begun with different tags may be begun in any order.
    """
    shape = list(part.shape)
    if _by_pairs(group):
        whole = part.new_empty((*shape[:dim], sum(lengths), *shape[dim + 1 :]))
        views = whole.split(list(lengths), dim)
        mine = part.narrow(dim, 0, lengths[group.rank]).contiguous()
        views[group.rank].copy_(mine)
        into = [view if view.is_contiguous() else torch.empty_like(view).contiguous() for view in views]
        works = _post([mine] * group.size, into, group=group, tag=tag)

        def placed() -> Tensor:
            for at, (view, came) in enumerate(zip(views, into, strict=True)):
                if view is not came and at != group.rank:
                    view.copy_(came)
            return whole

        return Pending(group, works, placed, (mine,))
    into_base = part.new_empty((group.size, *shape))
    mine = part.contiguous()
    with _named(group):
        work = group.comm._allgather_base(into_base.view(-1), mine.view(-1))
    return Pending(
        group, [work], lambda: torch.cat(into_base.unbind(), dim).narrow(dim, 0, sum(lengths)), (mine,)
    )


def begin_sum(
    whole: Tensor,
    dim: int,
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    group: Group,
    tag: int,
    ordered: bool,
) -> Pending:
    """Begin to sum what all ranks have, of which each gets its length along a dim: the adjoint of a fetch.

    Args:
        whole: What this rank contributes.
        dim: The dim.
        lengths: How much of it each rank gets, one after the other.
        dtype: What sums are taken in.
        group: The group.
        tag: As of ``begin_fetch``.
        ordered: Whether sums are taken in the order of ranks also where a backend has a quicker way.
    """
    parts = [part.contiguous() for part in whole.split(list(lengths), dim)]
    if _by_pairs(group):
        into = [torch.empty_like(parts[group.rank]) for _ in parts]
        into[group.rank] = parts[group.rank]
        works = _post(parts, into, group=group, tag=tag)
        return Pending(group, works, lambda: _in_order(into, dtype), parts)
    longest = max(lengths)
    full = [_longer(part, dim, longest).to(dtype if not ordered else part.dtype) for part in parts]
    length = lengths[group.rank]
    if ordered:
        into = [torch.empty_like(full[group.rank]) for _ in full]
        with _named(group):
            work = group.comm.alltoall(into, full)
        return Pending(group, [work], lambda: _in_order(into, dtype).narrow(dim, 0, length), full)
    stacked, found = torch.stack(full), torch.empty_like(full[0])
    with _named(group):
        work = group.comm._reduce_scatter_base(found.view(-1), stacked.view(-1))
    return Pending(group, [work], lambda: found.narrow(dim, 0, length), (stacked,))


def _longer(part: Tensor, dim: int, length: int) -> Tensor:
    """A part with zeros behind it."""
    if part.shape[dim] == length:
        return part
    rest = list(part.shape)
    rest[dim] = length - rest[dim]
    return torch.cat((part, part.new_zeros(rest)), dim)


def _post(parts: Sequence[Tensor], into: Sequence[Tensor], *, group: Group, tag: int) -> list[Any]:
    """Post a message to each other rank, and the receipt of one from each; empty ones are left out."""
    with _named(group):
        others = [(group.rank + step) % group.size for step in range(1, group.size)]
        works = [group.comm.send([parts[at]], at, tag) for at in others if parts[at].numel()]
        return works + [group.comm.recv([into[at]], at, tag) for at in reversed(others) if into[at].numel()]


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
