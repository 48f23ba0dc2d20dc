"""DeepSpeed AutoTP over a whole model: which rows and columns of which parameter every rank holds.

AutoTP has two ways into a model, and they do not cut it alike. For inference it looks at the classes and
names in a block of layers, and cuts the columns of the head. For training it takes the plan that transformers
gives for the model, and only where there is none looks as for inference; the head is then cut by rows or not
at all.

What no rule here names stays whole on every rank: norms, biases of what is summed over ranks, positions,
routers, and experts, which transformers 5 holds in arrays that AutoTP leaves alone.

Source: deepspeed 0.19.8, ``module_inject/auto_tp.py``, ``replace_module.py`` and ``tp_plan_converter.py``,
``runtime/engine.py`` (``_apply_autotp_partitioning``); transformers 5.24, ``base_model_tp_plan`` and
``_tp_plan``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardweave.dialects import hf
from shardweave.dialects.deepspeed.autotp import AutoTP, layout_of, shard, shares
from shardweave.errors import GeometryError, UnknownNameError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Sharded, Tensor, whole
from shardweave.models import Block, Model
from shardweave.models.blocks import HEAD
from shardweave.models.gpt_blocks import fused_role

TRAINING, INFERENCE = "training", "inference"
"""The ways into a model: ``deepspeed.initialize`` and ``deepspeed.init_inference``."""

_BLOCK_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "bloom": "BloomBlock",
        "chatglm": "GLMBlock",
        "codegen": "CodeGenBlock",
        "falcon": "FalconDecoderLayer",
        "gpt_bigcode": "GPTBigCodeBlock",
        "phi3": "Phi3DecoderLayer",
    }
)
"""The class of a layer where Q, K and V are fused, by which DeepSpeed knows their order."""

_PLANNED = frozenset({"gptj", "llama", "mistral", "qwen2", "qwen3"})
"""Families whose plan DeepSpeed follows for training."""

_UNPLANNED = frozenset({"bloom", "chatglm", "falcon", "gpt_bigcode", "yuan"})
"""Families without a plan, which are cut for training as for inference but for the head."""

_INFERENCE = _PLANNED | _UNPLANNED | {"codegen", "mixtral", "phi3", "qwen3_moe"}

_STYLES: Mapping[str, str] = MappingProxyType(
    {
        "mixtral": "packed_colwise, moe_tp_experts",
        "phi3": "rowwise_split_input",
        "qwen3_moe": "packed_colwise, moe_tp_experts",
    }
)
"""Styles in the plan of a family for which DeepSpeed rejects the plan as a whole."""

_WHOLE = frozenset({"norms", "layer_norms", "positions", "embedding_norm", "final", "final_bias", "moe"})
"""Kinds of blocks of which AutoTP cuts nothing."""

_ONE_STRETCH = ("bloom", "falcon")
"""Layouts that cut a fused weight in one stretch, which is right where each KV head has its rows together."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """One dim of a parameter, and the name of the layout that cuts it."""

    dim: int
    layout: str


def layout(
    model: Model,
    mesh: Mesh,
    *,
    way: str = TRAINING,
    grain: int = 1,
    num_kv_heads: int | None = None,
    vocab_parallel: bool | None = None,
    axis: str = "tp",
) -> Layout:
    """The parameters of every rank of a model that AutoTP has cut, under their names in the module.

    Args:
        model: The model.
        mesh: The ranks; those that differ on other axes only are replicas.
        way: ``training`` (``deepspeed.initialize``) or ``inference`` (``deepspeed.init_inference``).
        grain: ``tp_grain_size``: what feed-forwards and heads are dealt out in. DeepSpeed's own default is 1
            for training and 64 for inference.
        num_kv_heads: The count that DeepSpeed reads from the config, where it is not the attention's: the
            config of GPTBigCode did not always have one, and DeepSpeed then takes that of the heads.
        vocab_parallel: ``vocab_parallel_lm_head`` of a training. Not said, a head that is the embedding is
            cut with it by rows of the vocabulary where the model has a plan.
        axis: The mesh axis that cuts.

    Laws: over an axis of size 1 every parameter is whole, as DeepSpeed does nothing then; ``prove`` holds.

    Raises:
        GeometryError: DeepSpeed refuses the model, or would cut it so that its code computes something else;
            or sizes do not allow the cut.
        UnknownNameError: The way is unknown, or how the family is cut is not described here.
        MeshError: The mesh has no such axis.

    >>> from shardweave.models import from_config
    >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    >>> widths = {"hidden_size": 48, "vocab_size": 53, "intermediate_size": 22, "dtype": "bfloat16"}
    >>> model = from_config({"model_type": "llama", **sizes, **widths})
    >>> found = layout(model, Mesh((("tp", 3),)))
    >>> for rank in found.mesh.ranks:
    ...     arrays = found.arrays(rank)
    ...     heads, ffn = (f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj"))
    ...     print(arrays[heads][0].shape, arrays[ffn][0].shape, arrays["lm_head.weight"][0].shape)
    (24, 48) (48, 8) (18, 48)
    (24, 48) (48, 7) (18, 48)
    (0, 48) (48, 7) (17, 48)
    """
    tp = mesh.axis_size(axis)
    _check(model, way, tp, vocab_parallel)
    model = model.decoder
    stacked = any(True for _ in model.of("moe"))
    held = hf.layout(model, stacked_experts=stacked, with_aliases=True)
    if tp == 1:
        return Layout(f"deepspeed {way}", mesh, held.rules)
    cuts = dict(_cuts(model, way, tp, grain, num_kv_heads, vocab_parallel))
    rules = tuple(
        _cut(rule, mesh, axis, *cuts[rule.name]) if rule.name in cuts else rule for rule in held.rules
    )
    return Layout(f"deepspeed {way}", mesh, rules)


def _cut(rule: BufferRule, mesh: Mesh, axis: str, cut: _Cut, of: AutoTP) -> BufferRule:
    """The rule with one of its dims over the ranks."""
    (part,) = rule.parts
    dims: list[Dim | Sharded] = list(rule.dims)
    at = len(part.tensor.index) + cut.dim
    dims[at] = shard(mesh, cut.layout, whole(part.tensor.shape[cut.dim]), of, axis=axis)
    part = replace(part, replica=part.replica or shares(cut.layout, of))
    return replace(rule, parts=(part,), dims=tuple(dims))


# --- what is cut --------------------------------------------------------------------------------


def _cuts(
    model: Model, way: str, tp: int, grain: int, num_kv_heads: int | None, vocab_parallel: bool | None
) -> Iterator[tuple[str, tuple[_Cut, AutoTP]]]:
    """The cut of every parameter that has one, by its name."""
    for block in model.blocks:
        of = _known_of(model, block, tp, grain, num_kv_heads)
        for tensor, cut in _of_block(model, block):
            name = tensor.name if cut.layout in ("column", "row") else ""
            yield tensor.name, (cut, replace(of, name=name))
    (embedding,) = model.of("embedding")
    ends = _known_of(model, embedding, tp, grain, num_kv_heads)
    for name, cut in _ends(model, way, ends, vocab_parallel):
        yield name, (cut, ends)


def _known_of(model: Model, block: Block, tp: int, grain: int, num_kv_heads: int | None) -> AutoTP:
    """What DeepSpeed reads from the config of the model."""
    sizes = block.sizes
    return AutoTP(
        tp,
        num_heads=sizes.get("num_heads"),
        num_kv_heads=(num_kv_heads or sizes["num_kv_heads"]) if "num_kv_heads" in sizes else None,
        hidden=sizes.get("hidden_size"),
        grain=grain,
    )


def _of_block(model: Model, block: Block) -> Iterator[tuple[Tensor, _Cut]]:
    def columns(*roles: str, layout: str = "column") -> Iterator[tuple[Tensor, _Cut]]:
        """Cut along what comes out, the bias with the weight."""
        for role in (*roles, *(f"{role}_bias" for role in roles)):
            if role in block.tensors:
                yield block.tensors[role], _Cut(0, layout)

    def row(role: str, layout: str = "row") -> Iterator[tuple[Tensor, _Cut]]:
        """Cut along what goes in; every rank has the bias, which is added to the sum."""
        yield block.tensors[role], _Cut(1, layout)

    match block.kind:
        case "attention":
            yield from columns("q", "k", "v")
            yield from row("o")
        case "fused_attention":
            yield from columns(fused_role(block), layout=_fused(model, block))
            yield from row("o")
        case "filtered_attention":
            yield from columns("q", "k")
            yield from columns("v", layout="yuan_value")
            yield from row("o", "yuan_o_proj")
        case "mlp":
            yield from columns("gate", "up")
            yield from row("down")
        case "plain_mlp":
            yield from columns("up")
            yield from row("down")
        case "gate_up_mlp":
            yield from columns("gate_up", layout="gate_up")
            yield from row("down")
        case "embedding" | "head" | "head_bias":
            pass
        case kind if kind not in _WHOLE:
            raise GeometryError(
                "AutoTP's cut of every block of the model is described",
                where=f"model of {model.family}, layers {block.layers}",
                equation=f"block kind({kind!r}) is not known",
                hint="lay the model out whole, over an axis of size 1",
            )


def _fused(model: Model, block: Block) -> str:
    """The layout of a fused weight by the class of its block, if its rows lie as the layout takes them."""
    found = layout_of(_BLOCK_CLASSES[model.family])
    where = f"model of {model.family}, {block.tensors[fused_role(block)].name}"
    heads, kv_heads, blocks = (block.sizes[key] for key in ("num_heads", "num_kv_heads", "num_blocks"))
    if found == "glm" and kv_heads == 2:
        found = "chatglm2"
    expected = kv_heads if found in _ONE_STRETCH else 4 if found == "codegen" else 1
    if blocks != expected:
        raise GeometryError(
            "the rows that a rank gets are those that the model's code takes them for",
            where=where,
            equation=f"num_blocks({blocks}) != {expected} of the layout {found!r}",
            hint="use no tensor parallelism for it: DeepSpeed goes by the class of a layer alone, and ranks "
            "would read rows of Q as rows of K",
        )
    if model.family == "falcon" and kv_heads == 1 < heads:
        raise GeometryError(
            "a fused weight that is cut in one stretch has whole heads in every part",
            where=where,
            equation=f"one K and V for num_heads({heads}), and DeepSpeed deals out the config's num_kv_heads",
            hint="use no tensor parallelism for it: parts begin inside of heads, and K and V are on one rank",
        )
    return found


def _ends(model: Model, way: str, of: AutoTP, vocab_parallel: bool | None) -> Iterator[tuple[str, _Cut]]:
    """The embedding and the head."""
    (embedding,) = model.of("embedding")
    embed = embedding.tensors["embed"]
    heads = {HEAD} if model.tied else {block.tensors["head"].name for block in model.of("head")}
    if HEAD not in heads:
        return  # a head of another name is whole, and no module that AutoTP knows
    biases = [block.tensors["bias"].name for block in model.of("head_bias")]
    if way == INFERENCE:
        # A head that is the embedding becomes a parameter of its own, and the embedding stays whole.
        yield HEAD, _Cut(1, "lm_head")
        return
    planned = model.family in _PLANNED
    if vocab_parallel is None:
        rows = planned and (not model.tied or embed.shape[0] >= of.tp)
    else:
        rows = vocab_parallel or (planned and not model.tied)
    if rows:
        for name in (HEAD, *biases, *([embed.name] if model.tied else [])):
            yield name, _Cut(0, "lm_head")


# --- what is refused ----------------------------------------------------------------------------


def _check(model: Model, way: str, tp: int, vocab_parallel: bool | None) -> None:
    known = {TRAINING: _PLANNED | _UNPLANNED, INFERENCE: _INFERENCE}
    if way not in known:
        raise UnknownNameError(
            "AutoTP has a known way into a model",
            equation=f"way({way!r}) is not {' or '.join(known)}",
            hint="training for deepspeed.initialize, inference for deepspeed.init_inference",
        )
    if tp == 1:
        return
    where = f"model of {model.family}, tp({tp}), {way}"
    if way == INFERENCE and vocab_parallel:
        raise GeometryError(
            "a head is cut by rows of the vocabulary for training only",
            where=where,
            equation="vocab_parallel(True)",
            hint="leave it out: for inference DeepSpeed cuts the columns of the head",
        )
    if model.family == "gpt2":
        raise GeometryError(
            "AutoTP supports the model",
            where=where,
            equation="AutoTP.supported(GPT2Model) = False",
            hint="lay it out whole, over an axis of size 1: DeepSpeed refuses to cut it",
        )
    if way == TRAINING and model.family == "codegen":
        raise GeometryError(
            "the rows that a rank gets are those that the model's code takes them for",
            where=where,
            equation=f"a rank gets 4 / tp({tp}) blocks of Q, V and K, and the code of the model reads 4",
            hint="use no tensor parallelism: DeepSpeed trains this model on wrong logits without a word",
        )
    if way == TRAINING and model.family in _STYLES:
        raise GeometryError(
            "DeepSpeed follows every style of the plan that transformers gives",
            where=where,
            equation=f"styles {_STYLES[model.family]}",
            hint="DeepSpeed raises here, too; it asks for a partition_config of your own",
        )
    if model.family not in known[way]:
        raise UnknownNameError(
            "how AutoTP cuts the family is described",
            where=where,
            equation=f"{model.family!r} is not one of {', '.join(sorted(known[way]))}",
            hint="lay it out whole, over an axis of size 1, or compare with a marker probe first",
        )
