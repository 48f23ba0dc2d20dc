"""Hypothesis strategies of the algebra, for property tests of layouts, plans and partition functions.

They need hypothesis, which is loaded on the first call. Sizes are small, uneven, and rarely 1.

    from hypothesis import given
    from shardweave.testing.strategies import layouts

    @given(layouts())
    def test_every_layout_is_proved(layout): ...
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from shardweave.errors import MissingPackageError
from shardweave.layout import (
    PAD,
    Box,
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Sharded,
    Tensor,
    concat,
    pad,
    relabel,
    split,
    take,
    whole,
)

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

T = TypeVar("T")


def runs(*, labels: Sequence[str | None] = ("",), size: int = 20) -> SearchStrategy[Run]:
    """Runs of indices below ``size``; a label ``None`` draws padding."""
    st = _strategies()

    def build(draw: DrawFn) -> Run:
        label = draw(st.sampled_from(list(labels)))
        if label is PAD:
            return Run(PAD, 0, draw(st.integers(1, 4)))
        start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 4))
        return Run(label, start, draw(st.integers(1, (size - 1 - start) // step + 1)), step)

    return _composite(build)


def dims(
    *, labels: Sequence[str | None] = ("", None), size: int = 20, max_runs: int = 5
) -> SearchStrategy[Dim]:
    """Any dims: strided, padded, with indices in any order and more than once."""
    st = _strategies()
    built: SearchStrategy[Dim] = st.lists(runs(labels=labels, size=size), max_size=max_runs).map(Dim)
    return built


def cuts(dim: Dim, parts: int) -> SearchStrategy[tuple[Dim, ...]]:
    """Ways to give each index of a dim to one of ``parts``: uneven stretches, or blocks out of order."""
    st = _strategies()

    def build(draw: DrawFn) -> tuple[Dim, ...]:
        size = len(dim)
        edges = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
        sizes = [stop - start for start, stop in zip([0, *edges], [*edges, size], strict=True)]
        blocks = [block for block in range(1, size) if size % block == 0]
        if blocks and draw(st.booleans()):
            block = draw(st.sampled_from(blocks))
            dealt = draw(
                st.lists(st.integers(0, parts - 1), min_size=size // block, max_size=size // block).flatmap(
                    lambda owner: st.permutations(list(enumerate(owner)))
                )
            )
            return tuple(
                take(dim, [i for i, owner in dealt if owner == part], block) for part in range(parts)
            )
        return tuple(split(dim, sizes, part) for part in range(parts))

    return _composite(build)


def boxes(shape: Sequence[int]) -> SearchStrategy[Box]:
    """Boxes inside an array of ``shape``, with steps; now and then empty."""
    st = _strategies()

    def one(draw: DrawFn, size: int) -> range:
        start = draw(st.integers(0, size))
        return range(start, draw(st.integers(start, size)), draw(st.integers(1, 3)))

    return _composite(lambda draw: Box(tuple(one(draw, size) for size in shape)))


def meshes(
    *, axes: Sequence[str] = ("tp", "cp", "dp", "pp"), max_ranks: int = 12, offsets: bool = True
) -> SearchStrategy[Mesh]:
    """Meshes of one factorisation, with axes of any order and size, and now and then a first rank."""
    st = _strategies()

    def build(draw: DrawFn) -> Mesh:
        names = draw(st.permutations(list(axes)))
        left, sizes = max_ranks, []
        for _ in names:
            sizes.append(draw(st.integers(1, min(4, left))))
            left //= sizes[-1]
        offset = draw(st.sampled_from([0, 0, 3])) if offsets else 0
        return Mesh(tuple(zip(names, sizes, strict=True)), offset=offset)

    return _composite(build)


def tensors(*, name: str = "w", max_dims: int = 3, max_size: int = 9) -> SearchStrategy[Tensor]:
    """Tensors and families of them; a family has the index dim ``layer``, with layers left out."""
    st = _strategies()

    def build(draw: DrawFn) -> Tensor:
        shape = tuple(draw(st.lists(st.integers(2, max_size), min_size=1, max_size=max_dims)))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64"]))
        if not draw(st.booleans()):
            return Tensor(name, shape, dtype)
        layers = sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=4)))
        return Tensor(
            f"layers.{{layer}}.{name}", shape, dtype, (("layer", Dim(Run("", i, 1) for i in layers)),)
        )

    return _composite(build)


def layouts(*, max_tensors: int = 3, max_ranks: int = 8) -> SearchStrategy[Layout]:
    """Layouts that hold each element once, or by ranks that are replicas: all of them can be proved.

    Dims are cut along mesh axes by uneven stretches or blocks out of order, padded or not; two
    tensors may be fused, index dims stacked or separate, and arrays transposed.
    """
    st = _strategies()

    def build(draw: DrawFn) -> Layout:
        mesh = draw(meshes(axes=("tp", "pp", "dp"), max_ranks=max_ranks))
        count = draw(st.integers(1, max_tensors))
        return Layout("drawn", mesh, tuple(_rule(draw, mesh, f"w{i}") for i in range(count)))

    return _composite(build)


def _rule(draw: DrawFn, mesh: Mesh, name: str) -> BufferRule:
    st = _strategies()
    tensor: Tensor = draw(tensors(name=name))
    columns: list[Dim | Sharded] = list(tensor.dims)
    axes = list(draw(st.permutations([axis for axis, _ in mesh.axes])))
    parts: tuple[Part, ...] = (Part(tensor),)
    for d in range(tensor.num_dims):
        if not axes or not draw(st.booleans()):
            continue
        axis = axes.pop()
        held = draw(cuts(tensor.dims[d], mesh.axis_size(axis)))
        if d >= len(tensor.index):
            multiple = draw(st.integers(1, 4))
            held = tuple(pad(dim, multiple) for dim in held)
            if len(parts) == 1 and draw(st.booleans()):
                other = Tensor(f"{tensor.name}_too", tensor.shape, tensor.dtype, tensor.index)
                second = draw(cuts(whole(tensor.dims[d].runs[0].count), mesh.axis_size(axis)))
                held = tuple(
                    concat(relabel(a, "a"), relabel(b, "b")) for a, b in zip(held, second, strict=True)
                )
                parts = (Part(tensor, "a"), Part(other, "b"))
        columns[d] = Sharded((axis,), held)
    first = draw(st.sampled_from([0, len(tensor.index)]))
    stacked = tuple(draw(st.permutations(list(range(first, tensor.num_dims)))))
    return BufferRule(tensor.name if first else name, parts, tuple(columns), stacked=stacked)


def _strategies() -> Any:
    try:
        return importlib.import_module("hypothesis.strategies")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "hypothesis is installed where the strategies of shardweave.testing are used",
            equation=str(error),
            hint="pip install hypothesis",
        ) from error


def _composite(build: Callable[[DrawFn], T]) -> SearchStrategy[T]:
    strategy: SearchStrategy[T] = _strategies().composite(build)()
    return strategy
