"""Values that differ between trainer and engine: landing, steps, and what they compute, by plain code."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import BufferRuleError, DtypeError, TransformError, UnknownNameError
from shardweave.layout import (
    IDENTITY,
    BufferRule,
    Layout,
    Mesh,
    Part,
    Tensor,
    Transform,
    along,
    concat,
    even,
    pad,
    whole,
)
from shardweave.layout.transform import change
from shardweave.move import MemoryTransport, execute
from shardweave.plan import plan
from shardweave.refit.values import Step, apply, landing

CENTRED, DECAY = Transform("shift", -1.0), Transform("neg_exp")
TP2, TP3 = Mesh((("tp", 2),)), Mesh((("tp", 3),), offset=2)


def one(name: str, tensor: Tensor, mesh: Mesh, **more: Any) -> Layout:
    rows = along(mesh, "tp", lambda r: even(tensor.dims[-1], mesh.axis_size("tp"), r)) if mesh.axes else None
    dims = tensor.dims if rows is None else (*tensor.dims[:-1], rows)
    return Layout(name, mesh, (BufferRule(name, (Part(tensor),), dims, **more),))


def refit(src: Layout, dst: Layout, state: dict[int, dict[str, torch.Tensor]], **how: Any) -> dict[int, Any]:
    """Move, then apply, as a receiver does; all that is written begins as NaN."""
    landed, steps = landing(src, dst, **how)
    moved = plan(src, landed)
    table: dict[int, Any] = {}
    offers = {rank: MemoryTransport(table, rank=rank) for rank in {*src.mesh.ranks, *dst.mesh.ranks}}
    endpoints = {rank: offers[rank].offer(arrays) for rank, arrays in state.items()}
    final = {}
    for rank in dst.mesh.ranks:
        final[rank] = blank(dst, rank)
        in_place = {name for step in steps if step.in_place for name in step.arrays(rank)}
        apart = {name for step in steps for name in step.arrays(rank)} - in_place
        got = {name: (blank(landed, rank) if name in apart else final[rank])[name] for name in final[rank]}
        execute(moved, rank=rank, transport=offers[rank], src={}, dst=got, endpoints=endpoints)
        apply(steps, rank, got, final[rank])
    return final


def blank(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(buffer.shape, math.nan, dtype=getattr(torch, buffer.dtype))
        for name, (buffer, _) in layout.arrays(rank).items()
    }


# --- what a receiver does -----------------------------------------------------------------------

A_LOG = Tensor("layers.{layer}.A_log", (12,), "bfloat16", (("layer", whole(2)),))
LOGICAL = torch.linspace(-3, 4, 24).view(2, 12).to(torch.bfloat16)


def trainer_state(name: str, stored: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    return {
        r: {name.format(layer=n): stored[n, r * 6 : r * 6 + 6].clone() for n in range(2)} for r in range(2)
    }


def test_decay_lands_as_logarithm_and_becomes_what_the_engine_stores() -> None:
    src = one("layers.{layer}.A_log", A_LOG, TP2)
    dst = one("layers.{layer}.A", A_LOG, TP3, dtype="float32", transform=DECAY)
    final = refit(src, dst, trainer_state("layers.{layer}.A_log", LOGICAL))
    for rank in (2, 3, 4):
        for layer in range(2):
            # What vLLM's composed_weight_loader does: the shard, then -exp of it in float32.
            shard = LOGICAL[layer, (rank - 2) * 4 : (rank - 1) * 4]
            assert torch.equal(final[rank][f"layers.{layer}.A"], -torch.exp(shard.float()))


def test_the_way_back_is_a_logarithm() -> None:
    src = one("layers.{layer}.A", A_LOG, TP2, dtype="float32", transform=DECAY)
    dst = one("layers.{layer}.A_log", A_LOG, TP3)
    stored = -torch.exp(LOGICAL.float())
    with pytest.raises(DtypeError, match="float32 does not fit in bfloat16"):
        landing(src, dst)
    final = refit(src, dst, trainer_state("layers.{layer}.A", stored), allow_casts=True)
    for rank in (2, 3, 4):
        for layer in range(2):
            cut = slice((rank - 2) * 4, (rank - 1) * 4)
            assert torch.equal(final[rank][f"layers.{layer}.A_log"], LOGICAL[layer, cut])


def test_a_norm_around_zero_becomes_one_around_one_in_place() -> None:
    norm = Tensor("norm.weight", (12,), "bfloat16")
    src, dst = one("out_norm", norm, TP2, transform=CENTRED), one("norm", norm, TP3)
    landed, steps = landing(src, dst)
    assert [step.in_place for step in steps] == [True] and landed.rules[0].transform == CENTRED
    stored = torch.randn(12, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    state = {r: {"out_norm": stored[r * 6 : r * 6 + 6]} for r in range(2)}
    final = refit(src, dst, state)
    # What a converter does: add 1 in bfloat16.
    assert torch.equal(torch.cat([final[r]["norm"] for r in (2, 3, 4)]), stored + 1)


def test_padding_of_the_vocabulary_is_zero_and_only_it() -> None:
    embed = Tensor("embed", (10, 3), "bfloat16")
    src = Layout("hf", Mesh((), offset=9), (BufferRule("embed", (Part(embed),), embed.dims),))
    rows = along(TP3, "tp", lambda r: even(pad(whole(10), 12), 3, r))
    dst = Layout("engine", TP3, (BufferRule("embed", (Part(embed),), (rows, whole(3))),))
    landed, steps = landing(src, dst)
    assert landed == dst and [str(step) for step in steps] == ["embed: padding to 0"]
    values = torch.arange(1, 31).view(10, 3).to(torch.bfloat16)
    final = refit(src, dst, {9: {"embed": values}})
    expected = torch.cat([values, torch.zeros(2, 3, dtype=torch.bfloat16)])
    assert torch.equal(torch.cat([final[rank]["embed"] for rank in (2, 3, 4)]), expected)


def test_padding_is_zeroed_whatever_the_transform_and_the_order_of_dims() -> None:
    """0 is stored, not the transform of 0; experts are stacked, and two dims are padded."""
    w = Tensor("experts.{expert}.w", (5, 2), "float32", (("expert", whole(3)),))
    src = Layout("src", Mesh(()), (BufferRule("w.{expert}", (Part(w),), w.dims),))
    dims = pad(whole(3), 4), pad(whole(5), 8), whole(2)
    rule = BufferRule("w", (Part(w),), dims, stacked=(2, 0, 1), transform=Transform("shift", 5.0))
    dst = Layout("dst", Mesh((), offset=1), (rule,))
    values = torch.randn(3, 5, 2)
    (final,) = refit(src, dst, {0: {f"w.{e}": values[e].contiguous() for e in range(3)}}).values()
    expected = torch.zeros(2, 4, 8)
    expected[:, :3, :5] = (values.double() + 5).float().permute(2, 0, 1)
    assert torch.equal(final["w"], expected)


def test_what_lands_as_sent_is_cast_by_a_step() -> None:
    router = Tensor("router", (12,), "float32")
    src, dst = one("router", router, TP2), one("gate", router, TP3, dtype="bfloat16")
    assert landing(src, dst) == (dst, ())
    with pytest.raises(DtypeError, match="float32 does not fit in bfloat16"):
        landing(src, dst, as_sent=True)
    landed, steps = landing(src, dst, as_sent=True, allow_casts=True)
    assert landed.rules[0].dtype == "float32" and not steps[0].in_place and not steps[0].exact
    stored = torch.randn(12)
    final = refit(
        src, dst, {r: {"router": stored[r * 6 : r * 6 + 6]} for r in range(2)}, as_sent=True, allow_casts=True
    )
    assert torch.equal(torch.cat([final[r]["gate"] for r in (2, 3, 4)]), stored.to(torch.bfloat16))


def test_a_plan_past_landing_is_refused() -> None:
    norm = Tensor("norm.weight", (12,), "bfloat16")
    src, dst = one("out_norm", norm, TP2, transform=CENTRED), one("norm", norm, TP3)
    with pytest.raises(TransformError, match=r"shift.* != .*identity.*step of its own"):
        plan(src, dst)
    landed, _ = landing(src, dst)
    assert plan(src, landed).num_bytes == 24


def test_layouts_that_agree_have_no_steps() -> None:
    src, dst = one("a{layer}", A_LOG, TP2, transform=DECAY), one("b{layer}", A_LOG, TP3, transform=DECAY)
    assert landing(src, dst) == (dst, ())


# --- refusals -----------------------------------------------------------------------------------


def test_one_buffer_of_two_transforms_is_refused() -> None:
    q, k = Tensor("q", (4,), "float32"), Tensor("k", (4,), "float32")
    rules = (BufferRule("q", (Part(q),), q.dims), BufferRule("k", (Part(k),), k.dims, transform=CENTRED))
    fused = BufferRule("qk", (Part(q, "q"), Part(k, "k")), (concat(whole(4, "q"), whole(4, "k")),))
    src, dst = Layout("src", Mesh(()), rules), Layout("dst", Mesh(()), (fused,))
    with pytest.raises(TransformError, match=r"'q' and 'k': identity of 'q' != shift -1 of 'k'"):
        landing(src, dst)


def test_values_without_arithmetic_are_refused() -> None:
    w = Tensor("w", (12,), "float8_e4m3fn")
    with pytest.raises(TransformError, match="float8_e4m3fn"):
        landing(one("w", w, TP2), one("w", w, TP3, transform=CENTRED))


@pytest.mark.parametrize("bad", [1.0, 0.0, -0.0, math.nan, -math.inf])
def test_what_no_exp_can_have_made_is_refused_and_nothing_is_written(bad: float) -> None:
    mesh = Mesh(())
    norm, a = Tensor("norm", (3,), "float32"), Tensor("A_log", (3,), "float32")
    src = Layout(
        "src",
        mesh,
        tuple(BufferRule(t.name, (Part(t),), t.dims, transform=f) for t, f in ((norm, CENTRED), (a, DECAY))),
    )
    dst = Layout("dst", mesh, tuple(BufferRule(t.name, (Part(t),), t.dims) for t in (norm, a)))
    _, steps = landing(src, dst)
    arrays = {"norm": torch.ones(3), "A_log": torch.tensor([-2.0, bad, -0.5])}
    before = {name: array.clone() for name, array in arrays.items()}
    with pytest.raises(TransformError, match=r"array 'A_log' at \[1\].*1 of 3 are"):
        apply(steps, 0, arrays, arrays)
    assert all(arrays[name].equal(before[name]) or bad != bad for name in arrays)
    assert arrays["norm"].equal(before["norm"])


def test_padding_may_hold_anything_when_a_logarithm_is_taken() -> None:
    a = Tensor("A_log", (3,), "float32")
    rule = BufferRule("A", (Part(a),), (pad(whole(3), 4),), transform=DECAY)
    src = Layout("src", Mesh(()), (rule,))
    dst = Layout("dst", Mesh(()), (BufferRule("A_log", (Part(a),), (pad(whole(3), 4),)),))
    _, steps = landing(src, dst)
    array = {"A_log": torch.tensor([-1.0, -1.0, -1.0, 7.0])}
    apply(steps, 0, array, array)
    assert torch.equal(array["A_log"], torch.zeros(4))


def test_arrays_that_are_not_those_of_the_layouts_are_refused() -> None:
    norm = Tensor("norm", (6,), "float32")
    _, steps = landing(one("norm", norm, TP2, transform=CENTRED), one("norm", norm, TP2))
    good = {"norm": torch.ones(3)}
    with pytest.raises(UnknownNameError, match="landed array 'norm'"):
        apply(steps, 0, {}, good)
    with pytest.raises(BufferRuleError, match=r"shape\(4,\) != \(3,\)"):
        apply(steps, 0, {"norm": torch.ones(4)}, good)
    with pytest.raises(DtypeError, match=r"dtype\(float64\) != dtype\(float32\)"):
        apply(steps, 0, good, {"norm": torch.ones(3, dtype=torch.float64)})
    memory = torch.ones(5)
    with pytest.raises(BufferRuleError, match="overlap"):
        apply(steps, 0, {"norm": memory[:3]}, {"norm": memory[2:]})
    apply(steps, 0, {"norm": memory[:2].repeat(2)[:3]}, good)
    assert good["norm"].tolist() == [2, 2, 2]


def test_other_ranks_and_other_arrays_are_not_touched() -> None:
    norm = Tensor("norm", (6,), "float32")
    dst = Layout("dst", TP2, (BufferRule("norm", (Part(norm),), norm.dims, where=(("tp", (1,)),)),))
    _, steps = landing(one("norm", norm, TP2, transform=CENTRED), dst)
    assert [list(steps[0].arrays(rank)) for rank in (0, 1)] == [[], ["norm"]]
    arrays = {"other": torch.ones(2)}
    apply(steps, 0, arrays, arrays)
    assert torch.equal(arrays["other"], torch.ones(2))


# --- what is computed ---------------------------------------------------------------------------


def converted(src: Transform, dst: Transform, stored: torch.Tensor, dtype: str) -> tuple[Step, torch.Tensor]:
    name = str(stored.dtype).removeprefix("torch.")
    tensor = Tensor("t", tuple(stored.shape), name)
    sides = [
        Layout(side, Mesh(()), (BufferRule("t", (Part(tensor),), tensor.dims, dtype=d, transform=f),))
        for side, f, d in (("src", src, name), ("dst", dst, dtype))
    ]
    _, (step,) = landing(sides[0], sides[1], allow_casts=True)
    final = torch.full(stored.shape, math.nan, dtype=getattr(torch, dtype))
    apply((step,), 0, {"t": stored}, {"t": final})
    return step, final


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a dtype of 16 bits."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[torch.isfinite(values)]


def rounded(exact: Fraction, dtype: torch.dtype) -> float:
    """The nearest value of a dtype by exact arithmetic, ties to even."""
    info, digits = torch.finfo(dtype), {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}[dtype]
    if not exact:
        return 0.0
    exponent = max(
        math.frexp(abs(exact.numerator) / exact.denominator)[1], math.frexp(info.smallest_normal)[1]
    )
    unit = Fraction(2) ** (exponent - digits)
    return float(round(exact / unit) * unit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("constant", [1.0, -0.0625])
def test_every_sum_in_16_bits_is_rounded_once(dtype: torch.dtype, constant: float) -> None:
    stored = every(dtype)
    _, found = converted(Transform("shift", -constant), IDENTITY, stored, str(dtype).removeprefix("torch."))
    # torch's own sum, in float32 and rounded: what a converter does that adds to the tensor.
    assert torch.equal(found, stored + constant)
    sample = range(0, len(stored), 37)
    for i in sample:
        expected = rounded(Fraction(stored[i].item()) + Fraction(constant), dtype)
        assert found[i].item() == expected or math.isinf(found[i].item())


@given(st.floats(width=32, min_value=-(2.0**99), max_value=2.0**99), st.sampled_from([1.0, -1.0, 3.0]))
def test_a_sum_in_float32_is_rounded_once(x: float, constant: float) -> None:
    _, found = converted(Transform("shift", -constant), IDENTITY, torch.tensor([x]), "float32")
    assert found.item() == rounded(Fraction(x) + Fraction(constant), torch.float32)


@given(st.floats(width=32, min_value=2.0**-60, max_value=2.0**60), st.sampled_from([3.0, 0.75, 5.0]))
def test_a_quotient_in_float32_is_rounded_once(x: float, constant: float) -> None:
    _, found = converted(Transform("scale", constant), IDENTITY, torch.tensor([x]), "float32")
    assert found.item() == rounded(Fraction(x) / Fraction(constant), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_powers_of_two_are_exact(dtype: torch.dtype) -> None:
    stored = every(dtype)
    stored = stored[(stored.abs() < 1000) & (stored.abs() > 2.0**-8)]
    name = str(dtype).removeprefix("torch.")
    step, found = converted(Transform("scale", 0.25), Transform("scale", 2.0), stored, name)
    assert step.exact and torch.equal(found.double(), stored.double() * 8)
    back, again = converted(Transform("scale", 2.0), Transform("scale", 0.25), found, name)
    assert back.exact and torch.equal(again, stored)


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    """Of float32, for all of bfloat16 that does not overflow; numpy's float64 is the reference."""
    stored = every(torch.bfloat16)
    stored = stored[(stored < 88) & (stored > -87)]
    step, found = converted(IDENTITY, DECAY, stored, "float32")
    assert step.dtype == "float32" and not step.exact
    exact = -np.exp(stored.double().numpy())
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(found.double().numpy() - exact) / unit) <= 1


def test_exp_in_float64_where_a_side_is_float64() -> None:
    stored = torch.linspace(-5, 5, 101, dtype=torch.float64)
    step, found = converted(IDENTITY, DECAY, stored, "float64")
    assert step.dtype == "float64"
    np.testing.assert_allclose(found.numpy(), -np.exp(stored.numpy()), rtol=4e-16)


def test_arrays_larger_than_a_block_are_converted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardweave.refit.values._BLOCK", 7)
    stored = torch.randn(11, 3)
    _, found = converted(CENTRED, IDENTITY, stored, "float32")
    assert torch.equal(found, (stored.double() + 1).float())
    _, scalar = converted(CENTRED, IDENTITY, torch.tensor(0.5), "float32")
    assert scalar.item() == 1.5


# --- which operations ---------------------------------------------------------------------------

TRANSFORMS = st.one_of(
    st.just(IDENTITY),
    st.just(DECAY),
    st.builds(Transform, st.just("shift"), st.sampled_from([-1.0, 1.0, 0.1, 2.5, 1e16])),
    st.builds(Transform, st.just("scale"), st.sampled_from([0.5, 3.0, 0.1, -8.0, 1e308, 1e-308])),
)


@given(TRANSFORMS, TRANSFORMS, st.floats(-2, 2).filter(lambda x: abs(x) > 1e-3))
def test_a_change_is_the_one_undone_and_the_other_applied(src: Transform, dst: Transform, x: float) -> None:
    stored = src.apply(np.longdouble(x))
    does: dict[str, Any] = {
        "add": lambda v, c: v + np.longdouble(c),
        "multiply": lambda v, c: v * np.longdouble(c),
        "divide": lambda v, c: v / np.longdouble(c),
        "neg_exp": lambda v, _: -np.exp(v),
        "log_neg": lambda v, _: np.log(-v),
    }
    found = stored
    for name, constant in change(src, dst):
        found = does[name](found, constant)
    expected = dst.apply(src.undo(stored))
    assert abs(found - expected) <= 1e-15 * max(abs(expected), 1)
    assert (src == dst) == (change(src, dst) == ())
    assert len(change(src, dst)) <= 2


def test_a_step_says_what_it_does() -> None:
    norm = Tensor("model.norm.weight", (6,), "bfloat16")
    padded = BufferRule("norm", (Part(norm),), (pad(whole(6), 4),), dtype="float32")
    src = Layout("src", Mesh(()), (BufferRule("n", (Part(norm),), norm.dims, transform=CENTRED),))
    _, steps = landing(src, Layout("dst", Mesh(()), (padded,)))
    assert str(steps[0]) == (
        "norm (of model.norm.weight): bfloat16, shift -1 -> float32, identity; by add 1 in float64; "
        "padding to 0"
    )
