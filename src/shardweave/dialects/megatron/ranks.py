"""The ranks of a Megatron job, and which layers its pipeline stages have."""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.errors import GeometryError
from shardweave.layout import Mesh, ordered, pad, whole

Stages = tuple[tuple[int, ...], ...]
"""Number of layers by virtual chunk, then by pipeline stage."""


def mesh(
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = "tp-cp-ep-dp-pp",
    offset: int = 0,
) -> Mesh:
    """The ranks of a Megatron job: dense weights over ``tp cp dp pp``, experts over ``etp ep edp pp``.

    Args:
        tp: Tensor parallel degree.
        cp: Context parallel degree.
        pp: Pipeline parallel degree.
        ep: Expert parallel degree.
        dp: Data parallel degree; ``None`` means the smallest that the experts fit in.
        etp: Expert tensor parallel degree. Megatron takes ``tp`` where it is not given, which has
            surprised many; here it must be said where experts are spread and ``tp`` is not 1.
        order: Rank order, the leftmost varying fastest.
        offset: The first global rank.

    Raises:
        GeometryError: Half-given, or the degrees do not multiply to one number of ranks.
        MeshError: The pipeline groups of experts and dense weights differ in this order.

    >>> print(mesh(tp=4, ep=2, etp=1, dp=2))
    tp=4,cp=1,dp=2,pp=1 | etp=1,ep=2,edp=4,pp=1
    """
    if etp is None:
        if ep > 1 and tp > 1:
            raise GeometryError(
                "the expert tensor parallel degree is said where experts are spread",
                equation=f"tp({tp}), ep({ep}), etp(not given)",
                hint=f"give etp=1 for whole experts, or etp={tp} (Megatron's default) to cut them like tp",
            )
        etp = tp
    expert = etp * ep
    if dp is None:
        dp = next(n for n in range(1, expert + 1) if tp * cp * n % expert == 0)
    if tp * cp * dp % expert:
        raise GeometryError(
            "the ranks of a stage hold whole groups of experts",
            equation=f"tp({tp}) * cp({cp}) * dp({dp}) % (etp({etp}) * ep({ep}) = {expert}) != 0",
            hint="choose dp so that etp * ep divides tp * cp * dp",
        )
    dense = ordered(order.replace("-ep", "").replace("ep-", ""), {"tp": tp, "cp": cp, "dp": dp, "pp": pp})
    expert_names = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
    expert_sizes = {"etp": etp, "ep": ep, "edp": tp * cp * dp // expert, "pp": pp}
    tokens = [expert_names[token] for token in order.split("-") if token in expert_names]
    return Mesh(dense.axes, (ordered("-".join(tokens), expert_sizes).axes,), offset)


def stages(
    num_layers: int,
    pp: int,
    *,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    sizes: Sequence[int] | None = None,
) -> Stages:
    """How many layers each virtual chunk of each pipeline stage has.

    Layers run through the stages once for each virtual chunk: the layer of chunk ``v``, stage ``s``
    comes after all layers of smaller chunks and of the same chunk on smaller stages.

    Args:
        num_layers: Decoder layers of the model.
        pp: Pipeline stages.
        vpp: Virtual chunks a stage.
        first: Layers of the first stage, all chunks together, where it differs.
        last: Layers of the last stage, likewise.
        sizes: Explicit sizes, ``pp * vpp`` of them in layer order; overrides the rest.

    Raises:
        GeometryError: The layers do not come out even. Nothing is dropped and nothing rounded.

    >>> stages(10, 4, first=2, last=2)
    ((2, 3, 3, 2),)
    """
    if sizes is not None:
        if len(sizes) != pp * vpp or sum(sizes) != num_layers or min(sizes) < 0:
            raise GeometryError(
                "explicit pipeline sizes cover the layers",
                equation=f"sum({', '.join(map(str, sizes))}) = {sum(sizes)} over {len(sizes)} chunks != "
                f"num_layers({num_layers}) over pp({pp}) * vpp({vpp}) = {pp * vpp} chunks",
                hint="give one size a stage and chunk, in layer order",
            )
        return tuple(tuple(sizes[v * pp : (v + 1) * pp]) for v in range(vpp))
    edges = [n for n in (first, last) if n is not None]
    middle = pp - len(edges)
    left = num_layers - sum(edges)
    fits = left >= 0 and (left % (middle * vpp) == 0 if middle > 0 else left == 0)
    if pp < 1 or vpp < 1 or not fits or any(n % vpp for n in edges) or (pp == 1 and len(edges) > 1):
        raise GeometryError(
            "pipeline stages share the layers without a remainder",
            equation=f"num_layers({num_layers}) - first({first}) - last({last}) leaves {left} unassigned "
            f"over {middle} middle stages of vpp({vpp}) chunks, pp({pp})",
            hint="give the size of every stage (--stages 8,8,7,7), or of a first and last stage that fit",
        )
    share = left // middle if middle > 0 else 0
    per_stage = [share] * pp
    if first is not None:
        per_stage[0] = first
    if last is not None:
        per_stage[-1] = last
    return tuple(tuple(n // vpp for n in per_stage) for _ in range(vpp))


def padded_vocab_size(vocab_size: int, *, tp: int, divisor: int = 128) -> int:
    """The vocabulary with its padding: a multiple of ``divisor * tp``.

    >>> padded_vocab_size(151936, tp=8), padded_vocab_size(151936, tp=3)
    (152576, 152064)
    """
    return len(pad(whole(vocab_size), divisor * tp))


def layers_of(pipeline: Stages) -> tuple[tuple[range, ...], ...]:
    """The layer numbers of each chunk of each stage. Law: together they are all layers, in order."""
    found: list[tuple[range, ...]] = []
    at = 0
    for sizes in pipeline:
        chunk = []
        for size in sizes:
            chunk.append(range(at, at + size))
            at += size
        found.append(tuple(chunk))
    return tuple(found)
