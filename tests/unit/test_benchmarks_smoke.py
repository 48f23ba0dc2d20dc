"""The benchmarks of conversions and of refits run, and what they say of their own runs holds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_convert() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "convert.py"), "--tiny", "--runs", "1", "--no-peers"],
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


@pytest.mark.timeout(300)
def test_refit() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "refit.py"), "--tiny"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+, \w+) +\d+ +[\d.]+x +[\d.]+x +([\d.]+) ", done.stdout, re.M)
    names = [f"{model}, {transport}" for model in ("dense", "experts") for transport in ("gloo", "shared")]
    assert rows == [(name, "1.000") for name in names]
    assert "bytes moved over needed: 1.000" in done.stdout


def test_lint() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "lint.py"), "--tiny", "--semgrep", "", "--ast-grep", ""],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {line[:26].rstrip(): line[26:] for line in done.stdout.splitlines()}
    assert rows["form"].split() == ["is", "one", "shardweave", "ruff"]
    assert rows["module"].split() == ["yes", "yes", "yes"] and rows["star import"].split() == [
        "yes",
        "yes",
        "-",
    ]
    assert rows["for type checkers only"].split() == ["wrongly"], "of ruff"
    ours = {form: row[:19].split() for form, row in rows.items() if form not in ("form", "")}
    assert len(ours) > 17 and all(words in (["yes", "yes"], []) for form, words in ours.items()
                                  if not form.startswith("without")), ours  # fmt: skip
