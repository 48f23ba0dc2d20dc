"""A decoder: what llama, qwen3 and qwen3_moe compute, from the weights of one rank.

Functions of tensors. Weights are a mapping by name, and whatever gives a tensor for a name will do. Hidden
states lie between blocks as ``SequenceLayout.local_shape(split_tp=True)`` says: each rank has slots of its
own.

| | sequence | features |
|---|---|---|
| between blocks, norms, routing, experts | cut over ``cp`` and ``tp`` | whole |
| attention, MLP, logits | cut over ``cp`` | cut over ``tp`` |

Source: transformers 5, ``LlamaDecoderLayer``, ``Qwen3Attention``, ``Qwen3MoeDecoderLayer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.train.attention import attention
from shardweave.train.batch import Local, Microbatch, local
from shardweave.train.collectives import gather
from shardweave.train.experts import ExpertWeights, Routing, moe
from shardweave.train.grid import Group
from shardweave.train.linear import column, columns, embed, rms_norm, row, swiglu
from shardweave.train.logprobs import token_logprobs
from shardweave.train.loss import Tokens
from shardweave.train.maths import Maths
from shardweave.train.random import dropout
from shardweave.train.recompute import again
from shardweave.train.rotary import rotate
from shardweave.train.routing import Documents

Weights = Mapping[str, Tensor]

EMBEDDING, FINAL, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class Decoder:
    """How a rank computes a decoder.

    Attributes:
        maths: What is computed.
        tp: The ranks that cut heads, rows and slots.
        cp: The ranks that cut documents.
        ep: The ranks that share experts.
        etp: The ranks that cut each expert.
        document: The ranks that a document is on: those of ``tp`` and ``cp``.
        cp_method: ``ring``, ``gather`` or ``all_to_all``.
        balance: Whether experts are balanced, which takes a sum over ``document`` in each sparse layer.
        dropout: The share of what a block adds to the hidden state that is dropped.
        seed: Of the dropout.
        recompute: Whether the way back computes each layer once more, see ``recompute.py``.
    """

    maths: Maths
    tp: Group
    cp: Group
    ep: Group
    etp: Group
    document: Group
    cp_method: str = "ring"
    balance: bool = False
    dropout: float = 0.0
    seed: int = 0
    recompute: bool = False


@dataclass(frozen=True)
class View:
    """What a rank sees of a microbatch; made once, for all layers.

    Attributes:
        part: The slots of its context rank, whole over ``tp``.
        own: Its own slots.
        cos: For the slots of ``part``, see ``Rotary``.
        sin: The same.
        tokens: A number for each of its own slots that no other token of the run has.
        step: The number of the step, for dropout.
    """

    part: Local
    own: Local
    cos: Tensor
    sin: Tensor
    tokens: Tensor
    step: int


def view(decoder: Decoder, batch: Microbatch, *, dtype: torch.dtype, step: int = 0) -> View:
    """What a rank sees of a microbatch."""
    part = local(batch, decoder.cp.rank)
    own = local(batch, decoder.cp.rank, decoder.tp.rank)
    cos, sin = decoder.maths.rotary.tables(part.positions, dtype=dtype)
    numbers = torch.tensor(batch.numbers, dtype=torch.int64, device=own.ids.device)
    return View(part, own, cos, sin, (numbers[own.documents] << 24) + own.positions, step)


# --- layers -------------------------------------------------------------------------------------


def embedded(decoder: Decoder, weights: Weights, seen: View) -> Tensor:
    """The hidden state before the first layer."""
    return embed(seen.part.ids, weights[EMBEDDING], tp=decoder.tp, vocab_size=decoder.maths.vocab_size)


def through(
    decoder: Decoder, weights: Weights, x: Tensor, layers: Sequence[int], seen: View
) -> tuple[Tensor, tuple[Routing, ...]]:
    """The hidden state after some layers, and what the sparse ones of them did with this rank's tokens."""
    routings: list[Routing] = []
    for layer in layers:

        def one(h: Tensor, layer: int = layer) -> tuple[Tensor, Routing | None]:
            return _layer(decoder, weights, h, layer, seen)

        x, routing = again(one, x, weights) if decoder.recompute else one(x)
        routings += () if routing is None else (routing,)
    return x, tuple(routings)


def _layer(
    decoder: Decoder, weights: Weights, x: Tensor, layer: int, seen: View
) -> tuple[Tensor, Routing | None]:
    here = f"model.layers.{layer}."
    x = x + _dropped(decoder, attend(decoder, weights, x, layer, seen), f"{here}self_attn", seen)
    h = rms_norm(x, weights[f"{here}post_attention_layernorm.weight"], decoder.maths.eps)
    routing = None
    if f"{here}mlp.gate.weight" in weights:
        y, routing = _experts(decoder, weights, h, layer, seen)
    else:
        y = _mlp(decoder, weights, h, layer)
    return x + _dropped(decoder, y, f"{here}mlp", seen), routing


def attend(decoder: Decoder, weights: Weights, x: Tensor, layer: int, seen: View) -> Tensor:
    """What the attention of a layer adds to the hidden state."""
    here, maths, tp = f"model.layers.{layer}.self_attn.", decoder.maths, decoder.tp
    h = rms_norm(x, weights[f"model.layers.{layer}.input_layernorm.weight"], maths.eps)
    names = [f"{here}{name}_proj" for name in "qkv"]
    biases = [weights.get(f"{name}.bias") for name in names]
    q, k, v = columns(h, [weights[f"{name}.weight"] for name in names], biases, tp=tp)
    if maths.num_kv_heads % tp.size:
        k, v = (gather(rows, -1, group=tp) for rows in (k, v))
    q, k, v = (rows.unflatten(-1, (-1, maths.head_dim)) for rows in (q, k, v))
    if maths.num_kv_heads % tp.size:
        heads = torch.tensor(read_heads(maths, tp), device=x.device)
        k, v = (rows.index_select(-2, heads) for rows in (k, v))
    if maths.qk_norm:
        q = rms_norm(q, weights[f"{here}q_norm.weight"], maths.eps)
        k = rms_norm(k, weights[f"{here}k_norm.weight"], maths.eps)
    q, k = (rotate(rows, seen.cos, seen.sin) for rows in (q, k))
    y = attention(
        q,
        k,
        v,
        layout=seen.part.layout,
        cp=decoder.cp,
        method=decoder.cp_method,
        window=maths.windows[layer],
    )
    return row(y.flatten(-2), weights[f"{here}o_proj.weight"], weights.get(f"{here}o_proj.bias"), tp=tp)


def read_heads(maths: Maths, tp: Group) -> list[int]:
    """The KV heads that a rank's query heads read: as few as can be read in equal groups, in order.

    >>> from types import SimpleNamespace
    >>> ranks = [Group("tp", (0, 1), rank) for rank in range(2)]
    >>> [read_heads(SimpleNamespace(num_heads=6, num_kv_heads=3), tp) for tp in ranks]  # q: 0 0 1 | 1 2 2
    [[0, 0, 1], [1, 2, 2]]
    >>> [read_heads(SimpleNamespace(num_heads=8, num_kv_heads=1), tp) for tp in ranks]
    [[0], [0]]
    """
    each, group = maths.num_heads // tp.size, maths.num_heads // maths.num_kv_heads
    read = [query // group for query in range(tp.rank * each, (tp.rank + 1) * each)]
    distinct = sorted(set(read))
    alike = each // len(distinct)
    return distinct if read == [head for head in distinct for _ in range(alike)] else read


def _mlp(decoder: Decoder, weights: Weights, h: Tensor, layer: int) -> Tensor:
    here = f"model.layers.{layer}.mlp."
    gate, up, down = (f"{here}{name}_proj" for name in ("gate", "up", "down"))
    biases = [weights.get(f"{name}.bias") for name in (gate, up)]
    pair = columns(h, [weights[f"{name}.weight"] for name in (gate, up)], biases, tp=decoder.tp)
    return row(swiglu(*pair), weights[f"{down}.weight"], weights.get(f"{down}.bias"), tp=decoder.tp)


def _experts(decoder: Decoder, weights: Weights, h: Tensor, layer: int, seen: View) -> tuple[Tensor, Routing]:
    here, maths, own = f"model.layers.{layer}.mlp.", decoder.maths, seen.own
    gate, up, down = (weights[f"{here}experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    count = len(own.layout.lengths)
    return moe(
        h,
        own.is_real,
        ExpertWeights(weights[f"{here}gate.weight"], gate, up, down),
        num_experts=maths.num_experts,
        top_k=maths.top_k,
        norm_topk=maths.norm_topk,
        ep=decoder.ep,
        etp=decoder.etp,
        documents=Documents(own.documents, count, decoder.document) if decoder.balance else None,
    )


def _dropped(decoder: Decoder, y: Tensor, name: str, seen: View) -> Tensor:
    if not decoder.dropout:
        return y
    width = y.shape[-1]
    index = seen.tokens[..., None] * width + torch.arange(width, device=y.device)
    return dropout(y, decoder.dropout, seed=decoder.seed, name=name, index=index, step=seen.step)


# --- the head -----------------------------------------------------------------------------------


def tokens_of(
    decoder: Decoder,
    weights: Weights,
    x: Tensor,
    seen: View,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Tokens:
    """What a loss is given: the log-probability of the label of each of this rank's own slots.

    ``x`` is what the output head reads, see ``final``.
    """
    tp = decoder.tp
    logits = logits_of(decoder, weights, x)
    labels, vocab_size = seen.part.labels, decoder.maths.vocab_size
    entropies = None
    if entropy:
        logprobs, entropies = token_logprobs(
            logits, labels, tp=tp, vocab_size=vocab_size, temperature=temperature, entropy=True
        )
    else:
        logprobs = token_logprobs(logits, labels, tp=tp, vocab_size=vocab_size, temperature=temperature)
    own = seen.own
    return Tokens(logprobs, own.labels, own.mask, own.slots, entropies, own.extras)


def final(decoder: Decoder, weights: Weights, x: Tensor) -> Tensor:
    """What the output head reads: the hidden state after all layers, normed."""
    return rms_norm(x, weights[FINAL], decoder.maths.eps)


def logits_of(decoder: Decoder, weights: Weights, x: Tensor) -> Tensor:
    """The logits of the slots of the context rank, of this rank's columns of the padded vocabulary."""
    head = weights[EMBEDDING if decoder.maths.model.tied else HEAD]
    return column(x, head, tp=decoder.tp)
