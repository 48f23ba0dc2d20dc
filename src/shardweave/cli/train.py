"""``shardweave train`` and ``shardweave evaluate``: runs of the runtime, from one file of settings."""

from __future__ import annotations

import difflib
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardweave.cli import options
from shardweave.cli.common import (
    STOPPED,
    exit_code,
    parse_count,
    print_block,
    print_error,
    print_facts,
    print_finding,
    print_json,
    stderr,
    table,
)
from shardweave.errors import GeometryError, ShardweaveError, TransportError

if TYPE_CHECKING:
    from shardweave.train.config import TrainConfig
    from shardweave.train.launch import Place
    from shardweave.train.loop import Summary

ANY_SETTING = {"ignore_unknown_options": True}
"""Every setting is an option too; they are read here, as all that is wrong is said at once."""

_OWN = ("--nproc", "--explain", "--keys", "--json", "--quiet", "--debug", "--checkpoint")

Said = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [--SECTION.KEY VALUE]...",
        help="The settings, in YAML or JSON, and any of them anew: --parallel.tp 2.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        parser=parse_count,
        metavar="N",
        help="Ranks, a process each on this machine. Default: what the degrees multiply to.",
    ),
]
Explain = Annotated[bool, typer.Option("--explain", help="Print mesh, groups and parameters; start nothing.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def train(
    said: Said = None,
    nproc: Ranks = None,
    explain: Explain = False,
    keys: Annotated[bool, typer.Option("--keys", help="Print every setting and its default.")] = False,
    as_json: options.Json = False,
    quiet: Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Train a model, on as many ranks as its degrees ask for.

    A process a rank is started here, or by torchrun. All that is wrong with the
    settings is said before any is. A run that was stopped goes on from its
    newest checkpoint when the same command is run again, at any layout.
    """
    if keys:
        _print_keys()
        return
    _run("train", said, nproc, explain=explain, as_json=as_json, quiet=quiet, debug=debug)


def evaluate(
    said: Said = None,
    nproc: Ranks = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            exists=True,
            help="What is evaluated. Default: the newest of the run.",
        ),
    ] = None,
    explain: Explain = False,
    as_json: options.Json = False,
    quiet: Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure the loss of a checkpoint on the documents of evaluation.data.

    Forward only, at any layout. Its settings are those of train; a checkpoint
    of this runtime, of Hugging Face or of Megatron will do.
    """
    _run(
        "evaluate",
        said,
        nproc,
        explain=explain,
        as_json=as_json,
        quiet=quiet,
        debug=debug,
        checkpoint=checkpoint,
    )


def split_said(said: Sequence[str]) -> tuple[Path, list[tuple[str, str]]]:
    """The file of settings, and the settings that are given anew, from what stands on a command line.

    >>> split_said(["run.yaml", "--parallel.tp", "2", "--run.seed=7"])
    (PosixPath('run.yaml'), [('parallel.tp', '2'), ('run.seed', '7')])
    """
    files, anew, left = [], [], list(said)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            files.append(word)
            continue
        key, is_joined, value = word[2:].partition("=")
        if "." not in key:
            near = difflib.get_close_matches(word, _OWN, 1)
            raise typer.BadParameter(
                f"no such option: {word}" + (f", did you mean {near[0]}?" if near else "")
            )
        if not is_joined:
            if not left:
                raise typer.BadParameter(f"option {word} needs a value")
            value = left.pop(0)
        anew.append((key, value))
    if len(files) != 1:
        raise typer.BadParameter(
            "no file of settings is given"
            if not files
            else f"one file of settings is given, not {len(files)}"
        )
    return Path(files[0]), anew


def _run(
    verb: str,
    said: Sequence[str] | None,
    nproc: int | None,
    *,
    explain: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    checkpoint: Path | None = None,
) -> None:
    file, anew = split_said(said or ())
    from shardweave.train.checks import notes, parallel_of
    from shardweave.train.launch import find_place

    place = None if explain else find_place()
    if place is not None and nproc is not None:
        raise GeometryError(
            "ranks are started once",
            equation=f"--nproc {nproc} with RANK={place.rank} of WORLD_SIZE={place.world_size}",
            hint="leave out --nproc under torchrun, or unset RANK",
        )
    world_size = nproc if place is None else place.world_size
    config = _config(file, anew, world_size, verb, speaks=place is None or place.rank == 0)
    ranks = parallel_of(config).world_size
    if not quiet and (explain or (ranks == 1 if place is None else place.rank == 0)):
        for note in notes(config):
            stderr().print(f"note: {note}", style="dim", highlight=False, soft_wrap=True)
    if explain:
        _explain(config, as_json=as_json)
        return
    if place is None and ranks > 1:
        flags = {"--json": as_json, "--quiet": quiet, "--debug": debug}
        more = [flag for flag, is_given in flags.items() if is_given]
        more += ["--checkpoint", str(checkpoint)] if checkpoint is not None else []
        raise typer.Exit(_launched(verb, [*(said or ()), *more], ranks))
    _in_rank(verb, config, place, checkpoint, as_json=as_json, quiet=quiet)


def _config(
    file: Path, anew: Sequence[tuple[str, str]], world_size: int | None, verb: str, *, speaks: bool
) -> TrainConfig:
    """The settings; all that is wrong with them is printed, by one rank."""
    from shardweave.train.checks import find_wrong

    try:
        config, wrong = find_wrong(file, anew, world_size=world_size, evaluates=verb == "evaluate")
    except ShardweaveError as found:
        config, wrong = None, [found]
    if wrong and speaks:
        for error in wrong:
            print_finding(error)
    if config is None or wrong:
        if not speaks:
            time.sleep(3.0)  # who started the ranks ends all with the first, and one of them speaks
        raise typer.Exit(max(exit_code(error) for error in wrong))
    return config


# --- processes ----------------------------------------------------------------------------------


def _launched(verb: str, arguments: Sequence[str], ranks: int) -> int:
    from shardweave.train.launch import command_of, launch

    def told(what: str) -> None:
        print_error(
            f"every rank of a run ends by itself: {what}",
            hint="look for what ended it: SIGKILL often is the system, out of memory",
        )

    code = launch(command_of(verb, arguments), ranks=ranks, told=told)
    if code == STOPPED:
        print_error("stopped", hint="run the same command to go on")
    return code


def _in_rank(
    verb: str,
    config: TrainConfig,
    place: Place | None,
    checkpoint: Path | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Be one rank. Of an error that all have, the first tells."""
    from shardweave.train import launch
    from shardweave.train.worker import run_rank

    launch.end_with_parent()
    store = None
    try:
        store = None if place is None else launch.open_store(place, timeout_s=config.run.timeout_s)
        found = run_rank(
            verb, config, place=place, store=store, checkpoint=checkpoint, quiet=quiet or as_json
        )
    except Exception as error:
        if store is None:
            raise
        if isinstance(error, TransportError):
            time.sleep(0.5)  # who caused it speaks first
        if launch.claim(store):
            if isinstance(error, ShardweaveError):
                raise
            traceback.print_exc()
        raise typer.Exit(exit_code(error) if isinstance(error, ShardweaveError) else 1) from None
    if found is None:
        return
    if isinstance(found, dict):
        _print_evaluation(found, as_json=as_json, quiet=quiet)
        return
    if place is None or place.rank == 0:
        _print_summary(found, as_json=as_json, quiet=quiet)
    if found.stopped:
        if place is None:
            print_error("stopped", hint="run the same command to go on")
        raise typer.Exit(STOPPED)


# --- what is printed ----------------------------------------------------------------------------


def _print_summary(found: Summary, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(
            {
                "steps": found.steps,
                "begin": found.begin,
                "loss": found.loss,
                "evaluation_loss": found.evaluation_loss,
                "tokens": found.tokens,
                "seconds": round(found.seconds, 6),
                "checkpoint": None if found.checkpoint is None else str(found.checkpoint),
                "stopped": found.stopped,
            }
        )
    elif not quiet:
        rows = {"steps": f"{found.steps:,}" + (f", from {found.begin:,}" if found.begin else "")}
        if found.loss is not None:
            rows["loss"] = f"{found.loss:.6f}"
        if found.evaluation_loss is not None:
            rows["evaluation"] = f"{found.evaluation_loss:.6f}"
        rate = found.tokens / found.seconds if found.seconds else 0.0
        rows["time"] = f"{found.seconds:.2f} s, {rate:,.0f} tokens/s"
        if found.checkpoint is not None:
            rows["checkpoint"] = str(found.checkpoint)
        print_facts(rows)


def _print_evaluation(found: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(found)
    elif not quiet:
        print_facts(
            {
                "checkpoint": found["checkpoint"],
                "loss": f"{found['loss']:.6f}",
                "perplexity": f"{found['perplexity']:.4g}",
                "targets": f"{found['count']:,}",
            }
        )


def _print_keys() -> None:
    from dataclasses import MISSING

    from shardweave.train.config import TrainConfig
    from shardweave.train.settings import settings, shown

    made = table("setting", "default", "~meaning")
    for each in settings(TrainConfig):
        default = "needed" if each.default is MISSING else shown(each.default)
        made.add_row(each.key, default, each.meaning.replace("``", ""))
    print_block(made)


def _explain(config: TrainConfig, *, as_json: bool) -> None:
    from shardweave.cli.explained import print_explained
    from shardweave.train.explain import explain

    found = explain(config)
    if as_json:
        print_json(found.plain())
    else:
        print_explained(found, config)
