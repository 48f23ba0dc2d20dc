"""Pipelines of real processes against one process: loss, gradients, ragged microbatches, odd messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import workers
from torch import Tensor
from torch.distributed import FileStore

from shardweave.errors import PlanError, TransportError
from shardweave.layout import Mesh
from shardweave.train import pipeline
from shardweave.train.grid import Group, connect, plan_groups
from shardweave.train.pipeline import Boundary, Output, run
from shardweave.train.schedule import Action, PipelinePlan, plan_pipeline
from shardweave.train.sequence import SequenceLayout

WIDTH = 6
OFFSET = 2
LENGTHS = ((3,), (17, 2), (5,), (30,), (1, 1, 8), (4,), (11, 6), (2,))
"""Documents of each microbatch."""


def layouts(microbatches: int) -> list[SequenceLayout]:
    """As a rank of a context group of two sees them: half of the slots, padding among them."""
    return [SequenceLayout(LENGTHS[at], form="thd", cp=2) for at in range(microbatches)]


def boundary(microbatch: int) -> Boundary:
    layout = layouts(microbatch + 1)[microbatch]
    return Boundary((*layout.local_shape(split_tp=True), WIDTH), torch.float64, layout.digest)


def weights(stretches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = torch.randn(stretches, WIDTH, WIDTH, dtype=torch.float64, generator=generator)
    return [one.requires_grad_() for one in (made / 2).unbind()]


def first(microbatch: int, *, alike: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(100 + microbatch)
    return torch.randn(boundary(0 if alike else microbatch).shape, dtype=torch.float64, generator=generator)


def stretch(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A stretch of layers and the loss that it adds on its own, as routing does."""
    out = hidden + torch.tanh(hidden @ weight)
    return out, 0.01 * (hidden @ weight).square().mean()


def in_one_process(stretches: int, microbatches: int) -> tuple[float, list[Tensor]]:
    found, total = weights(stretches), torch.zeros((), dtype=torch.float64)
    for microbatch in range(microbatches):
        hidden = first(microbatch)
        for weight in found:
            hidden, extra = stretch(hidden, weight)
            total = total + extra
        total = total + (hidden.square() * (microbatch + 1)).sum().sqrt()
    total.backward()
    return total.item(), [weight.grad for weight in found if weight.grad is not None]


def in_stages(
    plan: PipelinePlan,
    pp: Group,
    *,
    limit: Callable[[int], Boundary] = boundary,
    alike: bool = False,
) -> tuple[float, dict[int, Tensor]]:
    """What one stage adds to the loss, and the gradients of its stretches; inputs must stay as they came."""
    held = weights(plan.stages * plan.virtual)
    total = 0.0
    inputs: list[tuple[Tensor, Tensor]] = []

    def forward(microbatch: int, chunk: int, hidden: Tensor | None) -> Output:
        nonlocal total
        if hidden is None:
            hidden = first(microbatch, alike=alike)
        else:
            inputs.append((hidden, hidden.detach().clone()))
        out, loss = stretch(hidden, held[chunk * plan.stages + pp.rank])
        is_last = plan.is_last(pp.rank, chunk)
        if is_last:
            loss = loss + (out.square() * (microbatch + 1)).sum().sqrt()
        total += loss.item()
        assert out.requires_grad == (plan.kind != "forward")
        return Output(None if is_last else out, loss)

    run(plan, pp=pp, forward=forward, boundary=(lambda _: boundary(0)) if alike else limit)
    for hidden, as_it_came in inputs:
        assert torch.equal(hidden, as_it_came), "an input changed while its microbatch was under way"
    grads = {at: held[at].grad for at in range(len(held)) if held[at].grad is not None}
    return total, grads  # type: ignore[return-value]


def stages(rank: int, folder: Path, size: int, timeout_s: float = 20) -> Group:
    plan = plan_groups({"model": Mesh((("pp", size),), offset=OFFSET)}, {"model": {"pp": ("pp",)}})
    store = FileStore(str(folder / "store"), size)
    return connect(plan, rank=rank, store=store, timeout_s=timeout_s).get("model", "pp")


# --- equal to one process -----------------------------------------------------------------------


def every_schedule(rank: int, *, folder: Path, size: int) -> dict[tuple[str, int, int], Any]:
    pp = stages(rank, folder, size)
    found = {}
    for virtual in (1, 2) if size > 1 else (1,):
        for microbatches in range(1, 9):
            for kind in ("1f1b" if virtual == 1 else "interleaved", "forward"):
                plan = plan_pipeline(kind, stages=size, virtual=virtual, microbatches=microbatches)
                loss, grads = in_stages(plan, pp)
                found[kind, virtual, microbatches] = loss, {at: g.numpy() for at, g in grads.items()}
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_loss_and_gradients_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    """Fault 13: ragged microbatches, 1 to 8 of them, 1 to 4 stages; inputs stay while others come."""
    ended = workers.run(every_schedule, range(OFFSET, OFFSET + size), folder=tmp_path, size=size)
    found = workers.values(ended)
    worst, cells = 0.0, list(found[OFFSET])
    assert len(cells) == (16 if size == 1 else 32)
    for kind, virtual, microbatches in cells:
        loss, grads = in_one_process(size * virtual, microbatches)
        mine = [found[rank][kind, virtual, microbatches] for rank in sorted(found)]
        assert sum(part for part, _ in mine) == pytest.approx(loss, rel=1e-13)
        got = {at: grad for _, part in mine for at, grad in part.items()}
        assert sorted(got) == ([] if kind == "forward" else list(range(size * virtual)))
        for at, grad in got.items():
            error = (torch.from_numpy(grad) - grads[at]).abs().max() / grads[at].abs().max()
            worst = max(worst, error.item())
    assert worst < 1e-12


def no_gradient(rank: int, *, folder: Path) -> Any:
    """The middle stage is the identity, and the first has nothing to learn."""
    pp = stages(rank, folder, 3)
    weight = weights(1)[0]

    def forward(microbatch: int, chunk: int, hidden: Tensor | None) -> Output:
        if hidden is None:
            return Output(first(microbatch))
        return Output(hidden) if pp.rank == 1 else Output(loss=stretch(hidden, weight)[0].sum())

    run(plan_pipeline("1f1b", stages=3, microbatches=4), pp=pp, forward=forward, boundary=boundary)
    return None if weight.grad is None else weight.grad.numpy()


def test_stages_without_weights_pass_gradients_on(tmp_path: Path) -> None:
    found = workers.values(workers.run(no_gradient, range(OFFSET, OFFSET + 3), folder=tmp_path))
    weight = weights(1)[0]
    sum(stretch(first(at), weight)[0].sum() for at in range(4)).backward()  # type: ignore[union-attr]
    assert found[OFFSET] is None and found[OFFSET + 1] is None
    torch.testing.assert_close(torch.from_numpy(found[OFFSET + 2]), weight.grad, rtol=1e-13, atol=0)


def kept_memory(rank: int, *, folder: Path) -> int:
    """How many outputs of the first stage are alive at most while microbatches go through."""
    import weakref

    pp = stages(rank, folder, 2)
    weight = weights(1)[0]
    alive: list[weakref.ref[Any]] = []
    most = 0

    def forward(microbatch: int, chunk: int, hidden: Tensor | None) -> Output:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        if hidden is not None:
            return Output(loss=(hidden @ weight).sum())
        # The graph of a sum keeps neither its terms nor its result.
        out = first(0) + weight.sum()
        alive.append(weakref.ref(out.untyped_storage()))
        return Output(out)

    plan = plan_pipeline("1f1b", stages=2, microbatches=40)
    run(plan, pp=pp, forward=forward, boundary=lambda _: boundary(0))
    return most


def test_outputs_are_let_go_of_once_they_are_sent(tmp_path: Path) -> None:
    found = workers.values(workers.run(kept_memory, range(OFFSET, OFFSET + 2), folder=tmp_path))
    assert 0 < found[OFFSET] <= 5, "outputs of 40 microbatches pile up"


# --- what does not fit --------------------------------------------------------------------------


def unlike(rank: int, *, folder: Path, what: str) -> str:
    """Stage 1 of 2 sees its microbatches in another way than stage 0."""
    pp = stages(rank, folder, 2)
    plan, odd = plan_pipeline("1f1b", stages=2, microbatches=3), {}
    if pp.rank == 1:
        if what == "fewer":
            plan = plan_pipeline("1f1b", stages=2, microbatches=2)
        elif what == "forward":
            plan = plan_pipeline("forward", stages=2, microbatches=3)
        else:
            odd = {
                # The shape from real tokens, where the other stage pads them.
                "raw length": {"shape": (sum(LENGTHS[1]) // 2, WIDTH)},
                "dtype": {"dtype": torch.bfloat16},
                "layout": {"digest": SequenceLayout(LENGTHS[1], form="thd", cp=2, order="contiguous").digest},
            }[what]

    def limit(microbatch: int) -> Boundary:
        return dataclasses.replace(boundary(microbatch), **odd if microbatch == 1 else {})

    with pytest.raises(PlanError) as caught:
        in_stages(plan, pp, limit=limit)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raw length", "shape(12, 6) torch.float64"),
        ("dtype", "torch.bfloat16"),
        ("layout", "layout "),
        ("fewer", "(forward of microbatch 2 for chunk 0"),
        ("forward", "backward of microbatch 0"),
    ],
)
def test_fault_13_stages_that_see_other_messages_are_both_told(what: str, says: str, tmp_path: Path) -> None:
    found = workers.values(workers.run(unlike, range(OFFSET, OFFSET + 2), folder=tmp_path, what=what))
    assert found[OFFSET] == found[OFFSET + 1]
    text = found[OFFSET]
    assert "ranks 2 and 3" in text and "stage 0 has (" in text and "stage 1 has (" in text
    assert says in text


def wrong_tensor(rank: int, *, folder: Path) -> str:
    pp = stages(rank, folder, 2)

    def forward(microbatch: int, chunk: int, hidden: Tensor | None) -> Output:
        return Output(torch.zeros(5, WIDTH, dtype=torch.float64))

    try:
        run(plan_pipeline("1f1b", stages=2, microbatches=3), pp=pp, forward=forward, boundary=boundary)
    except (PlanError, TransportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_stage_that_makes_another_tensor_sends_nothing(tmp_path: Path) -> None:
    found = workers.values(workers.run(wrong_tensor, range(OFFSET, OFFSET + 2), folder=tmp_path))
    assert found[OFFSET].startswith("PlanError: a stage hands on what its neighbour expects: rank 2, stage 0")
    assert "shape(5, 6) torch.float64 != shape(2, 6)" in found[OFFSET]
    assert found[OFFSET + 1].startswith("TransportError") and "from stage 0 to stage 1" in found[OFFSET + 1]


# --- fault 13, put back in ----------------------------------------------------------------------


def swapped(plan: PipelinePlan) -> PipelinePlan:
    """Stage 0 takes its second microbatch before its first: messages of one shape, mixed up."""
    mine = list(plan.events[0])
    actions = [at for at, event in enumerate(mine) if isinstance(event, Action)]
    sends = [at for at, event in enumerate(mine) if isinstance(event, tuple)]
    for at, other in (actions[:2], sends[:2]):
        mine[at], mine[other] = mine[other], mine[at]
    return dataclasses.replace(plan, events=(tuple(mine), *plan.events[1:]))


def reused() -> Callable[[Boundary, torch.device], Tensor]:
    """One buffer for all that is received."""
    memory = torch.empty(boundary(0).shape, dtype=torch.float64)
    return lambda limit, device: memory.detach()


def mutated(rank: int, *, folder: Path, what: str) -> str:
    pp = stages(rank, folder, 3, timeout_s=5)
    plan = plan_pipeline("1f1b", stages=3, microbatches=4)
    if what == "aliased":
        pipeline._fresh = reused()
    elif pp.rank == 0:
        plan = swapped(plan)
    if what == "swapped, and not compared before":
        pipeline._Mail.compare = lambda self: None  # type: ignore[method-assign]
    try:
        in_stages(plan, pp, alike=True)
    except (AssertionError, PlanError, TransportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("aliased", "AssertionError: an input changed while its microbatch was under way"),
        ("swapped", "PlanError: two stages of a pipeline expect the same messages between them"),
        (
            "swapped, and not compared before",
            "PlanError: a stage receives the message that it waits for: rank 3, stage 1 of group model.pp: "
            "stage 0 sent (forward of microbatch 1 for chunk 0",
        ),
    ],
)
def test_fault_13_put_back_in_is_caught(what: str, says: str, tmp_path: Path) -> None:
    """The code is changed, in its own processes, as others had it: what finds it is named here."""
    found = workers.values(workers.run(mutated, range(OFFSET, OFFSET + 3), folder=tmp_path, what=what))
    assert found[OFFSET + 1].startswith(says)
