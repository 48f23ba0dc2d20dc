"""Public reports about groups of the wrong grid, each with its numbers, answered by plans and by ranks.

What a report says of one model is tried on a grid that lies beside others in one world: `on_grids` gives the
ranks 2 and up a model under test, ranks 0 to 3 a second grid, and to all of them a third. So each test says
too that the groups of a grid are those of its own ranks: all of it runs under `guard`.

| report | what went wrong | right | wrong | test |
|---|---|---|---|---|
| Megatron #5916, #6470 | experts left out of the norm | sqrt(3), 3 zeros | sqrt(2), 2 | `..._5916_...` |
| radixark #80 | the same in a step, clipped too little | 0.0814635 | 0.0868546 | `..._80_...` |
| Megatron #6099 | biases of experts, under Muon | sqrt(N) | | `..._6099_...` |
| Megatron #6080 | expert gradients over dense data ranks | sqrt(N) | | `..._6080_...` |
| Megatron #7359 | replicas of shares counted | sqrt(n) | times 2.8284 | `..._7359_...` |
| Megatron #7160, #7165 | expert gradients times GTP | 1 | 4 | `..._7160_...` |
| Megatron #6888 | replica numbers of a tied embedding | 0 to n - 1 | | `..._6888_...` |
| Bridge #5862, #6102, Megatron #6775 | two writers, or none | one | | `..._5862_...`, b105 of shares |
| Bridge #4985 | other groups under one number | 4 and 6 | 5 | `..._4985_...` |
| Bridge #5555 | scales of two modules | 4.0, 200.0 | 1.0, 800.0 | `test_train_vision_language.py` in `dist` |
| Megatron #5285, `random.py` | seeds by the rank of another grid | alike in dp | not | `..._5285_...` |
| Megatron #4967, #6293 | `hasattr` of what is not set | an error | None | `..._4967_...` |
| Megatron #6293 | a count in the place of a group | refused | | `..._6293_...` |
| Megatron #7227, #7228 | a tied weight counted twice | 28.284 | 40 | `..._7227_...` |
| Megatron #6660 | sums over a group of one rank | times 1 | times 2**N | `..._6660_...` |
| pytorch #67600, #67639 | a rank outside a group goes on | refused | | `..._67600_...` |
| Megatron #6307 | groups of the wrong grid, and nothing raises | as one process | | `..._6307_...` |
| (none) | bridges that do not divide | intervals | ValueError | `test_bridges_...` |
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

# Ranks are those of tests/dist, and processes import this file by its name.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

import grid_ends
import train_matrix
import worlds
from train_cells import Cell
from train_ranks import CONFIG, assembled, full_weights, parallel_of

from shardweave.errors import GeometryError, ShardweaveError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, even, replicated, whole
from shardweave.plan import plan as plan_moves
from shardweave.store.native_agree import entry_of
from shardweave.store.native_elect import elect
from shardweave.testing.guard import guard
from shardweave.testing.world import run_world
from shardweave.train import collectives
from shardweave.train.arrays import held_arrays
from shardweave.train.checkpoint import weights_of
from shardweave.train.collectives import sum_all
from shardweave.train.gradients import measure, sum_gradients
from shardweave.train.grid import GRID, Group, GroupPlan, Groups, Over, plan_groups
from shardweave.train.muon import Muon
from shardweave.train.optimizer import AdamW, Optimizer, muon_for_matrices
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import ReducePlan, reduce_plan
from shardweave.train.runtime import begun, build, group_plan, layout_of

HERE, BESIDE, OVER_ALL = grid_ends.HERE, grid_ends.BESIDE, "over all"
OFFSET = 2
NUMEL = sum(weight.numel() for weight in full_weights(CONFIG, torch.float64).values())


def of(**degrees: Any) -> Parallel:
    """The degrees of a model that begins at rank 2."""
    return Parallel(offset=OFFSET, **degrees)


def three_grids(parallel: Parallel) -> GroupPlan:
    """A model, a grid that overlaps with it in part, and one that has all ranks."""
    beside = Mesh((("tp", 2), ("dp", 2)))
    everybody = Mesh((("tp", max(beside.size, parallel.mesh.ranks.stop)),))
    names = {"tp": ("tp",), "dp": ("dp",)}
    return plan_groups(
        {OVER_ALL: everybody, HERE: parallel.mesh, BESIDE: beside},
        {OVER_ALL: {"tp": ("tp",)}, HERE: parallel.groups, BESIDE: names},
    )


def on_grids(work: Callable[[Groups], Any], parallel: Parallel) -> dict[int, Any]:
    """What each rank of the model's grid comes to, and may use no group of another one for."""

    def live(groups: Groups) -> Any:
        if not groups.member(HERE):
            return None
        with guard(groups.of(HERE)):
            return work(groups.of(HERE))

    found = run_world(live, plan=three_grids(parallel), timeout_s=100)
    return {rank: found[rank] for rank in parallel.mesh.ranks}


def only(found: Mapping[int, Any]) -> Any:
    """What all ranks say, to the bit."""
    first, *others = found.values()
    assert all(other == first for other in others), found
    return first


def first_holders(plan: ReducePlan, value: float = 1.0) -> dict[str, Any]:
    """Gradients whose sum is a value everywhere: the first holder of each array has it."""
    return {
        name: torch.full(each.held.shape, value, dtype=torch.float64)
        if plan.rank == min(*each.over, *each.ends)
        else None
        for name, each in plan.arrays.items()
    }


# --- norms --------------------------------------------------------------------------------------


def scalars(parallel: Parallel) -> Layout:
    """One scalar that all ranks hold, and an expert's on each."""
    experts = Tensor("experts.{expert}", (), "float64", (("expert", whole(parallel.ep)),))
    held = along(parallel.mesh, "ep", lambda r: even(whole(parallel.ep), parallel.ep, r))
    rules = (
        BufferRule("dense", (Part(Tensor("dense", (), "float64")),), ()),
        BufferRule("experts", (Part(experts),), (held,), stacked=(0,)),
    )
    return Layout("scalars", parallel.mesh, rules)


def of_dense_rank_0(plan: ReducePlan, bucket: Any) -> bool:
    """The mistake: what dense tensor rank 0 does not hold is taken for a replica."""
    is_dense = all("experts" not in held.name for held in bucket.arrays)
    return is_dense or plan.layout.mesh.coordinate(plan.rank)["tp"] == 0


@pytest.mark.parametrize(
    ("degree", "norm", "wrong"), [(2, 1.7320508, 1.4142136), (4, 2.2360680, 1.4142136)], ids=["tp2", "tp4"]
)
def test_megatron_5916_6470_experts_of_every_rank_are_in_the_norm(
    degree: int, norm: float, wrong: float
) -> None:
    """TP = EP, ETP 1: a dense scalar, and an expert's of each rank, with gradients of 1, then of 0."""
    parallel = of(tp=degree, ep=degree)

    def work(groups: Groups) -> Any:
        plan = reduce_plan(scalars(parallel), groups.rank)
        ones, zeros = (sum_gradients(first_holders(plan, value), plan, groups) for value in (1.0, 0.0))
        return measure(ones, groups), measure(zeros, groups)

    (measured, none), (of_zeros, zeros) = only(on_grids(work, parallel))
    assert measured == pytest.approx(norm, abs=5e-8) and measured == pytest.approx(
        math.sqrt(degree + 1), rel=1e-15
    )
    assert (none, of_zeros, zeros) == (0, 0.0, degree + 1)
    with patch.object(ReducePlan, "counts", of_dense_rank_0):
        (measured, _), (_, zeros) = only(on_grids(work, parallel))
    assert measured == pytest.approx(wrong, abs=5e-8) and zeros == 2


def test_radixark_80_the_clip_coefficient_is_that_of_all_experts() -> None:
    """11.5135 without the experts of the other ranks, 12.2754 with them: 6.62 % of a clip to 1."""
    parallel = of(tp=2, ep=2)
    norm, wrong = 12.2754343246, 11.5135000849
    dense = 3.0
    of_experts = [math.sqrt(wrong**2 - dense**2), math.sqrt(norm**2 - wrong**2)]

    def work(groups: Groups) -> Any:
        plan = reduce_plan(scalars(parallel), groups.rank)
        at = parallel.mesh.coordinate(groups.rank)["ep"]
        grads = {
            "dense": torch.tensor(dense if at == 0 else 0.0, dtype=torch.float64),
            "experts": torch.tensor([of_experts[at]], dtype=torch.float64),
        }
        weights = {name: torch.ones_like(grad) for name, grad in grads.items()}
        optimizer = Optimizer(
            weights,
            plan=plan,
            groups=groups,
            settings=lambda name, shape: AdamW(beta1=0.5, weight_decay=0.0),
            sharded=False,
            max_norm=1.0,
        )
        done = optimizer.step(grads)
        first = next(
            one.values.item()
            for one in optimizer.states()
            if one.state == "exp_avg" and one.held.name != "dense"
        )
        return done.grad_norm, first / 0.5 / of_experts[at]

    found = on_grids(work, parallel)
    for measured, coefficient in found.values():
        assert measured == pytest.approx(norm, rel=1e-11)
        assert coefficient == pytest.approx(0.0814635, abs=5e-8)
    with patch.object(ReducePlan, "counts", of_dense_rank_0):
        found = on_grids(work, parallel)
    for measured, coefficient in found.values():
        assert measured == pytest.approx(wrong, rel=1e-11)
        assert coefficient == pytest.approx(0.0868546, abs=5e-8)
        assert coefficient / 0.0814635 - 1 == pytest.approx(0.0662, abs=5e-5)


def with_biases(parallel: Parallel) -> tuple[Layout, int]:
    """Matrices and biases, of experts and dense, and how many elements they have."""
    mesh, experts = parallel.mesh, (("expert", whole(4)),)
    held = along(mesh, "ep", lambda r: even(whole(4), parallel.ep, r))
    rows = along(mesh, "tp", lambda r: even(whole(12), parallel.tp, r))
    columns = along(mesh, "etp", lambda r: even(whole(8), parallel.etp, r))
    up = Tensor("mlp.experts.{expert}.up_proj.weight", (8, 6), "float64", experts)
    bias = Tensor("mlp.experts.{expert}.down_proj.bias", (5,), "float64", experts)
    q = Tensor("self_attn.q_proj.weight", (12, 6), "float64")
    o = Tensor("self_attn.o_proj.bias", (7,), "float64")
    rules = (
        BufferRule("mlp.experts.up_proj.weight", (Part(up),), (held, columns, whole(6)), stacked=(0, 1, 2)),
        BufferRule("mlp.experts.down_proj.bias", (Part(bias),), (held, whole(5)), stacked=(0, 1)),
        BufferRule(q.name, (Part(q),), (rows, whole(6))),
        BufferRule(o.name, (Part(o),), (whole(7),)),
    )
    return Layout("biases", mesh, rules), 4 * 8 * 6 + 4 * 5 + 12 * 6 + 7


@pytest.mark.parametrize("parallel", [of(tp=2, ep=2), of(tp=2, dp=2, ep=4), of(tp=4, ep=2, etp=2)])
def test_megatron_6099_biases_of_experts_under_muon_where_etp_is_not_tp(parallel: Parallel) -> None:
    """The optimizer's own norm, of matrices and of what only has biases."""
    layout, numel = with_biases(parallel)

    def work(groups: Groups) -> Any:
        plan = reduce_plan(layout, groups.rank)
        arrays = {
            name: torch.ones(each.held.shape, dtype=torch.float64) for name, each in plan.arrays.items()
        }
        optimizer = Optimizer(
            arrays, plan=plan, groups=groups, settings=muon_for_matrices(Muon(), AdamW()), sharded=True
        )
        grads = first_holders(plan)
        biases = {name: grad if name.endswith("bias") else None for name, grad in grads.items()}
        return optimizer.step(grads)[:2], optimizer.step(biases)[:2]

    for (ok, norm), (still, of_biases) in on_grids(work, parallel).values():
        assert ok and norm == pytest.approx(math.sqrt(numel), rel=1e-14)
        assert still and of_biases == pytest.approx(math.sqrt(4 * 5 + 7), rel=1e-14)


TOPOLOGIES = {
    "ep1": of(tp=2, dp=3),
    "ep = tp": of(tp=4, ep=4),
    "ep = etp = tp": of(tp=2, dp=2, ep=2, etp=2),
    "cp, ep over two of three": of(tp=2, cp=3, ep=2),
    "remat, not of experts": of(remat=4, ep=2),
    "eremat beside it": of(tp=2, remat=4, ep=2, eremat=2),
    "eremat alone": of(cp=2, dp=2, eremat=4),
    "all over dp": of(cp=2, dp=3, ep=2, weight_axes=("dp",)),
    "folded cp": of(cp=2, remat=2, ep=2, weight_axes=("cp", "remat")),
    "stages": of(tp=2, pp=3, ep=2),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_megatron_6080_all_ones_are_the_root_of_the_number_of_elements(name: str) -> None:
    """A qwen3_moe of 8 experts; on any topology its elements count once, whole or in shares."""
    parallel = TOPOLOGIES[name]
    layout = layout_of(CONFIG, parallel)

    def work(groups: Groups) -> Any:
        plan = reduce_plan(layout, groups.rank)
        found = [sum_gradients(first_holders(plan), plan, groups, sharded=each) for each in (False, True)]
        return [measure(one, groups) for one in found]

    whole_one, parts = only(on_grids(work, parallel))
    assert whole_one == parts == (pytest.approx(math.sqrt(NUMEL), rel=1e-14), 0)


def test_megatron_7359_replicas_of_what_nobody_shares_count_once() -> None:
    """Ones in the norms alone, which eight ranks of remat hold: sqrt(n), and not sqrt(8) as much."""
    parallel = of(remat=8)
    layout = layout_of(CONFIG, parallel)
    weights = full_weights(CONFIG, torch.float64)
    numel = sum(weight.numel() for weight in weights.values() if weight.dim() == 1)

    def work(groups: Groups) -> Any:
        plan = reduce_plan(layout, groups.rank)
        grads = {
            name: grad if grad is not None and grad.dim() == 1 else None
            for name, grad in first_holders(plan).items()
        }
        return measure(sum_gradients(grads, plan, groups), groups)

    norm, zeros = only(on_grids(work, parallel))
    assert norm == pytest.approx(math.sqrt(numel), rel=1e-14) and zeros == NUMEL - numel
    with patch.object(ReducePlan, "own", lambda plan, bucket: (0, bucket.numel)):
        wrong, _ = only(on_grids(work, parallel))
    assert wrong / norm == pytest.approx(2.8284, abs=5e-5)


def of_tied(parallel: Parallel) -> Layout:
    """800 elements, on the first stage and on the last."""
    embed = Tensor("embed", (40, 20), "float64")
    rows = along(parallel.mesh, "tp", lambda r: even(whole(40), parallel.tp, r))
    first, *last = (
        BufferRule("embed", (Part(embed),), (rows, whole(20)), where=(("pp", (stage,)),))
        for stage in sorted({0, parallel.pp - 1})
    )
    return Layout("tied", parallel.mesh, (first, *map(replicated, last)))


@pytest.mark.parametrize("parallel", [of(pp=2), of(pp=2, dp=2), of(tp=2, pp=3, cp=2)])
def test_megatron_7227_7228_a_tied_weight_counts_once(parallel: Parallel) -> None:
    """sqrt(800) = 28.284, and not the 40 of both stages."""
    layout = of_tied(parallel)

    def work(groups: Groups) -> Any:
        plan = reduce_plan(layout, groups.rank)
        return measure(sum_gradients(first_holders(plan), plan, groups), groups)

    assert only(on_grids(work, parallel)) == (pytest.approx(28.284271, abs=5e-7), 0)
    with patch.object(ReducePlan, "counts", lambda plan, bucket: True):
        assert only(on_grids(work, parallel))[0] == pytest.approx(40.0, rel=1e-14)


# --- sums ---------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("eremat", [1, 2])
def test_megatron_7160_7165_expert_gradients_where_only_dense_weights_are_shared(eremat: int) -> None:
    """GTP 4 beside EGTP 1 and 2: the gradients of experts are those of one process, not four times them."""
    cell = Cell(
        "thd", 1, 1, 1, 1, 2, 1, 1, True, "prompt", "ragged", "ring", remat=4, eremat=eremat, layers=3
    )
    true = train_matrix.truth(cell)
    told = train_matrix.in_memory(cell, "float64")
    got = assembled({rank: each.grads for rank, each in told.items()})
    ratios = {
        name: (got[name].norm() / grad.norm()).item()
        for name, grad in true.grads.items()
        if ".experts." in name and grad.norm() > 1e-3
    }
    assert len(ratios) > 20
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=1e-10)
    assert train_matrix.compare(cell, "float64", told, true).worst[0] <= 1e-12


@pytest.mark.dist
@pytest.mark.parametrize("over", [worlds.MEMORY, worlds.GLOO])
def test_bridge_4985_embedding_groups_sum_their_own_two_stages(over: str) -> None:
    """PP 2, DP 2, ranks with 1 to 4: 4 of the first pair, 6 of the second, never 5. Grids of their own."""
    found = worlds.ranks(grid_ends.ends, plan=grid_ends.plan(of(pp=2, dp=2)), over=over)
    assert found == {
        2: ((2, 4), 4.0),
        4: ((2, 4), 4.0),
        3: ((3, 5), 6.0),
        5: ((3, 5), 6.0),
    }


def test_megatron_6660_a_group_of_one_rank_changes_nothing() -> None:
    """DP 1: a gradient that is summed again and again is the same after N times, not 2**N as much."""
    parallel = of(tp=2)
    layout = of_tied(parallel)

    def work(groups: Groups) -> Any:
        plan = reduce_plan(layout, groups.rank)
        grads: dict[str, Any] = {"embed": torch.arange(400.0, dtype=torch.float64).view(20, 20)}
        for _ in range(10):
            grads = dict(sum_gradients(grads, plan, groups).arrays())
        return grads["embed"].sum().item()

    assert only(on_grids(work, parallel)) == 400 * 399 / 2


# --- replicas and writers -----------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [of(pp=2, dp=2, cp=2), of(pp=3, dp=3), of(tp=2, pp=2, dp=2)])
def test_megatron_6888_replicas_of_a_tied_embedding_are_numbered_once(parallel: Parallel) -> None:
    """On either stage the numbers over the group of dp and cp are exactly 0 to n - 1, and one writes."""
    layout, mesh = of_tied(parallel), parallel.mesh
    plans = {rank: reduce_plan(layout, rank) for rank in mesh.ranks if held_arrays(layout, rank).get("embed")}
    stages = {mesh.coordinate(rank)["pp"] for rank in plans}
    assert stages == {0, parallel.pp - 1}
    groups = group_plan(parallel)
    for rank, plan in plans.items():
        (bucket,) = plan.buckets
        data = groups.ranks(rank, GRID, "data")
        assert bucket.over == data
        numbers = [plans[other].buckets[0].over.index(other) for other in data]
        assert sorted(numbers) == list(range(len(data)))
        # The parts of the replicas are all of the array, each place once.
        stretches = [plans[other].own(plans[other].buckets[0]) for other in data]
        assert [start for start, _ in stretches] == [0, *(stop for _, stop in stretches[:-1])]
        assert stretches[-1][1] == bucket.numel
        # Of the two stages one stands for them.
        assert sorted(plans[other].counts(bucket) for other in bucket.ends) == [False, True]
    written: list[tuple[Any, Any]] = []
    held = [
        [
            entry_of(one)
            for one in weights_of(
                layout,
                rank,
                {name: torch.zeros(each.shape) for name, each in held_arrays(layout, rank).items()},
            )
        ]
        for rank in mesh.ranks
    ]
    for mine in elect(held):
        written += [(share.offset, share.size) for share in mine]
    assert sum(math.prod(size) for _, size in written) == 800 and len(set(written)) == len(written)


@pytest.mark.parametrize("parallel", [of(remat=2, dp=2), of(tp=2, remat=2, dp=2, ep=2)])
def test_bridge_5862_6102_megatron_6775_weights_have_exactly_one_writer(parallel: Parallel) -> None:
    """Replicas over dp and remat: one of them writes a norm; of a share, one of those that have this one."""
    layout = layout_of(CONFIG, parallel)
    held = [
        [entry_of(one) for one in weights_of(layout, rank, begun(layout, rank, config=CONFIG, seed=None))]
        for rank in layout.mesh.ranks
    ]
    writers: dict[str, set[int]] = {}
    boxes: dict[str, list[Any]] = {}
    shapes: dict[str, Any] = {}
    for rank, mine in zip(layout.mesh.ranks, elect(held), strict=True):
        for share in mine:
            entry = held[rank - OFFSET][share.entry]
            writers.setdefault(entry.key, set()).add(rank)
            boxes.setdefault(entry.key, []).append((share.offset, share.size))
            shapes[entry.key] = entry.shape
    assert sum(math.prod(shape) for shape in shapes.values()) == NUMEL
    for key, shape in shapes.items():
        seen = torch.zeros(shape, dtype=torch.int64)
        for offset, size in boxes[key]:
            seen[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))] += 1
        assert bool((seen == 1).all()), key
    assert len(writers["model/model.norm.weight"]) == 1
    # A matrix that is shared has a writer in each of the two parts.
    at = [layout.mesh.coordinate(rank)["remat"] for rank in writers["model/model.embed_tokens.weight"]]
    assert set(at) == {0, 1}


# --- random numbers -----------------------------------------------------------------------------


def test_megatron_5285_an_encoder_begins_by_its_own_coordinates() -> None:
    """TP 2 x DP 2 on the ranks of a TP 4 grid: replicas begin alike, and parts do not."""
    encoder, language = Parallel(tp=2, dp=2), Parallel(tp=4)
    plan = plan_groups(
        {"encoder": encoder.mesh, "language": language.mesh},
        {"encoder": encoder.groups, "language": language.groups},
    )
    # By the rank in the group of the other grid, as upstream had it, two replicas differ.
    by_own, by_other = (
        [2718 + mesh.coordinate(rank)["tp"] for rank in range(4)] for mesh in plan.grids.values()
    )
    assert (by_own, by_other) == ([2718, 2719, 2718, 2719], [2718, 2719, 2720, 2721])

    def work(groups: Groups) -> Any:
        with guard(groups.of("encoder")):
            runtime = build(CONFIG, parallel=encoder, groups=groups.of("encoder"), seed=3, dropout=0.1)
            return {name: weight.detach().clone() for name, weight in runtime.weights.items()}

    found = run_world(work, plan=plan)
    alone = begun(layout_of(CONFIG, Parallel()), 0, config=CONFIG, seed=3)
    layout = layout_of(CONFIG, encoder)
    num_cut = 0
    for name in found[0]:
        for a, b in plan.grids["encoder"].groups("dp"):
            assert torch.equal(found[a][name], found[b][name]), name
        is_cut = held_arrays(layout, 0)[name].shape != alone[name].shape
        num_cut += is_cut
        for a, b in plan.grids["encoder"].groups("tp"):
            assert torch.equal(found[a][name], found[b][name]) is not is_cut, name
    assert num_cut > 10
    for rank, mine in enumerate(found):
        for name, held in held_arrays(layout, rank).items():
            for part in held.parts:
                at = tuple(slice(r.start, r.stop) for r in part.box.dims)
                expert = part.name.partition(".experts.")[2].partition(".")[0]
                wanted = alone[name][int(expert)][at] if expert else alone[name][at]
                assert torch.equal(part.view(mine[name]), wanted), (rank, part.name)


# --- how groups are asked for -------------------------------------------------------------------


def test_megatron_4967_what_was_not_planned_is_an_error_and_no_none() -> None:
    """No attribute says that a group is there, none can be set beside the plan, and `None` is one thing."""
    plan = plan_groups(
        {"llm": Mesh((("tp", 2), ("pp", 3)))}, {"llm": {"tp": ("tp",), "ends": Over(("pp",), (0, -1))}}
    )
    groups = Groups(plan, 2, {})
    for name in ("tp", "ends", "tp_dp", "embd"):
        assert not hasattr(groups, name)
    assert groups.find("llm", "ends") is None  # planned, and this rank is not in it
    seen = groups.of("llm")
    for ask, grid in ((groups.find, "llm"), (groups.get, "llm"), (seen.find, GRID), (seen.get, GRID)):
        with pytest.raises(UnknownNameError, match=r"tp_dp is not among llm\.tp, llm\.ends"):
            ask(grid, "tp_dp")
    group = groups.get("llm", "tp")
    with pytest.raises((AttributeError, TypeError)):
        group.tp_dp = None  # type: ignore[attr-defined]
    # The default of what nobody set is not rank 0 of 1.
    assert not hasattr(group, "anything")


def test_megatron_6293_a_group_is_given_by_name() -> None:
    """A count of padding bound to a new group parameter. Here no position of an argument is a group's."""
    functions = [
        value
        for name, value in vars(collectives).items()
        if inspect.isfunction(value) and value.__module__ == collectives.__name__ and name[0] != "_"
    ]
    with_group = [one for one in functions if "group" in inspect.signature(one).parameters]
    assert len(with_group) >= 10
    for one in with_group:
        parameters = list(inspect.signature(one).parameters.values())
        group = inspect.signature(one).parameters["group"]
        assert group.annotation == "Group"
        if len(parameters) > 1:
            assert group.kind is inspect.Parameter.KEYWORD_ONLY, one.__name__
            assert group.default is inspect.Parameter.empty, "no group is nobody's group"
    with pytest.raises(TypeError):
        collectives.gather_parts(torch.ones(2), 3)  # type: ignore[misc]
    with pytest.raises(TypeError):
        collectives.sum_all(torch.ones(2))  # type: ignore[call-arg]


def test_pytorch_67600_67639_a_rank_outside_a_group_is_told_so() -> None:
    """A collective of a rank that is not in its group does not warn and go on."""

    def work(groups: Groups) -> str:
        group = groups.find("llm", "ends")
        if group is not None:
            sum_all(torch.ones(1), group=group)
            return "summed"
        try:
            sum_all(torch.ones(1), group=groups.get("llm", "ends"))
        except ShardweaveError as error:
            assert isinstance(error, GeometryError)
            return error.where
        return "went on"

    plan = plan_groups({"llm": Mesh((("pp", 3),))}, {"llm": {"ends": Over(("pp",), (0, -1))}})
    assert run_world(work, plan=plan) == ["summed", "rank 1, group llm.ends", "summed"]


# --- grids in one world -------------------------------------------------------------------------


def batch_on(ranks: int, offset: int, size: int) -> Layout:
    """The batch in equal intervals over data ranks."""
    mesh = Mesh((("dp", ranks),), offset=offset)
    samples = Tensor("samples", (size, 5), "float64")
    rows = along(mesh, "dp", lambda r: even(whole(size), ranks, r))
    return Layout("batch", mesh, (BufferRule("samples", (Part(samples),), (rows, whole(5))),))


@pytest.mark.parametrize(
    ("src", "dst", "size", "wanted"),
    [
        # Where the numbers divide, as upstream has it; and where upstream has a ValueError.
        (4, 2, 8, {0: {0: 2, 1: 2}, 1: {2: 2, 3: 2}}),
        (2, 4, 8, {0: {0: 2}, 1: {0: 2}, 2: {1: 2}, 3: {1: 2}}),
        (3, 2, 6, {0: {0: 2, 1: 1}, 1: {1: 1, 2: 2}}),
    ],
)
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_bridges_of_batches_of_three_ranks_on_two(
    src: int, dst: int, size: int, wanted: dict[int, dict[int, int]], offset: int
) -> None:
    """Which samples each destination has from whom, on the same ranks, on some of them, and on others."""
    found: dict[int, dict[int, int]] = {}
    for copy in plan_moves(batch_on(src, 0, size), batch_on(dst, offset, size)).copies():
        came = found.setdefault(copy.dst_rank - offset, {})
        came[copy.src_rank] = came.get(copy.src_rank, 0) + len(copy.elements.dims[0])
    assert found == wanted


TWO = {
    "policy": (Cell("thd", 2, 1, 2, 1, 2, 1, 1, True, "prompt", "ragged", "ring"), 0),
    "reference": (Cell("bshd", 1, 3, 2, 1, 2, 1, 1, False, "prompt", "ragged", "gather"), 2),
}
"""Four ranks from 0, six from 2: two of them are on both."""


@pytest.mark.timeout(240)
def test_megatron_6307_two_models_on_grids_that_overlap_in_part_equal_one_process() -> None:
    """Losses, gradients and two updates of each, where nothing may use a group of the other or of all."""
    true = {name: train_matrix.truth(cell) for name, (cell, _) in TWO.items()}
    degrees = {name: replace(parallel_of(cell), offset=offset) for name, (cell, offset) in TWO.items()}
    plan = plan_groups(
        {name: each.mesh for name, each in degrees.items()},
        {name: each.groups for name, each in degrees.items()},
    )

    def work(groups: Groups) -> dict[str, Any]:
        told = {}
        for name, (cell, _) in TWO.items():
            if not groups.member(name):
                continue
            with guard(groups.of(name)):
                config = train_matrix.config_of(cell)
                runtime = build(
                    config,
                    parallel=degrees[name],
                    groups=groups.of(name),
                    dtype="float64",
                    seed=None,
                    cp_method=cell.method,
                )
                told[name] = train_matrix.played(runtime, cell)
        return told

    found = run_world(work, plan=plan, timeout_s=200)
    assert [sorted(told) for told in found] == [["policy"]] * 2 + [["policy", "reference"]] * 2 + [
        ["reference"]
    ] * 4
    for name, (cell, _) in TWO.items():
        told = {rank: each[name] for rank, each in enumerate(found) if name in each}
        errors = train_matrix.compare(cell, "float64", told, true[name])
        print(errors)
        assert errors.worst[0] <= 1e-12, errors


def test_a_group_of_another_grid_is_refused_by_both_names() -> None:
    """An encoder's collective on the language model's group, which has other ranks, as upstream read it."""
    encoder, language = Parallel(tp=2, dp=2), Parallel(tp=4)
    plan = plan_groups(
        {"encoder": encoder.mesh, "language": language.mesh},
        {"encoder": encoder.groups, "language": language.groups},
    )

    def work(groups: Groups) -> tuple[float, str]:
        with guard(groups.of("encoder")):
            own = sum_all(torch.ones(1), group=groups.get("encoder", "tp")).item()
            wrong: Group = groups.get("language", "tp")
            with pytest.raises(GeometryError) as caught:
                sum_all(torch.ones(1), group=wrong)
            return own, caught.value.equation

    for own, said in run_world(work, plan=plan):
        assert own == 2.0
        assert said.startswith("group language.tp of ranks 0, 1, 2, 3 on grid language(tp=4,")
        assert "is not of grid encoder(tp=2," in said
