"""Muon on ranks: the bits of one process at every layout, and in bfloat16 those of torch's Muon.

Ranks are in memory, and those of two layouts processes over gloo.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import small_model
import torch
from small_model import TOPOLOGIES, Whole
from worlds import GLOO, MEMORY, ranks

from shardweave.errors import GapError, PlanError, UnknownNameError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Tensor, along, chunk, even, pad, whole
from shardweave.plan.simulate import materialise
from shardweave.store import native
from shardweave.store.native_manifest import About
from shardweave.train import matrices as module
from shardweave.train.arrays import Held
from shardweave.train.checkpoint import (
    load_states,
    load_weights,
    over_group,
    saver,
    states_of,
    weights_of,
)
from shardweave.train.checks import hf_config_of, parallel_of
from shardweave.train.collectives import send_parts
from shardweave.train.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from shardweave.train.gradients import check_replicas
from shardweave.train.grid import Group, GroupPlan, Groups, plan_groups
from shardweave.train.matrices import Matrices
from shardweave.train.matrix_plan import MatrixPlan, plan_matrices
from shardweave.train.muon import Muon, MuonRule, adjusted_ratio, newton_schulz
from shardweave.train.optimizer import (
    AdamW,
    Optimizer,
    Settings,
    decayed,
    muon_for_matrices,
    state_bytes,
)
from shardweave.train.reduction import ReducePlan, reduce_plan
from shardweave.train.runtime import layout_of
from shardweave.train.schedules import cosine
from shardweave.train.sequence import SequenceLayout
from shardweave.train.traffic import traffic
from shardweave.train.worker import settings_of

torch.set_num_threads(1)

TINY = Path(__file__).parent.parent / "data" / "hf_qwen3moe_tiny"
STEPS, MAX_NORM = 3, 20.0
PROCESSES = ("tp4 ep4 etp1", "tp1 g5")
"""Whose ranks are processes: four, and five of which three have nothing but padding of a matrix."""
ADAMW = AdamW(lr=1e-2, beta1=0.8, eps=1e-6, weight_decay=0.1)
AS_TORCH = Muon(lr=cosine(3e-2, num_steps=8, warmup=2), ns_dtype="bfloat16")
EXACT = Muon(lr=0.02, momentum=0.9, nesterov=False, weight_decay=0.3, ns_steps=4, adjust_lr_fn="spectral")
EXPERTS = Muon(lr=0.05, momentum=0.8, adjust_lr_fn="match_rms_adamw", ns_dtype="bfloat16")


def settings(name: str, shape: tuple[int, ...]) -> AdamW | Muon:
    """Two dtypes, all ways to adjust, and a padded matrix that two stages hold: the embedding."""
    if len(shape) < 2:
        return ADAMW
    if "experts" in name:
        return EXPERTS
    return EXACT if name.endswith((".o", "down")) or name == "embed" else AS_TORCH


def alone(layout: Layout) -> Groups:
    return Groups(plan_groups({"model": layout.mesh}, {"model": {}}), layout.mesh.offset, {})


# --- weights that are cut once more, with padding ---

SHAPES = {
    "layers.{layer}.up": ((20, 8), (("layer", whole(3)),)),
    "layers.{layer}.down": ((8, 20), (("layer", whole(3)),)),
    "small": ((6, 4), ()),
    "norm": ((8,), ()),
}
MATRICES = tuple(name for name, (shape, _) in SHAPES.items() if len(shape) == 2)
SHARED = {"tp4 g2": (4, 2, 1), "tp2 g2 dp2": (2, 2, 2), "tp1 g3 dp2": (1, 3, 2), "tp1 g5": (1, 5, 1)}
"""How rows are cut over tensor ranks and once more, and how many replicas there are."""


def shared_layout(tp: int, g: int, dp: int, *, dtype: str = "float64", multiple: int = 4) -> Layout:
    """Rows of a tensor rank, filled up at the end and cut over ``g``: some ranks have padding only."""
    mesh = Mesh((("tp", tp), ("g", g), ("dp", dp)))
    tensors = {name: Tensor(name, shape, dtype, index) for name, (shape, index) in SHAPES.items()}

    def rows(size: int, parts: int) -> object:
        def cut(at: int, t: int = 0) -> Dim:
            return even(pad(even(whole(size), parts, t), g * multiple), g, at)

        return along(mesh, ("g", "tp") if parts > 1 else "g", cut)

    def rule(name: str, *dims: object) -> BufferRule:
        lead = tuple(dim for _, dim in tensors[name].index)
        return BufferRule(name, (Part(tensors[name]),), (*lead, *dims))

    columns = along(mesh, "tp", lambda t: even(whole(20), tp, t))
    rules = (
        rule("layers.{layer}.up", rows(20, tp), whole(8)),
        rule("layers.{layer}.down", rows(8, 1), columns),
        rule("small", rows(6, 1), whole(4)),
        rule("norm", whole(8)),
    )
    return Layout("shared", mesh, rules)


def shared_groups(layout: Layout) -> GroupPlan:
    names = {"dp": ("dp",), "replicas": ("tp", "dp"), "all": ("tp", "g", "dp")}
    return plan_groups({"model": layout.mesh}, {"model": names})


def shared_drawn(seed: int) -> Whole:
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(-3, 4, [*(len(dim) for _, dim in index), *shape]).astype(np.float64)
        for name, (shape, index) in SHAPES.items()
    }


# --- one process, by torch ----------------------------------------------------------------------


def members(name: str, values: Any) -> list[Any]:
    """The matrices of a family, or its only vector."""
    if name in ("scale", "norm") or name.endswith("norm"):
        return [values]
    return list(values.reshape(-1, *values.shape[-2:]))


def plain_newton_schulz(matrix: torch.Tensor, used: Muon) -> torch.Tensor:
    """The polynomial of the singular values, by an SVD."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s).clamp(min=used.eps)
    a, b, c = used.ns_coefficients
    for _ in range(used.ns_steps):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def by_torch(begin: Whole, grads: list[Whole], dtype: torch.dtype, names: dict[str, Muon]) -> Whole:
    """torch's Muon on whole matrices, orthogonal in bfloat16 as it always is."""
    found = {}
    for name, used in names.items():
        params = [torch.nn.Parameter(torch.tensor(m).to(dtype)) for m in members(name, begin[name])]
        how = used.adjust_lr_fn
        optimizer = torch.optim.Muon(
            params,
            lr=used.rate(1),
            weight_decay=used.weight_decay,
            momentum=used.momentum,
            nesterov=used.nesterov,
            ns_coefficients=used.ns_coefficients,
            eps=used.eps,
            ns_steps=used.ns_steps,
            adjust_lr_fn=how,
        )
        for step, grad in enumerate(grads, 1):
            optimizer.param_groups[0]["lr"] = used.rate(step)
            for param, values in zip(params, members(name, grad[name]), strict=True):
                param.grad = torch.tensor(values).to(dtype)
            optimizer.step()
        found[name] = torch.stack([p.detach() for p in params]).reshape(begin[name].shape).double().numpy()
    return found


def by_hand(begin: Whole, grads: list[Whole], names: dict[str, Muon]) -> Whole:
    """The same in doubles and with another way to the same polynomial."""
    found = {}
    for name, used in names.items():
        ended = []
        for number, values in enumerate(members(name, begin[name])):
            w, m = torch.tensor(values), torch.zeros(values.shape, dtype=torch.float64)
            for step, grad in enumerate(grads, 1):
                g = torch.tensor(members(name, grad[name])[number])
                m = used.momentum * m + (1 - used.momentum) * g
                way = (1 - used.momentum) * g + used.momentum * m if used.nesterov else m
                rows, columns = w.shape
                ratio = {
                    "original": math.sqrt(max(1, rows / columns)),
                    "spectral": math.sqrt(max(rows, columns)),
                    "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
                }[used.adjust_lr_fn]
                lr = used.rate(step)
                w = w * (1 - lr * used.weight_decay) - lr * ratio * plain_newton_schulz(way, used)
            ended.append(w.numpy())
        found[name] = np.stack(ended).reshape(begin[name].shape)
    return found


def starts(shapes: Whole) -> Whole:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(values.shape) for name, values in shapes.items()}


def stored(layout: Layout, values: Whole) -> dict[int, dict[str, np.ndarray]]:
    return materialise(layout, {tensor: values[tensor.name] for tensor in layout.tensors}, fill=0)


def one_process(
    layout: Layout, begin: Whole, grads: list[Whole], choose: Settings, *, max_norm: float | None
) -> Any:
    """An optimizer of the layout of one rank."""
    dtype = getattr(torch, layout.rules[0].dtype or layout.tensors[0].dtype)
    rank = layout.mesh.offset
    params = small_model.tensors(stored(layout, begin)[rank], dtype)
    optimizer = Optimizer(
        params,
        plan=reduce_plan(layout, rank),
        groups=alone(layout),
        settings=choose,
        max_norm=max_norm,
    )
    for grad in grads:
        optimizer.step(small_model.tensors(stored(layout, grad)[rank], dtype))
    return optimizer


def whole_of(plan: ReducePlan, arrays: dict[str, torch.Tensor], shapes: Whole) -> Whole:
    """Whole values from the arrays of one rank that holds everything."""
    found = {name: np.zeros(values.shape) for name, values in shapes.items()}
    for name, array in arrays.items():
        for part in plan.arrays[name].held.parts:
            numbers = [int(word) for word in part.name.split(".") if word.isdigit()]
            families = zip(part.tensor.index, numbers, strict=True)
            at = [[number for _, number in dim].index(n) for (_, dim), n in families]
            box = [slice(r.start, r.stop, r.step) for r in part.box.dims]
            found[part.tensor.name][(*at, *box)] = part.view(array.detach()).double().numpy()
    return found


def momenta_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The momentum of each array that has one, in its shape, from a rank that has all of it."""
    found: dict[str, torch.Tensor] = {}
    for box in optimizer.states():
        if box.state == "momentum_buffer":
            array = found.setdefault(box.name, torch.full(box.held.shape, torch.nan, dtype=torch.float64))
            array[tuple(slice(r[0], r[-1] + 1) for r in box.box.dims)] = box.values.double()
    return found


CASES = {
    "as torch": (AS_TORCH, torch.float32),
    "in doubles, orthogonal in bfloat16": (replace(EXPERTS, nesterov=False), torch.float64),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_has_the_bits_of_torch(case: str) -> None:
    used, dtype = CASES[case]
    layout = shared_layout(1, 1, 1, dtype=str(dtype).removeprefix("torch."), multiple=1)
    begin, grads = starts(shared_drawn(0)), [shared_drawn(seed) for seed in range(1, 5)]
    optimizer = one_process(layout, begin, grads, muon_for_matrices(used, ADAMW), max_norm=None)
    wanted = by_torch(begin, grads, dtype, dict.fromkeys(MATRICES, used))
    found = whole_of(optimizer.plan, optimizer.params, shared_drawn(0))
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_one_process_in_doubles_is_the_polynomial_of_the_singular_values() -> None:
    layout = shared_layout(1, 1, 1, multiple=1)
    begin, grads = starts(shared_drawn(0)), [shared_drawn(seed) for seed in range(1, 4)]
    for used in (EXACT, replace(EXPERTS, ns_dtype=None), replace(AS_TORCH, ns_dtype="float64")):
        optimizer = one_process(layout, begin, grads, muon_for_matrices(used, ADAMW), max_norm=None)
        wanted = by_hand(begin, grads, dict.fromkeys(MATRICES, used))
        found = whole_of(optimizer.plan, optimizer.params, shared_drawn(0))
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-11, atol=1e-12, err_msg=name)


def test_adjusted_as_torch_adjusts() -> None:
    from torch.optim._muon import _adjust_lr

    for shape in ((6, 4), (4, 6), (5, 5), (128, 3)):
        for how in ("original", "match_rms_adamw"):
            assert 0.3 * adjusted_ratio(shape, how) == pytest.approx(
                _adjust_lr(0.3, how, torch.Size(shape)), rel=1e-15
            )
    assert adjusted_ratio((6, 4), "spectral") == math.sqrt(6)


# --- ranks --------------------------------------------------------------------------------------

SENT: Counter[int] = Counter()
"""The bytes of matrices that each rank has sent."""


def counted(parts: Any, into: Any, *, group: Group) -> None:
    SENT[group.ranks[group.rank]] += sum(part.nbytes for at, part in enumerate(parts) if at != group.rank)
    send_parts(parts, into, group=group)


def train(
    groups: Groups, *, layout: Layout, begin: dict[int, Any], grads: list[dict[int, Any]]
) -> dict[bool, Any]:
    rank = groups.rank
    plan = reduce_plan(layout, rank, bucket_bytes=1500)
    found = {}
    for sharded in (False, True):
        params = small_model.tensors(begin[rank])
        optimizer = Optimizer(
            params, plan=plan, groups=groups, settings=settings, sharded=sharded, max_norm=MAX_NORM
        )
        before = SENT[rank]
        steps = [optimizer.step(small_model.tensors(grad[rank])) for grad in grads]
        check_replicas(params, plan, groups)
        matrices = optimizer._matrices.plan
        found[sharded] = {
            "params": {name: param.numpy() for name, param in params.items()},
            "steps": steps,
            "momenta": {
                (box.name, box.state, tuple((r[0], r[-1] + 1) for r in box.box.dims)): box.values.numpy()
                for box in optimizer.owned()
            },
            "sent": (SENT[rank] - before, STEPS * matrices.sent_bytes(rank)),
            "ranks": matrices.ranks,
            "matrices": [
                (m.name, m.owner, [(str(b.box), b.ranks) for b in m.blocks]) for m in matrices.matrices
            ],
        }
    return found


def train_counted(groups: Groups, **given: Any) -> dict[bool, Any]:
    with patch.object(module, "send_parts", counted):
        return train(groups, **given)


def trained(layout: Layout, plan: GroupPlan, over: str = MEMORY, **given: Any) -> dict[int, Any]:
    """What each rank finds. A patch is one for all ranks in memory, and one in each process."""
    if over == GLOO:
        return ranks(train_counted, plan=plan, over=over, layout=layout, **given)
    with patch.object(module, "send_parts", counted):
        return ranks(train, plan=plan, over=over, layout=layout, **given)


def compare(layout: Layout, found: dict[int, Any], optimizer: Optimizer, shapes: Whole) -> None:
    """Weights, momenta, norms and bytes of all ranks against one process."""
    arrays = stored(layout, whole_of(optimizer.plan, optimizer.params, shapes))
    momenta = whole_of(optimizer.plan, momenta_of(optimizer), shapes)
    assert {box.state for box in optimizer.states()} == {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    held = stored(layout, momenta)
    for rank, both in found.items():
        for sharded in (False, True):
            for key, array in arrays[rank].items():
                got = both[sharded]["params"][key]
                np.testing.assert_array_equal(got, array, err_msg=f"rank {rank}, {key}, {sharded}")
            for (key, state, box), values in both[sharded]["momenta"].items():
                if state == "momentum_buffer":
                    wanted = held[rank][key][tuple(slice(*ends) for ends in box)]
                    np.testing.assert_array_equal(values, wanted, err_msg=f"rank {rank}, {key}, {box}")
            said, planned = both[sharded]["sent"]
            assert said == planned, "bytes are those of the plan"
        same = found[both[True]["ranks"][0]][True]["matrices"]
        assert both[True]["matrices"] == same, "ranks that share matrices plan alike"


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name not in ("one", "tp2 ep2 etp1")])
def test_every_layout_has_the_bits_of_one_process(name: str) -> None:
    layout, lone = small_model.layout(TOPOLOGIES[name]), small_model.layout(TOPOLOGIES["one"])
    begin = starts(small_model.drawn(0))
    drawn = [small_model.contributions(layout, seed) for seed in range(1, STEPS + 1)]
    optimizer = one_process(lone, begin, [total for _, total in drawn], settings, max_norm=MAX_NORM)
    found = trained(
        layout,
        small_model.group_plan(TOPOLOGIES[name]),
        GLOO if name in PROCESSES else MEMORY,
        begin=stored(layout, begin),
        grads=[grads for grads, _ in drawn],
    )
    compare(layout, found, optimizer, begin)


def shared_grads(layout: Layout, seed: int) -> tuple[dict[int, Any], Whole]:
    """What each rank contributes, and the sum: replicas contribute different integers."""
    replicas = [shared_drawn(100 * seed + number) for number in range(layout.mesh.size)]
    grads, total = {}, {name: np.zeros(v.shape) for name, v in replicas[0].items()}
    # Every rank has its own; holders of an element are summed over.
    ones = [stored(layout, mine) for mine in replicas]
    marks = stored(layout, {n: np.arange(1.0, 1 + v.size).reshape(v.shape) for n, v in total.items()})
    families = {key: rule.parts[0].tensor.name for rule in layout.rules for key in marks[0] if _of(rule, key)}
    for rank in layout.mesh.ranks:
        grads[rank] = ones[rank][rank]
        for key, array in grads[rank].items():
            at = marks[rank][key].reshape(-1).astype(np.int64)
            flat = total[families[key]].reshape(-1)
            np.add.at(flat, at[at > 0] - 1, array.reshape(-1)[at > 0])
    return grads, total


def _of(rule: BufferRule, key: str) -> bool:
    return key.rpartition(".")[2] == rule.name.rpartition(".")[2]


@pytest.mark.parametrize("name", SHARED)
def test_shares_with_padding_have_the_bits_of_one_process(name: str) -> None:
    layout, lone = shared_layout(*SHARED[name]), shared_layout(1, 1, 1, multiple=1)
    begin = starts(shared_drawn(0))
    drawn = [shared_grads(layout, seed) for seed in range(1, STEPS + 1)]
    optimizer = one_process(lone, begin, [total for _, total in drawn], settings, max_norm=MAX_NORM)
    found = trained(
        layout,
        shared_groups(layout),
        GLOO if name in PROCESSES else MEMORY,
        begin=stored(layout, begin),
        grads=[grads for grads, _ in drawn],
    )
    compare(layout, found, optimizer, begin)


# --- padding never counts -----------------------------------------------------------------------

PADDED = (("small", 1, 2, 8, 2.449, 2.828), ("layers.0.up", 4, 2, 32, 4.472, 5.657))
"""A matrix, tensor ranks, shares, its rows with padding, and the spectral scale without and with it."""


@pytest.mark.parametrize(("name", "tp", "g", "rows", "right", "wrong"), PADDED)
def test_the_scale_is_that_of_the_rows_of_the_model(
    name: str, tp: int, g: int, rows: int, right: float, wrong: float
) -> None:
    """Megatron-LM 6740 and 7236: rows that fill shares up were counted."""
    layout = shared_layout(tp, g, 1)
    for rank in layout.mesh.ranks:
        held = reduce_plan(layout, rank).arrays[name].held
        assert held.shape[0] * tp * g == rows
        rule = Muon(adjust_lr_fn="spectral").rule(held)
        assert round(rule.ratio, 3) == right
        assert (
            round(adjusted_ratio((rows, held.parts[0].shape[1] if held.parts else 4), "spectral"), 3) == wrong
        )


def counting_padding(self: Muon, held: Held) -> MuonRule:
    """The mistake: rows and columns of the shares together."""
    for part in held.parts:
        rows, columns = part.shape
        if held.shape[-2] > len(part.box.dims[0]) or len(part.box.dims[0]) < rows:
            rows = -(-rows // held.shape[-2]) * held.shape[-2] + held.shape[-2]
        return MuonRule(self, adjusted_ratio((rows, columns), self.adjust_lr_fn))
    return MuonRule(self, 1.0)


def by_shares(self: Matrices, flats: Any) -> None:
    """The mistake: what a rank has of a matrix is taken for a matrix."""
    for (number, _), place in self.plan.places.items():
        view = place.view(flats)
        view.copy_(newton_schulz(view.clone(), self.plan.matrices[number].settings))


def with_padding(self: Matrices, flats: Any) -> None:
    """The mistake: padding holds something, and the norm of a matrix is taken with it."""
    for number, matrix in enumerate(self.plan.matrices):
        some = [p for (n, _), p in self.plan.places.items() if n == number]
        whole = torch.cat([p.view(flats) for p in some])
        more = torch.cat((whole, torch.ones(2, whole.shape[1], dtype=whole.dtype)))
        found = newton_schulz(more, matrix.settings)[: len(whole)]
        for place, rows in zip(some, found.split([p.view(flats).shape[0] for p in some]), strict=True):
            place.view(flats).copy_(rows)


MISTAKES = {
    "padding in the scale": (Muon, "rule", counting_padding),
    "shares for matrices": (Matrices, "orthogonalise", by_shares),
    "padding in the norm": (Matrices, "orthogonalise", with_padding),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_does_not_pass(mistake: str) -> None:
    layout, lone = shared_layout(1, 2, 1), shared_layout(1, 1, 1, multiple=1)
    begin = starts(shared_drawn(0))
    drawn = [shared_grads(layout, seed) for seed in range(1, STEPS + 1)]
    optimizer = one_process(lone, begin, [total for _, total in drawn], settings, max_norm=MAX_NORM)
    given = {"begin": stored(layout, begin), "grads": [grads for grads, _ in drawn]}
    with patch.object(*MISTAKES[mistake]):
        found = trained(layout, shared_groups(layout), **given)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        compare(layout, found, optimizer, begin)


# --- plans --------------------------------------------------------------------------------------


def plans_of(
    layout: Layout, *, sharded: bool, choose: Settings = settings, bucket_bytes: int = 1500
) -> dict[int, MatrixPlan]:
    return {
        rank: plan_matrices(reduce_plan(layout, rank, bucket_bytes=bucket_bytes), choose, sharded=sharded)
        for rank in layout.mesh.ranks
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_work_is_balanced_and_no_byte_goes_twice(sharded: bool) -> None:
    layout = shared_layout(2, 3, 2, multiple=1)
    plans = plans_of(layout, sharded=sharded)
    plan = plans[0]
    assert {(other.ranks, other.matrices) for other in plans.values()} == {(plan.ranks, plan.matrices)}
    assert plan.ranks == tuple(layout.mesh.ranks)
    costs = [plan.cost(rank) for rank in plan.ranks]
    assert sum(costs) == 3 * (20 * 8 * 8 + 8 * 20 * 8) + 6 * 4 * 4
    assert max(costs) == 20 * 8 * 8, "six large matrices on twelve ranks: one each"
    # Every block is sent to its owner once, and comes back to each rank that has its state.
    sent = sum(plan.sent_bytes(rank) for rank in plan.ranks)
    to_owners = sum(
        block.box.numel * matrix.dtype.itemsize
        for matrix in plan.matrices
        for block in matrix.blocks
        if matrix.owner not in block.ranks
    )
    back = sum(
        block.box.numel * matrix.dtype.itemsize * len(set(block.ranks) - {matrix.owner})
        for matrix in plan.matrices
        for block in matrix.blocks
    )
    assert sent == to_owners + back
    assert to_owners == back if sharded else to_owners < back
    sizes = sum(m.shape[0] * m.shape[1] * m.dtype.itemsize for m in plan.matrices)
    assert to_owners < sizes, "an owner has some of it already"


def test_replicas_alone_send_only_what_their_cuts_divide() -> None:
    """Two replicas of seven matrices in one bucket: whole ones stay where their state is."""
    layout = shared_layout(1, 1, 2)
    plan = plans_of(layout, sharded=True, bucket_bytes=1 << 20)[0]
    divided = {m.name for m in plan.matrices if len(m.blocks) > 1}
    moved = {m.name for m in plan.matrices if any(b.sender != m.owner for b in m.blocks)}
    assert moved <= divided
    assert len(divided) == 1, "one cut"
    whole_state = plans_of(layout, sharded=False)[0]
    assert all(len(m.blocks) == 1 for m in whole_state.matrices)
    assert len({m.owner for m in whole_state.matrices}) == 2


# --- refusals -----------------------------------------------------------------------------------


def test_what_is_no_matrix_and_what_is_part_of_one() -> None:
    layout = shared_layout(2, 1, 1, multiple=1)
    plan, groups = reduce_plan(layout, 0), alone(layout)
    params = {name: torch.zeros(a.held.shape, dtype=torch.float64) for name, a in plan.arrays.items()}
    given: dict[str, Any] = {"plan": plan, "groups": groups}
    with pytest.raises(PlanError, match=r"array 'norm': shapes of its tensors: \(8,\)"):
        Optimizer(params, settings=Muon(), **given)
    with pytest.raises(UnknownNameError, match="ranks 0, 1 are in no group"):
        Optimizer(params, settings=settings, **given)
    uneven = shared_layout(1, 5, 1, multiple=2)

    def some(name: str, shape: tuple[int, ...]) -> AdamW | Muon:
        return ADAMW if len(shape) < 2 or shape[-1] < 5 else replace(AS_TORCH, ns_steps=3)

    assert len(plans_of(uneven, sharded=True, choose=some)[0].matrices) == 6
    with pytest.raises(
        GapError, match=r"matrix 'w': elements of its parts\(16\) != rows\(4\) \* columns\(5\)"
    ):
        plans_of(_columns(), sharded=True, choose=lambda n, shape: AS_TORCH if shape[1] == 2 else ADAMW)


def _columns() -> Layout:
    """A matrix of whose columns ranks have 2, 2 and 1."""
    mesh = Mesh((("tp", 3),))
    tensor = Tensor("w", (4, 5), "float64")
    dims = (whole(4), along(mesh, "tp", lambda t: chunk(whole(5), 3, t)))
    return Layout("columns", mesh, (BufferRule("w", (Part(tensor),), dims),))


def differing(groups: Groups) -> str:
    rank, layout = groups.rank, small_model.layout(TOPOLOGIES["dp3 pp2, tied"])
    params = small_model.tensors(stored(layout, starts(small_model.drawn(0)))[rank])
    before = {name: param.clone() for name, param in params.items()}
    odd = replace(EXACT, ns_steps=EXACT.ns_steps + (rank == 2))
    choose = muon_for_matrices(odd, ADAMW)
    optimizer = Optimizer(params, plan=reduce_plan(layout, rank), groups=groups, settings=choose)
    try:
        optimizer.step({name: torch.ones_like(param) for name, param in params.items()})
    except PlanError as error:
        assert all(torch.equal(params[name], before[name]) for name in params)
        return str(error)
    return ""


def test_ranks_with_other_settings_refuse_to_step() -> None:
    plan = small_model.group_plan(TOPOLOGIES["dp3 pp2, tied"])
    said = set(ranks(differing, plan=plan).values())
    assert len(said) == 1
    assert "settings of arrays of ranks [0, 1] != [2]" in said.pop()


def test_a_gradient_that_is_no_number_leaves_all_as_it_was() -> None:
    layout = shared_layout(1, 1, 1, multiple=1)
    begin = starts(shared_drawn(0))
    optimizer = one_process(layout, begin, [shared_drawn(1)], settings, max_norm=None)
    params = {name: param.clone() for name, param in optimizer.params.items()}
    states = [box.values.clone() for box in optimizer.states()]
    bad = {name: torch.ones_like(param) for name, param in params.items()}
    bad["small"][1, 2] = math.inf
    assert not optimizer.step(bad).ok
    assert all(torch.equal(optimizer.params[name], param) for name, param in params.items())
    assert all(torch.equal(box.values, old) for box, old in zip(optimizer.states(), states, strict=True))


# --- checkpoints --------------------------------------------------------------------------------


def resumed(
    groups: Groups,
    *,
    layout: Layout,
    begin: dict[int, Any],
    grads: list[dict[int, Any]],
    sharded: bool,
    run: Path,
    loads: bool,
) -> Any:
    """Steps from a checkpoint, if there is one, and a checkpoint at the end."""
    rank = groups.rank
    params = small_model.tensors(begin[rank], torch.bfloat16)
    plan = reduce_plan(layout, rank, bucket_bytes=900)
    optimizer = Optimizer(params, plan=plan, groups=groups, settings=settings, sharded=sharded)
    if loads:
        for param in params.values():
            param.fill_(torch.nan)
        for box in optimizer.states():
            real = torch.zeros(box.held.shape)
            for part in box.held.parts:
                part.view(real).fill_(torch.nan)
            box.values.copy_(real[tuple(slice(r[0], r[-1] + 1) for r in box.box.dims)])
        load_weights(run, layout=layout, rank=rank, arrays=params)
        load_states(run, optimizer)
    for grad in grads:
        optimizer.step(small_model.tensors(grad[rank], torch.bfloat16))
    exchange = over_group(groups.get("model", "all"))
    held = [*weights_of(layout, rank, params), *states_of(optimizer)]
    saver(run, rank=rank, exchange=exchange, fsync=False).save(held, About(step=optimizer.count))
    return {name: param.double().numpy() for name, param in params.items()}


def test_a_run_goes_on_at_another_layout_with_the_same_bits(tmp_path: Path) -> None:
    """Weights in bfloat16, their masters and momenta: two steps here, two there, as four in one process."""
    here, there = shared_layout(2, 2, 1, dtype="bfloat16"), shared_layout(1, 3, 2, dtype="bfloat16")
    lone = shared_layout(1, 1, 1, dtype="bfloat16", multiple=1)
    begin = starts(shared_drawn(0))
    drawn = [shared_grads(layout, seed) for seed, layout in enumerate((here, here, there, there), 1)]
    optimizer = one_process(lone, begin, [total for _, total in drawn], settings, max_norm=None)
    wanted = stored(there, whole_of(optimizer.plan, optimizer.params, begin))
    for layout, grads, sharded in ((here, drawn[:2], True), (there, drawn[2:], False)):
        found = ranks(
            resumed,
            plan=shared_groups(layout),
            layout=layout,
            begin=stored(layout, begin),
            grads=[one for one, _ in grads],
            sharded=sharded,
            run=tmp_path / "run",
            loads=layout is there,
        )
    for rank, arrays in found.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, wanted[rank][key], err_msg=f"rank {rank}, {key}")
    manifest = native.read(tmp_path / "run")
    states = {key.rpartition("/")[2] for key in manifest.tensors if "layers.1.up" in key}
    assert states == {"layers.1.up", "master", "momentum_buffer"}


# --- runs ---------------------------------------------------------------------------------------


def test_settings_of_a_run_and_what_they_cost() -> None:
    config = TrainConfig(
        ModelConfig(str(TINY), dtype="bfloat16"),
        DataConfig("corpus"),
        ParallelConfig(tp=2, ep=2, dp=2),
        BatchConfig(documents=2, sequence_length=32),
        optimizer=OptimizerConfig(kind="muon", muon_lr=0.02, lr=0.001, momentum=0.9, warmup_steps=4),
    )
    choose = settings_of(config)
    muon, adamw = choose("model.layers.0.self_attn.o_proj.weight", (4, 6)), choose("lm_head.weight", (9, 4))
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    assert (muon.rate(1), muon.rate(4), adamw.rate(4)) == (0.02 / 4, 0.02, 0.001)
    assert (muon.momentum, muon.weight_decay, muon.adjust_lr_fn) == (0.9, 0.1, "match_rms_adamw")
    parallel = parallel_of(config)
    hf = hf_config_of(config)
    layout = layout_of(hf, parallel, dtype="bfloat16")
    given: dict[str, Any] = {"dtype": "bfloat16", "sharded": True}
    batches = [[SequenceLayout((32,), tp=2)]] * 2
    without = traffic(hf, parallel, batches, **given)
    found = traffic(hf, parallel, batches, settings=choose, **given)
    for rank in layout.mesh.ranks:
        plan = reduce_plan(layout, rank)
        planned = plan_matrices(plan, choose, sharded=True).sent_bytes(rank)
        assert found.by_part(rank).get("matrices", 0) == planned
        assert found.total(rank) - without.total(rank) == planned
        # Masters, and of matrices the momentum only.
        adam = state_bytes(plan, decayed(AdamW()), sharded=True)
        matrices = sum(
            4 * block.box.numel
            for matrix in plan_matrices(plan, choose, sharded=True).matrices
            for block in matrix.blocks
            if rank in block.ranks
        )
        assert adam - state_bytes(plan, choose, sharded=True) == matrices
    assert any("matrices" in found.by_part(rank) for rank in layout.mesh.ranks)
