"""A decoder in one process, written row by row and document by document: the reference of the runtime.

It knows nothing of the runtime: no layouts, no groups, whole weights by their Hugging Face names, one
document at a time, every sum of the objective spelled out. `tests/oracle/test_train_transformers.py` compares
it with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x / (x.square().mean(-1, keepdim=True) + eps).sqrt())


def turned(x: Tensor, theta: float) -> Tensor:
    """(tokens, heads, dim), token t at position t."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x), dtype=x.dtype)[:, None] * theta ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attended(x: Tensor, w: Mapping[str, Tensor], here: str, config: Mapping[str, Any]) -> Tensor:
    dim, heads, kv_heads = (config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    eps, theta = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    q, k, v = ((x @ w[f"{here}{n}_proj.weight"].T).reshape(len(x), -1, dim) for n in "qkv")
    if f"{here}q_norm.weight" in w:
        q, k = norm(q, w[f"{here}q_norm.weight"], eps), norm(k, w[f"{here}k_norm.weight"], eps)
    q, k = turned(q, theta), turned(k, theta)
    out = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, kv].T / dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).tril() == 0, -torch.inf)
        out.append(scores.softmax(-1) @ v[:, kv])
    return torch.cat(out, -1) @ w[f"{here}o_proj.weight"].T


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(
    x: Tensor, w: Mapping[str, Tensor], here: str, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and of this document: tokens times the balance loss, and the sum of the z-loss."""
    num, top_k = config["num_local_experts"], config["num_experts_per_tok"]
    logits = x @ w[f"{here}gate.weight"].T
    probs = logits.softmax(-1)
    weights, chosen = probs.topk(top_k, -1)
    if config["norm_topk_prob"]:
        weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for t in range(len(x)):
        each = [
            weights[t, i]
            * mlp(
                x[t],
                *(w[f"{here}experts.{int(chosen[t, i])}.{n}_proj.weight"] for n in ("gate", "up", "down")),
            )
            for i in range(top_k)
        ]
        rows.append(sum(each[1:], each[0]))
    share = torch.bincount(chosen.flatten(), minlength=num).to(probs.dtype) / max(chosen.numel(), 1)
    balance = num * (share * probs.sum(0)).sum()
    return torch.stack(rows) if rows else x * 0, balance, logits.logsumexp(-1).square().sum()


def layer(
    x: Tensor, w: Mapping[str, Tensor], number: int, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden state after a layer, and its sums of balance and z-loss; 0 of a dense one."""
    here, eps = f"model.layers.{number}.", config["rms_norm_eps"]
    balance, z = x.new_zeros(()), x.new_zeros(())
    x = x + attended(norm(x, w[f"{here}input_layernorm.weight"], eps), w, f"{here}self_attn.", config)
    h = norm(x, w[f"{here}post_attention_layernorm.weight"], eps)
    if f"{here}mlp.gate.weight" in w:
        y, balance, z = experts(h, w, f"{here}mlp.", config)
    else:
        y = mlp(h, *(w[f"{here}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
    return x + y, balance, z


def hidden(ids: Tensor, w: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """What the output head reads of one document, and the sums of balance and z-loss."""
    x = w["model.embed_tokens.weight"][ids]
    balance, z = x.new_zeros(()), x.new_zeros(())
    for number in range(config["num_hidden_layers"]):
        x, more, more_z = layer(x, w, number, config)
        balance, z = balance + more, z + more_z
    return norm(x, w["model.norm.weight"], config["rms_norm_eps"]), balance, z


def scored(h: Tensor, targets: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """The log-probability of a target for each row that the output head reads."""
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return (h @ head.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def further(
    ids: Tensor, h: Tensor, w: Mapping[str, Tensor], config: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each head for a further token: log-probabilities, and its sums of balance and z-loss.

    Head k has a row for each token t whose document has a token t + k + 1, which is what it predicts from
    the embedding of token t + k and from what head k - 1 had for t; there are no other rows.
    """
    found, last, eps = [], config["num_hidden_layers"], config["rms_norm_eps"]
    embedding = w["model.embed_tokens.weight"]
    for k in range(1, heads_of(w) + 1):
        here, rows = f"model.layers.{last + k - 1}.", max(len(ids) - k - 1, 0)
        if not rows:
            found.append((h.new_zeros(0), h.new_zeros(()), h.new_zeros(())))
            continue
        x = torch.stack(
            [
                w[f"{here}eh_proj.weight"]
                @ torch.cat(
                    (
                        norm(embedding[ids[t + k]], w[f"{here}enorm.weight"], eps),
                        norm(h[t], w[f"{here}hnorm.weight"], eps),
                    )
                )
                for t in range(rows)
            ]
        )
        x, balance, z = layer(x, w, last + k - 1, config)
        h = norm(x, w[f"{here}shared_head.norm.weight"], eps)
        found.append((scored(h, ids[k + 1 :], w), balance, z))
    return found


def heads_of(w: Mapping[str, Tensor]) -> int:
    """The number of heads for further tokens that there are weights of."""
    return sum(name.endswith("eh_proj.weight") for name in w)


def forward(ids: Tensor, w: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each token but the first, and the sums of balance and z-loss of one document."""
    h, balance, z = hidden(ids, w, config)
    return scored(h[:-1], ids[1:], w), balance, z


def objective(
    documents: Sequence[Tensor],
    masks: Sequence[Tensor],
    w: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    balance_weight: float = 0.0,
    z_weight: float = 0.0,
    mtp_weight: float = 0.0,
    means: list[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The loss of a whole step and the log-probabilities of each document.

    With ``mtp_weight`` the heads for further tokens share it; ``means`` is given the loss of each.
    """
    total, balance, z, logprobs = (w["model.norm.weight"].new_zeros(()) for _ in range(4))
    depth = heads_of(w) if mtp_weight else 0
    ahead, counts = [total] * depth, [0] * depth
    sparse = [f"model.layers.{n}.mlp.gate.weight" in w for n in range(config["num_hidden_layers"] + depth)]
    of_layers, of_heads = sparse[: config["num_hidden_layers"]], sparse[config["num_hidden_layers"] :]
    found, routed = [], 0
    for ids, mask in zip(documents, masks, strict=True):
        if not len(ids):
            found.append(logprobs.new_zeros(0))
            continue
        h, more, more_z = hidden(ids, w, config)
        each = scored(h[:-1], ids[1:], w)
        found.append(torch.cat((each.new_zeros(1), each)))
        total = total - (each * mask[1:]).sum()
        balance, z = balance + more, z + more_z
        routed += len(ids) * sum(of_layers)
        for k, (each, more, more_z) in enumerate(further(ids, h, w, config) if depth else (), 1):
            ahead[k - 1] = ahead[k - 1] - (each * mask[k + 1 :]).sum()
            counts[k - 1] += int(mask[k + 1 :].sum())
            balance, z = balance + more, z + more_z
            routed += len(each) * of_heads[k - 1]
    loss = total / max(sum(int(mask[1:].sum()) for mask in masks), 1)
    if routed:
        loss = loss + balance_weight * balance / routed + z_weight * z / routed
    for summed, count in zip(ahead, counts, strict=True):
        loss = loss + mtp_weight / depth * summed / max(count, 1)
        if means is not None:
            means.append(summed / max(count, 1))
    return loss, found
