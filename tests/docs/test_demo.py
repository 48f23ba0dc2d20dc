"""The demo runs as a newcomer runs it, and fails where a weight is wrong."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.py"


@pytest.mark.peer("transformers")
def test_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DEMO], capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok    ") == 3
    assert "WRONG" not in done.stdout


def demo_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.peer("transformers")
def test_demo_sees_two_rows_in_each_others_place(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = demo_module()
    wrong = Path(shutil.copytree(data_dir / "mc_gqa_truth_hf", tmp_path / "wrong"))
    (wrong / "reference_logits.safetensors").unlink()
    tensors = load_file(wrong / "model.safetensors")
    key = "model.layers.1.self_attn.k_proj.weight"
    tensors[key][[0, 1]] = tensors[key][[1, 0]]
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(demo, "OUT", wrong)
    assert demo.compare() == 1
    shown = capsys.readouterr().out
    assert shown.count("WRONG") == 2
    assert shown.count("ok    ") == 1
