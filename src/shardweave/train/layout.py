"""What each rank of the runtime holds of a model: names are Hugging Face's, experts are stacked.

Every element of a weight is on exactly the ranks that differ on axes which do not cut it, and on no other: no
KV head is repeated to fill up ranks. Where heads do not divide, K and V are cut by rows, and their values
rather than their weights go to the ranks that need them (``train/model.py``).

| weights | cut over |
|---|---|
| Q, K, V, gate, up (rows), o, down (columns) | ``tp`` |
| embedding and head (rows, padded to a multiple) | ``tp``, on the first and the last stage |
| experts | ``ep`` by whole experts, ``etp`` by rows and columns |
| norms, the router, the projections of heads for further tokens | nothing |
| patches and positions of a vision tower | nothing |
| the first linear of its projector (rows), the second (columns) | ``tp`` |
| layers | ``pp`` |
| heads for further tokens | nothing: on the last stage, with an embedding of its own |

Matrices are cut once more, over the axes that share weights (``Parallel.weight_axes``): along the rows that
each has after the cuts above, so that a share of a column-parallel weight has fewer of its rows, and one of a
row-parallel weight fewer rows of its columns. Where rows do not divide, the last shares are filled up; that
padding is in no tensor of the model. Norms, biases and routers are not shared: they are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardweave.errors import GeometryError, ModelError
from shardweave.layout import (
    BufferRule,
    Dim,
    Layout,
    Mesh,
    Part,
    Run,
    Sharded,
    Tensor,
    along,
    even,
    pad,
    replicated,
    whole,
)
from shardweave.models import Block, Model

_ROWS = (
    *("q", "k", "v", "gate", "up", "q_bias", "k_bias", "v_bias", "gate_bias", "up_bias"),
    *("linear_1", "linear_1_bias"),
)
_COLUMNS = ("o", "down", "linear_2")
_WHOLE = (
    *("input_norm", "post_attention_norm", "q_norm", "k_norm", "norm", "o_bias", "down_bias", "router"),
    *("embed_norm", "hidden_norm", "proj"),
    *("input_norm_bias", "post_attention_norm_bias", "linear_2_bias", "bias"),
    *("patches", "patches_bias", "positions"),
)
_KINDS = (
    *("embedding", "norms", "attention", "mlp", "moe", "final", "head", "mtp"),
    *("patches", "positions", "layer_norms", "plain_mlp", "final_bias", "projector"),
)


def train_layout(
    model: Model,
    mesh: Mesh,
    *,
    stages: Sequence[Sequence[int]],
    dtype: str = "",
    share: Sequence[str] = (),
    share_experts: Sequence[str] = (),
    multiple: int = 1,
) -> Layout:
    """The layout of the runtime's parameters.

    Args:
        model: The model.
        mesh: With the axes ``tp``, ``pp`` and, for experts, ``ep`` and ``etp``; others replicate.
        stages: The layer numbers of each stage, in any order.
        dtype: The dtype of the parameters; that of the model by default.
        share: The axes that share dense matrices, in the order of the mesh.
        share_experts: Those that share the matrices of experts.
        multiple: The rows of a share are a multiple of it; 0 where rows have to divide evenly.

    Laws:
        ``prove(train_layout(...))`` holds.
        The shares of a matrix, one after the other and without padding, are what there is without ``share``.

    Raises:
        GeometryError: A dim does not divide, or a layer is on no stage or on two.
        ModelError: The model has blocks that the runtime does not compute.
    """
    held = sorted(layer for stage in stages for layer in stage)
    if len(stages) != mesh.axis_size("pp") or held != list(range(model.num_layers)):
        raise GeometryError(
            "every layer is on one stage",
            where=f"{len(stages)} stages on mesh {mesh}",
            equation=f"layers({held}) != 0..{model.num_layers - 1}",
            hint="give the layers of each stage, each layer once",
        )
    further = sorted(number for block in model.of("mtp") for _, number in block.layers)
    stages = [*stages[:-1], [*stages[-1], *further]]
    at_end = model.tied or bool(further)
    rules: list[BufferRule] = []
    for block in model.blocks:
        if block.kind not in _KINDS:
            raise ModelError(
                "the runtime computes every block of its models",
                where=f"family {model.family!r}",
                equation=f"kind({block.kind!r}) is not one of {', '.join(_KINDS)}",
                hint="train llama, qwen3 or qwen3_moe; other families can be converted and refitted",
            )
        for role, tensor in block.tensors.items():
            in_expert = block.kind == "moe" and role != "router"
            shares = _Shares(mesh, tuple(share_experts if in_expert else share), multiple)
            rules += _rules(block, role, tensor, mesh, stages, shares, at_end=at_end)
    if dtype:
        rules = [replace(rule, dtype=dtype) for rule in rules]
    return Layout("train", mesh, tuple(rules))


@dataclass(frozen=True, slots=True)
class _Shares:
    """How rows are shared."""

    mesh: Mesh
    axes: tuple[str, ...]
    multiple: int

    def along(self, axis: str | None, held: Callable[[int], Dim], what: str) -> Sharded:
        """The rows that are left at a coordinate on ``axis``, cut over the axes that share them."""
        sizes = [self.mesh.axis_size(name) for name in self.axes]
        parts = math.prod(sizes)

        def rows(*at: int) -> Dim:
            mine = held(at[0] if axis else 0)
            if not self.multiple and len(mine) % parts:
                raise GeometryError(
                    "every rank has an equal share of a weight",
                    where=what,
                    equation=f"rows({len(mine)}) % shares({parts}) = {len(mine) % parts} != 0",
                    hint="fill shares up (a multiple of 1 or more), or share the weight over fewer ranks",
                )
            number = sum(c * math.prod(sizes[:i]) for i, c in enumerate(at[1:] if axis else at))
            return even(pad(mine, parts * max(1, self.multiple)), parts, number) if parts > 1 else mine

        return along(self.mesh, (axis, *self.axes) if axis else self.axes, rows)


def _rules(
    block: Block,
    role: str,
    tensor: Tensor,
    mesh: Mesh,
    stages: Sequence[Sequence[int]],
    shares: _Shares,
    *,
    at_end: bool,
) -> Iterator[BufferRule]:
    if role not in (*_ROWS, *_COLUMNS, *_WHOLE, "embed", "head"):
        raise ModelError(
            "the runtime computes with every tensor of its models",
            where=f"tensor {tensor.name!r}",
            equation=f"role({role!r}) of a block of kind {block.kind!r} is not known",
            hint="train llama, qwen3 or qwen3_moe; other families can be converted and refitted",
        )
    in_expert = block.kind == "moe" and role != "router"
    axis = "etp" if in_expert else "tp"

    def cut(dim: int, padded: bool = False) -> Callable[[int], Dim]:
        size, parts = tensor.shape[dim], mesh.axis_size(axis)
        held = pad(whole(size), parts) if padded else whole(size)
        if len(held) % parts:
            raise GeometryError(
                "every rank has an equal share of a weight",
                where=f"tensor {tensor.name!r}, dim {dim}",
                equation=f"size({size}) % {axis}({parts}) = {size % parts} != 0",
                hint=f"choose a {axis} that divides {size}",
            )
        return lambda rank: even(held, parts, rank)

    dims: list[Dim | Sharded] = list(tensor.dims)
    first = len(tensor.index)
    is_matrix = len(tensor.shape) > 1 and role != "router"
    if role in _COLUMNS:
        dims[first + 1] = along(mesh, axis, cut(1))
    held: Callable[[int], Dim] | None = None
    if role in _ROWS:
        held = cut(0)
    elif role in ("embed", "head"):
        held = cut(0, padded=True)
    rows = tensor.dims[first]
    if is_matrix and shares.axes:
        what = f"tensor {tensor.name!r}"
        dims[first] = shares.along(axis if held else None, held or (lambda _: rows), what)
    elif held:
        dims[first] = along(mesh, axis, held)
    parts = (Part(tensor),)
    if not tensor.index:
        last = mesh.axis_size("pp") - 1
        stage = 0 if role == "embed" else last
        rule = BufferRule(tensor.name, parts, tuple(dims), where=(("pp", (stage,)),))
        yield rule
        if role == "embed" and at_end and last:
            yield replicated(BufferRule(tensor.name, parts, tuple(dims), where=(("pp", (last,)),)))
        return
    layers = {number for _, number in tensor.dims[0]}
    dims[0] = along(
        mesh, "pp", lambda stage: Dim(Run("", layer, 1) for layer in sorted(layers & set(stages[stage])))
    )
    if not in_expert:
        yield BufferRule(tensor.name, parts, tuple(dims))
        return
    num_experts, ep = len(tensor.dims[1]), mesh.axis_size("ep")
    if num_experts % ep:
        raise GeometryError(
            "every rank has an equal number of experts",
            where=f"tensor {tensor.name!r}",
            equation=f"num_experts({num_experts}) % ep({ep}) = {num_experts % ep} != 0",
            hint=f"choose an ep that divides {num_experts}",
        )
    dims[1] = along(mesh, "ep", lambda rank: even(tensor.dims[1], ep, rank))
    yield BufferRule(tensor.name.replace(".{expert}", ""), parts, tuple(dims), stacked=(1, 2, 3))
