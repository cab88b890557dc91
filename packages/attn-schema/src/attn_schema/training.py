"""Training jobs: the configuration of model, data, optimizer, checkpoints and evaluation; job states and events."""

from __future__ import annotations

import functools
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

import msgspec
from attn_core.errors import AttnError, InvalidValue, error_of_reasons
from msgspec import Meta

from attn_schema.device import AUTO, Device, require_device
from attn_schema.finetuning import LoraConfig, ObjectiveConfig
from attn_schema.model import ModelConfig
from attn_schema.on_policy import OnPolicyConfig
from attn_schema.optimization import MAX_STEPS, OPTIMIZER_PANEL, OptimizerConfig
from attn_schema.prepared import PreparedSource, prepared_sources, require_named_columns
from attn_schema.schema import DATASET, MAX_INT32, PREPARED, TOKENIZER, Checked, Schema, fields_of, in_panel, is_noun

MAX_SEED = 2**64 - 1
MAX_WORKERS = 4096
"""The maximum number of workers that share each batch."""


_data, _optimizer, _run, _workers = map(in_panel, ("Data", OPTIMIZER_PANEL, "Checkpoints and evaluation", "Workers"))


class DataConfig(Checked, frozen=True, kw_only=True):
    """The training data: text, pairs, tagged sentences, labelled texts or images, depending on the model family."""

    dataset: Annotated[
        str,
        _data(
            "Dataset by name, or the path of a file or folder on the server (it has a slash): UTF-8 "
            "text; for pairs a file SOURCE<tab>TARGET or a folder with train.LANGUAGE and "
            "val.LANGUAGE; for tags a .conllu file or a folder of them; for labels a file LABEL<tab>TEXT or "
            "a folder with train.tsv and val.tsv; for images a .npz file or a folder CLASS/IMAGE.",
            metavar="NAME|PATH",
            names=DATASET,
        ),
    ] = ""
    tokenizer: Annotated[
        str,
        _data(
            "character, word, byte_pairs:N (trained on the data), or the name or folder of a tokenizer on the server. "
            "For pairs, tags and labels, character selects word or byte_pairs.",
            names=TOKENIZER,
        ),
    ] = "character"
    validation_fraction: Annotated[
        float, _data("Fraction of the data, at its end, that is held out for validation.", ge=0, lt=1)
    ] = 0.1
    languages: Annotated[str, _data("Languages of a folder of pairs as FROM-TO, such as en-de.", max_length=64)] = ""
    max_pairs: Annotated[int, _data("Maximum number of pairs to read; 0 reads all.", ge=0, le=MAX_INT32)] = 0
    format: Annotated[
        Literal["text", "chat", "preference", "prompt"],
        _data(
            "Format of the dataset, for a base model with a chat template: text; chat, rows of messages, of questions "
            "and answers, or of token ids, of which only the answers contribute to the loss; preference, rows of "
            "prompt, chosen and rejected (DPO); or prompt, rows of a prompt and what rewards need (GRPO)."
        ),
    ] = "text"
    columns: Annotated[
        tuple[str, ...],
        _data(
            "Columns of rows that have other names than these formats, as NAME=COLUMN, such as "
            "prompt=question,completion=answer."
        ),
    ] = ()
    skip_broken: Annotated[bool, _data("Leave out rows that cannot be read, and count them.")] = False

    prepared: Annotated[
        str,
        _data(
            "Folders made by `attn data prepare`, in place of a dataset: one, or a mixture with the weight and the "
            "maximum number of epochs of each (no maximum if not given).",
            short="--data",
            metavar="FOLDER[:WEIGHT[:EPOCHS]],...",
            names=PREPARED,
        ),
    ] = ""
    document_mask: Annotated[
        bool,
        _data("Mask attention between documents where a sequence of prepared data holds several."),
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.document_mask and not (self.prepared and self.format == "text"):
            allowed = "true without prepared texts and chats, as it has no effect"
            raise InvalidValue.of("document_mask", self.document_mask, allowed)
        require_named_columns(self.columns)
        if not self.prepared:
            return
        prepared_sources(self.prepared)
        if self.format in ("chat", "prompt"):
            raise InvalidValue.of("format", self.format, "text or preference with prepared data, which may be of chats")
        plain = {"dataset": "", "tokenizer": "character", "languages": "", "columns": (), "skip_broken": False}
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise InvalidValue.of(name, getattr(self, name), "none with prepared data, which determine it")

    @property
    def sources(self) -> list[PreparedSource]:
        """The folders of prepared data with their weights."""
        return prepared_sources(self.prepared) if self.prepared else []

    @property
    def packs_documents(self) -> bool:
        """Whether several documents share a sequence, which does not attend from one to another."""
        return bool(self.prepared) and self.format == "text" and self.document_mask

    @property
    def path(self) -> str | None:
        """The dataset if it is a path (it has a slash), else None."""
        return self.dataset if "/" in self.dataset else None

    @property
    def name(self) -> str | None:
        """The dataset if it is a name (it has no slash), else None."""
        return None if "/" in self.dataset else self.dataset


class CheckpointConfig(Checked, frozen=True, kw_only=True):
    """When checkpoints are written; the last step always writes one."""

    save_steps: Annotated[int, _run("Steps between checkpoints.", ge=1, le=MAX_STEPS)] = 250
    save_total_limit: Annotated[
        int, _run("Maximum number of checkpoints to keep, the newest ones.", ge=1, le=MAX_INT32)
    ] = 2


class EvaluationConfig(Checked, frozen=True, kw_only=True):
    """When metrics are measured; the last step always measures all."""

    logging_steps: Annotated[int, _run("Steps between reports of the training loss.", ge=1, le=MAX_STEPS)] = 10
    eval_steps: Annotated[int, _run("Steps between measurements of the validation loss.", ge=1, le=MAX_STEPS)] = 250
    eval_batches: Annotated[
        int,
        _run(
            "Validation batches per measurement, each of 12 sequences, pairs or images, whatever batch_size is.",
            ge=1,
            le=MAX_INT32,
        ),
    ] = 20
    load_best_model_at_end: Annotated[
        bool, _run("Export the weights of the measurement with the lowest validation loss, instead of the last ones.")
    ] = False
    early_stopping_patience: (
        Annotated[
            int,
            _run(
                "Stop after this many measurements in a row without a lower validation loss; never if not given.",
                ge=1,
                le=MAX_INT32,
            ),
        ]
        | None
    ) = None
    bleu_sentences: Annotated[
        int,
        _run(
            "Number of validation sources that are translated to measure BLEU; only for encoder-decoders.",
            ge=0,
            le=MAX_INT32,
        ),
    ] = 0


class TrainingConfig(Checked, frozen=True, kw_only=True):
    """The configuration of a training job. Equal configurations give bitwise equal losses on equal machines."""

    model: Annotated[ModelConfig, Meta(description="The model.")] = ModelConfig()
    data: Annotated[DataConfig, Meta(description="The data.")] = DataConfig()
    optimizer: Annotated[OptimizerConfig, Meta(description="The optimizer.")] = OptimizerConfig()
    lora: Annotated[LoraConfig, Meta(description="The adapter that is trained in place of all weights.")] = LoraConfig()
    objective: Annotated[ObjectiveConfig, Meta(description="Preference optimization (DPO) and distillation.")] = (
        ObjectiveConfig()
    )
    on_policy: Annotated[OnPolicyConfig, Meta(description="Training on what the model samples (GRPO, GKD).")] = (
        OnPolicyConfig()
    )
    checkpoint: Annotated[CheckpointConfig, Meta(description="When checkpoints are written.")] = CheckpointConfig()
    evaluation: Annotated[EvaluationConfig, Meta(description="When metrics are measured.")] = EvaluationConfig()
    precision: Annotated[
        Literal["float32", "bfloat16"],
        _optimizer(
            "Element type of matrix products in training, and on a GPU of attention as well; weights and optimizer "
            "state are always float32."
        ),
    ] = "float32"
    torch_compile: Annotated[bool, _optimizer("Compile each block with torch.compile: slow to start, then faster.")] = (
        False
    )
    gradient_checkpointing: Annotated[
        bool, _optimizer("Recompute the activations of blocks in the backward pass: less memory, more time.")
    ] = False
    device: Annotated[Device, Meta(extra={"panel": OPTIMIZER_PANEL})] = AUTO
    seed: Annotated[int, _run("Seed of initial weights, data order and dropout.", ge=0, le=MAX_SEED)] = 0
    max_failures: Annotated[
        int, _run("Number of lost workers that are replaced; one more fails the job.", ge=0, le=MAX_INT32)
    ] = 3
    workers: Annotated[
        int,
        _workers("Workers that share each batch; losses equal those of a single worker.", ge=1, le=MAX_WORKERS),
    ] = 1  # fmt: skip
    min_workers: (
        Annotated[
            int,
            _workers(
                "Minimum number of workers to continue with if some are lost; equal to workers if not given.",
                ge=1,
                le=MAX_WORKERS,
            ),
        ]
        | None
    ) = None
    dp_shard: Annotated[
        int, _workers("Workers over which the parameters of the blocks are sharded (FSDP).", ge=1, le=MAX_WORKERS)
    ] = 1
    tp: Annotated[
        int, _workers("Workers over which the heads of each layer are split (tensor parallel).", ge=1, le=MAX_WORKERS)
    ] = 1
    cp: Annotated[
        int,
        _workers("Workers over which each sequence is split (context parallel).", ge=1, le=MAX_WORKERS),
    ] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_device("device", self.device)
        if self.min_workers is not None and self.min_workers > self.workers:
            raise InvalidValue.of("min_workers", self.min_workers, f"at most workers, {self.workers}")
        inner = self.dp_shard * self.tp * self.cp
        if self.workers % inner:
            allowed = f"a multiple of dp_shard x tp x cp = {self.dp_shard} x {self.tp} x {self.cp} = {inner}"
            raise InvalidValue.of("workers", self.workers, allowed)
        if self.lora.lora_rank is not None and self.model.base_model is None:
            raise InvalidValue.of("lora_rank", self.lora.lora_rank, "none without a base model (--from)")
        if self.data.format != "text" and self.model.base_model is None:
            raise InvalidValue.of("format", self.data.format, "text without a base model (--from)")
        if self.data.format == "preference":
            self._require_preferences()
        elif self.objective.preference_loss != "sigmoid" or self.objective.preference_beta is not None:
            name = "preference_loss" if self.objective.preference_beta is None else "preference_beta"
            raise InvalidValue.of(name, getattr(self.objective, name), "none unless format is preference")
        self.on_policy.require(self.data.format, self.objective.teacher, self.optimizer.batch_size)
        if self.data.format == "prompt":
            self._require_no_targets("prompts")
        elif self.on_policy.lmbda is not None:
            self._require_own_policy("lmbda")
        if self.evaluation.bleu_sentences and not self.model.is_encoder_decoder:
            raise InvalidValue.of(
                "bleu_sentences", self.evaluation.bleu_sentences, "0 unless the model is an encoder-decoder"
            )

    def _require_preferences(self) -> None:
        """Raise `InvalidValue` for what does not go with preferences."""
        if self.optimizer.batch_size < 2 and self.objective.preference_loss == "kto":
            raise InvalidValue.of("batch_size", 1, "at least 2 with kto, which compares the examples of a batch")
        self._require_no_targets("preferences")

    def _require_no_targets(self, what: str) -> None:
        """Raise `InvalidValue` for options of losses that have targets."""
        if self.objective.teacher is not None:
            raise InvalidValue.of("teacher", self.objective.teacher, f"none with {what}")
        self._require_own_policy(what)

    def _require_own_policy(self, what: str) -> None:
        """Raise `InvalidValue` for options with which what is trained is not the policy that samples or is compared."""
        if self.on_policy.rollout_server and self.lora.base_quantization != "none":
            allowed = "none with rollout_server, which gets weights with the adapter merged into them"
            raise InvalidValue.of("base_quantization", self.lora.base_quantization, allowed)
        if self.lora.lora_dropout:
            allowed = f"0 with {what}: the policy that is compared or samples has no dropout"
            raise InvalidValue.of("lora_dropout", self.lora.lora_dropout, allowed)
        if self.optimizer.label_smoothing:
            allowed = f"0 with {what}, whose loss has no targets to spread"
            raise InvalidValue.of("label_smoothing", self.optimizer.label_smoothing, allowed)
        if self.objective.distillation_weight is not None:
            allowed = f"none with {what}: all of the loss is the divergence"
            raise InvalidValue.of("distillation_weight", self.objective.distillation_weight, allowed)

    @classmethod
    def path_in(cls, holder: str, name: str) -> str:
        """How errors name a field of this noun in the field `holder` of a request, such as config.optimizer.steps."""
        return f"{holder}.{field_path(name)}"


@functools.cache
def field_path(name: str) -> str:
    """The path of a field in a part of `TrainingConfig`, such as optimizer.steps; other names are returned as given."""
    for info in fields_of(TrainingConfig):
        if is_noun(info.kind) and name.partition("[")[0] in info.kind.__struct_fields__:
            return f"{info.name}.{name}"
    return name


class JobState(StrEnum):
    """The lifecycle state of a training job. UNKNOWN: a state unknown to this version."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"

    @property
    def final(self) -> bool:
        """Whether the job has ended: it succeeded, failed or was cancelled."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class JobError(Schema, frozen=True, kw_only=True):
    """Why a job failed, or why its worker was replaced."""

    reason: Annotated[str, Meta(description="Class of the error, such as OUT_OF_CAPACITY.")] = ""
    message: Annotated[str, Meta(description="Error message.")] = ""
    metadata: Annotated[dict[str, str], Meta(description="Values that occur in the message, by name.")] = {}  # noqa: RUF012

    @classmethod
    def of(cls, error: AttnError) -> Self:
        """Make the record of an exception."""
        return cls(reason=error.reason, message=error.message, metadata=dict(error.metadata))

    def error(self) -> AttnError:
        """The recorded error as an exception, of the class that belongs to `reason`."""
        return error_of_reasons([self.reason, AttnError.reason], self.message, self.metadata)


class Checkpoint(Schema, frozen=True, kw_only=True):
    """A checkpoint that has been completely written."""

    step: Annotated[int, Meta(description="Optimizer steps done.")] = 0
    path: Annotated[str, Meta(description="Its folder on the server.")] = ""
    size_bytes: Annotated[int, Meta(description="Size of its files, in bytes.")] = 0
    create_time: Annotated[datetime, Meta(description="When it was complete.")] | None = None


class StateChange(Schema, frozen=True, kw_only=True):
    """The event of a job that changed its state."""

    previous: Annotated[JobState, Meta(description="State before.")] = JobState.UNKNOWN
    current: Annotated[JobState, Meta(description="State now.")] = JobState.UNKNOWN
    error: Annotated[JobError, Meta(description="Why the job failed, recovers or is stalled.")] | None = None


class Metrics(Schema, frozen=True, kw_only=True):
    """The event of values measured at a step."""

    step: Annotated[int, Meta(description="Optimizer steps done.")] = 0
    values: Annotated[
        dict[str, float],
        Meta(
            description="By name: loss and validation_loss in nats per token, learning_rate, gradient_norm, "
            "tokens_per_second, elapsed_seconds of training, skipped_steps with max_grad_norm_ratio; others may appear."
        ),
    ] = {}  # noqa: RUF012 - msgspec copies it  # fmt: skip


class LogLine(Schema, frozen=True, kw_only=True):
    """The event of one line of the job's log."""

    text: Annotated[str, Meta(description="The text, without line break.")] = ""


class JobEvent(Schema, frozen=True, kw_only=True):
    """An event of a training job: exactly one of `state_change`, `metrics`, `checkpoint` and `log` is given."""

    id: Annotated[int, Meta(description="Counts from 1 within the job, without gaps, over all attempts.")] = 0
    time: Annotated[datetime, Meta(description="When it happened.")] | None = None
    attempt: Annotated[int, Meta(description="Attempt it belongs to, from 1.")] = 0
    state_change: Annotated[StateChange, Meta(description="The state changed.")] | None = None
    metrics: Annotated[Metrics, Meta(description="Values were measured.")] | None = None
    checkpoint: Annotated[Checkpoint, Meta(description="A checkpoint is complete.")] | None = None
    log: Annotated[LogLine, Meta(description="A line of the log.")] | None = None

    @property
    def payload(self) -> StateChange | Metrics | Checkpoint | LogLine | None:
        """The content of the event; None for a kind of event that this version does not know."""
        return self.state_change or self.metrics or self.checkpoint or self.log


class TrainingJob(Schema, frozen=True, kw_only=True):
    """A training job: its configuration, state and progress."""

    id: Annotated[str, Meta(description="Id given by the client or chosen by the server.")] = ""
    config: Annotated[TrainingConfig, Meta(description="Its configuration, with the server's choices.")] = (
        TrainingConfig()
    )
    state: Annotated[JobState, Meta(description="Lifecycle state of the job.")] = JobState.UNKNOWN
    attempt: Annotated[int, Meta(description="Number of times that it has been started, from 1.")] = 0
    step: Annotated[int, Meta(description="Optimizer steps done.")] = 0
    last_metrics: Annotated[dict[str, float], Meta(description="Newest value of each metric, by name.")] = {}  # noqa: RUF012
    latest_checkpoint: Annotated[Checkpoint, Meta(description="Newest complete checkpoint.")] | None = None
    error: Annotated[JobError, Meta(description="Why it failed or is stalled.")] | None = None
    create_time: Annotated[datetime, Meta(description="When it was submitted.")] | None = None
    start_time: Annotated[datetime, Meta(description="When its present attempt began to train.")] | None = None
    end_time: Annotated[datetime, Meta(description="When it reached a final state.")] | None = None
    last_event_id: Annotated[int, Meta(description="Id of its newest event; 0 if there is none.")] = 0
    model_path: Annotated[
        str, Meta(description="Folder of the finished model on the server; empty before it has succeeded.")
    ] = ""  # fmt: skip
    priority: Annotated[
        int, Meta(description="Jobs of a higher priority start first and preempt running ones of a lower.")
    ] = 0
    queue_position: Annotated[int, Meta(description="Position in the queue, from 1; 0 if it is not queued.")] = 0
    waiting_for: Annotated[str, Meta(description="What a queued job waits for, as text.")] = ""


TRAINING_NOUNS: tuple[type[msgspec.Struct], ...] = (
    *(TrainingConfig, ModelConfig, DataConfig, OptimizerConfig, LoraConfig, ObjectiveConfig, OnPolicyConfig),
    *(CheckpointConfig, EvaluationConfig),
    *(TrainingJob, JobEvent, StateChange, Metrics, Checkpoint, LogLine, JobError),
)
