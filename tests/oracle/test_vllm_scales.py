"""Block scales of float8 weights: what vLLM's own loader gave each rank, and which cuts it refuses.

`make_vllm_scales.py` asked; `tests/data/README.vllm.md` states the origin.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_words import by_case, held, ranks_of, said

from shardweave.dialects import megatron, vllm
from shardweave.errors import GeometryError
from shardweave.layout import Layout, prove
from shardweave.models import from_config

CASES = json.loads((Path(__file__).parents[1] / "data/vllm_scales.json").read_text())
LOADED = [case for case in CASES if "parameters" in case]
REFUSED = [case for case in CASES if "error" in case]


def layout_of(case: Mapping[str, Any]) -> Layout:
    model = from_config(case["config"])
    tp, more = case["deployment"]["tp"], {k: v for k, v in case["deployment"].items() if k != "tp"}
    return vllm.layout(model, vllm.mesh(tp=tp), **more)


@by_case(LOADED)
def test_scales_are_where_vllm_loaded_them(case: Mapping[str, Any]) -> None:
    layout = layout_of(case)
    prove(layout)
    for rank, recorded in ranks_of(case):
        ours = {
            name: (buffer, positions)
            for name, (buffer, positions) in layout.arrays(rank).items()
            if name.endswith("_scale_inv") or buffer.dtype == "float8_e4m3fn"
        }
        assert set(ours) == set(recorded)
        for name, (buffer, positions) in ours.items():
            entry = recorded[name]
            assert (list(buffer.shape), buffer.dtype) == (entry["shape"], entry["dtype"]), name
            if "dims" in entry:
                _, dims, tensors = held(buffer, positions)
                assert (dims, tensors) == (said(entry)[1], set(entry["of"])), name


@by_case(REFUSED)
def test_a_cut_through_a_block_is_refused_by_name(case: Mapping[str, Any]) -> None:
    with pytest.raises(GeometryError, match=r"buffer 'model\.layers\.\{layer\}\..*% block\(128\) = "):
        layout_of(case)
    model = from_config(case["config"] | {"quantization_config": None})
    prove(vllm.layout(model, vllm.mesh(tp=2), expert_parallel=False))


def test_the_recording_has_both_kinds() -> None:
    assert len(LOADED) == 3 and len(REFUSED) == 4
    entries = [e for case in LOADED for entries in case["parameters"].values() for e in entries]
    assert sum("dims" in e for e in entries) > 40
    assert {e["dtype"] for e in entries} == {"float32", "float8_e4m3fn"}


def test_megatron_has_no_place_for_scales() -> None:
    model = from_config(LOADED[0]["config"])
    with pytest.raises(GeometryError, match=r"float8_e4m3fn with scales of blocks"):
        megatron.checkpoint(model)


@pytest.mark.peer("vllm")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_live_vllm_says_the_same() -> None:
    script = Path(__file__).with_name("make_vllm_scales.py")
    assert subprocess.run([sys.executable, str(script)], timeout=240, check=False).returncode == 0
