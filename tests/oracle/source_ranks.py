"""Real trainers on CPU processes, and what ``shardweave.refit.sources`` reads off each of their ranks.

Run as a script, once a rank: ``python source_ranks.py RANK WORLD_SIZE STORE CASES OUT``. CASES is a JSON file
with a list of cases; for each, every rank writes ``OUT/<name>.<rank>.npz``, the arrays of its source, and
``OUT/<name>.<rank>.json``: the text of its layout, whether the arrays are the parameters themselves, and what
was said to each of several wrong descriptions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardweave.dialects import fsdp, megatron
from shardweave.layout import Mesh
from shardweave.models import from_config
from shardweave.refit.sources import Source, from_fsdp2
from shardweave.refit.sources_megatron import from_megatron

Wrong = dict[str, Callable[[], Source]]


def said_to(wrong: Wrong) -> dict[str, str]:
    found = {}
    for name, call in wrong.items():
        try:
            call()
            found[name] = "accepted"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# --- Megatron -----------------------------------------------------------------------------------


def of_megatron(case: dict[str, Any], rank: int) -> tuple[Source, Wrong]:
    """A GPTModel that Megatron's own loader filled from a checkpoint of one rank."""
    from megatron.core import dist_checkpointing
    from megatron_cpu import MODELS, model_of

    sizes = dict(MODELS[case["kind"]])
    vocab = sizes.pop("vocab")
    if case["kind"] == "moe":
        sizes["moe_ffn_hidden_size"] = sizes["ffn_hidden_size"]
    degrees = {key: case.get(key) for key in ("tp", "pp", "ep", "etp", "vpp") if case.get(key) is not None}
    built = model_of(sizes | case.get("config", {}), vocab=vocab, tied=case.get("tied", False), **degrees)
    chunks = built if isinstance(built, list) else [built]
    wanted = {f"model{v}": chunk.sharded_state_dict() for v, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(wanted, case["checkpoint"])
    for v, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{v}"], strict=False)
    config = json.loads(Path(case["hf"]).read_text()) | {"tie_word_embeddings": case.get("tied", False)}
    config.pop("layer_types", None)  # one a layer, which all have full attention
    dp = dist.get_world_size() // (degrees["tp"] * degrees.get("pp", 1))
    mesh = megatron.mesh(dp=dp, **{key: value for key, value in degrees.items() if key != "vpp"})

    def source(chunks: Any = built, *, mesh: Mesh = mesh, rank: int = rank, **given: Any) -> Source:
        model = from_config(config | given.pop("config", {}), dtype=given.pop("dtype", "float32"))
        return from_megatron(chunks, model=model, mesh=mesh, rank=rank, **given)

    @contextmanager
    def changed(name: str, set_it: Callable[[Any], None], undo: Callable[[Any], None]) -> Iterator[None]:
        part = chunks[0].get_submodule(name)
        set_it(part)
        yield
        undo(part)

    def with_buffer(*, persistent: bool) -> Source:
        def add(part: Any) -> None:
            part.register_buffer("expert_bias", torch.zeros(4), persistent=persistent)

        with changed("decoder.layers.0.mlp", add, lambda part: delattr(part, "expert_bias")):
            return source()

    def without_norm() -> Source:
        norm = chunks[0].decoder.layers[0].input_layernorm
        kept, norm.weight = norm.weight, None
        try:
            return source()
        finally:
            norm.weight = kept

    ffn = "moe_intermediate_size" if case["kind"] == "moe" else "intermediate_size"
    other = {"tp": degrees["tp"], "pp": degrees.get("pp", 1)}
    wrong: Wrong = {
        "half of the heads": lambda: source(config={"num_attention_heads": 2, "head_dim": 16}),
        "local kv heads": lambda: source(config={"num_key_value_heads": 1}),
        "another head dim": lambda: source(config={"head_dim": 4}),
        "another ffn": lambda: source(config={ffn: 36}),
        "another dtype": lambda: source(dtype="bfloat16"),
        "fewer layers": lambda: source(config={"num_hidden_layers": 3}),
        "another vocabulary": lambda: source(config={"vocab_size": 1000}),
        "another rank": lambda: source(rank=rank ^ 1),
        "other degrees": lambda: source(mesh=megatron.mesh(tp=other["pp"], pp=other["tp"])),
        "no groups": lambda: source(groups=SimpleNamespace()),
        "not a spec": lambda: source(spec="te"),
        "a persistent buffer": lambda: with_buffer(persistent=True),
        "a buffer that is not": lambda: with_buffer(persistent=False),
        "a missing norm": without_norm,
        "a wrapped model": lambda: source([SimpleModule(chunk) for chunk in chunks]),
    }
    if len(chunks) > 1:
        wrong["a missing chunk"] = lambda: source(chunks[:1])
        wrong["chunks in another order"] = lambda: source(chunks[::-1])
    return source(), wrong


def of_latent(case: dict[str, Any], rank: int) -> tuple[Source, Wrong]:
    """A DeepSeek model: latent attention, shared experts, a correction bias, layers for further tokens."""
    from megatron_mla_cpu import build, held

    degrees = {axis: case.get(axis, 1) for axis in ("tp", "pp", "ep")}
    built = build(case["config"], **degrees)
    for number, value in enumerate(held(built).values()):
        value.fill_(number)
    dp = dist.get_world_size() // (degrees["tp"] * degrees["pp"])
    mesh = megatron.mesh(dp=dp, etp=1, **degrees)

    def source(**given: Any) -> Source:
        model = from_config(case["config"] | given.pop("config", {}))
        given = {"mtp_layer": "transformer_layer"} | given
        return from_megatron(built, model=model, mesh=mesh, rank=rank, **given)

    wrong: Wrong = {
        "no name of the layer within": lambda: source(mtp_layer=""),
        "another rank of q": lambda: source(config={"q_lora_rank": 26}),
        "no layers for further tokens": lambda: source(config={"num_nextn_predict_layers": 0}),
        "another shared expert": lambda: source(config={"n_shared_experts": 2}),
    }
    return source(), wrong


class SimpleModule(torch.nn.Module):
    """A wrapper as Megatron has several."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


# --- FSDP2 --------------------------------------------------------------------------------------


def of_fsdp2(case: dict[str, Any], rank: int) -> tuple[Source, Wrong]:
    """A transformers model under ``fully_shard``; rank 0 has written it in full before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads(Path(case["hf"]).read_text()) | case["config"]
    rest = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(5)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest))
    if rank == 0:
        module.save_pretrained(Path(case["truth"]))
    device = init_device_mesh("cpu", tuple(case["mesh"].values()), mesh_dim_names=tuple(case["mesh"]))
    dp = tuple(name for name in case["mesh"] if name != "tp")
    if "tp" in case["mesh"]:
        columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        for layer in module.model.layers:
            parallelize_module(layer, device["tp"], plan)
    for layer in module.model.layers:
        fully_shard(layer, mesh=device[dp])
    fully_shard(module, mesh=device[dp])

    def source(module: Any = module, **given: Any) -> Source:
        model = from_config(config | given.pop("config", {}))
        given = {"mesh": fsdp.mesh(**case["mesh"]), "rank": rank} | given
        return from_fsdp2(module, model=model, **given)

    def unsharded() -> Source:
        module.model.layers[0].unshard()
        try:
            return source()
        finally:
            module.model.layers[0].reshard()

    wrong: Wrong = {
        "whole parameters": unsharded,
        "another vocabulary": lambda: source(config={"vocab_size": 54}),
        "fewer layers": lambda: source(config={"num_hidden_layers": config["num_hidden_layers"] - 1}),
        "another mesh": lambda: source(mesh=fsdp.mesh(**{name + "_": n for name, n in case["mesh"].items()})),
        "another dtype": lambda: source(config={"dtype": "bfloat16"}),
    }
    return source(), wrong


# --- a rank -------------------------------------------------------------------------------------


def main(rank: int, world_size: int, store: str, cases: str, out: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    for case in json.loads(Path(cases).read_text()):
        if case["trainer"] != "fsdp2":
            from megatron_cpu import replace_cuda

            replace_cuda()
        trainers = {"megatron": of_megatron, "latent": of_latent, "fsdp2": of_fsdp2}
        source, wrong = trainers[case["trainer"]](case, rank)
        held = {name: array.numpy().copy() for name, array in source.arrays.items()}
        np.savez(out / f"{case['name']}.{rank}.npz", **held)
        live = True
        for name, array in source.arrays.items():  # what is written through one is seen through the next
            if array.numel():
                array.view(-1)[0] = 77.0
                live &= float(source.arrays[name].reshape(-1)[0]) == 77.0 and not array.requires_grad
        report = {"layout": str(source.layout), "live": live, "said": said_to(wrong)}
        (out / f"{case['name']}.{rank}.json").write_text(json.dumps(report))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
