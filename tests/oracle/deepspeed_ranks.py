"""One rank of a model that DeepSpeed's AutoTP has cut: its state, and what it computes.

A case has a ``name``, a ``config``, a ``way`` (``inference`` or ``training``), and what is ``said`` of it: a
``grain``, ``vocab_parallel``. Written are the state of the whole model and of the rank, its classes, the
largest difference of logits from those of the whole model, and what was refused or failed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from rank_processes import Case, play_all
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

# Its own all-reduce in shared memory is compiled at the first use, and is not what is asked about.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def build(config: dict[str, Any]) -> torch.nn.Module:
    """A model of random weights, the same on every rank; no two elements of it are equal but by accident."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def cut(model: torch.nn.Module, way: str, said: dict[str, Any]) -> torch.nn.Module:
    tp = dist.get_world_size()
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank()), "WORLD_SIZE": str(tp)}
    deepspeed.set_autotp_mode(training=way == "training")
    grain = said.get("grain", 1)
    if way == "inference":
        config = {"tp_size": tp, "tp_grain_size": grain}
        return deepspeed.init_inference(
            model, tensor_parallel=config, dtype=torch.float32, replace_with_kernel_inject=False
        ).module
    config = {"autotp_size": tp, "tp": {"tp_grain_size": grain}}
    if "vocab_parallel" in said:
        config["vocab_parallel_lm_head"] = said["vocab_parallel"]
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1, "tensor_parallel": config}
    )
    return engine.module


def play(case: Case, out: Path, rank: int) -> None:
    model = build(case["config"])
    whole = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
    ids = torch.arange(14).reshape(2, 7) % case["config"]["vocab_size"]
    # Bloom's slopes are cut where a mask is given, and nowhere else.
    seen = torch.ones_like(ids)
    with torch.no_grad():
        expected = model(ids, attention_mask=seen).logits
    said: dict[str, Any] = {}
    held: dict[str, torch.Tensor] = {}
    try:
        found = cut(model, case["way"], case["said"]).eval()
    except Exception as error:
        said["refused"] = f"{type(error).__name__}: {error}"
    else:
        held = {name: value.clone().contiguous() for name, value in found.state_dict().items()}
        said["classes"] = {name: type(module).__name__ for name, module in found.named_modules()}
        try:
            with torch.no_grad():
                logits = found(ids, attention_mask=seen).logits
            said["difference"] = float((logits - expected).abs().max())
        except Exception as error:
            said["failed"] = f"{type(error).__name__}: {error}"
    dist.barrier()
    name = f"{case['name']}-{rank}"
    save_file(held, out / f"{name}.safetensors")
    (out / f"{name}.json").write_text(json.dumps(said))
    if not rank:
        save_file(whole, out / f"{case['name']}-whole.safetensors")


if __name__ == "__main__":
    play_all(play)
