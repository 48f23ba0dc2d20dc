"""Heads for further tokens: the plain decoder, which the runtime is compared with, against megatron-core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_decoder import objective
from rank_processes import Case, run
from safetensors.numpy import load_file, save_file

from shardweave.train.maths import maths
from shardweave.train.mtp import with_heads

SCRIPT = Path(__file__).with_name("train_mtp_megatron.py")
MTP, WEIGHT = 2, 0.3
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 28,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    "tie_word_embeddings": False,
    "dtype": "float32",
}
DENSE = {key: value for key, value in MOE.items() if "moe" not in key and "expert" not in key}
DENSE |= {"model_type": "qwen3", "tie_word_embeddings": True}
del DENSE["norm_topk_prob"]
CONFIGS = {"moe": MOE, "dense, tied": DENSE}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Three documents of one length, each with another part that counts."""
    folder, found = tmp_path_factory.mktemp("weights"), {}
    chance = np.random.default_rng(7)
    for name, config in CONFIGS.items():
        weights = {}
        for tensor in with_heads(maths(config), MTP).model.tensors:
            for each in tensor.names():
                values = chance.normal(size=tensor.shape) * 0.25
                weights[each] = (values + (len(tensor.shape) == 1)).astype(np.float32)
        save_file(weights, folder / f"{name}.safetensors")
        tokens = chance.integers(config["vocab_size"], size=(3, 18))
        mask = chance.random((3, 18)) < np.array([0.9, 0.5, 0.3])[:, None]
        found[name] = {
            "name": name,
            "config": config,
            "weights": str(folder / f"{name}.safetensors"),
            "tokens": tokens.tolist(),
            "mask": mask.tolist(),
            "mtp": MTP,
            "mtp_weight": WEIGHT,
        }
    return found


@pytest.fixture(scope="module")
def out(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Megatron's gradients are."""
    folder = tmp_path_factory.mktemp("out")
    run(SCRIPT, list(cases.values()), folder, world_size=1, limit_s=240, preload="megatron.core")
    return folder


def plain(case: Case, dtype: torch.dtype) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of all heads, and the gradients."""
    weights = {
        name: torch.from_numpy(value).to(dtype).requires_grad_()
        for name, value in load_file(case["weights"]).items()
    }
    means: list[torch.Tensor] = []
    ids, masks = list(torch.tensor(case["tokens"])), list(torch.tensor(case["mask"]))
    loss, _ = objective(ids, masks, weights, case["config"], mtp_weight=WEIGHT, means=means)
    loss.backward()
    main = loss - sum(WEIGHT / MTP * mean for mean in means)
    grads = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in weights.items()
    }
    return [value.item() for value in (main, *means)], grads


@pytest.mark.peer("megatron.core")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CONFIGS)
def test_heads_are_megatrons_up_to_rounding(name: str, cases: dict[str, Case], out: Path) -> None:
    losses, grads = plain(cases[name], torch.float64)
    theirs = load_file(out / f"{name}.safetensors")
    said = json.loads((out / f"{name}.json").read_text())
    # Seen: losses 6.0e-7 apart, gradients 2.0e-6, in fp32.
    assert np.abs(np.array(said) - losses).max() < 1e-5 * min(losses)
    assert set(theirs) == set(grads)
    worst = 0.0
    for key, true in grads.items():
        gap = (torch.from_numpy(theirs[key]).double() - true).abs().max()
        worst = max(worst, (gap / true.abs().max()).item())
        assert gap <= 1e-5 * true.abs().max(), (key, gap, true.abs().max())
    print(name, np.abs(np.array(said) - losses).max(), worst)
