"""Flat buckets of matrices that ranks share (GTP_remat), folded with context ranks or not, by a slow writer.

This form was read from public sources and was not run: no release of megatron-core writes it yet. What holds
here holds of `megatron_shares`, which says what was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_shares import CONFIG, EXPERT_CONFIG, STATES, Chunk, Saved, Truth, chunks_of, truth, write

from shardweave.convert import convert, open_checkpoint, prepare
from shardweave.convert.convert import states
from shardweave.convert.formats import megatron_jobs
from shardweave.convert.target import Geometry
from shardweave.dialects.megatron import shares
from shardweave.errors import FormatError, GapError, ShardweaveError
from shardweave.store.manifest import Manifest
from shardweave.store.read import Reader

DENSE, MOE = truth(moe=False), truth(moe=True)
FOLDED = Saved(folded=True)
EVERY = ("tp", "cp", "remat", "pp", "ep", "etp", "expert_remat", "folded", "vpp")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

JOBS: dict[str, Saved] = {
    "not folded, as its arguments say": Saved(says=("tp", "remat")),
    "folded, nothing said": FOLDED,
    "folded, all said": replace(FOLDED, says=EVERY),
    "folded, along remat first": replace(FOLDED, cp_first=False),
    "folded, context ranks alone": Saved(remat=1, expert_remat=1, folded=True, dp=4),
    "folded, one bucket": replace(FOLDED, bucket_size=None),
    "folded, filled up to 32": replace(FOLDED, multiple=32),
    "folded, rows divide evenly": Saved(tp=1, etp=1, cp=5, remat=2, multiple=0, folded=True),
    "folded, two stages of two chunks": replace(FOLDED, pp=2, vpp=2),
    "two stages of two chunks": Saved(pp=2, vpp=2, remat=1, expert_remat=1),
    "experts among dense weights": Saved(moe=True, says=("tp", "remat", "expert_remat")),
    "folded, experts among dense weights": replace(FOLDED, moe=True),
    "folded, experts spread": replace(FOLDED, moe=True, ep=2, etp=1, expert_remat=3, says=EVERY),
    "folded, experts shared by none": replace(FOLDED, moe=True, expert_remat=1),
    "experts alone are shared": Saved(moe=True, remat=1, expert_remat=2, pp=2, says=EVERY),
}


def of(saved: Saved) -> tuple[Truth, dict[str, Any]]:
    """What a job holds, and the config of its model."""
    return (MOE, EXPERT_CONFIG) if saved.moe else (DENSE, CONFIG)


def compare(manifest: Manifest, true: Truth) -> int:
    """Compare every state with the truth, bit for bit."""
    with Reader(manifest) as reader:
        for (name, state), values in true.states.items():
            found = reader.load(f"optim/{name}/{'master' if state == 'param' else state}")
            same = found.tobytes() == values.tobytes()  # apart, as pytest looks for where long bytes differ
            assert same, (name, state)
        for name, weight in true.weights.items():
            same = reader.load(name).tobytes() == weight.view(torch.uint8).numpy().tobytes()
            assert same, name
    return len(true.states)


@pytest.mark.parametrize("name", JOBS)
def test_what_ranks_hold_is_what_is_read(tmp_path: Path, name: str) -> None:
    saved = JOBS[name]
    true, config = of(saved)
    write(saved, true, tmp_path)
    source = open_checkpoint(tmp_path, config=config)
    state = states(source)
    assert state is not None and set(state.counts.values()) == {7}
    assert compare(source.manifest, true) == len(STATES) * len(true.weights)


def test_the_writer_hides_nothing() -> None:
    """Shares that are full, in part and padding alone; two dtypes; several buckets; unequal rows."""
    chunks = list(chunks_of(FOLDED, DENSE))
    padding = {key: [0, 0] for key in {one.key for one in chunks}}
    for one in chunks:
        padding[one.key][0] += int((one.values == 7e7).sum())
        padding[one.key][1] += len(one.values)
    assert {(bool(some), some == every) for some, every in padding.values()} == {
        (False, False), (True, False), (True, True),
    }  # fmt: skip
    said = [re.search(r"dtype_\(torch\.(\w+),.*bucket_idx_(\d+)(\.cp_rank_\d+)?", key) for key in padding]
    kinds = {(match[1], match[3]) for match in said if match}
    assert kinds == {
        (dtype, cp)
        for dtype in ("bfloat16", "float32")
        for cp in (None, *(f".cp_rank_{c}" for c in range(3)))
    }
    assert max(int(match[2]) for match in said if match) > 2


# --- across the fold ------------------------------------------------------------------------------


def test_a_state_reshards_across_the_fold(tmp_path: Path) -> None:
    """Saved folded and not folded, a state is the same: both become the same files for another job."""
    geometry = Geometry(tp=1, pp=2, vocab_divisor=1)
    for name, saved in (("folded", FOLDED), ("plain", Saved(remat=3, expert_remat=3, says=("remat",)))):
        (tmp_path / name).mkdir()
        write(saved, DENSE, tmp_path / name)
        plan = prepare(tmp_path / name, to="megatron", config=CONFIG, geometry=geometry)
        convert(plan, tmp_path / f"{name} moved", fsync=False)
    views = [open_checkpoint(tmp_path / f"{name} moved", config=CONFIG) for name in ("folded", "plain")]
    for view in views:
        assert states(view) is not None
        compare(view.manifest, DENSE)
    files = [sorted(path.name for path in view.manifest.root.glob("*.distcp")) for view in views]
    assert files[0] == files[1] and files[0]
    for name in files[0]:
        assert len({(view.manifest.root / name).read_bytes() for view in views}) == 1


# --- what is wrong --------------------------------------------------------------------------------

Damage = Callable[[list[Chunk]], Iterator[Chunk]]


def _aliased(chunks: list[Chunk]) -> Iterator[Chunk]:
    """Ranks 0 and 1 of a context group share a key: rank 1 was the last to write, and rank 0's are lost."""
    for one in chunks:
        if ".cp_rank_0." not in one.key:
            yield replace(one, key=one.key.replace(".cp_rank_1.", ".cp_rank_0."))


def _one_key(chunks: list[Chunk]) -> Iterator[Chunk]:
    """All ranks of a context group share a key, as before there were keys of their own."""
    for one in chunks:
        if ".cp_rank_0." in one.key or ".cp_rank_" not in one.key:
            yield replace(one, key=one.key.replace(".cp_rank_0.", "."))


def _copied(chunks: list[Chunk]) -> Iterator[Chunk]:
    """Rank 1 of the context groups has stored the values of rank 0 under its own key."""
    values = {(one.key, one.at): one.values for one in chunks}
    for one in chunks:
        yield replace(one, values=values[one.key.replace(".cp_rank_1.", ".cp_rank_0."), one.at])


def _without_the_last(chunks: list[Chunk]) -> Iterator[Chunk]:
    yield from (one for one in chunks if ".cp_rank_2." not in one.key)


def _without_one(chunks: list[Chunk]) -> Iterator[Chunk]:
    yield from (one for one in chunks if "dp_group_idx_1" not in one.key or ".cp_rank_2." not in one.key)


def _swapped(chunks: list[Chunk]) -> Iterator[Chunk]:
    """Ranks 0 and 1 of the context groups of one group of ranks have changed places."""
    other = {".cp_rank_0.": ".cp_rank_1.", ".cp_rank_1.": ".cp_rank_0."}
    for one in chunks:
        key = one.key
        if "dp_group_idx_2." in key:
            key = re.sub(r"\.cp_rank_[01]\.", lambda match: other[match[0]], key)
        yield replace(one, key=key)


def _drifted(chunks: list[Chunk]) -> Iterator[Chunk]:
    """A norm differs on a rank that shares matrices with another."""
    for one in chunks:
        values = one.values
        if "dp_group_idx_2." in one.key and ".cp_rank_" not in one.key and one.key.endswith(".exp_avg"):
            values = torch.from_numpy(np.nextafter(values.numpy(), np.float32(9)))
        yield replace(one, values=values)


def _of_another_form(chunks: list[Chunk]) -> Iterator[Chunk]:
    yield from (replace(one, key=one.key.replace(".cp_rank_", ".context_rank_")) for one in chunks)


def _native_fp8(chunks: list[Chunk]) -> Iterator[Chunk]:
    yield from (replace(one, key=one.key.replace("torch.bfloat16", "torch.uint8")) for one in chunks)


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (_aliased, GapError, r"each rank of a context group has stored its share .* cp ranks\(0, 2\) of 3"),
        (_one_key, FormatError, r"0 of \d+ agree"),
        (_copied, FormatError, r"0 of \d+ agree.*a master rounds to its weight"),
        (_without_the_last, FormatError, r"0 of \d+ agree"),
        (_without_one, GapError, r"group 1, buffer 0.*cp ranks\(0, 1\) of 3"),
        (_swapped, FormatError, r"0 of \d+ agree.*a master rounds to its weight"),
        (_drifted, FormatError, r"0 of \d+ agree.*ranks that hold the same parameter"),
        (_of_another_form, FormatError, "is of another form"),
        (_native_fp8, FormatError, "fp8 parameters: their weights are no rounded masters"),
    ],
)
def test_what_is_not_what_ranks_held_is_refused(
    tmp_path: Path, damage: Damage, error: type[ShardweaveError], says: str
) -> None:
    saved = replace(FOLDED, says=("tp", "remat"))
    write(saved, DENSE, tmp_path, chunks=list(damage(list(chunks_of(saved, DENSE)))))
    source = open_checkpoint(tmp_path, config=CONFIG)
    with pytest.raises(error, match=f"(?s){says}"):
        states(source)
    assert source.manifest.tensors.keys() >= DENSE.weights.keys(), "weights alone can still be converted"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_one_key, r"those of no ranks != context_parallel_size\(3\), gtp_remat_fold_cp\(True\)"),
        (_without_the_last, r"those of 2 ranks != context_parallel_size\(3\)"),
    ],
)
def test_what_arguments_say_of_context_ranks_is_asked_of_the_keys(
    tmp_path: Path, damage: Damage, says: str
) -> None:
    saved = replace(FOLDED, says=EVERY)
    write(saved, DENSE, tmp_path, chunks=list(damage(list(chunks_of(saved, DENSE)))))
    with pytest.raises(FormatError, match=says):
        states(open_checkpoint(tmp_path, config=CONFIG))


def test_what_nothing_tells_apart_is_refused(tmp_path: Path) -> None:
    """Where all masters are equal and no padding lies among them, ranks may be counted in either order."""
    true = truth(moe=False)
    for name, weight in true.weights.items():
        true.states[name, "param"] = np.ones(weight.shape, np.float32)
        true.weights[name] = torch.ones_like(weight)
    write(replace(JOBS["folded, rows divide evenly"], says=("tp", "remat")), true, tmp_path)
    with pytest.raises(FormatError, match=r"2 of \d+ agree.*order=cp-remat.*order=remat-cp"):
        states(open_checkpoint(tmp_path, config=CONFIG))


# --- mistakes of the reader that these tests see ----------------------------------------------------


def _other_order(job: Any, *, remat: int, cp: int) -> shares.Share:
    number = remat + job.remat * cp if job.cp_first else cp + job.cp * remat
    return shares.Share(number, job.cp * job.remat, job.multiple)


def _no_context(job: Any, *, remat: int, cp: int) -> shares.Share:
    return shares.Share(remat * job.cp, job.cp * job.remat, job.multiple)


@pytest.mark.parametrize("wrong", [_no_context, _other_order])
def test_a_reader_that_counts_ranks_wrongly_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., shares.Share]
) -> None:
    """Where the only order that is tried is the other one, or all context ranks are taken for one."""
    write(FOLDED, DENSE, tmp_path)
    right = megatron_jobs.jobs
    monkeypatch.setattr(megatron_jobs.Job, "share", wrong)

    def tried(*args: Any) -> Iterator[megatron_jobs.Job]:
        yield from (job for job in right(*args) if job.cp_first)

    monkeypatch.setattr("shardweave.convert.formats.megatron_state.jobs", tried)
    with pytest.raises(FormatError, match=r"0 of \d+ agree"):
        states(open_checkpoint(tmp_path, config=CONFIG))


def test_a_reader_that_keeps_padding_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of rows that are not filled up begin at other rows, and have other sizes."""
    write(FOLDED, DENSE, tmp_path)

    def unpadded(share: shares.Share, size: int) -> range:
        held = -(-size // share.count)
        return range(share.number * held, (share.number + 1) * held)

    monkeypatch.setattr(shares.Share, "rows", unpadded)
    with pytest.raises(FormatError, match=r"0 of \d+ agree"):
        states(open_checkpoint(tmp_path, config=CONFIG))


def test_a_wrong_moment_is_seen_by_the_comparison(tmp_path: Path) -> None:
    """Masters prove where things lie. That a moment is of another rank, nothing stored tells."""

    def damaged() -> Iterator[Chunk]:
        chunks = list(chunks_of(FOLDED, DENSE))
        values = {(one.key, one.at): one.values for one in chunks}
        for one in chunks:
            key = one.key.replace("1.exp_avg", "0.exp_avg") if "cp_rank_1.exp_avg" in one.key else one.key
            yield replace(one, values=values[key, one.at])

    write(FOLDED, DENSE, tmp_path, chunks=list(damaged()))
    source = open_checkpoint(tmp_path, config=CONFIG)
    assert states(source) is not None
    with pytest.raises(AssertionError, match="exp_avg"):
        compare(source.manifest, DENSE)


def test_a_matrix_that_is_stored_with_its_padding_is_refused(tmp_path: Path) -> None:
    """Public sources store padded rows, with tp between those of two ranks: of which rank is not said."""
    true = truth(moe=False)
    name = "decoder.layers.mlp.linear_fc2.weight"
    padded = torch.zeros((4, 192, 130), dtype=torch.bfloat16)
    padded[:, :100] = true.weights[name]
    true.weights[name] = padded
    write(FOLDED, true, tmp_path)
    with pytest.raises(ShardweaveError):
        states(open_checkpoint(tmp_path, config=CONFIG))


def test_replicas_stand_for_each_other() -> None:
    """Of what is not shared, every share but the first is a replica; of a matrix, none is."""
    norm = shares.Parameter("norm", (6,), ())
    matrix = shares.Parameter("w", (6, 2), (), gathered=True)
    for number in range(4):
        share = shares.Share(number, 4, 0 if number else 2)
        assert shares.shared(norm, share).replica is (number > 0)
    assert not shares.shared(matrix, shares.Share(1, 3, 2)).replica
    assert shares.shared(matrix, shares.Share(2, 3, 2)).shape == (2, 2)
