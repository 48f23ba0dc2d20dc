"""vLLM's layouts: against recorded runs of its own loaders, and against the loaders themselves.

`tests/data/README.vllm.md` states the origin of the recording.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from vllm_words import by_case, compare, ranks_of

from shardweave.dialects import vllm
from shardweave.errors import GeometryError, ModelError
from shardweave.layout import Dim, Layout, even, prove, repeat, whole
from shardweave.models import Block, Model, from_config
from shardweave.models.blocks import (
    Heads,
    Stack,
    attention_block,
    embedding_block,
    final_block,
    head_block,
    moe_block,
    norms_block,
)

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "vllm_layouts.json").read_text())
CASES, REFUSALS = RECORDED["cases"], RECORDED["refusals"]

vllm_peer = pytest.mark.peer("vllm")


def layout_of(config: Mapping[str, Any], deployment: Mapping[str, Any]) -> Layout:
    given = {**deployment}
    sizes = {axis: given.pop(axis, 1) for axis in ("tp", "pp", "dp")}
    return vllm.layout(model_of(config), vllm.mesh(**sizes), **given)


def model_of(config: Mapping[str, Any]) -> Model:
    """The model of a config; a family with a shared expert is put together here, as none is described yet."""
    if config["model_type"] != "qwen2_moe":
        return from_config(config)
    stack = Stack("model.", config["hidden_size"], config["dtype"])
    layers, hidden, ffn = (
        whole(config["num_hidden_layers"]),
        stack.hidden_size,
        config["shared_expert_intermediate_size"],
    )
    shared = {
        role: stack.each(layers, f"mlp.shared_expert.{role}_proj.weight", *shape)
        for role, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn)))
    }
    shared["router"] = stack.each(layers, "mlp.shared_expert_gate.weight", 1, hidden)
    heads = Heads(config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    experts, expert_ffn = config["num_experts"], config["moe_intermediate_size"]
    blocks = (
        embedding_block(stack, config["vocab_size"]),
        norms_block(stack, layers),
        attention_block(stack, layers, heads, qkv_bias=True),
        moe_block(stack, layers, num_experts=experts, ffn_size=expert_ffn),
        Block("shared", layers, {"ffn_size": ffn, "hidden_size": hidden}, shared),
        final_block(stack),
        head_block(stack, config["vocab_size"]),
    )
    return Model("qwen2_moe", len(layers), stack.dtype, blocks)


# --- recorded -----------------------------------------------------------------------------------


@by_case(CASES)
def test_layout_is_what_vllm_loaded(case: Mapping[str, Any]) -> None:
    layout = layout_of(case["config"], case["deployment"])
    prove(layout)
    for rank, recorded in ranks_of(case):
        compare(layout, rank, recorded)


@by_case(REFUSALS)
def test_what_vllm_cannot_hold_is_refused(case: Mapping[str, Any]) -> None:
    with pytest.raises((GeometryError, ModelError)):
        layout_of(case["config"], case["deployment"])


def test_the_recording_has_what_the_tests_are_about() -> None:
    """A recording that lost its cases would pass every test above."""
    entries = [e for case in CASES for entries in case["parameters"].values() for e in entries]
    assert len(CASES) == 35 and len(REFUSALS) == 13 and len(entries) > 700
    assert [case["name"] for case in REFUSALS if not case["error"]] == [
        "biases of latent attention",
        "a tied head beside latent attention",
        "an o_proj bias that the class does not have",
        "a head dim that the class does not read",
    ]
    steps = {run[3] for e in entries for runs in e["dims"] or () for run in runs}
    assert {1, 4} <= steps
    assert {tuple(e["padding"]) for e in entries} == {(), ("zero",), ("unwritten",)}
    assert any(e["dims"] is None for e in entries)


def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rank % kv` in place of `rank // replicas`, the bug of many engines, fails the comparison."""

    def wrong(dim: Dim, num_kv_heads: int, tp: int, rank: int) -> Dim:
        parts = min(tp, num_kv_heads)
        return even(dim, parts, rank % parts)

    module = sys.modules["shardweave.dialects.vllm.layout"]
    monkeypatch.setattr(module, "kv_heads", wrong)
    case = next(case for case in CASES if case["name"] == "64 heads, 2 kv heads, tp 8")
    layout = layout_of(case["config"], case["deployment"])
    ranks = dict(ranks_of(case))
    compare(layout, 0, ranks[0])
    with pytest.raises(AssertionError, match=r"rank 1, model\.layers\.0\.self_attn\.qkv_proj"):
        compare(layout, 1, ranks[1])


# --- live ---------------------------------------------------------------------------------------


def script() -> ModuleType:
    """`make_vllm_layouts.py` beside this file, which is not in a package."""
    path = Path(__file__).with_name("make_vllm_layouts.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(path.stem) or importlib.util.module_from_spec(spec)
    if path.stem not in sys.modules:
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return module


@st.composite
def deployments(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], int]:
    """A model, a deployment that may or may not hold it, and one of its ranks."""
    small = st.integers(1, 6)
    tp, pp, dp = draw(small), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    kv = draw(small)
    heads = kv * draw(st.sampled_from([1, 2, 3, 4, 6]))
    tied = {"tie_word_embeddings": draw(st.booleans())}
    layers, vocab, ffn = (
        draw(st.integers(pp, 5)),
        draw(st.integers(1, 500)),
        draw(small) * draw(st.sampled_from([1, tp])),
    )
    family = draw(st.sampled_from(["qwen3", "qwen2", "qwen3_moe", "mixtral", "deepseek_v3"]))
    more: dict[str, Any] = {}
    deployment: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp}
    if family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        experts = draw(st.integers(2, 9))
        keys = {"qwen3_moe": "num_experts", "mixtral": "num_local_experts", "deepseek_v3": "n_routed_experts"}
        more = {keys[family]: experts, "num_experts_per_tok": 2}
        if family != "mixtral":
            more |= {"moe_intermediate_size": draw(small) * draw(st.sampled_from([1, tp * dp]))}
        deployment["expert_multiple"] = draw(st.sampled_from([1, 3, 8]))
        if tp * dp > 1 and draw(st.booleans()):
            redundant = draw(st.sampled_from([0, -experts % (tp * dp), tp * dp]))
            placement = "linear" if redundant else draw(st.sampled_from(["linear", "round_robin"]))
            deployment |= {"expert_parallel": True, "redundant_experts": redundant, "placement": placement}
    deployment["vocab_multiple"] = draw(st.sampled_from([64, 64 * tp, 30]))
    if family == "deepseek_v3":
        more |= {"n_group": 1, "topk_group": 1, "n_shared_experts": draw(st.integers(1, 2))}
        more |= {"q_lora_rank": draw(st.sampled_from([None, 22])), "first_k_dense_replace": draw(small) - 1}
        more |= {"intermediate_size": ffn, "vocab_size": vocab}
        config = script().latent(layers, heads, draw(st.integers(0, 2)), **more)
        return config, deployment, draw(st.integers(0, tp * pp * dp - 1))
    head_dim = draw(small) * 2
    hidden = heads * (head_dim if family == "qwen2" else 2)
    config = script().config(family, layers, hidden, heads, kv, head_dim, ffn, vocab, **tied, **more)
    return config, deployment, draw(st.integers(0, tp * pp * dp - 1))


@vllm_peer
@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=deployments())
def test_live_vllm_holds_the_same(asked: tuple[dict[str, Any], dict[str, Any], int]) -> None:
    config, deployment, rank = asked
    # Its own class asks for this before it builds a layer.
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    assume(deployment["tp"] <= min(config.get(count, 10**6) for count in counts))
    try:
        layout = layout_of(config, deployment)
    except GeometryError as refused:
        # What does not fit may be on any stage: a vocabulary on the first, experts on a later one.
        with pytest.raises((AssertionError, ValueError)):
            for one in range(deployment["tp"] * deployment["pp"] * deployment["dp"]):
                script().ask(config, deployment, one)
        event(f"refused: {refused.rule}")
        return
    event("held")
    prove(layout)
    compare(layout, rank, script().ask(config, deployment, rank))


@vllm_peer
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(3), ids=["dense", "experts", "experts and stages"])
def test_live_worlds_of_processes_hold_the_same(number: int) -> None:
    """Real gloo worlds with nothing of vLLM replaced: the one-process questions above are the true ones."""
    _, config, deployment = list(script().worlds())[number]
    layout = layout_of(config, deployment)
    for rank, recorded in script().world(config, deployment).items():
        compare(layout, rank, recorded)


# --- laws of the rules --------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6))
def test_kv_heads_beyond_their_number_are_repeated(kv: int, head_dim: int, replicas: int) -> None:
    tp, rows = kv * replicas, whole(kv * head_dim)
    for rank in range(tp):
        repeated = even(repeat(rows, replicas, block=head_dim), tp, rank)
        assert vllm.kv_heads(rows, kv, tp, rank) == repeated


@given(st.integers(0, 200), st.integers(1, 12))
def test_stages_hold_all_layers_and_the_last_is_among_the_smallest(layers: int, pp: int) -> None:
    sizes = vllm.stages(layers, pp)
    assert sum(sizes) == layers and len(sizes) == pp
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from(["linear", "round_robin"]))
def test_every_expert_is_placed_once(experts: int, ep: int, placement: str) -> None:
    ranks = [[e for _, e in vllm.placed_experts(experts, ep, r, placement=placement)] for r in range(ep)]
    assert sorted(e for rank in ranks for e in rank) == list(range(experts))
    sizes = [len(rank) for rank in ranks]
    assert sizes == [experts // ep + (r < experts % ep) for r in range(ep)]


# --- half-given geometry ------------------------------------------------------------------------

MODEL = from_config(CASES[1]["config"])


@pytest.mark.parametrize(
    "said",
    [
        {"redundant_experts": 2},
        {"placement": "round_robin"},
        {"placement": "random", "expert_parallel": True},
        {"placement": "round_robin", "redundant_experts": 2, "expert_parallel": True},
        {"layer_partition": (1, 1)},
        {"layer_partition": (3,)},
    ],
    ids=str,
)
def test_half_given_geometry_is_refused(said: dict[str, Any]) -> None:
    config = next(case["config"] for case in CASES if "ep 4" in case["name"])
    with pytest.raises(GeometryError):
        vllm.layout(from_config(config), vllm.mesh(tp=4), **said)


def test_an_expert_axis_says_expert_parallel() -> None:
    mesh = vllm.mesh(tp=4, ep=4)
    assert mesh.groups("ep") == mesh.groups("tp", "dp")
    with pytest.raises(GeometryError, match="expert_parallel"):
        vllm.layout(MODEL, mesh)
    with pytest.raises(GeometryError, match=r"ep\(2\) != tp\(4\) \* dp\(1\) = 4"):
        vllm.mesh(tp=4, ep=2)
