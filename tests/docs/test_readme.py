"""The commands of README.md run as they stand, and what it shows of their output is what they print."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from torch.distributed import FileStore, PrefixStore

from shardweave.cli import main
from shardweave.refit import Refit
from shardweave.refit.notes import Notes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^\$ (shardweave .*)\n((?:(?!\$ |```).*\n)*)", re.MULTILINE)
"""A command in a block, and what the page shows of its output."""

RUN = """
model: {path: model, weights: model}
data: {train: LICENSE, tokenizer: bytes}
batch: {documents: 2, sequence_length: 32}
optimizer: {schedule: constant}
run: {steps: 2}
"""


@pytest.fixture
def workplace(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the commands name: a checkpoint, its config, and a package with a function."""
    shutil.copytree(data_dir / "mc_gqa_tp2pp2" / "torch_dist", tmp_path / "iter_0001000")
    shutil.copy(data_dir / "mc_gqa_truth_hf" / "config.json", tmp_path / "config.json")
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shard.py").write_text("def cut(x, rank, tp):\n    return x.chunk(tp)[rank]\n")
    seen_by_one_receiver(tmp_path / "refit.store")
    shutil.copytree(data_dir / "hf_qwen3moe_tiny", tmp_path / "model")
    shutil.copy(ROOT / "LICENSE", tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")


def seen_by_one_receiver(path: Path) -> None:
    """The store of a session whose ranks have brought a version home."""
    put = PrefixStore("shardweave/refit", FileStore(str(path), -1)).set
    for rank, role in enumerate(("publisher", "receiver")):
        notes = Notes(put, rank=rank, role=role, layout="hf", transport="gloo", timeout_s=60.0)
        notes.come(publishers=(0,), receivers=(1,))
        notes.succeeded(Refit(version=7, turn=0, changed=True), None)


@pytest.mark.usefixtures("workplace")
def test_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after another, in the order of the page; a command that is shown with output is refused with it."""
    ran, refused = set(), 0
    for line, shown in COMMAND.findall(PAGE):
        if "://" in line:  # no test reaches a network
            continue
        _, *arguments = shlex.split(line, comments=True)
        code = main(arguments)
        assert (code, capsys.readouterr().err.strip()) == (2 if shown else 0, shown.strip()), line
        ran.add(arguments[0])
        refused += bool(shown)
    assert ran == {"convert", "plan", "check", "diff", "show", "probe", "refit", "train"}
    assert refused
