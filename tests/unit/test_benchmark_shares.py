"""The benchmark of weights in shares runs, on a small model, and both of its sides come to the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "shares.py"


@pytest.mark.peer("transformers")
@pytest.mark.timeout(300)
def test_shares() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--ranks", "2"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = re.search(
        r"^2 ranks +([\d.]+ +){7}([\d.e-]+), ([\d.]+) to ([\d.]+), ([\d.]+) to ([\d.]+)$", done.stdout, re.M
    )
    assert row is not None, done.stdout
    apart, ours, ours_last, theirs, theirs_last = map(float, row.groups()[1:])
    # Single precision, and sums over the ranks in another order.
    assert apart < 1e-5
    assert ours == pytest.approx(theirs, abs=2e-3) and ours_last == pytest.approx(theirs_last, abs=2e-3)
    assert ours_last < ours
