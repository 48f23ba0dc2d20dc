"""The benchmark of training steps runs, on a small model, and both of its runtimes learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train.py"


@pytest.mark.peer("megatron.core")
@pytest.mark.timeout(300)
def test_train() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--only", "experts, EP 2"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = re.search(
        r"^experts, EP 2 +([\d.]+ +){4}([\d.]+) to ([\d.]+), ([\d.]+) to ([\d.]+)$", done.stdout, re.M
    )
    assert row is not None, done.stdout
    ours, ours_last, theirs, theirs_last = map(float, row.groups()[1:])
    # Random weights of one spread begin near log(512) = 6.24, and an update of a batch makes it likelier.
    assert abs(ours - 6.24) < 0.1 and abs(theirs - 6.24) < 0.1
    assert ours_last < ours and theirs_last < theirs
