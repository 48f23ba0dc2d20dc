"""Public bug reports about what an inference rank holds: one test a report, named after it.

K02 fewer KV heads than ranks, K06 vocabulary and padding, K07 expert numbers, K08 shared experts,
K13 biases. Moves are carried out in numpy with every element another number, into targets full of
NaN; the right values are written down here without a layout.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardweave.dialects import hf, vllm
from shardweave.errors import BufferRuleError, CutError, GeometryError, ShardweaveError, TransformError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Tensor,
    Transform,
    along,
    concat,
    even,
    prove,
    relabel,
    take,
    whole,
)
from shardweave.layout.buffer import table_of
from shardweave.layout.table import atoms, table
from shardweave.models import Block, Model, from_config
from shardweave.plan import empty, encode, materialise, plan, simulate
from shardweave.plan.simulate import State


def described(family: str = "llama", **sizes: Any) -> Model:
    given = {
        "num_hidden_layers": 1,
        "hidden_size": 5,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "intermediate_size": 48,
        "vocab_size": 192,
        "dtype": "float32",
        "tie_word_embeddings": False,
    }
    return from_config({"model_type": family, **given, **sizes})


def experts_of(num: int, **sizes: Any) -> Model:
    given = {"num_experts": num, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    return described("qwen3_moe", **given, **sizes)


def markers(layout: Layout) -> dict[Tensor, np.ndarray]:
    """Whole tensors, every element of all of them another number."""
    values, start = {}, 1
    for tensor in layout.tensors:
        shape = [len(dim) for dim in tensor.dims]
        values[tensor] = np.arange(start, start + tensor.numel, dtype=np.float64).reshape(shape)
        start += tensor.numel
    return values


def moved(src: Layout, state: State, dst: Layout) -> State:
    return simulate(plan(src, dst), state, into=empty(dst, np.float64, fill=np.nan))


def rule_of(layout: Layout, end: str) -> BufferRule:
    (rule,) = (rule for rule in layout.rules if rule.name.endswith(end))
    return rule


def held(layout: Layout, end: str, label: str = "", dim: int = 1) -> list[list[int]]:
    """The indices of a tensor that each rank of the axis that cuts a dim holds."""
    return [[i for _, i in one.only(label)] for one in table_of(rule_of(layout, end).dims[dim])]


def share(dims: tuple[Dim, ...], label: str = "") -> dict[int, float]:
    """One over the number of ranks that hold an index: the weight of a copy in a sum over ranks."""
    found = atoms(table(dims, label))
    counts = np.diff(found.first)
    return {
        int(start + i * step): 1 / int(n)
        for start, size, step, n in zip(
            found.pieces.start, found.pieces.count, found.pieces.step, counts, strict=True
        )
        for i in range(size)
    }


# --- K02: fewer KV heads than ranks -------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv", "tp"), [(32, 4, 8), (64, 8, 16)])
def test_b015_transformers_48307_a_kv_head_is_held_whole(heads: int, kv: int, tp: int) -> None:
    model = described("qwen3", num_attention_heads=heads, num_key_value_heads=kv, head_dim=128)
    layout = vllm.layout(model, vllm.mesh(tp=tp))
    for label in "kv":
        rows = held(layout, "qkv_proj.weight", label)
        assert rows == [list(range(128 * (r // 2), 128 * (r // 2) + 128)) for r in range(tp)]
    k = next(model.of("attention")).tensors["k"]
    back = [copy for copy in plan(layout, hf.layout(model)).copies() if copy.family.tensor == k]
    written = Counter(i for copy in back for i in copy.dst_box.dims[0])
    assert written == Counter(range(128 * kv))


def test_b015_transformers_48307_six_ranks_over_four_heads_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"tp\(6\) % num_kv_heads\(4\) = 2"):
        vllm.layout(described(num_attention_heads=12), vllm.mesh(tp=6))


@pytest.mark.parametrize(("kv", "tp", "right"), [(2, 4, [0, 0, 1, 1]), (1, 8, [0] * 8)])
def test_b016_vllm_2379_head_is_rank_over_replicas(kv: int, tp: int, right: list[int]) -> None:
    heads, d = 24, 3
    model = described(num_attention_heads=heads, num_key_value_heads=kv, head_dim=d)
    layout = vllm.layout(model, vllm.mesh(tp=tp))
    assert [{row // d for row in rows} for rows in held(layout, "qkv_proj.weight", "k")] == [
        {h} for h in right
    ]
    for rows, head in zip(held(layout, "qkv_proj.weight", "q"), right, strict=True):
        assert {row // d // (heads // kv) for row in rows} == {head}


def test_b017_sglang_20967_a_norm_by_heads_is_cut_by_heads() -> None:
    norm = np.random.default_rng(17).standard_normal(1024)
    dims = tuple(vllm.kv_heads(whole(1024), 8, 16, rank) for rank in range(16))
    assert [[i for _, i in dim] for dim in dims] == [
        list(range(128 * (r // 2), 128 * (r // 2) + 128)) for r in range(16)
    ]
    weight = share(dims)
    assert set(weight.values()) == {1 / 2}
    total = sum(weight[i] * norm[i] ** 2 for dim in dims for _, i in dim)
    unweighted = sum(norm[i] ** 2 for dim in dims for _, i in dim)
    assert math.isclose(total, float(norm @ norm)) and math.isclose(unweighted, 2 * float(norm @ norm))


def test_b019_llamafactory_10794_every_rank_has_the_kv_head_of_its_queries() -> None:
    heads, kv, d, cp = 16, 2, 3, 4
    owner = [{i // d for _, i in vllm.kv_heads(whole(kv * d), kv, cp, r)} for r in range(cp)]
    assert owner == [{0}, {0}, {1}, {1}]
    vllm.layout(described(num_attention_heads=12, num_key_value_heads=2), vllm.mesh(tp=4))
    with pytest.raises(GeometryError, match=r"num_heads\(12\) % tp\(8\)"):
        vllm.layout(described(num_attention_heads=12, num_key_value_heads=2), vllm.mesh(tp=8))
    # The gradient of a K head is the sum over its query heads: here each adds its own number.
    alone = np.zeros(kv * d)
    for head in range(heads):
        alone[head // (heads // kv) * d : (head // (heads // kv) + 1) * d] += head + 1
    back = np.zeros(kv * d)
    for r in range(cp):
        mine = sum(head + 1 for head in range(r * heads // cp, (r + 1) * heads // cp))
        for _, row in vllm.kv_heads(whole(kv * d), kv, cp, r):
            back[row] += mine
    assert np.array_equal(back, alone)


def test_b020_bigcode_megatron_19_one_kv_head_stays_one() -> None:
    model = described(num_attention_heads=16, num_key_value_heads=1, head_dim=8)
    four, two, one = (vllm.layout(model, vllm.mesh(tp=tp)) for tp in (4, 2, 1))
    values = markers(four)
    state = moved(four, materialise(four, values, fill=0), two)
    k, v = (values[next(model.of("attention")).tensors[role]][0] for role in "kv")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    for rank in range(2):
        assert np.array_equal(state[rank][name][-16:], np.concatenate([k, v]))
    state = moved(two, state, one)
    assert state[0][name].shape == (16 * 8 + 8 + 8, 5)
    assert np.array_equal(state[0][name][-16:], np.concatenate([k, v]))
    files = plan(two, hf.layout(model))
    writers = Counter(
        i for c in files.copies() if c.dst_name.endswith("k_proj.weight") for i in c.dst_box.dims[0]
    )
    assert writers == Counter(range(8))


# --- K06: vocabulary and padding ----------------------------------------------------------------


def only_vocabulary(size: int, hidden: int = 2) -> Model:
    """A model of an embedding and a head."""
    sizes = {"vocab_size": size, "hidden_size": hidden}
    embed, head = (Tensor(f"{name}.weight", (size, hidden), "float64") for name in ("embed", "lm_head"))
    blocks = (
        Block("embedding", Dim(), sizes, {"embed": embed}),
        Block("head", Dim(), sizes, {"head": head}),
    )
    return Model("llama", 0, "float64", blocks)


@pytest.mark.parametrize(("vocab", "padded"), [(49159, 49216), (49159 + 256, 49472)])
def test_b042_vllm_20843_embedding_and_head_are_padded_alike(vocab: int, padded: int) -> None:
    layout = vllm.layout(only_vocabulary(vocab), vllm.mesh(tp=2))
    embed, head = (rule_of(layout, f"{name}.weight").dims[0] for name in ("embed", "lm_head"))
    assert embed == head
    assert [len(dim) for dim in table_of(embed)] == [padded // 2] * 2
    model = only_vocabulary(vocab)
    other = replace(model.blocks[1], sizes={**model.blocks[1].sizes, "vocab_size": padded})
    with pytest.raises(GeometryError, match=rf"vocab_size\({vocab}, {padded}\)"):
        vllm.layout(replace(model, blocks=(model.blocks[0], other)), vllm.mesh(tp=2))


@pytest.mark.parametrize(
    ("vocab", "tp", "padded", "per_rank"), [(129280, 24, 129408, 5392), (151552, 6, 151680, 25280)]
)
def test_b043_sglang_31799_a_padding_that_tp_divides(vocab: int, tp: int, padded: int, per_rank: int) -> None:
    model, multiple = only_vocabulary(vocab), math.lcm(64, tp)
    with pytest.raises(GeometryError, match=rf"% tp\({tp}\).*lcm\(64, {tp}\) = {multiple}"):
        vllm.layout(model, vllm.mesh(tp=tp))
    layout = vllm.layout(model, vllm.mesh(tp=tp), vocab_multiple=multiple)
    dims = table_of(rule_of(layout, "embed.weight").dims[0])
    assert {len(dim) for dim in dims} == {per_rank} and per_rank * tp == padded
    pads = [sum(label is None for label, _ in dim) for dim in dims]
    assert pads == [0] * (tp - 1) + [padded - vocab]
    ids = np.array([-1 if label is None else i for dim in dims for label, i in dim])
    logits = np.where(ids < 0, 9.0, ids % 1000 / 1000)
    assert 0 <= ids[np.argmax(np.where(ids < 0, -np.inf, logits))] < vocab
    assert ids[np.argmax(logits)] == -1


def test_b043_sglang_31799_there_and_back() -> None:
    wide, narrow = (
        vllm.layout(only_vocabulary(129280), vllm.mesh(tp=tp), vocab_multiple=m)
        for tp, m in ((24, 192), (8, 64))
    )
    state = materialise(wide, markers(wide), fill=np.nan)
    back = moved(narrow, moved(wide, state, narrow), wide)
    for rank, arrays in state.items():
        for name, array in arrays.items():
            assert np.array_equal(back[rank][name], array, equal_nan=True)


# --- K07: numbers of experts --------------------------------------------------------------------


def test_b044_vllm_gaudi_1796_local_numbers_count_from_the_rank() -> None:
    layout = vllm.layout(experts_of(8), vllm.mesh(tp=4, ep=4), expert_parallel=True)
    local = [{e: at for at, e in enumerate(ids)} for ids in held(layout, "w13_weight")]
    assert local[1] == {2: 0, 3: 1}
    routing = [2, 3, 0, 5, 2, 7]
    assert [local[1].get(e) for e in routing] == [0, 1, None, None, 0, None]
    assert [[r for r in range(4) if e in local[r]] for e in routing] == [[1], [1], [0], [2], [1], [3]]
    for e in range(8):
        (rank,) = (r for r in range(4) if e in local[r])
        assert held(layout, "w13_weight")[rank][local[rank][e]] == e
    with pytest.raises(CutError, match=r"id\(8\) is not in 0\.\.7"):
        take(whole(8), [8])


@pytest.mark.parametrize(("experts", "ep", "extra"), [(160, 24, 8), (128, 12, 4), (10, 4, 2)])
def test_b052_vllm_30614_the_number_of_redundant_experts_is_said(experts: int, ep: int, extra: int) -> None:
    assert (ep - experts % ep) % ep == extra
    with pytest.raises(
        GeometryError, match=rf"smallest number of redundant experts that divides is {extra}\b"
    ):
        vllm.placed_experts(experts, ep, 0, redundant=extra + 1)
    assert {len(vllm.placed_experts(experts, ep, r, redundant=extra)) for r in range(ep)} == {
        (experts + extra) // ep
    }


def test_b052_vllm_30614_an_update_reaches_every_replica() -> None:
    model = experts_of(10)
    files = hf.layout(model)
    layout = vllm.layout(model, vllm.mesh(tp=4), expert_parallel=True, redundant_experts=2)
    prove(layout)
    assert held(layout, "w13_weight") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]
    values = markers(files)
    before = materialise(layout, values)
    for tensor in model.tensors:
        if "expert" in dict(tensor.index):
            values[tensor][0, 1] += 0.5
    after = moved(files, materialise(files, values), layout)
    name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    changed = {
        (rank, slot)
        for rank in range(4)
        for slot in range(3)
        if (after[rank][name] != before[rank][name])[slot].all()
    }
    assert changed == {(0, 1), (3, 2)}
    assert all(
        (after[r][name] == before[r][name])[s].all()
        for r in range(4)
        for s in range(3)
        if (r, s) not in changed
    )
    written = Counter(copy.dst_name for copy in plan(layout, files).copies() if ".experts." in copy.dst_name)
    assert len(written) == 10 * 3
    exported = moved(layout, after, files)
    for at, array in materialise(files, values)[0].items():
        assert np.array_equal(exported[0][at], array), at


# --- K08: shared experts ------------------------------------------------------------------------


def with_shared(model: Model, ffn: int) -> Model:
    """The model with a shared expert on its sparse layers."""
    (moe,) = model.of("moe")
    hidden, at = moe.sizes["hidden_size"], "model.layers.{layer}.mlp.shared_expert"
    shapes = {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    layer = (("layer", moe.layers),)
    tensors = {
        role: Tensor(f"{at}.{role}_proj.weight", shape, model.dtype, layer) for role, shape in shapes.items()
    }
    tensors["router"] = Tensor(f"{at}_gate.weight", (1, hidden), model.dtype, layer)
    shared = Block("shared", moe.layers, {"ffn_size": ffn, "hidden_size": hidden}, tensors)
    return replace(model, blocks=(*model.blocks, shared))


def test_b054_sglang_26015_a_shared_expert_has_its_own_rule() -> None:
    model = with_shared(experts_of(64), ffn=28)
    files = hf.layout(model)
    layout = vllm.layout(model, vllm.mesh(tp=4, ep=4), expert_parallel=True)
    prove(layout)
    assert [e for ids in held(layout, "w13_weight") for e in ids] == list(range(64))
    assert [len(ids) for ids in held(layout, "w13_weight")] == [16] * 4
    rows = [[*range(7 * r, 7 * r + 7)] for r in range(4)]
    assert held(layout, "shared_expert.gate_up_proj.weight", "gate") == rows
    assert held(layout, "shared_expert.gate_up_proj.weight", "up") == rows
    again = vllm.layout(model, vllm.mesh(tp=4, ep=4), expert_parallel=True)
    assert encode(plan(files, layout)) == encode(plan(files, again))


def test_b055_sglang_26845_a_fused_shared_expert_counts_once() -> None:
    ep, routed, size = 8, 256, 3
    mesh = Mesh((("ep", ep),))
    tensors = {
        label: Tensor(f"{label}.{{expert}}.up.weight", (size, 2), "float64", (("expert", whole(n)),))
        for label, n in (("routed", routed), ("shared", 1))
    }

    def slots(rank: int) -> Dim:
        return concat(relabel(even(whole(routed), ep, rank), "routed"), whole(1, "shared"))

    parts = tuple(Part(tensor, label, replica=label == "shared") for label, tensor in tensors.items())
    dims = (along(mesh, "ep", slots), whole(size), whole(2))
    layout = Layout("fused", mesh, (BufferRule("w3", parts, dims, stacked=(0, 1, 2)),))
    prove(layout)
    table_of_slots = table_of(layout.rules[0].dims[0])
    assert [len(dim) for dim in table_of_slots] == [33] * 8
    assert sum(len(dim) for dim in table_of_slots) == 264
    assert len({slot for dim in table_of_slots for slot in dim}) == 257
    assert share(table_of_slots, "shared") == {0: 1 / ep}
    assert set(share(table_of_slots, "routed").values()) == {1.0}
    files = Layout(
        "files",
        Mesh(()),
        tuple(BufferRule(t.name, (Part(t),), t.dims) for t in tensors.values()),
    )
    exported = Counter(copy.dst_name for copy in plan(layout, files).copies() if "shared" in copy.dst_name)
    assert set(exported) == {"shared.0.up.weight"}
    state = materialise(layout, markers(layout))
    assert np.array_equal(
        moved(layout, state, files)[0]["shared.0.up.weight"], markers(layout)[tensors["shared"]][0]
    )


def test_b056_vllm_55686_both_halves_of_a_fused_shared_expert() -> None:
    ffn, hidden = 4, 8
    model = with_shared(experts_of(3, hidden_size=hidden), ffn=ffn)
    (shared,) = model.of("shared")
    gate, up = shared.tensors["gate"], shared.tensors["up"]
    target = replace(vllm.layout(model, vllm.mesh(tp=1)))
    target = replace(target, rules=(rule_of(target, "shared_expert.gate_up_proj.weight"),))
    rows = concat(whole(ffn, "gate"), whole(ffn, "up"))
    fused = Layout(
        "fused",
        Mesh(()),
        (
            BufferRule(
                "shared.{layer}.gate_up",
                (Part(gate, "gate"), Part(up, "up")),
                (gate.dims[0], rows, whole(hidden)),
            ),
        ),
    )
    split = Layout("split", Mesh(()), tuple(BufferRule(t.name, (Part(t),), t.dims) for t in (gate, up)))
    stacked = np.arange(2 * ffn * hidden, dtype=np.float64).reshape(2 * ffn, hidden)
    name = "model.layers.0.mlp.shared_expert.gate_up_proj.weight"
    writes = [(c.src_box.dims[0], c.dst_box.dims[0]) for c in plan(fused, target).copies()]
    assert writes == [(range(4), range(4)), (range(4, 8), range(4, 8))]
    assert np.array_equal(moved(fused, {0: {"shared.0.gate_up": stacked}}, target)[0][name], stacked)
    at = {gate.member({"layer": 0}): stacked[:ffn], up.member({"layer": 0}): stacked[ffn:]}
    assert np.array_equal(moved(split, {0: at}, target)[0][name], stacked)
    with pytest.raises(ShardweaveError, match="up_proj"):
        plan(Layout("gate alone", Mesh(()), split.rules[:1]), target)


# --- K13: biases --------------------------------------------------------------------------------


def test_b077_minivllm_80_a_row_parallel_bias_is_added_once() -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 3}
    model = described(**sizes, attention_bias=True)
    layout = vllm.layout(model, vllm.mesh(tp=2))
    tensors = next(model.of("attention")).tensors
    values = markers(layout)
    values[tensors["o"]] = np.arange(1.0, 13).reshape(1, 3, 4)
    values[tensors["o_bias"]] = np.array([[100.0, 200.0, 300.0]])
    state = materialise(layout, values)
    x, at = np.array([1.0, 2.0, 3.0, 4.0]), "model.layers.0.self_attn.o_proj"
    partial = [state[r][f"{at}.weight"] @ x[2 * r : 2 * r + 2] for r in range(2)]
    bias = [state[r][f"{at}.bias"] for r in range(2)]
    assert np.array_equal(bias[0], bias[1])
    assert np.array_equal(sum(partial) + bias[0], [130, 270, 410])
    assert np.array_equal(sum(p + b for p, b in zip(partial, bias, strict=True)), [230, 470, 710])
    # Copies on an axis that the rule does not read: not parts of a sum.
    assert "tp" in rule_of(layout, "o_proj.weight").axes and "tp" not in rule_of(layout, "o_proj.bias").axes


def test_b078_nano_vllm_125_a_bias_has_its_own_rule() -> None:
    model = described(num_attention_heads=12, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    layout = vllm.layout(model, vllm.mesh(tp=4))
    shapes = {name.removeprefix("model.layers.0."): b.shape for name, (b, _) in layout.arrays(3).items()}
    assert shapes["self_attn.qkv_proj.weight"] == (3 * 2 + 2 + 2, 5)
    assert shapes["self_attn.qkv_proj.bias"] == (3 * 2 + 2 + 2,)
    assert shapes["self_attn.o_proj.weight"] == (5, 6) and shapes["self_attn.o_proj.bias"] == (5,)
    assert shapes["mlp.gate_up_proj.weight"] == (24, 5) and shapes["mlp.gate_up_proj.bias"] == (24,)
    assert shapes["mlp.down_proj.weight"] == (5, 12) and shapes["mlp.down_proj.bias"] == (5,)
    weight, bias = (rule_of(layout, f"qkv_proj.{end}") for end in ("weight", "bias"))
    assert weight.dims[1] == bias.dims[1]
    assert [part.replica for part in bias.parts] == [False, True, True]
    o_bias = next(model.of("attention")).tensors["o_bias"]
    with pytest.raises(BufferRuleError, match=r"dims\(3\) != .*dims\(2\)"):
        BufferRule("o_proj.bias", (Part(o_bias),), rule_of(layout, "o_proj.weight").dims)


def test_b079_fastdeploy_5247_a_partial_bias_is_declared() -> None:
    tp = 4
    mesh = vllm.mesh(tp=tp)
    bias = Tensor("o_proj.bias", (3,), "float32")
    quarter = Transform("scale", 1 / tp)
    partial = Layout("partial", mesh, (BufferRule(bias.name, (Part(bias),), bias.dims, transform=quarter),))
    files = Layout("files", Mesh(()), (BufferRule(bias.name, (Part(bias),), bias.dims),))
    prove(partial)
    # A plan moves bytes: it refuses to take one function of the value for another.
    for src, dst in (files, partial), (partial, files):
        with pytest.raises(TransformError, match="scale"):
            plan(src, dst)
    for logical, stored in (8.0, 2.0), (4.0, 1.0):
        ranks = [
            rule.transform.apply(np.full(3, logical, np.float32))
            for rule in partial.rules
            for _ in mesh.ranks
        ]
        assert all(np.array_equal(held, [stored] * 3) for held in ranks)
        assert np.array_equal(sum(ranks), [logical] * 3)
        assert all(np.array_equal(quarter.undo(held), [logical] * 3) for held in ranks)
    third = Transform("scale", 1 / 3)
    assert quarter.exact and not third.exact
    whole_bias = np.random.default_rng(79).standard_normal(1000).astype(np.float16)
    back = third.undo(third.apply(whole_bias))
    assert np.max(np.abs(back / whole_bias - 1)) <= 2**-10
