"""Layouts and batches that the runtime is compared with one process in: every pair of choices that can be."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass
from functools import cache

CHOICES = {
    "form": ("bshd", "thd"),
    "tp": (1, 2),
    "cp": (1, 2, 4),
    "dp": (1, 2),
    "pp": (1, 2, 4),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "vp": (1, 2),
    "sharded": (False, True),
    "mask": ("all", "prompt", "one", "empty_rank", "empty_microbatch"),
    "lengths": ("ragged", "even"),
    "method": ("ring", "gather", "all_to_all"),
}
MOST_RANKS = 8


@dataclass(frozen=True)
class Cell:
    """One layout and one kind of batch."""

    form: str
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    vp: int
    sharded: bool
    mask: str
    lengths: str
    method: str
    remat: int = 1
    eremat: int = 1
    weight_axes: tuple[str, ...] = ("remat",)
    recompute: bool = False
    layers: int = 5

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.num_data * self.pp

    @property
    def num_data(self) -> int:
        return self.remat * self.dp

    @property
    def valid(self) -> bool:
        """Whether there is such a layout on eight ranks."""
        stage = self.tp * self.cp * self.num_data
        whole = stage % (self.ep * self.etp * self.eremat) == 0
        # Masks that leave a data rank without targets need one that has some.
        return (
            self.world_size <= MOST_RANKS
            and whole
            and (self.vp == 1 or self.pp > 1)
            and (self.mask != "empty_rank" or self.dp > 1)
        )

    @property
    def pairs(self) -> set[tuple[tuple[str, object], ...]]:
        return set(itertools.combinations(((k, v) for k, v in asdict(self).items() if k in CHOICES), 2))

    def __str__(self) -> str:
        degrees = " ".join(
            f"{n}{getattr(self, n)}"
            for n in ("tp", "cp", "remat", "dp", "pp", "ep", "etp", "eremat", "vp")
            if getattr(self, n) > 1
        )
        axes = f" weights over {' '.join(self.weight_axes)}" if self.weight_axes != ("remat",) else ""
        sharded = " sharded" if self.sharded else ""
        again = ", recomputed" if self.recompute else ""
        return (
            f"{self.form} {degrees or 'one'}{axes}{sharded}, mask {self.mask}, {self.lengths}, "
            f"{self.method}{again}"
        )


@cache
def all_cells() -> tuple[Cell, ...]:
    """Every cell that there is."""
    found = (Cell(*values) for values in itertools.product(*CHOICES.values()))
    return tuple(cell for cell in found if cell.valid)


@cache
def pairwise(seed: int = 0) -> tuple[Cell, ...]:
    """Few cells that together have every pair of choices that some cell has."""
    left = set().union(*(cell.pairs for cell in all_cells()))
    chance, found = random.Random(seed), []
    while left:
        # One of the open pairs is in every candidate, so that each step makes headway.
        pair = min(left, key=str)
        having = [cell for cell in all_cells() if pair in cell.pairs]
        best = max(chance.sample(having, min(len(having), 120)), key=lambda cell: len(cell.pairs & left))
        found.append(best)
        left -= best.pairs
    return tuple(sorted(found, key=lambda cell: (cell.world_size, str(cell))))
