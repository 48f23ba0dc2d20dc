"""The commands of docs/deepspeed.md run as they stand, one after another, on what DeepSpeed saved."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardweave.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^\$ (shardweave .*)$", re.MULTILINE)


@pytest.fixture
def workplace(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 2 data-parallel ranks at ZeRO-2, and a model of Hugging Face."""
    shutil.copytree(data_dir / "ds_zero2" / "step2", tmp_path / "run" / "step2")
    shutil.copy(data_dir / "ds_zero2" / "latest", tmp_path / "run")
    shutil.copytree(data_dir / "hf_llama_tied_tiny", tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_commands_run(workplace: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for line in COMMAND.findall(PAGE):
        _, *arguments = shlex.split(line)
        code = main(arguments)
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, ""), line
        shown.append(printed.out)
    assert "exp_avg, exp_avg_sq of 12 weights; 2 updates; 1 group of settings" in shown[0]
    assert len(list((workplace / "on6").rglob("*optim_states.pt"))) == 6
    assert len(list((workplace / "stage3").rglob("*optim_states.pt"))) == 4
    # What went through all of them is what DeepSpeed says of its run.
    truth = load_file(data_dir / "ds_zero2" / "truth.safetensors")
    main(["convert", "back", "last", "--to", "universal", "--config", "none", "-q"])
    kinds = {"fp32": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    (zero,) = (workplace / "last").rglob("zero")
    for name, values in truth.items():
        kind, _, weight = name.partition(".")
        found = torch.load(zero / weight / f"{kinds[kind]}.pt", weights_only=False)["param"]
        assert torch.equal(found, values), name


def test_the_guide_has_commands() -> None:
    assert len(COMMAND.findall(PAGE)) > 8
