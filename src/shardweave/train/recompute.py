"""Layers that are computed once more on the way back, so that only what goes into them is kept.

Nothing of it is random: dropout is a function of the token and the step (``random.py``), and sums over ranks
have one order. The second time gives the bits of the first, and so do the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shardweave.train.experts import Routing
from shardweave.train.gathered import Gathered

Layer = Callable[[Tensor], tuple[Tensor, Routing | None]]


def again(layer: Layer, x: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, Routing | None]:
    """What a layer makes of a hidden state, of which the graph keeps the hidden state alone.

    Args:
        layer: A function of the hidden state; gradients of what else it uses are added to the ``.grad`` of
            leaves.
        x: The hidden state.
        weights: What it reads.

    Raises:
        PlanError: On the way back, if a weight was changed since.
    """
    if not torch.is_grad_enabled():
        return layer(x)
    said: list[Tensor] = []
    # Leaves are no inputs of the graph here; the empty one has the way back reach this place in any case.
    outputs = _Again.apply(x, x.new_empty(0).requires_grad_(), layer, weights, said)
    if not said:
        return outputs[0], None
    return outputs[0], Routing(outputs[1], outputs[2], said[0])


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _: Tensor, layer: Layer, weights: Mapping[str, Tensor], said: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.layer, ctx.weights = layer, weights
        ctx.versions = weights.versions() if isinstance(weights, Gathered) else {}
        with torch.no_grad():
            y, routing = layer(x)
        if routing is None:
            return (y,)
        said.append(routing.tokens)
        return y, routing.aux_sum, routing.z_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        x = kept.detach().requires_grad_(ctx.needs_input_grad[0])
        weights = ctx.weights
        gathered = weights if isinstance(weights, Gathered) else None
        if gathered:  # what is read the second time has to be what was read the first time
            gathered.check_unchanged(ctx.versions)
        with torch.enable_grad(), gathered.saving(again=True) if gathered else nullcontext():
            y, routing = ctx.layer(x)
            if gathered:
                y = gathered.joined(y, again=True)
        outputs = (y,) if routing is None else (y, routing.aux_sum, routing.z_sum)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return x.grad, None, None, None, None
