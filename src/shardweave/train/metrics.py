"""What a run says of itself: a line for people, JSON for programs, tensorboard where it is asked for."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shardweave.errors import MissingPackageError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step; the same values on every rank.

    Attributes:
        loss: The mean cross-entropy of the targets of all ranks.
        count: How many targets there were.
        grad_norm: The norm of the whole gradient, before clipping.
        lr: The learning rate.
        zeros: Elements of the gradient that are 0; ``None`` where nobody counted.
        balance: How unevenly documents use experts, 1 where evenly; ``None`` where it has no weight.
        skipped: Whether weights were left alone, as some gradient was no number.
    """

    loss: float
    count: int
    grad_norm: float
    lr: float
    zeros: int | None = None
    balance: float | None = None
    skipped: bool = False


class Log:
    """Where a run writes what came of its steps. One rank has it.

    A file of JSON keeps the lines of steps before the one at which a run goes on, and loses later ones: they
    are of a run that was not saved, and come once more.
    """

    def __init__(
        self,
        *,
        steps: int,
        begin: int = 0,
        file: Path | None = None,
        tensorboard: Path | None = None,
        quiet: bool = False,
    ) -> None:
        """Begin.

        Args:
            steps: Steps in all.
            begin: Steps that are done.
            file: Gets one object a step.
            tensorboard: Gets scalars.
            quiet: Shows nothing.

        Raises:
            MissingPackageError: tensorboard is asked for and not installed.
        """
        self._board = _board(tensorboard, begin) if tensorboard is not None else None
        self._file = _opened(file, begin) if file is not None else None
        self._line = _line(steps, begin, quiet=quiet)
        self._step_end = time.monotonic()

    def step(self, step: int, outcome: Outcome, *, tokens: int) -> None:
        """Tell of a step.

        Args:
            step: How many are done with it.
            outcome: What came of it.
            tokens: Real tokens of all ranks.
        """
        now = time.monotonic()
        seconds, self._step_end = now - self._step_end, now
        values = {key: value for key, value in asdict(outcome).items() if value is not None}
        rate = tokens / seconds if seconds > 0 else 0.0
        more = {"tokens": tokens, "seconds": round(seconds, 6), "tokens_per_s": round(rate, 3)}
        self._write({"step": step, **values, **more})
        self._scalars(step, {**values, **more}, "train")
        self._line.show(step, outcome, rate)

    def evaluation(self, step: int, loss: float, count: int) -> None:
        """Tell of an evaluation."""
        self._write({"step": step, "evaluation_loss": loss, "evaluation_count": count})
        self._scalars(step, {"loss": loss}, "evaluation")
        self._line.note(f"step {step}: evaluation loss {loss:.4f} over {count:,} targets")
        self._step_end = time.monotonic()

    def saved(self, step: int, folder: Path) -> None:
        """Tell of a checkpoint."""
        self._line.note(f"step {step}: saved {folder}")
        self._step_end = time.monotonic()

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            # JSON has no number for what is none.
            kept = {
                k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
            }
            self._file.write(json.dumps(kept) + "\n")
            self._file.flush()

    def _scalars(self, step: int, values: Mapping[str, Any], group: str) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{group}/{name}", float(value), step)

    def close(self) -> None:
        """Let go of files and of the line."""
        self._line.close()
        for each in (self._file, self._board):
            if each is not None:
                each.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opened(file: Path, begin: int) -> Any:
    """The file, with the lines of steps up to ``begin``; it appears whole or stays as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if begin and file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                is_earlier = json.loads(line)["step"] <= begin
            except (ValueError, TypeError, KeyError):
                continue  # cut off by what ended the run
            if is_earlier:
                kept.append(line + "\n")
    staged = file.with_name(f".{file.name}.{os.getpid()}")
    staged.write_text("".join(kept), encoding="utf-8")
    staged.replace(file)
    return file.open("a", encoding="utf-8")


def _board(folder: Path, begin: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingPackageError(
            "what is written for tensorboard is written by its package",
            where=f"run.tensorboard {str(folder)!r}",
            equation="package tensorboard is not installed",
            hint="pip install 'shardweave[tensorboard]', or leave out run.tensorboard",
        ) from None
    return SummaryWriter(str(folder), purge_step=begin + 1 if begin else None)


# --- the line -----------------------------------------------------------------------------------

_PLAIN_EVERY_S = 10.0


def _line(steps: int, begin: int, *, quiet: bool) -> _Line:
    is_live = sys.stderr.isatty() and not {"NO_COLOR", "SHARDWEAVE_NO_PROGRESS"} & set(os.environ)
    return _Line(steps) if quiet else _Live(steps, begin) if is_live else _Plain(steps, begin)


class _Line:
    """Shows nothing."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def show(self, step: int, outcome: Outcome, rate: float) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Plain(_Line):
    """A line now and then, where stderr is no terminal."""

    def __init__(self, steps: int, begin: int) -> None:
        super().__init__(steps)
        self._begin = self._last = time.monotonic()
        self._from, self._first = begin, True

    def show(self, step: int, outcome: Outcome, rate: float) -> None:
        now = time.monotonic()
        if not self._first and step < self.steps and now - self._last < _PLAIN_EVERY_S:
            return
        left = (now - self._begin) / max(step - self._from, 1) * (self.steps - step)
        self._first, self._last = False, now
        self.note(f"step {step}/{self.steps}  {_said(outcome, rate)}  {left:.0f} s left")

    def note(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class _Live(_Line):
    """One line that is drawn anew."""

    def __init__(self, steps: int, begin: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(steps)
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(file=sys.stderr, highlight=False), transient=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=steps, completed=begin, said="")

    def show(self, step: int, outcome: Outcome, rate: float) -> None:
        self._bar.update(self._task, completed=step, said=_said(outcome, rate))

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def _said(outcome: Outcome, rate: float) -> str:
    skipped = "  skipped" if outcome.skipped else ""
    return f"loss {outcome.loss:.4f}  norm {outcome.grad_norm:.3g}  {rate:,.0f} tokens/s{skipped}"
