"""Meshes: rank orders, coordinates, groups, several factorisations."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import meshes

from shardweave.errors import MeshError
from shardweave.layout import Mesh, ordered


def brute_coordinates(axes: tuple[tuple[str, int], ...], offset: int) -> dict[int, dict[str, int]]:
    """Rank to coordinate by counting, the first axis fastest."""
    names = [name for name, _ in reversed(axes)]
    counted = itertools.product(*(range(n) for _, n in reversed(axes)))
    return {offset + i: dict(zip(names, values, strict=True)) for i, values in enumerate(counted)}


def brute_groups(
    mesh: Mesh, view: tuple[tuple[str, int], ...], axes: tuple[str, ...]
) -> list[tuple[int, ...]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in brute_coordinates(view, mesh.offset).items():
        groups.setdefault(tuple(v for name, v in coordinate.items() if name not in axes), []).append(rank)
    return sorted(tuple(sorted(group)) for group in groups.values())


# The right values of W=8, 2 x 2 x 2, as read from megatron-core.
EIGHT = {"tp": 2, "dp": 2, "pp": 2}
NEXT = ((0, 1), (2, 3), (4, 5), (6, 7))
BY_TWO = ((0, 2), (1, 3), (4, 6), (5, 7))
BY_FOUR = ((0, 4), (1, 5), (2, 6), (3, 7))


def test_order_tp_dp_pp() -> None:
    mesh = ordered("tp-dp-pp", EIGHT)
    assert mesh.groups("tp") == NEXT
    assert mesh.groups("dp") == BY_TWO
    assert mesh.groups("pp") == BY_FOUR


def test_order_tp_pp_dp() -> None:
    mesh = ordered("tp-pp-dp", EIGHT)
    assert mesh.groups("tp") == NEXT
    assert mesh.groups("dp") == BY_FOUR
    assert mesh.groups("pp") == BY_TWO


def test_experts_factorise_the_same_ranks() -> None:
    mesh = Mesh(
        (("tp", 2), ("cp", 1), ("dp", 4), ("pp", 1)), ((("etp", 1), ("ep", 4), ("edp", 2), ("pp", 1)),)
    )
    assert mesh.groups("tp") == NEXT
    assert mesh.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("edp") == BY_FOUR
    assert mesh.groups("etp", "ep") == mesh.groups("ep")
    assert mesh.coordinate(6) == {"tp": 0, "cp": 0, "dp": 3, "pp": 0, "etp": 0, "ep": 2, "edp": 1}
    with pytest.raises(MeshError, match="no factorisation has all of tp, ep"):
        mesh.groups("tp", "ep")


def test_pipeline_groups_that_differ_are_refused() -> None:
    dense = (("tp", 2), ("pp", 2), ("dp", 2))
    experts = (("etp", 1), ("ep", 4), ("pp", 2), ("edp", 1))
    assert Mesh(dense).groups("pp") == BY_TWO
    assert Mesh(experts).groups("pp") == BY_FOUR
    with pytest.raises(MeshError, match=r"axis 'pp', rank 2: coordinate 1 in .* != 0 in"):
        Mesh(dense, (experts,))
    last = (("etp", 1), ("ep", 4), ("edp", 1), ("pp", 2))
    assert Mesh((("tp", 2), ("dp", 2), ("pp", 2)), (last,)).groups("pp") == BY_FOUR


def test_a_shared_axis_of_two_sizes_is_refused() -> None:
    with pytest.raises(MeshError, match=r"axis 'pp', rank 11: coordinate 0 in .* != 1 in"):
        Mesh((("tp", 2), ("pp", 2)), ((("pp", 4),),), offset=10)


@given(st.permutations(["tp", "cp", "ep", "dp", "pp"]), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_any_order(tokens: list[str], sizes: list[int]) -> None:
    mesh = ordered("-".join(tokens), dict(zip(sorted(tokens), sizes, strict=True)))
    assert [name for name, _ in mesh.axes] == tokens
    for rank, coordinate in brute_coordinates(mesh.axes, 0).items():
        assert mesh.coordinate(rank) == coordinate
        strides = itertools.accumulate((n for _, n in mesh.axes), initial=1, func=lambda a, b: a * b)
        assert rank == sum(
            coordinate[name] * stride for (name, _), stride in zip(mesh.axes, strides, strict=False)
        )


def test_tokens_without_sizes_and_sizes_without_tokens() -> None:
    assert ordered("tp-cp-dp", {"tp": 2, "dp": 3, "pp": 1}).axes == (
        ("tp", 2),
        ("cp", 1),
        ("dp", 3),
        ("pp", 1),
    )
    assert ordered("", {}).size == 1
    with pytest.raises(MeshError, match=r"order 'tp-dp': pp\(2\) is not in the order"):
        ordered("tp-dp", {"tp": 2, "dp": 2, "pp": 2})


@given(meshes())
def test_coordinates_both_ways(mesh: Mesh) -> None:
    expected = brute_coordinates(mesh.axes, mesh.offset)
    assert list(mesh.ranks) == sorted(expected) and mesh.size == len(expected)
    for view in (mesh.axes, *mesh.views):
        for rank, coordinate in brute_coordinates(view, mesh.offset).items():
            assert coordinate.items() <= mesh.coordinate(rank).items()
            assert mesh.rank(coordinate) == rank
            assert mesh.rank(mesh.coordinate(rank)) == rank
            for name, value in coordinate.items():
                assert mesh.columns[name][rank - mesh.offset] == value
                assert mesh.axis_size(name) == mesh.sizes[name] > value
    free = mesh.axes[0][0]
    fixed = {name: 0 for name, _ in mesh.axes if name != free}
    assert mesh.where(fixed).tolist() == [rank for rank, c in expected.items() if fixed.items() <= c.items()]


@given(meshes(), st.data())
def test_groups_partition_the_ranks(mesh: Mesh, data: st.DataObject) -> None:
    view = data.draw(st.sampled_from([mesh.axes, *mesh.views]))
    names = data.draw(st.permutations([name for name, _ in view]))
    axes = tuple(names[: data.draw(st.integers(0, len(names)))])
    groups = mesh.groups(*axes)
    assert list(groups) == brute_groups(mesh, view, axes)
    assert sorted(rank for group in groups for rank in group) == list(mesh.ranks)
    assert {len(group) for group in groups} == {math.prod(mesh.sizes[axis] for axis in axes)}
    assert groups == mesh.groups(*axes, *axes)
    for group in groups:
        assert all(mesh.group(rank, *axes) == group for rank in group)


def test_meshes_side_by_side() -> None:
    encoder = ordered("tp-dp", {"tp": 2, "dp": 2})
    llm = ordered("tp-dp", {"tp": 4, "dp": 1}, offset=4)
    assert (encoder.ranks, llm.ranks) == (range(4), range(4, 8))
    assert llm.groups("tp") == ((4, 5, 6, 7),)
    assert llm.groups("dp") == ((4,), (5,), (6,), (7,))
    assert llm.coordinate(6) == {"tp": 2, "dp": 0}
    assert llm.where({"tp": 3}).tolist() == [7]
    with pytest.raises(MeshError, match=r"rank\(2\) is not in 4\.\.7"):
        llm.coordinate(2)


def test_a_mesh_of_many_ranks_is_quick() -> None:
    mesh = ordered("tp-cp-dp-pp", {"tp": 8, "cp": 2, "dp": 64, "pp": 16})
    assert len(mesh.groups("tp")) == 2048
    assert mesh.group(16383, "tp") == tuple(range(16376, 16384))


@pytest.mark.parametrize(
    ("ask", "equation"),
    [
        (lambda: Mesh((("tp", 2), ("tp", 2))), "axes(tp=2,tp=2)"),
        (lambda: Mesh((("tp", 0),)), "axes(tp=0)"),
        (lambda: Mesh((("t p", 2),)), "axes(t p=2)"),
        (lambda: Mesh((("tp", 2),), ((("ep", 3),),)), "tp(2) = 2 != ep(3) = 3"),
        (lambda: Mesh((("tp", 2),), offset=-1), "offset(-1) < 0"),
        (lambda: ordered("tp-tp", {"tp": 2}), "axes(tp=2,tp=2)"),
        (lambda: Mesh((("tp", 2),)).axis_size("pp"), "axis 'pp' is not among tp"),
        (lambda: Mesh((("tp", 2),)).groups("pp"), "axis 'pp' is not among tp"),
        (lambda: Mesh((("tp", 2),)).group(2, "tp"), "rank(2) is not in 0..1"),
        (lambda: Mesh((("tp", 2),)).where({"tp": 2}), "coordinate(2) is not in 0..1"),
        (lambda: Mesh((("tp", 2), ("dp", 2))).rank({"tp": 1}), "names 2 ranks"),
    ],
)
def test_what_is_no_mesh_is_refused(ask: object, equation: str) -> None:
    with pytest.raises(MeshError) as caught:
        ask()  # type: ignore[operator]
    error = caught.value
    assert all([error.rule, error.where, error.equation, error.hint])
    assert equation in error.equation
