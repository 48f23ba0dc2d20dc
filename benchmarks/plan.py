"""How long it takes to find out which bytes go where: layouts, plan and proof together.

    python benchmarks/plan.py            the three cases, modelexpress beside the first where it is installed
    python benchmarks/plan.py --tiny     small models, a second in all

Cases:
    experts   6 layers x 128 experts x gate, up, down; a trainer rank with whole experts to vLLM at TP4
    trillion  61 layers, 384 experts: 512 Megatron ranks (PP8 x EP64) to 256 engine ranks (TP8 x EP32)
    dense     64 layers, hidden 5120, 64/8 heads: Megatron TP8 to Megatron TP4 on 64 ranks

Each figure is the best of several runs on one thread. A plan is made from nothing each time: no
cache outlives a run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from shardweave.dialects import megatron, vllm
from shardweave.layout import BufferRule, Layout, Mesh, Part, along, concat, even, whole
from shardweave.models import Model, from_config
from shardweave.plan import Cost, Plan, cost, plan


@dataclass(frozen=True)
class Sizes:
    """A model, and how it is spread."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    expert_ffn: int = 0

    def model(self) -> Model:
        """The model as the reader of configs describes it."""
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
                "num_experts_per_tok": 8,
                "moe_intermediate_size": self.expert_ffn,
            }
        return from_config(config)


EXPERTS = Sizes(6, 2048, 32, 4, 128, 6144, 151936, experts=128, expert_ffn=768)
TRILLION = Sizes(61, 7168, 64, 8, 128, 18432, 163840, experts=384, expert_ffn=2048)
DENSE = Sizes(64, 5120, 64, 8, 128, 25600, 151936)

TINY_EXPERTS = Sizes(2, 32, 8, 4, 4, 64, 128, experts=8, expert_ffn=24)
TINY_TRILLION = Sizes(9, 64, 16, 8, 4, 64, 1024, experts=24, expert_ffn=32)
TINY_DENSE = Sizes(4, 64, 16, 8, 4, 96, 1024)


def experts_only(layout: Layout) -> Layout:
    """The buffers of the experts, which the peer is asked about."""
    rules = tuple(rule for rule in layout.rules if "expert" in rule.index)
    return Layout(layout.name, layout.mesh, rules)


def experts_case(model: Model, tp: int) -> tuple[Layout, Layout]:
    trainer = megatron.layout(model, megatron.mesh())
    engine = vllm.layout(model, vllm.mesh(tp=tp, offset=1))
    return experts_only(trainer), experts_only(engine)


def trillion_case(model: Model, pp: int, ep: int, tp: int, engine_ep: int) -> tuple[Layout, Layout]:
    trainer_mesh = megatron.mesh(pp=pp, ep=ep, dp=ep, etp=1)
    left = model.num_layers - (pp - 1) * -(-model.num_layers // pp)
    trainer = megatron.layout(model, trainer_mesh, pipeline=megatron.stages(model.num_layers, pp, last=left))
    return trainer, engine(model, Mesh((("tp", tp), ("ep", engine_ep)), offset=trainer_mesh.size))


def dense_case(model: Model, tp_from: int, tp_to: int, ranks: int) -> tuple[Layout, Layout]:
    trainer = megatron.layout(model, megatron.mesh(tp=tp_from, dp=ranks // tp_from))
    other = megatron.layout(model, megatron.mesh(tp=tp_to, dp=ranks // tp_to, offset=ranks))
    return trainer, other


def engine(model: Model, mesh: Mesh) -> Layout:
    """An engine with stacked experts, spread along ``ep`` and their rows cut along ``tp``."""
    tp = mesh.axis_size("tp")
    rules: list[BufferRule] = []

    def fused(
        name: str, block_roles: dict[str, tuple[Part, int]], cut: int | None, *, stacked: bool = False
    ) -> None:
        parts = tuple(part for part, _ in block_roles.values())
        tensor = parts[0].tensor
        dims = list(tensor.dims)
        first = len(tensor.index)
        if len(tensor.index) > 1:
            dims[1] = along(mesh, "ep", lambda r: even(tensor.dims[1], mesh.axis_size("ep"), r))
        if cut is not None:
            sizes = [(whole(part.tensor.shape[cut], part.label), n) for part, n in block_roles.values()]
            dims[first + cut] = along(
                mesh, "tp", lambda r: concat(*(even(rows, n, r * n // tp) for rows, n in sizes))
            )
        order = tuple(range(1, tensor.num_dims)) if stacked else None
        rules.append(BufferRule(name, parts, tuple(dims), stacked=order))

    for block in model.blocks:
        t = block.tensors
        if block.kind == "attention":
            kv = min(tp, block.sizes["num_kv_heads"])
            copies = kv < tp
            fused(
                "layers.{layer}.qkv",
                {
                    "q": (Part(t["q"], "q"), tp),
                    "k": (Part(t["k"], "k", replica=copies), kv),
                    "v": (Part(t["v"], "v", replica=copies), kv),
                },
                0,
            )
            fused("layers.{layer}.o", {"o": (Part(t["o"]), tp)}, 1)
            for role in ("q_norm", "k_norm"):
                fused(f"layers.{{layer}}.{role}", {role: (Part(t[role]), 1)}, None)
        elif block.kind == "moe":
            fused("layers.{layer}.router", {"router": (Part(t["router"]), 1)}, None)
            fused(
                "layers.{layer}.w13",
                {"gate": (Part(t["gate"], "gate"), tp), "up": (Part(t["up"], "up"), tp)},
                0,
                stacked=True,
            )
            fused("layers.{layer}.w2", {"down": (Part(t["down"]), tp)}, 1, stacked=True)
        elif block.kind in ("embedding", "head"):
            for role, tensor in t.items():
                fused(role, {role: (Part(tensor), tp)}, 0)
        else:
            for role, tensor in t.items():
                fused(tensor.name, {role: (Part(tensor), 1)}, None)
    return Layout("engine", mesh, tuple(rules))


@dataclass(frozen=True)
class Figures:
    """What one case cost."""

    name: str
    build_s: float
    plan_s: float
    peak_bytes: int
    tensors: int
    moves: int
    cost: Cost


def measure(name: str, case: Callable[[], tuple[Layout, Layout]], *, repeats: int) -> Figures:
    """Best time of both steps, and the most memory that they hold at once in a run of their own."""
    build_s = plan_s = float("inf")
    result: Plan | None = None
    for _ in range(max(repeats, 1)):
        start = time.perf_counter()
        src, dst = case()
        middle = time.perf_counter()
        result = plan(src, dst)
        end = time.perf_counter()
        build_s, plan_s = min(build_s, middle - start), min(plan_s, end - middle)
    assert result is not None
    tracemalloc.start()
    plan(*case())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tensors = sum(int(np.prod([len(dim) for _, dim in t.index])) for t in result.dst.tensors)
    return Figures(name, build_s, plan_s, peak_bytes, tensors, result.num_moves, cost(result))


def peer_seconds(sizes: Sizes, tp: int) -> float | None:
    """modelexpress planning what one of the ``tp`` receivers reads, or ``None`` where it is not installed.

    It gets for nothing what ours includes: the offers are merged and the loader's copies recorded.
    """
    if importlib.util.find_spec("modelexpress") is None:
        return None
    import torch
    from modelexpress.refit.reshard import rendezvous
    from modelexpress.refit.reshard.transfer_plan import plan_transfer
    from modelexpress.refit.reshard.types import CaptureResult, RecordedCopy

    hidden, ffn, address = sizes.hidden, sizes.expert_ffn, 1 << 40
    share, rank = ffn // tp, 1
    offers, copies = [], []
    for layer in range(sizes.layers):
        for expert in range(sizes.experts):
            for role, shape, dim in (
                ("gate", (ffn, hidden), 0),
                ("up", (ffn, hidden), 0),
                ("down", (hidden, ffn), 1),
            ):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"
                offer = rendezvous.PublishedShard("trainer", 0, address, (0, 0), shape)
                offers.append(rendezvous.PublishedTensor(name, "bfloat16", 2, shape, [offer]))
                address += 2 * ffn * hidden
                view = (share, hidden) if dim == 0 else (hidden, share)
                # w13 holds gate, then up, of each expert; w2 holds down.
                offset = expert * view[0] * view[1] * (2 if dim == 0 else 1)
                offset += view[0] * view[1] if role == "up" else 0
                copies.append(
                    RecordedCopy(
                        name,
                        (("narrow", (dim, rank * share, share), ()),),
                        f"model.layers.{layer}.mlp.experts.{'w13' if dim == 0 else 'w2'}_weight",
                        offset,
                        view,
                        (view[1], 1),
                        torch.bfloat16,
                    )
                )
    sources = rendezvous.build_sources(offers)[0]
    start = time.perf_counter()
    found = plan_transfer(CaptureResult(copies=copies), sources)
    seconds = time.perf_counter() - start
    planned = sum(segment.nbytes for segment in found._all_segments())
    print(
        f"modelexpress: {len(copies)} copies of one receiver in {seconds:.3f} s, "
        f"{found.descriptor_count()} descriptors, {planned / found.exact_bytes:.2f} x the needed bytes",
        flush=True,
    )
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-peer", action="store_true", help="leave modelexpress out (its part takes 20 s)")
    options = parser.parse_args(argv)
    tiny = options.tiny
    small = TINY_EXPERTS if tiny else EXPERTS
    experts = small.model()
    trillion = (TINY_TRILLION if tiny else TRILLION).model()
    dense = (TINY_DENSE if tiny else DENSE).model()
    big = (2, 4, 2, 2) if tiny else (8, 64, 8, 32)
    cases: dict[str, Callable[[], tuple[Layout, Layout]]] = {
        "experts": lambda: experts_case(experts, 4),
        "trillion": lambda: trillion_case(trillion, *big),
        "dense": lambda: dense_case(dense, 8, 4, 16 if tiny else 64),
    }
    machine = platform.processor() or platform.machine()
    print(
        f"{machine}, {os.cpu_count()} CPUs, Python {platform.python_version()}, numpy {np.__version__}; "
        f"one thread, best of {options.repeats}"
    )
    print(
        f"{'case':9} {'tensors':>8} {'moves':>7} {'layouts ms':>10} {'plan ms':>8} {'peak MiB':>8} "
        f"{'copies':>8} {'moved/needed':>12} {'send max/mean':>13}"
    )
    found = {}
    for name, case in cases.items():
        f = found[name] = measure(name, case, repeats=options.repeats)
        print(
            f"{name:9} {f.tensors:8} {f.moves:7} {1e3 * f.build_s:10.2f} {1e3 * f.plan_s:8.2f} "
            f"{f.peak_bytes / 2**20:8.1f} {f.cost.num_copies:8} "
            f"{f.cost.num_bytes / f.cost.needed_bytes:12.3f} {f.cost.send_imbalance:13.3f}",
            flush=True,
        )
    if not options.no_peer and (seconds := peer_seconds(small, 4)) is not None:
        ours = found["experts"].build_s + found["experts"].plan_s
        print(
            f"experts: ours, layouts and proofs included and for all 4 receivers, {1e3 * ours:.2f} ms: "
            f"{seconds / ours:.0f} x faster than modelexpress for one"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
