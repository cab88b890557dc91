"""The nouns of training: ranges, messages with the same fields, and paths of fields for errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attn_core.errors import InvalidValue, OutOfCapacity, UnknownName
from attn_schema.codec import from_message, message_class, to_message
from attn_schema.finetuning import LoraConfig
from attn_schema.training import (
    TRAINING_NOUNS,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    JobError,
    JobEvent,
    JobState,
    Metrics,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    TrainingJob,
    field_path,
)

CONFIG = TrainingConfig(
    model=ModelConfig(
        mechanism="gqa", options={"window": 8}, hidden_size=64, dropout=0.1, tie_word_embeddings=False,
        model_options={"pattern": ["gqa", "mha"]},
    ),
    data=DataConfig(dataset="/text", validation_fraction=0.0),
    optimizer=OptimizerConfig(steps=7, weight_decay=0, min_learning_rate=0),
    checkpoint=CheckpointConfig(save_steps=5),
    evaluation=EvaluationConfig(eval_batches=1),
    seed=2**64 - 1,
)  # fmt: skip


@pytest.mark.parametrize("noun", TRAINING_NOUNS, ids=lambda noun: noun.__name__)
def test_a_default_survives_the_message(noun: type[msgspec.Struct]) -> None:
    assert from_message(noun, to_message(noun())) == noun()
    assert from_message(noun, message_class(noun)()) == noun()


def test_a_configuration_survives_the_message() -> None:
    assert from_message(TrainingConfig, to_message(CONFIG)) == CONFIG


def test_a_job_and_its_events_survive_the_message() -> None:
    error = JobError.of(OutOfCapacity("the disk is full", needed=3))
    job = TrainingJob(id="a", config=CONFIG, state=JobState.FAILED, last_metrics={"loss": 1.5}, error=error)
    assert from_message(TrainingJob, to_message(job)) == job
    event = JobEvent(id=3, attempt=1, metrics=Metrics(step=2, values={"loss": 2.5}))
    read = from_message(JobEvent, to_message(event))
    assert read == event
    assert read.payload == event.metrics


def test_an_error_is_of_its_class_again() -> None:
    error = JobError.of(OutOfCapacity("the disk is full", needed=3)).error()
    assert isinstance(error, OutOfCapacity)
    assert (error.message, error.metadata) == ("the disk is full", {"needed": "3"})


REFUSED: list[tuple[type[msgspec.Struct], dict[str, Any], str]] = [
    (ModelConfig, {"hidden_size": 0}, "hidden_size"),
    (ModelConfig, {"dropout": 1.0}, "dropout"),
    (ModelConfig, {"norm": "batch"}, "norm"),
    (ModelConfig, {"router_aux_loss_coef": float("nan")}, "router_aux_loss_coef"),
    (ModelConfig, {"model_options": {"vocab_size": 9}}, "model_options"),
    (ModelConfig, {"model_options": {"hidden_size": 9}}, "model_options"),
    (DataConfig, {"validation_fraction": 1}, "validation_fraction"),
    (DataConfig, {"max_pairs": -1}, "max_pairs"),
    (OptimizerConfig, {"learning_rate": 0}, "learning_rate"),
    (OptimizerConfig, {"min_learning_rate": 1.0}, "min_learning_rate"),
    (OptimizerConfig, {"steps": 3, "warmup_steps": 4}, "warmup_steps"),
    (OptimizerConfig, {"optim": "adam"}, "optim"),
    (OptimizerConfig, {"optim": "sgd", "weight_decay": 0.1}, "weight_decay"),
    (OptimizerConfig, {"optim": "adadelta", "momentum": 0.9}, "momentum"),
    (OptimizerConfig, {"rho": 0.9}, "rho"),
    (OptimizerConfig, {"lr_scheduler_type": "halving", "min_learning_rate": 0.0}, "min_learning_rate"),
    (OptimizerConfig, {"decay_steps": 3}, "decay_steps"),
    (OptimizerConfig, {"lr_scheduler_type": "noam"}, "warmup_steps"),
    (OptimizerConfig, {"max_grad_norm_ratio": 1.0}, "max_grad_norm_ratio"),
    (OptimizerConfig, {"ema_decay": 1.0}, "ema_decay"),
    (CheckpointConfig, {"save_steps": 0}, "save_steps"),
    (EvaluationConfig, {"eval_batches": 0}, "eval_batches"),
    (TrainingConfig, {"precision": "float16"}, "precision"),
    (TrainingConfig, {"workers": 5000}, "workers"),
    (TrainingConfig, {"workers": 4, "tp": 3}, "workers"),
    (TrainingConfig, {"workers": 2, "min_workers": 3}, "min_workers"),
    (
        TrainingConfig,
        {
            "model": ModelConfig(base_model="smollm2"),
            "data": DataConfig(dataset="/pairs.jsonl", format="preference"),
            "lora": LoraConfig(lora_rank=4),
            "optimizer": OptimizerConfig(label_smoothing=0.1),
        },
        "label_smoothing",
    ),
    (
        TrainingConfig,
        {
            "model": ModelConfig(base_model="smollm2"),
            "data": DataConfig(dataset="/pairs.jsonl", format="preference"),
            "lora": LoraConfig(lora_rank=4, lora_dropout=0.1),
        },
        "lora_dropout",
    ),
    (TrainingConfig, {"evaluation": EvaluationConfig(bleu_sentences=3)}, "bleu_sentences"),
]


@pytest.mark.parametrize(("noun", "values", "field"), REFUSED)
def test_a_value_that_is_not_allowed_is_refused_with_its_field(
    noun: type[msgspec.Struct], values: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidValue, match="allowed") as caught:
        noun(**values)
    assert caught.value.metadata["field"] == field


def test_what_is_not_given_is_what_the_optimizer_and_the_schedule_take() -> None:
    adamw = OptimizerConfig(steps=30, learning_rate=0.5).with_defaults()
    assert (adamw.weight_decay, adamw.beta1, adamw.beta2, adamw.epsilon) == (0.1, 0.9, 0.99, 1e-8)
    assert (adamw.min_learning_rate, adamw.decay_steps, adamw.rho) == (0.05, None, None)
    sgd = OptimizerConfig(steps=30, optim="sgd", lr_scheduler_type="halving", decay_steps=7).with_defaults()
    assert (sgd.momentum, sgd.start_decay_steps, sgd.decay_steps) == (0.0, 20, 7)
    assert (sgd.min_learning_rate, sgd.weight_decay) == (None, None)


def test_a_field_that_does_not_exist_has_near_names() -> None:
    with pytest.raises(UnknownName, match="hidden_size"):
        TrainingConfig.from_mapping({"model": {"hiden_size": 8}})


def test_fields_have_paths() -> None:
    assert field_path("steps") == "optimizer.steps"
    assert field_path("hidden_size") == "model.hidden_size"
    assert field_path("seed") == "seed"


def test_every_field_has_one_part_so_that_its_option_has_one_meaning() -> None:
    parts = (ModelConfig, DataConfig, OptimizerConfig, CheckpointConfig, EvaluationConfig)
    names = [name for part in parts for name in part.__struct_fields__]
    assert len(names) == len(set(names))


def test_a_decoder_gets_the_fields_it_needs_and_other_families_their_own_defaults() -> None:
    model = ModelConfig(num_layers=2).with_defaults()
    assert (model.mechanism, model.hidden_size, model.num_layers) == ("attn-variants/mha", 128, 2)
    assert ModelConfig(family="vit").with_defaults() == ModelConfig(family="vit")
    assert ModelConfig(family="vit", hidden_size=8, model_options={"patch": 2}).config_fields() == {
        "hidden_size": 8,
        "patch": 2,
    }
