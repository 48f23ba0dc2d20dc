"""What a Megatron ``torch_dist`` checkpoint stores, and how ranks divide the writing of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardweave.dialects.megatron.mla import MTP_LAYERS
from shardweave.dialects.megatron.ranks import Stages, layers_of, stages
from shardweave.dialects.megatron.weight import Weight, halves, rows
from shardweave.dialects.megatron.weights import NUMBERED, specs, weights
from shardweave.dialects.names import match
from shardweave.errors import GeometryError
from shardweave.layout import BufferRule, Dim, Layout, Mesh, Part, Run, even, whole
from shardweave.models.spec import Model

_LAYER_KEYS = ("stacked", "per_layer", "singleton")


def checkpoint(
    model: Model,
    *,
    spec: str = "te",
    layer_keys: str = "stacked",
    padded_vocab: int | None = None,
    mtp_layer: str = MTP_LAYERS[0],
) -> Layout:
    """What a ``torch_dist`` checkpoint stores: whole weights, whatever ranks wrote it.

    Args:
        model: The model.
        spec: Layer spec of the model that wrote it; it decides the names of norms before experts.
        layer_keys: ``"stacked"``, one tensor ``[layers, ...]`` for all layers, which must be alike;
            ``"per_layer"``, one for each layer, experts stacked; ``"singleton"``, one for each layer and
            expert, gate and up apart. Layers for further tokens are never stacked.
        padded_vocab: Rows of the stored vocabulary; ``None`` where it is not padded.
        mtp_layer: What the layer within a layer for a further token is called, one of ``MTP_LAYERS``.
    """
    form = {"spec": spec, "layer_keys": layer_keys, "mtp_layer": mtp_layer}
    stored = _stored(model, padded_vocab=padded_vocab, **form)
    return Layout("torch_dist", Mesh(()), tuple(rule for _, rule in stored))


def variant(keys: Iterable[str], model: Model, *, padded_vocab: int | None = None) -> Layout:
    """The form in which a checkpoint with these keys is stored, decided by names alone.

    Raises:
        UnknownNameError: The keys are not exactly those of any form.
    """
    return match(_variants(model, padded_vocab), keys)


def _variants(model: Model, padded_vocab: int | None) -> Iterator[Layout]:
    alike = layers_alike(model)
    forms = [(model.decoder, MTP_LAYERS[0])]
    if model.decoder is not model:
        forms = [*((model, name) for name in MTP_LAYERS), *forms]
    for (one, mtp_layer), spec, layer_keys in itertools.product(forms, specs(model), _LAYER_KEYS):
        if alike or layer_keys != "stacked":
            form = {"spec": spec, "layer_keys": layer_keys, "mtp_layer": mtp_layer}
            yield checkpoint(one, padded_vocab=padded_vocab, **form)


def layers_alike(model: Model) -> bool:
    """Whether all layers of the decoder have the same weights, and so may be stacked.

    Layers beside mixers are numbered in any case: Megatron's class for them stacks none.
    """
    numbered = any(True for kind in NUMBERED for _ in model.of(kind))
    return not numbered and all(len(block.layers) in (0, model.num_layers) for block in model.decoder.blocks)


def _stored(
    model: Model, *, spec: str, layer_keys: str, padded_vocab: int | None, mtp_layer: str = MTP_LAYERS[0]
) -> Iterator[tuple[Weight, BufferRule]]:
    """Each stored weight with the rule that names it."""
    if layer_keys not in _LAYER_KEYS:
        raise GeometryError(
            "the keys of a checkpoint are of a known kind",
            equation=f"layer_keys({layer_keys!r}) is not one of {', '.join(_LAYER_KEYS)}",
            hint="stacked where all layers are alike, per_layer otherwise",
        )
    form = {"spec": spec, "mtp_layer": mtp_layer}
    for weight in weights(model, stored=True, padded_vocab=padded_vocab, **form):
        for stored in _halved(weight) if layer_keys == "singleton" else (weight,):
            yield stored, _rule(model, stored, layer_keys)


def _halved(weight: Weight) -> Iterator[Weight]:
    """Gate and up as weights of their own, as singleton keys have them."""
    if weight.cut is not halves:
        yield weight
        return
    for suffix, part in zip(("_w", "_v"), weight.parts, strict=True):
        size = whole(len(weight.dims[0]) // 2)
        yield replace(
            weight,
            path=weight.path + suffix,
            parts=(Part(part.tensor),),
            dims=(size, *weight.dims[1:]),
            cut=rows,
        )


def _rule(model: Model, weight: Weight, layer_keys: str) -> BufferRule:
    index = weight.parts[0].tensor.index
    if not index:
        return BufferRule(weight.path, weight.parts, weight.dims)
    dims = (weight.layers, *(dim for _, dim in index[1:]), *weight.dims)
    path = weight.path.replace("mlp.experts.", "mlp.experts.experts.")
    if layer_keys == "stacked" and not weight.further:
        if len(weight.layers) != model.num_layers or not layers_alike(model):
            raise GeometryError(
                "layers that are stacked in one tensor are all alike",
                where=f"weight {weight.path!r}",
                equation=f"it is on {len(weight.layers)} of {model.num_layers} layers: {weight.layers}, "
                f"all alike: {layers_alike(model)}",
                hint="store unlike layers with layer_keys='per_layer' (Megatron's non-homogeneous layers)",
            )
        stacked = tuple(range(len(dims)))
        return BufferRule(f"decoder.layers.{path}", weight.parts, dims, stacked, transform=weight.transform)
    name = f"{weight.module}.layers.{{layer}}.{path}"
    first = model.num_layers if weight.further else 0
    behind = Dim(Run("", n - first, 1) for _, n in weight.layers)
    numbers = (("layer", behind),) if first else ()
    if layer_keys != "singleton":
        stacked = tuple(range(1, len(dims)))
        return BufferRule(name, weight.parts, dims, stacked, numbers, transform=weight.transform)
    name = name.replace("experts.experts.", "experts.experts.{expert}.")
    return BufferRule(name, weight.parts, dims, numbers=numbers, transform=weight.transform)


def extra_states(model: Model, *, spec: str = "te", layer_keys: str = "stacked") -> Iterator[str]:
    """The keys of the objects that a job asks for beside the weights: its modules' extra states, all empty.

    A job refuses a checkpoint that lacks one of its own and ignores those of others, so here are all
    that a version of Transformer Engine may have: of linear layers, attention and norms.

    Source: megatron-core 0.16.1 for the local spec; for Transformer Engine, public reports of missing keys.
    """
    seen: set[tuple[str, Dim]] = set()
    for weight in weights(model, spec=spec, stored=True):
        # Of a weight that is stored by segments there is one module.
        path, segment, _ = weight.path.partition(".weight.")
        module, _, kind = (f"{path}.weight" if segment else weight.path).rpartition(".")
        if segment and (module, weight.layers) in seen:
            continue
        if segment:
            seen.add((module, weight.layers))
        layered = bool(weight.parts[0].tensor.index)
        linear = kind == "weight" and layered and (weight.cut_dim is not None or ".linear_" in module)
        if module.endswith((".conv1d", "mixer.norm")):
            continue
        if linear:
            yield from _extra_state(model, weight, module, layer_keys)
        if spec == "te" and linear and module.endswith((".linear_qkv", ".linear_kv_up_proj")):
            core = module.rpartition(".")[0] + ".core_attention"
            yield from _extra_state(model, weight, core, layer_keys)
        if spec == "te" and kind == "weight" and module.endswith("norm"):
            yield from _extra_state(model, weight, module, layer_keys)


def _extra_state(model: Model, weight: Weight, module: str, layer_keys: str) -> Iterator[str]:
    """Objects are numbered where weights are stacked: ``shard_``, their place, ``_``, how many there are."""
    index = [[n for _, n in dim] for _, dim in weight.parts[0].tensor.index]
    if not index:
        yield f"{module}._extra_state/shard_0_1"
        return
    index[0] = [n - (model.num_layers if weight.further else 0) for _, n in weight.layers]
    if weight.further and layer_keys == "stacked":
        layer_keys = "per_layer"
    numbered = {"stacked": 0, "per_layer": 1, "singleton": 2}[layer_keys]
    sizes = ".".join(str(len(numbers)) for numbers in index[numbered:]) or "1"
    for numbers in itertools.product(*index):
        path = module.replace("mlp.experts.", "mlp.experts.experts.")
        if numbered == 2 and weight.expert:
            path = path.replace("experts.experts.", f"experts.experts.{numbers[1]}.")
        layer = "" if layer_keys == "stacked" else f"{numbers[0]}."
        places = ".".join(map(str, numbers[numbered:])) or "0"
        yield f"{weight.module}.layers.{layer}{path}._extra_state/shard_{places}_{sizes}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a stored tensor that one rank writes."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def shards(
    model: Model,
    mesh: Mesh,
    *,
    spec: str = "te",
    layer_keys: str = "stacked",
    pipeline: Stages | None = None,
    padded_vocab: int | None = None,
) -> Mapping[str, tuple[Shard, ...]]:
    """How the ranks of a job divide the writing of a checkpoint: the shards of each key.

    A shard is what one rank holds contiguously of one stored tensor; of replicas the first rank
    writes. Law: the shards of a key tile it, padding included.
    """
    chunks = layers_of(pipeline or stages(model.num_layers, mesh.axis_size("pp")))
    last = mesh.axis_size("pp") - 1
    further = {n: last for block in model.of("mtp") for _, n in block.layers}
    stage = further | {layer: s for chunk in chunks for s, layers in enumerate(chunk) for layer in layers}
    found: dict[str, tuple[Shard, ...]] = {}
    for weight, rule in _stored(model, spec=spec, layer_keys=layer_keys, padded_vocab=padded_vocab):
        dims = [*_index_ranges(weight, mesh, stage), *_shape_ranges(weight, mesh)]
        edge = {} if weight.parts[0].tensor.index else {"pp": _edge(weight, mesh)}
        buffer = rule.at(Mesh(()), 0)
        assert buffer is not None
        for key, positions in buffer.members():
            fixed = dict(zip(buffer.separate, positions, strict=True))
            here = [
                [(r, c) for r, c in ranges if fixed.get(d, r.start) in r] for d, ranges in enumerate(dims)
            ]
            found[key] = tuple(
                Shard(
                    int(mesh.where(edge | {axis: at for _, c in box for axis, at in c.items()})[0]),
                    tuple(box[d][0].start for d in buffer.stacked),
                    tuple(len(box[d][0]) for d in buffer.stacked),
                )
                for box in itertools.product(*here)
            )
    return found


_Ranges = list[tuple[range, dict[str, int]]]
"""Stretches of positions of a stored dim, each with the coordinates of the ranks that hold it."""


def _index_ranges(weight: Weight, mesh: Mesh, stage: Mapping[int, int]) -> Iterator[_Ranges]:
    index = weight.parts[0].tensor.index
    if index:
        yield [(range(i, i + 1), {"pp": stage[layer]}) for i, (_, layer) in enumerate(weight.layers)]
    if weight.expert:
        share = len(index[1][1]) // mesh.axis_size("ep")
        yield [(range(e, e + 1), {"ep": e // share}) for e in range(len(index[1][1]))]


def _shape_ranges(weight: Weight, mesh: Mesh) -> Iterator[_Ranges]:
    axis = "etp" if weight.expert else "tp"
    for d, dim in enumerate(weight.dims):
        if d != weight.cut_dim:
            yield [(range(len(dim)), {})]
            continue
        # A cut of the positions says where the cut of what lies there is. Gate and up are written apart.
        size = mesh.axis_size(axis)
        whole_dim = whole(len(dim))
        parts = [even(whole_dim, 2, half) for half in (0, 1)] if weight.cut is halves else [whole_dim]
        cuts = [(rows(part, size, r), r) for r in range(size) for part in parts]
        yield [(range(run.start, run.last + 1), {axis: r}) for one, r in cuts for run in one.runs]


def _edge(weight: Weight, mesh: Mesh) -> int:
    """The stage of a weight outside the layers."""
    return 0 if weight.path.startswith("embedding.") else mesh.axis_size("pp") - 1
