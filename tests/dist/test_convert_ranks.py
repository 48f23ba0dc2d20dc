"""One conversion by several processes: the bytes of one, one error for all, and nothing published after it.

The reference is the conversion by one process. Processes are killed, stopped and told that the disk is full
in the middle of what they write; the same conversion then goes on with another number of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import convert_ranks
import pytest
import workers
from torch.distributed import HashStore, TCPStore

from shardweave.convert import Company, Geometry, Zero, convert, open_checkpoint, prepare
from shardweave.convert.execute import checksums_of
from shardweave.convert.journal import Journal
from shardweave.convert.share import check_borders, cut, tasks_of
from shardweave.convert.staging import FOLDER, Part, Staging, require_finished
from shardweave.errors import (
    DigestError,
    ExistsError,
    FormatError,
    GeometryError,
    JournalError,
    ShardweaveError,
    TransportError,
    TransportTimeoutError,
    WriteError,
)
from shardweave.store.manifest import Extent, Manifest, StoredTensor

DATA = Path(__file__).parents[1] / "data"
GQA, MOE, ZERO = DATA / "mc_gqa_tp2pp2" / "torch_dist", DATA / "hf_qwen3moe_tiny", DATA / "ds_zero2" / "step2"
CONFIG = DATA / "mc_gqa_truth_hf" / "config.json"
MEGATRON = Geometry(tp=2, pp=2, ep=2, etp=1, spec="local", vocab_divisor=1)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def alone(src: Path, dst: Path, **choices: Any) -> dict[str, bytes]:
    convert(prepare(src, **choices), dst, fsync=False)
    return files(dst)


def served() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Crew:
    """Starts conversions, each with a store of its own."""

    def __init__(self, src: Path, dst: Path, **choices: Any) -> None:
        self.src, self.dst, self.choices = src, dst, choices

    def __call__(self, size: int, **given: Any) -> dict[int, workers.Ended]:
        # Where process 0 serves the store, at a port that is free now.
        store = None if given.get("serves") else served()
        ranks = given.pop("ranks", range(size))
        done = given.pop("done", ())
        return workers.run(
            convert_ranks.go,
            ranks,
            done=done,
            port=free_port() if store is None else store.port,
            size=size,
            src=self.src,
            dst=self.dst,
            choices=self.choices,
            **given,
        )


def said(ended: dict[int, workers.Ended]) -> str:
    """The one text that all ranks raised."""
    errors = [end.error for end in ended.values()]
    assert all(isinstance(error, ShardweaveError) for error in errors), ended
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    return str(errors[0])


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    """Of experts from Hugging Face to native, in several files; large enough to break off in the middle."""
    src = shutil.copytree(MOE, tmp_path / "src")
    return Crew(src, tmp_path / "dst", to="native", max_file_bytes=200_000)


# --- the bytes of one ---------------------------------------------------------------------------

CASES: dict[str, tuple[Path, dict[str, Any]]] = {
    "hf": (GQA, {"to": "hf", "config": CONFIG, "max_file_bytes": 100_000}),
    "hf in one file": (GQA, {"to": "hf", "config": CONFIG}),
    "megatron": (MOE, {"to": "megatron", "geometry": MEGATRON}),
    "dcp": (MOE, {"to": "dcp", "max_file_bytes": 100_000}),
    "native": (MOE, {"to": "native", "max_file_bytes": 100_000}),
    "deepspeed": (ZERO, {"to": "deepspeed", "config": Path("none"), "zero": Zero(stage=2, dp=3)}),
    "universal": (ZERO, {"to": "universal", "config": Path("none")}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_target_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    src, choices = CASES[name]
    expected = alone(src, tmp_path / "one", **choices)
    for size in (2, 3):
        dst = tmp_path / str(size)
        found = workers.values(Crew(src, dst, **choices)(size))
        assert files(dst) == expected
        written = [found[rank]["written"] for rank in range(size)]
        assert min(written) > 0
        # Process 0 also writes what frames the arrays of some formats.
        most = found[0]["total"] - sum(map(len, prepare(src, **choices).target.constants.values()))
        assert sum(written) == most if choices["to"] in ("hf", "native") else sum(written) > most
        assert sum(written[1:]) < most
        assert not list(tmp_path.rglob(FOLDER))


def test_progress_is_of_all_and_is_told_by_process_0(crew: Crew) -> None:
    found = workers.values(crew(2, disturbed={0: ("slow", -1), 1: ("slow", -1)}, timeout_s=2.0))
    told, total = found[0]["told"], found[0]["total"]
    assert told == sorted(told) and {whole for _, whole in told} == {total} and told[-1][0] == total
    assert any(done not in (total, *range(found[0]["written"] + 1)) for done, _ in told)


def test_parts_are_balanced_by_bytes(tmp_path: Path) -> None:
    job = prepare(MOE, to="native", max_file_bytes=100_000)
    manifest = job.target.allocate(tmp_path)
    size = {key: tensor.num_bytes for key, tensor in manifest.tensors.items()}
    total, largest = sum(size.values()), max(size.values())
    for count in (2, 3, 5, 8, 1000):
        parts = tasks_of(manifest, count)
        assert sorted(task for part in parts for task in part) == sorted((key, 0) for key in size)
        assert max(sum(size[key] for key, _ in part) for part in parts) <= total / count + largest


def test_items_without_bytes_are_somebodys() -> None:
    assert cut("abc", [0, 0, 0], 2) == [["a", "b", "c"], []]


# --- one error for all --------------------------------------------------------------------------


def unpublished(crew: Crew) -> None:
    """Nothing is published, and no reader takes what is there for a checkpoint."""
    assert {path.name for path in crew.dst.iterdir()} <= {FOLDER} if crew.dst.exists() else True
    with pytest.raises(ShardweaveError):
        open_checkpoint(crew.dst)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("full", WriteError, "the target can be written: rank 1, .*No space left on device"),
        ("broken", WriteError, "the target can be written: rank 1, .*Input/output error"),
        (
            "error",
            TransportError,
            "every process of a conversion does its part: rank 1: ZeroDivisionError: s",
        ),
        ("changes", JournalError, "a source stays as it is while it is converted: rank "),
    ],
)
def test_a_failure_of_one_is_raised_by_all(
    crew: Crew, how: str, kind: type[Exception], text: str, tmp_path: Path
) -> None:
    ended = crew(3, disturbed={1: (how, 2)})
    with pytest.raises(kind, match=text):
        raise ended[2].error or AssertionError
    said(ended)
    assert max(end.seconds for end in ended.values()) < 15
    unpublished(crew)
    if how == "changes":  # what is staged is of another source
        shutil.rmtree(crew.dst)
    workers.values(crew(2))
    assert files(crew.dst) == alone(crew.src, tmp_path / "one", **crew.choices)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_one_that_is_gone_frees_the_others_and_another_number_goes_on(
    crew: Crew, victim: int, how: str, tmp_path: Path
) -> None:
    others = [rank for rank in range(3) if rank != victim]
    ended = crew(3, disturbed={victim: (how, 4)}, timeout_s=3.0, done=others if how == "stop" else ())
    text = said({rank: ended[rank] for rank in others})
    assert f"rank {victim}: gave no sign of life within timeout_s(3)" in text
    assert isinstance(ended[others[0]].error, TransportTimeoutError)
    assert max(ended[rank].seconds for rank in others) < 20
    unpublished(crew)
    found = workers.values(crew(2))
    assert found[0]["resumed"] == found[1]["resumed"] > 4
    assert files(crew.dst) == alone(crew.src, tmp_path / "one", **crew.choices)
    assert not (crew.dst / FOLDER).exists()


def test_the_one_that_serves_the_store_frees_the_others(crew: Crew, tmp_path: Path) -> None:
    ended = crew(3, disturbed={0: ("kill", 4)}, serves=True)
    assert "processes that convert together reach their store" in said({rank: ended[rank] for rank in (1, 2)})
    assert ended[0].exit_code == -9 and max(end.seconds for end in ended.values()) < 15
    unpublished(crew)
    workers.values(crew(2, serves=True))
    assert files(crew.dst) == alone(crew.src, tmp_path / "one", **crew.choices)


def test_one_process_goes_on_where_three_were_killed(crew: Crew, tmp_path: Path) -> None:
    crew(3, disturbed=dict.fromkeys(range(3), ("kill", 4)))
    assert len(list((crew.dst / FOLDER).glob("journal*.jsonl"))) == 3
    report = convert(prepare(crew.src, **crew.choices), crew.dst, fsync=False)
    assert report.resumed >= 9
    assert files(crew.dst) == alone(crew.src, tmp_path / "one", **crew.choices)


def test_three_go_on_where_one_broke_off(crew: Crew, tmp_path: Path) -> None:
    assert crew(1, disturbed={0: ("kill", 20)})[0].exit_code == -9
    found = workers.values(crew(3))
    assert found[0]["resumed"] >= 19
    assert files(crew.dst) == alone(crew.src, tmp_path / "one", **crew.choices)


def test_who_does_not_come_is_named(crew: Crew) -> None:
    ended = crew(3, ranks=[0, 2], timeout_s=3.0)
    # Rank 0 waits for rank 1, and rank 2 for rank 0: who gives up first names whom it waits for.
    assert re.search(r"rank [01]: did not come within timeout_s\(3\)", said(ended))
    unpublished(crew)


def test_a_target_that_holds_something_is_refused_by_all(crew: Crew) -> None:
    crew.dst.mkdir()
    (crew.dst / "mine").write_text("kept")
    ended = crew(2)
    assert "a target is empty: rank 0, " in said(ended) and isinstance(ended[1].error, ExistsError)
    assert files(crew.dst) == {"mine": b"kept"}
    workers.values(crew(2, force=True))
    assert "mine" not in files(crew.dst)


def test_a_source_with_other_bytes_than_recorded_is_refused_by_all(crew: Crew, tmp_path: Path) -> None:
    workers.values(crew(2))
    back = Crew(crew.dst, tmp_path / "back", to="hf")
    last = max(crew.dst.glob("*.safetensors"))
    with last.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    ended = back(2)
    assert "rank 1, " in said(ended) and isinstance(ended[0].error, DigestError)
    assert not back.dst.exists()


def test_processes_that_mean_something_else_are_told(tmp_path: Path) -> None:
    store = served()
    ended = workers.run(
        different, range(2), port=store.port, src=MOE, dst=tmp_path / "dst",
    )  # fmt: skip
    assert "all processes carry out the same conversion: ranks 0 and 1: " in said(ended)
    assert not (tmp_path / "dst").exists()


def different(rank: int, **given: Any) -> Any:
    choices = {"to": "native", "max_file_bytes": 100_000 * (1 + rank)}
    return convert_ranks.go(rank, size=2, choices=choices, **given)


def test_a_rank_of_an_earlier_run_keeps_others_out(tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    job = prepare(MOE, to="native")
    with Staging(dst, force=False) as staging:
        staging.take_up({"a": "b"})
    with Part(dst, 2), pytest.raises(ExistsError, match="one conversion at a time writes a target"):
        convert(job, dst, force=True)
    convert(job, dst, force=True)


# --- what file systems may do to writes beside each other ----------------------------------------


def test_a_neighbour_whose_bytes_were_undone_is_seen(tmp_path: Path) -> None:
    """Two hosts write into one page, and one puts back what it had read of it."""
    tensors = {}
    for i, name in enumerate("abcd"):
        tensors[name] = StoredTensor(name, "uint8", (1000,), (Extent((0,), (1000,), "f", 1000 * i),))
    (tmp_path / "f").write_bytes(bytes(range(250)) * 16)
    target = Manifest(tmp_path, "hf", tensors, {"f": 4000})
    parts = tasks_of(target, 2)
    assert parts == [{("a", 0), ("b", 0)}, {("c", 0), ("d", 0)}]
    recorded = {(name, 0): checksums_of(target, tensors[name], 0) for name in tensors}
    assert [check_borders(target, parts, rank, recorded) for rank in (0, 1)] == [2, 2]
    with (tmp_path / "f").open("r+b") as file:
        file.seek(1999)
        file.write(b"\0")
    assert check_borders(target, parts, 0, recorded) == 2
    with pytest.raises(WriteError, match=r"at byte 1000: xxh3_128 of 'b'"):
        check_borders(target, parts, 1, recorded)
    # Nothing to read where parts are in pages of their own.
    far = replace(target, tensors={
        "a": StoredTensor("a", "uint8", (65536,), (Extent((0,), (65536,), "f", 0),)),
        "b": StoredTensor("b", "uint8", (65536,), (Extent((0,), (65536,), "f", 65536),)),
    })  # fmt: skip
    assert check_borders(far, tasks_of(far, 2), 0, {}) == 0


def test_journals_are_read_together_and_each_keeps_its_own(tmp_path: Path) -> None:
    with Journal(tmp_path / "one") as one:
        one.add("a", 0, {"xxh3_128": "1"})
    with (tmp_path / "one").open("ab") as file:
        file.write(b'{"key": "torn"')
    with Journal(tmp_path / "two", others=[tmp_path / "one"]) as two:
        two.add("b", 1, {"xxh3_128": "2"})
        assert two.done.keys() == {("a", 0), ("b", 1)}
    assert [json.loads(line)["key"] for line in (tmp_path / "two").read_text().splitlines()] == ["b"]
    assert (tmp_path / "one").read_bytes().endswith(b'{"key": "torn"')


# --- a company ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_places_that_do_not_exist(rank: int, size: int) -> None:
    with pytest.raises(GeometryError, match="numbered from 0 and meet in a store"):
        Company(HashStore(), rank=rank, size=size)


def test_several_need_a_store() -> None:
    with pytest.raises(GeometryError, match="without a store"):
        Company(None, rank=0, size=2)


@pytest.mark.parametrize(
    "lie", ["[]", "nonsense", '["os","","","",""]', '["WriteError","a","b"]', "x" * 70_000]
)
def test_whatever_stands_in_the_store_is_an_error_of_this_package(lie: str) -> None:
    store = HashStore()
    store.set("shardweave/convert/outcome", lie)
    company = Company(store, rank=0, size=2, timeout_s=5.0)
    with pytest.raises(TransportError, match="reports an error in the form of this version"), company:
        company.seal()


def test_what_is_sealed_is_not_ended_by_another(tmp_path: Path) -> None:
    store = HashStore()
    with Company(store, rank=0, size=2, timeout_s=2.0) as company:
        company.seal()
        other = Company(store, rank=1, size=2, timeout_s=2.0)
        with pytest.raises(TransportError, match="ValueError: mine"), other:
            raise ValueError("mine")
        company.check()


# --- the command --------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    return ["-m", "shardweave", "convert", str(GQA), *words, "--config", str(CONFIG)]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH")])
    )
    yield {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "200"}


@pytest.mark.timeout(120)
def test_torchrun(tmp_path: Path, environment: dict[str, str]) -> None:
    expected = alone(GQA, tmp_path / "one", to="hf", config=CONFIG)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = subprocess.run(
        [*run, *command(str(tmp_path / "dst"), "--to", "hf", "--json")],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["written_bytes"] == prepare(GQA, to="hf", config=CONFIG).num_bytes
    assert files(tmp_path / "dst") == expected


def started(environment: dict[str, str], *words: str) -> tuple[list[int], list[str], list[str]]:
    """Codes, output and errors of two processes, of which process 0 serves the store."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, *command(*words)],
            env={**environment, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    told = [process.communicate(timeout=90) for process in processes]
    return [process.returncode for process in processes], [one[0] for one in told], [one[1] for one in told]


@pytest.mark.timeout(120)
def test_processes_that_somebody_else_starts(tmp_path: Path, environment: dict[str, str]) -> None:
    """One error is printed once."""
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "mine").touch()
    begin = time.monotonic()
    codes, out, errors = started(environment, str(tmp_path / "dst"), "--to", "hf", "--timeout", "60")
    assert (codes, out) == ([2, 2], ["", ""])
    errors = [error for error in errors if "error:" in error]
    assert len(errors) == 1 and "a target is empty: rank 0, " in errors[0] and "Traceback" not in errors[0]
    assert time.monotonic() - begin < 60


@pytest.mark.timeout(120)
def test_a_target_at_a_url(tmp_path: Path, environment: dict[str, str]) -> None:
    """The files go by way of a folder that all processes see, and one of them copies."""
    words = [f"file://{tmp_path}/dst", "--to", "hf"]
    codes, out, errors = started(environment, *words)
    assert codes == [2, 2] and "give --cache FOLDER" in "".join(errors) and not (tmp_path / "dst").exists()
    codes, out, errors = started(environment, *words, "--cache", str(tmp_path / "cache"))
    assert codes == [0, 0], errors
    assert f"file://{tmp_path}/dst (hf)" in out[0] and out[1] == ""
    assert files(tmp_path / "dst") == alone(GQA, tmp_path / "one", to="hf", config=CONFIG)
    assert list((tmp_path / "cache").iterdir()) == []


def test_one_process_does_not_import_torch(tmp_path: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys; from shardweave.cli import main; sys.argv[1:] = sys.argv[1:]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    words = command(str(tmp_path / "dst"), "--to", "hf")[2:]
    told = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**environment, "RANK": "0", "WORLD_SIZE": "1"}, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    require_finished(tmp_path / "dst")
    with pytest.raises(FormatError):
        require_finished(unfinished_in(tmp_path / "other"))


def unfinished_in(folder: Path) -> Path:
    (folder / FOLDER).mkdir(parents=True)
    (folder / FOLDER / "identity.json").write_text("{}")
    return folder
