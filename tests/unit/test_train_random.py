"""Counter-based random numbers: published vectors, plain references, and the same bits in every layout."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import OutsideError, PlanError
from shardweave.layout import Box, BufferRule, Dim, Layout, Mesh, Part, Run, Tensor, along, pad, whole
from shardweave.train import random
from shardweave.train.arrays import held_arrays
from shardweave.train.random import (
    Normal,
    Uniform,
    dropout,
    init,
    key_of,
    normal,
    normal_quantile,
    philox,
    uniform,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

import small_model

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_is_the_published_one(
    counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    assert philox(counter, key) == wanted
    for many in (lambda word: np.full(3, word, dtype=np.int64), lambda word: torch.full((3,), word)):
        found = philox([many(word) for word in counter], key)
        assert [word.tolist() for word in found] == [[word] * 3 for word in wanted]


def plain(seed: int, name: str, index: int, step: int = 0) -> float:
    """One number, of Python's own integers."""
    a, b, c, d = key_of(seed, name, step=step).words
    block = index // 2
    words = philox((block % 2**32, block // 2**32, c, d), (a, b))
    high, low = words[2 * (index % 2) :][:2]
    return ((high // 64) * 2**26 + low // 64 + 0.5) / 2**52


@given(st.integers(0, 2**62), st.integers(-5, 2**40), st.text(max_size=5), st.integers(0, 9))
def test_a_number_is_that_of_its_index(index: int, seed: int, name: str, step: int) -> None:
    wanted = plain(seed, name, index, step)
    assert uniform(seed, name, np.array([3, index]), step=step)[1] == wanted
    assert uniform(seed, name, torch.tensor([[index]]), step=step).item() == wanted
    assert uniform(seed, name, range(index, index + 3), step=step)[0] == wanted
    assert 0 < wanted < 1


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9))
def test_ranges_and_indices_are_the_same_bits(start: int, count: int, chunk: int) -> None:
    wanted = uniform(1, "x", np.arange(start, start + count))
    before = random._CHUNK
    random._CHUNK = chunk
    try:
        np.testing.assert_array_equal(uniform(1, "x", range(start, start + count)), wanted)
        np.testing.assert_array_equal(normal(1, "x", range(start, start + count)), normal_quantile(wanted))
    finally:
        random._CHUNK = before


@given(st.data())
def test_a_box_has_the_numbers_of_its_indices(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    dims = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        dims.append(
            range(start, data.draw(st.integers(start, size)), data.draw(st.sampled_from([1, 1, 1, 2])))
        )
    box = Box(tuple(dims))
    numbers = np.arange(math.prod(shape)).reshape(shape)[np.ix_(*box.dims)] if shape else np.array(0)
    found = random._box(key_of(3, "w"), shape, box, lambda unit: unit)
    np.testing.assert_array_equal(found, uniform(3, "w", numbers))


def test_the_quantile_is_that_of_the_standard_library() -> None:
    unit = np.concatenate(
        [uniform(2, "u", range(30_000)), [2.0**-53, 1 - 2.0**-53, 1e-12, 1e-10, 0.075, 0.0749999, 0.925, 0.5]]
    )
    reference = statistics.NormalDist()
    wanted = np.array([reference.inv_cdf(float(u)) for u in unit])
    np.testing.assert_allclose(normal_quantile(unit), wanted, rtol=2e-15, atol=1e-16)
    small = np.exp(-37 * unit)
    np.testing.assert_allclose(random._log(small), np.log(small), rtol=5e-16)


def test_the_moments_are_those_of_the_distributions() -> None:
    n = 1 << 20
    flat, bell = uniform(7, "flat", range(n)), normal(7, "bell", range(n))
    assert abs(flat.mean() - 0.5) < 4 / math.sqrt(12 * n)
    assert abs(bell.mean()) < 4 / math.sqrt(n)
    assert abs(bell.std() - 1) < 4 / math.sqrt(2 * n)
    for lag in (1, 2, 64):
        assert abs((bell[lag:] * bell[:-lag]).mean()) < 4 / math.sqrt(n)
    counts = np.bincount((flat * 256).astype(int), minlength=256)
    chi = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert 150 < chi < 380, "256 bins, equally full"
    # Neighbouring names, seeds and steps are other streams.
    for other in (
        normal(7, "bell.", range(n)),
        normal(8, "bell", range(n)),
        normal(7, "bell", range(n), step=1),
    ):
        assert abs((bell * other).mean()) < 4 / math.sqrt(n)


# --- what is done with them ---


@pytest.mark.parametrize("name", small_model.TOPOLOGIES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_every_layout_begins_with_the_same_bits(name: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    layout = small_model.layout(small_model.TOPOLOGIES[name], dtype)
    spread = Normal(0.02)
    values = {}
    for tensor in layout.tensors:
        members = [spread(uniform(11, each, range(math.prod(tensor.shape)))) for each in tensor.names()]
        values[tensor.name] = np.array(members).reshape([len(dim) for dim in tensor.dims])
    wanted = small_model.stored(layout, values, fill=0)
    for rank in layout.mesh.ranks:
        for key, held in held_arrays(layout, rank).items():
            into = torch.full(held.shape, math.nan, dtype=kind)
            init(into, held, seed=11, quantile=spread)
            assert torch.equal(into, torch.from_numpy(wanted[rank][key]).to(kind)), (rank, key)


def test_transposed_stacks_and_steps() -> None:
    mesh = Mesh((("tp", 2),))
    w = Tensor("experts.{e}.w", (5, 3), "float64", (("e", whole(4)),))
    experts = along(mesh, "tp", lambda r: Dim([Run("", r, 2, 2)]))
    rule = BufferRule("w", (Part(w),), (experts, pad(whole(5), 4), whole(3)), stacked=(2, 0, 1))
    layout = Layout("transposed", mesh, (rule,))
    held = held_arrays(layout, 1)["w"]
    into = torch.full(held.shape, math.nan, dtype=torch.float64)
    init(into, held, seed=0, quantile=Uniform(-2.0, 2.0))
    assert into.shape == (3, 2, 8)
    for place, number in enumerate((1, 3)):
        wanted = -2 + 4 * uniform(0, f"experts.{number}.w", np.arange(15).reshape(5, 3))
        np.testing.assert_array_equal(into[:, place, :5].T.numpy(), wanted)
    assert (into[:, :, 5:] == 0).all()
    with pytest.raises(PlanError, match="shape"):
        init(torch.zeros(3, 8), held, seed=0, quantile=Normal(1.0))


def test_dropout_drops_the_same_elements_wherever_they_are() -> None:
    x = torch.ones(64, 32, dtype=torch.float64, requires_grad=True)
    index = torch.arange(64 * 32).view(64, 32)
    whole_ = dropout(x, 0.25, seed=1, name="layer", index=index)
    for start, stop in ((0, 10), (10, 11), (11, 64)):
        part = dropout(x[start:stop], 0.25, seed=1, name="layer", index=index[start:stop])
        assert torch.equal(part, whole_[start:stop])
    kept = whole_ != 0
    assert torch.equal(whole_[kept], torch.full_like(whole_[kept], 1 / 0.75))
    assert abs(kept.double().mean() - 0.75) < 4 * math.sqrt(0.75 * 0.25 / kept.numel())
    whole_.sum().backward()
    assert torch.equal(x.grad, whole_.detach())
    for other in ({"seed": 2}, {"name": "other"}, {"step": 1}):
        given_ = {"seed": 1, "name": "layer", "index": index, **other}
        assert not torch.equal(dropout(x, 0.25, **given_) != 0, kept)
    assert dropout(x, 0.0, seed=1, name="layer", index=index) is x


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(OutsideError, match="not all"):
        dropout(torch.ones(2), 1.0, seed=0, name="x", index=torch.arange(2))
    for index in (range(-1, 2), np.array([-1]), torch.tensor([-3])):
        with pytest.raises(OutsideError, match="index"):
            uniform(0, "x", index)
    assert uniform(0, "x", range(0)).shape == (0,)
    assert uniform(0, "x", torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)
