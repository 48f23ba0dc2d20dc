"""Gradients summed over ranks, against sums in numpy; and wrong sums brought back and caught.

Ranks are in memory, and those of some topologies processes over gloo.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import small_model
import torch
from small_model import TOPOLOGIES
from worlds import GLOO, ranks

from shardweave.errors import GapError, HolderError, OverlapError, PlanError, ReplicaError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, even, whole
from shardweave.train import reduction
from shardweave.train.gradients import (
    Gradients,
    check_replicas,
    count_zeros,
    grad_norm,
    measure,
    sum_gradients,
)
from shardweave.train.grid import Groups, plan_groups
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import ReducePlan, reduce_plan

NUM_ELEMENTS = sum(values.size for values in small_model.drawn(0).values())


# --- sums ---


def sums(groups: Groups, *, parallel: Parallel, grads: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Sums whole and in parts, and what is measured of both; with buckets so small that there are several."""
    plan = reduce_plan(small_model.layout(parallel), groups.rank, bucket_bytes=1500)
    mine = small_model.tensors(grads[groups.rank])
    whole_ones, parts = (sum_gradients(mine, plan, groups, sharded=sharded) for sharded in (False, True))
    check_replicas(whole_ones.arrays(), plan, groups)
    boxes = [
        (f.held.name, [slice(r.start, r.stop) for r in f.box.dims], part[f.places].view(f.box.shape).numpy())
        for bucket, part in zip(plan.buckets, parts.flats, strict=True)
        for f in bucket.fragments(*plan.own(bucket))
    ]
    return {
        "arrays": {name: array.numpy() for name, array in whole_ones.arrays().items()},
        "boxes": boxes,
        "measured": [measure(found, groups) for found in (whole_ones, parts)],
        "ones": [measure(ones(plan, groups, sharded=sharded), groups) for sharded in (False, True)],
        "size": len(plan.buckets),
    }


def ones(plan: ReducePlan, groups: Groups, *, sharded: bool) -> Gradients:
    """Summed gradients of all ones: the first holder of each array contributes them, the others nothing."""
    first = {name: min(min(each.over), min(each.ends)) for name, each in plan.arrays.items()}
    grads = {
        name: torch.ones(each.held.shape) if plan.rank == first[name] else None
        for name, each in plan.arrays.items()
    }
    return sum_gradients(grads, plan, groups, sharded=sharded)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_gradient_is_the_sum_over_its_holders(name: str) -> None:
    parallel = TOPOLOGIES[name]
    layout = small_model.layout(parallel)
    grads, total = small_model.contributions(layout)
    wanted = small_model.stored(layout, total, fill=0)  # what padding contributes, NaN, is gone
    plan, over = small_model.group_plan(parallel), small_model.OVER[name]
    found = ranks(sums, plan=plan, over=over, parallel=parallel, grads=grads)
    covered = {
        rank: {key: np.zeros(array.shape, int) for key, array in arrays.items()}
        for rank, arrays in wanted.items()
    }
    for rank, mine in found.items():
        assert mine["arrays"].keys() == wanted[rank].keys()
        for key, array in mine["arrays"].items():
            np.testing.assert_array_equal(array, wanted[rank][key], err_msg=f"rank {rank}, {key}")
        for key, box, values in mine["boxes"]:
            np.testing.assert_array_equal(
                values, wanted[rank][key][tuple(box)], err_msg=f"rank {rank}, {key}"
            )
            covered[rank][key][tuple(box)] += 1
    # Each place of an array is in the part of one of its replicas of a stage.
    for rank, arrays in covered.items():
        for key, each in reduce_plan(layout, rank).arrays.items():
            np.testing.assert_array_equal(sum(covered[other][key] for other in each.over), 1)
        assert arrays.keys() == wanted[rank].keys()
    flat = np.concatenate([values.reshape(-1) for values in total.values()])
    # Whole or in parts, and on every rank, it is one number, to the bit.
    ((norm, zeros),) = {one for mine in found.values() for one in mine["measured"]}
    assert norm == pytest.approx(np.linalg.norm(flat), rel=1e-15)
    assert zeros == np.count_nonzero(flat == 0) > 0
    ((norm, zeros),) = {one for mine in found.values() for one in mine["ones"]}
    assert norm == pytest.approx(math.sqrt(NUM_ELEMENTS), rel=1e-15)
    assert zeros == 0
    assert min(mine["size"] for mine in found.values()) > 1, "several buckets"


def norm_of_ones(groups: Groups, *, parallel: Parallel) -> float:
    plan = reduce_plan(small_model.layout(parallel), groups.rank)
    return grad_norm(ones(plan, groups, sharded=True), groups)


FAULTS: dict[str, Any] = {
    # "the norm omits experts": what dense tensor rank 0 does not have is taken for a replica
    "experts by the dense rank": lambda plan, bucket: (
        all("experts" not in held.name for held in bucket.arrays)
        or plan.layout.mesh.coordinate(plan.rank)["tp"] == 0
    ),
    "tied twice": lambda plan, bucket: True,
}


@pytest.mark.parametrize(
    ("fault", "name"), [("experts by the dense rank", "tp2 ep2 etp1"), ("tied twice", "dp3 pp2, tied")]
)
def test_a_wrong_count_is_seen_by_ones(fault: str, name: str) -> None:
    parallel = TOPOLOGIES[name]
    with patch.object(ReducePlan, "counts", FAULTS[fault]):  # once for all ranks, which are threads
        found = ranks(norm_of_ones, plan=small_model.group_plan(parallel), parallel=parallel)
    assert all(abs(norm - math.sqrt(NUM_ELEMENTS)) > 0.1 for norm in found.values())


# --- the numbers of the public reports ---


def scalars(parallel: Parallel, num_experts: int) -> Layout:
    """One dense scalar that all have, and an expert scalar for each rank."""
    mesh = parallel.mesh
    dense = Tensor("dense", (), "float64")
    experts = Tensor("experts.{expert}", (), "float64", (("expert", whole(num_experts)),))
    held = along(mesh, "ep", lambda r: even(whole(num_experts), parallel.ep, r))
    return Layout(
        "scalars",
        mesh,
        (BufferRule("dense", (Part(dense),), ()), BufferRule("experts.{expert}", (Part(experts),), (held,))),
    )


def scalar_norm(groups: Groups, *, parallel: Parallel, value: float) -> tuple[float, int]:
    plan = reduce_plan(scalars(parallel, parallel.ep), groups.rank)
    grads = {name: torch.full((), value, dtype=torch.float64) for name in plan.arrays}
    if groups.rank:
        grads["dense"] = None
    found = sum_gradients(grads, plan, groups)
    return grad_norm(found, groups), count_zeros(found, groups)


@pytest.mark.parametrize(
    ("degree", "value", "fault", "norm", "zeros"),
    [
        (2, 1.0, False, math.sqrt(3), 0),
        (4, 1.0, False, math.sqrt(5), 0),
        (2, 0.0, False, 0.0, 3),
        (2, 1.0, True, math.sqrt(2), 0),
        (4, 1.0, True, math.sqrt(2), 0),
        (2, 0.0, True, 0.0, 2),
    ],
)
def test_megatron_5916_experts_are_in_the_norm(
    degree: int, value: float, fault: bool, norm: float, zeros: int
) -> None:
    """TP = EP, ETP 1: sqrt(3), not sqrt(2), and three zeros, not two; the fault gives what was reported."""
    parallel = Parallel(tp=degree, ep=degree)
    counts = FAULTS["experts by the dense rank"] if fault else ReducePlan.counts
    with patch.object(ReducePlan, "counts", counts):
        found = ranks(scalar_norm, plan=small_model.group_plan(parallel), parallel=parallel, value=value)
    for got, num_zeros in found.values():
        assert got == pytest.approx(norm, rel=1e-15)
        assert num_zeros == zeros


# --- faults of plans ---


def without(*axes: str) -> Any:
    """Replicas as they are found by one who does not know of some axes."""
    right = reduction._replicas

    def replicas(layout: Layout, rule: BufferRule, rank: int) -> tuple[int, ...]:
        mine = layout.mesh.coordinate(rank)
        ranks = right(layout, rule, rank)
        return tuple(r for r in ranks if all(layout.mesh.coordinate(r)[axis] == mine[axis] for axis in axes))

    return replicas


def dense_for_experts(layout: Layout, rule: BufferRule, rank: int) -> tuple[int, ...]:
    """Experts summed over the data ranks of dense weights."""
    mine = layout.mesh.coordinate(rank)
    axes = ("tp", "pp") if "ep" in rule.axes else rule.axes
    return tuple(layout.mesh.where({axis: mine[axis] for axis in axes}).tolist())


@pytest.mark.parametrize(
    ("parallel", "wrong", "error"),
    [
        (Parallel(cp=2, dp=2), without("cp"), GapError),  # fault 3: divided by dp * cp, summed over dp
        (Parallel(dp=2, cp=4), without("dp"), GapError),
        (Parallel(dp=4, ep=2), dense_for_experts, HolderError),  # fault 14: ranks with other experts
        (Parallel(tp=2, dp=2, ep=4), dense_for_experts, HolderError),
        (Parallel(tp=2, dp=2), dense_for_experts, GapError),  # ETP 1 beside TP 2: too few
        (Parallel(tp=2), without("tp"), GapError),  # fault 15: norms, over tp
        (Parallel(cp=2, ep=2), lambda layout, rule, rank: tuple(layout.mesh.ranks), HolderError),
    ],
)
def test_faults_3_14_15_a_wrong_plan_is_refused(
    parallel: Parallel, wrong: Any, error: type[Exception]
) -> None:
    layout = small_model.layout(parallel)
    for rank in layout.mesh.ranks:
        reduce_plan(layout, rank)
    with patch.object(reduction, "_replicas", wrong), pytest.raises(error) as caught:
        for rank in layout.mesh.ranks:
            reduce_plan(layout, rank)
    assert "summed over" in str(caught.value)


def test_a_tied_embedding_without_its_other_stage_is_refused() -> None:
    layout = small_model.layout(Parallel(pp=2, dp=2))
    right = reduction._places

    def alone(*args: Any) -> Any:
        return {rank: rule for rank, rule in right(*args).items() if rank == args[-1]}

    with patch.object(reduction, "_places", alone), pytest.raises(GapError, match="embed"):
        reduce_plan(layout, 0)


def partial(groups: Groups, *, parallel: Parallel, grads: dict[int, Any]) -> str:
    """Sums over dp only, that nobody proves: replicas then differ."""
    rank, layout = groups.rank, small_model.layout(parallel)
    with patch.object(reduction, "_replicas", without("cp")), patch.object(reduction, "_prove"):
        wrong = reduce_plan(layout, rank)
    found = sum_gradients(small_model.tensors(grads[rank]), wrong, groups).arrays()
    try:
        check_replicas(found, reduce_plan(layout, rank), groups)
    except ReplicaError as error:
        return str(error)
    return ""


def test_fault_15_replicas_that_differ_are_seen_on_every_rank() -> None:
    parallel = Parallel(cp=2, dp=2)
    grads, _ = small_model.contributions(small_model.layout(parallel))
    # Each rank patches its own plan: processes.
    plan = small_model.group_plan(parallel)
    found = ranks(partial, plan=plan, over=GLOO, parallel=parallel, grads=grads)
    assert all("replicas hold the same bytes" in text and "rank" in text for text in found.values())
    assert len(set(found.values())) == 1


def dp_cp_alike(groups: Groups, *, parallel: Parallel, grads: dict[int, Any]) -> Any:
    plan = reduce_plan(small_model.layout(parallel), groups.rank)
    found = sum_gradients(small_model.tensors(grads[groups.rank]), plan, groups)
    return {name: array.numpy() for name, array in found.arrays().items()}


def test_fault_3_dp2_cp4_is_dp8() -> None:
    found = []
    for parallel in (Parallel(dp=2, cp=4), Parallel(dp=8)):
        grads, _ = small_model.contributions(small_model.layout(parallel))
        plan = small_model.group_plan(parallel)
        found.append(ranks(dp_cp_alike, plan=plan, parallel=parallel, grads=grads))
    for rank, arrays in found[0].items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, found[1][rank][name])


# --- refusals, and other dtypes ---


def test_copies_within_an_axis_that_cuts_are_refused() -> None:
    """KV heads repeated over tensor ranks would need a sum that the rule does not speak of."""
    mesh = Mesh((("tp", 4),))
    k = Tensor("k", (6, 5), "float32")
    rows = along(mesh, "tp", lambda r: even(whole(6), 2, r // 2))
    layout = Layout("repeated", mesh, (BufferRule("k", (Part(k, replica=True),), (rows, whole(5))),))
    with pytest.raises(GapError, match=r"held by ranks 0, 1, summed over rank 0"):
        reduce_plan(layout, 0)


def test_parts_that_overlap_are_refused() -> None:
    mesh = Mesh((("tp", 2),))
    w = Tensor("w", (6, 5), "float32")
    rows = along(mesh, "tp", lambda r: (whole(6), even(whole(6), 2, 1))[r])
    layout = Layout("overlapping", mesh, (BufferRule("w", (Part(w, replica=True),), (rows, whole(5))),))
    with pytest.raises(OverlapError, match="other parts"):
        reduce_plan(layout, 0)


def alone(layout: Layout, names: dict[str, Any] | None = None) -> tuple[ReducePlan, Groups]:
    plan = reduce_plan(layout, 0)
    return plan, Groups(plan_groups({"model": layout.mesh}, {"model": names or {}}), 0, {})


def test_what_is_not_of_the_rank_is_refused() -> None:
    plan, groups = alone(small_model.layout(Parallel()))
    with pytest.raises(UnknownNameError, match=r"layers\.9\.q"):
        sum_gradients({"layers.9.q": None}, plan, groups)
    with pytest.raises(PlanError, match=r"shape\(6, 12\) != shape\(12, 6\)"):
        sum_gradients({"layers.1.q": torch.zeros(6, 12)}, plan, groups)
    with pytest.raises(PlanError, match="whole gradients"):
        Gradients(plan, (), sharded=True).arrays()


def test_ranks_without_a_group_are_named() -> None:
    plan, groups = alone(small_model.layout(Parallel(dp=2)), {"tp": ("tp",)})
    with pytest.raises(UnknownNameError, match=r"ranks 0, 1 are no group of model"):
        sum_gradients({}, plan, groups)


def narrow(groups: Groups, *, parallel: Parallel, wide: bool) -> tuple[str, float]:
    plan = reduce_plan(small_model.layout(parallel, "bfloat16"), groups.rank)
    grads = {"scale": torch.tensor((1.0, 2**-9, 2**-9)[groups.rank], dtype=torch.bfloat16)}
    found = sum_gradients(grads, plan, groups, accumulate=torch.float32 if wide else None)
    return str(found.flats[0].dtype), float(found.arrays()["scale"])


@pytest.mark.parametrize(
    ("wide", "wanted"), [(True, ("torch.float32", 1 + 2**-8)), (False, ("torch.bfloat16", 1.0))]
)
def test_narrow_gradients_are_summed_in_float32(wide: bool, wanted: tuple[str, float]) -> None:
    parallel = Parallel(dp=3)
    found = ranks(narrow, plan=small_model.group_plan(parallel), parallel=parallel, wide=wide)
    assert set(found.values()) == {wanted}


def test_plans_of_large_worlds_need_no_ranks() -> None:
    """4,096 ranks: the plan of one of them, proved against all."""
    parallel = Parallel(tp=2, cp=4, dp=128, pp=4, ep=4, etp=2)
    plan = reduce_plan(small_model.layout(parallel), 1777)
    assert {name: len(each.over) for name, each in plan.arrays.items()} == {
        "layers.2.q": 512,
        "layers.2.o": 512,
        "layers.2.norm": 1024,
        "layers.2.experts.up": 128,
        "layers.2.experts.down": 128,
    }
