"""``shardweave show``: the pictures that a command draws, in the terminal and as a file."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

from cli_driver import Run

Checkpoint = Callable[[str], tuple[Path, Path]]
QKV = ("--select", "linear_qkv.weight")


def test_rows_of_ranks(sw: Run, checkpoint: Checkpoint) -> None:
    """8 query heads over 2 KV heads at TP 4: half of the ranks own no K and no V."""
    _, config = checkpoint("mc_gqa_tp4")
    done = sw("show", config, "--as", "megatron:tp=4", *QKV)
    assert (done.code, done.err) == (0, "")
    assert done.out.count("no k, no v") == 2
    assert "q heads 0-2" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_where_rows_go(sw: Run, checkpoint: Checkpoint) -> None:
    _, config = checkpoint("mc_gqa_tp4")
    layouts = ("--as", "megatron:tp=4", "--to", "vllm:tp=2")
    done = sw("show", config, *layouts, *QKV)
    assert done.code == 0
    assert "megatron" in done.out
    assert "vllm" in done.out


def test_stored(sw: Run, checkpoint: Checkpoint) -> None:
    src, config = checkpoint("mc_gqa_tp4")
    done = sw("show", src, "--config", config, *QKV)
    assert done.code == 0
    assert "layers 0-3" in done.out


def test_svg(sw: Run, checkpoint: Checkpoint, tmp_path: Path) -> None:
    src, config = checkpoint("mc_gqa_tp4")
    for number, where in enumerate([(), ("--as", "vllm:tp=2"), ("--as", "megatron:tp=4", "--to", "hf")]):
        path = tmp_path / f"{number}.svg"
        select = ("--select", "q") if number else QKV
        done = sw("show", src, "--config", config, *where, *select, "--svg", path)
        assert (done.code, done.out) == (0, "")
        assert str(path) in done.err
        assert ET.parse(path).getroot().tag.endswith("svg")


def test_what_is_not_there(sw: Run, checkpoint: Checkpoint) -> None:
    src, config = checkpoint("mc_gqa_tp4")
    done = sw("show", src, "--config", config, "--select", "nothing")
    assert (done.code, done.out) == (1, "")
    assert "'nothing'" in done.err
