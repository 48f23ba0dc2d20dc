"""The state of Megatron's optimizers, read and written against megatron-core itself: bits, and losses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run
from safetensors.torch import load_file

from shardweave.store import megatron_optimizer, torch_dist
from shardweave.store.manifest import Manifest, TensorSpec
from shardweave.store.megatron_groups import common_of
from shardweave.store.read import Reader
from shardweave.store.torch_dist_write import allocate, finish

SCRIPT = Path(__file__).with_name("megatron_optimizer_cpu.py")
DATA = Path(__file__).parents[1] / "data"
STATES = ("master", "exp_avg", "exp_avg_sq")
State = Mapping[str, np.ndarray]

pytestmark = [pytest.mark.peer("megatron.core"), pytest.mark.timeout(400)]


def report(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.{rank}.json").read_text()))


def on_rank(folder: Path, name: str, rank: int) -> dict[str, np.ndarray]:
    """What a rank held, bf16 as words."""
    held = load_file(folder / f"{name}.{rank}.safetensors")
    words = {key: value.view(torch.uint16) if value.itemsize == 2 else value for key, value in held.items()}
    return {key: value.numpy() for key, value in words.items()}


def whole(folder: Path, name: str, ranks: int) -> dict[str, np.ndarray]:
    """Weights and states of all ranks put together by their own ranges and attributes, under module names.

    An element that no rank has is NaN; one that several have is the same on all of them.
    """
    held: dict[int, dict[str, np.ndarray]] = {}
    said: dict[str, dict[str, Any]] = {}
    for rank in range(ranks):
        about = report(folder, name, rank)
        mine = held.setdefault(about["tp"], {})
        for key, value in on_rank(folder, name, rank).items():
            kind, _, weight = key.partition(".")
            at = said[weight] = about["ranges"][weight] | said.get(weight, {})
            if kind == "weight":
                assert key not in mine or mine[key].tobytes() == value.tobytes(), key
                mine[key] = value
                continue
            span = about["ranges"][weight]
            flat = mine.setdefault(key, np.full(int(np.prod(at["shape"])), np.nan, np.float32))
            assert flat[span["start"] : span["stop"]].shape == value.shape
            flat[span["start"] : span["stop"]] = value
    out = {}
    for key in held[0]:
        cut = said[key.partition(".")[2]]["cut"]
        parts = [mine[key].reshape(said[key.partition(".")[2]]["shape"]) for _, mine in sorted(held.items())]
        if cut is None:
            assert len({part.tobytes() for part in parts}) == 1, key
            out[key] = parts[0]
            continue
        dim, stride = cut
        pieces = [np.split(part, stride, dim) for part in parts]
        out[key] = np.concatenate([piece[n] for n in range(stride) for piece in pieces], dim)
        assert not (key.partition(".")[0] in STATES and np.isnan(out[key]).any()), key
    return out


def stored(view: Manifest, kind: str, module_name: str, reader: Reader, *, spread: int = 0) -> np.ndarray:
    """What a view has of a parameter of a module of the local spec, found by its stacked key."""
    key, at = module_name, []
    for pattern, stacked in (r"\.layers\.(\d+)\.", ".layers."), (r"\.local_experts\.(\d+)\.", ".experts."):
        if match := re.search(pattern, key):
            at.append(int(match[1]))
            key = key.replace(match[0], stacked)
    key = key.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    key = key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    if len(at) == 2:
        at[1] += spread
    name = key if kind == "weight" else f"optim/{key}/{kind}"
    return np.asarray(reader.load(name)[tuple(at)])


def rewritten(source: Path, target: Path, *, expert_parallel: bool = False) -> None:
    """The same weights and states through the store's own writers, with everything that is carried."""
    view = megatron_optimizer.named(torch_dist.read(source))
    kept = megatron_optimizer.carried(view)
    trained = {
        name: tensor.shape
        for name, tensor in view.tensors.items()
        if not name.startswith("optim/") and name not in view.records["untrained"]
    }
    keys = {name: name for name in view.tensors if not name.startswith("optim/")}
    for name in trained:
        keys |= {f"optim/{name}/{state}": megatron_optimizer.key_of(name, state) for state in STATES}
    assert keys.keys() == view.tensors.keys()
    specs = []
    for name, key in keys.items():
        tensor = view.tensors[name]
        rows, rest = tensor.shape[0] // 2, tensor.shape[1:]
        ends = (0, rows), (rows, tensor.shape[0] - rows)
        halves = tuple(((at, *(0 for _ in rest)), (size, *rest)) for at, size in ends)
        specs.append(TensorSpec(key, tensor.dtype, tensor.shape, halves))
    common = common_of(view.records["optimizer"], trained, expert_parallel=expert_parallel, kept=kept)
    extra = {
        key: torch_dist.object_bytes(view, key) for key in view.records["objects"] if "._extra_state/" in key
    }
    target.mkdir()
    laid = allocate(target, specs, records={"common": common, "objects": {**extra, **kept["objects"]}})
    with Reader(view) as reader:
        for name, key in keys.items():
            values = reader.load(name)
            for extent in laid.tensors[key].extents:
                box = tuple(slice(o, o + s) for o, s in zip(extent.offset, extent.shape, strict=True))
                with (target / extent.file).open("r+b") as file:
                    file.seek(extent.start)
                    file.write(np.ascontiguousarray(values[box]).tobytes())
    finish(laid, fsync=False)


# --- one training, stopped and gone on with elsewhere ---------------------------------------------

BEGUN = {"kind": "gqa", "tp": 1, "steps": 2, "more": 3}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two data-parallel ranks, saved by Megatron, and the three after them."""
    folder = tmp_path_factory.mktemp("begun")
    beside = {"iteration": 2, "opt_param_scheduler": {"max_lr": 3e-3, "num_steps": 8}}
    cases = [{**BEGUN, "name": "dp2", "sharding": "fully_reshardable", "save": str(folder / "saved"),
              "beside": beside}]  # fmt: skip
    run(SCRIPT, cases, folder, world_size=2, limit_s=150, preload="megatron_adam")
    return folder


@pytest.fixture(scope="module")
def gone_on(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rewritten folder, loaded at other degrees; and all of the training at another DP."""
    folder = tmp_path_factory.mktemp("gone_on")
    rewritten(begun / "saved", folder / "written")
    loaded = {"kind": "gqa", "checkpoint": str(folder / "written"), "at": 2, "more": 3}
    cases = [
        {**BEGUN, "name": "uninterrupted"},
        {**loaded, "name": "dp4", "tp": 1},
        {**loaded, "name": "tp2", "tp": 2},
        {"kind": "moe", "name": "ep2", "tp": 1, "ep": 2, "steps": 2, "sharding": "fully_reshardable",
         "save": str(folder / "moe")},
    ]  # fmt: skip
    run(SCRIPT, cases, folder, world_size=4, limit_s=200, preload="megatron_adam")
    return folder


class TestFullyReshardable:
    def test_what_is_read_is_what_the_ranks_held(self, begun: Path) -> None:
        view = megatron_optimizer.named(torch_dist.read(begun / "saved"))
        truth = whole(begun, "dp2", 2)
        with Reader(view) as reader:
            for key, value in truth.items():
                kind, _, name = key.partition(".")
                assert stored(view, kind, name, reader).tobytes() == value.tobytes(), key
        assert sum(key.startswith("exp_avg_sq.") for key in truth) == 35

    def test_the_real_optimizer_loads_it_at_another_dp(self, begun: Path, gone_on: Path) -> None:
        truth, found = whole(begun, "dp2", 2), whole(gone_on, "dp4", 4)
        assert truth.keys() == found.keys()
        assert all(found[key].tobytes() == value.tobytes() for key, value in truth.items())

    def test_the_real_optimizer_loads_it_at_another_tp(self, begun: Path, gone_on: Path) -> None:
        truth, found = whole(begun, "dp2", 2), whole(gone_on, "tp2", 4)
        assert truth.keys() == found.keys()
        assert all(found[key].tobytes() == value.tobytes() for key, value in truth.items())

    def test_the_training_goes_on_with_the_same_losses(self, begun: Path, gone_on: Path) -> None:
        ours = report(begun, "dp2", 0)["more"]
        other = report(gone_on, "uninterrupted", 0)["more"]
        noise = max(abs(a - b) for a, b in zip(ours, other, strict=True))
        at_dp4 = [abs(a - b) for a, b in zip(report(gone_on, "dp4", 0)["more"], ours, strict=True)]
        print(ours, other, report(gone_on, "dp4", 0)["more"], report(gone_on, "tp2", 0)["more"])
        assert max(at_dp4) <= noise

    def test_what_all_ranks_share_comes_back(self, gone_on: Path) -> None:
        assert set(report(gone_on, "dp4", 0)["beside"]) >= {"iteration", "opt_param_scheduler"}
