"""How large a trainer's manifests are, and what publishing and joining them costs, beside modelexpress.

    python benchmarks/manifest.py            both models on 8 ranks
    python benchmarks/manifest.py --tiny     small models, a second in all

Models:
    dense     64 layers, hidden 5120, 64/8 heads: Megatron at TP8
    experts   48 layers x 128 experts, hidden 2048, 32/4 heads: Megatron at TP4 with EP8 over 8 ranks

A receiver takes the manifests of all ranks. Ours are written once for each rank alone, and once for the
trainer as a whole; both with an endpoint of 64 bytes a rank. modelexpress publishes a table of boxes, one
entry a tensor, without an endpoint here; its specs are made from the same sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

from shardweave.dialects import megatron
from shardweave.layout import Layout
from shardweave.models import from_config
from shardweave.refit import Manifest, decode, encode, merge, part_of

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """A model and its trainer of ``tp * dp`` ranks."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tp: int
    dp: int = 1
    experts: int = 0

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def layout(self) -> Layout:
        """The trainer, its experts spread over all ranks."""
        config = {
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "tie_word_embeddings": False,
        }
        if self.experts:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": self.ffn,
            }
        ep = self.ranks if self.experts else 1
        return megatron.layout(from_config(config), megatron.mesh(tp=self.tp, dp=self.dp, ep=ep, etp=1))


CASES = {
    "dense": Sizes(64, 5120, 64, 8, 128, 25600, 151936, tp=8),
    "experts": Sizes(48, 2048, 32, 4, 128, 768, 151936, tp=4, dp=2, experts=128),
}
TINY = {
    "dense": Sizes(12, 64, 16, 8, 4, 96, 1024, tp=8),
    "experts": Sizes(6, 32, 8, 4, 4, 24, 1024, tp=4, dp=2, experts=16),
}


def timed(run: Callable[[], T], *, repeats: int) -> tuple[T, float]:
    """What it gives, and the seconds of the fastest run."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        found = run()
        best = min(best, time.perf_counter() - start)
    return found, best


def parts(layout: Layout) -> list[bytes]:
    """The manifest of each rank alone."""
    ranks = layout.mesh.ranks
    return [encode(Manifest(part_of(layout, rank), {rank: os.urandom(64)}, 7)) for rank in ranks]


class Shape:
    """What modelexpress asks of a local tensor when it writes its table: shape, type and address."""

    def __init__(self, shape: tuple[int, ...], address: int, dtype: Any) -> None:
        self.shape, self.ndim, self.dtype, self.address = shape, len(shape), dtype, address
        self.device = self  # it has no index, as that of a CPU
        self.index = None

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return True

    def narrow(self, dim: int, start: int, length: int) -> Shape:
        assert dim == 0
        row = 2
        for size in self.shape[1:]:
            row *= size
        return Shape((length, *self.shape[1:]), self.address + start * row, self.dtype)


def peer_tables(sizes: Sizes) -> list[bytes] | None:
    """The tables of all ranks as modelexpress writes them, or ``None`` where it is not installed."""
    if (
        importlib.util.find_spec("modelexpress") is None
        or importlib.util.find_spec("modelexpress_rl") is None
    ):
        return None
    import torch
    from modelexpress.refit.reshard import rendezvous
    from modelexpress_rl.train.engines.megatron import MegatronTensorSpec, aliases, build_hf_aliases

    aliases.tensor_digest = lambda _: None  # its digests are not measured
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    rows = {
        "num_heads": str(sizes.heads),
        "num_kv_heads": str(sizes.kv_heads),
        "head_dim": str(sizes.head_dim),
        "qkv_interleave": "by_head",
    }
    gated = {"gated_mlp_order": "gate_then_up"}

    def specs(rank: int) -> list[Any]:
        found: list[Any] = []
        address = 1 << 40
        tp_rank = rank % sizes.tp

        def add(
            role: str,
            names: tuple[str, ...],
            shape: tuple[int, ...],
            axis: int | None,
            extras: dict[str, str],
        ) -> None:
            nonlocal address
            local, place = list(shape), None
            if axis is not None:
                local[axis] //= sizes.tp
                place = (tp_rank * local[axis], (tp_rank + 1) * local[axis])
            kind = "REPLICATE" if axis is None else "SHARD"
            tensor = Shape(tuple(local), address, torch.bfloat16)
            found.append(MegatronTensorSpec(names[0], tensor, role, names, shape, kind, axis, place, extras))
            address += 1 << 28

        hidden = sizes.hidden
        add("column", ("model.embed_tokens.weight",), (sizes.vocab, hidden), 0, {})
        for layer in range(sizes.layers):
            at = f"model.layers.{layer}."
            names = tuple(f"{at}self_attn.{role}_proj.weight" for role in "qkv")
            add("qkv_column", names, (q + 2 * kv, hidden), 0, rows)
            add("row", (f"{at}self_attn.o_proj.weight",), (hidden, q), 1, {})
            for norm in ("self_attn.q_norm", "self_attn.k_norm"):
                add("replicated", (f"{at}{norm}.weight",), (sizes.head_dim,), None, {})
            for norm in ("input_layernorm", "post_attention_layernorm"):
                add("replicated", (f"{at}{norm}.weight",), (hidden,), None, {})
            if not sizes.experts:
                mlp = tuple(f"{at}mlp.{role}_proj.weight" for role in ("gate", "up"))
                add("gated_mlp_column", mlp, (2 * sizes.ffn, hidden), 0, gated)
                add("row", (f"{at}mlp.down_proj.weight",), (hidden, sizes.ffn), 1, {})
                continue
            add("replicated", (f"{at}mlp.gate.weight",), (sizes.experts, hidden), None, {})
            share = sizes.experts // sizes.ranks
            for expert in range(rank * share, (rank + 1) * share):
                of = f"{at}mlp.experts.{expert}."
                both = tuple(f"{of}{role}_proj.weight" for role in ("gate", "up"))
                add("expert_column", both, (2 * sizes.ffn, hidden), None, gated)
                add("expert_row", (f"{of}down_proj.weight",), (hidden, sizes.ffn), None, {})
        add("replicated", ("model.norm.weight",), (hidden,), None, {})
        add("column", ("lm_head.weight",), (sizes.vocab, hidden), 0, {})
        return found

    return [
        rendezvous.encode_shard_table(build_hf_aliases(specs(rank), agent_name=f"t{rank}"))
        for rank in range(sizes.ranks)
    ]


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    machine = platform.processor() or platform.machine()
    print(f"{machine}, Python {platform.python_version()}; one thread, best of {options.repeats}")
    print(
        f"{'model':9} {'ranks':>5} {'tensors':>8} {'whole B':>8} {'parts B':>8} {'publish ms':>10} "
        f"{'decode ms':>9} {'join ms':>8} {'peer B':>9} {'peer/parts':>10} {'peer/whole':>10}"
    )
    for name, sizes in (TINY if options.tiny else CASES).items():
        layout = sizes.layout()
        tensors = sum(sum(1 for _ in tensor.names()) for tensor in layout.tensors)
        endpoints = {rank: os.urandom(64) for rank in layout.mesh.ranks}
        whole = len(encode(Manifest(layout, endpoints, 7)))
        packed, publish = timed(lambda layout=layout: parts(layout), repeats=options.repeats)
        manifests, unpack = timed(lambda packed=packed: list(map(decode, packed)), repeats=options.repeats)
        _, join = timed(
            lambda manifests=manifests, layout=layout: merge(manifests, tensors=layout.tensors),
            repeats=options.repeats,
        )
        each = sum(map(len, packed))
        tables = peer_tables(sizes)
        peer = sum(map(len, tables)) if tables else 0
        ratios = f"{peer / each:10.0f} {peer / whole:10.0f}" if tables else f"{'-':>10} {'-':>10}"
        print(
            f"{name:9} {sizes.ranks:5} {tensors:8} {whole:8} {each:8} {1e3 * publish:10.2f} "
            f"{1e3 * unpack:9.2f} {1e3 * join:8.2f} {peer or '-':>9} {ratios}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
