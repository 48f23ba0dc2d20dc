"""Notes: what ranks leave for people is small, says what was, and decides nothing."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from shardweave.errors import PlanError, TransportError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor
from shardweave.move import MemoryTransport
from shardweave.refit import Buffers, Publisher, Receiver, Refit, Session, Source
from shardweave.refit.notes import Note, Notes, stretches
from shardweave.refit.status import MOST_BYTES, look

Put = list[tuple[str, bytes]]


def notes(put: Any, role: Any = "receiver") -> Notes:
    return Notes(put, rank=4, role=role, layout="vllm", transport="gloo", timeout_s=60.0)


def kept(said: Put) -> Note:
    key, data = said[-1]
    assert key == "status/4"
    return msgspec.json.decode(data, type=Note)


def recorder() -> tuple[Put, Any]:
    said: Put = []
    return said, lambda key, value: said.append((key, value))


def test_a_store_that_is_gone_changes_nothing() -> None:
    def gone(key: str, value: bytes) -> None:
        raise TransportError("the store of a refit answers", hint="none")

    some = notes(gone)
    some.come(publishers=(0, 1), receivers=(4,))
    some.succeeded(Refit(version=7, turn=0, changed=True), None)
    some.failed(PlanError("r", hint="h"), turn=1, version=7, in_doubt=False)


def test_a_failure_keeps_what_was_and_says_what_is_served() -> None:
    said, put = recorder()
    some = notes(put)
    some.succeeded(Refit(7, 3, True, 2, 0, 480, 12, {"stage": 0.5}), None)
    assert (kept(said).version, kept(said).bytes_per_s, kept(said).error) == (7, 960.0, "")
    some.failed(PlanError("a rule", hint="a hint"), turn=4, version=7, in_doubt=False)
    assert (kept(said).version, kept(said).turn, kept(said).failed_turn) == (7, 3, 4)
    assert kept(said).error == "PlanError: a rule. hint: a hint" and kept(said).bytes_received == 480
    some.failed(PlanError("a rule", hint="a hint"), turn=5, version=7, in_doubt=True)
    assert kept(said).version is None, "a receiver that cannot know claims nothing"
    some.succeeded(Refit(8, 6, True), None)
    assert (kept(said).version, kept(said).error, kept(said).failed_turn) == (8, "", -1)


def test_a_publisher_that_fails_has_not_published() -> None:
    said, put = recorder()
    some = notes(put, role="publisher")
    some.succeeded(Refit(7, 3, True), None)
    some.failed(PlanError("a rule", hint="a hint"), turn=4, version=8, in_doubt=False)
    assert (kept(said).version, kept(said).offered) == (7, 8)


def test_notes_are_small_whatever_happened() -> None:
    said, put = recorder()
    some = notes(put)
    some.come(publishers=range(12_000), receivers=range(12_000, 16_384))
    some.failed(
        PlanError("r" * 10**6, where="w" * 10**6, hint="h" * 10**6), turn=1, version=1, in_doubt=False
    )
    assert max(len(data) for _, data in said) < 4096 < MOST_BYTES
    assert kept(said).error.endswith(" ...")


@pytest.mark.parametrize("ranks", [(), (3,), (0, 1, 2), (0, 2, 4), (5, 6, 9, 10, 11)])
def test_stretches_are_the_ranks(ranks: tuple[int, ...]) -> None:
    found = stretches(ranks)
    assert tuple(rank for first, count in found for rank in range(first, first + count)) == ranks


def test_a_refit_costs_one_note_a_rank() -> None:
    """From the second on; and what is read is what was done."""
    w = Tensor("w", (12, 5), "float32")
    whole: tuple[BufferRule, ...] = (BufferRule("w", (Part(w),), w.dims),)
    at: dict[int, Any] = {}
    trainer, engine = Layout("trainer", Mesh(()), whole), Layout("engine", Mesh((), offset=1), whole)
    store, lock = HashStore(), threading.Lock()
    written: list[str] = []

    def seat(rank: int) -> Session:
        def make(*, store: Any, ranks: Any, rank: int, timeout_s: float) -> MemoryTransport:
            return MemoryTransport(at, rank=rank)

        made = Session(store=store, publishers=(0,), receivers=(1,), rank=rank, transport=make, timeout_s=20)
        inner = made._meeting.note

        def note(key: str, value: bytes) -> None:
            with lock:
                written.append(key)
            inner(key, value)

        made._meeting.note = note  # type: ignore[method-assign]
        return made

    publisher = Publisher(seat(0), Source(trainer, {"w": torch.rand(12, 5)}))
    receiver = Receiver(seat(1), Buffers(layout=engine, rank=1, arrays={"w": torch.zeros(12, 5)}))
    for version in (3, 4):
        written.clear()
        thread = threading.Thread(target=publisher.publish, args=(version,))
        thread.start()
        done = receiver.receive()
        thread.join(20)
    assert sorted(written) == ["status/0", "status/1"]

    found = look(PrefixStore("shardweave/refit", store))
    assert found.one_version == 4 and found.is_well and found.last is not None and found.last.error is None
    assert (found.turn, found.phase, found.missing) == (done.turn + 1, "", ())
    assert found.notes[1].bytes_received == done.bytes_received == 240
    assert found.plans[1].bytes == found.plans[1].needed_bytes == 240
