"""A vision encoder on many layouts against one process: features, and gradients of every weight.

Ranks are in memory. The reference below knows images, and nothing of slots, padding or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from vision_cells import CONFIG, TEXT, TOWER

from shardweave.errors import GeometryError, ModelError, PlanError
from shardweave.layout import prove
from shardweave.testing.world import run_world
from shardweave.train.arrays import held_arrays
from shardweave.train.gradients import check_replicas, sum_gradients
from shardweave.train.grid import Groups
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import group_plan
from shardweave.train.sequence import SequenceLayout
from shardweave.train.vision import (
    Vision,
    build_vision,
    encode,
    image_layout,
    language_config,
    num_patches,
    vision_layout_of,
    vision_maths,
)

SEED, EXACT = 3, 1e-12


@dataclass(frozen=True)
class Case:
    """An encoder on a grid, and how many images each data rank has."""

    parallel: Parallel
    images: tuple[int, ...]
    method: str = "gather"
    order: str = "contiguous"
    recompute: bool = False
    layer: int = -1

    @property
    def config(self) -> dict[str, Any]:
        return {**CONFIG, "vision_feature_layer": self.layer}

    def __str__(self) -> str:
        of = self.parallel
        axes = [f"{name}{getattr(of, name)}" for name in ("tp", "cp", "remat", "dp")]
        shared = [f"over {'+'.join(of.weight_axes)}"] * (of.num_shares > 1)
        rest = [self.method, self.order, f"layer {self.layer}", *["again"] * self.recompute]
        return " ".join([*axes, *shared, f"images {self.images}", *rest])


# --- the reference ------------------------------------------------------------------------------


def weights_of(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights so large that each matters, biases and norms too."""
    chance = torch.Generator().manual_seed(SEED)
    found = {}
    for tensor in vision_maths(config).model.tensors:
        for name in tensor.names():
            drawn = torch.randn(tensor.shape, generator=chance, dtype=torch.float64) * 0.3
            is_norm = "norm" in name and name.endswith("weight")
            found[name] = drawn + is_norm
    return found


def pixels_of(count: int) -> Tensor:
    chance = torch.Generator().manual_seed(SEED + 1)
    return torch.randn(count, 3, 22, 22, generator=chance, dtype=torch.float64)


def asked_of(count: int) -> Tensor:
    """What the features of all images are multiplied by and summed."""
    return torch.randn(count, 25, 20, generator=torch.Generator().manual_seed(SEED + 2), dtype=torch.float64)


def plain(config: Mapping[str, Any], weights: Mapping[str, Tensor], pixels: Tensor) -> Tensor:
    """Features ``(images, patches, width)``, by the definition."""
    tower = config["vision_config"]
    hidden, heads, eps = tower["hidden_size"], tower["num_attention_heads"], tower["layer_norm_eps"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        wide = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()
        return wide * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    at = "vision_tower.embeddings."
    matrix, bias = (weights[f"{at}patch_embedding.{name}"] for name in ("weight", "bias"))
    x = F.conv2d(pixels, matrix, bias, stride=tower["patch_size"]).flatten(2).transpose(1, 2)
    x = x + weights[f"{at}position_embedding.weight"]
    taken = config["vision_feature_layer"] % (tower["num_hidden_layers"] + 1)
    for layer in range(taken):
        at = f"vision_tower.encoder.layers.{layer}."
        h = norm(x, f"{at}layer_norm1")
        q, k, v = (
            linear(h, f"{at}self_attn.{name}_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in "qkv"
        )
        seen = (q @ k.transpose(-1, -2) / math.sqrt(hidden // heads)).softmax(-1) @ v
        x = x + linear(seen.transpose(1, 2).flatten(-2), f"{at}self_attn.out_proj")
        h = linear(norm(x, f"{at}layer_norm2"), f"{at}mlp.fc1")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{at}mlp.fc2")
    h = linear(x, "multi_modal_projector.linear_1")
    h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
    return linear(h, "multi_modal_projector.linear_2")


@lru_cache
def truth(layer: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    config = {**CONFIG, "vision_feature_layer": layer}
    weights = {name: weight.requires_grad_() for name, weight in weights_of(config).items()}
    if not count:
        return torch.zeros(0, 25, 20, dtype=torch.float64), {
            name: torch.zeros_like(weight) for name, weight in weights.items()
        }
    features = plain(config, weights, pixels_of(count))
    (features * asked_of(count)).sum().backward()
    return features.detach(), {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in weights.items()
    }


# --- the ranks ----------------------------------------------------------------------------------


def filled(vision: Vision, weights: Mapping[str, Tensor]) -> Vision:
    with torch.no_grad():
        for name, held in held_arrays(vision.layout, vision.rank).items():
            vision.weights[name].zero_()
            for part in held.parts:
                at = tuple(slice(r.start, r.stop, r.step) for r in part.box.dims)
                part.view(vision.weights[name]).copy_(weights[part.name][at])
    return vision


Part = tuple[str, tuple[slice, ...], Tensor]


def parts_of(vision: Vision, arrays: Mapping[str, Tensor]) -> list[Part]:
    """Arrays as parts of whole tensors."""
    return [
        (
            part.name,
            tuple(slice(r.start, r.stop, r.step) for r in part.box.dims),
            part.view(arrays[name].detach()),
        )
        for name, held in held_arrays(vision.layout, vision.rank).items()
        for part in held.parts
    ]


def joined(config: Mapping[str, Any], ranks: Sequence[Sequence[Part]]) -> dict[str, Tensor]:
    """Whole tensors from what ranks hold. Holders have the same bits, and nothing is missing."""
    found = {name: torch.full_like(weight, math.nan) for name, weight in weights_of(config).items()}
    for parts in ranks:
        for name, at, values in parts:
            into = found[name][at]
            assert (into.isnan() | (into == values)).all(), f"holders of {name} differ"
            into.copy_(values)
    assert not any(value.isnan().any() for value in found.values())
    return found


def played(groups: Groups, case: Case) -> tuple[Tensor, list[Part]] | None:
    """The features of this rank's tokens in the place of those of all images, and its gradients."""
    if groups.rank not in case.parallel.mesh.ranks:
        return None
    vision = build_vision(
        case.config,
        parallel=case.parallel,
        groups=groups,
        seed=None,
        cp_method=case.method,
        recompute=case.recompute,
    )
    filled(vision, weights_of(case.config))
    data = case.parallel.data_rank(groups.rank)
    first, count, total = sum(case.images[:data]), case.images[data], sum(case.images)
    layout = replace(image_layout(vision.maths, count, case.parallel), order=case.order)
    features = encode(vision, pixels_of(total)[first : first + count], layout)
    assert features.shape == (*layout.local_shape(split_tp=True), 20) and features.requires_grad

    at = case.parallel.mesh.coordinate(groups.rank)
    number = layout.place(np.arange(count * 25), fill=-1)
    mine = torch.from_numpy(layout.local(number, at["cp"], at["tp"]))
    real = mine >= 0
    assert not features[~real].any(), "padding"
    rows = first * 25 + mine[real]
    # Padding is asked for, too, and nothing comes of it.
    weight = torch.ones_like(features)
    weight[real] = asked_of(total).flatten(0, 1)[rows]
    (features * weight).sum().backward()
    vision.reading.finish()
    plan = reduce_plan(vision.layout, groups.rank)
    grads = sum_gradients({name: array.grad for name, array in vision.weights.items()}, plan, groups).arrays()
    check_replicas(grads, plan, groups)
    own = torch.full((total * 25, 20), math.nan, dtype=torch.float64)
    own[rows] = features[real].detach()
    return own, parts_of(vision, grads)


def errors(case: Case) -> tuple[float, float, str]:
    """Of the features and of the gradient that is farthest off, relative to the largest value of each."""
    ranks = run_world(
        lambda groups: played(groups, case), plan=group_plan(case.parallel), timeout_s=60, strict=True
    )
    told = [each for each in ranks if each is not None]
    wanted, wanted_grads = truth(case.layer, sum(case.images))
    seen = torch.stack([own for own, _ in told])
    assert ((~seen.isnan()).sum(0) == 1).all(), "each patch is on one rank"
    features = seen.nan_to_num().sum(0).view_as(wanted)
    grads = joined(case.config, [parts for _, parts in told])
    worst = [
        ((grads[name] - true).abs().max().item() / max(true.abs().max().item(), 1), name)
        for name, true in wanted_grads.items()
    ]
    size = wanted.abs().max().item() if wanted.numel() else 1
    off = (features - wanted).abs().max().item() / size if wanted.numel() else 0.0
    return off, *max(worst)


CASES = [
    Case(Parallel(), (3,)),
    Case(Parallel(), (2,), layer=-2),
    Case(Parallel(), (0,)),
    Case(Parallel(tp=2), (3,)),
    Case(Parallel(tp=2), (0,)),
    Case(Parallel(dp=4), (2, 0, 3, 1)),
    Case(Parallel(tp=2, dp=2), (3, 0)),
    Case(Parallel(cp=3), (2,)),
    Case(Parallel(cp=3), (2,), "ring"),
    Case(Parallel(cp=3), (2,), "all_to_all"),
    Case(Parallel(cp=3), (2,), order="zigzag"),
    Case(Parallel(tp=2, cp=2), (3,)),
    Case(Parallel(tp=2, cp=2), (1,), "ring", recompute=True),
    Case(Parallel(tp=2, cp=2, dp=2), (0, 2), layer=-2),
    Case(Parallel(cp=2, dp=2, tp=2, offset=3), (1, 2), order="zigzag"),
]
SHARED = [
    Case(Parallel(remat=2), (2, 1)),
    Case(Parallel(remat=3), (0, 3, 0), recompute=True),
    Case(Parallel(tp=2, dp=2, weight_axes=("dp",)), (0, 2), recompute=True),
    Case(Parallel(cp=2, dp=2, weight_axes=("cp", "dp")), (2, 0)),
    Case(Parallel(remat=2, dp=2), (1, 0, 2, 1), layer=-2),
]
"""Weights in shares, of which some have padding."""


@pytest.mark.parametrize("case", CASES + SHARED, ids=str)
def test_a_layout_equals_one_process(case: Case) -> None:
    features, grads, where = errors(case)
    print(f"features {features:.1e}, gradients {grads:.1e} {where}")
    assert features <= EXACT and grads <= EXACT, where


def test_what_is_not_computed_has_no_gradient() -> None:
    """The weights behind the hidden state that features are made of."""
    _, grads = truth(-2, 2)
    unused = {name for name, grad in grads.items() if not grad.any()}
    assert {name.split(".")[1:4:2] == ["encoder", "2"] or "post_layernorm" in name for name in unused} == {
        True
    }
    assert len(unused) == 16 + 2


# --- the begin ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_every_layout_begins_with_the_same_bits(dtype: str) -> None:
    def begun(parallel: Parallel) -> dict[str, Tensor]:
        def work(groups: Groups) -> list[Part]:
            vision = build_vision(CONFIG, parallel=parallel, groups=groups, dtype=dtype, seed=5)
            return [
                (name, at, values.to(torch.float64)) for name, at, values in parts_of(vision, vision.weights)
            ]

        ranks = run_world(work, plan=group_plan(parallel), timeout_s=30)
        return joined(CONFIG, [parts for parts in ranks if parts])

    alone = begun(Parallel())
    for parallel in (Parallel(tp=2, cp=2), Parallel(dp=2, tp=2), Parallel(remat=3, weight_axes=("remat",))):
        assert all((alone[name] == value).all() for name, value in begun(parallel).items()), parallel


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (Parallel(pp=2), "pp(2) > 1"),
        (Parallel(dp=2, ep=2), "ep(2) > 1"),
        (Parallel(tp=2, etp=2), "etp(2) > 1"),
        (Parallel(remat=2, eremat=2), "eremat(2) > 1"),
        (Parallel(tp=4), "num_heads(6) % tp(4) = 2"),
    ],
)
def test_degrees_that_an_encoder_does_not_have(parallel: Parallel, said: str) -> None:
    with pytest.raises(GeometryError) as caught:
        vision_layout_of(CONFIG, parallel)
    assert said in str(caught.value)


def test_a_size_that_does_not_divide_is_refused_by_name() -> None:
    config = {**CONFIG, "vision_config": {**TOWER, "intermediate_size": 29}}
    with pytest.raises(GeometryError, match=r"mlp\.fc1.*size\(29\) % tp\(2\) = 1"):
        vision_layout_of(config, Parallel(tp=2))


@pytest.mark.parametrize(
    ("changes", "tower", "said"),
    [
        ({"vision_feature_select_strategy": "default"}, {}, "('default') is not 'full'"),
        ({"vision_feature_select_strategy": ...}, {}, "vision_feature_select_strategy('default')"),
        ({"vision_feature_layer": [-1, -2]}, {}, "vision_feature_layer([-1, -2])"),
        ({"vision_feature_layer": 4}, {}, "vision_feature_layer(4)"),
        ({"projector_hidden_act": "silu"}, {}, "projector_hidden_act('silu')"),
        ({}, {"hidden_act": "quick_gelu"}, "hidden_act('quick_gelu')"),
        ({}, {"attention_dropout": 0.1}, "attention_dropout(0.1)"),
        ({}, {"layer_norm_eps": 0}, "layer_norm_eps(0)"),
        ({}, {"rope_theta": 1.0}, "rope_theta"),
        ({"model_type": "qwen3"}, {}, "model_type='qwen3'"),
    ],
)
def test_what_is_not_computed(changes: dict[str, Any], tower: dict[str, Any], said: str) -> None:
    config = {**CONFIG, **changes, "vision_config": {**TOWER, **tower}}
    with pytest.raises(ModelError) as caught:
        vision_maths({key: value for key, value in config.items() if value is not ...})
    assert said in str(caught.value)


def test_images_that_do_not_fit() -> None:
    def work(groups: Groups) -> None:
        parallel = Parallel()
        vision = build_vision(CONFIG, parallel=parallel, groups=groups)
        layout, pixels = image_layout(vision.maths, 2, parallel), pixels_of(2)
        for wrong, said in (
            (pixels[:1], "pixels(1, 3, 22, 22)"),
            (pixels[..., :20], "pixels(2, 3, 22, 20)"),
            (pixels[:, :2], "pixels(2, 2, 22, 22)"),
            (pixels.long(), "torch.int64"),
        ):
            with pytest.raises(PlanError) as caught:
                encode(vision, wrong, layout)
            assert said in str(caught.value)
        with pytest.raises(PlanError, match=r"lengths\(25, 24\) != 25 each"):
            encode(vision, pixels, replace(layout, lengths=(25, 24)))
        for other in (SequenceLayout((25, 25), "thd"), replace(layout, tp=2), replace(layout, cp=2)):
            with pytest.raises(GeometryError, match="cut over the encoder's ranks"):
                encode(vision, pixels, other)

    run_world(work, plan=group_plan(Parallel()))


def test_a_method_that_cannot() -> None:
    def work(groups: Groups) -> None:
        with pytest.raises(GeometryError, match=r"heads\(3\) % cp\(2\)"):
            build_vision(CONFIG, parallel=Parallel(tp=2, cp=2), groups=groups, cp_method="all_to_all")

    run_world(work, plan=group_plan(Parallel(tp=2, cp=2)))


def test_layouts_are_proved_and_hold_the_model_once() -> None:
    for case in CASES + SHARED:
        layout = vision_layout_of(case.config, case.parallel)
        prove(layout)
        assert set(layout.tensors) == set(vision_maths(case.config).model.tensors)


def test_the_parts_of_a_config() -> None:
    assert num_patches(CONFIG) == 25
    assert language_config(CONFIG) == {**TEXT, "dtype": "float64"}
    assert language_config({**CONFIG, "tie_word_embeddings": True})["tie_word_embeddings"] is True
