"""Experts over ranks against one process that loops over tokens.

Ranks are in memory, and those of some cases processes over gloo.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import worlds
from torch import Tensor
from worlds import GLOO, MEMORY

from shardweave.errors import PlanError
from shardweave.layout import Mesh
from shardweave.train import experts, routing, rows
from shardweave.train.experts import ExpertWeights, moe, shared_expert
from shardweave.train.grid import Group, Groups, plan_groups
from shardweave.train.routing import Documents, route
from shardweave.train.sequence import SequenceLayout

EXPERTS, TOP_K, HIDDEN, INNER = 12, 3, 7, 10
ALONE = Group("alone", (0,), 0)
NAMES = ("gate", "up", "down")


# --- what is asked ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Ranks, and the lengths of the documents of each data-parallel rank."""

    lengths: tuple[tuple[int, ...], ...]
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    form: str = "thd"
    top_k: int = TOP_K
    norm_topk: bool = True
    favourite: int | None = None
    """The expert that every token goes to."""

    @property
    def world(self) -> int:
        return self.tp * self.cp * len(self.lengths)

    def mesh(self) -> Mesh:
        edp = self.world // (self.ep * self.etp)
        axes = (("tp", self.tp), ("cp", self.cp), ("dp", len(self.lengths)))
        return Mesh(axes, ((("etp", self.etp), ("ep", self.ep), ("edp", edp)),))

    def layout(self, dp: int) -> SequenceLayout:
        return SequenceLayout(self.lengths[dp], self.form, self.cp, self.tp)


CASES = {
    "ep1": Case(((5, 9, 1),), norm_topk=False),
    "ep2": Case(((5, 9, 1),), tp=2, ep=2),
    "ep4": Case(((5, 9), (11,)), tp=2, ep=4, form="bshd"),
    "ep4-cp": Case(((13, 3),), cp=4, ep=4, norm_topk=False),
    "etp2": Case(((5, 9, 2),), tp=2, etp=2, norm_topk=False),
    "ep2-etp2": Case(((7, 12, 1),), tp=2, cp=2, ep=2, etp=2),
    "ep3": Case(((5, 9), (4,), (1, 2, 3)), ep=3),
    "ep2-edp2": Case(((5, 9), (3, 4, 6)), tp=2, ep=2),
    "etp2-edp2": Case(((5, 9), (3, 4, 6)), tp=2, etp=2, form="bshd"),
    "ep3-etp2": Case(((5, 9), (4,), (1, 2, 3)), tp=2, ep=3, etp=2, norm_topk=False),
    "a rank without a slot": Case(((5, 9), (0,)), tp=2, ep=4),
    "a rank with padding only": Case(((1, 1),), tp=2, cp=2, ep=2, etp=2),
    "no tokens at all": Case(((0, 0), (0,)), tp=2, ep=2, etp=2),
    "one expert": Case(((5, 9), (6,)), tp=2, ep=2, etp=2, top_k=1, favourite=7, norm_topk=False),
}


ON_PROCESSES = ("ep2-etp2", "ep3", "a rank without a slot")
KINDS = {"ep": ("ep",), "etp": ("etp",), "document": ("tp", "cp"), "tp": ("tp",)}


@dataclass(frozen=True)
class Problem:
    """Weights of the whole layer; for each data-parallel rank its padded batch, and what outputs weigh."""

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    batches: tuple[Tensor, ...]
    weighed: tuple[Tensor, ...]


def problem(case: Case, dtype: torch.dtype = torch.float64) -> Problem:
    draw = torch.Generator().manual_seed(5)
    normal = partial(torch.randn, generator=draw, dtype=torch.float64)
    router = normal(EXPERTS, HIDDEN)
    gate, up = normal(EXPERTS, INNER, HIDDEN), normal(EXPERTS, INNER, HIDDEN)
    down = normal(EXPERTS, HIDDEN, INNER)
    layouts = [case.layout(dp) for dp in range(len(case.lengths))]
    # By token, so that those of two layouts are alike; and padding that is not zero.
    tokens = [normal(2, layout.num_tokens, HIDDEN) for layout in layouts]
    batches, weighed = [], []
    for layout, values in zip(layouts, tokens, strict=True):
        for found, value in zip((batches, weighed), values, strict=True):
            batch = normal(*layout.shape, HIDDEN)
            batch.view(-1, HIDDEN)[torch.from_numpy(layout.tokens)] = value
            found.append(batch)
    if case.favourite is not None:
        router[case.favourite] += 12 * torch.eye(HIDDEN, dtype=torch.float64)[0]
        batches = [batch.index_fill(-1, torch.tensor([0]), 1.0) for batch in batches]
    values = (router, gate, up, down)
    return Problem(
        *(value.to(dtype) for value in values),
        tuple(batch.to(dtype) for batch in batches),
        tuple(weigh.to(dtype) for weigh in weighed),
    )


# --- one process, one token at a time -----------------------------------------------------------


def plain(case: Case) -> dict[str, Any]:
    """Outputs, losses and gradients by loops over documents, tokens and experts."""
    given = problem(case)
    weights = {name: getattr(given, name).clone().requires_grad_() for name in ("router", *NAMES)}
    xs = [batch.clone().requires_grad_() for batch in given.batches]
    ys, loss, aux, z = [], torch.zeros((), dtype=torch.float64), 0.0 * xs[0].sum(), 0.0 * xs[0].sum()
    used = torch.zeros(EXPERTS, dtype=torch.int64)
    for dp, x in enumerate(xs):
        layout, flat = case.layout(dp), x.reshape(-1, HIDDEN)
        rows = [torch.zeros(HIDDEN, dtype=torch.float64)] * len(flat)
        start = 0
        for length, slots in zip(layout.lengths, layout.padded, strict=True):
            counts, probs = torch.zeros(EXPERTS, dtype=torch.float64), []
            for at in range(start, start + length):
                logits = weights["router"] @ flat[at]
                prob = torch.exp(logits) / torch.exp(logits).sum()
                best = sorted(range(EXPERTS), key=lambda e: (-prob[e].item(), e))[: case.top_k]
                total = sum(prob[e] for e in best) if case.norm_topk else 1.0
                for e in best:
                    a, b = weights["gate"][e] @ flat[at], weights["up"][e] @ flat[at]
                    y = weights["down"][e] @ (a * torch.sigmoid(a) * b)
                    rows[at] = rows[at] + prob[e] / total * y
                    counts[e] += 1
                    used[e] += 1
                probs.append(prob)
                z = z + torch.log(torch.exp(logits).sum()) ** 2
            if length:
                f = counts / (length * case.top_k)
                aux = aux + length * EXPERTS * (f * torch.stack(probs).mean(0)).sum()
            start += slots
        y = torch.stack(rows).view(x.shape) if rows else torch.zeros_like(x)
        loss = loss + (y * given.weighed[dp]).sum()
        ys.append(y.detach())
    leaves = [*weights.values(), *xs]
    names = [*weights, *(f"x{dp}" for dp in range(len(xs)))]
    found: dict[str, Any] = {"y": ys, "aux": aux.item(), "z": z.item(), "tokens": used}
    for name, value in {"loss": loss, "aux": aux, "z": z}.items():
        if value.requires_grad:
            grads = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
        else:
            grads = (None,) * len(leaves)
        found[f"d{name}"] = {
            key: torch.zeros_like(leaf) if grad is None else grad
            for key, leaf, grad in zip(names, leaves, grads, strict=True)
        }
    return found


# --- the ranks ----------------------------------------------------------------------------------


def layer(groups: Groups, *, case: Case, padding: float = 1.0) -> dict[str, Any]:
    """What one rank finds; twice, to see that it is the same to the bit."""
    ep, etp, document = (groups.get("model", name) for name in ("ep", "etp", "document"))
    at = case.mesh().coordinate(groups.rank)
    first, second = (_once(at, case, ep, etp, document, padding) for _ in range(2))
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    return {key: value.numpy() for key, value in first.items()}


def _once(
    at: dict[str, int], case: Case, ep: Group, etp: Group, document: Group, padding: float
) -> dict[str, Tensor]:
    given, layout = problem(case), case.layout(at["dp"])
    local = partial(layout.local, cp_rank=at["cp"], tp_rank=at["tp"])
    is_real = local(torch.from_numpy(layout.is_real))
    x = local(given.batches[at["dp"]])
    x[~is_real] *= padding
    x.requires_grad_()
    inner = slice(etp.rank * INNER // etp.size, (etp.rank + 1) * INNER // etp.size)
    mine = slice(ep.rank * EXPERTS // ep.size, (ep.rank + 1) * EXPERTS // ep.size)
    weights = ExpertWeights(
        given.router.clone(),
        given.gate[mine, inner].clone(),
        given.up[mine, inner].clone(),
        given.down[mine, :, inner].clone(),
    )
    leaves = [weights.router, weights.gate, weights.up, weights.down, x]
    for leaf in leaves:
        leaf.requires_grad_()
    numbers = local(torch.from_numpy(layout.documents))
    y, done = moe(
        x,
        is_real,
        weights,
        num_experts=EXPERTS,
        top_k=case.top_k,
        norm_topk=case.norm_topk,
        ep=ep,
        etp=etp,
        documents=Documents(numbers, len(layout.lengths), document),
    )
    loss = (y * local(given.weighed[at["dp"]])).sum()
    grads = torch.autograd.grad(loss, leaves, retain_graph=True)
    found = {"y": y.detach(), "aux": done.aux_sum.detach(), "z": done.z_sum.detach(), "tokens": done.tokens}
    names = ("router", *NAMES, "x")
    found |= {f"dloss.{name}": grad for name, grad in zip(names, grads, strict=True)}
    for name, value in {"aux": done.aux_sum, "z": done.z_sum}.items():
        router, dx = torch.autograd.grad(value, (weights.router, x), retain_graph=True)
        found |= {f"d{name}.router": router, f"d{name}.x": dx}
    return found


def ranks(work: Any, case: Case, **how: Any) -> dict[int, dict[str, Tensor]]:
    """What each rank returned; as numpy on the way, which outlives its process."""
    plan = plan_groups({"model": case.mesh()}, {"model": KINDS})
    return {
        rank: {key: torch.as_tensor(value) for key, value in part.items()}
        for rank, part in worlds.ranks(work, plan=plan, case=case, **how).items()
    }


def together(case: Case, **how: Any) -> dict[str, Any]:
    """What the ranks found, as of one process: weights' gradients are sums over those who hold them."""
    parts = ranks(layer, case, **how)
    mesh = case.mesh()
    at = {rank: mesh.coordinate(rank) for rank in parts}
    found: dict[str, Any] = {key: sum(part[key] for part in parts.values()) for key in ("aux", "z", "tokens")}
    for loss in ("loss", "aux", "z"):
        grads = {"router": sum(part[f"d{loss}.router"] for part in parts.values())}
        for dp in range(len(case.lengths)):
            of = {(at[r]["cp"], at[r]["tp"]): part for r, part in parts.items() if at[r]["dp"] == dp}
            order = [of[key] for key in sorted(of)]
            layout = case.layout(dp)
            grads[f"x{dp}"] = layout.join([part[f"d{loss}.x"] for part in order], split_tp=True)
            if loss == "loss":
                y = layout.join([part["y"] for part in order], split_tp=True)
                found.setdefault("y", []).append(y)
        found[f"d{loss}"] = grads
    for name in NAMES:
        dim = 2 if name == "down" else 1
        found["dloss"][name] = torch.cat(
            [
                torch.cat(
                    [
                        sum(
                            part[f"dloss.{name}"]
                            for r, part in parts.items()
                            if (at[r]["ep"], at[r]["etp"]) == (e, t)
                        )
                        for t in range(case.etp)
                    ],
                    dim,
                )
                for e in range(case.ep)
            ]
        )
    return found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """How far values are apart, over the largest that is wanted."""
    pairs = {"aux": (found["aux"], wanted["aux"]), "z": (found["z"], wanted["z"])}
    pairs |= {f"y{dp}": pair for dp, pair in enumerate(zip(found["y"], wanted["y"], strict=True))}
    for loss in ("dloss", "daux", "dz"):
        pairs |= {f"{loss}.{name}": (grad, wanted[loss][name]) for name, grad in found[loss].items()}
    apart = {}
    for name, (mine, theirs) in pairs.items():
        mine, theirs = torch.as_tensor(mine), torch.as_tensor(theirs, dtype=torch.float64)
        assert mine.shape == theirs.shape, name
        if mine.numel():
            apart[name] = ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)).item()
    return apart


@pytest.mark.parametrize("name", CASES)
def test_experts_over_ranks_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    found, wanted = together(case, over=GLOO if name in ON_PROCESSES else MEMORY), plain(case)
    apart = differences(found, wanted)
    assert max(apart.values()) <= 1e-12, {key: far for key, far in apart.items() if far > 1e-12}
    assert torch.equal(found["tokens"], wanted["tokens"])
    assert {"dloss.router", "dloss.gate", "dloss.up", "dloss.down", "daux.router", "dz.router"} <= set(apart)
    if case.favourite is not None:
        unused = [e for e in range(EXPERTS) if e != case.favourite]
        assert found["tokens"][unused].sum() == 0 and found["dloss"]["gate"][unused].count_nonzero() == 0


def test_padding_counts_nowhere() -> None:
    """Whatever it holds, all else is the same to the bit."""
    case = CASES["ep2-etp2"]
    usual = ranks(layer, case)
    for padding in (-3.0, float("nan")):
        other = ranks(layer, case, padding=padding)
        for rank, parts in usual.items():
            for key, value in parts.items():
                assert torch.equal(value, other[rank][key]), (rank, key)
    layout = case.layout(0)
    y = layout.join([usual[rank]["y"] for rank in range(4)], split_tp=True)
    assert y[~torch.from_numpy(layout.is_real)].count_nonzero() == 0


# --- faults -------------------------------------------------------------------------------------


def _statistics_of_one_rank(case: Case) -> Any:
    """The balance of the tokens of a rank, not of a document."""
    return patch.object(routing, "sum_all", lambda tensor, *, group: tensor)


def _aux_scaled_by_the_group(case: Case) -> Any:
    """Every rank contributes the loss of the group, as where it is averaged later over other ranks."""
    right = routing.balance_sum
    return patch.object(
        experts, "balance_sum", lambda *a, group, **k: group.size * right(*a, group=group, **k)
    )


def _gradients_times_ep(case: Case) -> Any:
    """Expert gradients are not divided as dense ones are: exactly ``ep`` times too large."""
    right = experts._Mlp.backward

    def backward(ctx: Any, *grads: Tensor) -> Any:
        of_rows, *of_weights, last = right(ctx, *grads)
        return of_rows, *(case.ep * grad for grad in of_weights), last

    return patch.object(experts._Mlp, "backward", backward)


def _own_part_over_etp(case: Case) -> Any:
    """The way back over etp takes this rank's gradient only: the loss is right."""

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].split(list(ctx.sizes))[ctx.group.rank], None, None

    return patch.object(rows._Collect, "backward", backward)


def _router_without_outputs(case: Case) -> Any:
    """The weights of outputs do not reach the router: the loss is right."""

    def wrong(*a: Any, **k: Any) -> Any:
        choices = route(*a, **k)
        return replace(choices, weights=choices.weights.detach() + 0 * choices.weights)

    return patch.object(experts, "route", wrong)


def mutated(case: Case, mutation: str) -> dict[str, Any]:
    """What the ranks find with a fault in all of them."""
    with MUTATIONS[mutation](case):  # once for all ranks, which are threads
        return together(case)


MUTATIONS = {
    "statistics of one rank": _statistics_of_one_rank,
    "aux scaled by the group": _aux_scaled_by_the_group,
    "gradients times ep": _gradients_times_ep,
    "own part over etp": _own_part_over_etp,
    "router without outputs": _router_without_outputs,
}


@pytest.mark.parametrize(
    ("mutation", "seen"),
    [
        ("statistics of one rank", {"aux", "daux.router", "daux.x0"}),
        ("aux scaled by the group", {"aux", "daux.router", "daux.x0"}),
    ],
)
def test_fault_6_aux_that_depends_on_the_layout_is_seen(mutation: str, seen: set[str]) -> None:
    case = CASES["ep2-etp2"]
    apart = differences(mutated(case, mutation), plain(case))
    assert {key for key, far in apart.items() if far > 1e-3} == seen


@pytest.mark.parametrize(
    ("mutation", "seen"),
    [
        ("gradients times ep", {"dloss.gate", "dloss.up", "dloss.down"}),
        ("own part over etp", {"dloss.router", "dloss.x0"}),
        ("router without outputs", {"dloss.router", "dloss.x0"}),
    ],
)
def test_fault_14_expert_and_router_gradients_are_seen(mutation: str, seen: set[str]) -> None:
    case = CASES["ep2-etp2"]
    apart = differences(mutated(case, mutation), plain(case))
    assert {key for key, far in apart.items() if far > 1e-3} == seen


def test_fault_6_nothing_depends_on_the_layout() -> None:
    """One microbatch on one rank, and on two and four of tp and cp."""
    found = {}
    for name, (tp, cp) in {"1": (1, 1), "tp2": (2, 1), "cp2": (1, 2), "tp2-cp2": (2, 2)}.items():
        found[name] = together(Case(((5, 9, 1),), tp=tp, cp=cp, ep=tp * cp))
    one = found.pop("1")
    for name, other in found.items():
        pairs = {key: (other[key], one[key]) for key in ("aux", "z")}
        for loss in ("dloss", "daux", "dz"):
            pairs[loss] = (other[loss]["router"], one[loss]["router"])
        for key, (mine, wanted) in pairs.items():
            assert (mine - wanted).abs().max() <= 1e-12 * wanted.abs().max(), (name, key)


# --- one rank -----------------------------------------------------------------------------------


def test_of_equal_experts_the_first_are_chosen() -> None:
    probs = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 5.0, 2.0]])
    router = torch.eye(5)
    assert route(probs, router, top_k=2, norm_topk=False).experts.tolist() == [[1, 3], [0, 1], [1, 3]]
    assert route(probs, router, top_k=5, norm_topk=False).experts.tolist() == [list(range(5))] * 3


def test_a_token_that_is_not_a_number_stays_one_and_ends_nothing() -> None:
    given = problem(CASES["ep1"])
    x = given.batches[0].clone()
    x[3] = float("nan")
    y, _ = moe(
        x,
        torch.ones(len(x), dtype=torch.bool),
        ExpertWeights(given.router, given.gate, given.up, given.down),
        num_experts=EXPERTS,
        top_k=TOP_K,
        norm_topk=True,
        ep=ALONE,
        etp=ALONE,
    )
    assert y[3].isnan().all()
    assert not y[:3].isnan().any() and not y[4:].isnan().any()


def test_balance_is_one_where_experts_are_used_evenly() -> None:
    """Whatever top_k is; a document of twice as many tokens counts twice."""
    for top_k in (1, 3):
        logits = torch.zeros(12, EXPERTS, dtype=torch.float64)
        for token in range(12):
            for choice in range(top_k):
                logits[token, (token + 4 * choice) % EXPERTS] = 1e-9
        choices = route(logits, torch.eye(EXPERTS, dtype=torch.float64), top_k=top_k, norm_topk=True)
        numbers = torch.zeros(12, dtype=torch.int64)
        total = routing.balance_sum(choices, numbers, count=1, group=ALONE)
        assert total.item() == pytest.approx(12.0, abs=1e-6)


def test_shapes_are_refused_before_any_message() -> None:
    given = problem(CASES["ep1"])
    ep = Group("ep", (0, 1), 0, comm=None)
    weights = ExpertWeights(given.router, given.gate[:6], given.up[:6], given.down[:6])
    x, is_real = torch.zeros(4, HIDDEN, dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    usual = {"num_experts": EXPERTS, "top_k": TOP_K, "norm_topk": True, "ep": ep, "etp": ALONE}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("is_real(3,) != (4,)", {"is_real": is_real[:3]}),
        ("gate(12, 10, 7) != (6, 10, 7)", {"weights": replace(weights, gate=given.gate)}),
        ("down(6, 7, 9) != (6, 7, 10)", {"weights": replace(weights, down=weights.down[..., :9])}),
        ("router(11, 7) != (12, 7)", {"weights": replace(weights, router=given.router[:11])}),
        ("experts(13) % ep(2) != 0", {"num_experts": 13}),
        ("top_k(13) is not in 1..12", {"top_k": 13}),
        ("documents(3,) != slots(4,)", {"documents": Documents(torch.zeros(3, dtype=torch.int64), 1, ep)}),
    ]
    for equation, changed in wrong:
        with pytest.raises(PlanError) as error:
            moe(**{"x": x, "is_real": is_real, "weights": weights, **usual, **changed})
        assert equation in error.value.equation


def test_bf16_is_as_near_to_fp64_as_its_rounding() -> None:
    """Errors of 2 ** -8 each; that of a sum of products is a few of them."""
    case = CASES["ep1"]
    low, high = problem(case, torch.bfloat16), problem(case)
    found = []
    for given, dtype in ((low, torch.bfloat16), (low, torch.float64), (high, torch.float64)):
        y, _ = moe(
            given.batches[0].to(dtype),
            torch.ones(len(given.batches[0]), dtype=torch.bool),
            ExpertWeights(*(getattr(given, name).to(dtype) for name in ("router", *NAMES))),
            num_experts=EXPERTS,
            top_k=TOP_K,
            norm_topk=True,
            ep=ALONE,
            etp=ALONE,
        )
        found.append(y.double())
    size = found[2].abs().max()
    assert (found[0] - found[1]).abs().max() <= 0.03 * size


# --- shared experts -----------------------------------------------------------------------------


def _shared(groups: Groups, *, case: Case, with_scale: bool) -> dict[str, Any]:
    layout, given, tp = case.layout(0), problem(case), groups.get("model", "tp")
    inner = slice(tp.rank * INNER // tp.size, (tp.rank + 1) * INNER // tp.size)
    leaves = [
        layout.local(given.batches[0], 0, tp.rank),
        given.gate[0, inner],
        given.up[0, inner],
        given.down[0, :, inner],
        given.router[:1],
    ]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    x, gate, up, down, scale = leaves
    y = shared_expert(x, gate, up, down, tp=tp, scale=scale if with_scale else None)
    (y * layout.local(given.weighed[0], 0, tp.rank)).sum().backward()
    found = {"y": y.detach().numpy()}
    for name, leaf in zip(("x", *NAMES, "scale"), leaves, strict=True):
        if leaf.grad is not None:
            found[name] = leaf.grad.numpy()
    return found


@pytest.mark.parametrize("with_scale", [True, False])
def test_a_shared_expert_over_tp_is_a_dense_mlp(with_scale: bool) -> None:
    case = Case(((5, 9),), tp=2, form="bshd")
    parts = ranks(_shared, case, with_scale=with_scale)
    given, layout = problem(case), case.layout(0)
    x, gate, up, down, scale = (
        value.clone().requires_grad_()
        for value in (given.batches[0], given.gate[0], given.up[0], given.down[0], given.router[:1])
    )
    a = x @ gate.T
    y = (a * torch.sigmoid(a) * (x @ up.T)) @ down.T
    y = y / (1 + torch.exp(-x @ scale.T)) if with_scale else y
    (y * given.weighed[0]).sum().backward()
    wanted = {"y": y.detach(), "x": x.grad, "gate": gate.grad, "up": up.grad, "down": down.grad}
    joined = {
        "y": layout.join([parts[r]["y"] for r in range(2)], split_tp=True),
        "x": layout.join([parts[r]["x"] for r in range(2)], split_tp=True),
        "gate": torch.cat([parts[r]["gate"] for r in range(2)]),
        "up": torch.cat([parts[r]["up"] for r in range(2)]),
        "down": torch.cat([parts[r]["down"] for r in range(2)], 1),
    }
    if with_scale:
        wanted["scale"], joined["scale"] = scale.grad, parts[0]["scale"] + parts[1]["scale"]
    for name, value in wanted.items():
        assert (joined[name] - value).abs().max() <= 1e-12 * value.abs().max(), name


# --- transformers -------------------------------------------------------------------------------


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_one_rank_is_the_block_of_transformers(
    monkeypatch: pytest.MonkeyPatch, norm_topk: bool, dtype: torch.dtype, far: float
) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=norm_topk,
    )
    config._experts_implementation = "eager"
    block = theirs.Qwen3MoeSparseMoeBlock(config).to(dtype)
    given = problem(Case(((11, 17),)), dtype)
    with torch.no_grad():
        block.gate.weight.copy_(given.router)
        block.experts.gate_up_proj.copy_(torch.cat((given.gate, given.up), 1))
        block.experts.down_proj.copy_(given.down)
    if dtype == torch.float64:  # Theirs is fp32 in any case, which would hide all below 1e-7.
        softmax = torch.nn.functional.softmax
        monkeypatch.setattr(
            torch.nn.functional, "softmax", lambda x, dtype, dim: softmax(x, dim=dim, dtype=torch.float64)
        )
    x = given.batches[0].view(1, -1, HIDDEN)
    their_x, my_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = ExpertWeights(*(getattr(given, name).clone().requires_grad_() for name in ("router", *NAMES)))
    their_y = block(their_x)
    my_y, done = moe(
        my_x,
        torch.ones(x.shape[:-1], dtype=torch.bool),
        weights,
        num_experts=EXPERTS,
        top_k=TOP_K,
        norm_topk=norm_topk,
        ep=ALONE,
        etp=ALONE,
        documents=Documents(torch.zeros(x.shape[:-1], dtype=torch.int64), 1, ALONE),
    )
    for y in (their_y, my_y):
        (y * given.weighed[0].view(y.shape)).sum().backward()
    gate_up = block.experts.gate_up_proj.grad
    pairs = {
        "y": (my_y.detach(), their_y.detach()),
        "x": (my_x.grad, their_x.grad),
        "router": (weights.router.grad, block.gate.weight.grad),
        "gate": (weights.gate.grad, gate_up[:, :INNER]),
        "up": (weights.up.grad, gate_up[:, INNER:]),
        "down": (weights.down.grad, block.experts.down_proj.grad),
    }
    for name, (mine, wanted) in pairs.items():
        assert (mine - wanted).abs().max() <= far * wanted.abs().max(), name

    # Theirs has its shares sum to k.
    logits = (x @ given.router.T).view(-1, EXPERTS)
    monkeypatch.undo()
    aux = theirs.load_balancing_loss_func((logits,), EXPERTS, TOP_K)
    assert done.aux_sum.item() * TOP_K / len(logits) == pytest.approx(aux.item(), rel=1e-6)
