"""Public bug reports that a conversion or a pipeline decides: one test a report, named after it.

Weights are filled with numbers that say which layer, expert or row they are. Targets are read by
torch and safetensors, or filled with NaN first.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from shardweave.convert import Geometry, Report, convert, open_checkpoint, prepare
from shardweave.dialects import hf, megatron
from shardweave.errors import (
    ExistsError,
    FormatError,
    GapError,
    GeometryError,
    MissingFileError,
    PickleError,
    PlanError,
    ReplicaError,
    ShardweaveError,
    TruncatedError,
    UnknownNameError,
)
from shardweave.layout import Layout, Mesh, Tensor, prove
from shardweave.models import Model, from_config
from shardweave.plan import empty, materialise, plan, simulate

LLAMA: dict[str, Any] = {
    "model_type": "llama", "dtype": "float32", "vocab_size": 28, "hidden_size": 12, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 20,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE: dict[str, Any] = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
}  # fmt: skip


def markers(tensor: Tensor) -> np.ndarray:
    """Every element is the number of its layer and expert: ``1000 * layer + expert``."""
    number = np.zeros([len(dim) for _, dim in tensor.index])
    for d, (_, dim) in enumerate(tensor.index):
        shape = [len(dim) if i == d else 1 for i in range(len(tensor.index))]
        number += np.reshape([n * (1000, 1)[d] for _, n in dim], shape)
    return np.broadcast_to(
        number.reshape(number.shape + (1,) * len(tensor.shape)), [len(d) for d in tensor.dims]
    ).copy()


def held(model: Model, layout: Layout) -> list[dict[str, np.ndarray]]:
    """What each rank holds, every element a marker."""
    found = materialise(layout, {t: markers(t) for t in model.tensors}, fill=np.nan)
    return [found[rank] for rank in range(layout.mesh.size)]


def layers(state: Mapping[str, np.ndarray], part: str = "linear_proj") -> dict[str, int]:
    """The layer that each local name of a weight holds."""
    return {name: int(value.flat[0]) // 1000 for name, value in state.items() if part in name}


def write_hf(
    folder: Path, config: dict[str, Any], *, name: str = "model.safetensors"
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tensors = {
        key: torch.randn(tensor.shape, generator=generator)
        for tensor in from_config(config).tensors
        for key in tensor.names()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return tensors


def dcp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.full(tuple(entry.size), torch.nan)
        for key, entry in entries.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def go(src: Path, dst: Path, to: str, **choices: Any) -> Report:
    return convert(prepare(src, to=to, **choices), dst, fsync=False)


# --- K05 tied embeddings --------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (4, 1), (1, 1)])
def test_b034_megatron_5737_a_tied_embedding_has_two_holders_and_one_writer(
    pp: int, vpp: int, tmp_path: Path
) -> None:
    config = {**LLAMA, "tie_word_embeddings": True}
    model = from_config(config)
    pipeline = megatron.stages(4, pp, vpp=vpp)
    live = megatron.layout(model, megatron.mesh(pp=pp), pipeline=pipeline, vocab_divisor=1)
    owners = {
        (stage, name)
        for stage, state in enumerate(held(model, live))
        for name in state
        if "word_embeddings" in name or "output_layer" in name
    }
    first, last = ("model0.", f"model{vpp - 1}.") if vpp > 1 else ("", "")
    copy = {(pp - 1, f"{last}output_layer.weight")} if pp > 1 else set()
    assert owners == {(0, f"{first}embedding.word_embeddings.weight")} | copy

    (embedding,) = (t for t in model.tensors if "embed_tokens" in t.name)
    value = np.random.default_rng(0).standard_normal(embedding.shape)
    values = {t: markers(t) for t in model.tensors} | {embedding: value}
    source = hf.layout(model)
    filled = simulate(
        plan(source, live), materialise(source, values), into=empty(live, np.float64, fill=np.nan)
    )
    for stage, name in owners:
        assert np.array_equal(filled[stage][name], value)

    tensors = write_hf(tmp_path / "src", config)
    assert "lm_head.weight" not in tensors
    geometry = Geometry(pp=pp, vpp=vpp, vocab_divisor=1)
    go(tmp_path / "src", tmp_path / "mc", "megatron", geometry=geometry)
    stored = dcp_tensors(tmp_path / "mc")
    assert [key for key in stored if "embedding" in key or "output" in key] == [
        "embedding.word_embeddings.weight"
    ]
    assert torch.equal(stored["embedding.word_embeddings.weight"], tensors["model.embed_tokens.weight"])


# --- K07 experts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["grouped", "sequential"])
def test_b045_model_optimizer_1631_local_experts_have_global_numbers(experts: str) -> None:
    model = from_config(MOE)
    live = megatron.layout(model, megatron.mesh(ep=8, etp=1), experts=experts, vocab_divisor=1)
    prove(live)
    numbers: list[int] = []
    for rank, state in enumerate(held(model, live)):
        mine = {
            name: sorted({int(n) for n in value.flat})
            for name, value in state.items()
            if "linear_fc1" in name
        }
        for layer in range(4):
            form = {
                "grouped": "experts.linear_fc1.weight{}",
                "sequential": "local_experts.{}.linear_fc1.weight",
            }
            for i in (0, 1):
                (name,) = (n for n in mine if f"layers.{layer}." in n and n.endswith(form[experts].format(i)))
                assert mine[name] == [1000 * layer + 2 * rank + i]
        numbers += {n % 1000 for found in mine.values() for n in found}
    assert sorted(numbers) == list(range(16))


def test_b046_megatron_5845_stacked_experts_reach_every_expert_or_are_refused(tmp_path: Path) -> None:
    tensors = write_hf(tmp_path / "src", MOE)
    go(tmp_path / "src", tmp_path / "stacked", "hf", stacked_experts=True)
    go(tmp_path / "stacked", tmp_path / "mc", "megatron", geometry=Geometry(vocab_divisor=1))
    stored = dcp_tensors(tmp_path / "mc")
    assert not any(value.isnan().any() for value in stored.values())
    fc1 = stored["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    for layer, expert in itertools.product(range(4), range(16)):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        assert torch.equal(fc1[layer, expert, :10], tensors[f"{prefix}gate_proj.weight"])
        assert torch.equal(fc1[layer, expert, 10:], tensors[f"{prefix}up_proj.weight"])
    # Half of the keys in each form is no form.
    mixed = load_file(tmp_path / "stacked/model.safetensors")
    del mixed["model.layers.2.mlp.experts.gate_up_proj"]
    mixed |= {k: v for k, v in tensors.items() if "layers.2.mlp.experts" in k and "down" not in k}
    save_file(mixed, tmp_path / "stacked/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnknownNameError, match=r"missing .*unexpected .*layers\.2\.mlp\.experts"):
        go(tmp_path / "stacked", tmp_path / "dst", "hf")


@pytest.mark.parametrize(
    "degrees", [{"ep": 8, "etp": 1}, {"tp": 2, "pp": 2, "ep": 2, "etp": 2}, {"pp": 4, "ep": 4, "etp": 1}]
)
def test_b047_megatron_bridge_4083_the_index_has_the_names_of_all_ranks(
    degrees: dict[str, int], tmp_path: Path
) -> None:
    tensors = write_hf(tmp_path / "src", MOE)
    geometry = Geometry(**degrees, layer_keys="singleton", vocab_divisor=1)
    go(tmp_path / "src", tmp_path / "mc", "megatron", geometry=geometry)
    report = go(tmp_path / "mc", tmp_path / "hf", "hf", max_file_bytes=2_000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values()) == report.written_bytes
    # The names of one rank are lost: a check says which.
    model = from_config(MOE)
    names = set(megatron.checkpoint(model, layer_keys="singleton", padded_vocab=28).arrays(0))
    rank = {n for n in names if re.search(r"experts\.experts\.1[45]\.", n)}
    with pytest.raises(UnknownNameError, match=rf"missing {len(rank)} \(.*experts\.1[45]\..*unexpected 0"):
        megatron.variant(names - rank, model, padded_vocab=28)


def test_b048_pith_train_89_every_rank_gets_its_slice_of_the_stack() -> None:
    config = {**MOE, "num_experts": 64, "num_hidden_layers": 2}
    model = from_config(config)
    stacked = hf.layout(model, stacked_experts=True)
    live = megatron.layout(model, megatron.mesh(pp=2, ep=4, dp=4, etp=1), vocab_divisor=1)
    values = {t: markers(t) for t in model.tensors}
    filled = simulate(
        plan(stacked, live), materialise(stacked, values), into=empty(live, np.float64, fill=np.nan)
    )
    mesh = live.mesh
    for rank, state in filled.items():
        stage, r = mesh.coordinate(rank)["pp"], mesh.coordinate(rank)["ep"]
        for i in range(16):
            value = state[f"decoder.layers.0.mlp.experts.linear_fc2.weight{i}"]
            assert np.all(value == 1000 * stage + 16 * r + i)
        assert not any(np.isnan(value).any() for value in state.values())


def test_b053_nemo_rl_3403_the_form_is_settled_before_anything_moves(tmp_path: Path) -> None:
    config = {**MOE, "num_experts": 3, "moe_intermediate_size": 2, "hidden_size": 4, "num_hidden_layers": 1}
    tensors = write_hf(tmp_path / "src", config)
    go(tmp_path / "src", tmp_path / "stacked", "hf", stacked_experts=True)
    stacked = load_file(tmp_path / "stacked/model.safetensors")
    both = stacked["model.layers.0.mlp.experts.gate_up_proj"]
    assert both.shape == (3, 4, 4) and stacked["model.layers.0.mlp.experts.down_proj"].shape == (3, 4, 2)
    go(tmp_path / "stacked", tmp_path / "single", "hf")
    single = {k: v for k, v in load_file(tmp_path / "single/model.safetensors").items() if ".experts." in k}
    assert len(single) == 9
    for e, i in itertools.product(range(3), range(2)):
        prefix = f"model.layers.0.mlp.experts.{e}."
        assert torch.equal(single[f"{prefix}gate_proj.weight"][i], both[e, i])
        assert torch.equal(single[f"{prefix}up_proj.weight"][i], both[e, 2 + i])
        assert torch.equal(
            single[f"{prefix}down_proj.weight"], stacked["model.layers.0.mlp.experts.down_proj"][e]
        )
        assert torch.equal(single[f"{prefix}gate_proj.weight"], tensors[f"{prefix}gate_proj.weight"])
    # Names of one form with the arrays of the other are refused when the source is opened.
    swapped = {**tensors, "model.layers.0.mlp.experts.0.gate_proj.weight": both.clone()}
    save_file(swapped, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ShardweaveError, match=r"stored \(3, 4, 4\) != \(2, 4\)"):
        prepare(tmp_path / "src", to="hf")


# --- K09 pipeline stages --------------------------------------------------------------------------


def numbers(pipeline: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """The layers of each chunk of each stage, counted here by a walk along the pipeline."""
    at, found = 0, []
    for sizes in pipeline:
        chunk = []
        for size in sizes:
            chunk.append(list(range(at, at + size)))
            at += size
        found.append(chunk)
    return found


def test_b058_megatron_1304_layers_that_do_not_divide_are_refused_or_spread(tmp_path: Path) -> None:
    with pytest.raises(GeometryError, match=r"num_layers\(30\).*leaves 30 unassigned over 4 middle stages"):
        megatron.stages(30, 4)
    with pytest.raises(GeometryError, match=r"num_layers\(70\)"):
        megatron.stages(70, 12)
    for sizes in ((7, 7, 7, 7), (8, 8, 7, 8), (8, 8, 7)):
        with pytest.raises(
            GeometryError, match=r"explicit pipeline sizes cover the layers.*num_layers\(30\)"
        ):
            megatron.stages(30, 4, sizes=sizes)
    assert megatron.stages(3, 4, sizes=(1, 1, 1, 0)) == ((1, 1, 1, 0),)

    config = {**LLAMA, "num_hidden_layers": 30}
    model = from_config(config)
    live = megatron.layout(
        model, megatron.mesh(pp=4), pipeline=megatron.stages(30, 4, sizes=(8, 8, 7, 7)), vocab_divisor=1
    )
    prove(live)
    found = [sorted(layers(state).values()) for state in held(model, live)]
    assert found == [list(range(8)), list(range(8, 16)), list(range(16, 23)), list(range(23, 30))]
    # A floor plan leaves layers 28 and 29 to nobody, and the proof says so.
    floor = megatron.layout(model, megatron.mesh(pp=4), pipeline=((7, 7, 7, 7),), vocab_divisor=1)
    with pytest.raises(GapError, match="28"):
        prove(floor)

    tensors = write_hf(tmp_path / "src", config)
    with pytest.raises(GeometryError, match="without a remainder"):
        prepare(tmp_path / "src", to="megatron", geometry=Geometry(pp=4))
    go(tmp_path / "src", tmp_path / "mc", "megatron", geometry=Geometry(pp=4, stages=(8, 8, 7, 7)))
    stored = dcp_tensors(tmp_path / "mc")["decoder.layers.self_attention.linear_proj.weight"]
    for layer in range(30):
        assert torch.equal(stored[layer], tensors[f"model.layers.{layer}.self_attn.o_proj.weight"])


@pytest.mark.parametrize(("num_layers", "ranks"), [(10, 3), (40, 7), (5, 5), (13, 8)])
def test_b059_mlx_1680_borders_are_sums_of_the_sizes_before(num_layers: int, ranks: int) -> None:
    """Sizes of a remainder in either order cover every layer once; a range past the end is refused."""
    base, rest = divmod(num_layers, ranks)
    sizes = [base + (i < rest) for i in range(ranks)]
    model = from_config({**LLAMA, "num_hidden_layers": num_layers})
    for order in (sizes, sizes[::-1]):
        pipeline = megatron.stages(num_layers, ranks, sizes=order)
        live = megatron.layout(model, megatron.mesh(pp=ranks), pipeline=pipeline, vocab_divisor=1)
        prove(live)
        found = [sorted(layers(state).values()) for state in held(model, live)]
        assert found == numbers([order])[0]
        assert sorted(itertools.chain(*found)) == list(range(num_layers))
    with pytest.raises(GeometryError, match=rf"!= num_layers\({num_layers}\)"):
        megatron.stages(num_layers, ranks, sizes=[sizes[0]] * (ranks - 1) + [sizes[0] + 1])


def test_b060_transformers_24381_the_second_stage_has_the_second_half() -> None:
    model = from_config(LLAMA)
    live = megatron.layout(model, megatron.mesh(pp=2), vocab_divisor=1)
    source = hf.layout(model)
    values = {t: markers(t) for t in model.tensors}
    filled = simulate(
        plan(source, live), materialise(source, values), into=empty(live, np.float64, fill=np.nan)
    )
    name = "decoder.layers.{}.self_attention.linear_proj.weight"
    assert layers(filled[0]) == {name.format(0): 0, name.format(1): 1}
    assert layers(filled[1]) == {name.format(0): 2, name.format(1): 3}
    assert all(np.all(filled[1][name.format(i)] == 1000 * (2 + i)) for i in (0, 1))


def test_b061_swiss_ai_116_virtual_chunks_are_interleaved() -> None:
    model = from_config({**LLAMA, "num_hidden_layers": 80})
    pipeline = megatron.stages(80, 8, vpp=5)
    assert pipeline == ((2,) * 8,) * 5
    interleaved = megatron.layout(model, megatron.mesh(pp=8), pipeline=pipeline, vocab_divisor=1)
    prove(interleaved)
    state = held(model, interleaved)
    assert sorted(layers(state[0]).values()) == [0, 1, 16, 17, 32, 33, 48, 49, 64, 65]
    assert sorted(layers(state[7]).values()) == [14, 15, 30, 31, 46, 47, 62, 63, 78, 79]
    for rank, v, i in itertools.product(range(8), range(5), range(2)):
        name = f"model{v}.decoder.layers.{i}.self_attention.linear_proj.weight"
        assert layers(state[rank])[name] == v * 16 + rank * 2 + i

    # From a run without chunks: by the layer that is meant, not by the name that it has.
    plain = megatron.layout(model, megatron.mesh(pp=8), vocab_divisor=1)
    values = {t: markers(t) for t in model.tensors}
    filled = simulate(
        plan(plain, interleaved), materialise(plain, values), into=empty(interleaved, np.float64, fill=np.nan)
    )
    for rank, expected in materialise(interleaved, values).items():
        assert filled[rank].keys() == expected.keys()
        assert all(np.array_equal(filled[rank][name], value) for name, value in expected.items())
    assert not set(interleaved.arrays(3)) & set(plain.arrays(3)) and interleaved != plain


def test_b062_megatron_bridge_5581_edges_that_do_not_fit_are_refused() -> None:
    assert megatron.stages(46, 4, first=11, last=11) == ((11, 12, 12, 11),)
    with pytest.raises(
        GeometryError,
        match=r"num_layers\(46\) - first\(11\) - last\(11\) leaves 24 unassigned over 0 middle .* pp\(2\)",
    ):
        megatron.stages(46, 2, first=11, last=11)
    for pp in (1, 23):
        with pytest.raises(GeometryError, match=rf"first\(11\) - last\(11\) .*pp\({pp}\)"):
            megatron.stages(46, pp, first=11, last=11)
    assert megatron.stages(46, 23) == ((2,) * 23,)
    for pp, first, last in itertools.product(range(1, 9), (None, 3, 11), (None, 5, 11)):
        try:
            (sizes,) = megatron.stages(46, pp, first=first, last=last)
        except GeometryError:
            continue
        assert sum(sizes) == 46 and len(sizes) == pp and min(sizes) > 0


# --- K10 MTP --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_b066_megatron_bridge_5380_who_holds_the_embedding(tied: bool, pp: int, tmp_path: Path) -> None:
    """Stages that do not need the embedding hold none; a copy that drifted is found, not chosen from."""
    config = {**LLAMA, "tie_word_embeddings": tied}
    model = from_config(config)
    live = megatron.layout(model, megatron.mesh(pp=pp), vocab_divisor=1)
    (embedding,) = (t for t in model.tensors if "embed_tokens" in t.name)
    holders = {
        rank
        for rank in range(pp)
        for buffer, _ in live.arrays(rank).values()
        if any(piece.tensor == embedding for piece in buffer.pieces())
    }
    assert holders == ({0, pp - 1} if tied else {0})
    if tied and pp == 2:
        tensors = write_hf(tmp_path / "src", config)
        head = tensors["model.embed_tokens.weight"].clone()
        head[27, 11] += 1
        save_file(
            tensors | {"lm_head.weight": head}, tmp_path / "src/model.safetensors", metadata={"format": "pt"}
        )
        with pytest.raises(ReplicaError, match=r"at \(27, 11\)"):
            go(tmp_path / "src", tmp_path / "dst", "hf")
    with pytest.raises(ShardweaveError, match="num_nextn_predict_layers"):
        from_config({**config, "num_nextn_predict_layers": 1})


# --- K19 files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "model-a.safetensors", "weights_final.safetensors"])
def test_b129_automodel_2289_files_are_cut_by_size_and_not_by_names(name: str, tmp_path: Path) -> None:
    tensors = write_hf(tmp_path / "src", LLAMA, name=name)
    go(tmp_path / "src", tmp_path / "hf", "hf", max_file_bytes=1000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    # The same model from two pipeline stages with column shards gives the very same files.
    geometry = Geometry(tp=2, pp=2, vocab_divisor=1)
    go(tmp_path / "src", tmp_path / "mc", "megatron", geometry=geometry)
    go(tmp_path / "mc", tmp_path / "again", "hf", max_file_bytes=1000)
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
        for key, value in load_file(tmp_path / "hf" / file).items():
            assert torch.equal(value, tensors[key])


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.layers.3.mlp.up_proj.weight"])
def test_b130_slime_2270_a_source_without_all_of_the_model_is_refused(lost: str, tmp_path: Path) -> None:
    tensors = write_hf(tmp_path / "src", LLAMA)
    del tensors[lost]
    save_file(tensors, tmp_path / "src/model.safetensors", metadata={"format": "pt"})
    for to in ("hf", "megatron"):
        with pytest.raises(UnknownNameError, match=rf"missing 1 \({re.escape(lost)}\)"):
            go(tmp_path / "src", tmp_path / "dst", to)
    assert not (tmp_path / "dst").exists()
    # A plan towards a model that has more is refused as well, with the name.
    model = from_config(LLAMA)
    whole = hf.layout(model)
    fewer = Layout("fewer", Mesh(()), tuple(rule for rule in whole.rules if rule.name != "lm_head.weight"))
    with pytest.raises(PlanError, match=r"missing 1 of .*lm_head\.weight"):
        plan(fewer, whole)


# --- K24 atomic saves -----------------------------------------------------------------------------


def prefixes(names: Iterable[str]) -> Iterable[list[str]]:
    ordered = sorted(names)
    return (ordered[:i] for i in range(len(ordered)))


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_b154_speculators_739_a_part_of_a_checkpoint_is_not_one(to: str, tmp_path: Path) -> None:
    write_hf(tmp_path / "src", LLAMA)
    whole = tmp_path / "whole"
    go(tmp_path / "src", whole, to, max_file_bytes=3000)
    needed = [
        p.name for p in whole.iterdir() if p.suffix in (".safetensors", ".distcp") or p.name == ".metadata"
    ]
    assert len(needed) > 3
    errors = (FormatError, MissingFileError, TruncatedError, PickleError)
    for some in prefixes(needed):
        part = tmp_path / "part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name in [*some, "config.json"]:
            os.link(whole / name, part / name)
        with pytest.raises(errors):
            open_checkpoint(part)
        if some:  # a truncated last file
            (part / some[-1]).unlink()
            (part / some[-1]).write_bytes((whole / some[-1]).read_bytes()[:-7])
            with pytest.raises(errors):
                open_checkpoint(part)
    if to == "hf":  # an index without one of its files
        for name in needed:
            part = tmp_path / "marker"
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(whole, part)
            (part / name).unlink()
            with pytest.raises(MissingFileError, match=name):
                open_checkpoint(part)
    open_checkpoint(whole)


def test_b156_nemo_rl_3312_every_save_has_the_values_of_its_own_time(tmp_path: Path) -> None:
    """Three saves under one structure: the first is not repeated, and a job does not outlive its source."""
    found = []
    for step in range(3):
        tensors = write_hf(tmp_path / f"step{step}", LLAMA)
        tensors = {key: value + step for key, value in tensors.items()}
        save_file(tensors, tmp_path / f"step{step}/model.safetensors", metadata={"format": "pt"})
        go(
            tmp_path / f"step{step}",
            tmp_path / f"out{step}",
            "megatron",
            geometry=Geometry(tp=2, vocab_divisor=1),
        )
        stored = dcp_tensors(tmp_path / f"out{step}")
        assert torch.equal(stored["output_layer.weight"], tensors["lm_head.weight"])
        found.append(stored)
    assert not torch.equal(found[0]["output_layer.weight"], found[2]["output_layer.weight"])
    # A second save into the same folder is refused, or replaces all of it.
    job = prepare(tmp_path / "step2", to="megatron", geometry=Geometry(tp=2, vocab_divisor=1))
    with pytest.raises(ExistsError):
        convert(job, tmp_path / "out0", fsync=False)
    convert(job, tmp_path / "out0", force=True, fsync=False)
    again = dcp_tensors(tmp_path / "out0")
    assert all(torch.equal(again[key], value) for key, value in found[2].items())
