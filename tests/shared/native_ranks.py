"""Ranks as threads that save together, and a small model with everything that makes layouts hard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from shardweave.layout import (
    BufferRule,
    Layout,
    Mesh,
    Part,
    Tensor,
    along,
    even,
    pad,
    replicated,
    whole,
)
from shardweave.store.native_write import Exchange

T = TypeVar("T")

VOCAB, HIDDEN, FFN, LAYERS, EXPERTS = 101, 24, 36, 5, 6


class Meeting:
    """Exchanges of ranks that are threads."""

    def __init__(self, size: int, *, within_s: float = 20.0) -> None:
        self._said: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)
        self._within_s = within_s

    def of(self, rank: int) -> Exchange:
        def exchange(data: bytes) -> Sequence[bytes]:
            self._said[rank] = data
            self._barrier.wait(self._within_s)
            found = list(self._said)
            self._barrier.wait(self._within_s)
            return found

        return exchange


def each(size: int, work: Callable[[int], T]) -> list[T | BaseException]:
    """What `work` returns or raises for each rank, all at the same time."""
    found: list[T | BaseException] = [RuntimeError("it did not end")] * size

    def one(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def tensors() -> dict[str, Tensor]:
    """Sizes that divide by nothing in common, a family over layers, one over layers and experts."""
    layers, experts = ("layer", whole(LAYERS)), ("expert", whole(EXPERTS))
    prefix = "model.layers.{layer}"
    shapes: dict[str, tuple[str, tuple[int, ...], Any]] = {
        "embed": ("model.embed_tokens.weight", (VOCAB, HIDDEN), ()),
        "norm": (f"{prefix}.input_layernorm.weight", (HIDDEN,), (layers,)),
        "gate": (f"{prefix}.mlp.experts.{{expert}}.gate_proj.weight", (FFN, HIDDEN), (layers, experts)),
        "up": (f"{prefix}.mlp.up_proj.weight", (FFN, HIDDEN), (layers,)),
        "down": (f"{prefix}.mlp.down_proj.weight", (HIDDEN, FFN), (layers,)),
    }
    return {role: Tensor(name, shape, "float32", index) for role, (name, shape, index) in shapes.items()}


def layout(*, tp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1, dtype: str = "") -> Layout:
    """Rows over tp, the embedding padded and on both ends, experts over ep, layers over stages, unevenly."""
    edp = tp * dp // ep
    mesh = Mesh((("tp", tp), ("dp", dp), ("pp", pp)), ((("ep", ep), ("edp", edp), ("pp", pp)),))
    t = tensors()
    stage = along(mesh, "pp", lambda r: even(pad(whole(LAYERS), pp), pp, r).only(""))
    rows = along(mesh, "tp", lambda r: even(whole(FFN), tp, r))
    vocab = along(mesh, "tp", lambda r: even(pad(whole(VOCAB), 4 * tp), tp, r))
    embed = BufferRule(t["embed"].name, (Part(t["embed"]),), (vocab, whole(HIDDEN)), where=(("pp", (0,)),))
    rules = [
        embed,
        BufferRule(t["norm"].name, (Part(t["norm"]),), (stage, whole(HIDDEN))),
        BufferRule(
            "model.layers.{layer}.mlp.experts.gate_proj.weight",
            (Part(t["gate"]),),
            (stage, along(mesh, "ep", lambda r: even(whole(EXPERTS), ep, r)), whole(FFN), whole(HIDDEN)),
            stacked=(1, 2, 3),
        ),
        BufferRule(t["down"].name, (Part(t["down"]),), (stage, whole(HIDDEN), rows)),
        # Stored as columns by rows: an array whose dims are in another order than the tensor's.
        BufferRule(t["up"].name, (Part(t["up"]),), (stage, rows, whole(HIDDEN)), stacked=(2, 1)),
    ]
    if pp > 1:
        again = BufferRule(embed.name, embed.parts, embed.dims, where=(("pp", (pp - 1,)),))
        rules.append(replicated(again))
    if dtype:
        rules = [BufferRule(r.name, r.parts, r.dims, r.stacked, r.numbers, r.where, dtype) for r in rules]
    return Layout("test", mesh, tuple(rules))


def values(seed: int = 0) -> dict[Tensor, np.ndarray]:
    """Whole tensors of distinct values: no element is like another one."""
    found, start = {}, 1 + seed * 1_000_000
    for tensor in tensors().values():
        shape = tuple(len(dim) for dim in tensor.dims)
        found[tensor] = np.arange(start, start + tensor.numel, dtype=np.float32).reshape(shape)
        start += tensor.numel
    return found
