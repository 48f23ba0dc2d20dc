"""The features of the encoder on one rank, and gradients of its weights, against those of transformers.

As in `test_train_transformers.py`, its softmax is in fp32 in models of any dtype; with `torch.float32` as
another name of `torch.float64` its own code is equal to 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from vision_cells import changed, theirs

from shardweave.testing.world import run_world
from shardweave.train.grid import Groups
from shardweave.train.parallel import Parallel
from shardweave.train.runtime import group_plan
from shardweave.train.vision import Vision, build_vision, encode, image_layout

pytestmark = pytest.mark.peer("transformers")

CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "the layer before the last": changed({"vision_feature_layer": -2}),
    "a layer counted from the first": changed({"vision_feature_layer": 1}),
    "what missing keys mean": changed(
        {
            "vision_feature_layer": ...,
            "vision_config": {**changed({})["vision_config"], "layer_norm_eps": 1e-6},
        }
    ),
    "other activations": changed({"projector_hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "gelu"}),
    "a projector without biases": changed({"multimodal_projector_bias": False}),
    "another eps": changed({}, {"layer_norm_eps": 0.5}),
    "gray images that patches fill": changed({}, {"num_channels": 1, "image_size": 20}),
}


@contextmanager
def exact() -> Iterator[None]:
    """What is said to be computed in fp32 is computed in fp64."""
    with patch.object(torch, "float32", torch.float64), patch.object(torch, "float", torch.float64):
        yield


PRECISIONS = {
    "fp64, exact": (torch.float64, exact, 1e-12),
    "fp64, as it is": (torch.float64, nullcontext, 3e-6),
    "fp32": (torch.float32, nullcontext, 1e-5),
}


def alone(config: dict[str, Any], dtype: torch.dtype, seed: int | None = None) -> Vision:
    """The encoder on one rank."""

    def work(groups: Groups) -> Vision:
        named = str(dtype).removeprefix("torch.")
        return build_vision(config, parallel=Parallel(), groups=groups, dtype=named, seed=seed)

    return run_world(work, plan=group_plan(Parallel()))[0]


def gap(got: Tensor, wanted: Tensor) -> float:
    """The distance over the size."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    size, distance = wanted.double().norm().item(), (got.double() - wanted.double()).norm().item()
    return distance / size if size > 1e-9 else distance


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_encoder_is_that_of_transformers(name: str, precision: str) -> None:
    dtype, context, bound = PRECISIONS[precision]
    config = CASES[name] or changed({})
    model, size = theirs(config, dtype), config["vision_config"]["image_size"]
    chance = torch.Generator().manual_seed(9)
    pixels = torch.randn(
        2, config["vision_config"]["num_channels"], size, size, generator=chance, dtype=torch.float64
    ).to(dtype)
    asked = torch.randn(50, 20, generator=chance, dtype=torch.float64).to(dtype)
    with context():
        true = torch.cat(model.get_image_features(pixels, return_dict=True).pooler_output)
        (true * asked).sum().backward()
    named = {key.removeprefix("model."): weight for key, weight in model.named_parameters()}

    vision = alone(config, dtype)
    assert set(vision.weights) == {
        key for key in named if "language_model" not in key and "lm_head" not in key
    }
    with torch.no_grad():
        for key, weight in vision.weights.items():
            weight.copy_(named[key])
    features = encode(vision, pixels, image_layout(vision.maths, 2, Parallel()))
    assert gap(features.detach(), true.detach()) <= bound
    (features * asked).sum().backward()
    for key, weight in vision.weights.items():
        # Adding to all keys changes no softmax: the true gradient of their bias is 0, and both have rounding.
        wanted, got = named[key].grad, weight.grad
        if key.endswith("k_proj.bias") and wanted is not None:
            assert got is not None and max(got.abs().max(), wanted.abs().max()) <= 1e3 * bound, key
        elif wanted is None:
            assert got is None, key
        else:
            assert got is not None and gap(got, wanted) <= bound, (key, gap(got, wanted))


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("as it is", "what missing keys mean")]
)
def test_what_a_case_changes_matters(name: str) -> None:
    """The same weights and pixels come to other features without the change, where both fit."""
    config, plain = CASES[name], changed({})
    first, other = (
        {key: weight.shape for key, weight in alone(each, torch.float64).weights.items()}
        for each in (config, plain)
    )
    if first != other:
        return  # tensors are other ones, which is seen in the names and shapes
    pixels = torch.randn(1, 3, 22, 22, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    model, found = theirs(plain, torch.float64), []
    named = {key.removeprefix("model."): weight for key, weight in model.named_parameters()}
    for each in (config, plain):
        vision = alone(each, torch.float64)
        with torch.no_grad():
            for key, weight in vision.weights.items():
                weight.copy_(named[key])
            found.append(encode(vision, pixels, image_layout(vision.maths, 1, Parallel())))
    assert gap(*found) > 1e-4


def test_weights_begin_as_those_of_transformers() -> None:
    """Of each weight the deviation, and the largest value, at a size where chance makes little of both."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    wide = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1, "image_size": 64}
    config = changed({}, wide, {"hidden_size": 160})
    values = {key: value for key, value in config.items() if key not in ("model_type", "dtype")}
    torch.manual_seed(1)
    model = LlavaForConditionalGeneration(LlavaConfig(**values))
    named = {key.removeprefix("model."): weight for key, weight in model.named_parameters()}
    for key, weight in alone(config, torch.float32, seed=0).weights.items():
        got, wanted = weight.detach(), named[key].detach()
        if wanted.std() == 0:
            assert torch.equal(got, wanted), key
            continue
        few = 4 / math.sqrt(wanted.numel())
        assert abs(got.std() / wanted.std() - 1) < few, key
        assert abs(got.mean() / wanted.std()) < few, key
        # Draws that are bounded end where theirs do; those of a normal distribution go on.
        is_bounded = wanted.abs().max() < 2.4 * wanted.std()
        assert (got.abs().max() < 2.4 * got.std()) == is_bounded, key
