"""A layer of experts: tokens go to the ranks that hold theirs, are worked on, and come back.

Experts are cut two ways. Over ``ep`` each rank holds some experts, over ``etp`` each rank holds a part of the
inner dim of these. The ranks of both are ranks whose tokens are all different, those of sequence parallelism
included. A token therefore travels twice: to the ranks in its own ``ep`` group that hold experts of its, and
from there to all ranks of the ``etp`` group, of which each computes a part of the sum.

| way there | way back |
|---|---|
| ``spread``: a row for each rank that a token goes to | ``join``: the sum for each token |
| ``exchange`` over ``ep`` | ``exchange`` over ``ep`` |
| ``collect``: the rows of all ``etp`` ranks | ``deliver``: the sum over ranks, each its own rows |
| ``spread``: a row for each expert that a row goes to | ``weighted``: the weighted sum for each row |

What stands in one line is the adjoint of each other, weights apart. A token travels once to a rank, however
many of its experts are there, with their numbers and weights, and one sum comes back. Every rank takes part
in every message, also where it has no tokens, and an expert without tokens has a gradient of zero. Rows are
neither padded nor dropped, and all sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from shardweave.errors import PlanError
from shardweave.train.collectives import exchange, gather_parts, send_parts
from shardweave.train.grid import Group
from shardweave.train.linear import columns, row, swiglu
from shardweave.train.routing import Choices, Documents, balance_sum, check_documents, route, z_sum
from shardweave.train.rows import collect, deliver, join, make_fan, marks_of, spread, weighted


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer of experts that one rank holds.

    Attributes:
        router: ``(E, H)``, whole on every rank.
        gate: ``(E/ep, F/etp, H)``: experts ``[r*E/ep, (r+1)*E/ep)`` on rank ``r`` of ``ep``.
        up: As ``gate``.
        down: ``(E/ep, H, F/etp)``.
    """

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """What a layer did with this rank's tokens. Sums over ranks are those of the microbatch.

    Attributes:
        aux_sum: The part of this rank in the sum over documents of tokens times balance loss
            (`routing.balance_sum`); a zero without gradient where no documents were given.
        z_sum: The sum over tokens of the z-loss (`routing.z_sum`).
        tokens: How many choices fell on each expert, ``(E,)``, int64.
    """

    aux_sum: Tensor
    z_sum: Tensor
    tokens: Tensor


def moe(
    x: Tensor,
    is_real: Tensor,
    weights: ExpertWeights,
    *,
    num_experts: int,
    top_k: int,
    norm_topk: bool,
    ep: Group,
    etp: Group,
    documents: Documents | None = None,
) -> tuple[Tensor, Routing]:
    """Experts applied to the tokens of all ranks together.

    Args:
        x: This rank's own tokens, ``(..., slots, H)``; no other rank has any of them.
        is_real: Which slots are tokens, bool, ``(..., slots)``. Padding goes to no expert and counts nowhere.
        weights: What this rank holds.
        num_experts: ``E``.
        top_k: Experts for each token.
        norm_topk: Whether the weights of a token's experts sum to 1.
        ep: The ranks that experts are cut over.
        etp: The ranks that the inner dim of an expert is cut over.
        documents: Whose balance is asked for; by default that of none.

    Returns:
        The outputs in the shape of ``x``, 0 for padding, and what was done.

    Raises:
        PlanError: A shape does not fit; raised before any message.
        TransportError, TransportTimeoutError: A rank is gone or does not come.

    >>> alone = Group("alone", (0,), 0)
    >>> weights = ExpertWeights(torch.eye(2), *(torch.ones(2, 1, 2),) * 2, torch.ones(2, 2, 1))
    >>> x, is_real = torch.ones(3, 2), torch.tensor([True, True, False])
    >>> y, routing = moe(
    ...     x, is_real, weights, num_experts=2, top_k=1, norm_topk=True, ep=alone, etp=alone
    ... )
    >>> y  # silu(2) * 2
    tensor([[3.5232, 3.5232],
            [3.5232, 3.5232],
            [0.0000, 0.0000]])
    >>> routing.tokens
    tensor([2, 0])
    """
    _check(x, is_real, weights, num_experts, top_k, ep, etp)
    slots = x.reshape(-1, x.shape[-1])
    real = is_real.reshape(-1).nonzero().squeeze(1)
    is_padded = len(real) < len(slots)
    tokens = slots.index_select(0, real) if is_padded else slots
    choices = route(tokens, weights.router, top_k=top_k, norm_topk=norm_topk)
    aux_sum = choices.probs.new_zeros(())
    if documents is not None:
        check_documents(documents, is_real.shape)
        numbers = documents.numbers.reshape(-1)[real]
        aux_sum = balance_sum(choices, numbers, count=documents.count, group=documents.group)

    y = _apply(tokens, choices, weights, ep, etp)
    if is_padded:
        y = torch.zeros_like(slots).index_copy(0, real, y)
    return y.view(x.shape), Routing(aux_sum, z_sum(choices), choices.per_expert())


def shared_expert(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, tp: Group, scale: Tensor | None = None
) -> Tensor:
    """An expert that every token goes to: a dense MLP, cut over ``tp``, optionally under a sigmoid.

    Args:
        x: This rank's own tokens, ``(..., slots, H)``.
        gate: ``(F/tp, H)``.
        up: ``(F/tp, H)``.
        down: ``(H, F/tp)``.
        tp: The ranks that ``F`` and the sequence are cut over.
        scale: ``(1, H)``, whole on every rank: outputs are multiplied by ``sigmoid(x @ scale.T)``, as in
            Qwen2-MoE.

    Returns:
        The outputs in the shape of ``x``; those of padding are whatever padding gives.

    Raises:
        PlanError: A shape does not fit, or the slots do not divide.
    """
    y = row(swiglu(*columns(x, (gate, up), tp=tp)), down, tp=tp)
    return y if scale is None else torch.sigmoid(x @ scale.T) * y


def _check(
    x: Tensor, is_real: Tensor, weights: ExpertWeights, num_experts: int, top_k: int, ep: Group, etp: Group
) -> None:
    """Shapes against each other, before ranks communicate."""
    hidden, inner = x.shape[-1], weights.gate.shape[1]
    local = num_experts // ep.size
    wanted = {
        "is_real": (is_real, tuple(x.shape[:-1])),
        "router": (weights.router, (num_experts, hidden)),
        "gate": (weights.gate, (local, inner, hidden)),
        "up": (weights.up, (local, inner, hidden)),
        "down": (weights.down, (local, hidden, inner)),
    }
    wrong = [
        f"{name}{tuple(tensor.shape)} != {shape}"
        for name, (tensor, shape) in wanted.items()
        if tuple(tensor.shape) != shape
    ]
    if num_experts % ep.size:
        wrong.append(f"experts({num_experts}) % ep({ep.size}) != 0")
    if not 0 < top_k <= num_experts:
        wrong.append(f"top_k({top_k}) is not in 1..{num_experts}")
    if wrong:
        raise PlanError(
            "tokens, experts and ranks of a layer of experts fit together",
            where=f"rank {ep.global_rank(ep.rank)}, ep={ep.size}, etp={etp.size}, x{tuple(x.shape)}",
            equation=", ".join(wrong),
            hint="stack the experts of a rank as (E/ep, F/etp, H), (E/ep, F/etp, H) and (E/ep, H, F/etp)",
        )


# --- there and back -----------------------------------------------------------------------------


def _apply(tokens: Tensor, choices: Choices, weights: ExpertWeights, ep: Group, etp: Group) -> Tensor:
    """The weighted sum of what its experts say of each token, ``(T, H)``."""
    top_k, local = choices.experts.shape[1], weights.gate.shape[0]
    # What a row's experts here are, and their weights; a message of its own, for it has a dtype of its own.
    said = torch.cat((choices.experts.to(choices.weights.dtype), choices.weights), 1)
    if ep.size == 1:
        sent = got = [len(tokens)]
        rows = tokens
    else:
        ranks = make_fan(marks_of(choices.experts // local, ep.size))
        sent, got = list(ranks.sizes), _tell(ranks.sizes, tokens, ep)
        rows = exchange(spread(tokens, ranks), sent, got, group=ep)
        said = exchange(spread(said, ranks), sent, got, group=ep)
    if etp.size > 1:
        mine = torch.tensor([len(rows)], device=rows.device)
        held = torch.cat(gather_parts(mine, group=etp)).tolist()
        rows, said = collect(rows, held, group=etp), collect(said, held, group=etp)

    experts = said.detach()[:, :top_k].long() - ep.rank * local
    is_here = (experts >= 0) & (experts < local)
    of_expert = make_fan(marks_of(experts.where(is_here, local), local + 1)[:, :local])
    opened = spread(rows, of_expert)
    closed: Tensor = _Mlp.apply(opened, weights.gate, weights.up, weights.down, of_expert.sizes)
    rows = weighted(closed, said[:, top_k:].masked_select(is_here).to(closed.dtype), of_expert)

    if etp.size > 1:
        rows = deliver(rows, held, group=etp)
    if ep.size > 1:
        rows = join(exchange(rows, got, sent, group=ep), ranks)
    return rows


def _tell(sizes: Sequence[int], like: Tensor, ep: Group) -> list[int]:
    """How many rows come from each rank, where each says how many it has for each."""
    to = torch.tensor(sizes, device=like.device)
    into = torch.empty_like(to)
    send_parts(to.split(1), into.split(1), group=ep)
    found: list[int] = into.tolist()
    return found


class _Mlp(torch.autograd.Function):
    """``down(silu(gate(x)) * up(x))`` of each expert on its own stretch of rows.

    One matmul each, written into place: torch's grouped kernel takes neither fp64 nor rows that are no
    multiple of 16 bytes.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, sizes: tuple[int, ...]
    ) -> Tensor:
        opened = rows.new_empty((2, len(rows), gate.shape[1]))
        y = rows.new_empty((len(rows), down.shape[1]))
        for e, at in _stretches(sizes):
            torch.mm(rows[at], gate[e].T, out=opened[0, at])
            torch.mm(rows[at], up[e].T, out=opened[1, at])
            torch.mm(functional.silu(opened[0, at]).mul_(opened[1, at]), down[e].T, out=y[at])
        ctx.save_for_backward(rows, gate, up, down, opened)
        ctx.sizes = sizes  # type: ignore[attr-defined]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate, up, down, opened = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_rows = torch.empty_like(rows)
        grad_gate, grad_up, grad_down = (torch.empty_like(weight) for weight in (gate, up, down))
        for e, size in enumerate(ctx.sizes):
            if not size:
                for empty in (grad_gate, grad_up, grad_down):
                    empty[e].zero_()
        for e, at in _stretches(ctx.sizes):
            a, b = opened[0, at], opened[1, at]
            act, inner = functional.silu(a), grad[at] @ down[e]
            torch.mm(grad[at].T, act * b, out=grad_down[e])
            grad_b = act.mul_(inner)
            grad_a = torch.ops.aten.silu_backward(inner.mul_(b), a)
            torch.mm(grad_a.T, rows[at], out=grad_gate[e])
            torch.mm(grad_b.T, rows[at], out=grad_up[e])
            torch.mm(grad_a, gate[e], out=grad_rows[at])
            grad_rows[at].addmm_(grad_b, up[e])
        return grad_rows, grad_gate, grad_up, grad_down, None


def _stretches(sizes: Sequence[int]) -> list[tuple[int, slice]]:
    """The experts that have rows, and where these are."""
    found, start = [], 0
    for e, size in enumerate(sizes):
        if size:
            found.append((e, slice(start, start + size)))
        start += size
    return found
