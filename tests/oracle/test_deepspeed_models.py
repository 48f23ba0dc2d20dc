"""Whole models under DeepSpeed's AutoTP: what every rank holds, and whether what it computes is right.

Real models of transformers with random weights go through ``init_inference`` and ``deepspeed.initialize`` on
gloo ranks (``deepspeed_ranks.py``). Every element of every parameter of every rank is compared with the
layout, and the logits with those of the whole model: where DeepSpeed cuts a model into something else, it
shows there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_deepspeed_families as stubs
from rank_processes import run
from safetensors.numpy import load_file

from shardweave.dialects import deepspeed
from shardweave.dialects.deepspeed import INFERENCE, TRAINING
from shardweave.dialects.deepspeed import model as rules
from shardweave.errors import GeometryError, ShardweaveError, UnknownNameError
from shardweave.layout import Layout, Mesh, parse_layout, prove
from shardweave.models import Model, from_config

# The first test of each number of ranks waits for all models of it.
pytestmark = [pytest.mark.peer("deepspeed"), pytest.mark.peer("transformers"), pytest.mark.timeout(200)]

SCRIPT = Path(__file__).with_name("deepspeed_ranks.py")
TINY = Path(__file__).parents[1] / "data" / "configs" / "tiny"
ARGS = ("grain", "num_kv_heads", "vocab_parallel")
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model to cut.

    Attributes:
        family: Whose tiny config it has.
        way: How it is cut.
        changes: What its config is changed by.
        said: Arguments of the layout, and settings of DeepSpeed.
        computes: ``right``, or what the cut model does instead: ``fails`` (its code raises), ``split`` (its
            logits are of a part of the vocabulary).
        hooks: DeepSpeed's layers that it must have got.
    """

    family: str
    way: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)
    computes: str = "right"
    hooks: Sequence[str] = ("LinearLayer", "LinearAllreduce")

    @property
    def config(self) -> dict[str, Any]:
        config = json.loads((TINY / f"{self.family}.json").read_text()) | dict(self.changes)
        return {key: value for key, value in config.items() if value is not ...}

    @property
    def model(self) -> Model:
        return from_config(self.config)

    def layout(self, tp: int) -> Layout:
        args = {key: value for key, value in self.said.items() if key in ARGS}
        return deepspeed.layout(self.model, Mesh((("tp", tp), ("dp", 2))), way=self.way, **args)


FUSED = ("fused_LinearLayer", "LinearLayer", "LinearAllreduce")
HEAD = ("LmHeadLinearAllreduce",)
VOCAB = ("VocabParallelLinear", "VocabParallelEmbedding")
EAGER = {"experts_implementation": "eager"}
PHI3 = {"hidden_size": 36, "head_dim": ..., "num_key_value_heads": 3}
RW = {"new_decoder_architecture": False, "num_kv_heads": 6, "bias": True, "parallel_attn": False}
TIED = {"tie_word_embeddings": True}

# Over three ranks, with 2 KV heads for 6 heads: one rank without heads, feed-forwards of 8, 7 and 7.
THREE: dict[str, Case] = {
    **{family: Case(family, TRAINING) for family in ("llama", "mistral", "qwen2", "qwen3", "gptj")},
    "gpt_bigcode": Case("gpt_bigcode", TRAINING, hooks=FUSED),
    "bloom": Case("bloom", TRAINING, computes="fails", hooks=FUSED),
    "falcon": Case("falcon", TRAINING, {"num_kv_heads": 3}, hooks=FUSED),
    "falcon-rw": Case("falcon", TRAINING, RW, hooks=FUSED),
    "llama-grain": Case("llama", TRAINING, said={"grain": 4}),
    "gptj-bias": Case("gptj", TRAINING, said={"vocab_parallel": True}, computes="split", hooks=VOCAB[:1]),
    **{
        f"{family}-tied": Case(family, TRAINING, TIED, computes="split", hooks=VOCAB)
        for family in ("llama", "mistral", "qwen2", "qwen3", "gptj")
    },
    "llama-tied-whole": Case("llama", TRAINING, TIED, {"vocab_parallel": False}),
    "gpt_bigcode-rows": Case(
        "gpt_bigcode", TRAINING, said={"vocab_parallel": True}, computes="split", hooks=VOCAB
    ),
    "gpt_bigcode-untied": Case("gpt_bigcode", TRAINING, {"tie_word_embeddings": False}, hooks=FUSED),
    **{
        f"{family}-inference": Case(
            family, INFERENCE, EAGER if family in ("mixtral", "qwen3_moe") else {}, hooks=HEAD
        )
        for family in ("llama", "mistral", "qwen2", "qwen3", "gptj", "mixtral", "qwen3_moe")
    },
    "llama-inference-grain": Case("llama", INFERENCE, TIED, {"grain": 4}, hooks=HEAD),
    "gpt_bigcode-inference": Case("gpt_bigcode", INFERENCE, hooks=FUSED + HEAD),
    "bloom-inference": Case("bloom", INFERENCE, hooks=FUSED + HEAD),
    "falcon-inference": Case("falcon", INFERENCE, {"num_kv_heads": 3}, hooks=FUSED + HEAD),
    "phi3-inference": Case(
        "phi3", INFERENCE, PHI3, computes="fails", hooks=(*FUSED[:1], "GateUpPack_LinearLayer", *HEAD)
    ),
}
TWO = {
    "codegen-inference": Case("codegen", INFERENCE, hooks=FUSED + HEAD),
    "gptj-inference-tied": Case("gptj", INFERENCE, TIED, {"grain": 8}, hooks=HEAD),
    "bloom-two": Case("bloom", INFERENCE, hooks=FUSED + HEAD),
}
CASES = {name: (tp, case) for tp, cases in ((3, THREE), (2, TWO)) for name, case in cases.items()}

# What DeepSpeed refuses, or what its cut computes: no layout is given.
REFUSED = {
    "gpt2": (Case("gpt2", TRAINING), "AutoTP not supported for model"),
    "gpt2-inference": (Case("gpt2", INFERENCE), "AutoTP not supported for model"),
    "mixtral": (Case("mixtral", TRAINING, EAGER), "packed_colwise"),
    "qwen3_moe": (Case("qwen3_moe", TRAINING, EAGER), "packed_colwise"),
    "phi3": (Case("phi3", TRAINING, PHI3), "rowwise_split_input"),
    "codegen": (Case("codegen", TRAINING), "wrong"),
    "gpt_bigcode-heads": (Case("gpt_bigcode", INFERENCE, {"multi_query": False}), "fails"),
    "gpt_bigcode-heads-training": (Case("gpt_bigcode", TRAINING, {"multi_query": False}), "fails"),
    "falcon-mqa": (Case("falcon", INFERENCE, RW | {"multi_query": True}), "fails"),
    "phi3-head-dim": (Case("phi3", INFERENCE), "fails"),
}


# --- DeepSpeed's side ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """What came of a model: the whole one, the ranks' parameters, and what they say."""

    whole: Arrays
    ranks: Sequence[Arrays]
    said: Sequence[Mapping[str, Any]]


def play(cases: Mapping[str, Case], tp: int, folder: Path) -> dict[str, Cut]:
    described = [
        {"name": name, "config": case.config, "way": case.way, "said": dict(case.said)}
        for name, case in cases.items()
    ]
    run(SCRIPT, described, folder, world_size=tp, limit_s=180, preload="deepspeed")
    return {
        name: Cut(
            load_file(folder / f"{name}-whole.safetensors"),
            [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(tp)],
            [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(tp)],
        )
        for name in cases
    }


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Cut]:
    of_two = {**TWO, **{name: case for name, (case, _) in REFUSED.items()}}
    found: dict[str, Cut] = {}

    def of(name: str) -> Cut:
        if name not in found:
            tp, cases = (3, THREE) if name in THREE else (2, of_two)
            found.update(play(cases, tp, tmp_path_factory.mktemp(f"tp{tp}")))
        return found[name]

    return of


# --- both sides ---------------------------------------------------------------------------------


def held(layout: Layout, rank: int, whole: Arrays) -> dict[str, np.ndarray]:
    """The arrays of a rank: of each array of the whole model, the indices that the layout says."""
    found = {}
    for name, (buffer, _) in layout.arrays(rank).items():
        array = whole[name]
        for axis, at in enumerate(buffer.stacked):
            if at not in layout_fused(layout, buffer.name):
                array = np.take(array, [index for _, index in buffer.dims[at]], axis=axis)
        found[name] = array
    return found


def layout_fused(layout: Layout, name: str) -> tuple[int, ...]:
    """Dims over several tensors, of experts in memory, and their index: no rule of AutoTP touches them."""
    (rule,) = (rule for rule in layout.rules if rule.name == name)
    return tuple(range(len(rule.index))) + rule.fused


def differing(layout: Layout, found: Cut) -> list[str]:
    """Which parameters of which rank are not what the layout says."""
    wrong = []
    for rank, theirs in enumerate(found.ranks):
        ours = held(layout, rank, found.whole)
        wrong += [f"{name} of rank {rank}" for name in ours.keys() ^ theirs.keys()]
        wrong += [
            f"{name} of rank {rank}"
            for name in ours.keys() & theirs.keys()
            if ours[name].shape != theirs[name].shape or not np.array_equal(ours[name], theirs[name])
        ]
    return wrong


@pytest.mark.parametrize("name", CASES)
def test_every_rank_holds_what_the_layout_says(cut: Callable[[str], Cut], name: str) -> None:
    tp, case = CASES[name]
    found, layout = cut(name), case.layout(tp)
    assert "refused" not in found.said[0], found.said[0]
    prove(layout)
    assert parse_layout(str(layout)) == layout
    assert differing(layout, found) == []


@pytest.mark.parametrize("name", CASES)
def test_the_layers_that_cut_were_put_in(cut: Callable[[str], Cut], name: str) -> None:
    for said in cut(name).said:
        assert set(CASES[name][1].hooks) <= set(said["classes"].values())


@pytest.mark.parametrize("name", CASES)
def test_what_is_cut_computes_what_the_whole_model_does(cut: Callable[[str], Cut], name: str) -> None:
    for said in cut(name).said:
        match CASES[name][1].computes:
            case "right":
                assert said["difference"] < 1e-4
            case "split":
                assert said["failed"].startswith("RuntimeError: The size of tensor a")
            case "fails":
                assert said["failed"].startswith("RuntimeError")


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_refuses_or_gets_wrong_has_no_layout(cut: Callable[[str], Cut], name: str) -> None:
    case, reason = REFUSED[name]
    for said in cut(name).said:
        if reason == "wrong":
            assert said["difference"] > 0.1, "logits of another model, and no word of it"
        elif reason == "fails":
            assert said["failed"]
        else:
            assert reason in said["refused"]
    with pytest.raises(GeometryError) as error:
        case.layout(2)
    assert error.value.hint and error.value.equation


# --- remote code --------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tp"), [("chatglm", 2), ("chatglm", 3), ("yuan", 2), ("yuan", 3)])
@pytest.mark.parametrize("way", [TRAINING, INFERENCE])
def test_layers_of_remote_code(monkeypatch: pytest.MonkeyPatch, family: str, tp: int, way: str) -> None:
    """ChatGLM and Yuan, whose code is not here: their layers, by the names and sizes that AutoTP looks at."""
    from deepspeed import comm

    monkeypatch.setattr(comm, "get_world_size", lambda group=None: group.tp if group else 1)
    monkeypatch.setattr(comm, "get_rank", lambda group=None: group.rank if group else 0)
    changes = {"chatglm": {"hidden_size": 48}, "yuan": {"hidden_size": 48, "num_attention_heads": 12}}[family]
    case = Case(family, way, changes)
    build = {"chatglm": stubs.chatglm, "yuan": stubs.yuan}[family]
    layout = case.layout(tp)
    for rank in range(tp):
        model = build(case.config)
        whole = stubs.marked(model)
        theirs = stubs.theirs(model, case.config, tp, rank)
        ours = held(layout, rank, {**whole, "lm_head.weight": whole.get("lm_head.weight")})
        for name in theirs:
            if ".layers." in name:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=f"{name} of rank {rank}")


# --- a layout that is wrong ---------------------------------------------------------------------


def without(role: str) -> Callable[..., Any]:
    """The rules of a block with those of one role left out."""
    real = rules._of_block

    def of_block(model: Model, block: Any, *args: Any) -> Any:
        spared = [tensor for of, tensor in block.tensors.items() if of.removesuffix("_bias") == role]
        return ((tensor, of) for tensor, of in real(model, block, *args) if tensor not in spared)

    return of_block


ROLES = {"qkv", "qvk", "q", "k", "v", "o", "gate", "up", "gate_up", "down"}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_that_never_fires_is_seen(
    cut: Callable[[str], Cut], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each rule of a block in turn is left out: exactly its parameters differ, on every rank."""
    tp, case = CASES[name]
    blocks = [block for block in case.model.blocks if block.layers and block.kind != "moe"]
    for role in sorted(ROLES & {role for block in blocks for role in block.tensors}):
        with monkeypatch.context() as patch:
            patch.setattr(rules, "_of_block", without(role))
            wrong = differing(case.layout(tp), cut(name))
        missed = [
            t for block in blocks for of, t in block.tensors.items() if of.removesuffix("_bias") == role
        ]
        names = {member for tensor in missed for member in tensor.names()}
        assert {entry.rpartition(" of rank ")[0] for entry in wrong} <= names
        assert len({entry.rpartition(" ")[2] for entry in wrong}) >= tp - 1, f"{role} of {name}"


@pytest.mark.parametrize(
    "name", [name for name, (_, case) in CASES.items() if "fused_LinearLayer" in case.hooks]
)
@pytest.mark.parametrize("layout", ["column", "bloom", "glm", "thirds", "phi3", "bigcode", "codegen"])
def test_a_wrong_name_of_a_fused_layout_is_seen(
    cut: Callable[[str], Cut], monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    tp, case = CASES[name]
    right = rules._fused(case.model, next(case.model.of("fused_attention")))
    same = {"falcon": {"bloom", "column"}, "bloom": {"column"}}.get(right, set())
    monkeypatch.setattr(rules, "_fused", lambda *_: layout)
    try:
        wrong = differing(case.layout(tp), cut(name))
    except ShardweaveError:
        return
    assert (wrong == []) == (layout == right or layout in same)


@pytest.mark.parametrize("end", ["embedding", "head"])
def test_an_end_that_is_not_cut_is_seen(
    cut: Callable[[str], Cut], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    case = THREE["llama-tied"]
    real = rules._ends
    name = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}[end]
    monkeypatch.setattr(rules, "_ends", lambda *args: (e for e in real(*args) if e[0] != name))
    assert differing(case.layout(3), cut("llama-tied")) == [f"{name} of rank {rank}" for rank in range(3)]


# --- what is said of it -------------------------------------------------------------------------


def test_one_rank_has_all_of_it_whatever_the_model() -> None:
    for family in ("gpt2", "codegen", "mixtral", "llama", "nemotron_h", "deepseek_v3"):
        model = Case(family, TRAINING).model
        layout = deepspeed.layout(model, Mesh((("dp", 2), ("tp", 1))))
        prove(layout)
        assert all(not rule.axes for rule in layout.rules)


def test_other_axes_hold_replicas() -> None:
    layout = THREE["qwen3"].layout(3)
    assert {axis for rule in layout.rules for axis in rule.axes} == {"tp"}


def test_what_is_not_described_is_refused() -> None:
    of = partial(deepspeed.layout, mesh=Mesh((("tp", 2),)))
    with pytest.raises(UnknownNameError, match="'deepseek_v3' is not one of bloom"):
        of(Case("deepseek_v3", TRAINING).model)
    with pytest.raises(UnknownNameError, match="way\\('serving'\\) is not training or inference"):
        of(Case("llama", TRAINING).model, way="serving")
    with pytest.raises(GeometryError, match=r"vocab_parallel\(True\)"):
        of(Case("llama", TRAINING).model, way=INFERENCE, vocab_parallel=True)
    with pytest.raises(GeometryError, match=r"one K and V for num_heads\(6\)"):
        of(Case("falcon", INFERENCE, RW | {"multi_query": True}).model, way=INFERENCE)
    with pytest.raises(GeometryError, match=r"num_blocks\(6\) != 1 of the layout 'glm'"):
        of(Case("chatglm", INFERENCE, {"multi_query_attention": False}).model, way=INFERENCE)
    with pytest.raises(GeometryError, match="'shared_qk_attention'"):
        of(Case("yuan", TRAINING, {"use_shareqk": True}).model)


def test_the_count_of_kv_heads_that_an_older_config_gives() -> None:
    """Without a count in its config DeepSpeed takes that of GPTBigCode's heads, and deals them out."""
    case = Case("gpt_bigcode", TRAINING, said={"num_kv_heads": 6})
    rows = [
        case.layout(3).arrays(rank)["transformer.h.0.attn.c_attn.weight"][0].shape[0] for rank in range(3)
    ]
    assert rows == [20, 20, 20]
    rows = [
        THREE["gpt_bigcode"].layout(3).arrays(rank)["transformer.h.0.attn.c_attn.weight"][0].shape[0]
        for rank in range(3)
    ]
    assert rows == [40, 10, 10]
