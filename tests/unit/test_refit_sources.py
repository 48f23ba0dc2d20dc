"""Sources as values: the arrays of a rank are those of its layout, or the source is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardweave.errors import DtypeError, GeometryError, MeshError, PlanError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, even, whole
from shardweave.refit.sources import Live, Source, state_of

Arrays = dict[str, torch.Tensor]


def layout(offset: int = 4) -> Layout:
    """Two ranks with some rows of each layer, and a norm that both hold whole."""
    mesh = Mesh((("tp", 2),), offset=offset)
    w = Tensor("layers.{layer}.w", (6, 5), "float32", (("layer", whole(3)),))
    norm = Tensor("norm", (7,), "bfloat16")
    rows = along(mesh, "tp", lambda r: even(whole(6), 2, r))
    rules = (
        BufferRule(w.name, (Part(w),), (whole(3), rows, whole(5))),
        BufferRule("norm", (Part(norm),), norm.dims),
    )
    return Layout("trainer", mesh, rules)


def arrays() -> Arrays:
    held = {f"layers.{layer}.w": torch.full((3, 5), float(layer)) for layer in range(3)}
    return {**held, "norm": torch.ones(7, dtype=torch.bfloat16)}


def test_arrays_are_those_given() -> None:
    given = arrays()
    source = Source(layout(), given, 5)
    assert source.rank == 5
    assert all(source.arrays[name] is array for name, array in given.items())


class Quantised(torch.Tensor):
    """As libraries store eight bits and say that they are sixteen."""


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda held: held.pop("norm"), UnknownNameError, r"missing 1 \(norm\); unexpected 0"),
        (
            lambda held: held.update(bias=torch.zeros(1)),
            UnknownNameError,
            r"missing 0; unexpected 1 \(bias\)",
        ),
        (
            lambda held: held.update({"layers.1.w": torch.zeros(5, 3)}),
            PlanError,
            r"rank 5, 'layers.1.w': shape\(5, 3\) != shape\(3, 5\)",
        ),
        (
            lambda held: held.update(norm=torch.ones(7)),
            DtypeError,
            r"rank 5, 'norm': dtype\(float32\) != dtype\(bfloat16\)",
        ),
        (
            lambda held: held.update(norm=torch.ones(7, dtype=torch.bfloat16).as_subclass(Quantised)),
            DtypeError,
            r"rank 5, 'norm': type\(Quantised\)",
        ),
    ],
)
def test_arrays_that_are_not_those_of_the_layout_are_refused(
    change: Callable[[Arrays], object], error: type[Exception], said: str
) -> None:
    given = arrays()
    change(given)
    with pytest.raises(error, match=said):
        Source(layout(), given, 5)


def test_the_rank_is_said_where_there_are_several() -> None:
    with pytest.raises(GeometryError, match=r"rank\(not given\), ranks\(2\)"):
        Source(layout(), arrays())
    with pytest.raises(MeshError, match=r"rank\(6\)"):
        Source(layout(), arrays(), 6)


def test_live_arrays_are_where_the_parameters_are_now() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    live = Live({"w": parameter})
    before = live["w"]
    parameter.data.add_(1)
    assert before.data_ptr() == parameter.data_ptr() and bool((before == 1).all())
    parameter.data = torch.full((2, 3), 2.0)
    assert bool((live["w"] == 2).all()) and not live["w"].requires_grad


def test_the_state_of_a_module_has_shared_parameters_under_all_names_and_buffers_that_are_saved() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Linear(2, 3, bias=False)
    module.b = torch.nn.Linear(2, 3, bias=False)
    module.b.weight = module.a.weight
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("cached", torch.zeros(1), persistent=False)
    assert state_of(module).keys() == module.state_dict().keys() == {"a.weight", "b.weight", "saved"}
    compiled = torch.nn.Module()
    compiled._orig_mod = module  # as torch.compile wraps it
    assert state_of(compiled).keys() == state_of(module).keys()
