"""A vision encoder and a language model trained as one, each on a grid of its own.

What the encoder makes of a patch stands in the text in place of the embedding of a word. So a step is:
images through the encoder, their rows over the bridge, words and rows through the language model and back,
the gradients of the rows over the bridge the other way, and back through the encoder. All ranks of both grids
take the parts that they have in this order, whichever grids they are in; none waits in a ring.

Nothing else is shared. The number that the loss is divided by is counted where the loss is, once; the
gradients that come over the bridge are those of that loss. The encoder knows no batch size and no scale, and
its own gradients are summed over its own replicas by its own plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardweave.errors import GeometryError, PlanError
from shardweave.layout import Layout, subset
from shardweave.train.arrays import held_arrays
from shardweave.train.batch import Microbatch
from shardweave.train.bridge import Bridge, bridge, rows_on
from shardweave.train.collectives import sum_all
from shardweave.train.grid import Group, GroupPlan, Groups, plan_groups
from shardweave.train.optimizer import AdamW, Optimizer, Settings, Step
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.runtime import Runtime, build, layout_of
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import Inserted, Objective, Stepped, forward_backward
from shardweave.train.vision import (
    Vision,
    VisionMaths,
    build_vision,
    encode,
    image_layout,
    language_config,
    vision_layout_of,
    vision_maths,
)

VISION: Final = "vision"
LANGUAGE: Final = "language"
WORLD: Final = "world"

Ints = NDArray[np.int64]
Pixels = Callable[[range], Tensor]
"""The images of some numbers, ``(number, channels, height, width)``: each rank asks for its own."""


def group_plan(*, vision: Parallel, language: Parallel) -> GroupPlan:
    """The groups of both grids, and one across them.

    >>> print(group_plan(vision=Parallel(dp=3), language=Parallel(tp=2, offset=2)).across)
    {'world': (0, 1, 2, 3)}
    """
    return plan_groups(
        {VISION: vision.mesh, LANGUAGE: language.mesh},
        {VISION: vision.groups, LANGUAGE: language.groups},
        across={WORLD: (VISION, LANGUAGE)},
    )


@dataclass(frozen=True)
class VisionLanguage:
    """What one rank has of both.

    Attributes:
        config: The Hugging Face config of the whole.
        grids: The degrees of each module.
        vision: The encoder; ``None`` on ranks that are not in its grid.
        language: The language model; ``None`` likewise.
        world: All ranks of both grids.
        layouts: What every rank holds of each module.
        trained: The weights of each module that are trained, by the names of its layout's buffers.
    """

    config: Mapping[str, Any]
    grids: Mapping[str, Parallel]
    vision: Vision | None
    language: Runtime | None
    world: Group
    layouts: Mapping[str, Layout]
    trained: Mapping[str, frozenset[str]]

    @cached_property
    def modules(self) -> dict[str, Vision | Runtime]:
        """The modules that this rank has, in the order in which all ranks take them."""
        both: dict[str, Vision | Runtime | None] = {VISION: self.vision, LANGUAGE: self.language}
        return {name: module for name, module in both.items() if module is not None}

    def grads(self) -> dict[str, dict[str, Tensor | None]]:
        """The gradients of the trained weights of each module, as optimizers take them."""
        return {
            name: {
                key: module.weights[key].grad
                for key, held in held_arrays(module.layout, module.rank).items()
                if held.buffer.name in self.trained[name]
            }
            for name, module in self.modules.items()
            if self.trained[name]
        }

    @property
    def token(self) -> int:
        """The token that a patch stands in place of."""
        found = self.config.get("image_token_index", self.config.get("image_token_id"))
        assert isinstance(found, int), "the config was read"
        return found


def build_vision_language(
    config: Mapping[str, Any],
    *,
    vision: Parallel,
    language: Parallel,
    groups: Groups,
    dtype: str = "",
    seed: int | None = 0,
    trained: Callable[[str], bool] = lambda name: True,
) -> VisionLanguage:
    """Both modules on this rank, as far as it is in their grids.

    Args:
        config: The Hugging Face config of a LLaVA model.
        vision: The degrees of the encoder and the projector; no pipeline.
        language: The degrees of the language model.
        groups: This rank's groups, of ``group_plan``.
        dtype: The dtype of the weights.
        seed: Of the weights.
        trained: Which weights are trained, by the names that each module gives them, with ``{layer}`` in
            place of a number. The others are frozen: they have no gradient, no state, no part in the norm.

    Raises:
        ModelError, GeometryError: As of the modules.
    """
    seen = told = None
    if groups.member(VISION):
        seen = build_vision(config, parallel=vision, groups=groups.of(VISION), dtype=dtype, seed=seed)
    if groups.member(LANGUAGE):
        text = language_config(config)
        told = build(text, parallel=language, groups=groups.of(LANGUAGE), dtype=dtype, seed=seed)
    layouts = {
        VISION: vision_layout_of(config, vision, dtype=dtype),
        LANGUAGE: layout_of(language_config(config), language, dtype=dtype),
    }
    chosen = {
        name: frozenset(rule.name for rule in layout.rules if trained(rule.name))
        for name, layout in layouts.items()
    }
    grids = {VISION: vision, LANGUAGE: language}
    model = VisionLanguage(config, grids, seen, told, groups.across(WORLD), layouts, chosen)
    for name, module in model.modules.items():
        for key, held in held_arrays(module.layout, module.rank).items():
            module.weights[key].requires_grad_(held.buffer.name in chosen[name])
    return model


# --- who has which row --------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """Which images there are in a step, and where in the texts their patches stand; the same on every rank.

    Attributes:
        texts: The microbatches of each data rank of the language model.
        at: For each of them, the tokens that patches stand in place of, by their place among the real tokens.
        maths: Of the encoder, which knows the patches of an image.
        share: How many images each data rank of the encoder has.
    """

    texts: tuple[tuple[Microbatch, ...], ...]
    at: tuple[tuple[Ints, ...], ...]
    maths: VisionMaths
    share: tuple[int, ...]

    @property
    def patches(self) -> int:
        """The patches of an image."""
        return self.maths.num_patches

    @property
    def num_rows(self) -> int:
        """Patches of all images."""
        return self.patches * sum(self.share)

    def images(self, part: int) -> range:
        """The numbers of the images of a data rank of the encoder."""
        start = sum(self.share[:part])
        return range(start, start + self.share[part])

    def sequence(self, part: int, parallel: Parallel) -> SequenceLayout:
        """Where the patches of those images are: each image is a document."""
        return image_layout(self.maths, self.share[part], parallel)


def scene(model: VisionLanguage, texts: Sequence[Sequence[Microbatch]]) -> Scene:
    """Find the images of a step, and deal them out to the encoder's data ranks, in order and evenly.

    Raises:
        PlanError: The texts are not those of each data rank, or a microbatch has a part of an image.
    """
    num_data, maths = model.grids[LANGUAGE].num_data, vision_maths(model.config)
    patches = maths.num_patches
    if len(texts) != num_data:
        raise PlanError(
            "a step has the texts of each data rank of the language model",
            equation=f"texts({len(texts)}) != remat * dp({num_data})",
            hint="give those of all data ranks to every rank; only where they have images is looked at",
        )
    at: list[tuple[Ints, ...]] = []
    for part, batches in enumerate(texts):
        found = []
        for number, batch in enumerate(batches):
            places = (batch.ids == model.token).nonzero().view(-1).numpy().astype(np.int64)
            if len(places) % patches:
                raise PlanError(
                    "an image stands in a text with all its patches",
                    where=f"data rank {part}, microbatch {number}",
                    equation=f"tokens {model.token}({len(places)}) % patches({patches}) = "
                    f"{len(places) % patches} != 0",
                    hint="repeat the token of an image once for each patch, as its processor does",
                )
            found.append(places)
        at.append(tuple(found))
    count = sum(len(one) for each in at for one in each) // patches
    parts = model.grids[VISION].num_data
    share = tuple(count // parts + (i < count % parts) for i in range(parts))
    return Scene(tuple(map(tuple, texts)), tuple(at), maths, share)


def rows_of_encoder(scene: Scene, parallel: Parallel, *, width: int) -> Layout:
    """Which rows each rank of the encoder has after the projector: the patches among its own slots."""

    def held(tp: int, cp: int, remat: int, dp: int) -> Ints:
        part = remat + parallel.remat * dp
        layout = scene.sequence(part, parallel)
        return scene.patches * scene.images(part).start + _tokens(layout, cp, tp)

    return rows_on(parallel.mesh, ("tp", "cp", "remat", "dp"), held, num_rows=scene.num_rows, width=width)


def rows_of_decoder(scene: Scene, parallel: Parallel, *, width: int) -> Layout:
    """Which rows each rank of the first stage wants: those that stand among its own slots."""
    first = np.cumsum([0, *(sum(map(len, each)) for each in scene.at)])

    def held(tp: int, cp: int, remat: int, dp: int) -> Ints:
        part = remat + parallel.remat * dp
        rows, start = [np.zeros(0, dtype=np.int64)], int(first[part])
        for batch, places in zip(scene.texts[part], scene.at[part], strict=True):
            number = np.full(batch.layout.num_tokens, -1, dtype=np.int64)
            number[places] = np.arange(start, start + len(places))
            mine = number[_tokens(batch.layout, cp, tp)]
            rows.append(mine[mine >= 0])
            start += len(places)
        return np.concatenate(rows)

    return rows_on(parallel.mesh, ("tp", "cp", "remat", "dp"), held, num_rows=scene.num_rows, width=width)


def _tokens(layout: SequenceLayout, cp: int, tp: int) -> Ints:
    """The real tokens among a rank's own slots, by their place among all of them, in the order of slots."""
    place = np.full(layout.is_real.size, -1, dtype=np.int64)
    place[layout.tokens] = np.arange(layout.num_tokens)
    mine = place[layout.slots(cp, tp).reshape(-1)]
    return mine[mine >= 0]


# --- a step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What came of a step.

    Attributes:
        stepped: As of the language model; ``None`` on ranks that are not in its grid.
        moved_bytes: What went over the bridge between ranks on the way there, of all ranks.
    """

    stepped: Stepped | None
    moved_bytes: int


def step(
    model: VisionLanguage,
    texts: Sequence[Sequence[Microbatch]],
    pixels: Pixels,
    objective: Objective | None = None,
    *,
    number: int = 0,
) -> Trained:
    """Run a step forward and backward; gradients are left in the weights, as of ``forward_backward``.

    Every rank of both grids calls it.

    Args:
        model: Both modules.
        texts: The microbatches of each data rank of the language model. A rank computes with those of its
            own, and looks at the layouts and image tokens of the others.
        pixels: Gives the images; in order of the data ranks, microbatches and places in them.
        objective: What is trained on. Tokens of images are no targets: their mask is ``False``.
        number: The number of the step, for dropout.
    """
    known = scene(model, texts)
    width = int(language_config(model.config)["hidden_size"])
    rows = _features(model, known, pixels, width)
    way = _bridge(model, known, width)
    arrived = way.over(rows) if way is not None else rows[:0]
    leaf = arrived.detach().requires_grad_(model.language is not None)
    stepped = None
    if model.language is not None:
        batches = known.texts[model.grids[LANGUAGE].data_rank(model.language.rank)]
        inserted = list(_inserted(model.language, batches, known, leaf))
        stepped = forward_backward(model.language, batches, objective, step=number, inserted=inserted)
    if way is not None and model.trained[VISION]:
        grad = leaf.grad if leaf.grad is not None else torch.zeros_like(arrived)
        torch.autograd.backward([arrived], [grad])
        if model.vision is not None:
            model.vision.reading.finish()
    return Trained(stepped, 0 if way is None else way.moved * rows.element_size())


def _features(model: VisionLanguage, known: Scene, pixels: Pixels, width: int) -> Tensor:
    """What this rank's encoder makes of its images, of each patch a row."""
    dtype = next(iter(model.modules.values())).dtype
    if model.vision is None:
        return torch.zeros(0, width, dtype=dtype, requires_grad=True)
    parallel = model.grids[VISION]
    part = parallel.data_rank(model.vision.rank)
    layout = known.sequence(part, parallel)
    features = encode(model.vision, pixels(known.images(part)), layout)
    at = parallel.mesh.coordinate(model.vision.rank)
    slots = layout.slots(at["cp"], at["tp"]).reshape(-1)
    real = torch.from_numpy(layout.is_real.reshape(-1)[slots].nonzero()[0])
    rows = features.index_select(0, real.to(features.device))
    # An encoder that is frozen has no graph, and the bridge takes its way back all the same.
    return rows if rows.requires_grad else rows.detach().requires_grad_()


def _bridge(model: VisionLanguage, known: Scene, width: int) -> Bridge | None:
    if not known.num_rows:
        return None
    return bridge(
        rows_of_encoder(known, model.grids[VISION], width=width),
        rows_of_decoder(known, model.grids[LANGUAGE], width=width),
        group=model.world,
    )


def _inserted(language: Runtime, batches: Sequence[Microbatch], known: Scene, rows: Tensor) -> list[Inserted]:
    """The rows of each microbatch, and the slots that they stand at."""
    parallel = language.parallel
    at = parallel.mesh.coordinate(language.rank)
    part, start = parallel.data_rank(language.rank), 0
    found = []
    for batch, places in zip(batches, known.at[part], strict=True):
        is_image = np.zeros(batch.layout.num_tokens, dtype=bool)
        is_image[places] = True
        mask = batch.layout.local(batch.layout.place(is_image, fill=False), at["cp"], at["tp"])
        stop = start + int(mask.sum()) * (at["pp"] == 0)
        found.append(Inserted(torch.from_numpy(np.ascontiguousarray(mask)), rows[start:stop]))
        start = stop
    return found


# --- updates ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimizers:
    """The optimizer of each module that a rank has, and one norm over both.

    Attributes:
        of: By module; those without a trained weight have none.
        world: All ranks of both grids.
        first: For each module the rank that speaks of its norm.
    """

    of: Mapping[str, Optimizer]
    world: Group
    first: Mapping[str, int]

    def step(self, grads: Mapping[str, Mapping[str, Tensor | None]]) -> Step:
        """Sum, clip by the norm of both modules together, update. Every rank calls it.

        Args:
            grads: For each module that this rank has, the gradients by name.

        Returns:
            The norm and the zeros of both; where one is infinite or no number, nothing is changed anywhere.
        """
        me = self.world.global_rank(self.world.rank)
        found = {name: optimizer.sum(grads[name]) for name, optimizer in self.of.items()}
        said = torch.zeros(2, dtype=torch.float64)
        for name, (_, measured) in found.items():
            if self.first[name] == me:
                said += torch.tensor([measured.grad_norm**2, measured.num_zeros], dtype=torch.float64)
        total = sum_all(said, group=self.world)
        norm = math.sqrt(total[0]) if math.isfinite(total[0]) else math.nan
        measured = Step(math.isfinite(norm), norm, int(total[1]))
        for name, (gradients, _) in found.items():
            self.of[name].update(gradients, measured)
        return measured


def optimizers(
    model: VisionLanguage,
    settings: AdamW | Settings,
    *,
    sharded: bool = True,
    max_norm: float | None = None,
) -> Optimizers:
    """The optimizers of a model's modules, for the weights that are trained.

    Raises:
        GeometryError: Nothing is trained.
    """
    if not any(model.trained.values()):
        raise GeometryError(
            "something is trained",
            equation="trained(name) is False for every weight",
            hint="leave a part of the model trained: the projector, at least",
        )
    found = {}
    for name, module in model.modules.items():
        names = model.trained[name]
        if not names:
            continue
        kept = {rule.parts[0].tensor.name for rule in module.layout.rules if rule.name in names}
        layout = subset(module.layout, keep=kept.__contains__)
        params = {key: module.weights[key] for key in held_arrays(layout, module.rank)}
        found[name] = Optimizer(
            params,
            plan=reduce_plan(layout, module.rank),
            groups=module.groups,
            settings=settings,
            sharded=sharded,
            max_norm=max_norm,
        )
    first = {name: model.grids[name].mesh.ranks.start for name in (VISION, LANGUAGE)}
    return Optimizers(found, model.world, first)
