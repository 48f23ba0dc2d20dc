"""What of the state of an optimizer goes along with a conversion, said before anybody relies on it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardweave.convert.checkpoint import OptimizerState
from shardweave.convert.states import MASTER
from shardweave.layout import Layout

Place = Literal["beside", "weights", "none"]
"""Where masters are: states beside rounded weights, the weights themselves, or nowhere, where a run has no
weights in full precision."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What goes along.

    Attributes:
        num_weights: How many weights have a state.
        states: How many of them have each state, by its name; without masters.
        counts: The fewest and the most updates that were made of a weight; ``None`` where none are counted.
        num_groups: Groups of settings; 0 where none are known.
        masters: Where the masters are.
        dtypes: The dtypes of the weights that have a state.
    """

    num_weights: int
    states: Mapping[str, int]
    counts: tuple[int, int] | None
    num_groups: int
    masters: Place
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        """One line: the states, the number of updates, and the groups.

        >>> print(Kept(5, {"exp_avg": 5, "momentum_buffer": 2}, (3, 3), 1, "weights", ("float32",)))
        exp_avg of 5, momentum_buffer of 2 weights; 3 updates; 1 group of settings
        """
        alike = len(set(self.states.values())) == 1
        names = (
            ", ".join(self.states) if alike else ", ".join(f"{k} of {n:,}" for k, n in self.states.items())
        )
        weights = f" of {self.num_weights:,}" if alike else ""
        said = [f"{names or 'no states'}{weights} weights"]
        if self.counts is not None:
            low, high = self.counts
            said.append(f"{low:,} updates" if low == high else f"{low:,} to {high:,} updates")
        if self.num_groups:
            said.append(f"{self.num_groups:,} group{'' if self.num_groups == 1 else 's'} of settings")
        return "; ".join(said)

    @property
    def masters_said(self) -> str:
        """Where the masters are, in words."""
        dtypes = " and ".join(self.dtypes)
        return {
            "beside": f"masters beside {dtypes} weights",
            "weights": f"weights are the masters, in {dtypes}",
            "none": f"no masters: weights are trained in {dtypes}",
        }[self.masters]


def kept(state: OptimizerState, target: Layout) -> Kept:
    """What goes along into a target.

    Args:
        state: What the source has.
        target: What is written, weights and states.
    """
    states = Counter(one for weight in state.weights.values() for one in sorted(weight.states))
    families = {
        tensor.name.removeprefix("optim/").rpartition("/")[0]: tensor.name.endswith(f"/{MASTER}")
        for tensor in sorted(target.tensors, key=lambda tensor: tensor.name.endswith(f"/{MASTER}"))
        if tensor.name.startswith("optim/")
    }
    dtypes = sorted({r.dtype for r in target.rules for part in r.parts if part.tensor.name in families})
    masters: Place = "none"
    if any(families.values()):
        masters = "beside"
    elif set(dtypes) <= {"float32", "float64"}:
        masters = "weights"
    counts = [count for name, count in state.counts.items() if name in state.weights]
    return Kept(
        len(state.weights),
        dict(states),
        (min(counts), max(counts)) if counts else None,
        _num_groups(state),
        masters,
        tuple(dtypes),
    )


def _num_groups(state: OptimizerState) -> int:
    alike = operator.is_ if state.grouped else operator.eq
    found: list[Mapping[str, object]] = []
    for said in state.settings.values():
        if not any(alike(said, other) for other in found):
            found.append(said)
    return len(found)
