"""AutoTP's layouts: against 107 recorded runs of the real functions, and against the functions themselves.

`tests/data/deepspeed_layouts/` states the origin of the recording.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardweave.dialects.deepspeed import (
    LAYOUTS,
    AutoTP,
    layout_of,
    shares,
    weight_layout,
    widths,
)
from shardweave.errors import GeometryError, OverlapError, ShardweaveError, UnknownNameError
from shardweave.layout import Dim, Mesh, Part, Run, Tensor, parse_layout, prove, whole
from shardweave.layout.buffer import table_of
from shardweave.layout.layout import Layout
from shardweave.layout.table import atoms, table

Case = Mapping[str, Any]

CASES: list[Case] = json.loads(
    (Path(__file__).parents[1] / "data" / "deepspeed_layouts" / "layouts.json").read_text()
)["cases"]
RAN = [case for case in CASES if "ranks" in case]
REFUSED = [case for case in CASES if "ranks" not in case]

# The recording's names of what has another name here.
NAMES = {
    "unknown_fallback_bloom": "unknown",
    "glm_gqa_not_special": "thirds",
    "internlm2_wqkv_forced": "internlm2",
    "gate_up_pack": "gate_up",
    "yuan_oproj": "yuan_o_proj",
}


def case_id(case: Case) -> str:
    heads = f"kv{case['meta']['num_kv_heads']}-grain{case['meta']['tp_grain_size']}"
    return f"{case['layout']}-{'x'.join(map(str, case['shape']))}-tp{case['tp']}-{heads}-{case['module']}"


def name_of(case: Case) -> str:
    if case["module"] == "lm_head":
        return "lm_head"
    return NAMES.get(case["layout"], case["layout"])


def model_of(case: Case) -> AutoTP:
    meta = case["meta"]
    plain = case["layout"] in ("column", "row")
    return AutoTP(
        tp=case["tp"],
        num_heads=meta["num_attention_heads"],
        num_kv_heads=meta["num_kv_heads"],
        hidden=meta["n_embd"],
        grain=meta["tp_grain_size"],
        name=case["module"] or "" if plain else "",
    )


def dims_of(case: Case) -> list[Dim]:
    size = case["shape"][case["axis"]]
    return [LAYOUTS[name_of(case)](whole(size), rank, model_of(case)) for rank in range(case["tp"])]


def indices(dim: Dim) -> list[int]:
    assert all(label == "" for label, _ in dim)
    return [index for _, index in dim]


def recorded(case: Case, rank: int) -> list[int]:
    return [i for start, count in case["ranks"][str(rank)]["axis_runs"] for i in range(start, start + count)]


def layout_for(case: Case) -> Layout:
    tensor = Tensor("weight", tuple(case["shape"]), "float32")
    return weight_layout(
        name_of(case), tensor, Mesh((("dp", 2), ("tp", case["tp"]))), model_of(case), dim=case["axis"]
    )


def test_recording_is_complete() -> None:
    assert (len(RAN), len(REFUSED)) == (97, 10)


@pytest.mark.parametrize("case", RAN, ids=case_id)
def test_recorded_cut(case: Case) -> None:
    markers = np.arange(np.prod(case["shape"]), dtype="<i8").reshape(case["shape"])
    for rank, dim in enumerate(dims_of(case)):
        entry = case["ranks"][str(rank)]
        assert indices(dim) == recorded(case, rank)
        assert dim == Dim(Run("", start, count) for start, count in entry["axis_runs"])
        held = np.ascontiguousarray(np.take(markers, indices(dim), case["axis"]))
        assert list(held.shape) == entry["shard_shape"]
        assert hashlib.sha256(held.tobytes()).hexdigest() == entry["flat_sha256"]


@pytest.mark.parametrize("case", RAN, ids=case_id)
def test_recorded_holders(case: Case) -> None:
    found = atoms(table(dims_of(case), ""))
    ours = {
        (int(found.pieces.start[atom] + i * found.pieces.step[atom]), frozenset(held.tolist()))
        for atom in range(len(found.pieces))
        for held in [found.holders.entry[found.first[atom] : found.first[atom + 1]]]
        for i in range(int(found.pieces.count[atom]))
    }
    theirs = {
        (i, frozenset(holders))
        for entry in case["ranks"].values()
        for start, count, holders in entry["p5_runs"]
        for i in range(start, start + count)
    }
    assert ours == theirs


@pytest.mark.parametrize("case", RAN, ids=case_id)
def test_proof_of_the_whole_weight(case: Case) -> None:
    layout = layout_for(case)
    prove(layout)
    assert parse_layout(str(layout)) == layout
    (rule,) = layout.rules
    (part,) = rule.parts
    replicates = bool(case["replicated_axis_runs"])
    assert case["covers"]
    assert part.replica == replicates == shares(name_of(case), model_of(case)) != case["partitions"]
    if replicates:
        owned = Layout("owned", layout.mesh, (replace_part(rule, Part(part.tensor)),))
        with pytest.raises(OverlapError, match="held by rank"):
            prove(owned)


def replace_part(rule: Any, part: Part) -> Any:
    return type(rule)(rule.name, (part,), rule.dims)


def test_the_recording_replicates_where_it_should() -> None:
    shared = [case["layout"] for case in RAN if case["replicated_axis_runs"]]
    assert {name: shared.count(name) for name in shared} == {"bigcode": 8, "yuan_value": 3, "yuan_oproj": 3}


@pytest.mark.parametrize("case", REFUSED, ids=case_id)
def test_recorded_refusal(case: Case) -> None:
    """What the peer refuses is refused with a reason, or done as the model says."""
    match case["layout"], len(case["shape"]):
        case "internlm2_wqkv_forced", _:
            # Rows lie by KV group; thirds of 128 rows do not exist, and no name is half known.
            assert [indices(dim) for dim in dims_of(case)] == [list(range(64)), list(range(64, 128))]
            with pytest.raises(UnknownNameError, match="'InternLM2DecoderLayer'"):
                layout_of(case["module"])
            with pytest.raises(GeometryError, match=r"rows\(128\) % 3 = 2 != 0"):
                LAYOUTS["thirds"](whole(128), 0, model_of(case))
        case "glm_gqa_not_special", _:
            meta, rows = case["meta"], case["shape"][0]
            with pytest.raises(GeometryError, match=rf"rows\({rows}\) % 3 = 1 != 0"):
                dims_of(case)
            with pytest.raises(GeometryError, match=rf"num_kv_heads\({meta['num_kv_heads']}\) != num_heads"):
                LAYOUTS["glm"](whole(rows), 0, model_of(case))
        case "codegen" | "phi3", 1:
            # A bias has the rows of its weight; the peer reads the shape's second size, and there is none.
            weight = next(
                c
                for c in RAN
                if (c["layout"], c["shape"][0], c["tp"], c["meta"])
                == (case["layout"], case["shape"][0], case["tp"], case["meta"])
            )
            assert [indices(dim) for dim in dims_of(case)] == [recorded(weight, r) for r in range(case["tp"])]
        case "codegen", 2:
            with pytest.raises(GeometryError, match=r"num_kv_heads\(8\) % 16 = 8 != 0"):
                dims_of(case)
        case "yuan_value" | "yuan_oproj", _:
            reason = {8: r"tp\(8\) > num_kv_heads\(8\) / 2", 3: r"num_kv_heads\(10\) % 3 = 1 != 0"}[
                case["tp"]
            ]
            with pytest.raises(GeometryError, match=reason):
                dims_of(case)
        case _:
            pytest.fail(f"a refusal without a reason: {case['layout']}")


@pytest.mark.parametrize("case", [c for c in RAN if c["layout"] == "glm_gqa_not_special"], ids=case_id)
def test_grouped_heads_are_no_thirds(case: Case) -> None:
    """The peer cuts these into stretches that mix q, k and v; their bytes have a name, q, k and v do not."""
    kv_heads, heads = case["meta"]["num_kv_heads"], case["meta"]["num_attention_heads"]
    with pytest.raises(GeometryError, match=rf"num_kv_heads\({kv_heads}\) != num_heads\({heads}\)"):
        LAYOUTS["glm"](whole(case["shape"][0]), 0, model_of(case))


# --- the real functions -------------------------------------------------------------------------

BLOCKS = {
    "bloom": "BloomBlock",
    "falcon": "FalconDecoderLayer",
    "unknown": "SomeNewBlock",
    "glm": "GLMBlock",
    "mpt": "MptBlock",
    "baichuan": "BaichuanLayer",
    "qwen": "QWenBlock",
    "chatglm2": "GLMBlock",
    "thirds": "DecoderLayer",
    "codegen": "CodeGenBlock",
    "bigcode": "GPTBigCodeBlock",
    "phi3": "Phi3DecoderLayer",
}
COUNTS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 24])
PEER = pytest.mark.peer("deepspeed")


@cache
def peer() -> Any:
    import deepspeed  # noqa: F401  (its accelerator is chosen here, by DS_ACCELERATOR)
    from deepspeed.module_inject import fusedqkv_utils, layers, tp_shard

    return fusedqkv_utils, layers, tp_shard


def meta_of(model: AutoTP) -> Any:
    return peer()[2].AutoTPMeta(model.num_kv_heads, model.num_heads, model.hidden, model.grain)


def their_rows(name: str, size: int, model: AutoTP, rank: int, *, bias: bool = False) -> list[int]:
    """What the real function leaves of the rows of a weight whose elements are their row numbers."""
    import torch

    fused, layers, _ = peer()
    columns = model.hidden or 7
    rows = torch.arange(size, dtype=torch.float64)
    weight = rows if bias else rows[:, None].repeat(1, columns)
    if name in ("yuan_value", "yuan_o_proj"):
        value = name == "yuan_value"
        shaped = weight if value else weight.T
        cut, _ = fused.shard_value_with_share_qk(shaped, None, rank, model.tp, value, meta_of(model))
        cut = cut.detach() if value else cut.detach().T
    elif name in BLOCKS:
        cut = fused.prepare_tp_fused_qkvw(BLOCKS[name], weight, model.tp, rank, meta_of(model))
    else:
        sizes = (size // 2, size // 2) if name == "gate_up" else (size,)
        module = {"gate_up": "mlp", "lm_head": "lm_head"}.get(name, model.name)
        given = layers._subparam_shard_widths(sizes, model.tp, meta_of(model), module)
        cut = layers._partition_logical_tensor(weight, 0, model.tp, rank, given, subparam_sizes=sizes)
    assert bias or bool((cut == cut[:, :1]).all())
    return [int(row) for row in (cut if bias else cut[:, 0])]


def nonsense(name: str, size: int, model: AutoTP) -> str:
    """Why a cut that the peer makes means nothing, or ``""``: each of these has to be refused here."""
    heads, kv, hidden = model.num_heads, model.num_kv_heads, model.hidden
    if name in ("bloom", "falcon", "unknown") and kv and size % kv:
        return "cut inside KV groups"
    if name in ("glm", "mpt", "baichuan", "qwen"):
        if size != 3 * hidden if hidden is not None else kv is None:
            return "nothing says that the thirds are q, k and v, or the hidden size says that they are not"
        if kv is not None and (heads is None or heads != kv):
            return "grouped heads, so the thirds are not q, k and v"
        if size % (3 * (kv or 1)):
            return "no thirds of whole heads"
    if name == "thirds" and (size % 3 or kv == 2):
        return "no thirds, or the peer takes another branch"
    if name in ("chatglm2", "phi3"):
        if name == "chatglm2" and kv != 2:
            return "the peer takes another branch"
        if heads is None or kv is None or hidden is None:
            return "head size taken from a shape"
        if hidden % heads or heads % kv or size != (heads + 2 * kv) * (hidden // heads):
            return "rows that are not q, k and v"
    if name == "bigcode":
        if heads is None or hidden is None or hidden % heads or size != hidden + 2 * (hidden // heads):
            return "a key/value block that is not one head, as of an interleaved model"
        if kv not in (None, 1, heads):
            return "more than one KV head, held whole"
    if name == "gate_up" and size % 2:
        return "no halves, which the peer sees on more than one rank only"
    if name == "codegen" and kv and size % (3 * kv):
        return "no whole heads"
    if name in ("yuan_value", "yuan_o_proj") and kv and (kv % 2 or size % kv or heads not in (None, kv)):
        return "heads without a pair, or rows that belong to no head and are dropped"
    return ""


@st.composite
def questions(draw: st.DrawFn, name: str) -> tuple[int, AutoTP]:
    """A model that fits the layout, and now and then one that is half known or does not fit."""
    tp = draw(st.integers(1, 6))
    kv = 2 if name == "chatglm2" else draw(COUNTS)
    head_dim = draw(st.sampled_from([2, 3, 5]))
    groups = draw(st.integers(1, 4)) if name in ("falcon", "phi3", "chatglm2", "thirds", "column") else 1
    if name == "codegen" and draw(st.integers(0, 4)):
        kv = 4 * tp * draw(st.integers(1, 2))
    if name.startswith("yuan") and draw(st.integers(0, 4)):
        kv = tp * draw(st.sampled_from([2, 4, 6]) if tp % 2 else st.integers(2, 5))
    heads, hidden = kv * groups, kv * groups * head_dim
    size = {
        "bigcode": hidden + 2 * head_dim,
        "thirds": 3 * head_dim * kv,
        "yuan_value": hidden,
        "yuan_o_proj": hidden,
        "gate_up": 2 * draw(st.integers(1, 200)),
        "column": draw(st.one_of(st.just(hidden), st.integers(0, 300))),
        "lm_head": draw(st.integers(1, 300)),
    }.get(name, (heads + 2 * kv) * head_dim)
    grain = draw(st.sampled_from([1, 1, 5, 8, 64]))
    known: dict[str, int | None] = {"num_heads": heads, "num_kv_heads": kv, "hidden": hidden}
    match draw(st.integers(0, 9)):
        case 0:
            known[draw(st.sampled_from(sorted(known)))] = None
        case 1:
            known[draw(st.sampled_from(sorted(known)))] = draw(COUNTS)
        case 2:
            size = max(1, size + draw(st.integers(-5, 5)))
        case 3 | 4 if name not in ("phi3", "codegen"):
            known["num_kv_heads"] = None
    module = draw(st.sampled_from(["", "q_proj", "mlp.up_proj", "lm_head", "embed_out", "experts.w1"]))
    return size, AutoTP(tp, grain=grain, name=module if name == "column" else "", **known)


@PEER
@pytest.mark.parametrize(
    "name", sorted({*BLOCKS, "yuan_value", "yuan_o_proj", "gate_up", "column", "lm_head"})
)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_against_the_real_function(name: str, data: st.DataObject) -> None:
    size, model = data.draw(questions(name))
    rank = data.draw(st.integers(0, model.tp - 1))
    try:
        ours: list[int] | None = indices(LAYOUTS[name](whole(size), rank, model))
    except ShardweaveError as error:
        ours = None
        assert error.hint and error.equation
    try:
        theirs: list[int] | None = their_rows(name, size, model, rank)
    except Exception:
        theirs = None
    if nonsense(name, size, model):
        assert ours is None, nonsense(name, size, model)
    else:
        if theirs is None and done_right(name, model):
            theirs = thirds_of_two_heads(size, model, rank)
        assert ours == theirs


def done_right(name: str, model: AutoTP) -> bool:
    """Two heads that are not grouped are thirds; the peer wants a hidden size that it does not need."""
    return name in ("glm", "mpt", "baichuan", "qwen") and model.num_kv_heads == 2 and model.hidden is None


def thirds_of_two_heads(size: int, model: AutoTP, rank: int) -> list[int]:
    head = size // 6
    held = {1: [0, 1]}.get(model.tp, [rank] if rank < 2 else [])
    return [third * 2 * head + h * head + i for third in range(3) for h in held for i in range(head)]


@PEER
@settings(deadline=None)
@given(data=st.data(), name=st.sampled_from(["glm", "phi3", "chatglm2", "bloom"]))
def test_the_peers_two_paths_agree_with_ours(name: str, data: st.DataObject) -> None:
    """Layers are cut by frozen widths, weights by the older function; both are the one composition."""
    import torch

    size, model = data.draw(questions(name))
    assume(not nonsense(name, size, model) and model.tp > 1)
    fused, layers, _ = peer()
    rank = data.draw(st.integers(0, model.tp - 1))
    sections = fused.fused_qkv_subparam_sizes(BLOCKS[name], (size, model.hidden or 7), meta_of(model))
    given_widths = layers._subparam_shard_widths(sections, model.tp, meta_of(model))
    rows = torch.arange(size)[:, None]
    cut = layers._partition_logical_tensor(rows, 0, model.tp, rank, given_widths, subparam_sizes=sections)
    assert cut[:, 0].tolist() == indices(LAYOUTS[name](whole(size), rank, model))


@PEER
@settings(deadline=None)
@given(
    size=st.integers(0, 500),
    tp=st.integers(1, 9),
    kv=st.one_of(st.none(), st.integers(1, 12)),
    grain=st.integers(1, 70),
    name=st.sampled_from(
        [
            "",
            "q_proj",
            "mlp",
            "model.mlp.fc",
            "lm_head",
            "embed_out",
            "x.lm_head",
            "gate_proj",
            "experts.0.w2",
        ]
    ),
)
def test_widths_are_the_peers(size: int, tp: int, kv: int | None, grain: int, name: str) -> None:
    _, _, tp_shard = peer()
    meta = tp_shard.AutoTPMeta(num_kv_heads=kv, tp_grain_size=grain)
    ours = widths(size, tp=tp, num_kv_heads=kv, grain=grain, name=name)
    assert list(ours) == tp_shard.get_shard_size_list(size, tp, meta, name or None)


@PEER
def test_a_bias_is_cut_as_its_weight_where_the_peer_can() -> None:
    model = AutoTP(4, num_heads=8, num_kv_heads=8, hidden=32)
    for name, size in (("bloom", 96), ("glm", 96), ("bigcode", 40), ("yuan_value", 32)):
        for rank in range(4):
            ours = indices(LAYOUTS[name](whole(size), rank, model))
            assert ours == their_rows(name, size, model, rank, bias=True)


def test_a_layout_for_two_kv_heads_is_not_thirds() -> None:
    model = AutoTP(2, num_heads=6, num_kv_heads=2, hidden=18)
    with pytest.raises(GeometryError, match=r"num_kv_heads\(2\).*'chatglm2'"):
        LAYOUTS["thirds"](whole(30), 0, model)
    assert str(LAYOUTS["chatglm2"](whole(30), 1, model)) == "[9:18] [21:24] [27:30]"


def test_an_output_head_has_no_kv_heads() -> None:
    model = AutoTP(3, num_kv_heads=2, grain=16)
    assert [len(LAYOUTS["lm_head"](whole(100), rank, model)) for rank in range(3)] == [32, 32, 36]
    assert [len(LAYOUTS["column"](whole(100), rank, model)) for rank in range(3)] == [50, 50, 0]


@PEER
def test_classes_lead_to_the_peers_layout() -> None:
    fused, _, _ = peer()
    kinds = {"bloom": "bloomtype", "falcon": "bloomtype", "bigcode": "bigcodetype", "codegen": "codegentype"}
    kinds |= {
        "glm": "glmtype",
        "mpt": "glmtype",
        "baichuan": "glmtype",
        "qwen": "qwentype",
        "phi3": "phi3type",
    }
    for block in fused.FUSED_QKV_TYPE_DICT:
        assert kinds[layout_of(block)] == fused.get_fused_qkv_type(block)


@PEER
def test_a_layout_that_is_wrong_does_not_pass() -> None:
    """The comparison above can fail: an even cut of q is not the peer's, nor is one stretch of the whole."""
    model = AutoTP(4, num_heads=7, num_kv_heads=7, hidden=28)
    theirs = [their_rows("glm", 84, model, rank) for rank in range(4)]
    assert theirs != [list(range(21 * rank, 21 * rank + 21)) for rank in range(4)]
    assert theirs != [indices(LAYOUTS["bloom"](whole(84), rank, model)) for rank in range(4)]
    assert theirs == [indices(LAYOUTS["glm"](whole(84), rank, model)) for rank in range(4)]


def test_ranks_that_share_are_listed() -> None:
    """The middle head of two neighbours of an odd Yuan cut, as the four pieces that the peer leaves out."""
    layout = weight_layout(
        "yuan_value", Tensor("v", (24, 6), "float32"), Mesh((("tp", 2),)), AutoTP(2, num_kv_heads=6)
    )
    assert [str(dim) for dim in table_of(layout.rules[0].dims[0])] == ["[0:8] [12:20]", "[4:12] [16:24]"]
