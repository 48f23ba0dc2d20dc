"""An encoder and a language model on grids of their own, against one process: loss, gradients, two updates.

Texts have no image, one, or two; so ranks of the encoder have unequally many, and some none. The image has
nine patches, which no number of ranks divides. In fp64, within 1e-12 of one process. What one process
computes is compared with transformers in ``tests/oracle/test_train_llava.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from worlds import GLOO, MEMORY, ranks

from shardweave.errors import GeometryError, PlanError, ShardweaveError
from shardweave.layout import Layout
from shardweave.testing.guard import guard
from shardweave.train import vision_language
from shardweave.train.arrays import held_arrays
from shardweave.train.batch import Microbatch
from shardweave.train.collectives import sum_all
from shardweave.train.gradients import sum_gradients
from shardweave.train.grid import Groups
from shardweave.train.loss import Tokens
from shardweave.train.optimizer import AdamW
from shardweave.train.parallel import Parallel
from shardweave.train.reduction import reduce_plan
from shardweave.train.sequence import SequenceLayout
from shardweave.train.step import Objective
from shardweave.train.vision import num_patches
from shardweave.train.vision_language import (
    LANGUAGE,
    VISION,
    build_vision_language,
    group_plan,
    optimizers,
    rows_of_decoder,
    rows_of_encoder,
    scene,
    step,
)

IMAGE = 36
CONFIG: dict[str, Any] = {
    "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "dtype": "float64",
    "image_token_id": IMAGE, "image_seq_length": 9, "projector_hidden_act": "gelu",
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 12, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_channels": 3, "image_size": 6,
        "patch_size": 2, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "attention_dropout": 0.0,
        "vision_use_head": False,
    },
    "text_config": {
        "model_type": "qwen3", "vocab_size": 37, "hidden_size": 16, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    },
}  # fmt: skip
PATCHES = 9
# Of each document: words, then images, then words.
DOCUMENTS = ((3, 1, 2), (4, 0, 3), (2, 2, 1), (1, 1, 4), (5, 0, 0), (2, 1, 2))

V, L = Parallel, Parallel
PAIRS: dict[str, tuple[Parallel, Parallel]] = {
    "one rank": (V(), L()),
    "the same ranks, 1:1": (V(tp=2), L(tp=2)),
    "the same ranks, another factorisation": (V(dp=4), L(tp=2, cp=2)),
    "the same ranks, stages": (V(dp=2), L(pp=2)),
    "the same ranks, shares": (V(remat=2), L(remat=2, weight_axes=("remat",))),
    "apart, 1:1": (V(dp=2), L(tp=2, offset=2)),
    "apart, 2:1": (V(dp=4), L(cp=2, offset=4)),
    "apart, 1:2": (V(tp=2), L(tp=2, cp=2, offset=2)),
    "apart, 3:2": (V(dp=3), L(dp=2, offset=3)),
    "apart, 4:1": (V(tp=2, dp=2), L(offset=4)),
    "apart, the language first": (V(cp=3, offset=2), L(dp=2)),
    "in common in part, 3:3": (V(dp=3), L(dp=3, offset=2)),
    "in common in part, 4:4": (V(tp=2, dp=2), L(tp=2, cp=2, offset=2)),
    "in common in part, 2:3": (V(dp=2, offset=1), L(pp=2, offset=2)),
    "one in the other": (V(dp=2, offset=1), L(tp=2, dp=2)),
    "with an offset": (V(cp=3, offset=1), L(tp=2, cp=2, offset=3)),
}  # fmt: skip


def images(numbers: range) -> torch.Tensor:
    """Each image by its number, so that it is the same wherever it is asked for."""
    made = [
        torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(100 + n), dtype=torch.float64)
        for n in numbers
    ]
    return torch.stack(made) if made else torch.zeros(0, 3, 6, 6, dtype=torch.float64)


def texts_of(parallel: Parallel, documents: Any = DOCUMENTS) -> list[list[Microbatch]]:
    """Two microbatches for each data rank, over the documents in order."""
    parts = parallel.num_data * 2
    cuts = [round(i * len(documents) / parts) for i in range(parts + 1)]
    found: list[list[Microbatch]] = [[] for _ in range(parallel.num_data)]
    for part in range(parts):
        few = range(cuts[part], cuts[part + 1])
        found[part // 2].append(_batch(parallel, documents, few))
    return found


def _batch(parallel: Parallel, documents: Any, few: range) -> Microbatch:
    ids, mask, lengths = [], [], []
    for number in few or range(1):
        before, count, after = documents[number] if few else (2, 0, 0)
        chance = torch.Generator().manual_seed(number)
        words = torch.randint(0, IMAGE, (before + after,), generator=chance)
        pictures = torch.full((count * PATCHES,), IMAGE)
        ids.append(torch.cat([words[:before], pictures, words[before:]]))
        is_word = ids[-1] != IMAGE
        is_word[0] = False
        mask.append(is_word & bool(few))
        lengths.append(len(ids[-1]))
    layout = SequenceLayout(tuple(lengths), "thd", parallel.cp, parallel.tp)
    return Microbatch(layout, torch.cat(ids), torch.cat(mask), tuple(few or (1000,)))


def trained_all(name: str) -> bool:
    return True


def only_projector_and_text(name: str) -> bool:
    return "vision_tower" not in name


def only_projector(name: str) -> bool:
    return "multi_modal_projector" in name


def only_text(name: str) -> bool:
    return "vision_tower" not in name and "multi_modal_projector" not in name


Arrays = dict[str, np.ndarray]


def whole(layout: Layout, rank: int, arrays: dict[str, torch.Tensor]) -> Arrays:
    """The parts of tensors that a rank has, in tensors of NaN."""
    found: Arrays = {}
    for name, held in held_arrays(layout, rank).items():
        if name not in arrays:
            continue
        values = arrays[name].detach().numpy()
        separate = dict(zip(held.buffer.separate, held.positions, strict=True))
        for piece in held.buffer.pieces():
            index = len(piece.tensor.index)
            if any(at not in piece.at.dims[d] for d, at in separate.items()):
                continue
            numbers = {
                n: piece.box.dims[d][piece.at.dims[d].index(separate[d])]
                for d, (n, _) in enumerate(piece.tensor.index)
            }
            key = piece.tensor.member(numbers)
            into = found.setdefault(key, np.full(piece.tensor.shape, np.nan))
            box = tuple(slice(r[0], r[-1] + 1) for r in piece.box.dims[index:])
            at = tuple(slice(r[0], r[-1] + 1) for r in piece.at.dims[index:])
            into[box] = values[at]
    return found


def play(
    groups: Groups,
    *,
    vision: Parallel,
    language: Parallel,
    trained: Callable[[str], bool] = trained_all,
    steps: int = 2,
    documents: Any = DOCUMENTS,
    guarded: bool = False,
) -> dict[str, Any]:
    """Two steps; what this rank has of the gradients of the first, and of the weights after both."""
    watched = guard(groups) if guarded else contextlib.nullcontext()
    with watched:
        model = build_vision_language(
            CONFIG, vision=vision, language=language, groups=groups, seed=3, trained=trained
        )
        chosen = optimizers(model, AdamW(lr=1e-2, weight_decay=0.1), max_norm=0.5)
        found: dict[str, Any] = {"losses": [], "norms": [], "zeros": [], "grads": {}, "weights": {}}
        for number in range(steps):
            out = step(model, texts_of(language, documents), images, number=number)
            found["moved"] = out.moved_bytes
            if out.stepped is not None:
                found["losses"].append(out.stepped.report.loss)
            if number == 0:
                for name, module in model.modules.items():
                    given = {key: weight.grad for key, weight in module.weights.items()}
                    summed = sum_gradients(given, reduce_plan(module.layout, module.rank), module.groups)
                    found["grads"] |= whole(module.layout, module.rank, summed.arrays())
                    assert all(
                        (weight.grad is None) or weight.requires_grad for weight in module.weights.values()
                    ), name
            made = chosen.step(model.grads())
            assert made.ok
            found["norms"].append(made.grad_norm)
            found["zeros"].append(made.num_zeros)
            for module in model.modules.values():
                for weight in module.weights.values():
                    weight.grad = None
        for module in model.modules.values():
            found["weights"] |= whole(module.layout, module.rank, dict(module.weights))
    return found


@lru_cache
def reference(trained: Callable[[str], bool] = trained_all) -> dict[str, Any]:
    one = Parallel()
    return ranks(play, plan=group_plan(vision=one, language=one), vision=one, language=one, trained=trained)[
        0
    ]


def compare(found: dict[int, Any], wanted: dict[str, Any]) -> None:
    seen: dict[str, dict[str, np.ndarray]] = {"grads": {}, "weights": {}}
    for rank, one in found.items():
        if one["losses"]:
            np.testing.assert_allclose(one["losses"], wanted["losses"], rtol=1e-12, err_msg=str(rank))
        np.testing.assert_allclose(one["norms"], wanted["norms"], rtol=1e-12, err_msg=str(rank))
        # A bias of keys has no effect, so its gradient is 0 but for what rounding leaves of it.
        np.testing.assert_allclose(one["zeros"], wanted["zeros"], atol=12, err_msg=str(rank))
        for kind, masks in seen.items():
            for name, values in one[kind].items():
                there = ~np.isnan(values)
                expected = wanted[kind][name]
                assert np.abs(values[there] - expected[there]).max(initial=0) < 1e-12, (rank, kind, name)
                masks[name] = masks.get(name, np.zeros(values.shape, dtype=bool)) | there
    for kind, masks in seen.items():
        assert masks.keys() == wanted[kind].keys()
        assert all(mask.all() for mask in masks.values()), kind


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "one rank"])
def test_it_is_one_process(name: str) -> None:
    vision, language = PAIRS[name]
    found = ranks(play, plan=group_plan(vision=vision, language=language), vision=vision, language=language)
    compare(found, reference())


@pytest.mark.parametrize("name", ["apart, 3:2", "in common in part, 4:4"])
def test_processes_agree(name: str) -> None:
    vision, language = PAIRS[name]
    plan = group_plan(vision=vision, language=language)
    compare(ranks(play, plan=plan, over=GLOO, vision=vision, language=language), reference())


@pytest.mark.parametrize("trained", [only_projector_and_text, only_projector, only_text])
@pytest.mark.parametrize("name", ["apart, 3:2", "in common in part, 3:3", "the same ranks, stages"])
def test_frozen_parts_stay_and_have_no_part_in_the_norm(name: str, trained: Callable[[str], bool]) -> None:
    vision, language = PAIRS[name]
    plan = group_plan(vision=vision, language=language)
    found = ranks(play, plan=plan, vision=vision, language=language, trained=trained)
    wanted = reference(trained)
    compare(found, wanted)
    before, after = reference()["grads"].keys(), wanted["weights"]
    assert before == after.keys()
    assert wanted["norms"][0] < reference()["norms"][0]


def test_nothing_trained_is_refused() -> None:
    one = Parallel()
    with pytest.raises(GeometryError, match="for every weight"):
        ranks(
            play,
            plan=group_plan(vision=one, language=one),
            vision=one,
            language=one,
            trained=lambda name: False,
        )


def test_a_step_without_an_image_and_one_with_many() -> None:
    one = Parallel()
    for documents in (((3, 0, 2),) * 6, ((2, 3, 1), *DOCUMENTS[1:])):
        wanted = ranks(
            play, plan=group_plan(vision=one, language=one), vision=one, language=one, documents=documents
        )[0]
        vision, language = PAIRS["apart, 3:2"]
        found = ranks(
            play,
            plan=group_plan(vision=vision, language=language),
            vision=vision,
            language=language,
            documents=documents,
        )
        compare(found, wanted)


@pytest.mark.parametrize("name", ["apart, 3:2", "in common in part, 4:4", "the same ranks, 1:1"])
def test_bytes_over_the_bridge_are_those_that_are_wanted_elsewhere(name: str) -> None:
    """1.000: every row that a rank wants and has not is sent to it once, and its gradient once back."""
    vision, language = PAIRS[name]

    def rows(groups: Groups) -> tuple[int, int]:
        model = build_vision_language(CONFIG, vision=vision, language=language, groups=groups, seed=3)
        known = scene(model, texts_of(language))
        here, there = (
            of(known, model.grids[kind], width=16)
            for of, kind in ((rows_of_encoder, VISION), (rows_of_decoder, LANGUAGE))
        )

        def mine(layout: Layout) -> set[int]:
            if groups.rank not in layout.mesh.ranks:
                return set()
            return {n for buffer in layout.buffers(groups.rank) for _, n in buffer.dims[0]}

        wanted = len(mine(there) - mine(here)) * 16 * 8
        return wanted, step(model, texts_of(language), images).moved_bytes

    found = ranks(rows, plan=group_plan(vision=vision, language=language))
    needed = sum(wanted for wanted, _ in found.values())
    assert {moved for _, moved in found.values()} == {needed}


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "one rank"])
def test_no_foreign_group_and_no_default_one_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call on torch's default group raises, on groups of nobody's plan, and of the other's grid."""

    def held_to_its_grid(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **given: Any) -> Any:
            with guard(module.groups):
                return function(module, *args, **given)

        return call

    for function in ("encode", "forward_backward"):
        monkeypatch.setattr(vision_language, function, held_to_its_grid(getattr(vision_language, function)))
    vision, language = PAIRS[name]
    plan = group_plan(vision=vision, language=language)
    compare(ranks(play, plan=plan, vision=vision, language=language, guarded=True), reference())


def test_a_group_of_the_other_grid_is_refused() -> None:
    """The guard of the suite can fail: an encoder that sums over the language model's ranks."""
    vision, language = PAIRS["the same ranks, another factorisation"]

    def go(groups: Groups) -> str:
        with guard(groups.of(VISION)), pytest.raises(ShardweaveError) as error:
            sum_all(torch.ones(1), group=groups.of(LANGUAGE).get("model", "tp"))
        return str(error.value)

    said = ranks(go, plan=group_plan(vision=vision, language=language))
    assert all("language.tp" in text and "vision" in text for text in said.values())


def test_half_an_image_and_texts_of_other_ranks_are_refused() -> None:
    one = Parallel()

    def go(groups: Groups) -> None:
        model = build_vision_language(CONFIG, vision=one, language=one, groups=groups)
        texts = texts_of(one)
        with pytest.raises(PlanError, match=r"texts\(3\) != remat \* dp\(1\)"):
            step(model, [*texts, *texts, *texts], images)
        ids = texts[0][0].ids.clone()
        ids[ids == IMAGE] = 1
        ids[1:4] = IMAGE
        broken = Microbatch(texts[0][0].layout, ids, texts[0][0].mask, texts[0][0].numbers)
        with pytest.raises(PlanError, match=r"% patches\(9\) = 3 != 0"):
            step(model, [[broken, *texts[0][1:]]], images)

    ranks(go, plan=group_plan(vision=one, language=one))


def test_the_normalisation_across_grids_is_that_of_the_loss() -> None:
    """An encoder on four ranks, a language model on two; the encoder's gradients are four and 200 times that
    of one token, and not one or 800: it divides by nothing of its own.

    Reported of a framework that scaled each module by its own counts.
    """
    vision, language = V(dp=4), L(dp=2, offset=4)
    documents = ((1, 1, 1),) * 4

    def weighted(times: float) -> Callable[[Tokens], tuple[torch.Tensor, torch.Tensor]]:
        def loss(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
            return -times * tokens.sum(tokens.logprobs), tokens.count

        return loss

    def go(groups: Groups, *, of: tuple[Parallel, Parallel], times: float) -> Any:
        model = build_vision_language(CONFIG, vision=of[0], language=of[1], groups=groups, seed=3)
        step(model, texts_of(of[1], documents), images, Objective(loss=weighted(times)))
        if model.vision is None:
            return None
        given = {key: weight.grad for key, weight in model.vision.weights.items()}
        plan = reduce_plan(model.vision.layout, model.vision.rank)
        summed = sum_gradients(given, plan, model.vision.groups).arrays()
        return {key: value.numpy() for key, value in summed.items()}

    one = (Parallel(), Parallel())
    single = ranks(go, plan=group_plan(vision=one[0], language=one[1]), of=one, times=1.0)[0]
    for times in (4.0, 200.0):
        found = ranks(
            go, plan=group_plan(vision=vision, language=language), of=(vision, language), times=times
        )
        for rank in range(4):
            for key, values in found[rank].items():
                np.testing.assert_allclose(values, times * single[key], rtol=1e-11, atol=1e-12)


def test_a_mutation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that divides by its own number of data ranks."""
    whole_encode = vision_language.encode

    def scaled(vision: Any, pixels: Any, layout: Any) -> torch.Tensor:
        features = whole_encode(vision, pixels, layout)
        return features.detach() + (features - features.detach()) / vision.parallel.num_data

    monkeypatch.setattr(vision_language, "encode", scaled)
    vision, language = PAIRS["apart, 3:2"]
    found = ranks(play, plan=group_plan(vision=vision, language=language), vision=vision, language=language)
    with pytest.raises(AssertionError):
        compare(found, reference())


def test_sizes_are_those_of_the_config() -> None:
    assert num_patches(CONFIG) == PATCHES
