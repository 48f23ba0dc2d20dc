"""Running the command in-process or as a process, and comparing what it prints with golden files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardweave.cli import main

# Test files are no package: what they share is made importable.
sys.path.insert(0, str(Path(__file__).parent))

from cli_driver import ROOT, UPDATE, Done, Run

CONFIGS = {"mc_gqa": "mc_gqa_truth_hf", "mc_moe": "mc_moe_truth_hf"}


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns without colours, wherever the tests run."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "SHARDWEAVE_NO_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def sw(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process."""

    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return Done(code, shown.out, shown.err)

    return run


@pytest.fixture(scope="session")
def process() -> Run:
    """Runs the command as a process of its own."""

    def run(*arguments: str | Path, program: Sequence[str] = (sys.executable, "-m", "shardweave")) -> Done:
        done = subprocess.run(
            [*program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compares a text with ``golden/NAME.txt``; SHARDWEAVE_UPDATE_GOLDEN=1 writes it anew."""

    def compare(name: str, text: str, **hidden: object) -> None:
        for word, value in hidden.items():
            text = text.replace(str(value), f"<{word}>")
        # Times and rates are the only things that two runs print differently.
        text = re.sub(r"\d+\.\d+ s, \d+\.\d+ GiB/s", "<time>", text)
        path = Path(__file__).parent / "golden" / f"{name}.txt"
        if os.environ.get(UPDATE):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, f"{UPDATE}=1 accepts the new text"

    return compare


@pytest.fixture
def checkpoint(data_dir: Path) -> Callable[[str], tuple[Path, Path]]:
    """The Megatron checkpoint of a fixture, and the config that describes it."""

    def found(name: str) -> tuple[Path, Path]:
        return data_dir / name / "torch_dist", data_dir / CONFIGS[name[:6]] / "config.json"

    return found


@pytest.fixture
def copy_of(data_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a fixture's folder, to be damaged."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(data_dir / name, tmp_path / name.replace("/", "_")))

    return copied
