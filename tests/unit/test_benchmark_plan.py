"""The benchmark of planning runs, on small models, and says what it is there to say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan.py"


def test_the_benchmark_of_planning_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(SCRIPT))["main"](["--tiny", "--repeats", "1", "--no-peer"])
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert "moved/needed" in head
    assert [row.split()[0] for row in rows] == ["experts", "trillion", "dense"]
    for row in rows:
        # Bytes moved over bytes needed, to three places.
        assert row.split()[7] == "1.000"
