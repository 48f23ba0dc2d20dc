"""Checkpoints that shardweave writes, resumed by real DeepSpeed: the same bits, and the same training after
them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from filling import fill
from rank_processes import Case, run

from shardweave.store import deepspeed, deepspeed_state, deepspeed_write, universal_write
from shardweave.store.deepspeed_write import Zero
from shardweave.store.manifest import Manifest, TensorSpec
from shardweave.store.optimizer import OptimizerRecord

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

SCRIPT = Path(__file__).with_name("deepspeed_resuming.py")
UPDATES, THEN = 2, 2
ACCUMULATED = {"data_types": {"grad_accum_dtype": "fp32"}}
"""Makes DeepSpeed take another class for the optimizer at stage 1."""
FROZEN, BUFFERS = "gain", ("seen", "shift")
Held = dict[str, Any]


def play(cases: list[Case], folder: Path, *, world_size: int) -> dict[str, list[Held]]:
    """Real DeepSpeed on so many processes; what each rank held, by the name of the case."""
    folder.mkdir()
    run(SCRIPT, cases, folder, world_size=world_size, limit_s=240, preload="deepspeed")
    return {
        case["out"]: [
            torch.load(folder / f"{case['out']}.{rank}.pt", weights_only=False) for rank in range(world_size)
        ]
        for case in cases
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, list[Held]]:
    """One run of each kind, two updates long, saved by DeepSpeed; and its losses after that."""
    two = {"groups": 2, "steps": UPDATES, "then": THEN}
    one = {"steps": UPDATES, "then": THEN}

    def saved(name: str) -> dict[str, str]:
        return {"out": name, "save": str(folder / "peer" / name)}

    return play(
        [
            {"stage": 1, **two, **saved("zero1")},
            {"stage": 2, **two, **saved("zero2")},
            {"stage": 3, "zero": {"sub_group_size": 30}, **two, **saved("zero3")},
            {"stage": 2, "zero": {"round_robin_gradients": True}, **two, **saved("robin")},
            {"stage": 1, "zero": {"parameter_alignment": True}, **two, **saved("aligned")},
            {"stage": 1, "dtype": "float16", **two, **saved("half")},
            {"stage": 1, "dtype": "float32", **two, **saved("single")},
            {"stage": 1, "config": ACCUMULATED, **two, **saved("accumulated")},
            {"stage": 1, **one, **saved("one")},
            {"stage": 1, "optimizer": "sgd", "states": ["momentum_buffer"], **one, **saved("sgd")},
            {
                "stage": 1, "settings": {"amsgrad": True}, **one, **saved("amsgrad"),
                "states": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
            },
        ],
        folder / "trained",
        world_size=2,
    )  # fmt: skip


# --- what is written -----------------------------------------------------------------------------------


def states_of(held: Held) -> list[str]:
    return [key for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer") if key in held]


def arrays_of(held: Held, *, masters: str) -> dict[str, torch.Tensor]:
    """What a rank held, under the names of stores: masters ``beside`` the rounded weights, or ``instead``."""
    arrays: dict[str, torch.Tensor] = {}
    for name, value in held["module"].items():
        own = held["fp32"].get(name)
        arrays[name] = own if own is not None and masters == "instead" else value
        if own is not None:
            arrays |= {f"optim/{name}/master": own} if masters == "beside" else {}
            arrays |= {f"optim/{name}/{state}": held[state][name] for state in states_of(held)}
    return arrays


def records_of(held: Held) -> dict[str, Any]:
    """What a foreign source says: names, settings and counts, and nothing of DeepSpeed's own."""
    names = [name for name in held["module"] if name in held["fp32"]]
    split = [
        [name for name in names if held["fp32"][name].dim() > 1],
        [n for n in names if held["fp32"][n].dim() == 1],
    ]
    members = split if len(held["groups"]) == 2 else [names]
    groups = tuple({"params": part, **group} for part, group in zip(members, held["groups"], strict=True))
    count = {} if "momentum_buffer" in held else dict.fromkeys(names, UPDATES)
    return {
        "optimizer": OptimizerRecord(count, groups),
        "untrained": frozenset({FROZEN, *BUFFERS}),
        "buffers": BUFFERS,
    }


def specs_of(arrays: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(key, str(value.dtype)[6:], tuple(value.shape)) for key, value in arrays.items()]


def check_archives(root: Path) -> None:
    for path in root.rglob("*.pt"):
        assert zipfile.ZipFile(path).testzip() is None, path


def native(root: Path, arrays: Mapping[str, torch.Tensor], zero: Zero, records: Mapping[str, Any]) -> Path:
    root.mkdir(parents=True)
    manifest = deepspeed_write.allocate(root, specs_of(arrays), zero=zero, records=records, tag="saved")
    deepspeed_write.finish(manifest, fill(manifest, arrays))
    check_archives(root)
    assert (root / "latest").read_text() == "saved"
    return root / "saved"


def universal(root: Path, held: Held, records: Mapping[str, Any], *, flat: bool = False) -> Path:
    root.mkdir(parents=True)
    arrays = arrays_of(held, masters="instead")
    manifest = universal_write.allocate(root, specs_of(arrays), records=records, flat=flat)
    universal_write.finish(manifest, fill(manifest, arrays))
    check_archives(root)
    assert (root / "latest_universal").read_text() == "universal"
    assert sum(len(tensor.extents) for tensor in manifest.tensors.values()) == len(arrays)
    return root / "universal"


# --- the files, against DeepSpeed's own ------------------------------------------------------------------


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two loaded files differ, to the bit; dicts of either kind are the same."""
    if isinstance(theirs, torch.Tensor):
        same = (
            isinstance(ours, torch.Tensor)
            and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            and torch.equal(
                ours.contiguous().view(-1).view(torch.uint8), theirs.contiguous().view(-1).view(torch.uint8)
            )
        )
        return [] if same else [f"{path}: {ours} is not {theirs}"]
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or set(ours) != set(theirs):
            return [f"{path}: {set(ours) ^ set(theirs)}"]
        return [one for key in theirs for one in differences(ours[key], theirs[key], f"{path}/{key}")]
    if type(theirs) in (list, tuple):
        if type(ours) is not type(theirs) or len(ours) != len(theirs):
            return [f"{path}: {ours!r} is not {theirs!r}"]
        return [
            one
            for i, pair in enumerate(zip(ours, theirs, strict=True))
            for one in differences(*pair, f"{path}/{i}")
        ]
    if type(theirs).__module__ == "deepspeed.runtime.fp16.loss_scaler":
        return [] if type(ours) is type(theirs) and vars(ours) == vars(theirs) else [f"{path}: {vars(ours)}"]
    return [] if type(ours) is type(theirs) and ours == theirs else [f"{path}: {ours!r} is not {theirs!r}"]


PEERS = {
    "zero1": Zero(1, 2),
    "zero2": Zero(2, 2),
    "zero3": Zero(3, 2, sub_group_size=30),
    "robin": Zero(2, 2, round_robin_gradients=True),
    "aligned": Zero(1, 2, parameter_alignment=True),
    "half": Zero(1, 2, dtype="float16"),
    "single": Zero(1, 2, dtype="float32"),
    "sgd": Zero(1, 2),
    "amsgrad": Zero(1, 2),
}


@pytest.mark.parametrize("name", PEERS)
def test_files_are_those_that_deepspeed_writes(name: str, trained: Any, folder: Path, tmp_path: Path) -> None:
    """Every value of every file, from what ranks held and the records that the reader returns."""
    zero, peer = PEERS[name], folder / "peer" / name / "native"
    # Where weights go around the ranks, DeepSpeed's own functions gather the wrong ranges.
    held = trained["zero2" if name == "robin" else name][0]
    records = deepspeed_state.of_source(deepspeed.read(peer).records, tp=1)
    shapes = torch.load(next(peer.glob("*mp_rank_00_model_states.pt")), weights_only=False)["param_shapes"]
    arrays = arrays_of(held, masters="instead" if zero.stage == 3 else "beside")
    ours = native(tmp_path / "ours", arrays, zero, records)
    assert {path.name for path in ours.iterdir()} == {path.name for path in peer.iterdir()}
    for path in ours.iterdir():
        pair = [torch.load(one / path.name, weights_only=False) for one in (ours, peer)]
        if name == "robin" and "optim_states" in path.name:
            # DeepSpeed records where weights would lie without the option.
            slices = [value["optimizer_state_dict"].pop("param_slice_mappings") for value in pair]
            assert slices[0] != slices[1]
        if name == "zero3" and "rank_1" in path.name and "model_states" in path.name:
            pair[1]["frozen_param_fragments"][FROZEN][2:] = 0  # whatever was in the memory of its padding
        if name == "zero3" and "optim_states" in path.name:  # the same in its masters
            for flat, group in zip(pair[1]["optimizer_state_dict"]["fp32_flat_groups"], shapes, strict=True):
                sizes = [shape.numel() for shape in group.values()]
                ends = accumulate(-(-size // 2) for size in sizes)
                padded = [end - 1 for end, size in zip(ends, sizes, strict=True) if size % 2]
                flat.data[padded if "rank_1" in path.name else []] = 0
        assert not differences(*pair), path.name


# --- resumed ------------------------------------------------------------------------------------------------


def check(found: list[Held], held: Held, *, untrained: bool = True) -> None:
    """Each rank of a resumed run holds the bits of the one that went on, and its losses are the same
    after."""
    for rank, mine in enumerate(found):
        for key in ("fp32", *states_of(held)):
            wrong = [name for name in held[key] if not torch.equal(mine[key][name], held[key][name])]
            assert not wrong, (rank, key, wrong)
        names = [name for name in held["module"] if untrained or name in held["fp32"]]
        wrong = [name for name in names if not torch.equal(mine["module"][name], held["module"][name])]
        assert not wrong, (rank, wrong)
        assert mine["groups"] == held["groups"] and mine["then"] == held["then"], rank


RESUMED: dict[int, dict[str, tuple[str, Zero | int]]] = {
    1: {
        "native1": ("zero1", Zero(1, 1)),
        "native3": ("zero3", Zero(3, 1)),
        "universal1": ("one", 1),
        "universal3": ("one", 3),
    },
    2: {
        "native1": ("zero1", Zero(1, 2)),
        "native2": ("zero1", Zero(2, 2)),
        "native3": ("zero1", Zero(3, 2, sub_group_size=30)),
        "accumulated": ("accumulated", Zero(1, 2)),
        "universal_accumulated": ("accumulated", 1),
        "aligned": ("zero1", Zero(2, 2, parameter_alignment=True)),
        "half": ("half", Zero(2, 2, dtype="float16")),
        "half3": ("half", Zero(3, 2, dtype="float16")),
        "single": ("single", Zero(3, 2, dtype="float32")),
        "sgd": ("sgd", Zero(2, 2)),
        "amsgrad": ("amsgrad", Zero(3, 2)),
        "universal2": ("one", 2),
        "universal_two": ("zero1", 1),
        "universal_sgd": ("sgd", 1),
        "universal_amsgrad": ("amsgrad", 2),
        "flat3": ("one", 3),
    },
    4: {
        "native1": ("zero3", Zero(1, 4)),
        "native2": ("zero1", Zero(2, 4, round_robin_gradients=True)),
        "native3": ("zero1", Zero(3, 4)),
        "universal1": ("one", 1),
        "universal2": ("zero1", 2),
        "universal3": ("one", 3),
        "flat3": ("one", 3),
    },
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", RESUMED)
def test_deepspeed_goes_on_from_what_is_written(world_size: int, trained: Any, tmp_path: Path) -> None:
    """Weights, masters and states to the bit, and the losses of the run that was not interrupted.

    The engines begin with other weights, and those of native checkpoints with other buffers too. The runs
    agree to the bit at every stage and world size (the first assertion), so that one of them is the
    reference for all.
    """
    cases, expected = [], {}
    for out, (source, target) in RESUMED[world_size].items():
        held = expected[out] = trained[source][0]
        case: Case = {
            "out": out,
            "skip": UPDATES,
            "then": THEN,
            "groups": len(held["groups"]),
            "states": states_of(held),
            "config": ACCUMULATED if source == "accumulated" else {},
        }
        case |= {
            "optimizer": "sgd" if "sgd" in source else "adamw",
            "settings": {"amsgrad": source == "amsgrad"},
        }
        if case["optimizer"] == "sgd":
            case["settings"] = {}
        if isinstance(target, Zero):
            masters = "instead" if target.stage == 3 else "beside"
            path = native(tmp_path / out, arrays_of(held, masters=masters), target, records_of(held))
            options = (
                {"round_robin_gradients", "parameter_alignment"} if target.stage < 3 else {"sub_group_size"}
            )
            case |= {
                "stage": target.stage, "dtype": target.dtype, "spoil": True,
                "zero": {key: getattr(target, key) for key in options},
            }  # fmt: skip
        else:
            path = universal(tmp_path / out, held, records_of(held), flat="flat" in out)
            case |= {"stage": target, "universal": True}
        cases.append({**case, "load": str(path)})
    assert all(
        trained[name][0]["then"] == trained["zero1"][0]["then"]
        for name in ("zero2", "zero3", "robin", "aligned")
    )
    assert trained["accumulated"][0]["optimizer"] == "BF16_Optimizer"
    found = play(cases, tmp_path / "ranks", world_size=world_size)
    for out, (_, target) in RESUMED[world_size].items():
        native_one = isinstance(target, Zero)
        if native_one and target.round_robin_gradients:
            # Its functions that gather states take the wrong ranges where the option is on: only losses tell.
            assert all(mine["then"] == expected[out]["then"] for mine in found[out])
        else:
            check(found[out], expected[out], untrained=native_one)


@pytest.mark.timeout(300)
def test_tensor_parallel_ranks_get_their_own(tmp_path: Path) -> None:
    """Two tensor-parallel ranks with weights of their own, times two data-parallel ones, at each stage.

    A universal checkpoint holds weights whole; DeepSpeed cuts them along the dim that stands beside them.
    """
    case: Case = {"tp": 2, "groups": 2, "stage": 1, "steps": UPDATES, "then": THEN, "out": "trained"}
    held = play([case], tmp_path / "trained", world_size=4)["trained"]
    assert not torch.equal(held[0]["fp32"]["head.weight"], held[1]["fp32"]["head.weight"])
    case |= {"steps": 0, "skip": UPDATES}
    cases = []
    for stage in (1, 2, 3):
        ranks = [arrays_of(one, masters="instead" if stage == 3 else "beside") for one in held[:2]]
        arrays = {f"{name}@{rank}": ranks[rank][name] for name in ranks[0] for rank in range(2)}
        path = native(tmp_path / f"zero{stage}", arrays, Zero(stage, 2, tp=2), records_of(held[0]))
        cases.append({**case, "stage": stage, "load": str(path), "spoil": True, "out": f"native{stage}"})
    dims = {name: int("down" in name) for name in held[0]["fp32"]}
    whole = dict(held[0])
    for key in ("fp32", *states_of(whole)):
        whole[key] = {
            name: torch.cat([one[key][name] for one in held[:2]], dim) for name, dim in dims.items()
        }
    parts = {name: {"cat_dim": dim} for name, dim in dims.items()}
    path = universal(tmp_path / "universal", whole, {**records_of(whole), "parts": parts})
    for stage in (1, 2):
        cases.append(
            {**case, "stage": stage, "load": str(path), "universal": True, "out": f"universal{stage}"}
        )
    found = play(cases, tmp_path / "resumed", world_size=4)
    for one in cases:
        for rank in range(4):
            check(found[one["out"]][rank : rank + 1], held[rank], untrained="native" in one["out"])


def test_client_state_and_settings_come_back(trained: Any, folder: Path, tmp_path: Path) -> None:
    """What DeepSpeed saved, read, written at another degree, and loaded: also what it keeps for a script."""
    manifest: Manifest = deepspeed.read(folder / "peer" / "zero1")
    records = deepspeed_state.of_source(manifest.records, tp=1)
    path = native(tmp_path / "ours", arrays_of(trained["zero1"][0], masters="beside"), Zero(2, 1), records)
    case: Case = {"groups": 2, "stage": 2, "skip": UPDATES, "then": THEN, "load": str(path), "out": "resumed"}
    found = play([case], tmp_path / "ranks", world_size=1)["resumed"]
    check(found, trained["zero1"][0])
    assert found[0]["client"]["epoch"] == 3


def test_deepspeeds_own_tools_read_them(trained: Any, tmp_path: Path) -> None:
    """``zero_to_fp32`` and ``ds_to_universal`` give the masters and states that were written."""
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    held = trained["zero1"][0]
    for stage in (2, 3):
        masters = "instead" if stage == 3 else "beside"
        path = native(
            tmp_path / f"zero{stage}", arrays_of(held, masters=masters), Zero(stage, 3), records_of(held)
        )
        found = get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
        for name, value in held["fp32"].items():
            assert torch.equal(found[name], value), (stage, name)
        out = tmp_path / f"universal{stage}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "sys.argv",
                ["", "--input_folder", str(path), "--output_folder", str(out), "--inject_missing_state",
                 "--num_extract_workers", "1", "--num_merge_workers", "1"],
            )  # fmt: skip
            main(parse_arguments())
        for name in held["fp32"]:
            for key, state in (("fp32", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                value = torch.load(out / "zero" / name / f"{key}.pt", weights_only=False)
                value = value["param"] if isinstance(value, dict) else value
                assert torch.equal(value.view(-1), held[state][name].view(-1)), (stage, name, key)
