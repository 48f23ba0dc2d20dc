"""The optimizer on ranks, sharded and replicated, against torch's AdamW in one process.

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
from small_model import TOPOLOGIES, Whole
from worlds import plan_of, ranks

from shardweave.errors import DtypeError, PlanError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, parse_box, whole
from shardweave.train import optimizer as module
from shardweave.train.gradients import check_replicas
from shardweave.train.grid import Groups, plan_groups
from shardweave.train.optimizer import AdamW, Optimizer, decayed
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.schedules import constant, cosine, linear

STEPS = 3
MAX_NORM = 20.0
MATRICES = AdamW(lr=cosine(3e-2, num_steps=8, warmup=2, least=1e-3), beta2=0.95, weight_decay=0.3)
FEW = AdamW(lr=1e-2, beta1=0.8, eps=1e-6, weight_decay=0.1)


def settings(name: str, shape: tuple[int, ...]) -> AdamW:
    """Experts have their own settings; vectors do not decay."""
    return FEW if "experts" in name else decayed(MATRICES)(name, shape)


def begin() -> Whole:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(values.shape) for name, values in small_model.drawn(0).items()}


def reference(
    grads: list[Whole], dtype: torch.dtype = torch.float64
) -> tuple[Whole, dict[str, Any], list[float]]:
    """torch's optimizer and its clipping, on whole tensors."""
    params = {name: torch.nn.Parameter(torch.from_numpy(v).to(dtype)) for name, v in begin().items()}
    chosen = {
        name: settings(name, small_model.SHAPES[name][0] if "experts" not in name else (0, 0, 0))
        for name in params
    }
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [params[name]],
                "lr": s.rate(1),
                "betas": (s.beta1, s.beta2),
                "eps": s.eps,
                "weight_decay": s.weight_decay,
            }
            for name, s in chosen.items()
        ],
        foreach=False,
    )
    norms = []
    for step, grad in enumerate(grads, 1):
        for (name, param), group in zip(params.items(), optimizer.param_groups, strict=True):
            param.grad = torch.from_numpy(grad[name]).to(dtype)
            group["lr"] = chosen[name].rate(step)
        norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), MAX_NORM)))
        optimizer.step()
    states = {name: optimizer.state[param] for name, param in params.items()}
    return {name: param.detach().numpy() for name, param in params.items()}, states, norms


def train(groups: Groups, *, parallel: Parallel, grads: list[dict[int, dict[str, Any]]]) -> dict[bool, Any]:
    rank, layout = groups.rank, small_model.layout(parallel)
    plan = reduce_plan(layout, rank, bucket_bytes=1500)
    found = {}
    for sharded in (False, True):
        params = small_model.tensors(small_model.stored(layout, begin(), fill=0)[rank])
        optimizer = Optimizer(
            params, plan=plan, groups=groups, settings=settings, sharded=sharded, max_norm=MAX_NORM
        )
        steps = [optimizer.step(small_model.tensors(grad[rank])) for grad in grads]
        check_replicas(params, plan, groups)
        found[sharded] = {
            "params": {name: param.numpy() for name, param in params.items()},
            "steps": steps,
            "owned": [
                (box.name, box.state, [slice(r.start, r.stop) for r in box.box.dims], box.values.numpy())
                for box in optimizer.owned()
            ],
            "held": sum(box.values.numel() for box in optimizer.states()),
        }
    return found


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_sharded_and_replicated_are_torch_in_one_process(name: str) -> None:
    parallel = TOPOLOGIES[name]
    layout = small_model.layout(parallel)
    drawn = [small_model.contributions(layout, seed) for seed in range(1, STEPS + 1)]
    wanted, states, norms = reference([total for _, total in drawn])
    assert max(norms) > MAX_NORM, "some steps are clipped"
    arrays = small_model.stored(layout, wanted, fill=0)
    moments = {
        state: small_model.stored(layout, {n: s[state].numpy() for n, s in states.items()}, fill=0)
        for state in ("exp_avg", "exp_avg_sq")
    }
    found = ranks(
        train,
        plan=small_model.group_plan(parallel),
        over=small_model.OVER[name],
        parallel=parallel,
        grads=[grads for grads, _ in drawn],
    )
    owned = {tensor: dict.fromkeys(moments, 0) for tensor in layout.tensors}
    for rank, both in found.items():
        for key, array in arrays[rank].items():
            got = both[True]["params"][key]
            np.testing.assert_array_equal(got, both[False]["params"][key], err_msg="sharded is replicated")
            np.testing.assert_allclose(got, array, rtol=1e-12, atol=1e-14, err_msg=f"rank {rank}, {key}")
        for sharded in (False, True):
            for step, norm in zip(both[sharded]["steps"], norms, strict=True):
                assert step.ok
                assert step.grad_norm == pytest.approx(norm, rel=1e-14)
        assert [b[:3] for b in both[True]["owned"]] == [b[:3] for b in both[False]["owned"]]
        for key, state, box, values in both[True]["owned"]:
            np.testing.assert_allclose(values, moments[state][rank][key][tuple(box)], rtol=1e-12, atol=1e-14)
            held = reduce_plan(layout, rank).arrays[key].held
            here = np.zeros(held.shape, bool)
            here[tuple(box)] = True
            for part in held.parts:
                inside = here[tuple(slice(r.start, r.stop) for r in part.at.dims)]
                owned[part.tensor][state] += int(inside.sum())
    # Every element of the model is owned once, whatever the replicas.
    assert owned == {tensor: dict.fromkeys(moments, tensor.numel) for tensor in layout.tensors}
    if parallel.world_size == parallel.dp * parallel.pp and parallel.dp > 1:
        held = [both[True]["held"] / both[False]["held"] for both in found.values()]
        assert max(held) < 1.3 / parallel.dp, "parts are balanced"


# --- arrays that do not divide ---


def odd_layout(dtype: str, ranks: int = 3) -> Layout:
    """Fewer elements, or fewer rows, than ranks; a row longer than all the rest."""
    mesh = Mesh((("tp", 1), ("cp", 1), ("dp", ranks), ("pp", 1)))
    shapes = {"one": (), "two": (2,), "wide": (1, 50), "rows": (5, 3), "stack": (2, 3, 4)}
    return Layout(
        "odd",
        mesh,
        tuple(
            BufferRule(n, (Part(Tensor(n, s, dtype)),), tuple(whole(i) for i in s)) for n, s in shapes.items()
        ),
    )


def odd(groups: Groups, *, dtype: str, sharded: bool) -> Any:
    plan = reduce_plan(odd_layout(dtype), groups.rank)
    params, grads = odd_values(dtype, groups.rank)
    optimizer = Optimizer(params, plan=plan, groups=groups, settings=FEW, sharded=sharded, max_norm=1.0)
    for grad in grads:
        optimizer.step(grad)
    boxes = {(box.name, str(box.box)): box.values.dtype for box in optimizer.states()}
    return {name: param.double().numpy() for name, param in params.items()}, boxes


def odd_values(dtype: str, rank: int) -> Any:
    kind = getattr(torch, dtype)
    shapes = {r.name: r.parts[0].tensor.shape for r in odd_layout(dtype).rules}

    def draw(seed: int, size: float) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng(seed)
        return {
            n: torch.from_numpy(np.asarray(rng.standard_normal(s) * size)).to(kind) for n, s in shapes.items()
        }

    return draw(99, 1.0), [draw(10 * step + rank, 1.0) for step in range(6)]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_arrays_smaller_than_their_group_and_masters(dtype: str) -> None:
    plan = plan_of(dp=3)
    found = {sharded: ranks(odd, plan=plan, dtype=dtype, sharded=sharded) for sharded in (False, True)}
    # One process, in float32 where the arrays are narrower: masters that are rounded when a step is done.
    wide = torch.promote_types(getattr(torch, dtype), torch.float32)
    params, _ = odd_values(dtype, 0)
    masters = {name: torch.nn.Parameter(p.to(wide)) for name, p in params.items()}
    optimizer = torch.optim.AdamW(
        masters.values(), lr=FEW.rate(1), betas=(0.8, 0.999), eps=1e-6, weight_decay=0.1, foreach=False
    )
    every = [odd_values(dtype, rank)[1] for rank in range(3)]
    for step in range(6):
        for name, master in masters.items():
            master.grad = sum(grads[step][name].to(wide) for grads in every)
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
    for mine, _ in (*found[True].values(), *found[False].values()):
        for name, master in masters.items():
            wanted = master.detach().to(getattr(torch, dtype)).double().numpy()
            np.testing.assert_array_equal(mine[name], found[True][0][0][name])
            # bfloat16 has 8 bits: where float32 rounded otherwise, now and then the next number.
            np.testing.assert_allclose(mine[name], wanted, rtol=1e-12 if dtype == "float64" else 2**-8)
    sizes = [parse_box(box).numel for _, boxes in found[True].values() for _, box in boxes]
    assert sum(sizes) == 1 + 2 + 50 + 15 + 24, "a box for each element, of one rank"
    assert {dtype for _, boxes in found[True].values() for dtype in boxes.values()} == {wide}


def test_masters_keep_what_bfloat16_cannot() -> None:
    """Updates far below the spacing of bfloat16 add up; without masters nothing would move."""
    plan, groups = alone(odd_layout("bfloat16", 1))
    params = {name: torch.ones(a.held.shape, dtype=torch.bfloat16) for name, a in plan.arrays.items()}
    quick = AdamW(lr=1e-3, weight_decay=0.0)
    optimizer = Optimizer(params, plan=plan, groups=groups, settings=quick)
    for _ in range(8):
        optimizer.step({name: torch.ones(p.shape) for name, p in params.items()})
    assert all((p == 1 - 2**-7).all() for p in params.values()), "1 - 8e-3, rounded"


# --- infinite gradients ---


def infinite(groups: Groups, *, parallel: Parallel, bad: float, where: int) -> Any:
    rank, layout = groups.rank, small_model.layout(parallel)
    plan = reduce_plan(layout, rank)
    params = small_model.tensors(small_model.stored(layout, begin(), fill=0)[rank])
    before = {name: param.clone() for name, param in params.items()}
    optimizer = Optimizer(params, plan=plan, groups=groups, settings=settings)
    grads = {name: torch.ones_like(param) for name, param in params.items()}
    if rank == where:
        grads[next(iter(grads))].view(-1)[0] = bad
    skipped = optimizer.step(grads)
    same = all(torch.equal(params[name], before[name]) for name in params)
    zero = all(not box.values.any() for box in optimizer.states())
    made = optimizer.step({name: torch.ones_like(param) for name, param in params.items()})
    moved = any(not torch.equal(params[name], before[name]) for name in params)
    return skipped.ok, same and zero, made.ok, moved, optimizer.count


@pytest.mark.parametrize(("bad", "where"), [(math.inf, 0), (math.nan, 3)])
def test_one_infinite_gradient_of_one_rank_skips_the_step_on_all(bad: float, where: int) -> None:
    parallel = Parallel(tp=2, pp=2, ep=2)
    found = ranks(infinite, plan=small_model.group_plan(parallel), parallel=parallel, bad=bad, where=where)
    assert set(found.values()) == {(False, True, True, True, 1)}


# --- one process ---


def alone(layout: Layout) -> tuple[Any, Groups]:
    return reduce_plan(layout, 0), Groups(plan_groups({"model": layout.mesh}, {"model": {}}), 0, {})


def test_state_written_into_views_goes_on_as_if_it_had_not_stopped() -> None:
    plan, groups = alone(odd_layout("bfloat16", 1))
    grads = odd_values("bfloat16", 0)[1]

    def fresh() -> Optimizer:
        return Optimizer(odd_values("bfloat16", 0)[0], plan=plan, groups=groups, settings=FEW)

    through, stopped, resumed = fresh(), fresh(), fresh()
    for grad in grads:
        through.step(grad)
    for grad in grads[:3]:
        stopped.step(grad)
    for name, param in stopped.params.items():
        resumed.params[name].copy_(param)
    for mine, theirs in zip(resumed.states(), stopped.states(), strict=True):
        assert (mine.name, mine.state, mine.box) == (theirs.name, theirs.state, theirs.box)
        mine.values.copy_(theirs.values)
    resumed.count = stopped.count
    for grad in grads[3:]:
        resumed.step(grad)
    for name, param in through.params.items():
        assert torch.equal(param, resumed.params[name])
    resumed.params["rows"].fill_(2.0)
    resumed.reset_masters()
    found = next(box for box in resumed.states() if box.name == "rows" and box.state == "master")
    assert (found.values == 2).all()


def test_bits_do_not_depend_on_how_a_bucket_is_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(40_001, generator=generator) for _ in range(3)]
    whole_, cut_ = ([*(x.clone() for x in drawn), drawn[0] ** 2] for _ in range(2))
    module.adamw(*whole_, FEW, step=3)
    for start, stop in ((0, 1), (1, 8), (8, 1003), (1003, 1004), (1004, 39_999), (39_999, 40_001)):
        with patch.object(module, "_CHUNK", 777):
            module.adamw(*(x[start:stop] for x in cut_), FEW, step=3)
    for one, other in zip(whole_, cut_, strict=True):
        assert torch.equal(one, other)


def test_wrong_arrays_are_refused() -> None:
    plan, groups = alone(odd_layout("float32", 1))
    right = {name: torch.zeros(a.held.shape) for name, a in plan.arrays.items()}
    for params, error, said in (
        ({**right, "three": torch.zeros(3)}, UnknownNameError, "three"),
        ({**right, "two": torch.zeros(3)}, PlanError, r"shape\(3,\) != shape\(2,\)"),
        ({**right, "two": torch.zeros(2).double()}, DtypeError, "torch.float64"),
        ({**right, "rows": torch.zeros(3, 5).T}, PlanError, "stride"),
    ):
        with pytest.raises(error, match=said):
            Optimizer(params, plan=plan, groups=groups, settings=FEW)


def test_schedules_by_hand() -> None:
    assert [constant(2.0, warmup=4)(step) for step in (1, 2, 4, 9)] == [0.5, 1.0, 2.0, 2.0]
    rate = linear(1.0, num_steps=10, warmup=2, least=0.2)
    assert [round(rate(step), 6) for step in (1, 2, 6, 10, 11)] == [0.5, 1.0, 0.6, 0.2, 0.2]
    rate = cosine(1.0, num_steps=9, warmup=1, least=0.0)
    assert [round(rate(step), 6) for step in (1, 3, 5, 9)] == [1.0, 0.853553, 0.5, 0.0]
    with pytest.raises(PlanError, match="warmup"):
        linear(1.0, num_steps=3, warmup=4)
