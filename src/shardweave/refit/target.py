"""What a receiver fills: staged beside what is served, made whole, and put in place at once.

``Target`` is what a session asks of an engine. ``Buffers`` is the target for anybody's arrays: it stages in
memory, and what is more than a bound in files. Other engines bring their own (``refit.engines``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from shardweave.errors import WriteError
from shardweave.layout import Layout
from shardweave.move.transport import tensors
from shardweave.refit.sources import Source


class Target(Protocol):
    """Where one rank of an engine puts a version.

    A session calls ``stage``, fills what it returned, calls ``derive``, and then either ``commit`` or
    ``discard``. Whatever fails before ``commit`` leaves what is served as it was.

    Attributes:
        layout: Where the state of all ranks of the engine is; their global ranks are those of its mesh.
        rank: The global rank of this one.
    """

    layout: Layout
    rank: int

    def stage(self) -> Mapping[str, torch.Tensor]:
        """Arrays to fill, under the names, in the shapes and dtypes of the layout; padding holds zeros.

        No memory of what is served.
        """
        ...

    def derive(self) -> None:
        """Everything that has to be made of the staged arrays and may fail."""
        ...

    def commit(self) -> None:
        """Serve what was staged. It cannot fail, and takes no longer than a copy."""
        ...

    def discard(self) -> None:
        """Forget what was staged."""
        ...

    def broken(self) -> str:
        """What is no longer as the last commit left it, by name, or nothing. A cheap look, not a proof."""
        ...


class Buffers:
    """The arrays of one rank, filled by copying what was staged into them."""

    def __init__(
        self,
        *,
        layout: Layout,
        rank: int,
        arrays: Mapping[str, Any],
        memory_bytes: int | None = None,
        spill: str | os.PathLike[str] | None = None,
    ) -> None:
        """Declare what the arrays are.

        Args:
            layout: Of all ranks of the engine.
            rank: This one.
            arrays: Its arrays under the layout's names, all of them and no others: tensors, or numpy arrays.
                They are written to at each commit, and at no other time.
            memory_bytes: The most memory that staging takes; as much as the arrays by default.
            spill: A folder on a local disk, where the rest is staged.

        Raises:
            UnknownNameError, PlanError, DtypeError: The arrays are not those of the layout.
            WriteError: The folder cannot hold what does not fit into memory.
        """
        self.layout, self.rank = layout, rank
        self._live = Source(layout, tensors(arrays), rank).arrays  # which checks that they are the rank's
        self._staged: dict[str, torch.Tensor] = {}
        self._memory_bytes, self._spill = memory_bytes, spill
        self._committed: dict[str, tuple[int, ...]] = {}

    def stage(self) -> Mapping[str, torch.Tensor]:
        """See ``Target.stage``. The same arrays every time: memory that was touched once is faster."""
        if not self._staged:
            left = self._memory_bytes
            staged: dict[str, torch.Tensor] = {}
            # Small arrays stay in memory: files serve large ones.
            for name, live in sorted(self._live.items(), key=lambda item: item[1].nbytes):
                if left is None or live.nbytes <= left:
                    left = None if left is None else left - live.nbytes
                    staged[name] = torch.zeros_like(live, memory_format=torch.contiguous_format)
                else:
                    staged[name] = self._in_file(name, live)
            self._staged = staged
        return self._staged

    def derive(self) -> None:
        """See ``Target.derive``: nothing is derived, but the arrays have to be those of the layout still.

        Raises:
            PlanError, DtypeError: An array was given another shape or dtype, as kernels that repack it do.
        """
        Source(self.layout, self._live, self.rank)

    def commit(self) -> None:
        """See ``Target.commit``."""
        for name, live in self._live.items():
            live.copy_(self._staged[name])
            self._committed[name] = _state(live)

    def discard(self) -> None:
        """See ``Target.discard``. The memory is kept for the next version."""

    def broken(self) -> str:
        """See ``Target.broken``: an array that torch wrote to since, or whose memory is other memory."""
        return next((name for name, was in self._committed.items() if _state(self._live[name]) != was), "")

    def _in_file(self, name: str, live: torch.Tensor) -> torch.Tensor:
        if self._spill is None:
            raise WriteError(
                "staging has room for a version",
                where=f"rank {self.rank}, {name!r}",
                equation=f"bytes({live.nbytes}) of this array do not fit into what memory_bytes"
                f"({self._memory_bytes}) leaves",
                hint="raise memory_bytes, or name a folder on a local disk with spill=",
            )
        if not live.nbytes:
            return torch.zeros_like(live)
        folder = Path(self._spill)
        try:
            with tempfile.TemporaryFile(dir=folder, prefix="shardweave-") as file:
                # Without this a full disk is found out by a signal in the middle of a copy.
                os.posix_fallocate(file.fileno(), 0, live.nbytes)
                memory = mmap.mmap(file.fileno(), live.nbytes)
        except OSError as error:
            raise WriteError(
                "the folder for staging has room for a version",
                where=f"rank {self.rank}, {name!r}, {folder}",
                equation=f"bytes({live.nbytes}): {error.strerror or error}",
                hint="free space there, name another folder with spill=, or raise memory_bytes; what is "
                "served is unchanged",
            ) from error
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_SEQUENTIAL)
        return torch.frombuffer(memory, dtype=live.dtype).view(live.shape)


def _state(array: torch.Tensor) -> tuple[int, ...]:
    """What changes when memory is given back, or written to through a tensor that shares it."""
    written = 0 if array.is_inference() else array._version
    return array.data_ptr(), array.untyped_storage().nbytes(), written
