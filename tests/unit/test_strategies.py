"""The public strategies: what they draw is valid, proved, and not always the same."""

from __future__ import annotations

import builtins
import importlib
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings

from shardweave.errors import MissingPackageError
from shardweave.layout import Box, Dim, Layout, Mesh, Sharded, Tensor, parse_layout, prove, whole
from shardweave.testing import strategies


@given(strategies.layouts())
@settings(deadline=None)
def test_layouts_are_proved_and_can_be_written(layout: Layout) -> None:
    prove(layout)
    assert parse_layout(str(layout)) == layout


@given(strategies.cuts(whole(12, "q"), 3))
def test_cuts_give_each_index_once(parts: tuple[Dim, ...]) -> None:
    assert len(parts) == 3
    assert sorted(index for dim in parts for index in dim) == [("q", i) for i in range(12)]


@given(strategies.boxes((4, 7)))
def test_boxes_lie_inside(box: Box) -> None:
    assert all(index in range(size) for dim, size in zip(box.dims, (4, 7), strict=True) for index in dim)


@given(strategies.dims(labels=("q", "k"), size=9))
def test_dims_stay_below_their_size(dim: Dim) -> None:
    assert all(label in ("q", "k") and 0 <= index < 9 for label, index in dim)


@given(strategies.meshes(max_ranks=6))
def test_meshes_are_small(mesh: Mesh) -> None:
    assert mesh.size <= 6


@given(strategies.tensors(max_dims=2, max_size=5))
def test_tensors_have_the_asked_sizes(tensor: Tensor) -> None:
    assert 1 <= len(tensor.shape) <= 2 and max(tensor.shape) <= 5
    assert [name for name, _ in tensor.index] in ([], ["layer"])


def holds(layout: Layout, what: str) -> bool:
    rules = layout.rules
    return {
        "fused": any(len(rule.parts) == 2 for rule in rules),
        "cut along two axes": any(sum(isinstance(dim, Sharded) for dim in rule.dims) == 2 for rule in rules),
        "transposed": any(list(rule.stacked or ()) != sorted(rule.stacked or ()) for rule in rules),
        "stacked": any(rule.parts[0].tensor.index and 0 in (rule.stacked or ()) for rule in rules),
        "padded": any("pad[" in str(layout) for _ in rules),
    }[what]


@pytest.mark.parametrize("what", ["fused", "cut along two axes", "transposed", "stacked", "padded"])
def test_layouts_of_every_kind_are_drawn(what: str) -> None:
    find(strategies.layouts(), lambda layout: holds(layout, what), settings=settings(phases=[Phase.generate]))


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *args: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert builtins.issubclass(MissingPackageError, ImportError)
    with pytest.raises(MissingPackageError, match="pip install hypothesis"):
        strategies.dims()
