"""Who constructs what in the installed megatron-core 0.16.1, beside what a plain search of its text finds."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardweave.lint.constructors import Inventory, inventory

pytestmark = [pytest.mark.peer("megatron.core"), pytest.mark.timeout(300)]

CORE = "megatron.core.transformer"


@pytest.fixture(scope="module")
def megatron() -> Path:
    found = find_spec("megatron.core")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent.parent


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def of(megatron: Path, cache: Path, cls: str, argument: str = "pg_collection") -> Inventory:
    return inventory(cls, argument, [megatron], root=megatron.parent, cache=cache)


def in_text(megatron: Path, pattern: str) -> Counter[str]:
    """Files and how often a pattern is in them."""
    found: Counter[str] = Counter()
    for path in megatron.rglob("*.py"):
        count = len(re.findall(pattern, path.read_text(encoding="utf-8")))
        if count:
            found[path.relative_to(megatron.parent).as_posix()] = count
    return found


def test_rotary_embedding(megatron: Path, cache: Path) -> None:
    made = of(megatron, cache, "RotaryEmbedding", "cp_group")
    assert [name.rpartition(".")[2] for name in made.family] == ["RotaryEmbedding", "YarnRotaryEmbedding"]
    assert made.counts() == {"keyword": 7, "missing": 2, "escape": 1, "super-keyword": 1}
    places = {(f.path.removeprefix("megatron/core/"), f.name.rpartition(".")[2]) for f in made.findings
              if f.kind == "missing"}  # fmt: skip
    assert places == {
        ("models/bert/bert_model.py", "RotaryEmbedding"),
        ("models/gpt/gpt_model.py", "YarnRotaryEmbedding"),
    }
    calls = Counter(f.path for f in made.findings if f.kind in ("keyword", "missing"))
    assert calls == in_text(megatron, r"= (?:Yarn)?RotaryEmbedding\(")


def test_self_attention_is_only_built_from_specs(megatron: Path, cache: Path) -> None:
    made = of(megatron, cache, f"{CORE}.attention.SelfAttention")
    assert made.counts() == {"spec": 19, "escape": 1}
    assert not in_text(megatron, r"(?<!class )\bSelfAttention\(")
    named = Counter(f.path for f in made.findings if f.kind == "spec")
    written = in_text(megatron, r"module=SelfAttention\b")
    # One file gives the class another name first.
    assert set(named - written) <= {f.path for f in made.findings if f.kind == "escape"}
    assert not written - named


def test_dot_product_attention(megatron: Path, cache: Path) -> None:
    made = of(megatron, cache, f"{CORE}.dot_product_attention.DotProductAttention")
    assert made.counts() == {"spec": 10, "escape": 3}
    # A class of the same name in another library is no part of the family.
    assert made.family == (f"{CORE}.dot_product_attention.DotProductAttention",)
    assert "class TEDotProductAttention(te.pytorch.DotProductAttention)" in (
        megatron / "core/extensions/transformer_engine.py"
    ).read_text(encoding="utf-8")


def test_transformer_layer_and_what_inherits_from_it(megatron: Path, cache: Path) -> None:
    made = of(megatron, cache, f"{CORE}.transformer_layer.TransformerLayer")
    assert made.counts() == {"spec": 29, "escape": 5, "super-keyword": 1, "super-args": 2}
    assert {name.rpartition(".")[2] for name in made.family} == {
        "TransformerLayer", "MoETransformerLayer", "MLPLayer", "RealQuantTransformerLayer",
        "FP8WeightTransformerLayer", "BlockwiseFP8WeightTransformerLayer",
    }  # fmt: skip


@pytest.mark.parametrize(
    "cls",
    [
        f"{CORE}.attention.SelfAttention",
        f"{CORE}.transformer_layer.MoETransformerLayer",
        f"{CORE}.multi_latent_attention.MLASelfAttention",
        "megatron.core.models.gpt.gpt_model.GPTModel",
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.YarnRotaryEmbedding",
    ],
)
def test_the_order_of_bases_is_the_real_one(megatron: Path, cache: Path, cls: str) -> None:
    from shardweave.lint.cache import Cache
    from shardweave.lint.class_cache import load
    from shardweave.lint.files import find, read
    from shardweave.lint.hierarchy import Hierarchy
    from shardweave.lint.names import Tree

    sources = find([megatron], root=megatron.parent)
    read(sources)
    index = load(sources, cache=Cache(cache))
    hierarchy = Hierarchy(
        [(source, index[source.path].classes) for source in sources],
        Tree(sources, facts_of=lambda source: index[source.path].facts, is_target=lambda dotted: False),
    )
    [node] = hierarchy.by_dotted[cls]
    module, _, name = cls.rpartition(".")
    real = getattr(importlib.import_module(module), name)
    order = [part.dotted for part in hierarchy.mro(node) if part.row is not None]
    assert order == [f"{c.__module__}.{c.__qualname__}" for c in real.__mro__ if c.__module__ in
                     {source.module for source in sources}]  # fmt: skip
    init = hierarchy.initialiser(node)
    assert init is not None
    assert [part.name for part in init.parameters] == list(inspect.signature(real).parameters)
    assert init.line == real.__init__.__code__.co_firstlineno
