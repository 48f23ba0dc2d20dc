"""Rotary position encoding: where a token is, as an angle for each pair of dims of a head.

Positions come from the ``SequenceLayout`` and travel with the tokens; nothing here counts them anew. What a
config says of scaled frequencies is read strictly: a key or kind that is not understood is an error.

>>> rotary = read_rotary({"rope_type": "linear", "factor": 2.0}, head_dim=4, theta=100.0)
>>> cos, sin = rotary.tables(torch.tensor([0, 2]), dtype=torch.float64)
>>> cos
tensor([[1.0000, 1.0000],
        [0.5403, 0.9950]], dtype=torch.float64)
>>> rotate(torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64), cos[1], sin[1])
tensor([[0.5403, 0.0000, 0.8415, 0.0000]], dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardweave.errors import ModelError, PlanError

# --- frequencies --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linear:
    """All frequencies are divided by one factor."""

    factor: float

    def scale(self, plain: Tensor, theta: float) -> Tensor:
        """The frequencies ``(head_dim / 2,)`` from those without scaling."""
        return plain / self.factor

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Llama3:
    """Waves longer than a context are slowed down, short ones kept, those between are in between.

    Attributes:
        factor: How much long waves are slowed down.
        low: Waves that fit less than this often into the original context are long.
        high: Waves that fit more than this often are short.
        original: Positions that the model was first trained on.
    """

    factor: float
    low: float
    high: float
    original: int

    def scale(self, plain: Tensor, theta: float) -> Tensor:
        """The frequencies ``(head_dim / 2,)`` from those without scaling."""
        wave = 2 * math.pi / plain
        keep = (self.original / wave - self.low) / (self.high - self.low)
        between = (1 - keep) * plain / self.factor + keep * plain
        slowed = torch.where(wave > self.original / self.low, plain / self.factor, between)
        return torch.where(wave < self.original / self.high, plain, slowed)

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Yarn:
    """Dims that turn slowly are slowed down by a factor, quick ones kept, with a ramp between them.

    Attributes:
        factor: How much slow dims are slowed down.
        original: Positions that the model was first trained on.
        amplitude: What cosines and sines are multiplied by.
        quick: Turns in the original context from which on a dim is kept.
        slow: Turns in it up to which a dim is slowed down in full.
        whole: Whether the ramp begins and ends at whole dims.
    """

    factor: float
    original: int
    amplitude: float
    quick: float = 32.0
    slow: float = 1.0
    whole: bool = True

    def scale(self, plain: Tensor, theta: float) -> Tensor:
        """The frequencies ``(head_dim / 2,)`` from those without scaling."""
        size = 2 * len(plain)
        first, last = (self._dim(turns, theta, size) for turns in (self.quick, self.slow))
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        width = last - first or 0.001
        ramp = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
        keep = 1 - ((ramp - first) / width).clamp(0, 1)
        periods = theta ** (_exponents(size, plain))
        return 1.0 / (self.factor * periods) * (1 - keep) + plain * keep

    def _dim(self, turns: float, theta: float, size: int) -> float:
        """The dim that makes so many turns in the original context."""
        return (size * math.log(self.original / (turns * 2 * math.pi))) / (2 * math.log(theta))


def _exponents(size: int, like: Tensor) -> Tensor:
    return torch.arange(0, size, 2, dtype=like.dtype, device=like.device) / size


# --- the encoding -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rotary:
    """Angles of positions.

    Attributes:
        head_dim: Dims of a head, all of them turned: dim ``i`` together with dim ``head_dim / 2 + i``.
        theta: The base of the frequencies.
        scaling: How they are scaled; ``None`` for not at all.
    """

    head_dim: int
    theta: float = 10000.0
    scaling: Linear | Llama3 | Yarn | None = None

    def tables(self, positions: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines.

        They are computed in float64 for float64 and in float32 for all else, as in transformers.

        Args:
            positions: Positions of any shape.
            dtype: What is to be rotated.

        Returns:
            Two tensors ``(*positions, head_dim / 2)`` of that dtype.
        """
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        like = torch.empty((), dtype=exact, device=positions.device)
        frequencies = 1.0 / self.theta ** _exponents(self.head_dim, like)
        amplitude = 1.0
        if self.scaling is not None:
            frequencies, amplitude = self.scaling.scale(frequencies, self.theta), self.scaling.amplitude
        angles = positions[..., None].to(exact) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if amplitude != 1.0:
            cos, sin = cos * amplitude, sin * amplitude
        return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of dims of each head by its angle.

    Law: with an amplitude of one, ``rotate(rotate(x, cos, sin), cos, -sin) == x`` but for rounding.

    Args:
        x: ``(..., heads, head_dim)``.
        cos: ``(..., head_dim / 2)``, as ``x`` without its heads.
        sin: The same.

    Raises:
        PlanError: The tables are of other positions, another head or another dtype than what is rotated.
    """
    half = x.shape[-1] // 2
    ahead = (*x.shape[:-2], half)
    fits = all(
        len(t.shape) <= len(ahead) and t.shape == ahead[len(ahead) - len(t.shape) :] for t in (cos, sin)
    )
    if not fits or x.shape[-1] % 2 or {cos.dtype, sin.dtype} != {x.dtype}:
        raise PlanError(
            "tables have an angle for each pair of dims of each token",
            equation=f"x{tuple(x.shape)} {x.dtype}, cos{tuple(cos.shape)} {cos.dtype}, "
            f"sin{tuple(sin.shape)} {sin.dtype}",
            hint="make them of the positions of the same part of the batch, in the dtype of the tensor",
        )
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


# --- reading ------------------------------------------------------------------------------------

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
    },
}


def read_rotary(
    given: Mapping[str, Any] | None,
    *,
    head_dim: int,
    theta: float | None = None,
    max_positions: int | None = None,
) -> Rotary:
    """The encoding that a config describes.

    Args:
        given: What a config of transformers has as ``rope_parameters``, or ``rope_scaling`` in older ones.
        head_dim: Dims of a head.
        theta: ``rope_theta`` of the config, where it is not in ``given``.
        max_positions: ``max_position_embeddings``: the original context where ``given`` names none.

    Raises:
        ModelError: A kind or key is not understood, or a value is missing.

    >>> read_rotary({"rope_type": "default", "rope_theta": 1e6}, head_dim=8)
    Rotary(head_dim=8, theta=1000000.0, scaling=None)
    """
    values = dict(given or {})
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _KEYS:
        raise ModelError(
            "a kind of rotary encoding is one that is computed here",
            where="rope_parameters",
            equation=f"rope_type({kind!r}) is not among {', '.join(_KEYS)}",
            hint="its frequencies are another function of position; no other kind stands in for it",
        )
    strange = sorted(set(values) - _ALWAYS - _KEYS[kind])
    if strange or values.get("partial_rotary_factor", 1.0) != 1.0:
        said = ", ".join(f"{key}={values[key]!r}" for key in strange or ["partial_rotary_factor"])
        raise ModelError(
            "every key of a rotary encoding is understood",
            where=f"rope_parameters of rope_type {kind}",
            equation=said,
            hint="a key that changes the angles cannot be left out; remove it only if it changes none",
        )
    theta = values.get("rope_theta", theta)
    if theta is None or theta <= 0 or head_dim < 2 or head_dim % 2:
        raise ModelError(
            "a rotary encoding has a base and turns pairs of dims",
            where="rope_parameters",
            equation=f"rope_theta({theta}), head_dim({head_dim})",
            hint="give rope_theta, and an even head_dim",
        )
    return Rotary(head_dim, float(theta), _scaling(kind, values, max_positions))


def _scaling(
    kind: str, values: Mapping[str, Any], max_positions: int | None
) -> Linear | Llama3 | Yarn | None:
    if kind == "default":
        return None
    values = {"original_max_position_embeddings": max_positions, **values}

    def need(key: str) -> Any:
        found = values.get(key)
        if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
            raise ModelError(
                "a scaled rotary encoding has all numbers of its kind",
                where=f"rope_parameters of rope_type {kind}",
                equation=f"{key}={found!r}",
                hint="give a positive number",
            )
        return found

    factor = need("factor")
    if kind == "linear":
        return Linear(factor)
    original = need("original_max_position_embeddings")
    if kind == "llama3":
        low, high = need("low_freq_factor"), need("high_freq_factor")
        if low >= high:
            raise ModelError(
                "long waves fit into a context less often than short ones",
                where="rope_parameters of rope_type llama3",
                equation=f"low_freq_factor({low}) >= high_freq_factor({high})",
                hint="check whether the two are exchanged",
            )
        return Llama3(factor, low, high, original)
    amplitude = values.get("attention_factor")
    if amplitude is None:
        mscale, all_dim = values.get("mscale"), values.get("mscale_all_dim")
        # One of the two alone says nothing, as in transformers.
        amplitude = (
            _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)
        )
    return Yarn(
        factor,
        original,
        amplitude,
        values.get("beta_fast") or 32,
        values.get("beta_slow") or 1,
        bool(values.get("truncate", True)),
    )


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
