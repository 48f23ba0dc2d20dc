"""The loop: steps, evaluations, checkpoints, and how a run stops and goes on.

What a step does is not known here; a ``Trainer`` does it. A run is a function of its settings: it goes on
from any of its checkpoints, at any layout, with the documents that would have come next.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardweave.errors import ConfigError, ExistsError, NonFiniteError
from shardweave.store.native import complete_steps
from shardweave.train.batch import Microbatch
from shardweave.train.config import TrainConfig
from shardweave.train.data import Loader
from shardweave.train.metrics import Log, Outcome

MOST_SKIPPED = 8
"""Steps in a row that may be skipped because some gradient is no number."""


class Trainer(Protocol):
    """A model and its optimizer on one rank. Every method is called by all ranks, in the same order."""

    def step(self, batches: Sequence[Microbatch], *, number: int) -> Outcome:
        """Train on the microbatches of this data rank. ``number`` counts steps from 1."""

    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[float, int]:
        """The sum of the losses of the targets of all ranks, and how many there are."""

    def save(self, run: Path, *, step: int, about: Mapping[str, Any], wait: bool) -> Path:
        """Save to the folder of a run; with ``wait`` it is there when this returns."""

    def restore(self, folder: Path) -> Mapping[str, Any]:
        """Take weights and the state of the optimizer from a checkpoint, and give what was said about it."""

    def finish(self) -> None:
        """Wait until what is saved in the background is there."""

    def any_rank(self, asked: bool) -> bool:
        """Whether any rank says so."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to.

    Attributes:
        steps: Steps that are done, those of earlier runs included.
        begin: Steps that were done before.
        loss: Of the last step; ``None`` where none was made.
        evaluation_loss: Of the last evaluation, if there was one.
        tokens: Real tokens of all ranks that this run trained on.
        seconds: How long it took.
        checkpoint: The newest, if there is one.
        stopped: Whether it was asked to stop before its end.
    """

    steps: int
    begin: int
    loss: float | None
    evaluation_loss: float | None
    tokens: int
    seconds: float
    checkpoint: Path | None
    stopped: bool


def fit(
    trainer: Trainer,
    config: TrainConfig,
    *,
    train: Loader,
    evaluation: Loader | None,
    log: Log | Callable[[int], Log] | None = None,
    asked: Callable[[], bool] = lambda: False,
) -> Summary:
    """Train from the newest checkpoint to the end, or until somebody asks to stop.

    Args:
        trainer: Does the steps.
        config: The settings.
        train: The microbatches of this data rank.
        evaluation: Those that it is measured on.
        log: On one rank what is told of the run, or what makes it from the steps that are done; nothing on
            others.
        asked: Whether this rank was asked to stop; all stop after the same step.

    Raises:
        NonFiniteError: The loss of a step is no number, or the gradients of many.
        ExistsError: There is a checkpoint, and nothing is to be resumed.
        ConfigError: A checkpoint is of a run over other documents.
    """
    run = _Run(trainer, config, train, evaluation)
    run.resume()
    made = log(run.done) if callable(log) else log
    try:
        return run.to_end(made, asked)
    finally:
        if made is not None:
            made.close()


class Evaluator(Protocol):
    """The part of a trainer that an evaluation needs."""

    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[float, int]:
        """As of ``Trainer``."""


def evaluate(trainer: Evaluator, loader: Loader) -> tuple[float, int]:
    """The mean loss over all parts of a loader, each once, and how many targets there were."""
    sums, counts = [], 0
    for batches in loader.once():
        total, count = trainer.evaluate(batches)
        sums.append(total)
        counts += count
    return math.fsum(sums) / counts if counts else 0.0, counts


def require_finite(loss: float, *, step: int) -> None:
    """Refuse to go on from a loss that is no number.

    Raises:
        NonFiniteError: As above.
    """
    if not math.isfinite(loss):
        raise NonFiniteError(
            "the loss of a step is a number",
            where=f"step {step}",
            equation=f"loss({loss})",
            hint="lower optimizer.lr or optimizer.clip, or look at the documents of that step; the "
            "newest checkpoint is of a step before it",
        )


def require_updates(skipped: int, *, step: int) -> None:
    """Refuse to go on where one gradient after the other is no number: weights would never change again.

    Raises:
        NonFiniteError: As above.
    """
    if skipped >= MOST_SKIPPED:
        raise NonFiniteError(
            "the gradients of a run are numbers, but for a few steps",
            where=f"step {step}",
            equation=f"skipped({skipped} in a row) >= {MOST_SKIPPED}",
            hint="lower optimizer.lr, and go on from a checkpoint before them",
        )


# --- a run --------------------------------------------------------------------------------------


class _Run:
    def __init__(
        self, trainer: Trainer, config: TrainConfig, train: Loader, evaluation: Loader | None
    ) -> None:
        self.trainer, self.config, self.train, self.evaluation = trainer, config, train, evaluation
        self.folder = None if config.checkpoint.folder is None else Path(config.checkpoint.folder)
        self.done = self.begin = self.tokens = 0
        self.skipped = 0
        self.loss: float | None = None
        self.evaluation_loss: float | None = None
        self.saved: Path | None = None
        self.saved_step = -1

    def resume(self) -> None:
        """Go to the newest checkpoint, if there is one."""
        found = complete_steps(self.folder) if self.folder is not None and self.folder.is_dir() else []
        if not found:
            return
        step, folder = found[-1]
        if self.config.checkpoint.resume == "never":
            raise ExistsError(
                "a run that is not resumed has a folder of its own",
                where=str(folder),
                equation=f"step({step}) is there, and checkpoint.resume is never",
                hint="choose another checkpoint.folder, or checkpoint.resume auto",
            )
        said = self.trainer.restore(folder)
        check_same(said.get("documents", {}), documents_of(self.config, self.train), where=str(folder))
        self.done = self.begin = self.saved_step = step
        self.saved = folder

    def to_end(self, log: Log | None, asked: Callable[[], bool]) -> Summary:
        start, stopped = time.monotonic(), False
        of, steps = self.config, self.config.run.steps
        while self.done < steps and not stopped:
            self.step(log)
            stopped = self.trainer.any_rank(asked()) and self.done < steps
            if due(self.done, of.evaluation.every, steps) and not stopped:
                self.evaluate(log)
            if due(self.done, of.checkpoint.every, steps) or stopped:
                self.save(log, wait=not of.checkpoint.background or stopped or self.done == steps)
        self.trainer.finish()
        return Summary(
            steps=self.done,
            begin=self.begin,
            loss=self.loss,
            evaluation_loss=self.evaluation_loss,
            tokens=self.tokens,
            seconds=time.monotonic() - start,
            checkpoint=self.saved,
            stopped=stopped,
        )

    def step(self, log: Log | None) -> None:
        batches = self.train.step(self.done)
        outcome = self.trainer.step(batches, number=self.done + 1)
        self.done, self.loss = self.done + 1, outcome.loss
        tokens = self.train.num_tokens(self.done - 1)
        self.tokens += tokens
        if log is not None:
            log.step(self.done, outcome, tokens=tokens)
        self.skipped = self.skipped + 1 if outcome.skipped else 0
        require_updates(self.skipped, step=self.done)

    def evaluate(self, log: Log | None) -> None:
        if self.evaluation is None:
            return
        self.evaluation_loss, count = evaluate(self.trainer, self.evaluation)
        if log is not None:
            log.evaluation(self.done, self.evaluation_loss, count)

    def save(self, log: Log | None, *, wait: bool) -> None:
        if self.folder is None or self.saved_step == self.done:
            return
        about = {"documents": documents_of(self.config, self.train)}
        self.saved = self.trainer.save(self.folder, step=self.done, about=about, wait=wait)
        self.saved_step = self.done
        if log is not None:
            log.saved(self.done, self.saved)


def due(done: int, every: int, steps: int) -> bool:
    """Whether something that comes every so many steps, and at the end, comes now."""
    return done == steps or (every > 0 and done % every == 0)


def documents_of(config: TrainConfig, train: Loader) -> dict[str, Any]:
    """What decides which documents come when."""
    return {
        "data.train": config.data.train,
        "data.tokenizer": config.data.tokenizer,
        "data.targets": config.data.targets,
        "data.shuffle": config.data.shuffle,
        "batch.documents": config.batch.documents,
        "batch.sequence_length": config.batch.sequence_length,
        "run.seed": config.run.seed,
        "parts of documents": train.size,
    }


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """Refuse to go on with other documents than a run began with.

    A checkpoint that was converted says nothing of documents, and goes on with those of its step.

    Raises:
        ConfigError: Some setting differs.
    """
    different = [key for key in now if before.get(key) != now[key] and key != "data.train"]
    if before and different:
        raise ConfigError(
            "a run goes on with the documents that it began with",
            where=where,
            equation=", ".join(f"{key}({before.get(key)}) != {key}({now[key]})" for key in different),
            hint="put these settings back, or begin a run in another checkpoint.folder, with model.weights "
            "of this one",
        )


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Whether this process was asked to stop, by SIGTERM or Ctrl-C. Asked once more it stops at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
