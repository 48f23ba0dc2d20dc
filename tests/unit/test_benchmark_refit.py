"""The benchmarks of fingerprints and manifests run, on small sizes, and say what they are there to say."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def lines_of(script: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    runpy.run_path(str(FOLDER / script))["main"](["--tiny", "--repeats", "1"])
    return capsys.readouterr().out.splitlines()[1:]


def test_the_benchmark_of_fingerprints_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows, last = lines_of("fingerprint.py", capsys)
    assert "time over a copy" in head
    assert rows[0].startswith("torch copy_") and rows[0].split()[-1] == "1.00" and len(rows) == 24
    assert all(float(row.split()[-2]) > 0 for row in rows)
    assert last.startswith("verify.sums of ") and last.endswith(" us a copy")


def test_the_benchmark_of_manifests_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    head, *rows = lines_of("manifest.py", capsys)
    assert head.split()[-2:] == ["peer/parts", "peer/whole"]
    assert [row.split()[0] for row in rows] == ["dense", "experts"]


@pytest.mark.peer("modelexpress", "modelexpress_rl")
def test_manifests_are_at_least_twenty_times_smaller_than_the_peer_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On models that are a hundred times smaller than real ones, where the ratio is smallest."""
    assert importlib.util.find_spec("modelexpress")
    for row in lines_of("manifest.py", capsys)[1:]:
        assert all(int(ratio) >= 20 for ratio in row.split()[-2:]), row
