"""The one scale of a step: however it is cut, its loss and gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import workers
from cut import columns_of, connected, own_slots
from torch import Tensor

from shardweave.errors import PlanError
from shardweave.train.collectives import sum_all
from shardweave.train.grid import Group, Groups
from shardweave.train.logprobs import token_logprobs
from shardweave.train.loss import (
    Term,
    Tokens,
    check_counts,
    count_targets,
    cross_entropy,
    report,
    term,
    total,
)
from shardweave.train.sequence import IGNORE

VOCAB = 37
SLOTS, BATCHES, DOCUMENTS = 24, 3, 2
MASKS = ("all", "prompt", "one", "empty rank", "none")
SCALES = {"dp2": (1, 1, 2), "tp2 cp2": (2, 2, 1), "cp4": (1, 4, 1), "tp2 dp2": (2, 1, 2)}


def whole(masked: str) -> dict[str, Tensor]:
    """Documents ``(batches, documents, slots)`` of features, labels and masks; the weights of a head."""
    some = torch.Generator().manual_seed(5)
    shape = (BATCHES, DOCUMENTS, SLOTS)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., -1] = False
    if masked == "prompt":
        mask[:, 0, :10], mask[:, 1, :17], mask[1] = False, False, False  # and an empty microbatch
    elif masked == "one":
        mask[:] = False
        mask[2, 1, 3] = True
    elif masked == "empty rank":
        mask[:, 1] = False
        mask[:, 0, 6:12] = False
    elif masked == "none":
        mask[:] = False
    labels = torch.randint(VOCAB, shape, generator=some)
    labels[..., -1] = IGNORE
    return {
        "x": torch.randn((*shape, 6), generator=some, dtype=torch.float64),
        "head": torch.randn((VOCAB, 6), generator=some, dtype=torch.float64),
        "labels": labels,
        "mask": mask,
    }


def second(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """A term of its own kind, for what an auxiliary loss or a further head brings."""
    return tokens.sum(tokens.logprobs.square()), tokens.count


def step_of_one(masked: str) -> dict[str, Any]:
    """All at once, in one process: the sum over all that counts, over their number."""
    given = whole(masked)
    head = given["head"].clone().requires_grad_()
    every = (given["x"] @ head.T).log_softmax(-1)
    labels = given["labels"].clamp(min=0)
    logprobs = every.gather(-1, labels[..., None])[..., 0]
    # The second term counts the even slots of them only.
    further = given["mask"] & (torch.arange(SLOTS) % 2 == 0)
    count, few = int(given["mask"].sum()), int(further.sum())
    first = -logprobs[given["mask"]].sum() / max(count, 1)
    other = logprobs[further].square().sum() / max(few, 1)
    loss = first + 0.3 * other
    loss.backward()
    return {"loss": loss.item(), "first": first.item(), "count": count, "few": few, "grad": head.grad}


def step_of_rank(groups: Groups, masked: str, fault: str = "") -> dict[str, Any]:
    """One step: microbatches one after the other, documents over dp, slots over cp and tp."""
    at = {name: groups.get("model", name) for name in ("tp", "cp", "dp", "all")}
    tp, cp, dp = (at[name].size for name in ("tp", "cp", "dp"))
    given = whole(masked)
    head = columns_of(given["head"].T, at["tp"]).T.clone().requires_grad_()

    def of_cp(values: Tensor) -> Tensor:
        if at["dp"].size > 1:
            values = values[at["dp"].rank : at["dp"].rank + 1]
        return values.reshape(values.shape[0], cp, SLOTS // cp, *values.shape[2:])[:, at["cp"].rank]

    def own(values: Tensor) -> Tensor:
        return own_slots(of_cp(values), at["tp"])

    even = torch.arange(SLOTS) % 2 == 0
    masks = {"loss": given["mask"], "second": given["mask"] & even}
    counts = count_targets(
        {name: [own(each) for each in mask] for name, mask in masks.items()}, group=at["all"]
    )
    if fault == "5 counted over dp only":
        counts = count_targets({n: [own(e) for e in mask] for n, mask in masks.items()}, group=at["dp"])
    elif fault == "5 counted on every rank":
        counts = count_targets({n: [of_cp(e) for e in mask] for n, mask in masks.items()}, group=at["all"])
    slots = torch.arange(DOCUMENTS * SLOTS).view(DOCUMENTS, SLOTS)
    terms: list[Term] = []
    for number in range(BATCHES):
        logits = of_cp(given["x"][number]) @ head.T
        logprobs = token_logprobs(logits, of_cp(given["labels"][number]), tp=at["tp"], vocab_size=VOCAB)
        of_term = {}
        for name, mask in masks.items():
            labels = own(given["labels"][number])
            of_term[name] = Tokens(logprobs, labels, own(mask[number]), own(slots))
        loss = mean_of_rank if fault == "2 a mean on each rank" else cross_entropy
        mine = [
            term(loss, of_term["loss"]),
            term(second, of_term["second"], name="second", weight=0.3),
        ]
        if fault == "2 a count of this rank":
            local = {part.name: max(int(part.count), 1) * BATCHES * cp * tp * dp for part in mine}
            objective = total(mine, local)
        elif fault == "3 a factor of cp":
            objective = total(mine, counts) * cp
        elif fault == "6 the further term over microbatches":
            objective = total(mine[:1], counts) + total(mine[1:], counts) / BATCHES
        else:
            objective = total(mine, counts)
        objective.backward()
        terms += mine
    said = report(terms, counts, group=at["all"])
    grad = sum_all(head.grad, group=at["dp"])
    if fault != "15 summed over dp only":
        grad = sum_all(grad, group=at["cp"])
    return {
        "grad": grad.numpy(),
        "loss": said.loss,
        "first": said.means["loss"],
        "text": str(said),
        "counts": (counts["loss"], counts["second"]),
    }


def mean_of_rank(tokens: Tokens) -> tuple[Tensor, Tensor]:
    summed, count = cross_entropy(tokens)
    return summed / count.clamp(min=1), torch.ones_like(count)


def steps_of_rank(
    rank: int, *, folder: Path, degrees: tuple[int, int, int], masks: tuple[str, ...], fault: str
) -> dict[str, Any]:
    tp, cp, dp = degrees
    groups = connected(rank, folder, tp=tp, cp=cp, dp=dp)
    return {masked: step_of_rank(groups, masked, fault) for masked in masks}


def run_step(
    folder: Path, degrees: tuple[int, int, int], masks: tuple[str, ...], fault: str = ""
) -> dict[int, workers.Ended]:
    tp, cp, dp = degrees
    return workers.run(
        steps_of_rank, range(tp * cp * dp), folder=folder, degrees=degrees, masks=masks, fault=fault
    )


def differences(found: dict[int, Any], wanted: dict[str, Any], tp: int) -> dict[str, float]:
    """How far ranks' numbers are from those of one process, relative to the largest; the worst of ranks."""
    far = {"loss": 0.0, "grad": 0.0}
    largest = max(float(wanted["grad"].abs().max()), 1e-30)
    for rank, mine in found.items():
        group = Group("tp", tuple(range(tp)), rank % tp)
        grad = columns_of(wanted["grad"].T, group).T
        rows = max(0, min(VOCAB - group.rank * len(grad), len(grad)))
        ours = torch.from_numpy(mine["grad"])
        assert not ours[rows:].any()
        far["grad"] = max(far["grad"], float((ours - grad)[:rows].abs().max()) / largest)
        for name in ("loss", "first"):
            far["loss"] = max(far["loss"], abs(mine[name] - wanted[name]) / max(abs(wanted[name]), 1e-30))
    return far


@pytest.mark.parametrize("name", SCALES)
def test_a_step_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    every = workers.values(run_step(tmp_path, SCALES[name], MASKS))
    for masked in MASKS:
        found, wanted = {rank: mine[masked] for rank, mine in every.items()}, step_of_one(masked)
        for mine in found.values():
            assert mine["counts"] == (wanted["count"], wanted["few"])
            assert all(mine[name] == found[0][name] for name in ("loss", "first", "text"))
        assert max(differences(found, wanted, SCALES[name][0]).values()) <= 1e-12, masked
        if masked == "none":
            assert found[0]["text"] == "loss 0 (nothing counts), second 0 (nothing counts)"
            assert not any(mine["grad"].any() for mine in found.values())


FAULTS = {
    "2 a count of this rank": "gradients",
    "2 a mean on each rank": "refused",
    "3 a factor of cp": "gradients",
    "5 counted over dp only": "refused",
    "5 counted on every rank": "refused",
    "6 the further term over microbatches": "gradients",
    "15 summed over dp only": "gradients",
}
"""By its number in the list of known reports: how each is seen. What is reported shows none of those that
change gradients, which is why no test here compares losses alone."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_scale_is_seen(fault: str, tmp_path: Path) -> None:
    ended = run_step(tmp_path, (2, 2, 1), ("prompt",), fault)
    if FAULTS[fault] == "refused":
        for end in ended.values():
            assert isinstance(end.error, PlanError)
            assert "losses count each target of a step once" in str(end.error)
        return
    found = {rank: mine["prompt"] for rank, mine in workers.values(ended).items()}
    far = differences(found, step_of_one("prompt"), 2)
    assert far["grad"] > 1e-3 and far["loss"] <= 1e-12


def test_what_losses_counted_is_compared_by_name() -> None:
    alone = Group("all", (0,), 0)
    terms = [
        Term("loss", torch.tensor(2.0), torch.tensor(3)),
        Term("mtp_1", torch.tensor(1.0), torch.tensor(2)),
    ]
    check_counts(terms, {"loss": 3, "mtp_1": 2}, group=alone)
    with pytest.raises(PlanError, match=r"term 'mtp_1'.*counted\(2\) != N\(4\)"):
        check_counts(terms, {"loss": 3, "mtp_1": 4}, group=alone)
    said = report(terms[:1], {"loss": 3, "mtp_1": 0}, group=alone)
    assert said.empty == ("mtp_1",) and said.means == {"loss": 2 / 3, "mtp_1": 0.0}
