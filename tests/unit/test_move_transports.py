"""What each transport does with memory: in place, staged, mapped, registered."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import HashStore

from shardweave.errors import MissingPackageError, TransportError, TransportTimeoutError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Sharded, Tensor, along, even, whole
from shardweave.move import (
    CollectiveTransport,
    MemoryTransport,
    Moved,
    NixlTransport,
    Rendezvous,
    SharedTransport,
    collective,
    schedule,
)
from shardweave.plan import Plan, plan

ONE, TWO = Mesh((("tp", 1),)), Mesh((("tp", 2),), offset=1)
WHOLE = torch.arange(120, dtype=torch.float32).view(12, 10) + 1


def from_rank_0(*, rows: bool) -> Plan:
    """Rank 0 has all of it; ranks 1 and 2 want rows, which are stretches, or columns, which are not."""
    tensor = Tensor("w", (12, 10), "float32")
    cut = along(TWO, "tp", lambda r: even(whole(12 if rows else 10), 2, r))
    dims: tuple[Dim | Sharded, ...] = (cut, whole(10)) if rows else (whole(12), cut)
    return plan(
        Layout("whole", ONE, (BufferRule("w", (Part(tensor),), (whole(12), whole(10))),)),
        Layout("cut", TWO, (BufferRule("w", (Part(tensor),), dims),)),
    )


class Backend:
    """Records messages; what is sent to a rank is given to whoever receives from this one."""

    def __init__(self, rank: int, wire: dict[int, list[torch.Tensor]], fail: str = "") -> None:
        self._rank, self.wire, self.fail = rank, wire, fail
        self.messages: list[torch.Tensor] = []

    def rank(self) -> int:
        return self._rank

    def send(self, data: Sequence[torch.Tensor], peer: int, tag: int) -> Backend:
        self.messages.append(data[0])
        self.wire.setdefault(peer, []).append(data[0].clone())
        return self

    def recv(self, data: Sequence[torch.Tensor], peer: int, tag: int) -> Backend:
        self.messages.append(data[0])
        data[0].copy_(self.wire[self._rank].pop(0))
        return self

    def wait(self, timeout: Any) -> None:
        if self.fail:
            raise RuntimeError(self.fail)


def send_and_receive(moves: Plan) -> tuple[Backend, Backend, torch.Tensor, CollectiveTransport]:
    wire: dict[int, list[torch.Tensor]] = {}
    sender, receiver = Backend(0, wire), Backend(1, wire)
    wanted = moves.dst.rules[0].at(moves.dst.mesh, 1)
    assert wanted is not None
    target = {"w": torch.full(wanted.shape, torch.nan)}
    for backend, src, dst in ((sender, {"w": WHOLE}, {}), (receiver, {}, target)):
        end = CollectiveTransport(group=backend, ranks=(0, 1, 2))
        for copies in schedule(moves, rank=end.rank).rounds:
            end.run(moves, copies, src=src, dst=dst, endpoints={})
        if backend is sender:
            first = end
    return sender, receiver, target["w"], first


def test_a_stretch_is_sent_and_received_in_place() -> None:
    sender, receiver, target, end = send_and_receive(from_rank_0(rows=True))
    assert torch.equal(target, WHOLE[:6])
    assert [m.data_ptr() for m in sender.messages] == [WHOLE.data_ptr(), WHOLE[6:].data_ptr()]
    assert [m.data_ptr() for m in receiver.messages] == [target.data_ptr()]
    assert end._staging.buffer is None and end._room.buffer is None


def test_columns_are_packed_once_and_cost_their_own_bytes() -> None:
    sender, receiver, target, end = send_and_receive(from_rank_0(rows=False))
    assert torch.equal(target, WHOLE[:, :5])
    assert [m.numel() for m in sender.messages] == [12 * 5 * 4] * 2
    assert end._room.buffer is not None and end._room.buffer.numel() == 2 * 12 * 5 * 4
    assert [m.data_ptr() for m in receiver.messages] == [target.data_ptr()], "a stretch at the destination"


def test_small_blocks_of_a_pair_and_dtype_share_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 and 2 get half of the columns each: 120 bytes of a, b and c, 60 of half and 300 of large."""
    monkeypatch.setattr(collective, "SMALL_BYTES", 300)
    monkeypatch.setattr(collective, "PACK_BYTES", 250)
    values = {name: torch.randn(6, 10) for name in ("a", "large", "b", "half", "c")}
    values |= {"large": torch.randn(15, 10), "half": values["half"].bfloat16()}
    parts = {n: Part(Tensor(n, tuple(v.shape), str(v.dtype).split(".")[1])) for n, v in values.items()}

    def layout(mesh: Mesh) -> Layout:
        columns = along(mesh, "tp", lambda r: even(whole(10), mesh.size, r))
        rules = [BufferRule(n, (part,), (whole(len(values[n])), columns)) for n, part in parts.items()]
        return Layout("columns", mesh, tuple(rules))

    moves = plan(layout(ONE), layout(TWO))
    target = {name: torch.full_like(value[:, :5].contiguous(), torch.nan) for name, value in values.items()}
    wire: dict[int, list[torch.Tensor]] = {}
    sender, receiver, moved = Backend(0, wire), Backend(1, wire), []
    for backend, src, dst in ((sender, values, {}), (receiver, {}, target)):
        end = CollectiveTransport(group=backend, ranks=(0, 1, 2))
        (copies,) = schedule(moves, rank=end.rank).rounds
        moved.append(end.run(moves, copies, src=src, dst=dst, endpoints={}))
    assert all(torch.equal(target[name], value[:, :5]) for name, value in values.items())
    # a and b, then large, which keeps its place, then half, then c, which the first has no room for.
    assert [message.numel() for message in receiver.messages] == [240, 300, 60, 120]
    assert receiver.messages[1].data_ptr() == target["large"].data_ptr()
    assert moved == [Moved(sent=2 * 720), Moved(received=720)], "no gaps"


def stacked(count: int) -> tuple[Plan, torch.Tensor, dict[str, torch.Tensor]]:
    """Experts that rank 0 holds one by one; ranks 1 and 2 want half of the columns of each, stacked."""
    expert = Tensor("expert.{expert}", (6, 10), "float32", (("expert", whole(count)),))
    columns = along(TWO, "tp", lambda r: even(whole(10), 2, r))
    source = BufferRule("expert.{expert}", (Part(expert),), expert.dims)
    target = BufferRule("experts", (Part(expert),), (expert.dims[0], whole(6), columns), (0, 1, 2))
    values = torch.randn(count, 6, 10)
    return (
        plan(Layout("one by one", ONE, (source,)), Layout("stacked", TWO, (target,))),
        values,
        {f"expert.{i}": value for i, value in enumerate(values)},
    )


def exchanged(moves: Plan, src: dict[str, torch.Tensor], dst: dict[str, torch.Tensor]) -> list[Backend]:
    """The backends of rank 0, which sends, and of rank 1, which receives, after one round."""
    wire: dict[int, list[torch.Tensor]] = {}
    backends = [Backend(0, wire), Backend(1, wire)]
    for backend, mine, theirs in zip(backends, (src, {}), ({}, dst), strict=True):
        end = CollectiveTransport(group=backend, ranks=(0, 1, 2))
        (copies,) = schedule(moves, rank=end.rank).rounds
        end.run(moves, copies, src=mine, dst=theirs, endpoints={})
    return backends


def test_packed_blocks_that_become_one_stretch_share_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five experts of 120 bytes, at most two a message: received in place, with none of them left over."""
    monkeypatch.setattr(collective, "SMALL_BYTES", 100)
    monkeypatch.setattr(collective, "STRETCH_BYTES", 300)
    moves, values, src = stacked(5)
    target = torch.full((5, 6, 5), torch.nan)
    sender, receiver = exchanged(moves, src, {"experts": target})
    assert torch.equal(target, values[:, :, :5])
    assert [message.numel() for message in receiver.messages] == [240, 240, 120]
    assert [message.data_ptr() for message in receiver.messages] == [target[i].data_ptr() for i in (0, 2, 4)]
    assert len(sender.messages) == 6


def test_messages_to_several_peers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan lists all experts of rank 1 before those of rank 2; they leave side by side."""
    monkeypatch.setattr(collective, "SMALL_BYTES", 100)
    monkeypatch.setattr(collective, "STRETCH_BYTES", 100)
    moves, _, src = stacked(3)
    (copies,) = schedule(moves, rank=0).rounds
    assert [copy.dst_rank for copy in copies] == [1, 1, 1, 2, 2, 2]
    backend, peers = Backend(0, {}), []
    send = backend.send
    monkeypatch.setattr(
        backend, "send", lambda data, peer, tag: (peers.append(peer), send(data, peer, tag))[1]
    )
    end = CollectiveTransport(group=backend, ranks=(0, 1, 2))
    end.run(moves, copies, src=src, dst={}, endpoints={})
    assert peers == [1, 2, 1, 2, 1, 2]


def test_room_for_what_is_packed_is_used_again_once_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two messages of 128 bytes: the third waits until the first has left, and so on."""
    monkeypatch.setattr(collective, "SMALL_BYTES", 100)
    monkeypatch.setattr(collective, "STRETCH_BYTES", 100)
    monkeypatch.setattr(collective, "ROOM_BYTES", 256)
    moves, values, src = stacked(3)
    held: list[torch.Tensor] = []

    class Lazy(Backend):
        """Reads what it sends when it is waited for, and not before."""

        def send(self, data: Sequence[torch.Tensor], peer: int, tag: int) -> Backend:
            work = Lazy(0, {})
            work.messages = [data[0]]
            return work

        def wait(self, timeout: Any) -> None:
            held.append(self.messages[0].clone().view(torch.float32).view(6, 5))

    (copies,) = schedule(moves, rank=0).rounds
    end = CollectiveTransport(group=Lazy(0, {}), ranks=(0, 1, 2))
    end.run(moves, copies, src=src, dst={}, endpoints={})
    assert end._room.buffer is not None and end._room.buffer.numel() == 256
    wanted = [values[i][:, half] for i in range(3) for half in (slice(0, 5), slice(5, 10))]
    assert len(held) == 6
    assert all(torch.equal(got, want) for got, want in zip(held, wanted, strict=True))


@pytest.mark.parametrize("change", ["nothing", "memory", "strides"])
def test_a_round_that_was_seen_finds_its_blocks_in_what_is_there_now(change: str) -> None:
    moves = from_rank_0(rows=False)
    (copies,) = schedule(moves, rank=1).rounds
    table: dict[int, dict[str, torch.Tensor]] = {}
    source, end = MemoryTransport(table, rank=0), MemoryTransport(table, rank=1)
    target = torch.full((12, 5), torch.nan)
    first = WHOLE.clone()
    source.offer({"w": first})
    end.run(moves, copies, src={}, dst={"w": target}, endpoints={0: b"0"})
    assert torch.equal(target, WHOLE[:, :5])
    now = {"nothing": first, "memory": torch.empty(12, 10), "strides": torch.empty(10, 12).t()}[change]
    now.copy_(-WHOLE)
    source.offer({"w": now})
    target = target.clone() if change == "memory" else target
    end.run(moves, copies, src={}, dst={"w": target}, endpoints={0: b"0"})
    assert torch.equal(target, -WHOLE[:, :5])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Timed out waiting 100ms for recv operation to complete", TransportTimeoutError),
        ("Connection closed by peer [127.0.0.1]:1234", TransportError),
    ],
)
def test_a_group_that_failed_is_named_and_not_used_again(text: str, error: type[Exception]) -> None:
    moves = from_rank_0(rows=True)
    (copies,) = schedule(moves, rank=0).rounds
    end = CollectiveTransport(group=Backend(0, {}, fail=text), ranks=(0, 1, 2), timeout_s=0.1)
    for wanted, words in ((error, "rank 0 and rank 1"), (TransportError, "it broke off with")):
        with pytest.raises(wanted, match=words) as caught:
            end.run(moves, copies, src={"w": WHOLE}, dst={}, endpoints={})
        assert type(caught.value) is wanted and text in str(caught.value)


# --- shared memory ------------------------------------------------------------------------------


def read_columns(endpoint: bytes, rank: int = 1) -> torch.Tensor:
    moves = from_rank_0(rows=False)
    target = {"w": torch.full((12, 5), torch.nan)}
    for copies in schedule(moves, rank=rank).rounds:
        SharedTransport(rank=rank).run(moves, copies, src={}, dst=target, endpoints={0: endpoint})
    return target["w"]


def test_arrays_are_copied_into_a_segment_once_or_live_there() -> None:
    end = SharedTransport(rank=0)
    endpoint = end.offer({"w": WHOLE, "none": torch.empty(0, 3)})
    assert torch.equal(read_columns(endpoint), WHOLE[:, :5])
    assert end.offer({"w": WHOLE + 1, "none": torch.empty(0, 3)}) == endpoint, "the same segment"
    assert torch.equal(read_columns(endpoint), WHOLE[:, :5] + 1)

    held = end.allocate({"w": ((12, 10), "float32")})
    endpoint = end.offer(held)
    held["w"].copy_(WHOLE * 2)
    assert torch.equal(read_columns(endpoint), WHOLE[:, :5] * 2), "no second copy"
    end.close()


def test_a_segment_has_no_name_and_is_gone_with_its_publisher() -> None:
    before = set(Path("/dev/shm").iterdir())
    end = SharedTransport(rank=0)
    endpoint = end.offer({"w": WHOLE})
    assert set(Path("/dev/shm").iterdir()) <= before
    end.close()
    with pytest.raises(TransportError, match=r"rank 0, /proc/.*FileNotFoundError"):
        read_columns(endpoint)


def test_another_file_of_that_number_is_not_taken_for_the_segment() -> None:
    end, other = SharedTransport(rank=0), SharedTransport(rank=3)
    endpoint, strange = end.offer({"w": WHOLE}), other.offer({"w": WHOLE})
    forged = {**json.loads(endpoint), "file": json.loads(strange)["file"]}
    with pytest.raises(TransportError, match="token"):
        read_columns(json.dumps(forged).encode())
    end.close()
    other.close()


# --- nixl and the rendezvous --------------------------------------------------------------------


def test_nixl_that_is_missing_is_named_with_its_extra() -> None:
    packages = dict.fromkeys(
        ("nixl", "nixl._api", "nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api")
    )
    with patch.dict(sys.modules, packages), pytest.raises(MissingPackageError, match=r"shardweave\[nixl\]"):
        NixlTransport(rank=0)


def test_ranks_that_do_not_come_are_named() -> None:
    meeting = Rendezvous(store=HashStore(), ranks=(4, 5, 6), rank=5, timeout_s=0.05)
    with pytest.raises(TransportTimeoutError, match="rank 5 waits for rank 4, rank 6"):
        meeting.exchange(b"")
