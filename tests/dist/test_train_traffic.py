"""Bytes on the wire are those that formulas say, one by one; so are the idle times of a pipeline.

Every communicator of a rank is put behind one that counts what is sent through it, by the name of the group.
It knows what messages between pairs need, so that a byte that goes another way is an error and not missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import workers
from torch import Tensor
from train_cells import Cell
from train_ranks import CONFIG, batches_of, fill, full_weights, parallel_of, runtime_of, stage_sizes

from shardweave.errors import PlanError
from shardweave.train import decoder, experts, linear
from shardweave.train.blocks import blocks
from shardweave.train.config import TrainConfig
from shardweave.train.data import Loader, Parts
from shardweave.train.explain import full_step
from shardweave.train.muon import Muon
from shardweave.train.optimizer import AdamW, Optimizer, muon_for_matrices
from shardweave.train.parallel import Parallel
from shardweave.train.pipeline import _Mail, _Stage
from shardweave.train.reduction import reduce_plan
from shardweave.train.routing import Choices
from shardweave.train.runtime import GRID, Runtime
from shardweave.train.schedule import plan_pipeline
from shardweave.train.sequence import SequenceLayout
from shardweave.train.settings import read
from shardweave.train.step import Objective, forward_backward
from shardweave.train.tokens import Tokens
from shardweave.train.traffic import PARTS, Traffic, imbalance, traffic

pytestmark = pytest.mark.timeout(240)

# --- layouts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layout, and what else changes what is sent."""

    cell: Cell
    config: Mapping[str, Any]
    objective: Objective
    dtype: str = "float64"
    mtp: int = 0

    def predicted(self, routed: Any = None) -> Traffic:
        batches = [[batch.layout for batch in batches_of(self.cell, dp)] for dp in range(self.cell.dp)]
        return traffic(
            self.config,
            parallel_of(self.cell),
            batches,
            self.objective,
            sharded=self.cell.sharded,
            dtype=self.dtype,
            stage_sizes=stage_sizes(self.cell, self.config["num_hidden_layers"]),
            cp_method=self.cell.method,
            mtp=self.mtp,
            settings=SETTINGS,
            routed=routed,
        )


def cell(**given: Any) -> Cell:
    one = {"tp": 1, "cp": 1, "dp": 1, "pp": 1, "ep": 1, "etp": 1, "vp": 1}
    kind = {"form": "thd", "sharded": False, "mask": "prompt", "lengths": "ragged", "method": "ring"}
    return Cell(**{**one, **kind, **given})


SETTINGS = muon_for_matrices(Muon(ns_dtype="bfloat16"), AdamW())
PLAIN, ALL = Objective(), Objective(balance=0.02, router_z=0.01, entropy=True)
ONE_KV_HEAD = {**CONFIG, "num_key_value_heads": 1}
TIED = {**CONFIG, "tie_word_embeddings": True}
CASES = {
    "tp2": Case(cell(tp=2), ONE_KV_HEAD, ALL, "float32", mtp=1),
    "cp2 ring": Case(cell(cp=2), CONFIG, PLAIN, "bfloat16"),
    "cp2 gather": Case(cell(cp=2, method="gather", form="bshd"), CONFIG, ALL),
    "cp2 all_to_all": Case(cell(cp=2, method="all_to_all"), ONE_KV_HEAD, PLAIN, "float32"),
    "pp2 vp2": Case(cell(pp=2, vp=2), TIED, ALL, mtp=2),
    "dp2 sharded": Case(cell(dp=2, sharded=True), CONFIG, PLAIN, "bfloat16"),
    "pp4": Case(cell(pp=4, form="bshd"), CONFIG, PLAIN, "float32"),
    "dp2 ep2 sharded": Case(cell(dp=2, ep=2, sharded=True, mask="empty_microbatch"), CONFIG, ALL),
    "tp2 cp2 ep2 etp2": Case(cell(tp=2, cp=2, ep=2, etp=2), CONFIG, replace(ALL, entropy=False), mtp=1),
    "tp2 dp2 pp2 ep4 sharded": Case(cell(tp=2, dp=2, pp=2, ep=4, sharded=True), TIED, ALL, "bfloat16", mtp=1),
}

# --- what ranks count ---------------------------------------------------------------------------


class Counting:
    """A communicator that counts what this rank sends. Anything but messages between pairs is refused."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.bytes = comm, 0

    def name(self) -> str:
        return str(self._comm.name())

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self.bytes += sum(tensor.nbytes for tensor in tensors)
        return self._comm.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._comm.recv(tensors, source, tag)


def counted(runtime: Runtime) -> dict[str, Counting]:
    """Counters of all groups of a rank by name, put in their place."""
    found = {}
    for name in runtime.groups.plan.names[GRID]:
        group = runtime.groups.find(GRID, name)
        if group is not None and group.comm is not None:
            found[name] = Counting(group.comm)
            object.__setattr__(group, "comm", found[name])
    return found


@contextmanager
def noted(ep: int, local: int) -> Iterator[dict[tuple[int, int], list[int]]]:
    """How many tokens go to each rank of ``ep``, by layer and microbatch, from what routers chose."""
    found: dict[tuple[int, int], list[int]] = {}
    at: list[int] = []
    layer_of, route = decoder._experts, experts.route

    def experts_of(one: Any, weights: Any, h: Tensor, layer: int, seen: Any) -> Any:
        at[:] = [layer]
        return layer_of(one, weights, h, layer, seen)

    def routed(*args: Any, **given: Any) -> Choices:
        choices = route(*args, **given)
        ranks = [{expert // local for expert in chosen} for chosen in choices.experts.tolist()]
        # Microbatches go through a layer in their order.
        number = sum(layer == at[0] for layer, _ in found)
        found[at[0], number] = [sum(rank in those for those in ranks) for rank in range(ep)]
        return choices

    with patch.object(decoder, "_experts", experts_of), patch.object(experts, "route", routed):
        yield found


Log = list[tuple[Any, ...]]


@contextmanager
def logged() -> Iterator[Log]:
    """What a stage does, takes and gives, in order; messages by kind, microbatch and where they go."""
    log: Log = []
    real = {name: getattr(_Stage, name) for name in ("go_forward", "go_back")}
    give, take = _Mail.give, _Mail.take

    def doing(name: str) -> Callable[..., None]:
        def act(stage: _Stage, action: Any) -> None:
            log.append(("do", 1 if name == "go_forward" else 2))
            real[name](stage, action)

        return act

    def given(mail: _Mail, kind: str, number: int, chunk: int, tensor: Tensor) -> None:
        place = chunk * mail._plan.stages + mail._pp.rank
        log.append(("give", kind, number, place + (1 if kind == "forward" else -1)))
        give(mail, kind, number, chunk, tensor)

    def taken(mail: _Mail, kind: str, number: int, chunk: int) -> Tensor:
        log.append(("take", kind, number, chunk * mail._plan.stages + mail._pp.rank))
        return take(mail, kind, number, chunk)

    with (
        patch.object(_Stage, "go_forward", doing("go_forward")),
        patch.object(_Stage, "go_back", doing("go_back")),
        patch.object(_Mail, "give", given),
        patch.object(_Mail, "take", taken),
    ):
        yield log


@dataclass(frozen=True)
class Told:
    """What a rank counted in a step: bytes by group, where tokens went, and what its stage did."""

    bytes: dict[str, int]
    routed: dict[tuple[int, int], list[int]]
    log: Log


def play(rank: int, *, names: list[str], folder: Path, wasteful: bool = False) -> list[Told]:
    """One step of each case; wasteful, linears of one input gather it once for each."""
    found = []
    for number, name in enumerate(names):
        case = CASES[name]
        runtime = runtime_of(
            case.cell, rank, folder / f"store{number}", case.config, case.dtype, mtp=case.mtp
        )
        fill(runtime, full_weights(case.config, runtime.dtype, mtp=case.mtp))
        optimizer = Optimizer(
            runtime.weights,
            plan=reduce_plan(runtime.layout, rank),
            groups=runtime.groups,
            settings=SETTINGS,
            sharded=case.cell.sharded,
            max_norm=1.0,
        )
        batches = batches_of(case.cell, runtime.parallel.data_rank(rank))
        counters = counted(runtime)
        local = case.config["num_local_experts"] // case.cell.ep
        columns = each_alone if wasteful else linear.columns
        with (
            noted(case.cell.ep, local) as routed,
            logged() as log,
            patch.object(decoder, "columns", columns),
        ):
            forward_backward(runtime, batches, case.objective)
        assert optimizer.step({name: weight.grad for name, weight in runtime.weights.items()}).ok
        found.append(Told({name: each.bytes for name, each in counters.items()}, routed, log))
        runtime.groups.close()
    return found


def each_alone(x: Tensor, weights: Any, biases: Any = None, *, tp: Any) -> tuple[Tensor, ...]:
    """A fault: the same values, and the sequence is gathered for each weight."""
    return tuple(
        linear.column(x, weight, bias, tp=tp)
        for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
    )


# --- bytes --------------------------------------------------------------------------------------


def told_of(names: list[str], folder: Path, **given: Any) -> dict[str, dict[int, Told]]:
    (size,) = {CASES[name].cell.world_size for name in names}
    ended = workers.run(play, range(size), names=names, folder=folder, within_s=150, **given)
    ranks = workers.values(ended)
    return {name: {rank: ranks[rank][i] for rank in ranks} for i, name in enumerate(names)}


@pytest.fixture(scope="module", params=sorted({case.cell.world_size for case in CASES.values()}))
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ranks told of all cases of one number of ranks."""
    names = [name for name, case in CASES.items() if case.cell.world_size == request.param]
    return told_of(names, tmp_path_factory.mktemp("traffic"))


def routed_of(told: Mapping[int, Told]) -> dict[tuple[int, int, int], list[int]]:
    return {(*at, rank): sizes for rank, each in told.items() for at, sizes in each.routed.items()}


def check_bytes(name: str, told: Mapping[int, Told]) -> None:
    predicted = CASES[name].predicted(routed_of(told))
    assert predicted.exact
    for rank, each in told.items():
        counted = {group: size for group, size in each.bytes.items() if size}
        assert counted == predicted.by_group(rank), f"{name}, rank {rank}\n{predicted}"


def test_every_byte_of_a_step_is_in_the_formulas(played: dict[str, dict[int, Told]]) -> None:
    for name, told in played.items():
        check_bytes(name, told)
        total = sum(sum(each.bytes.values()) for each in told.values())
        assert total > 10_000
        print(f"{name}: {total:,} bytes from {len(told)} ranks")


def test_what_experts_send_is_expected_about_as_it_comes(played: dict[str, dict[int, Told]]) -> None:
    """Without what routers chose it is an expectation, and says so; with one rank of experts it is exact."""
    for name, told in played.items():
        case = CASES[name]
        expected, real = case.predicted(), case.predicted(routed_of(told))
        assert expected.exact == (case.cell.ep == 1)
        for rank in told:
            wanted, got = real.by_part(rank), expected.by_part(rank)
            some, other = (each.pop("experts", 0) for each in (wanted, got))
            assert wanted == got
            assert some == other if expected.exact else abs(some - other) < 0.35 * some, (name, some, other)


def test_cases_have_every_part_and_every_group() -> None:
    found = [each.sent for each in (case.predicted() for case in CASES.values())]
    keys = {key for sent in found for of in sent.values() for key in of}
    assert {part for part, _ in keys} == set(PARTS[2:])  # what shares send is in test_train_costs.py
    # Those of the same ranks as another one are called by the other one's name.
    assert {group for _, group in keys} >= {
        "tp",
        "cp",
        "dp",
        "pp",
        "ep",
        "etp",
        "document",
        "replicas",
        "all",
    }


def test_a_gather_too_many_is_seen(tmp_path: Path) -> None:
    told = told_of(["tp2"], tmp_path, wasteful=True)["tp2"]
    with pytest.raises(AssertionError, match="tp2, rank"):
        check_bytes("tp2", told)
    predicted = CASES["tp2"].predicted().by_group(0)
    assert told[0].bytes["tp"] > predicted["tp"]
    del told[0].bytes["tp"], predicted["tp"]
    assert {group: size for group, size in told[0].bytes.items() if size} == predicted


def test_batches_of_other_degrees_and_missing_routes_are_refused() -> None:
    layout = SequenceLayout((8, 5), "thd", tp=2)
    for batches in ([], [[layout], [layout, layout]], [[layout], [SequenceLayout((8,), "thd")]]):
        with pytest.raises(PlanError, match="equally many microbatches"):
            traffic(CONFIG, Parallel(tp=2, dp=2), batches, sharded=False)
    with pytest.raises(PlanError, match="where its tokens go"):
        traffic(CONFIG, Parallel(tp=2, dp=2, ep=2), [[layout], [layout]], sharded=False, routed={})


# --- who waits ----------------------------------------------------------------------------------


def replayed(logs: list[Log]) -> tuple[int, list[int]]:
    """How long stages take, and how long each waits, if a pass forward takes 1 and back takes 2.

    From what stages did: each waits in ``take`` for what another one had when it called ``give``.
    """
    clocks, waits, at, busy = [0] * len(logs), [0] * len(logs), [0] * len(logs), [0] * len(logs)
    ready: dict[tuple[Any, ...], int] = {}
    while any(done < len(log) for done, log in zip(at, logs, strict=True)):
        before = list(at)
        for stage, log in enumerate(logs):
            while at[stage] < len(log):
                what, *rest = log[at[stage]]
                if what == "take":
                    if tuple(rest) not in ready:
                        break
                    wait = max(0, ready[tuple(rest)] - clocks[stage])
                    clocks[stage] += wait
                    waits[stage] += wait
                    busy[stage] += 1
                elif what == "give":
                    ready[tuple(rest)] = clocks[stage]
                else:
                    clocks[stage] += rest[0]
                at[stage] += 1
        assert at != before, "stages wait in a ring"
    assert all(busy), "a stage took nothing"
    return max(clocks), [wait + max(clocks) - clock for wait, clock in zip(waits, clocks, strict=True)]


def in_order(log: Log) -> Log:
    """A log with the work of each action behind what it takes, and before what it gives."""
    found: Log = []
    for entry in log:
        if entry[0] == "take" and found and found[-1][0] == "do":
            found.insert(-1, entry)
        else:
            found.append(entry)
    return found


def test_stages_wait_as_long_as_the_plan_says(played: dict[str, dict[int, Told]]) -> None:
    seen = 0
    for name, told in played.items():
        case, mesh = CASES[name].cell, parallel_of(CASES[name].cell).mesh
        if case.pp == 1:
            continue
        stages = mesh.group(0, "pp")
        span, idle = replayed([in_order(told[rank].log) for rank in stages])
        kind = "interleaved" if case.vp > 1 else "1f1b"
        plan = plan_pipeline(kind, stages=case.pp, virtual=case.vp, microbatches=len(batches_of(case, 0)))
        assert span == plan.makespan
        assert [wait / span for wait in idle] == pytest.approx([plan.bubble] * case.pp, abs=1e-12)
        print(f"{name}: {span} passes, of which stages wait {idle}, bubble {plan.bubble:.3f}")
        seen += 1
    assert seen == sum(CASES[name].cell.pp > 1 for name in played)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("lengths", [(96,), (48, 17, 5), (3, 0, 31, 64)])
def test_work_is_what_blocks_compute(lengths: tuple[int, ...], order: str) -> None:
    """Pairs of the blocks that a rank computes, all ranks' keys together, against ``imbalance``."""
    for cp in (2, 3, 4):
        layout = SequenceLayout(lengths, "thd", cp=cp, order=order)
        pairs = []
        for rank in range(cp):
            pairs.append(0)
            for source in range(cp):
                for block in blocks(layout, rank, source):
                    queries, keys = (stop - start for start, stop in (block.queries, block.keys))
                    pairs[-1] += queries * (queries + 1) // 2 if block.causal else queries * keys
        assert sum(pairs) == sum(n * (n + 1) // 2 for n in lengths)
        assert imbalance([layout]) == pytest.approx(max(pairs) * cp / sum(pairs), rel=1e-12)
        divides = all(n % (2 * cp) == 0 for n in lengths)
        if divides and order == "zigzag":
            assert imbalance([layout]) == 1.0
        if divides and order == "contiguous":  # the last part of a document sees all before it
            (n,) = lengths
            part = n // cp
            assert max(pairs) == part * (n - part) + part * (part + 1) // 2


@pytest.mark.parametrize(
    "batch", [{"microbatch": 3}, {"tokens": 50}, {"tokens": 5}, {"tokens": 64, "form": "bshd"}]
)
def test_a_full_step_is_what_a_loader_makes_of_full_documents(batch: dict[str, Any]) -> None:
    said = {
        "model": {"path": "a"},
        "data": {"train": "a"},
        "parallel": {"dp": 2, "cp": 2, "tp": 2},
        "batch": {"documents": 14, "sequence_length": 15, **batch},
    }
    config, wrong = read(TrainConfig, said)
    assert config is not None and not wrong
    tokens = Tokens(np.zeros(15 * 14, np.int64), np.arange(1, 15) * 15)
    loader = Loader(
        Parts(tokens, sequence_length=15),
        documents=14,
        microbatch=config.batch.microbatch,
        slots=config.batch.tokens,
        dp=2,
        dp_rank=1,
        form=config.batch.form,
        cp=2,
        tp=2,
    )
    assert full_step(config) == [batch.layout for batch in loader.step(0)]
