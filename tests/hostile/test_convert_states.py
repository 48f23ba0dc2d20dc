"""The state of an optimizer in a conversion: what is carried, and what is refused before a byte is written.

Folders are written by ``torch.distributed.checkpoint`` itself, on one rank; what real ranks of
``fully_shard`` write and load is in ``tests/oracle/test_interchange.py``.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from shardweave.convert import FORMATS, convert, open_checkpoint, prepare, states
from shardweave.convert.check import check
from shardweave.convert.diff import compare
from shardweave.errors import (
    DtypeError,
    FormatError,
    OutsideError,
    ReplicaError,
    ShardweaveError,
    UnknownNameError,
)
from shardweave.layout import Box
from shardweave.models import from_config
from shardweave.plan import load as load_plan
from shardweave.plan import save as save_plan
from shardweave.store import native, torch_dist
from shardweave.store.native_held import Held
from shardweave.store.native_manifest import About
from shardweave.store.native_write import Saver
from shardweave.store.read import Reader
from shardweave.store.torch_dcp import Keys
from shardweave.train.checkpoint import words_of
from shardweave.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from shardweave.train.interchange import settings_of
from shardweave.train.settings import plain

Tree = dict[str, Any]
CONFIG: Tree = {
    "model_type": "qwen3_moe", "vocab_size": 13, "hidden_size": 6, "intermediate_size": 10,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "mlp_only_layers": [1],
    "tie_word_embeddings": True, "dtype": "float32", "rms_norm_eps": 1e-5,
}  # fmt: skip
STEP = 1234
ADAMW = {
    "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
CONFIGS = Path(__file__).parents[1] / "data" / "configs" / "tiny"
NORM = "model.layers.1.input_layernorm.weight"
GATE_UP = "model.layers.2.mlp.experts.gate_up_proj"
EMBED = "model.embed_tokens.weight"


def shapes() -> dict[str, tuple[int, ...]]:
    """What a module holds, written out: experts stacked, the tied head under both of its names."""
    found: dict[str, tuple[int, ...]] = {EMBED: (13, 6)}
    for layer in range(3):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.{one}_proj.weight": (rows, 6) for one, rows in zip("qkv", (8, 4, 4), strict=True)
        }
        found |= {f"{at}.self_attn.o_proj.weight": (6, 8), f"{at}.self_attn.q_norm.weight": (4,)}
        found |= {f"{at}.self_attn.k_norm.weight": (4,), f"{at}.input_layernorm.weight": (6,)}
        found |= {f"{at}.post_attention_layernorm.weight": (6,)}
        if layer == 1:
            found |= {f"{at}.mlp.{one}_proj.weight": (10, 6) for one in ("gate", "up")}
            found |= {f"{at}.mlp.down_proj.weight": (6, 10)}
        else:
            found |= {f"{at}.mlp.gate.weight": (3, 6), f"{at}.mlp.experts.gate_up_proj": (3, 10, 6)}
            found |= {f"{at}.mlp.experts.down_proj": (3, 6, 5)}
    return found | {"model.norm.weight": (6,)}


def tree(dtype: torch.dtype = torch.float32) -> Tree:
    """What ``get_state_dict`` gives of a model with AdamW."""
    chance = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=chance).to(dtype) for name, shape in shapes().items()}
    state = {
        name: {
            "step": torch.tensor(float(STEP)),
            "exp_avg": torch.randn(weight.shape, generator=chance).to(dtype),
            "exp_avg_sq": torch.randn(weight.shape, generator=chance).square().to(dtype),
        }
        for name, weight in weights.items()
    }
    matrices = [name for name, weight in weights.items() if weight.dim() > 1]
    others = [name for name in weights if name not in matrices]
    groups = [{**ADAMW, "params": matrices}, {**ADAMW, "weight_decay": 0.0, "params": others}]
    weights["lm_head.weight"] = weights[EMBED]
    return {"model": weights, "optim": {"state": state, "param_groups": groups}}


def saved(folder: Path, what: Tree) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(what, checkpoint_id=folder)
    return folder


def loaded(folder: Path) -> Tree:
    """All that torch finds in a folder, in the form that it was saved in."""
    found: Tree = {}
    _load_state_dict(
        found, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return found


def assert_same(found: Any, wanted: Any, at: str = "") -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), at
        for key, value in wanted.items():
            assert_same(found[key], value, f"{at}.{key}")
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), at
    elif at.endswith(".params"):
        assert sorted(found) == sorted(wanted), at
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), at
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{at}.{i}")
    else:
        assert found == wanted and type(found) is type(wanted), at


def go(src: Path, dst: Path, to: str, **more: Any) -> Any:
    return convert(prepare(src, to=to, **more), dst, fsync=False)


# --- what is carried ----------------------------------------------------------------------------


def test_there_and_back_is_what_torch_saved(tmp_path: Path) -> None:
    what = tree()
    src = saved(tmp_path / "src", {**what, "scheduler": {"last_epoch": 3, "table": torch.ones(4)}})
    report = go(src, tmp_path / "native", "native", config=CONFIG)
    assert set(report.account.left_out) == {"other/scheduler.table", "scheduler.last_epoch"}
    manifest = native.read(tmp_path / "native")
    assert manifest.records["about"].step == STEP
    assert len(manifest.records["about"].extras["param_groups"]) == 2
    with Reader(manifest) as reader:
        assert reader.load("optim/all/step") == STEP
        name = "model.layers.2.mlp.experts.1.up_proj.weight"
        found = torch.from_numpy(reader.load(f"optim/{name}/exp_avg_sq").copy())
    assert torch.equal(found, what["optim"]["state"][GATE_UP]["exp_avg_sq"][1, 5:])
    go(tmp_path / "native", tmp_path / "back", "dcp", keys=Keys(optim="optimizer"))
    assert_same(loaded(tmp_path / "back"), {"model": what["model"], "optimizer": what["optim"]})
    for folder in ("src", "native", "back"):
        config = CONFIG if folder == "src" else None
        assert check(tmp_path / folder, config=config).whole
        assert compare(tmp_path / folder, src, left_config=config, right_config=CONFIG).equal
    # From native to native, and from dcp to dcp, flat: nothing is lost either.
    go(tmp_path / "native", tmp_path / "again", "native")
    go(tmp_path / "again", tmp_path / "flat", "dcp", keys=Keys(flat=True))
    go(tmp_path / "flat", tmp_path / "last", "dcp")
    assert_same(loaded(tmp_path / "last"), what)


def test_flat_settings_have_the_keys_that_torch_asks_for(tmp_path: Path) -> None:
    go(saved(tmp_path / "src", tree()), tmp_path / "flat", "dcp", config=CONFIG, keys=Keys(flat=True))
    manifest = torch_dist.read(tmp_path / "flat")
    assert torch_dist.read_object(manifest, f"optim.param_groups.{NORM}.weight_decay") == 0.0
    assert torch_dist.read_object(manifest, f"optim.param_groups.{GATE_UP}.betas") == (0.9, 0.95)
    ways = manifest.records["planner_data"]
    assert ways[f"optim.state.{NORM}.exp_avg"] == ("optim", f"state.{NORM}.exp_avg")


def test_other_formats_and_weights_alone_leave_it_out_by_name(tmp_path: Path) -> None:
    src = saved(tmp_path / "src", tree())
    key = f"optim/{NORM}/exp_avg"
    cases: list[tuple[str, str, Tree]] = [
        ("hf", "hf", {}), ("alone", "dcp", {"weights_only": True}), ("narrow", "dcp", {"dtype": "bfloat16"}),
    ]  # fmt: skip
    for name, to, more in cases:
        report = go(src, tmp_path / name, to, config=CONFIG, **more)
        assert report.account.left_out[key] == 24
        assert "optim.param_groups.0.lr" in report.account.left_out
        assert states(open_checkpoint(tmp_path / name)) is None
    assert_same(loaded(tmp_path / "alone"), {"model": tree()["model"]})


def test_a_rounded_weight_keeps_what_it_is_rounded_from(tmp_path: Path) -> None:
    """A run in bfloat16 goes on from float32 weights: these are its masters, to the bit."""
    what = tree()
    src = saved(tmp_path / "src", what)
    report = go(src, tmp_path / "native", "native", config=CONFIG, dtype="bfloat16")
    assert (
        report.account.used
        + report.account.replica
        + report.account.format
        + sum(report.account.left_out.values())
        == report.account.total
    )
    manifest = native.read(tmp_path / "native")
    with Reader(manifest) as reader:
        assert manifest.tensors[f"model/{NORM}"].dtype == "bfloat16"
        moment = what["optim"]["state"][NORM]["exp_avg"]
        for name, wanted in (("master", what["model"][NORM]), ("exp_avg", moment)):
            assert torch.equal(torch.from_numpy(reader.load(f"optim/{NORM}/{name}").copy()), wanted)
    # And back: the weights of torch are the masters.
    go(tmp_path / "native", tmp_path / "back", "dcp")
    assert_same(loaded(tmp_path / "back"), what)
    # In full precision again, they need no masters.
    go(tmp_path / "native", tmp_path / "wide", "native", dtype="float32")
    wide = native.read(tmp_path / "wide")
    assert wide.tensors[f"model/{NORM}"].dtype == "float32" and f"optim/{NORM}/master" not in wide.tensors
    go(tmp_path / "wide", tmp_path / "again", "dcp")
    assert_same(loaded(tmp_path / "again"), what)


def test_states_of_any_name_counts_of_each_weight_and_frozen_weights(tmp_path: Path) -> None:
    """AMSGrad, counts that differ, lower layers that are frozen."""
    what = tree()
    for states_ in what["optim"]["state"].values():
        states_["max_exp_avg_sq"] = states_["exp_avg_sq"] + 1
    frozen = [name for name in what["optim"]["state"] if "layers.0." in name or name == "model.norm.weight"]
    for name in frozen:
        del what["optim"]["state"][name]
    for group in what["optim"]["param_groups"]:
        group["amsgrad"] = True
        group["params"] = [name for name in group["params"] if name not in frozen]
    src = saved(tmp_path / "src", what)
    go(src, tmp_path / "native", "native", config=CONFIG)
    go(tmp_path / "native", tmp_path / "back", "dcp")
    assert_same(loaded(tmp_path / "back"), what)
    # A count of each weight is torch's; a native checkpoint has one.
    what["optim"]["state"][NORM]["step"] = torch.tensor(7.0)
    src = saved(tmp_path / "unequal", what)
    go(src, tmp_path / "again", "dcp", config=CONFIG)
    assert_same(loaded(tmp_path / "again"), what)
    with pytest.raises(FormatError, match=rf"step\(7\) of '{NORM}'|of '{NORM}'"):
        prepare(src, to="native", config=CONFIG)


def test_a_model_that_nobody_describes(tmp_path: Path) -> None:
    """A model of no known family, with a state and without a config: its tensors are what is named."""
    what: Tree = {"model": {"up.weight": torch.randn(5, 3), "norm.count": torch.tensor(1 << 24 | 1)}}
    state = {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 3), "exp_avg_sq": torch.rand(5, 3)}
    what["optim"] = {"state": {"up.weight": state}, "param_groups": [{**ADAMW, "params": ["up.weight"]}]}
    src = saved(tmp_path / "src", what)
    with pytest.raises(ShardweaveError, match="--config none"):
        prepare(src, to="native")
    go(src, tmp_path / "native", "native", config=Path("none"))
    go(tmp_path / "native", tmp_path / "back", "dcp", config=Path("none"))
    assert_same(loaded(tmp_path / "back"), what)
    go(src, tmp_path / "hf", "hf", config=Path("none"))
    assert compare(src, tmp_path / "hf", left_config=Path("none"), right_config=Path("none")).equal


def test_a_flat_dict_of_weights_has_no_key_above_them(tmp_path: Path) -> None:
    src = saved(tmp_path / "src", tree()["model"])
    go(src, tmp_path / "dst", "dcp", config=CONFIG)
    assert_same(loaded(tmp_path / "dst"), {"model": tree()["model"]})


def test_large_tensors_are_cut_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads a chunk whole, however little of it a rank needs."""
    monkeypatch.setitem(FORMATS["dcp"].target.__globals__, "CHUNK_BYTES", 100)
    go(saved(tmp_path / "src", tree()), tmp_path / "dst", "dcp", config=CONFIG)
    manifest = torch_dist.read(tmp_path / "dst")
    assert [one.shape for one in manifest.tensors[f"model.{EMBED}"].extents] == [(4, 6)] * 3 + [(1, 6)]
    assert_same(loaded(tmp_path / "dst"), tree())


def test_a_plan_with_states_is_stored_and_loaded(tmp_path: Path) -> None:
    job = prepare(saved(tmp_path / "src", tree()), to="dcp", config=CONFIG)
    save_plan(job.plan, tmp_path / "plan.swp")
    assert load_plan(tmp_path / "plan.swp").src == job.plan.src


def test_matrices_of_muon_and_the_rest_of_adamw(tmp_path: Path) -> None:
    """Muon counts no updates; its settings have names of their own."""
    what = tree()
    muon = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315)}
    own = [name for name in what["optim"]["state"] if name.endswith("_proj.weight")]
    for name in own:
        what["optim"]["state"][name] = {"momentum_buffer": what["optim"]["state"][name]["exp_avg"]}
    for group in what["optim"]["param_groups"]:
        group["params"] = [name for name in group["params"] if name not in own]
    what["optim"]["param_groups"].append({**muon, "params": own})
    src = saved(tmp_path / "src", what)
    go(src, tmp_path / "native", "native", config=CONFIG)
    go(tmp_path / "native", tmp_path / "back", "dcp")
    back = loaded(tmp_path / "back")
    # Groups come in the order of their first weights.
    back["optim"]["param_groups"].sort(key=lambda group: (group["lr"], -group.get("weight_decay", 0.0)))
    assert_same(back, what)


def run_folder(folder: Path, *, dtype: str, extras: Tree | None = None, count: int = STEP) -> Path:
    """What a run saves: float32 masters beside weights that are narrower."""
    src = saved(folder / "made", tree())
    go(src, folder / "wide", "native", config=CONFIG)
    manifest, held = native.read(folder / "wide"), []
    with Reader(manifest) as reader:
        for key, one in manifest.tensors.items():
            values = torch.from_numpy(reader.load(key).copy())
            if key == "optim/all/step":
                values = torch.tensor(count)
            box = Box.of((0,) * len(one.shape), one.shape)
            if key.startswith("model/") and dtype != "float32":
                master = f"optim/{key.removeprefix('model/')}/master"
                held.append(Held(master, one.shape, "float32", box, values))
                values = values.to(getattr(torch, dtype))
            held.append(Held(key, one.shape, str(values.dtype).removeprefix("torch."), box, values))
    said = About(step=count, config=CONFIG, extras=extras or {})
    return Saver(folder / "run", words=words_of, fsync=False).save(held, said)


def settings(**optimizer: Any) -> Tree:
    config = TrainConfig(
        ModelConfig("."), DataConfig("x"), optimizer=OptimizerConfig(**optimizer), run=RunConfig(steps=2000)
    )
    return {"settings": plain(config)}


def test_masters_are_the_weights_of_torch(tmp_path: Path) -> None:
    src = run_folder(tmp_path, dtype="bfloat16", extras=settings(schedule="linear", warmup_steps=100))
    report = go(src, tmp_path / "dst", "dcp", settings=settings_of)
    assert "rounded" in report.account.reasons[NORM] and report.account.left_out[NORM] == 12
    found, wanted = loaded(tmp_path / "dst"), tree()
    assert_same(found["model"], wanted["model"])
    assert_same(found["optim"]["state"], wanted["optim"]["state"])
    matrices, others = found["optim"]["param_groups"]
    # The rate of update 1235: down from 1e-4 at 100 to 0 at 2000.
    assert matrices["lr"] == others["lr"] == pytest.approx(1e-4 * (2000 - 1235) / 1900, rel=1e-12)
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert matrices["betas"] == (0.9, 0.95) and matrices.keys() == {*ADAMW, "params"}
    assert NORM in others["params"] and GATE_UP in matrices["params"]
    # Settings that all weights share are one group.
    src = run_folder(tmp_path / "same", dtype="bfloat16", extras=settings(weight_decay=0.0))
    go(src, tmp_path / "one", "dcp", settings=settings_of)
    assert len(loaded(tmp_path / "one")["optim"]["param_groups"]) == 1
    # To native, masters stay masters, and what the run said stays said.
    go(src, tmp_path / "native", "native")
    manifest = native.read(tmp_path / "native")
    assert manifest.tensors[f"model/{NORM}"].dtype == "bfloat16"
    assert manifest.tensors[f"optim/{NORM}/master"].dtype == "float32"
    assert manifest.records["about"].extras == settings(weight_decay=0.0)


# --- what is refused ----------------------------------------------------------------------------


def refused(tmp_path: Path, what: Tree, error: type[ShardweaveError], match: str, **more: Any) -> None:
    """Nothing is written, and the weights alone can be converted."""
    src, dst = saved(tmp_path / "src", what), tmp_path / "dst"
    for to in ("native", "dcp"):
        with pytest.raises(error, match=match) as found:
            go(src, dst, to, config=CONFIG, **more)
        assert not dst.exists()
    if "--weights-only" in (found.value.hint or ""):
        go(src, dst, "native", config=CONFIG, weights_only=True)


Change = Callable[[Tree], None]


def change(what: Tree, name: str, state: str, values: Any) -> None:
    what["optim"]["state"][name][state] = values


def drop(what: Tree, *path: Any) -> None:
    *way, last = path
    for key in way:
        what = what[key]
    del what[last]


REFUSED: dict[str, tuple[Change, type[ShardweaveError], str]] = {
    "a state of one weight": (
        lambda t: drop(t, "optim", "state", NORM, "exp_avg_sq"), UnknownNameError, f"optim/{NORM}/exp_avg_sq",
    ),
    "all states of one weight": (
        lambda t: drop(t, "optim", "state", NORM), UnknownNameError, f"1 have none: '{NORM}'",
    ),
    "the state of a family": (
        lambda t: drop(t, "optim", "state", EMBED), UnknownNameError, f"1 have none: '{EMBED}'",
    ),
    "one count": (lambda t: drop(t, "optim", "state", NORM, "step"), UnknownNameError, f"optim/{NORM}/step"),
    "half an update": (
        lambda t: [change(t, name, "step", torch.tensor(1.5)) for name in t["optim"]["state"]],
        FormatError, r"step\(1\.5\)",
    ),
    "a count of many": (lambda t: change(t, NORM, "step", torch.ones(2)), FormatError, r"float32 \(2,\)"),
    "a state of another shape": (
        lambda t: change(t, GATE_UP, "exp_avg", torch.ones(3, 10, 5)),
        OutsideError, f"optim/{GATE_UP}/exp_avg",
    ),
    "a state of another dtype": (
        lambda t: change(t, NORM, "exp_avg", torch.ones(6, dtype=torch.float64)),
        DtypeError, "float32, float64",
    ),
    "a state of no weight": (
        lambda t: t["optim"]["state"].update({"model.extra.weight": {"exp_avg": torch.ones(2)}}),
        UnknownNameError, "1 are of none: 'model.extra.weight'",
    ),
    "a state under the other name of a tied weight": (
        lambda t: t["optim"]["state"].update({"lm_head.weight": t["optim"]["state"][NORM]}),
        UnknownNameError, "1 are of none: 'lm_head.weight'",
    ),
    "a weight in no group": (
        lambda t: t["optim"]["param_groups"][1]["params"].remove(NORM),
        FormatError, f"1 in no group: '{NORM}'",
    ),
    "a weight in two groups": (
        lambda t: t["optim"]["param_groups"][0]["params"].append(NORM), FormatError, "1 in several groups",
    ),
    "a group with a weight that is none": (
        lambda t: t["optim"]["param_groups"][0]["params"].append("b"), UnknownNameError, "'b'",
    ),
    "a setting that is no value": (
        lambda t: t["optim"]["param_groups"][0].update({"hook": {"a": 1}}), FormatError, "hook",
    ),
    "two sets of weights": (
        lambda t: t.update({"ema": dict(t["model"])}), FormatError, "under 'ema.', 'model.'",
    ),
    "two optimizers": (lambda t: t.update({"sgd": t["optim"]}), FormatError, "under 'optim.', 'sgd.'"),
    "a weight that is missing": (lambda t: drop(t, "model", NORM), UnknownNameError, NORM),
    "a weight too many": (
        lambda t: t["model"].update({"model.extra.weight": torch.ones(2)}), UnknownNameError, "model.extra",
    ),
    "a weight of another shape": (
        lambda t: t["model"].update({NORM: torch.ones(7)}), OutsideError, NORM,
    ),
    "copies of a tied weight that differ": (
        lambda t: t["model"].update({"lm_head.weight": torch.ones(13, 6)}), ReplicaError, "lm_head",
    ),
    "names of another model": (
        lambda t: t.update(model={"tok_embeddings.weight": torch.ones(2)}, optim={}),
        UnknownNameError, "no key",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    make, error, match = REFUSED[name]
    what = tree()
    make(what)
    refused(tmp_path, what, error, match)


def test_a_run_whose_settings_are_not_known(tmp_path: Path) -> None:
    src = run_folder(tmp_path, dtype="float32")
    with pytest.raises(FormatError, match="none are recorded"):
        prepare(src, to="dcp", settings=settings_of)
    strange = settings()
    strange["settings"]["optimizer"]["speed"] = 3
    src = run_folder(tmp_path / "b", dtype="float32", extras=strange)
    with pytest.raises(FormatError, match=r"optimizer\.speed is not a setting"):
        prepare(src, to="dcp", settings=settings_of)
    src = run_folder(tmp_path / "c", dtype="float32", extras={"param_groups": [{"lr": 1.0}]})
    with pytest.raises(FormatError, match="param_groups"):
        prepare(src, to="dcp")
    prepare(src, to="dcp", weights_only=True)


def test_more_updates_than_torch_can_count(tmp_path: Path) -> None:
    src = run_folder(tmp_path, dtype="float32", extras=settings(), count=(1 << 24) + 1)
    with pytest.raises(FormatError, match="16777217"):
        prepare(src, to="dcp", settings=settings_of)


def test_a_state_without_its_count(tmp_path: Path) -> None:
    src = run_folder(tmp_path, dtype="float32")
    source = open_checkpoint(src)
    kept = {key: one for key, one in source.manifest.tensors.items() if key != "optim/all/step"}
    source = replace(source, manifest=replace(source.manifest, tensors=kept))
    with pytest.raises(UnknownNameError, match="optim/all/step"):
        states(source)


def test_two_keys_for_one_name(tmp_path: Path) -> None:
    """A weight that poses as a state of another one, where weights have no key above them."""
    what = tree()
    flat = {**what["model"], f"optim/{NORM}/exp_avg": torch.ones(6), "optim": what["optim"]}
    with pytest.raises(FormatError, match=f"1 come to that of another one: .*{NORM}.*exp_avg"):
        prepare(saved(tmp_path / "src", flat), to="native", config=CONFIG)


def test_keys_are_words() -> None:
    for keys in ({"model": ""}, {"optim": "a b"}, {"model": "x", "optim": "x"}):
        with pytest.raises(FormatError, match="keys of their own"):
            Keys(**keys)


def test_a_conversion_that_is_killed_goes_on_with_the_state(tmp_path: Path) -> None:
    """Staged files of an earlier try, half of them damaged, end as the same bytes."""
    src = saved(tmp_path / "src", tree())
    go(src, tmp_path / "whole", "dcp", config=CONFIG)
    job, told = prepare(src, to="dcp", config=CONFIG), []

    def stop(done: int, total: int) -> None:
        told.append(done)
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(job, tmp_path / "dst", fsync=False, workers=1, progress=stop)
    report = convert(job, tmp_path / "dst", fsync=False)
    assert report.resumed > 0
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "dst" / path.name).read_bytes() == path.read_bytes(), path.name


def test_json_of_the_config_goes_beside(tmp_path: Path) -> None:
    """So that the folder describes itself, to this package; torch reads past it."""
    go(saved(tmp_path / "src", tree()), tmp_path / "dst", "dcp", config=CONFIG)
    assert json.loads((tmp_path / "dst" / "config.json").read_text()) == CONFIG
    shutil.rmtree(tmp_path / "src")
    assert open_checkpoint(tmp_path / "dst").format == "dcp"


@pytest.mark.parametrize("name", ["nemotron-nas", "nemotron_h"])
def test_layers_that_are_not_alike(name: str, tmp_path: Path) -> None:
    """Several families of one name, each with the states of its own layers, masters too."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    model = from_config(config, dtype="float32")
    families = [tensor.name for tensor in model.tensors]
    assert len(set(families)) < len(families)
    chance = torch.Generator().manual_seed(5)
    names = {name: tensor.shape for tensor in model.tensors for name in tensor.names()}
    weights = {name: torch.randn(shape, generator=chance) for name, shape in names.items()}
    state = {
        name: {
            "step": torch.tensor(float(STEP)),
            "exp_avg": torch.randn(weight.shape, generator=chance),
            "exp_avg_sq": torch.rand(weight.shape, generator=chance),
        }
        for name, weight in weights.items()
    }
    what = {"model": weights, "optim": {"state": state, "param_groups": [{**ADAMW, "params": list(weights)}]}}
    src = saved(tmp_path / "src", what)
    go(src, tmp_path / "native", "native", config=config, dtype="bfloat16")
    masters = [key for key in native.read(tmp_path / "native").tensors if key.endswith("/master")]
    assert len(masters) == len(weights)
    go(tmp_path / "native", tmp_path / "back", "dcp")
    assert_same(loaded(tmp_path / "back"), what)


def test_copies_of_a_rounded_weight_are_rounded_too(tmp_path: Path) -> None:
    """DeepSeek's layers for further tokens have the embedding once more, rounded as the embedding is."""
    config = json.loads((CONFIGS / "deepseek_v3.json").read_text())
    model = from_config(config, dtype="float32")
    names = {name: tensor.shape for tensor in model.tensors for name in tensor.names()}
    weights = {name: torch.randn(shape) for name, shape in names.items()}
    state = {
        name: {"step": torch.tensor(3.0), "exp_avg": weight + 1, "exp_avg_sq": weight * weight}
        for name, weight in weights.items()
    }
    what = {"model": weights, "optim": {"state": state, "param_groups": [{**ADAMW, "params": list(weights)}]}}
    go(saved(tmp_path / "src", what), tmp_path / "native", "native", config=config, dtype="bfloat16")
    (copied,) = {of for of in model.copies.values() if "embed" in of}
    report = go(tmp_path / "native", tmp_path / "back", "dcp")
    again = next(name for name, of in model.copies.items() if of == copied)
    assert f"{again}" in report.account.left_out
    for key in (copied, again):
        assert torch.equal(loaded(tmp_path / "back")["model"][key], weights[copied])
