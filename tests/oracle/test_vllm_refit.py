"""A running vLLM engine, refitted from the ranks of a Megatron job: it serves what a fresh engine would.

Each engine is a program of its own (``vllm_engine.py``): four Megatron ranks publish, TP4 with the experts
spread over EP2 and ETP2, two KV heads cut across ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"

pytestmark = [pytest.mark.peer("vllm"), pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1900)]


def run(folder: Path, *args: str) -> Any:
    """What the program says. vLLM finds the backend as where shardweave is installed: by entry point."""
    info = folder / "site" / "shardweave-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardweave\nVersion: 0\n")
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["vllm.general_plugins"].items()
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {target}\n")
    path = os.pathsep.join([str(SOURCES), str(info.parent)])
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_engine.py"), str(folder), *args],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(found[0].removeprefix("RESULT "))


@pytest.mark.parametrize(
    ("model", "tp"),
    [
        ("qwen3", 1),
        ("qwen3_bf16", 1),
        ("qwen3_moe", 1),
        ("qwen3_moe", 2),
        ("deepseek_v3", 1),
        ("qwen3_next", 1),
    ],
)
def test_an_engine_serves_what_a_fresh_one_would(model: str, tp: int, tmp_path: Path) -> None:
    fresh = run(tmp_path, model, str(tp), "fresh")
    found = run(tmp_path, model, str(tp), "live")
    start = found["at start"]
    assert found["errors"] == []

    def serves(what: str, version: int | None, *, audited: bool) -> Any:
        seen = found[what]
        ranks = [(s["rank"], s["version"], s["changed"], s["error"]) for s in seen["state"]]
        assert ranks == [(4 + r, version, "", "") for r in range(tp)], what
        assert len(seen["audit"]) == tp
        for audit in seen["audit"]:
            if audited:
                assert audit["compared"] > 40 and audit["different"] == [] and audit["error"] == "", what
            else:
                assert "nothing was committed, or something was staged since" in audit["error"], what
        return seen

    serves("at start", None, audited=False)

    # The same weights once more: no logprob, no parameter, no packed copy differs.
    same = serves("the same weights", 0, audited=True)
    assert same["said"] == start["said"] and same["parameters"] == start["parameters"]

    # Other weights: exactly what an engine says that was started from them.
    other = serves("other weights", 1, audited=True)
    assert other["said"] == fresh and fresh != start["said"]

    # A derivation that fails: all sides hear of it, and what was served is served.
    assert len(found["broken"]) == 5  # the engine and four trainer ranks
    assert all("the derivation broke off at its end" in error for error in found["broken"])
    after = serves("after a failure", 1, audited=False)
    assert after["said"] == other["said"] and after["parameters"] == other["parameters"]

    again = serves("the first again", 3, audited=True)
    assert again["said"] == start["said"] and again["parameters"] == start["parameters"]

    # Why a twin: to write into the weights that an engine shows changes nothing of what it says,
    written = found["written in place"]
    if model != "deepseek_v3":  # whose latent attention computes from views of what it was loaded with
        assert written["said"] == start["said"]
    if model != "qwen3":  # of a tied model nothing is left to write to but the embedding
        assert written["parameters"] != start["parameters"]
        for audit in written["audit"]:
            assert [each.split(":")[0] for each in audit["different"]] == ["lm_head.cpu_linear"]
    # and vLLM's own reload of the same checkpoint leaves experts as they were loaded, not as they are used.
    reloaded = found["reloaded by vLLM"]
    assert all(state["changed"] and "was changed since" in state["error"] for state in reloaded["state"])
    if model in ("qwen3_moe", "deepseek_v3", "qwen3_next"):
        assert reloaded["said"] != start["said"]
        for audit in reloaded["audit"]:
            names = {each.split(":")[0].rsplit(".", 1)[1] for each in audit["different"]}
            assert names == {"w13_weight", "w2_weight"}

    healed = serves("refitted after that", 4, audited=True)
    assert healed["said"] == start["said"] and healed["parameters"] == start["parameters"]

    # What the engine remembers is no weight.
    assert found["caches"][0] == found["caches"][1]


def test_pipeline_stages_hold_what_they_loaded(tmp_path: Path) -> None:
    found = run(tmp_path, "qwen3_moe", "1", "stages")
    assert found["errors"] == []
    start, same, other, again = found["parameters"]
    assert start == same == again and all(a != b for a, b in zip(start, other, strict=True))
    assert len(found["audits"]) == 6 and all(a["compared"] > 20 for a in found["audits"])
    assert all(audit["different"] == [] and audit["error"] == "" for audit in found["audits"])
    assert [state["version"] for state in found["state"]] == [2, 2]
