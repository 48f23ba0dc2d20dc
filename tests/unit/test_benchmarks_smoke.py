"""The benchmark of conversions runs, and what it says of its own run holds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks/convert.py"


def test_convert() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--tiny", "--runs", "1", "--no-peers"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(.*), (\d+) MiB of weights$", done.stdout, re.M) == [
        ("Megatron TP4 to Hugging Face", "2"),
        ("Hugging Face to Megatron TP4", "2"),
    ]
    rows = re.findall(r"^shardweave +[\d.]+ +[\d.]+ +[\d.]+ +(\d+) +([\d.]+) +([\d.]+)$", done.stdout, re.M)
    assert len(rows) == 2 and done.stdout.count("\ncp -r ") == 2
    for peak_mib, read, written in rows:
        assert int(peak_mib) < 256
        assert 1.0 <= float(read) < 4.0 and 1.0 <= float(written) < 1.2
