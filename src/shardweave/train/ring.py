"""Attention to keys that come in parts: a block at a time, merged by the sums that their softmax divides by.

A block gives its output and the logarithm of its sum (``lse``). Two blocks of the same queries are merged
from these alone, so that it does not matter which rank had the keys, or when. The derivative is worked out
by hand: a block's probabilities are ``exp(score - lse)`` with the *final* ``lse`` of its queries, and what
its keys get depends on nothing else of the other blocks.

``attend_parts`` has the keys of all ranks at hand, ``ring`` lets them travel round the group: they are the
same sum in the same order, and forward they have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardweave.train.blocks import Block, blocks
from shardweave.train.collectives import send_parts
from shardweave.train.grid import Group
from shardweave.train.sequence import SequenceLayout

Part = tuple[tuple[Block, ...], Tensor]
"""What is seen of a rank's keys, and these: ``(2, rows, slots, kv heads, dim)``, keys and then values."""


# --- one block ----------------------------------------------------------------------------------


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys.

    Args:
        q: ``(rows, queries, heads, dim)``.
        k: ``(rows, keys, kv heads, dim)``.
        v: The same.
        causal: Whether queries and keys are the same slots, of which each sees those up to itself.
        scale: What scores are multiplied by.

    Returns:
        The output, as ``q``, and the logarithm of the sum of exponentials, ``(rows, queries, heads)``, in
        float32 or float64.
    """
    if _has_flash(q.device):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2)
    scores, _, values = _scores(q, k, v, causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ values
    return _heads_last(out).to(q.dtype), _heads_last(lse)


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block gives to the gradients of its queries, keys and values.

    Args:
        grad: The gradient of the output.
        q: As forward.
        k: As forward.
        v: As forward.
        out: The output over *all* blocks of these queries.
        lse: The logarithm of the sum over all of them.
        causal: As forward.
        scale: As forward.
    """
    if _has_flash(q.device):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(grad, q, k, v, out, lse), 0.0, causal, scale=scale
        )
        dq, dk, dv = (one.transpose(1, 2) for one in grads)
        return dq, dk, dv
    scores, keys, values = _scores(q, k, v, causal, scale)
    grouped = keys.shape[1]
    g, o, queries = (_grouped(one.to(scores.dtype), grouped) for one in (grad, out, q))
    p = (scores - lse.transpose(1, 2).unflatten(1, (grouped, -1))[..., None]).exp()
    ds = p * (g @ values.transpose(-1, -2) - (g * o).sum(-1, keepdim=True)) * scale
    dq = _heads_last(ds @ keys)
    dk, dv = ((a.transpose(-1, -2) @ b).sum(2).transpose(1, 2) for a, b in ((ds, queries), (p, g)))
    return dq, dk, dv


def _has_flash(device: torch.device) -> bool:
    """Whether blocks are computed without their scores being stored. On other devices they are."""
    return device.type == "cpu"


def _scores(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled scores ``(rows, kv heads, group, queries, keys)``, and keys and values that fit them."""
    exact = _exact(q.dtype)
    keys, values = (one.to(exact).transpose(1, 2).unsqueeze(2) for one in (k, v))
    scores = _grouped(q.to(exact), k.shape[2]) @ keys.transpose(-1, -2) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores, keys, values


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    heads: Tensor = x.transpose(1, 2).unflatten(1, (kv_heads, -1))
    return heads


def _heads_last(x: Tensor) -> Tensor:
    return x.flatten(1, 2).transpose(1, 2)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.transpose(1, 2) for one in tensors)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What is summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- many blocks --------------------------------------------------------------------------------


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add what other keys gave to the same queries, in place.

    Exponents are never positive, so that nothing overflows however far the two sums are apart.
    """
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_()[..., None]).add_(more * (more_lse - both).exp_()[..., None])
    lse.copy_(both)


def _forward(q: Tensor, parts: Iterable[Part], scale: float) -> tuple[Tensor, Tensor]:
    """Output and ``lse`` over parts, of which the first has a key for every query."""
    exact = _exact(q.dtype)
    out = torch.zeros(q.shape, dtype=exact, device=q.device)
    lse = torch.zeros(q.shape[:-1], dtype=exact, device=q.device)
    for number, (seen, kv) in enumerate(parts):
        for block in seen:
            asking, having = slice(*block.queries), slice(*block.keys)
            k, v = kv[:, :, having]
            more, more_lse = block_forward(q[:, asking], k, v, block.causal, scale)
            if number == 0:
                out[:, asking], lse[:, asking] = more, more_lse
            else:
                merge(out[:, asking], lse[:, asking], more, more_lse)
    return out.to(q.dtype), lse


def _backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float, dq: Tensor, dkv: Tensor
) -> None:
    """Add one part's share to the gradients of the queries, and of its keys and values."""
    seen, kv = part
    for block in seen:
        asking, having = slice(*block.queries), slice(*block.keys)
        k, v = kv[:, :, having]
        more = block_backward(
            grad[:, asking], q[:, asking], k, v, out[:, asking], lse[:, asking], block.causal, scale
        )
        for total, one in zip((dq[:, asking], *dkv[:, :, having]), more, strict=True):
            total += one


def _order(group: Group) -> Iterator[int]:
    """Whose keys a rank has, step by step: its own, and then those of the rank before, and so on."""
    return ((group.rank - step) % group.size for step in range(group.size))


# --- all keys at hand ---------------------------------------------------------------------------


def attend_parts(q: Tensor, kv: Tensor, *, layout: SequenceLayout, group: Group, scale: float) -> Tensor:
    """Attention to the keys of all ranks.

    Args:
        q: This rank's queries, ``(rows, slots, heads, dim)``.
        kv: Keys and values of all ranks, one rank's after the other, ``(2, rows, ranks * slots, kv heads,
            dim)``.
        layout: The batch.
        group: The ranks that it is cut over.
        scale: What scores are multiplied by.
    """
    found: Tensor = _Parts.apply(q, kv, layout, group, scale)
    return found


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, layout: SequenceLayout, group: Group, scale: float
    ) -> Tensor:
        parts = kv.chunk(group.size, 2)
        out, lse = _forward(
            q, ((blocks(layout, group.rank, source), parts[source]) for source in _order(group)), scale
        )
        ctx.save_for_backward(q, kv, out, lse)
        ctx.layout, ctx.group, ctx.scale = layout, group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        group: Group = ctx.group
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        dkv = torch.zeros_like(kv, memory_format=torch.contiguous_format)
        parts, dparts = (one.chunk(group.size, 2) for one in (kv, dkv))
        for source in _order(group):
            part = blocks(ctx.layout, group.rank, source), parts[source]
            _backward(grad, q, out, lse, part, ctx.scale, dq, dparts[source])
        return dq.to(q.dtype), dkv, None, None, None


# --- keys that travel ---------------------------------------------------------------------------


def ring(q: Tensor, kv: Tensor, *, layout: SequenceLayout, group: Group, scale: float) -> Tensor:
    """Attention to the keys of all ranks, which go round the group a rank at a time.

    No rank has more than two parts of keys at once. Backward, the keys go round again, and their gradients
    with them and one step further, home.

    Args:
        q: This rank's queries, ``(rows, slots, heads, dim)``.
        kv: This rank's keys and values, ``(2, rows, slots, kv heads, dim)``.
        layout: The batch.
        group: The ranks that it is cut over.
        scale: What scores are multiplied by.
    """
    found: Tensor = _Ring.apply(q, kv, layout, group, scale)
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, layout: SequenceLayout, group: Group, scale: float
    ) -> Tensor:
        def arriving() -> Iterator[Part]:
            here = kv
            for step, source in enumerate(_order(group)):
                if step:
                    here = _pass_on(here, group)
                yield blocks(layout, group.rank, source), here

        out, lse = _forward(q, arriving(), scale)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.layout, ctx.group, ctx.scale = layout, group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        group: Group = ctx.group
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        here, dkv = kv, torch.zeros(kv.shape, dtype=lse.dtype, device=kv.device)
        for step, source in enumerate(_order(group)):
            if step:
                here = _pass_on(here, group)
            part = blocks(ctx.layout, group.rank, source), here
            _backward(grad, q, out, lse, part, ctx.scale, dq, dkv)
            dkv = _pass_on(dkv, group)
        return dq.to(q.dtype), dkv.to(kv.dtype), None, None, None


def _pass_on(tensor: Tensor, group: Group) -> Tensor:
    """Give a tensor to the next rank, and take one of the same shape from the one before."""
    into, nothing = torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor.new_empty(0)
    parts, places = [nothing] * group.size, [tensor.new_empty(0)] * group.size
    parts[(group.rank + 1) % group.size] = tensor.contiguous()
    places[(group.rank - 1) % group.size] = into
    send_parts(parts, places, group=group)
    return into
