"""LLaVA: a vision tower, a projector, and the decoder of another family that reads images as tokens.

The tower is SigLIP's: patches, learned positions, layers of attention and feed-forward with biases. It is
described as a model of its own, with the kinds of blocks that decoders have. In the whole model its kinds are
called ``vision_...``, so that nothing that cuts the blocks of a decoder takes them for its own.

Source: transformers 5, ``models/llava``: LlavaConfig, LlavaMultiModalProjector; ``models/siglip``:
SiglipVisionConfig, SiglipVisionEmbeddings, SiglipEncoderLayer; ``conversion_mapping`` for names in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardweave.layout import Dim, whole
from shardweave.models.blocks import Stack, attention_block, final_block
from shardweave.models.config import IGNORED, MATHS, NEUTRAL, RUNTIME, TASK, TOKENS, Config, Keys
from shardweave.models.gpt_blocks import (
    ffn_block,
    final_bias_block,
    full_heads,
    layer_norms_block,
    positions_block,
)
from shardweave.models.spec import Block, Model

MODEL_TYPE, ARCHITECTURE = "llava", "LlavaForConditionalGeneration"
TOWER, PROJECTOR, TEXT = "vision_tower.", "multi_modal_projector.", "language_model."
"""What the names of each part start with in files."""

_OLD_TOWER = "vision_tower.vision_model."
"""What those of the tower start with in files of transformers 4."""
_TOWERS = "siglip_vision_model"

_ELSEWHERE = {key: reason for key, reason in IGNORED.items() if reason != MATHS}
"""Keys of every family, without those about the maths of a decoder: neither part takes them for its own."""

KEYS = Keys(
    frozenset(
        {
            *("architectures", "dtype", "model_type", "torch_dtype", "tie_word_embeddings"),
            *("multimodal_projector_bias", "text_config", "vision_config", "vision_feature_layer"),
        }
    ),
    {
        **_ELSEWHERE,
        "ignore_index": TASK,
        "image_seq_length": "is the number of patches once more",
        "image_token_id": TOKENS,
        "image_token_index": TOKENS,
        "projector_hidden_act": MATHS,
        "vision_feature_select_strategy": MATHS,
        "vocab_size": "is that of the language model once more, which has its own",
    },
    {**NEUTRAL, "use_image_newline_parameter": (False, None)},
)
"""The keys of its configs, beside those of the two parts."""

VISION_KEYS = Keys(
    frozenset(
        {
            *("architectures", "hidden_size", "image_size", "intermediate_size", "model_type"),
            *("num_attention_heads", "num_channels", "num_hidden_layers", "patch_size", "vision_use_head"),
        }
    ),
    {
        **_ELSEWHERE,
        **dict.fromkeys(("attention_dropout", "hidden_act", "layer_norm_eps"), MATHS),
        **dict.fromkeys(("dtype", "torch_dtype"), RUNTIME),
    },
    {key: allowed for key, allowed in NEUTRAL.items() if key != "use_qk_norm"},
)
"""The keys of the config of the tower. The weights of all parts have one dtype, that of the whole."""


def read(values: Mapping[str, Any]) -> Config:
    """The config of the whole, all of whose keys are understood.

    Raises:
        ModelError: A key is unknown, or the architecture is another one.
    """
    config = Config(values, KEYS, f"config of {MODEL_TYPE}")
    if config.get("architectures") not in (None, [ARCHITECTURE]):
        raise config.fail(
            "the tensors are those of the vision-language model with its head",
            f"architectures={config.get('architectures')} != [{ARCHITECTURE!r}]",
            "other heads and bare backbones have other tensors; convert the whole model",
        )
    return config


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model. Its head is tied where it says so or the whole does.

    Raises:
        ModelError: There is none.
    """
    config = read(values)
    text = config.get("text_config")
    if not isinstance(text, Mapping) or not isinstance(text.get("model_type"), str):
        raise config.fail(
            "the language model has a config of its own",
            f"text_config={text!r:.60}",
            "write text_config as the config of a family, with its model_type and sizes",
        )
    return {**text, "tie_word_embeddings": True} if config.flag("tie_word_embeddings") else text


def vision_config(values: Mapping[str, Any]) -> Config:
    """The config of the tower.

    Raises:
        ModelError: There is none, it is not understood, or the tower is another one.
    """
    config = read(values)
    found = config.part(config.get("vision_config"), VISION_KEYS, "vision_config")
    if found.get("model_type") != _TOWERS:
        raise found.fail(
            "the vision tower is a known one",
            f"model_type={found.get('model_type')!r} is not {_TOWERS}",
            "describe the tower in a file of its own in shardweave.models",
        )
    if found.flag("vision_use_head", missing=True):
        raise found.fail(
            "the vision tower gives a vector for each patch",
            f"vision_use_head({found.values.get('vision_use_head', 'not given, which means True')})",
            "set vision_use_head to false: the head that pools patches is not described here",
        )
    return found


def vision(values: Mapping[str, Any], *, dtype: str = "") -> Model:
    """The tensors of the tower and the projector, as a model of its own.

    Beside the kinds of a decoder's blocks it has ``patches`` and ``projector``, see ``Block``.

    Args:
        values: The config of the whole.
        dtype: As of ``from_config``.

    Raises:
        ModelError: A config is not understood, or sizes contradict each other.
    """
    config, of = read(values), vision_config(values)
    text = text_config(values)
    width = Config(
        {"hidden_size": text.get("hidden_size")}, Keys(frozenset({"hidden_size"})), "text_config"
    ).size("hidden_size")
    stack = Stack(TOWER, of.size("hidden_size"), config.dtype(dtype), "encoder.layers")
    num_layers = of.size("num_hidden_layers")
    blocks = (
        *_around(of, stack),
        *_layers(of, stack, whole(num_layers)),
        final_block(stack, name="post_layernorm.weight"),
        final_bias_block(stack, "post_layernorm.bias"),
        _projector(config, stack, width),
    )
    buffers = frozenset(f"{tower}embeddings.position_ids" for tower in (TOWER, _OLD_TOWER))
    return Model(_TOWERS, num_layers, stack.dtype, blocks, buffers=buffers)


def joined(values: Mapping[str, Any], text: Model) -> Model:
    """The whole model.

    Args:
        values: The config of the whole.
        text: The language model, under the names that it has in files of the whole.
    """
    tower = vision(values, dtype=text.dtype)
    blocks = tuple(replace(block, kind=f"vision_{block.kind}") for block in tower.blocks)
    return replace(
        text,
        family=MODEL_TYPE,
        blocks=(*text.blocks, *blocks),
        buffers=text.buffers | tower.buffers,
        prefixes={TOWER: _OLD_TOWER},
    )


def _around(config: Config, stack: Stack) -> tuple[Block, Block]:
    """What turns an image into hidden states: a matrix for patches, as a convolution, and positions."""
    hidden, patch, channels = stack.hidden_size, config.size("patch_size"), _channels(config)
    side = config.size("image_size") // patch
    if not side:
        raise config.fail(
            "an image has at least one patch",
            f"image_size({config.get('image_size')}) < patch_size({patch})",
            "correct the one that is wrong, or take the config that belongs to the weights",
        )
    name = "embeddings.patch_embedding"
    patches = {
        "patches": stack.once(f"{name}.weight", hidden, channels, patch, patch),
        "patches_bias": stack.once(f"{name}.bias", hidden),
    }
    sizes = {"num_channels": channels, "patch_size": patch, "hidden_size": hidden}
    positions = positions_block(stack, side * side, "embeddings.position_embedding.weight")
    return Block("patches", Dim(), sizes, patches), positions


def _channels(config: Config) -> int:
    return config.size("num_channels", missing=3)


def _layers(config: Config, stack: Stack, layers: Dim) -> tuple[Block, ...]:
    found, size = full_heads(config, stack.hidden_size), config.size("intermediate_size")
    return (
        layer_norms_block(stack, layers, {"input_norm": "layer_norm1", "post_attention_norm": "layer_norm2"}),
        attention_block(stack, layers, found, qkv_bias=True, o_bias=True, o_name="out_proj"),
        ffn_block(stack, layers, size, up="mlp.fc1", down="mlp.fc2", bias=True),
    )


def _projector(config: Config, stack: Stack, width: int) -> Block:
    """Two linears from the tower's hidden states to those of the language model."""
    taken = config.get("vision_feature_layer")
    count = len(taken) if isinstance(taken, list | tuple) else 1
    shapes = {"linear_1": (width, stack.hidden_size * count), "linear_2": (width, width)}
    of = Stack(PROJECTOR, width, stack.dtype)
    tensors = {role: of.once(f"{role}.weight", *shape) for role, shape in shapes.items()}
    if config.flag("multimodal_projector_bias", missing=True):
        tensors |= {f"{role}_bias": of.once(f"{role}.bias", width) for role in shapes}
    return Block("projector", Dim(), {"hidden_size": stack.hidden_size, "text_hidden_size": width}, tensors)
