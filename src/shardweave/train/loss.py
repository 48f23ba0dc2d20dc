"""What a loss is given and what it returns, and the one scale that the runtime puts on it.

A loss sees the tokens of one rank and returns ``(sum, count)``, both of what this rank counts and nothing
else: it divides by nothing. The objective of a step is

    sum over ranks and microbatches of weight * sum / N,

with N the targets of the whole step, counted from the masks of all ranks and microbatches before the first
backward (``count_targets``). There is no other scale: nothing is divided by microbatches, by data or by
context ranks, so that gradients do not depend on how a step is cut. Losses of further heads and auxiliary
terms are ``Term``s of their own N and go the same way.

>>> tokens = Tokens(
...     logprobs=torch.tensor([-1.0, -2.0, 0.0]),
...     labels=torch.tensor([7, 3, IGNORE]),
...     mask=torch.tensor([True, True, False]),
...     slots=torch.arange(3),
... )
>>> cross_entropy(tokens)
(tensor(3.), tensor(2))
>>> total([term(cross_entropy, tokens)], {"loss": 4})
tensor(0.7500)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardweave.errors import PlanError, UnknownNameError
from shardweave.train.collectives import on_host, sum_all
from shardweave.train.grid import Group
from shardweave.train.sequence import IGNORE

# --- what a loss is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rank and one microbatch; every tensor has the shape of the rank's own slots.

    Attributes:
        logprobs: Of each label, with gradient; 0 where the label is IGNORE.
        labels: int64, what each slot shall predict, or IGNORE.
        mask: bool, the slots that count.
        slots: int64, their numbers in the whole padded batch.
        entropies: Of each slot's distribution, with gradient, where they were asked for; 0 at IGNORE.
        extras: What else a loss needs of each slot by name, such as ``advantages``; sliced like the ids.

    Raises:
        PlanError: Shapes differ, the mask is not bool, or it counts a slot that has no label.
    """

    logprobs: Tensor
    labels: Tensor
    mask: Tensor
    slots: Tensor
    entropies: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        given = {"labels": self.labels, "mask": self.mask, "slots": self.slots, **self.extras}
        if self.entropies is not None:
            given["entropies"] = self.entropies
        for name, value in given.items():
            if value.shape != self.logprobs.shape:
                raise PlanError(
                    "what a loss is given has the shape of the rank's own slots",
                    where=name,
                    equation=f"shape{tuple(value.shape)} != logprobs{tuple(self.logprobs.shape)}",
                    hint="slice it with local(cp_rank, tp_rank) of the SequenceLayout, as the ids are",
                )
        wrong = self.mask.dtype != torch.bool or bool((self.mask & (self.labels == IGNORE)).any())
        if wrong:
            counted = int((self.mask.bool() & (self.labels == IGNORE)).sum())
            raise PlanError(
                "a mask is bool, and counts slots that have a label",
                where="mask",
                equation=f"dtype({self.mask.dtype}), slots without a label that it counts({counted}) != 0",
                hint="shift mask and labels together; the last token of a document has no target",
            )

    def __getitem__(self, name: str) -> Tensor:
        """A value by name.

        Raises:
            UnknownNameError: The batch has no such value.
        """
        if name == "entropies" and self.entropies is not None:
            return self.entropies
        if name not in self.extras:
            raise UnknownNameError(
                "a loss reads what its batch has",
                equation=f"{name!r} not among extras({', '.join(self.extras) or 'none'})",
                hint="put it into the batch, one number a token, or ask for entropies",
            )
        return self.extras[name]

    @property
    def count(self) -> Tensor:
        """The slots that count, a number."""
        return self.mask.sum()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the slots that count; what others hold does not matter, NaN included."""
        return values.where(self.mask, 0).sum()


Loss = Callable[[Tokens], tuple[Tensor, Tensor]]
"""A loss: the sum over the rank's tokens that count, with gradient, and how many they are."""


def cross_entropy(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The negative log-probability of the labels."""
    return -tokens.sum(tokens.logprobs), tokens.count


def policy_gradient(
    *, clip: float = 0.2, clip_high: float | None = None, kl: float = 0.0, entropy: float = 0.0
) -> Loss:
    """The clipped policy-gradient loss of PPO and GRPO, for each token.

    ``-min(r * A, clamp(r, 1 - clip, 1 + clip_high) * A)`` with ``r = exp(logprob - old_logprob)``, plus
    ``kl`` times ``exp(d) - d - 1`` with ``d = ref_logprob - logprob``, less ``entropy`` times the entropy.
    A loss that means over documents and not tokens has its weights in the advantages.

    Args:
        clip: How far the ratio may fall below 1.
        clip_high: How far it may rise above; as ``clip`` by default.
        kl: The weight of the distance from a reference policy; needs ``ref_logprobs``.
        entropy: The weight of the entropy bonus; needs entropies.

    Returns:
        A loss. It reads ``advantages`` and ``old_logprobs`` of the batch.

    Raises:
        PlanError: A number is not finite or has the wrong sign.
    """
    high = clip if clip_high is None else clip_high
    if not (0 < clip <= 1 and 0 < high < math.inf and 0 <= kl < math.inf and math.isfinite(entropy)):
        raise PlanError(
            "a clipped loss has a band around the ratio 1, and finite weights",
            where="policy_gradient",
            equation=f"clip({clip}), clip_high({high}), kl({kl}), entropy({entropy})",
            hint="use 0 < clip <= 1, clip_high > 0 and kl >= 0",
        )
    return partial(_policy_gradient, low=1 - clip, high=1 + high, kl=kl, entropy=entropy)


def _policy_gradient(
    tokens: Tokens, *, low: float, high: float, kl: float, entropy: float
) -> tuple[Tensor, Tensor]:
    # Slots that do not count may hold anything, and 0 * inf in a backward would be NaN.
    new = tokens.logprobs.where(tokens.mask, 0)
    old, advantages = (tokens[name].where(tokens.mask, 0) for name in ("old_logprobs", "advantages"))
    ratio = (new - old).exp()
    each = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if kl:
        away = tokens["ref_logprobs"].where(tokens.mask, 0) - new
        each = each + kl * (away.expm1() - away)
    if entropy:
        each = each - entropy * tokens["entropies"]
    return tokens.sum(each), tokens.count


# --- terms and the scale ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    """One rank's and one microbatch's share in one part of the objective.

    Attributes:
        name: Which part.
        sum: A number with gradient, scaled by nothing.
        count: What it is a sum of, as this rank counted it.
        weight: Of this part in the objective; 0 for one that is only reported.
    """

    name: str
    sum: Tensor
    count: Tensor
    weight: float = 1.0


def term(loss: Loss, tokens: Tokens, *, name: str = "loss", weight: float = 1.0) -> Term:
    """What a loss says of some tokens.

    The sum always hangs on the log-probabilities, also where a loss gave a constant because nothing counts:
    the backward of a rank has collectives that others wait in.

    Raises:
        PlanError: It did not return two numbers, or its sum has no gradient and something counts.
    """
    found: Any = loss(tokens)
    is_pair = isinstance(found, tuple) and len(found) == 2
    if not is_pair or not all(isinstance(part, Tensor) and part.numel() == 1 for part in found):
        shapes = found if not is_pair else [getattr(part, "shape", part) for part in found]
        raise PlanError(
            "a loss returns (sum, count), two numbers as tensors",
            where=f"term {name!r}",
            equation=f"got {type(found).__name__} {shapes!r}"[:200],
            hint="return (tokens.sum(values), tokens.count); the runtime divides",
        )
    summed, count = found
    if tokens.logprobs.requires_grad and not summed.requires_grad and bool(count.any()):
        raise PlanError(
            "a loss has a gradient where tokens count",
            where=f"term {name!r}",
            equation=f"count({count.item()}) > 0, and the sum hangs on no log-probability",
            hint="take the sum of values with gradient: no detach(), no item(), no no_grad()",
        )
    return Term(name, summed.reshape(()) + tokens.logprobs.reshape(-1)[:0].sum(), count.detach(), weight)


def count_targets(masks: Mapping[str, Iterable[Tensor]], *, group: Group) -> dict[str, int]:
    """N of each term: what counts in the whole step.

    Args:
        masks: For each term, in the same order on all ranks, this rank's own part (cut over cp and tp) of the
            mask of each microbatch; no microbatch at all is fine.
        group: The ranks that together have each token once: those of a stage.

    Returns:
        The counts by name, the same on each rank.
    """
    zero = torch.zeros((), dtype=torch.int64, device=_device(group))
    mine = {name: sum((mask.sum().to(zero.device) for mask in each), zero) for name, each in masks.items()}
    if not mine:
        return {}
    return dict(zip(mine, sum_all(torch.stack([*mine.values()]), group=group).tolist(), strict=True))


def total(terms: Iterable[Term], counts: Mapping[str, int]) -> Tensor:
    """What to call ``backward`` on: each sum times its weight over N, and no other scale.

    Where N is 0, nothing counts in the whole step: the term is 0 and so are its gradients, which are there.
    Terms of weight 0 are left out.

    Args:
        terms: Those of one rank and microbatch, at least one of a weight.
        counts: N of each term, of all ranks and microbatches.

    Raises:
        UnknownNameError: A term has no N.
        PlanError: There is no term.
    """
    parts = [part.sum * _scale(part, counts) for part in terms if part.weight]
    if not parts:
        raise PlanError(
            "an objective has a term of a weight",
            equation="terms(0)",
            hint="train on one term at least; what is only reported needs no backward",
        )
    # In the widest dtype of them, one after the other.
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found


def _scale(part: Term, counts: Mapping[str, int]) -> float:
    _check_known(part, counts)
    return part.weight / counts[part.name] if counts[part.name] else 0.0


def _check_known(part: Term, counts: Mapping[str, int]) -> None:
    if part.name not in counts:
        raise UnknownNameError(
            "each term has its N",
            where=f"term {part.name!r}",
            equation=f"{part.name!r} not among counts({', '.join(counts)})",
            hint="count its mask with count_targets() before the first backward",
        )


# --- what is reported ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """The values of a step: of all ranks and microbatches, the same on every rank.

    Attributes:
        loss: The objective, all terms with their weights.
        means: Each term without its weight, over its N; 0 where that is 0.
        counts: N of each term.

    >>> print(Report(0.5, {"loss": 0.5, "mtp_1": 0.0}, {"loss": 12, "mtp_1": 0}))
    loss 0.5 (12), mtp_1 0 (nothing counts)
    """

    loss: float
    means: Mapping[str, float]
    counts: Mapping[str, int]

    @property
    def empty(self) -> tuple[str, ...]:
        """The terms that nothing counted in: no loss and no gradient came of them."""
        return tuple(name for name, count in self.counts.items() if not count)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {mean:.6g} ({self.counts[name] or 'nothing counts'})"
            for name, mean in self.means.items()
        )


def report(terms: Iterable[Term], counts: Mapping[str, int], *, group: Group) -> Report:
    """The values of a step, after ``check_counts`` of it.

    To be called before the weights change, with all terms of the step.

    Args:
        terms: Those of all microbatches of this rank; none on a rank that computes no loss.
        counts: N of each term, in the same order on all ranks.
        group: All ranks.

    Raises:
        PlanError: Losses counted something else than N; on every rank.
        UnknownNameError: A term has no N.
    """
    found = _sums(terms, counts, group)
    _check(found, counts)
    means = {name: float(found[name][0]) / count if count else 0.0 for name, count in counts.items()}
    loss = sum(float(found[name][1]) / count for name, count in counts.items() if count)
    return Report(float(loss), means, dict(counts))


def check_counts(terms: Iterable[Term], counts: Mapping[str, int], *, group: Group) -> None:
    """Refuse losses that counted something else than N, as where two ranks count one token.

    Arguments and errors as of ``report``, which does this too.
    """
    _check(_sums(terms, counts, group), counts)


def _sums(
    terms: Iterable[Term], counts: Mapping[str, int], group: Group
) -> dict[str, tuple[float, float, float]]:
    """For each name the sum, the sum with its weight, and the count of all ranks; in fp64."""
    rows = {name: torch.zeros(3, dtype=torch.float64, device=_device(group)) for name in counts}
    for part in terms:
        _check_known(part, counts)
        summed, count = (each.detach().to(rows[part.name]).reshape(()) for each in (part.sum, part.count))
        rows[part.name] += torch.stack((summed, part.weight * summed, count))
    if not rows:
        return {}
    every = sum_all(torch.stack([*rows.values()]), group=group).tolist()
    return {name: (row[0], row[1], row[2]) for name, row in zip(rows, every, strict=True)}


def _device(group: Group) -> torch.device:
    """Where the group's backend takes tensors, also from a rank that has none to go by."""
    if on_host(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _check(found: Mapping[str, tuple[float, float, float]], counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        if found[name][2] != count:
            raise PlanError(
                "losses count each target of a step once, as the masks do",
                where=f"term {name!r}, all ranks and microbatches",
                equation=f"counted({found[name][2]:.17g}) != N({count})",
                hint="return tokens.count, of the rank's own slots: no mask of the whole row, no mean",
            )
