"""A vision encoder and its projector, as LLaVA has them, from the weights of one rank of a grid of its own.

An image is a document of patches in a ``SequenceLayout``, of which every patch sees all. So hidden states lie
between blocks as the decoder's do, and its linears and its attention are used as they are:

| | patches | features |
|---|---|---|
| between blocks, norms, after the projector | cut over ``cp`` and ``tp`` | whole |
| attention, feed-forward, within the projector | cut over ``cp`` | cut over ``tp`` |

A rank makes hidden states of the patches that it has slots for, and gives the features of these; where they
go from there is not known here. Ranks without an image take part with nothing.

Source: transformers 5, ``SiglipVisionEmbeddings``, ``SiglipEncoderLayer``, ``LlavaModel.get_image_features``,
``LlavaMultiModalProjector``; ``SiglipPreTrainedModel._init_weights`` for how weights begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardweave.errors import GeometryError, ModelError, PlanError
from shardweave.layout import Layout
from shardweave.models import Model, llava
from shardweave.train.arrays import held_arrays
from shardweave.train.attention import attention, check_method
from shardweave.train.gathered import Gathered, shared_weights
from shardweave.train.grid import Group, Groups
from shardweave.train.layout import train_layout
from shardweave.train.linear import column, columns, row
from shardweave.train.maths import only, positive, wrong
from shardweave.train.parallel import Parallel
from shardweave.train.random import Normal, Quantile, Uniform, init
from shardweave.train.recompute import again
from shardweave.train.runtime import GRID
from shardweave.train.sequence import SequenceLayout

Weights = Mapping[str, Tensor]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""What configs call the functions between two linears."""

_EMBEDDINGS, _LAYERS = f"{llava.TOWER}embeddings.", f"{llava.TOWER}encoder.layers."


# --- what is computed ---------------------------------------------------------------------------


@dataclass(frozen=True)
class VisionMaths:
    """What an encoder computes with its weights.

    Attributes:
        model: The tensors of the tower and the projector, under the names of files of the whole model.
        hidden_size: The width of the tower's hidden state.
        text_hidden_size: The width of the features, that of the language model's hidden state.
        num_heads: Heads, each with a K and V.
        head_dim: The size of a head.
        num_channels: Of an image.
        image_size: Its height and its width.
        patch_size: Those of a patch. What is left over on the right and at the bottom is not seen.
        depth: How many layers are computed: features are what the last of them gives, before any norm. The
            weights of further layers, and of the norm after them, are there and have no gradient.
        eps: What is added to the variance in a norm.
        activation: What is done between the linears of a layer, one of ``ACTIVATIONS``.
        projector_activation: The same in the projector.
    """

    model: Model
    hidden_size: int
    text_hidden_size: int
    num_heads: int
    head_dim: int
    num_channels: int
    image_size: int
    patch_size: int
    depth: int
    eps: float
    activation: str
    projector_activation: str

    @property
    def side(self) -> int:
        """Patches of a row of an image, and of a column."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Patches of an image, row by row: the features that it comes to."""
        return self.side * self.side


def vision_maths(config: Mapping[str, Any], *, dtype: str = "") -> VisionMaths:
    """The maths of the encoder of a LLaVA model.

    Args:
        config: The Hugging Face config of the whole model.
        dtype: The dtype of the weights, where it is not that of the config.

    Raises:
        ModelError: The model is none of these, or a value of its config is not computed.
    """
    if config.get("model_type") != llava.MODEL_TYPE:
        raise ModelError(
            "the encoder is that of a vision-language model",
            where=f"config of {config.get('model_type')}",
            equation=f"model_type={config.get('model_type')!r} is not {llava.MODEL_TYPE!r}",
            hint="give the config of the whole, with vision_config and text_config",
        )
    model = llava.vision(config, dtype=dtype)
    tower: Mapping[str, Any] = config["vision_config"]
    only(tower, "attention_dropout", 0.0, None)
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy != "full":
        raise wrong(config, "vision_feature_select_strategy", strategy, "is not 'full': no patch is left out")
    blocks = {block.kind: block for block in model.blocks}
    heads = blocks["attention"].sizes
    return VisionMaths(
        model=model,
        hidden_size=heads["hidden_size"],
        text_hidden_size=blocks["projector"].sizes["text_hidden_size"],
        num_heads=heads["num_heads"],
        head_dim=heads["head_dim"],
        num_channels=blocks["patches"].sizes["num_channels"],
        image_size=tower["image_size"],
        patch_size=blocks["patches"].sizes["patch_size"],
        depth=_depth(config, model.num_layers),
        eps=positive(tower, "layer_norm_eps", 1e-6),
        activation=_activation(tower, "hidden_act", "gelu_pytorch_tanh"),
        projector_activation=_activation(config, "projector_hidden_act", "gelu"),
    )


def _depth(config: Mapping[str, Any], num_layers: int) -> int:
    """The layers before the hidden state that features are made of; there is one more state than layers."""
    taken = config.get("vision_feature_layer", -2)
    if type(taken) is not int or not -num_layers - 1 <= taken <= num_layers:
        raise wrong(config, "vision_feature_layer", taken, f"is not one hidden state of {num_layers} layers")
    return taken % (num_layers + 1)


def _activation(config: Mapping[str, Any], key: str, missing: str) -> str:
    found = config.get(key, missing)
    if found not in ACTIVATIONS:
        raise wrong(config, key, found, f"is not one of {', '.join(ACTIVATIONS)}")
    return str(found)


def num_patches(config: Mapping[str, Any]) -> int:
    """The patches of an image, which are the tokens that stand for it in a text.

    >>> tower = {"model_type": "siglip_vision_model", "vision_use_head": False, "hidden_size": 1152}
    >>> tower |= {"image_size": 384, "patch_size": 14, "num_attention_heads": 16, "num_hidden_layers": 27}
    >>> config = {"model_type": "llava", "text_config": {"model_type": "qwen3", "hidden_size": 1024}}
    >>> num_patches(config | {"vision_config": {**tower, "intermediate_size": 4304}})
    729
    """
    (positions,) = llava.vision(config, dtype="float32").of("positions")
    return positions.sizes["num_positions"]


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model of a LLaVA model, as one of its family has it alone.

    Its dtype is that of the whole, where the whole has one.
    """
    text = dict(llava.text_config(config))
    whole = llava.read(config)
    dtype = whole.get(whole.spelled("dtype", "torch_dtype"))
    if dtype is not None:
        text.pop("torch_dtype", None)
        text["dtype"] = dtype
    return text


# --- who has what -------------------------------------------------------------------------------


def vision_layout(
    found: VisionMaths, parallel: Parallel, *, shared: bool = True, multiple: int = 1
) -> Layout:
    """What every rank holds of an encoder, by the rules of ``train_layout``.

    Args:
        found: What is computed.
        parallel: The degrees.
        shared: Whether weights lie in shares; without, it is what ranks compute with.
        multiple: As of ``train_layout``.

    Raises:
        GeometryError: An encoder does not go over these degrees, or a size does not divide.
    """
    _check_degrees(found, parallel)
    return train_layout(
        found.model,
        parallel.mesh,
        stages=[range(found.model.num_layers)],
        share=parallel.dense_axes if shared else (),
        multiple=multiple,
    )


def vision_layout_of(
    config: Mapping[str, Any], parallel: Parallel, *, dtype: str = "", multiple: int = 1
) -> Layout:
    """The same from the config of the whole model; needs no process and no group."""
    return vision_layout(vision_maths(config, dtype=dtype), parallel, multiple=multiple)


def image_layout(found: VisionMaths, count: int, parallel: Parallel) -> SequenceLayout:
    """The images of a data rank as documents of patches.

    Every patch sees all of its image, so that ranks have equal work in the plain order, which pads least.

    Args:
        found: What is computed.
        count: How many images; there may be none.
        parallel: The degrees.
    """
    lengths = (found.num_patches,) * count
    return SequenceLayout(lengths, "thd", parallel.cp, parallel.tp, "contiguous", causal=False)


def _check_degrees(found: VisionMaths, parallel: Parallel) -> None:
    for name in ("pp", "vp", "ep", "etp", "eremat"):
        if (size := getattr(parallel, name)) > 1:
            raise GeometryError(
                "an encoder is cut over tp, cp and data ranks",
                where=f"mesh {parallel.mesh}",
                equation=f"{name}({size}) > 1",
                hint=f"use {name}=1 for the encoder: it has no experts, and its layers are on every rank",
            )
    if found.num_heads % parallel.tp:
        raise GeometryError(
            "every rank has an equal number of heads",
            where=f"mesh {parallel.mesh}",
            equation=f"num_heads({found.num_heads}) % tp({parallel.tp}) = "
            f"{found.num_heads % parallel.tp} != 0",
            hint="choose a tp for the encoder that divides its heads; it need not be the language model's",
        )


# --- built --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vision:
    """An encoder on one rank.

    Attributes:
        config: The Hugging Face config of the whole model.
        parallel: The degrees of the encoder.
        rank: The global rank.
        groups: Its groups, those of its grid as ``model``.
        maths: What it computes.
        layout: What every rank holds.
        weights: What this rank holds, by name.
        cp_method: How attention goes over context ranks.
        recompute: Whether the way back computes each layer once more.
        multiple: What the rows of a share are a multiple of.
    """

    config: Mapping[str, Any]
    parallel: Parallel
    rank: int
    groups: Groups
    maths: VisionMaths
    layout: Layout
    weights: dict[str, Tensor]
    cp_method: str = "gather"
    recompute: bool = False
    multiple: int = 1

    @cached_property
    def reading(self) -> Gathered:
        """The weights as they are computed with: whole where this rank holds a share.

        Where weights are shared, ``reading.finish()`` follows every way back.
        """
        whole = vision_layout(self.maths, self.parallel, shared=False)
        groups = {self.parallel.dense_axes: self.groups.get(GRID, "shares")}
        return Gathered(self.weights, shared_weights(self.layout, whole, self.rank, groups))

    @property
    def tp(self) -> Group:
        """The ranks that cut heads, rows and slots."""
        return self.groups.get(GRID, "tp")

    @property
    def cp(self) -> Group:
        """The ranks that cut images."""
        return self.groups.get(GRID, "cp")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(iter(self.weights.values())).dtype


def build_vision(
    config: Mapping[str, Any],
    *,
    parallel: Parallel,
    groups: Groups,
    dtype: str = "",
    device: str = "cpu",
    seed: int | None = 0,
    cp_method: str = "gather",
    recompute: bool = False,
    multiple: int = 1,
) -> Vision:
    """An encoder on this rank.

    Weights are begun as transformers begins them, each element a function of the seed, the name and its
    place, so that every layout begins with the same bits.

    Args:
        config: The Hugging Face config of the whole model.
        parallel: The degrees of the encoder: ``tp``, ``cp``, ``dp`` and ``remat``.
        groups: This rank's groups as the encoder's grid sees them.
        dtype: The dtype of the weights; that of the config by default.
        device: Where they are.
        seed: Of the weights; ``None`` leaves them NaN, for a checkpoint to fill.
        cp_method: How attention goes over context ranks: ``gather``, ``ring``, ``all_to_all``.
        recompute: Whether the way back computes each layer once more and keeps only what went into it.
        multiple: The rows of a share of a weight are a multiple of it, see ``train_layout``.

    Raises:
        ModelError: The model is not computed here.
        GeometryError: It does not fit on these degrees.
    """
    found = vision_maths(config, dtype=dtype)
    layout = vision_layout(found, parallel, multiple=multiple)
    heads = found.num_heads // parallel.tp
    check_method(cp_method, cp=parallel.cp, heads=heads, kv_heads=heads)
    text = llava.text_config(config)
    spread = positive(text, "initializer_range", 0.02)
    weights = _begun(found.model, layout, groups.rank, seed=seed, spread=spread, device=device)
    return Vision(
        config, parallel, groups.rank, groups, found, layout, weights, cp_method, recompute, multiple
    )


def _begun(
    model: Model, layout: Layout, rank: int, *, seed: int | None, spread: float, device: str
) -> dict[str, Tensor]:
    """The weights of a rank at the begin of a training, as leaves that gradients are taken of."""
    begins = {
        tensor.name: _begin(block.kind, role, tensor.shape, spread)
        for block in model.blocks
        for role, tensor in block.tensors.items()
    }
    found = {}
    for name, held in held_arrays(layout, rank).items():
        array = torch.full(
            held.shape, math.nan, dtype=getattr(torch, held.buffer.dtype), device=torch.device(device)
        )
        begin = begins[held.buffer.name]
        if seed is not None and isinstance(begin, float):
            array.fill_(begin)
        elif seed is not None and not isinstance(begin, float):
            init(array, held, seed=seed, quantile=begin)
        found[name] = array.requires_grad_()
    return found


def _begin(kind: str, role: str, shape: tuple[int, ...], spread: float) -> float | Quantile:
    """What a weight is at first: a number, or drawn."""
    if kind == "plain_mlp" and role.endswith("bias"):
        return Normal(1e-6)
    if role.endswith("bias"):
        return 0.0
    if len(shape) == 1:
        return 1.0
    if kind == "projector":
        return Normal(spread)
    if role == "positions":
        return Normal(shape[1] ** -0.5)
    if role == "patches":
        # Their truncated normal is cut off at 2, and not at two deviations: only the factor is left of it.
        return Normal(math.prod(shape[1:]) ** -0.5 / 0.8796256610342398)
    edge = math.sqrt(6 / (shape[0] + shape[1]))
    return Uniform(-edge, edge)


# --- computed -----------------------------------------------------------------------------------


def encode(vision: Vision, pixels: Tensor, layout: SequenceLayout) -> Tensor:
    """The features of images, of which each rank gives those of its own slots.

    Every rank of the encoder's grid calls it. What data ranks have need not be equally many, and may be none.

    Args:
        vision: The encoder.
        pixels: The images of this data rank, ``(images, channels, height, width)``, the same on all its
            ranks.
        layout: Where their patches lie, one document each; see ``image_layout``. Either order is right.

    Returns:
        ``(own slots, text hidden size)``, with graph; zeros for padding.

    Laws:
        Each feature, and every gradient summed over the ranks that hold a weight, is that of one process.

    Raises:
        GeometryError: The layout is not over the encoder's ranks.
        PlanError: The images are not those of the layout, or of another size than the model's.
    """
    _check(vision, pixels, layout)
    weights = vision.reading
    with weights.saving():
        return weights.joined(_features(vision, weights, pixels, layout))


def _features(vision: Vision, weights: Weights, pixels: Tensor, layout: SequenceLayout) -> Tensor:
    maths = vision.maths
    own = _own(layout, vision.cp.rank, vision.tp.rank)
    padding = own.padding.to(pixels.device)[:, None]
    x = _embedded(maths, weights, pixels, own).masked_fill(padding, 0)
    for layer in range(maths.depth):

        def one(h: Tensor, layer: int = layer) -> tuple[Tensor, None]:
            return _layer(vision, weights, h, layer, layout), None

        x = again(one, x, weights)[0] if vision.recompute else one(x)[0]
    return _projected(vision, weights, x).masked_fill(padding, 0)


def _embedded(maths: VisionMaths, weights: Weights, pixels: Tensor, own: _Own) -> Tensor:
    """The hidden state before the first layer: a matrix on each patch, and the embedding of its position."""
    name, seen = f"{_EMBEDDINGS}patch_embedding", maths.side * maths.patch_size
    matrix = weights[f"{name}.weight"].flatten(1)
    grid = pixels[..., :seen, :seen].unflatten(3, (maths.side, -1)).unflatten(2, (maths.side, -1))
    at = own.positions.to(pixels.device)
    rows, places = at // maths.side, at % maths.side
    # (channels, height, width) of each patch, in the order of the matrix's columns.
    patches = grid.permute(0, 2, 4, 1, 3, 5)[own.images.to(pixels.device), rows, places].flatten(1)
    x = F.linear(patches.to(matrix.dtype), matrix, weights[f"{name}.bias"])
    return x + F.embedding(at, weights[f"{_EMBEDDINGS}position_embedding.weight"])


def _layer(vision: Vision, weights: Weights, x: Tensor, layer: int, layout: SequenceLayout) -> Tensor:
    here, maths, tp = f"{_LAYERS}{layer}.", vision.maths, vision.tp
    h = _normed(maths, weights, x, f"{here}layer_norm1")
    names = [f"{here}self_attn.{name}_proj" for name in "qkv"]
    q, k, v = (
        rows.unflatten(-1, (-1, maths.head_dim))
        for rows in columns(
            h,
            [weights[f"{name}.weight"] for name in names],
            [weights[f"{name}.bias"] for name in names],
            tp=tp,
        )
    )
    y = attention(q, k, v, layout=layout, cp=vision.cp, method=vision.cp_method)
    out = f"{here}self_attn.out_proj"
    x = x + row(y.flatten(-2), weights[f"{out}.weight"], weights[f"{out}.bias"], tp=tp)
    h = _normed(maths, weights, x, f"{here}layer_norm2")
    up, down = f"{here}mlp.fc1", f"{here}mlp.fc2"
    h = ACTIVATIONS[maths.activation](column(h, weights[f"{up}.weight"], weights[f"{up}.bias"], tp=tp))
    return x + row(h, weights[f"{down}.weight"], weights[f"{down}.bias"], tp=tp)


def _normed(maths: VisionMaths, weights: Weights, x: Tensor, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], maths.eps)


def _projected(vision: Vision, weights: Weights, x: Tensor) -> Tensor:
    first, second = f"{llava.PROJECTOR}linear_1", f"{llava.PROJECTOR}linear_2"
    h = column(x, weights[f"{first}.weight"], weights.get(f"{first}.bias"), tp=vision.tp)
    h = ACTIVATIONS[vision.maths.projector_activation](h)
    return row(h, weights[f"{second}.weight"], weights.get(f"{second}.bias"), tp=vision.tp)


@dataclass(frozen=True, slots=True)
class _Own:
    """The own slots of a rank: of each the image, the patch, and whether it is none."""

    images: Tensor
    positions: Tensor
    padding: Tensor


@lru_cache(maxsize=256)
def _own(layout: SequenceLayout, cp_rank: int, tp_rank: int) -> _Own:
    images, positions, real = (
        torch.from_numpy(layout.local(values, cp_rank, tp_rank))
        for values in (layout.documents, layout.positions, layout.is_real)
    )
    return _Own(images, positions.where(real, 0), ~real)


def _check(vision: Vision, pixels: Tensor, layout: SequenceLayout) -> None:
    maths, tp, cp = vision.maths, vision.tp, vision.cp
    if (layout.form, layout.causal, layout.cp, layout.tp) != ("thd", False, cp.size, tp.size):
        raise GeometryError(
            "images are documents that are seen whole, packed, and cut over the encoder's ranks",
            where=f"rank {vision.rank}, {layout}",
            equation=f"form({layout.form!r}), causal({layout.causal}), cp({layout.cp}), tp({layout.tp}) != "
            f"('thd', False, {cp.size}, {tp.size})",
            hint="make it by image_layout(), with the degrees of the encoder and not the language model's",
        )
    size = maths.image_size
    shape = (len(layout.lengths), maths.num_channels, size, size)
    if tuple(pixels.shape) != shape or not pixels.is_floating_point():
        raise PlanError(
            "pixels are the images of the layout, of the size that the model has positions for",
            where=f"rank {vision.rank}, {layout}",
            equation=f"pixels{tuple(pixels.shape)} {pixels.dtype} != {shape} floating",
            hint="resize images as the model's processor does; positions are not interpolated",
        )
    if any(length != maths.num_patches for length in layout.lengths):
        raise PlanError(
            "an image has all its patches in the layout",
            where=f"rank {vision.rank}, {layout}",
            equation=f"lengths{layout.lengths} != {maths.num_patches} each",
            hint="make it by image_layout()",
        )
