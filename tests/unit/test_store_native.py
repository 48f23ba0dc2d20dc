"""The native store: elected writers, the proof before a byte, whole or nothing, and any layout back."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native_ranks
import numpy as np
import pytest
from native_ranks import Meeting, each

from shardweave.errors import (
    DigestError,
    DtypeError,
    FormatError,
    GapError,
    MissingFileError,
    OutsideError,
    OverlapError,
    ReplicaError,
    ShardweaveError,
    UnknownNameError,
    WriteError,
)
from shardweave.layout import Box, Layout, prove
from shardweave.plan import empty, materialise
from shardweave.store import native, native_agree, native_elect
from shardweave.store.native import Wanted
from shardweave.store.native_agree import entry_of
from shardweave.store.native_elect import Entry, elect, prove_shares
from shardweave.store.native_held import Held, held_of
from shardweave.store.native_manifest import About
from shardweave.store.native_write import SAVING, Saver
from shardweave.store.read import load

DEGREES: dict[str, dict[str, int]] = {
    "one": {},
    "tp4": {"tp": 4},
    "tp2 dp3": {"tp": 2, "dp": 3, "ep": 3},
    "pp3": {"pp": 3},
    "tp2 pp2 dp2": {"tp": 2, "dp": 2, "pp": 2, "ep": 2},
    "dp6 ep6": {"dp": 6, "ep": 6},
}
STATES = ("master", "exp_avg", "exp_avg_sq")
ABOUT = About(
    step=7,
    config={"model_type": "test", "nothing": None, "rope": {"theta": 1e-6, "factors": [1, -2.5]}},
    data={"document": 3, "token": 17},
    extras={"seed": 2**63 + 5, "name": "lauf – 1"},
    software="shardweave test",
)


def held(layout: Layout, rank: int, seed: int = 0) -> list[Held]:
    """The weights of a rank, and three states of each, cut in the same way, and the step."""
    found = list(held_of(layout, rank, materialise(layout, native_ranks.values(seed))[rank]))
    for i, state in enumerate(STATES):
        arrays = materialise(layout, native_ranks.values(seed + 1 + i))[rank]
        found += held_of(layout, rank, arrays, key=f"optim/{{name}}/{state}")
    return [*found, Held("optim/all/step", (), "int64", Box(()), np.array(41))]


def save(run: Path, layout: Layout, *, about: About = ABOUT, seed: int = 0, **options: Any) -> list[Saver]:
    """All ranks of a layout save, as threads."""
    meeting = Meeting(layout.mesh.size)

    def one(rank: int) -> Saver:
        saver = Saver(run, rank=rank, exchange=meeting.of(rank), fsync=False, **options)
        saver.save(held(layout, rank, seed), about)
        return saver

    found = each(layout.mesh.size, one)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return [result for result in found if isinstance(result, Saver)]


def load_at(run: Path, layout: Layout, rank: int, key: str, **options: Any) -> dict[str, np.ndarray]:
    """The arrays of a rank, prefilled with NaN, from a checkpoint."""
    arrays = empty(layout, np.float32, fill=np.nan)[rank]
    manifest = native.read(run)
    native.fill(
        manifest,
        [
            Wanted(one.key, one.shape, one.box, one.values.view("<u4"))
            for one in held_of(layout, rank, arrays, key=key)
        ],
        **options,
    )
    return arrays


@pytest.mark.parametrize("saved", ["one", "tp2 dp3", "tp2 pp2 dp2"])
def test_what_one_layout_saves_every_other_reads(saved: str, tmp_path: Path) -> None:
    save(tmp_path, native_ranks.layout(**DEGREES[saved]))
    for name, degrees in DEGREES.items():
        layout = native_ranks.layout(**degrees)
        prove(layout)
        for seed, key in enumerate(("model/{name}", *(f"optim/{{name}}/{s}" for s in STATES))):
            wanted = materialise(layout, native_ranks.values(seed), fill=np.nan)
            for rank in layout.mesh.ranks:
                found = load_at(tmp_path, layout, rank, key)
                for array, truth in wanted[rank].items():
                    # Bit for bit; where nothing was stored, the padding, there still is NaN.
                    assert found[array].tobytes() == truth.tobytes(), (name, rank, array)


def test_the_whole_is_what_numpy_has(tmp_path: Path) -> None:
    """Against the whole tensors, and with the reader of all formats, not with the layouts that saved."""
    save(tmp_path, native_ranks.layout(tp=2, dp=2, pp=2, ep=2))
    manifest = native.read(tmp_path)
    assert manifest.records["about"] == ABOUT
    count = 0
    for tensor, truth in native_ranks.values().items():
        numbers = [[n for _, n in dim] for _, dim in tensor.index]
        for at in np.ndindex(*map(len, numbers)):
            named = {name: numbers[d][at[d]] for d, (name, _) in enumerate(tensor.index)}
            found = load(manifest, f"model/{tensor.member(named)}")
            assert found.dtype == np.float32
            assert np.array_equal(found, truth[at])
            count += 1
    assert load(manifest, "optim/all/step") == 41
    assert len(manifest.tensors) == 4 * count + 1
    for key in manifest.tensors:
        assert not any(word in key for word in ("rank", "bucket", "tp", "dp_"))
    assert native.verify(manifest) == sum(t.num_bytes for t in manifest.tensors.values())


def test_files_are_safetensors_that_others_read(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    save(tmp_path, native_ranks.layout(tp=4))
    folder = tmp_path / "step-00000007"
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"rank_{rank:05d}.safetensors" for rank in range(4)),
        "shardweave.manifest",
    ]
    truth = native_ranks.values()[native_ranks.tensors()["embed"]]
    rows = {}
    for path in folder.glob("*.safetensors"):
        rows |= {k: v for k, v in load_file(path).items() if k.startswith("model/model.embed")}
    for key, values in rows.items():
        low, high = key.partition("[")[2].partition(",")[0].split(":")
        assert np.array_equal(values, truth[int(low) : int(high)])
    assert sum(len(values) for values in rows.values()) == native_ranks.VOCAB


def test_loading_reads_what_is_wanted_and_little_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = native_ranks.layout(tp=2)
    save(tmp_path, layout)
    manifest = native.read(tmp_path)
    read: list[int] = []
    real = native.Reader._copy

    def counted(self: Any, fd: int, start: int, strides: Any, out: Any, **rest: Any) -> None:
        read.append(out.nbytes)
        real(self, fd, start, strides, out, **rest)

    monkeypatch.setattr(native.Reader, "_copy", counted)
    for name in ("tp4", "pp3"):
        other, read[:] = native_ranks.layout(**DEGREES[name]), []
        arrays = empty(other, np.float32, fill=np.nan)[1]
        boxes = list(held_of(other, 1, arrays))
        native.fill(manifest, [Wanted(b.key, b.shape, b.box, b.values.view("<u4")) for b in boxes])
        assert sum(read) == sum(box.values.nbytes for box in boxes)


# --- writers ------------------------------------------------------------------------------------


def entries(layout: Layout) -> list[list[Entry]]:
    return [[entry_of(one) for one in held(layout, rank)] for rank in layout.mesh.ranks]


def names(ranks: int) -> dict[int, str]:
    return {rank: f"rank {rank}" for rank in range(ranks)}


@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
def test_writers_are_balanced_disjoint_and_complete(degrees: dict[str, int]) -> None:
    layout = native_ranks.layout(**degrees)
    said = entries(layout)
    shares = elect(said)
    assert shares == elect(said)
    # Element by element, in plain numpy.
    counts: dict[str, np.ndarray] = {}
    loads = np.zeros(layout.mesh.size)
    for rank, mine in enumerate(shares):
        for share in mine:
            entry = said[rank][share.entry]
            box = Box.of(entry.offset, entry.size)
            assert all(
                o <= a and a + n <= o + m
                for o, m, a, n in zip(entry.offset, entry.size, share.offset, share.size, strict=True)
            ), (box, share)
            count = counts.setdefault(entry.key, np.zeros(entry.shape, np.int64))
            count[tuple(slice(a, a + n) for a, n in zip(share.offset, share.size, strict=True))] += 1
            loads[rank] += np.prod(share.size) * np.dtype(entry.dtype).itemsize
    assert counts.keys() == {entry.key for mine in said for entry in mine}
    assert all((count == 1).all() for count in counts.values())
    # Stages hold more or less; within a stage all can write the same.
    for stage in range(degrees.get("pp", 1)):
        mine = loads[layout.mesh.columns["pp"] == stage]
        assert mine.max() / mine.mean() < 1.05, loads


def test_saved_bytes_are_those_of_the_model_once(tmp_path: Path) -> None:
    savers = save(tmp_path, native_ranks.layout(tp=2, dp=3, ep=3))
    once = sum(t.numel for t in native_ranks.tensors().values()) * 4 * 4 + 8
    written = [saver.written_bytes for saver in savers]
    assert sum(written) == once
    assert max(written) / (once / 6) < 1.05


def test_two_writers_and_none_are_refused_before_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong group of writers, as dp for dp x cp and back: every box twice, or some without a writer."""
    layout = native_ranks.layout(dp=2, tp=2)
    real = native_elect.elect

    def all_write(said: Any) -> Any:
        return tuple(
            tuple(native_elect.Share(i, e.offset, e.size) for i, e in enumerate(mine)) for mine in said
        )

    def last_is_left_out(said: Any) -> Any:
        return (*real(said)[:-1], ())

    for mutant, kind in ((all_write, OverlapError), (last_is_left_out, GapError)):
        monkeypatch.setattr(native_agree, "elect", mutant)
        run = tmp_path / kind.__name__
        with pytest.raises(kind, match=r"model/|optim/"):
            save(run, layout)
        assert list(run.iterdir()) == []


def test_a_rank_that_holds_other_rows_than_its_peers_say_is_refused(tmp_path: Path) -> None:
    """Ranks that alias one key: what was silently overwritten elsewhere is an overlap and a gap here."""
    one = Held("optim/w/exp_avg", (8, 3), "float32", Box.of((0, 0), (4, 3)), np.zeros((4, 3), np.float32))
    two = Held("optim/w/exp_avg", (8, 3), "float32", Box.of((4, 0), (4, 3)), np.ones((4, 3), np.float32))
    shifted = Held("optim/w/exp_avg", (8, 3), "float32", Box.of((3, 0), (5, 3)), np.ones((5, 3), np.float32))
    padded = Held("optim/w/exp_avg", (8, 3), "float32", Box.of((4, 0), (5, 3)), np.ones((5, 3), np.float32))
    other = Held("optim/w/exp_avg", (9, 3), "float32", Box.of((4, 0), (4, 3)), np.ones((4, 3), np.float32))
    wide = Held("optim/w/exp_avg", (8, 3), "float64", Box.of((4, 0), (4, 3)), np.ones((4, 3)))
    named = Held("optim/rank0/w/exp_avg", (8, 3), "float32", two.box, two.values)
    cases: list[tuple[Held, type[ShardweaveError]]] = [
        (one, GapError),
        (shifted, OverlapError),
        (padded, OutsideError),
        (other, FormatError),
        (wide, DtypeError),
        (named, FormatError),
    ]
    for second, kind in cases:
        errors = _save_each(tmp_path, [[one], [second]])
        assert [type(error) for error in errors] == [kind, kind], errors
        assert str(errors[0]) == str(errors[1])
        assert list(tmp_path.iterdir()) == []
    assert _save_each(tmp_path, [[one], [two]]) == [None, None]
    with_twice = _save_each(tmp_path, [[one, one], [two]])
    assert [type(error) for error in with_twice] == [OverlapError] * 2
    prove_shares(*_agreed([[one], [two]]), names(2))


def _agreed(ones: list[list[Held]]) -> Any:
    said = [[entry_of(one) for one in mine] for mine in ones]
    return said, elect(said)


def _save_each(run: Path, ones: list[list[Held]], about: About = ABOUT, **options: Any) -> list[Any]:
    meeting = Meeting(len(ones))

    def one(rank: int) -> None:
        Saver(run, rank=rank, exchange=meeting.of(rank), fsync=False, **options).save(ones[rank], about)

    return each(len(ones), one)


# --- whole or nothing ---------------------------------------------------------------------------


def test_an_error_of_one_rank_is_that_of_all_and_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = native_ranks.layout(tp=2, dp=2)
    save(tmp_path, layout)
    before = snapshot(tmp_path)
    real = Saver._write

    def full(self: Saver, path: Path, *rest: Any) -> bytes:
        if self.rank == 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device", str(path))
        return real(self, path, *rest)

    monkeypatch.setattr(Saver, "_write", full)
    for step in (7, 8):
        meeting = Meeting(4)

        def one(rank: int, step: int = step, meeting: Meeting = meeting) -> None:
            saver = Saver(tmp_path, rank=rank, exchange=meeting.of(rank), fsync=False)
            saver.save(held(layout, rank, seed=9), About(step=step))

        errors = each(4, one)
        assert {type(error) for error in errors} == {WriteError}
        assert len({str(error) for error in errors}) == 1
        assert "rank 2" in str(errors[0]) and "No space left" in str(errors[0])
        assert snapshot(tmp_path) == before


def test_a_bug_of_one_rank_is_told_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(held: Any) -> Any:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr(native_agree, "elect", boom)
    with pytest.raises(ShardweaveError, match="rank 0: ZeroDivisionError: by hand"):
        save(tmp_path, native_ranks.layout(tp=2))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_steps_latest_and_keep(tmp_path: Path) -> None:
    layout = native_ranks.layout(tp=2)
    for step in (10, 20, 30, 40):
        save(tmp_path, layout, about=About(step=step), seed=step, keep=2)
    assert [step for step, _ in native.complete_steps(tmp_path)] == [30, 40]
    assert native.latest(tmp_path) == tmp_path / "step-00000040"
    assert native.read(tmp_path).records["about"].step == 40
    # A run that went back saves an earlier step: it is the newest, and is kept.
    save(tmp_path, layout, about=About(step=15), seed=1, keep=2)
    assert native.latest(tmp_path) == tmp_path / "step-00000015"
    assert [step for step, _ in native.complete_steps(tmp_path)] == [15, 40]
    # A step that is there is replaced.
    save(tmp_path, layout, about=About(step=15), seed=2, keep=2)
    truth = native_ranks.values(2)[native_ranks.tensors()["embed"]]
    assert np.array_equal(load(native.read(tmp_path), "model/model.embed_tokens.weight"), truth)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000015", "step-00000040"]
    with pytest.raises(FormatError, match="keep"):
        Saver(tmp_path, keep=0)


def test_latest_where_a_save_was_killed_between_its_renames(tmp_path: Path) -> None:
    save(tmp_path, native_ranks.layout())
    folder = tmp_path / "step-00000007"
    folder.rename(native.replaced(folder))
    assert native.latest(tmp_path) == native.replaced(folder)
    assert native.read(tmp_path).records["about"] == ABOUT
    save(tmp_path, native_ranks.layout(), about=About(step=8))
    assert [step for step, _ in native.complete_steps(tmp_path)] == [7, 8]
    (tmp_path / "latest").unlink()
    assert native.latest(tmp_path) == tmp_path / "step-00000008"
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(FormatError, match="latest"):
        native.latest(tmp_path)


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    with pytest.raises(ShardweaveError, match="step-00000007"):
        save(tmp_path, native_ranks.layout())
    assert (folder / "notes").read_text() == "mine"
    with pytest.raises(MissingFileError):
        native.read(folder)


def test_only_plain_values_are_kept(tmp_path: Path) -> None:
    for value in (2**64, {1: 2}, {"a": [b"x"]}, np.float32(1), {"t": {1, 2}}):
        with pytest.raises(FormatError, match="plain"):
            save(tmp_path, native_ranks.layout(), about=About(extras={"x": value}))
    assert list(tmp_path.iterdir()) == []


# --- replicas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_replicas_that_differ_are_named_on_every_rank(tmp_path: Path, in_background: bool) -> None:
    """TP 2 x DP 3: one word of one replica, in the third array of several that the same ranks share."""
    layout = native_ranks.layout(tp=2, dp=3)
    ones = [held(layout, rank) for rank in range(6)]
    shared = {one.key for one in ones[0]} & {one.key for one in ones[4]}
    wrong = next(one for one in ones[4] if one.key == sorted(shared)[2])
    wrong.values.reshape(-1).view("<u4")[-1:] ^= 1

    def told(run: Path, **options: Any) -> list[Any]:
        meeting = Meeting(6)
        savers = [Saver(run, rank=r, exchange=meeting.of(r), fsync=False, **options) for r in range(6)]
        found = each(6, lambda r: savers[r].save(ones[r], ABOUT, in_background=in_background))
        each(6, lambda r: savers[r].wait())
        return found

    for error in told(tmp_path / "run"):
        assert isinstance(error, ReplicaError) and wrong.key in str(error)
        assert re.search(r"rank 0 against rank 4\W", str(error)), error
    assert native.latest(tmp_path / "run") is None and not list((tmp_path / "run").iterdir())
    # Whoever does not want to know saves what those have that were elected.
    assert all(isinstance(one, Path) for one in told(tmp_path / "trusted", compare_replicas=False))
    saved = load(native.read(tmp_path / "trusted"), wrong.key)
    mine = next(one for one in ones[0] if (one.key, one.box) == (wrong.key, wrong.box))
    at = tuple(slice(dim.start, dim.stop) for dim in wrong.box.dims)
    words = [np.ascontiguousarray(each).view("<u4") for each in (saved[at], mine.values, wrong.values)]
    assert ((words[0] == words[1]) | (words[0] == words[2])).all()


def held_by_all(values: np.ndarray, ranks: int) -> list[list[Held]]:
    box = Box.of((0,) * values.ndim, values.shape)
    return [[Held("model/w", values.shape, "float32", box, values.copy())] for _ in range(ranks)]


def save_all(run: Path, ones: list[list[Held]], how: list[dict[str, Any]], *, background: bool) -> list[Any]:
    meeting = Meeting(len(ones))
    savers = [Saver(run, rank=r, exchange=meeting.of(r), fsync=False, **how[r]) for r in range(len(ones))]
    return each(len(ones), lambda r: savers[r].save(ones[r], ABOUT, in_background=background))


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("chosen", [(True, False), (False, True)])
def test_ranks_that_choose_differently_are_refused(
    tmp_path: Path, chosen: tuple[bool, bool], in_background: bool
) -> None:
    how = [{"compare_replicas": one} for one in chosen]
    ones = held_by_all(np.arange(6, dtype=np.float32), 2)
    for error in save_all(tmp_path, ones, how, background=in_background):
        assert isinstance(error, FormatError) and "choose the same" in str(error)
    assert not list(tmp_path.iterdir())


def test_a_state_that_changes_while_it_is_compared_is_refused(tmp_path: Path) -> None:
    """One word is another at the first look alone."""
    looks = [0, 0]

    def words(rank: int) -> Callable[[Any], np.ndarray]:
        def look(values: Any) -> np.ndarray:
            looks[rank] += 1
            return np.asarray(values) + (rank == 1 and looks[rank] == 1)

        return look

    ones = held_by_all(np.arange(6, dtype=np.float32), 2)
    how = [{"words": words(rank)} for rank in range(2)]
    for error in save_all(tmp_path, ones, how, background=False):
        assert isinstance(error, ReplicaError) and "stands still until save returns" in str(error)
    assert not list(tmp_path.iterdir())


def test_words_of_another_dtype_are_not_taken_for_a_replica_that_drifted(tmp_path: Path) -> None:
    ones = held_by_all(np.arange(6, dtype=np.float32), 2)
    how: list[dict[str, Any]] = [{}, {"words": lambda values: np.asarray(values, dtype=np.float64)}]
    for error in save_all(tmp_path, ones, how, background=False):
        assert isinstance(error, FormatError) and "float64" in str(error)
    assert not list(tmp_path.iterdir())


def test_the_rank_that_is_alone_is_the_one_that_is_named(tmp_path: Path) -> None:
    ones = held_by_all(np.arange(6, dtype=np.float32), 4)
    ones[0][0].values[3] = -1
    for error in save_all(tmp_path, ones, [{}] * 4, background=False):
        assert isinstance(error, ReplicaError) and "rank 1 against rank 0" in str(error)


def test_what_nobody_else_holds_is_not_read_twice(tmp_path: Path) -> None:
    """Six ranks read what they share once to compare it, besides what they write."""
    layout = native_ranks.layout(tp=2, dp=3)
    ones = [held(layout, rank) for rank in range(6)]
    read = [0] * 6

    def words(rank: int) -> Callable[[Any], np.ndarray]:
        def noted(values: Any) -> np.ndarray:
            found = np.asarray(values)
            read[rank] += found.nbytes
            return found

        return noted

    meeting = Meeting(6)
    savers = [Saver(tmp_path, rank=r, exchange=meeting.of(r), fsync=False, words=words(r)) for r in range(6)]
    assert all(isinstance(one, Path) for one in each(6, lambda r: savers[r].save(ones[r], ABOUT)))
    places = [{(one.key, str(one.box)): one.values.nbytes for one in mine} for mine in ones]
    for rank in range(6):
        others = set().union(*(places[r] for r in range(6) if r != rank))
        both = sum(size for place, size in places[rank].items() if place in others)
        assert read[rank] == both + savers[rank].written_bytes


# --- in the background --------------------------------------------------------------------------


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing waits until the state has been changed; what is saved is what was."""
    changed = threading.Event()
    real = Saver._write

    def slow(self: Saver, *rest: Any) -> bytes:
        assert changed.wait(20)
        return real(self, *rest)

    monkeypatch.setattr(Saver, "_write", slow)
    layout = native_ranks.layout(tp=2)
    ones = [held(layout, rank) for rank in range(2)]
    meeting = Meeting(2)
    savers = [Saver(tmp_path, rank=r, exchange=meeting.of(r), fsync=False) for r in range(2)]
    each(2, lambda r: savers[r].save(ones[r], ABOUT, in_background=True))
    for mine in ones:
        for one in mine:
            one.values[...] = -1
    assert native.latest(tmp_path) is None
    changed.set()
    assert each(2, lambda r: savers[r].wait()) == [None, None]
    truth = materialise(native_ranks.layout(), native_ranks.values(), fill=np.nan)[0]
    found = load_at(tmp_path, native_ranks.layout(), 0, "model/{name}")
    assert [name for name in truth if found[name].tobytes() != truth[name].tobytes()] == []


def test_without_the_copy_the_test_above_would_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saver, "_copy", lambda self, pieces: b"")
    with pytest.raises(AssertionError, match="embed_tokens"):
        test_what_is_saved_is_the_state_at_the_call(tmp_path, monkeypatch)


def test_an_error_in_the_background_comes_at_wait_or_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Saver._write
    broken = threading.Event()

    def write(self: Saver, path: Path, *rest: Any) -> bytes:
        if broken.is_set() and self.rank == 1:
            raise OSError(28, "No space left on device", str(path))
        return real(self, path, *rest)

    monkeypatch.setattr(Saver, "_write", write)
    layout = native_ranks.layout(tp=2)
    meeting = Meeting(2)
    savers = [Saver(tmp_path, rank=r, exchange=meeting.of(r), fsync=False) for r in range(2)]

    def start(step: int) -> list[Any]:
        return each(2, lambda r: savers[r].save(held(layout, r), About(step=step), in_background=True))

    assert all(isinstance(one, Path) for one in start(1))
    broken.set()
    assert all(isinstance(one, Path) for one in start(2))
    assert {type(one) for one in each(2, lambda r: savers[r].wait())} == {WriteError}
    assert each(2, lambda r: savers[r].wait()) == [None, None]  # told once
    start(3)
    assert {type(one) for one in start(4)} == {WriteError}
    broken.clear()
    assert all(isinstance(one, Path) for one in start(5))
    each(2, lambda r: savers[r].wait())
    assert [step for step, _ in native.complete_steps(tmp_path)] == [1, 5]
    assert not list(tmp_path.glob(f"{SAVING}*"))


# --- what is asked for --------------------------------------------------------------------------


def test_what_a_checkpoint_has_not_is_refused_at_once(tmp_path: Path) -> None:
    save(tmp_path, native_ranks.layout())
    manifest = native.read(tmp_path)
    box, out = Box.of((0,), (2,)), np.zeros(2, "<u4")
    with pytest.raises(UnknownNameError, match="1 of 1 missing"):
        native.fill(manifest, [Wanted("model/other", (2,), box, out)])
    with pytest.raises(OutsideError, match="shape"):
        native.fill(manifest, [Wanted("optim/all/step", (2,), box, out)])


def test_a_changed_bit_is_seen_where_the_box_is_read_whole(tmp_path: Path) -> None:
    save(tmp_path, native_ranks.layout(tp=2))
    manifest = native.read(tmp_path)
    extent = manifest.tensors["model/model.embed_tokens.weight"].extents[-1]
    path = manifest.root / extent.file
    data = bytearray(path.read_bytes())
    data[extent.start + 5] ^= 16
    path.write_bytes(data)
    for check in (
        lambda: native.verify(native.read(tmp_path)),
        lambda: load_at(tmp_path, native_ranks.layout(), 0, "model/{name}"),
    ):
        with pytest.raises(DigestError, match=extent.file):
            check()
    load_at(tmp_path, native_ranks.layout(), 0, "model/{name}", verify=False)


def test_weights_by_their_own_names(tmp_path: Path) -> None:
    save(tmp_path, native_ranks.layout(tp=2))
    manifest = native.read(tmp_path)
    found = native.named(manifest)
    states = {key for key in manifest.tensors if key.startswith("optim/")}
    assert set(found.tensors) == {n for t in native_ranks.tensors().values() for n in t.names()} | states
    truth = native_ranks.values()[native_ranks.tensors()["embed"]]
    assert np.array_equal(load(found, "model.embed_tokens.weight"), truth)
    assert native.verify(found) == native.verify(manifest)


def test_digests_do_not_depend_on_strides() -> None:
    values = np.arange(2 * 700 * 900, dtype=np.uint16).reshape(2, 700, 900)
    plain = native.digest_of(values)
    assert native.digest_of(np.asfortranarray(values)) == plain
    assert native.digest_of(values[::-1].copy()[::-1]) == plain
    big = np.broadcast_to(np.arange(3, dtype=np.uint8)[:, None], (3, 5 << 20))
    assert native.digest_of(big) == native.digest_of(big.copy())
    assert native.digest_of(np.zeros((0, 3), np.uint8)) == native.digest_of(np.zeros(0, np.uint8))
