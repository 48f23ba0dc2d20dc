"""A vision encoder and a language model in one process against transformers' LLaVA: loss and gradients.

Weights are those that the model begins with here, given to transformers by name. It takes angles and norms in
fp32 whatever the dtype is; with ``torch.float32`` as another name of ``torch.float64`` its own code computes
all of it in fp64. What other grids compute is compared with this process in
``tests/dist/test_train_vision_language.py``.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardweave.testing.world import run_world
from shardweave.train.batch import Microbatch
from shardweave.train.grid import Groups
from shardweave.train.parallel import Parallel
from shardweave.train.sequence import SequenceLayout
from shardweave.train.vision_language import build_vision_language, group_plan, step

pytestmark = pytest.mark.peer("transformers")

IMAGE, PATCHES = 36, 9
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_channels": 3, "image_size": 6, "patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "attention_dropout": 0.0,
    "vision_use_head": False,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 37, "hidden_size": 16, "intermediate_size": 20,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip


def config(layer: int) -> dict[str, Any]:
    return {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "dtype": "float64",
        "image_token_id": IMAGE, "image_seq_length": PATCHES, "projector_hidden_act": "gelu",
        "vision_feature_layer": layer, "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": True, "tie_word_embeddings": False, "vision_config": VISION,
        "text_config": TEXT,
    }  # fmt: skip


def theirs(name: str) -> str:
    """The name that transformers' module has for one of ours."""
    if name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return name if name.startswith("lm_head") else f"model.{name}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layer", [-1, -2])
def test_the_loss_and_the_gradients_are_those_of_transformers(layer: int) -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    told = config(layer)
    documents = [[3, *[IMAGE] * PATCHES, 7, 11], [5, 2, *[IMAGE] * (2 * PATCHES), 9, 1, 30]]
    pixels = torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    lengths = tuple(map(len, documents))
    ids = torch.tensor([token for document in documents for token in document])
    mask = ids != IMAGE
    mask[[0, lengths[0]]] = False
    one = Parallel()

    def go(groups: Groups) -> Any:
        model = build_vision_language(told, vision=one, language=one, groups=groups, seed=5)
        batch = Microbatch(SequenceLayout(lengths, "thd"), ids, mask)
        out = step(model, [[batch]], lambda numbers: pixels[numbers.start : numbers.stop])
        assert out.stepped is not None
        weights = {key: value for module in model.modules.values() for key, value in module.weights.items()}
        return out.stepped.report.loss, weights

    ((loss, weights),) = run_world(go, plan=group_plan(vision=one, language=one))
    with patch.object(torch, "float32", torch.float64), patch.object(torch, "float", torch.float64):
        known = {
            key: value for key, value in told.items() if key not in ("model_type", "architectures", "dtype")
        }
        peer = LlavaForConditionalGeneration(LlavaConfig(**known)).double()
        parameters = dict(peer.named_parameters())
        unused = {
            name
            for name in parameters
            if "post_layernorm" in name or f"encoder.layers.{3 + layer + 1}." in name
        }
        assert {theirs(name) for name in weights} >= parameters.keys() - unused
        with torch.no_grad():
            for name, value in weights.items():
                if theirs(name) in parameters:
                    parameters[theirs(name)].copy_(value)
        total, start = torch.zeros((), dtype=torch.float64), 0
        image = 0
        for document in documents:
            row = torch.tensor(document)[None]
            count = document.count(IMAGE) // PATCHES
            logits = peer(input_ids=row, pixel_values=pixels[image : image + count]).logits[0]
            targets, counted = row[0, 1:], mask[start + 1 : start + len(document)]
            logprobs = logits[:-1].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            total = total - logprobs[counted].sum()
            start, image = start + len(document), image + count
        expected = total / mask.sum()
        expected.backward()
    assert abs(loss - float(expected)) < 1e-12
    for name, value in weights.items():
        found, wanted = value.grad, parameters.get(theirs(name))
        if wanted is None or wanted.grad is None:
            assert found is None or not found.any(), name
        else:
            assert (found - wanted.grad).abs().max() < 1e-12, name
