"""Pairs of layouts of small models, what their ranks hold, and one rank's part of moving them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardweave.dialects import megatron, vllm
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Tensor,
    along,
    concat,
    even,
    pad,
    split,
    take,
    whole,
)
from shardweave.models import Model, from_config
from shardweave.move import (
    CollectiveTransport,
    MemoryTransport,
    NixlTransport,
    Rendezvous,
    Report,
    SharedTransport,
    Transport,
    execute,
    process_group,
)
from shardweave.plan import Plan, materialise, plan, simulate

torch.set_num_threads(1)

Tensors = dict[str, torch.Tensor]


def _model() -> Model:
    return from_config(
        {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "hidden_size": 20,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "intermediate_size": 24,
            "vocab_size": 70,
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
        }
    )


def _qkv(tp: int, offset: int) -> tuple[Layout, Layout]:
    """A fused Megatron QKV, padding, norms; to what vLLM holds, with a KV head on two ranks if tp is 4."""
    model = _model()
    return (
        megatron.layout(model, megatron.mesh(tp=4), vocab_divisor=3),
        vllm.layout(model, vllm.mesh(tp=tp, offset=offset), vocab_multiple=8),
    )


def _experts() -> tuple[Layout, Layout]:
    """Experts in another order on another number of ranks; stacked here, arrays of their own there."""
    tensor = Tensor(
        "layers.{layer}.experts.{expert}.w", (10, 7), "float32", (("layer", whole(3)), ("expert", whole(6)))
    )
    order = (4, 0, 3, 5, 1, 2)
    three, two = Mesh((("ep", 3),)), Mesh((("ep", 2),), offset=2)
    placed = along(three, "ep", lambda r: take(whole(6), order[2 * r : 2 * r + 2]))
    local = along(two, "ep", lambda r: whole(3))
    return (
        Layout(
            "stacked",
            three,
            (
                BufferRule(
                    "layers.{layer}.experts.w",
                    (Part(tensor),),
                    (whole(3), placed, whole(10), whole(7)),
                    stacked=(1, 2, 3),
                ),
            ),
        ),
        Layout(
            "separate",
            two,
            (
                BufferRule(
                    "layers.{layer}.experts.{expert}.w",
                    (Part(tensor),),
                    (whole(3), along(two, "ep", lambda r: even(whole(6), 2, r)), whole(10), whole(7)),
                    numbers=(("expert", local),),
                ),
            ),
        ),
    )


def _stages() -> tuple[Layout, Layout]:
    """Uneven pipeline stages, names that count from 0 on each; ranks 1 and 2 are on both sides."""
    tensor = Tensor("layers.{layer}.w", (9, 4), "float64", (("layer", whole(7)),))

    def side(name: str, mesh: Mesh, sizes: tuple[int, ...]) -> Layout:
        layers = along(mesh, "pp", lambda s: split(whole(7), sizes, s))
        numbers = along(mesh, "pp", lambda s: whole(sizes[s]))
        rule = BufferRule(
            "layers.{layer}.w", (Part(tensor),), (layers, whole(9), whole(4)), numbers=(("layer", numbers),)
        )
        return Layout(name, mesh, (rule,))

    return (
        side("three", Mesh((("pp", 3),)), (2, 4, 1)),
        side("two", Mesh((("pp", 2),), offset=1), (4, 3)),
    )


def _transposed() -> tuple[Layout, Layout]:
    """Stored the other way round, cut along the other dim, and a third dim in between."""
    tensor = Tensor("w", (12, 5, 9), "float32")
    two, three = Mesh((("tp", 2),)), Mesh((("tp", 3),), offset=2)
    rows = along(two, "tp", lambda r: even(whole(12), 2, r))
    columns = along(three, "tp", lambda r: even(whole(9), 3, r))
    return (
        Layout("rows", two, (BufferRule("w", (Part(tensor),), (rows, whole(5), whole(9))),)),
        Layout(
            "columns",
            three,
            (BufferRule("w", (Part(tensor),), (whole(12), whole(5), columns), stacked=(2, 0, 1)),),
        ),
    )


def _padding() -> tuple[Layout, Layout]:
    """A vocabulary padded to other sizes on both sides; a scalar that one rank has and all need."""
    embed, scale = Tensor("embed", (13, 6), "float64"), Tensor("scale", (), "float64")

    def side(name: str, mesh: Mesh, size: int, one: bool) -> Layout:
        rows = along(mesh, "tp", lambda r: even(pad(whole(13), size), mesh.axis_size("tp"), r))
        where = (("tp", (1,)),) if one else ()
        return Layout(
            name,
            mesh,
            (
                BufferRule("embed", (Part(embed),), (rows, whole(6))),
                BufferRule("scale", (Part(scale),), (), where=where),
            ),
        )

    return side("three", Mesh((("tp", 3),)), 6, True), side("two", Mesh((("tp", 2),), offset=3), 4, False)


def _uneven() -> tuple[Layout, Layout]:
    """Cuts at odd places; every third row on the other side, and columns in two orders."""
    tensor = Tensor("w", (13, 8), "float32")
    two, three = Mesh((("tp", 2),)), Mesh((("tp", 3),), offset=1)
    rows = along(two, "tp", lambda r: split(whole(13), (5, 8), r))
    every = along(three, "tp", lambda r: Dim([Run("", r, len(range(r, 13, 3)), 3)]))
    halves = concat(Dim([Run("", 5, 3)]), Dim([Run("", 0, 5)]))
    return (
        Layout("cut", two, (BufferRule("w", (Part(tensor),), (rows, whole(8))),)),
        Layout("dealt", three, (BufferRule("w", (Part(tensor),), (every, halves)),)),
    )


def _cast(src: str, dst: str) -> tuple[Layout, Layout]:
    """Another dtype on the other side, and columns where rows were."""
    tensor = Tensor("w", (10, 6), src)
    two, three = Mesh((("tp", 2),)), Mesh((("tp", 3),), offset=2)
    rows = along(two, "tp", lambda r: even(whole(10), 2, r))
    columns = along(three, "tp", lambda r: even(whole(6), 3, r))
    return (
        Layout("src", two, (BufferRule("w", (Part(tensor),), (rows, whole(6))),)),
        Layout("dst", three, (BufferRule("w", (Part(tensor),), (whole(10), columns), dtype=dst),)),
    )


PAIRS = {
    "fused_qkv": lambda: _qkv(2, 4),
    "kv_heads_on_two_ranks": lambda: _qkv(4, 2),
    "experts": _experts,
    "stages": _stages,
    "transposed": _transposed,
    "padding": _padding,
    "uneven": _uneven,
    "cast_up": lambda: _cast("bfloat16", "float64"),
    "cast_down": lambda: _cast("float32", "bfloat16"),
}


# Made before ranks are forked, so once for all of them.
PLANS = {pair: plan(*sides(), allow_casts=pair == "cast_down") for pair, sides in PAIRS.items()}


def ranks_of(moves: Plan) -> list[int]:
    return sorted({*moves.src.mesh.ranks, *moves.dst.mesh.ranks})


def source(moves: Plan) -> dict[int, Tensors]:
    """What the ranks of the source hold: random values of the stored dtype; padding is NaN."""
    random = np.random.default_rng(3)
    values = {t: random.standard_normal([len(dim) for dim in t.dims]) for t in moves.src.tensors}
    state = materialise(moves.src, values, fill=np.nan)
    return {rank: _stored(moves.src, rank, arrays) for rank, arrays in state.items()}


def prefilled(moves: Plan, rank: int) -> Tensors:
    """What a rank of the destination holds before: NaN."""
    if rank not in moves.dst.mesh.ranks:
        return {}
    return {
        name: torch.full(buffer.shape, torch.nan, dtype=getattr(torch, buffer.dtype))
        for name, (buffer, _) in moves.dst.arrays(rank).items()
    }


def expected(moves: Plan) -> dict[int, Tensors]:
    """The reference: simulated in float64, which holds every value of the stored dtypes, and cast once."""
    state = {rank: {n: t.double().numpy() for n, t in held.items()} for rank, held in source(moves).items()}
    into = {
        rank: {n: t.double().numpy() for n, t in prefilled(moves, rank).items()}
        for rank in moves.dst.mesh.ranks
    }
    return {
        rank: _stored(moves.dst, rank, arrays) for rank, arrays in simulate(moves, state, into=into).items()
    }


def _stored(layout: Layout, rank: int, arrays: dict[str, Any]) -> Tensors:
    stored = {name: getattr(torch, buffer.dtype) for name, (buffer, _) in layout.arrays(rank).items()}
    # A cast may give NaN other bits; here there is one NaN.
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: t.to(stored[name]).masked_fill(t.isnan(), torch.nan) for name, t in given.items()}


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {
        name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()
    }


# --- one rank -----------------------------------------------------------------------------------


def transport(
    kind: str, rank: int, ranks: list[int], store: torch.distributed.Store, timeout_s: float
) -> Transport:
    if kind == "collective":
        group = process_group(store=store, ranks=ranks, rank=rank, timeout_s=timeout_s)
        return CollectiveTransport(group=group, ranks=ranks, timeout_s=timeout_s)
    if kind == "nixl":
        return NixlTransport(rank=rank, timeout_s=timeout_s)
    if kind == "shared":
        return SharedTransport(rank=rank)
    return MemoryTransport({}, rank=rank)


def move(
    rank: int,
    *,
    pair: str,
    kind: str,
    folder: Path,
    memory_bytes: int = 1 << 20,
    verify: bool = True,
    timeout_s: float = 20.0,
    ends: dict[int, str] | None = None,
    turns: int = 1,
) -> tuple[dict[str, bytes], Report]:
    """One rank's part: plan, meet, offer, move, as often as asked; `ends` says which rank dies or stalls."""
    moves = PLANS[pair]
    ranks = ranks_of(moves)
    store = torch.distributed.FileStore(str(folder / "store"), len(ranks))
    meeting = Rendezvous(
        store=torch.distributed.PrefixStore("move", store), ranks=ranks, rank=rank, timeout_s=timeout_s
    )
    end = transport(kind, rank, ranks, store, timeout_s)
    src, dst = source(moves).get(rank, {}), prefilled(moves, rank)
    _hamper(end, (ends or {}).get(rank, ""))
    for _ in range(turns):
        endpoints = meeting.exchange(end.offer(src))
        for tensor in dst.values():
            tensor.fill_(torch.nan)
        report = execute(
            moves,
            rank=rank,
            transport=end,
            src=src,
            dst=dst,
            endpoints=endpoints,
            memory_bytes=memory_bytes,
            rendezvous=meeting,
            verify=verify,
        )
    end.close()
    return bits(dst), report


def _hamper(end: Transport, how: str) -> None:
    """Let a rank die or stall when it comes to its first round."""
    run = end.run

    def hampered(*args: Any, **given: Any) -> Any:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stalls":
            time.sleep(1000)
        return run(*args, **given)

    end.run = hampered  # type: ignore[method-assign]
