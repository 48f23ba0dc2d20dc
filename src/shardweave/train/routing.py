"""Which experts a token goes to, and what that costs: the router, its statistics and its two losses.

A router looks at one token at a time, so that no layout changes what it chooses. What it is judged by is
another matter: whether experts are used evenly is a property of a document, whose tokens lie on several
ranks. They are counted over these ranks, which is one small message without a derivative; each rank then
contributes its own tokens' part, and the sum over ranks is the loss of the document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.errors import PlanError
from shardweave.train.collectives import sum_all
from shardweave.train.grid import Group


@dataclass(frozen=True, slots=True)
class Documents:
    """To which document the tokens of a rank belong, and which ranks have the others.

    Attributes:
        numbers: The document of each slot, int64, in the shape of a rank's part:
            `SequenceLayout.documents` cut as the tokens are.
        count: How many documents the microbatch has.
        group: The ranks that the tokens of a document lie on, each token on one: ``tp`` x ``cp``.
    """

    numbers: Tensor
    count: int
    group: Group


@dataclass(frozen=True, slots=True)
class Choices:
    """What a router says of ``T`` tokens, of which each goes to ``k`` of ``E`` experts.

    Attributes:
        logits: ``(T, E)``, in the dtype of the tokens.
        probs: ``(T, E)``, their softmax over all experts, in fp32 or fp64.
        experts: ``(T, k)``, the chosen ones of each token, ascending.
        weights: ``(T, k)``, what their outputs are weighted by, in the dtype of ``probs``.
    """

    logits: Tensor
    probs: Tensor
    experts: Tensor
    weights: Tensor

    def per_expert(self) -> Tensor:
        """How many tokens go to each expert, ``(E,)``, int64."""
        return self.experts.flatten().bincount(minlength=self.probs.shape[1])


def route(tokens: Tensor, router: Tensor, *, top_k: int, norm_topk: bool) -> Choices:
    """Choose the experts of each token.

    The softmax is over all experts and at least fp32. Of equal probabilities the expert of the lower number
    is chosen, so that a choice is a function of the probabilities alone.

    Args:
        tokens: ``(T, H)``.
        router: ``(E, H)``.
        top_k: Experts for each token.
        norm_topk: Whether the weights of a token are scaled so that they sum to 1 (``norm_topk_prob``).

    >>> tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> router = torch.tensor([[0.0, 9.0], [5.0, 0.0], [5.0, 0.0]])
    >>> route(tokens, router, top_k=1, norm_topk=True).experts
    tensor([[1],
            [0]])
    """
    logits = tokens @ router.T
    probs = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    chosen = _largest(probs.detach(), top_k)
    experts = chosen.nonzero()[:, 1].view(-1, top_k)
    weights = probs.gather(1, experts)
    if norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choices(logits, probs, experts, weights)


def _largest(probs: Tensor, top_k: int) -> Tensor:
    """A mask with exactly ``k`` true in each row: the largest, of equal ones those that come first."""
    # NaN counts as large: a step that overflows is found by its gradients and must not end on one rank.
    probs = probs.nan_to_num(nan=2.0)
    least = probs.topk(top_k, sorted=False).values.amin(-1, keepdim=True)
    above, level = probs > least, probs == least
    left = top_k - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (level & (level.cumsum(-1, dtype=torch.int32) <= left))


def balance_sum(choices: Choices, numbers: Tensor, *, count: int, group: Group) -> Tensor:
    """The auxiliary loss of how evenly documents use experts, each weighted by its tokens.

    For a document of ``n`` tokens with ``f_i`` the share of its ``n * k`` choices that fell on expert ``i``
    and ``P_i`` the mean probability of it, the loss is ``E * sum_i f_i P_i``: 1 where experts are used
    evenly, whatever ``k`` is. The gradient goes through ``P``.

    Laws:
        The sum over the ranks of the group is ``sum over documents of n * E * sum_i f_i P_i``.

    Args:
        choices: Of this rank's tokens.
        numbers: The document of each of them, ``(T,)``, int64.
        count: How many documents there are.
        group: The ranks that the tokens of a document lie on.

    Returns:
        A scalar: what this rank's tokens contribute.
    """
    num_experts = choices.probs.shape[1]
    at = numbers[:, None] * num_experts + choices.experts
    mine = at.flatten().bincount(minlength=count * num_experts).view(count, num_experts)
    chosen = sum_all(mine, group=group)
    share = chosen.to(choices.probs.dtype) / chosen.sum(-1, keepdim=True).clamp(min=1)
    return num_experts * (choices.probs * share.index_select(0, numbers)).sum()


def z_sum(choices: Choices) -> Tensor:
    """The router z-loss: the sum over this rank's tokens of the squared logsumexp of their logits."""
    return choices.logits.to(choices.probs.dtype).logsumexp(-1).square().sum()


def check_documents(documents: Documents, slots: torch.Size) -> None:
    """Refuse documents of other slots than the tokens, before ranks communicate.

    Raises:
        PlanError: The shapes differ.
    """
    if documents.numbers.shape != slots:
        raise PlanError(
            "each slot belongs to a document",
            where=f"group {documents.group.name}, rank {documents.group.global_rank(documents.group.rank)}",
            equation=f"documents{tuple(documents.numbers.shape)} != slots{tuple(slots)}",
            hint="cut SequenceLayout.documents as the tokens are cut: local() with the tp rank",
        )
