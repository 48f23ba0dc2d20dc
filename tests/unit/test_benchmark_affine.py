"""The benchmark of affine maps runs, on few blocks, and says what it is there to say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "affine.py"


def test_the_benchmark_of_maps_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT))["main"](["--tiny", "--repeats", "1", "--no-peer"])
    _, head, *rows, fit, last = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["blocks", "read", "write", "layout", "plan"]
    assert [row.split()[0] for row in rows] == ["64", "128"]
    assert fit.split()[0] == "exponent" and len(fit.split()) == 7
    assert last.startswith("checkpoint of 18 weights") and last.endswith("deepspeed - ms")
