"""A policy and its reference in one job, each on a grid of its own: the reference takes the policy's weights.

After it did, every weight of it has the policy's bits, and what it says are the policy's probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from worlds import GLOO, MEMORY, ranks

from shardweave.errors import PlanError
from shardweave.train.batch import Microbatch
from shardweave.train.following import follow
from shardweave.train.grid import Group, GroupPlan, Groups, plan_groups
from shardweave.train.loss import policy_gradient
from shardweave.train.optimizer import AdamW, Optimizer
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime, build, layout_of
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import Objective, evaluate, forward_backward

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 37, "hidden_size": 16, "intermediate_size": 20,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "tie_word_embeddings": False, "dtype": "float64", "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip
MOE: dict[str, Any] = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 6, "num_hidden_layers": 2,
}  # fmt: skip
PAIRS: dict[str, tuple[dict[str, Any], Parallel, Parallel]] = {
    "the same ranks": (DENSE, Parallel(tp=2, dp=2), Parallel(pp=3, offset=0)),
    "apart, 2:1": (DENSE, Parallel(tp=2, cp=2), Parallel(tp=2, offset=4)),
    "in common in part": (DENSE, Parallel(tp=2, dp=2), Parallel(pp=3, offset=2)),
    "shares of weights to stages": (
        DENSE, Parallel(remat=3, weight_axes=("remat",)), Parallel(tp=2, offset=3),
    ),
    "experts": (MOE, Parallel(ep=4, dp=4), Parallel(tp=2, ep=2, etp=1, offset=3)),
}  # fmt: skip
LENGTHS = (7, 4, 9)


def plan_of(policy: Parallel, reference: Parallel) -> GroupPlan:
    return plan_groups(
        {"policy": policy.mesh, "reference": reference.mesh},
        {"policy": policy.groups, "reference": reference.groups},
        across={"world": ("policy", "reference")},
    )


def batch(parallel: Parallel, **extras: torch.Tensor) -> Microbatch:
    layout = SequenceLayout(LENGTHS, form="thd", cp=parallel.cp, tp=parallel.tp)
    chance = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 37, (layout.num_tokens,), generator=chance)
    mask = torch.ones(layout.num_tokens, dtype=torch.bool)
    mask[[0, 7, 11]] = False
    return Microbatch(layout, ids, mask, extras=extras)


def probabilities(runtime: Runtime) -> torch.Tensor:
    found = evaluate(runtime, [batch(runtime.parallel)], keep_logprobs=True).logprobs
    assert found is not None
    return found[0]


def play(groups: Groups, *, name: str) -> Any:
    """The reference has other weights; it follows; the policy learns; the reference follows again."""
    config, of_policy, of_reference = PAIRS[name]
    policy = reference = None
    if groups.member("policy"):
        policy = build(config, parallel=of_policy, groups=groups.of("policy"), seed=1)
    if groups.member("reference"):
        reference = build(config, parallel=of_reference, groups=groups.of("reference"), seed=2)
    following = follow(
        layout_of(config, of_policy), layout_of(config, of_reference), group=groups.across("world")
    )
    mine, theirs = (model.weights if model else {} for model in (policy, reference))
    found: dict[str, Any] = {"reference": [], "policy": []}
    moved = 0
    for turn in range(2):
        report = following.refresh(mine, theirs)
        moved = report.bytes_received + report.bytes_local
        if reference is not None:
            found["reference"].append(probabilities(reference))
        if policy is not None:
            found["policy"].append(probabilities(policy))
        if policy is not None and turn == 0:
            old = found["policy"][0].detach()
            told = {
                "old_logprobs": old,
                "ref_logprobs": old - 0.1,
                "advantages": torch.linspace(-1, 1, len(old)),
            }
            own = [batch(of_policy, **{key: value.double() for key, value in told.items()})]
            forward_backward(policy, own, Objective(loss=policy_gradient(kl=0.1)))
            optimizer = Optimizer(
                mine,
                plan=reduce_plan(policy.layout, policy.rank),
                groups=policy.groups,
                settings=AdamW(lr=1e-2),
            )
            assert optimizer.step({key: weight.grad for key, weight in mine.items()}).ok
    return {key: [one.detach().numpy() for one in few] for key, few in found.items()}, moved


@pytest.mark.parametrize(("name", "over"), [*((name, MEMORY) for name in PAIRS), ("in common in part", GLOO)])
def test_a_reference_has_the_bits_and_the_probabilities_of_its_policy(name: str, over: str) -> None:
    config, of_policy, of_reference = PAIRS[name]
    found = ranks(play, plan=plan_of(of_policy, of_reference), over=over, name=name)
    policy = next(one for one, _ in found.values() if one["policy"])["policy"]
    assert (policy[0] != policy[1]).any(), "the policy did not learn"
    for rank, (one, moved) in found.items():
        for turn, logprobs in enumerate(one["reference"]):
            # Other degrees take sums in another order.
            np.testing.assert_allclose(logprobs, policy[turn], rtol=0, atol=1e-12)
        if one["reference"]:
            layout = layout_of(config, of_reference)
            real = sum(piece.box.numel for buffer in layout.buffers(rank) for piece in buffer.pieces())
            assert moved == 8 * real, "a weight came twice, or padding was moved"


def test_weights_are_those_of_one_process() -> None:
    """A reference that followed is a model that was begun with the policy's seed, at its own degrees."""
    config, of_policy, of_reference = PAIRS["in common in part"]

    def go(groups: Groups) -> bool:
        policy = reference = None
        if groups.member("policy"):
            policy = build(config, parallel=of_policy, groups=groups.of("policy"), seed=1)
        if groups.member("reference"):
            reference = build(config, parallel=of_reference, groups=groups.of("reference"), seed=None)
            same = build(config, parallel=of_reference, groups=groups.of("reference"), seed=1)
        following = follow(
            layout_of(config, of_policy), layout_of(config, of_reference), group=groups.across("world")
        )
        following.refresh(policy.weights if policy else {}, reference.weights if reference else {})
        if reference is None:
            return True
        real = {}  # padding stays what it was: NaN
        for key, weight in reference.weights.items():
            there = ~weight.isnan()
            real[key] = torch.equal(weight[there], same.weights[key][there])
        return all(real.values()) and sum(int((~w.isnan()).sum()) for w in reference.weights.values()) > 0

    assert all(ranks(go, plan=plan_of(of_policy, of_reference)).values())


def test_wrong_arrays_are_refused_on_every_rank() -> None:
    config, of_policy, of_reference = PAIRS["apart, 2:1"]

    def go(groups: Groups) -> str:
        mine: dict[str, torch.Tensor] = {}
        theirs: dict[str, torch.Tensor] = {}
        if groups.member("policy"):
            mine = build(config, parallel=of_policy, groups=groups.of("policy"), seed=1).weights
        if groups.member("reference"):
            theirs = build(config, parallel=of_reference, groups=groups.of("reference"), seed=2).weights
            if groups.rank == 5:
                theirs["model.norm.weight"] = theirs["model.norm.weight"].float()
        following = follow(
            layout_of(config, of_policy), layout_of(config, of_reference), group=groups.across("world")
        )
        with pytest.raises(PlanError) as error:
            following.refresh(mine, theirs)
        return str(error.value)

    said = ranks(go, plan=plan_of(of_policy, of_reference))
    assert "model.norm.weight" in said[5] and all("1 other ranks" in said[rank] for rank in range(5))
    with pytest.raises(PlanError, match="missing"):
        follow(
            layout_of(config, of_policy),
            layout_of({**config, "num_hidden_layers": 4}, replace(of_reference, offset=0)),
            group=_world(6),
        )


def _world(size: int) -> Any:
    return Group("world", tuple(range(size)), 0)
