"""How vLLM cuts heads, the vocabulary, layers and experts over its ranks: each rule, stated once."""

from __future__ import annotations

import math

from shardweave.errors import GeometryError
from shardweave.layout import Dim, Mesh, Run, concat, cut, even, pad, take, whole

VOCAB_MULTIPLE = 64
"""What vLLM pads a vocabulary to a multiple of, unless a layer says otherwise."""


def mesh(*, tp: int, ep: int = 1, pp: int = 1, dp: int = 1, offset: int = 0) -> Mesh:
    """The ranks of a deployment: ``tp`` varies fastest, then ``pp``, then ``dp``.

    vLLM has no size of its own for expert parallelism: experts are spread over the ``tp * dp`` ranks
    of a stage, which are ``mesh.groups("tp", "dp")``. A given ``ep`` must say the same and adds the
    axis ``ep`` as a second factorisation. With both ``pp`` and ``dp`` the group is not a stretch of
    ranks and has no axis; leave ``ep`` out there.

    >>> print(mesh(tp=2, pp=2, ep=2))
    tp=2,pp=2,dp=1 | ep=2,pp=2

    Raises:
        GeometryError: ``ep`` is neither 1 nor ``tp * dp``.
    """
    if ep not in (1, tp * dp):
        raise GeometryError(
            "expert parallelism in vLLM spans all tensor and data parallel ranks of a stage",
            equation=f"ep({ep}) != tp({tp}) * dp({dp}) = {tp * dp}",
            hint=f"give ep={tp * dp}, or 1 to cut the rows of experts",
        )
    views = ((("ep", ep), ("pp", pp)),) if ep > 1 else ()
    return Mesh((("tp", tp), ("pp", pp), ("dp", dp)), views, offset)


def query_heads(dim: Dim, num_heads: int, tp: int, rank: int) -> Dim:
    """The Q rows of a rank: an equal number of whole heads.

    Raises:
        GeometryError: ``tp`` does not divide the heads.
    """
    check_divides("num_heads", num_heads, "tp", tp, "choose a tp that divides the query heads")
    return even(dim, tp, rank)


def kv_heads(dim: Dim, num_kv_heads: int, tp: int, rank: int) -> Dim:
    """The K or V rows of a rank: whole heads, each on ``tp / num_kv_heads`` ranks where tp is larger.

    Law: the query heads of a rank read only the KV heads of the same rank.

    >>> [str(kv_heads(whole(6), 2, 4, rank)) for rank in range(4)]
    ['[0:3]', '[0:3]', '[3:6]', '[3:6]']

    Raises:
        GeometryError: Neither of ``tp`` and ``num_kv_heads`` is a multiple of the other.
    """
    hint = f"choose a tp that divides or is a multiple of num_kv_heads({num_kv_heads})"
    if tp > num_kv_heads:
        check_divides("tp", tp, "num_kv_heads", num_kv_heads, hint)
    else:
        check_divides("num_kv_heads", num_kv_heads, "tp", tp, hint)
    parts = min(tp, num_kv_heads)
    return even(dim, parts, rank // (tp // parts))


def vocabulary(size: int, tp: int, rank: int, *, multiple: int = VOCAB_MULTIPLE) -> Dim:
    """The vocabulary rows of a rank: padded with zero rows at the end, then cut evenly.

    Raises:
        GeometryError: ``tp`` does not divide the padded size.

    >>> print(vocabulary(49159, 2, 1))
    [24608:49159] pad[57]
    """
    padded = pad(whole(size), multiple)
    check_divides(
        f"vocab_size({size}) padded to a multiple of {multiple}",
        len(padded),
        "tp",
        tp,
        f"vLLM refuses it too; a padding of lcm({multiple}, {tp}) = {math.lcm(multiple, tp)} would divide",
    )
    return even(padded, tp, rank)


def stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage: equal, the remainder going to the stages before the last one.

    >>> stages(61, 4)
    (15, 15, 16, 15)
    """
    sizes, rest = [num_layers // pp] * pp, num_layers % pp
    for stage in range(pp - 1 - rest, pp - 1):
        sizes[stage] += 1
    return tuple(sizes)


def placed_experts(
    num_experts: int, ep: int, rank: int, *, placement: str = "linear", redundant: int = 0
) -> Dim:
    """The logical experts in the slots of a rank.

    ``linear`` gives each rank a stretch of slots, the first ones one more where they do not divide;
    ``round_robin`` deals the experts out. Redundant slots follow the logical ones and start again at
    expert 0; they are the placement before the load balancer moves anything.

    >>> [str(placed_experts(10, 4, rank)) for rank in range(4)]
    ['[0:3]', '[3:6]', '[6:8]', '[8:10]']
    >>> print(placed_experts(10, 4, 3, redundant=2))
    [9:10] [0:2]

    Raises:
        GeometryError: The placement is unknown, or redundant slots do not divide.
    """
    if placement not in ("linear", "round_robin") or (redundant and placement != "linear"):
        raise GeometryError(
            "experts are placed linear or round_robin, redundant ones linear",
            equation=f"placement({placement!r}), redundant_experts({redundant})",
            hint="vLLM falls back to linear where it cannot deal out experts; its log says which one holds",
        )
    if placement == "round_robin":
        return Dim((Run("", rank, len(range(rank, num_experts, ep)), ep),))
    slots = concat(whole(num_experts), take(whole(num_experts), [i % num_experts for i in range(redundant)]))
    if redundant:
        check_divides(
            f"num_experts({num_experts}) + redundant_experts({redundant})",
            len(slots),
            "ep",
            ep,
            f"the smallest number of redundant experts that divides is {-num_experts % ep}",
        )
    size, rest = divmod(len(slots), ep)
    start = rank * size + min(rank, rest)
    return cut(slots, start, start + size + (rank < rest))


def check_divides(what: str, size: int, by: str, parts: int, hint: str) -> None:
    """Refuse a cut that does not come out even."""
    if size % parts:
        raise GeometryError(
            "vLLM gives every rank an equal share, of rows or of copies",
            equation=f"{what}({size}) % {by}({parts}) = {size % parts} != 0",
            hint=hint,
        )
