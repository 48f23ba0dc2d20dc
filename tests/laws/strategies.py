"""Hypothesis strategies for the values of the algebra, and slow plain references for what they hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from shardweave.layout import (
    IDENTITY,
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
    Transform,
    along,
    balanced,
    chunk,
    concat,
    even,
    interleave,
    pad,
    select,
    take,
    whole,
)

Item = tuple[str | None, int]

labels = st.sampled_from(["", "q", "k", "gate.weight", "pad"])
labels_and_padding = labels | st.just(PAD)


counts = st.sampled_from([0, 1, 1, 2, 3, 5])


@st.composite
def runs(
    draw: st.DrawFn,
    label: st.SearchStrategy[str | None] = labels_and_padding,
    count: st.SearchStrategy[int] = counts,
) -> Run:
    """A run with small numbers, so that runs meet, overlap and repeat; counts 0, 1 and 2 are common."""
    return Run(draw(label), draw(st.integers(0, 12)), draw(count), draw(st.integers(1, 4)))


def dims(label: st.SearchStrategy[str | None] = labels_and_padding) -> st.SearchStrategy[Dim]:
    return st.lists(runs(label), max_size=7).map(Dim)


# Long runs of few labels: most of them have indices in common.
crowded_dims = st.lists(runs(st.sampled_from(["", "", "q", PAD]), st.integers(1, 12)), max_size=4).map(Dim)


def items_of(given: list[Run]) -> list[Item]:
    """The indices of a list of runs, one by one."""
    return [
        (PAD, 0) if run.label is PAD else (run.label, run.start + i * run.step)
        for run in given
        for i in range(run.count)
    ]


def stretch_at(items: list[Item], at: int) -> int:
    """How many items from `at` on one run can hold."""
    label, first = items[at]
    most = 1
    step = items[at + 1][1] - first if at + 1 < len(items) else 0
    for label_i, index in items[at + 1 :]:
        progresses = index == 0 if label is PAD else step > 0 and index == first + most * step
        if label_i != label or not progresses:
            break
        most += 1
    return most


def run_of(items: list[Item]) -> Run:
    (label, start), count = items[0], len(items)
    return Run(label, start, count, 1 if label is PAD or count < 2 else items[1][1] - start)


def groupings(items: list[Item]) -> Iterator[list[Run]]:
    """Every list of runs that holds the items."""
    if not items:
        yield []
        return
    for n in range(1, stretch_at(items, 0) + 1):
        for rest in groupings(items[n:]):
            yield [run_of(items[:n]), *rest]


@st.composite
def regrouped(draw: st.DrawFn, items: list[Item]) -> list[Run]:
    """One of the lists of runs that hold the items."""
    found: list[Run] = []
    at = 0
    while at < len(items):
        n = draw(st.integers(1, stretch_at(items, at)))
        found.append(run_of(items[at : at + n]))
        at += n
    return found


ranges = st.builds(
    lambda start, count, step: range(start, start + count * step, step),
    st.integers(0, 5),
    st.sampled_from([0, 1, 2, 4, 7]),
    st.sampled_from([1, 1, 2, 3]),
)


def boxes(num_dims: int) -> st.SearchStrategy[Box]:
    return st.tuples(*[ranges] * num_dims).map(Box)


# --- meshes and layouts -------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of two to four axes, with a second factorisation that shares the last axis half of the time."""
    names = draw(st.permutations(["tp", "cp", "dp", "pp"]))[: draw(st.integers(2, 4))]
    axes = tuple((name, draw(st.sampled_from([1, 2, 2, 3]))) for name in names)
    offset = draw(st.sampled_from([0, 5]))
    if not draw(st.booleans()):
        return Mesh(axes, offset=offset)
    inner = math.prod(n for _, n in axes[:-1])
    ep = draw(st.sampled_from([n for n in range(1, inner + 1) if inner % n == 0]))
    return Mesh(axes, ((("ep", ep), ("edp", inner // ep), axes[-1]),), offset)


def _one(draw: st.DrawFn, mesh: Mesh, axes: list[str], dim: Dim, padded: bool) -> Dim | Sharded:
    """A random way to lay out a dim; takes the axes that it cuts along out of `axes`."""
    size = len(dim)
    ways = ["whole", "balanced", "chunk", "strided", "taken", "nested"] + (["padded"] if padded else [])
    way = draw(st.sampled_from(ways))
    if way == "whole" or len(axes) < (2 if way == "nested" else 1):
        return dim
    axis = axes.pop()
    n = mesh.axis_size(axis)
    match way:
        case "balanced":
            return along(mesh, axis, lambda r: balanced(dim, n, r))
        case "chunk":
            return along(mesh, axis, lambda r: chunk(dim, n, r))
        case "strided":
            return along(mesh, axis, lambda r: select(dim, Dim([Run("", r, len(range(r, size, n)), n)])))
        case "taken":
            order = draw(st.permutations(range(size)))
            return along(mesh, axis, lambda r: balanced(take(dim, order), n, r))
        case "padded":
            multiple = n * draw(st.integers(1, 3))
            return along(mesh, axis, lambda r: even(pad(dim, multiple), n, r))
    inner = axes.pop()
    m = mesh.axis_size(inner)
    return along(mesh, (axis, inner), lambda r, s: chunk(balanced(dim, n, r), m, s))


def _fused(draw: st.DrawFn, mesh: Mesh, axes: list[str], dims: list[Dim]) -> Dim | Sharded:
    axis = axes.pop()
    n = mesh.axis_size(axis)
    way = draw(st.sampled_from(["cut then fuse", "fuse then cut", "interleave then cut"]))
    if way == "cut then fuse":
        return along(mesh, axis, lambda r: concat(*(balanced(dim, n, r) for dim in dims)))
    longest = max(len(dim) for dim in dims)
    fused = interleave(*(pad(dim, longest) for dim in dims)) if way.startswith("inter") else concat(*dims)
    return along(mesh, axis, lambda r: balanced(fused, n, r))


@st.composite
def index_dims(draw: st.DrawFn) -> tuple[tuple[str, Dim], ...]:
    names = draw(st.sampled_from([(), ("layer",), ("layer", "expert")]))
    starts = {"layer": 3, "expert": 0}
    return tuple(
        (name, Dim([Run("", starts[name], draw(st.integers(1, 4)), draw(st.integers(1, 2)))]))
        for name in names
    )


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    index = draw(index_dims())
    names = draw(st.permutations([name for name, _ in index]))
    name = ".".join(["model", *(f"{part}s.{{{part}}}" for part in names), "weight"])
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=2)))
    return Tensor(name, shape, draw(st.sampled_from(["bfloat16", "float32"])), index)


@st.composite
def _rules(
    draw: st.DrawFn, mesh: Mesh, name: str, index: tuple[tuple[str, Dim], ...], fused: bool
) -> BufferRule:
    """A rule that holds its tensors exactly once."""
    # Axes of one factorisation only; each cuts one dim.
    view = draw(st.sampled_from([mesh.axes, *mesh.views]))
    axes = draw(st.permutations([axis for axis, _ in view]))
    template = ".".join([name, *(f"{i}s.{{{i}}}" for i, _ in index)])
    inner = draw(st.integers(1, 4))
    labels = ["q", "k", "v"] if fused else [""]
    widths = [draw(st.integers(1, 7)) for _ in labels]
    parts = tuple(
        Part(Tensor(f"{template}.{label or 'w'}", (width, inner), "float32", index), label)
        for label, width in zip(labels, widths, strict=True)
    )
    stacked_index = [i for i in range(len(index)) if draw(st.booleans())]
    columns: list[Dim | Sharded] = [
        _one(draw, mesh, axes, dim, i in stacked_index) for i, (_, dim) in enumerate(index)
    ]
    if fused and axes:
        columns.append(
            _fused(draw, mesh, axes, [whole(w, label) for w, label in zip(widths, labels, strict=True)])
        )
    elif fused:
        columns.append(concat(*(whole(w, label) for w, label in zip(widths, labels, strict=True))))
    else:
        columns.append(_one(draw, mesh, axes, whole(widths[0]), True))
    columns.append(_one(draw, mesh, axes, whole(inner), True))
    stacked = draw(st.permutations([*stacked_index, len(index), len(index) + 1]))
    separate = [i for i in range(len(index)) if i not in stacked_index]
    numbers = []
    for i in separate:
        if draw(st.booleans()):  # counted from 10 on each rank
            column = columns[i]
            dims = (column,) if isinstance(column, Dim) else column.dims
            printed = tuple(Dim([Run("", 10, len(d))]) for d in dims)
            numbers.append(
                (index[i][0], printed[0] if isinstance(column, Dim) else Sharded(column.axes, printed))
            )
    stored = ".".join(["stored", name, *(f"{{{index[i][0]}}}" for i in separate)])
    transform = draw(st.sampled_from([IDENTITY, Transform("scale", 0.1), Transform("neg_exp")]))
    dtype = draw(st.sampled_from(["", "bfloat16"]))
    where: tuple[tuple[str, tuple[int, ...]], ...] = ()
    if axes and draw(st.booleans()):  # replicas, and not on every rank
        axis = axes.pop()
        where = ((axis, tuple(draw(st.sets(st.sampled_from(range(mesh.axis_size(axis))), min_size=1)))),)
    return BufferRule(stored, parts, tuple(columns), tuple(stacked), tuple(numbers), where, dtype, transform)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout that holds each of its tensors exactly once: one plain buffer and one fused."""
    mesh = draw(meshes())
    index = draw(index_dims())
    rules = tuple(
        draw(_rules(mesh, name, index, fused)) for name, fused in (("plain", False), ("fused", True))
    )
    return Layout(draw(st.sampled_from(["a", "megatron tp=2", ""])), mesh, rules)


# --- plain references ---------------------------------------------------------------------------


def marked(layout: Layout) -> dict[Tensor, np.ndarray]:
    """The whole of every tensor; no two elements of the layout have one value, and none is NaN."""
    values: dict[Tensor, np.ndarray] = {}
    first = 0
    for tensor in layout.tensors:
        values[tensor] = np.arange(first, first + tensor.numel, dtype=np.float64).reshape(
            [len(dim) for dim in tensor.dims]
        )
        first += tensor.numel
    return values


def element(values: dict[Tensor, np.ndarray], tensor: Tensor, index: tuple[int, ...]) -> float:
    """One element by the numbers of its dims."""
    place = [list(dim).index(("", number)) for dim, number in zip(tensor.dims, index, strict=True)]
    return float(values[tensor][tuple(place)])


def walked(layout: Layout, rank: int, values: dict[Tensor, np.ndarray]) -> dict[str, np.ndarray]:
    """The stored arrays of a rank, element by element from the dims of the rules. Padding is NaN."""
    coordinate = layout.mesh.coordinate(rank)
    stored: dict[str, np.ndarray] = {}
    for rule in layout.rules:
        if any(coordinate[axis] not in allowed for axis, allowed in rule.where):
            continue

        def here(dim: Dim | Sharded) -> list[Item]:
            if isinstance(dim, Dim):
                return list(dim)
            entry, stride = 0, 1
            for axis in dim.axes:
                entry, stride = entry + coordinate[axis] * stride, stride * layout.mesh.axis_size(axis)
            return list(dim.dims[entry])

        columns = [here(dim) for dim in rule.dims]
        printed = {name: here(dim) for name, dim in rule.numbers}
        names = [name for name, _ in rule.parts[0].tensor.index]
        separate = [i for i in range(len(columns)) if i not in rule.stacked]
        for at in itertools.product(*(range(len(columns[i])) for i in separate)):
            numbers = {
                names[i]: (printed[names[i]] if names[i] in printed else columns[i])[p][1]
                for i, p in zip(separate, at, strict=True)
            }
            array = np.full([len(columns[i]) for i in rule.stacked], np.nan)
            for inside in np.ndindex(*array.shape):
                position = dict(zip(separate, at, strict=True)) | dict(zip(rule.stacked, inside, strict=True))
                held = [columns[i][position[i]] for i in range(len(columns))]
                if any(label is PAD for label, _ in held):
                    continue
                name = next((label for label, _ in held if label), "")
                part = next(part for part in rule.parts if part.label == name)
                array[inside] = element(values, part.tensor, tuple(index for _, index in held))
            stored[rule.name.format(**numbers)] = array
    return stored
