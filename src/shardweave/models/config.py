"""Reading a Hugging Face config: every key is known by name, or the config is refused.

A config is a bag of keys that different versions of different code have written. A key that is
skipped because nobody has heard of it is how a gate, a bias or a norm goes missing, so a family
lists its keys in three groups and everything else is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardweave.errors import FormatError, MissingFileError, ModelError

RUNTIME = "says how the model is run or where it comes from"
MATHS = "changes what is computed with the tensors, not which there are"
TOKENS = "names token ids"
GENERATION = "says how text is generated"
TASK = "belongs to heads of other tasks"

_DTYPES = ("bfloat16", "float16", "float32", "float64")

_REASONS = {
    RUNTIME: """
        _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path attn_implementation
        chunk_size_feed_forward experts_implementation gradient_checkpointing initializer_range is_decoder
        name_or_path output_attentions output_hidden_states output_router_logits pretraining_tp
        return_dict torchscript transformers_version use_bfloat16 use_cache
    """,
    MATHS: """
        attention_dropout hidden_act max_position_embeddings partial_rotary_factor rms_norm_eps
        rope_parameters rope_scaling rope_theta
    """,
    TOKENS: """
        bos_token_id decoder_start_token_id eos_token_id pad_token_id prefix sep_token_id
    """,
    GENERATION: """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
        length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
        num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
        suppress_tokens temperature top_k top_p typical_p
    """,
    TASK: """
        finetuning_task id2label label2id num_labels problem_type task_specific_params tf_legacy_loss
    """,
}
IGNORED: Mapping[str, str] = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
"""Keys that change no tensor in any family, and why."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "attn_output_gate": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False, None),
    "mtp_num_hidden_layers": (0, None),
    "mtp_num_layers": (0, None),
    "num_mtp_layers": (0, None),
    "num_nextn_predict_layers": (0, None),
    "per_layer_config": ({}, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "tie_encoder_decoder": (False, None),
    "use_qk_norm": (False, None),
}
"""Keys that add or change tensors in ways no family describes, and the values at which they do not."""

SHAPES = frozenset(
    {
        "architectures",
        "dtype",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)
"""Keys that decide which tensors there are in every family."""


@dataclass(frozen=True)
class Keys:
    """The keys that are understood.

    Attributes:
        shapes: Keys that decide which tensors exist, or their sizes.
        ignored: Keys that change no tensor, and why.
        neutral: Keys that are understood only at these values.
    """

    shapes: frozenset[str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """The values of a config, all of whose keys are understood.

    Args:
        values: The config as it was written.
        keys: What is understood of it.
        where: How messages call it.

    Raises:
        ModelError: A key is unknown, or has a value at which it changes tensors in an unknown way.
    """

    values: Mapping[str, Any]
    keys: Keys
    where: str

    def __post_init__(self) -> None:
        known = {*self.keys.shapes, *self.keys.ignored, *self.keys.neutral}
        unknown = sorted(str(key) for key in self.values if key not in known)
        if unknown:
            raise ModelError(
                "every key of a config is understood",
                where=self.where,
                equation=", ".join(f"{key}={_brief(self.values.get(key))}" for key in unknown),
                hint="list it in its family: as ignored if it changes no tensor, else by what it changes",
            )
        for key, allowed in self.keys.neutral.items():
            if key in self.values and self.values[key] not in allowed:
                raise ModelError(
                    "a config has no parts beyond those that its family describes",
                    where=self.where,
                    equation=f"{key}={_brief(self.values[key])} is not {' or '.join(map(str, allowed))}",
                    hint="use a model without it: what this key adds or changes is not described here",
                )

    def fail(self, rule: str, equation: str, hint: str) -> ModelError:
        """An error about this config."""
        return ModelError(rule, where=self.where, equation=equation, hint=hint)

    def part(self, value: Any, keys: Keys, name: str) -> Config:
        """A config inside this one, with keys of its own."""
        if not isinstance(value, Mapping):
            raise self.fail("a part of a config is a mapping", f"{name}={_brief(value)}", "write it as {...}")
        return Config(value, keys, f"{self.where}, {name}")

    def get(self, key: str) -> Any:
        """The value of a key that the family lists, ``None`` where it is missing or null."""
        assert key in self.keys.shapes, f"{key} is read, so list it among the keys that shape tensors"
        return self.values.get(key)

    def spelled(self, *keys: str) -> str:
        """The spelling in use, of a key with several; the first where there is none.

        Raises:
            ModelError: Two spellings contradict each other.
        """
        given = [key for key in keys if self.get(key) is not None]
        if any(self.values[key] != self.values[given[0]] for key in given):
            raise self.fail(
                "two spellings of one key agree",
                " != ".join(f"{key}({_brief(self.values[key])})" for key in given),
                "keep the one that is right",
            )
        return given[0] if given else keys[0]

    def size(self, key: str, *, missing: int = 0, null: int = 0, least: int = 1) -> int:
        """An integer of at least ``least``.

        Args:
            key: Its key.
            missing: What an absent key means; 0 where it means nothing.
            null: What a null means; 0 where it means nothing.
            least: The least value that makes sense.
        """
        default = null if key in self.values else missing
        value = self.get(key)
        if value is None and default:
            return default
        if type(value) is not int or value < least:
            raise self.fail(
                f"a size is an integer of at least {least}",
                f"{key}={_brief(value)}" if key in self.values else f"{key} is not given",
                "give it as the model was built; nothing is assumed here",
            )
        return value

    def flag(self, key: str, *, missing: bool = False) -> bool:
        """True or false; ``missing`` says what an absent key means."""
        value = self.get(key) if key in self.values else missing
        if type(value) is not bool:
            raise self.fail("a switch is true or false", f"{key}={_brief(value)}", "write true or false")
        return value

    def dtype(self, wanted: str) -> str:
        """The dtype of the weights: the one that is wanted, else the config's."""
        key = self.spelled("dtype", "torch_dtype")
        found = wanted or self.get(key)
        if found not in _DTYPES:
            raise self.fail(
                "the weights have a known dtype",
                f"{'the argument dtype' if wanted else key}={found!r} is not one of {', '.join(_DTYPES)}",
                "pass dtype= to say which the weights have",
            )
        return str(found)

    def numbers(self, key: str, below: int) -> tuple[int, ...]:
        """A list of numbers from 0 to ``below``; missing and null are the empty list."""
        value = self.get(key)
        value = [] if value is None else value
        if not isinstance(value, Sequence) or any(type(n) is not int or not 0 <= n < below for n in value):
            raise self.fail(
                "a list of layers names layers of the model",
                f"{key}={_brief(value)} with num_hidden_layers({below})",
                "layers are counted from 0",
            )
        return tuple(value)


def load(path: Path) -> Mapping[str, Any]:
    """The config at a path: the file, or the ``config.json`` of a folder.

    Raises:
        MissingFileError: There is no such file.
        FormatError: It is not one JSON object, or gives a key twice.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        value = json.loads(file.read_bytes(), object_pairs_hook=_once)
    except FileNotFoundError:
        raise MissingFileError(
            "a model has a config.json", where=str(file), hint="give the file, or the folder that holds it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(
            "a config is one JSON object with each key once",
            where=str(file),
            equation=str(error),
            hint="correct it at that place, or take the config.json of the model again",
        ) from None
    if not isinstance(value, dict):
        raise FormatError(
            "a config is one JSON object",
            where=str(file),
            equation=f"got {_brief(value)}",
            hint="give the model's config.json, which starts with {",
        )
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return found


def _brief(value: object, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
