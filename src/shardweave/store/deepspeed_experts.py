"""The experts of ``deepspeed.moe``: one file an expert, and names that each rank gives for itself.

A rank calls its experts 0, 1, ... wherever it stands, in its optimizer's files too; in the files of experts
they have their numbers in the model. Flat groups of experts are cut among the ranks that hold the same ones.

Source: deepspeed 0.19.8 ``runtime/engine.py`` (``_save_moe_checkpoint``), ``utils/groups.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardweave.errors import FormatError, IndexMismatchError
from shardweave.store.deepspeed_files import MODEL, File, Ranks, broken, complete, load
from shardweave.store.pickles import brief
from shardweave.store.torch_save import TensorAt

_EXPERT: Final = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class Experts:
    """The files of experts of a save.

    Attributes:
        files: All of them.
        by_rank: By tensor-parallel rank and weight the file and the tensor.
        local: Experts of one rank, by what stands before their number.
        data_first: Ranks that hold the same experts are adjacent.
    """

    files: tuple[File, ...] = ()
    by_rank: Mapping[int, Mapping[str, tuple[str, TensorAt]]] = field(default_factory=dict)
    local: Mapping[str, int] = field(default_factory=dict)
    data_first: bool = False

    @classmethod
    def of(cls, folder: Path, found: Mapping[str, Ranks], model: Mapping[str, Any]) -> Experts:
        """From the names of a folder's files, and its first model states.

        Raises:
            FormatError, IndexMismatchError, MissingFileError: Files contradict their names, or are missing.
        """
        if model.get("ds_autoep_layers"):
            raise FormatError(
                "the experts of a save are those of deepspeed.moe",
                where=str(folder),
                equation="ds_autoep_layers: experts are stacked by AutoEP",
                hint="convert it with DeepSpeed's ds_to_universal, and read the universal checkpoint",
            )
        names = found["expert"]
        if found["expert_optim"] and not found["optim"]:
            raise FormatError(
                "states of experts name the weights that they are of",
                where=str(folder / next(iter(found["expert_optim"].values()))),
                equation="without ZeRO an expert's states are under numbers",
                hint="save with ZeRO stage 1, whose files name weights",
            )
        if not names:
            return cls()
        last: dict[int, int] = {}
        for _, layer, expert in names:
            last[layer] = max(last.get(layer, 0), expert)
        wanted = [
            (tp, layer, expert)
            for tp in range(max(key[0] for key in names) + 1)
            for layer in range(max(last) + 1)
            for expert in range(last.get(layer, 0) + 1)
        ]
        complete(folder, names, wanted, "layer_{1}_expert_{2}_mp_rank_{0:02d}_model_states.pt")
        files: list[File] = []
        by_rank: dict[int, dict[str, tuple[str, TensorAt]]] = {}
        total: dict[str, int] = {}
        for (tp, _, expert), name in names.items():
            file = load(folder, name, allow=MODEL)
            files.append(file)
            mine = by_rank.setdefault(tp, {})
            for key, tensor in file.value.items():
                match = _EXPERT.fullmatch(key) if type(key) is str else None
                if match is None or type(tensor) is not TensorAt:
                    raise broken(folder / name, f"entry {brief(key)} is no weight of an expert")
                if int(match[2]) != expert or key in mine:
                    raise IndexMismatchError(
                        "a file of an expert holds the weights of that expert",
                        where=f"{folder / name}, weight {key!r}",
                        equation=f"expert {match[2]} in a file of expert {expert}",
                        hint="files have changed places; copy the whole folder again",
                    )
                mine[key] = name, tensor
                total[match[1]] = max(total.get(match[1], 0), expert + 1)
        local: dict[str, int] = {}
        for group in model.get("param_shapes") or []:
            for name in group if type(group) is dict else ():
                if match := _EXPERT.fullmatch(name):
                    local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
        config = model.get("ds_config")
        first = type(config) is dict and config.get("use_data_before_expert_parallelism") is True
        return cls(tuple(files), by_rank, local, first)

    def rename(self, name: str, rank: int) -> str:
        """The name in the model of what expert-parallel rank ``rank`` calls ``name``."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            raise FormatError(
                "only weights of experts are cut among fewer ranks than others",
                where=f"weight {name!r}",
                equation="it is in a group of experts, and its name is no expert's",
                hint="experts of deepspeed.moe are read; convert others with ds_to_universal",
            )
        return f"{match[1]}{rank * self.local[match[1]] + int(match[2])}{match[3]}"

    def weights(self, tp: int) -> Mapping[str, tuple[str, TensorAt]]:
        """The weights of all experts of a tensor-parallel rank: file and tensor."""
        return self.by_rank.get(tp, {})
