"""``shardweave refit status``: what ranks left, shown; what they did not leave, refused or shown as it is."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_driver import Run
from torch.distributed import FileStore, PrefixStore, TCPStore

from shardweave.errors import ShardweaveError, TransportTimeoutError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, along, split
from shardweave.move import MemoryTransport
from shardweave.refit import Buffers, Publisher, Receiver, Session, Source
from shardweave.refit.notes import Note, Notes, Planned

HOURS = 7200.0


class World:
    """Three trainer ranks with uneven rows and an engine of two, as threads."""

    def __init__(self, store: Any, timeout_s: float = 10.0) -> None:
        self.store, self.table, self.timeout_s = store, {}, timeout_s
        w = Tensor("w", (12, 5), "float32")

        def layout(name: str, sizes: tuple[int, ...], offset: int = 0) -> Layout:
            mesh = Mesh((("tp", len(sizes)),), offset=offset)
            rows = along(mesh, "tp", lambda r: split(w.dims[0], sizes, r))
            return Layout(name, mesh, (BufferRule("w", (Part(w),), (rows, w.dims[1])),))

        self.trainer, self.engine = layout("trainer", (5, 4, 3)), layout("engine", (7, 5), 3)
        self.live = {rank: {"w": torch.rand(rows, 5)} for rank, rows in enumerate((5, 4, 3))}
        self.members: dict[int, Publisher | Receiver] = {
            rank: Publisher(self.session(rank), Source(self.trainer, self.live[rank], rank))
            for rank in range(3)
        }
        for rank, rows in ((3, 7), (4, 5)):
            target = Buffers(layout=self.engine, rank=rank, arrays={"w": torch.zeros(rows, 5)})
            self.members[rank] = Receiver(self.session(rank), target)

    def session(self, rank: int) -> Session:
        def make(*, store: Any, ranks: Any, rank: int, timeout_s: float) -> MemoryTransport:
            return MemoryTransport(self.table, rank=rank)

        return Session(
            store=self.store, publishers=range(3), receivers=(3, 4), rank=rank, transport=make,
            timeout_s=self.timeout_s,
        )  # fmt: skip

    def turn(self, version: int, *, without: tuple[int, ...] = ()) -> Mapping[int, Exception]:
        failed: dict[int, Exception] = {}

        def run(rank: int) -> None:
            member = self.members[rank]
            try:
                if isinstance(member, Publisher):
                    member.publish(version)
                else:
                    member.receive()
            except ShardweaveError as error:
                failed[rank] = error

        threads = [threading.Thread(target=run, args=(r,)) for r in self.members if r not in without]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return failed


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(store: TCPStore) -> str:
    return f"127.0.0.1:{store.port}"


# --- what ranks did -----------------------------------------------------------------------------


def test_all_on_one_version(sw: Run, server: TCPStore) -> None:
    world = World(server)
    assert not world.turn(6) and not world.turn(7)
    keys = server.num_keys()
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert (done.code, done.err) == (0, "")
    assert "All 2 receivers serve version 7." in done.out
    assert "ranks 0-2: trainer, tp 3" in done.out and "ranks 3-4: engine, tp 2" in done.out
    assert "1, committed" in done.out and "2, nobody is in it yet" in done.out
    assert server.num_keys() == keys, "looking writes nothing"

    found = json.loads(sw("refit", "status", "--timeout", "40", place(server), "--json").out)
    assert (found["well"], found["version"], found["damaged"]) == (True, 7, {})
    ranks = {each["rank"]: each for each in found["ranks"]}
    assert [each["version"] for each in ranks.values()] == [7] * 5
    assert sum(ranks[rank]["bytes_received"] for rank in (3, 4)) == 12 * 5 * 4
    assert set(ranks[3]["seconds"]) == {"hello", "seal", "stage", "verify", "derive", "vote", "commit"}
    (plan,) = found["plans"]
    assert (plan["first_rank"], plan["num_ranks"], plan["families"]) == (3, 2, 1)
    assert plan["bytes"] == plan["needed_bytes"] == 12 * 5 * 4
    assert plan["receive_imbalance"] == pytest.approx(7 / 6)


def test_a_rank_that_does_not_come_is_named_while_others_wait_and_after(sw: Run, server: TCPStore) -> None:
    world = World(server, timeout_s=3.0)
    assert not world.turn(6)
    failed: dict[int, Exception] = {}
    turn = threading.Thread(target=lambda: failed.update(world.turn(7, without=(4,))))
    turn.start()
    end = time.monotonic() + 20
    # Others may still be on their way at the first looks.
    while (
        "open turn   1, hello: waits for rank 4\n"
        not in (done := sw("refit", "status", "--timeout", "40", place(server))).out
    ):
        assert time.monotonic() < end, done
    assert done.code == 0, "all serve version 6 until then"
    turn.join(60)
    assert {type(error) for error in failed.values()} == {TransportTimeoutError} and len(failed) == 4
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert done.code == 1
    assert "All 2 receivers serve version 6; the last refit failed on ranks 0-3." in done.out
    assert "rank 0, turn 1, offered version 7:" in done.out and "TransportTimeoutError" in done.out
    assert not world.turn(7)
    assert sw("refit", "status", "--timeout", "40", place(server)).code == 0


def test_an_engine_that_joins_serves_nothing_yet(sw: Run, server: TCPStore) -> None:
    world = World(server)
    assert not world.turn(6)
    server.delete_key("shardweave/refit/status/4")
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert done.code == 1
    assert "Not one version: version 6 on rank 3; none known on rank 4." in done.out


def test_a_store_file(sw: Run, tmp_path: Path) -> None:
    path = tmp_path / "refit.store"
    world = World(PrefixStore("job", FileStore(str(path), -1)))
    assert not world.turn(6)
    before = path.read_bytes()
    done = sw("refit", "status", path, "--prefix", "job")
    assert (done.code, done.err) == (0, "")
    assert "All 2 receivers serve version 6." in done.out
    assert path.read_bytes() == before, "looking writes nothing"
    assert sw("refit", "status", path).code == 1, "another prefix"
    world.store.set("shardweave/refit/status/4", b"{}")
    world.store.delete_key("shardweave/refit/status/3")
    done = sw("refit", "status", path, "--prefix", "job")
    assert done.code == 1 and "unreadable: status/4" in done.out and "none known on ranks 3-4" not in done.out


def test_watch_looks_until_it_is_stopped(sw: Run, server: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(server)
    assert not world.turn(6)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    # Its own clock alone: threads of the session sleep too.
    monkeypatch.setattr("shardweave.cli.refit.time", SimpleNamespace(time=time.time, sleep=sleep))
    done = sw("refit", "status", "--timeout", "40", place(server), "--watch")
    assert (done.code, done.err, done.out.count("All 2 receivers serve version 6.")) == (0, "", 3)


# --- how it looks -------------------------------------------------------------------------------


def leave(store: Any, key: str, value: bytes) -> None:
    store.set(f"shardweave/refit/{key}", value)


def test_what_is_shown(sw: Run, golden: Callable[..., None], tmp_path: Path) -> None:
    """Four trainer ranks, two engines, of which one lags behind after a failure."""
    import msgspec

    path = tmp_path / "refit.store"
    store = FileStore(str(path), -1)
    put = PrefixStore("shardweave/refit", store).set
    seconds = {"hello": 0.012, "seal": 0.25, "stage": 1.5, "vote": 0.75}
    ends = {"verify": 0.125, "derive": 0.5, "commit": 0.004}
    trainer, now = "megatron, tp 4", time.time() - HOURS - 60
    notes = Notes(put, rank=0, role="publisher", layout=trainer, transport="gloo", timeout_s=120.0)
    notes.come(publishers=range(4), receivers=(4, 5, 8))
    for rank in range(4):
        note = Note(
            "publisher", "trainer-0", 1000 + rank, trainer, now, 12, 3, True, 1, 5 << 30, 0, 96, seconds
        )
        put(f"status/{rank}", msgspec.json.encode(note))
    for rank in (4, 5):
        note = Note(
            "receiver", "engine-0", 2000 + rank, "vllm, tp 2", now, 12, 3, True, 2, 0, 9 << 30, 96,
            {**seconds, **ends},
        )  # fmt: skip
        put(f"status/{rank}", msgspec.json.encode(note))
    error = "WriteError: staging has room for a version: rank 8, 'w'. hint: raise memory_bytes"
    late = Note(
        "receiver", "engine-1", 77, "vllm", now, 11, 2, True, 1, 0, 0, 0, {}, error=error, failed_turn=3
    )
    put("status/8", msgspec.json.encode(late))
    for first, size in ((4, 2), (8, 1)):
        planned = Planned(first, size, trainer, "vllm", 14, 288, 18 << 30, 18 << 30, 1.02, 1.0, 3 - size)
        put(f"status/plan/{first}", msgspec.json.encode(planned))
    put("turn", "4")
    put("3/outcome", '["commit", 5]')
    put("4/hello/0", b"...")
    done = sw("refit", "status", path)
    assert (done.code, done.err) == (1, "")
    golden("refit_status", done.out, tmp=tmp_path)


# --- nobody there, or somebody else -------------------------------------------------------------


def test_nobody_answers(sw: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = sw("refit", "status", f"127.0.0.1:{port}")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        f"error: the store of a refit answers: 127.0.0.1:{port}: Connection refused\nhint"
    )


@pytest.fixture
def silent() -> Iterator[int]:
    """A server that listens and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_server_that_says_nothing_is_given_up_in_time(process: Run, silent: int) -> None:
    begin = time.monotonic()
    done = process("refit", "status", f"127.0.0.1:{silent}", "--timeout", "1.5")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: the store of a refit answers in time: ")
    assert time.monotonic() - begin < 30


def test_a_store_without_a_session(sw: Run, server: TCPStore) -> None:
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert (done.code, done.out) == (1, "")
    assert "a session has begun in the store" in done.err and "--prefix" in done.err


@pytest.mark.parametrize(
    "what", ["nowhere", "host:", "host:0", "host:99999", ":29400", "a b:1", "host:29400/x"]
)
def test_what_is_no_place(sw: Run, what: str) -> None:
    done = sw("refit", "status", what)
    assert (done.code, done.out) == (2, "")
    assert "HOST:PORT" in done.err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_what_is_no_timeout(sw: Run, seconds: str) -> None:
    assert sw("refit", "status", "host:1", "--timeout", seconds).code == 2


# --- hostile content ----------------------------------------------------------------------------

HOSTILE = {
    "huge": b'{"role": "' + b"x" * (1 << 20) + b'"}',
    "no JSON": b"\xff\xfe{",
    "nested": b"[" * 50_000,
    "another type": b"[]",
    "a number beyond bounds": b'{"role":"receiver","host":"h","pid":1,"layout":"l","time":1e308}',
    "digits": b'{"role":"receiver","host":"h","pid":' + b"9" * 5000 + b',"layout":"l","time":1}',
    "many steps": json.dumps(
        {"role": "receiver", "host": "h", "pid": 1, "layout": "l", "time": 1,
         "seconds": {str(i): 1.0 for i in range(999)}}
    ).encode(),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_note_that_is_none(sw: Run, server: TCPStore, what: str) -> None:
    world = World(server)
    assert not world.turn(6)
    leave(server, "status/4", HOSTILE[what])
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert (done.code, done.err) == (1, "")
    assert "unreadable: status/4" in done.out
    assert len(done.out) < 4000 and done.out.replace("\n", "").isprintable()
    assert (
        "status/4"
        in json.loads(sw("refit", "status", "--timeout", "40", place(server), "--json").out)["damaged"]
    )


@pytest.mark.parametrize("what", [*HOSTILE, "many ranks"])
def test_members_that_are_none(sw: Run, server: TCPStore, what: str) -> None:
    many = b'{"publishers":[[0,9223372036854775807]],"receivers":[[1,1]],"transport":"t","timeout_s":1}'
    leave(server, "status/members", {**HOSTILE, "many ranks": many}[what])
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert (done.code, done.out) == (1, "")
    assert "what a rank leaves for people is readable" in done.err and len(done.err) < 1000


def test_escape_sequences_and_markup_are_shown_and_not_obeyed(sw: Run, server: TCPStore) -> None:
    world = World(server)
    assert not world.turn(6)
    dirty = "\x1b[2J[red]x[/red]\r\n\u202e"
    note = {
        "role": "receiver", "host": dirty, "pid": 1, "layout": dirty, "time": 1.0, "version": 6,
        "error": dirty, "seconds": {dirty: 1.0},
    }  # fmt: skip
    leave(server, "status/4", json.dumps(note).encode())
    leave(server, "0/outcome", json.dumps([dirty, 1, dirty, dirty, dirty, dirty, dirty]).encode())
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert done.code == 1
    assert done.out.replace("\n", "").isprintable()
    assert "\\x1b[2J[red]x[/red]" in done.out


@pytest.mark.parametrize("turn", [b"", b"x", b"-1", b"9" * 30, b"\xff", b"1e9"])
def test_a_turn_that_is_none(sw: Run, server: TCPStore, turn: bytes) -> None:
    world = World(server)
    assert not world.turn(6)
    leave(server, "turn", turn)
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert done.err == "" and done.out.replace("\n", "").isprintable()


@pytest.mark.parametrize("outcome", [b"", b"{", b"[]", b'["commit"]', b'[1, "x"]', b"null", b"[" * 20_000])
def test_an_outcome_that_is_none(sw: Run, server: TCPStore, outcome: bytes) -> None:
    world = World(server)
    assert not world.turn(6)
    leave(server, "0/outcome", outcome)
    done = sw("refit", "status", "--timeout", "40", place(server))
    assert (done.code, done.err) == (1, "")
    assert "unreadable: 0/outcome" in done.out


@pytest.mark.parametrize(
    "data",
    [b"hello, this is no store at all\n" * 99, b"\xff" * 999, b"\1\0\0\0\xff\1\0\0\0x", b"\7\0\0", b""],
)
def test_a_file_that_is_no_store(sw: Run, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    done = sw("refit", "status", tmp_path / "file")
    assert (done.code, done.out) == (1, "")
    assert ("of a FileStore" in done.err) or (not data and "a session has begun" in done.err)


def test_a_value_of_gigabytes_in_a_file_is_passed_over(sw: Run, tmp_path: Path) -> None:
    path = tmp_path / "refit.store"
    world = World(FileStore(str(path), -1))
    assert not world.turn(6)
    key = b"/shardweave/refit/status/4"
    with path.open("ab") as file:  # sparse: 3 GB that nobody wrote
        file.write(len(key).to_bytes(4, "little") + key + (3 << 30).to_bytes(4, "little"))
        file.truncate(file.tell() + (3 << 30))
    begin = time.monotonic()
    done = sw("refit", "status", path)
    assert time.monotonic() - begin < 5
    assert done.code == 1 and "unreadable: status/4" in done.out


def test_help_of_refit_loads_no_torch(process: Run) -> None:
    code = "import sys; from shardweave.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    for arguments in (["refit"], ["refit", "--help"], ["refit", "status", "--help"], ["refit", "status"]):
        done = process(*arguments, program=(sys.executable, "-c", code))
        assert not {"torch", "numpy", "msgspec", "shardweave.refit"} & set(done.out.split())
