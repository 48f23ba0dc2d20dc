"""One rank of a run: its device, its groups, its model, and the loop over it.

Everything of a run is made here from its settings and its place, and let go of at the end. An error of one
rank is that of all (``together.py``).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from shardweave import __version__
from shardweave.errors import GeometryError, MissingFileError
from shardweave.store.native import latest
from shardweave.store.native_manifest import About
from shardweave.train import loop
from shardweave.train.batch import Microbatch
from shardweave.train.checkpoint import (
    load_states,
    load_weights,
    saver,
    states_of,
    through_store,
    weights_of,
)
from shardweave.train.checks import hf_config_of, parallel_of
from shardweave.train.collectives import max_all
from shardweave.train.config import TrainConfig
from shardweave.train.data import evaluation_loader, train_loader
from shardweave.train.grid import connect
from shardweave.train.launch import Place
from shardweave.train.metrics import Log, Outcome
from shardweave.train.muon import Muon
from shardweave.train.optimizer import AdamW, Optimizer, Settings, decayed, muon_for_matrices
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import GRID, Runtime, build, evaluated, group_plan
from shardweave.train.schedules import Schedule, constant, cosine, linear, scaled
from shardweave.train.settings import plain
from shardweave.train.step import BALANCE, MAIN, Objective, forward_backward
from shardweave.train.step import evaluate as forward
from shardweave.train.together import Together

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def run_rank(
    verb: str,
    config: TrainConfig,
    *,
    place: Place | None,
    store: Store | None,
    checkpoint: Path | None = None,
    quiet: bool = False,
) -> loop.Summary | dict[str, Any] | None:
    """Be one rank of a run.

    Args:
        verb: ``train`` or ``evaluate``.
        config: The settings, ``parallel.dp`` filled in.
        place: Where this process is; ``None`` where it is alone.
        store: The store of the run; ``None`` where it is alone.
        checkpoint: What is evaluated, where it is not the newest of the run.
        quiet: Shows no progress.

    Returns:
        What a training came to; what an evaluation came to on rank 0, and nothing on others.
    """
    rank, parallel = (0 if place is None else place.rank), parallel_of(config)
    device = device_of(config, place)
    meeting = HashStore() if store is None else store
    with deterministic(config.run.deterministic):
        groups = connect(
            group_plan(parallel),
            rank=rank,
            store=PrefixStore("groups", meeting),
            backend="nccl" if device.startswith("cuda") else "gloo",
            timeout_s=config.run.timeout_s,
        )
        with Together(meeting, rank=rank, groups=groups):
            newest = _newest(config)
            begins = verb == "train" and config.model.weights is None and newest is None
            runtime = build(
                hf_config_of(config),
                parallel=parallel,
                groups=groups,
                dtype=config.model.dtype,
                device=device,
                seed=config.run.seed if begins else None,
                stage_sizes=config.parallel.stages,
                cp_method=config.parallel.attention,
                dropout=config.model.dropout,
                mtp=config.model.mtp,
                multiple=config.parallel.weight_multiple,
                recompute=config.model.recompute,
                ordered=config.run.deterministic,
                ahead=config.parallel.prefetch,
            )
            runtime = replace(runtime, decoder=replace(runtime.decoder, seed=config.run.seed))
            if verb == "evaluate":
                found = _evaluate(config, runtime, checkpoint or newest)
                return found if rank == 0 else None
            return _train(config, runtime, meeting, resumes=newest is not None, quiet=quiet)


def _train(
    config: TrainConfig, runtime: Runtime, store: Store, *, resumes: bool, quiet: bool
) -> loop.Summary:
    dp_rank = runtime.parallel.data_rank(runtime.rank)
    vocab_size = runtime.decoder.maths.vocab_size
    train = train_loader(config, dp_rank=dp_rank, vocab_size=vocab_size)
    evaluation = evaluation_loader(config, dp_rank=dp_rank, vocab_size=vocab_size)
    if config.model.weights is not None and not resumes:
        _load(runtime, Path(config.model.weights))
    trainer = RankTrainer(config, runtime, store)
    of = config.run

    def log(done: int) -> Log:
        return Log(
            steps=of.steps,
            begin=done,
            file=None if of.log is None else Path(of.log),
            tensorboard=None if of.tensorboard is None else Path(of.tensorboard),
            quiet=quiet,
        )

    with loop.stop_signals() as asked:
        return loop.fit(
            trainer,
            config,
            train=train,
            evaluation=evaluation,
            log=log if runtime.rank == 0 else None,
            asked=asked,
        )


def _evaluate(config: TrainConfig, runtime: Runtime, path: Path | None) -> dict[str, Any]:
    dp_rank = runtime.parallel.data_rank(runtime.rank)
    loader = evaluation_loader(config, dp_rank=dp_rank, vocab_size=runtime.decoder.maths.vocab_size)
    assert loader is not None, "an evaluation has data: checks.find_wrong(..., evaluates=True)"
    if path is None and config.model.weights is not None:
        path = Path(config.model.weights)
    if path is None:
        raise MissingFileError(
            "what is evaluated has weights",
            where=f"checkpoint.folder {config.checkpoint.folder!r}",
            equation="no checkpoint is there, and model.weights is null",
            hint="train first, or give --checkpoint",
        )
    _load(runtime, path)
    loss, count = loop.evaluate(_Evaluator(runtime), loader)
    perplexity = math.exp(min(loss, 700.0))
    return {"checkpoint": str(path), "loss": loss, "perplexity": perplexity, "count": count}


def _newest(config: TrainConfig) -> Path | None:
    folder = config.checkpoint.folder
    return None if folder is None or not Path(folder).is_dir() else latest(Path(folder))


def _load(runtime: Runtime, path: Path) -> About:
    """Weights of any format. Which dtype they are trained in was said, so rounding to it is meant."""
    return load_weights(
        path,
        layout=runtime.layout,
        rank=runtime.rank,
        arrays={name: array.detach() for name, array in runtime.weights.items()},
        config=runtime.config,
        allow_casts=True,
    )


# --- a model and its optimizer ------------------------------------------------------------------


class _Evaluator:
    """The part of a trainer that an evaluation needs."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[float, int]:
        """The sum of the losses of the targets of all ranks, and how many there are."""
        found = forward(evaluated(self.runtime), moved(batches, self.runtime)).report
        return found.means[MAIN] * found.counts[MAIN], found.counts[MAIN]


class RankTrainer(_Evaluator):
    """A ``loop.Trainer`` of a runtime."""

    def __init__(self, config: TrainConfig, runtime: Runtime, store: Store) -> None:
        """Make the optimizer of a model.

        Args:
            config: The settings.
            runtime: The model.
            store: The store of the run, through which ranks save.
        """
        super().__init__(runtime)
        of = config.optimizer
        self._config, self._store = config, store
        self._objective = Objective(
            balance=config.loss.balance, router_z=config.loss.router_z, mtp=config.loss.mtp
        )
        self._rate = schedule_of(config)
        self._optimizer = Optimizer(
            runtime.weights,
            plan=reduce_plan(runtime.layout, runtime.rank),
            groups=runtime.groups,
            settings=settings_of(config),
            sharded=of.sharded,
            max_norm=of.clip,
        )
        self._saver: Any = None

    def step(self, batches: Sequence[Microbatch], *, number: int) -> Outcome:
        """Train on microbatches; weights stay as they were where the loss is no number."""
        weights = self.runtime.weights
        for weight in weights.values():
            weight.grad = None
        found = forward_backward(
            self.runtime, moved(batches, self.runtime), self._objective, step=number
        ).report
        loop.require_finite(found.loss, step=number)
        done = self._optimizer.step({name: weight.grad for name, weight in weights.items()})
        return Outcome(
            loss=found.means[MAIN],
            count=found.counts[MAIN],
            grad_norm=done.grad_norm,
            lr=self._rate(self._optimizer.count + (0 if done.ok else 1)),
            zeros=done.num_zeros,
            balance=found.means.get(BALANCE),
            skipped=not done.ok,
        )

    def save(self, run: Path, *, step: int, about: Mapping[str, Any], wait: bool) -> Path:
        """Save to the folder of a run."""
        runtime, world_size = self.runtime, self.runtime.parallel.world_size
        if self._saver is None:
            choices = self._config.checkpoint
            more: dict[str, Any] = {
                "keep": choices.keep or None,
                "compare_replicas": choices.compare_replicas,
            }
            if world_size > 1:
                more["exchange"] = through_store(
                    PrefixStore("save", self._store),
                    rank=runtime.rank,
                    size=world_size,
                    timeout_s=self._config.run.timeout_s,
                )
            self._saver = saver(run, rank=runtime.rank, **more)
        said = About(
            step=step,
            config=dict(runtime.config),
            data=dict(about["documents"]),
            extras={"settings": plain(self._config)},
            software=f"shardweave {__version__}",
        )
        held = itertools.chain(
            weights_of(runtime.layout, runtime.rank, runtime.weights), states_of(self._optimizer)
        )
        folder: Path = self._saver.save(held, said, in_background=not wait)
        return folder

    def restore(self, folder: Path) -> Mapping[str, Any]:
        """Take weights and the state of the optimizer from a checkpoint of any layout."""
        about = _load(self.runtime, folder)
        self._optimizer.reset_masters()
        load_states(folder, self._optimizer)
        return {"documents": about.data}

    def finish(self) -> None:
        """Wait until what is saved in the background is there."""
        if self._saver is not None:
            self._saver.wait()

    def any_rank(self, asked: bool) -> bool:
        """Whether any rank says so."""
        like = next(iter(self.runtime.weights.values()))
        mine = torch.tensor([int(asked)], device=like.device)
        return bool(max_all(mine, group=self.runtime.groups.get(GRID, "all")))


def schedule_of(config: TrainConfig) -> Schedule:
    """The learning rate of a run as a function of the update."""
    of = config.optimizer
    if of.schedule == "constant":
        return constant(of.lr, warmup=of.warmup_steps)
    made = {"linear": linear, "cosine": cosine}[of.schedule]
    end = of.decay_steps or config.run.steps
    return made(of.lr, num_steps=end, warmup=of.warmup_steps, least=of.min_lr)


def settings_of(config: TrainConfig) -> Settings:
    """How each array of a run is updated."""
    of, rate = config.optimizer, schedule_of(config)
    adamw = AdamW(rate, beta1=of.beta1, beta2=of.beta2, eps=of.eps, weight_decay=of.weight_decay)
    if of.kind == "adamw":
        return decayed(adamw)
    muon = Muon(
        scaled(rate, (of.muon_lr or of.lr) / of.lr),
        momentum=of.momentum,
        nesterov=of.nesterov,
        weight_decay=of.weight_decay,
        ns_steps=of.ns_steps,
        ns_dtype=of.ns_dtype,
        adjust_lr_fn=of.adjust_lr_fn,
    )
    return muon_for_matrices(muon, adamw)


def moved(batches: Sequence[Microbatch], runtime: Runtime) -> list[Microbatch]:
    """Microbatches on the device of a model."""
    device = next(iter(runtime.weights.values())).device
    if device.type == "cpu":
        return list(batches)
    return [replace(each, ids=each.ids.to(device), mask=each.mask.to(device)) for each in batches]


def device_of(config: TrainConfig, place: Place | None) -> str:
    """The device of a rank.

    Raises:
        GeometryError: GPUs are asked for, and there are fewer than ranks on this machine.
    """
    here, number = (1, 0) if place is None else (place.local_size, place.local_rank)
    found = torch.cuda.device_count() if config.run.device != "cpu" else 0
    if config.run.device == "cuda" and found < here:
        raise GeometryError(
            "each rank of a machine has a GPU",
            where=f"rank {0 if place is None else place.rank}",
            equation=f"gpus({found}) < ranks({here})",
            hint="start fewer ranks here, or use run.device cpu",
        )
    if found < here:
        return "cpu"
    torch.cuda.set_device(number)
    return f"cuda:{number}"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Kernels that give the same bits each time, while it is entered."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
