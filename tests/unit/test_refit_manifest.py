"""Manifests: their bytes, their structural hash, hostile ones, and what several say together."""

from __future__ import annotations

import hashlib
import itertools
import random
import zlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.dialects import megatron
from shardweave.errors import (
    FormatError,
    GapError,
    GeometryError,
    MeshError,
    OverlapError,
    PlanError,
    ReplicaError,
    ShardweaveError,
    UnknownNameError,
)
from shardweave.layout import (
    BufferRule,
    Layout,
    Mesh,
    Part,
    Tensor,
    along,
    balanced,
    concat,
    even,
    prove,
    whole,
)
from shardweave.layout.fingerprint import NOTHING, NUM_BYTES, fingerprint
from shardweave.models import from_config
from shardweave.plan import empty, materialise, plan, simulate
from shardweave.refit import Manifest, decode, encode, fingerprints_of, merge, part_of
from shardweave.refit import manifest as module
from shardweave.testing.strategies import layouts

MAGIC = b"shardweave.manifest/2\n"

CONFIG = {
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 56,
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}


def trainer(*, tp: int = 4, dp: int = 1, ep: int = 1, offset: int = 0) -> Layout:
    """A Megatron trainer; with 4 ranks along tp and 2 KV heads, some ranks hold queries only."""
    mesh = megatron.mesh(tp=tp, dp=dp, ep=ep, etp=1, offset=offset)
    return megatron.layout(from_config(CONFIG), mesh)


def whole_manifest(layout: Layout) -> Manifest:
    return Manifest(layout, {rank: f"10.0.0.{rank}:7".encode() for rank in layout.mesh.ranks}, version=3)


def per_rank(layout: Layout, **more: object) -> list[Manifest]:
    return [
        Manifest(part_of(layout, rank), {rank: bytes([rank])}, **{"version": 3, **more})
        for rank in layout.mesh.ranks
    ]


# --- bytes --------------------------------------------------------------------------------------


@given(layouts(), st.data())
def test_what_is_encoded_is_decoded(layout: Layout, data: st.DataObject) -> None:
    ranks = data.draw(st.sets(st.sampled_from(list(layout.mesh.ranks)), min_size=1))
    endpoints = {rank: data.draw(st.binary(max_size=9)) for rank in ranks}
    version = data.draw(st.none() | st.integers(0, (1 << 63) - 1))
    parts = sum(len(rule.parts) for rule in layout.rules)
    some = fingerprint(np.arange(5.0))
    prints = dict.fromkeys(ranks, (some,) * parts) if data.draw(st.booleans()) else {}
    manifest = Manifest(layout, endpoints, version, prints, data.draw(st.integers(0, (1 << 64) - 1)))
    assert decode(encode(manifest)) == manifest
    assert encode(decode(encode(manifest))) == encode(manifest)


def test_the_order_of_endpoints_plays_no_part() -> None:
    layout = trainer()
    backwards = {rank: bytes([rank]) for rank in reversed(layout.mesh.ranks)}
    forwards = dict(sorted(backwards.items()))
    assert encode(Manifest(layout, backwards)) == encode(Manifest(layout, forwards))


def test_the_size_does_not_grow_with_layers_and_experts() -> None:
    large = from_config({**CONFIG, "num_hidden_layers": 96, "num_experts": 384})
    mesh = megatron.mesh(tp=4, ep=1, etp=1)
    sizes = [
        len(encode(whole_manifest(megatron.layout(model, mesh)))) for model in (from_config(CONFIG), large)
    ]
    tensors = sum(
        np.prod([len(dim) for _, dim in t.index], dtype=int) for t in megatron.layout(large, mesh).tensors
    )
    assert tensors > 100_000 and abs(sizes[1] - sizes[0]) < 100 and sizes[1] < 2500


def test_a_rank_says_what_it_holds_and_no_more() -> None:
    layout = trainer()
    for rank in layout.mesh.ranks:
        part = part_of(layout, rank)
        assert {n: (b.shape, p) for n, (b, p) in part.arrays(rank).items()} == {
            n: (b.shape, p) for n, (b, p) in layout.arrays(rank).items()
        }
        held = {(p.tensor, p.box, p.at) for b in part.buffers(rank) for p in b.pieces()}
        assert held == {(p.tensor, p.box, p.at) for b in layout.buffers(rank) for p in b.pieces()}
    with pytest.raises(GapError):
        prove(part_of(layout, 0))


# --- structure ----------------------------------------------------------------------------------


def test_the_structural_hash_is_that_of_the_geometry() -> None:
    layout = trainer()
    base = whole_manifest(layout)
    parts = sum(len(rule.parts) for rule in layout.rules)
    same = [
        replace(base, version=4),
        replace(base, version=None),
        replace(base, endpoints=dict.fromkeys(layout.mesh.ranks, b"elsewhere")),
        replace(base, fingerprints=dict.fromkeys(layout.mesh.ranks, (NOTHING,) * parts), key=9),
        replace(base, layout=replace(layout, name="another name")),
        decode(encode(base)),
    ]
    assert {manifest.structure for manifest in same} == {base.structure}
    moved = trainer(offset=8)
    others = [
        replace(base, endpoints={0: b"", 1: b""}),
        whole_manifest(moved),
        whole_manifest(trainer(tp=2, dp=2)),
        whole_manifest(replace(layout, rules=layout.rules[:-1])),
        whole_manifest(replace(layout, rules=(replace(layout.rules[0], dtype="float32"), *layout.rules[1:]))),
        *per_rank(layout),
    ]
    hashes = {manifest.structure for manifest in others} | {base.structure}
    assert len(hashes) == len(others) + 1


# --- half specified -----------------------------------------------------------------------------


def test_half_a_manifest_is_refused() -> None:
    layout = trainer()
    parts = sum(len(rule.parts) for rule in layout.rules)
    some = fingerprints_of(layout, 0, empty(layout, np.uint16, fill=1)[0])
    for fields, rule in (
        ({"endpoints": {}}, "ranks of its layout"),
        ({"endpoints": {0: b"", 4: b""}}, "endpoints of rank 4 "),
        ({"fingerprints": {0: some}}, "every rank of a manifest or for none"),
        (
            {"fingerprints": dict.fromkeys(range(4), some[1:])},
            rf"fingerprints\({parts - 1}\) != parts\({parts}\)",
        ),
        ({"version": -1}, "counted from 0"),
        ({"version": 1 << 63}, "counted from 0"),
        ({"key": 1 << 64}, "counted from 0"),
    ):
        with pytest.raises(GeometryError, match=rule):
            replace(whole_manifest(layout), **fields)


# --- hostile bytes ------------------------------------------------------------------------------


def wrapped(body: bytes) -> bytes:
    packed = zlib.compress(body)
    return MAGIC + hashlib.blake2b(packed, digest_size=16).digest() + packed


def unwrapped(data: bytes) -> list[object]:
    return msgspec.msgpack.decode(zlib.decompress(data[len(MAGIC) + 16 :]))


def test_every_damaged_byte_and_every_cut_is_refused() -> None:
    data = encode(per_rank(trainer())[0])
    for i in range(len(data)):
        with pytest.raises(FormatError):
            decode(data[:i])
        with pytest.raises(FormatError):
            decode(data[:i] + bytes([data[i] ^ 0x41]) + data[i + 1 :])
    with pytest.raises(FormatError, match="another digest"):
        decode(data + b"\0")


def test_bytes_that_unpack_to_too_much_are_refused_in_bounded_memory() -> None:
    bomb = wrapped(bytes(module.MOST_BYTES + 1))
    assert len(bomb) < 20_000
    with pytest.raises(FormatError):
        decode(bomb)
    body = unwrapped(encode(whole_manifest(trainer())))
    body[2] = [b"\0" * (module.MOST_BYTES // 4)] * 4
    with pytest.raises(FormatError):
        decode(wrapped(msgspec.msgpack.encode(body)))
    with pytest.raises(FormatError, match="sane size"):
        encode(Manifest(trainer(), {0: bytes(module.MOST_BYTES)}))


def test_bytes_after_the_end_are_refused() -> None:
    packed = encode(whole_manifest(trainer()))[len(MAGIC) + 16 :] + b"more"
    with pytest.raises(FormatError, match="sane size"):
        decode(MAGIC + hashlib.blake2b(packed, digest_size=16).digest() + packed)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        (0, "layout \n", ShardweaveError),
        (0, 7, FormatError),
        (1, [0, 1, 2, 2], FormatError),
        (1, [3, 2, 1, 0], FormatError),
        (1, [0, 1, 2], FormatError),
        (1, [0, 1, 2, 4], GeometryError),
        (1, [-1, 0, 1, 2], GeometryError),
        (1, [0, 1, 2, 1 << 63], GeometryError),
        (2, [b""], FormatError),
        (3, -1, GeometryError),
        (3, 1.0, FormatError),
        (4, [b""], FormatError),
        (4, [b"\xff" * NUM_BYTES] * 4, FormatError),
        (4, [b"\0" * NUM_BYTES] * 4, GeometryError),
        (5, -1, GeometryError),
    ],
)
def test_a_wrong_field_is_refused(field: int, value: object, error: type[Exception]) -> None:
    body = unwrapped(encode(whole_manifest(trainer())))
    body[field] = value
    with pytest.raises(error):
        decode(wrapped(msgspec.msgpack.encode(body)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[0:96]", "[0:97]"),  # outside
        ("mesh tp=4", "mesh tp=4000000"),
        ("[0:5]", "[0:99999999999999999999999]"),
        (" bfloat16", " bfloat17"),
        ("holds 0", "holds 99"),
    ],
)
def test_a_layout_that_is_not_sound_is_refused(old: str, new: str) -> None:
    body = unwrapped(encode(whole_manifest(trainer())))
    text = body[0]
    assert isinstance(text, str) and old in text
    body[0] = text.replace(old, new)
    with pytest.raises(ShardweaveError):
        decode(wrapped(msgspec.msgpack.encode(body)))


def test_overlapping_parts_of_one_manifest_are_refused() -> None:
    w = Tensor("w", (7, 5), "float32")
    mesh = Mesh((("tp", 2),))
    rows = along(mesh, "tp", lambda r: whole(7) if r else even(whole(4), 2, 0))
    layout = Layout("", mesh, (BufferRule("w", (Part(w),), (rows, w.dims[1])),))
    with pytest.raises(OverlapError):
        decode(encode(whole_manifest(layout)))


@pytest.mark.parametrize("seed", range(60))
def test_noise_gives_a_named_error_or_a_manifest(seed: int) -> None:
    """Random edits of the text, of the message, and of the packed bytes, all with a right digest."""
    draw = random.Random(seed)
    body = unwrapped(encode(whole_manifest(trainer(tp=2, ep=2, dp=2))))
    text = str(body[0])
    for _ in range(20):
        changed = list(body)
        kind = draw.randrange(3)
        if kind == 0:
            letters = list(text)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(letters))
                letters[at : at + draw.randrange(3)] = draw.choice(
                    ["", "9", "-1", ":", "[", "]", "\n", " ", "|", ","]
                )
            changed[0] = "".join(letters)
        data = bytearray(msgspec.msgpack.encode(changed))
        if kind == 1:
            for _ in range(draw.randint(1, 3)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        wrong = bytearray(wrapped(bytes(data)))
        if kind == 2:
            at = draw.randrange(len(MAGIC) + 16, len(wrong))
            wrong[at] = draw.randrange(256)
            wrong[len(MAGIC) : len(MAGIC) + 16] = hashlib.blake2b(
                wrong[len(MAGIC) + 16 :], digest_size=16
            ).digest()
        try:
            found = decode(bytes(wrong))
        except ShardweaveError:
            continue
        assert decode(encode(found)) == found


# --- joining ------------------------------------------------------------------------------------


def simulated(
    source: Layout, state: dict[int, dict[str, np.ndarray]], target: Layout
) -> dict[int, dict[str, np.ndarray]]:
    return simulate(plan(source, target), state, into=empty(target, np.float64, fill=np.nan))


@given(layouts(), st.randoms())
def test_ranks_together_are_the_source(layout: Layout, order: random.Random) -> None:
    """A plan from the joined layout fills any other layout as one from the layout itself does."""
    manifests = per_rank(layout)
    order.shuffle(manifests)
    joined = merge(manifests, tensors=layout.tensors)
    assert joined == merge(reversed(manifests))
    assert set(joined.tensors) == set(layout.tensors)
    start = itertools.count(1)
    values = {
        t: np.array([next(start) for _ in range(t.numel)], dtype=np.float64).reshape([len(d) for d in t.dims])
        for t in layout.tensors
    }
    target = Layout("one", Mesh((), offset=20), tuple(plain(t) for t in layout.tensors))
    state = materialise(layout, values, fill=-1)
    found = simulated(joined, state, target)[20]
    expected = materialise(target, values)[20]
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def plain(tensor: Tensor) -> BufferRule:
    return BufferRule(tensor.name, (Part(tensor),), tensor.dims)


def test_whole_manifests_are_taken_as_they_are() -> None:
    layout = trainer(dp=2, ep=2)
    assert merge([whole_manifest(layout)]) == layout
    halves = [
        replace(whole_manifest(layout), endpoints=dict.fromkeys(ranks, b""))
        for ranks in (range(4), range(4, 8))
    ]
    assert merge(halves) == layout


def test_a_replica_stands_in_for_a_rank_that_is_gone() -> None:
    layout = trainer(dp=2)
    manifests = per_rank(layout)
    joined = merge(manifests[:2] + manifests[3:])
    assert 2 in joined.mesh.ranks and not list(joined.buffers(2))
    with pytest.raises(GapError):
        merge(manifests[:2] + manifests[3:6] + manifests[7:])


def test_two_trainers_of_other_cuts_are_replicas_only_where_they_are_the_same() -> None:
    """The same weights, cut along tp=2 and tp=4: overlapping parts that are not the same."""
    with pytest.raises(OverlapError):
        merge([whole_manifest(trainer()), whole_manifest(trainer(tp=2, offset=4))])


def test_a_rank_is_published_once() -> None:
    manifests = per_rank(trainer())
    with pytest.raises(OverlapError, match="rank 1 in two manifests"):
        merge([*manifests, manifests[1]])


def test_manifests_of_nobody_are_refused() -> None:
    with pytest.raises(GapError, match=r"manifests\(0\)"):
        merge([])


def test_ranks_too_far_apart_are_refused() -> None:
    layout = trainer(tp=2)
    far = replace(layout, mesh=replace(layout.mesh, offset=1 << 29))
    with pytest.raises(MeshError):
        merge([per_rank(layout)[0], Manifest(part_of(far, (1 << 29) + 1), {(1 << 29) + 1: b""}, version=3)])


def test_versions_and_keys_agree() -> None:
    first, *others = per_rank(trainer())
    with pytest.raises(PlanError, match=r"version\(4\) != version\(3\)"):
        merge([replace(first, version=4), *others])
    with pytest.raises(GeometryError, match="version of a source"):
        merge([replace(first, version=None), *others])
    merge([replace(manifest, version=None) for manifest in (first, *others)])


def test_what_is_expected_is_published_and_nothing_else() -> None:
    layout = trainer()
    manifests = per_rank(layout)
    extra = Tensor("model.extra.weight", (6,), "bfloat16")
    merge(manifests, tensors=layout.tensors)
    with pytest.raises(UnknownNameError, match=r"'model\.extra\.weight' is in none of them, 1 of "):
        merge(manifests, tensors=[*layout.tensors, extra])
    with pytest.raises(UnknownNameError, match="is not among"):
        merge(manifests, tensors=layout.tensors[1:])
    longer = replace(layout.tensors[0], shape=(97, 24))
    with pytest.raises(PlanError, match=r"97, 24.*96, 24"):
        merge(manifests, tensors=[longer, *layout.tensors[1:]])


# --- replicas -----------------------------------------------------------------------------------


def test_replicas_are_compared_part_by_part() -> None:
    """Every rank has its own queries and a copy of the one KV head; one copy differs."""
    q, k = Tensor("q", (12, 5), "float32"), Tensor("k", (3, 5), "float32")
    mesh = Mesh((("tp", 4),))
    rows = along(mesh, "tp", lambda r: concat(balanced(whole(12, "q"), 4, r), whole(3, "k")))
    layout = Layout(
        "", mesh, (BufferRule("qk", (Part(q, "q"), Part(k, "k", replica=True)), (rows, whole(5))),)
    )
    rng = np.random.default_rng(1)
    state = materialise(layout, {t: rng.random([len(d) for d in t.dims], dtype=np.float32) for t in (q, k)})

    def published() -> list[Manifest]:
        found = []
        for rank in mesh.ranks:
            part = part_of(layout, rank)
            prints = {rank: fingerprints_of(part, rank, state[rank], key=2)}
            found.append(Manifest(part, {rank: b""}, 1, prints, 2))
        return found

    good = published()
    assert merge(good).tensors == (q, k)
    state[2]["qk"][1, 1] += 1  # a query of its own
    merge(published())
    state[3]["qk"][4, 2] += 1  # the second row of its copy of k
    with pytest.raises(ReplicaError, match=r"'k'.* of rank 0 != .* of rank 3"):
        merge(published())
    with pytest.raises(GeometryError, match=r"key\(2\) != key\(3\)"):
        merge([*good[:3], replace(good[3], key=3)])
    with pytest.raises(GeometryError, match="fingerprints of a source"):
        merge([*good[:3], replace(good[3], fingerprints={})])


def test_fingerprints_of_ranks_add_up_to_the_tensor() -> None:
    layout = trainer()
    rng = np.random.default_rng(3)
    values = {t: rng.integers(0, 1 << 16, [len(d) for d in t.dims], dtype=np.uint16) for t in layout.tensors}
    state = materialise(layout, values)
    totals = dict.fromkeys(layout.tensors, NOTHING)
    seen = set()
    for rank in layout.mesh.ranks:
        coordinate = layout.mesh.coordinate(rank)
        parts = [(rule, part) for rule in layout.rules for part in rule.parts]
        for (rule, part), found in zip(parts, fingerprints_of(layout, rank, state[rank]), strict=True):
            copy = part.tensor, tuple(coordinate[axis] for axis in rule.axes)
            if copy not in seen:  # norms and routers are on every rank, and count once
                totals[part.tensor] += found
            seen.add(copy)
    for tensor, array in values.items():
        assert totals[tensor] == fingerprint(array), tensor
