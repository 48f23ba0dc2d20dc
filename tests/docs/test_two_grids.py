"""examples/two_grids.py: six processes train as one does, over a bridge that sends what is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_grids.py"
ROW = re.compile(r"^ +(\d+) +(\d\.\d{4}) +(\d+)%", re.MULTILINE)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    return done.stdout


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_two_grids() -> None:
    said = run("--steps", "18")
    assert "rank 2  dp 2    tp 0, cp 0  5: 0-2  2,3  2,4  2-5  0-5" in said
    assert "352 rows, each once, of which 10 stay where they are; 87,552 bytes" in said
    assert "the bridge sent 1.000 of what is needed" in said
    losses = [float(loss) for _, loss, _ in ROW.findall(said)]
    assert losses[0] > 2 and losses[-1] < 0.4
    assert int(ROW.findall(said)[-1][2]) >= 90


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_without_images_nothing_is_learnt() -> None:
    said = run("--steps", "10", "--blind")
    assert "without images nothing is learnt" in said
    assert float(ROW.findall(said)[-1][1]) > 1.2
