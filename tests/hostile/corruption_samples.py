"""Checkpoints of every format with the state of AdamW, small, and what other software reads of them.

The first checkpoints are written by torch and safetensors themselves, the others converted from those.
"""

from __future__ import annotations

import argparse
import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from shardweave.convert import Geometry, Zero, convert, prepare
from shardweave.dialects import deepspeed, megatron
from shardweave.dialects.megatron.buckets import fill, sizes_of
from shardweave.dialects.megatron.parameters import parameters
from shardweave.layout import Mesh
from shardweave.models import from_config
from shardweave.store import digest
from shardweave.store.torch_dcp import Keys

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4,
    "tie_word_embeddings": False, "dtype": "bfloat16", "rms_norm_eps": 1e-6, "max_position_embeddings": 32,
}  # fmt: skip
MOE: dict[str, Any] = {
    **DENSE, "model_type": "qwen3_moe", "vocab_size": 42, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 10, "norm_topk_prob": True,
}  # fmt: skip
MODELS = {"dense": DENSE, "moe": MOE}
STATES = ("exp_avg", "exp_avg_sq")
SETTINGS = {
    "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False, "foreach": None,
    "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
TP2 = Mesh((("tp", 2),))


@dataclass(frozen=True, eq=False)
class Sample:
    """A checkpoint of one format.

    Attributes:
        name: What it is called.
        kind: The format, as the table of what is seen has it.
        root: The folder.
        other: A folder of a later save of the same job: other values, another step.
        opens: What ``prepare`` needs to read it.
        again: What ``prepare`` is asked for to write the same arrays cut in the same way.
        contents: What a reader that is not ours finds in such a folder.
    """

    name: str
    kind: str
    root: Path
    other: Path
    opens: Mapping[str, Any] = field(default_factory=dict)
    again: Mapping[str, Any] = field(default_factory=dict)
    contents: Callable[[Path], dict[str, bytes]] | None = None


# --- samples --------------------------------------------------------------------------------------

Values = dict[str, dict[str, torch.Tensor]]


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of Hugging Face's files, in the order of the module."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for one, shape in {"q": (24, hidden), "k": (8, hidden), "v": (8, hidden), "o": (hidden, 24)}.items():
            found[f"{at}.self_attn.{one}_proj.weight"] = shape
        found |= {f"{at}.self_attn.{one}_norm.weight": (4,) for one in "qk"}
        blocks = {f"{at}.mlp": config["intermediate_size"]}
        if "num_experts" in config:
            found[f"{at}.mlp.gate.weight"] = (config["num_experts"], hidden)
            ffn = config["moe_intermediate_size"]
            blocks = {f"{at}.mlp.experts.{expert}": ffn for expert in range(config["num_experts"])}
        for block, ffn in blocks.items():
            found |= {f"{block}.{one}_proj.weight": (ffn, hidden) for one in ("gate", "up")}
            found[f"{block}.down_proj.weight"] = (hidden, ffn)
        found |= {f"{at}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def values_of(config: Mapping[str, Any], *, seed: int) -> Values:
    """Masters, moments and rounded weights by kind and name."""
    chance = torch.Generator().manual_seed(seed)
    found = {
        kind: {name: torch.randn(shape, generator=chance) for name, shape in shapes(config).items()}
        for kind in ("master", *STATES)
    }
    found["exp_avg_sq"] = {name: value.square() for name, value in found["exp_avg_sq"].items()}
    return {**found, "weight": {name: value.bfloat16() for name, value in found["master"].items()}}


def as_module(values: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Values under the names of the module, where transformers 5 stacks the experts of a layer."""
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        begin, _, rest = name.partition(".mlp.experts.")
        if not rest:
            found[name] = value
        elif rest == "0.gate_proj.weight":
            experts = [
                {one: values[f"{begin}.mlp.experts.{e}.{one}_proj.weight"] for one in ("gate", "up", "down")}
                for e in range(config["num_experts"])
            ]
            fused = [torch.cat([one["gate"], one["up"]]) for one in experts]
            found[f"{begin}.mlp.experts.gate_up_proj"] = torch.stack(fused)
            found[f"{begin}.mlp.experts.down_proj"] = torch.stack([one["down"] for one in experts])
    return found


def save_dcp(folder: Path, values: Values, config: Mapping[str, Any], *, step: int) -> None:
    """What ``get_state_dict`` gives of a module and AdamW, saved by torch."""
    kinds = {kind: as_module(values[kind], config) for kind in ("master", *STATES)}
    names = list(kinds["master"])
    state = {
        name: {"step": torch.tensor(float(step)), **{kind: kinds[kind][name] for kind in STATES}}
        for name in names
    }
    flat = [name for name in names if kinds["master"][name].dim() == 1]
    groups = [
        {**SETTINGS, "weight_decay": 0.1, "params": [name for name in names if name not in flat]},
        {**SETTINGS, "weight_decay": 0.0, "params": flat},
    ]
    tree = {"model": kinds["master"], "optim": {"state": state, "param_groups": groups}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)


def save_shards(folder: Path, values: Values) -> None:
    """As ``HuggingFaceStorageWriter(save_distributed=True)`` of torch does on two ranks, cut by rows."""
    folder.mkdir()
    for rank in range(2):
        mine = {
            name: value if value.dim() == 1 else value.tensor_split(2)[rank]
            for name, value in values["weight"].items()
            if value.dim() > 1 or not rank
        }
        first = {name: value.tensor_split(2)[0].shape[0] for name, value in values["weight"].items()}
        offsets = {
            name: {"saved_offsets": [first[name] * rank * (value.dim() > 1)] + [0] * (value.dim() - 1)}
            for name, value in mine.items()
        }
        save_file(
            {name: value.contiguous() for name, value in mine.items()},
            folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(offsets)},
        )


GROUP = {
    "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "wd_mult": 1.0, "lr_mult": 1.0,
    "is_expert_parallel": False, "is_decoupled_lr": False,
}  # fmt: skip


def save_ranks_of_megatron(folder: Path, source: Path, config: Mapping[str, Any], *, step: int) -> None:
    """An older folder of Megatron's two tensor-parallel ranks, from the whole arrays of a newer one."""
    arrays = whole_arrays(source)
    model = from_config(config, dtype="float32")
    mesh = megatron.mesh(tp=2, etp=2)
    padded = arrays["embedding.word_embeddings.weight"].shape[0]
    for rank in range(2):
        (chunk,) = parameters(model, mesh, rank, experts="sequential", padded_vocab=padded)
        held: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in ("", "param", *STATES)}
        for kind, mine in held.items():
            for one in chunk:
                prefix = f"optimizer.state.{kind}." if kind else ""
                dtype = arrays[f"{prefix}{one.stretches[0].array}"].dtype
                mine[one.name] = torch.full(one.shape, torch.nan, dtype=dtype)
                for part in one.stretches:
                    box = tuple(slice(dim.start, dim.stop) for dim in part.box.dims)
                    at = tuple(slice(dim.start, dim.stop) for dim in part.at.dims)
                    mine[one.name][at] = arrays[f"{prefix}{part.array}"][box].reshape(part.at.shape)
        place = folder / f"iter_{step:07d}/mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        args = argparse.Namespace(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=1,
            expert_model_parallel_size=1,
            rank=rank,
        )
        groups = [
            {**GROUP, "step": step, "params": [0]},
            {**GROUP, "step": step, "wd_mult": 0.0, "params": [1]},
        ]
        torch.save(
            {"args": args, "checkpoint_version": 3.0, "iteration": step, "model": held[""],
             "optimizer": {"optimizer": {"param_groups": groups}}},
            place / "model_optim_rng.pt",
        )  # fmt: skip
        sizes = sizes_of(chunk, None)
        flat = {kind: torch.zeros(sum(sizes)) for kind in held if kind}
        for placed in fill(chunk, sizes)[0]:
            for kind, one in flat.items():
                one[placed.start : placed.stop] = held[kind][placed.parameter.name].reshape(-1)
        states = {**flat, "numel_unpadded": sum(sizes)}
        torch.save(
            {0: {(torch.bfloat16, torch.float32): states}, "buckets_coalesced": True},
            place / "distrib_optim.pt",
        )
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def whole_arrays(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder of torch, read by torch."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def samples(model: str, place: Path, buckets: Path) -> list[Sample]:
    """A sample of each format.

    Args:
        model: Which model.
        place: Where to write.
        buckets: A folder of Megatron's with flat buckets, which only Megatron writes.
    """
    config = MODELS[model]
    dense, decoder = model == "dense", from_config(config, dtype="bfloat16")
    layout = (
        deepspeed.layout(decoder, TP2)
        if dense
        else megatron.layout(decoder, megatron.mesh(tp=2, etp=2), vocab_divisor=1)
    )
    spread = {"geometry": Geometry(tp=2, pp=2) if dense else Geometry(tp=2, ep=2, etp=1), "dtype": "bfloat16"}
    targets: dict[str, dict[str, Any]] = {
        "megatron": {"to": "megatron", **spread},
        "zero1": {"to": "deepspeed", "zero": Zero(stage=1, dp=3, tp=2 if dense else 1), "dtype": "bfloat16"},
        "zero2": {"to": "deepspeed", "zero": Zero(stage=2, dp=2), "dtype": "bfloat16"},
        "zero3": {"to": "deepspeed", "zero": Zero(stage=3, dp=2, dtype="bfloat16")},
        "universal": {"to": "universal"},
        "dcp flat": {"to": "dcp", "keys": Keys(flat=True), "max_file_bytes": 40_000},
        "native": {"to": "native", "dtype": "bfloat16", "max_file_bytes": 20_000},
        "hf index": {"to": "hf", "dtype": "bfloat16", "max_file_bytes": 5000, "stacked_experts": not dense},
        "ranks": {"to": "ranks", "to_layout": layout, "dtype": "bfloat16", "weights_only": True},
    }
    roots: dict[str, dict[str, Path]] = {}
    for save, (seed, step) in {"root": (7, 1234), "other": (11, 1235)}.items():
        at, values = place / save, values_of(config, seed=seed)
        at.mkdir(parents=True)
        found = {name: at / name.replace(" ", "_") for name in ("dcp", "hf", "hf dcp", "legacy", *targets)}
        save_dcp(found["dcp"], values, config, step=step)
        (found["dcp"] / "config.json").write_text(json.dumps(config))
        found["hf"].mkdir()
        save_file(values["weight"], found["hf"] / "model.safetensors")
        save_shards(found["hf dcp"], values)
        for name, target in targets.items():
            convert(prepare(found["dcp"], **target), found[name], fsync=False)
        save_ranks_of_megatron(found["legacy"], found["megatron"], config, step=step)
        for name, folder in found.items():
            home = folder / f"iter_{step:07d}" if name == "legacy" else folder
            (home / "config.json").write_text(json.dumps(config))
            if name != "dcp flat":  # what other software writes has no digests beside it
                for path in folder.rglob(digest.SIDECAR):
                    path.unlink()
        roots[save] = found

    def one(name: str, kind: str, again: Mapping[str, Any], contents: Any, **opens: Any) -> Sample:
        return Sample(name, kind, roots["root"][name], roots["other"][name], opens, again, contents)

    found = [
        one("hf", "hf", {"to": "hf"}, safetensors_of),
        one("hf index", "hf", targets["hf index"], safetensors_of),
        one("hf dcp", "hf-dcp", {"to": "hf"}, shards_of),
        one("ranks", "ranks", targets["ranks"], safetensors_of, layout=layout),
        one("megatron", "torch_dist", targets["megatron"], streams_of),
        one(
            "legacy",
            "mp_rank",
            {"to": "megatron", "geometry": Geometry(tp=2), "dtype": "bfloat16"},
            lambda root: ranks_of(root, config),
        ),
        *(one(f"zero{n}", f"ZeRO-{n}", targets[f"zero{n}"], records_of) for n in (1, 2, 3)),
        one("universal", "universal", {"to": "universal"}, records_of),
        one("dcp", "dcp", {"to": "dcp"}, streams_of),
        one("dcp flat", "dcp with digests", targets["dcp flat"], streams_of),
        one("native", "native", targets["native"], None),
    ]
    if dense:
        found.append(Sample("buckets", "torch_dist buckets", buckets, buckets, {}, {}, None))
    return found


# --- what others read -----------------------------------------------------------------------------


def safetensors_of(folder: Path) -> dict[str, bytes]:
    """All tensors by key; those of ranks by file too."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        begin = f"{path.name}/" if path.name.startswith("rank_") else ""
        found |= {f"{begin}{key}": bits(value) for key, value in load_file(path).items()}
    return found


def shards_of(folder: Path) -> dict[str, bytes]:
    """Shards put together at their offsets; whole files as they are."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        info = json.loads(header.get("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        for key, value in load_file(path).items():
            parts.setdefault(key, []).append(
                (info.get(key, {"saved_offsets": [0]})["saved_offsets"][0], value)
            )
    return {
        key: bits(torch.cat([v for _, v in sorted(few, key=lambda p: p[0])])) for key, few in parts.items()
    }


def streams_of(folder: Path) -> dict[str, bytes]:
    """All tensors, read by torch."""
    return {key: bits(value) for key, value in whole_arrays(folder).items()}


def ranks_of(folder: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The whole arrays of an older folder of Megatron, in its order; else of a newer one."""
    if (folder / ".metadata").exists():
        return streams_of(folder)
    model, mesh, found = (
        from_config(config, dtype="float32"),
        megatron.mesh(tp=2, etp=2),
        dict[str, torch.Tensor](),
    )
    for rank, place in enumerate(sorted(folder.glob("*/mp_rank_*"))):
        weights = torch.load(place / "model_optim_rng.pt", weights_only=False)["model"]
        padded = 2 * weights["embedding.word_embeddings.weight"].shape[0]
        (chunk,) = parameters(model, mesh, rank, experts="sequential", padded_vocab=padded)
        ((states,),) = [list(torch.load(place / "distrib_optim.pt", weights_only=False)[0].values())]
        shapes = {
            key: one.shape
            for key, (one, _) in megatron.checkpoint(model, padded_vocab=padded).stored().items()
        }
        for placed in fill(chunk, sizes_of(chunk, None))[0]:
            one, kinds = placed.parameter, {"": weights[placed.parameter.name]}
            for kind in ("param", *STATES):
                kinds[f"optimizer.state.{kind}."] = states[kind][placed.start : placed.stop].reshape(
                    one.shape
                )
            for prefix, value in kinds.items():
                for part in one.stretches:
                    box = tuple(slice(dim.start, dim.stop) for dim in part.box.dims)
                    at = tuple(slice(dim.start, dim.stop) for dim in part.at.dims)
                    whole = found.setdefault(
                        f"{prefix}{part.array}", torch.full(shapes[part.array], torch.nan, dtype=value.dtype)
                    )
                    whole[box] = value[at].reshape(whole[box].shape)
    return {key: bits(value) for key, value in found.items()}


def records_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all storages of all files, read by zipfile, which compares CRCs."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if "/data/" in name:
                    found[f"{path.relative_to(folder)}/{name.partition('/')[2]}"] = archive.read(name)
    return found


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
