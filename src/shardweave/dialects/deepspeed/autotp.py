"""DeepSpeed AutoTP: how it cuts one weight over tensor-parallel ranks, fused weights included.

AutoTP cuts a stored weight, whatever is fused in it, along one dim. Each layout here is a function
from that dim to what one rank holds of it. Given ``whole(size)`` it speaks of the rows of the fused
weight; given the fused weight as a composition, it speaks of the tensors in it:

>>> tp2 = AutoTP(2, num_heads=4, num_kv_heads=4)
>>> print(LAYOUTS["glm"](whole(24), 1, tp2))
[4:8] [12:16] [20:24]
>>> print(LAYOUTS["glm"](concat(whole(8, "q"), whole(8, "k"), whole(8, "v")), 1, tp2))
q[4:8] k[4:8] v[4:8]

Widths are data: they follow whole KV heads or units of a grain, and are hardly ever an even
division. What DeepSpeed would guess from a shape or from part of a name is refused here.

Source: deepspeed 0.19.8, ``module_inject/tp_shard.py``, ``fusedqkv_utils.py`` and ``layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardweave.errors import GeometryError, UnknownNameError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Sharded,
    Tensor,
    along,
    concat,
    cut,
    even,
    interleave,
    split,
    take,
    whole,
)

# The parts of a module's name by which DeepSpeed knows that a weight has no heads.
_NO_HEADS = ("mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_OUTPUT_HEADS = ("lm_head", "embed_out")

_BLOCKS = 4
"""CodeGen stores its heads in four blocks, each with its own q, v and k."""


def widths(
    size: int, *, tp: int, num_kv_heads: int | None = None, grain: int = 1, name: str = ""
) -> tuple[int, ...]:
    """How many indices of a dim each rank holds.

    The dim is dealt out in units, the first ranks getting one more where the units do not divide.
    A unit is a KV head, where the count is known, divides the dim, and the name is of a weight that
    has heads; otherwise it is ``grain`` indices, or one where the dim is smaller than a grain. What
    is left of the dim goes to the last rank.

    Laws: the widths add up to ``size``; there are ``tp`` of them.

    >>> widths(128, tp=3, num_kv_heads=8)
    (48, 48, 32)
    >>> widths(50257, tp=4, num_kv_heads=8, grain=64, name="lm_head")
    (12608, 12544, 12544, 12561)

    Source: ``get_shard_size_list``.
    """
    _positive(tp=tp, num_kv_heads=num_kv_heads, grain=grain)
    has_heads = name not in _OUTPUT_HEADS and not any(part in name for part in _NO_HEADS)
    if num_kv_heads is not None and has_heads and size % num_kv_heads == 0:
        unit = size // num_kv_heads or 1
    else:
        unit = grain if size >= grain else 1
    units, tail = divmod(size, unit)
    dealt = [unit * (units // tp + (rank < units % tp)) for rank in range(tp)]
    return (*dealt[:-1], dealt[-1] + tail)


@dataclass(frozen=True, slots=True)
class AutoTP:
    """What AutoTP knows when it cuts a weight. What is ``None`` is not known, and never inferred.

    Attributes:
        tp: Tensor-parallel ranks.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; equal to ``num_heads`` where they are not grouped.
        hidden: The model's hidden size.
        grain: ``tp_grain_size`` of the DeepSpeed config.
        name: The module's name, by which plain columns and rows are told to have heads or none.
    """

    tp: int
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden: int | None = None
    grain: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        _positive(
            tp=self.tp,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            hidden=self.hidden,
            grain=self.grain,
        )

    def widths(self, size: int, name: str = "") -> tuple[int, ...]:
        """The widths of a dim of ``size``; see ``widths``."""
        return widths(size, tp=self.tp, num_kv_heads=self.num_kv_heads, grain=self.grain, name=name)


# --- layouts ------------------------------------------------------------------------------------


def _column(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch. Source: ``LinearLayer``, ``LinearAllreduce``, ``VocabParallelEmbedding``."""
    return split(dim, model.widths(len(dim), model.name), rank)


def _lm_head(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch of an output head, which has no KV heads. Source: ``LmHeadLinearAllreduce``."""
    return split(dim, model.widths(len(dim), "lm_head"), rank)


def _groups(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch of rows fused by KV group. Source: ``_bloom_type_transpose``."""
    _whole_heads(dim, model)
    return split(dim, model.widths(len(dim)), rank)


def _known_groups(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """Rows fused by KV group, as InternLM2 has them; DeepSpeed forced to cut them takes thirds."""
    _known(model, "num_kv_heads")
    return _groups(dim, rank, model)


def _sections(dim: Dim, rank: int, model: AutoTP) -> Dim:
    return concat(*(split(third, model.widths(len(third)), rank) for third in _equal(dim, 3, model)))


def _qkv_thirds(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch of each of q, k and v, all of one size. Source: ``_glm_type_transpose``."""
    rule = "q, k and v are thirds of a fused weight only where each head has its own K and V"
    hint = "for 2 KV heads use 'chatglm2'; 'thirds' names the bytes of a grouped model cut this way"
    if model.num_kv_heads is not None:
        heads, kv_heads = _known(model, "num_heads", "num_kv_heads")
        _same(rule, model, (f"num_kv_heads({kv_heads})", kv_heads), (f"num_heads({heads})", heads), hint=hint)
    if model.num_kv_heads is None or model.hidden is not None:
        (hidden,) = _known(model, "hidden")
        _same(rule, model, (f"rows({len(dim)})", len(dim)), (f"3 * hidden({hidden})", 3 * hidden), hint=hint)
    _whole_heads(dim, model, times=3)
    return _sections(dim, rank, model)


def _thirds(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch of each third, whatever the thirds are. Source: ``_glm_type_transpose``."""
    if model.num_kv_heads == 2:
        raise GeometryError(
            "a fused weight of two KV heads is cut by q, k and v, not by thirds",
            where=str(model),
            equation="num_kv_heads(2)",
            hint="use 'chatglm2', which DeepSpeed takes for any model of two KV heads here",
        )
    return _sections(dim, rank, model)


def _qkv(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch of each of q, k and v, of their own sizes. Source: ``_phi3_type_transpose``."""
    num_heads, num_kv_heads = _known(model, "num_heads", "num_kv_heads")
    _divides("query heads share KV heads equally", model, ("num_heads", num_heads), num_kv_heads)
    kv = num_kv_heads * _head_dim(dim, model, kv_heads=2 * num_kv_heads)
    sections = (len(dim) - 2 * kv, kv, kv)
    return concat(
        *(split(split(dim, sections, i), model.widths(size), rank) for i, size in enumerate(sections))
    )


def _chatglm2(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """The same for a model of two KV heads, the only grouped one that DeepSpeed cuts so here."""
    _same(
        "the sections q, k and v of this layout have two KV heads",
        model,
        (f"num_kv_heads({model.num_kv_heads})", model.num_kv_heads),
        ("2", 2),
        hint="DeepSpeed cuts thirds for any other count; use 'glm' where no heads are grouped",
    )
    return _qkv(dim, rank, model)


def _bigcode(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch of q, and the one K and V head whole on every rank.

    Source: ``_bigcode_type_transpose``.
    """
    num_heads, hidden = _known(model, "num_heads", "hidden")
    if model.num_kv_heads not in (None, 1):
        # GPTBigCode's config has no count of KV heads, and DeepSpeed then takes that of the heads.
        _same(
            "a weight with one K and V head has one KV head, or as many as it has heads to cut q by",
            model,
            (f"num_kv_heads({model.num_kv_heads})", model.num_kv_heads),
            (f"num_heads({num_heads})", num_heads),
            hint="give 1, the count of the heads, or nothing, as DeepSpeed was given",
        )
    kv = 2 * _head_dim(dim, model, kv_heads=2)
    return concat(split(cut(dim, 0, hidden), model.widths(hidden), rank), split(dim, (hidden, kv), 1))


def _codegen(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """Pieces of q, v and k in turn, then one even stretch. Source: ``_codegen_type_transpose``."""
    (num_kv_heads,) = _known(model, "num_kv_heads")
    heads = ("num_kv_heads", num_kv_heads)
    _divides("every CodeGen block falls to the ranks by whole heads", model, heads, _BLOCKS * model.tp)
    _whole_heads(dim, model, times=3)
    section = len(dim) // (3 * _BLOCKS)
    q, v, k = (take(dim, range(first, 3 * _BLOCKS, 3), section) for first in range(3))
    return even(interleave(q, v, k, block=section // model.tp), model.tp, rank)


def _shared_qk(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch of each half of the value heads. Source: ``shard_value_with_share_qk``.

    With an odd number of heads a rank, the middle head of two neighbours is held by both.
    """
    heads = _per_rank(model) * model.tp
    _whole_heads(dim, model)
    head = len(dim) // heads
    start, count = rank * _per_rank(model) // 2, -(-_per_rank(model) // 2)
    return concat(*(cut(even(dim, 2, half), start * head, (start + count) * head) for half in range(2)))


def _gate_up(dim: Dim, rank: int, model: AutoTP) -> Dim:
    """One stretch of each half, cut as an mlp. Source: ``GateUpPack_LinearLayer``."""
    return concat(*(split(half, model.widths(len(half), "mlp"), rank) for half in _equal(dim, 2, model)))


LAYOUTS: Mapping[str, Callable[[Dim, int, AutoTP], Dim]] = MappingProxyType(
    {
        "column": _column,
        "row": _column,
        "lm_head": _lm_head,
        "bloom": _groups,
        "falcon": _groups,
        "unknown": _groups,
        "internlm2": _known_groups,
        "glm": _qkv_thirds,
        "mpt": _qkv_thirds,
        "baichuan": _qkv_thirds,
        "qwen": _qkv_thirds,
        "thirds": _thirds,
        "chatglm2": _chatglm2,
        "phi3": _qkv,
        "bigcode": _bigcode,
        "codegen": _codegen,
        "yuan_value": _shared_qk,
        "yuan_o_proj": _shared_qk,
        "gate_up": _gate_up,
    }
)
"""Each layout by name: from the stored dim, a rank and the model to what the rank holds.

``unknown`` is what DeepSpeed does to a fused weight that it does not recognise, after a warning.
``thirds`` is what it does to a grouped model whose class name ends in ``DecoderLayer``: the bytes
are where this says, but the thirds are not q, k and v. A ``qwen`` model does not run where a rank
has no query rows, though its weights can be cut so.
"""

_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "BloomBlock": "bloom",
        "FalconDecoderLayer": "falcon",
        "GLMBlock": "glm",
        "MPTBlock": "mpt",
        "MptBlock": "mpt",
        "BaichuanLayer": "baichuan",
        "DecoderLayer": "baichuan",
        "QWenBlock": "qwen",
        "Phi3DecoderLayer": "phi3",
        "GPTBigCodeBlock": "bigcode",
        "CodeGenBlock": "codegen",
    }
)


def layout_of(block_class: str) -> str:
    """The layout of the fused QKV weight in a block of the class ``block_class``.

    The whole name is compared. DeepSpeed looks for a known name inside it, so that any
    ``...DecoderLayer`` is cut in thirds, and falls back to one stretch where it finds none.

    Raises:
        UnknownNameError: The order of the fused rows does not follow from the name.
    """
    if block_class not in _CLASSES:
        raise UnknownNameError(
            "the class of a block says in which order its fused QKV rows lie",
            where=f"class {block_class!r}",
            equation=f"not among {', '.join(_CLASSES)}",
            hint="name the layout yourself, after a look at the model's own code or with a marker probe",
        )
    return _CLASSES[block_class]


def layout_named(layout: str) -> Callable[[Dim, int, AutoTP], Dim]:
    """The layout of that name. Raises ``UnknownNameError`` where there is none."""
    if layout not in LAYOUTS:
        raise UnknownNameError(
            "a layout of AutoTP has a name",
            equation=f"{layout!r} is not among {', '.join(LAYOUTS)}",
            hint="layout_of() gives the name for the class of a block",
        )
    return LAYOUTS[layout]


def shares(layout: str, model: AutoTP) -> bool:
    """Whether ranks hold copies of one another's elements in a layout.

    GPTBigCode's only K and V head is on every rank. A Yuan rank with an odd number of heads holds
    one with its neighbour; DeepSpeed publishes no checkpoint map for this case.
    """
    if layout in ("yuan_value", "yuan_o_proj"):
        return _per_rank(model) % 2 == 1
    return layout == "bigcode" and model.tp > 1


def shard(mesh: Mesh, layout: str, dim: Dim, model: AutoTP, *, axis: str = "tp") -> Sharded:
    """The stored dim over the ranks of a mesh axis.

    >>> model = AutoTP(2, num_heads=4, hidden=16)
    >>> print(*shard(Mesh((("tp", 2),)), "bigcode", whole(24), model).dims, sep=" | ")
    [0:8] [16:24] | [8:24]
    """
    _same(
        "AutoTP cuts over the ranks of one mesh axis",
        model,
        (f"{axis}({mesh.axis_size(axis)})", mesh.axis_size(axis)),
        (f"tp({model.tp})", model.tp),
        hint="describe the model with the mesh's number of ranks",
    )
    return along(mesh, axis, lambda rank: layout_named(layout)(dim, rank, model))


def weight_layout(
    layout: str, tensor: Tensor, mesh: Mesh, model: AutoTP, *, dim: int = 0, axis: str = "tp"
) -> Layout:
    """One stored weight as a layout, to prove, draw and plan with.

    Args:
        layout: One of ``LAYOUTS``.
        tensor: The stored weight, fused as it is stored, or the bias of a layout that cuts dim 0.
        mesh: The ranks; those that differ on other axes only are replicas.
        model: What AutoTP knows.
        dim: The dim that is cut: 1 for ``row``, ``lm_head`` and ``yuan_o_proj`` weights.
        axis: The mesh axis that cuts it.
    """
    dims: list[Dim | Sharded] = list(tensor.dims)
    at = len(tensor.index) + dim
    dims[at] = shard(mesh, layout, whole(tensor.shape[dim]), model, axis=axis)
    part = Part(tensor, replica=shares(layout, model))
    return Layout(f"deepspeed {layout}", mesh, (BufferRule(tensor.name, (part,), tuple(dims)),))


# --- what has to be known -----------------------------------------------------------------------


def _positive(**counts: int | None) -> None:
    for what, count in counts.items():
        if count is not None and count < 1:
            raise GeometryError(
                "sizes of a model and of a mesh are positive",
                equation=f"{what}({count}) < 1",
                hint="leave out what is not known",
            )


def _known(model: AutoTP, *names: str) -> tuple[int, ...]:
    values = tuple(getattr(model, name) for name in names)
    if None in values:
        raise GeometryError(
            "a fused weight is cut by what the model says, not by what its shape suggests",
            where=str(model),
            equation=f"{', '.join(name for name in names if getattr(model, name) is None)} = None",
            hint="take the head counts and the hidden size from the model's config",
        )
    return values


_Side = tuple[str, int | None]


def _same(rule: str, model: AutoTP, got: _Side, expected: _Side, *, hint: str) -> None:
    if got[1] != expected[1]:
        raise GeometryError(rule, where=str(model), equation=f"{got[0]} != {expected[0]}", hint=hint)


def _divides(rule: str, model: AutoTP, size: tuple[str, int], parts: int) -> None:
    if size[1] % parts:
        raise GeometryError(
            rule,
            where=str(model),
            equation=f"{size[0]}({size[1]}) % {parts} = {size[1] % parts} != 0",
            hint="check the sizes against the model's config, or use another tensor-parallel degree",
        )


def _equal(dim: Dim, parts: int, model: AutoTP) -> tuple[Dim, ...]:
    _divides("a fused weight of equal sections falls into them", model, ("rows", len(dim)), parts)
    return tuple(even(dim, parts, i) for i in range(parts))


def _whole_heads(dim: Dim, model: AutoTP, *, times: int = 1) -> None:
    # DeepSpeed falls back to units of a grain, and would cut inside heads without a word.
    parts = times * (model.num_kv_heads or 1)
    _divides("a fused weight holds whole KV heads", model, ("rows", len(dim)), parts)


def _head_dim(dim: Dim, model: AutoTP, *, kv_heads: int) -> int:
    """The head size, where the rows are the query heads and ``kv_heads`` heads of K and V together."""
    num_heads, hidden = _known(model, "num_heads", "hidden")
    _divides("heads share the hidden size equally", model, ("hidden", hidden), num_heads)
    head_dim, heads = hidden // num_heads, num_heads + kv_heads
    _same(
        "the rows of a fused weight are its query heads and its K and V heads",
        model,
        (f"rows({len(dim)})", len(dim)),
        (
            f"(num_heads({num_heads}) + {kv_heads}) * head_dim({head_dim}) = {heads * head_dim}",
            heads * head_dim,
        ),
        hint="other rows need another layout: GPTBigCode with K and V for every head has them interleaved",
    )
    return head_dim


def _per_rank(model: AutoTP) -> int:
    """Heads on each rank of an attention that shares Q and K between its halves."""
    (heads,) = _known(model, "num_kv_heads")
    _same(
        "shared-QK attention has one K and V for each head",
        model,
        (f"num_kv_heads({heads})", heads),
        (f"num_heads({model.num_heads})", model.num_heads or heads),
        hint="leave num_heads out, or give the same count",
    )
    _divides("shared-QK attention pairs its heads", model, ("num_kv_heads", heads), 2)
    _divides("every rank holds whole heads", model, ("num_kv_heads", heads), model.tp)
    if model.tp > heads // 2:
        raise GeometryError(
            "every rank holds a pair of heads",
            where=str(model),
            equation=f"tp({model.tp}) > num_kv_heads({heads}) / 2",
            hint=f"use at most {heads // 2} tensor-parallel ranks",
        )
    return heads // model.tp
