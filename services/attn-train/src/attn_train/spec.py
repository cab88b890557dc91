"""What to train, on what and how: the specification of a job, with every default filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder; None leaves a size to the model family's default.

    Sizes are whole numbers: `width` of the residual stream, `context` in tokens, `hidden` inside the feed-forward.
    `others` are further fields of a decoder's config by name.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    max_seq_len: int
    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: str = "layer"
    norm_place: str = "pre"
    feed_forward: str = "gelu"
    intermediate_size: int | None = None
    positions: str = "learned"
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    experts: int | None = None
    experts_per_token: int | None = None
    routing: str = "mixtral"
    router_aux_loss_coef: float = 0.0
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The family of models that has this shape."""
        return "decoder"

    @property
    def label(self) -> str:
        """What is trained, in a word."""
        return self.mechanism

    def values(self, model_fields: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the family for this shape, with those that the data have decided on, such as `vocabulary`."""
        values = dataclasses.asdict(self) | dict(model_fields)
        values |= values.pop("others")
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class FamilyModelSpec:
    """A model of another family than the decoder: its name, and the fields of its config that the data leave open."""

    family: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, family: str, fields: Mapping[str, Any]) -> FamilyModelSpec:
        """With a source where the fields say how long one may be."""
        return (SourceModelSpec if "max_encoder_len" in fields else FamilyModelSpec)(family=family, fields=fields)

    @property
    def label(self) -> str:
        """What is trained, in a word."""
        return self.family

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that is written, in tokens."""
        return int(self.fields["max_seq_len"])

    def values(self, model_fields: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the family, with those that the data have decided on."""
        return {**self.fields, **model_fields}


@dataclass(frozen=True, kw_only=True)
class SourceModelSpec(FamilyModelSpec):
    """A model of a family that reads a source."""

    @property
    def max_encoder_len(self) -> int:
        """The longest source, in tokens."""
        return int(self.fields["max_encoder_len"])


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What to train on: a data set by `name`, or the file or folder at `path`; exactly one is given.

    `validation` is the fraction at the end that is kept for validation, in [0, 1). Of pairs, `languages`
    such as "en-de" names the files of a folder, and `most_pairs` limits how many are read; 0 reads all.
    """

    name: str | None = None
    path: str | None = None
    tokenizer: str = "character"
    validation: float = 0.1
    languages: str = ""
    max_pairs: int = 0


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) with linear warm-up and cosine decay.

    `steps` updates of `batch` sequences each; the decay acts on matrices only; `clip` limits the norm of the
    whole gradient, 0 means no limit. `label_smoothing` is the probability that targets give to all tokens alike; only
    models with a source take it.
    """

    steps: int
    batch: int
    learning_rate: float
    min_learning_rate: float
    warmup: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0
    label_smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """When checkpoints are written and losses measured, in steps; the last step always does both.

    A model with a source then translates `bleu_sentences` validation sources for its BLEU.
    """

    interval: int = 250
    keep: int = 2
    evaluation_interval: int = 250
    evaluation_batches: int = 20
    metrics_interval: int = 10
    bleu_sentences: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """A whole job. Equal specifications give equal losses, bit for bit, on equal machines.

    `precision` is that in which linear layers multiply during updates: "float32" or "bfloat16".
    """

    model: ModelSpec | FamilyModelSpec
    data: DataSpec
    optimizer: OptimizerSpec
    checkpoint: CheckpointSpec = CheckpointSpec()
    seed: int = 0
    max_failures: int = 3
    workers: int = 1
    precision: str = "float32"

    def plain(self) -> dict[str, Any]:
        """The specification as plain values, which `from_plain` turns back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> TrainingSpec:
        """The specification of plain values written by `plain`."""
        parts = {
            "model": (FamilyModelSpec.of if "family" in values["model"] else ModelSpec)(**values["model"]),
            "data": DataSpec(**values["data"]),
            "optimizer": OptimizerSpec(**values["optimizer"]),
            "checkpoint": CheckpointSpec(**values["checkpoint"]),
        }
        return cls(**{**values, **parts})
