"""From a config to a model: find the family, read its layers, add what surrounds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardweave.errors import ModelError
from shardweave.layout import whole
from shardweave.models import (
    bloom,
    chatglm,
    codegen,
    deepseek_v2,
    deepseek_v3,
    falcon,
    gpt2,
    gpt_bigcode,
    gptj,
    llama,
    llava,
    mamba2,
    mistral,
    mixtral,
    nemotron_h,
    nemotron_nas,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
    yuan,
)
from shardweave.models.blocks import Stack, embedding_block, final_block, head_block
from shardweave.models.config import Config, load
from shardweave.models.quantised import quantised
from shardweave.models.spec import Block, Model

FAMILIES = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        mixtral.FAMILY,
        nemotron_nas.FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
        deepseek_v2.FAMILY,
        deepseek_v3.FAMILY,
        qwen3_next.FAMILY,
        qwen3_next.DENSE,
        qwen3_next.SPARSE,
        nemotron_h.FAMILY,
        mamba2.FAMILY,
        gpt2.FAMILY,
        gptj.FAMILY,
        gpt_bigcode.FAMILY,
        codegen.FAMILY,
        bloom.FAMILY,
        falcon.FAMILY,
        phi3.FAMILY,
        chatglm.FAMILY,
        yuan.FAMILY,
    )
}
"""Every family of decoders by its ``model_type``; ``llava`` has one of them as its language model."""


def from_config(config: Mapping[str, Any] | Path, *, dtype: str = "", prefix: str | None = None) -> Model:
    """The logical tensors of the model that a Hugging Face config describes.

    Configs of transformers 4 and 5 are read alike (``torch_dtype`` and ``dtype``, ``rope_scaling`` and
    ``rope_parameters``).

    Args:
        config: The config, its file, or the folder with its ``config.json``.
        dtype: The dtype of the weights, where the config does not say or something else is wanted.
        prefix: What the decoder's names start with, where it is not what files of the family have; a
            vision-language model nests them deeper.

    Raises:
        ModelError: The family is unknown, a key is not understood, or sizes contradict each other.
        MissingFileError, FormatError: The path does not lead to a config.

    >>> sizes = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    >>> widths = {"vocab_size": 199, "hidden_size": 48, "intermediate_size": 112}
    >>> model = from_config({"model_type": "llama", "dtype": "bfloat16", **sizes, **widths})
    >>> print(next(model.of("attention")).tensors["k"])
    model.layers.{layer[0:3]}.self_attn.k_proj.weight (16, 48) bfloat16
    """
    values = load(config) if isinstance(config, Path) else config
    where = f"config {config}" if isinstance(config, Path) else "config"
    if values.get("model_type") != llava.MODEL_TYPE:
        return _decoder(values, where, dtype, prefix)
    text, dtype = llava.text_config(values), llava.read(values).dtype(dtype)
    return llava.joined(values, _decoder(text, f"{where}, text_config", dtype, prefix, llava.TEXT))


def _decoder(
    values: Mapping[str, Any], where: str, dtype: str, prefix: str | None, within: str = ""
) -> Model:
    """The tensors of a decoder, whose names begin with what it lies within."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            "a config belongs to a known family",
            where=where,
            equation=f"model_type={name!r} is not one of {', '.join(FAMILIES)}",
            hint="describe the family in a file of its own in shardweave.models",
        )
    family = FAMILIES[name]
    where = f"config of {name}"
    read = Config(family.respelled(values, where), family.keys, where)
    if read.get("architectures") not in (None, *([name] for name in (family.architecture, *family.renamed))):
        raise read.fail(
            "the tensors are those of the language model with its head",
            f"architectures={read.get('architectures')} != [{family.architecture!r}]",
            "other heads and bare backbones have other tensors; convert the language model",
        )
    prefix = within + family.prefix if prefix is None else prefix
    head = within + family.head
    stack = Stack(prefix, read.size("hidden_size"), read.dtype(dtype), family.within)
    vocab_size = read.size("vocab_size")
    num_layers = family.num_layers(read)
    tied = read.flag("tie_word_embeddings", missing=family.tied)
    embedding = embedding_block(stack, vocab_size, name=family.embedding)
    blocks: tuple[Block, ...] = (
        embedding,
        *family.layers(read, stack, whole(num_layers)),
        final_block(stack, name=family.final),
        *(() if tied else (head_block(stack, vocab_size, name=head),)),
        *family.around(read, stack),
    )
    if (quantisation := values.get("quantization_config")) is not None:
        blocks = quantised(read, quantisation, blocks)
    aliases = {head: embedding.tensors["embed"].name} if tied else {}
    once_more = {"embedding": embedding.tensors["embed"].name, "head": aliases.get(head, head)}
    copies = {
        f"{prefix}layers.{layer}.{copy}": once_more[kind]
        for block in blocks
        if block.kind == "mtp"
        for _, layer in block.layers
        for copy, kind in family.copies.items()
    }
    buffers = {
        f"{prefix}{family.within}.{layer}.{buffer}"
        for layer in range(num_layers)
        for buffer in family.buffers
    } | {prefix + buffer for buffer in family.buffers_once}
    return Model(name, num_layers, stack.dtype, blocks, aliases, copies, frozenset(buffers))
