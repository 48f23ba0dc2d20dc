"""Public reports about which bytes go where: fused QKV, KV heads, replicas, and what peers accept silently.

The silent-accept cases are those of ModelExpress 0.7.0: geometry that it plans without a word. What a plan
decides is here. What only content or a live peer decides is not, and is covered so:

- replicas with different bytes are named by ``plan.assemble`` (tests/laws/test_assemble.py) and, in files, by
  ``convert`` (tests/hostile/test_convert_inputs.py); here, that digests of content tell apart what a sum of
  words does not;
- a cached plan after the trainer restarted: a plan has no addresses in it, it is a function of the two
  layouts (tests/laws/test_plan.py), and a journal of another source is refused
  (tests/hostile/test_convert_kill.py);
- a trainer that takes a step while it is read: a source that changes is never published
  (tests/hostile/test_convert_inputs.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from shardweave.errors import (
    CutError,
    DtypeError,
    GapError,
    OverlapError,
    PlanError,
    TransformError,
    UnknownNameError,
)
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Sharded,
    Tensor,
    Transform,
    along,
    concat,
    cut,
    even,
    pad,
    split,
    whole,
)
from shardweave.plan import cost, empty, materialise, plan, prove_plan, simulate
from shardweave.store import digest

Array = NDArray[np.float64]


def grouped(heads: int, kv: int, head_dim: int) -> Dim:
    """One block a KV group: its query heads, then K, then V."""
    q, k, v = (whole(n * head_dim, label) for n, label in ((heads, "q"), (kv, "k"), (kv, "v")))
    width = heads // kv * head_dim
    blocks = []
    for g in range(kv):
        one = g * head_dim, (g + 1) * head_dim
        blocks += [cut(q, g * width, (g + 1) * width), cut(k, *one), cut(v, *one)]
    return concat(*blocks)


def qkv(heads: int, kv: int, head_dim: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        Tensor("q", (heads * head_dim, hidden), "float64"),
        Tensor("k", (kv * head_dim, hidden), "float64"),
        Tensor("v", (kv * head_dim, hidden), "float64"),
    )


def markers(*tensors: Tensor) -> dict[Tensor, Array]:
    """Row times a thousand plus column, and a million for each tensor: each element has its own value."""
    found = {}
    for i, tensor in enumerate(tensors, 1):
        rows, columns = (*tensor.shape, 1)[:2]
        value = 1e7 * i + 1000.0 * np.arange(rows)[:, None] + np.arange(columns)
        found[tensor] = value.reshape(tensor.shape)
    return found


def one_rank(rule: BufferRule, *, name: str = "one", rank: int = 0) -> Layout:
    return Layout(name, Mesh((), offset=rank), (rule,))


def separate(*tensors: Tensor, rank: int = 0) -> Layout:
    """Hugging Face: each tensor whole under its own name."""
    return Layout("hf", Mesh((), offset=rank), tuple(BufferRule(t.name, (Part(t),), t.dims) for t in tensors))


def megatron_qkv(tensors: tuple[Tensor, ...], heads: int, kv: int, tp: int, *, offset: int = 0) -> Layout:
    head_dim, hidden = tensors[1].shape[0] // kv, tensors[0].shape[1]
    mesh = Mesh((("tp", tp),), offset=offset)
    rows = along(mesh, "tp", lambda r: even(grouped(heads, kv, head_dim), tp, r))
    parts = tuple(Part(t, t.name) for t in tensors)
    return Layout("megatron", mesh, (BufferRule("qkv", parts, (rows, whole(hidden))),))


def engine_qkv(tensors: tuple[Tensor, ...], kv: int, tp: int, *, offset: int = 0) -> Layout:
    """Cut, then fuse; a KV head is held by several ranks where there are more ranks than heads."""
    mesh, held = Mesh((("tp", tp),), offset=offset), min(kv, tp)
    rows = along(
        mesh,
        "tp",
        lambda r: concat(
            even(whole(tensors[0].shape[0], "q"), tp, r),
            even(whole(tensors[1].shape[0], "k"), held, r * held // tp),
            even(whole(tensors[2].shape[0], "v"), held, r * held // tp),
        ),
    )
    parts = tuple(Part(t, t.name, replica=t.name != "q" and held < tp) for t in tensors)
    return Layout("engine", mesh, (BufferRule("qkv_proj", parts, (rows, whole(tensors[0].shape[1]))),))


def moved(src: Layout, dst: Layout, state: dict[int, dict[str, Array]]) -> dict[int, dict[str, Array]]:
    return simulate(plan(src, dst), state, into=empty(dst, np.float64, fill=np.nan))


def fuse(values: dict[Tensor, Array], heads: int, kv: int, head_dim: int) -> Array:
    """The fused weight by the group rule, head by head and with no use of the algebra."""
    q, k, v = values.values()
    rows = []
    for g in range(kv):
        for head in range(g * heads // kv, (g + 1) * heads // kv):
            rows.append(q[head * head_dim : (head + 1) * head_dim])
        rows += [k[g * head_dim : (g + 1) * head_dim], v[g * head_dim : (g + 1) * head_dim]]
    return np.concatenate(rows)


# --- K01: fused QKV -----------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [8, 64, 1])
def test_b001_grouped_rows_export_whatever_the_number_of_kv_heads(kv: int) -> None:
    heads, head_dim, hidden = 64, 128, 3
    tensors = qkv(heads, kv, head_dim, hidden)
    values = markers(*tensors)
    fused = fuse(values, heads, kv, head_dim)
    width = (heads // kv + 2) * head_dim
    assert fused.shape[0] == kv * width == {8: 10240, 64: 24576, 1: 8448}[kv]
    hf = moved(megatron_qkv(tensors, heads, kv, 1), separate(*tensors), {0: {"qkv": fused}})[0]
    for tensor in tensors:
        np.testing.assert_array_equal(hf[tensor.name], values[tensor])
    for g in range(kv):
        assert (hf["k"][g * head_dim] == fused[g * width + heads // kv * head_dim]).all()


def test_b002_a_round_trip_does_not_hide_the_wrong_order() -> None:
    heads, kv, head_dim = 16, 8, 128
    tensors = qkv(heads, kv, head_dim, 2)
    values = markers(*tensors)
    hf, right = separate(*tensors), megatron_qkv(tensors, heads, kv, 1)
    plain_rows = concat(*(whole(t.shape[0], t.name) for t in tensors))
    wrong = one_rank(BufferRule("qkv", right.rules[0].parts, (plain_rows, whole(2))))
    state = {0: {t.name: values[t] for t in tensors}}
    fused = moved(hf, right, state)[0]["qkv"]
    # K head 3 stands behind three whole groups and the two query heads of its own.
    assert (fused[(3 * 4 + 2) * head_dim] == values[tensors[1]][3 * head_dim]).all()
    np.testing.assert_array_equal(fused, fuse(values, heads, kv, head_dim))
    for layout in (right, wrong):
        there = moved(hf, layout, state)
        back = moved(layout, hf, there)[0]
        assert all((back[t.name] == values[t]).all() for t in tensors)
    # Both go round; only one of them is what the module reads.
    assert (moved(hf, wrong, state)[0]["qkv"] != fused).any()


@pytest.mark.parametrize("kv", [4, 32])
def test_b003_an_adapter_has_the_rows_of_its_weight(kv: int) -> None:
    heads, head_dim, rank = 32, 4, 5
    rng = np.random.default_rng(kv)
    factors = {t: rng.integers(-9, 9, t.shape).astype(np.float64) for t in qkv(heads, kv, head_dim, rank)}
    shared = rng.integers(-9, 9, (rank, 7)).astype(np.float64)
    # The same dim function, said of tensors of another width.
    layout = megatron_qkv(tuple(factors), heads, kv, 1)
    fused = moved(separate(*factors), layout, {0: {t.name: x for t, x in factors.items()}})[0]["qkv"]
    merged = fuse({t: x @ shared for t, x in factors.items()}, heads, kv, head_dim)
    np.testing.assert_array_equal(fused @ shared, merged)


@pytest.mark.parametrize(("tp", "engine_tp"), [(2, 4), (4, 2), (2, 8)])
def test_b004_engine_ranks_get_whole_heads(tp: int, engine_tp: int) -> None:
    heads, kv, head_dim = 16, 4, 4
    tensors = qkv(heads, kv, head_dim, 3)
    values = markers(*tensors)
    fused = fuse(values, heads, kv, head_dim)
    state = {r: {"qkv": part} for r, part in enumerate(np.split(fused, tp))}
    got = moved(megatron_qkv(tensors, heads, kv, tp), engine_qkv(tensors, kv, engine_tp, offset=tp), state)
    q, k, v = values.values()
    for r in range(engine_tp):
        q_rows = heads * head_dim // engine_tp
        held = max(1, kv // engine_tp)
        first = r * kv // engine_tp * head_dim
        wanted = [q[r * q_rows : (r + 1) * q_rows]]
        wanted += [x[first : first + held * head_dim] for x in (k, v)]
        np.testing.assert_array_equal(got[tp + r]["qkv_proj"], np.concatenate(wanted))
    if (tp, engine_tp) == (2, 4):
        assert got[3]["qkv_proj"][0, 0] == q[4 * head_dim, 0]  # rank 1 begins with query head 4


@pytest.mark.parametrize("sizes", [(("q", 4096), ("k", 1024), ("v", 1024)), (("gate", 14336), ("up", 14336))])
def test_b005_an_even_cut_of_a_concatenation_is_another_layout(sizes: tuple[tuple[str, int], ...]) -> None:
    tp = 4
    mesh = Mesh((("tp", tp),))
    tensors = tuple(Tensor(label, (size, 2), "float64") for label, size in sizes)
    parts = tuple(Part(t, t.name) for t in tensors)
    fused = concat(*(whole(size, label) for label, size in sizes))
    naive = along(mesh, "tp", lambda r: even(fused, tp, r))
    right = along(mesh, "tp", lambda r: concat(*(even(whole(size, label), tp, r) for label, size in sizes)))
    assert naive != right
    owned = {label: len(right.dims[2].only(label)) for label, _ in sizes}
    assert owned == {label: size // tp for label, size in sizes}
    if "q" in owned:
        assert str(naive.dims[2]) == "q[3072:4096] k[0:512]"
    # Stored by one rule and read by the other, every row still arrives where it belongs.
    values = markers(*tensors)
    src, dst = (
        Layout(name, replace(mesh, offset=offset), (BufferRule("w", parts, (rows, whole(2))),))
        for name, rows, offset in (("naive", naive, 0), ("right", right, tp))
    )
    raw = np.split(np.concatenate([values[t] for t in tensors]), tp)
    got = moved(src, dst, {r: {"w": part} for r, part in enumerate(raw)})
    for r in range(tp):
        pieces = [np.split(values[t], tp)[r] for t in tensors]
        np.testing.assert_array_equal(got[tp + r]["w"], np.concatenate(pieces))


def test_b013_scales_follow_the_rows_that_they_scale() -> None:
    heads, kv, head_dim, group, tp, hidden = 8, 4, 6, 3, 2, 5
    weights = qkv(heads, kv, head_dim, hidden)
    scales = tuple(Tensor(f"{t.name}.scale", (t.shape[0] // group, 1), "float64") for t in weights)
    rng = np.random.default_rng(13)
    values = {t: rng.integers(1, 99, t.shape).astype(np.float64) for t in (*weights, *scales)}
    mesh = Mesh((("tp", tp),), offset=1)

    def fused(tensors: tuple[Tensor, ...], block: int, name: str) -> BufferRule:
        """One function for both: the scales are cut by the same rule in units of their groups."""
        parts = tuple(Part(t, w.name) for t, w in zip(tensors, weights, strict=True))
        rows = along(
            mesh,
            "tp",
            lambda r: concat(*(even(whole(w.shape[0] // block, w.name), tp, r) for w in weights)),
        )
        return BufferRule(name, parts, (rows, whole(tensors[0].shape[1])))

    engine = Layout("engine", mesh, (fused(weights, 1, "qkv"), fused(scales, group, "qkv.scale")))
    got = moved(separate(*weights, *scales), engine, {0: {t.name: x for t, x in values.items()}})
    for r in range(tp):
        scaled = got[1 + r]["qkv"] * np.repeat(got[1 + r]["qkv.scale"], group, axis=0)
        wanted = [
            np.split(values[w] * np.repeat(values[s], group, axis=0), tp)[r]
            for w, s in zip(weights, scales, strict=True)
        ]
        np.testing.assert_array_equal(scaled, np.concatenate(wanted))
    # Scales that are held whole beside a weight that is cut are not what the engine declared.
    with pytest.raises(OverlapError, match=r"q\.scale"):
        plan(
            separate(*weights, *scales),
            replace(
                engine,
                rules=(
                    engine.rules[0],
                    replace(
                        engine.rules[1],
                        dims=(
                            Sharded(
                                ("tp",),
                                (
                                    concat(
                                        *(
                                            whole(s.shape[0], w.name)
                                            for s, w in zip(scales, weights, strict=True)
                                        )
                                    ),
                                )
                                * 2,
                            ),
                            whole(1),
                        ),
                    ),
                ),
            ),
        )


# --- K02, K17: few KV heads, many replicas ------------------------------------------------------


@pytest.mark.parametrize("engine_tp", [8, 4, 1])
@pytest.mark.parametrize(("heads", "kv", "tp"), [(64, 2, 8), (24, 6, 4)])
def test_b014_raw_rows_of_few_kv_heads_are_published_and_received(
    heads: int, kv: int, tp: int, engine_tp: int
) -> None:
    head_dim = 128
    tensors = qkv(heads, kv, head_dim, 1)
    values = markers(*tensors)
    src = megatron_qkv(tensors, heads, kv, tp)
    owned = [
        tuple(len(dim.only(label)) for label in "qkv")
        for dim in src.rules[0].dims[0].dims  # type: ignore[union-attr]
    ]
    if kv == 2:
        # Ranks 3 and 7 own K and V; the others own 8.5 query heads and nothing else.
        assert owned == [(832, 128, 128) if r in (3, 7) else (1088, 0, 0) for r in range(8)]
    else:
        assert [sum(rows) for rows in owned] == [1152] * 4
    state = {r: {"qkv": part} for r, part in enumerate(np.split(fuse(values, heads, kv, head_dim), tp))}
    hf = moved(src, separate(*tensors, rank=tp), state)[tp]
    for tensor in tensors:
        np.testing.assert_array_equal(hf[tensor.name], values[tensor])
    if heads % engine_tp == 0 and (kv % engine_tp == 0 or engine_tp % kv == 0):
        dst = engine_qkv(tensors, kv, engine_tp, offset=tp)
        got = moved(src, dst, state)
        for rank, arrays in materialise(dst, values).items():
            np.testing.assert_array_equal(got[rank]["qkv_proj"], arrays["qkv_proj"])
        assert cost(plan(src, dst)).num_bytes == 8 * sum(
            x.size for arrays in got.values() for x in arrays.values()
        )


def test_b014_heads_that_do_not_divide_are_refused_by_the_rule_that_needs_them_to() -> None:
    tensors = qkv(24, 6, 128, 1)
    with pytest.raises(CutError, match=r"len\(3072\).*parts\(5\)"):
        engine_qkv(tensors, 6, 5)


def test_b109_eight_equal_offers_are_read_once_and_shared() -> None:
    tensor = Tensor("w", (8, 4), "float32")
    rule = BufferRule("w", (Part(tensor),), tensor.dims)
    offers = Layout("trainer", Mesh((("dp", 8),)), (rule,))
    for readers in (
        one_rank(rule, rank=8),
        Layout(
            "rows",
            Mesh((("tp", 8),), offset=8),
            (
                replace(
                    rule, dims=(along(Mesh((("tp", 8),)), "tp", lambda r: even(whole(8), 8, r)), whole(4))
                ),
            ),
        ),
    ):
        found = plan(offers, readers)
        figures = cost(found)
        assert figures.num_bytes == figures.needed_bytes == 128
        assert figures.pairs[:, 0].tolist() == list(range(8))
        assert figures.pairs[:, 2].tolist() == [16] * 8
        assert figures.send_imbalance == 1.0


def test_b109_one_name_for_two_geometries_is_refused() -> None:
    first, second = Tensor("w", (8, 4), "float32"), Tensor("w", (4, 8), "float32")
    layout = Layout("twice", Mesh(()), tuple(BufferRule("w", (Part(t),), t.dims) for t in (first, second)))
    with pytest.raises(UnknownNameError, match=r"'w' comes from 'w' and from 'w'"):
        layout.arrays(0)
    with pytest.raises(PlanError, match=r"missing 1 of 1: w \(4, 8\)"):
        plan(separate(first), separate(second))


def test_b109_offers_of_other_sizes_of_the_same_bytes_are_covered_once() -> None:
    """A rank offers the whole, two others offer halves of it: declared replicas, and read once."""
    tensor = Tensor("w", (8, 4), "float32")
    mesh = Mesh((("r", 3),))
    halves = along(mesh, "r", lambda r: whole(8) if r == 0 else split(whole(8), (5, 3), r - 1))
    src = Layout("mixed", mesh, (BufferRule("w", (Part(tensor, replica=True),), (halves, whole(4))),))
    found = plan(src, separate(tensor, rank=3))
    assert cost(found).num_bytes == 128
    got = simulate(found, materialise(src, markers(tensor)), into=empty(found.dst, np.float64, fill=np.nan))
    np.testing.assert_array_equal(got[3]["w"], markers(tensor)[tensor])
    undeclared = replace(src, rules=(replace(src.rules[0], parts=(Part(tensor),)),))
    with pytest.raises(OverlapError, match=r"tensor 'w', dim 0, indices \[0:5\].*rank 0 and by rank 1"):
        plan(undeclared, separate(tensor, rank=3))


# --- what a peer accepts silently ---------------------------------------------------------------

W = Tensor("w", (8, 4), "float32")
TWO = Mesh((("tp", 2),))


def offered(low: Dim, high: Dim, *, replica: bool = False) -> Layout:
    rule = BufferRule("w", (Part(W, replica=replica),), (Sharded(("tp",), (low, high)), whole(4)))
    return Layout("trainer", TWO, (rule,))


def test_a_missing_row_shard_is_refused() -> None:
    with pytest.raises(GapError, match=r"tensor 'w', box \[4:8, 0:4\]: missing 16 of 32"):
        plan(offered(split(whole(8), (4, 4), 0), Dim()), separate(W))


def test_overlapping_shards_are_refused_or_read_once_where_they_are_declared_equal() -> None:
    low, high = cut(whole(8), 0, 5), cut(whole(8), 3, 8)
    with pytest.raises(OverlapError, match=r"tensor 'w', dim 0, indices \[3:5\].*rank 0 and by rank 1"):
        plan(offered(low, high), separate(W))
    assert cost(plan(offered(low, high, replica=True), separate(W))).num_bytes == 8 * 4 * 4


def test_an_element_size_follows_from_the_dtype_and_cannot_contradict_it() -> None:
    good = offered(*(split(whole(8), (4, 4), i) for i in (0, 1)))
    with pytest.raises(DtypeError, match=r"float32 does not fit in bfloat16"):
        plan(good, one_rank(replace(separate(W).rules[0], dtype="bfloat16")))
    with pytest.raises(DtypeError, match=r"float24.* is not among"):
        plan(replace(good, rules=(replace(good.rules[0], dtype="float24"),)), separate(W))


def test_half_of_a_fused_parameter_never_published_is_refused() -> None:
    gate, up = (Tensor(name, (6, 4), "float32") for name in ("gate", "up"))
    rows = concat(whole(6, "gate"), whole(6, "up"))
    engine = one_rank(
        BufferRule("gate_up", (Part(gate, "gate"), Part(up, "up")), (rows, whole(4))), name="engine", rank=1
    )
    with pytest.raises(PlanError, match=r"missing 1 of 2: up \(6, 4\)"):
        plan(separate(gate), engine)
    # Nor can a plan that lost the half of it be carried out.
    found = plan(separate(gate, up), engine)
    with pytest.raises(GapError, match=r"tensor 'up', rank 1, box .* written 0 of 24 elements"):
        prove_plan(replace(found, families=found.families[:1]))


def test_a_loader_that_transforms_is_not_recorded_as_a_copy() -> None:
    decay = Tensor("A_log", (12,), "float32")
    stored = one_rank(BufferRule("A", (Part(decay),), decay.dims, transform=Transform("neg_exp")), rank=1)
    with pytest.raises(TransformError, match=r"'A_log', buffers 'A_log' and 'A'"):
        plan(separate(decay), stored)


def test_padding_rows_of_a_vocabulary_are_in_no_copy_and_zero_in_the_reference() -> None:
    vocab = Tensor("embed", (13, 3), "float64")
    mesh = Mesh((("tp", 2),), offset=1)
    rows = along(mesh, "tp", lambda r: even(pad(whole(13), 8), 2, r))
    engine = Layout("engine", mesh, (BufferRule("embed", (Part(vocab),), (rows, whole(3))),))
    values = markers(vocab)
    found = plan(separate(vocab), engine)
    assert sum(copy.dst_box.numel for copy in found.copies()) == 13 * 3
    got = simulate(found, {0: {"embed": values[vocab]}}, into=empty(engine, np.float64, fill=0.0))
    assert (got[2]["embed"][5:] == 0).all()
    np.testing.assert_array_equal(np.concatenate([got[1]["embed"], got[2]["embed"]])[:13], values[vocab])
    # A padded source is trimmed by the plan: what it holds in its padding goes nowhere.
    padded = {1: got[1], 2: {"embed": np.where(got[2]["embed"] == 0, np.nan, got[2]["embed"])}}
    back = moved(engine, separate(vocab), padded)
    np.testing.assert_array_equal(back[0]["embed"], values[vocab])


def test_two_conversions_into_one_fused_parameter_do_not_share_a_place() -> None:
    biases = tuple(
        Tensor(f"{label}_bias", (size,), "float32") for label, size in (("q", 6), ("k", 2), ("v", 2))
    )
    rows = concat(*(whole(t.shape[0], t.name) for t in biases))
    rule = BufferRule("qkv_bias", tuple(Part(t, t.name) for t in biases), (rows,), dtype="bfloat16")
    engine = one_rank(rule, rank=1)
    with pytest.raises(DtypeError, match=r"'q_bias'.*float32 does not fit in bfloat16"):
        plan(separate(*biases), engine)
    found = plan(separate(*biases), engine, allow_casts=True)
    places = [copy.dst_box.dims[0] for copy in found.copies()]
    assert places == [range(6), range(6, 8), range(8, 10)]
    assert cost(found).num_bytes == 10 * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda words: words.reshape(-1, 64)[[0, 2, 1, *range(3, 16)]],
        lambda words: np.concatenate([words[1:2], words[:1], words[2:]]),
        lambda words: words.reshape(4, -1)[[1, 2, 0, 3]],
    ],
    ids=["two rows of 256 B swapped inside 4 KiB", "a word moved within a row", "rows 0, 3 against 1, 2"],
)
def test_digests_depend_on_where_the_bytes_are(change: object) -> None:
    words = np.random.default_rng(9).integers(0, 2**31, 1024, dtype=np.int32)
    changed = np.ascontiguousarray(change(words)).reshape(-1)  # type: ignore[operator]
    assert int(words.sum(dtype=np.int64)) == int(changed.sum(dtype=np.int64))
    assert digest.of_array(words) != digest.of_array(changed)
