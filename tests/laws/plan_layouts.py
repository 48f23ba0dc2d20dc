"""Layouts of one small model, cut in many ways, and a plain reference of what their ranks store."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardweave.layout import (
    PAD,
    Buffer,
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Sharded,
    Tensor,
    along,
    chunk,
    concat,
    cut,
    even,
    pad,
    relabel,
    split,
    take,
    whole,
)
from shardweave.testing.strategies import cuts

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, EXPERTS = 5, 3, 12, 4, 2, 12, 13, 6
Q_ROWS, KV_ROWS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

_LAYER = (("layer", whole(LAYERS)),)
_SPARSE = (("layer", Dim([Run("", 1, 2), Run("", 4, 1)])), ("expert", whole(EXPERTS)))
Q = Tensor("layers.{layer}.q", (Q_ROWS, HIDDEN), "float64", _LAYER)
K = Tensor("layers.{layer}.k", (KV_ROWS, HIDDEN), "float64", _LAYER)
V = Tensor("layers.{layer}.v", (KV_ROWS, HIDDEN), "float64", _LAYER)
NORM = Tensor("layers.{layer}.norm", (HIDDEN,), "float64", _LAYER)
GATE = Tensor("layers.{layer}.experts.{expert}.gate", (FFN, HIDDEN), "float64", _SPARSE)
UP = Tensor("layers.{layer}.experts.{expert}.up", (FFN, HIDDEN), "float64", _SPARSE)
EMBED = Tensor("embed", (VOCAB, HIDDEN), "float64")
SCALE = Tensor("scale", (), "float64")
TENSORS = (Q, K, V, NORM, GATE, UP, EMBED, SCALE)

Values = dict[Tensor, NDArray[np.float64]]
State = dict[int, dict[str, NDArray[np.float64]]]


def markers() -> Values:
    """Every element of every tensor has a value of its own."""
    values: Values = {}
    start = 1
    for tensor in TENSORS:
        values[tensor] = np.arange(start, start + tensor.numel, dtype=np.float64).reshape(
            [len(dim) for dim in tensor.dims]
        )
        start += tensor.numel
    return values


def reference(layout: Layout, values: Values) -> State:
    """What every rank stores, position by position from the dims alone; padding is NaN."""
    places = {
        tensor: [{number: i for i, (_, number) in enumerate(dim)} for dim in tensor.dims]
        for tensor in layout.tensors
    }
    stored: dict[Buffer, NDArray[np.float64]] = {}
    state: State = {}
    for rank in layout.mesh.ranks:
        state[rank] = {}
        for buffer in layout.buffers(rank):
            if buffer not in stored:  # replicas store the same
                stored[buffer] = _stored(buffer, places, values)
            separate = [d for d in range(len(buffer.dims)) if d not in buffer.stacked]
            arrays = np.transpose(stored[buffer].copy(), (*separate, *buffer.stacked))
            for name, at in buffer.members():
                state[rank][name] = arrays[at]
    return state


def _stored(
    buffer: Buffer, places: dict[Tensor, list[dict[int, int]]], values: Values
) -> NDArray[np.float64]:
    stored = np.full([len(dim) for dim in buffer.dims], np.nan)
    tensors = {part.label: part.tensor for part in buffer.parts}
    of: dict[tuple[str, ...], tuple[list[dict[int, int]], NDArray[np.float64]]] = {}
    for held in itertools.product(*(enumerate(dim) for dim in buffer.dims)):
        labels = tuple([label for _, (label, _) in held])
        if PAD in labels:
            continue
        if labels not in of:
            tensor = tensors["".join(label for label in labels if label)]
            of[labels] = places[tensor], values[tensor]
        place, value = of[labels]
        element = tuple([at[n] for at, (_, (_, n)) in zip(place, held, strict=True)])
        stored[tuple([i for i, _ in held])] = value[element]
    return stored


def assert_same(got: State, wanted: State) -> None:
    assert got.keys() == wanted.keys()
    for rank, arrays in wanted.items():
        assert got[rank].keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(got[rank][name], array, err_msg=f"rank {rank}, {name}")


def grouped() -> Dim:
    """Q, K and V rows fused by KV group."""
    width = Q_ROWS // KV_HEADS
    q, k, v = whole(Q_ROWS, "q"), whole(KV_ROWS, "k"), whole(KV_ROWS, "v")
    return concat(
        *(
            concat(
                cut(q, g * width, (g + 1) * width),
                cut(k, g * HEAD_DIM, (g + 1) * HEAD_DIM),
                cut(v, g * HEAD_DIM, (g + 1) * HEAD_DIM),
            )
            for g in range(KV_HEADS)
        )
    )


@st.composite
def layouts(draw: st.DrawFn, *, name: str = "drawn") -> Layout:
    """The model on a mesh of up to 12 ranks, now and then with a first rank or a second factorisation."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    dp = draw(st.sampled_from([n for n in (1, 2, 3) if tp * n <= 12]))
    pp = draw(st.sampled_from([n for n in (1, 2) if tp * dp * n <= 12]))
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 6) if tp * dp % n == 0]))
    # The stage varies slowest in both factorisations, so it has the same groups in both.
    mesh = Mesh(
        (("tp", tp), ("dp", dp), ("pp", pp)),
        ((("ep", ep), ("edp", tp * dp // ep), ("pp", pp)),),
        offset=draw(st.sampled_from([0, 0, 5])),
    )
    rules = (
        _qkv(draw, mesh),
        _norm(draw, mesh),
        _experts(draw, mesh),
        _embed(draw, mesh),
        BufferRule("scale", (Part(SCALE),), (), where=draw(st.sampled_from([(), (("pp", (pp - 1,)),)]))),
    )
    return Layout(name, mesh, rules)


def _layers(draw: st.DrawFn, mesh: Mesh) -> tuple[Sharded, tuple[tuple[str, Dim | Sharded], ...]]:
    """Uneven stages, and names that count from 0 on each of them or not."""
    pp = mesh.axis_size("pp")
    first = draw(st.integers(0, LAYERS)) if pp == 2 else LAYERS
    sizes = (first, LAYERS - first)[:pp]
    held = along(mesh, "pp", lambda s: split(whole(LAYERS), sizes, s))
    local = along(mesh, "pp", lambda s: whole(sizes[s]))
    return held, draw(st.sampled_from([(), (("layer", local),)]))


def _qkv(draw: st.DrawFn, mesh: Mesh) -> BufferRule:
    tp, dp = mesh.axis_size("tp"), mesh.axis_size("dp")
    layers, numbers = _layers(draw, mesh)
    style = draw(st.sampled_from(["grouped", "heads", "chunked", "scattered"]))
    copies = False
    rows: Dim | Sharded
    if style == "grouped":
        # Raw rows of the fused weight: with 12 ranks a rank may end inside a head, and own no K or V.
        rows = along(mesh, "tp", lambda r: split(grouped(), _near_even(Q_ROWS + 2 * KV_ROWS, tp), r))
    elif style == "heads":
        kv = max(n for n in (1, 2, 4) if tp % n == 0)
        copies = kv < tp
        rows = along(
            mesh,
            "tp",
            lambda r: concat(
                even(whole(Q_ROWS, "q"), tp, r),
                even(whole(KV_ROWS, "k"), kv, r * kv // tp),
                even(whole(KV_ROWS, "v"), kv, r * kv // tp),
            ),
        )
    elif style == "chunked":
        # Fully sharded on top of tensor parallel: the same function applied to a dim that is cut already.
        sizes = _near_even(Q_ROWS + 2 * KV_ROWS, tp)
        rows = along(mesh, ("dp", "tp"), lambda d, r: chunk(split(grouped(), sizes, r), dp, d))
    else:
        q, k, v = (draw(cuts(whole(rows), tp)) for rows in (Q_ROWS, KV_ROWS, KV_ROWS))
        order = draw(st.permutations(["q", "k", "v"]))
        held = {"q": q, "k": k, "v": v}
        rows = along(mesh, "tp", lambda r: concat(*(relabel(held[label][r], label) for label in order)))
    stacked = draw(st.sampled_from([(1, 2), (2, 1), (0, 1, 2), (2, 0, 1)]))
    parts = (Part(Q, "q"), Part(K, "k", replica=copies), Part(V, "v", replica=copies))
    return BufferRule(
        "qkv" if 0 in stacked else "layers.{layer}.qkv",
        parts,
        (layers, rows, whole(HIDDEN)),
        stacked=stacked,
        numbers=() if 0 in stacked else numbers,
    )


def _norm(draw: st.DrawFn, mesh: Mesh) -> BufferRule:
    """Steps: the columns of a rank are every n-th."""
    layers, numbers = _layers(draw, mesh)
    axis = draw(st.sampled_from(["tp", "dp"]))
    size = mesh.axis_size(axis)
    columns: Dim | Sharded = whole(HIDDEN)
    if draw(st.booleans()):
        columns = along(mesh, axis, lambda r: Dim([Run("", i, 1) for i in range(r, HIDDEN, size)]))
    return BufferRule("layers.{layer}.norm", (Part(NORM),), (layers, columns), numbers=numbers)


def _experts(draw: st.DrawFn, mesh: Mesh) -> BufferRule:
    ep, edp = mesh.axis_size("ep"), mesh.axis_size("edp")
    placed = draw(st.permutations(range(EXPERTS)))
    share = EXPERTS // ep
    experts = along(mesh, "ep", lambda r: take(whole(EXPERTS), placed[r * share : (r + 1) * share]))
    rows: Dim | Sharded = concat(whole(FFN, "gate"), whole(FFN, "up"))
    style = draw(st.sampled_from(["whole", "halves", "steps"]))
    if style == "halves":
        rows = along(
            mesh,
            "edp",
            lambda r: concat(chunk(whole(FFN, "gate"), edp, r), chunk(whole(FFN, "up"), edp, r)),
        )
    elif style == "steps":
        rows = along(
            mesh,
            "edp",
            lambda r: concat(
                *(Dim([Run(label, i, 1) for i in range(r, FFN, edp)]) for label in ("up", "gate"))
            ),
        )
    layers: Dim | Sharded = GATE.dims[0]
    if mesh.axis_size("pp") == 2 and draw(st.booleans()):
        layers = along(mesh, "pp", lambda s: split(GATE.dims[0], (1, 2), s))
    stacked = draw(st.sampled_from([(2, 3), (1, 2, 3), (1, 3, 2), (3, 0, 2, 1)]))
    template = "layers.{layer}.experts.{expert}.w13"
    for d, placeholder in enumerate(("{layer}.", "{expert}.")):
        template = template.replace(placeholder, "") if d in stacked else template
    return BufferRule(
        template, (Part(GATE, "gate"), Part(UP, "up")), (layers, experts, rows, whole(HIDDEN)), stacked
    )


def _embed(draw: st.DrawFn, mesh: Mesh) -> BufferRule:
    """A padded vocabulary; where stages are two, the first or the last has it, or one owns and one copies."""
    tp, multiple = mesh.axis_size("tp"), draw(st.integers(1, 4))
    rows = along(mesh, "tp", lambda r: even(pad(whole(VOCAB), multiple * tp), tp, r))
    where = draw(st.sampled_from([(), (("pp", (0,)),)]))
    order = draw(st.sampled_from([(0, 1), (1, 0)]))
    return BufferRule("embed", (Part(EMBED),), (rows, whole(HIDDEN)), stacked=order, where=where)


def _near_even(size: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by one at most."""
    return tuple(size * (i + 1) // parts - size * i // parts for i in range(parts))
