"""A training of real DeepSpeed, interrupted, converted and gone on with: nobody can tell from its losses.

It trains three steps at ZeRO-2 on 2 ranks. What it saved is converted, also by way of other formats, and
DeepSpeed goes on for three steps at another stage or number of ranks. The run that was not interrupted is the
reference, and its own noise is none: the same losses at every world size, which the first test sees to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Case, run

from shardweave.convert import Zero, convert, prepare
from shardweave.errors import GeometryError

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

SCRIPT = Path(__file__).with_name("deepspeed_resuming.py")
STEPS = 3
NAMED = Path("none")
Held = dict[str, Any]


def play(cases: list[Case], folder: Path, *, world_size: int) -> dict[str, list[Held]]:
    folder.mkdir()
    run(SCRIPT, cases, folder, world_size=world_size, limit_s=240, preload="deepspeed")
    return {
        case["out"]: [
            torch.load(folder / f"{case['out']}.{rank}.pt", weights_only=False) for rank in range(world_size)
        ]
        for case in cases
    }


def go(src: Path, dst: Path, to: str, **options: Any) -> Path:
    """A conversion; the folder that DeepSpeed is told."""
    convert(prepare(src, to=to, config=NAMED, **options), dst, fsync=False)
    if to == "universal":
        return dst / "universal"
    return dst / (dst / "latest").read_text() if to == "deepspeed" else dst


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Held]:
    """ZeRO-2 after three steps, with two groups and a frozen weight, and what the run was and did then."""
    folder = tmp_path_factory.mktemp("deepspeed")
    case: Case = {
        "out": "whole", "stage": 2, "groups": 2, "steps": STEPS, "then": STEPS, "save": str(folder / "save"),
    }  # fmt: skip
    found = play([case], folder / "trained", world_size=2)["whole"]
    assert found[0]["then"] == found[1]["then"]
    return folder / "save" / "native", found[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 4])
def test_it_goes_on_at_another_number_of_ranks(
    world_size: int, saved: tuple[Path, Held], tmp_path: Path
) -> None:
    source, held = saved
    dcp = go(source, tmp_path / "dcp", "dcp")
    native = go(dcp, tmp_path / "shardweave", "native", dtype="bfloat16")
    universal = go(source, tmp_path / "universal", "universal")
    ways: dict[str, tuple[Path, int]] = {
        "universal": (universal, 1),
        "universal by way of torch and shardweave": (go(native, tmp_path / "far", "universal"), 2),
        "another DP": (
            go(source, tmp_path / "dp", "deepspeed", zero=Zero(stage=2, dp=world_size), dtype="bfloat16"), 2,
        ),
        "another stage, from a universal one": (
            go(universal, tmp_path / "z1", "deepspeed", zero=Zero(stage=1, dp=world_size), dtype="bfloat16"),
            1,
        ),
        "ZeRO-1, from torch": (
            go(dcp, tmp_path / "z1t", "deepspeed", zero=Zero(stage=1, dp=world_size), dtype="bfloat16"), 1,
        ),
        "ZeRO-3": (go(source, tmp_path / "z3", "deepspeed", zero=Zero(stage=3, dp=world_size)), 3),
    }  # fmt: skip
    with pytest.raises(GeometryError, match="may be either: 'gain', 'shift'"):
        prepare(dcp, to="deepspeed", config=NAMED, zero=Zero(stage=3, dp=world_size, dtype="bfloat16"))
    cases: list[Case] = [
        {
            "out": name.replace(" ", "_"), "stage": stage, "groups": 2, "skip": STEPS, "then": STEPS,
            "load": str(path), "universal": path.name == "universal",
            # A universal checkpoint brings no engine its frozen weights and buffers back.
            "spoil": path.name != "universal",
        }
        for name, (path, stage) in ways.items()
    ]  # fmt: skip
    found = play(cases, tmp_path / "ranks", world_size=world_size)
    for name in ways:
        for rank, mine in enumerate(found[name.replace(" ", "_")]):
            at = (name, rank)
            assert mine["then"] == held["then"], at
            assert mine["groups"] == held["groups"], at
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                assert mine[key].keys() == held[key].keys(), at
                wrong = [one for one in held[key] if not torch.equal(mine[key][one], held[key][one])]
                assert not wrong, (*at, key, wrong)
            wrong = [
                one for one in held["module"] if not torch.equal(mine["module"][one], held["module"][one])
            ]
            assert not wrong, (*at, wrong)
