"""What vLLM's model classes are known to hold, and the refusal of models that are something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardweave.errors import GeometryError, ModelError
from shardweave.layout import Mesh, Tensor
from shardweave.models import Block, Model

# The ends of a model that every pipeline stage of it holds, the others being on the first and the last stage
# only: embedding, last norm, head. vLLM decides it in each model class.
ENDS_EVERYWHERE: Mapping[str, str] = {
    "deepseek_v2": "",
    "deepseek_v3": "",
    "llama": "",
    "mistral": "",
    "nemotron-nas": "",
    "qwen2": "",
    "qwen3": "",
    "mixtral": "embedding final head",
    "nemotron_h": "embedding final head",
    "qwen2_moe": "embedding final head",
    "qwen3_5_moe_text": "embedding",
    "qwen3_5_text": "embedding",
    "qwen3_moe": "embedding final head",
    "qwen3_next": "embedding head",
}

# What model classes call otherwise than the files: a part of a name, and what they call it.
NAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "mamba2": ((".A_log", ".A"),),
    "nemotron_h": (("backbone.", "model."), ("embeddings.", "embed_tokens."), (".A_log", ".A")),
}

# Model classes that build a head of its own whatever the config says, and fill it with nothing if it is tied.
_NEVER_TIED = frozenset({"deepseek_v2", "deepseek_v3", "qwen3_next"})

# Model classes that build o_proj without a bias and drop the one of a checkpoint without a word.
_NO_O_BIAS = frozenset({"qwen3", "qwen3_moe"})

# Model classes that do not read a head dim, and load the first rows of larger heads without a word.
_DERIVED_HEAD_DIM = frozenset({"qwen2", "qwen2_moe"})


def check_model(model: Model, mesh: Mesh) -> None:
    """The parts of a model fit together, and vLLM's class of the family is known to hold all of them."""
    if mesh.axis_size("pp") > 1 and model.family not in ENDS_EVERYWHERE:
        raise ModelError(
            "it is known which pipeline stages of a model hold its embedding and head",
            where=f"family {model.family!r}",
            equation=f"pp({mesh.axis_size('pp')}) > 1",
            hint=f"known are {', '.join(ENDS_EVERYWHERE)}; use pp=1 for others",
        )
    for block in model.of("attention") if model.family in _NO_O_BIAS else ():
        if "o_bias" in block.tensors:
            raise ModelError(
                "vLLM has a parameter for every tensor of the model",
                where=f"tensor {block.tensors['o_bias'].name!r}",
                equation=f"vLLM builds o_proj of {model.family} without a bias",
                hint="vLLM leaves the bias out without a word; serve such a model elsewhere",
            )
    for block in model.of("attention") if model.family in _DERIVED_HEAD_DIM else ():
        hidden, heads, head_dim = (block.sizes[key] for key in ("hidden_size", "num_heads", "head_dim"))
        if hidden != heads * head_dim:
            raise ModelError(
                "vLLM reads the head dim of the model",
                where=f"family {model.family!r}, layers {block.layers}",
                equation=f"hidden_size({hidden}) != num_heads({heads}) * head_dim({head_dim}), "
                "and vLLM's class divides",
                hint="vLLM loads a part of each head without a word; serve such a model elsewhere",
            )
    if model.tied and model.family in _NEVER_TIED:
        raise ModelError(
            "vLLM ties the head of a model that has none of its own",
            where=f"family {model.family!r}",
            equation="tie_word_embeddings(True), and vLLM's class builds a head that no tensor fills",
            hint="vLLM serves such a model with a head of random values; serve it elsewhere",
        )
    vocab = {block.sizes["vocab_size"] for kind in ("embedding", "head") for block in model.of(kind)}
    if len(vocab) > 1:
        raise GeometryError(
            "the embedding and the head have one vocabulary, padded by one rule",
            equation=f"vocab_size({', '.join(str(size) for size in sorted(vocab))})",
            hint="describe both with the logical size; padding is added here",
        )


def check_drafter(model: Model, mesh: Mesh, partition: Sequence[int] | None) -> None:
    """There are layers to draft with, on one stage."""
    if model.decoder is model or model.tied:
        raise ModelError(
            "a drafter has layers for further tokens, and heads",
            where=f"family {model.family!r}",
            equation=f"layers for further tokens({sum(len(block.layers) for block in model.of('mtp'))}), "
            f"tied({model.tied})",
            hint="leave drafter out: this model drafts nothing",
        )
    if mesh.axis_size("pp") > 1 or partition is not None:
        raise GeometryError(
            "a drafter is on one pipeline stage",
            equation=f"pp({mesh.axis_size('pp')}), layer_partition({partition})",
            hint="give the mesh of the ranks of that stage, with pp=1",
        )


def check_roles(block: Block, required: str, optional: str) -> None:
    """Every tensor is one that the rules know, and those that are stored together are all there."""
    together = [required.split(), *(roles.split("+") for roles in optional.split())]
    present = set(block.tensors)
    unknown = present - {role for roles in together for role in roles}
    torn = [roles for roles in together[1:] if 0 < len(present & set(roles)) < len(roles)]
    missing = set(required.split()) - present | {role for roles in torn for role in roles} - present
    if unknown or missing:
        raise ModelError(
            "the tensors of a block are those that vLLM stores, those that it fuses all together",
            where=f"block {block.kind!r} on layers {block.layers}",
            equation=f"unknown({', '.join(sorted(unknown))}), missing({', '.join(sorted(missing))})",
            hint="describe the block with all its tensors; what vLLM stores differently needs own rules",
        )


def check_shape(tensor: Tensor, *shape: int) -> None:
    """A tensor has the shape that its rule cuts."""
    if tensor.shape != shape:
        raise ModelError(
            "the shape of a tensor follows from the sizes of its block",
            where=f"tensor {tensor.name!r}",
            equation=f"shape{tensor.shape} != {shape}",
            hint="a tensor with gates or other heads in it is not the one that vLLM's plain rule cuts",
        )
