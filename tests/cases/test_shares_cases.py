"""Public reports about sharded weights and states, answered by the layouts and files of weights in shares.

What they say of gradients, norms and steps is tried in `tests/dist/test_train_shares*.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from native_ranks import Meeting, each
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from train_ranks import CONFIG

from shardweave.errors import GapError, UnknownNameError
from shardweave.layout import BufferRule, Layout, Mesh, Part, along, even, pad, whole
from shardweave.layout import Tensor as Logical
from shardweave.store import native
from shardweave.store.native_agree import entry_of
from shardweave.store.native_elect import elect
from shardweave.store.native_manifest import About
from shardweave.train.arrays import held_arrays
from shardweave.train.checkpoint import load_states, load_weights, saver, states_of, weights_of
from shardweave.train.gathered import Shared
from shardweave.train.grid import Group, Groups
from shardweave.train.optimizer import AdamW, Optimizer
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import begun, group_plan, layout_of

NAME = "model.norm.weight"


def of_rows(rows: int, ranks: int, multiple: int = 1) -> Layout:
    """One tensor of so many elements in equal shares, filled up at the end."""
    tensor, mesh = Logical(NAME, (rows,), "float32"), Mesh((("dp", ranks),))
    cut = along(mesh, "dp", lambda r: even(pad(whole(rows), ranks * multiple), ranks, r))
    return Layout("shares", mesh, (BufferRule(NAME, (Part(tensor),), (cut,)),))


def real(layout: Layout) -> list[int]:
    """How many elements of the tensor each rank has."""
    return [
        sum(part.box.numel for part in held_arrays(layout, rank)[NAME].parts) for rank in layout.mesh.ranks
    ]


def arrays_of(layout: Layout, rank: int, values: Tensor) -> dict[str, Tensor]:
    """A rank's part of the values; padding is NaN."""
    held = held_arrays(layout, rank)[NAME]
    array = torch.full(held.shape, torch.nan)
    for part in held.parts:
        part.view(array).copy_(values[part.box.dims[0].start : part.box.dims[0].stop])
    return {NAME: array}


def save(layout: Layout, run: Path, values: Tensor, *, without: Sequence[int] = ()) -> list[Any]:
    """What each rank writes, or raises; some say that they have nothing."""
    meeting = Meeting(layout.mesh.size)

    def one(rank: int) -> int:
        held = [] if rank in without else list(weights_of(layout, rank, arrays_of(layout, rank, values)))
        mine = saver(run, rank=rank, exchange=meeting.of(rank), fsync=False)
        mine.save(held, About(step=1))
        return mine.written_bytes

    return each(layout.mesh.size, one)


def loaded(layout: Layout, run: Path) -> Iterator[dict[str, Tensor]]:
    for rank in layout.mesh.ranks:
        arrays = {name: torch.full(held.shape, torch.nan) for name, held in held_arrays(layout, rank).items()}
        load_weights(run, layout=layout, rank=rank, arrays=arrays)
        yield arrays


def same_at(layouts: Sequence[Layout], run: Path, values: Tensor) -> None:
    for layout in layouts:
        for rank, arrays in enumerate(loaded(layout, run)):
            wanted = arrays_of(layout, rank, values)[NAME].nan_to_num(0.0)
            assert torch.equal(arrays[NAME], wanted), (layout.mesh, rank)


# --- K16: flat shards and padding ---------------------------------------------------------------


def test_b094_deepspeed_6918_padding_of_more_than_the_last_rank(tmp_path: Path) -> None:
    layout = of_rows(266240, 768, 2)
    assert {held_arrays(layout, rank)[NAME].shape for rank in layout.mesh.ranks} == {(348,)}
    assert real(layout)[764:] == [348, 20, 0, 0]
    shared = Shared(NAME, 0, 266240, Group("shares", tuple(range(768)), 0), 1)
    assert list(shared.lengths(348)) == real(layout)
    small, values = of_rows(5, 4, 2), torch.arange(5.0) + 1
    assert real(small) == [2, 2, 1, 0]
    save(small, tmp_path, values)
    same_at([of_rows(5, 1), of_rows(5, 3), small], tmp_path, values)


@pytest.mark.parametrize(("ranks", "sizes"), [(4, (2, 2, 1)), (3, (2, 3, 1))])
def test_b095_deepspeed_5822_each_parameter_is_cut_for_itself(ranks: int, sizes: tuple[int, ...]) -> None:
    for rows, size in zip((5, 7, 1), sizes, strict=True):
        layout = of_rows(rows, ranks)
        assert {held_arrays(layout, rank)[NAME].shape for rank in layout.mesh.ranks} == {(size,)}
        assert sum(real(layout)) == rows


def test_b100_megatron_6191_a_rank_of_padding_alone_is_no_damage(tmp_path: Path) -> None:
    layout, values = of_rows(9, 8), torch.arange(9.0) + 1
    assert real(layout) == [2, 2, 2, 2, 1, 0, 0, 0]
    assert all(isinstance(one, int) for one in save(layout, tmp_path / "a", values, without=(5, 6, 7)))
    same_at([layout, of_rows(9, 2)], tmp_path / "a", values)
    told = save(layout, tmp_path / "b", values, without=(2,))
    assert {type(one) for one in told} == {GapError}
    assert not [path for path in tmp_path.joinpath("b").rglob("*") if path.is_file()]


def test_b102_fast_llm_439_what_counts_is_elements_of_the_model(tmp_path: Path) -> None:
    layout, values = of_rows(3, 8), torch.arange(3.0) + 1
    assert real(layout) == [1, 1, 1, 0, 0, 0, 0, 0]
    save(layout, tmp_path, values)
    stored = native.read(tmp_path).tensors[f"model/{NAME}"]
    assert sum(extent.numel for extent in stored.extents) == 3
    same_at([layout, of_rows(3, 2)], tmp_path, values)


MODEL = {**CONFIG, "num_hidden_layers": 2, "mlp_only_layers": [1], "dtype": "float32"}


def optimizer_of(parallel: Parallel, rank: int, layout: Layout) -> Optimizer:
    weights = begun(layout, rank, config=MODEL, seed=1)
    groups = Groups(group_plan(parallel), rank, {})
    return Optimizer(weights, plan=reduce_plan(layout, rank), groups=groups, settings=AdamW())


def save_run(parallel: Parallel, run: Path, *, leave_out: str = "") -> list[Any]:
    """Weights and moments of a model; the moments of one array may be left out."""
    layout, meeting = layout_of(MODEL, parallel), Meeting(parallel.world_size)

    def one(rank: int) -> int:
        optimizer = optimizer_of(parallel, rank, layout)
        for state in optimizer.states():
            state.values.fill_(1.0)
        states = [held for held in states_of(optimizer) if not leave_out or leave_out not in held.key]
        mine = saver(run, rank=rank, exchange=meeting.of(rank), fsync=False)
        mine.save([*weights_of(layout, rank, optimizer.params), *states], About(step=1))
        return mine.written_bytes

    return each(parallel.world_size, one)


def test_b101_megatron_66_b145_bridge_5988_nothing_in_a_file_is_of_a_rank(tmp_path: Path) -> None:
    """No list by ranks and no state of a generator: randomness is a function of seed and place."""
    found = []
    for number, parallel in enumerate((Parallel(remat=2, dp=2), Parallel(tp=2), Parallel())):
        save_run(parallel, tmp_path / f"{number}")
        manifest = native.read(tmp_path / f"{number}")
        found.append({key: (one.dtype, one.shape) for key, one in manifest.tensors.items()})
    assert found[0] == found[1] == found[2]
    assert {key.partition("/")[0] for key in found[0]} == {"model", "optim"}


def test_b103_areal_1468_moments_that_are_not_there_are_named(tmp_path: Path) -> None:
    parallel = Parallel(remat=2)
    save_run(parallel, tmp_path, leave_out="model.norm.weight/exp_avg_sq")
    optimizer = optimizer_of(parallel, 1, layout_of(MODEL, parallel))
    for state in optimizer.states():
        state.values.fill_(torch.nan)
    with pytest.raises(UnknownNameError, match=r"model\.norm\.weight/exp_avg_sq"):
        load_states(tmp_path, optimizer)
    assert all(state.values.isnan().all() for state in optimizer.states())


# --- K17: who writes ----------------------------------------------------------------------------


def writers(parallel: Parallel) -> dict[str, list[int]]:
    """The ranks that write something of each tensor."""
    layout = layout_of(MODEL, parallel)
    held = []
    for rank in layout.mesh.ranks:
        weights = begun(layout, rank, config=MODEL, seed=None)
        held.append([entry_of(one) for one in weights_of(layout, rank, weights)])
    found: dict[str, list[int]] = {}
    volumes: dict[str, int] = {}
    for rank, mine in enumerate(elect(held)):
        for share in mine:
            key = held[rank][share.entry].key.removeprefix("model/")
            found.setdefault(key, []).append(rank)
            volumes[key] = volumes.get(key, 0) + torch.Size(share.size).numel()
    shapes = {entry.key.removeprefix("model/"): entry.shape for entries in held for entry in entries}
    assert volumes == {key: torch.Size(shape).numel() for key, shape in shapes.items()}
    return found


def test_b104_megatron_4801_every_shard_has_one_writer() -> None:
    parallel = Parallel(tp=4, pp=2, dp=2)
    found, mesh = writers(parallel), parallel.mesh
    for layer, stage in ((0, 0), (1, 1)):
        here = f"model.layers.{layer}."
        norm = found[f"{here}input_layernorm.weight"]
        assert len(norm) == 1 and mesh.coordinate(norm[0])["pp"] == stage
        at = [mesh.coordinate(rank) for rank in found[f"{here}self_attn.q_proj.weight"]]
        assert sorted(c["tp"] for c in at) == [0, 1, 2, 3] and {c["pp"] for c in at} == {stage}


def test_b105_bridge_5862_a_norm_has_one_writer_and_each_share_one() -> None:
    parallel = Parallel(remat=2, dp=2)
    found = writers(parallel)
    assert len(found["model.norm.weight"]) == 1
    at = [parallel.mesh.coordinate(rank)["remat"] for rank in found["model.layers.0.self_attn.q_proj.weight"]]
    assert sorted(at) == [0, 1]


@pytest.mark.parametrize(("axes", "count"), [(("remat", "cp"), 4), (("remat",), 2)])
def test_b106_megatron_6886_folded_context_ranks_hold_other_rows(axes: tuple[str, ...], count: int) -> None:
    """Folded, each rank writes rows of its own; otherwise context ranks are replicas, with one writer."""
    parallel = Parallel(cp=2, remat=2, weight_axes=axes)
    layout = layout_of(MODEL, parallel)
    key = "model.layers.0.self_attn.q_proj.weight"
    rows = {rank: held_arrays(layout, rank)[key].parts[0].box.dims[0] for rank in layout.mesh.ranks}
    assert len(set(rows.values())) == count
    assert len(writers(parallel)[key]) == count
    # The moments likewise: what ranks say of a key are different boxes, which together are all of it.
    boxes = []
    for rank in layout.mesh.ranks:
        optimizer = optimizer_of(parallel, rank, layout)
        boxes += [one.box for one in states_of(optimizer) if one.key == f"optim/{key}/exp_avg"]
    assert len(set(boxes)) == len(boxes) and sum(box.numel for box in boxes) == 24 * 24


# --- K22: begins --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parallel",
    [Parallel(tp=2), Parallel(tp=4), Parallel(remat=3), Parallel(dp=3, weight_axes=("dp",)), Parallel(pp=2)],
    ids=lambda parallel: f"{parallel.mesh}".partition(" | ")[0],
)
def test_b142_bridge_5840_b143_olmo_core_307_a_begin_is_that_of_one_rank(parallel: Parallel) -> None:
    alone = begun(layout_of(MODEL, Parallel()), 0, config=MODEL, seed=5)
    layout = layout_of(MODEL, parallel)
    for rank in layout.mesh.ranks:
        arrays = begun(layout, rank, config=MODEL, seed=5)
        for name, held in held_arrays(layout, rank).items():
            for part in held.parts:
                whole_one = alone[name]
                at = tuple(slice(r.start, r.stop) for r in part.box.dims)
                expert = part.name.partition(".experts.")[2].partition(".")[0]
                wanted = whole_one[int(expert)][at] if expert else whole_one[at]
                assert torch.equal(part.view(arrays[name]), wanted), (rank, part.name)
    experts = alone["model.layers.0.mlp.experts.up_proj.weight"]
    assert all(not torch.equal(experts[a], experts[b]) for a in range(8) for b in range(a))
