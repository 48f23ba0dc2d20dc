"""A part of a model: the tensors whose names some patterns match."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardweave.errors import GeometryError, UnknownNameError
from shardweave.layout import Dim, Run, Tensor
from shardweave.models.spec import SCALE, Block, Model

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,6})\.\.(\d{1,6})", re.ASCII)
_MOST = 4096
"""Of alternatives in one pattern: more are a mistake, or an attack."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A part of a model.

    Attributes:
        model: The part, as a model.
        groups: Which tensors of the whole are in it, each with the members that are. What a buffer may have
            fused is in one group; layers of which the patterns match different tensors are in several.
    """

    model: Model
    groups: tuple[Mapping[Tensor, Tensor], ...]


def chosen(model: Model, patterns: Sequence[str]) -> Chosen:
    """The part of a model that some patterns match.

    Patterns are as a shell has them: ``*`` matches dots too, ``[0-3]`` a character, ``{0,1}`` and ``{0..3}``
    alternatives. They match names of Hugging Face's files, each expert on its own; a tied tensor is matched
    by any of its names. Scales go with the weights that they scale.

    Law: the names of its tensors are those of the model that match, and no others.

    Args:
        model: The whole.
        patterns: At least one of which matches each tensor of the part; each matches at least one.

    Raises:
        UnknownNameError: A pattern matches nothing.
        GeometryError: It is no pattern.

    >>> from shardweave.models import from_config
    >>> sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 88}
    >>> model = from_config({"model_type": "llama", "dtype": "bfloat16", "vocab_size": 199, **sizes})
    >>> print(*chosen(model, ["*.layers.{1..2}.mlp.[gu]*"]).model.tensors, sep=chr(10))
    model.layers.{layer[1:3]}.mlp.gate_proj.weight (88, 48) bfloat16
    model.layers.{layer[1:3]}.mlp.up_proj.weight (88, 48) bfloat16
    """
    matched = _matched(model, patterns)
    blocks: list[Block] = []
    groups: list[Mapping[Tensor, Tensor]] = []
    for block in model.blocks:
        for layers, held in _of_block(block, matched):
            tensors = {role: _with_index(block.tensors[role], layers, held[role]) for role in held}
            blocks.append(replace(block, layers=layers, tensors=tensors))
            groups.append({block.tensors[role]: tensor for role, tensor in tensors.items()})
    kept = {tensor.name for block in blocks for tensor in block.tensors.values()}
    aliases = {alias: name for alias, name in model.aliases.items() if name in kept}
    part = replace(model, blocks=tuple(blocks), aliases=aliases, copies={})
    return Chosen(part, tuple(groups))


def _matched(model: Model, patterns: Sequence[str]) -> frozenset[str]:
    """The names that match, scales of matched weights among them."""
    names = [name for tensor in model.tensors for name in tensor.names()]
    again = {**model.aliases, **model.copies}
    found = set[str]()
    for pattern in patterns:
        match = re.compile("|".join(map(fnmatch.translate, expanded(pattern)))).match
        hits = {name for name in names if match(name)}
        hits |= {of for name, of in again.items() if match(name)}
        if not hits:
            families = [re.sub(r"\{\w+\}", "*", tensor.name) for tensor in model.tensors]
            near = difflib.get_close_matches(pattern, list(dict.fromkeys(families)), n=3, cutoff=0.3)
            raise UnknownNameError(
                "a pattern matches names of tensors of the model",
                where=f"pattern {pattern!r}",
                equation=f"0 of {len(names):,} names match",
                hint=f"near are {', '.join(near or families[:3])}; names are those of Hugging Face's files",
            )
        found |= hits
    for block in model.blocks:
        for role, tensor in block.tensors.items():
            scale = block.tensors.get(role + SCALE)
            if scale is not None:
                pairs = zip(tensor.names(), scale.names(), strict=True)
                found |= {of_scale for name, of_scale in pairs if name in found}
    return frozenset(found)


def expanded(pattern: str) -> list[str]:
    """A pattern without braces for each of its alternatives.

    Raises:
        GeometryError: There are too many, or it is no pattern.

    >>> expanded("layers.{0..2}.{q,k}")
    ['layers.0.q', 'layers.0.k', 'layers.1.q', 'layers.1.k', 'layers.2.q', 'layers.2.k']
    """
    parts: list[list[str]] = []
    for number, part in enumerate(_BRACES.split(pattern)):
        stretch = _RANGE.fullmatch(part) if number % 2 else None
        if stretch is not None:
            low, high = int(stretch[1]), int(stretch[2])
            parts.append([str(n) for n in range(low, min(high, low + _MOST) + 1)])
        else:
            parts.append(part.split(",") if number % 2 else [part])
    count, plain = math.prod(map(len, parts)), _BRACES.sub("", pattern)
    if not pattern.isprintable() or not pattern or not 0 < count <= _MOST or set("{}") & set(plain):
        raise GeometryError(
            "a pattern is of names, with few alternatives",
            where=f"pattern {pattern[:200]!r}",
            equation=f"alternatives({count}), at most {_MOST}",
            hint="write it as 'model.layers.3.*' or '*.experts.{0..7}.*'; braces do not nest",
        )
    return ["".join(turn) for turn in itertools.product(*parts)]


_Held = Mapping[str, frozenset[tuple[int, ...]]]
"""The members of a layer by role, as the numbers of further index dims."""


def _of_block(block: Block, matched: Collection[str]) -> Iterator[tuple[Dim, _Held]]:
    """Layers of a block that have the same members in the part, and those members."""
    layers: dict[int | None, dict[str, set[tuple[int, ...]]]] = defaultdict(dict)
    for role, tensor in block.tensors.items():
        for turn in itertools.product(*([n for _, n in dim] for _, dim in tensor.index)):
            if tensor.member(dict(zip((axis for axis, _ in tensor.index), turn, strict=True))) in matched:
                layers[turn[0] if turn else None].setdefault(role, set()).add(turn[1:])
    alike: dict[tuple[tuple[str, frozenset[tuple[int, ...]]], ...], list[int | None]] = {}
    for layer in sorted(layers, key=lambda n: -1 if n is None else n):
        held = layers[layer]
        signature = tuple((role, frozenset(held[role])) for role in block.tensors if role in held)
        alike.setdefault(signature, []).append(layer)
    for signature, numbers in alike.items():
        yield Dim(Run("", n, 1) for n in numbers if n is not None), dict(signature)


def _with_index(tensor: Tensor, layers: Dim, turns: Collection[tuple[int, ...]]) -> Tensor:
    """The family with these layers, and these further numbers."""
    if not tensor.index:
        return tensor
    further = [sorted({turn[d] for turn in turns}) for d in range(len(tensor.index) - 1)]
    if math.prod(map(len, further)) != len(turns):
        raise GeometryError(
            "the members of a family that are chosen are some numbers of each of its index dims",
            where=f"tensor {tensor.name!r}",
            equation=f"members({len(turns)}) != {' * '.join(str(len(few)) for few in further)}",
            hint="choose them with several conversions",
        )
    dims = [layers, *(Dim(Run("", n, 1) for n in few) for few in further)]
    return replace(
        tensor, index=tuple((axis, dim) for (axis, _), dim in zip(tensor.index, dims, strict=True))
    )
