"""Layouts whose weights lie in shares, worlds in memory of them, and a model whose gradients are integers:
what `test_train_shares*.py` are made of.

Degrees in short: T tensor, G remat (weight shards), C context, D data. "folded" is ``weight_axes`` of remat
and cp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
import train_matrix
from torch import Tensor
from train_cells import Cell
from train_ranks import built, fill, full_weights, parallel_of

from shardweave.testing.world import run_world
from shardweave.train.gathered import Gathered
from shardweave.train.grid import Groups
from shardweave.train.linear import column, columns, embed, row, vocabulary
from shardweave.train.recompute import again
from shardweave.train.runtime import Runtime, group_plan

FOLDED, PLAIN = ("remat", "cp"), ("remat",)
BOUND = train_matrix.BOUNDS["float64"]
T = TypeVar("T")


def cell(**given: Any) -> Cell:
    """One rank, if nothing else is given."""
    one = {"tp": 1, "cp": 1, "dp": 1, "pp": 1, "ep": 1, "etp": 1, "vp": 1}
    kind = {"form": "thd", "sharded": True, "mask": "prompt", "lengths": "ragged", "method": "ring"}
    return Cell(**{**one, **kind, "layers": 3, **given})


LAYOUTS: dict[str, Cell] = {
    "one": cell(),
    "G2": cell(remat=2, mask="empty_rank"),
    "C2 folded": cell(cp=2, weight_axes=FOLDED, recompute=True),
    "G2 C2 folded": cell(remat=2, cp=2, weight_axes=FOLDED, mask="empty_rank", method="gather"),
    "G2 C2": cell(remat=2, cp=2, mask="empty_rank", sharded=False),
    "C2 D2 folded": cell(cp=2, dp=2, weight_axes=FOLDED, mask="empty_rank"),
    "T2 G2": cell(tp=2, remat=2, etp=2, form="bshd", mask="empty_rank"),
    "T2 C2 folded": cell(tp=2, cp=2, weight_axes=FOLDED, sharded=False),
    "T2 G2 C2 folded": cell(tp=2, remat=2, cp=2, ep=2, weight_axes=FOLDED, mask="empty_rank"),
    "T2 G2 C2": cell(tp=2, remat=2, cp=2, etp=2, mask="empty_rank", recompute=True),
    "G2 C2 D2 folded": cell(remat=2, cp=2, dp=2, weight_axes=FOLDED, mask="empty_rank"),
    "G2 C2 D2": cell(remat=2, cp=2, dp=2, mask="empty_rank", form="bshd"),
    "C4 D2 folded": cell(cp=4, dp=2, weight_axes=FOLDED, mask="empty_rank", method="all_to_all"),
    # Experts: other degrees than dense weights in every direction.
    "G2 EG1 EP4": cell(remat=2, dp=2, ep=4, mask="empty_rank"),
    "G2 EG2 EP2": cell(remat=2, dp=2, ep=2, eremat=2, mask="empty_rank", sharded=False),
    "G1 EG2 EP2 C2 folded": cell(cp=2, dp=2, ep=2, eremat=2, weight_axes=FOLDED, mask="empty_rank"),
    "G4 EG1 EP8": cell(remat=4, dp=2, ep=8, mask="empty_rank"),
    # No two degrees alike.
    "C3 D2 folded": cell(cp=3, dp=2, weight_axes=FOLDED, mask="empty_rank"),
    "C3 D2 over dp": cell(cp=3, dp=2, weight_axes=("dp",), ep=2, mask="empty_rank", recompute=True),
    "C3 D2 over all": cell(cp=3, dp=2, weight_axes=("remat", "cp", "dp"), mask="empty_rank"),
    "G2 C3 D2 folded": cell(remat=2, cp=3, dp=2, weight_axes=FOLDED, ep=2, eremat=3, mask="empty_rank"),
    "G2 C3 D2": cell(remat=2, cp=3, dp=2, ep=2, eremat=2, mask="empty_rank", recompute=True),
    # Stages of two stretches each.
    "G2 D2 P2 over remat and dp": cell(
        remat=2, dp=2, pp=2, vp=2, ep=2, weight_axes=("remat", "dp"), layers=4, mask="empty_rank"
    ),
}
LARGE = cell(tp=2, remat=2, cp=3, dp=2, weight_axes=FOLDED, ep=4, eremat=3, mask="empty_rank")
"""24 ranks."""
PAIRS = {
    "C2 folded": "C2",
    "G2 C2 folded": "G2 C2",
    "T2 G2 C2 folded": "T2 G2 C2",
    "G2 C2 D2 folded": "G2 C2 D2",
    "G2 C3 D2 folded": "G2 C3 D2",
}
"""Folded, and the same degrees unfolded."""


def in_world(of: Cell, work: Callable[[Groups], T], *, strict: bool = False) -> list[T]:
    """What a function returns on each rank of a layout, in memory."""
    return run_world(work, plan=group_plan(parallel_of(of)), timeout_s=100, strict=strict)


# --- the real model -----------------------------------------------------------------------------


def errors(of: Cell, dtype: str = "float64", *, strict: bool = False) -> train_matrix.Errors:
    """How far a layout in memory is from one process."""
    true = train_matrix.truth(of)  # before a world: torch imports more when an optimizer is made
    return train_matrix.compare(of, dtype, train_matrix.in_memory(of, dtype, strict=strict), true)


# --- a model of integers ------------------------------------------------------------------------

LINEAR: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "float64",
}
"""Degrees up to 3 cut its 28 rows unevenly, and the 37 of its vocabulary."""

IN_ORDER = (0, 1, 2)


@dataclass(frozen=True)
class Way:
    """What is computed in a step.

    Attributes:
        layers: The order in which layers are gone through; one may come again, or not at all.
        microbatches: How many.
        recompute: Whether layers are computed once more on the way back.
        silent: Data ranks whose loss depends on no weight.
    """

    layers: tuple[int, ...] = IN_ORDER
    microbatches: int = 1
    recompute: bool = False
    silent: tuple[int, ...] = ()


@cache
def integers(tied: bool = True) -> Mapping[str, Tensor]:
    """Whole weights of -1, 0 and 1; norms of 1 and 2."""
    found = {}
    for name, like in full_weights({**LINEAR, "tie_word_embeddings": tied}, torch.float64).items():
        found[name] = like.gt(1).double() + 1 if like.dim() == 1 else (like * 1.6).round().clamp(-1, 1)
    return found


def data_of(data: int, cp: int, number: int) -> tuple[Tensor, Tensor]:
    """Token ids and integer weights of their logits, of a rank of data and context and a microbatch."""
    chance = torch.Generator().manual_seed(100 * number + 10 * data + cp)
    ids = torch.randint(0, LINEAR["vocab_size"] - 5, (6,), generator=chance)
    weight = torch.randint(-1, 2, (6, LINEAR["vocab_size"]), generator=chance).double()
    return ids, weight


def plain(way: Way, num_data: int, cp: int, tied: bool = True) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients in one process."""
    w = {name: value.clone().requires_grad_() for name, value in integers(tied).items()}
    loss = torch.zeros((), dtype=torch.float64)
    for number in range(way.microbatches):
        for data in set(range(num_data)) - set(way.silent):
            for c in range(cp):
                ids, weight = data_of(data, c, number)
                x = w["model.embed_tokens.weight"][ids]
                for layer in way.layers:
                    here = f"model.layers.{layer}."
                    x = x * w[f"{here}input_layernorm.weight"]
                    q = x @ w[f"{here}self_attn.q_proj.weight"].T
                    x = x + q @ w[f"{here}self_attn.o_proj.weight"].T
                    gate, up = (x @ w[f"{here}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
                    x = x + (gate - up) @ w[f"{here}mlp.down_proj.weight"].T
                head = w["model.embed_tokens.weight" if tied else "lm_head.weight"]
                loss = loss + ((x * w["model.norm.weight"]) @ head.T * weight).sum()
    if loss.requires_grad:
        loss.backward()
    zero = {name: torch.zeros_like(value) for name, value in w.items()}
    return loss.item(), {n: zero[n] if value.grad is None else value.grad for n, value in w.items()}


def linear_runtime(of: Cell, groups: Groups, *, tied: bool = True, **more: Any) -> Runtime:
    """The model of integers on a rank, filled."""
    runtime = built(
        replace(of, ep=1, eremat=1, etp=1), groups, {**LINEAR, "tie_word_embeddings": tied}, **more
    )
    fill(runtime, integers(tied))
    return runtime


def walk(runtime: Runtime, way: Way, weights: Gathered | None = None) -> float:
    """A step of the model of integers: this rank's part of the loss; gradients are added to the weights."""
    weights = runtime.reading if weights is None else weights
    total = 0.0
    for number in range(way.microbatches):
        loss = forward(runtime, way, weights, number)
        total += loss.item()
        loss.backward()
    weights.finish()
    return total


def forward(runtime: Runtime, way: Way, weights: Gathered, number: int = 0) -> Tensor:
    """One microbatch, as ``step.py`` has it."""
    at = runtime.parallel.mesh.coordinate(runtime.rank)
    data, tp = runtime.parallel.data_rank(runtime.rank), runtime.decoder.tp
    ids, weight = data_of(data, at["cp"], number)
    vocab, tied = runtime.decoder.maths.vocab_size, runtime.decoder.maths.model.tied

    with weights.saving():
        x = embed(ids, weights["model.embed_tokens.weight"], tp=tp, vocab_size=vocab)
        for layer in way.layers:

            def one(h: Tensor, here: str = f"model.layers.{layer}.") -> tuple[Tensor, None]:
                h = h * weights[f"{here}input_layernorm.weight"]
                q = column(h, weights[f"{here}self_attn.q_proj.weight"], tp=tp)
                h = h + row(q, weights[f"{here}self_attn.o_proj.weight"], tp=tp)
                pair = [weights[f"{here}mlp.{n}_proj.weight"] for n in ("gate", "up")]
                gate, up = columns(h, pair, tp=tp)
                return h + row(gate - up, weights[f"{here}mlp.down_proj.weight"], tp=tp), None

            x, _ = again(one, x, weights) if way.recompute else one(x)
        head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        logits = column(x * weights["model.norm.weight"], head, tp=tp)
        mine, _ = vocabulary(vocab, tp=tp)
        loss = (logits[:, : len(mine)] * weight[:, mine.start : mine.stop]).sum()
        if data in way.silent:  # as ``loss.term`` has a loss that is a constant
            loss = logits.reshape(-1)[:0].sum()
        return weights.joined(loss)


def same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same bits."""
    assert set(got) == set(wanted)
    wrong = [name for name, value in wanted.items() if not torch.equal(got[name], value)]
    assert not wrong, wrong
