"""vLLM's layouts of hybrid models: against recorded runs of its own loaders, and the loaders themselves.

`tests/data/README.vllm_hybrid.md` states the origin of the recording.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from vllm_words import by_case, compare, ranks_of

from shardweave.dialects import megatron, vllm
from shardweave.errors import GeometryError, ModelError
from shardweave.layout import Dim, Layout, concat, even, prove, whole
from shardweave.models import from_config
from shardweave.plan import empty, materialise, plan, simulate
from shardweave.refit.values import apply, landing

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "vllm_hybrid.json").read_text())
CASES, REFUSALS = RECORDED["cases"], RECORDED["refusals"]


def layout_of(config: Mapping[str, Any], deployment: Mapping[str, Any]) -> Layout:
    given = {**deployment}
    sizes = {axis: given.pop(axis, 1) for axis in ("tp", "pp", "dp")}
    return vllm.layout(from_config(config), vllm.mesh(**sizes), **given)


def named(name: str) -> Mapping[str, Any]:
    return next(case for case in CASES if case["name"] == name)


def agree(layout: Layout, rank: int, recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Dims, and the values that are stored otherwise."""
    compare(layout, rank, recorded)
    for name, (buffer, _) in layout.arrays(rank).items():
        assert buffer.transform.kind == recorded[name].get("transform", "identity"), name


@by_case(CASES)
def test_layout_is_what_vllm_loaded(case: Mapping[str, Any]) -> None:
    layout = layout_of(case["config"], case["deployment"])
    prove(layout)
    for rank, recorded in ranks_of(case):
        agree(layout, rank, recorded)


@by_case(CASES)
def test_dtypes_beside_the_engine_s(case: Mapping[str, Any]) -> None:
    layout = vllm.layout(from_config(case["config"]), vllm.mesh(tp=1), dtype="bfloat16")
    found = {name: buffer.dtype for name, (buffer, _) in layout.arrays(0).items()}
    assert {name: dtype for name, dtype in found.items() if dtype != "bfloat16"} == case["dtypes"]


@by_case(REFUSALS)
def test_what_vllm_cannot_hold_is_refused(case: Mapping[str, Any]) -> None:
    with pytest.raises((GeometryError, ModelError)):
        layout_of(case["config"], case["deployment"])


def test_the_recording_has_what_the_tests_are_about() -> None:
    """A recording that lost its cases would pass every test above."""
    entries = [e for case in CASES for entries in case["parameters"].values() for e in entries]
    assert len(CASES) == 13 and len(REFUSALS) == 10 and len(entries) > 700
    assert [case["name"] for case in REFUSALS if not case["error"]] == [
        "fewer key heads than ranks, fused",
        "a gated query with biases",
        "a head that is tied and not",
        "one group, a bias of the projection",
    ]
    assert {case["config"]["model_type"] for case in CASES} == {
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "mamba2",
    }  # fmt: skip
    assert sum("transform" in entry for entry in entries) > 20
    # Nothing but a rank's share of the padded vocabulary is without markers.
    held = ((name, e) for case in CASES for name, entries in case["parameters"].items() for e in entries)
    ends = {"lm_head.weight", "model.embed_tokens.weight", "backbone.embeddings.weight"}
    assert {name for name, entry in held if entry["dims"] is None} == ends


@pytest.mark.parametrize(
    ("name", "module", "wrong", "message"),
    [
        # An even cut of the fused rows, the bug of planners that have no segments: gated delta nets, mixers.
        ("qwen3_5, tp 2", "gdn", lambda s, w: w.over_tp(lambda r: even(concat(*s), w.tp, r)), "in_proj_qkvz"),
        ("nemotron_h, tp 2, pp 2", "mamba", lambda d, n, r: d, r"conv1d\.weight|in_proj"),
    ],
    ids=["delta", "mamba"],
)
def test_a_wrong_rule_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, wrong: Any, message: str
) -> None:
    of = sys.modules[f"shardweave.dialects.vllm.{module}"]
    if module == "gdn":
        monkeypatch.setattr(of, "cut_apart", wrong)
    else:

        def raw(*dims: Dim) -> Dim:
            """z, x, B, C and dt of a rank as if they had been cut together."""
            joined = concat(*dims)
            start = min(index for _, index in joined)
            return joined if start == 0 else whole(len(joined))

        monkeypatch.setattr(of, "concat", raw)
    case = named(name)
    layout = layout_of(case["config"], case["deployment"])
    ranks = dict(ranks_of(case))
    with pytest.raises(AssertionError, match=message):
        for rank, recorded in ranks.items():
            agree(layout, rank, recorded)


# --- live ---------------------------------------------------------------------------------------


def script() -> ModuleType:
    """`make_vllm_hybrid.py` beside this file, which is not in a package."""
    path = Path(__file__).with_name("make_vllm_hybrid.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(path.stem) or importlib.util.module_from_spec(spec)
    if path.stem not in sys.modules:
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return module


@pytest.mark.peer("vllm")
@pytest.mark.slow
@pytest.mark.timeout(300)
@by_case(CASES)
def test_live_vllm_holds_the_same(case: Mapping[str, Any]) -> None:
    layout = layout_of(case["config"], case["deployment"])
    for rank in (0, len(layout.mesh.ranks) - 1):
        agree(layout, rank, script().ask(case["config"], case["deployment"], rank))


def random_weights(shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Norms lie on a grid, so that they are the same after a detour around 0."""
    rng, found = np.random.default_rng(11), {}
    for name, marked in shapes.items():
        on_grid = name.endswith("norm.weight")
        drawn = rng.integers(512, 2048, marked.shape) / 1024 if on_grid else rng.normal(size=marked.shape)
        found[name] = drawn.astype(np.float32)
    return found


@pytest.mark.peer("vllm")
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("qwen3_next, tp 2, a dense layer", {"tp": 4, "etp": 2, "dp": 1}),
        ("qwen3_5, tied, tp 4, pp 2", {"tp": 2, "pp": 3}),
        ("nemotron_h, tp 2, pp 2", {"tp": 4, "pp": 2}),
        ("nemotron_h, one group, tp 4", {"dp": 2}),
    ],
)
def test_a_refit_from_megatron_is_a_fresh_load(
    name: str, degrees: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with the values that vLLM changes while it loads, and the zeros that it writes."""
    import torch

    case, ask = named(name), script()
    model, weights = from_config(case["config"]), random_weights(ask.checkpoint(case["config"]))
    values = {
        tensor: np.stack([weights[name] for name in tensor.names()]).reshape(
            [len(dim) for dim in tensor.dims]
        )
        for tensor in model.tensors
    }
    trainer = megatron.layout(model, megatron.mesh(**degrees))
    engine = layout_of(case["config"], case["deployment"])
    landed, steps = landing(trainer, engine)
    state = materialise(trainer, values)
    for rank in trainer.mesh.ranks:
        for array, (buffer, _) in trainer.arrays(rank).items():
            state[rank][array] = buffer.transform.apply(state[rank][array])
    moved = simulate(plan(trainer, landed), state, into=empty(landed, np.float32, fill=np.nan))
    for module in (ask, ask.ASK):
        monkeypatch.setattr(module, "checkpoint", lambda _: weights)
    ask.without_images()
    given = {**ask.ASK.DEPLOYMENT, **case["deployment"]}
    for rank in engine.mesh.ranks:
        ours = {array: torch.from_numpy(found) for array, found in moved[rank].items()}
        apply(steps, rank, ours, ours)
        with ask.ASK._groups(given["tp"], given["pp"], given["dp"], rank):
            fresh = ask.ASK.load(case["config"], case["deployment"])
        assert ours.keys() == fresh.keys()
        for array, expected in fresh.items():
            np.testing.assert_array_equal(ours[array].numpy(), expected, err_msg=f"rank {rank}, {array}")
