"""megatron-core, imported with an Adam as Apex and Transformer Engine have it: it counts updates in groups.

With torch's own, whose states have a ``step``, megatron-core 0.16.1 cannot load what it saved: it asks the
tensors of a checkpoint for that state too.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params: Any, **settings: Any) -> None:
        assert settings.pop("adam_w_mode")
        super().__init__(params, {"bias_correction": True, **settings})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = made = group.get("step", 0) + 1
            assert type(made) is int and group["bias_correction"]
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, grad = self.state[weight], weight.grad
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(weight)
                state["exp_avg"].lerp_(grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                root = (state["exp_avg_sq"] / (1 - second**made)).sqrt_().add_(group["eps"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.addcdiv_(state["exp_avg"] / (1 - first**made), root, value=-group["lr"])


for module in (optimizer, distrib_optimizer):
    module.Adam = FusedAdam
optimizer.USING_PYTORCH_OPTIMIZER = False
distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
