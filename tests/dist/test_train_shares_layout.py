"""Weights in shares before a step is taken: how they begin, what is padding, what is refused, who has which
documents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import train_matrix
from share_worlds import FOLDED, LARGE, LAYOUTS, LINEAR, PAIRS, cell, in_world
from torch import Tensor
from train_cells import Cell
from train_ranks import as_numpy, assembled, built, fill, parallel_of, stage_sizes

from shardweave.errors import ConfigError, GeometryError, ShardweaveError
from shardweave.layout import even, prove
from shardweave.train import layout as layout_module
from shardweave.train.arrays import held_arrays
from shardweave.train.checks import find_wrong, notes, read_config
from shardweave.train.checks import parallel_of as parallel_of_config
from shardweave.train.data import train_loader
from shardweave.train.grid import Groups
from shardweave.train.parallel import Parallel
from shardweave.train.random import uniform
from shardweave.train.runtime import begun, layout_of

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "tests/data/hf_qwen3moe_tiny")
"""4 heads, 2 KV heads of 16, 2 layers, 8 experts of 40."""
SEED = 11
SIZES, MULTIPLES = (1, 7, 16, 48, 62, 126, 150), (0, 1, 16, 32)


# --- the begin ----------------------------------------------------------------------------------


def begin(of: Cell, *, multiple: int = 1, tied: bool = False) -> dict[str, Tensor]:
    """The weights of all ranks as whole tensors; that replicas are alike is checked on the way."""
    config = {**train_matrix.config_of(of), "initializer_range": 0.25, "tie_word_embeddings": tied}
    parallel = parallel_of(of)
    sizes = stage_sizes(of, config["num_hidden_layers"])
    layout = layout_of(config, parallel, dtype="float64", stage_sizes=sizes, multiple=multiple)
    prove(layout)
    ranks = {}
    for rank in layout.mesh.ranks:
        arrays, parts = begun(layout, rank, config=config, seed=SEED), []
        for name, held in held_arrays(layout, rank).items():
            assert not any(
                arrays[name][tuple(slice(r.start, r.stop) for r in hole.dims)].any() for hole in held.padding
            ), f"padding of {name} is not 0"
            for part in held.parts:
                at = tuple((r.start, r.stop, r.step) for r in part.box.dims)
                parts.append((part.name, at, as_numpy(part.view(arrays[name].detach()))))
        ranks[rank] = parts
    return assembled(ranks)


@pytest.fixture(scope="module")
def one() -> dict[int, dict[str, Tensor]]:
    """Of one process, by layers."""
    return {layers: begin(cell(layers=layers)) for layers in (3, 4)}


@pytest.mark.parametrize("name", [*LAYOUTS, "24 ranks"])
def test_every_layout_begins_with_the_bits_of_one_process(
    name: str, one: Mapping[int, Mapping[str, Tensor]]
) -> None:
    of = LAYOUTS.get(name, LARGE)
    found = begin(of, multiple=16 if "C3" in name else 1)
    wanted = one[of.layers]
    assert set(found) == set(wanted)
    assert all(torch.equal(found[key], values) for key, values in wanted.items())


def test_no_two_rows_and_no_two_weights_begin_alike(one: Mapping[int, Mapping[str, Tensor]]) -> None:
    rows = [row for values in one[3].values() if values.dim() == 2 for row in values]
    assert len({tuple(row[:6].tolist()) for row in rows}) == len(rows)
    drawn = torch.cat([values.flatten() for values in one[3].values() if values.dim() == 2])
    drawn = drawn.sort().values / 0.25
    # Kolmogorov and Smirnov: how far shares of values are from those of a normal distribution.
    normal = torch.special.ndtr(drawn)
    places = torch.arange(1, len(drawn) + 1) / len(drawn)
    assert (normal - places).abs().max() < 1.95 / math.sqrt(len(drawn))  # exceeded once in 1000 seeds
    pairs = [values for key, values in one[3].items() if key.endswith(("q_proj.weight", "o_proj.weight"))]
    for a in range(len(pairs)):
        for b in range(a):
            correlation = (pairs[a] * pairs[b]).mean() / 0.25**2
            assert abs(correlation) < 5 / math.sqrt(pairs[a].numel()), (a, b)


def test_a_begin_by_the_place_on_a_rank_would_be_seen(one: Mapping[int, Mapping[str, Tensor]]) -> None:
    """As the folded ranks of other runtimes had it: every share of a weight has the rows of the first."""

    def by_place(into: Tensor, held: Any, *, seed: int, quantile: Any) -> None:
        index = torch.arange(into.numel()).reshape(into.shape)
        with torch.no_grad():
            into.copy_(torch.from_numpy(quantile(uniform(seed, held.name, index).numpy())))

    with patch("shardweave.train.runtime.init", by_place), pytest.raises(AssertionError):
        found = begin(LAYOUTS["C2 folded"])
        assert all(torch.equal(found[key], values) for key, values in one[3].items())


# --- shares and their padding -------------------------------------------------------------------


def of_rows(rows: int) -> dict[str, Any]:
    """A model of one layer with so many rows of its gates, and so many tokens."""
    return {**LINEAR, "num_hidden_layers": 1, "intermediate_size": rows, "vocab_size": rows, "hidden_size": 8}


GATE, EMBEDDING = "model.layers.0.mlp.gate_proj.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "of",
    [
        cell(remat=8),
        cell(remat=2, cp=3, weight_axes=FOLDED),
        cell(dp=3, remat=2, weight_axes=("dp",)),
        cell(tp=2, remat=3),
    ],
    ids=str,
)
def test_what_is_gathered_are_the_rows_of_the_weight(of: Cell) -> None:
    """For every number of rows and every multiple; padding is at the end, and cut off."""
    parallel = parallel_of(of)
    shares = parallel.num_shares
    cases = [(rows, multiple) for rows in SIZES for multiple in MULTIPLES if rows % of.tp == 0]

    def work(groups: Groups) -> int:
        fitting = 0
        for rows, multiple in cases:
            config, mine = of_rows(rows), rows // of.tp
            if not multiple and (mine % shares or 8 % shares or 24 // of.tp % shares or 12 // of.tp % shares):
                with pytest.raises(GeometryError, match="every rank has an equal share of a weight"):
                    built(of, groups, config, multiple=multiple)
                continue
            fitting += 1
            runtime = built(of, groups, config, multiple=multiple)
            at = parallel.mesh.coordinate(runtime.rank)
            number = runtime.groups.get("model", "shares").rank
            step = max(1, multiple)
            each = -(-mine // (shares * step)) * step
            wanted = torch.arange(rows * 8.0, dtype=torch.float64).view(rows, 8) + 1
            for name in (GATE, EMBEDDING):
                share = runtime.weights[name]
                assert share.shape == (each, 8), (rows, multiple)
                held = wanted[mine * at["tp"] : mine * (at["tp"] + 1)]
                here = held[number * each : (number + 1) * each]
                # Padding has no number: none of it may come to anybody.
                with torch.no_grad():
                    share.fill_(torch.nan)[: len(here)] = here
                    assert torch.equal(runtime.reading[name], held), (name, rows, multiple, at)
            runtime.reading.finish()
        return fitting

    (fitting,) = set(in_world(of, work, strict=True))
    assert fitting >= 3 * len(cases) // 4


def test_several_ranks_may_have_nothing_but_padding() -> None:
    """62 rows in 8 shares of a multiple of 16: 128 rows, and none left for the last four."""
    parallel = Parallel(remat=8)
    layout = layout_of(of_rows(62), parallel, multiple=16)
    parts = {rank: held_arrays(layout, rank)[GATE].parts for rank in range(8)}
    assert [sum(part.box.numel // 8 for part in parts[rank]) for rank in range(8)] == [
        16,
        16,
        16,
        14,
        0,
        0,
        0,
        0,
    ]
    assert {held_arrays(layout, rank)[GATE].shape for rank in range(8)} == {(16, 8)}


def test_padding_of_a_share_does_not_move_the_rows_of_the_next_tensor_rank() -> None:
    """124 rows on 4 tensor ranks are 31 each, filled up to 32 in two shares of 16."""
    config = {**of_rows(124), "num_attention_heads": 4}
    layout = layout_of(config, Parallel(tp=4, remat=2), multiple=16)
    rows = {}
    for rank in layout.mesh.ranks:
        held = held_arrays(layout, rank)[GATE]
        assert held.shape == (16, 8) and len(held.parts) == 1
        rows[rank] = held.parts[0].box.dims[0]
    assert [rows[rank] for rank in range(4)] == [range(31 * t, 31 * t + 16) for t in range(4)]
    assert [rows[rank] for rank in range(4, 8)] == [range(31 * t + 16, 31 * t + 31) for t in range(4)]


def test_shares_in_the_order_of_another_axis_would_be_seen() -> None:
    """With two degrees alike it would not."""
    of = cell(remat=2, cp=3, weight_axes=FOLDED)
    right = layout_module.even

    def turned(dim: Any, parts: int, number: int) -> Any:
        swapped = number % 3 * 2 + number // 3 if parts == 6 else number
        return right(dim, parts, swapped)

    def work(groups: Groups) -> bool:
        runtime = built(of, groups, of_rows(48))
        fill(runtime, {**whole})
        with torch.no_grad():
            return torch.equal(runtime.reading[GATE], whole[GATE])

    from train_ranks import full_weights

    whole = full_weights(of_rows(48), torch.float64)
    assert all(in_world(of, work))
    with patch.object(layout_module, "even", turned):
        assert not any(in_world(of, work))
    assert right is even


def test_experts_know_nothing_of_context_ranks() -> None:
    """Folding cuts dense weights; shares of experts are what they were."""
    for folded in PAIRS:
        on, off = (parallel_of(replace(LAYOUTS[folded], weight_axes=a)) for a in (FOLDED, ("remat",)))
        assert on.expert_axes == off.expert_axes == ("eremat",)
        assert on.num_shares == off.num_shares * on.cp and on.num_expert_shares == off.num_expert_shares
        config = train_matrix.config_of(LAYOUTS[folded])
        a, b = (layout_of(config, parallel) for parallel in (on, off))
        for rank in on.mesh.ranks:
            mine, theirs = a.arrays(rank), b.arrays(rank)
            assert mine.keys() == theirs.keys()
            same = {name for name in mine if mine[name][0].dims == theirs[name][0].dims}
            small = {name for name in mine if "norm" in name or name.endswith("mlp.gate.weight")}
            assert same == small | {name for name in mine if ".experts." in name}


# --- what does not fit --------------------------------------------------------------------------


def settings(**sections: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": {"path": TINY}, "data": {"train": "README.md"}}
    for name, values in sections.items():
        found[name] = {**found.get(name, {}), **values}
    return found


BAD: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "no such number of shards": (
        {"parallel": {"remat": 3}},
        4,
        "world_size(4) % (tp(1) * cp(1) * remat(3) * pp(1) = 3) = 1 != 0",
    ),
    "too few ranks": (
        {"parallel": {"tp": 2, "cp": 3, "remat": 2, "dp": 2}, "batch": {"documents": 8}},
        12,
        "tp(2) * cp(3) * remat(2) * pp(1) = 12 * dp(2) = 24 != world_size(12)",
    ),
    "experts over more than there are": (
        {"parallel": {"remat": 2, "ep": 2, "eremat": 3}, "batch": {"documents": 2}},
        None,
        "tp(1) * cp(1) * remat(2) * dp(1) = 2 % (ep(2) * etp(1) * eremat(3)) = 2 != 0",
    ),
    "an axis twice": ({"parallel": {"weight_axes": ["cp", "cp"]}}, None, "parallel.weight_axes(cp,cp)"),
    "an axis that weights are not alike on": ({"parallel": {"weight_axes": ["tp"]}}, None, "tp"),
    "no shards at all": ({"parallel": {"remat": 0}}, None, "remat"),
    "documents that shards cannot divide": (
        {"parallel": {"remat": 3, "dp": 2}, "batch": {"documents": 8}},
        None,
        "batch.documents(8) % remat * dp(6) = 2 != 0",
    ),
    "documents that microbatches cannot divide": (
        {"parallel": {"remat": 2, "dp": 2}, "batch": {"documents": 12, "microbatch": 2}},
        None,
        "batch.documents(12) % (remat * dp(4) * batch.microbatch(2)) = 4 != 0",
    ),
    "a name with a slip": ({"parallel": {"fold_cp_": True}}, None, "fold_cp_"),
    "a number for yes or no": ({"parallel": {"fold_cp": 2}}, None, "fold_cp"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_said_as_an_equation(name: str) -> None:
    said, world_size, equation = BAD[name]
    _, wrong = find_wrong(settings(**said), world_size=world_size)
    assert wrong and all(isinstance(error, ConfigError) and error.rule and error.hint for error in wrong)
    assert any(equation in error.equation for error in wrong), [error.equation for error in wrong]
    with pytest.raises(ShardweaveError):
        read_config(settings(**said), world_size=world_size)


PARALLEL_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no shards": ({"remat": 0}, "remat(0)"),
    "fewer than no shards of experts": ({"eremat": -1}, "eremat(-1)"),
    "experts over more than there are": (
        {"remat": 2, "eremat": 4},
        "tp(1) * cp(1) * remat(2) * dp(1) = 2 % (ep(1) * etp(1) * eremat(4)) = 4 != 0",
    ),
    "weights over heads": ({"tp": 2, "weight_axes": ("tp",)}, "(tp) is not some of (cp, remat, dp)"),
    "weights over an axis twice": (
        {"cp": 2, "weight_axes": ("cp", "cp")},
        "(cp, cp) is not some of (cp, remat, dp)",
    ),
}


@pytest.mark.parametrize("name", PARALLEL_BAD)
def test_degrees_that_cannot_be_are_refused(name: str) -> None:
    given, equation = PARALLEL_BAD[name]
    with pytest.raises(GeometryError) as caught:
        Parallel(**given)
    assert equation in caught.value.equation and caught.value.hint


def test_shares_that_have_to_be_even_say_the_rows() -> None:
    with pytest.raises(GeometryError, match="every rank has an equal share of a weight") as caught:
        layout_of(of_rows(48), Parallel(remat=5), multiple=0)
    assert (
        caught.value.equation == "rows(48) % shares(5) = 3 != 0" or "% shares(5) =" in caught.value.equation
    )


def test_folding_without_context_ranks_changes_nothing_and_says_so() -> None:
    config = read_config(settings(parallel={"remat": 2, "fold_cp": True}, batch={"documents": 8}))
    assert list(notes(config)) == ["parallel.fold_cp changes nothing: parallel.cp is 1"]
    on = parallel_of_config(config)
    off = replace(on, weight_axes=("remat",))
    model = train_matrix.config_of(cell())
    a, b = layout_of(model, on), layout_of(model, off)
    for rank in range(2):
        assert {n: x[0].dims for n, x in a.arrays(rank).items()} == {
            n: x[0].dims for n, x in b.arrays(rank).items()
        }


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize(
    ("remat", "dp", "cp", "tp"), [(2, 3, 1, 1), (2, 3, 5, 2), (3, 2, 2, 1), (1, 6, 3, 1)]
)
def test_a_step_has_each_document_once_whatever_weights_are_cut_over(
    tmp_path: Path, remat: int, dp: int, cp: int, tp: int, fold: bool
) -> None:
    """The documents of a step are microbatch times data ranks times microbatches of each, and no more."""
    tokens = np.concatenate([np.full(7, number) for number in range(60)]).astype(np.uint16)
    tokens.tofile(tmp_path / "t.bin")
    said = settings(
        data={"train": str(tmp_path / "t.bin"), "shuffle": False},
        batch={"documents": 24, "microbatch": 2, "sequence_length": 8},
        parallel={"remat": remat, "dp": dp, "cp": cp, "tp": tp, "fold_cp": fold},
    )
    config = read_config(said)
    parallel = parallel_of_config(config)
    assert parallel.num_data == remat * dp == 6
    assert parallel.num_shares == remat * (cp if fold else 1)
    found: dict[int, list[list[int]]] = {}
    for rank in parallel.mesh.ranks:
        data = parallel.data_rank(rank)
        loader = train_loader(config, dp_rank=data, vocab_size=500)
        batches = loader.step(0)
        assert len(batches) == 24 // (2 * 6)
        mine = [batch.ids.tolist() for batch in batches]
        # The ranks of a document have the same one; nobody else has it.
        assert found.setdefault(data, mine) == mine
    assert sorted(found) == list(range(6))
    at = [parallel.mesh.coordinate(rank) for rank in parallel.mesh.ranks]
    assert {(c["remat"], c["dp"]): parallel.data_rank(r) for r, c in enumerate(at)} == {
        (g, d): g + remat * d for g in range(remat) for d in range(dp)
    }
    given = [ids for data in range(6) for batch in found[data] for ids in batch]
    whole = train_loader(read_config(settings(**{**said, "parallel": {}})), dp_rank=0, vocab_size=500)
    assert given == [ids for batch in whole.step(0) for ids in batch.ids.tolist()]
    assert len({tuple(batch) for data in found.values() for batch in data}) == 12
