"""Linears, the embedding and the norm on ranks: numbers and gradients of one process and plain torch.

Ranks are in memory, and three of them processes over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import GLOO, MEMORY, plan_of, ranks

from shardweave.errors import PlanError
from shardweave.train import collectives, linear
from shardweave.train.collectives import sum_all
from shardweave.train.grid import Group, Groups
from shardweave.train.linear import column, columns, embed, rms_norm, row, swiglu

ALONE = Group("tp", (0,), 0)
VOCAB, HIDDEN, FEATURES, SLOTS, EPS = 37, 10, 24, 12, 1e-6
CUT = {"embed": 0, "gate": 0, "up": 0, "gate_bias": 0, "down": 1}
"""The dim that is cut over tp of each weight; the others are whole on each rank."""


def drawn(dtype: torch.dtype) -> dict[str, Tensor]:
    some = torch.Generator().manual_seed(3)
    shapes = {
        "embed": (VOCAB, HIDDEN),
        "norm": (HIDDEN,),
        "gate": (FEATURES, HIDDEN),
        "gate_bias": (FEATURES,),
        "up": (FEATURES, HIDDEN),
        "down": (HIDDEN, FEATURES),
        "down_bias": (HIDDEN,),
    }
    return {
        name: torch.randn(shape, generator=some, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def tokens() -> tuple[Tensor, Tensor]:
    """Ids with both ends of each part for 1 to 4 ranks, and what the result is weighted by."""
    some = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (2, SLOTS), generator=some)
    ids.view(-1)[:12] = torch.tensor([0, 9, 10, 12, 13, 18, 19, 25, 26, 29, 30, 36])
    return ids, torch.randn((2, SLOTS, HIDDEN), generator=some, dtype=torch.float64)


def plain() -> dict[str, Tensor]:
    """The block in one process and fp64: the result, and the gradient of each weight and of the input."""
    weights = {name: weight.requires_grad_() for name, weight in drawn(torch.float64).items()}
    ids, g = tokens()
    x = weights["embed"][ids]
    x.retain_grad()
    h = weights["norm"] * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    gate, up = h @ weights["gate"].T + weights["gate_bias"], h @ weights["up"].T
    y = x + (gate * torch.sigmoid(gate) * up) @ weights["down"].T + weights["down_bias"]
    (y * g).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: weight.grad for name, weight in weights.items()}}


def part(value: Tensor, dim: int, tp: Group) -> Tensor:
    """A rank's even part of a dim, the whole padded to a multiple with what must not matter."""
    width = -(-value.shape[dim] // tp.size)
    short = width * tp.size - value.shape[dim]
    shape = list(value.shape)
    shape[dim] = short
    padded = torch.cat((value, value.new_full(shape, 1e4)), dim)
    return padded.narrow(dim, tp.rank * width, width).clone()


def block(tp: Group, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """What a rank has of the result and of the gradients, summed over the ranks that have a weight whole."""
    weights = {
        name: (part(weight, CUT[name], tp) if name in CUT else weight).requires_grad_()
        for name, weight in drawn(dtype).items()
    }
    ids, g = tokens()
    x = linear.embed(ids, weights["embed"], tp=tp, vocab_size=VOCAB)
    x.retain_grad()
    h = linear.rms_norm(x, weights["norm"], EPS)
    gate, up = linear.columns(h, (weights["gate"], weights["up"]), (weights["gate_bias"], None), tp=tp)
    y = x + linear.row(linear.swiglu(gate, up), weights["down"], weights["down_bias"], tp=tp)
    (y * g.to(dtype).chunk(tp.size, 1)[tp.rank]).sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    for name, weight in weights.items():
        found[name] = weight.grad if name in CUT else sum_all(weight.grad, group=tp)
    return {name: value.double().numpy() for name, value in found.items()}


def block_of_rank(groups: Groups) -> dict[torch.dtype, dict[str, np.ndarray]]:
    return {dtype: block(groups.get("model", "tp"), dtype) for dtype in (torch.float64, torch.float32)}


def far(found: dict[int, dict[str, np.ndarray]], tp: int) -> dict[str, float]:
    """For each result how far ranks are from one process, relative to the largest value."""
    wanted, most = plain(), {}
    for name, value in wanted.items():
        for rank, mine in found.items():
            group = Group("tp", tuple(range(tp)), rank)
            cut = 1 if name in ("x", "y") else CUT.get(name)
            theirs = (value if cut is None else part(value, cut, group)).numpy()
            ours = mine[name]
            assert ours.shape == theirs.shape
            if name == "embed":
                rows = max(0, min(VOCAB - rank * len(ours), len(ours)))
                assert not ours[rows:].any()
                ours, theirs = ours[:rows], theirs[:rows]
            most[name] = max(most.get(name, 0.0), float(np.abs(ours - theirs).max() / value.abs().max()))
    return most


# --- faults -------------------------------------------------------------------------------------


def own_part(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return grads[0].chunk(ctx.group.size, ctx.dim)[ctx.group.rank].clone(), None, None


def before_the_sum(y: Tensor, weight: Tensor, bias: Tensor | None = None, *, tp: Group) -> Tensor:
    return collectives.reduce_scatter(torch.nn.functional.linear(y, weight, bias), -2, group=tp)


def divided(x: Tensor, weights: Any, biases: Any = None, *, tp: Group) -> Any:
    return columns(_Over.apply(x, tp), weights, biases, tp=tp)


class _Over(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.size = tp.size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.size, None


FAULTS: dict[str, tuple[Any, str, Any]] = {
    # 15: partial gradients of what each rank has whole, as the gather's backward takes its own part only.
    "15 no sum in the backward": (collectives._Gather, "backward", staticmethod(own_part)),
    # 3: a mean where a sum belongs.
    "3 divided by the ranks": (linear, "columns", divided),
    "the bias on every rank": (linear, "row", before_the_sum),
    "rows one further on": (
        linear,
        "vocabulary",
        lambda n, tp: (range(tp.rank * 13 + 1, min(tp.rank * 13 + 13, n)), 13),
    ),
}


# --- tests --------------------------------------------------------------------------------------


def test_one_rank_is_plain_torch() -> None:
    assert max(far({0: block(ALONE, torch.float64)}, 1).values()) <= 1e-12
    assert max(far({0: block(ALONE, torch.float32)}, 1).values()) <= 5e-6


@pytest.mark.parametrize(("tp", "over"), [(2, MEMORY), (3, MEMORY), (3, GLOO), (4, MEMORY)])
def test_any_number_of_ranks_is_plain_torch(tp: int, over: str) -> None:
    each = ranks(block_of_rank, plan=plan_of(tp=tp), over=over)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        found = far({rank: mine[dtype] for rank, mine in each.items()}, tp)
        assert {name: value for name, value in found.items() if not value <= bound} == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_put_in_is_seen(fault: str) -> None:
    with patch.object(*FAULTS[fault]):  # once for all ranks, which are threads
        each = ranks(block_of_rank, plan=plan_of(tp=3))
    found = far({rank: mine[torch.float64] for rank, mine in each.items()}, 3)
    assert max(found.values()) > 1e-3
    if fault.startswith(("3", "15")):
        assert found["y"] <= 1e-12  # the forward does not show it


def embedded(groups: Groups) -> np.ndarray:
    group = groups.get("model", "tp")
    weight = part(drawn(torch.float32)["embed"], 0, group)
    return embed(tokens()[0], weight, tp=group, vocab_size=VOCAB).numpy()


def test_an_embedding_has_the_same_bits_over_any_number_of_ranks() -> None:
    each = ranks(embedded, plan=plan_of(tp=4))
    wanted = drawn(torch.float32)["embed"][tokens()[0]].numpy()
    assert np.array_equal(np.concatenate([each[rank] for rank in range(4)], 1), wanted)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    some = torch.Generator().manual_seed(1)
    norm = Qwen3MoeRMSNorm(HIDDEN, eps=EPS).to(dtype)
    norm.weight.data = torch.randn(HIDDEN, generator=some).to(dtype)
    x, mine = (
        torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype) for _ in range(2)
    )
    weight = norm.weight.detach().clone().requires_grad_()
    x.requires_grad_()
    mine.requires_grad_()
    wanted, found = norm(x), rms_norm(mine, weight, EPS)
    assert found.dtype == dtype and torch.equal(found, wanted)
    wanted.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(mine.grad, x.grad) and torch.equal(weight.grad, norm.weight.grad)


def test_derivatives_of_one_rank_are_those_of_small_steps() -> None:
    some = torch.Generator().manual_seed(6)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=some, dtype=torch.float64, requires_grad=True)

    def work(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        pair = columns(rms_norm(x, norm, EPS), (gate, up), tp=ALONE)
        return row(swiglu(*pair), down, bias, tp=ALONE)

    assert torch.autograd.gradcheck(
        work, (draw(2, 3, 4), draw(4), draw(5, 4), draw(5, 4), draw(4, 5), draw(4))
    )


# --- mistakes -----------------------------------------------------------------------------------

TWO = Group("tp", (4, 5), 1)
"""A group that nobody answers in: what is refused is refused before anybody is asked."""


@pytest.mark.parametrize(
    "work",
    [
        lambda: embed(torch.tensor([[0, 37]]), torch.zeros(19, 4), tp=TWO, vocab_size=37),
        lambda: embed(torch.tensor([[0, -100]]), torch.zeros(19, 4), tp=TWO, vocab_size=37),
        lambda: embed(torch.tensor([[0, 1, 2]]), torch.zeros(19, 4), tp=TWO, vocab_size=37),
        lambda: embed(torch.tensor([[0, 1]]), torch.zeros(37, 4), tp=TWO, vocab_size=37),
        lambda: column(torch.zeros(2, 4), torch.zeros(3, 5), tp=TWO),
        lambda: columns(torch.zeros(2, 4), (torch.zeros(3, 4),), (None, None), tp=TWO),
        lambda: row(torch.zeros(2, 4), torch.zeros(3, 5), tp=TWO),
        lambda: row(torch.zeros(3, 4), torch.zeros(3, 4), tp=TWO),
    ],
)
def test_a_mistake_is_refused_before_anybody_communicates(work: Callable[[], Any]) -> None:
    with pytest.raises(PlanError) as caught:
        work()
    error = caught.value
    assert error.rule and "rank 5" in error.where and error.equation and error.hint
