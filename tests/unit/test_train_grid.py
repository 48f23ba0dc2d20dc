"""Groups of grids, planned without torch: the lists of ranks are those that Megatron has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardweave.errors import GeometryError, TransportError, UnknownNameError
from shardweave.layout import Mesh, ordered
from shardweave.train.grid import GRID, Groups, Over, plan_groups
from shardweave.train.parallel import Parallel
from shardweave.train.runtime import group_plan

DENSE = ordered("tp-cp-dp-pp", {"tp": 2, "cp": 2, "dp": 3, "pp": 2}, offset=5)
EXPERT = Mesh(DENSE.axes, ((("etp", 1), ("ep", 4), ("edp", 3), ("pp", 2)),), offset=5)
KINDS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "dp_cp": ("cp", "dp"),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "ends": Over(("pp",), (0, -1)),
    "first": Over(("pp",), (0,)),
    "ep": ("ep",),
    "expert_dp": ("edp",),
    "expert_tp": ("etp",),
}


def test_groups_are_those_of_the_mesh_with_its_offset() -> None:
    plan = plan_groups({"llm": EXPERT}, {"llm": KINDS})
    for rank in EXPERT.ranks:
        at = EXPERT.coordinate(rank)
        for name, axes in KINDS.items():
            if isinstance(axes, Over):
                continue
            wanted = [
                other
                for other in EXPERT.ranks
                if all(
                    EXPERT.coordinate(other)[axis] == at[axis]
                    for axis in (
                        ("tp", "cp", "dp", "pp") if axes[0] in "tp cp dp pp" else ("etp", "ep", "edp", "pp")
                    )
                    if axis not in axes
                )
            ]
            assert plan.ranks(rank, "llm", name) == tuple(wanted), (rank, name)


def test_equal_lists_share_a_communicator_and_single_ranks_need_none() -> None:
    mesh = ordered("tp-cp-dp-pp", {"tp": 2, "cp": 1, "dp": 3, "pp": 2})
    kinds = {
        "dp": ("dp",),
        "dp_cp": ("cp", "dp"),
        "cp": ("cp",),
        "tp": ("tp",),
        "ends": Over(("pp",), (0, -1)),
    }
    plan = plan_groups({"llm": mesh}, {"llm": {**kinds, "pp": ("pp",)}})
    # dp and dp_cp are the same lists, ends and pp too; cp has single ranks only.
    assert len(plan.communicators) == 4 + 6 + 6
    assert len(set(plan.communicators)) == len(plan.communicators)
    assert all(len(ranks) > 1 for ranks in plan.communicators)


def test_the_members_of_part_of_a_group() -> None:
    plan = plan_groups(
        {"llm": ordered("tp-pp", {"tp": 2, "pp": 4})}, {"llm": {"ends": Over(("pp",), (0, -1))}}
    )
    groups = Groups(plan, 2, {})
    assert plan.ranks(0, "llm", "ends") == (0, 6)
    assert groups.find("llm", "ends") is None
    with pytest.raises(GeometryError, match=r"rank 2, group llm\.ends"):
        groups.get("llm", "ends")
    with pytest.raises(UnknownNameError, match=r"llm\.embd is not among llm\.ends"):
        groups.find("llm", "embd")


def test_a_rank_outside_a_grid_is_no_member() -> None:
    plan = plan_groups(
        {
            "encoder": ordered("tp-dp", {"tp": 2, "dp": 2}),
            "llm": ordered("tp-dp", {"tp": 4, "dp": 1}, offset=4),
        },
        {"encoder": {"tp": ("tp",)}, "llm": {"tp": ("tp",)}},
    )
    assert plan.communicators == ((0, 1), (2, 3), (4, 5, 6, 7))
    assert plan.ranks(5, "encoder", "tp") is None and plan.ranks(5, "llm", "tp") == (4, 5, 6, 7)
    assert plan.world_size == 8


def test_a_position_is_a_rank_in_the_group_and_wraps() -> None:
    group = Groups(plan_groups({"llm": DENSE}, {"llm": {"pp": ("pp",)}}), 18, {}).get("llm", "pp")
    assert (group.ranks, group.rank, group.is_first) == ((6, 18), 1, False)
    assert (group.global_rank(0), group.global_rank(-1), group.global_rank(group.rank + 1)) == (6, 18, 6)


def test_grids_on_the_same_ranks_on_some_of_them_and_on_others() -> None:
    """By hand: which communicators there are, each list once, in the order of grids and names."""
    grids = {
        "vision": ordered("tp-dp", {"tp": 2, "dp": 3}),
        "language": ordered("tp-dp", {"tp": 2, "dp": 2}, offset=4),
        "critic": ordered("tp", {"tp": 2}, offset=8),
    }
    plan = plan_groups(
        grids,
        {grid: {axis: (axis,) for axis, _ in mesh.axes} for grid, mesh in grids.items()},
        across={"world": ("language", "vision"), "last": ("critic",)},
    )
    assert plan.communicators == (
        *((0, 1), (2, 3), (4, 5), (0, 2, 4), (1, 3, 5)),
        *((6, 7), (4, 6), (5, 7)),  # not (4, 5) again
        *((8, 9), tuple(range(8))),  # not (8, 9) again
    )
    assert (plan.world_size, plan.most_calls, plan.mean_calls) == (10, 4, 2.8)
    assert plan.num_groups == 3 + 2 + 2 + 2 + 1 + 2


def test_communicators_of_grids_that_overlap_are_made_without_a_ring_of_waiting() -> None:
    """Each rank makes its own in turn, and each waits for all members: that ends at any overlap."""
    grids = {
        "a": ordered("tp-dp", {"tp": 2, "dp": 3}),
        "b": ordered("x-y", {"x": 3, "y": 2}, offset=3),
        "c": ordered("x-y-z", {"x": 2, "y": 2, "z": 2}, offset=1),
    }
    axes = {grid: {name: (name,) for name, _ in mesh.axes} for grid, mesh in grids.items()}
    plan = plan_groups(grids, axes, across={"all": ("a", "b", "c")})
    left = {rank: list(numbers) for rank, numbers in plan.of_rank.items()}
    rounds = 0
    while any(left.values()):
        ready = {
            numbers[0]
            for numbers in left.values()
            if numbers and all(left[other][:1] == numbers[:1] for other in plan.communicators[numbers[0]])
        }
        assert ready, left
        left = {rank: [one for one in numbers if one not in ready] for rank, numbers in left.items()}
        rounds += 1
    assert rounds < len(plan.communicators)  # and not one after the other


def test_the_groups_of_one_grid_are_those_of_a_model_alone() -> None:
    vision, language = Parallel(tp=2, dp=2), Parallel(tp=2, pp=2, dp=2, offset=2)
    plan = plan_groups(
        {"vision": vision.mesh, "language": language.mesh},
        {"vision": vision.groups, "language": language.groups},
        across={"world": ("vision", "language")},
    )
    assert plan.of("vision") == group_plan(vision) and plan.of("language") == group_plan(language)
    made = {ranks: object() for number, ranks in enumerate(plan.communicators) if number in plan.of_rank[3]}
    groups = Groups(plan, 3, made)
    for grid, of in (("vision", vision), ("language", language)):
        seen = groups.of(grid)
        assert seen.rank == 3 and seen.plan == group_plan(of)
        for name in of.groups:
            found = seen.find(GRID, name)
            assert found is groups.find(grid, name)
            assert found is None or found.ranks == group_plan(of).ranks(3, GRID, name)
            assert found is None or found.comm is made.get(found.ranks)
    # Ranks 2 and 3 are tp of both: one communicator. Their names say whose each is.
    both = groups.of("vision").get(GRID, "tp"), groups.of("language").get(GRID, "tp")
    assert [group.name for group in both] == ["vision.tp", "language.tp"]
    assert both[0].ranks == both[1].ranks == (2, 3) and both[0].comm is both[1].comm is not None


def test_a_rank_outside_a_grid_has_its_groups_and_is_in_none_of_them() -> None:
    grids = {"vision": ordered("tp", {"tp": 2}), "language": ordered("tp-pp", {"tp": 2, "pp": 2}, offset=1)}
    plan = plan_groups(
        grids,
        {grid: {axis: (axis,) for axis, _ in mesh.axes} for grid, mesh in grids.items()},
        across={"world": ("vision", "language"), "eyes": ("vision",)},
    )
    groups = [Groups(plan, rank, {}) for rank in range(5)]
    assert [each.member("vision") for each in groups] == [True, True, False, False, False]
    assert [each.member("language") for each in groups] == [False, True, True, True, True]
    assert [each.of("language").member(GRID) for each in groups] == [False, True, True, True, True]
    assert groups[0].of("language").find(GRID, "tp") is None
    with pytest.raises(GeometryError, match=r"rank\(0\) in no group of that name on tp=2,pp=2 @ 1"):
        groups[0].of("language").get(GRID, "tp")
    assert [each.across("world").rank for each in groups] == [0, 1, 2, 3, 4]
    assert groups[1].across("eyes").ranks == (0, 1)
    with pytest.raises(GeometryError, match=r"rank 2, group eyes: rank\(2\) in no group"):
        groups[2].across("eyes")


def test_what_nobody_planned_has_no_name() -> None:
    """Neither another grid's group, nor one over several, is found in the groups of one grid."""
    grids = {"vision": ordered("tp", {"tp": 2}), "language": ordered("dp", {"dp": 2})}
    plan = plan_groups(
        grids, {"vision": {"tp": ("tp",)}, "language": {"dp": ("dp",)}}, across={"world": tuple(grids)}
    )
    groups = Groups(plan, 1, {})
    with pytest.raises(UnknownNameError, match=r"vision\.dp is not among vision\.tp, language\.dp"):
        groups.of("vision").get(GRID, "dp")
    with pytest.raises(UnknownNameError, match="language is not among model"):
        groups.of("vision").find("language", "dp")
    with pytest.raises(UnknownNameError, match=r"world is not among across\(\)"):
        groups.of("vision").across("world")
    with pytest.raises(UnknownNameError, match=r"all is not among across\(world\)"):
        groups.across("all")
    for ask in (groups.of, groups.member):
        with pytest.raises(UnknownNameError, match="audio is not among vision, language"):
            ask("audio")
    with pytest.raises(UnknownNameError, match="vision not among grids"):
        plan_groups({"a": Mesh((("tp", 4),))}, {"vision": {}})
    with pytest.raises(UnknownNameError, match="vision not among grids"):
        plan_groups({"a": Mesh((("tp", 4),))}, {}, across={"world": ("a", "vision")})


def test_the_groups_of_all_grids_are_closed_at_once() -> None:
    class Made:
        def name(self) -> str:
            return "memory"

        def abort(self) -> None:
            ended.append(self)

    grids = {"vision": ordered("tp", {"tp": 2}), "language": ordered("tp", {"tp": 2})}
    plan = plan_groups(
        grids, {grid: {"tp": ("tp",)} for grid in grids}, across={"world": ("vision", "language")}
    )
    ended: list[Made] = []
    made = Made()
    groups = Groups(plan, 0, {(0, 1): made})
    seen = groups.of("vision")
    found = seen.get(GRID, "tp"), groups.get("language", "tp"), groups.across("world")
    assert all(group.comm is made for group in found)
    with pytest.raises(TransportError, match="close\\(\\) of groups\\.of\\('vision'\\)"):
        seen.close()
    assert not ended
    groups.close()
    assert ended == [made]
    for group in found:
        with pytest.raises(TransportError, match=r"send\(\) after close\(\)"):
            group.comm.send([], 1, 0)


def test_a_large_world_is_planned_without_torch() -> None:
    """16,384 ranks: TP8 CP2 PP16 EP64 ETP1. Nobody makes 16,384 groups of one rank."""
    script = """
import sys
from shardweave.layout import Mesh
from shardweave.train.grid import plan_groups
dense = (("tp", 8), ("cp", 2), ("dp", 64), ("pp", 16))
mesh = Mesh(dense, ((("etp", 1), ("ep", 64), ("edp", 16), ("pp", 16)),))
names = "tp cp dp dp_cp pp tp_pp etp ep edp".split()
kinds = {name: tuple(name.split("_")) for name in names}
plan = plan_groups({"llm": mesh}, {"llm": kinds})
assert "torch" not in sys.modules
print(len(plan.communicators), max(map(len, plan.of_rank.values())))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    # tp 2048, cp 8192, dp 256, dp_cp 128, pp 1024, tp_pp 128, ep 256, edp 1024; no etp
    assert done.stdout.split() == [str(2048 + 8192 + 256 + 128 + 1024 + 128 + 256 + 1024), "8"]
