"""Training that goes on across frameworks: ``fully_shard`` with AdamW, saved by torch, and the runtime.

Weights, moments, counts and settings are bit-equal on the other side, at other numbers of ranks and other
layouts, and the next step has the same loss and gives the same weights. Everything is computed in fp64.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run
from safetensors.torch import load_file

from shardweave.convert import convert, prepare
from shardweave.convert.check import check
from shardweave.store import native
from shardweave.store.read import Reader
from shardweave.store.torch_dcp import Keys
from shardweave.train.checkpoint import load_states, load_weights, states_of, weights_of
from shardweave.train.grid import Groups
from shardweave.train.interchange import settings_of
from shardweave.train.optimizer import AdamW, Optimizer
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import group_plan, layout_of
from shardweave.train.tokens import Document, write_packed

pytestmark = [
    pytest.mark.peer("transformers"), pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300),
]  # fmt: skip

TORCH, RUNS = (Path(__file__).with_name(name) for name in ("fsdp_training.py", "train_runs.py"))
MODELS = "transformers.modeling_utils"
EXACT = 1e-12
STEPS, DOCUMENTS, LENGTH = 3, 12, 10

# No dim that 3 or 4 ranks divide evenly but for the hidden one.
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 86, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "dtype": "float64",
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama"},
    "tied": {**SIZES, "model_type": "qwen3", "tie_word_embeddings": True},
    # 6 experts on 4 ranks: the last has none; a dense layer among sparse ones.
    "moe": {
        **SIZES, "model_type": "qwen3_moe", "moe_intermediate_size": 22, "num_experts": 6,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
}  # fmt: skip
OPTIMIZER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with configs, and with documents of which a step takes the next ones."""
    folder = tmp_path_factory.mktemp("interchange")
    chance = torch.Generator().manual_seed(3)
    ids = torch.randint(0, SIZES["vocab_size"], (STEPS + 1, DOCUMENTS, LENGTH), generator=chance)
    (folder / "documents.json").write_text(json.dumps(ids.tolist()))
    every = (Document(one.numpy(), np.ones(LENGTH, np.bool_)) for one in ids.flatten(0, 1))
    write_packed(folder / "tokens", every, dtype="uint16")
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def case(place: Path, name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "config": CONFIGS[name], "optimizer": OPTIMIZER, "steps": STEPS,
        "documents": str(place / "documents.json"), **more,
    }  # fmt: skip


def settings(place: Path, name: str, folder: Path, degrees: Mapping[str, int], every: int = 0) -> Path:
    """The settings of a run of one step more than was saved, from the newest checkpoint of its folder."""
    said = {
        "model": {"path": str(place / name), "dtype": "float64"},
        "data": {"train": str(place / "tokens"), "shuffle": False},
        "parallel": dict(degrees),
        "batch": {"documents": DOCUMENTS, "microbatch": 3, "sequence_length": LENGTH},
        "optimizer": {**OPTIMIZER, "clip": None, "schedule": "constant", "sharded": True},
        "checkpoint": {"folder": str(folder), "every": every},
        "run": {"steps": STEPS + 1, "log": str(folder / "log.jsonl"), "device": "cpu", "timeout_s": 60.0},
    }
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(said))
    return folder / "run.json"


def train(place: Path, files: Mapping[str, Path]) -> dict[str, list[float]]:
    """Runs of four ranks from their settings; the loss of each step."""
    out = place / f"runs {len(list(place.glob('runs *')))}"
    out.mkdir()
    cases = [{"run": str(file)} for file in files.values()]
    run(RUNS, cases, out, world_size=4, limit_s=200, preload="shardweave.train.worker")
    found = {}
    for name, file in files.items():
        lines = map(json.loads, (file.parent / "log.jsonl").read_text().splitlines())
        found[name] = [line["loss"] for line in lines if "loss" in line]
    return found


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a native checkpoint, by the names of the runtime."""
    manifest = native.named(native.read(folder))
    with Reader(manifest) as reader:
        return {key: torch.from_numpy(reader.load(key).copy()) for key in manifest.tensors}


def as_files(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What modules hold, under the names of files: each expert alone, a tied weight once."""
    found: dict[str, torch.Tensor] = {}
    for key, values in held.items():
        before, experts, after = key.partition(".experts.")
        if key.endswith("/step") or (key == "lm_head.weight" and "optim/lm_head.weight/exp_avg" not in held):
            continue
        if not experts:
            found[key] = values
            continue
        fused, _, state = after.partition("/")
        for i, expert in enumerate(values):
            parts = {fused.removesuffix("_proj"): expert}
            if fused == "gate_up_proj":
                parts = dict(zip(("gate", "up"), expert.chunk(2), strict=True))
            for what, part in parts.items():
                name = f"{before}.experts.{i}.{what}_proj.weight"
                found[f"{name}/{state}" if state else name] = part
    return found


def assert_same_bits(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert found[key].dtype == values.dtype, key
        assert torch.equal(found[key].view(torch.int64), values.contiguous().view(torch.int64)), key


def assert_close(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        distance = (found[key] - values).norm() / values.norm()
        assert distance < EXACT, (key, float(distance))


def loaded(folder: Path, config: Mapping[str, Any], parallel: Parallel) -> dict[str, torch.Tensor]:
    """What all ranks of a layout hold of a checkpoint after they loaded it, put together."""
    layout = layout_of(config, parallel)
    found: dict[str, torch.Tensor] = {}

    def put(key: str, shape: tuple[int, ...], box: Any, values: torch.Tensor) -> None:
        into = found.setdefault(key, torch.full(shape, torch.nan, dtype=values.dtype))
        view = into[tuple(slice(r.start, r.stop, r.step) for r in box.dims)]
        assert bool(view.isnan().all()) or torch.equal(view, values), key
        view.copy_(values)

    for rank in layout.mesh.ranks:
        arrays = {
            name: torch.full(buffer.shape, torch.nan, dtype=torch.float64)
            for name, (buffer, _) in layout.arrays(rank).items()
        }
        load_weights(folder, layout=layout, rank=rank, arrays=arrays)
        optimizer = Optimizer(
            arrays, plan=reduce_plan(layout, rank), groups=Groups(group_plan(parallel), rank, {}),
            settings=AdamW(),
        )  # fmt: skip
        load_states(folder, optimizer)
        assert optimizer.count == STEPS
        for one in (*weights_of(layout, rank, arrays), *states_of(optimizer)):
            if one.key != "optim/all/step":
                put(one.key.removeprefix("model/"), one.shape, one.box, one.values)
    return found


# --- from torch ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_by_torch(place: Path) -> Path:
    """What four ranks of torch saved, with the state of all of them and what came next."""
    out = place / "torch"
    out.mkdir()
    more: dict[str, dict[str, Any]] = {
        "llama": {"keys": ["model", "optimizer"]},
        "tied": {"nested": True},
        "moe": {"flat": True},
    }
    cases = [case(place, name, save=str(out / name), **more[name]) for name in CONFIGS]
    run(TORCH, cases, out, world_size=4, limit_s=200, preload=MODELS)
    return out


DEGREES: dict[str, list[dict[str, Any]]] = {
    "llama": [{"tp": 2, "dp": 2}, {"pp": 2, "cp": 2}],
    "tied": [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 3, "weight_axes": ("dp",)}],
    "moe": [{"tp": 2, "cp": 2, "ep": 2}],
}
TRAINED = [("llama", 0), ("llama", 1), ("moe", 0)]


@pytest.fixture(scope="module")
def converted(place: Path, saved_by_torch: Path) -> dict[str, Path]:
    """What torch saved as a step of a run, for each model."""
    found = {}
    for name in CONFIGS:
        found[name] = place / f"from torch {name}" / native.step_folder(STEPS)
        convert(prepare(saved_by_torch / name, to="native", config=place / name), found[name], fsync=False)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_what_torch_saved_is_loaded_at_any_layout(
    name: str, saved_by_torch: Path, converted: dict[str, Path]
) -> None:
    truth = as_files(load_file(saved_by_torch / f"{name}.saved.safetensors"))
    found = whole(converted[name])
    assert int(found.pop("optim/all/step")) == STEPS
    assert_same_bits(found, truth)
    for degrees in DEGREES[name]:
        assert_same_bits(loaded(converted[name], CONFIGS[name], Parallel(**degrees)), truth)
    assert check(converted[name]).whole
    # Weights alone are read from where torch put them.
    layout = layout_of(CONFIGS[name], Parallel(tp=2))
    arrays = {
        key: torch.full(buffer.shape, torch.nan, dtype=torch.float64)
        for key, (buffer, _) in layout.arrays(1).items()
    }
    load_weights(saved_by_torch / name, layout=layout, rank=1, arrays=arrays, config=CONFIGS[name])
    for one in weights_of(layout, 1, arrays):
        at = tuple(slice(r.start, r.stop) for r in one.box.dims)
        assert torch.equal(one.values, truth[one.key.removeprefix("model/")][at]), one.key


def test_a_run_goes_on_from_what_torch_saved(
    place: Path, saved_by_torch: Path, converted: dict[str, Path]
) -> None:
    files = {}
    for name, i in TRAINED:
        folder = place / f"run of {name} {i}"
        shutil.copytree(converted[name].parent, folder)
        files[f"{name} {i}"] = settings(place, name, folder, DEGREES[name][i])
    losses = train(place, files)
    for name, i in TRAINED:
        said = json.loads((saved_by_torch / f"{name}.json").read_text())
        [loss] = losses[f"{name} {i}"]
        assert abs(loss / said["losses"][-1] - 1) < EXACT
        found = whole(place / f"run of {name} {i}" / native.step_folder(STEPS + 1))
        assert int(found.pop("optim/all/step")) == STEPS + 1
        assert_close(found, as_files(load_file(saved_by_torch / f"{name}.next.safetensors")))


# --- to torch -----------------------------------------------------------------------------------

FROM: dict[str, dict[str, int]] = {"llama": {"tp": 2, "cp": 2}, "moe": {"pp": 2, "tp": 2, "etp": 2}}
KEYS = {"llama": Keys(optim="optimizer"), "moe": Keys(model="app.model", optim="app.optim", flat=True)}


def test_torch_goes_on_from_what_a_run_saved(place: Path) -> None:
    out = place / "back"
    out.mkdir()
    folders = {name: place / f"own run of {name}" for name in FROM}
    losses = train(
        place, {name: settings(place, name, folders[name], degrees, STEPS) for name, degrees in FROM.items()}
    )
    cases = []
    for name, keys in KEYS.items():
        step = folders[name] / native.step_folder(STEPS)
        convert(prepare(step, to="dcp", keys=keys, settings=settings_of), out / name, fsync=False)
        assert not (out / name / "metadata.json").exists()
        own = [keys.model, keys.optim]
        cases.append(case(place, name, load=str(out / name), keys=own, flat=keys.flat))
    run(TORCH, cases, out, world_size=3, limit_s=200, preload=MODELS)
    for name in FROM:
        held = load_file(out / f"{name}.saved.safetensors")
        assert {float(one) for key, one in held.items() if key.endswith("/step")} == {float(STEPS)}
        found = whole(folders[name] / native.step_folder(STEPS))
        del found["optim/all/step"]
        assert_same_bits(as_files(held), found)
        said = json.loads((out / f"{name}.json").read_text())
        assert [group["weight_decay"] for group in said["groups"]] == [OPTIMIZER["weight_decay"], 0.0]
        assert {group["lr"] for group in said["groups"]} == {OPTIMIZER["lr"]}
        assert abs(said["losses"][-1] / losses[name][-1] - 1) < EXACT
        found = whole(folders[name] / native.step_folder(STEPS + 1))
        del found["optim/all/step"]
        assert_close(as_files(load_file(out / f"{name}.next.safetensors")), found)
        # And what is written for torch is read here.
        convert(prepare(out / name, to="native"), place / f"again {name}", fsync=False)
        assert_same_bits(whole(place / f"again {name}"), whole(folders[name] / native.step_folder(STEPS)))
