"""Our groups are those of megatron-core's own rank generator, in its order."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardweave.layout import Mesh, ordered

parallel_state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed")

sizes = st.sampled_from([1, 2, 2, 3, 4])
DENSE = ("tp", "dp", "pp", "cp")
EXPERT = ("tp", "ep", "dp", "pp")


def compare(
    kinds: tuple[str, ...], order: str, drawn: dict[str, int], tokens: list[str], offset: int
) -> Mesh:
    generator = parallel_state.RankGenerator(**{"cp": 1, "ep": 1} | drawn, order=order, rank_offset=offset)
    mesh = ordered(order, drawn, offset=offset)
    assert generator.world_size == mesh.size
    for token in [*kinds, "-".join(tokens), "tp-" + tokens[0] if tokens[0] != "tp" else "tp"]:
        theirs = generator.get_ranks(token)
        assert [list(group) for group in mesh.groups(*token.split("-"))] == theirs, token
    return mesh


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.permutations(DENSE),
    st.lists(sizes, min_size=4, max_size=4),
    st.permutations(DENSE),
    st.integers(1, 4),
    st.sampled_from([0, 8]),
)
def test_dense_groups(order: list[str], drawn: list[int], tokens: list[str], n: int, offset: int) -> None:
    compare(DENSE, "-".join(order), dict(zip(DENSE, drawn, strict=True)), tokens[:n], offset)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.permutations(EXPERT),
    st.lists(sizes, min_size=4, max_size=4),
    st.permutations(EXPERT),
    st.integers(1, 4),
)
def test_expert_groups(order: list[str], drawn: list[int], tokens: list[str], n: int) -> None:
    compare(EXPERT, "-".join(order), dict(zip(EXPERT, drawn, strict=True)), tokens[:n], 0)


def test_the_default_order_with_the_combined_groups() -> None:
    drawn = {"tp": 2, "cp": 2, "dp": 3, "pp": 2}
    generator = parallel_state.RankGenerator(**drawn, ep=1, order="tp-cp-ep-dp-pp")
    mesh = ordered("tp-cp-ep-dp-pp", drawn)
    for token in ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-dp", "ep"):
        assert [list(g) for g in mesh.groups(*token.split("-"))] == generator.get_ranks(token), token
    experts = parallel_state.RankGenerator(tp=1, ep=4, dp=3, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    mesh = ordered("tp-cp-ep-dp-pp", {"tp": 1, "ep": 4, "dp": 3, "pp": 2})
    for token in ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp"):
        assert [list(g) for g in mesh.groups(*token.split("-"))] == experts.get_ranks(token), token


def test_a_missing_token_is_an_error_on_both_sides() -> None:
    with pytest.raises(RuntimeError):
        parallel_state.RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-dp")
    with pytest.raises(ValueError, match=r"pp\(2\)"):
        ordered("tp-dp", {"tp": 2, "dp": 2, "pp": 2})
    theirs = parallel_state.RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="dp-tp")
    assert [list(g) for g in ordered("dp-tp", {"tp": 2, "dp": 2, "pp": 1}).groups("tp")] == theirs.get_ranks(
        "tp"
    )
