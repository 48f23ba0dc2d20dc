"""A part of a model has the names that match, and no others, however families and blocks are cut."""

from __future__ import annotations

import fnmatch
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.dialects import hf
from shardweave.errors import GeometryError, UnknownNameError
from shardweave.layout import prove
from shardweave.models import Model, from_config
from shardweave.models.chosen import chosen, expanded

TINY = Path(__file__).parents[1] / "data" / "configs" / "tiny"
MODELS = {
    name: from_config(json.loads((TINY / f"{name}.json").read_text()), dtype="float32")
    for name in ("deepseek_v3", "nemotron-nas", "nemotron_h")
}
WORDS = (
    "model.",
    "layers",
    ".",
    "1",
    "2",
    "[0-2]",
    "*",
    "*",
    "?",
    "experts",
    "norm",
    "weight",
    "proj",
    "mlp",
)


def names_of(model: Model) -> set[str]:
    return {name for tensor in model.tensors for name in tensor.names()}


def matching(model: Model, patterns: list[str]) -> set[str]:
    """Name by name."""
    names = {name: name for name in names_of(model)} | {**model.aliases} | {**model.copies}
    return {of for name, of in names.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}


@pytest.mark.parametrize("name", MODELS)
@given(
    patterns=st.lists(
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map("".join), min_size=1, max_size=3
    )
)
def test_names(name: str, patterns: list[str]) -> None:
    model = MODELS[name]
    wanted = [matching(model, [pattern]) for pattern in patterns]
    if not all(wanted):
        with pytest.raises(UnknownNameError):
            chosen(model, patterns)
        return
    found = chosen(model, patterns)
    listed = [one for tensor in found.model.tensors for one in tensor.names()]
    assert set(listed) == set().union(*wanted) and len(listed) == len(set(listed))
    prove(hf.layout(found.model))
    assert set(hf.layout(found.model).stored()) == set(listed)
    # Groups say of each tensor of the whole which members are in the part.
    members = [one for group in found.groups for kept in group.values() for one in kept.names()]
    assert sorted(members) == sorted(listed)


def test_single_experts_of_single_layers() -> None:
    """Every set of members, also those that are no product of layers and experts."""
    model = MODELS["deepseek_v3"]
    experts = sorted(
        name for name in names_of(model) if ".experts.0.up_proj." in name or ".experts.2.up_proj." in name
    )
    for few in itertools.combinations(experts, 3):
        assert names_of(chosen(model, list(few)).model) == set(few)


def test_all_is_all() -> None:
    for model in MODELS.values():
        assert names_of(chosen(model, ["*"]).model) == names_of(model)


def test_a_tied_head_is_the_embedding() -> None:
    config = {"model_type": "llama", "vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "intermediate_size": 6, "tie_word_embeddings": True}
    model = from_config(config, dtype="float32")
    part = chosen(model, ["lm_head.*"]).model
    assert names_of(part) == {"model.embed_tokens.weight"} and part.aliases
    assert not chosen(model, ["model.norm.weight"]).model.aliases


@pytest.mark.parametrize("pattern", ["", "{a", "a}", "{a{b}}", "{0..5000}", "{0..99}{0..99}", "a\nb"])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(GeometryError):
        expanded(pattern)
