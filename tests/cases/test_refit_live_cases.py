"""Public reports about live refits, one test each, on every transport where it makes a difference.

First what users of other systems reported, then what ModelExpress 0.7.0 accepts without a word, as far as it
takes a running refit to see it; the same cases of plans and manifests alone are in test_plan_cases.py and
test_refit_cases.py. Ranks are threads of one process.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refit_world import (
    Lies,
    Steps,
    World,
    all_alike,
    bits,
    content,
    engine_layout,
    model,
    succeeded,
    trainer_layout,
)

from shardweave.dialects import hf, megatron, vllm
from shardweave.errors import (
    DigestError,
    DtypeError,
    GapError,
    OverlapError,
    PlanError,
    ReplicaError,
    ShardweaveError,
    TransportError,
)
from shardweave.layout import (
    PAD,
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Tensor,
    Transform,
    along,
    concat,
    even,
    exact_sums,
    pad,
    split,
    whole,
)
from shardweave.models import Model, from_config
from shardweave.move import Transport
from shardweave.refit import Buffers, Publisher, Receiver, Source

NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("nixl", "nixl_cu12", "nixl_cu13"))),
        reason="nixl is not installed",
    ),
)
each_transport = pytest.mark.parametrize("transport", ["memory", "gloo", "shared", NIXL])


@contextmanager
def world(*given: Any, **options: Any) -> Iterator[World]:
    made = World(*given, **options)
    try:
        yield made
    finally:
        made.close()


def flat(mesh: Mesh, tensor: Tensor, *dims: Any, **options: Any) -> Layout:
    """A layout of one buffer with the name of its tensor."""
    return Layout("", mesh, (BufferRule(tensor.name, (Part(tensor),), dims or tensor.dims, **options),))


def one(offset: int) -> Mesh:
    return Mesh((), offset=offset)


def dense(heads: int, kv_heads: int, *, tied: bool = False) -> Model:
    return from_config(
        {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "hidden_size": 20,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 4,
            "intermediate_size": 24,
            "vocab_size": 70,
            "dtype": "bfloat16",
            "tie_word_embeddings": tied,
        }
    )


def pair(transport: str) -> tuple[Layout, tuple[Layout, ...]]:
    """Experts, few KV heads, padding; with half the ranks where each one's end takes long to make."""
    tp = 2 if transport == "nixl" else 4
    return trainer_layout(tp), (engine_layout(tp // 2, offset=tp),)


def whole_of(layout: Layout, offset: int) -> Layout:
    """A layout of one rank, at another."""
    return Layout(layout.name, one(offset), layout.rules)


# --- what users report --------------------------------------------------------------------------


@each_transport
@pytest.mark.parametrize(("heads", "kv", "tp"), [(64, 2, 8), (24, 6, 4)])
def test_modelexpress_639_650_kv_heads_below_tp(heads: int, kv: int, tp: int, transport: str) -> None:
    """Ranks with queries only, and with half a head; all of q, k and v arrive, byte for byte."""
    described = dense(heads, kv)
    trainer = megatron.layout(described, megatron.mesh(tp=tp), vocab_divisor=1)
    with world(trainer, (whole_of(hf.layout(described), tp),), transport=transport) as live:
        live.train(1)
        succeeded(live.turn(1))
        live.check_serves(1)


@each_transport
def test_modelexpress_635_eight_equal_offers_are_read_once_and_shared(transport: str) -> None:
    tensor = Tensor("w", (8, 4), "float32")
    with world(flat(Mesh((("dp", 8),)), tensor), (flat(one(8), tensor),), transport=transport) as live:
        done = succeeded(live.turn(0))
        assert done[8].bytes_received == 128
        if transport == "gloo":
            assert [done[rank].bytes_sent for rank in range(8)] == [16] * 8
        live.check_serves(0)


def test_modelexpress_635_a_trainer_that_orders_rows_otherwise_is_seen() -> None:
    """The live self-test: known rows through a refit and back. With two groups swapped it fails."""
    described = dense(12, 2)
    trainer = megatron.layout(described, megatron.mesh(tp=4), vocab_divisor=1)
    engine = whole_of(hf.layout(described), 4)

    def read_back(*, swapped: bool) -> bool:
        with world(trainer, (engine,)) as live:
            numbers = content(trainer, 0)
            names = [name for name in numbers[0] if "linear_qkv.weight" in name]
            assert names
            for name in names if swapped else ():
                fused = torch.cat([numbers[rank][name] for rank in range(4)])
                first, second = fused.chunk(2)
                for rank, rows in enumerate(torch.cat([second, first]).chunk(4)):
                    numbers[rank][name].copy_(rows)
            for rank, name in itertools.product(range(4), numbers[0]):
                live.live[rank][name].copy_(numbers[rank][name])
            succeeded(live.turn(0))
            return bits(live.served[4]) == bits(content(engine, 0)[4])

    assert read_back(swapped=False)
    assert not read_back(swapped=True)


@each_transport
def test_nemo_rl_3632_one_failed_receiver_leaves_all_at_the_version_before(transport: str) -> None:
    trainer, _ = pair(transport)
    engines = tuple(engine_layout(1, offset=trainer.mesh.size + i) for i in range(3))
    with world(trainer, engines, transport=transport) as live:
        succeeded(live.turn(0))
        receiver = live.members[live.receivers[1]]
        derive = receiver.target.derive

        def fail() -> None:
            derive()
            raise RuntimeError("the kernel cannot take these shapes")

        receiver.target.derive = fail
        live.train(1)
        found = live.turn(1)
        all_alike(found, TransportError)
        assert all("the kernel cannot take these shapes" in str(error) for error in found.values())
        live.check_serves(0)
        receiver.target.derive = derive
        succeeded(live.turn(1))
        live.check_serves(1)


class Breaks:
    """A receiver whose loader refuses something in the middle of the transfer."""

    def __init__(self, inner: Transport, rounds: int) -> None:
        self.inner, self.rank, self.left = inner, inner.rank, rounds

    def offer(self, arrays: Any) -> bytes:
        return self.inner.offer(arrays)

    def run(self, *given: Any, **more: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise AssertionError("size mismatch in tensor k")
        return self.inner.run(*given, **more)

    def close(self) -> None:
        self.inner.close()


@each_transport
def test_nemo_rl_3403_an_engine_that_fails_in_the_transfer_frees_the_trainer(transport: str) -> None:
    timeout_s = 20.0
    with world(*pair(transport), transport=transport, timeout_s=timeout_s, memory_bytes=4096) as live:
        live.hamper[live.receivers[-1]] = lambda inner: Breaks(inner, 2)
        begin = time.monotonic()
        found = live.turn(0)
        assert time.monotonic() - begin < timeout_s, "nobody waits until it is too late"
        assert all("size mismatch in tensor k" in str(error) for error in found.values()), found
        live.check_serves(None)
        live.hamper.clear()
        succeeded(live.turn(0))
        live.check_serves(0)


@each_transport
def test_nemo_rl_3403_stacked_experts_arrive_as_one_tensor_each(transport: str) -> None:
    tensor = Tensor(
        "layers.{layer}.experts.{expert}.w", (10, 7), "float32", (("layer", whole(2)), ("expert", whole(6)))
    )
    three = Mesh((("ep", 3),))
    placed = along(three, "ep", lambda r: even(whole(6), 3, r))
    stacked = BufferRule(
        "layers.{layer}.experts.w",
        (Part(tensor),),
        (whole(2), placed, whole(10), whole(7)),
        stacked=(1, 2, 3),
    )
    engine = Layout("", one(3), (BufferRule(tensor.name, (Part(tensor),), tensor.dims),))
    with world(Layout("", three, (stacked,)), (engine,), transport=transport) as live:
        assert live.live[0]["layers.0.experts.w"].shape == (2, 10, 7)
        succeeded(live.turn(0))
        assert len(live.served[3]) == 12 and live.served[3]["layers.1.experts.5.w"].shape == (10, 7)
        live.check_serves(0)


@each_transport
def test_nemo_rl_2471_an_embedding_on_two_stages_is_one_source_if_it_is_one(transport: str) -> None:
    trainer = megatron.layout(dense(12, 2, tied=True), megatron.mesh(tp=2, pp=2), vocab_divisor=1)
    engine = Layout("", one(4), tuple(BufferRule(t.name, (Part(t),), t.dims) for t in trainer.tensors))
    with world(trainer, (engine,), transport=transport) as live:
        held = {rank: set(arrays) for rank, arrays in live.live.items()}
        assert [("output_layer.weight" in names) for names in held.values()] == [False, False, True, True]
        done = succeeded(live.turn(0))
        assert done[4].bytes_received == sum(t.nbytes for t in live.served[4].values())
        live.check_serves(0)
        live.train(1)
        live.live[3]["output_layer.weight"][5, 7] += 1  # one element of the copy, on one rank
        found = live.turn(1)
        all_alike(found, ReplicaError)
        assert "rank 1 and rank 3" in str(found[0]) and "embed" in str(found[0])
        live.check_serves(0)


def test_replicas_of_data_parallel_ranks_are_compared_too() -> None:
    trainer = megatron.layout(dense(12, 2), megatron.mesh(tp=2, dp=2), vocab_divisor=1)
    with world(trainer, (whole_of(hf.layout(dense(12, 2)), 4),)) as live:
        succeeded(live.turn(0))
        live.train(1)
        name = next(name for name in live.live[2] if "linear_proj" in name)
        live.live[2][name].view(torch.int16)[3, 1] ^= 1
        found = live.turn(1)
        all_alike(found, ReplicaError)
        assert "rank 0 and rank 2" in str(found[4]) and "o_proj" in str(found[4])
        live.check_serves(0)


def test_replicas_that_overlap_in_part_are_compared_where_they_do() -> None:
    tensor = Tensor("w", (12, 5), "float32")
    mesh = Mesh((("r", 3),))
    rows = along(mesh, "r", lambda r: whole(12) if r == 0 else split(whole(12), (7, 5), r - 1))
    trainer = Layout("", mesh, (BufferRule("w", (Part(tensor, replica=True),), (rows, whole(5))),))
    with world(trainer, (flat(one(3), tensor),)) as live:
        succeeded(live.turn(0))
        live.check_serves(0)
        live.train(1)
        live.live[2]["w"][4, 4] += 1
        found = live.turn(1)
        all_alike(found, ReplicaError)
        assert "rank 0 and rank 2" in str(found[3]) and "[7:12]" in str(found[3])


@each_transport
def test_verl_7978_a_parameter_repacked_for_a_kernel_is_refused_and_not_filled(transport: str) -> None:
    tensor = Tensor("w", (6, 4, 8), "float32")
    with world(flat(Mesh((("dp", 2),)), tensor), (flat(one(2), tensor),), transport=transport) as live:
        succeeded(live.turn(0))
        live.train(1)
        served = live.served[2]["w"]
        served.data = served.data.view(6, 2, 2, 8)
        found = live.turn(1)
        all_alike(found, PlanError)
        assert "shape(6, 2, 2, 8) != shape(6, 4, 8)" in str(found[0])
        served.data = served.data.view(6, 4, 8)
        assert bits(live.served[2]) == bits(content(flat(one(2), tensor), 0)[2])
        succeeded(live.turn(1))
        live.check_serves(1)


@each_transport
def test_skyrl_1680_the_same_weights_again_leave_every_byte_as_it_was(transport: str) -> None:
    """Experts unquantised, twice the same weights: under a new number, and under the same."""
    with world(*pair(transport), transport=transport) as live:
        succeeded(live.turn(0))
        live.check_serves(0)
        before = {rank: bits(served) for rank, served in live.served.items()}
        done = succeeded(live.turn(1))
        assert all(each.changed and each.version == 1 for each in done.values())
        assert {rank: bits(served) for rank, served in live.served.items()} == before
        assert not any(each.changed or each.bytes_received for each in succeeded(live.turn(1)).values())
        assert {rank: bits(served) for rank, served in live.served.items()} == before


@each_transport
def test_skyrl_1345_no_value_of_the_version_before_is_left_by_a_cache(transport: str) -> None:
    """Pipeline stages; from turn to turn plans, schedules, groups and staging stay, and values do not."""
    trainer = megatron.layout(
        model(num_hidden_layers=4), megatron.mesh(tp=1, pp=2, ep=2, etp=1, dp=2), vocab_divisor=3
    )
    engine = engine_layout(1 if transport == "nixl" else 2, offset=trainer.mesh.size, num_hidden_layers=4)
    with world(trainer, (engine,), transport=transport) as live:
        for version in (1, 2, 3):
            live.train(version)
            succeeded(live.turn(version))
            live.check_serves(version)


@each_transport
@pytest.mark.parametrize("how", ["storage dropped", "old weights restored"])
def test_trl_5312_what_was_dropped_or_restored_is_not_said_to_be_installed(how: str, transport: str) -> None:
    with world(*pair(transport), transport=transport) as live:
        succeeded(live.turn(0))
        first, served = live.receivers[0], live.served[live.receivers[0]]
        before = {name: array.clone() for name, array in served.items()}
        live.train(1)
        succeeded(live.turn(1))
        live.check_serves(1)
        for name, old in before.items():
            if how == "storage dropped":
                served[name].data = torch.empty(0, dtype=old.dtype)  # as an engine that goes to sleep
            else:
                served[name].copy_(old)  # as one that wakes up
        with pytest.raises(PlanError, match=r"was changed since version\(1\) was committed"):
            _ = live.members[first].version
        assert all(live.members[rank].version == 1 for rank in live.receivers[1:])
        for name, old in before.items():
            served[name].data = torch.empty_like(old)
        done = succeeded(live.turn(1))  # the same version, and yet it is brought again
        assert done[first].bytes_received
        live.check_serves(1)


@each_transport
def test_vllm_28425_transposed_runtime_storage_is_what_a_fresh_load_would_hold(transport: str) -> None:
    """A fused weight in one byte a value with its scales; the engine stores both the other way round."""
    parts = {role: Tensor(role, (rows, 10), "float8_e4m3fn") for role, rows in (("gate", 12), ("up", 12))}
    scales = {role: Tensor(f"{role}.scale", (4, 5), "float32") for role in ("gate", "up")}
    two = Mesh((("tp", 2),), offset=2)

    def fused(mesh: Mesh, name: str, tensors: dict[str, Tensor], **stored: Any) -> BufferRule:
        size = mesh.axis_size("tp")
        rows = along(
            mesh, "tp", lambda r: concat(*(even(whole(t.shape[0], k), size, r) for k, t in tensors.items()))
        )
        held = tuple(Part(t, k) for k, t in tensors.items())
        return BufferRule(name, held, (rows, next(iter(tensors.values())).dims[1]), **stored)

    trainer = Mesh((("tp", 2),))
    stored = {"stacked": (1, 0)}
    live_layout = Layout("", trainer, (fused(trainer, "w13", parts), fused(trainer, "w13.scale", scales)))
    engine = Layout("", two, (fused(two, "w13", parts, **stored), fused(two, "w13.scale", scales, **stored)))
    with world(live_layout, (engine,), transport=transport) as live:
        live.train(4)
        succeeded(live.turn(4))
        assert live.served[2]["w13"].shape == (10, 12)
        live.check_serves(4)


def test_vime_133_scales_of_unaligned_shards_are_refused_and_aligned_ones_arrive() -> None:
    """258 columns in blocks of 128 over two ranks are 3 blocks of scales; 2 and 2 describe another weight."""
    weight = Tensor("w", (4, 258), "float8_e4m3fn")
    scale, wrong = Tensor("w.scale", (4, 3), "float32"), Tensor("w.scale", (4, 4), "float32")
    mesh = Mesh((("tp", 2),))

    def side(scale: Tensor, cut: Any, mesh: Mesh) -> Layout:
        columns = along(mesh, "tp", lambda r: split(weight.dims[1], cut[0], r))
        blocks = along(mesh, "tp", lambda r: split(scale.dims[1], cut[1], r))
        return Layout(
            "",
            mesh,
            (
                BufferRule("w", (Part(weight),), (whole(4), columns)),
                BufferRule("w.scale", (Part(scale),), (whole(4), blocks)),
            ),
        )

    aligned = side(scale, ((128, 130), (1, 2)), mesh)
    engine = Layout("", one(2), tuple(BufferRule(t.name, (Part(t),), t.dims) for t in (weight, scale)))
    with world(aligned, (engine,)) as live:
        succeeded(live.turn(0))
        live.check_serves(0)
    with world(side(wrong, ((129, 129), (2, 2)), mesh), (engine,)) as live:
        found = live.turn(0)
        assert all(isinstance(each, ShardweaveError) for each in found.values())
        assert "w.scale" in str(found[2])
        live.check_serves(None)


@each_transport
def test_miles_2605_a_transport_that_reports_success_and_moves_nothing(transport: str) -> None:
    with world(*pair(transport), transport=transport, retries=0) as live:
        live.hamper[live.receivers[-1]] = lambda inner: Lies(
            inner, 10**9, "moves nothing" if transport != "gloo" else "a bit"
        )
        found = live.turn(0)
        all_alike(found, DigestError)
        live.check_serves(None)
        live.hamper.clear()
        succeeded(live.turn(0))
        live.check_serves(0)


def resident_bytes() -> int:
    """Memory of this process that is its own, without files that are mapped and shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which only Linux has")
@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_sglang_8076_memory_beside_the_model_stays_in_the_budget(transport: str, tmp_path: Path) -> None:
    """1 GB of model and 64 MB of budget, scaled to a sixteenth: 64 MiB, and 4 MiB for each end."""
    budget = 4 << 20
    tensor = Tensor("layers.{layer}.w", (1024, 512), "float32", (("layer", whole(32)),))
    two = Mesh((("tp", 2),))
    rows = along(two, "tp", lambda r: even(whole(1024), 2, r))
    trainer = Layout("", two, (BufferRule(tensor.name, (Part(tensor),), (whole(32), rows, whole(512))),))
    engine = Layout("", one(2), (BufferRule(tensor.name, (Part(tensor),), tensor.dims),))
    with world(trainer, (engine,), transport=transport, memory_bytes=budget) as live:
        target = Buffers(layout=engine, rank=2, arrays=live.served[2], memory_bytes=budget, spill=tmp_path)
        live.members[2] = Receiver(live.session(2), target)
        exact_sums.compiled()  # numba itself is some 50 MB of a process, whatever the model is
        for arrays in live.live.values():  # every page of the model is there before it is measured
            for array in arrays.values():
                array.mul_(1)
        before, peak, done = resident_bytes(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                peak[0] = max(peak[0], resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        succeeded(live.turn(0))
        done.set()
        watcher.join()
        live.check_serves(0)
        # Three ends in one process, and what verifying needs at a time.
        assert peak[0] - before < 3 * budget + (8 << 20) < tensor.numel * 4 // 2


@pytest.mark.parametrize("engine_tp", [1, 2])
def test_verl_5311_what_trainers_send_is_what_is_needed_and_evenly_shared(engine_tp: int) -> None:
    """No gather and no broadcast: bytes sent are bytes received, each once, and no rank sends over 1.1x."""
    described = dense(16, 8)
    trainer = megatron.layout(described, megatron.mesh(tp=2, dp=2), vocab_divisor=1)
    engine = vllm.layout(described, vllm.mesh(tp=engine_tp, offset=4), vocab_multiple=1)
    with world(trainer, (engine,), transport="gloo") as live:
        done = succeeded(live.turn(0))
        live.check_serves(0)
        padding = sum(
            run.count * (buffer.numel // len(dim))
            for rank in engine.mesh.ranks
            for buffer in engine.buffers(rank)
            for dim in buffer.dims
            for run in dim.runs
            if run.label is PAD
        )
        needed = sum(t.nbytes for served in live.served.values() for t in served.values()) - 2 * padding
        sent = np.array([done[rank].bytes_sent for rank in range(4)])
        assert sent.sum() == sum(done[rank].bytes_received for rank in engine.mesh.ranks) == needed
        assert sent.max() <= 1.1 * sent.mean()


# --- what a peer accepts without a word ----------------------------------------------------------

W = Tensor("w", (8, 4), "float32")


def stating(first: Layout, second: Layout, engine: Layout) -> World:
    """A world in which two publishers state a layout of their own each."""
    halves = flat(
        Mesh((("tp", 2),)), W, along(Mesh((("tp", 2),)), "tp", lambda r: even(whole(8), 2, r)), whole(4)
    )
    made = World(halves, (engine,))
    for rank, layout in enumerate((first, second)):
        arrays = {
            name: torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype))
            for name, (buffer, _) in layout.arrays(rank).items()
        }
        made.members[rank] = Publisher(made.session(rank), Source(layout, arrays, rank))
    return made


def some_rows(rank: int, start: int, count: int, **options: Any) -> Layout:
    return flat(one(rank), W, Dim([Run("", start, count)]), whole(4), **options)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (some_rows(0, 0, 4), some_rows(1, 0, 4), GapError),
        (some_rows(0, 0, 5), some_rows(1, 3, 5), OverlapError),
        (some_rows(0, 0, 4), some_rows(1, 4, 4, dtype="bfloat16"), DtypeError),
    ],
    ids=["one of two row shards missing", "overlapping shards", "element sizes that disagree"],
)
def test_shards_that_are_no_source_are_refused_on_every_rank(
    first: Layout, second: Layout, kind: type[ShardweaveError]
) -> None:
    live = stating(first, second, flat(one(2), W))
    all_alike(live.turn(0), kind)
    assert not live.table, "nothing was even offered"
    live.check_serves(None)


def test_replicas_with_different_content_are_refused_by_both_names() -> None:
    with world(flat(Mesh((("dp", 3),)), W), (flat(one(3), W),)) as live:
        live.live[2]["w"][6, 1] += 1e-7
        found = live.turn(0)
        all_alike(found, ReplicaError)
        assert "rank 0 and rank 2" in str(found[3])
        live.check_serves(None)


def test_up_proj_never_published_for_a_gate_up_parameter() -> None:
    gate, up = (Tensor(name, (6, 4), "float32") for name in ("gate", "up"))
    rows = concat(whole(6, "gate"), whole(6, "up"))
    fused = BufferRule("gate_up", (Part(gate, "gate"), Part(up, "up")), (rows, whole(4)))
    with world(flat(one(0), gate), (Layout("", one(1), (fused,)),)) as live:
        found = live.turn(0)
        assert all(isinstance(each, ShardweaveError) and "up" in str(each) for each in found.values())
        live.check_serves(None)


@each_transport
def test_a_loader_that_transforms_gets_the_logical_values_and_applies_it_once(transport: str) -> None:
    tensor = Tensor("A_log", (12,), "bfloat16")
    two = Mesh((("tp", 2),))
    rows = along(two, "tp", lambda r: even(whole(12), 2, r))
    engine = flat(one(2), tensor, dtype="float32", transform=Transform("neg_exp"))
    with world(flat(two, tensor, rows), (engine,), transport=transport) as live:
        for version in (0, 1):
            live.train(version)
            succeeded(live.turn(version))
            stored = torch.cat([live.live[rank]["A_log"] for rank in (0, 1)]).float()
            torch.testing.assert_close(live.served[2]["A_log"], -torch.exp(stored), rtol=1e-6, atol=0)


@each_transport
def test_padding_rows_of_a_vocabulary_are_zero_after_every_refit(transport: str) -> None:
    vocab = Tensor("embed", (13, 3), "float32")
    two = Mesh((("tp", 2),), offset=1)
    engine = flat(two, vocab, along(two, "tp", lambda r: even(pad(whole(13), 8), 2, r)), whole(3))
    with world(flat(one(0), vocab), (engine,), transport=transport) as live:
        for version in (0, 1):
            live.train(version)
            succeeded(live.turn(version))
            live.check_serves(version)
            assert (live.served[2]["embed"][5:] == 0).all()


@each_transport
def test_two_conversions_into_one_fused_parameter_do_not_share_staging(transport: str) -> None:
    biases = {
        name: Tensor(f"{name}_bias", (size,), "float32") for name, size in (("q", 6), ("k", 2), ("v", 4))
    }
    trainer = Layout("", one(0), tuple(BufferRule(t.name, (Part(t),), t.dims) for t in biases.values()))
    rows = concat(*(whole(t.shape[0], name) for name, t in biases.items()))
    rule = BufferRule("qkv_bias", tuple(Part(t, n) for n, t in biases.items()), (rows,), dtype="bfloat16")
    with world(
        trainer, (Layout("", one(1), (rule,)),), transport=transport, options={"allow_casts": True}
    ) as live:
        succeeded(live.turn(0))
        wanted = torch.cat([live.live[0][f"{name}_bias"] for name in biases]).to(torch.bfloat16)
        assert bits(live.served[1]) == bits({"qkv_bias": wanted})


class Rearranges:
    """A transport that puts the right words into wrong places."""

    def __init__(self, inner: Transport, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.inner, self.rank, self.change = inner, inner.rank, change

    def offer(self, arrays: Any) -> bytes:
        return self.inner.offer(arrays)

    def run(self, plan: Any, copies: Any, **given: Any) -> Any:
        moved = self.inner.run(plan, copies, **given)
        array = given["dst"]["w"]
        array.copy_(self.change(array.reshape(-1)).view_as(array))
        return moved

    def close(self) -> None:
        self.inner.close()


def swapped_lines(words: torch.Tensor) -> torch.Tensor:
    return words.view(-1, 64)[[0, 2, 1, *range(3, len(words) // 64)]].reshape(-1)


def a_moved_word(words: torch.Tensor) -> torch.Tensor:
    return torch.cat([words[1:1024], words[:1], words[1024:]])


def exchanged_pairs(words: torch.Tensor) -> torch.Tensor:
    return words.view(4, -1)[[1, 0, 3, 2]].reshape(-1)


@each_transport
@pytest.mark.parametrize("change", [swapped_lines, a_moved_word, exchanged_pairs])
def test_words_in_wrong_places_are_no_content_that_was_sealed(
    change: Callable[[torch.Tensor], torch.Tensor], transport: str
) -> None:
    tensor = Tensor("w", (4, 1024), "float32")
    with world(flat(one(0), tensor), (flat(one(1), tensor),), transport=transport, retries=0) as live:
        live.hamper[1] = lambda inner: Rearranges(inner, change)
        all_alike(live.turn(0), DigestError)
        live.check_serves(None)


@each_transport
def test_a_trainer_that_restarted_is_read_at_its_new_addresses(transport: str) -> None:
    with world(*pair(transport), transport=transport) as live:
        succeeded(live.turn(0))
        kept = dict(live.members[live.receivers[0]].session._worlds._ways)
        stale = live.live[1]
        live.live[1] = {name: array.clone() for name, array in stale.items()}
        live.members[1].close()
        for array in stale.values():
            array.fill_(torch.nan)  # whoever reads there gets what nobody published
        live.join(1)
        live.train(1)
        succeeded(live.turn(1))
        live.check_serves(1)
        assert dict(live.members[live.receivers[0]].session._worlds._ways) == kept, (
            "and no plan was made again"
        )


@each_transport
def test_a_step_of_the_optimizer_during_a_read_is_seen_and_the_read_repeated(transport: str) -> None:
    """What arrives is one version, whole: never the rows of two steps."""
    with world(*pair(transport), transport=transport, retries=2, memory_bytes=4096) as live:
        stepped: list[int] = []

        def step() -> None:
            if not stepped:
                stepped.append(1)
                live.train(1)

        live.hamper[live.receivers[0]] = lambda inner: Steps(inner, step)
        done = succeeded(live.turn(0))
        assert stepped
        tries = {each.tries for each in done.values()}
        assert tries == ({1} if transport == "shared" else {2})  # a segment is a copy, taken at the seal
        wanted = content(live.engines[0], 0 if transport == "shared" else 1)
        assert {r: bits(served) for r, served in live.served.items()} == {r: bits(wanted[r]) for r in wanted}
