"""``shardweave probe``: a function of a user's module, named and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_driver import Run

MODULE = '''
import numpy as np
import torch

def rows(x, rank, tp):
    return x.chunk(tp)[rank]

def heads(q, k, v, rank, tp):
    """Cut each, then fuse; k and v are shared where there are more ranks than heads."""
    kv = min(tp, 2)
    share = rank // (tp // kv)
    return torch.cat([q.chunk(tp)[rank], k.chunk(kv)[share], v.chunk(kv)[share]])

def strided(x, rank, tp):
    return x[rank::tp]

def adds(x, rank, tp):
    return x.chunk(tp)[rank] + 1
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_probe.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])


def test_found(sw: Run) -> None:
    done = sw("probe", "mine_to_probe:rows", "--shape", "10,3", "--tp", "2")
    assert (done.code, done.err) == (0, "")
    assert done.out == "rank 0: [0:5] x [0:3]\nrank 1: [5:10] x [0:3]\n"
    said = json.loads(sw("probe", "mine_to_probe:strided", "--shape", "6,2", "--tp", "2", "--json").out)
    assert said == {
        "tensors": {"": [6, 2]},
        "ranks": [["[0:5:2]", "[0:2]"], ["[1:6:2]", "[0:2]"]],
        "order": [0, 1],
        "cut": [0],
        "flat": False,
    }


QKV = ("--shape", "q=32,6", "--shape", "k=8,6", "--shape", "v=8,6", "--tp", "4")
KEYS = "num_heads=8,num_kv_heads=2,head_dim=4"


def test_expected(sw: Run, golden) -> None:
    rows = ("probe", "mine_to_probe:rows", "--shape", "48,6", "--tp", "4", "--expect")
    heads = ("probe", "mine_to_probe:heads", *QKV, "--expect")
    for command in [
        (*rows, "megatron:rows"),
        (*rows, "deepspeed:column"),
        (*rows, "[0:12] | [12:24] | [24:36] | [36:48]"),
        (*heads, f"vllm:qkv,{KEYS}"),
        ("probe", "mine_to_probe:strided", "--shape", "6,2", "--tp", "2", "--expect", "[0:5:2] | [1:6:2]"),
    ]:
        done = sw(*command)
        assert (done.code, done.err) == (0, ""), command
        assert done.out.endswith("\nAs expected.\n")
    shown = []
    for command in [
        (*rows, f"vllm:qkv,{KEYS}"),
        (*rows, "megatron:gate_up"),
        (*rows, "deepspeed:glm,num_heads=4,num_kv_heads=4"),
        (*heads, f"megatron:qkv,{KEYS}"),
        ("probe", "mine_to_probe:adds", "--shape", "6,2", "--tp", "2"),
        ("probe", "mine_to_probe:nothing", "--shape", "6,2", "--tp", "2"),
    ]:
        done = sw(*command)
        assert done.code == 1, command
        shown.append(done.err)
    golden("probe_findings", "\n".join(shown))
