"""megatron-core's optimizers on CPU processes: steps, checkpoints, and what each rank holds of the state.

Run as a script, once a rank, by ``rank_processes.run`` with ``megatron_adam`` preloaded. A case builds a
model of ``megatron_cpu.MODELS`` or of a DeepSeek ``config``, with bf16 weights, loads ``checkpoint`` where
there is one, makes ``pushed`` steps with made gradients or trains ``steps``, saves to ``save`` where that is
given, and trains ``more``.
Every rank writes ``OUT/<name>.<rank>.safetensors``, its weights and flat shards of master and moments before
the last of these, and ``OUT/<name>.<rank>.json``: losses, and of which stretch of its weight a shard is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_cpu import MODELS, model_of, replace_cuda
from rank_processes import play_all

BATCH, LENGTH = 4, 16


def replace_devices() -> None:
    """torch's factories put on the CPU what Megatron's optimizer asks of a GPU by name."""
    import torch

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "zeros", "ones", "empty", "full", "zeros_like", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    kind = torch.Tensor.type

    def of_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = of_cuda  # type: ignore[method-assign]

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_stream(self, *_: Any) -> None: ...

    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: Stream()  # type: ignore[assignment,return-value]


class Chunks:
    """The chunks of a rank where its layers are in several, in place of the wrapper of its only one."""

    def __init__(self, wrapped: list[Any]) -> None:
        import torch

        self.wrapped, self.module = wrapped, torch.nn.Module()
        for number, one in enumerate(wrapped):
            self.module.add_module(f"chunk{number}", one.module)


def stored_of(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """What a rank stores of its weights, chunk by chunk where it has several."""
    chunks = dict(model.named_children())
    if "chunk0" not in chunks:
        return {"model": model.sharded_state_dict(metadata=metadata)}
    return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in chunks.items()}


def built(case: dict[str, Any]) -> tuple[Any, Any]:
    """The model in its data-parallel wrapper, with seeded weights, and its optimizer."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    made = latent_model(case) if "config" in case else plain_model(case)
    distributed = case.get("distributed", True)
    every = []
    for model in made if isinstance(made, list) else [made]:
        if case.get("one_dtype"):
            model.bfloat16()  # the norms of the local spec are fp32 otherwise
        every.append(
            DistributedDataParallel(
                model.config,
                DistributedDataParallelConfig(
                    use_distributed_optimizer=distributed,
                    overlap_grad_reduce="bucket_size" in case,
                    bucket_size=case.get("bucket_size"),
                    grad_reduce_in_fp32=True,
                ),
                model,
            )
        )
    wrapped = every[0] if case.get("vpp") is None else Chunks(every)
    with torch.no_grad():
        for name, parameter in wrapped.module.named_parameters():
            values = seeded(name, parameter, 5) * 0.05
            parameter.copy_(values + 1 if parameter.dim() == 1 else values)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=3e-3, weight_decay=0.1, clip_grad=1.0, bf16=True,
            params_dtype=torch.bfloat16, use_distributed_optimizer=distributed,
        ),
        every,
    )  # fmt: skip
    return wrapped, optimizer


def latent_model(case: dict[str, Any]) -> Any:
    """A model with latent attention; its buffers are 0."""
    import torch
    from megatron_mla_cpu import build

    model = build(case["config"], tp=case["tp"], pp=case.get("pp", 1), ep=case.get("ep", 1))
    with torch.no_grad():
        for value in model.buffers():
            value.zero_()
    return model


def plain_model(case: dict[str, Any]) -> Any:
    """A model of ``megatron_cpu.MODELS``, its chunks where it has several."""
    import torch

    still = dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)
    unfused = dict.fromkeys(("masked_softmax_fusion", "bias_dropout_fusion"), False)
    sizes = {**MODELS[case["kind"]], "params_dtype": torch.bfloat16, "bf16": True, **still, **unfused}
    vocab, etp = sizes.pop("vocab"), None
    if case["kind"] == "moe":
        sizes |= {
            "moe_ffn_hidden_size": sizes["ffn_hidden_size"],
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
        etp = 1
    form = {"vocab": vocab, "tp": case["tp"], "pp": case.get("pp", 1), "ep": case.get("ep", 1), "etp": etp}
    return model_of(sizes, **form, tied=case.get("tied", False), vpp=case.get("vpp"))


def is_cut(name: str, parameter: Any) -> bool:
    """Whether tensor-parallel ranks cut it; experts say so too, and are whole here."""
    return getattr(parameter, "tensor_model_parallel", False) and "local_experts" not in name


def seeded(name: str, parameter: Any, number: int) -> Any:
    """Values that are those of no other parameter, and of all ranks that hold the same one."""
    import torch
    from megatron.core import parallel_state

    place: list[Any] = [number, name, parallel_state.get_pipeline_model_parallel_rank()]
    if getattr(parameter, "shared_embedding", False):
        place = [number]
    if is_cut(name, parameter):
        place.append(parallel_state.get_tensor_model_parallel_rank())
    if "local_experts" in name:
        place.append(parallel_state.get_expert_model_parallel_rank())
    generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
    return torch.randn(parameter.shape, generator=generator)


def push(wrapped: Any, optimizer: Any, number: int) -> None:
    """A step with made gradients, for jobs whose forward pass would need a pipeline."""
    for name, parameter in wrapped.module.named_parameters():
        parameter.main_grad.copy_(seeded(name, parameter, number))
    optimizer.step()


def step(case: dict[str, Any], wrapped: Any, optimizer: Any, number: int) -> float:
    """A step on a batch that depends on its number alone; its loss over the whole batch."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads  # sums norms over tp too

    generator = torch.Generator().manual_seed(100 + number)
    tokens = torch.randint(0, MODELS[case["kind"]]["vocab"], (BATCH, LENGTH + 1), generator=generator)
    share = BATCH // parallel_state.get_data_parallel_world_size()
    mine = tokens[parallel_state.get_data_parallel_rank() * share :][:share]
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    places = torch.arange(LENGTH)[None].expand(share, -1)
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    loss = wrapped(mine[:, :-1].contiguous(), places, mask, labels=mine[:, 1:].contiguous()).float().mean()
    loss.backward()
    finalize_model_grads([wrapped])
    optimizer.step()
    total = loss.detach().double()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total) / parallel_state.get_data_parallel_world_size()


def held(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's weights and flat shards of states, and by name where each is of its weight."""
    tensors, ranges = {}, {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach().clone().contiguous()
        dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
        cut = [dim, stride] if is_cut(name, parameter) else None
        ranges[name] = {"shape": list(parameter.shape), "cut": cut}
    for one in optimizer.chained_optimizers:
        if hasattr(one, "model_float16_groups"):
            pairs = [
                *zip(one.model_float16_groups, one.shard_fp32_from_float16_groups, strict=True),
                *zip(one.model_fp32_groups, one.shard_fp32_groups, strict=True),
            ]
        else:
            pairs = [
                *zip(one.float16_groups, one.fp32_from_float16_groups, strict=True),
                *((group, group) for group in one.fp32_from_fp32_groups),
            ]
        for weights, mains in pairs:
            for weight, main in zip(weights, mains, strict=True):
                if main is None:
                    continue
                name = names[weight]
                if hasattr(one, "model_float16_groups"):
                    at = one._get_model_param_range_map(weight)["param"]
                    ranges[name] |= {"start": at.start, "stop": at.end}
                else:
                    ranges[name] |= {"start": 0, "stop": weight.numel()}
                tensors[f"master.{name}"] = main.detach().clone().reshape(-1)
                for state in ("exp_avg", "exp_avg_sq"):
                    tensors[f"{state}.{name}"] = one.optimizer.state[main][state].clone().reshape(-1)
    return tensors, ranges


def save_older(case: dict[str, Any], model: Any, optimizer: Any) -> None:
    """A folder for each rank of the model, as Megatron-LM's training script saves them."""
    import argparse
    import random

    import numpy as np
    import torch
    from megatron.core import parallel_state

    tp, pp, ep = case["tp"], case.get("pp", 1), case.get("ep", 1)
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    folder = Path(case["save"]) / name
    if parallel_state.get_expert_data_parallel_rank() == 0:
        folder.mkdir()
        rng = [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
            }
        ]
        args = argparse.Namespace(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            data_parallel_size=4 // tp // pp,
            overlap_grad_reduce="bucket_size" in case,
            ddp_bucket_size=case.get("bucket_size"),
            params_dtype=torch.bfloat16,
        )
        whole = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": 2,
            "model": model.state_dict_for_save_checkpoint(),
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": {"max_lr": 3e-3, "num_steps": 8},
            "rng_state": rng,
        }
        torch.save(whole, folder / "model_optim_rng.pt")
    if case.get("distributed", True):
        torch.distributed.barrier()
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    torch.distributed.barrier()


def play(case: dict[str, Any], out: Path, rank: int) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.api import CheckpointException  # no Exception by its own choice

    wrapped, optimizer = built(case)
    model = wrapped.module
    report: dict[str, Any] = {"tp": parallel_state.get_tensor_model_parallel_rank(),
                              "pp": parallel_state.get_pipeline_model_parallel_rank(),
                              "ep": parallel_state.get_expert_model_parallel_rank()}  # fmt: skip
    metadata = {"distrib_optim_sharding_type": case["sharding"]} if case.get("sharding") else {}
    at = 0
    try:
        if "checkpoint" in case:
            push(wrapped, optimizer, 99)  # what is there must be overwritten
            common = dist_checkpointing.load_common_state_dict(case["checkpoint"])
            metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or metadata
            wanted = {"model": model.sharded_state_dict(metadata=metadata)}
            wanted["optimizer"] = optimizer.sharded_state_dict(
                model.sharded_state_dict(metadata=metadata), is_loading=True, metadata=metadata
            )
            state = dist_checkpointing.load(wanted, case["checkpoint"], strict="raise_all")
            report["beside"] = sorted(set(state) - set(wanted))
            model.load_state_dict(state["model"], strict=False)
            optimizer.load_state_dict(state["optimizer"])
            at = case["at"]
        for number in range(case.get("pushed", 0)):
            push(wrapped, optimizer, 10 + number)
        report["losses"] = [step(case, wrapped, optimizer, at + n) for n in range(case.get("steps", 0))]
        tensors, report["ranges"] = held(model, optimizer)
        save_file(tensors, out / f"{case['name']}.{rank}.safetensors")
        if "save" in case:
            if not rank:
                Path(case["save"]).mkdir()
            dist.barrier()
        if case.get("older"):
            save_older(case, model, optimizer)
        elif "save" in case:
            whole = {
                **stored_of(model, metadata),
                "optimizer": optimizer.sharded_state_dict(stored_of(model, metadata), metadata=metadata),
                **case.get("beside", {}),
            }
            dist_checkpointing.save(whole, case["save"], content_metadata=metadata)
        at += case.get("steps", 0)
        report["more"] = [step(case, wrapped, optimizer, at + n) for n in range(case.get("more", 0))]
    except (Exception, CheckpointException) as error:  # the kind of refusal is the answer
        report["error"] = f"{type(error).__name__}: {error}"
        if not case.get("may_fail"):
            raise
    (out / f"{case['name']}.{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    replace_cuda()
    replace_devices()
    play_all(play)
