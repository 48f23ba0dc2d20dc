"""A trainer and engines as threads of one process, over any transport: what live refits are tried on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed import HashStore

from shardweave.dialects import megatron, vllm
from shardweave.errors import ShardweaveError
from shardweave.layout import Layout
from shardweave.models import Model, from_config
from shardweave.move import MemoryTransport, Transport
from shardweave.plan import materialise
from shardweave.refit import Buffers, Publisher, Receiver, Refit, Session, Source
from shardweave.refit.transports import maker

Tensors = dict[str, torch.Tensor]


def model(**changed: Any) -> Model:
    return from_config(
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 3,
            "hidden_size": 20,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "intermediate_size": 24,
            "moe_intermediate_size": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "vocab_size": 70,
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            **changed,
        }
    )


def trainer_layout(tp: int = 4, **changed: Any) -> Layout:
    """Four ranks, of which some hold no K and no V."""
    return megatron.layout(model(**changed), megatron.mesh(tp=tp, ep=2, etp=tp // 2), vocab_divisor=3)


def engine_layout(tp: int = 2, *, offset: int = 4, **changed: Any) -> Layout:
    return vllm.layout(model(**changed), vllm.mesh(tp=tp, offset=offset))


def content(layout: Layout, version: int) -> dict[int, Tensors]:
    """What the ranks of a layout hold of a version; the reference, cut from whole tensors."""
    whole = {
        tensor: np.random.default_rng([version, i]).standard_normal([len(dim) for dim in tensor.dims])
        for i, tensor in enumerate(sorted(layout.tensors, key=lambda t: t.name))
    }
    state = materialise(layout, whole, fill=0)
    return {
        rank: {
            name: torch.from_numpy(array).to(getattr(torch, layout.arrays(rank)[name][0].dtype))
            for name, array in arrays.items()
        }
        for rank, arrays in state.items()
    }


def bits(arrays: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in arrays.items()
    }


@dataclass
class World:
    """A trainer and engines, each rank with its seat, kept from turn to turn.

    Attributes:
        trainer, engines: Their layouts. Where ranks state layouts of their own, see ``parts``.
        transport: The name of one, or ``"memory"``.
        hamper: For some ranks, what is put around their transports.
        options: Of the receivers.
        parts: For some publishers, the layout that they state in place of the trainer's.
    """

    trainer: Layout
    engines: tuple[Layout, ...]
    transport: str = "memory"
    timeout_s: float = 10.0
    retries: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    hamper: dict[int, Callable[[Transport], Transport]] = field(default_factory=dict)
    parts: dict[int, Layout] = field(default_factory=dict)
    memory_bytes: int = 1 << 28

    def __post_init__(self) -> None:
        self.store: Any = HashStore()
        self.table: dict[int, Any] = {}
        self.live = content(self.trainer, 0)
        self.served: dict[int, Tensors] = {}
        self.members: dict[int, Publisher | Receiver] = {}
        for rank in (*self.publishers, *self.receivers):
            self.join(rank)

    @property
    def publishers(self) -> tuple[int, ...]:
        return tuple(self.trainer.mesh.ranks)

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(rank for engine in self.engines for rank in engine.mesh.ranks)

    def engine_of(self, rank: int) -> Layout:
        return next(engine for engine in self.engines if rank in engine.mesh.ranks)

    def session(self, rank: int) -> Session:
        make_inner = None if self.transport == "memory" else maker(self.transport)

        def make(*, store: Any, ranks: Any, rank: int, timeout_s: float) -> Transport:
            made: Transport = (
                MemoryTransport(self.table, rank=rank)
                if make_inner is None
                else make_inner(store=store, ranks=ranks, rank=rank, timeout_s=timeout_s)
            )
            return self.hamper[rank](made) if rank in self.hamper else made

        return Session(
            store=self.store,
            publishers=self.publishers,
            receivers=self.receivers,
            rank=rank,
            transport=make,
            timeout_s=self.timeout_s,
            retries=self.retries,
            memory_bytes=self.memory_bytes,
        )

    def join(self, rank: int) -> None:
        """Start a rank, or start it again."""
        if rank in self.publishers:
            layout = self.parts.get(rank, self.trainer)
            self.members[rank] = Publisher(self.session(rank), Source(layout, self.live[rank], rank))
            return
        layout = self.engine_of(rank)
        self.served[rank] = {
            name: torch.full(buffer.shape, torch.nan, dtype=getattr(torch, buffer.dtype))
            for name, (buffer, _) in layout.arrays(rank).items()
        }
        target = Buffers(layout=layout, rank=rank, arrays=self.served[rank])
        self.members[rank] = Receiver(self.session(rank), target, **self.options)

    def train(self, version: int) -> None:
        """The weights of a version, in place, as an optimizer leaves them."""
        for rank, arrays in content(self.trainer, version).items():
            for name, array in arrays.items():
                self.live[rank][name].copy_(array)

    def turn(self, version: int, *, without: tuple[int, ...] = ()) -> dict[int, Refit | BaseException]:
        """All ranks but some publish or receive; what each returned or raised."""
        found: dict[int, Refit | BaseException] = {}

        def run(rank: int) -> None:
            member = self.members[rank]
            try:
                found[rank] = member.publish(version) if isinstance(member, Publisher) else member.receive()
            except BaseException as error:
                found[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank,), daemon=True)
            for rank in self.members
            if rank not in without
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * self.timeout_s + 20)
            assert not thread.is_alive(), "a rank hangs"
        return found

    def check_serves(self, version: int | None) -> None:
        """Every receiver serves a version, whole, and says so."""
        for engine in self.engines:
            wanted = content(engine, version) if version is not None else {}
            for rank in engine.mesh.ranks:
                receiver = self.members[rank]
                assert isinstance(receiver, Receiver)
                assert receiver.version == version
                if version is None:
                    assert all(t.isnan().all() for t in self.served[rank].values())
                else:
                    assert bits(self.served[rank]) == bits(wanted[rank])

    def close(self) -> None:
        for member in self.members.values():
            member.close()


def all_alike(found: Mapping[int, Refit | BaseException], kind: type[ShardweaveError]) -> None:
    """Every rank raised an error of one class."""
    assert {type(each) for each in found.values()} == {kind}, found


def succeeded(found: Mapping[int, Refit | BaseException]) -> dict[int, Refit]:
    for each in found.values():
        if isinstance(each, BaseException):
            raise each
    return {rank: each for rank, each in found.items() if isinstance(each, Refit)}


# --- transports that do harm -------------------------------------------------------------------


class Lies:
    """A transport that reports success and moves nothing, or moves something else."""

    def __init__(self, inner: Transport, times: int, how: str) -> None:
        self.inner, self.rank, self.times, self.how = inner, inner.rank, times, how

    def offer(self, arrays: Any) -> bytes:
        return self.inner.offer(arrays)

    def run(self, plan: Any, copies: Any, **given: Any) -> Any:
        self.times -= 1
        if self.times < 0:
            return self.inner.run(plan, copies, **given)
        if self.how == "moves nothing":
            return self.inner.run(plan, [], **given)
        moved = self.inner.run(plan, copies, **given)
        mine = [copy for copy in copies if copy.dst_rank == self.rank]
        if mine:
            array = given["dst"][mine[-1].dst_name]
            at = tuple(r[-1] for r in mine[-1].dst_box.dims)
            array.view(torch.int16)[at] ^= 1  # one bit of one element
        return moved

    def close(self) -> None:
        self.inner.close()


class Steps:
    """An optimizer that steps while its weights are read."""

    def __init__(self, inner: Transport, step: Callable[[], None]) -> None:
        self.inner, self.rank, self.step = inner, inner.rank, step

    def offer(self, arrays: Any) -> bytes:
        return self.inner.offer(arrays)

    def run(self, *args: Any, **given: Any) -> Any:
        self.step()
        return self.inner.run(*args, **given)

    def close(self) -> None:
        self.inner.close()
