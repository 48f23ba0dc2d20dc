"""Public reports about training, answered by the runtime on ranks: one test each, named after the report.

Reports that its parts answer have their tests beside those parts, in `tests/dist` and `tests/unit`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_decoder import objective as plain_objective
from torch import Tensor
from torch.distributed import FileStore, HashStore, Store

# Ranks are started as those of tests/dist, and import this file by its name.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

import workers
from train_ranks import CONFIG, assembled, fill, full_weights, parts_of

from shardweave.errors import GeometryError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Sharded, along, even, whole
from shardweave.layout import Tensor as Described
from shardweave.train.arrays import held_arrays
from shardweave.train.batch import local, microbatch
from shardweave.train.gradients import measure, sum_gradients
from shardweave.train.grid import Over, connect, plan_groups
from shardweave.train.optimizer import AdamW, Optimizer
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime, build, group_plan, layout_of
from shardweave.train.schedule import stages_of
from shardweave.train.sequence import IGNORE
from shardweave.train.step import evaluate, forward_backward

# --- b131: rows under context parallelism -------------------------------------------------------

SEED = {**CONFIG, "num_hidden_layers": 2, "mlp_only_layers": []}
"""Two layers are kept, both sparse."""

BATCHES: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "as reported": ("bshd", ((128,), (128,))),
    "two rows": ("bshd", ((8, 8), (16, 16))),
    "two documents in a row": ("thd", ((8, 8), (16, 32))),
    "lengths that do not divide": ("bshd", ((13, 7), (1, 30))),
    "documents that do not divide": ("thd", ((13, 7), (1, 30))),
}
LAYOUTS = {
    "cp2 pp2": Parallel(cp=2, pp=2),
    "cp2 pp1": Parallel(cp=2),
    "cp4 pp1": Parallel(cp=4),
    "cp2 pp2 dp2": Parallel(cp=2, pp=2, dp=2),
}


def drawn(lengths: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    chance = torch.Generator().manual_seed(7)
    return [
        [torch.randint(0, SEED["vocab_size"], (n,), generator=chance) for n in batch] for batch in lengths
    ]


def runtime_on(
    parallel: Parallel, rank: int, store: Store, config: Mapping[str, Any], **more: Any
) -> Runtime:
    groups = connect(group_plan(parallel), rank=rank, store=store, timeout_s=30)
    runtime = build(config, parallel=parallel, groups=groups, seed=None, **more)
    fill(runtime, full_weights(config, torch.float64))
    return runtime


def evaluated(runtime: Runtime, batches: str, changed: bool = False) -> tuple[float, list[Any]]:
    """The loss, and the log-probability of each token."""
    form, lengths = BATCHES[batches]
    documents, cp = drawn(lengths), runtime.parallel.cp
    if changed:
        for batch in documents:
            batch[0][: len(batch[0]) // 2] += 1
            batch[0] %= SEED["vocab_size"]
    told = evaluate(runtime, [microbatch(ids, form=form, cp=cp) for ids in documents], keep_logprobs=True)
    assert told.logprobs is not None
    return told.report.loss, [each.numpy() for each in told.logprobs]


def evaluations(rank: int, *, name: str, folder: Path) -> dict[str, Any]:
    parallel = LAYOUTS[name]
    store = FileStore(str(folder / "store"), parallel.world_size)
    runtime = runtime_on(parallel, rank, store, SEED)
    found: dict[str, Any] = {batches: evaluated(runtime, batches) for batches in BATCHES}
    found["changed"] = evaluated(runtime, "two documents in a row", changed=True)
    runtime.groups.close()
    return found


@pytest.fixture(scope="module")
def cp_off() -> dict[str, tuple[float, list[Any]]]:
    """The same on one rank, and it is what the plain decoder says."""
    runtime = runtime_on(Parallel(), 0, HashStore(), SEED)
    found = {batches: evaluated(runtime, batches) for batches in BATCHES}
    weights = full_weights(SEED, torch.float64)
    for batches, (loss, logprobs) in found.items():
        flat = [ids for batch in drawn(BATCHES[batches][1]) for ids in batch]
        kept = [torch.ones(len(ids), dtype=torch.bool) for ids in flat]
        with torch.no_grad():
            wanted, each = plain_objective(flat, kept, weights, SEED)
        np.testing.assert_allclose(np.concatenate(logprobs), torch.cat(each).numpy(), rtol=0, atol=1e-12)
        assert loss == pytest.approx(wanted.item(), rel=1e-12)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
def test_b131_megatron_5617_rows_under_cp_are_those_without(
    name: str, cp_off: dict[str, tuple[float, list[Any]]], tmp_path: Path
) -> None:
    """Evaluation of a qwen3_moe; with pp the report's crashed, without it all was silently off."""
    ranks = workers.values(
        workers.run(evaluations, range(LAYOUTS[name].world_size), name=name, folder=tmp_path)
    )
    for found in ranks.values():
        for batches, (loss, logprobs) in cp_off.items():
            assert found[batches][0] == pytest.approx(loss, rel=1e-12), batches
            for got, wanted in zip(found[batches][1], logprobs, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12, err_msg=batches)
        # The second document of a row knows nothing of the first one. (Attention to the bit, which is tested
        # there; how a matrix product of experts rounds a row depends on how many rows it has.)
        for (first, _), got, other in zip(
            BATCHES["two documents in a row"][1],
            found["two documents in a row"][1],
            found["changed"][1],
            strict=True,
        ):
            assert np.abs(got[first:] - other[first:]).max() <= 1e-13
            assert np.abs(got[:first] - other[:first]).max() > 0.1


def test_b131_megatron_5661_what_is_aligned_goes_through_one_map() -> None:
    ids = torch.arange(8)
    batch = microbatch([ids], form="bshd", cp=2)
    first, second = (local(batch, rank) for rank in range(2))
    assert first.ids.tolist() == [[0, 1, 6, 7]] and first.labels.tolist() == [[1, 2, 7, IGNORE]]
    assert first.positions.tolist() == [[0, 1, 6, 7]] and first.mask.tolist() == [[True, True, True, False]]
    assert batch.layout.join([first.ids, second.ids]).tolist() == [ids.tolist()]
    # Length 10 is padded, and padding does not count.
    padded = microbatch([torch.arange(10)], form="bshd", cp=2)
    parts = [local(padded, rank) for rank in range(2)]
    assert padded.layout.padded == (12,) and sum(int(part.mask.sum()) for part in parts) == padded.count == 9
    assert padded.layout.join([part.is_real for part in parts]).sum() == 10


# --- b132: labels -------------------------------------------------------------------------------


def test_b132_verl_4250_labels_are_shifted_before_the_cut() -> None:
    ids = torch.arange(1, 9)
    batch = microbatch([ids], cp=2)
    parts = [local(batch, rank) for rank in range(2)]
    assert [part.ids.tolist() for part in parts] == [[1, 2, 7, 8], [3, 4, 5, 6]]
    assert [part.labels.tolist() for part in parts] == [[2, 3, 8, IGNORE], [4, 5, 6, 7]]
    # What the reports did; 2 cp - 2 targets are wrong for each document, and its last one is none.
    assert parts[0].ids.roll(-1).tolist() == [2, 7, 8, 1]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_b132_slime_73_a_shift_after_the_cut_is_off_at_the_borders_of_chunks(cp: int) -> None:
    documents = [torch.arange(100, 116), torch.arange(200, 224)]
    batch = microbatch(documents, cp=cp)
    wrong = 0
    for rank in range(cp):
        part = local(batch, rank)
        for document, ids in enumerate(documents):
            here = part.documents == document
            right, rolled = part.labels[here], part.ids[here].roll(-1)
            counts = right != IGNORE
            assert bool((right[counts] == part.ids[here][counts] + 1).all())
            off = (counts & (right != rolled)).nonzero()[:, 0].tolist()
            # The ends of a rank's two chunks; the middle rank's lie side by side.
            chunk = len(ids) // (2 * cp) if cp > 1 else len(ids)
            ends = {chunk - 1, 2 * chunk - 1} if cp > 1 else set()
            assert set(off) <= ends
            wrong += len(off)
    assert wrong == len(documents) * (2 * cp - 2)


# --- b134, b138, b140, b141: counts and norms ---------------------------------------------------

Arrays = tuple[Mesh, list[BufferRule], list[float]]


def _cut(mesh: Mesh, axis: str, size: int) -> Sharded:
    return along(mesh, axis, lambda rank: even(whole(size), mesh.axis_size(axis), rank))


def _grid(axes: Mapping[str, int], **arrays: tuple[int, str, float]) -> Arrays:
    """A grid and its arrays: size, axis that cuts it, and what each rank adds to each of its elements."""
    mesh, rules = Mesh(tuple(axes.items())), []
    for name, (size, axis, _) in arrays.items():
        part = Part(Described(name, (size,), "float64"))
        rules.append(BufferRule(name, (part,), (_cut(mesh, axis, size) if axis else whole(size),)))
    return mesh, rules, [added for *_, added in arrays.values()]


GRIDS: Mapping[str, Arrays] = {
    # Quarters of norm 1.5, and what all have of norm 4: 5, and not sqrt(9 + 64).
    "b138": _grid({"tp": 4}, cut=(4, "tp", 1.5), held=(1, "", 1.0)),
    "b140, 1 rank": _grid({"dp": 1}, w=(1, "", 0.8)),
    "b140, 2 ranks": _grid({"dp": 2}, w=(1, "", 0.4)),
    "b140, 4 ranks": _grid({"dp": 4}, w=(1, "", 0.2)),
    # One cut over dp, one over tp, one that all have, such as the sink of each head.
    "b141": _grid({"tp": 2, "dp": 2}, a=(6, "dp", 2.0), b=(4, "tp", 0.5), sinks=(3, "", 0.25)),
}


def norms(rank: int, *, name: str, folder: Path) -> dict[str, Any]:
    mesh, rules, adds = GRIDS[name]
    axes = {"all": tuple(name for name, _ in mesh.axes), **{axis: (axis,) for axis, _ in mesh.axes}}
    groups = connect(
        plan_groups({"model": mesh}, {"model": axes}),
        rank=rank,
        store=FileStore(str(folder / "store"), mesh.size),
        timeout_s=20,
    )
    layout = Layout("norms", mesh, tuple(rules))
    plan = reduce_plan(layout, rank)
    shapes = {each.held.name: each.held.shape for each in plan.arrays.values()}
    given = {
        name: torch.full(shapes[name], add, dtype=torch.float64)
        for name, add in zip((rule.name for rule in rules), adds, strict=True)
    }
    found = {}
    for sharded in (False, True):
        summed = sum_gradients(given, plan, groups, sharded=sharded)
        weights = {name: torch.ones(shape, dtype=torch.float64) for name, shape in shapes.items()}
        steps = Optimizer(
            weights,
            plan=plan,
            groups=groups,
            settings=lambda name, shape: AdamW(lr=0.1, beta1=0.5, weight_decay=0.0),
            sharded=sharded,
            max_norm=1.0,
        )
        norm = steps.step(given).grad_norm
        clipped = {
            one.name: one.values.reshape(-1)[:1].item() / 0.5
            for one in steps.owned()
            if one.state == "exp_avg" and one.values.numel()
        }
        found[sharded] = norm, measure(summed, groups), clipped
    groups.close()
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("b138", 5.0),
        ("b140, 1 rank", 0.8),
        ("b140, 2 ranks", 0.8),
        ("b140, 4 ranks", 0.8),
        # Sums over two, two and four ranks: 4, 1 and 1.
        ("b141", math.sqrt(6 * 4.0**2 + 4 * 1.0**2 + 3 * 1.0**2)),
    ],
)
def test_b138_nemo_rl_3788_b140_twinkle_290_b141_torchtune_2420_norms_count_elements_once(
    name: str, norm: float, tmp_path: Path
) -> None:
    ranks = workers.values(workers.run(norms, GRIDS[name][0].ranks, name=name, folder=tmp_path))
    sums = {"cut": 1.5, "held": 4.0, "w": 0.8, "a": 4.0, "b": 1.0, "sinks": 1.0}
    scale = min(1.0, 1.0 / (norm + 1e-6))
    for found in ranks.values():
        for stepped, (measured, zeros), clipped in found.values():
            assert stepped == pytest.approx(norm, rel=1e-14) and measured == stepped and zeros == 0
            # 0.8 stays 0.8; above 1 all are scaled by one number.
            for array, value in clipped.items():
                assert value == pytest.approx(sums[array] * scale, rel=1e-14)
    assert {array for found in ranks.values() for array in found[True][2]} == {r.name for r in GRIDS[name][1]}


# --- b034, b066: an embedding on several stages -------------------------------------------------

TIED = {**CONFIG, "num_hidden_layers": 4, "mlp_only_layers": [1], "tie_word_embeddings": True}
STAGES = {"1, 1": (1, 1), "2, 1": (2, 1), "2, 2": (2, 2), "4, 1": (4, 1)}
TIED_LENGTHS = ((9, 4), (6,))


def holders(config: Mapping[str, Any], parallel: Parallel, **more: Any) -> set[int]:
    """The stages that hold the embedding."""
    layout = layout_of(config, parallel, **more)
    return {rank for rank in layout.mesh.ranks if "model.embed_tokens.weight" in held_arrays(layout, rank)}


def tied_step(rank: int, *, name: str, folder: Path) -> tuple[float, Any]:
    pp, vp = STAGES[name]
    parallel = Parallel(pp=pp, vp=vp)
    runtime = runtime_on(parallel, rank, FileStore(str(folder / "store"), pp), TIED)
    batches = [microbatch(ids) for ids in drawn(TIED_LENGTHS)]
    loss = forward_backward(runtime, batches).report.loss
    own = {key: weight.grad for key, weight in runtime.weights.items()}
    grads = sum_gradients(own, reduce_plan(runtime.layout, rank), runtime.groups).arrays()
    runtime.groups.close()
    return loss, parts_of(runtime, grads)


@pytest.mark.dist
@pytest.mark.parametrize("name", STAGES)
def test_b034_megatron_5737_a_tied_embedding_learns_from_both_ends(name: str, tmp_path: Path) -> None:
    """Two copies, one gradient: that of lookup and head together, whatever the stages and chunks are."""
    pp, vp = STAGES[name]
    assert holders(TIED, Parallel(pp=pp, vp=vp)) == {0, pp - 1}
    ranks = workers.values(workers.run(tied_step, range(pp), name=name, folder=tmp_path))
    weights = {key: values.requires_grad_() for key, values in full_weights(TIED, torch.float64).items()}
    assert "lm_head.weight" not in weights
    flat = [ids for batch in drawn(TIED_LENGTHS) for ids in batch]
    kept = [torch.ones(len(ids), dtype=torch.bool) for ids in flat]
    loss, _ = plain_objective(flat, kept, weights, TIED)
    loss.backward()
    # Copies are compared to the bit where they are put together.
    grads = assembled({rank: parts for rank, (_, parts) in ranks.items()})
    for rank, (got, _) in ranks.items():
        assert got == pytest.approx(loss.item(), rel=1e-12), rank
    for key, weight in weights.items():
        wanted = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert float((grads[key] - wanted).norm()) <= 1e-12 * max(1.0, float(wanted.norm())), key


def test_b066_megatron_bridge_5380_heads_for_further_tokens_have_the_embedding_of_the_first_stage() -> None:
    """Their stage holds a copy, tied or not, and its gradient is summed with that of the first."""
    untied = {**TIED, "tie_word_embeddings": False}
    parallel = Parallel(pp=4)
    assert holders(untied, parallel) == {0}
    for config in (untied, TIED):
        assert holders(config, parallel, mtp=1) == {0, 3}
        layout = layout_of(config, parallel, mtp=1)
        for rank in (0, 3):
            assert reduce_plan(layout, rank).arrays["model.embed_tokens.weight"].ends == (0, 3)


# --- b058 to b062: which layers a stage has -----------------------------------------------------


def sizes(chunks: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [sum(len(chunk) for chunk in stage) for stage in chunks]


def test_b058_megatron_1304_no_layer_is_dropped() -> None:
    found = stages_of(30, stages=4)
    assert sizes(found) == [8, 8, 7, 7]
    assert [layer for stage in found for chunk in stage for layer in chunk] == list(range(30))
    assert sizes(stages_of(70, stages=12)) == [6] * 10 + [5] * 2
    with pytest.raises(GeometryError, match=r"layers\(28\) of 30, on no stage: 28, 29"):
        stages_of(30, stages=4, sizes=[7] * 4)
    with pytest.raises(GeometryError, match="every chunk of a stage has a layer"):
        stages_of(3, stages=4)


@pytest.mark.parametrize("stages", range(1, 9))
def test_b059_mlx_1680_borders_are_sums_of_sizes(stages: int) -> None:
    assert [chunk for (chunk,) in stages_of(10, stages=3)] == [(0, 1, 2, 3), (4, 5, 6), (7, 8, 9)]
    for layers in range(stages, 41):
        found = [layer for stage in stages_of(layers, stages=stages) for chunk in stage for layer in chunk]
        assert found == list(range(layers))
    with pytest.raises(GeometryError):
        stages_of(10, stages=3, layers=[[3, 4, 5], [0, 1, 2], [8, 9, 10, 11]])


def test_b060_transformers_24381_the_second_stage_holds_the_second_half() -> None:
    layout = layout_of(TIED, Parallel(pp=2))
    for rank, wanted in ((0, {0, 1}), (1, {2, 3})):
        names = held_arrays(layout, rank)
        assert {int(name.split(".")[2]) for name in names if ".layers." in name} == wanted


def test_b061_swiss_ai_116_chunks_are_interleaved_by_their_global_number() -> None:
    found = stages_of(80, stages=8, virtual=5)
    first, last = ([layer for chunk in found[stage] for layer in chunk] for stage in (0, 7))
    assert first == [0, 1, 16, 17, 32, 33, 48, 49, 64, 65]
    assert last == [14, 15, 30, 31, 46, 47, 62, 63, 78, 79]


def test_b062_megatron_bridge_5581_edges_that_leave_layers_over_are_refused() -> None:
    assert sizes(stages_of(46, stages=4, sizes=(11, 12, 12, 11))) == [11, 12, 12, 11]
    with pytest.raises(GeometryError, match=r"layers\(22\) of 46, on no stage: 22, 23"):
        stages_of(46, stages=2, sizes=(11, 11))
    with pytest.raises(GeometryError, match=r"stretches\(2\) of 1"):
        stages_of(46, stages=1, sizes=(11, 11))
    assert sizes(stages_of(46, stages=2)) == [23, 23]


# --- b111: groups are values --------------------------------------------------------------------


def test_b111_megatron_6781_two_grids_in_one_process_know_nothing_of_each_other() -> None:
    dense = Mesh((("tp", 1), ("cp", 16), ("dp", 2), ("pp", 1)))
    kinds = {"dp": ("dp",), "cp": ("cp",), "dp_cp": ("cp", "dp"), "ends": Over(("pp",), (0, -1))}
    alone = plan_groups({"llm": dense}, {"llm": kinds})
    assert [alone.ranks(rank, "llm", "dp") for rank in (0, 15, 17)] == [(0, 16), (15, 31), (1, 17)]
    at = dense.coordinate(17)
    assert (at["cp"], at["dp"]) == (1, 1)
    encoder = Mesh((("tp", 4), ("dp", 8)))
    both = plan_groups({"llm": dense, "encoder": encoder}, {"llm": kinds, "encoder": {"dp": ("dp",)}})
    for rank in range(32):
        for name in kinds:
            assert both.ranks(rank, "llm", name) == alone.ranks(rank, "llm", name)
        assert both.ranks(rank, "encoder", "dp") == tuple(range(rank % 4, 32, 4))
    # Each rank is in one group of each kind, dense ones and those of experts alike.
    parallel = Parallel(tp=2, cp=2, dp=2, ep=4, etp=2)
    plan = group_plan(parallel)
    for names in (("tp", "cp", "dp", "pp"), ("ep", "etp", "edp", "pp")):
        for rank in parallel.mesh.ranks:
            groups = [plan.ranks(rank, "model", name) for name in names]
            assert all(group is not None and rank in group for group in groups)
            assert math.prod(len(group or ()) for group in groups) == parallel.world_size
