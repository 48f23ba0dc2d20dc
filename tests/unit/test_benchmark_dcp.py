"""The benchmark beside torch.distributed.checkpoint runs, and both sides load what they saved."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dcp.py"


@pytest.mark.timeout(300)
def test_dcp() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", "--runs", "1", "--no-fsync", "--ranks", "2"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w[\w ]*), ([\w ]+?) +(?:[\d.]+ +){5}(\d+) +([\d.]+) +([\d.]+)$", done.stdout, re.M)
    assert [(what, who) for what, who, *_ in rows] == [
        ("save", "torch"), ("save", "shardweave"),
        ("load", "torch"), ("load", "shardweave"), ("load", "no digests"),
        ("load by columns", "torch"), ("load by columns", "shardweave"),
    ]  # fmt: skip
    for what, _, peak_mib, read, written in rows:
        assert int(peak_mib) < 256
        assert 1.0 <= float(written) < 1.5 if what == "save" else float(read) >= 1.0
    assert re.search(r"^on disk, shardweave +4 files, 1\.0\d+ of the state$", done.stdout, re.M)
