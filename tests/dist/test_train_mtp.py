"""Heads for further tokens: at every layout they are those of one process, and faults put in are seen.

The reference is the plain decoder, which has for head k a row for each token that has a token k + 1 further
on in its document, and no other rows. All layouts take the same documents, so that they are compared with
each other too. Ranks are in memory, and those of one layout are processes over gloo.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import worlds
from plain_decoder import objective as plain_objective
from torch import Tensor
from torch.distributed import HashStore
from train_cells import Cell
from train_matrix import ADAM, BALANCE, MAX_NORM, ROUTER_Z, relative
from train_ranks import CONFIG, assembled, built, documents_of, fill, full_weights, parallel_of, parts_of

from shardweave.errors import ModelError
from shardweave.layout import prove
from shardweave.train import loss, mtp, step
from shardweave.train.batch import Local, Microbatch, local, microbatch
from shardweave.train.gradients import check_replicas, measure, sum_gradients
from shardweave.train.grid import Groups, connect
from shardweave.train.maths import maths
from shardweave.train.optimizer import Optimizer, decayed
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime, build, group_plan, layout_of
from shardweave.train.sequence import IGNORE
from shardweave.train.step import Objective, evaluate, forward_backward

pytestmark = pytest.mark.timeout(300)

DEPTH, WEIGHT, BOUND = 2, 0.3, 1e-12
NUM_MICROBATCHES = 3
HEADS = ("model.layers.5.", "model.layers.6.")
WHAT = Objective(balance=BALANCE, router_z=ROUTER_Z, mtp=WEIGHT)
SPARSE = CONFIG
DENSE_TIED = {**CONFIG, "mlp_only_layers": [2, 4], "tie_word_embeddings": True}


def cell(**given: Any) -> Cell:
    one = {"tp": 1, "cp": 1, "dp": 1, "pp": 1, "ep": 1, "etp": 1, "vp": 1}
    kind = {"form": "thd", "sharded": False, "mask": "prompt", "lengths": "ragged", "method": "ring"}
    return Cell(**{**one, **kind, **given})


LAYOUTS: dict[str, tuple[Cell, dict[str, Any]]] = {
    "thd tp2 cp2 ep2, sharded": (cell(tp=2, cp=2, ep=2, sharded=True), SPARSE),
    "bshd pp2 vp2 dp2": (cell(form="bshd", pp=2, vp=2, dp=2), SPARSE),
    "bshd cp2 dp2 ep4, sharded": (
        cell(form="bshd", cp=2, dp=2, ep=4, sharded=True, method="gather"),
        SPARSE,
    ),
    "thd pp4": (cell(pp=4), SPARSE),
    "thd tp2 pp2, tied": (cell(tp=2, pp=2), DENSE_TIED),
    "bshd dp2 tp2 etp2, tied, sharded": (
        cell(form="bshd", dp=2, tp=2, etp=2, sharded=True),
        DENSE_TIED,
    ),
}


def documents() -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Microbatches of documents of 0 to 22 tokens and their masks, the same ones for any layout."""
    ids, masks = documents_of(cell(dp=2))
    masks[1][0][0][:] = False
    return [batch for data in ids for batch in data], [batch for data in masks for batch in data]


def batches_for(of: Cell, data: int) -> list[Microbatch]:
    """The three microbatches of a data rank, twice as large where there is one data rank."""
    each = documents()
    if of.dp == 1:
        ids, masks = ([a + b for a, b in zip(some[::2], some[1::2], strict=True)] for some in each)
    else:
        ids, masks = (some[data::2] for some in each)
    return [
        microbatch(some, kept, form=of.form, cp=of.cp, tp=of.tp)
        for some, kept in zip(ids, masks, strict=True)
    ]


# --- one process --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What one process comes to."""

    loss: float
    means: list[float]
    grads: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def truth(config: Mapping[str, Any]) -> Truth:
    """The plain decoder on all documents, and the optimizer of torch."""
    full = full_weights(config, torch.float64, mtp=DEPTH)
    weights = {name: weight.requires_grad_() for name, weight in full.items()}
    ids, masks = ([each for batch in some for each in batch] for some in documents())
    groups = [[w for w in weights.values() if (w.dim() > 1) == moves] for moves in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        lr=ADAM.rate(1),
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    found = []
    for _ in range(2):
        means: list[Tensor] = []
        value, _ = plain_objective(
            ids,
            masks,
            weights,
            config,
            balance_weight=BALANCE,
            z_weight=ROUTER_Z,
            mtp_weight=WEIGHT,
            means=means,
        )
        optimizer.zero_grad()
        value.backward()
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        grads = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
        found.append(Truth(value.item(), [mean.item() for mean in means], grads, norm, {}))
        torch.nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)
        optimizer.step()
    return replace(found[0], weights={name: weight.detach() for name, weight in weights.items()})


# --- the ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a rank says of a layout."""

    loss: float
    evaluated: float
    means: dict[str, float]
    norm: float
    grads: list[Any]
    weights: list[Any]


def begun(groups: Groups, name: str) -> tuple[Runtime, list[Microbatch]]:
    """A layout on this rank, and its batches."""
    of, config = LAYOUTS[name]
    runtime = built(of, groups, config, mtp=DEPTH)
    fill(runtime, full_weights(config, runtime.dtype, mtp=DEPTH))
    return runtime, batches_for(of, runtime.parallel.data_rank(runtime.rank))


def play(groups: Groups, *, name: str) -> Told:
    """A step without an update, an evaluation, and two updates."""
    runtime, batches = begun(groups, name)
    evaluated = evaluate(runtime, batches, WHAT).report
    plan = reduce_plan(runtime.layout, runtime.rank)
    optimizer = Optimizer(
        runtime.weights,
        plan=plan,
        groups=runtime.groups,
        settings=decayed(ADAM),
        sharded=LAYOUTS[name][0].sharded,
        max_norm=MAX_NORM,
    )
    first = None
    for _ in range(2):
        said, own = stepped(runtime, batches)
        if first is None:
            summed = sum_gradients(own, plan, runtime.groups)
            first = said, measure(summed, runtime.groups)[0], parts_of(runtime, summed.arrays())
        assert optimizer.step(own).ok
    check_replicas(runtime.weights, plan, runtime.groups)
    assert first is not None
    said, norm, grads = first
    return Told(
        loss=said.loss,
        evaluated=evaluated.loss,
        means=dict(said.means),
        norm=norm,
        grads=grads,
        weights=parts_of(runtime, runtime.weights),
    )


def stepped(runtime: Runtime, batches: Sequence[Microbatch]) -> tuple[loss.Report, dict[str, Tensor | None]]:
    for weight in runtime.weights.values():
        weight.grad = None
    said = forward_backward(runtime, batches, WHAT).report
    return said, {name: weight.grad for name, weight in runtime.weights.items()}


def one_step(groups: Groups, *, name: str) -> tuple[dict[str, float], list[Any]]:
    """What is reported of a step, and its gradients."""
    runtime, batches = begun(groups, name)
    said, own = stepped(runtime, batches)
    summed = sum_gradients(own, reduce_plan(runtime.layout, runtime.rank), runtime.groups)
    return dict(said.means), parts_of(runtime, summed.arrays())


# --- faults -------------------------------------------------------------------------------------

Look = Callable[[Microbatch, int, int], Local]
"""How a context rank sees a batch some tokens ahead, whole over tp."""


@contextmanager
def looks(look: Look) -> Iterator[None]:
    """Heads see a batch in another way."""

    def seen(batch: Microbatch, cp_rank: int, tp_rank: int | None = None, *, ahead: int = 0) -> Local:
        whole = look(batch, cp_rank, ahead)
        if tp_rank is None:
            return whole

        def part(values: Tensor) -> Tensor:
            return values.chunk(batch.layout.tp, -1)[tp_rank]

        names = ("ids", "labels", "mask", "positions", "is_real", "slots", "documents")
        return replace(whole, **{name: part(getattr(whole, name)) for name in names})

    with patch.object(mtp, "local", seen):
        yield


def as_it_is(batch: Microbatch, cp_rank: int, ahead: int) -> Local:
    return local(batch, cp_rank, ahead=ahead)


def rolled_after_slicing(batch: Microbatch, cp_rank: int, ahead: int) -> Local:
    """Each rank rolls what it has."""
    seen = local(batch, cp_rank)
    labels = seen.labels.roll(-ahead, -1)
    return replace(
        seen,
        ids=seen.ids.roll(-ahead, -1),
        labels=labels,
        mask=seen.mask.roll(-ahead, -1) & (labels != IGNORE),
        is_real=labels != IGNORE,
    )


def rolled_at_real_bounds(batch: Microbatch, cp_rank: int, ahead: int) -> Local:
    """The padded batch is rolled between sums of real lengths, where documents would end without padding."""
    layout, seen = batch.layout, local(batch, cp_rank)
    bounds = np.cumsum([0, *layout.lengths])

    def rolled(values: Tensor, fill: float, by: int) -> Tensor:
        flat = layout.place(values, fill=fill).reshape(-1)
        found = flat.clone()
        for start, stop in itertools.pairwise(bounds):
            found[start:stop] = torch.cat((flat[start + by : stop], flat.new_full((by,), fill)))[
                : stop - start
            ]
        part: Tensor = layout.local(found.reshape(layout.shape), cp_rank)
        return part

    labels = rolled(batch.ids, IGNORE, ahead + 1)
    return replace(
        seen,
        ids=rolled(batch.ids, 0, ahead),
        labels=labels,
        mask=rolled(batch.mask, False, ahead + 1) & (labels != IGNORE),
        is_real=labels != IGNORE,
    )


def masked_as_the_next_token(batch: Microbatch, cp_rank: int, ahead: int) -> Local:
    """Labels are shifted on, the mask is not."""
    seen = local(batch, cp_rank, ahead=ahead)
    return replace(seen, mask=local(batch, cp_rank).mask & (seen.labels != IGNORE))


def routed_past_the_end(batch: Microbatch, cp_rank: int, ahead: int) -> Local:
    """Tokens that have no label go to experts and count in their balance."""
    return replace(local(batch, cp_rank, ahead=ahead), is_real=local(batch, cp_rank).is_real)


def other_missing_tokens(batch: Microbatch, cp_rank: int, ahead: int) -> Local:
    """No fault: what is looked at past the end is another token, and another for each slot."""
    seen = local(batch, cp_rank, ahead=ahead)
    return replace(seen, ids=seen.ids.where(seen.labels != IGNORE, seen.slots * 7 % 37))


@contextmanager
def counted_as(count: Callable[[Parallel, loss.Term, int], float], parallel: Parallel) -> Iterator[None]:
    """The scale of heads is one over another number than N; what is reported stays as it is."""

    def total(terms: Sequence[loss.Term], counts: Mapping[str, int]) -> Tensor:
        other = {t.name: count(parallel, t, counts[t.name]) for t in terms if t.name.startswith("mtp")}
        return loss.total(terms, {**counts, **other})  # type: ignore[dict-item]

    with patch.object(step, "total", total):
        yield


def mean_of_means(parallel: Parallel, term: loss.Term, count: int) -> float:
    """Each rank's and microbatch's mean, averaged over them."""
    return max(int(term.count), 1) * parallel.tp * parallel.cp * NUM_MICROBATCHES


def less_by_cp(parallel: Parallel, term: loss.Term, count: int) -> float:
    return count * parallel.cp


FAULTS: dict[str, Callable[[Parallel], Any]] = {
    "none": lambda parallel: looks(as_it_is),
    "other missing tokens": lambda parallel: looks(other_missing_tokens),
    "rolled after slicing": lambda parallel: looks(rolled_after_slicing),
    "rolled at real bounds": lambda parallel: looks(rolled_at_real_bounds),
    "masked as the next token": lambda parallel: looks(masked_as_the_next_token),
    "routed past the end": lambda parallel: looks(routed_past_the_end),
    "mean of means": lambda parallel: counted_as(mean_of_means, parallel),
    "less by cp": lambda parallel: counted_as(less_by_cp, parallel),
}
ON = "thd tp2 cp2 ep2, sharded"
"""The layout that faults are put in, whose ranks are processes otherwise."""


# --- tests --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(truths: dict[bool, Truth]) -> dict[str, dict[int, Told]]:
    """What the ranks of every layout say."""
    return {
        name: worlds.ranks(
            play,
            plan=group_plan(parallel_of(of)),
            over=worlds.GLOO if name == ON else worlds.MEMORY,
            within_s=240,
            name=name,
        )
        for name, (of, _) in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def with_faults() -> dict[str, dict[int, tuple[dict[str, float], list[Any]]]]:
    """What ranks say of a step with each fault, which is put in once for all of them, as they are threads."""
    parallel, found = parallel_of(LAYOUTS[ON][0]), {}
    for name, fault in FAULTS.items():
        with fault(parallel):
            found[name] = worlds.ranks(one_step, plan=group_plan(parallel), within_s=120, name=ON)
    return found


@pytest.fixture(scope="module")
def truths() -> dict[bool, Truth]:
    """What one process comes to, of a model with its own head and of one without."""
    return {bool(config["tie_word_embeddings"]): truth(config) for config in (SPARSE, DENSE_TIED)}


def worst(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    assert set(got) == set(wanted)
    return max(relative(got, wanted))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_process(
    name: str, told: dict[str, dict[int, Told]], truths: dict[bool, Truth]
) -> None:
    true = truths[LAYOUTS[name][1]["tie_word_embeddings"]]
    assert len(true.means) == DEPTH and len({round(mean, 3) for mean in true.means}) == DEPTH
    ranks = told[name]
    for each in ranks.values():
        for value in (each.loss, each.evaluated):
            assert abs(value - true.loss) <= BOUND * true.loss
        for k, mean in enumerate(true.means, 1):
            assert abs(each.means[f"mtp_{k}"] - mean) <= BOUND * mean
        assert abs(each.norm - true.norm) <= BOUND * true.norm
    grads = worst(assembled({rank: each.grads for rank, each in ranks.items()}), true.grads)
    weights = worst(assembled({rank: each.weights for rank, each in ranks.items()}), true.weights)
    print(f"{name}: gradients {grads}, weights after two updates {weights}")
    assert max(grads, weights)[0] <= BOUND


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_any_other_layout(tied: bool, told: dict[str, dict[int, Told]]) -> None:
    alike = [name for name, (_, config) in LAYOUTS.items() if config["tie_word_embeddings"] == tied]
    grads = [assembled({rank: each.grads for rank, each in told[name].items()}) for name in alike]
    assert len(grads) > 1
    for other in grads[1:]:
        assert worst(other, grads[0])[0] <= BOUND


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("none", "other missing tokens")])
def test_a_fault_is_seen(fault: str, with_faults: dict[str, Any], truths: dict[bool, Truth]) -> None:
    true, ranks = truths[False], with_faults[fault]
    means = ranks[0][0]
    grads = worst(assembled({rank: each[1] for rank, each in ranks.items()}), true.grads)
    off = max(abs(means[f"mtp_{k}"] - mean) / mean for k, mean in enumerate(true.means, 1))
    print(f"{fault}: gradients off by {grads[0]:.1e} at {grads[1]}, reported losses of heads by {off:.1e}")
    assert grads[0] > 1e-4


def test_the_way_that_faults_are_put_in_changes_nothing(
    told: dict[str, dict[int, Told]], with_faults: dict[str, Any]
) -> None:
    """Nor that ranks are in memory."""
    for rank, each in told[ON].items():
        assert_same_bits(with_faults["none"][rank][1], each.grads)


def test_the_embedding_of_a_missing_token_cannot_matter(
    told: dict[str, dict[int, Told]], with_faults: dict[str, Any]
) -> None:
    for rank, each in told[ON].items():
        means, grads = with_faults["other missing tokens"][rank]
        assert means == each.means
        assert_same_bits(grads, each.grads)


def assert_same_bits(got: Sequence[Any], wanted: Sequence[Any]) -> None:
    for (name, at, values), (other, there, true) in zip(got, wanted, strict=True):
        assert (name, at) == (other, there) and np.array_equal(values, true), name


@pytest.mark.parametrize("form", ["bshd", "thd"])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("lengths", [(5, 9), (1, 2, 3, 4), (0, 7), (17,), (6, 1, 12)])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_look_ahead_is_that_of_each_document(
    form: str, cp: int, tp: int, lengths: tuple[int, ...], ahead: int
) -> None:
    chance = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, 90, (length,), generator=chance) for length in lengths]
    masks = [torch.rand(length, generator=chance) < 0.7 for length in lengths]
    batch = microbatch(ids, masks, form=form, cp=cp, tp=tp)
    layout = batch.layout
    parts = [local(batch, c, t, ahead=ahead) for c in range(cp) for t in range(tp)]
    wanted: dict[str, list[int]] = {"ids": [], "labels": [], "mask": [], "is_real": []}
    for document, kept, padded in zip(ids, masks, layout.padded, strict=True):
        for t in range(padded):
            has = t + ahead + 1 < len(document)
            wanted["ids"].append(int(document[t + ahead]) if t + ahead < len(document) else 0)
            wanted["labels"].append(int(document[t + ahead + 1]) if has else IGNORE)
            wanted["mask"].append(has and bool(kept[t + ahead + 1]))
            wanted["is_real"].append(has)
    for name, values in wanted.items():
        got = layout.join([getattr(part, name) for part in parts], split_tp=True)
        assert got.reshape(-1).tolist() == values, name


def test_heads_are_layers_like_the_last_one() -> None:
    for config, kind in ((SPARSE, "moe"), (DENSE_TIED, "mlp")):
        plain = maths(config)
        found = mtp.with_heads(plain, 3)
        assert (found.num_layers, found.depth, plain.depth) == (5, 3, 0)
        assert found.model.decoder == plain.model
        behind = [block for block in found.model.blocks if any(n >= 5 for _, n in block.layers)]
        assert {block.kind for block in behind} == {"norms", "attention", kind, "mtp"}
        assert {str(block.layers) for block in behind} == {"[5:8]"}
        assert len(found.windows) == 8


def test_a_window_of_the_last_layer_is_that_of_the_heads() -> None:
    window = {"sliding_window": 5, "use_sliding_window": True}
    assert mtp.with_heads(maths({**CONFIG, **window}), 2).windows == (5,) * 7


def test_heads_are_given_once_and_not_less_than_none() -> None:
    plain = maths(SPARSE)
    assert mtp.with_heads(plain, 0) is plain
    with pytest.raises(ModelError, match=r"mtp\(-1\) < 0"):
        mtp.with_heads(plain, -1)
    with pytest.raises(ModelError, match=r"heads\(2\) != 0"):
        mtp.with_heads(mtp.with_heads(plain, 2), 1)


def test_without_a_weight_the_model_is_the_one_without_heads() -> None:
    found = []
    for depth in (0, DEPTH):
        groups = connect(group_plan(Parallel()), rank=0, store=HashStore())
        runtime = build(SPARSE, parallel=Parallel(), groups=groups, seed=7, mtp=depth)
        batches = batches_for(cell(), 0)
        found.append(forward_backward(runtime, batches, replace(WHAT, mtp=0.0)).report)
        heads = {name for name, weight in runtime.weights.items() if weight.grad is None}
        assert heads == {name for name in runtime.weights if name.startswith(HEADS)}
    assert found[0] == found[1] and set(found[0].means) == {"loss", "balance", "router_z"}


@pytest.mark.parametrize("config", [SPARSE, DENSE_TIED], ids=["sparse", "dense, tied"])
@pytest.mark.parametrize(
    "parallel",
    [Parallel(pp=4), Parallel(tp=2, cp=2, pp=2, ep=4), Parallel(tp=2, dp=2, pp=2, vp=2, ep=2, etp=2)],
    ids=lambda parallel: str(parallel.mesh),
)
def test_heads_and_an_embedding_are_on_the_last_stage(config: dict[str, Any], parallel: Parallel) -> None:
    layout = layout_of(config, parallel, mtp=DEPTH)
    prove(layout)
    for rank in layout.mesh.ranks:
        stage = parallel.mesh.coordinate(rank)["pp"]
        arrays = reduce_plan(layout, rank).arrays
        is_last = stage == parallel.pp - 1
        assert any(name.startswith(HEADS) for name in arrays) == is_last
        embedding = arrays.get("model.embed_tokens.weight")
        assert (embedding is not None) == (is_last or stage == 0)
        if embedding is not None:
            ends = [parallel.mesh.coordinate(other)["pp"] for other in embedding.ends]
            assert ends == [0, parallel.pp - 1]
        if is_last:
            stages = layout.mesh.where({"pp": stage})
            assert arrays["model.layers.6.eh_proj.weight"].over == tuple(stages.tolist())
