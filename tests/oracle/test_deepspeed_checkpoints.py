"""DeepSpeed's own checkpoints, native and universal, against what its engine said of its state.

Beside the files under ``tests/data``, DeepSpeed trains and saves here what those do not show. Its own
functions gather the truth (`deepspeed_training`). Where they are wrong, and a test says so, the rounded
weights are it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_universal import convert
from rank_processes import run
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file

from shardweave.errors import IndexMismatchError
from shardweave.store import deepspeed, deepspeed_universal
from shardweave.store.manifest import Manifest
from shardweave.store.read import Reader

DATA = Path(__file__).parents[1] / "data"
SCRIPT = Path(__file__).with_name("deepspeed_training.py")
BIG = 2**24 + 1


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def rounded(master: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 as bfloat16: to even, of the upper half."""
    words = np.ascontiguousarray(master).view("<u4")
    return np.asarray((words + 0x7FFF + ((words >> 16) & 1)) >> 16, "<u2")


def check(manifest: Manifest, truth: Mapping[str, torch.Tensor], suffix: str = "") -> set[str]:
    """Each array is bit for bit what the engine held; returns the keys that were compared."""
    stage3 = manifest.records.get("deepspeed", {}).get("stage") == 3 or manifest.format == "universal"
    seen = set()
    with Reader(manifest) as reader:
        for key, expected in truth.items():
            if stage3 and key.endswith("/master"):
                key = key.removeprefix("optim/").removesuffix("/master")
            elif stage3 and f"optim/{key}/master" in truth:
                continue  # the rounded weight, which is not stored
            if key in manifest.records["shared"]:
                continue
            found = reader.load(f"{key}{suffix}")
            assert found.shape == tuple(expected.shape), key
            assert manifest.tensors[f"{key}{suffix}"].dtype == str(expected.dtype).removeprefix("torch."), key
            assert found.tobytes() == raw(expected), key
            seen.add(f"{key}{suffix}")
    return seen


# --- files of other runs --------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_save_of_each_stage_is_what_the_engine_held(stage: int) -> None:
    root = DATA / f"ds_zero{stage}"
    manifest = deepspeed.read(root)
    truth = load_numpy(root / "truth.safetensors")
    with Reader(manifest) as reader:
        for key, expected in truth.items():
            state, name = key.split(".", 1)
            master = name if stage == 3 else f"optim/{name}/master"
            found = reader.load(master if state == "fp32" else f"optim/{name}/{state}")
            assert found.shape == expected.shape, key
            assert found.tobytes() == expected.tobytes(), key
            if state == "fp32" and stage < 3:
                assert (reader.load(name) == rounded(expected)).all(), name
    assert len(manifest.tensors) == len(truth) + (len(truth) // 3 if stage < 3 else 0)
    record = manifest.records["optimizer"]
    assert set(record.count.values()) == {2}
    assert [name for group in record.groups for name in group["params"]] == list(record.count)
    assert record.groups[0]["lr"] == 0.01
    assert record.groups[0]["betas"] == (0.9, 0.999)
    assert manifest.records["untrained"] == frozenset()
    assert manifest.records["deepspeed"]["stage"] == stage


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_universal_checkpoint_is_what_the_engine_held(stage: int) -> None:
    root = DATA / f"ds_zero{stage}"
    manifest = deepspeed_universal.read(root)
    truth = load_numpy(root / "truth.safetensors")
    with Reader(manifest) as reader:
        for key, expected in truth.items():
            state, name = key.split(".", 1)
            found = reader.load(name if state == "fp32" else f"optim/{name}/{state}")
            assert found.shape == expected.shape, key
            assert found.tobytes() == expected.tobytes(), key
    assert len(manifest.tensors) == len(truth)
    record = manifest.records["optimizer"]
    assert record.count == deepspeed.read(root).records["optimizer"].count
    assert record.groups == deepspeed.read(root).records["optimizer"].groups


def test_tensor_parallel_ranks_hold_their_parts() -> None:
    manifest = deepspeed.read(DATA / "ds_autotp" / "saved")
    seen = set()
    for tp in range(2):
        seen |= check(manifest, load_file(DATA / "ds_autotp" / f"truth.tp{tp}.safetensors"), f"@{tp}")
    assert seen == set(manifest.tensors)
    shapes = [manifest.tensors[f"lm_head.weight@{tp}"].shape for tp in range(2)]
    assert shapes == [(12, 12), (11, 12)]
    info = manifest.records["universal_checkpoint_info"]
    assert info["affine_map"]["params"][r"^lm_head\.weight$"]["logical_shape"] == [23, 12]
    assert not any("@" in name for name in manifest.records["optimizer"].count)


def test_the_universal_form_of_tensor_parallel_ranks_is_whole() -> None:
    manifest = deepspeed_universal.read(DATA / "ds_autotp" / "universal")
    parts = [load_file(DATA / "ds_autotp" / f"truth.tp{tp}.safetensors") for tp in range(2)]
    cut = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "lm_head": 0}
    cut |= {"o_proj": 1, "down_proj": 1}
    with Reader(manifest) as reader:
        for key in parts[0]:
            if not key.startswith("optim/"):
                continue
            dim = next((dim for word, dim in cut.items() if word in key), None)
            whole = parts[0][key] if dim is None else torch.cat([part[key] for part in parts], dim)
            name = key.removeprefix("optim/").removesuffix("/master") if key.endswith("master") else key
            assert reader.load(name).tobytes() == raw(whole), key
    assert manifest.records["universal"]["parts"]["lm_head.weight"] == {"vocab_tensor": True}
    assert set(manifest.records["optimizer"].count.values()) == {2}


# --- runs of its engine ---------------------------------------------------------------------------

TWO = {
    "plain": {"stage": 0, "dtype": "fp32", "optimizer": "adamw"},
    "frozen1": {"stage": 1, "dtype": "bf16", "optimizer": "adamw", "frozen": True},
    "momentum": {"stage": 2, "dtype": "fp16", "optimizer": "sgd", "frozen": True, "tied": True},
    "turns": {"stage": 2, "dtype": "bf16", "optimizer": "adamw", "zero": {"round_robin_gradients": True}},
    "amsgrad": {"stage": 1, "dtype": "fp32", "optimizer": "amsgrad", "tied": True},
    "scalars": {"stage": 1, "dtype": "fp32", "optimizer": "nadam"},
    "elastic": {"stage": 1, "dtype": "bf16", "optimizer": "adamw", "zero": {"elastic_checkpoint": True}},
    "bf16": {
        "stage": 1, "dtype": "bf16", "optimizer": "adamw",
        "config": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "frozen3": {"stage": 3, "dtype": "bf16", "optimizer": "adamw", "frozen": True},
    "momentum3": {
        "stage": 3, "dtype": "fp16", "optimizer": "sgd", "tied": True, "zero": {"sub_group_size": 100},
    },
    "amsgrad3": {"stage": 3, "dtype": "fp32", "optimizer": "amsgrad", "zero": {"sub_group_size": 60}},
}  # fmt: skip
FOUR = {  # in this order: DeepSpeed keeps the groups of one for the next
    "experts": {"stage": 1, "dtype": "bf16", "optimizer": "adamw", "experts": {"count": 4, "ep": 2}},
    "tp": {"stage": 1, "dtype": "bf16", "optimizer": "adamw", "frozen": True, "tp": 2},
    "tp3": {"stage": 3, "dtype": "bf16", "optimizer": "adamw", "frozen": True, "tp": 2},
    "pipeline": {"stage": 1, "dtype": "bf16", "optimizer": "adamw", "stages": 2},
}


def _trained(cases: Mapping[str, Any], folder: Path, world_size: int) -> Path:
    named = [{"name": name, **case} for name, case in cases.items()]
    run(SCRIPT, named, folder, world_size=world_size, limit_s=280, preload="deepspeed")
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(TWO, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(FOUR, tmp_path_factory.mktemp("four"), 4)


@pytest.mark.peer("deepspeed")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in TWO if name != "turns"])
def test_what_the_engine_saves_is_what_it_held(two: Path, name: str) -> None:
    case: Mapping[str, Any] = TWO[name]
    manifest = deepspeed.read(two / name)
    for rank in range(2):
        seen = check(manifest, load_file(two / f"{name}.rank{rank}.safetensors"))
        assert seen == set(manifest.tensors)
    groups = manifest.records["optimizer"].groups
    assert [all(manifest.tensors[n].shape[1:] for n in group["params"]) for group in groups] == [True, False]
    if case["optimizer"] != "sgd":
        assert set(manifest.records["optimizer"].count.values()) == {2}
    if name != "elastic":  # which keeps no settings
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert [group["lr"] for group in groups] == [0.01, 0.02]
    buffers = {f"blocks.{i}.{buffer}" for i in range(2) for buffer in ("scale", "seen")}
    frozen = {f"blocks.{i}.frozen.{part}" for i in range(2) for part in ("weight", "bias")}
    assert manifest.records["untrained"] == buffers | (frozen if case.get("frozen") else set())
    assert manifest.records["shared"] == ({"head.weight": "words.weight"} if case.get("tied") else {})
    with Reader(manifest) as reader:
        assert reader.load("blocks.1.seen").tolist() == [BIG, 13]
    kept = next(iter(manifest.records["deepspeed"]["model_states"].values()))
    assert kept["note"] == {"epoch": 3}


@pytest.mark.peer("deepspeed")
@pytest.mark.timeout(400)
def test_weights_in_turns_are_found_where_they_are_and_not_where_the_engine_says(two: Path) -> None:
    # With round_robin_gradients DeepSpeed 0.19.8 records the fragments of another order than the one that it
    # uses: safe_get_full_* and ds_to_universal give elements of other weights. The rounded weights tell.
    manifest = deepspeed.read(two / "turns")
    said = load_file(two / "turns.rank0.safetensors")
    wrong = 0
    with Reader(manifest) as reader:
        for name in manifest.records["optimizer"].count:
            master = reader.load(f"optim/{name}/master")
            assert (reader.load(name) == rounded(master)).all(), name
            wrong += raw(said[f"optim/{name}/master"]) != master.tobytes()
    assert wrong > 0


@pytest.mark.peer("deepspeed")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FOUR)
def test_ranks_of_experts_and_of_tensors_hold_their_parts(four: Path, name: str) -> None:
    case: Mapping[str, Any] = FOUR[name]
    manifest = deepspeed.read(four / name)
    tp, seen = case.get("tp", 1), set()
    for rank in range(4):
        truth = load_file(four / f"{name}.rank{rank}.safetensors")
        seen |= check(manifest, truth, f"@{rank % tp}" if tp > 1 else "")
    assert seen == set(manifest.tensors)
    if name == "pipeline":
        record = manifest.records["optimizer"]
        assert record.groups[0]["params"].count("tied_modules.words.weight") == 1
        assert sorted(record.count) == sorted(n for group in record.groups for n in group["params"])
        assert {"1.seen", "2.seen"} <= manifest.records["untrained"]
    if name == "experts":
        prefix = "blocks.1.moe.deepspeed_moe.experts.deepspeed_experts"
        assert {f"{prefix}.{e}.0.weight" for e in range(4)} <= set(manifest.tensors)
        groups = manifest.records["optimizer"].groups
        assert [sum("deepspeed_experts" in n for n in group["params"]) for group in groups] == [0, 0, 16, 8]


@pytest.mark.peer("deepspeed")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["frozen1", "amsgrad3", "frozen3"])
def test_a_conversion_of_its_own_keeps_what_was_never_trained(two: Path, tmp_path: Path, name: str) -> None:
    convert(two / name / "saved", tmp_path / "universal", "--inject_missing_state")
    manifest = deepspeed_universal.read(tmp_path)
    truth = load_file(two / f"{name}.rank0.safetensors")
    lost = {key for key in truth if key.endswith("/max_exp_avg_sq")}
    seen = check(manifest, {key: value for key, value in truth.items() if key not in lost})
    assert seen == set(manifest.tensors)
    native = deepspeed.read(two / name)
    for key in ("untrained", "shared", "optimizer"):
        assert manifest.records[key] == native.records[key], key
    with Reader(manifest) as reader:  # ds_to_universal makes 2**24 of it
        assert reader.load("blocks.1.seen").tolist() == [BIG, 13]


@pytest.mark.peer("deepspeed")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "swapped"), [("frozen1", (0, 0, 1)), ("experts", (0, 2, 3)), ("tp", (1, 0, 1))]
)
def test_files_of_two_ranks_that_changed_places_are_found(
    two: Path, four: Path, tmp_path: Path, name: str, swapped: tuple[int, int, int]
) -> None:
    tp, a, b = swapped
    folder = shutil.copytree((two if name in TWO else four) / name / "saved", tmp_path / "saved")
    one, other = (folder / f"bf16_zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt" for dp in (a, b))
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    with pytest.raises(IndexMismatchError, match="changed places"):
        deepspeed.read(folder)


@pytest.mark.peer("deepspeed")
@pytest.mark.timeout(400)
def test_a_conversion_of_its_own_keeps_the_frozen_part_of_each_rank(four: Path, tmp_path: Path) -> None:
    # ds_to_universal writes the first rank's part as the whole weight; the module's files have both.
    convert(four / "tp" / "saved", tmp_path / "universal", "--inject_missing_state")
    manifest = deepspeed_universal.read(tmp_path)
    names = manifest.records["untrained"]
    assert names == deepspeed.read(four / "tp").records["untrained"]
    with Reader(manifest) as reader:
        for tp in range(2):
            truth = load_file(four / f"tp.rank{tp}.safetensors")
            for name in names:
                assert reader.load(f"{name}@{tp}").tobytes() == raw(truth[name]), name
        assert not (reader.load("blocks.1.frozen.weight@0") == reader.load("blocks.1.frozen.weight@1")).all()
