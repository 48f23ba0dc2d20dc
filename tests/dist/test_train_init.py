"""The same begin, the same steps: weights are begun to the bit alike at every layout, dropout drops the same
elements, and a run that is run again has the same bits.

Ranks are in memory, and those of some jobs processes over gloo.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import plain_decoder
import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore
from train_ranks import CONFIG, Held, as_numpy, assembled
from worlds import GLOO, MEMORY, ranks

from shardweave.train.arrays import held_arrays
from shardweave.train.batch import Microbatch, microbatch
from shardweave.train.decoder import View, view
from shardweave.train.gradients import sum_gradients
from shardweave.train.grid import Groups, connect
from shardweave.train.layout import Layout
from shardweave.train.optimizer import AdamW, Optimizer, decayed
from shardweave.train.parallel import Parallel
from shardweave.train.random import uniform
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime, begun, build, evaluated, group_plan, layout_of
from shardweave.train.step import evaluate, forward_backward

# The first test that asks for them runs all ranks.
pytestmark = pytest.mark.timeout(240)

SEED, STEP, DROPOUT, EXACT = 11, 3, 0.1, 1e-12
# Weights so large that what is dropped is seen in the loss.
MODEL: dict[str, Any] = {**CONFIG, "initializer_range": 0.25}


def parts(layout: Layout, rank: int, arrays: Mapping[str, Tensor]) -> list[Held]:
    """What a rank holds as parts of whole tensors."""
    found = []
    for name, held in held_arrays(layout, rank).items():
        for part in held.parts:
            at = tuple((r.start, r.stop, r.step) for r in part.box.dims)
            found.append((part.name, at, as_numpy(part.view(arrays[name].detach()))))
    return found


# --- the begin ----------------------------------------------------------------------------------

# Degrees, the layers of each stage where they are not even, and changes of the config.
BEGUN: dict[str, tuple[Parallel, Sequence[int] | None, Mapping[str, Any]]] = {
    "tp2 pp2": (Parallel(tp=2, pp=2), None, {}),
    "ep2 etp2 tp2 cp2": (Parallel(tp=2, cp=2, ep=2, etp=2), None, {}),
    "dp2 pp3 uneven": (Parallel(dp=2, pp=3), (1, 3, 1), {}),
    "pp2 vp2 uneven": (Parallel(pp=2, vp=2), (2, 1, 1, 1), {}),
    "tp4 vocabulary padded by 3": (Parallel(tp=4), None, {}),
    "tied over pp2, tp2": (Parallel(tp=2, pp=2, ep=2), None, {"tie_word_embeddings": True}),
    "with biases, tp2": (Parallel(tp=2), None, {"attention_bias": True}),
    "at an offset": (Parallel(tp=2, ep=2, offset=5), None, {}),
}


def begin(
    parallel: Parallel, sizes: Sequence[int] | None, config: Mapping[str, Any], dtype: str = "float64"
) -> dict[str, Tensor]:
    """The weights of all ranks as whole tensors; that replicas are alike is checked on the way."""
    layout = layout_of(config, parallel, dtype=dtype, stage_sizes=sizes)
    ranks = {
        rank: parts(layout, rank, begun(layout, rank, config=config, seed=SEED))
        for rank in range(parallel.offset, parallel.offset + parallel.world_size)
    }
    return assembled(ranks)


@pytest.mark.parametrize("name", BEGUN)
def test_every_layout_begins_with_the_bits_of_one_process(name: str) -> None:
    parallel, sizes, changes = BEGUN[name]
    config = {**MODEL, **changes}
    one, found = begin(Parallel(), None, config), begin(parallel, sizes, config)
    assert set(found) == set(one)
    for key, values in one.items():
        assert torch.equal(found[key], values), key
    if "biases" in name:
        assert not one["model.layers.0.self_attn.q_proj.bias"].any()
    assert (one["model.norm.weight"] == 1).all()
    # No two tensors begin alike, and all have the spread that was asked for.
    drawn = [values for values in one.values() if values.dim() == 2]
    assert len({values.flatten()[0].item() for values in drawn}) == len(drawn)
    assert torch.cat([values.flatten() for values in drawn]).std().item() == pytest.approx(0.25, rel=0.02)


def test_numbers_by_the_place_on_a_rank_would_be_seen() -> None:
    """Of one process they would be as good as ours."""

    def by_place(into: Tensor, held: Any, *, seed: int, quantile: Any) -> None:
        index = torch.arange(into.numel()).reshape(into.shape)
        with torch.no_grad():
            into.copy_(torch.from_numpy(quantile(uniform(seed, held.name, index).numpy())))

    with patch("shardweave.train.runtime.init", by_place):
        one = begin(Parallel(), None, MODEL)
        found = begin(Parallel(pp=2, tp=2, ep=2), None, MODEL)
    wrong = {
        key.rpartition("layers.")[2] for key, values in one.items() if not torch.equal(found[key], values)
    }
    assert {
        "model.embed_tokens.weight",
        "1.self_attn.q_proj.weight",
        "1.mlp.experts.7.up_proj.weight",
    } <= wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shorter_dtype_begins_with_the_rounded_numbers(dtype: str) -> None:
    one, short = begin(Parallel(), None, MODEL), begin(Parallel(tp=2, pp=2), None, MODEL, dtype)
    for key, values in one.items():
        assert torch.equal(short[key], values.to(getattr(torch, dtype)).to(short[key].dtype)), key


def test_rows_that_only_pad_the_vocabulary_begin_as_zeros() -> None:
    parallel = Parallel(tp=4)
    layout = layout_of(MODEL, parallel)
    last = begun(layout, 3, config=MODEL, seed=SEED)["model.embed_tokens.weight"]
    assert last.shape == (10, 24) and not last[7:].any() and last[:7].all()


# --- the steps ----------------------------------------------------------------------------------


def documents() -> list[Tensor]:
    chance = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, MODEL["vocab_size"], (size,), generator=chance) for size in (9, 4, 17, 2, 6, 13, 1)
    ]


# The numbers of the documents of each data rank and microbatch.
IN_ORDER = (((0, 1), (2, 3)), ((4, 5), (6,)))
MOVED = (((5, 2), (6, 0)), ((3,), (1, 4)))


@dataclass(frozen=True)
class Job:
    """A layout, where the documents are, and how much is dropped."""

    parallel: Parallel
    deal: tuple[tuple[tuple[int, ...], ...], ...]
    form: str = "thd"
    dropout: float = DROPOUT
    sharded: bool = False

    @property
    def batches(self) -> tuple[list[Microbatch], ...]:
        """Of each data rank; one that is alone has those of both."""
        dealt = self.deal if self.parallel.dp == 2 else (sum(self.deal, ()),)
        docs, cp, tp = documents(), self.parallel.cp, self.parallel.tp
        return tuple(
            [
                microbatch([docs[i] for i in batch], form=self.form, cp=cp, tp=tp, numbers=batch)
                for batch in batches
            ]
            for batches in dealt
        )


JOBS: dict[str, Job] = {
    "one": Job(Parallel(), IN_ORDER),
    "one, documents moved": Job(Parallel(), MOVED, form="bshd"),
    "pp2 vp2": Job(Parallel(pp=2, vp=2), IN_ORDER, form="bshd"),
    "dp2": Job(Parallel(dp=2, ep=2), IN_ORDER, sharded=True),
    "dp2, documents moved": Job(Parallel(dp=2), MOVED),
    "dp2, nothing dropped": Job(Parallel(dp=2), IN_ORDER, dropout=0.0, sharded=True),
    "tp2 cp2": Job(Parallel(tp=2, cp=2, ep=2, etp=2), IN_ORDER, sharded=True),
    "cp2 dp2, documents moved": Job(Parallel(cp=2, dp=2, ep=4), MOVED),
    "tp2 pp2, documents moved": Job(Parallel(tp=2, pp=2), MOVED, form="bshd"),
}


ON_PROCESSES = ("dp2", "tp2 cp2")


@dataclass(frozen=True)
class Run:
    """What came of two steps of a rank; arrays of numpy, as parts of whole tensors."""

    losses: tuple[float, float]
    evaluated: float
    begun: list[Held]
    grads: list[Held]
    weights: list[Held]


def runtime_of(job: Job, groups: Groups) -> Runtime:
    return build(MODEL, parallel=job.parallel, groups=groups, seed=SEED, dropout=job.dropout)


def on_one(job: Job) -> Runtime:
    """The runtime of a job that one rank does."""
    return runtime_of(job, connect(group_plan(job.parallel), rank=0, store=HashStore()))


def two_steps(groups: Groups, *, job: Job) -> Run:
    """A fresh runtime, and two updates."""
    runtime, rank = runtime_of(job, groups), groups.rank
    layout, batches = runtime.layout, job.batches[job.parallel.data_rank(rank)]
    plan = reduce_plan(layout, rank)
    optimizer = Optimizer(
        runtime.weights,
        plan=plan,
        groups=runtime.groups,
        settings=decayed(AdamW(lr=0.02)),
        sharded=job.sharded,
        max_norm=0.5,
    )
    first = parts(layout, rank, runtime.weights)
    losses, grads = [], []
    kept = evaluate(evaluated(runtime), batches).report.loss
    for step in (STEP, STEP + 1):
        for weight in runtime.weights.values():
            weight.grad = None
        losses.append(forward_backward(runtime, batches, step=step).report.loss)
        own = {name: weight.grad for name, weight in runtime.weights.items()}
        grads += parts(layout, rank, sum_gradients(own, plan, runtime.groups).arrays()) if not grads else []
        optimizer.step(own)
    return Run((losses[0], losses[1]), kept, first, grads, parts(layout, rank, runtime.weights))


def twice(groups: Groups, *, job: Job) -> list[Run]:
    """A job, and the same job again."""
    return [two_steps(groups, job=job) for _ in range(2)]


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[int, list[Run]]]:
    """By job and rank, each job done twice."""
    found: dict[str, dict[int, list[Run]]] = {}
    for name, job in JOBS.items():
        over = GLOO if name in ON_PROCESSES else MEMORY
        found[name] = ranks(twice, plan=group_plan(job.parallel), over=over, within_s=100, job=job)
    return found


@dataclass(frozen=True)
class Truth:
    loss: float
    grads: dict[str, Tensor]


def plain(share: float) -> Truth:
    """One process, document by document, each row dropped by its document's number and its place there."""
    weights = {name: w.requires_grad_() for name, w in begin(Parallel(), None, MODEL).items()}
    eps, losses, targets = MODEL["rms_norm_eps"], [], 0

    def dropped(y: Tensor, name: str, number: int) -> Tensor:
        width = y.shape[1]
        rows = (number << 24) + torch.arange(len(y))
        index = rows[:, None] * width + torch.arange(width)
        return y * (uniform(SEED, name, index, step=STEP) >= share) / (1 - share)

    for number, ids in enumerate(documents()):
        x = weights["model.embed_tokens.weight"][ids]
        for layer in range(MODEL["num_hidden_layers"]):
            here = f"model.layers.{layer}."
            h = plain_decoder.norm(x, weights[f"{here}input_layernorm.weight"], eps)
            y = plain_decoder.attended(h, weights, f"{here}self_attn.", MODEL)
            x = x + dropped(y, f"{here}self_attn", number)
            h = plain_decoder.norm(x, weights[f"{here}post_attention_layernorm.weight"], eps)
            if f"{here}mlp.gate.weight" in weights:
                y, _, _ = plain_decoder.experts(h, weights, f"{here}mlp.", MODEL)
            else:
                y = plain_decoder.mlp(
                    h, *(weights[f"{here}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
                )
            x = x + dropped(y, f"{here}mlp", number)
        h = plain_decoder.norm(x, weights["model.norm.weight"], eps)
        losses.append(-plain_decoder.scored(h[:-1], ids[1:], weights).sum())
        targets += len(ids) - 1
    loss = torch.stack(losses).sum() / targets
    loss.backward()
    grads = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}
    return Truth(loss.item(), grads)


@pytest.fixture(scope="module")
def truths() -> dict[float, Truth]:
    return {share: plain(share) for share in (0.0, DROPOUT)}


@pytest.mark.parametrize("name", JOBS)
def test_the_same_elements_are_dropped_at_every_layout(
    name: str, runs: dict[str, dict[int, list[Run]]], truths: dict[float, Truth]
) -> None:
    truth = truths[JOBS[name].dropout]
    for rank, (run, _) in runs[name].items():
        assert run.losses[0] == pytest.approx(truth.loss, rel=EXACT), rank
        # Another step drops others, and an evaluation none.
        assert run.evaluated == pytest.approx(truths[0.0].loss, rel=EXACT), rank
    got = assembled({rank: run.grads for rank, (run, _) in runs[name].items()})
    assert set(got) == set(truth.grads)
    for key, wanted in truth.grads.items():
        assert (got[key] - wanted).norm() <= EXACT * truth.grads[key].norm() + 1e-15, key


def test_what_is_dropped_is_seen(truths: dict[float, Truth], runs: dict[str, dict[int, list[Run]]]) -> None:
    assert abs(truths[DROPOUT].loss - truths[0.0].loss) > 1e-3
    # Without their own numbers the documents of a microbatch would lose other elements.
    job = JOBS["one"]
    runtime = on_one(job)
    bare = [microbatch([documents()[i] for i in batch]) for batch in sum(job.deal, ())]
    assert abs(forward_backward(runtime, bare, step=STEP).report.loss - truths[DROPOUT].loss) > 1e-3
    first, second = (
        forward_backward(runtime, job.batches[0], step=step).report.loss for step in (STEP, STEP + 1)
    )
    assert first == runs["one"][0][0].losses[0] and abs(second - first) > 1e-3


def test_dropout_by_slot_would_be_seen(truths: dict[float, Truth]) -> None:
    """It is as good as ours on one process, and another at each layout."""

    def by_slot(*given: Any, **more: Any) -> View:
        seen = view(*given, **more)
        return replace(seen, tokens=seen.own.slots)

    losses = []
    with patch("shardweave.train.step.view", by_slot):
        for name in ("one", "one, documents moved"):
            runtime = on_one(JOBS[name])
            losses.append(forward_backward(runtime, JOBS[name].batches[0], step=STEP).report.loss)
    assert min(abs(a - b) for a, b in itertools.combinations([*losses, truths[DROPOUT].loss], 2)) > 1e-3


@pytest.mark.parametrize("name", JOBS)
def test_ranks_begin_with_the_bits_of_one_process(name: str, runs: dict[str, dict[int, list[Run]]]) -> None:
    one = begin(Parallel(), None, MODEL)
    found = assembled({rank: run.begun for rank, (run, _) in runs[name].items()})
    assert set(found) == set(one) and all(torch.equal(found[key], values) for key, values in one.items())


@pytest.mark.parametrize("name", JOBS)
def test_run_again_a_run_has_the_same_bits(name: str, runs: dict[str, dict[int, list[Run]]]) -> None:
    for rank, (first, again) in runs[name].items():
        assert (first.losses, first.evaluated) == (again.losses, again.evaluated), rank
        for kind in ("begun", "grads", "weights"):
            for a, b in zip(getattr(first, kind), getattr(again, kind), strict=True):
                assert a[:2] == b[:2] and a[2].tobytes() == b[2].tobytes(), (rank, kind, a[0])
        moved = [a for a, b in zip(first.begun, first.weights, strict=True) if (a[2] != b[2]).any()]
        assert len(moved) > len(first.begun) // 2
