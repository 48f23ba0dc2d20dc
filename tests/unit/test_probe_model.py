"""The probe over a whole model, and layouts in files: what somebody's own framework does, found and kept.

The framework is a function that is written here array by array. What the layout says is compared with what
the function gives for random tensors, element by element.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardweave.errors import ExistsError, GapError, ProbeError
from shardweave.layout import Layout, concat, even, format_layout, parse_layout, whole
from shardweave.layout.buffer import table_of
from shardweave.models import Model, from_config
from shardweave.store.layout_file import read_layout, write_layout
from shardweave.testing import probe_model

Arrays = dict[str, np.ndarray]


@pytest.fixture
def tiny(data_dir: Path) -> Callable[..., Model]:
    def read(family: str, **changes: Any) -> Model:
        return from_config(
            json.loads((data_dir / "configs" / "tiny" / f"{family}.json").read_text()) | changes
        )

    return read


def mine(tensors: Arrays, rank: int, tp: int) -> Arrays:
    """A framework: its own names, Q, K and V of a rank as one array, K and V shared where heads are few."""
    found: Arrays = {}
    kv = min(tp, 2)
    group = rank * kv // tp
    for name, x in tensors.items():
        if name.endswith("self_attn.q_proj.weight"):
            prefix = name.removesuffix("self_attn.q_proj.weight").replace("model.layers.", "blocks.")
            k, v = (tensors[name.replace("q_proj", f"{one}_proj")] for one in "kv")
            parts = [np.split(x, tp)[rank], np.split(k, kv)[group], np.split(v, kv)[group]]
            found[f"{prefix}attn.qkv"] = np.concatenate(parts)
        elif name.endswith("mlp.gate_proj.weight"):
            prefix = name.removesuffix("mlp.gate_proj.weight").replace("model.layers.", "blocks.")
            up = tensors[name.replace("gate_proj", "up_proj")]
            both = [np.split(gate_or_up, tp)[rank] for gate_or_up in (x, up)]
            found[f"{prefix}mlp.gate_up"] = np.concatenate(both).T  # stored (in, out)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name.replace("model.layers.", "blocks.")] = np.array_split(x, tp, axis=1)[rank]
        elif "norm" in name:
            found[name.replace("model.layers.", "blocks.")] = x
        elif "embed" in name or "head" in name:
            found[name] = np.array_split(x, tp)[rank]
    return found


def gathered(layout: Layout, tensors: Arrays, rank: int) -> Arrays:
    """What the layout says that a rank holds."""
    found: Arrays = {}
    for name, (buffer, positions) in layout.arrays(rank).items():
        array = np.full([len(dim) for dim in buffer.dims], np.nan)
        for piece in buffer.pieces():
            index = dict(zip([key for key, _ in piece.tensor.index], piece.box.dims, strict=False))
            n = len(index)
            for at, numbers in _members(piece, n):
                source = tensors[piece.tensor.member(dict(zip(index, numbers, strict=True)))]
                block = source[tuple(slice(r.start, r.stop, r.step) for r in piece.box.dims[n:])]
                array[(*at, *(slice(r.start, r.stop) for r in piece.at.dims[n:]))] = block
        found[name] = array[tuple(positions)].transpose([axis - len(positions) for axis in buffer.stacked])
    return found


def _members(piece: Any, n: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    ats: list[tuple[int, ...]] = [()]
    numbers: list[tuple[int, ...]] = [()]
    for at, number in zip(piece.at.dims[:n], piece.box.dims[:n], strict=True):
        ats = [(*one, i) for one in ats for i in at]
        numbers = [(*one, i) for one in numbers for i in number]
    return list(zip(ats, numbers, strict=True))


def random_tensors(model: Model) -> Arrays:
    rng = np.random.default_rng(5)
    return {name: rng.random(tensor.shape) for tensor in model.tensors for name in tensor.names()}


def by_layer(model: Model, tensors: Arrays) -> list[Arrays]:
    groups: dict[str, Arrays] = {}
    for name, x in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        groups.setdefault(layer, {})[name] = x
    return list(groups.values())


def same(layout: Layout, model: Model, partition: Callable[[Arrays, int, int], Arrays], tp: int) -> None:
    tensors = random_tensors(model)
    for rank in range(tp):
        theirs: Arrays = {}
        for group in by_layer(model, tensors):
            theirs |= partition(group, rank, tp)
        ours = gathered(layout, tensors, rank)
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_array_equal(ours[name], array, err_msg=f"{name} of rank {rank}")


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_found_is_what_the_function_gives(tiny: Any, tp: int, sampled: bool) -> None:
    model = tiny("llama", num_hidden_layers=5, intermediate_size=24, num_key_value_heads=2 if tp < 3 else 6)

    def partition(tensors: Arrays, rank: int, ranks: int) -> Arrays:
        return mine(tensors, rank, ranks)

    layout = probe_model(partition, model, ranks=tp, sampled=sampled)
    same(layout, model, partition, tp)
    assert {rule.name for rule in layout.rules} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(f"blocks.{{layer}}.{name}_layernorm.weight" for name in ("input", "post_attention")),
        "blocks.{layer}.attn.qkv",
        "blocks.{layer}.self_attn.o_proj.weight",
        "blocks.{layer}.mlp.gate_up",
        "blocks.{layer}.mlp.down_proj.weight",
    }
    assert set(layout.tensors) == set(model.tensors)


def test_fused_arrays_are_said_by_roles_and_shared_heads_are_replicas(tiny: Any) -> None:
    model = tiny("llama", intermediate_size=24)
    layout = probe_model(mine, model, ranks=6)
    qkv = next(rule for rule in layout.rules if rule.name.endswith("qkv"))
    q, k, v = whole(48, "q"), whole(16, "k"), whole(16, "v")
    assert table_of(qkv.dims[1]) == tuple(
        concat(even(q, 6, r), even(k, 2, r // 3), even(v, 2, r // 3)) for r in range(6)
    )
    assert [(part.label, part.replica) for part in qkv.parts] == [("q", False), ("k", True), ("v", True)]
    same(layout, model, mine, 6)


def odd_at(layer: int) -> Callable[[Arrays, int, int], Arrays]:
    """The framework, with one layer whose output projection is cut by rows."""

    def odd(tensors: Arrays, rank: int, tp: int) -> Arrays:
        found = mine(tensors, rank, tp)
        name = f"{layer}.self_attn.o_proj.weight"
        if f"model.layers.{name}" in tensors:
            found[f"blocks.{name}"] = np.split(tensors[f"model.layers.{name}"], tp)[rank]
        return found

    return odd


def test_layers_that_are_cut_otherwise_are_rules_of_their_own(tiny: Any) -> None:
    model = tiny("llama", intermediate_size=24)
    layout = probe_model(odd_at(1), model, ranks=2)
    same(layout, model, odd_at(1), 2)
    assert {str(rule.dims[0]) for rule in layout.rules if "o_proj" in rule.name} == {"[0:1] [2:3]", "[1:2]"}


def test_sampled_layers_that_are_not_alike_are_refused(tiny: Any) -> None:
    model = tiny("llama", intermediate_size=24, num_hidden_layers=5)
    with pytest.raises(ProbeError, match=r"o_proj.*so are layers \[0:1\], of \[0:5\].*--sampled"):
        probe_model(odd_at(4), model, ranks=2, sampled=True)
    # A layer between is not looked at: that is what is asked for.
    assert probe_model(odd_at(2), model, ranks=2, sampled=True) == probe_model(mine, model, ranks=2)


@pytest.mark.parametrize("name", ["block1.fc1_{}", "l{}.w1", "3.{}.3", "{}"])
def test_the_number_of_a_layer_is_found_among_others(tiny: Any, name: str) -> None:
    model = tiny("llama", intermediate_size=24)

    def partition(tensors: Arrays, rank: int, tp: int) -> Arrays:
        return {
            (name.format(key.split(".")[2]) + "/" + key.split(".", 3)[3]) if ".layers." in key else key: x
            for key, x in tensors.items()
        }

    layout = probe_model(partition, model, ranks=2)
    same(layout, model, partition, 2)
    assert len(layout.rules) == len(model.tensors)


def test_experts_are_a_dim_of_their_rule(tiny: Any) -> None:
    model = tiny("mixtral")

    def partition(tensors: Arrays, rank: int, tp: int) -> Arrays:
        return {
            name.replace("block_sparse_moe", "moe"): np.array_split(x, tp)[rank]
            for name, x in tensors.items()
        }

    layout = probe_model(partition, model, ranks=2)
    same(layout, model, partition, 2)
    (rule,) = (rule for rule in layout.rules if "w1" in rule.name)
    assert rule.name == "model.layers.{layer}.moe.experts.{expert}.w1.weight"


def test_what_is_held_twice_is_a_replica(tiny: Any) -> None:
    model = tiny("llama", tie_word_embeddings=True, intermediate_size=24)

    def tied(tensors: Arrays, rank: int, tp: int) -> Arrays:
        found = mine(tensors, rank, tp)
        if "model.embed_tokens.weight" in found:
            found["head"] = found["model.embed_tokens.weight"].copy()
        return found

    layout = probe_model(tied, model, ranks=2)
    same(layout, model, tied, 2)
    assert [rule.parts[0].replica for rule in layout.rules if rule.name == "head"] == [True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {k: v for k, v in x.items() if "layers.1.mlp.up" not in k}, "reach no rank"),
        (lambda x: {k.replace("layers.1.mlp.up", "layers.one.mlp.up"): v for k, v in x.items()}, "number"),
        (lambda x: {k: v + 1 for k, v in x.items()}, "moves|marker|value"),
    ],
)
def test_refusals(tiny: Any, change: Callable[[Arrays], Arrays], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        probe_model(lambda x, rank, tp: change(x), tiny("llama"), ranks=2)


def test_experts_that_are_stacked_are_refused(tiny: Any) -> None:
    def stacked(tensors: Arrays, rank: int, tp: int) -> Arrays:
        experts = [name for name in tensors if name.endswith("w1.weight")]
        found = {name: x for name, x in tensors.items() if name not in experts}
        if experts:
            found[experts[0]] = np.concatenate([tensors[name] for name in experts])
        return found

    with pytest.raises(ProbeError, match="of one layer, and of one expert"):
        probe_model(stacked, tiny("mixtral"), ranks=2)


def test_rows_that_no_rank_has_are_a_gap(tiny: Any) -> None:
    def short(tensors: Arrays, rank: int, tp: int) -> Arrays:
        return {
            name: x[: len(x) // tp * tp].reshape(tp, -1, *x.shape[1:])[rank] for name, x in tensors.items()
        }

    with pytest.raises(GapError, match=r"embed_tokens.*\[52:53"):
        probe_model(short, tiny("llama"), ranks=2)


# --- files --------------------------------------------------------------------------------------


def test_a_layout_is_written_and_read(tiny: Any, tmp_path: Path) -> None:
    layout = probe_model(mine, tiny("llama", intermediate_size=24), ranks=6, name="mine")
    path = tmp_path / "mine.layout"
    write_layout(layout, path)
    assert read_layout(path) == layout == parse_layout(format_layout(layout))
    assert [file.name for file in tmp_path.iterdir()] == ["mine.layout"]
    with pytest.raises(ExistsError, match=r"mine\.layout"):
        write_layout(layout, path)
    assert read_layout(path) == layout


def test_a_layout_is_proved_when_it_is_read(tiny: Any, tmp_path: Path) -> None:
    text = format_layout(probe_model(mine, tiny("llama", intermediate_size=24), ranks=2))
    path = tmp_path / "edited.layout"
    assert text.count("tp: [0:11] | [11:22]") == 0 and "tp: [0:27] | [27:53]" in text
    path.write_text(text.replace("tp: [0:27] | [27:53]", "tp: [0:27] | [28:53]"))
    with pytest.raises(GapError, match="embed_tokens"):
        read_layout(path)
