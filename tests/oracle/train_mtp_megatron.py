"""One step of megatron-core with layers for further tokens, on one CPU process.

Run as a script by ``rank_processes.run``. A case names a config, a file of weights by HF name, tokens (batch,
1 + length) and which of them count:

    {"name", "config", "weights": file, "tokens": (batch, 1 + length), "mask": the same, "mtp", "mtp_weight"}

It writes ``OUT/<name>.safetensors``, gradients by HF name, and ``OUT/<name>.json``, the loss of the next
token and of each further one.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rank_processes import Case, play_all
from safetensors.numpy import load_file, save_file
from train_megatron import sizes_of

from shardweave.dialects import hf, megatron
from shardweave.plan import assemble, empty, plan, simulate
from shardweave.train.maths import maths
from shardweave.train.mtp import with_heads


def play(case: Case, out: Path, rank: int) -> None:
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron_cpu import model_of

    config = case["config"]
    sizes = {"mtp_num_layers": case["mtp"], "mtp_loss_scaling_factor": case["mtp_weight"]}
    module = model_of(
        sizes_of(config) | sizes,
        vocab=config["vocab_size"],
        tp=1,
        etp=1 if config["model_type"] == "qwen3_moe" else None,
        tied=config["tie_word_embeddings"],
        rotary_base=config["rope_parameters"]["rope_theta"],
    )
    model = with_heads(maths(config), case["mtp"]).model
    mesh = megatron.mesh(tp=1, ep=1, etp=1)
    live = megatron.layout(model, mesh, spec="local", experts="sequential", vocab_divisor=1)
    into = empty(live, np.float32, fill=np.nan)
    held = simulate(plan(hf.layout(model), live), {0: load_file(case["weights"])}, into=into)[rank]
    parameters = dict(module.named_parameters())
    assert sorted(parameters) == sorted(held)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(held[name]))
    tokens, mask = torch.tensor(case["tokens"]), torch.tensor(case["mask"])
    length = tokens.shape[1] - 1
    counted = mask[:, 1:].float()
    MTPLossLoggingHelper.tracker.clear()
    losses = module(
        tokens[:, :-1].contiguous(),
        torch.arange(length)[None].expand(len(tokens), -1),
        torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=counted,
    )
    loss = (losses * counted).sum() / counted.sum()
    loss.backward()
    grads = {name: parameter.grad.numpy() for name, parameter in parameters.items()}
    found = {}
    for tensor, values in assemble(live, {rank: grads}).items():
        found |= zip(tensor.names(), values.reshape(-1, *tensor.shape), strict=True)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in found.items()},
        out / f"{case['name']}.safetensors",
    )
    report = [loss.item(), *MTPLossLoggingHelper.tracker["values"].tolist()]
    (out / f"{case['name']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    from megatron_cpu import replace_cuda

    replace_cuda()
    play_all(play)
