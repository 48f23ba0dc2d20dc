"""Which settings fit together, the model and the number of ranks: all that is wrong, before a process exists.

Each check is an equation of degrees and sizes. None needs torch, a group or a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardweave.errors import ConfigError, ShardweaveError
from shardweave.models import Model
from shardweave.models.config import load as load_model
from shardweave.train.config import TrainConfig
from shardweave.train.maths import Maths, maths
from shardweave.train.parallel import Parallel
from shardweave.train.settings import load, read


def read_config(
    source: Path | Mapping[str, Any],
    overrides: Sequence[tuple[str, str]] = (),
    *,
    world_size: int | None = None,
) -> TrainConfig:
    """The settings of a run, of which all fit.

    Args:
        source: A YAML or JSON file, or what one would say.
        overrides: Keys and values as texts, as a command line has them; they win.
        world_size: The number of ranks; by default what the degrees multiply to.

    Raises:
        ConfigError: Something does not fit; all of it is said at once.
        MissingFileError, FormatError: The file is not there, or is none.
    """
    config, wrong = find_wrong(source, overrides, world_size=world_size)
    if config is None or wrong:
        where = str(source) if isinstance(source, Path) else "settings"
        raise joined(wrong, where)
    return config


def joined(wrong: Sequence[ShardweaveError], where: str) -> ShardweaveError:
    """Several findings as one error; one alone is itself."""
    if len(wrong) == 1:
        return wrong[0]
    return ConfigError(
        "the settings of a run are known, of their types, and fit together",
        where=where,
        equation="; ".join(f"({i}) {one.equation or one.rule}" for i, one in enumerate(wrong, 1)),
        hint="; ".join(dict.fromkeys(f"({i}) {one.hint}" for i, one in enumerate(wrong, 1))),
    )


def find_wrong(
    source: Path | Mapping[str, Any],
    overrides: Sequence[tuple[str, str]] = (),
    *,
    world_size: int | None = None,
    evaluates: bool = False,
) -> tuple[TrainConfig | None, list[ShardweaveError]]:
    """As ``read_config``, with all that is wrong one by one.

    Args:
        source: As there.
        overrides: As there.
        world_size: As there.
        evaluates: Whether they are those of an evaluation, which needs data.

    Returns:
        The settings, with ``parallel.dp`` filled in; ``None`` where values are unknown or of no type.
    """
    said = load(source) if isinstance(source, Path) else source
    where = str(source) if isinstance(source, Path) else "settings"
    config, wrong = read(TrainConfig, said, overrides, where=where)
    if config is None:
        return None, list(wrong)
    model: Model | None = None
    findings: list[ShardweaveError] = []
    try:
        model = model_of(config).model
    except ShardweaveError as error:
        findings.append(error)
    config, more = _with_dp(config, world_size)
    findings += [*more, *_degrees(config), *_batch(config), *_rest(config, evaluates)]
    if model is not None:
        findings += _model(config, model)
    return config, findings


def model_of(config: TrainConfig) -> Maths:
    """What the model of a run computes.

    Raises:
        ModelError, MissingFileError, FormatError: Its config is not there, or not understood.
    """
    return maths(hf_config_of(config), dtype=config.model.dtype)


def hf_config_of(config: TrainConfig) -> Mapping[str, Any]:
    """The Hugging Face config of the model of a run."""
    return load_model(Path(config.model.path))


def parallel_of(config: TrainConfig) -> Parallel:
    """The degrees of a run whose ``dp`` is known."""
    of = config.parallel
    names = ("tp", "cp", "remat", "pp", "ep", "etp", "eremat", "vp")
    axes = dict.fromkeys((*of.weight_axes, *(("cp",) if of.fold_cp else ())))
    return Parallel(dp=of.dp or 1, weight_axes=tuple(axes), **{name: getattr(of, name) for name in names})


def notes(config: TrainConfig) -> Iterator[str]:
    """What is allowed and does nothing, or less than it seems to."""
    of = config.parallel
    if of.fold_cp and of.cp == 1:
        yield "parallel.fold_cp changes nothing: parallel.cp is 1"
    shared = [axis for axis in of.weight_axes if (getattr(of, axis) or 1) > 1]
    if of.weight_axes != ("remat",) and not shared and not (of.fold_cp and of.cp > 1):
        yield f"parallel.weight_axes {','.join(of.weight_axes)} shares nothing: each of these degrees is 1"


# --- checks -------------------------------------------------------------------------------------


def _wrong(rule: str, equation: str, hint: str) -> ConfigError:
    return ConfigError(rule, where="settings", equation=equation, hint=hint)


def _with_dp(config: TrainConfig, world_size: int | None) -> tuple[TrainConfig, list[ConfigError]]:
    of = config.parallel
    rest = of.tp * of.cp * of.remat * of.pp
    remat = f" * remat({of.remat})" if of.remat > 1 else ""
    product = f"tp({of.tp}) * cp({of.cp}){remat} * pp({of.pp}) = {rest}"
    if world_size is None:
        return replace(config, parallel=replace(of, dp=of.dp or 1)), []
    if of.dp is not None:
        wrong = []
        if of.dp * rest != world_size:
            wrong.append(
                _wrong(
                    "the degrees multiply to the number of ranks",
                    f"{product} * dp({of.dp}) = {rest * of.dp} != world_size({world_size})",
                    "leave out parallel.dp, which is then what the world leaves, or change --nproc",
                )
            )
        return config, wrong
    if world_size % rest:
        found = _wrong(
            "the degrees divide the number of ranks",
            f"world_size({world_size}) % ({product}) = {world_size % rest} != 0",
            f"start a multiple of {rest} ranks, or choose smaller degrees",
        )
        return replace(config, parallel=replace(of, dp=1)), [found]
    return replace(config, parallel=replace(of, dp=world_size // rest)), []


def _degrees(config: TrainConfig) -> Iterator[ConfigError]:
    of = config.parallel
    ranks, experts = of.tp * of.cp * of.remat * (of.dp or 1), of.ep * of.etp * of.eremat
    if ranks % experts:
        remat = f" * remat({of.remat})" if of.remat > 1 else ""
        eremat = f" * eremat({of.eremat})" if of.eremat > 1 else ""
        yield _wrong(
            "experts are on the ranks of a stage a whole number of times: etp * ep * edp * pp is the world",
            f"tp({of.tp}) * cp({of.cp}){remat} * dp({of.dp}) = {ranks} % "
            f"(ep({of.ep}) * etp({of.etp}){eremat}) = {ranks % experts} != 0",
            "choose parallel.ep and parallel.etp whose product divides tp * cp * dp",
        )
    if len(set(of.weight_axes)) != len(of.weight_axes):
        yield _wrong(
            "weights are shared over an axis once",
            f"parallel.weight_axes({','.join(of.weight_axes)})",
            "name each axis once",
        )
    if of.vp > 1 and of.pp == 1:
        yield _wrong(
            "stretches are interleaved over stages",
            f"vp({of.vp}) > 1 with pp({of.pp})",
            "leave out parallel.vp, or raise parallel.pp",
        )
    if of.stages is not None and len(of.stages) != of.pp * of.vp:
        yield _wrong(
            "each stretch of each stage has a number of layers",
            f"stages({len(of.stages)}) != pp({of.pp}) * vp({of.vp}) = {of.pp * of.vp}",
            "give one number for each, or leave out parallel.stages",
        )


def _batch(config: TrainConfig) -> Iterator[ConfigError]:
    of, dp = config.batch, config.parallel.remat * (config.parallel.dp or 1)
    name = "dp" if config.parallel.remat == 1 else "remat * dp"
    if of.documents % dp:
        yield _wrong(
            "data ranks have equally many documents",
            f"batch.documents({of.documents}) % {name}({dp}) = {of.documents % dp} != 0",
            "choose batch.documents as a multiple of the data ranks",
        )
    elif of.tokens is None and of.documents % (dp * of.microbatch):
        yield _wrong(
            "the documents of a data rank fill its microbatches",
            f"batch.documents({of.documents}) % ({name}({dp}) * batch.microbatch({of.microbatch})) = "
            f"{of.documents % (dp * of.microbatch)} != 0",
            "choose batch.documents as a multiple of both, or give batch.tokens",
        )
    of_parallel = config.parallel
    multiple = of_parallel.tp * (
        of_parallel.cp * 2 if of_parallel.cp > 1 and of_parallel.order == "zigzag" else of_parallel.cp
    )
    slots = -(-of.sequence_length // multiple) * multiple
    if of.tokens is not None and of.form == "bshd":
        yield _wrong(
            "microbatches of so many tokens are packed",
            f"batch.tokens({of.tokens}) with batch.form({of.form})",
            "use batch.form thd, or batch.microbatch in place of batch.tokens",
        )
    elif of.tokens is not None and of.tokens < slots:
        yield _wrong(
            "a microbatch has room for the longest document",
            f"batch.tokens({of.tokens}) < {slots}, which is batch.sequence_length({of.sequence_length}) "
            f"up to a multiple of {multiple}",
            "raise batch.tokens, or lower batch.sequence_length",
        )


def _rest(config: TrainConfig, evaluates: bool) -> Iterator[ConfigError]:
    of, steps = config.optimizer, config.run.steps
    if of.min_lr > of.lr:
        yield _wrong(
            "the learning rate comes down",
            f"optimizer.min_lr({of.min_lr:g}) > optimizer.lr({of.lr:g})",
            "lower optimizer.min_lr",
        )
    end = of.decay_steps or steps
    if of.schedule != "constant" and of.warmup_steps > end:
        yield _wrong(
            "the learning rate rises before it comes down",
            f"optimizer.warmup_steps({of.warmup_steps}) > {end}",
            "shorten the warm-up, or use optimizer.schedule constant",
        )
    for name in ("beta1", "beta2", "momentum"):
        if getattr(of, name) == 1:
            yield _wrong(
                "a mean that decays forgets",
                f"optimizer.{name}(1) >= 1",
                f"choose optimizer.{name} below 1",
            )
    if config.checkpoint.folder is None and config.checkpoint.every:
        yield _wrong(
            "checkpoints have a folder",
            f"checkpoint.every({config.checkpoint.every}) with checkpoint.folder(null)",
            "give checkpoint.folder",
        )
    if config.evaluation.data is None and (config.evaluation.every or evaluates):
        asked = "evaluate" if evaluates else f"evaluation.every({config.evaluation.every})"
        yield _wrong(
            "what is evaluated on is named",
            f"{asked} with evaluation.data(null)",
            "give evaluation.data",
        )


def _model(config: TrainConfig, model: Model) -> Iterator[ConfigError]:
    of, layers = config.parallel, model.num_layers
    if layers < of.pp * of.vp:
        yield _wrong(
            "each stretch of each stage has a layer",
            f"num_hidden_layers({layers}) < pp({of.pp}) * vp({of.vp}) = {of.pp * of.vp}",
            "choose fewer stages",
        )
    elif of.stages is not None and len(of.stages) == of.pp * of.vp and sum(of.stages) != layers:
        yield _wrong(
            "the stages have the layers of the model",
            f"sum(stages) = {sum(of.stages)} != num_hidden_layers({layers})",
            "change parallel.stages so that they add up",
        )
    experts = list(model.of("moe"))
    if not experts and of.ep * of.etp * of.eremat > 1:
        eremat = f" * eremat({of.eremat})" if of.eremat > 1 else ""
        yield _wrong(
            "degrees of experts are those of a model with experts",
            f"ep({of.ep}) * etp({of.etp}){eremat} > 1 with family {model.family!r}, which has none",
            "leave out parallel.ep, parallel.etp and parallel.eremat",
        )
    if not experts and (config.loss.balance or config.loss.router_z):
        yield _wrong(
            "losses of routers are those of a model with experts",
            f"loss.balance({config.loss.balance:g}), loss.router_z({config.loss.router_z:g}) "
            f"with family {model.family!r}, which has none",
            "leave out loss.balance and loss.router_z",
        )
    for block in model.of("attention"):
        heads, rows = block.sizes["num_heads"], block.sizes["num_kv_heads"] * block.sizes["head_dim"]
        yield from _divides("query heads", f"num_attention_heads({heads})", heads, "tp", of.tp)
        if of.attention == "all_to_all" and of.cp > 1 and heads % of.tp == 0:
            yield from _divides("heads of a rank", f"heads({heads // of.tp})", heads // of.tp, "cp", of.cp)
        kv = block.sizes["num_kv_heads"]
        head_dim = block.sizes["head_dim"]
        yield from _divides(
            "rows of K and V", f"kv_heads({kv}) * head_dim({head_dim}) = {rows}", rows, "tp", of.tp
        )
        break
    for block in model.of("mlp"):
        size = block.sizes["ffn_size"]
        yield from _divides("rows of an MLP", f"intermediate_size({size})", size, "tp", of.tp)
        break
    for block in experts[:1]:
        count, size = block.sizes["num_experts"], block.sizes["ffn_size"]
        yield from _divides("experts", f"num_experts({count})", count, "ep", of.ep)
        yield from _divides("rows of an expert", f"moe_intermediate_size({size})", size, "etp", of.etp)


def _divides(what: str, name: str, size: int, axis: str, degree: int) -> Iterator[ConfigError]:
    if size % degree:
        yield _wrong(
            f"{what} are cut evenly over {axis}",
            f"{name} % {axis}({degree}) = {size % degree} != 0",
            f"choose a parallel.{axis} that divides {size}",
        )
