"""The buffers of a vLLM rank, kind of block by kind of block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from shardweave.dialects.vllm import gdn, mamba, mla
from shardweave.dialects.vllm.checks import (
    ENDS_EVERYWHERE,
    NAMES,
    check_drafter,
    check_model,
    check_roles,
    check_shape,
)
from shardweave.dialects.vllm.rules import (
    VOCAB_MULTIPLE,
    check_divides,
    kv_heads,
    placed_experts,
    query_heads,
    stages,
    vocabulary,
)
from shardweave.dialects.vllm.scales import apart, follow
from shardweave.dialects.vllm.world import Where, World, held_whole, renamed
from shardweave.errors import GeometryError, ModelError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Sharded,
    Tensor,
    concat,
    even,
    pad,
    relabel,
    take,
    whole,
)
from shardweave.models import Block, Model

# The names of a fused buffer and of the first tensor in it.
_QKV = (".q_proj.", ".qkv_proj.")
_GATE_UP = (".gate_proj.", ".gate_up_proj.")
_W13 = (
    (".experts.{expert}.gate_proj.weight", ".experts.routed_experts.w13_weight"),
    (".experts.{expert}.w1.weight", ".experts.routed_experts.w13_weight"),
)
_W2 = (
    (".experts.{expert}.down_proj.weight", ".experts.routed_experts.w2_weight"),
    (".experts.{expert}.w2.weight", ".experts.routed_experts.w2_weight"),
)


def layout(
    model: Model,
    mesh: Mesh,
    *,
    expert_parallel: bool = False,
    placement: str = "linear",
    redundant_experts: int = 0,
    layer_partition: Sequence[int] | None = None,
    vocab_multiple: int = VOCAB_MULTIPLE,
    expert_multiple: int = 1,
    dtype: str = "",
    drafter: bool = False,
) -> Layout:
    """The parameters that every rank of a vLLM deployment holds while weights are loaded.

    Layers for further tokens are left out: vLLM serves them as a model of their own, the drafter.

    Args:
        model: The logical tensors.
        mesh: The ranks, from ``mesh()``.
        expert_parallel: Whole experts a rank (``--enable-expert-parallel``), not rows of each.
        placement: How experts are placed: ``linear``, or ``round_robin`` where the engine's log says that
            it holds; vLLM falls back to linear for models without expert groups, and for most backends.
        redundant_experts: Additional expert slots of the load balancer.
        layer_partition: Layers of each stage (``VLLM_PP_LAYER_PARTITION``), where not by ``stages()``.
        vocab_multiple: What the vocabulary is padded to a multiple of.
        expert_multiple: What the rows of a rank's experts are padded to a multiple of; some expert
            kernels ask for 128.
        dtype: The dtype of the engine, where it is not that of the model.
        drafter: Whether this is the model that drafts with the layers for further tokens, with an embedding
            and heads of its own (``DeepSeekMTP``), in place of the model that they belong to.

    Raises:
        GeometryError: The deployment cannot hold the model, or contradicts itself.
        ModelError: A tensor of the model is none that these rules know.
    """
    check_model(model, mesh)
    if not expert_parallel and ("ep" in mesh.sizes or redundant_experts or placement != "linear"):
        raise GeometryError(
            "a deployment with an expert axis, redundant or placed experts is expert parallel",
            equation=f"expert_parallel(False), mesh({mesh}), redundant_experts({redundant_experts}), "
            f"placement({placement!r})",
            hint="pass expert_parallel=True, or leave the others out",
        )
    if drafter:
        check_drafter(model, mesh, layer_partition)
    world = World(
        mesh,
        layers=mla.further(model)
        if drafter
        else _layers(model.num_layers, mesh.axis_size("pp"), layer_partition),
        ends_everywhere=frozenset(ENDS_EVERYWHERE.get(model.family, "").split()),
        names=NAMES.get(model.family, ()),
        tied=model.tied,
        expert_parallel=expert_parallel,
        placement=placement,
        redundant=redundant_experts,
        vocab_multiple=vocab_multiple,
        expert_multiple=expert_multiple,
        dtype=dtype,
    )
    rules: list[BufferRule] = []
    for block in mla.draft_blocks(model) if drafter else model.decoder.blocks:
        if block.kind not in _KINDS:
            raise ModelError(
                "every block of a model is of a kind that vLLM's rules cover",
                where=f"family {model.family!r}",
                equation=f"kind({block.kind!r}) is not one of {', '.join(_KINDS)}",
                hint="add the rules of the kind to shardweave.dialects.vllm",
            )
        required, optional, build = _KINDS[block.kind]
        plain, scales = apart(block)
        check_roles(plain, required, optional)
        around = block.kind in ("mtp", "embedding")
        for rule in build(plain, mla.within(world) if drafter and not around else world):
            rules += follow(rule, scales, block)
    if drafter:
        rules += _draft_heads(model, world)
    return Layout("vllm", mesh, tuple(rules))


def _layers(num_layers: int, pp: int, partition: Sequence[int] | None) -> tuple[range, ...]:
    sizes = stages(num_layers, pp) if partition is None else tuple(partition)
    if len(sizes) != pp or sum(sizes) != num_layers or min(sizes) < 0:
        raise GeometryError(
            "the stages of a pipeline hold all layers once",
            equation=f"layer_partition{sizes}, pp({pp}), num_layers({num_layers})",
            hint="give one size a stage; together they are the layers of the model",
        )
    ends = list(accumulate(sizes, initial=0))
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def _embedding(block: Block, world: World) -> Iterator[BufferRule]:
    # A tied head is the same parameter, so the last stage of a pipeline holds the embedding as well.
    where = world.only("embedding", 0, -1) if world.tied else world.only("embedding", 0)
    yield _vocabulary(block, block.tensors["embed"], where, world)


def _head(block: Block, world: World) -> Iterator[BufferRule]:
    yield _vocabulary(block, block.tensors["head"], world.only("head", -1), world)


def _vocabulary(block: Block, tensor: Tensor, where: Where, world: World) -> BufferRule:
    size, hidden = block.sizes["vocab_size"], block.sizes["hidden_size"]
    check_shape(tensor, size, hidden)
    rows = world.over_tp(lambda r: vocabulary(size, world.tp, r, multiple=world.vocab_multiple))
    several = any(len(stages) > 1 for _, stages in where)
    return world.rule(tensor.name, [Part(tensor, replica=several)], rows, whole(hidden), where=where)


def _draft_heads(model: Model, world: World) -> Iterator[BufferRule]:
    """A head for each layer; one owns what all of them hold."""
    names = [name for name in model.copies if name.endswith(".shared_head.head.weight")]
    for i, name in enumerate(names):
        for block in model.of("head"):
            rule = _vocabulary(block, block.tensors["head"], (), world)
            parts = tuple(replace(part, replica=i > 0) for part in rule.parts)
            yield replace(rule, name=name, parts=parts)


def _final(block: Block, world: World) -> Iterator[BufferRule]:
    norm = block.tensors["norm"]
    yield world.rule(norm.name, [Part(norm)], *norm.dims, where=world.only("final", -1))


def _norms(block: Block, world: World) -> Iterator[BufferRule]:
    for role in block.tensors:
        yield held_whole(block, role, world)


def _attention(block: Block, world: World) -> Iterator[BufferRule]:
    sizes, tp, layers = block.sizes, world.tp, world.index(block)
    heads, kv, head_dim, hidden = (
        sizes[key] for key in ("num_heads", "num_kv_heads", "head_dim", "hidden_size")
    )

    def fused(r: int) -> Dim:
        k, v = (kv_heads(whole(kv * head_dim, label), kv, tp, r) for label in "kv")
        return concat(query_heads(whole(heads * head_dim, "q"), heads, tp, r), k, v)

    rows = world.over_tp(fused)
    for suffix, columns in ("", (hidden,)), ("_bias", ()):
        if f"q{suffix}" not in block.tensors:
            continue
        q, k, v = (block.tensors[f"{role}{suffix}"] for role in "qkv")
        check_shape(q, heads * head_dim, *columns)
        check_shape(k, kv * head_dim, *columns)
        check_shape(v, kv * head_dim, *columns)
        parts = [Part(q, "q"), Part(k, "k", replica=tp > kv), Part(v, "v", replica=tp > kv)]
        yield world.rule(renamed(q, _QKV), parts, layers, rows, *(whole(size) for size in columns))
    o = block.tensors["o"]
    check_shape(o, hidden, heads * head_dim)
    columns_of_o = world.over_tp(lambda r: query_heads(whole(heads * head_dim), heads, tp, r))
    yield world.rule(o.name, [Part(o)], layers, whole(hidden), columns_of_o)
    for role in "q_norm", "k_norm":
        if role in block.tensors:
            check_shape(block.tensors[role], head_dim)
            yield held_whole(block, role, world)
    if "o_bias" in block.tensors:
        yield held_whole(block, "o_bias", world)


def _mlp(block: Block, world: World) -> Iterator[BufferRule]:
    ffn, hidden, layers = block.sizes["ffn_size"], block.sizes["hidden_size"], world.index(block)
    rows = world.over_tp(lambda r: _gate_up(ffn, world.tp, r, 1))
    for suffix, columns in ("", (hidden,)), ("_bias", ()):
        if f"gate{suffix}" not in block.tensors:
            continue
        gate, up = (block.tensors[f"{role}{suffix}"] for role in ("gate", "up"))
        check_shape(gate, ffn, *columns)
        check_shape(up, ffn, *columns)
        parts = [Part(gate, "gate"), Part(up, "up")]
        yield world.rule(renamed(gate, _GATE_UP), parts, layers, rows, *(whole(size) for size in columns))
    down = block.tensors["down"]
    check_shape(down, hidden, ffn)
    columns_of_down = world.over_tp(lambda r: _ffn(whole(ffn), world.tp, r))
    yield world.rule(down.name, [Part(down)], layers, whole(hidden), columns_of_down)
    for role in "down_bias", "router":
        if role in block.tensors:
            yield held_whole(block, role, world)


def _moe(block: Block, world: World) -> Iterator[BufferRule]:
    gate, up, down = (block.tensors[role] for role in ("gate", "up", "down"))
    num, ffn, hidden = (block.sizes[key] for key in ("num_experts", "ffn_size", "hidden_size"))
    layers, experts = world.index(block), gate.dims[1]
    parts, multiple = (1 if world.expert_parallel else world.moe), world.expert_multiple

    def slots(rank: int) -> Dim:
        placed = placed_experts(num, world.moe, rank, placement=world.placement, redundant=world.redundant)
        return take(experts, [position for _, position in placed])

    def cut_rows(rule: Callable[[int], Dim]) -> Dim | Sharded:
        return rule(0) if world.expert_parallel else world.over_moe(rule)

    held = world.over_moe(slots) if world.expert_parallel else experts
    replica = world.redundant > 0
    for tensor, shape in (gate, (ffn, hidden)), (up, (ffn, hidden)), (down, (hidden, ffn)):
        check_shape(tensor, *shape)
    yield world.rule(
        renamed(gate, *_W13),
        [Part(gate, "gate", replica), Part(up, "up", replica)],
        layers,
        held,
        cut_rows(lambda r: _gate_up(ffn, parts, r, multiple)),
        whole(hidden),
        stacked=(1, 2, 3),
    )
    yield world.rule(
        renamed(down, *_W2),
        [Part(down, replica=replica)],
        layers,
        held,
        whole(hidden),
        cut_rows(lambda r: pad(_ffn(whole(ffn), parts, r), multiple)),
        stacked=(1, 2, 3),
    )
    yield held_whole(block, "router", world)
    if "router_bias" in block.tensors:
        bias = block.tensors["router_bias"]
        check_shape(bias, num)
        yield world.rule(bias.name, [Part(bias)], layers, *bias.dims[1:], dtype=bias.dtype)


def _gate_up(ffn: int, parts: int, rank: int, multiple: int) -> Dim:
    rows = pad(_ffn(whole(ffn), parts, rank), multiple)
    return concat(relabel(rows, "gate"), relabel(rows, "up"))


def _ffn(dim: Dim, parts: int, rank: int) -> Dim:
    check_divides("ffn_size", len(dim), "ranks", parts, "choose a tp, for experts a tp * dp, that divides it")
    return even(dim, parts, rank)


# Kind of block -> the tensors that it must have, those that it may have, and its rules.
_KINDS: Mapping[str, tuple[str, str, Callable[[Block, World], Iterator[BufferRule]]]] = {
    "embedding": ("embed", "", _embedding),
    "norms": ("", "input_norm post_attention_norm", _norms),
    "attention": ("q k v o", "q_bias+k_bias+v_bias o_bias q_norm+k_norm", _attention),
    "gated_attention": ("q k v o q_norm k_norm", "", gdn.gated_attention),
    "delta": ("conv a_log dt_bias norm out", "qkvz+ba qkv+z+b+a", gdn.delta),
    "mamba": ("in conv a_log d dt_bias norm out", "in_bias+out_bias conv_bias", mamba.mixer),
    "plain_mlp": ("up down", "up_bias+down_bias", mamba.plain_mlp),
    "mla": ("kv_a kv_a_norm kv_b o", "q q_a+q_a_norm+q_b", mla.latent),
    "mlp": ("gate up down", "gate_bias+up_bias down_bias", _mlp),
    "moe": ("router gate up down", "router_bias", _moe),
    "shared": ("gate up down", "router", _mlp),
    "mtp": ("embed_norm hidden_norm proj norm", "", _norms),
    "final": ("norm", "", _final),
    "head": ("head", "", _head),
}
