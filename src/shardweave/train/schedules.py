"""Learning rates as pure functions of the number of the update, which is counted from 1.

>>> rate = cosine(1e-3, num_steps=110, warmup=10, least=1e-4)
>>> [f"{rate(step):.2e}" for step in (1, 10, 60, 110, 200)]
['1.00e-04', '1.00e-03', '5.50e-04', '1.00e-04', '1.00e-04']
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardweave.errors import PlanError

Schedule = Callable[[int], float]
"""From the number of an update to its learning rate."""


def constant(lr: float, *, warmup: int = 0) -> Schedule:
    """One rate, reached over ``warmup`` updates in equal steps, the first of which is not 0."""
    return _warmed(lr, warmup, lambda step: lr)


def linear(lr: float, *, num_steps: int, warmup: int = 0, least: float = 0.0) -> Schedule:
    """Up to ``lr`` in ``warmup`` updates, then in a line down to ``least`` at update ``num_steps``."""
    share = _share(num_steps, warmup)
    return _warmed(lr, warmup, lambda step: lr + (least - lr) * share(step))


def cosine(lr: float, *, num_steps: int, warmup: int = 0, least: float = 0.0) -> Schedule:
    """Up to ``lr`` in ``warmup`` updates, then in half a cosine down to ``least`` at update ``num_steps``."""
    share = _share(num_steps, warmup)
    return _warmed(
        lr, warmup, lambda step: least + (lr - least) * 0.5 * (1 + math.cos(math.pi * share(step)))
    )


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """A schedule that is ``factor`` times another at every update."""
    return schedule if factor == 1 else lambda step: schedule(step) * factor


def _warmed(lr: float, warmup: int, then: Schedule) -> Schedule:
    return lambda step: lr * step / warmup if step < warmup else then(step)


def _share(num_steps: int, warmup: int) -> Schedule:
    """How much of the way down is behind an update, from 0 to 1."""
    if not 0 <= warmup <= num_steps:
        raise PlanError(
            "a schedule warms up before it ends",
            equation=f"0 <= warmup({warmup}) <= num_steps({num_steps}) does not hold",
            hint="count both in updates",
        )
    return lambda step: min(1.0, max(0, step - warmup) / max(1, num_steps - warmup))
