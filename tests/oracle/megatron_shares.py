"""A slow writer of the flat buckets of Megatron's optimizer, where ranks share matrices.

No release of megatron-core that can be installed shares matrices, so the form was read from public sources of
Megatron-LM and was *not* seen to come out of it. What is here knows nothing of the library: it goes rank by
rank and parameter by parameter, cuts arrays with numpy, lays them end to end in plain loops, and gives every
chunk that a data-parallel rank would have to ``torch.distributed.checkpoint.save``.

What was read:

    - of the rows that a tensor-parallel rank has of a matrix, filled up to a multiple of ``multiple`` times
      the number of shares, each rank has an equal share; norms, biases and routers are whole;
    - a buffer holds parameters of one dtype, the last one first, each from a multiple of 64 elements on; a
      bucket ends with the parameter by which it has ``bucket_size`` elements, and is filled up to a multiple
      of 128 and of its data-parallel ranks, which share it equally; that last padding is not stored;
    - groups are numbered along tp, remat, pp, and for experts apart along etp, ep, their remat, pp;
    - where ranks of a context group are folded in, they share the matrices outside experts too. These are in
      buffers of their own, which the ranks of ``dp`` share instead of those of ``dp`` and ``cp``, and whose
      keys have ``.cp_rank_{c}`` at their ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

LAYERS, HIDDEN, HEADS, KV, HEAD, FFN, VOCAB, EXPERTS = 4, 100, 4, 1, 30, 130, 250, 4
"""Sizes of which no rows divide among the shares: 125, 90, 130 and 100 of a rank of two."""
CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD,
    "intermediate_size": FFN, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
EXPERT_CONFIG = CONFIG | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": 52, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True,
}  # fmt: skip
STATES = ("param", "exp_avg", "exp_avg_sq")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True)
class Saved:
    """A job that saves: its degrees, and what is not as usual.

    ``folded`` has context ranks share matrices too, ``cp_first`` counts them before those of ``remat``.
    ``says`` are the names of arguments that it records.
    """

    tp: int = 2
    cp: int = 3
    remat: int = 2
    dp: int = 2
    pp: int = 1
    vpp: int = 1
    moe: bool = False
    ep: int = 1
    etp: int = 2
    expert_remat: int = 2
    folded: bool = False
    cp_first: bool = True
    multiple: int = 16
    bucket_size: int | None = 9000
    says: tuple[str, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether experts have an optimizer of their own."""
        return self.moe and (self.ep > 1 or self.etp != self.tp or self.expert_remat != self.remat)

    @property
    def edp(self) -> int:
        """The replicas of experts."""
        return self.tp * self.cp * self.remat * self.dp // (self.etp * self.ep * self.expert_remat)


@dataclass
class Truth:
    """Whole weights by stored name, and their states; values are those of no other element."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)


def truth(*, moe: bool, seed: int = 3) -> Truth:
    """A state whose matrices and norms are bf16, but for embedding, output and norms of heads in fp32."""
    decoder = "decoder.layers"
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        f"{decoder}.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HEADS * HEAD),
        f"{decoder}.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
        f"{decoder}.self_attention.linear_qkv.weight": (LAYERS, (HEADS + 2 * KV) * HEAD, HIDDEN),
        f"{decoder}.self_attention.q_layernorm.weight": (LAYERS, HEAD),
        f"{decoder}.self_attention.k_layernorm.weight": (LAYERS, HEAD),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (VOCAB, HIDDEN),
    }
    if moe:
        shapes |= {
            f"{decoder}.pre_mlp_layernorm.weight": (LAYERS, HIDDEN),
            f"{decoder}.mlp.router.weight": (LAYERS, EXPERTS, HIDDEN),
            f"{decoder}.mlp.experts.experts.linear_fc1.weight": (LAYERS, EXPERTS, 104, HIDDEN),
            f"{decoder}.mlp.experts.experts.linear_fc2.weight": (LAYERS, EXPERTS, HIDDEN, 52),
        }
    else:
        shapes |= {
            f"{decoder}.mlp.linear_fc1.layer_norm_weight": (LAYERS, HIDDEN),
            f"{decoder}.mlp.linear_fc1.weight": (LAYERS, 2 * FFN, HIDDEN),
            f"{decoder}.mlp.linear_fc2.weight": (LAYERS, HIDDEN, FFN),
        }
    found = Truth()
    for name, shape in shapes.items():
        single = any(word in name for word in ("embedding", "output", "q_layernorm", "k_layernorm"))
        for state in STATES:
            of = np.random.default_rng(zlib.crc32(f"{seed} {name} {state}".encode()))
            found.states[name, state] = of.standard_normal(shape, dtype=np.float32)
        master = torch.from_numpy(found.states[name, "param"])
        found.weights[name] = master if single else master.bfloat16()
    return found


def modules(saved: Saved, pp: int, ep: int) -> list[list[tuple[str, str, tuple[int, ...]]]]:
    """The parameters of a stage chunk by chunk: name, stored array, and place in the dims before its own.

    Their order is that of modules with Transformer Engine, experts grouped.
    """
    chunks = []
    size = LAYERS // saved.pp // saved.vpp
    for v in range(saved.vpp):
        first = (v * saved.pp + pp) * size
        found: list[tuple[str, str, tuple[int, ...]]] = []
        if pp == 0 and v == 0:
            found.append(("embedding", "embedding.word_embeddings.weight", ()))
        for layer in range(first, first + size):
            paths = ["self_attention.linear_proj.weight", "self_attention.linear_qkv.layer_norm_weight",
                     "self_attention.linear_qkv.weight", "self_attention.q_layernorm.weight",
                     "self_attention.k_layernorm.weight"]  # fmt: skip
            if saved.moe:
                paths += ["pre_mlp_layernorm.weight", "mlp.router.weight"]
            else:
                fc1 = "mlp.linear_fc1"
                paths += [f"{fc1}.layer_norm_weight", f"{fc1}.weight", "mlp.linear_fc2.weight"]
            found += [(f"{layer}.{path}", f"decoder.layers.{path}", (layer,)) for path in paths]
            for path in ("linear_fc1.weight", "linear_fc2.weight") if saved.moe else ():
                for expert in range(ep * EXPERTS // saved.ep, (ep + 1) * EXPERTS // saved.ep):
                    array = f"decoder.layers.mlp.experts.experts.{path}"
                    found.append((f"{layer}.experts.{path}{expert}", array, (layer, expert)))
        if pp == saved.pp - 1 and v == saved.vpp - 1:
            found.append(("final", "decoder.final_layernorm.weight", ()))
            found.append(("output", "output_layer.weight", ()))
        chunks.append(found)
    return chunks


def is_matrix(array: str) -> bool:
    """Whether ranks cut it and share it."""
    return "norm" not in array and "router" not in array


def rows_of(whole: np.ndarray, array: str, tp: int, size: int) -> np.ndarray:
    """What a tensor-parallel rank has of a parameter."""
    if not is_matrix(array):
        return whole
    if array.endswith(COLUMNS):
        return np.split(whole, size, axis=1)[tp]
    if array.endswith("linear_fc1.weight"):
        gate, up = np.split(whole, 2)
        return np.concatenate([np.split(gate, size)[tp], np.split(up, size)[tp]])
    return np.split(whole, size)[tp]


def share_of(held: np.ndarray, number: int, count: int, multiple: int) -> np.ndarray:
    """A share of rows; padding is a value that is in no state."""
    if count == 1:
        return held
    alignment = max(multiple, 1) * count
    padding = -len(held) % alignment
    assert multiple or not padding
    full = np.concatenate([held, np.full((padding, held.shape[1]), 7e7, np.float32)])
    size = len(full) // count
    return full[number * size : (number + 1) * size]


@dataclass(frozen=True)
class Chunk:
    """A stretch of a stored array of one dim, or an array that is stored whole."""

    key: str
    at: int
    total: int
    values: torch.Tensor


def buckets_of(
    key: str, parameters: list[tuple[str, np.ndarray]], *, bucket_size: int | None, ranks: int, end: str
) -> Iterator[Chunk]:
    """A buffer, bucket by bucket, as the chunks of the ranks that share it."""
    buckets: list[list[tuple[int, np.ndarray]]] = [[]]
    at = 0
    for _, values in reversed(parameters):
        start = math.ceil(at / 64) * 64
        buckets[-1].append((start, values))
        at = start + values.size
        if bucket_size is not None and at >= bucket_size:
            buckets.append([])
            at = 0
    for number, bucket in enumerate(one for one in buckets if one):
        total = bucket[-1][0] + bucket[-1][1].size
        unit = math.lcm(ranks, 128)
        local = math.ceil(total / unit) * unit // ranks
        borders = {0, total, *(rank * local for rank in range(ranks) if rank * local < total)}
        for start, values in bucket:
            borders |= {start, start + values.size}
        flat = np.full(total, -5e5, np.float32)
        for start, values in bucket:
            flat[start : start + values.size] = values.reshape(-1)
        cuts = sorted(borders)
        for low, high in itertools.pairwise(cuts):
            values = torch.from_numpy(flat[low:high].copy())
            yield Chunk(f"{key}.bucket_idx_{number}{end}", low, total, values)


def chunks_of(saved: Saved, true: Truth) -> Iterator[Chunk]:
    """Everything that the optimizers of all ranks store."""
    places = [
        (False, rank, pp, remat, (cp, tp))
        for pp in range(saved.pp)
        for remat in range(saved.remat)
        for tp in range(saved.tp)
        for cp in range(saved.cp)
        for rank in [tp + saved.tp * (remat + saved.remat * pp)]
    ]
    if saved.apart:
        places += [
            (True, rank, pp, remat, (ep, etp))
            for pp in range(saved.pp)
            for remat in range(saved.expert_remat)
            for ep in range(saved.ep)
            for etp in range(saved.etp)
            for rank in [etp + saved.etp * (ep + saved.ep * (remat + saved.expert_remat * pp))]
        ]
    for experts, group, pp, remat, (other, tp) in places:
        ep, cp = (other, 0) if experts else (0, other)
        number = cp + saved.cp * remat if saved.cp_first else remat + saved.remat * cp
        buffer = 0
        for chunk in modules(saved, pp, ep):
            kinds: dict[tuple[torch.dtype, bool], list[tuple[str, str, tuple[int, ...]]]] = {}
            for one in chunk:
                of_expert = ".experts." in one[1]
                if (of_expert and saved.apart) is not experts:
                    continue
                folded = saved.folded and is_matrix(one[1]) and not of_expert
                kinds.setdefault((true.weights[one[1]].dtype, folded), []).append(one)
            for (dtype, folded), few in kinds.items():
                key = "optimizer.distributed.dp_group_idx_"
                key = f"{key}{group}.gbuf_idx_{buffer}.dtype_({dtype}, torch.float32)"
                if saved.apart:
                    key = f"chained_{int(experts)}.{key}"
                buffer += 1
                if cp and not folded:
                    continue  # the ranks of a context group share the buffer, and all have the same of it
                for state in STATES:
                    held = []
                    for name, array, place in few:
                        of_expert = ".experts." in array
                        size = saved.etp if of_expert else saved.tp
                        mine = rows_of(true.states[array, state][place], array, tp, size)
                        if is_matrix(array) and folded:
                            mine = share_of(mine, number, saved.cp * saved.remat, saved.multiple)
                        elif is_matrix(array):
                            of = saved.expert_remat if of_expert else saved.remat
                            mine = share_of(mine, remat, of, saved.multiple)
                        held.append((name, mine))
                    ranks = saved.edp if experts else saved.dp if folded else saved.dp * saved.cp
                    end = f".cp_rank_{cp}.{state}" if folded else f".{state}"
                    yield from buckets_of(key, held, bucket_size=saved.bucket_size, ranks=ranks, end=end)


class ByChunks(DefaultSavePlanner):
    """torch's planner with the chunks of all ranks, in one process."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__()
        self.chunks = {(one.key, one.at): one.values for one in chunks}
        self.items = [
            WriteItem(
                index=MetadataIndex(one.key, torch.Size([one.at])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size([one.at]), torch.Size([len(one.values)])),
                    properties=TensorProperties(dtype=one.values.dtype),
                    size=torch.Size([one.total]),
                ),
            )
            for one in chunks
        ]

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[*plan.items, *self.items])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        at = write_item.index.offset
        found = self.chunks.get((write_item.index.fqn, at[0])) if at is not None and len(at) == 1 else None
        return super().resolve_data(write_item) if found is None else found


ARGUMENTS = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "remat": "gtp_weight_remat_size", "expert_remat": "expert_gtp_weight_remat_size",
    "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size", "folded": "gtp_remat_fold_cp",
    "vpp": "virtual_pipeline_model_parallel_size",
}  # fmt: skip


def write(saved: Saved, true: Truth, folder: Path, *, chunks: list[Chunk] | None = None) -> None:
    """Save weights and buckets with torch, and beside them what Megatron has beside them."""
    save(
        dict(true.weights),
        storage_writer=FileSystemWriter(folder, single_file_per_rank=True),
        planner=ByChunks(list(chunks_of(saved, true)) if chunks is None else chunks),
        no_dist=True,
    )
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
                    "common_backend_version": 1})
    )  # fmt: skip
    group = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "step": 7}
    group |= {"lr_mult": 1.0, "is_decoupled_lr": False}
    made = [
        {"optimizer": {"param_groups": [
            {**group, "wd_mult": mult, "is_expert_parallel": apart, "params": [0]} for mult in mults
        ]}}
        for apart, mults in ((False, (1.0, 0.0)), *(((True, (1.0,)),) if saved.apart else ()))
    ]  # fmt: skip
    said: Mapping[str, Any] = asdict(saved)
    args = argparse.Namespace(**{ARGUMENTS[name]: said[name] for name in saved.says})
    common = {
        "optimizer": made[0] if len(made) == 1 else dict(enumerate(made)),
        "args": args,
        "iteration": 7,
        "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"},
    }
    torch.save(common, folder / "common.pt")
