"""Options of weights in shares, from the command line to what a run holds and does, a process a rank."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_driver import ROOT

from shardweave.train.config import TrainConfig
from shardweave.train.settings import settings

TINY = ROOT / "tests/data/hf_qwen3moe_tiny/config.json"
UP, EXPERTS = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.up_proj.weight"

# A rank as torchrun starts it, that says at the end what it had made of its options.
RANK = """
import json, os, sys
from pathlib import Path
from shardweave.cli import main
from shardweave.train import worker

made, build = [], worker.build
def kept(*args, **options):
    made.append(build(*args, **options))
    return made[-1]
worker.build = kept
code = main(sys.argv[2:])
found = made[-1]
said = {
    "shapes": {name: list(weight.shape) for name, weight in found.weights.items()},
    "shared": sorted(found.reading.shared), "axes": list(found.parallel.weight_axes),
    "ahead": found.reading._ahead, "ordered": found.reading._ordered, "recompute": found.decoder.recompute,
    "data": found.parallel.data_rank(found.rank),
}
Path(sys.argv[1], f"said{os.environ['RANK']}.json").write_text(json.dumps(said))
sys.exit(code)
"""


def play(folder: Path, ranks: int, *options: str) -> tuple[list[float], list[Mapping[str, Any]], str]:
    """The losses of a run, what each rank says, and what rank 0 prints on stderr."""
    config = {**json.loads(TINY.read_text()), "vocab_size": 259}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text("to share a weight is to cut it once more, and nothing else. " * 8)
    said = {
        "model": {"path": str(folder / "config.json"), "dtype": "float64"},
        "data": {"train": str(folder / "text.txt")},
        "batch": {"documents": 4, "sequence_length": 24},
        "optimizer": {"lr": 3e-3, "sharded": True},
        "run": {"steps": 3, "timeout_s": 60.0, "log": str(folder / "log.jsonl")},
    }
    (folder / "run.json").write_text(json.dumps(said))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", RANK, str(folder), "train", str(folder / "run.json"), *options]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), **place},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=150)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
    rows = [json.loads(row) for row in (folder / "log.jsonl").read_text().splitlines()]
    told = [json.loads((folder / f"said{rank}.json").read_text()) for rank in range(ranks)]
    return [row["loss"] for row in rows], told, errors[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Mapping[str, Any]]:
    """What one rank comes to, with the defaults but for one that has nothing to do there."""
    losses, (told,), errors = play(tmp_path_factory.mktemp("one"), 1, "--parallel.fold_cp", "true")
    assert "note: parallel.fold_cp changes nothing: parallel.cp is 1" in errors
    assert len(losses) == 3 and len(set(losses)) == 3
    assert told["shared"] == [] and told["ahead"] and told["ordered"] and not told["recompute"]
    return losses, told


def rows(told: Mapping[str, Any], name: str, dim: int) -> int:
    found: int = told["shapes"][name][dim]
    return found


@pytest.mark.dist
@pytest.mark.timeout(300)
class TestOptions:
    def test_remat_eremat_multiple_and_prefetch(
        self, alone: tuple[list[float], Mapping[str, Any]], tmp_path: Path
    ) -> None:
        losses, told, _ = play(
            tmp_path, 2,
            "--parallel.remat", "2", "--parallel.eremat", "2", "--parallel.weight_multiple", "5",
            "--parallel.prefetch", "false",
        )  # fmt: skip
        assert losses == pytest.approx(alone[0], rel=1e-12)
        for rank, said in enumerate(told):
            assert said["data"] == rank and not said["ahead"]
            for name, dim in ((UP, 0), (EXPERTS, 1)):
                whole, share = rows(alone[1], name, dim), rows(said, name, dim)
                assert name in said["shared"] and share == -(-whole // 10) * 5

    def test_fold_cp_and_recompute(
        self, alone: tuple[list[float], Mapping[str, Any]], tmp_path: Path
    ) -> None:
        options = ("--parallel.cp", "2", "--parallel.fold_cp", "true", "--model.recompute", "true")
        losses, told, errors = play(tmp_path, 2, *options)
        assert losses == pytest.approx(alone[0], rel=1e-12)
        assert "note:" not in errors
        for said in told:
            assert said["data"] == 0 and said["recompute"] and said["axes"] == ["remat", "cp"]
            assert rows(said, UP, 0) == -(-rows(alone[1], UP, 0) // 2)
            assert said["shapes"][EXPERTS] == alone[1]["shapes"][EXPERTS], "experts are never folded"

    def test_weight_axes_and_deterministic(
        self, alone: tuple[list[float], Mapping[str, Any]], tmp_path: Path
    ) -> None:
        options = ("--parallel.weight_axes", "dp", "--run.deterministic", "false")
        losses, told, _ = play(tmp_path, 2, *options)
        assert losses == pytest.approx(alone[0], rel=1e-12)
        for rank, said in enumerate(told):
            assert said["data"] == rank and said["axes"] == ["dp"] and not said["ordered"]
            assert rows(said, EXPERTS, 1) == -(-rows(alone[1], EXPERTS, 1) // 2)


def test_settings_that_errors_name_exist() -> None:
    """An error that tells people to set what there is not helps nobody."""
    known = {setting.key for setting in settings(TrainConfig)}
    sections = {key.partition(".")[0] for key in known}
    pattern = re.compile(rf"(?<![\w./])({'|'.join(sections)})\.([a-z_0-9]+)\b(?![(.])")
    named = set()
    for path in sorted((ROOT / "src/shardweave").glob("train/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Error", "_wrong"))):
                continue
            for text in (
                n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is str
            ):
                named |= {".".join(found) for found in pattern.findall(text)}
    assert {"parallel.ep", "checkpoint.folder", "optimizer.lr"} <= named
    assert named <= known, f"{sorted(named - known)} are no settings"
