"""What a run is: every setting, its type, its default and its meaning.

The command line (``--parallel.tp 2``), files of YAML or JSON and the page ``docs/train-config.md`` are made
from these classes (``settings.py``); ``checks.py`` says which values fit together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shardweave.train.settings import Amount, Bounds, Count, Natural, Positive

Share = Annotated[float, Bounds(0, 1)]
"""A number from 0 to 1."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is trained.

    Relative paths, here and below, begin at the current folder.

    Attributes:
        path: The model's Hugging Face ``config.json``, or the folder that holds it.
        weights: A checkpoint that its weights are read from, of Hugging Face, Megatron, FSDP or this runtime;
            null draws them from ``run.seed``.
        dtype: The dtype of parameters and activations.
        dropout: The share of what each block adds that is dropped in training.
        mtp: Heads for further tokens, beside what the config says; a checkpoint without them cannot begin one
            with them.
        recompute: Whether the way back computes each layer once more, and keeps only what went into it.
    """

    path: str
    weights: str | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    dropout: Annotated[float, Bounds(0, 0.99)] = 0.0
    mtp: Natural = 0
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many ranks share what.

    ``tp * cp * remat * dp * pp`` is the number of ranks, and ``etp * ep * eremat`` divides
    ``tp * cp * remat * dp``: experts are laid over the same ranks once more.

    Attributes:
        tp: Ranks that cut heads, rows and, between the blocks of a layer, the sequence.
        cp: Ranks that cut each document.
        remat: Ranks with documents of their own that share each weight, and gather it for use (GTP_remat).
        dp: Ranks with documents of their own; null for what the world leaves.
        pp: Pipeline stages.
        ep: Ranks that share the experts of a layer.
        etp: Ranks that cut each expert.
        eremat: Ranks that share the weights of the same experts, and gather them for use.
        vp: Stretches of layers of a stage; more than one interleaves the schedule.
        stages: Layers of each stretch, in order of the model; null for even ones.
        attention: How context ranks exchange keys and values.
        order: Which parts of a document a context rank has; a zigzag balances causal attention.
        weight_axes: The axes that share weights: ``remat`` alone, ``dp`` or ``cp,dp`` for FSDP.
        fold_cp: Whether the context ranks share weights too: ``cp`` beside ``weight_axes``.
        weight_multiple: The rows of a share are filled up to a multiple of it; 0 where they have to divide.
        prefetch: Whether a shared weight is fetched while the one before it is used.
    """

    tp: Count = 1
    cp: Count = 1
    remat: Count = 1
    dp: Count | None = None
    pp: Count = 1
    ep: Count = 1
    etp: Count = 1
    eremat: Count = 1
    vp: Count = 1
    stages: tuple[Count, ...] | None = None
    attention: Literal["ring", "gather", "all_to_all"] = "ring"
    order: Literal["zigzag", "contiguous"] = "zigzag"
    weight_axes: tuple[Literal["remat", "cp", "dp"], ...] = ("remat",)
    fold_cp: bool = False
    weight_multiple: Natural = 1
    prefetch: bool = True


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is read.

    A folder is packed tokens, ``NAME.bin`` beside ``NAME.idx`` is Megatron's form, ``.bin`` alone is one
    stretch of tokens; ``.txt`` is one document, ``.jsonl`` one a line: ``text``, ``prompt`` with
    ``response``, or ``messages``.

    Attributes:
        train: The documents to train on.
        tokenizer: Of text: ``bytes``, or the folder or name of a Hugging Face tokenizer.
        dtype: Of the tokens of a ``.bin`` alone.
        targets: Which tokens count: all, or those of responses.
        shuffle: Whether each pass is in an order of its own, drawn from ``run.seed``.
    """

    train: str
    tokenizer: str = "bytes"
    dtype: Literal["uint8", "uint16", "int32", "int64"] = "uint16"
    targets: Literal["all", "responses"] = "all"
    shuffle: bool = True


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Which documents make up a step.

    They are the same at every layout: the batch is cut over data ranks in order, and each part into
    microbatches.

    Attributes:
        documents: Documents of a step, over all ranks.
        microbatch: Documents of a microbatch.
        tokens: Most slots of a microbatch, in place of ``microbatch``: documents fill it in order.
        sequence_length: Most tokens of a document; what is longer is cut, the last token of a part once more
            at the begin of the next.
        form: ``bshd``: documents are rows of one length; ``thd``: packed one after the other.
    """

    documents: Count = 8
    microbatch: Count = 1
    tokens: Count | None = None
    sequence_length: Annotated[int, Bounds(2)] = 1024
    form: Literal["bshd", "thd"] = "thd"


@dataclass(frozen=True, slots=True)
class LossConfig:
    """What is added to the cross-entropy of the tokens.

    Attributes:
        balance: Weight of how unevenly documents use experts, which is 1 where they use them evenly; the
            model's ``router_aux_loss_coef`` is not read.
        router_z: Weight of the z-loss of the router.
        mtp: Weight of the heads for further tokens, of all together, where ``model.mtp`` has some.
    """

    balance: Amount = 0.0
    router_z: Amount = 0.0
    mtp: Amount = 0.1


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """How weights are updated: masters are in float32 or wider.

    Attributes:
        kind: ``adamw`` for everything; ``muon`` for the matrices of layers, and AdamW for embeddings, heads,
            routers, norms and biases.
        lr: The highest learning rate.
        beta1: Decay of the mean of gradients.
        beta2: Decay of the mean of their squares.
        eps: What is added to the root of the second.
        muon_lr: The highest learning rate of Muon, before it follows from the shape of a matrix; null for
            ``lr``. Its schedule is the same.
        momentum: Decay of Muon's momentum.
        nesterov: Whether Muon looks a step ahead.
        ns_steps: Steps of Newton-Schulz, by which Muon makes a matrix orthogonal.
        ns_dtype: What they are computed in, and matrices sent in; null for the dtype of masters.
        adjust_lr_fn: How Muon's learning rate follows from rows and columns: as large steps as AdamW's with
            0.2 sqrt(max(rows, columns)), sqrt(max(1, rows / columns)), or sqrt(max(rows, columns)).
        weight_decay: Decay of weights; norms and biases have none.
        clip: The most that the norm of the whole gradient may be; null does not clip.
        schedule: How the learning rate goes on after the warm-up.
        warmup_steps: Steps in which it rises from 0.
        decay_steps: The step at which it has come down to ``min_lr``; null for ``run.steps``.
        min_lr: The lowest learning rate.
        sharded: Whether replicas share masters and moments, each with its part.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Positive = 1e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    muon_lr: Positive | None = None
    momentum: Share = 0.95
    nesterov: bool = True
    ns_steps: Count = 5
    ns_dtype: Literal["bfloat16", "float32", "float64"] | None = None
    adjust_lr_fn: Literal["match_rms_adamw", "original", "spectral"] = "match_rms_adamw"
    weight_decay: Amount = 0.1
    clip: Positive | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Natural = 0
    decay_steps: Count | None = None
    min_lr: Amount = 0.0
    sharded: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When the run is saved, and where it goes on. A checkpoint is read at any layout.

    Attributes:
        folder: Where checkpoints go; null saves nothing.
        every: Steps between two; 0 for the end only.
        keep: How many of the last are kept; 0 for all.
        compare_replicas: Whether what several ranks hold is compared before it is saved, weights and states.
            Each rank reads what it shares with others for that before ``background`` begins.
        background: Whether writing goes on while the next steps are computed.
        resume: ``auto`` goes on from the last checkpoint where there is one, ``never`` refuses a folder that
            has one.
    """

    folder: str | None = None
    every: Natural = 0
    keep: Natural = 0
    compare_replicas: bool = True
    background: bool = False
    resume: Literal["auto", "never"] = "auto"


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """What the model is measured on.

    Attributes:
        data: Documents that are not trained on; null does not evaluate.
        every: Steps between two evaluations; 0 for the end only.
        documents: How many, the first ones; 0 for all.
    """

    data: str | None = None
    every: Natural = 0
    documents: Natural = 0


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run itself.

    Attributes:
        steps: Steps in all, those of earlier runs included.
        seed: Of weights, of the order of documents and of dropout.
        log: A file that gets one JSON object a step; null for none.
        tensorboard: A folder for tensorboard; null for none.
        device: ``auto`` takes a GPU for each rank where there are as many.
        timeout_s: The longest that ranks wait for each other, in seconds.
        deterministic: Whether only kernels are used that give the same bits each time.
    """

    steps: Count = 100
    seed: Natural = 0
    log: str | None = None
    tensorboard: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Positive = 300.0
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """All settings of a run."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
