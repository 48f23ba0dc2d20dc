"""The loops of examples/: rewards improve, every iteration serves what was published, damage is seen."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ROW = re.compile(
    r"^ +(\d+)  (\d\.\d{3}) #+ +\d+\.\d{3} s +([\d,]+)  (the same|DIFFER)  (equal|OFF) ", re.MULTILINE
)

# All weights of the model once, in float32.
NUM_BYTES = "458,688"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def check(done: subprocess.CompletedProcess[str], steps: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    rows = ROW.findall(done.stdout)
    assert [int(version) for version, *_ in rows] == list(range(steps))
    assert {tuple(rest) for _, _, *rest in rows} == {(NUM_BYTES, "the same", "equal")}
    assert float(rows[-1][1]) > float(rows[0][1]) + 0.1
    assert "WRONG" not in done.stdout


@pytest.mark.peer("transformers")
@pytest.mark.dist
@pytest.mark.timeout(300)
def test_rl_loop() -> None:
    check(run("rl_loop.py", "--steps", "5"), 5)


@pytest.mark.peer("transformers")
@pytest.mark.dist
@pytest.mark.timeout(300)
def test_rl_loop_sees_one_bit_that_differs() -> None:
    done = run("rl_loop.py", "--steps", "2", "--spoil")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [row[3] for row in ROW.findall(done.stdout)] == ["the same", "DIFFER"]
    assert "model.layers.1.mlp.up_proj.weight differs" in done.stdout
    assert "WRONG: answers did not come from the weights that were published" in done.stdout


@pytest.mark.peer("transformers")
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rl_loop_on_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'shardweave[ray]' to run examples/rl_loop_ray.py")
    check(run("rl_loop_ray.py", "--steps", "5"), 5)
