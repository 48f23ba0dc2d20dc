"""Weights in blocks of float8: beside each weight the scales by which its blocks are multiplied.

Source: transformers, ``integrations/finegrained_fp8.py``: FP8Linear; the files of DeepSeek-V3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardweave.models.config import MATHS, Config, Keys
from shardweave.models.spec import SCALE, Block

_KEYS = Keys(
    shapes=frozenset({"weight_block_size", "modules_to_not_convert"}),
    ignored={"activation_scheme": MATHS, "scale_fmt": MATHS},
    neutral={"quant_method": ("fp8",), "fmt": ("e4m3",)},
)

_LINEAR: Mapping[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "o"),
    "mla": ("q", "q_a", "q_b", "kv_a", "kv_b", "o"),
    "mlp": ("gate", "up", "down"),
    "moe": ("gate", "up", "down"),
    "shared": ("gate", "up", "down"),
}
"""The weights that are quantised. Embeddings, heads, routers, norms and what is around MTP layers are not."""


def quantised(config: Config, value: Any, blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks as a ``quantization_config`` says that they are stored.

    Args:
        config: The config that has it.
        value: Its value.
        blocks: The blocks of the model without quantisation.

    Raises:
        ModelError: It is another kind of quantisation, or leaves out weights that are quantised here.
    """
    given = config.part(value, _KEYS, "quantization_config")
    block = given.get("weight_block_size")
    if given.values.get("quant_method") != "fp8" or (
        not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block)
    ):
        raise given.fail(
            "quantised weights have block scales",
            f"quant_method={given.values.get('quant_method')!r}, weight_block_size={block!r}",
            "use the weights before quantisation, or those in blocks ([128, 128])",
        )
    found = tuple(_with_scales(one, *block) for one in blocks)
    _check_spared(given, found)
    return found


def _with_scales(block: Block, rows: int, columns: int) -> Block:
    roles = [role for role in _LINEAR.get(block.kind, ()) if role in block.tensors]
    if not roles:
        return block
    tensors = dict(block.tensors)
    for role in roles:
        weight = tensors[role]
        out, into = weight.shape
        shape = (-(-out // rows), -(-into // columns))
        tensors[role] = replace(weight, dtype="float8_e4m3fn")
        tensors[role + SCALE] = replace(weight, name=weight.name + "_scale_inv", shape=shape, dtype="float32")
    return replace(
        block, sizes={**block.sizes, "scale_rows": rows, "scale_columns": columns}, tensors=tensors
    )


def _check_spared(given: Config, blocks: tuple[Block, ...]) -> None:
    """The modules that are said not to be quantised are none that is quantised here."""
    modules = set(_modules(blocks))
    for name in given.get("modules_to_not_convert") or ():
        of = re.sub(r"\d+", "0", str(name))
        hit = next((module for module in sorted(modules) if f".{of}." in f".{module}."), None)
        if hit is not None:
            raise given.fail(
                "all weights of a kind are quantised, or none",
                f"modules_to_not_convert has {name!r}, which is or holds {hit!r}",
                "quantise it too: layers that differ in their dtype are not described here",
            )


def _modules(blocks: tuple[Block, ...]) -> Iterator[str]:
    for block in blocks:
        for role, tensor in block.tensors.items():
            if role + SCALE in block.tensors:
                yield re.sub(r"\{\w+\}|\d+", "0", tensor.name).removesuffix(".weight")
