"""Turns of a refit, with ranks as threads of one process: what they bring, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refit_world import (
    Lies,
    Steps,
    Tensors,
    World,
    all_alike,
    bits,
    content,
    engine_layout,
    succeeded,
    trainer_layout,
)

from shardweave.errors import (
    DigestError,
    DtypeError,
    GapError,
    GeometryError,
    OverlapError,
    PlanError,
    ShardweaveError,
    TransportError,
    TransportTimeoutError,
    UnknownNameError,
    WriteError,
)
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Run, Tensor, along, even, split, subset
from shardweave.refit import Buffers, Publisher, Receiver, Source

# --- what a turn brings -------------------------------------------------------------------------


def test_versions_arrive_bit_for_bit() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    for version in (0, 1, 2):
        world.train(version)
        found = succeeded(world.turn(version))
        assert {each.version for each in found.values()} == {version}
        assert all(each.changed for each in found.values())
        world.check_serves(version)


def test_a_plan_is_made_once() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    first = {rank: dict(member.session._worlds._ways) for rank, member in world.members.items()}
    world.train(1)
    succeeded(world.turn(1))
    for rank, member in world.members.items():
        assert member.session._worlds._ways.keys() == first[rank].keys()
        assert all(member.session._worlds._ways[key] is way for key, way in first[rank].items())


def test_the_same_version_twice_moves_nothing() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(3))
    found = succeeded(world.turn(3))
    assert not any(each.changed or each.bytes_received or each.bytes_sent for each in found.values())
    for rank, served in world.served.items():
        assert bits(served) == bits(content(world.engine_of(rank), 0)[rank])


def test_other_weights_under_one_number_are_refused() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    world.train(1)
    found = world.turn(0)
    all_alike(found, PlanError)
    assert "a version has one content" in str(found[4])
    world.check_serves(0)


def test_two_engines_of_different_degrees() -> None:
    world = World(trainer_layout(), (engine_layout(2, offset=4), engine_layout(4, offset=6)))
    world.train(1)
    succeeded(world.turn(1))
    world.check_serves(1)


def test_replicas_share_the_load() -> None:
    """Four copies of everything, and receivers that want it all once: none sends more than its part."""
    tensor = Tensor("w", (48, 5), "float32")
    four = Mesh((("dp", 4),))
    trainer = Layout("replicas", four, (BufferRule("w", (Part(tensor),), tensor.dims),))
    two = Mesh((("tp", 2),), offset=4)
    rows = along(two, "tp", lambda r: even(tensor.dims[0], 2, r))
    engine = Layout("halves", two, (BufferRule("w", (Part(tensor),), (rows, tensor.dims[1])),))
    world = World(trainer, (engine,))
    succeeded(world.turn(0))
    member = world.members[4].session
    (way,) = member._worlds._ways.values()
    sent = np.zeros(4, dtype=int)
    for copy in way.plan.copies():
        sent[copy.src_rank] += copy.dst_box.numel
    assert sent.max() <= 1.05 * sent.mean()
    world.check_serves(0)


# --- change -------------------------------------------------------------------------------------


def test_a_trainer_rank_is_restarted() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    ways = world.members[4].session._worlds._ways
    kept = dict(ways)
    world.live[2] = {name: array.clone() for name, array in world.live[2].items()}  # at other addresses
    world.table.pop(2)
    world.join(2)
    world.train(1)
    succeeded(world.turn(1))
    world.check_serves(1)
    assert all(ways[key] is way for key, way in kept.items())


def test_an_engine_joins_and_the_others_receive_nothing() -> None:
    world = World(trainer_layout(), (engine_layout(2, offset=4),))
    succeeded(world.turn(0))
    world.engines = (*world.engines, engine_layout(4, offset=6))
    for member in world.members.values():
        member.session.change(publishers=world.publishers, receivers=world.receivers)
    for rank in (6, 7, 8, 9):
        world.join(rank)
    found = succeeded(world.turn(0))
    assert not any(found[rank].bytes_received for rank in (4, 5))
    assert all(found[rank].bytes_received for rank in (6, 7, 8, 9))
    world.check_serves(0)


def test_a_receiver_that_was_restarted_gets_the_version_that_the_other_serves() -> None:
    world = World(trainer_layout(), (engine_layout(),))
    succeeded(world.turn(0))
    world.join(5)
    succeeded(world.turn(0))
    world.check_serves(0)


# --- subsets ------------------------------------------------------------------------------------


def attention_of(layout: Layout) -> Layout:
    rules = tuple(rule for rule in layout.rules if "self_attn" in rule.parts[0].tensor.name)
    return Layout(layout.name, layout.mesh, rules)


def test_a_declared_subset_is_received_whole() -> None:
    world = World(trainer_layout(), (attention_of(engine_layout()),), options={"subset": True})
    world.train(1)
    succeeded(world.turn(1))
    whole = content(engine_layout(), 1)
    for rank, served in world.served.items():
        assert len(served) == 3 * 4  # qkv, o, and the two norms of each layer
        assert bits(served) == bits({name: whole[rank][name] for name in served})


def test_some_layers_are_received_and_the_others_left_alone() -> None:
    """Layers 0 and 2 of three and nothing else; the layout says so, and is proved to have all of them."""
    whole = engine_layout()
    world = World(
        trainer_layout(),
        (subset(whole, keep=lambda name: "{layer}" in name, layer=(0, 2)),),
        options={"subset": True},
    )
    world.train(1)
    succeeded(world.turn(1))
    reference = content(whole, 1)
    for rank, served in world.served.items():
        assert {name.split(".")[2] for name in served} == {"0", "2"}
        assert bits(served) == bits({name: reference[rank][name] for name in served})


def test_what_an_engine_lacks_is_refused_unless_it_says_so() -> None:
    world = World(trainer_layout(), (attention_of(engine_layout()),))
    all_alike(world.turn(0), UnknownNameError)
    world.check_serves(None)


# --- refusals before a byte moves ---------------------------------------------------------------


def small(sizes: tuple[int, ...], *, dtype: str = "float32", name: str = "w") -> Layout:
    tensor = Tensor(name, (12, 5), dtype)
    mesh = Mesh((("tp", len(sizes)),))
    rows = along(mesh, "tp", lambda r: split(tensor.dims[0], sizes, r))
    return Layout("small", mesh, (BufferRule(name, (Part(tensor),), (rows, tensor.dims[1])),))


def one(offset: int, *, dtype: str = "float32", name: str = "w", stored: str = "") -> Layout:
    tensor = Tensor(name, (12, 5), dtype)
    return Layout(
        "one", Mesh((), offset=offset), (BufferRule(name, (Part(tensor),), tensor.dims, dtype=stored),)
    )


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        (one(3, name="v"), UnknownNameError),
        (one(3, dtype="bfloat16"), UnknownNameError),
        (one(3, stored="bfloat16"), DtypeError),
    ],
    ids=["an unknown parameter", "another dtype of the tensor", "a dtype that cannot hold all values"],
)
def test_every_rank_refuses_before_a_byte_moves(engine: Layout, kind: type[ShardweaveError]) -> None:
    world = World(small((5, 4, 3)), (engine,))
    all_alike(world.turn(0), kind)
    assert not world.table  # nothing was even offered
    world.check_serves(None)


def test_publishers_of_two_versions_are_refused() -> None:
    world = World(small((5, 4, 3)), (one(3),))
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        member = world.members[rank]
        try:
            found[rank] = (
                member.publish(4 if rank == 1 else 3) if isinstance(member, Publisher) else member.receive()
            )
        except ShardweaveError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in world.members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    all_alike(found, PlanError)
    assert "version(3) != version(4)" in str(found[3])
    world.check_serves(None)


def test_half_an_engine_is_refused() -> None:
    tensor = Tensor("w", (12, 5), "float32")
    mesh = Mesh((("tp", 2),), offset=3)
    rows = along(mesh, "tp", lambda r: even(tensor.dims[0], 2, r))
    engine = Layout("halves", mesh, (BufferRule("w", (Part(tensor),), (rows, tensor.dims[1])),))
    world = World(small((5, 4, 3)), (engine,))
    for member in world.members.values():
        if member.session.rank != 4:
            member.session.change(publishers=(0, 1, 2), receivers=(3,))
    all_alike(world.turn(0, without=(4,)), GeometryError)
    assert not world.table


# --- failures -----------------------------------------------------------------------------------


def test_a_receiver_that_fails_after_staging_leaves_all_where_they_were() -> None:
    world = World(trainer_layout(), (engine_layout(2, offset=4), engine_layout(4, offset=6)))
    succeeded(world.turn(0))
    target = world.members[7].target

    def full() -> None:
        raise MemoryError("no room to derive")

    target.derive = full
    world.train(1)
    found = world.turn(1)
    all_alike(found, TransportError)
    assert "MemoryError: no room to derive" in str(found[0])
    world.check_serves(0)
    del target.derive
    succeeded(world.turn(1))
    world.check_serves(1)


@pytest.mark.parametrize("missing", [1, 5], ids=["a publisher", "a receiver"])
def test_a_rank_that_does_not_come_is_named_within_the_bound(missing: int) -> None:
    world = World(trainer_layout(), (engine_layout(),), timeout_s=1.0)
    found = world.turn(0, without=(missing,))
    all_alike(found, TransportTimeoutError)
    assert f"rank {missing}" in str(found[0])
    world.check_serves(None)
    succeeded(world.turn(0))  # and when it comes, all is well
    world.check_serves(0)


@pytest.mark.parametrize("how", ["moves nothing", "flips a bit"])
def test_a_transport_that_lies_is_caught(how: str) -> None:
    world = World(trainer_layout(), (engine_layout(),), retries=0)
    succeeded(world.turn(0))
    world.hamper[5] = lambda inner: Lies(inner, 10**9, how)
    for member in world.members.values():
        member.session._close_transport()
    world.train(1)
    found = world.turn(1)
    all_alike(found, DigestError)
    assert "rank 5" in str(found[4])
    world.check_serves(0)


def test_content_that_changed_on_its_way_is_sent_again() -> None:
    world = World(trainer_layout(), (engine_layout(),), retries=2)
    lies = iter([1, 1])
    world.hamper[5] = lambda inner: Lies(inner, next(lies, 0), "flips a bit")
    found = succeeded(world.turn(0))
    assert {each.tries for each in found.values()} == {3}
    world.check_serves(0)


def test_a_step_during_a_pull_is_detected_and_the_transfer_repeated() -> None:
    world = World(trainer_layout(), (engine_layout(),), retries=1)
    stepped: list[int] = []

    def step() -> None:
        if not stepped:
            stepped.append(1)
            world.train(1)

    world.hamper[4] = lambda inner: Steps(inner, step)
    found = succeeded(world.turn(0))
    assert {each.tries for each in found.values()} == {2}
    for rank, served in world.served.items():  # one version, whole: that after the step
        assert bits(served) == bits(content(world.engine_of(rank), 1)[rank])


def test_weights_that_never_hold_still_are_refused_by_name() -> None:
    world = World(trainer_layout(), (engine_layout(),), retries=1)
    versions = iter(range(1, 100))
    world.hamper[4] = lambda inner: Steps(inner, lambda: world.train(next(versions)))
    found = world.turn(0)
    assert {type(each) for each in found.values()} == {DigestError}
    assert "does not change while it is read" in str(found[0])
    world.check_serves(None)


# --- staging ------------------------------------------------------------------------------------


def test_staging_beyond_memory_goes_to_files(tmp_path: Any) -> None:
    layout = engine_layout()
    world = World(trainer_layout(), (layout,))
    for rank in world.receivers:
        target = Buffers(
            layout=layout, rank=rank, arrays=world.served[rank], memory_bytes=3000, spill=tmp_path
        )
        world.members[rank] = Receiver(world.session(rank), target)
    succeeded(world.turn(0))
    world.check_serves(0)
    assert not list(tmp_path.iterdir())  # nothing that has a name, nothing to clean up


def test_staging_without_room_is_refused_before_a_byte_moves() -> None:
    layout = engine_layout()
    world = World(trainer_layout(), (layout,))
    target = Buffers(layout=layout, rank=4, arrays=world.served[4], memory_bytes=3000)
    world.members[4] = Receiver(world.session(4), target)
    found = world.turn(0)
    all_alike(found, WriteError)
    world.check_serves(None)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda arrays: arrays.pop(next(iter(arrays))), UnknownNameError),
        (lambda arrays: arrays.update(more=torch.zeros(1)), UnknownNameError),
        (lambda arrays: arrays.update({"w": torch.zeros(5, 12)}), PlanError),
        (lambda arrays: arrays.update({"w": torch.zeros(12, 5, dtype=torch.float64)}), DtypeError),
    ],
)
def test_arrays_that_are_not_those_of_the_layout(
    change: Callable[[Tensors], Any], kind: type[ShardweaveError]
) -> None:
    arrays = {"w": torch.zeros(12, 5)}
    change(arrays)
    with pytest.raises(kind):
        Buffers(layout=one(3), rank=3, arrays=arrays)


def test_gaps_and_overlaps_of_published_parts_are_refused() -> None:
    """Each rank states its own layout: one of the rows is nobody's, or two ranks' without being replicas."""
    tensor = Tensor("w", (12, 5), "float32")

    def part(rank: int, start: int, count: int) -> Layout:
        rows = Dim([Run("", start, count)])
        return Layout(
            "part", Mesh((), offset=rank), (BufferRule("w", (Part(tensor),), (rows, tensor.dims[1])),)
        )

    for parts, kind in (
        ((part(0, 0, 5), part(1, 6, 6)), GapError),
        ((part(0, 0, 7), part(1, 5, 7)), OverlapError),
    ):
        world = World(small((5, 7)), (one(2),))
        for rank, layout in enumerate(parts):
            arrays = {"w": torch.zeros(layout.arrays(rank)["w"][0].shape)}
            world.members[rank] = Publisher(world.session(rank), Source(layout, arrays, rank))
        all_alike(world.turn(0), kind)
        world.check_serves(None)
