"""The benchmark of conversions with optimizer state runs, and what it says of its own runs holds."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "universal.py"


@pytest.mark.timeout(300)
def test_universal() -> None:
    peer = find_spec("deepspeed") is not None
    options = ["--tiny", "--runs", "1", "--memory-mib", "1", *["--no-peer"] * (not peer)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(.*), \d+ MiB in (\d+) files$", done.stdout, re.M) == [
        ("ZeRO-1 TP4 DP2 to universal", "14"),  # 4 of weights, 8 of states, config.json, latest
        ("universal to ZeRO-3 DP8", "125"),  # 4 of each of 30 weights, and 5
        ("ZeRO-2 DP2 to DCP", "5"),
        ("Megatron TP4 to DCP", "6"),
    ]
    rows = re.findall(r"^shardweave +(?:[\d.]+ +){5}(\d+) +([\d.]+) +([\d.]+)$", done.stdout, re.M)
    assert len(rows) == 4 and done.stdout.count("\ncp -r ") == 4
    for peak_mib, read, written in rows:
        assert int(peak_mib) < 64
        assert 0.8 < float(read) < 3 and 0.4 < float(written) < 1.1
    if peer:
        assert len(re.findall("^ds_to_universal [12] ", done.stdout, re.M)) == 2
        # One a rank, weight and state at least; and 30 weights of 3 states and a count.
        (found,) = re.findall(r"of them (\d+) temporary; 120 tensors, equal to the bit$", done.stdout, re.M)
        assert int(found) >= 4 * 30 * 3
