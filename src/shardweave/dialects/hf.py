"""Hugging Face: one rank, every tensor whole, under its own name.

Five things vary. Experts are stored one by one, as files hold them, or stacked, as transformers 5
holds them in memory. A tied head is stored once, or under both its names. Layers for further tokens
are there with their copies of the embedding and the head, as DeepSeek's files have them, without, or
are left out, as transformers does. The names of a vision tower begin as transformers 4 wrote them, or as
transformers 5 does. The weights need not be the model's only tensors, and a file with
names beyond it is refused, not filtered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from shardweave.dialects.names import match
from shardweave.errors import GeometryError
from shardweave.layout import BufferRule, Layout, Mesh, Part, Tensor, concat, whole
from shardweave.models import Block, Model


def layout(
    model: Model, *, stacked_experts: bool = False, with_aliases: bool = False, with_copies: bool = True
) -> Layout:
    """The model as Hugging Face files hold it, on one rank; of ``model.decoder`` as transformers holds it.

    Args:
        model: The model.
        stacked_experts: Whether the experts of a layer are two arrays, ``gate_up_proj`` (experts, gate
            rows then up rows, hidden) and ``down_proj`` (experts, hidden, ffn), as transformers 5 holds
            them in memory; its files hold each expert on its own.
        with_aliases: Whether tied tensors are stored under each of their names.
        with_copies: Whether layers for further tokens have their copies of the embedding and the head.

    Law: ``prove(layout(model, ...))`` holds for every model and choice.

    Raises:
        GeometryError: Stacked experts with block scales; how transformers stacks scales is not described. Or
            of a part of a model that has not all experts of a layer.

    Source: transformers 5, ``Qwen3MoeExperts``, ``MixtralExperts``, and ``conversion_mapping`` for the names.
    """
    if stacked_experts and not stackable(model):
        raise GeometryError(
            "experts with block scales, or some of a layer, are stored one by one",
            where=f"model of {model.family}",
            equation="stacked_experts(True), and "
            + ("its weights have scales" if model.scaled else "not all experts are chosen"),
            hint="leave them as files have them, or convert the weights to a dtype without scales first"
            if model.scaled
            else "leave them as files have them, or choose all experts of a layer",
        )
    rules: list[BufferRule] = []
    for block in model.blocks:
        if stacked_experts and block.kind == "moe":
            rules += _stacked(block)
        else:
            rules += (_whole(tensor.name, tensor) for tensor in block.tensors.values())
    again = {**(model.aliases if with_aliases else {}), **(model.copies if with_copies else {})}
    if again:
        stored = {tensor.name: tensor for tensor in model.tensors}
        rules += (_whole(name, stored[of], replica=True) for name, of in again.items())
    return Layout("hf", Mesh(()), tuple(rules))


def stackable(model: Model) -> bool:
    """Whether the experts of a model can be stacked: all of each layer are there, and no block has scales."""
    return not model.scaled and all(
        {"router", "gate", "up", "down"} <= block.tensors.keys()
        and all(
            len(dim) == block.sizes["num_experts"]
            for tensor in block.tensors.values()
            for name, dim in tensor.index
            if name == "expert"
        )
        for block in model.of("moe")
    )


def variant(keys: Iterable[str], model: Model) -> Layout:
    """The layout whose array names are exactly ``keys``: no shape is looked at, none is guessed.

    Raises:
        UnknownNameError: No variant has these names; the message compares with the nearest.

    >>> from shardweave.models import from_config
    >>> sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 88}
    >>> model = from_config({"model_type": "llama", "dtype": "bfloat16", "vocab_size": 199, **sizes})
    >>> names = [name for tensor in model.tensors for name in tensor.names()]
    >>> variant(names, model) == layout(model)
    True
    """
    return match(_variants(model), keys)


def names(model: Model) -> frozenset[str]:
    """All names that arrays of a model have in some variant."""
    return frozenset(name for one in _variants(model) for name in one.arrays(0))


def _variants(model: Model) -> Iterator[Layout]:
    models = [model] if model.decoder is model else [model, model.decoder]
    for one in models:
        stacked = (False, True) if any(True for _ in one.of("moe")) and stackable(one) else (False,)
        aliases = (False, True) if one.aliases else (False,)
        copies = (True, False) if one.copies else (False,)
        for experts, with_aliases, with_copies in product(stacked, aliases, copies):
            found = layout(one, stacked_experts=experts, with_aliases=with_aliases, with_copies=with_copies)
            yield found
            if model.prefixes:
                yield _of_old(found, model)


def _of_old(found: Layout, model: Model) -> Layout:
    """The same arrays under the names that files of old versions have."""
    rules = []
    for rule in found.rules:
        old = next((ours for ours in model.prefixes if rule.name.startswith(ours)), "")
        rules.append(replace(rule, name=model.prefixes.get(old, old) + rule.name.removeprefix(old)))
    return replace(found, rules=tuple(rules))


def _whole(name: str, tensor: Tensor, *, replica: bool = False) -> BufferRule:
    return BufferRule(name, (Part(tensor, replica=replica),), tensor.dims)


def _stacked(block: Block) -> Iterator[BufferRule]:
    """A sparse layer as it is in memory, where its module is called ``mlp`` in every family."""
    router, gate, up, down = (block.tensors[role] for role in ("router", "gate", "up", "down"))
    module, _, _ = router.name.removesuffix(".gate.weight").rpartition(".")
    layers, experts, rows, columns = gate.dims
    stacked = (1, 2, 3)
    for tensor in block.tensors.values():
        if tensor not in (gate, up, down):
            yield _whole(f"{module}.mlp.gate.{tensor.name.rpartition('.gate.')[2]}", tensor)
    yield BufferRule(
        f"{module}.mlp.experts.gate_up_proj",
        (Part(gate, "gate"), Part(up, "up")),
        (layers, experts, concat(whole(len(rows), "gate"), whole(len(rows), "up")), columns),
        stacked,
    )
    yield BufferRule(f"{module}.mlp.experts.down_proj", (Part(down),), down.dims, stacked)
