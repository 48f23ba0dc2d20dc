"""The picture of a bridge: every row of the plan is in one band, and bands fit the boxes at their ends."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from shardweave.layout import Mesh
from shardweave.plan import Plan, plan
from shardweave.show.bridge import Lane, bridge_drawing, bridge_picture, lanes
from shardweave.train.bridge import rows_on

HERE, THERE = Mesh((("dp", 3),)), Mesh((("tp", 2), ("cp", 2)), offset=2)
RIBBON = re.compile(
    r'd="M(\S+) (\S+)C\S+ \S+ \S+ \S+ (\S+) (\S+)L\S+ (\S+)C\S+ \S+ \S+ \S+ \S+ (\S+)Z".*?<title>(\d+) rows '
    r"of rank (\d+) (?:to rank (\d+)|stay on it)"
)
BOX = re.compile(r'<rect x="(\S+)" y="(\S+)" width="\S+" height="(\S+)" class="\S+" rx="5"><title>rank (\d+)')


def of(num_rows: int) -> Plan:
    """Rows in turn over three ranks, and in stretches over four others, of which one is the same."""
    rows = np.arange(num_rows)
    src = rows_on(HERE, ("dp",), lambda d: rows[d::3], num_rows=num_rows, width=2)
    dst = rows_on(
        THERE, ("tp", "cp"), lambda t, c: np.array_split(rows, 4)[t + 2 * c], num_rows=num_rows, width=2
    )
    return plan(src, dst)


def test_lanes_are_the_rows_by_sender_and_receiver() -> None:
    wanted = {
        (row % 3, 2 + next(i for i, part in enumerate(np.array_split(np.arange(22), 4)) if row in part))
        for row in range(22)
    }
    found = lanes(of(22))
    assert {(lane.src, lane.dst) for lane in found} == wanted
    assert sum(lane.count for lane in found) == 22
    assert Lane(2, 2, 2) in found  # rows 2 and 5 of 0 to 5


@pytest.mark.parametrize("num_rows", [4, 22, 301])
def test_bands_fit_the_boxes(num_rows: int) -> None:
    """Of each box the bands are as many rows as it has, one below the other, and none leaves it."""
    shapes = "\n".join(bridge_drawing(of(num_rows), names=("here", "there")).shapes)
    boxes = {
        (float(x) > 300, int(rank)): (float(y), float(y) + float(h)) for x, y, h, rank in BOX.findall(shapes)
    }
    assert len(boxes) == 7
    ends: dict[tuple[bool, int], list[tuple[float, float]]] = {}
    total = 0
    for _, top, _, top2, bottom2, bottom, count, src, dst in RIBBON.findall(shapes):
        total += int(count)
        ends.setdefault((False, int(src)), []).append((float(top), float(bottom)))
        ends.setdefault((True, int(dst or src)), []).append((float(top2), float(bottom2)))
    assert total == num_rows
    for key, bands in ends.items():
        low, high = boxes[key]
        assert bands[0][0] >= low - 0.11 and bands[-1][1] <= high + 0.11, key
        assert all(abs(a[1] - b[0]) < 0.11 for a, b in itertools.pairwise(bands)), key


def test_a_rank_of_both_grids_is_said_to_be_and_rows_that_stay() -> None:
    drawn = bridge_picture(of(22), names=("here", "there"), title="Two")
    ET.fromstring(drawn)
    assert drawn.count("rank 2, in both") == 2 and drawn.count("in both") == 2
    assert "2 stay" in drawn and "tp 1, cp 0" in drawn and "dp 3: ranks 0-2" in drawn
