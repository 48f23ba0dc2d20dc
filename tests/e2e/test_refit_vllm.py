"""The shortest end-to-end run: Megatron at TP2 into vLLM at TP2, and a weight that is not the version's.

``make e2e-refit`` runs all cases, ten versions each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from run import NEAR, Limits, Run, run_case, vllm_python

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.peer("megatron.core"),
    pytest.mark.skipif(
        vllm_python() is None,
        reason="vLLM's environment is not there: make .venv-vllm/.done, or SHARDWEAVE_VLLM_PYTHON",
    ),
]


def test_a_refitted_engine_answers_as_a_fresh_one(tmp_path: Path) -> None:
    python = vllm_python()
    assert python is not None
    run = Run(tmp_path, python, Limits())
    first, second, *spoiled = run_case(run, "qwen3-tp2", versions=3, contents=2, spoil=True)
    assert first.good and second.good and first.moved > 0
    # The check can fail: a weight of one rank was changed, and engine and trainer agree on what it makes.
    for line in spoiled:
        assert not line.equal and line.apart <= NEAR and line.moved == line.needed
