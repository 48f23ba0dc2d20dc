"""The decoder with weights in shares equals one process: log-probabilities, loss, gradients, norm, updates.

Layouts and documents are in `share_worlds.py`, the comparison is that of `test_train_matrix.py`. Data ranks
have uneven documents, one of them no target at all. What is exact is in `test_train_shares_exact.py`.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import plain_decoder
import pytest
import torch
import train_matrix
import workers
from share_worlds import BOUND, FOLDED, LARGE, LAYOUTS, PAIRS, cell, errors, in_world
from torch import Tensor
from torch.distributed import FileStore
from train_cells import Cell
from train_ranks import (
    CONFIG,
    as_numpy,
    assembled,
    batches_of,
    built,
    documents_of,
    fill,
    full_weights,
    parallel_of,
    parts_of,
)

from shardweave.errors import PlanError
from shardweave.train.batch import Microbatch, local, microbatch
from shardweave.train.gathered import Gathered
from shardweave.train.gradients import sum_gradients
from shardweave.train.grid import Groups, connect
from shardweave.train.loss import Tokens, cross_entropy
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime, group_plan
from shardweave.train.step import Objective, forward_backward
from shardweave.train.together import Together

pytestmark = pytest.mark.timeout(240)

PROCESSES = {
    4: ("T2 G2", "C2 D2 folded", "G2 EG2 EP2"),
    6: ("C3 D2 folded", "C3 D2 over dp", "C3 D2 over all"),
    8: ("G2 C2 D2 folded", "G4 EG1 EP8"),
}
DTYPES = {4: ("float64",), 6: ("float64", "float32"), 8: ("float64",)}
# Of folded layouts the unfolded twins are compared to the bit, in `test_train_shares_exact.py`.
IN_MEMORY = [
    name
    for name in LAYOUTS
    if name not in (*itertools.chain(*PROCESSES.values()), "G2 C2", "T2 G2 C2", "G2 C2 D2")
]


# --- against one process ------------------------------------------------------------------------


@pytest.mark.parametrize("size", PROCESSES)
def test_a_layout_of_processes_equals_one(size: int) -> None:
    cells = [LAYOUTS[name] for name in PROCESSES[size]]
    pairs = itertools.product(cells, DTYPES[size])
    told = train_matrix.on_processes(cells, DTYPES[size])
    found = [
        train_matrix.compare(of, dtype, each, train_matrix.truth(of))
        for (of, dtype), each in zip(pairs, told, strict=True)
    ]
    for one in found:
        print(one)
    for dtype in DTYPES[size]:
        worst, bound = train_matrix.worst_of(found, dtype), train_matrix.BOUNDS[dtype]
        assert worst.worst[0] <= bound, f"beyond {bound:g}: {worst}"


@pytest.mark.parametrize("name", IN_MEMORY)
def test_a_layout_in_memory_equals_one_process(name: str) -> None:
    found = errors(LAYOUTS[name])
    print(found)
    assert found.worst[0] <= BOUND, f"beyond {BOUND:g}: {found}"


def test_twenty_four_ranks_equal_one_process() -> None:
    sizes = (LARGE.tp, LARGE.cp, LARGE.ep, LARGE.remat * LARGE.cp, LARGE.eremat * LARGE.ep)
    assert len(set(sizes)) == len(sizes)  # no two alike, so that none can stand in for another
    found = errors(LARGE)
    print(found)
    assert found.worst[0] <= BOUND, f"beyond {BOUND:g}: {found}"


def test_every_layout_has_its_pair() -> None:
    for folded, plain in PAIRS.items():
        of = LAYOUTS[folded]
        assert set(of.weight_axes) == set(FOLDED) and of.cp > 1
        assert plain not in LAYOUTS or LAYOUTS[plain].num_data == of.num_data


# --- gradients of a step, with any loss ---------------------------------------------------------


def gradients(
    of: Cell, objective: Any = None, *, batches: Any = None, **more: Any
) -> tuple[float, Mapping[str, Tensor]]:
    """The loss and the summed gradients of a step; that replicas are alike is checked on the way."""
    config = train_matrix.config_of(of)

    def work(groups: Groups) -> tuple[float, Any]:
        runtime = built(of, groups, config, **more)
        fill(runtime, full_weights(config, runtime.dtype))
        data = runtime.parallel.data_rank(runtime.rank)
        given = batches(data) if batches else batches_of(of, data)
        loss = forward_backward(runtime, given, objective).report.loss
        return loss, parts_of(runtime, summed(runtime))

    told = in_world(of, work)
    assert len({loss for loss, _ in told}) == 1
    return told[0][0], assembled({rank: parts for rank, (_, parts) in enumerate(told)})


def summed(runtime: Runtime) -> dict[str, Tensor]:
    own = {name: weight.grad for name, weight in runtime.weights.items()}
    return sum_gradients(own, reduce_plan(runtime.layout, runtime.rank), runtime.groups).arrays()


def far(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    assert set(got) == set(wanted)
    return max(error for error, _ in train_matrix.relative(got, wanted))


def test_a_layer_computed_once_more_has_the_same_bits() -> None:
    """Layers are alike in shape, so that what one has fetched would fit the next."""
    of = replace(LAYOUTS["G2 C2 folded"], method="ring")
    (loss, once), (other, again) = (gradients(replace(of, recompute=on)) for on in (False, True))
    assert loss == other and once.keys() == again.keys()
    assert all(torch.equal(values, again[name]) for name, values in once.items())
    assert all(values.any() for name, values in once.items() if "experts" not in name)


def test_a_run_has_the_same_bits_again_and_whatever_is_fetched_ahead() -> None:
    of = LAYOUTS["G1 EG2 EP2 C2 folded"]
    first = gradients(of)
    for more in ({}, {"ahead": False, "ordered": False}):
        loss, grads = gradients(of, **more)
        assert loss == first[0] and all(torch.equal(first[1][name], grads[name]) for name in grads)


def test_experts_without_a_token_on_some_ranks_that_share_them() -> None:
    """Half of the data ranks have nothing in one microbatch, the others nothing in the other."""
    sizes = [[[0], [5, 3]], [[0], [1, 4]], [[7, 2], [0]], [[6], [0]]]
    chance = torch.Generator().manual_seed(3)
    documents = [
        [
            [torch.randint(0, CONFIG["vocab_size"], (size,), generator=chance) for size in each]
            for each in rank
        ]
        for rank in sizes
    ]
    found = []
    for of in (
        cell(dp=4),
        cell(remat=2, dp=2, ep=2, eremat=2),
        cell(remat=2, dp=2, ep=2, weight_axes=("remat", "dp"), recompute=True),
    ):
        assert of.num_data == 4
        found.append(gradients(of, batches=lambda data: [microbatch(ids) for ids in documents[data]]))
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-14)
        assert far(grads, found[0][1]) <= BOUND


def silent(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """A loss that is a plain 0 where nothing counts."""
    if not tokens.count:
        return torch.zeros(()), tokens.count
    return cross_entropy(tokens)


def apart(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """A loss that depends on no weight, on any rank."""
    return (tokens.logprobs * 0).sum(), tokens.count


@pytest.mark.parametrize("name", ["G1 EG2 EP2 C2 folded"])
def test_a_rank_whose_loss_depends_on_no_weight_adds_zeros(name: str) -> None:
    of = LAYOUTS[name]
    loss, grads = gradients(of, Objective(silent))
    plain_loss, wanted = gradients(of, Objective(cross_entropy))
    assert loss == plain_loss and all(torch.equal(grads[key], wanted[key]) for key in wanted)
    loss, grads = gradients(of, Objective(apart))
    assert loss == 0 and not any(values.any() for values in grads.values())


# --- heads for further tokens -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "tied"),
    [
        (replace(LAYOUTS["C3 D2 over all"], recompute=True), False),
        (cell(remat=2, cp=2, pp=2, weight_axes=FOLDED, mask="empty_rank"), True),
    ],
    ids=["untied", "tied over two stages"],
)
def test_the_output_head_is_read_by_every_head_for_further_tokens(of: Cell, tied: bool) -> None:
    """Three uses of one weight, or five where it is the embedding too, on two stages where there are two."""
    config = {**train_matrix.config_of(of), "tie_word_embeddings": tied}

    def work(groups: Groups) -> tuple[float, Any]:
        runtime = built(of, groups, config, mtp=2)
        fill(runtime, full_weights(config, runtime.dtype, mtp=2))
        batches = batches_of(of, runtime.parallel.data_rank(runtime.rank))
        loss = forward_backward(runtime, batches, Objective(mtp=0.3)).report.loss
        return loss, parts_of(runtime, summed(runtime))

    told = in_world(of, work, strict=True)
    w = {name: v.requires_grad_() for name, v in full_weights(config, torch.float64, mtp=2).items()}
    documents, masks = documents_of(of)
    flat, kept = (
        [each for rank in of_ranks for batch in rank for each in batch] for of_ranks in (documents, masks)
    )
    loss, _ = plain_decoder.objective(flat, kept, w, config, mtp_weight=0.3)
    loss.backward()
    wanted = {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in w.items()}
    assert told[0][0] == pytest.approx(loss.item(), rel=BOUND)
    assert far(assembled({rank: parts for rank, (_, parts) in enumerate(told)}), wanted) <= BOUND


# --- a rank that fails --------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Nothing forward; on the way back an error, or the end of the process."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, killed: bool) -> Tensor:
        ctx.killed = killed
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if ctx.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("on the way back")


def with_a_rank_that_fails(rank: int, *, killed: bool, folder: Path) -> tuple[str, str, float]:
    """A step of which rank 2 does not come back, while the others wait for its shares."""
    of = LAYOUTS["G2 C2 folded"]
    config = train_matrix.config_of(of)
    store = FileStore(str(folder / "store"), 4)
    groups = connect(group_plan(parallel_of(of)), rank=rank, store=store, timeout_s=5)
    runtime = built(of, groups, config)
    fill(runtime, full_weights(config, runtime.dtype))
    batches = batches_of(of, runtime.parallel.data_rank(rank))

    def loss(tokens: Tokens) -> tuple[Tensor, Tensor]:
        logprobs = Fails.apply(tokens.logprobs, killed) if rank == 2 else tokens.logprobs
        return -tokens.sum(logprobs), tokens.count

    begin = time.monotonic()
    try:
        with Together(store, rank=rank, groups=groups):
            forward_backward(runtime, batches, Objective(loss))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    finally:
        groups.close()
    return "", "", time.monotonic() - begin


@pytest.mark.parametrize("killed", [False, True], ids=["it raises", "it is killed"])
def test_a_rank_that_fails_while_others_wait_for_its_share_is_named(killed: bool, tmp_path: Path) -> None:
    ended = workers.run(
        with_a_rank_that_fails,
        range(4),
        killed=killed,
        folder=tmp_path,
        done=[0, 1, 3] if killed else range(4),
        within_s=60,
    )
    told = workers.values({rank: end for rank, end in ended.items() if not (killed and rank == 2)})
    for rank, (error, text, seconds) in told.items():
        # Of one that is gone it is known which group it was missed in.
        assert error == "TransportError", (rank, error, text)
        assert re.search(r"\branks? (\d(, | and ))*2\b", text), (rank, text)
        assert seconds < 30, (rank, seconds)


# --- one rank that is set otherwise -------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "equation"),
    [
        ({"recompute": True}, "ranks [0, 1, 3]: False; ranks [2]: True"),
        ({"multiple": 3}, "ranks [0, 1, 3]: 1; ranks [2]: 3"),
        ({"ahead": False}, "ranks [0, 1, 3]: True; ranks [2]: False"),
        ({"ordered": False}, "ranks [0, 1, 3]: True; ranks [2]: False"),
        ({"weight_axes": ("remat",)}, "ranks [0, 1, 3]: ('remat', 'cp'); ranks [2]: ('remat',)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_rank_that_is_set_otherwise_is_named_before_a_message(
    changed: dict[str, Any], equation: str
) -> None:
    """It would wait for messages that no other rank sends."""
    of = LAYOUTS["G2 C2 folded"]
    config = train_matrix.config_of(of)

    def work(groups: Groups) -> str:
        more = dict(changed) if groups.rank == 2 else {}
        own = replace(of, **{key: more.pop(key) for key in ("recompute", "weight_axes") if key in more})
        runtime = built(own, groups, config, **more)
        fill(runtime, full_weights(config, runtime.dtype))
        with pytest.raises(PlanError, match="all ranks compute one model and one objective") as caught:
            forward_backward(runtime, batches_of(of, runtime.parallel.data_rank(runtime.rank)))
        return caught.value.equation

    assert set(in_world(of, work)) == {equation}


# --- Megatron's mean of means -------------------------------------------------------------------


def mean_of_ranks(of: Cell) -> tuple[list[list[Microbatch]], list[list[Tensor]]]:
    """Batches whose tokens have the weights that make the objective Megatron's default: the mean over all
    ranks and microbatches of the mean over a rank's own targets. As it is the mean over ranks, it depends on
    how many there are and on which tokens each has.

    Also the weights, for each data rank and document, as one process needs them.
    """
    documents, masks = documents_of(of)
    batches, weights = [], []
    for data in range(of.num_data):
        given = batches_of(of, data)
        batches.append([])
        weights.append([])
        for number, batch in enumerate(given):
            numbers = torch.arange(len(batch.ids), dtype=torch.float64)
            told = [local(replace(batch, extras={"number": numbers}), c) for c in range(of.cp)]
            each = torch.zeros(len(batch.ids), dtype=torch.float64)
            for part in told:
                mine = part.extras["number"][part.mask].long()
                each[mine] = 1 / (max(len(mine), 1) * of.num_data * of.cp * len(given))
            batches[-1].append(replace(batch, extras={"weights": each}))
            weights[-1] += list(each.split([len(ids) for ids in documents[data][number]]))
        assert sum(int((each > 0).sum()) for each in weights[-1]) == sum(
            int(mask[1:].sum()) for batch in masks[data] for mask in batch
        )
    return batches, weights


@pytest.mark.parametrize("name", ["G2 C3 D2 folded", "G2 C3 D2"])
def test_the_mean_of_the_means_of_ranks_is_a_loss_with_weights(name: str) -> None:
    of = LAYOUTS[name]
    config, (documents, masks) = train_matrix.config_of(of), documents_of(of)
    batches, weights = mean_of_ranks(of)
    count = sum(int(mask[1:].sum()) for rank in masks for batch in rank for mask in batch)

    def loss(tokens: Tokens) -> tuple[Tensor, Tensor]:
        return -tokens.sum(tokens.logprobs * tokens["weights"]) * count, tokens.count

    found, grads = gradients(of, Objective(loss), batches=batches.__getitem__)
    w = {name: value.requires_grad_() for name, value in full_weights(config, torch.float64).items()}
    flat = [ids for rank in documents for batch in rank for ids in batch]
    each = [plain_decoder.forward(ids, w, config)[0] if len(ids) else ids.new_zeros(0) for ids in flat]
    mean = -sum(
        (logprobs * weight[1:]).sum()
        for logprobs, weight in zip(each, itertools.chain(*weights), strict=True)
        if len(weight)
    )
    mean.backward()
    wanted = {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in w.items()}
    assert found == pytest.approx(mean.item(), rel=BOUND)
    assert far(grads, wanted) <= BOUND
    # It is another objective than the mean over all tokens.
    assert far(grads, train_matrix.truth(of).grads) > 0.01


def test_a_loss_that_divides_for_itself_is_refused() -> None:
    def mean(tokens: Tokens) -> tuple[Tensor, Tensor]:
        return -tokens.sum(tokens.logprobs) / tokens.count.clamp(min=1), tokens.count.clamp(max=1)

    with pytest.raises(PlanError, match="losses count each target of a step once"):
        gradients(LAYOUTS["G2 C2 folded"], Objective(mean))


# --- a mistake ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "factor"), [("G1 EG2 EP2 C2 folded", 0.5), ("G2 EG2 EP2", 2.0)])
def test_experts_by_the_divisor_of_dense_weights_would_be_seen(name: str, factor: float) -> None:
    of, end = LAYOUTS[name], Gathered._end_sum

    def ended(self: Gathered) -> None:
        if self._sum is not None and ".experts." in self._sum[0]:
            at, pending = self._sum
            self._sum = at, replace(pending, end=lambda: pending.end() * factor)
        end(self)

    right = gradients(of)[1]
    with patch.object(Gathered, "_end_sum", ended):
        wrong = gradients(of)[1]
    assert any(".experts." in key for key in right)
    for key, values in right.items():
        assert torch.equal(wrong[key], values * factor if ".experts." in key else values), key
    assert far(wrong, right) == pytest.approx(abs(factor - 1))


def test_every_rank_reads_the_whole_of_what_it_holds_a_share_of() -> None:
    """Of the decoder on 24 ranks: each array's whole has the bits of the tensor's part that tp cuts."""
    of = LARGE
    config = train_matrix.config_of(of)
    whole = full_weights(config, torch.float64)

    def work(groups: Groups) -> tuple[int, int]:
        runtime = built(of, groups, config)
        fill(runtime, whole)
        reading, rank = runtime.reading, runtime.rank
        with torch.no_grad():
            found = {name: as_numpy(reading[name]) for name in reading}
        reading.finish()
        at = runtime.parallel.mesh.coordinate(rank)
        key = "model.layers.1.self_attn.q_proj.weight"
        assert (found[key] == whole[key].chunk(2, 0)[at["tp"]].numpy()).all()
        key = "model.layers.1.self_attn.o_proj.weight"
        assert (found[key] == whole[key].chunk(2, 1)[at["tp"]].numpy()).all()
        stacked = found["model.layers.1.mlp.experts.down_proj.weight"]
        for number, expert in enumerate(stacked):
            first = at["ep"] * 2 + number
            assert (expert == whole[f"model.layers.1.mlp.experts.{first}.down_proj.weight"].numpy()).all()
        return len(reading.shared), len(reading)

    told = in_world(of, work, strict=True)
    assert len(set(told)) == 1 and 0 < told[0][0] < told[0][1]
