"""Heads that predict further tokens (multi-token prediction), as DeepSeek-V3 has them.

Head ``k`` sits behind the last layer, on the last stage. For token ``t`` it takes the embedding of token
``t + k`` and what the output head read of the head before it, of the model itself for the first; norms both,
projects them to the width of the hidden state, and takes them through a layer of its own and a norm. The
output head of the model then predicts token ``t + k + 1``.

What it looks at and predicts is shifted on whole documents, before anything is cut (``local`` with
``ahead``), so that no part of a rank and no document's end is crossed. A token whose document has no token
``t + k + 1`` counts nowhere: not in the loss, not in routing. The embedding that it is given is that of any
token; it comes later than all tokens that count, and none of them sees it.

Source: the technical report of DeepSeek-V3, section 2.2; megatron-core 0.16.1, where each head too is given
what the one before it had behind its norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from shardweave.errors import ModelError
from shardweave.layout import Dim, Run
from shardweave.models import Block
from shardweave.models.blocks import Stack, mtp_block
from shardweave.train.batch import Microbatch, local
from shardweave.train.decoder import Decoder, View, Weights, embedded, through, tokens_of
from shardweave.train.experts import Routing
from shardweave.train.linear import rms_norm
from shardweave.train.loss import Tokens
from shardweave.train.maths import Maths


def with_heads(found: Maths, depth: int) -> Maths:
    """A model with heads for further tokens, whose layers are like its last one.

    Args:
        found: The model.
        depth: How many; 0 for the model as it is.

    Raises:
        ModelError: The depth is negative, or the model has heads already.

    >>> from shardweave.train.maths import maths
    >>> sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2}
    >>> llama = maths({"model_type": "llama", "num_hidden_layers": 2, **sizes}, dtype="float32")
    >>> for tensor in next(with_heads(llama, 2).model.of("mtp")).tensors.values():
    ...     print(tensor)
    model.layers.{layer[2:4]}.enorm.weight (4) float32
    model.layers.{layer[2:4]}.hnorm.weight (4) float32
    model.layers.{layer[2:4]}.eh_proj.weight (4, 8) float32
    model.layers.{layer[2:4]}.shared_head.norm.weight (4) float32
    """
    if depth < 0 or (depth and found.depth):
        raise ModelError(
            "a model is given heads for further tokens once, and no negative number",
            where=f"family {found.model.family!r}",
            equation=f"mtp({depth}) < 0" if depth < 0 else f"heads({found.depth}) != 0",
            hint="use mtp=0 for a model as its config says",
        )
    if not depth:
        return found
    model, last = found.model, found.num_layers - 1
    layers = Dim((Run("", found.num_layers, depth),))
    like = [_moved(block, layers) for block in model.blocks if any(n == last for _, n in block.layers)]
    heads = mtp_block(Stack("model.", found.hidden_size, model.dtype), layers)
    return replace(
        found,
        model=replace(model, blocks=(*model.blocks, *like, heads)),
        windows=(*found.windows, *found.windows[-1:] * depth),
    )


def _moved(block: Block, layers: Dim) -> Block:
    """A block on other layers."""
    tensors = {
        role: replace(
            tensor,
            index=tuple((name, layers if name == "layer" else dim) for name, dim in tensor.index),
        )
        for role, tensor in block.tensors.items()
    }
    return replace(block, layers=layers, tensors=tensors)


def ahead(decoder: Decoder, batch: Microbatch, seen: View, depth: int) -> tuple[View, ...]:
    """What each head sees of a microbatch that ``seen`` is the model's view of."""
    cp, tp = decoder.cp.rank, decoder.tp.rank
    return tuple(
        replace(seen, part=local(batch, cp, ahead=k), own=local(batch, cp, tp, ahead=k))
        for k in range(1, depth + 1)
    )


@dataclass(frozen=True)
class Head:
    """What a head made of a microbatch.

    Attributes:
        tokens: What a loss is given.
        routings: What its layer did with this rank's tokens, where it is sparse.
    """

    tokens: Tokens
    routings: tuple[Routing, ...]


def further(decoder: Decoder, weights: Weights, h: torch.Tensor, views: Sequence[View]) -> tuple[Head, ...]:
    """The heads one after the other.

    The projection is whole on each rank, which has its own slots of the sequence: no message.

    Args:
        decoder: How this rank computes.
        weights: Of the last stage, the embedding among them.
        h: What the output head reads of the model, ``(..., slots / tp, H)``.
        views: Those of ``ahead``, one a head.
    """
    found, eps = [], decoder.maths.eps
    for layer, seen in enumerate(views, decoder.maths.num_layers):
        here = f"model.layers.{layer}."
        e = rms_norm(embedded(decoder, weights, seen), weights[f"{here}enorm.weight"], eps)
        h = rms_norm(h, weights[f"{here}hnorm.weight"], eps)
        x = F.linear(torch.cat((e, h), -1), weights[f"{here}eh_proj.weight"])
        x, routings = through(decoder, weights, x, [layer], seen)
        h = rms_norm(x, weights[f"{here}shared_head.norm.weight"], eps)
        found.append(Head(tokens_of(decoder, weights, h, seen), routings))
    return tuple(found)
