"""What the ranks of a Megatron job hold in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardweave.dialects.megatron.mla import MTP_LAYERS
from shardweave.dialects.megatron.ranks import Stages, layers_of, padded_vocab_size, stages
from shardweave.dialects.megatron.weight import Weight, halves
from shardweave.dialects.megatron.weights import only, weights
from shardweave.errors import GeometryError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Run, Sharded, along, even, whole
from shardweave.models.spec import Model


def layout(
    model: Model,
    mesh: Mesh,
    *,
    spec: str = "te",
    experts: str = "grouped",
    pipeline: Stages | None = None,
    vocab_divisor: int = 128,
    mtp_layer: str = MTP_LAYERS[0],
    down_proj: str = "",
) -> Layout:
    """What each rank of a Megatron job holds, under the names that its modules give.

    Args:
        model: The model.
        mesh: The ranks, from ``mesh()``.
        spec: Layer spec, ``"te"`` or ``"local"``.
        experts: ``"grouped"`` (``experts.linear_fc1.weight{i}``) or ``"sequential"``
            (``experts.local_experts.{i}.linear_fc1.weight``).
        pipeline: Layers of each chunk and stage, from ``stages()``; even where not given.
        vocab_divisor: Megatron's ``make_vocab_size_divisible_by``; 1 where it is not padded.
        mtp_layer: What the layer within a layer for a further token is called, one of ``MTP_LAYERS``.
        down_proj: How latent attention's way down is held, ``"replicated"`` or ``"column"``; by default
            replicated in Transformer Engine's spec and cut in the local one.

    Layers for further tokens are all on the last stage, which has a copy of the embedding for them.

    Raises:
        GeometryError, CutError: Degrees that the model cannot be cut by.
    """
    tp, pp = mesh.axis_size("tp"), mesh.axis_size("pp")
    pipeline = pipeline or stages(model.num_layers, pp)
    if experts not in ("grouped", "sequential"):
        raise GeometryError(
            "experts are stored grouped or sequentially",
            equation=f"experts({experts!r}) is not 'grouped' or 'sequential'",
            hint="grouped for --moe-grouped-gemm, sequential otherwise",
        )
    vocab = next(block.sizes["vocab_size"] for block in model.of("embedding"))
    padded = padded_vocab_size(vocab, tp=tp, divisor=vocab_divisor)
    rules: list[BufferRule] = []
    form = {"spec": spec, "mtp_layer": mtp_layer, "down_proj": down_proj}
    for weight in weights(model, stored=False, padded_vocab=padded, **form):
        shape = list[Dim | Sharded](weight.dims)
        if weight.cut_dim is not None:
            shape[weight.cut_dim] = _cut_along(mesh, "etp" if weight.expert else "tp", weight)
        if not weight.parts[0].tensor.index:
            rules += _edge_rules(model, weight, tuple(shape), pp, len(pipeline))
            continue
        chunks = list(enumerate(layers_of(pipeline)))
        for v, chunk in chunks[-1:] if weight.further else chunks:
            prefix = f"model{v}." if len(pipeline) > 1 else ""
            if weight.further:
                behind = range(model.num_layers, 1 + max(n for _, n in weight.layers))
                chunk = (*(range(0) for _ in chunk[:-1]), behind)
            rules.append(_layer_rule(mesh, chunk, prefix, weight, tuple(shape), experts))
    return Layout("megatron", mesh, tuple(rules))


def _cut_along(mesh: Mesh, axis: str, weight: Weight) -> Sharded:
    size = mesh.axis_size(axis)
    dim = weight.dims[weight.cut_dim or 0]
    parts = 2 * size if weight.cut is halves else size
    if len(dim) % parts:
        raise GeometryError(
            f"{axis} cuts a weight into equal rows or columns",
            where=f"weight {weight.path!r} ({', '.join(part.tensor.name for part in weight.parts)})",
            equation=f"size({len(dim)}) % {'2 * ' if parts != size else ''}{axis}({size}) != 0",
            hint=f"choose a {axis} that divides it; Megatron has no uneven cut",
        )
    return along(mesh, axis, lambda r: weight.cut(dim, size, r))


def _edge_rules(
    model: Model, weight: Weight, shape: tuple[Dim | Sharded, ...], pp: int, chunks: int
) -> Iterator[BufferRule]:
    """The weights before the first and after the last layer."""
    first, last = ("model0.", f"model{chunks - 1}.") if chunks > 1 else ("", "")
    embedding = weight.path.startswith("embedding.")
    where = (("pp", (0 if embedding else pp - 1,)),)
    yield BufferRule((first if embedding else last) + weight.path, weight.parts, shape, where=where)
    copy = tuple(replace(part, replica=True) for part in weight.parts)
    if embedding and model.tied and pp > 1:
        # The last stage computes logits with a copy of the embedding.
        yield BufferRule(last + "output_layer.weight", copy, shape, where=(("pp", (pp - 1,)),))
    if embedding and pp > 1 and model.decoder is not model:
        # Layers for further tokens read their embeddings.
        yield BufferRule(last + weight.path, copy, shape, where=(("pp", (pp - 1,)),))


def _layer_rule(
    mesh: Mesh,
    chunk: tuple[range, ...],
    prefix: str,
    weight: Weight,
    shape: tuple[Dim | Sharded, ...],
    experts: str,
) -> BufferRule:
    here = [only(weight.layers, layers) for layers in chunk]
    index: list[Dim | Sharded] = [along(mesh, "pp", lambda s: here[s])]
    # A stage counts its layers from 0, those without this weight included.
    numbers = along(mesh, "pp", lambda s: Dim(Run("", n - chunk[s].start, 1) for _, n in here[s]))
    printed: list[tuple[str, Dim | Sharded]] = [("layer", numbers)]
    path = weight.path
    if weight.expert:
        ep = mesh.axis_size("ep")
        all_experts = weight.parts[0].tensor.index[1][1]
        if len(all_experts) % ep:
            raise GeometryError(
                "ep spreads experts evenly",
                where=f"weight {path!r}",
                equation=f"num_experts({len(all_experts)}) % ep({ep}) != 0",
                hint="choose an ep that divides the experts",
            )
        index.append(along(mesh, "ep", lambda r: even(all_experts, ep, r)))
        printed.append(("expert", along(mesh, "ep", lambda _: whole(len(all_experts) // ep))))
        one = "mlp.experts.local_experts.{expert}."
        path = path.replace("mlp.experts.", one) if experts == "sequential" else path + "{expert}"
    name = f"{prefix}{weight.module}.layers.{{layer}}.{path}"
    return BufferRule(
        name, weight.parts, (*index, *shape), numbers=tuple(printed), transform=weight.transform
    )
