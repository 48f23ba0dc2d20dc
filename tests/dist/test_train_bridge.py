"""Rows from one grid to another and their gradients back, in memory and between processes.

Which ranks have which rows is drawn at random: any two numbers of ranks, with and without ranks in common,
ranks without a row. The reference is indexing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from worlds import GLOO, ranks

from shardweave.errors import GapError, OverlapError, PlanError
from shardweave.layout import Mesh
from shardweave.plan import plan
from shardweave.testing.world import sent_bytes
from shardweave.train.bridge import bridge, rows_on
from shardweave.train.grid import GroupPlan, Groups, plan_groups

WIDTH = 3
PAIRS: dict[str, tuple[Mesh, Mesh]] = {
    "the same ranks, 1:1": (Mesh((("dp", 4),)), Mesh((("dp", 4),))),
    "the same ranks, another factorisation": (Mesh((("tp", 2), ("dp", 3))), Mesh((("tp", 3), ("dp", 2)))),
    "apart, 2:1": (Mesh((("dp", 4),)), Mesh((("dp", 2),), offset=4)),
    "apart, 1:2": (Mesh((("dp", 2),)), Mesh((("cp", 4),), offset=2)),
    "apart, 3:2": (Mesh((("dp", 3),)), Mesh((("dp", 2),), offset=3)),
    "apart, 4:1": (Mesh((("dp", 4),)), Mesh((("dp", 1),), offset=4)),
    "apart, the second first": (Mesh((("dp", 3),), offset=2), Mesh((("dp", 2),))),
    "in common in part, 3:3": (Mesh((("dp", 3),)), Mesh((("dp", 3),), offset=2)),
    "in common in part, 4:3": (Mesh((("tp", 2), ("dp", 2))), Mesh((("cp", 3),), offset=2)),
    "one in the other": (Mesh((("dp", 2),), offset=1), Mesh((("tp", 2), ("cp", 2)))),
    "with an offset": (Mesh((("dp", 3),), offset=1), Mesh((("dp", 2),), offset=3)),
}


def dealt(mesh: Mesh, num_rows: int, seed: int) -> list[np.ndarray]:
    """Rows at random ranks, in random order."""
    chance = np.random.default_rng(seed)
    rows, owner = chance.permutation(num_rows), chance.integers(0, mesh.size, num_rows)
    return [rows[owner == rank] for rank in range(mesh.size)]


def layout_of(mesh: Mesh, held: list[np.ndarray], num_rows: int) -> Any:
    axes = [name for name, _ in mesh.axes]
    strides = np.cumprod([1, *(size for _, size in mesh.axes)])

    def of(*at: int) -> np.ndarray:
        return held[sum(int(a * s) for a, s in zip(at, strides, strict=False))]

    return rows_on(mesh, axes, of, num_rows=num_rows, width=WIDTH)


def world(first: Mesh, second: Mesh) -> GroupPlan:
    return plan_groups({"a": first, "b": second}, {}, across={"world": ("a", "b")})


def go(groups: Groups, *, first: Mesh, second: Mesh, num_rows: int, seed: int, counted: bool) -> list[int]:
    """Move rows and take the way back; bytes that this rank had to send there, and that it sent both ways."""
    here, there = dealt(first, num_rows, seed), dealt(second, num_rows, seed + 1)
    way = bridge(
        layout_of(first, here, num_rows), layout_of(second, there, num_rows), group=groups.across("world")
    )

    def mine(mesh: Mesh, held: list[np.ndarray]) -> torch.Tensor:
        of = held[groups.rank - mesh.offset] if groups.rank in mesh.ranks else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(of)

    full = torch.arange(num_rows * WIDTH, dtype=torch.float64).view(num_rows, WIDTH)
    chance = torch.Generator().manual_seed(seed)
    grads = torch.randn(num_rows, WIDTH, dtype=torch.float64, generator=chance)
    mine_first, mine_second = mine(first, here), mine(second, there)
    rows = full[mine_first].clone().requires_grad_()
    arrived = way.over(rows)
    assert torch.equal(arrived, full[mine_second])
    sent = sent_bytes(groups)["world"] if counted and way.group.size > 1 else 0
    torch.autograd.backward([arrived], [grads[mine_second]])
    assert torch.equal(rows.grad, grads[mine_first])
    wanted = len(set(mine_first.tolist()) - set(mine_second.tolist())) * WIDTH
    return [8 * wanted, sent, way.moved * 8]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PAIRS)
def test_rows_arrive_and_gradients_go_back_where_they_came_from(name: str, seed: int) -> None:
    """Every byte that is sent is wanted by another rank, and is sent once: 1.000 of what is needed."""
    first, second = PAIRS[name]
    found = ranks(
        go, plan=world(first, second), first=first, second=second, num_rows=23, seed=seed, counted=True
    )
    needed, sent, said = (sum(one[i] for one in found.values()) for i in range(3))
    assert sent == needed == said // len(found)


@pytest.mark.parametrize("name", ["apart, 3:2", "in common in part, 4:3", "the same ranks, 1:1"])
def test_processes_do_the_same(name: str) -> None:
    first, second = PAIRS[name]
    given = {"first": first, "second": second, "num_rows": 23, "seed": 5, "counted": False}
    assert ranks(go, plan=world(first, second), over=GLOO, **given).keys() == ({*first.ranks, *second.ranks})


def test_three_sources_and_two_destinations_are_an_interval_plan() -> None:
    """A peer raises unless one number divides the other. Six samples: 2 and 1 rows, 1 and 2."""
    first, second = Mesh((("dp", 3),)), Mesh((("dp", 2),), offset=3)
    src = rows_on(first, ("dp",), lambda d: np.arange(2 * d, 2 * d + 2), num_rows=6, width=WIDTH)
    dst = rows_on(second, ("dp",), lambda d: np.arange(3 * d, 3 * d + 3), num_rows=6, width=WIDTH)
    family = plan(src, dst).families[0]
    counts: dict[tuple[int, int], int] = {}
    for box, a, b in zip(family.box.tolist(), family.src.tolist(), family.dst.tolist(), strict=True):
        counts[a, b - 3] = counts.get((a, b - 3), 0) + int(family.count[box, 0])
    assert counts == {(0, 0): 2, (1, 0): 1, (1, 1): 1, (2, 1): 2}


def test_what_is_no_permutation_is_refused() -> None:
    mesh = Mesh((("dp", 2),))
    whole = plan_groups({"a": mesh}, {}, across={"world": ("a",)})

    def side(*held: list[int]) -> Any:
        return rows_on(mesh, ("dp",), lambda d: np.array(held[d], dtype=np.int64), num_rows=4, width=WIDTH)

    right, twice, lost = side([0, 1], [2, 3]), side([0, 1, 2], [2, 3]), side([0, 1], [3])

    def work(groups: Groups) -> None:
        group = groups.across("world")
        with pytest.raises(OverlapError):
            bridge(twice, right, group=group)
        with pytest.raises(GapError):
            bridge(right, lost, group=group)
        with pytest.raises(PlanError, match=r"rows\(3\) != held\(2\)"):
            bridge(right, right, group=group).over(torch.zeros(3, WIDTH))

    ranks(work, plan=whole)
    elsewhere = rows_on(
        Mesh((("dp", 2),), offset=5), ("dp",), lambda d: np.arange(2 * d, 2 * d + 2), num_rows=4, width=WIDTH
    )

    def outside(groups: Groups) -> None:
        with pytest.raises(PlanError, match="ranks 5, 6 are not in it"):
            bridge(right, elsewhere, group=groups.across("world"))

    ranks(outside, plan=whole)


def test_a_mutation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the order in which they arrive, and not in that in which they are wanted."""
    first, second = PAIRS["apart, 3:2"]
    monkeypatch.setattr("numpy.argsort", lambda a, **_: np.arange(len(a)))
    with pytest.raises(AssertionError):
        ranks(go, plan=world(first, second), first=first, second=second, num_rows=23, seed=1, counted=True)
