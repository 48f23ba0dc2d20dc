"""Rotary encoding: the bits of transformers for each kind, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardweave.errors import ModelError, PlanError
from shardweave.train.rotary import Llama3, Rotary, Yarn, read_rotary, rotate
from shardweave.train.sequence import SequenceLayout

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
KINDS: dict[str, Mapping[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3 without a context": {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    "yarn": YARN,
    "yarn, all": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.25},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, one mscale": {**YARN, "mscale": 0.7},
    "yarn, no slower": {**YARN, "factor": 1.0},
}
SIZES = {"head_dim": 24, "theta": 5000.0, "max_positions": 2048}


def theirs(kind: str, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cosines, sines and the rotated heads of transformers."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=72,
        num_attention_heads=3,
        head_dim=24,
        max_position_embeddings=2048,
        rope_parameters={**KINDS[kind], "rope_theta": 5000.0},
    )
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    rotated, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    return cos, sin, rotated


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_transformers(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 2048, (2, 300), generator=generator)
    x = torch.randn(2, 300, 3, 24, generator=generator).to(dtype)
    cos, sin = read_rotary(KINDS[kind], **SIZES).tables(positions, dtype=dtype)
    their_cos, their_sin, rotated = theirs(kind, positions, x)
    assert torch.equal(torch.cat((cos, cos), -1), their_cos)
    assert torch.equal(torch.cat((sin, sin), -1), their_sin)
    assert torch.equal(rotate(x, cos, sin), rotated)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_computed_in_float64(kind: str) -> None:
    positions = torch.arange(2048)
    rotary = read_rotary(KINDS[kind], **SIZES)
    exact, coarse = (rotary.tables(positions, dtype=t)[0] for t in (torch.float64, torch.float32))
    assert 1e-8 < (exact - coarse).abs().max() < 1e-3  # of angles of up to 2047
    cos, _, _ = theirs(kind, positions[None], torch.zeros(1, 2048, 3, 24))
    assert (exact - cos[0, :, :12]).abs().max() < 1e-3


def test_turns_by_hand() -> None:
    cos, sin = Rotary(4, 100.0).tables(torch.tensor([3]), dtype=torch.float64)
    wanted = torch.tensor([3.0, 0.3], dtype=torch.float64)
    assert torch.allclose(cos[0], wanted.cos(), rtol=1e-15)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    turned = rotate(x, cos, sin)[0, 0]
    for i in range(2):
        complex_ = (x[0, 0, i] + 1j * x[0, 0, i + 2]) * torch.exp(1j * wanted[i])
        assert torch.allclose(turned[i], complex_.real) and torch.allclose(turned[i + 2], complex_.imag)


def test_derivative() -> None:
    cos, sin = read_rotary(KINDS["yarn"], head_dim=6, theta=100.0).tables(
        torch.arange(5), dtype=torch.float64
    )
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))


def test_the_two_spellings_of_a_config() -> None:
    old = read_rotary({"type": "linear", "factor": 2}, head_dim=8, theta=1e6)
    assert old == read_rotary({"rope_type": "linear", "factor": 2, "rope_theta": 1e6}, head_dim=8)
    assert read_rotary(None, head_dim=8, theta=1e4) == Rotary(8, 1e4)
    assert isinstance(read_rotary(LLAMA3, head_dim=8, theta=1e4).scaling, Llama3)
    assert isinstance(read_rotary(YARN, head_dim=8, theta=1e4).scaling, Yarn)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type('dynamic')"),
        ({"rope_type": "longrope"}, "rope_type('longrope')"),
        ({"type": "su"}, "rope_type('su')"),
        ({"rope_type": "default", "mrope_section": [2, 2]}, "mrope_section=[2, 2]"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 2}, "beta_fast=2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_type": "linear"}, "factor=None"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2'"),
        ({**YARN, "factor": None}, "factor=None"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings=None"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "low_freq_factor(1.0) >= high_freq_factor(1.0)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_rotary(given, head_dim=8, theta=1e4)
    assert said in str(caught.value)


@pytest.mark.parametrize(("head_dim", "theta"), [(7, 1e4), (0, 1e4), (8, None), (8, -1.0)])
def test_impossible_sizes(head_dim: int, theta: float | None) -> None:
    with pytest.raises(ModelError, match="pairs of dims"):
        read_rotary(None, head_dim=head_dim, theta=theta)


def test_tables_of_another_part_are_refused() -> None:
    cos, sin = Rotary(8).tables(torch.arange(6), dtype=torch.float32)
    for x in (torch.zeros(5, 2, 8), torch.zeros(6, 2, 12), torch.zeros(6, 2, 8, dtype=torch.float64)):
        with pytest.raises(PlanError, match="an angle for each pair"):
            rotate(x, cos, sin)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("form", "lengths"), [("thd", (4, 4)), ("thd", (5, 9)), ("bshd", (7, 6))])
def test_a_token_is_turned_alike_on_every_rank(form: str, lengths: tuple[int, ...], order: str) -> None:
    """Fault 12: angles are those of the tokens that a rank has, not of its first ones."""
    layout = SequenceLayout(lengths, form, 2, order=order)
    rotary = Rotary(8)
    whole = torch.randn(*layout.shape, 3, 8, dtype=torch.float64)
    positions = torch.from_numpy(layout.positions)
    wanted = rotate(whole, *rotary.tables(positions, dtype=torch.float64))

    def turned(positions: list[torch.Tensor]) -> torch.Tensor:
        """The batch from parts that are rotated on their own."""
        parts = [
            rotate(layout.local(whole, rank), *rotary.tables(positions[rank], dtype=torch.float64))
            for rank in range(2)
        ]
        found: torch.Tensor = layout.join(parts)
        return found

    assert torch.equal(turned([layout.local(positions, rank) for rank in range(2)]), wanted)
    counted = torch.arange(layout.local_shape()[-1]).expand(layout.local_shape())
    assert not torch.allclose(turned([counted, counted]), wanted)
