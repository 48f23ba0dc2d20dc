"""The parameters of a Megatron rank in the order of its modules, and where each lies in what is stored whole.

The flat buffers of the distributed optimizer follow this order, and nothing in a checkpoint records it. It is
the order in which modules are made, stated here once. Whoever uses it proves it by what is stored: sizes of
buckets, borders of their chunks, and masters that round to the weights.

Source: megatron-core 0.16.1, ``transformer/{transformer_layer,attention,multi_latent_attention,mlp}.py``,
``transformer/{moe/{moe_layer,experts},multi_token_prediction}.py``, ``models/gpt/gpt_model.py``,
``models/common/language_module/language_module.py``; checked against its models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardweave.dialects.megatron.checkpoint import _halved, _rule
from shardweave.dialects.megatron.mla import MTP_LAYERS
from shardweave.dialects.megatron.ranks import Stages, layers_of, stages
from shardweave.dialects.megatron.weight import Segments, Weight, halves, rows
from shardweave.dialects.megatron.weights import weights
from shardweave.errors import GeometryError
from shardweave.layout import Box, Buffer, Mesh, even, whole
from shardweave.layout.box import intersect_range
from shardweave.models.spec import Model


@dataclass(frozen=True, slots=True)
class Stretch:
    """A block of a parameter and of the stored array that it is a block of.

    Attributes:
        array: The stored array.
        box: Where the block lies in it.
        at: Where it lies in the parameter. Sizes are those of ``box`` without its stacked dims of one index.
    """

    array: str
    box: Box
    at: Box


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of one rank.

    Attributes:
        name: Its name in the rank's module, without the chunk.
        shape: Its shape on the rank.
        stretches: Which blocks of stored arrays it is. Law: their ``at`` tile it, but for padding.
        expert: Whether it is of one of many experts.
        shared: Whether it is one of two embeddings that two stages have; these are in buckets of their own.
        replica: Whether another rank, or another parameter, stands for it.
        gathered: Whether ranks that share matrices have rows of it alone, and gather it for use.
    """

    name: str
    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    expert: bool = False
    shared: bool = False
    replica: bool = False
    gathered: bool = False

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


_ORDER = (
    "input_layernorm.", "self_attention.linear_proj.", "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.", "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.", "self_attention.linear_kv_up_proj.",
    "self_attention.linear_qkv.", "self_attention.q_layernorm.", "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.", "pre_mlp_layernorm.", "mlp.router.", "mlp.experts.",
    "mlp.shared_experts.", "mlp.linear_fc1.", "mlp.linear_fc2.",
)  # fmt: skip
"""The modules of a layer, in the order in which they are made."""
_WITHIN = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
_EDGES = ("embedding.", "decoder.layers.", "decoder.final", "mtp.layers.", "output_layer.")
_FURTHER = ("enorm.", "hnorm.", "eh_proj.", *(f"{name}." for name in MTP_LAYERS), "final_layernorm.")
"""What a layer for a further token has, a layer among it under one of its two names."""
_BUFFERS = ("mlp.router.expert_bias",)
"""What modules hold that is no parameter, and has no state."""


def parameters(
    model: Model,
    mesh: Mesh,
    rank: int,
    *,
    spec: str = "te",
    experts: str = "grouped",
    layer_keys: str = "stacked",
    pipeline: Stages | None = None,
    padded_vocab: int | None = None,
) -> tuple[tuple[Parameter, ...], ...]:
    """What a rank holds, chunk by chunk, each in the order of its modules.

    Args:
        model: The model.
        mesh: The ranks.
        rank: One of them.
        spec: Layer spec, ``"te"`` or ``"local"``.
        experts: ``"grouped"`` or ``"sequential"``, as in ``layout``.
        layer_keys: How layers are stored, as in ``checkpoint``.
        pipeline: Layers of each chunk and stage; even where not given.
        padded_vocab: Rows of the stored vocabulary; ``None`` where it is not padded.

    Raises:
        GeometryError: Degrees that the model cannot be cut by, or a model whose modules are not described.
    """
    at = mesh.coordinate(rank)
    pp = mesh.axis_size("pp")
    chunks = layers_of(pipeline or stages(model.num_layers, pp))
    live = list(weights(model, spec=spec, stored=False, padded_vocab=padded_vocab))
    kept = list(weights(model, spec=spec, stored=True, padded_vocab=padded_vocab))
    behind = range(model.num_layers, 1 + max((n for one in live for _, n in one.layers), default=0))
    if any(isinstance(weight.cut, Segments) for weight in live) or len(live) != len(kept):
        raise GeometryError(
            "the order of the parameters of a rank is described",
            where=f"model of {model.family}",
            equation="it has weights that are stored by segments",
            hint="save the optimizer with --dist-ckpt-optim-fully-reshardable; weights can be read alone",
        )
    if len(behind) and model.tied and pp > 1:
        raise GeometryError(
            "the parameters of the last stage are described",
            where=f"model of {model.family}, {pp} stages",
            equation="its output is its embedding, of which layers for further tokens have a copy too",
            hint="save the optimizer with --dist-ckpt-optim-fully-reshardable; weights can be read alone",
        )
    found: list[list[Parameter]] = [[] for _ in chunks]
    for weight, stored in zip(live, kept, strict=True):
        if weight.path.endswith(_BUFFERS):
            continue
        axis = "etp" if weight.expert else "tp"
        cut = tuple(_cut(weight, mesh.axis_size(axis), at[axis]))
        arrays = _arrays(model, stored, layer_keys)
        replica = weight.cut_dim is None and at[axis] != 0
        replica |= any(at[name] for name in (("edp",) if weight.expert else ("dp", "cp")))
        layers = [n for _, n in weight.layers]
        if not weight.parts[0].tensor.index:
            for v, name, shared, copy in _edges(model, weight, at["pp"], pp, len(chunks)):
                one = _parameter(name, weight, cut, arrays, ())
                found[v].append(replace(one, shared=shared, replica=replica or copy))
            continue
        for v, chunk in enumerate(chunks):
            here = chunk[at["pp"]]
            if weight.further:
                here = behind if (v, at["pp"]) == (len(chunks) - 1, pp - 1) else range(0)
            for layer in (n for n in here if n in layers):
                begin = f"{weight.module}.layers.{layer - here.start}."
                places = (layers.index(layer),)
                if not weight.expert:
                    one = _parameter(begin + weight.path, weight, cut, arrays, places)
                    found[v].append(replace(one, replica=replica))
                    continue
                count = len(weight.parts[0].tensor.index[1][1])
                share = even(whole(count), mesh.axis_size("ep"), at["ep"])
                for number, (_, expert) in enumerate(share):
                    path = _of_expert(weight.path, number, experts)
                    one = _parameter(begin + path, weight, cut, arrays, (*places, expert))
                    found[v].append(replace(one, replica=replica))
    return tuple(tuple(sorted(chunk, key=place_of)) for chunk in found)


def place_of(parameter: Parameter) -> tuple[int, ...]:
    """What parameters of a chunk are sorted by to be in the order of the modules.

    Raises:
        GeometryError: It is of a module whose place is not described.
    """
    edge = next((n for n, begin in enumerate(_EDGES) if parameter.name.startswith(begin)), None)
    match = re.fullmatch(r"(?:decoder|mtp)\.layers\.(\d+)\.(.+)", parameter.name)
    if edge is not None and not match:
        return (edge,)
    path = match[2] if match else ""
    within = next((n for n, begin in enumerate(_FURTHER) if path.startswith(begin)), None)
    if parameter.name.startswith("mtp.") and match and within is not None:
        if _FURTHER[within].rstrip(".") not in MTP_LAYERS:
            return edge or 0, int(match[1]), within
        layer = replace(parameter, name=f"decoder.layers.0.{path.partition('.')[2]}")
        return edge or 0, int(match[1]), within, *place_of(layer)[2:]
    module = next((n for n, begin in enumerate(_ORDER) if path.startswith(begin)), None)
    last = re.sub(r"\d+$", "", path.rpartition(".")[2])
    if match is None or edge is None or module is None or last not in _WITHIN:
        raise GeometryError(
            "the order of the parameters of a rank is described",
            where=repr(parameter.name),
            equation="the place of its module is not known",
            hint="save the optimizer with --dist-ckpt-optim-fully-reshardable; weights can be read alone",
        )
    sequential = re.search(r"local_experts\.(\d+)\.linear_fc([12])", path)
    grouped = re.search(r"linear_fc([12])\.\w+?(\d*)$", path)
    inner = (0, 0, 0)
    if sequential:
        inner = (int(sequential[1]), int(sequential[2]), 0)
    elif grouped:
        inner = (0, int(grouped[1]), 0)
    number = int(grouped[2]) if grouped and grouped[2] and not sequential else 0
    return edge, int(match[1]), module, *inner, _WITHIN.index(last), number


def _of_expert(path: str, number: int, experts: str) -> str:
    """The name of a weight of an expert below the layer."""
    if experts == "sequential":
        return path.replace("mlp.experts.", f"mlp.experts.local_experts.{number}.")
    return f"{path}{number}"


def _edges(
    model: Model, weight: Weight, stage: int, pp: int, chunks: int
) -> Iterator[tuple[int, str, bool, bool]]:
    """Chunks of a stage that have a weight outside the layers: its name, is it shared, and is it a copy."""
    embedding = weight.path.startswith("embedding.")
    further = model.decoder is not model
    shared = embedding and (model.tied or further) and pp > 1
    if stage == (0 if embedding else pp - 1):
        yield 0 if embedding else chunks - 1, weight.path, shared, False
    if shared and stage == pp - 1:
        # Layers for further tokens read their embeddings.
        yield chunks - 1, weight.path if further else "output_layer.weight", True, True


_Cut = tuple[tuple[int, int, int], ...]
"""First position on the rank, first position in the whole, and how many: stretches of the dim that is cut."""


def _cut(weight: Weight, size: int, part: int) -> Iterator[tuple[int, int, int]]:
    if weight.cut_dim is None:
        return
    dim, at = whole(len(weight.dims[weight.cut_dim])), 0
    # A cut of the positions says where the cut of what lies there is.
    parts = [even(dim, 2, half) for half in (0, 1)] if weight.cut is halves else [dim]
    cut = rows if weight.cut is halves else weight.cut
    for run in (run for one in parts for run in cut(one, size, part).runs):
        assert run.step == 1, "Megatron cuts no stripes"
        yield at, run.start, run.count
        at += run.count


def _arrays(model: Model, stored: Weight, layer_keys: str) -> tuple[tuple[Buffer, int], ...]:
    """The buffers of a stored weight, and at which row each begins: gate and up may be stored apart."""
    found, at = list[tuple[Buffer, int]](), 0
    for one in _halved(stored) if layer_keys == "singleton" else (stored,):
        buffer = _rule(model, one, layer_keys).at(Mesh(()), 0)
        assert buffer is not None, "a stored layout has one rank"
        found.append((buffer, at))
        at += len(one.dims[0])
    return tuple(found)


def _parameter(
    name: str, weight: Weight, cut: _Cut, arrays: tuple[tuple[Buffer, int], ...], places: tuple[int, ...]
) -> Parameter:
    """A parameter at its places in the dims over which layers and experts are stacked."""
    sizes = [len(dim) for dim in weight.dims]
    stretches = []
    for at, start, size in cut or ((0, 0, sizes[0]),):
        low = [0] * len(sizes)
        low[weight.cut_dim or 0] = start
        shape = list(sizes)
        shape[weight.cut_dim or 0] = size
        for buffer, begin in arrays:
            rows_of = intersect_range(
                range(low[0], low[0] + shape[0]), range(begin, begin + len(buffer.dims[len(places)]))
            )
            if not len(rows_of):
                continue
            held = Box((rows_of, *(range(o, o + n) for o, n in zip(low[1:], shape[1:], strict=True))))
            offset = [0] * len(sizes)
            offset[weight.cut_dim or 0] = at
            offset[0] += rows_of.start - low[0]
            fixed = [places[d] for d in buffer.stacked if d < len(places)]
            array = buffer.member(tuple(places[d] for d in buffer.separate))
            inside = [range(rows_of.start - begin, rows_of.stop - begin), *held.dims[1:]]
            box = Box((*(range(n, n + 1) for n in fixed), *inside))
            stretches.append(Stretch(array, box, Box.of(offset, held.shape)))
    if weight.cut_dim is not None:
        sizes[weight.cut_dim] = sum(size for *_, size in cut)
    gathered = weight.cut_dim is not None and len(sizes) == 2
    return Parameter(name, tuple(sizes), tuple(stretches), weight.expert, gathered=gathered)
