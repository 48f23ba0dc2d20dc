"""Laws of plans, on pairs of layouts of one small model that is cut in every way we know."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_layouts import (
    EMBED,
    NORM,
    TENSORS,
    assert_same,
    layouts,
    markers,
    reference,
)

from shardweave.errors import FormatError, PlanError, ShardweaveError
from shardweave.layout import (
    BufferRule,
    Layout,
    Mesh,
    Part,
    Tensor,
    along,
    even,
    format_layout,
    parse_layout,
    prove,
    replicated,
    split,
    whole,
)
from shardweave.plan import (
    Plan,
    cost,
    decode,
    empty,
    encode,
    load,
    materialise,
    needed_bytes,
    plan,
    save,
    simulate,
)
from shardweave.plan import file as plan_file
from shardweave.testing.strategies import layouts as any_layouts

VALUES = markers()
NODES = st.sampled_from([None, 1, 2, 3, 4])
# Drawing a pair of layouts and cutting them element by element is most of the time of an example.
slow_draws = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def same_bytes(a: Plan, b: Plan) -> bool:
    return encode(a) == encode(b)


# --- what a plan does ---------------------------------------------------------------------------


@given(layouts())
@slow_draws
def test_materialise_is_what_the_dims_say(layout: Layout) -> None:
    prove(layout, TENSORS)
    assert_same(materialise(layout, VALUES, fill=np.nan), reference(layout, VALUES))


@given(layouts(name="a"), layouts(name="b"), NODES)
@slow_draws
def test_a_plan_fills_the_destination_and_leaves_padding_alone(
    a: Layout, b: Layout, nodes: int | None
) -> None:
    wanted = reference(b, VALUES)
    # What is not written stays NaN, and padding of the source is NaN: neither may show.
    got = simulate(
        plan(a, b, ranks_per_node=nodes), reference(a, VALUES), into=empty(b, np.float64, fill=np.nan)
    )
    assert_same(got, wanted)
    # Padding is not written: whatever it held, it holds still.
    other = simulate(plan(a, b), reference(a, VALUES), into=empty(b, np.float64, fill=-1.0))
    for rank, arrays in wanted.items():
        for name, array in arrays.items():
            assert (other[rank][name][np.isnan(array)] == -1.0).all()


@given(layouts(name="a"), layouts(name="b"))
@slow_draws
def test_there_and_back_is_the_identity(a: Layout, b: Layout) -> None:
    start = reference(a, VALUES)
    there = simulate(plan(a, b), start, into=empty(b, np.float64, fill=np.nan))
    back = simulate(plan(b, a), there, into=empty(a, np.float64, fill=np.nan))
    assert_same(back, start)


@given(any_layouts(), NODES)
@slow_draws
def test_any_layout_to_itself_and_to_one_rank(layout: Layout, nodes: int | None) -> None:
    values = {
        tensor: np.arange(i << 20, (i << 20) + tensor.numel, dtype=np.float64).reshape(
            [len(d) for d in tensor.dims]
        )
        for i, tensor in enumerate(layout.tensors, 1)
    }
    one = Layout(
        "one",
        Mesh((("dp", 2),), offset=1),
        tuple(BufferRule(tensor.name, (Part(tensor),), tensor.dims) for tensor in layout.tensors),
    )
    held = reference(layout, values)
    for other in (layout, one):
        there = simulate(
            plan(layout, other, ranks_per_node=nodes), held, into=empty(other, np.float64, fill=np.nan)
        )
        assert_same(there, reference(other, values))
    back = simulate(plan(one, layout), reference(one, values), into=empty(layout, np.float64, fill=np.nan))
    assert_same(back, held)


@given(layouts(name="a"))
@slow_draws
def test_a_layout_to_itself_stays_on_its_ranks(a: Layout) -> None:
    found = cost(plan(a, a))
    assert found.local_bytes == found.num_bytes
    assert found.send_imbalance == found.receive_imbalance == 1.0
    assert found.peak_staging_bytes == 0


def test_a_destination_may_want_fewer_tensors() -> None:
    mesh = Mesh((("tp", 2),))
    every = Layout("all", mesh, tuple(BufferRule(t.name, (Part(t),), t.dims) for t in (NORM, EMBED)))
    some = Layout("some", mesh, every.rules[1:])
    assert [f.tensor for f in plan(every, some).families] == [EMBED]
    with pytest.raises(PlanError, match="missing 1 of 2: layers"):
        plan(some, every)


# --- what it costs ------------------------------------------------------------------------------


@given(layouts(name="a"), layouts(name="b"), NODES)
@slow_draws
def test_a_plan_moves_what_is_needed_and_no_more(a: Layout, b: Layout, nodes: int | None) -> None:
    found = plan(a, b, ranks_per_node=nodes)
    figures = cost(found, ranks_per_node=nodes)
    wanted = reference(b, VALUES)
    elements = sum(int((~np.isnan(x)).sum()) for arrays in wanted.values() for x in arrays.values())
    assert figures.num_bytes == figures.needed_bytes == needed_bytes(b) == found.num_bytes == 8 * elements
    assert figures.local_bytes + figures.node_bytes + figures.world_bytes == figures.num_bytes
    assert int(figures.pairs[:, 2].sum()) == figures.num_bytes

    # The same figures, copy by copy.
    copies = list(found.copies())
    assert figures.num_copies == len(copies)
    pairs: dict[tuple[int, int], int] = {}
    for copy in copies:
        pair = copy.src_rank, copy.dst_rank
        pairs[pair] = pairs.get(pair, 0) + 8 * copy.dst_box.numel
        assert copy.dst_box.numel == copy.src_box.numel == copy.elements.numel
    assert figures.pairs.tolist() == [[s, d, n] for (s, d), n in sorted(pairs.items())]
    near = {pair: nodes is not None and pair[0] // nodes == pair[1] // nodes for pair in pairs}
    local = sum(n for (s, d), n in pairs.items() if s == d)
    assert figures.local_bytes == local
    assert figures.node_bytes == sum(n for (s, d), n in pairs.items() if s != d and near[s, d])


@given(layouts(name="a"), layouts(name="b"))
@slow_draws
def test_descriptors_are_the_contiguous_stretches(a: Layout, b: Layout) -> None:
    found = plan(a, b)
    shapes = [
        {r: {n: x.shape for n, x in s.items()} for r, s in reference(side, VALUES).items()} for side in (a, b)
    ]
    stretches = 0
    for copy in found.copies():
        src, dst = shapes[0][copy.src_rank][copy.src_name], shapes[1][copy.dst_rank][copy.dst_name]
        places = [
            np.arange(int(np.prod(shape))).reshape(shape)[
                tuple(slice(r.start, r.stop, r.step) for r in box.dims)
            ]
            for shape, box in ((src, copy.src_box), (dst, copy.dst_box))
        ]
        at = np.stack([copy.to_destination(places[0]).ravel(), places[1].ravel()])
        if copy.src_dims != copy.dst_dims:
            # A transposed copy may be contiguous by chance where a dim has one index; it is not counted on.
            continue
        stretches += 1 + int((np.diff(at, axis=1) != 1).any(axis=0).sum())
    same = [f for f in found.families if a.rules[f.src_rule].stacked == b.rules[f.dst_rule].stacked]
    assert cost(replace(found, families=tuple(same))).num_descriptors == stretches


@given(layouts(name="a"), layouts(name="b"), st.integers(1, 4))
@slow_draws
def test_the_nearest_replica_serves(a: Layout, b: Layout, nodes: int) -> None:
    """No element comes from another rank, or another node, where the rank, or its node, has it."""
    found = plan(a, b, ranks_per_node=nodes)
    for family in found.families:
        holders = _holders(a, family.tensor)
        for move, box in enumerate(family.box.tolist()):
            src, dst = int(family.src[move]), int(family.dst[move])
            element = tuple(dim[0] for dim in family.elements(box).dims)
            if dst != src:
                assert dst not in holders[element]
            if src // nodes != dst // nodes:
                assert not any(rank // nodes == dst // nodes for rank in holders[element])


def _holders(layout: Layout, tensor: Tensor) -> dict[tuple[int, ...], set[int]]:
    """The ranks that hold each element of a tensor, one element at a time."""
    found: dict[tuple[int, ...], set[int]] = {}
    for rank in layout.mesh.ranks:
        for buffer in layout.buffers(rank):
            for piece in buffer.pieces():
                if piece.tensor == tensor:
                    for index in np.ndindex(*piece.box.shape):
                        element = tuple(dim[i] for dim, i in zip(piece.box.dims, index, strict=True))
                        found.setdefault(element, set()).add(rank)
    return found


# --- balance ------------------------------------------------------------------------------------


def _model(layers: int, *, offset: int = 0, tp: int, dp: int) -> Layout:
    """A model of many tensors of very different sizes, one of them without layers."""
    mesh = Mesh((("tp", tp), ("dp", dp)), offset=offset)
    index = (("layer", whole(layers)),)
    rules = []
    for name, rows, columns in (
        ("q", 48, 40),
        ("k", 12, 40),
        ("up", 192, 40),
        ("down", 40, 192),
        ("norm", 1, 40),
    ):
        tensor = Tensor(f"{{layer}}.{name}", (rows, columns), "bfloat16", index)
        cut = (
            along(mesh, "tp", lambda r, rows=rows: even(whole(rows), tp, r))
            if rows % tp == 0
            else whole(rows)
        )
        rules.append(BufferRule(tensor.name, (Part(tensor),), (whole(layers), cut, whole(columns))))
    head = Tensor("head", (960, 40), "bfloat16")
    rules.append(
        BufferRule("head", (Part(head),), (along(mesh, "tp", lambda r: even(whole(960), tp, r)), whole(40)))
    )
    return Layout("model", mesh, tuple(rules))


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (4, 1), (2, 3), (4, 5), (12, 7), (4, 16)])
def test_eight_replicas_share_the_work(tp: int, dp: int) -> None:
    src = _model(24, tp=4, dp=8)
    dst = _model(24, tp=tp, dp=dp, offset=src.mesh.size)
    figures = cost(plan(src, dst))
    assert figures.send_imbalance <= 1.1
    # First come, first served, which is what the peers do, is worse: eight replicas, one of them busy.
    assert len(np.unique(figures.pairs[:, 0])) == src.mesh.size


def test_a_box_is_cut_no_finer_than_its_replicas_ask_for() -> None:
    tensor = Tensor("{layer}.w", (6, 5), "float32", (("layer", whole(24)),))
    one = BufferRule(tensor.name, (Part(tensor),), tensor.dims)
    sources = Layout("src", Mesh((("dp", 8),)), (one,))
    parts = {
        readers: len(plan(sources, Layout("dst", Mesh((("dp", readers),), offset=8), (one,))).families[0].box)
        for readers in (1, 2, 3, 4, 8, 16, 12)
    }
    # As many copies as the least common multiple of readers and replicas, so that each sends as many.
    assert parts == {1: 8, 2: 8, 3: 24, 4: 8, 8: 8, 16: 16, 12: 24}


def test_a_rank_that_has_it_reads_nothing_from_others() -> None:
    src = _model(4, tp=4, dp=2)
    found = plan(src, _model(4, tp=2, dp=4), ranks_per_node=4)
    figures = cost(found, ranks_per_node=4)
    assert figures.local_bytes > 0
    # Both nodes have a whole copy of the model, so nothing crosses between them.
    assert figures.world_bytes == 0


# --- replicas held by several buffers -----------------------------------------------------------


def _tied(first: Part, second: Part, rows: tuple[int, int]) -> Layout:
    mesh = Mesh((("pp", 2),))
    dims = [whole(6) if n == 6 else split(whole(6), (n, 6 - n), 0) for n in rows]
    return Layout(
        "tied",
        mesh,
        (
            BufferRule("embedding", (first,), (dims[0], whole(3)), where=(("pp", (0,)),)),
            BufferRule("output", (second,), (dims[1], whole(3)), where=(("pp", (1,)),)),
        ),
    )


def test_owners_come_before_replicas_and_one_whole_replica_before_a_part() -> None:
    tensor = Tensor("embed", (6, 3), "float64")
    values = {tensor: np.arange(18.0).reshape(6, 3)}
    dst = Layout("dst", Mesh((("tp", 1),), offset=2), (BufferRule("embed", (Part(tensor),), tensor.dims),))
    own, copy = Part(tensor), Part(tensor, replica=True)
    for layout, source in (
        (_tied(own, copy, (6, 6)), 0),
        (_tied(copy, own, (6, 6)), 1),
        (_tied(copy, copy, (6, 6)), 0),
        # The first replica holds a part only; what it holds says nothing about the rest.
        (_tied(copy, copy, (4, 6)), 1),
        # The owner does not hold everything; the replica does.
        (_tied(own, copy, (4, 6)), 1),
    ):
        found = plan(layout, dst)
        assert {int(rank) for family in found.families for rank in family.src} == {source}
        got = simulate(found, reference(layout, values), into=empty(dst, np.float64, fill=np.nan))
        assert_same(got, reference(dst, values))


def test_replicas_that_hold_a_tensor_only_together_are_refused() -> None:
    tensor = Tensor("embed", (6, 3), "float64")
    mesh = Mesh((("pp", 2),))
    halves = Layout(
        "halves",
        mesh,
        tuple(
            BufferRule(name, (Part(tensor, replica=True),), (split(whole(6), (4, 2), i), whole(3)))
            for i, name in enumerate(("low", "high"))
        ),
    )
    prove(halves)
    dst = Layout("dst", mesh, (BufferRule("embed", (Part(tensor),), tensor.dims),))
    with pytest.raises(PlanError, match=r"tensor 'embed': 'low' replica 12 of 18, 'high' replica 6 of 18"):
        plan(halves, dst)
    # The same buffers as owners are a layout like any other.
    owners = replace(halves, rules=tuple(replace(rule, parts=(Part(tensor),)) for rule in halves.rules))
    assert {family.src_rule for family in plan(owners, dst).families} == {0, 1}


def test_a_copy_in_the_destination_is_filled_too() -> None:
    tensor = Tensor("embed", (6, 3), "float64")
    values = {tensor: np.arange(18.0).reshape(6, 3)}
    whole_rule = BufferRule("embed", (Part(tensor),), tensor.dims)
    src = Layout("src", Mesh((("tp", 2),)), (whole_rule,))
    dst = Layout("dst", Mesh((("tp", 3),)), (whole_rule, replace(replicated(whole_rule), name="head")))
    got = simulate(plan(src, dst), reference(src, values), into=empty(dst, np.float64, fill=np.nan))
    assert_same(got, reference(dst, values))


# --- the same plan everywhere -------------------------------------------------------------------


@given(layouts(name="a"), layouts(name="b"), NODES)
@slow_draws
def test_the_same_input_gives_the_same_plan(a: Layout, b: Layout, nodes: int | None) -> None:
    first = encode(plan(a, b, ranks_per_node=nodes))
    again = plan(parse_layout(format_layout(a)), parse_layout(format_layout(b)), ranks_per_node=nodes)
    assert encode(again) == first


REMOTE = """
import hashlib, sys
from shardweave.layout import parse_layout
from shardweave.plan import encode, plan
for pair in sys.stdin.read().split("\\0\\0"):
    src, dst = (parse_layout(text) for text in pair.split("\\0"))
    print(hashlib.sha256(encode(plan(src, dst, ranks_per_node=2))).hexdigest())
"""


def test_another_process_with_other_hashes_makes_the_same_plan() -> None:
    pairs = [
        (_model(5, tp=4, dp=3), _model(5, tp=3, dp=2, offset=7)),
        (_model(3, tp=2, dp=4), _model(3, tp=4, dp=2)),
    ]
    text = "\0\0".join("\0".join(map(format_layout, pair)) for pair in pairs)
    wanted = [hashlib.sha256(encode(plan(a, b, ranks_per_node=2))).hexdigest() for a, b in pairs]
    for seed in ("1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", REMOTE],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.stdout.split() == wanted


# --- the file form ------------------------------------------------------------------------------


@given(layouts(name="a"), layouts(name="b"))
@slow_draws
def test_a_plan_survives_its_file(a: Layout, b: Layout) -> None:
    written = plan(a, b)
    read = decode(encode(written))
    assert (read.src, read.dst) == (a, b)
    assert same_bytes(read, written)
    got = simulate(read, reference(a, VALUES), into=empty(b, np.float64, fill=np.nan))
    assert_same(got, reference(b, VALUES))


def test_a_plan_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    made = plan(_model(3, tp=4, dp=2), _model(3, tp=3, dp=2))
    save(made, path)
    assert same_bytes(load(path), made)


ENCODED = encode(plan(_model(3, tp=4, dp=2), _model(3, tp=3, dp=2, offset=4), ranks_per_node=3))
HEAD = len(plan_file._MAGIC) + plan_file._DIGEST_BYTES


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_are_a_format_error(data: st.DataObject) -> None:
    damaged = _damaged(data, ENCODED)
    assume(damaged != ENCODED)
    with pytest.raises(FormatError):
        decode(damaged)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_forged_bytes_are_a_named_error_or_a_right_plan(data: st.DataObject) -> None:
    """Damage under a digest that fits: what decodes has been proved, whatever else happens has a name."""
    body = _damaged(data, ENCODED[HEAD:])
    try:
        found = decode(plan_file._MAGIC + plan_file._digest(body) + body)
    except ShardweaveError:
        return
    assert cost(found).num_bytes == needed_bytes(found.dst)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_forged_columns_are_a_named_error_or_a_right_plan(data: st.DataObject) -> None:
    """The same, where the damage is in the numbers of a column and not in how they are packed."""
    body = msgspec.msgpack.decode(ENCODED[HEAD:], type=plan_file._Body)
    family = data.draw(st.integers(0, len(body.families) - 1))
    column = data.draw(st.integers(0, len(plan_file._COLUMNS) - 1))
    values = plan_file._unpack(body.families[family].columns[column], most=1 << 30).copy()
    flat = values.reshape(-1)
    flat[data.draw(st.integers(0, len(flat) - 1))] = data.draw(
        st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1))
    )
    columns = list(body.families[family].columns)
    columns[column] = plan_file._pack(values)
    families = list(body.families)
    families[family] = msgspec.structs.replace(families[family], columns=columns)
    forged = msgspec.msgpack.encode(msgspec.structs.replace(body, families=families))
    try:
        found = decode(plan_file._MAGIC + plan_file._digest(forged) + forged)
    except ShardweaveError:
        return
    assert cost(found).num_bytes == needed_bytes(found.dst)


def _damaged(data: st.DataObject, original: bytes) -> bytes:
    at = data.draw(st.integers(0, len(original) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
    if kind == "flip":
        return original[:at] + bytes([original[at] ^ data.draw(st.integers(1, 255))]) + original[at + 1 :]
    if kind == "cut":
        return original[:at]
    if kind == "drop":
        return original[:at] + original[at + data.draw(st.integers(1, 8)) :]
    return original[:at] + data.draw(st.binary(min_size=1, max_size=6)) + original[at:]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b"tp=4,dp=2", b"tp=4,dp=2000000000000"),
        (b"{layer[0:3]}", b"{layer[0:3000000000000000]}"),
        (b"(48, 40)", b"(4800000000000, 4000000000000)"),
        (b"@ 4", b"@ 4000000000000000000000"),
    ],
)
def test_a_small_file_cannot_ask_for_much_memory(was: bytes, becomes: bytes) -> None:
    body = msgspec.msgpack.decode(ENCODED[HEAD:], type=plan_file._Body)
    src, dst = (text.replace(was.decode(), becomes.decode()) for text in (body.src, body.dst))
    forged = msgspec.msgpack.encode(msgspec.structs.replace(body, src=src, dst=dst))
    with pytest.raises(ShardweaveError):
        decode(plan_file._MAGIC + plan_file._digest(forged) + forged)


def test_a_column_that_unpacks_to_more_than_it_says_is_refused() -> None:
    body = msgspec.msgpack.decode(ENCODED[HEAD:], type=plan_file._Body)
    bomb = plan_file._pack(np.zeros(1 << 24, dtype=np.int64))
    for shape in ((8,), (1 << 62,), (-1, -1), (1 << 40, 1 << 40)):
        column = msgspec.structs.replace(bomb, shape=shape)
        family = msgspec.structs.replace(body.families[0], columns=[column] * len(plan_file._COLUMNS))
        forged = msgspec.msgpack.encode(msgspec.structs.replace(body, families=[family]))
        with pytest.raises(FormatError, match="the columns of a plan"):
            decode(plan_file._MAGIC + plan_file._digest(forged) + forged)
