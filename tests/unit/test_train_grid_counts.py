"""How many communicators a rank makes at the degrees of large runs, beside what Megatron's ranks make."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardweave.train.parallel import Parallel

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "groups.py"


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(
    ("parallel", "upstream", "most", "mean", "total"),
    [
        (Parallel(tp=8, cp=2, pp=8, dp=8, ep=8), 2680, 9, 8.25, 1161),
        (Parallel(tp=8, cp=2, pp=16, dp=64, ep=64), 32832, 11, 10.125, 14993),
    ],
)
def test_a_rank_makes_at_most_a_tenth_of_the_calls(
    benchmark: dict[str, Any], parallel: Parallel, upstream: int, most: int, mean: float, total: int
) -> None:
    """W=1024 TP8 CP2 PP8 EP8 ETP1 and W=16384 TP8 CP2 PP16 EP64 ETP1."""
    found = benchmark["counted"]({"language": parallel})
    assert found.upstream == upstream
    assert (found.most, found.mean, found.total) == (most, mean, total)
    assert found.most <= found.upstream / 10
    # Which a rank is in, by hand: each list once. At 16,384 ranks there are 64 dp ranks and 64 ranks of
    # experts, of which edp is 16; at 1,024 ep is tp, and edp is cp and dp together.
    tp, cp, dp, pp, everybody = (parallel.mesh.group(0, *axes) for axes in AXES)
    wanted = {tp, cp, dp, pp, everybody}
    wanted |= {parallel.mesh.group(0, *axes) for axes in (("tp", "cp"), ("tp", "cp", "dp"), ("cp", "dp"))}
    wanted |= {parallel.mesh.group(0, "ep"), parallel.mesh.group(0, "edp"), (pp[0], pp[-1])}
    assert len(wanted) == most


AXES = (("tp",), ("cp",), ("dp",), ("pp",), ("tp", "cp", "dp", "pp"))


def test_a_second_grid_costs_what_it_adds(benchmark: dict[str, Any]) -> None:
    """Half of the ranks are on both: what the grids have in common is made once."""
    language, vision = Parallel(tp=2, cp=2, dp=2), Parallel(tp=2, dp=2, offset=4)
    both = benchmark["counted"]({"language": language, "vision": vision})
    alone = [benchmark["counted"]({"model": of}) for of in (language, vision)]
    # tp of the encoder are pairs of the language model's, its dp are pairs of cp, and all of it is a
    # document; the ranks of both together are those of the language model.
    assert [one.total for one in alone] == [4 + 4 + 4 + 2 + 2 + 1, 2 + 2 + 1]
    assert both.total == alone[0].total and both.most == alone[0].most
    assert both.upstream == sum(one.upstream for one in alone)


def test_the_counts_need_no_torch_and_little_time() -> None:
    script = f"""
import runpy, sys
runpy.run_path({str(SCRIPT)!r})["main"]([])
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["upstream", "most", "mean", "ratio", "in", "all", "seconds"]
    wanted = [
        ("1,024 ranks", "2,680", "9", "8.250", "1,161"),
        ("16,384 ranks", "32,832", "11", "10.125", "14,993"),
    ]
    for row, (name, upstream, most, mean, total) in zip(rows, wanted, strict=False):
        assert row.startswith(name)
        figures = row[40:].split()
        assert (figures[0], figures[1], figures[2], figures[4]) == (upstream, most, mean, total)
        assert float(figures[5]) < 30
    assert len(rows) == 3


def test_small_worlds(benchmark: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    benchmark["main"](["--tiny"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row[:40].strip() for row in rows] == list(benchmark["TINY"])
