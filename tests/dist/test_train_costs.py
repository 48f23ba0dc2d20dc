"""What weights in shares cost: bytes on the wire and bytes of memory are those that formulas say, one by one.

Ranks are threads of one world in memory, which counts what each sends by the name of the group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ledger import Ledger
from torch import Tensor
from train_cells import Cell
from train_ranks import CONFIG, batches_of, fill, full_weights, parallel_of, stage_sizes

from shardweave.testing.world import run_world, sent_bytes
from shardweave.train import decoder, experts
from shardweave.train.grid import Groups
from shardweave.train.memory import Memory, memory
from shardweave.train.optimizer import MASTER, AdamW, Optimizer
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime, build, group_plan
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import Objective, forward_backward
from shardweave.train.traffic import PARTS, Traffic, traffic

pytestmark = pytest.mark.timeout(240)

PLAIN = Objective(mtp=0.0)
ALL = Objective(balance=0.1, router_z=0.01, entropy=True)
SPARSE = {**CONFIG, "num_hidden_layers": 3, "mlp_only_layers": [1]}
TIED = {**SPARSE, "tie_word_embeddings": True}
_OF_EXPERTS = ("moe_intermediate_size", "num_local_experts", "num_experts_per_tok", "norm_topk_prob")
DENSE = {
    **{key: value for key, value in SPARSE.items() if key not in (*_OF_EXPERTS, "mlp_only_layers")},
    "model_type": "qwen3",
}


def cell(**given: Any) -> Cell:
    plain = Cell("thd", 1, 1, 1, 1, 1, 1, 1, False, "all", "ragged", "ring")
    return replace(plain, **given)


@dataclass(frozen=True)
class Case:
    """A layout, and what else changes what is sent and held."""

    cell: Cell
    config: Mapping[str, Any] = field(default_factory=lambda: SPARSE)
    objective: Objective = PLAIN
    dtype: str = "float64"
    mtp: int = 0
    multiple: int = 1
    ahead: bool = True

    @property
    def given(self) -> dict[str, Any]:
        """What a run and its costs are both told."""
        return {
            "dtype": self.dtype,
            "stage_sizes": stage_sizes(self.cell, self.config["num_hidden_layers"]),
            "mtp": self.mtp,
            "multiple": self.multiple,
            "recompute": self.cell.recompute,
        }

    def predicted(self, routed: Any = None) -> Traffic:
        parallel = parallel_of(self.cell)
        batches = [
            [batch.layout for batch in batches_of(self.cell, data)] for data in range(parallel.num_data)
        ]
        return traffic(
            self.config,
            parallel,
            batches,
            self.objective,
            sharded=self.cell.sharded,
            cp_method=self.cell.method,
            routed=routed,
            **self.given,
        )


FSDP, HYBRID, FOLDED = ("dp",), ("remat", "dp"), ("cp", "remat")
CASES = {
    "remat3": Case(cell(remat=3), DENSE),
    "remat2 dp2, the state replicated": Case(cell(remat=2, dp=2), TIED, ALL, "bfloat16"),
    "remat2 dp2, the state sharded": Case(cell(remat=2, dp=2, sharded=True), SPARSE, PLAIN, "float32"),
    "cp3 folded": Case(cell(cp=3, weight_axes=("cp",), sharded=True), DENSE, ALL),
    "cp2 remat3 folded": Case(cell(cp=2, remat=3, weight_axes=FOLDED, method="gather"), TIED, ALL, "float32"),
    "cp2 remat2 apart, recomputed": Case(cell(cp=2, remat=2, recompute=True), SPARSE, ALL),
    "fsdp 4": Case(cell(dp=4, weight_axes=FSDP, sharded=True), SPARSE, PLAIN, "bfloat16"),
    "fsdp over cp2 dp3": Case(cell(cp=2, dp=3, weight_axes=("cp", "dp")), DENSE, PLAIN, "bfloat16"),
    "fsdp over remat2 dp2, recomputed": Case(
        cell(remat=2, dp=2, weight_axes=HYBRID, recompute=True), TIED, ALL, ahead=True
    ),
    "eremat2 ep2": Case(cell(remat=4, ep=2, eremat=2, sharded=True), SPARSE, ALL, "float32"),
    "tp2 cp2 remat2 ep2 etp2 eremat2, recomputed": Case(
        cell(tp=2, cp=2, remat=2, ep=2, etp=2, eremat=2, weight_axes=FOLDED, recompute=True),
        {**SPARSE, "num_key_value_heads": 1},
        ALL,
        mtp=1,
        ahead=True,
    ),
    "pp2 vp2 remat2, recomputed": Case(
        cell(pp=2, vp=2, remat=2, recompute=True), {**TIED, "num_hidden_layers": 4}, ALL, mtp=2
    ),
    "pp3 remat2 dp2 tp1": Case(cell(pp=3, remat=2, dp=2, mask="empty_microbatch"), TIED, ALL, "bfloat16"),
    "tp2 dp3 ep3, wide shares": Case(
        cell(tp=2, dp=3, ep=3, weight_axes=FSDP), {**SPARSE, "num_local_experts": 9}, ALL, multiple=8
    ),
}

# --- what ranks count ---------------------------------------------------------------------------

Routes = dict[tuple[int, int, int], list[int]]


@contextmanager
def noted(case: Case) -> Iterator[Routes]:
    """How many tokens go to each rank of ``ep``, by layer, microbatch and rank, from what routers chose."""
    found: Routes = {}
    at = threading.local()
    layer_of, route = decoder._experts, experts.route
    ep, local = case.cell.ep, case.config.get("num_local_experts", 0) // case.cell.ep

    def experts_of(one: Any, weights: Any, h: Tensor, layer: int, seen: Any) -> Any:
        at.layer, at.rank = layer, one.tp.global_rank(one.tp.rank)
        return layer_of(one, weights, h, layer, seen)

    def routed(*args: Any, **given: Any) -> Any:
        choices = route(*args, **given)
        if torch.is_grad_enabled() != case.cell.recompute:  # of two times the first
            ranks = [{expert // local for expert in chosen} for chosen in choices.experts.tolist()]
            number = sum((layer, rank) == (at.layer, at.rank) for layer, _, rank in found)
            found[at.layer, number, at.rank] = [sum(r in those for those in ranks) for r in range(ep)]
        return choices

    with patch.object(decoder, "_experts", experts_of), patch.object(experts, "route", routed):
        yield found


@dataclass(frozen=True)
class Told:
    """What a rank counted in a step.

    Attributes:
        sent: Bytes by the name of the group.
        unasked: Of these what it sent of weights that were fetched ahead and that nobody asked for.
        memory: What it holds after it, and the most that was whole in it.
    """

    sent: dict[str, int]
    unasked: dict[str, int]
    memory: Memory


@dataclass(frozen=True)
class Played:
    """What ranks told of a case: for each rank its steps, and for each step where tokens went."""

    case: Case
    told: list[list[Told]]
    routes: list[Routes]


def play(case: Case, steps: int = 2) -> Played:
    parallel, routes = parallel_of(case.cell), []
    full = full_weights(case.config, getattr(torch, case.dtype), mtp=case.mtp)
    batches = [batches_of(case.cell, data) for data in range(parallel.num_data)]
    turn = threading.Barrier(parallel.world_size)

    def work(groups: Groups) -> list[Told]:
        runtime = runtime_of(case, groups)
        fill(runtime, full)
        optimizer = optimizer_of(case, runtime)
        found: list[Told] = []
        reading, before = runtime.reading, sent_bytes(groups)
        finish = reading.finish

        def finished() -> None:
            for _, coming in reading._coming.values():
                name, (share,) = coming.group.name.split(".")[1], coming.sent
                unasked[name] = unasked.get(name, 0) + share.nbytes * (coming.group.size - 1)
            finish()

        for _ in range(steps):
            unasked: dict[str, int] = {}
            ledger = Ledger(reading)
            with noted(case) if turn.wait() == 0 else nullcontext() as seen:
                routes.extend(() if seen is None else (seen,))
                turn.wait()
                with ledger.watching(), patch.object(reading, "finish", finished):
                    forward_backward(runtime, batches[parallel.data_rank(groups.rank)], case.objective)
                turn.wait()
            grads = {name: weight.grad for name, weight in runtime.weights.items()}
            assert optimizer.step(grads).ok
            now = sent_bytes(groups)
            sent = {name.split(".")[1]: now[name] - before[name] for name in now if now[name] > before[name]}
            before = now
            found.append(Told(sent, unasked, weighed(runtime, optimizer, ledger)))
            for weight in runtime.weights.values():
                weight.grad = None
        return found

    return Played(case, run_world(work, plan=group_plan(parallel), timeout_s=200), routes)


def weighed(runtime: Runtime, optimizer: Optimizer, ledger: Ledger) -> Memory:
    """The bytes of all tensors that a rank has."""
    weights = list(runtime.weights.values())
    states = [(box.state == MASTER, box.values) for box in optimizer.states()]
    return Memory(
        weights=sum(each.nbytes for each in weights),
        gradients=sum(each.grad.nbytes for each in weights if each.grad is not None),
        masters=sum(values.nbytes for is_master, values in states if is_master),
        moments=sum(values.nbytes for is_master, values in states if not is_master),
        wholes=ledger.most_wholes,
        whole_gradients=ledger.most_gradients,
    )


def runtime_of(case: Case, groups: Groups) -> Runtime:
    return build(
        case.config,
        parallel=parallel_of(case.cell),
        groups=groups,
        seed=None,
        cp_method=case.cell.method,
        ahead=case.ahead,
        **case.given,
    )


def optimizer_of(case: Case, runtime: Runtime) -> Optimizer:
    return Optimizer(
        runtime.weights,
        plan=reduce_plan(runtime.layout, runtime.rank),
        groups=runtime.groups,
        settings=AdamW(),
        sharded=case.cell.sharded,
        max_norm=1.0,
    )


@pytest.fixture(scope="module", params=CASES)
def played(request: pytest.FixtureRequest) -> Played:
    return play(CASES[request.param])


# --- bytes --------------------------------------------------------------------------------------


def test_every_byte_of_a_step_is_in_the_formulas(played: Played) -> None:
    """But for one weight at most that was fetched ahead for nothing, which is counted apart."""
    case = played.case
    for step, routed in enumerate(played.routes):
        predicted = case.predicted(routed if case.cell.ep > 1 else None)
        assert predicted.exact
        for rank, steps in enumerate(played.told):
            wanted, unasked = predicted.by_group(rank), steps[step].unasked
            assert len(unasked) <= case.ahead
            assert steps[step].sent == {
                group: wanted.get(group, 0) + unasked.get(group, 0) for group in {*wanted, *unasked}
            }, f"{case}, step {step}, rank {rank}\n{predicted}"
            assert predicted.by_part(rank)["fetch"] > 1000


def test_every_byte_of_memory_is_in_the_formulas(played: Played) -> None:
    case = played.case
    wanted = memory(
        case.config,
        parallel_of(case.cell),
        sharded=case.cell.sharded,
        trains_mtp=bool(case.objective.mtp),
        ahead=case.ahead,
        microbatches=3,
        **case.given,
    )
    for rank, steps in enumerate(played.told):
        for each in steps:
            assert each.memory == wanted[rank], f"{case}, rank {rank}"
            assert each.memory.wholes > 1000 and each.memory.whole_gradients > 1000


def test_cases_share_in_every_way() -> None:
    found = [case.predicted() for case in CASES.values()]
    keys = {key for each in found for sent in each.sent.values() for key in sent}
    assert {part for part, _ in keys} == {*PARTS} - {"matrices"}, "Muon's: test_train_traffic.py"
    assert {(part, name) for part in PARTS[:2] for name in ("shares", "expert_shares")} <= keys


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("axes", [("remat",), ("cp", "remat"), ("cp", "remat", "dp"), ("dp",)])
def test_what_shares_cost_is_the_closed_formula(axes: tuple[str, ...], recompute: bool) -> None:
    """``(W - 1) / W * P / T`` elements for each read and each sum of a microbatch, ``(R - 1) / R`` a step.

    ``P`` are the elements of all matrices, ``W`` ranks share each, ``T`` is ``tp``, and ``R`` ranks hold the
    same share.
    """
    config = {**DENSE, "vocab_size": 48, "intermediate_size": 48, "num_key_value_heads": 4}
    parallel = Parallel(tp=2, cp=2, remat=3, dp=2, weight_axes=axes)
    shape, num_microbatches = SequenceLayout((24,), cp=2, tp=2), 3
    found = traffic(
        config,
        parallel,
        [[shape] * num_microbatches] * parallel.num_data,
        PLAIN,
        sharded=True,
        dtype="bfloat16",
        recompute=recompute,
    )
    hidden, rows = 24, 3 * 24 + 2 * 48
    in_layers, head = 3 * (rows * hidden + hidden * (24 + 48)), 48 * hidden
    shared, width = parallel.num_shares, 2
    kept = Fraction(shared - 1, shared)
    reads = in_layers * (2 + recompute) + head * 2 + head  # the embedding is looked up in, and not read back
    copies = 12 // shared
    of_step = Fraction(copies - 1, copies) * (in_layers + 2 * head) / (2 * shared) * (4 + width)
    for sent in found.sent.values():
        parts = {part: size for (part, group), size in sent.items() if group == "shares"}
        assert parts["fetch"] == num_microbatches * kept * Fraction(reads, 2) * width
        assert parts["share gradients"] == (
            num_microbatches * kept * Fraction(in_layers + 2 * head, 2) * width
        )
    # Buckets are cut at rows: what one of the copies has more, another one has less.
    over = [
        sum(
            size
            for (part, group), size in sent.items()
            if part in ("gradients", "weights") and group != "replicas"
        )
        for sent in found.sent.values()
    ]
    assert sum(over) == of_step * parallel.world_size


def test_shares_of_experts_are_the_closed_formula() -> None:
    parallel = Parallel(remat=6, ep=2, eremat=3)
    config = {**SPARSE, "moe_intermediate_size": 12}
    found = traffic(config, parallel, [[SequenceLayout((24,))] * 2] * 6, PLAIN, sharded=True, dtype="float32")
    of_experts = 2 * 3 * 8 * 24 * 12  # two sparse layers of three matrices
    for sent in found.sent.values():
        assert sent["fetch", "expert_shares"] == 2 * Fraction(2, 3) * of_experts / 2 * 4 * 2
        assert sent["share gradients", "expert_shares"] == 2 * Fraction(2, 3) * of_experts / 2 * 4
