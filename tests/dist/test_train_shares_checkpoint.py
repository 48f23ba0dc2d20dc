"""Weights in shares, their masters and moments, from every layout to every other by way of files.

What is stored says nothing of shares: boxes of tensors, without padding, each once. Every element of every
state has a number of its own here, so that one that comes from elsewhere is seen; padding is NaN.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import train_matrix
from native_ranks import Meeting, each
from share_worlds import FOLDED, LAYOUTS, LINEAR
from torch import Tensor
from torch.distributed import checkpoint as dcp
from train_ranks import CONFIG, full_weights, parallel_of

from shardweave.convert import Geometry, convert, prepare
from shardweave.errors import GapError, OverlapError, ShardweaveError
from shardweave.layout import Layout
from shardweave.store import native, native_agree
from shardweave.store.native_elect import Entry, Share, Shares
from shardweave.store.native_manifest import About
from shardweave.testing.world import run_world
from shardweave.train.arrays import Held
from shardweave.train.batch import microbatch
from shardweave.train.checkpoint import load_states, load_weights, over_group, saver, states_of, weights_of
from shardweave.train.grid import Groups
from shardweave.train.optimizer import AdamW, Optimizer, decayed
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import Bucket, ReducePlan, reduce_plan
from shardweave.train.runtime import GRID, begun, build, group_plan, layout_of
from shardweave.train.step import forward_backward

pytestmark = pytest.mark.timeout(120)

TWO: dict[str, Any] = {**CONFIG, "num_hidden_layers": 2, "mlp_only_layers": [1], "dtype": "bfloat16"}
"""A layer of experts and a dense one."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is saved or loaded.

    Attributes:
        parallel: The degrees.
        multiple: Of the rows of a share.
        sharded: Whether copies share the state.
    """

    parallel: Parallel
    multiple: int = 1
    sharded: bool = True

    @property
    def layout(self) -> Layout:
        return layout_of(TWO, self.parallel, multiple=self.multiple)


NAMES = (
    *("one", "G2", "C2 folded", "G2 C2 folded", "G2 C2", "T2 G2", "T2 G2 C2 folded", "G2 C2 D2 folded"),
    *("C4 D2 folded", "G2 EG2 EP2", "G1 EG2 EP2 C2 folded", "G4 EG1 EP8", "C3 D2 folded"),
    *("C3 D2 over all", "G2 C3 D2 folded", "G2 C3 D2"),
)
PLACES = {name: Place(parallel_of(LAYOUTS[name]), sharded=LAYOUTS[name].sharded) for name in NAMES}
PLACES |= {
    "G2 C2 folded": replace(PLACES["G2 C2 folded"], multiple=16),
    "C4 D2 folded": replace(PLACES["C4 D2 folded"], multiple=32),
    "T2 G2": replace(PLACES["T2 G2"], multiple=5),
    "G2 D2 P2 over remat and dp": Place(
        Parallel(remat=2, dp=2, pp=2, ep=4, weight_axes=("remat", "dp")), multiple=3
    ),
    "T4 D2 over dp": Place(Parallel(tp=4, dp=2, etp=2, weight_axes=("dp",)), sharded=False),
    "C2 D3": Place(Parallel(cp=2, dp=3, ep=2)),
}


@cache
def truth() -> Mapping[str, Mapping[str, Tensor]]:
    """Whole weights and states by name; each element of a state is a number that no other one is."""
    weights, found, first = full_weights(TWO, torch.bfloat16), {}, 1
    for name, weight in weights.items():
        numbers = torch.arange(first, first + weight.numel(), dtype=torch.float32).view(weight.shape)
        first += weight.numel()
        found[name] = {"exp_avg": numbers + 0.25, "exp_avg_sq": numbers + 0.5, "master": numbers}
    assert first < 1 << 21  # float32 holds the quarters
    return {name: {"weight": weights[name], **states} for name, states in found.items()}


@cache
def array_of(held: Held, state: str) -> Tensor:
    """What an array shall hold; NaN where it has padding."""
    dtype = torch.bfloat16 if state == "weight" else torch.float32
    array = torch.full(held.shape, torch.nan, dtype=dtype)
    for part in held.parts:
        at = tuple(slice(r.start, r.stop, r.step) for r in part.box.dims)
        part.view(array).copy_(truth()[part.name][state][at])
    return array


def state_of(place: Place, rank: int, layout: Layout) -> tuple[dict[str, Tensor], Optimizer]:
    """The weights and the optimizer of a rank, NaN all over."""
    weights = begun(layout, rank, config=TWO, seed=None)
    groups = Groups(group_plan(place.parallel), rank, {})
    plan = reduce_plan(layout, rank)
    optimizer = Optimizer(weights, plan=plan, groups=groups, settings=AdamW(), sharded=place.sharded)
    for state in optimizer.states():
        state.values.fill_(torch.nan)
    return weights, optimizer


def save(place: Place, run: Path, *, step: int = 7) -> list[Any]:
    """Save at a layout; what each rank returns or raises."""
    layout, meeting = place.layout, Meeting(place.parallel.world_size)

    def one(rank: int) -> int:
        weights, optimizer = state_of(place, rank, layout)
        held = optimizer.plan.arrays
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(array_of(held[name].held, "weight"))
        for state in optimizer.states():
            at = tuple(slice(r.start, r.stop) for r in state.box.dims)
            state.values.copy_(array_of(state.held, state.state)[at])
        optimizer.count = step
        mine = saver(run, rank=rank, exchange=meeting.of(rank), fsync=False)
        mine.save([*weights_of(layout, rank, weights), *states_of(optimizer)], About(step=step))
        return mine.written_bytes

    return each(place.parallel.world_size, one)


def load(place: Place, rank: int, run: Path, *, layout: Layout) -> None:
    """Load on one rank, and compare every bit that it has."""
    weights, optimizer = state_of(place, rank, layout)
    load_weights(run, layout=layout, rank=rank, arrays=weights)
    load_states(run, optimizer)
    assert optimizer.count == 7
    for name, weight in weights.items():
        wanted = array_of(optimizer.plan.arrays[name].held, "weight")
        assert torch.equal(weight, wanted.nan_to_num(0.0)), name  # padding is 0
    for state in optimizer.states():
        wanted = array_of(state.held, state.state)[tuple(slice(r.start, r.stop) for r in state.box.dims)]
        real = ~wanted.isnan()
        assert torch.equal(state.values[real], wanted[real]), (state.name, state.state, state.box)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every layout."""
    found = {}
    for number, (name, place) in enumerate(PLACES.items()):
        found[name] = tmp_path_factory.mktemp(f"run{number}")
        told = save(place, found[name])
        assert all(isinstance(one, int) for one in told), (name, told)
    return found


# --- from every layout to every other -----------------------------------------------------------


@pytest.mark.parametrize("into", PLACES)
def test_every_layout_loads_what_every_layout_saved(into: str, runs: Mapping[str, Path]) -> None:
    """Of each pair one rank, another one for each source; all of them twice at least."""
    place = PLACES[into]
    layout, size = place.layout, place.parallel.world_size
    for number, name in enumerate(PLACES):
        load(place, number % size, runs[name], layout=layout)
    assert len(PLACES) >= size


def test_files_of_all_layouts_say_the_same(runs: Mapping[str, Path]) -> None:
    """Names, dtypes and shapes are those of the model; boxes tile them; no NaN is in any file."""
    wanted = {
        f"model/{name}" if state == "weight" else f"optim/{name}/{state}": (
            str(values.dtype).removeprefix("torch."),
            tuple(values.shape),
        )
        for name, states in truth().items()
        for state, values in states.items()
    }
    for name, run in runs.items():
        manifest = native.read(run)
        tensors = {key: (one.dtype, one.shape) for key, one in manifest.tensors.items()}
        assert tensors.pop("optim/all/step") == ("int64", ()), name
        assert tensors == wanted, name
        for key, stored in manifest.tensors.items():
            volume = sum(extent.numel for extent in stored.extents)
            assert volume == torch.Size(stored.shape).numel(), (name, key)
        native.verify(manifest)


def test_writers_share_the_work(runs: Mapping[str, Path], tmp_path: Path) -> None:
    told = save(PLACES["G2 C2 D2 folded"], tmp_path / "run")
    assert max(told) < 1.3 * sum(told) / len(told)


# --- padding ------------------------------------------------------------------------------------


def test_padding_is_in_no_file(tmp_path: Path) -> None:
    """124 rows on 4 tensor ranks are 31 each, filled up to 32: the file has 124, all in place."""
    config = {
        **LINEAR,
        "num_hidden_layers": 1,
        "intermediate_size": 124,
        "hidden_size": 8,
        "dtype": "float32",
    }
    layout, meeting = layout_of(config, Parallel(tp=4, remat=2), multiple=16), Meeting(8)
    name = "model.layers.0.mlp.gate_proj.weight"
    wanted = torch.arange(124 * 8.0).view(124, 8)

    def one(rank: int) -> None:
        weights = begun(layout, rank, config=config, seed=1)
        at = layout.mesh.coordinate(rank)
        rows = wanted[31 * at["tp"] : 31 * (at["tp"] + 1)][16 * at["remat"] : 16 * (at["remat"] + 1)]
        with torch.no_grad():
            assert weights[name].shape == (16, 8)
            weights[name].fill_(torch.nan)[: len(rows)] = rows
        saver(tmp_path, rank=rank, exchange=meeting.of(rank), fsync=False).save(
            weights_of(layout, rank, weights), About(step=1)
        )

    assert each(8, one) == [None] * 8
    assert native.read(tmp_path).tensors[f"model/{name}"].shape == (124, 8)
    alone = layout_of(config, Parallel())
    weights = begun(alone, 0, config=config, seed=None)
    load_weights(tmp_path, layout=alone, rank=0, arrays=weights)
    assert torch.equal(weights[name], wanted)


# --- who writes ---------------------------------------------------------------------------------


def refused(place: Place, run: Path, error: type[ShardweaveError]) -> str:
    """What all ranks say, and that nothing was written."""
    told = save(place, run)
    assert {type(one) for one in told} == {error}, told
    left = [path for path in run.rglob("*") if path.is_file()]
    assert not left, left
    (said,) = {f"{one}" for one in told}
    return said


def within(axes: tuple[str, ...], of: Callable[[Bucket, ReducePlan], bool]) -> Any:
    """Ranks stand for the parts that they would have if other ranks held the same."""
    right = ReducePlan.own

    def own(self: ReducePlan, bucket: Bucket) -> tuple[int, int]:
        if not of(bucket, self):
            return right(self, bucket)
        ranks = self.layout.mesh.group(self.rank, *axes)
        at, size = ranks.index(self.rank), len(ranks)
        return bucket.numel * at // size, bucket.numel * (at + 1) // size

    return patch.object(ReducePlan, "own", own)


def is_share(bucket: Bucket, plan: ReducePlan) -> bool:
    return "q_proj" in " ".join(held.name for held in bucket.arrays)


def test_shares_that_are_given_away_as_if_context_ranks_had_copies_leave_gaps(tmp_path: Path) -> None:
    """The group that gradients of unfolded weights have: of each share only some rows would be stored."""
    place = replace(PLACES["C3 D2 folded"], sharded=False)
    with within(("cp", "dp"), is_share):
        said = refused(place, tmp_path, GapError)
    assert "optim/model." in said


def test_copies_that_are_given_away_as_if_they_were_shares_overlap(tmp_path: Path) -> None:
    """The other way round, by parts that differ: a row would be stored by several ranks."""
    place = Place(Parallel(cp=3, dp=2), sharded=False)

    def own(self: ReducePlan, bucket: Bucket) -> tuple[int, int]:
        at = self.layout.mesh.coordinate(self.rank)
        size = self.parallel_dp  # type: ignore[attr-defined]
        low = bucket.numel * at["dp"] // size
        return low + at["cp"] * (low > 0), bucket.numel * (at["dp"] + 1) // size

    with patch.object(ReducePlan, "own", own), patch.object(ReducePlan, "parallel_dp", 2, create=True):
        said = refused(place, tmp_path, OverlapError)
    assert "optim/model." in said


def test_copies_that_all_say_the_same_box_are_written_once(tmp_path: Path) -> None:
    """By the data ranks alone: context ranks then say the same, and one of them is chosen."""
    place = Place(Parallel(cp=3, dp=2), sharded=False)
    with within(("dp",), lambda bucket, plan: True):
        told = save(place, tmp_path)
    stored = native.read(tmp_path).tensors
    size = sum(torch.Size(one.shape).numel() * {"bfloat16": 2}.get(one.dtype, 4) for one in stored.values())
    assert sum(told) == pytest.approx(size, rel=0.01)
    load(PLACES["one"], 0, tmp_path, layout=PLACES["one"].layout)


def elected(change: Callable[[list[list[Entry]], Shares], Shares]) -> Any:
    right = native_agree.elect
    return patch.object(native_agree, "elect", lambda held: change(held, right(held)))


def test_a_writer_of_the_wrong_group_is_seen_before_a_byte(tmp_path: Path) -> None:
    """Every rank of a context group writes what it holds; then only the first one does."""
    place = PLACES["C3 D2 folded"]

    def all_holders(held: list[list[Entry]], shares: Shares) -> Shares:
        return tuple(
            tuple(Share(number, entry.offset, entry.size) for number, entry in enumerate(entries))
            for entries in held
        )

    def first_of_context(held: list[list[Entry]], shares: Shares) -> Shares:
        return tuple(mine if rank % 3 == 0 else () for rank, mine in enumerate(shares))

    with elected(all_holders):
        said = refused(place, tmp_path / "a", OverlapError)
    assert "model/" in said or "optim/" in said
    with elected(first_of_context):
        said = refused(place, tmp_path / "b", GapError)
    assert "model/" in said or "optim/" in said


# --- fused arrays -------------------------------------------------------------------------------


def stored_by_torch(folder: Path, keys: list[str]) -> dict[str, Tensor]:
    """Read by torch itself."""
    metadata = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    found = {key: torch.zeros(metadata[key].size, dtype=torch.bfloat16) for key in keys}
    dcp.load(found, checkpoint_id=str(folder), no_dist=True)
    return found


@pytest.mark.parametrize("name", ["G4 EG1 EP8", "C3 D2 over all"])
def test_gate_and_up_are_fused_whole_wherever_a_share_ends(
    name: str, runs: Mapping[str, Path], tmp_path: Path
) -> None:
    """Megatron has both in one array; shares of 7 rows, or of 5, end within either."""
    job = prepare(runs[name], to="megatron", config=TWO, geometry=Geometry(tp=2, etp=1), weights_only=True)
    convert(job, tmp_path / "mc", fsync=False)
    dense = "decoder.layers.1.mlp.linear_fc1.weight"
    experts = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    found = stored_by_torch(tmp_path / "mc", [dense, experts])

    def fused(here: str) -> Tensor:
        return torch.cat([truth()[f"{here}.{n}_proj.weight"]["weight"] for n in ("gate", "up")])

    assert torch.equal(found[dense], fused("model.layers.1.mlp"))
    for number in range(8):
        assert torch.equal(found[experts][number], fused(f"model.layers.0.mlp.experts.{number}"))


# --- training goes on ---------------------------------------------------------------------------

RING = (
    "G2 C2 folded",
    "T2 G2",
    "C3 D2 over all",
    "G1 EG2 EP2 C2 folded",
    "G2 D2 P2 over remat and dp",
    "one",
)
ADAM = AdamW(lr=0.02, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1)


def documents() -> list[Tensor]:
    chance = torch.Generator().manual_seed(8)
    return [torch.randint(0, TWO["vocab_size"], (n,), generator=chance) for n in (9, 4, 13, 6, 3, 7, 11, 2)]


def train(place: Place, steps: range, *, load_from: Path | None, save_to: Path | None) -> Iterator[float]:
    """The loss of some steps with the same documents; saved after the second."""
    parallel = place.parallel

    def work(groups: Groups) -> list[float]:
        seed = None if load_from else 3
        config = {**TWO, "initializer_range": 0.25}
        runtime = build(
            config, parallel=parallel, groups=groups, dtype="float32", seed=seed, multiple=place.multiple
        )
        plan = reduce_plan(runtime.layout, runtime.rank)
        optimizer = Optimizer(
            runtime.weights,
            plan=plan,
            groups=groups,
            settings=decayed(ADAM),
            sharded=place.sharded,
            max_norm=0.5,
        )
        if load_from:
            load_weights(load_from, layout=runtime.layout, rank=runtime.rank, arrays=runtime.weights)
            load_states(load_from, optimizer)
        data, found = parallel.data_rank(runtime.rank), []
        for step in steps:
            share = 8 // parallel.num_data
            mine = documents()[data * share : (data + 1) * share]
            batches = [microbatch(mine, cp=parallel.cp, tp=parallel.tp)]
            for weight in runtime.weights.values():
                weight.grad = None
            found.append(forward_backward(runtime, batches, step=step).report.loss)
            assert optimizer.step({name: weight.grad for name, weight in runtime.weights.items()}).ok
            if save_to and step == 1:
                exchange = over_group(groups.get(GRID, "all"))
                saver(save_to, rank=runtime.rank, exchange=exchange, fsync=False).save(
                    [*weights_of(runtime.layout, runtime.rank, runtime.weights), *states_of(optimizer)],
                    About(step=2),
                )
        return found

    yield from run_world(work, plan=group_plan(parallel), timeout_s=100)[0]


def test_training_goes_on_at_another_layout_as_it_would_have(tmp_path: Path) -> None:
    went = {}
    for number, name in enumerate(RING):
        run = tmp_path / f"{number}"
        went[name] = list(train(PLACES[name], range(4), load_from=None, save_to=run))
    for number, (name, other) in enumerate(itertools.pairwise([*RING, RING[0]])):
        run = tmp_path / f"{number}"
        on = list(train(PLACES[other], range(2, 4), load_from=run, save_to=None))
        assert on == pytest.approx(went[name][2:], rel=1e-6), (name, other)
    assert all(losses[0] > losses[-1] + 0.01 for losses in went.values())
    # Without its moments a run goes another way.
    with patch.object(sys.modules[__name__], "load_states", lambda run, optimizer: None):
        on = list(train(PLACES[RING[0]], range(2, 4), load_from=tmp_path / "0", save_to=None))
    assert abs(on[1] - went[RING[0]][3]) > 1e-4


def test_the_ring_changes_every_degree() -> None:
    def degrees(name: str) -> dict[str, Any]:
        of = PLACES[name].parallel
        return {n: getattr(of, n) for n in ("tp", "cp", "remat", "dp", "pp", "ep", "eremat", "weight_axes")}

    changed = {
        key
        for a, b in itertools.pairwise([*RING, RING[0]])
        for key, value in degrees(a).items()
        if degrees(b)[key] != value
    }
    assert changed == set(degrees("one")) and FOLDED in {degrees(name)["weight_axes"] for name in RING}
    assert train_matrix.BOUNDS["float64"] < 1e-6
