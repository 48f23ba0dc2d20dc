"""Groups of grids, planned without torch: the lists of ranks are those that Megatron has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardweave.errors import GeometryError, MeshError, UnknownNameError
from shardweave.layout import Mesh, ordered
from shardweave.train.grid import Groups, Over, plan_groups

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


def test_grids_that_overlap_in_part_are_refused() -> None:
    with pytest.raises(MeshError, match=r"ranks 0\.\.3 and 2\.\.5 overlap"):
        plan_groups({"a": Mesh((("tp", 4),)), "b": Mesh((("tp", 4),), offset=2)}, {})
    with pytest.raises(UnknownNameError, match="vision not among grids"):
        plan_groups({"a": Mesh((("tp", 4),))}, {"vision": {}})


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
