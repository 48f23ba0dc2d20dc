"""What ``probe --expect`` names: dims, or the rule of a dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardweave.errors import GeometryError

if TYPE_CHECKING:
    from shardweave.layout import Dim

Sizes = Mapping[str, int]
"""The size of the cut dim of each probed tensor, by its name; ``""`` for a single one."""

HINT = (
    "write '[0:16] | [16:32]', or megatron:rows, megatron:qkv, megatron:gate_up, vllm:qkv, deepspeed:NAME "
    "with keys as in megatron:qkv,num_heads=8,num_kv_heads=2,head_dim=8"
)


def expected(text: str, sizes: Sizes, tp: int) -> list[Dim]:
    """The dim that each rank shall hold.

    A rule of a dialect speaks of the rows of one fused tensor where one is probed, and of the tensors
    ``q k v`` or ``gate up`` where those are.

    >>> [str(dim) for dim in expected("megatron:gate_up", {"gate": 6, "up": 6}, 2)]
    ['gate[0:3] up[0:3]', 'gate[3:6] up[3:6]']

    Raises:
        NotationError: The text is no dim.
        GeometryError: There is no such rule, or it does not fit the tensors.
    """
    from shardweave.layout import parse_dim

    name, colon, rest = text.partition(":")
    if not colon or name not in ("megatron", "vllm", "deepspeed"):
        return [parse_dim(dim) for dim in text.split("|")]
    rule, *words = (word.strip() for word in rest.split(","))
    keys: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        if not value.isdecimal() or key in keys:
            raise GeometryError(
                "the keys of a rule are numbers, each once", where=repr(text), equation=repr(word), hint=HINT
            )
        keys[key] = int(value)
    try:
        cut = _RULES[name](rule, sizes, tp, keys)
    except (KeyError, TypeError) as error:
        raise GeometryError(
            "a rule of a dialect is known and has its keys",
            where=repr(text),
            equation=f"{error}; probed {', '.join(sizes) if '' not in sizes else 'one tensor'}",
            hint=HINT,
        ) from None
    return [cut(rank) for rank in range(tp)]


Cut = Callable[[int], "Dim"]


def _megatron(rule: str, sizes: Sizes, tp: int, keys: dict[str, int]) -> Cut:
    from shardweave.dialects.megatron import fused_qkv
    from shardweave.dialects.megatron.weight import halves
    from shardweave.layout import concat, even, whole

    if rule == "gate_up":
        dim = whole(sizes[""]) if "" in sizes else concat(*(whole(sizes[x], x) for x in ("gate", "up")))
        return lambda rank: halves(dim, tp, rank)
    if rule == "qkv" and "" not in sizes:
        heads = fused_qkv(*(keys[key] for key in ("num_heads", "num_kv_heads", "head_dim")))
        return lambda rank: even(heads, tp, rank)
    if rule not in ("rows", "qkv"):
        raise KeyError(rule)
    return lambda rank: even(whole(sizes[""]), tp, rank)


def _vllm(rule: str, sizes: Sizes, tp: int, keys: dict[str, int]) -> Cut:
    from shardweave.dialects.vllm import kv_heads, query_heads
    from shardweave.layout import concat, cut, whole

    if rule != "qkv":
        raise KeyError(rule)
    num_heads, num_kv_heads, head_dim = (keys[key] for key in ("num_heads", "num_kv_heads", "head_dim"))
    widths = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    if "" in sizes:
        whole_, ends = whole(sizes[""]), [0, widths["q"], widths["q"] + widths["k"], sum(widths.values())]
        q, k, v = (cut(whole_, a, b) for a, b in pairwise(ends))
    else:
        q, k, v = (whole(sizes[label], label) for label in "qkv")
    return lambda rank: concat(
        query_heads(q, num_heads, tp, rank), *(kv_heads(dim, num_kv_heads, tp, rank) for dim in (k, v))
    )


def _deepspeed(rule: str, sizes: Sizes, tp: int, keys: dict[str, Any]) -> Cut:
    from shardweave.dialects.deepspeed import LAYOUTS, AutoTP
    from shardweave.layout import concat, whole

    layout, model = LAYOUTS[rule], AutoTP(tp=tp, **keys)
    dim = concat(*(whole(size, name) for name, size in sizes.items()))
    return lambda rank: layout(dim, rank, model)


_RULES: Mapping[str, Callable[[str, Sizes, int, dict[str, int]], Cut]] = {
    "megatron": _megatron,
    "vllm": _vllm,
    "deepspeed": _deepspeed,
}
