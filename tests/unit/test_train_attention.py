"""What attention refuses, before anybody communicates; and the kernel of devices that have no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardweave.errors import GeometryError, PlanError
from shardweave.train import ring
from shardweave.train.attention import METHODS, attention, check_method
from shardweave.train.grid import Group
from shardweave.train.sequence import SequenceLayout

LAYOUT = SequenceLayout((5, 9), "thd", 2)


class Silent:
    """A communicator that nobody may use."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


PAIR = Group("cp", (0, 1), 0, Silent())


def call(q: tuple[int, ...] = (10, 6, 8), k: tuple[int, ...] = (10, 2, 8), **given: Any) -> torch.Tensor:
    dtype = given.pop("k_dtype", torch.float32)
    v = given.pop("v", k)
    options = {"layout": LAYOUT, "cp": PAIR, "method": "ring", **given}
    return attention(torch.zeros(q), torch.zeros(k, dtype=dtype), torch.zeros(v, dtype=dtype), **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "rings"}, "method('rings') is not among ring, gather, all_to_all"),
        ({"window": 4}, "window(4). hint: use one of gather, all_to_all"),
        ({"window": 0, "method": "gather"}, "window(0)"),
        ({"q": (10, 3, 8), "k": (10, 3, 8), "method": "all_to_all"}, "heads(3) % cp(2) != 0"),
        ({"q": (10, 5, 8)}, "heads(5) % kv_heads(2) != 0"),
        ({"cp": Group("cp", (0,), 0)}, "ranks(1) != cp(2)"),
        (
            {"layout": replace(LAYOUT, causal=False), "method": "gather", "window": 4},
            "window(4), causal(False)",
        ),
    ],
)
def test_what_a_method_cannot_do(given: dict[str, Any], said: str) -> None:
    with pytest.raises(GeometryError) as caught:
        call(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"q": (20, 6, 8)}, "queries, thd of 2 documents"),
        ({"k": (20, 2, 8)}, "keys, thd of 2 documents"),
        ({"v": (10, 1, 8)}, "v(10, 1, 8)"),
        ({"k": (10, 2, 4)}, "k(10, 2, 4)"),
        ({"q": (10, 48), "k": (10, 48)}, "give tensors of 3 dims"),
        ({"k_dtype": torch.float64}, "torch.float64"),
    ],
)
def test_what_is_no_part_of_the_batch(given: dict[str, Any], said: str) -> None:
    for method in METHODS:
        with pytest.raises(PlanError) as caught:
            call(method=method, **given)
        assert said in str(caught.value)


def test_a_config_is_checked_without_ranks() -> None:
    sizes = {"cp": 2, "heads": 4, "kv_heads": 1}
    for method in METHODS:
        check_method(method, **sizes)
        with pytest.raises(GeometryError, match=r"dropout\(0.1\)"):
            check_method(method, dropout=0.1, **sizes)
        with pytest.raises(GeometryError, match="order"):
            check_method(method, order="striped", **sizes)
    check_method("ring", cp=1, heads=3, kv_heads=1, window=5)  # nothing is shared


def test_an_empty_batch_has_gradients() -> None:
    layout = SequenceLayout((0, 0), "bshd")
    q, k, v = (torch.zeros(2, 0, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    out = attention(q, k, v, layout=layout, cp=Group("cp", (0,), 0))
    assert out.shape == q.shape
    assert all(grad is not None for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_the_scale_of_scores() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64) for _ in range(3))
    layout, alone = SequenceLayout((4,)), Group("cp", (0,), 0)
    one = attention(q, k, v, layout=layout, cp=alone, scale=0.5)
    other = attention(q * 0.5 * 8**0.5, k, v, layout=layout, cp=alone)
    assert torch.allclose(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 3e-6)], ids=str)
def test_the_plain_kernel(dtype: torch.dtype, limit: float, causal: bool) -> None:
    q, k, v, grad = (torch.randn(2, 7, heads, 8, dtype=dtype) for heads in (6, 2, 2, 6))
    if not causal:
        k, v = k[:, :5], v[:, :5]
    out, lse = ring.block_forward(q, k, v, causal, 0.3)
    found = [out, lse, *ring.block_backward(grad, q, k, v, out, lse, causal, 0.3)]
    with patch.object(ring, "_has_flash", lambda device: False):
        out, lse = ring.block_forward(q, k, v, causal, 0.3)
        plain = [out, lse, *ring.block_backward(grad, q, k, v, out, lse, causal, 0.3)]
    for one, other in zip(found, plain, strict=True):
        assert one.shape == other.shape and (one - other).abs().max() < limit
