"""Losses of real ranks: the numbers and gradients of one process and plain torch, however they are cut."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import workers
from cut import columns_of, connected, own_slots
from torch import Tensor

from shardweave.errors import PlanError, TransportError, UnknownNameError
from shardweave.train import logprobs as logprobs_module
from shardweave.train.collectives import sum_all
from shardweave.train.grid import Group
from shardweave.train.logprobs import token_logprobs
from shardweave.train.loss import (
    Tokens,
    cross_entropy,
    policy_gradient,
    term,
    total,
)
from shardweave.train.sequence import IGNORE

ALONE = Group("tp", (0,), 0)
VOCAB = 37


def problem(slots: int, vocab: int, labelled: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Two rows of logits and labels, and what the sum of results is weighted by."""
    some = torch.Generator().manual_seed(slots * vocab)
    shape = (2, slots)
    labels = torch.randint(vocab, shape, generator=some)
    # Both ends of every part of the vocabulary, for any number of ranks from 1 to 4.
    ends = sorted({edge for tp in (1, 2, 3, 4) for at in range(tp) for edge in _ends(vocab, tp, at)})
    labels.view(-1)[: len(ends)] = torch.tensor(ends)[: labels.numel()]
    if labelled == "one":
        labels[labels > -1] = IGNORE
        labels[1, 1] = vocab - 1
    elif labelled == "none":
        labels[:] = IGNORE
    else:
        labels[0, 1::5] = IGNORE
    draw = {name: torch.randn(shape, generator=some, dtype=torch.float64) for name in ("g", "h")}
    logits = 5 * torch.randn((*shape, vocab), generator=some, dtype=torch.float64)
    return {"logits": logits.to(dtype), "labels": labels, **draw}


def _ends(vocab: int, tp: int, at: int) -> Iterator[int]:
    width = -(-vocab // tp)
    yield from {min(at * width, vocab - 1), min(at * width + width, vocab) - 1}


def plain(given: dict[str, Tensor], temperature: float) -> dict[str, Tensor]:
    """The same by log_softmax of everything, in fp64."""
    logits = given["logits"].double().requires_grad_()
    every = (logits / temperature).log_softmax(-1)
    labels, ignored = given["labels"], given["labels"] == IGNORE
    logprobs = every.gather(-1, labels.masked_fill(ignored, 0)[..., None])[..., 0].masked_fill(ignored, 0)
    entropies = -(every.exp() * every).sum(-1).masked_fill(ignored, 0)
    (logprobs * given["g"] + entropies * given["h"]).sum().backward()
    both = logits.grad
    logits.grad = None
    (logits / temperature).log_softmax(-1).gather(-1, labels.masked_fill(ignored, 0)[..., None])[
        ..., 0
    ].masked_fill(ignored, 0).mul(given["g"]).sum().backward()
    return {"logprobs": logprobs.detach(), "entropies": entropies.detach(), "both": both, "one": logits.grad}


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value."""
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


CASES = [
    (12, VOCAB, "some", 1.0),
    (24, VOCAB, "some", 0.7),
    (12, 5, "some", 2.5),  # on four ranks the last has padding only
    (12, VOCAB, "one", 1.0),
    (12, VOCAB, "none", 1.0),
]


def errors_of_rank(rank: int, *, tp: int, folder: Path | None, mutation: str = "") -> dict[str, float]:
    """How far results and gradients are from plain torch, in all cases and dtypes."""
    group = connected(rank, folder, tp=tp).get("model", "tp") if folder else ALONE
    found: dict[str, float] = {}
    with mutated(mutation):
        for slots, vocab, labelled, temperature in CASES:
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                given = problem(slots, vocab, labelled, dtype)
                wanted = plain(given, temperature)
                logits = columns_of(given["logits"], group).requires_grad_()
                told = {"tp": group, "vocab_size": vocab, "temperature": temperature}
                logprobs, entropies = token_logprobs(logits, given["labels"], **told, entropy=True)
                only = token_logprobs(logits, given["labels"], **told)
                assert torch.equal(only, logprobs)
                g, h = (own_slots(given[name], group) for name in "gh")
                both = (logprobs * g + entropies * h).sum()
                grads = [torch.autograd.grad(both, logits, retain_graph=True)[0] for _ in range(3)]
                assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
                (one,) = torch.autograd.grad((only * g).sum(), logits)
                padding = slice(max(0, min(vocab - group.rank * logits.shape[-1], logits.shape[-1])), None)
                assert not grads[0][..., padding].any() and not one[..., padding].any()
                for name, mine, cut in (
                    ("logprobs", logprobs, own_slots),
                    ("entropies", entropies, own_slots),
                    ("both", grads[0], columns_of),
                    ("one", one, columns_of),
                ):
                    # Padding columns of what columns_of makes are not those of a gradient.
                    theirs, ours = cut(wanted[name], group), mine.detach()
                    if cut is columns_of:
                        theirs, ours = theirs[..., : padding.start], ours[..., : padding.start]
                    # Of the largest of all ranks, which a rank's part alone may be far below.
                    if not ours.numel():
                        continue
                    far = float((ours.double() - theirs).abs().max())
                    far = far / max(float(wanted[name].abs().max()), 1e-30) if far else 0.0
                    key = f"{dtype} {name}"
                    found[key] = max(found.get(key, 0.0), far)
    return found


def bound(key: str) -> float:
    if "float64" in key:
        return 1e-12
    # Gradients are rounded to the dtype of the logits, results are not.
    return 5e-3 if "bfloat16" in key and ("both" in key or "one" in key) else 3e-6


MUTATIONS = ("double count", "own slots only", "label lost at the edge", "padding counts", "local sum")


def mutated(name: str) -> ExitStack:
    """The code under test with a fault of the name in it; as it is without one."""
    stack = ExitStack()
    module = logprobs_module
    if name == "double count":  # each rank returns all slots' gradient twice, as a loss counted on two ranks
        real = module.gather_parts
        stack.enter_context(patch.object(module, "gather_parts", lambda x, group: _doubled(real, x, group)))
    elif name == "own slots only":  # no gather of gradients: partial grads, fault 15
        real = module.gather_parts
        stack.enter_context(patch.object(module, "gather_parts", lambda x, group: _alone(real, x, group)))
    elif name == "label lost at the edge":
        real_inside = module._inside

        def lost(here: Tensor, columns: int) -> tuple[Tensor, Tensor]:
            at, inside = real_inside(here, columns)
            return at, inside & (here < columns - 1)

        stack.enter_context(patch.object(module, "_inside", lost))
    elif name == "padding counts":
        real_tokens = module.vocabulary
        stack.enter_context(patch.object(module, "vocabulary", lambda n, tp: _padded(real_tokens, n, tp)))
    elif name == "local sum":  # the softmax of a rank's own columns
        real = module.gather_parts
        stack.enter_context(patch.object(module, "gather_parts", lambda x, group: _own_sums(real, x, group)))
    return stack


def _is_gradient(x: Tensor) -> bool:
    return x.dim() > 2


def _doubled(real: Any, x: Tensor, group: Group) -> tuple[Tensor, ...]:
    return tuple(2 * part if _is_gradient(x) else part for part in real(x, group=group))


def _alone(real: Any, x: Tensor, group: Group) -> tuple[Tensor, ...]:
    parts = real(x, group=group)
    if not _is_gradient(x):
        return parts
    return tuple(part if at == group.rank else torch.zeros_like(part) for at, part in enumerate(parts))


def _padded(real: Any, vocab_size: int, tp: Group) -> tuple[range, int]:
    tokens, rows = real(vocab_size, tp=tp)
    return range(tokens.start, tokens.start + rows), rows


def _own_sums(real: Any, x: Tensor, group: Group) -> tuple[Tensor, ...]:
    parts = real(x, group=group)
    return parts if _is_gradient(x) else tuple(torch.stack((p[0], x[1], *p[2:])) for p in parts)


def worst(tp: int, folder: Path, mutation: str = "") -> dict[str, float]:
    ranks = workers.values(
        workers.run(errors_of_rank, range(tp), tp=tp, folder=folder, mutation=mutation, within_s=50)
    )
    keys = {key for found in ranks.values() for key in found}
    return {key: max(found.get(key, 0.0) for found in ranks.values()) for key in sorted(keys)}


# --- log-probabilities --------------------------------------------------------------------------


def test_one_rank_is_plain_torch() -> None:
    found = errors_of_rank(0, tp=1, folder=None)
    assert {key: far for key, far in found.items() if not far <= bound(key)} == {}


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_any_number_of_ranks_is_plain_torch(tp: int, tmp_path: Path) -> None:
    found = worst(tp, tmp_path)
    assert len(found) == 12
    assert {key: far for key, far in found.items() if not far <= bound(key)} == {}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_put_in_is_seen(mutation: str, tmp_path: Path) -> None:
    try:
        found = worst(3, tmp_path, mutation)
    except AssertionError as error:  # of a rank, that padding got a gradient
        assert mutation == "padding counts" and isinstance(error.__cause__, AssertionError)
    else:
        assert {key for key, far in found.items() if not far <= bound(key)}


def test_gradcheck_with_what_slots_without_a_label_hold_being_nan() -> None:
    logits = torch.randn(1, 4, 7, dtype=torch.float64)
    labels = torch.tensor([[6, IGNORE, 0, 3]])
    logits[0, 2, 4] = -torch.inf
    logits[0, 1] = torch.nan

    def work(x: Tensor) -> tuple[Tensor, Tensor]:
        at = logits.clone()
        at[0, 0], at[0, 3] = x[0], x[1]
        return token_logprobs(at, labels, tp=ALONE, vocab_size=7, temperature=0.6, entropy=True)

    free = torch.stack((logits[0, 0], logits[0, 3])).requires_grad_()
    assert torch.autograd.gradcheck(work, (free,))
    whole = logits.clone().requires_grad_()
    logprobs, entropies = token_logprobs(whole, labels, tp=ALONE, vocab_size=7, entropy=True)
    (logprobs + entropies).sum().backward()
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropies).all()
    assert torch.isfinite(whole.grad).all() and not whole.grad[0, 1].any()


def test_many_rows_at_a_time_or_one_are_the_same_bits() -> None:
    given = problem(24, VOCAB, "some", torch.bfloat16)
    found = []
    for elements in (1, 5 * VOCAB, 1 << 20):
        with patch.object(logprobs_module, "_CPU_ELEMENTS", elements):
            logits = given["logits"].clone().requires_grad_()
            both = token_logprobs(logits, given["labels"], tp=ALONE, vocab_size=VOCAB, entropy=True)
            (both[0] * 2 + both[1]).sum().backward()
            found.append((both[0], both[1], logits.grad))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    logits = torch.randn(3, VOCAB, requires_grad=True)
    found = token_logprobs(logits, torch.tensor([1, 2, 3]), tp=ALONE, vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(found.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --- mistakes -----------------------------------------------------------------------------------

MISTAKES: dict[str, dict[str, Any]] = {
    # Fault 1: the labels of the whole sequence with the logits of a part of it.
    "labels of all slots": {"labels": (2, 24)},
    "labels cut over tp": {"labels": (2, 6)},
    "logits gathered": {"logits": (2, 12, 38)},
    "odd slots": {"logits": (2, 11, 19), "labels": (2, 11)},
    "a label past the vocabulary": {"label": 37},
    "a negative label": {"label": -1},
    "temperature": {"temperature": 0.0},
}


def refused(rank: int, *, folder: Path, mistakes: list[str], only: int | None) -> list[tuple[str, float]]:
    """What each mistake is refused as, and after how many seconds."""
    group = connected(rank, folder, tp=2).get("model", "tp")
    sum_all(torch.ones(1), group=group)  # nobody ends before the other is connected
    return [_refused(group, MISTAKES[name] if only in (None, rank) else {}) for name in mistakes]


def _refused(group: Group, given: dict[str, Any]) -> tuple[str, float]:
    logits = torch.zeros(given.get("logits", (2, 12, 19)))
    labels = torch.full(given.get("labels", (2, 12)), IGNORE)
    labels[0, 0] = given.get("label", 36)
    begin = time.monotonic()
    try:
        token_logprobs(logits, labels, tp=group, vocab_size=VOCAB, temperature=given.get("temperature", 1.0))
    except (PlanError, TransportError) as error:
        assert error.rule and error.where and error.equation and error.hint
        return type(error).__name__, time.monotonic() - begin
    return "", time.monotonic() - begin


def test_a_mistake_is_the_same_error_on_every_rank_at_once(tmp_path: Path) -> None:
    ended = workers.run(refused, range(2), folder=tmp_path, mistakes=list(MISTAKES), only=None)
    for found in workers.values(ended).values():
        assert [name for name, _ in found] == ["PlanError"] * len(MISTAKES)
        assert max(seconds for _, seconds in found) < 1


def test_a_mistake_of_one_rank_leaves_none_hanging(tmp_path: Path) -> None:
    ended = workers.run(refused, range(2), folder=tmp_path, mistakes=["labels of all slots"], only=1)
    found = workers.values(ended)
    assert found[1][0][0] == "PlanError"
    assert found[0][0][0].startswith("Transport")


def test_what_a_loss_is_given_fits_together() -> None:
    given = {
        "logprobs": torch.zeros(2, 3),
        "labels": torch.tensor([[1, 2, IGNORE]] * 2),
        "mask": torch.tensor([[True, False, False]] * 2),
        "slots": torch.arange(6).view(2, 3),
    }
    tokens = Tokens(**given, extras={"advantages": torch.ones(2, 3)})
    assert tokens.count == 2 and torch.equal(tokens["advantages"], torch.ones(2, 3))
    with pytest.raises(UnknownNameError, match=r"old_logprobs.*advantages"):
        tokens["old_logprobs"]
    with pytest.raises(UnknownNameError, match="entropies"):
        policy_gradient(entropy=0.1)(
            Tokens(**given, extras={"advantages": torch.ones(2, 3), "old_logprobs": torch.ones(2, 3)})
        )
    for wrong in (
        {"labels": given["labels"][:1]},
        {"mask": given["mask"].long()},
        {"mask": torch.ones(2, 3, dtype=torch.bool)},
        {"entropies": torch.zeros(3)},
        {"extras": {"advantages": torch.zeros(6)}},
    ):
        with pytest.raises(PlanError):
            Tokens(**{**given, **wrong})


@pytest.mark.parametrize(
    "loss",
    [
        lambda tokens: tokens.sum(tokens.logprobs),  # fault 4: no count
        lambda tokens: (tokens.logprobs, tokens.count),
        lambda tokens: (tokens.sum(tokens.logprobs), 3),
        lambda tokens: (tokens.sum(tokens.logprobs), tokens.count, {}),
    ],
)
def test_fault_4_a_loss_without_its_count_is_refused(loss: Any) -> None:
    with pytest.raises(PlanError, match=r"a loss returns \(sum, count\)"):
        term(loss, _three())


def _three(**more: Any) -> Tokens:
    labels = torch.tensor([4, 5, IGNORE])
    return Tokens(
        torch.tensor([-1.0, -0.5, 0.0], requires_grad=True), labels, labels != IGNORE, torch.arange(3), **more
    )


def test_terms_without_a_count_or_of_no_weight() -> None:
    tokens = _three()
    with pytest.raises(UnknownNameError, match="'mtp_1' not among counts"):
        total([term(cross_entropy, tokens, name="mtp_1")], {"loss": 3})
    with pytest.raises(PlanError, match="a term of a weight"):
        total([term(cross_entropy, tokens, weight=0.0)], {"loss": 3})
    constant = term(lambda _: (torch.tensor(0.0), torch.tensor(0)), tokens)
    total([constant], {"loss": 2}).backward()
    assert torch.equal(tokens.logprobs.grad, torch.zeros(3))  # there, so that its collectives were run


@pytest.mark.parametrize("given", [{"clip": 0.0}, {"clip": 1.5}, {"kl": -1.0}, {"entropy": float("nan")}])
def test_numbers_of_a_policy_loss_are_checked(given: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="clip"):
        policy_gradient(**given)


def test_the_policy_loss_by_hand() -> None:
    new = torch.tensor([-1.0, -2.0, -0.3, -1.0, -7.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.5, -1.0, -0.3, -2.0, torch.inf], dtype=torch.float64)
    ref = torch.tensor([-1.1, -2.5, -0.1, -1.0, torch.nan], dtype=torch.float64)
    advantages = torch.tensor([2.0, 3.0, -1.0, -1.5, torch.nan], dtype=torch.float64)
    entropies = torch.tensor([0.5, 0.25, 1.0, 2.0, 9.0], dtype=torch.float64)
    mask = torch.tensor([True] * 4 + [False])
    labels = torch.tensor([1, 2, 3, 4, IGNORE])
    extras = {"old_logprobs": old, "ref_logprobs": ref, "advantages": advantages}
    tokens = Tokens(new, labels, mask, torch.arange(5), entropies, extras)
    summed, count = policy_gradient(clip=0.2, clip_high=0.3, kl=0.1, entropy=0.01)(tokens)
    summed.backward()
    wanted, slopes = 0.0, []
    for lp, o, r, a, h in zip(*(x[:4].tolist() for x in (new, old, ref, advantages, entropies)), strict=True):
        ratio = float(torch.tensor(lp - o, dtype=torch.float64).exp())
        cut = min(max(ratio, 0.8), 1.3)
        kl = float(torch.tensor(r - lp, dtype=torch.float64).exp())
        wanted += -min(ratio * a, cut * a) + 0.1 * (kl - (r - lp) - 1) - 0.01 * h
        slopes.append((-ratio * a if ratio * a <= cut * a else 0.0) + 0.1 * (1 - kl))
    assert float(summed.detach()) == pytest.approx(wanted, rel=1e-12) and int(count) == 4
    assert new.grad.tolist() == pytest.approx([*slopes, 0.0], rel=1e-12)
