"""One step of megatron-core on CPU processes: loss, losses of tokens, and every gradient by its HF name.

Run as a script, once a rank, by ``rank_processes.run``. A case names a folder in Hugging Face form, degrees
and tokens; weights come to Megatron's parameters by our plan, and gradients go back by our layout:

    {"name", "hf": folder, "tp", "dp", "ep", "tokens": (batch, 1 + length), "weights": (batch, length)}

The loss is ``sum(weights * losses) / sum(weights)`` of the whole batch, of which each data rank has a part.
For each case a rank writes ``OUT/<name>.<rank>.safetensors``, gradients under Megatron's names, and
``OUT/<name>.<rank>.json``; ``read`` puts those of all ranks together.

What is Megatron's: the model, its forward and backward, and its sum over TP ranks of the gradients of the
norms of queries and keys. What is not: data ranks sum by plain all-reduces, where Megatron has buckets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rank_processes import Case, play_all
from safetensors.numpy import load_file, save_file

from shardweave.dialects import hf, megatron
from shardweave.layout import Layout
from shardweave.models import Model, from_config
from shardweave.plan import assemble, empty, plan, simulate

Arrays = dict[str, NDArray[Any]]


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def tensors_of(folder: Path) -> Arrays:
    """All tensors of a folder in Hugging Face form."""
    files = sorted(folder.glob("model*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


def layout_of(model: Model, case: Case) -> Layout:
    """What Megatron's ranks hold: experts whole and spread over ``ep``."""
    mesh = megatron.mesh(tp=case["tp"], dp=case["dp"], ep=case["ep"], etp=1)
    return megatron.layout(model, mesh, spec="local", experts="sequential", vocab_divisor=1)


def sizes_of(config: dict[str, Any]) -> dict[str, Any]:
    """A qwen3, or a qwen3_moe whose layers are all sparse, as arguments of Megatron's TransformerConfig.

    Megatron takes the softmax over the chosen experts, which is what ``norm_topk_prob`` comes to.
    """
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "ffn_hidden_size": config["intermediate_size"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if config["model_type"] == "qwen3_moe":
        sizes |= {
            "num_moe_experts": config.get("num_local_experts") or config["num_experts"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    return sizes


# --- a rank -------------------------------------------------------------------------------------


def build(config: dict[str, Any], case: Case) -> Any:
    """The GPTModel of this rank, its parameters NaN."""
    from megatron_cpu import model_of

    return model_of(
        sizes_of(config),
        vocab=config["vocab_size"],
        tp=case["tp"],
        ep=case["ep"],
        etp=1 if config["model_type"] == "qwen3_moe" else None,
        rotary_base=config["rope_parameters"]["rope_theta"],
    )


class Step:
    """Forward, backward and the sums of gradients, of this rank's part of a batch."""

    def __init__(self, module: Any, tokens: Any, weights: Any) -> None:
        """Take this rank's part of the tokens (batch, 1 + sequence) and of the weights of their losses."""
        import torch
        from megatron.core import parallel_state

        self.module, self.group = module, parallel_state.get_data_parallel_group()
        dp, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        own = tokens.chunk(size)[dp]
        self.inputs, self.labels = own[:, :-1].contiguous(), own[:, 1:].contiguous()
        self.weights = weights.chunk(size)[dp] / weights.sum()
        length = self.inputs.shape[1]
        self.positions = torch.arange(length)[None].expand_as(self.inputs)
        self.mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        # What finalize_model_grads asks of a model that Megatron's DDP does not wrap.
        module.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        # An expert gets the tokens of all ranks of ep; it is summed over the ranks that hold it too.
        self.sums = [(self.group, [p for p in module.parameters() if getattr(p, "allreduce", True)])]
        experts = [p for p in module.parameters() if not getattr(p, "allreduce", True)]
        self.sums += [(parallel_state.get_expert_data_parallel_group(), experts)]

    def forward_backward(self) -> tuple[Any, Any]:
        """The loss of all ranks, and this rank's losses of tokens; gradients are in the parameters."""
        import torch.distributed as dist
        from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

        losses = self.module(self.inputs, self.positions, self.mask, labels=self.labels)
        loss = (losses * self.weights).sum()
        loss.backward()
        _allreduce_non_tensor_model_parallel_grads([self.module], self.module.config)
        for group, parameters in self.sums:
            for parameter in parameters if group.size() > 1 else ():
                dist.all_reduce(parameter.grad, group=group)
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return whole, losses.detach()


def play(case: Case, out: Path, rank: int) -> None:
    import torch
    from megatron.core import parallel_state

    folder = Path(case["hf"])
    config = config_of(folder)
    module = build(config, case)
    model = from_config(config)
    live = layout_of(model, case)
    moves, into = plan(hf.layout(model), live), empty(live, np.float32, fill=np.nan)
    held = simulate(moves, {0: tensors_of(folder)}, into=into)
    parameters = dict(module.named_parameters())
    assert sorted(parameters) == sorted(held[rank])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(held[rank][name]))
            assert bool(parameter.isfinite().all()), name
    step = Step(module, torch.tensor(case["tokens"]), torch.tensor(case["weights"]))
    loss, losses = step.forward_backward()
    save_file({n: p.grad.numpy() for n, p in parameters.items()}, out / f"{case['name']}.{rank}.safetensors")
    report = {
        "loss": loss.item(),
        "losses": losses.tolist(),
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
    }
    (out / f"{case['name']}.{rank}.json").write_text(json.dumps(report))


# --- all ranks together -------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What a step came to.

    Attributes:
        loss: Of the whole batch.
        losses: Of each token, (batch, sequence).
        gradients: Of the loss, by HF name.
    """

    loss: float
    losses: NDArray[Any]
    gradients: Arrays


def read(case: Case, out: Path, *, layout: Layout | None = None) -> Trained:
    """Put together what the ranks wrote, by default Megatron's.

    Replicas have the same gradients and losses, bit for bit, or it raises.
    """
    live = layout or layout_of(from_config(config_of(Path(case["hf"]))), case)
    ranks = {rank: load_file(out / f"{case['name']}.{rank}.safetensors") for rank in live.mesh.ranks}
    reports = [json.loads((out / f"{case['name']}.{rank}.json").read_text()) for rank in live.mesh.ranks]
    parts = {report["dp"]: report["losses"] for report in reports}
    assert all(report["losses"] == parts[report["dp"]] for report in reports), "replicas"
    (loss,) = {report["loss"] for report in reports}
    gradients = {}
    for tensor, values in assemble(live, ranks).items():
        gradients |= zip(tensor.names(), values.reshape(-1, *tensor.shape), strict=True)
    return Trained(loss, np.concatenate([parts[dp] for dp in sorted(parts)]), gradients)


if __name__ == "__main__":
    from megatron_cpu import replace_cuda

    replace_cuda()
    play_all(play)
