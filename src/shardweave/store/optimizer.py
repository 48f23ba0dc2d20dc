"""What a store says of an optimizer beside the arrays of its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """How often weights were updated, and with which settings.

    Attributes:
        count: The number of updates of each weight, by its name; without those that no state counts.
        groups: The groups of parameters in their order: ``params``, the names of its weights in order, and
            its settings by the words of torch (``lr``, ``betas``, ``eps``, ``weight_decay``).
    """

    count: Mapping[str, int]
    groups: tuple[Mapping[str, Any], ...] = ()
