"""Logits and gradients of the runtime on one rank, and of the plain decoder, against those of transformers.

transformers computes norms, the softmax of attention and of the router, and the angles of positions in fp32
in models of any dtype. With `torch.float32` as another name of `torch.float64` its own code computes all of
it in fp64 (`exact`), and is then equal to 1e-12. As it is, it is equal as far as fp32 goes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import plain_decoder
import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from shardweave.train.batch import microbatch
from shardweave.train.decoder import embedded, final, logits_of, through, view
from shardweave.train.grid import connect
from shardweave.train.parallel import Parallel
from shardweave.train.runtime import Runtime, build, group_plan
from shardweave.train.step import forward_backward

pytestmark = pytest.mark.peer("transformers")

Config = Mapping[str, Any]

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
}
BASES: dict[str, Config] = {
    "llama": {**SIZES, "model_type": "llama"},
    "qwen3": {**SIZES, "model_type": "qwen3"},
    "qwen3_moe": {
        **SIZES,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 11,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
}
TIED = {"tie_word_embeddings": True}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    }
}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 200,
    }
}
OLD = {"rope_parameters": None, "rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
TYPES = ["full_attention", "sliding_attention", "full_attention"]

# What a case changes that no tensor shows, so that the same weights go with and without it.
MATHS: dict[str, tuple[str, Config]] = {
    "llama, linear": ("llama", LINEAR),
    "llama, llama3": ("llama", LLAMA3),
    "llama, yarn": ("llama", YARN),
    "llama, keys of old": ("llama", OLD),
    "llama, another eps": ("llama", {"rms_norm_eps": 0.1}),
    "qwen3, yarn": ("qwen3", YARN),
    "qwen3, window of some layers": ("qwen3", {**WINDOW, "max_window_layers": 1}),
    "qwen3, window by type": ("qwen3", {**WINDOW, "layer_types": TYPES}),
    "qwen3, window of one": ("qwen3", {**WINDOW, "sliding_window": 1, "max_window_layers": 0}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, one expert": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "qwen3_moe, all experts": ("qwen3_moe", {"num_experts_per_tok": 7}),
    "qwen3_moe, window": ("qwen3_moe", WINDOW),
    "qwen3_moe, llama3": ("qwen3_moe", LLAMA3),
}
CASES: dict[str, tuple[str, Config]] = {
    **{name: (name, {}) for name in BASES},
    "llama, tied": ("llama", TIED),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, a head dim from others": ("llama", {"head_dim": None}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many KV heads": ("llama", {"num_key_value_heads": None}),
    "qwen3, tied": ("qwen3", TIED),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe, tied": ("qwen3_moe", TIED),
    "qwen3_moe, biases": ("qwen3_moe", {"attention_bias": True}),
    "qwen3_moe, every other sparse": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen3_moe, some dense": ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    "qwen3_moe, none sparse": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    **MATHS,
}
PLAIN = [
    *BASES,
    "llama, tied",
    "llama, one KV head",
    "llama, another eps",
    "qwen3, tied",
    "qwen3_moe, tied",
    "qwen3_moe, every other sparse",
    "qwen3_moe, some dense",
    "qwen3_moe, weights as they are",
    "qwen3_moe, all experts",
]
"""What the plain decoder computes: no biases, no windows, no other angles."""

# Relative, of logits to the largest and of a gradient to its norm. In fp32 rounding is 6e-8, and the longest
# sums have some dozens of terms.
EXACT, AS_IT_IS, SHORT = 1e-12, 3e-6, 1e-5
LENGTHS = (7, 12, 1, 4)


def config_of(name: str) -> dict[str, Any]:
    base, changes = CASES[name]
    return {**BASES[base], **changes}


# --- transformers -------------------------------------------------------------------------------


@contextmanager
def exact() -> Iterator[None]:
    """What is said to be computed in fp32 is computed in fp64."""
    with patch.object(torch, "float32", torch.float64), patch.object(torch, "float", torch.float64):
        yield


def theirs(config: Config, dtype: torch.dtype) -> Any:
    """A model of transformers with weights so large that each matters; the same in every dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # It writes into what it is given.
    values = {key: copy.deepcopy(value) for key, value in config.items() if value is not None}
    del values["model_type"]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **values),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    chance = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=chance, dtype=torch.float64)
            is_norm = name.endswith("norm.weight")
            # Bits that both dtypes have.
            weight.copy_((drawn * 0.25 + is_norm).to(torch.bfloat16))
    return model.to(dtype)


def documents(vocab_size: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(9)
    return [torch.randint(0, vocab_size, (length,), generator=chance) for length in LENGTHS]


def stacked(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arrays by the runtime's names: it has gate and up of experts apart."""
    found = {}
    for name, value in arrays.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, 1)
            base = name.removesuffix("gate_up_proj")
            found |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = value
        else:
            found[name] = value
    return found


def apart(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arrays by the names of files, each expert alone."""
    found = {}
    for name, value in arrays.items():
        before, experts, after = name.partition(".experts.")
        if experts:
            found |= {f"{before}.experts.{i}.{after}": each for i, each in enumerate(value)}
        else:
            found[name] = value
    return found


def asked(model: Any, docs: list[Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, the mean loss and gradients, document by document, by the runtime's names."""
    logits = [model(ids[None]).logits[0] for ids in docs]
    losses = [
        torch.nn.functional.cross_entropy(each[:-1], ids[1:], reduction="sum")
        for each, ids in zip(logits, docs, strict=True)
        if len(ids) > 1
    ]
    loss = torch.stack(losses).sum() / sum(len(ids) - 1 for ids in docs)
    loss.backward()
    grads = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    return torch.cat(logits).detach(), loss.detach(), stacked(grads)


# --- ours ---------------------------------------------------------------------------------------


def ours(config: Config, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Runtime:
    """The runtime on one rank, with given weights."""
    parallel = Parallel()
    groups = connect(group_plan(parallel), rank=0, store=HashStore())
    runtime = build(
        config, parallel=parallel, groups=groups, dtype=str(dtype).removeprefix("torch."), seed=None
    )
    assert set(runtime.weights) == set(weights)
    with torch.no_grad():
        for name, weight in runtime.weights.items():
            weight.copy_(weights[name])
    return runtime


def logits(runtime: Runtime, docs: list[Tensor]) -> Tensor:
    decoder = runtime.decoder
    with torch.no_grad():
        seen = view(decoder, microbatch(docs), dtype=runtime.dtype)
        x = embedded(decoder, runtime.weights, seen)
        x, _ = through(decoder, runtime.weights, x, range(decoder.maths.num_layers), seen)
        return logits_of(decoder, runtime.weights, final(decoder, runtime.weights, x))


def gap(got: Tensor, wanted: Tensor) -> float:
    """The distance over the size."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    size, distance = wanted.double().norm().item(), (got.double() - wanted.double()).norm().item()
    return distance / size if size else distance


def worst(got: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The parameter whose gradient is farthest off."""
    assert set(got) == set(wanted)
    found = []
    for name, true in wanted.items():
        mine = got[name]
        assert mine is not None, name
        found.append((gap(mine, true), name))
    return max(found)


# --- they are the same --------------------------------------------------------------------------

PRECISIONS = {
    "fp64, exact": (torch.float64, exact, EXACT),
    "fp64, as it is": (torch.float64, nullcontext, AS_IT_IS),
    "fp32": (torch.float32, nullcontext, SHORT),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_runtime_is_transformers(name: str, precision: str) -> None:
    dtype, context, bound = PRECISIONS[precision]
    config = config_of(name)
    docs = documents(config["vocab_size"])
    with context():
        model = theirs(config, dtype)
        true_logits, true_loss, true_grads = asked(model, docs)
    runtime = ours(config, stacked(dict(model.named_parameters())), dtype)
    assert gap(logits(runtime, docs), true_logits) <= bound
    # Two microbatches, the second of documents of one token and of some.
    stepped = forward_backward(runtime, [microbatch(docs[:2]), microbatch(docs[2:])])
    assert stepped.report.loss == pytest.approx(true_loss.item(), rel=bound)
    error, where = worst({name: weight.grad for name, weight in runtime.weights.items()}, true_grads)
    print(f"{name}, {precision}: {error:.1e} {where}")
    assert error <= bound, where


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_decoder_is_both(name: str) -> None:
    """The reference of all layouts, against transformers and against the runtime on one rank."""
    config = config_of(name)
    docs = documents(config["vocab_size"])
    with exact():
        model = theirs(config, torch.float64)
        _, true_loss, true_grads = asked(model, docs)
    weights = apart(stacked({name: weight.detach() for name, weight in model.named_parameters()}))
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    masks = [torch.ones(len(ids), dtype=torch.bool) for ids in docs]
    loss, logprobs = plain_decoder.objective(docs, masks, weights, config)
    loss.backward()
    assert gap(loss.detach(), true_loss) <= EXACT
    grads = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in weights.items()
    }
    error, where = worst(grads, apart(true_grads))
    assert error <= EXACT, where

    runtime = ours(config, stacked(dict(model.named_parameters())), torch.float64)
    targets = torch.cat([ids[1:] for ids in docs])
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    rows = [i for i in range(sum(LENGTHS)) if i not in ends.tolist()]
    scored = logits(runtime, docs)[rows].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert gap(scored, torch.cat([each[1:] for each in logprobs]).detach()) <= EXACT


@pytest.mark.parametrize("name", MATHS)
def test_what_a_case_changes_matters(name: str) -> None:
    """The same weights without the change come to other logits, in the runtime and in transformers."""
    base, _ = CASES[name]
    docs = documents(BASES[base]["vocab_size"])
    model = theirs(BASES[base], torch.float64)
    weights = stacked(dict(model.named_parameters()))
    with_it, without = (
        logits(ours(config, weights, torch.float64), docs) for config in (config_of(name), BASES[base])
    )
    assert gap(with_it, without) > 1e-3
    with torch.no_grad():
        changed = theirs(config_of(name), torch.float64)
        other = torch.cat([changed(ids[None]).logits[0] for ids in docs])
    assert gap(other, without) > 1e-3


def test_a_token_of_padding_is_a_token() -> None:
    """Where transformers takes no gradient of the embedding of `pad_token_id`, it is a token like others."""
    config = {**BASES["llama"], "pad_token_id": 5}
    docs = [torch.tensor([5, 1, 5, 8, 30, 2])]
    with exact():
        model = theirs(config, torch.float64)
        _, _, wanted = asked(model, docs)
        _, _, usual = asked(theirs(BASES["llama"], torch.float64), docs)
    runtime = ours(config, stacked(dict(model.named_parameters())), torch.float64)
    forward_backward(runtime, [microbatch(docs)])
    grad = runtime.weights["model.embed_tokens.weight"].grad
    assert grad is not None and not wanted["model.embed_tokens.weight"][5].any() and grad[5].any()
    error, where = worst({name: weight.grad for name, weight in runtime.weights.items()}, usual)
    assert error <= EXACT, where
