"""Layouts as a command says them: ``megatron:tp=8,pp=2,ep=4,etp=1``, ``vllm:tp=4 @ 16``, ``hf``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardweave.errors import GeometryError

if TYPE_CHECKING:
    from shardweave.layout import Layout
    from shardweave.models import Model

Reader = Callable[[str], Any]


def _degree(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _sum(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("+"))


def _flag(text: str) -> bool:
    return {"": True, "true": True, "false": False}[text]


_MEGATRON: Mapping[str, Reader] = {
    **dict.fromkeys(("tp", "cp", "dp", "pp", "ep", "etp", "vpp", "vocab_divisor"), _degree),
    **dict.fromkeys(("first", "last"), int),
    **dict.fromkeys(("spec", "experts", "order", "mtp_layer", "down_proj"), str),
    "stages": _sum,
}
_VLLM: Mapping[str, Reader] = {
    **dict.fromkeys(("tp", "pp", "dp", "ep", "vocab_multiple", "expert_multiple"), _degree),
    **dict.fromkeys(("placement", "dtype"), str),
    "redundant_experts": int,
    "expert_parallel": _flag,
    "drafter": _flag,
    "stages": _sum,
}
_HF: Mapping[str, Reader] = {"stacked_experts": _flag, "aliases": _flag}
_FSDP: Mapping[str, Reader] = {**dict.fromkeys(("replicate", "dp", "tp"), _degree), "outer": str, **_HF}

KEYS_OF_DCP: Mapping[str, Reader] = {"model": str, "optim": str, "flat": _flag}
"""The keys that ``--to dcp:`` takes: where the training script keeps weights, and the optimizer's state."""

DIALECTS: Mapping[str, Mapping[str, Reader]] = {
    "megatron": _MEGATRON,
    "vllm": _VLLM,
    "fsdp": _FSDP,
    "hf": _HF,
}
"""The keys that each dialect takes, and how their values are read."""

NOTATION = "DIALECT:KEY=VALUE,... @ RANK"


def parse_side(text: str) -> tuple[str, dict[str, Any], int]:
    """The dialect, its keys, and the first rank that a text names.

    >>> parse_side("megatron:tp=4,stages=8+7 @ 16")
    ('megatron', {'tp': 4, 'stages': (8, 7)}, 16)

    Raises:
        GeometryError: It is no such text.
    """
    body, at, rank = text.partition("@")
    name, _, rest = body.strip().partition(":")
    if name not in DIALECTS or (at and not rank.strip().isdecimal()):
        raise GeometryError(
            f"a layout is named {NOTATION}",
            where=repr(text),
            equation=f"{name!r} is not one of {', '.join(DIALECTS)}"
            if name not in DIALECTS
            else f"{rank.strip()!r} is no rank",
            hint="for example megatron:tp=8,pp=2,ep=4,etp=1 or vllm:tp=4 @ 16",
        )
    return name, keys_of(name, rest, DIALECTS[name], where=repr(text)), int(rank) if at else 0


def keys_of(name: str, text: str, keys: Mapping[str, Reader], *, where: str) -> dict[str, Any]:
    """The values that a text gives to the keys of something.

    >>> keys_of("vllm", "tp=4, expert_parallel", DIALECTS["vllm"], where="")
    {'tp': 4, 'expert_parallel': True}

    Raises:
        GeometryError: A key is unknown or given twice, or has no value of its kind.
    """
    found = dict[str, Any]()
    for word in (word.strip() for word in text.split(",") if word.strip()):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in keys or key in found:
            raise GeometryError(
                f"{name} takes each of its keys once",
                where=where,
                equation=f"{key!r} is given twice" if key in found else f"{key!r} is none of its keys",
                hint=f"{name} knows {', '.join(sorted(keys))}",
            )
        try:
            found[key] = keys[key](value)
        except (ValueError, KeyError):
            raise GeometryError(
                "a key has a value of its kind",
                where=where,
                equation=f"{key}={value!r}",
                hint="degrees are numbers from 1, stages are layers like 8+8+7+7, switches true or false",
            ) from None
    return found


def layout_of(text: str, model: Model) -> Layout:
    """The layout of a model that a text names.

    Raises:
        GeometryError: It is no such text, or the model cannot be laid out so.
    """
    name, keys, offset = parse_side(text)
    build = {"megatron": _megatron, "vllm": _vllm, "fsdp": _fsdp, "hf": _hf}[name]
    return build(model, offset, **keys)


def _megatron(model: Model, offset: int, **keys: Any) -> Layout:
    from shardweave.dialects import megatron

    pp = keys.get("pp", 1)
    shape = {key: keys.pop(key) for key in ("first", "last", "vpp") if key in keys}
    pipeline = megatron.stages(model.num_layers, pp, sizes=keys.pop("stages", None), **shape)
    form = ("spec", "experts", "vocab_divisor", "mtp_layer", "down_proj")
    rest = {key: keys.pop(key) for key in form if key in keys}
    return megatron.layout(model, megatron.mesh(**keys, offset=offset), pipeline=pipeline, **rest)


def _vllm(model: Model, offset: int, **keys: Any) -> Layout:
    from shardweave.dialects import vllm

    axes = {key: keys.pop(key) for key in ("pp", "dp", "ep") if key in keys}
    mesh = vllm.mesh(tp=keys.pop("tp", 1), **axes, offset=offset)
    keys.setdefault("expert_parallel", axes.get("ep", 1) > 1)
    return vllm.layout(model, mesh, layer_partition=keys.pop("stages", None), **keys)


def _fsdp(model: Model, offset: int, *, aliases: bool = False, **keys: Any) -> Layout:
    from shardweave.dialects import fsdp

    keys.setdefault("dp", 1)
    dims = {axis: keys.pop(axis) for axis in ("replicate", "dp", "tp") if axis in keys}
    if "tp" in dims:
        keys["tp"] = "tp"
    if "replicate" in dims:
        keys["replicate"] = ("replicate",)
    return fsdp.layout(model, fsdp.mesh(**dims, offset=offset), with_aliases=aliases, **keys)


def _hf(model: Model, offset: int, *, stacked_experts: bool = False, aliases: bool = False) -> Layout:
    from shardweave.dialects import hf
    from shardweave.layout import Mesh

    layout = hf.layout(model, stacked_experts=stacked_experts, with_aliases=aliases)
    return replace(layout, mesh=Mesh((), offset=offset))
