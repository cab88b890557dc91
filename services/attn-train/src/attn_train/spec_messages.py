"""Specifications as messages of the wire, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from attn.v1 import common_pb2
from attn.v1 import training_pb2 as pb
from attn_core import Capability, installed
from attn_core.errors import InvalidValue
from google.protobuf import json_format, struct_pb2

from attn_train.spec import CheckpointSpec, DataSpec, FamilyModelSpec, ModelSpec, OptimizerSpec, TrainingSpec

NORMS = {"layernorm": "layer", "rmsnorm": "rms"}
ACTIVATIONS = {word: word for word in ("gelu", "swiglu", "gelu_tanh", "relu", "geglu", "geglu_tanh")}
PLACES = {word: word for word in ("pre", "post", "both")}
POSITIONS = {word: word for word in ("learned", "rotary", "none", "sinusoidal")}

NAMED = {item.name for item in dataclasses.fields(ModelSpec)} | {"vocab_size"}
"""Fields of a decoder that cannot stand among the others."""


def spec_of(message: pb.TrainingSpec) -> TrainingSpec:
    """The specification of a message, with defaults filled in; raises InvalidValue for a word or choice."""
    given = CheckpointSpec()
    checkpoint = message.checkpoint
    return TrainingSpec(
        model=_model(message.model),
        data=_data(message.data),
        optimizer=_optimizer(message.optimizer),
        checkpoint=CheckpointSpec(
            interval=checkpoint.interval_steps or given.interval,
            keep=checkpoint.keep or given.keep,
            evaluation_interval=checkpoint.evaluation_interval_steps or given.evaluation_interval,
            evaluation_batches=checkpoint.evaluation_batches or given.evaluation_batches,
            bleu_sentences=checkpoint.bleu_sentences,
        ),
        seed=message.seed,
        max_failures=message.max_failures if message.HasField("max_failures") else 3,
        workers=message.workers or 1,
        precision=message.precision or TrainingSpec.precision,
    )


def spec_message(spec: TrainingSpec) -> pb.TrainingSpec:
    """The message of a specification, with every default written out."""
    return pb.TrainingSpec(
        model=_model_message(spec.model),
        data=_data_message(spec.data),
        optimizer=pb.OptimizerConfig(
            steps=spec.optimizer.steps,
            batch_size=spec.optimizer.batch,
            learning_rate=spec.optimizer.learning_rate,
            min_learning_rate=spec.optimizer.min_learning_rate,
            warmup_steps=spec.optimizer.warmup,
            weight_decay=spec.optimizer.weight_decay,
            beta1=spec.optimizer.beta1,
            beta2=spec.optimizer.beta2,
            gradient_clip=spec.optimizer.clip,
            label_smoothing=spec.optimizer.label_smoothing,
        ),
        checkpoint=pb.CheckpointPolicy(
            interval_steps=spec.checkpoint.interval,
            keep=spec.checkpoint.keep,
            evaluation_interval_steps=spec.checkpoint.evaluation_interval,
            evaluation_batches=spec.checkpoint.evaluation_batches,
            bleu_sentences=spec.checkpoint.bleu_sentences,
        ),
        seed=spec.seed,
        max_failures=spec.max_failures,
        workers=spec.workers,
        precision=spec.precision,
    )


def default_positions(message: pb.ModelConfig) -> str:
    """ "rotary" where the mechanism takes it: it learns far faster than "learned", which works with all.

    Raises UnknownName for a mechanism that does not exist.
    """
    mechanism = installed().mechanisms.get(message.mechanism.name)
    size = message.head_size or (message.width // message.heads if message.heads > 0 else 0)
    # Rotation turns pairs of numbers.
    return "rotary" if mechanism.can(Capability.ROTARY) and size % 2 == 0 else "learned"


def plain_struct(field: str, message: struct_pb2.Struct) -> dict[str, Any]:
    """The values of a struct; raises InvalidValue for numbers that are infinite or none at all."""
    try:
        return json_format.MessageToDict(message)
    except ValueError as error:
        raise InvalidValue.of(field, "NaN or an infinite number", "finite numbers") from error


def _model(message: pb.ModelConfig) -> ModelSpec | FamilyModelSpec:
    if message.family not in {"", "decoder"}:
        return _family_model(message)
    others = plain_struct("spec.model.family_options", message.family_options)
    if named := sorted(others.keys() & NAMED):
        allowed = "fields of a decoder that have no field of their own in the model"
        raise InvalidValue.of("spec.model.family_options", named, allowed)
    if not message.mechanism.name:
        raise InvalidValue.of("spec.model.mechanism.name", "", "the name of a mechanism")
    return ModelSpec(
        hidden_size=message.width,
        num_layers=message.layers,
        num_heads=message.heads,
        max_seq_len=message.context_length,
        mechanism=message.mechanism.name,
        options=plain_struct("spec.model.mechanism.options", message.mechanism.options),
        num_kv_heads=message.kv_heads or None,
        head_dim=message.head_size or None,
        norm=_word("norm", message.norm, NORMS),
        norm_place=_word("norm_placement", message.norm_placement, PLACES),
        feed_forward=_word("activation", message.activation, ACTIVATIONS),
        intermediate_size=message.feed_forward_size or None,
        positions=_word("positions", message.positions or default_positions(message), POSITIONS),
        dropout=message.dropout,
        tie_word_embeddings=message.tie_embeddings if message.HasField("tie_embeddings") else True,
        experts=message.experts or None,
        experts_per_token=message.experts_per_token or None,
        routing=message.routing or "mixtral",
        router_aux_loss_coef=message.balance,
        others=others,
    )


def _family_model(message: pb.ModelConfig) -> FamilyModelSpec:
    given = sorted(field.name for field, _ in message.ListFields() if field.name not in {"family", "family_options"})
    if given:
        raise InvalidValue.of("spec.model", given, "only family and family_options, for another family than decoder")
    return FamilyModelSpec.of(message.family, plain_struct("spec.model.family_options", message.family_options))


def _model_message(model: ModelSpec | FamilyModelSpec) -> pb.ModelConfig:
    if isinstance(model, FamilyModelSpec):
        named = pb.ModelConfig(family=model.family)
        named.family_options.update(dict(model.fields))
        return named
    mechanism = common_pb2.MechanismRef(name=model.mechanism)
    mechanism.options.update(model.options)
    message = pb.ModelConfig(
        width=model.hidden_size,
        layers=model.num_layers,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads or 0,
        head_size=model.head_dim or 0,
        context_length=model.max_seq_len,
        mechanism=mechanism,
        norm=_spelled(model.norm, NORMS),
        norm_placement=model.norm_place,
        activation=model.feed_forward,
        feed_forward_size=model.intermediate_size or 0,
        positions=model.positions,
        dropout=model.dropout,
        tie_embeddings=model.tie_word_embeddings,
        experts=model.experts or 0,
        experts_per_token=model.experts_per_token or 0,
        routing=model.routing,
        balance=model.router_aux_loss_coef,
    )
    if model.others:
        message.family_options.update(dict(model.others))
    return message


def _data(message: pb.DataSource) -> DataSpec:
    kind = message.WhichOneof("kind")
    if kind is None or not getattr(message, kind):
        raise InvalidValue.of("spec.data", "neither name nor path", "one of them")
    given = DataSpec()
    return DataSpec(
        name=message.name if kind == "name" else None,
        path=message.path if kind == "path" else None,
        tokenizer=message.tokenizer or given.tokenizer,
        validation=message.validation_fraction if message.HasField("validation_fraction") else given.validation,
        languages=message.languages,
        max_pairs=message.most_pairs,
    )


def _data_message(data: DataSpec) -> pb.DataSource:
    message = pb.DataSource(
        tokenizer=data.tokenizer,
        validation_fraction=data.validation,
        languages=data.languages,
        most_pairs=data.max_pairs,
    )
    if data.name is not None:
        message.name = data.name
    else:
        message.path = data.path or ""
    return message


def _optimizer(message: pb.OptimizerConfig) -> OptimizerSpec:
    absent = {
        "min_learning_rate": message.learning_rate / 10,
        "warmup_steps": 0,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "gradient_clip": 1.0,
    }
    values = {
        name: getattr(message, name) if message.HasField(name) else default  # type: ignore[arg-type]
        for name, default in absent.items()
    }
    return OptimizerSpec(
        steps=message.steps,
        batch=message.batch_size,
        learning_rate=message.learning_rate,
        min_learning_rate=values["min_learning_rate"],
        warmup=int(values["warmup_steps"]),
        weight_decay=values["weight_decay"],
        beta1=values["beta1"],
        beta2=values["beta2"],
        clip=values["gradient_clip"],
        label_smoothing=message.label_smoothing,
    )


def _word(field: str, given: str, words: dict[str, str]) -> str:
    """The decoder's word for the wire's; the first is the default."""
    if not given:
        return next(iter(words.values()))
    if given not in words:
        raise InvalidValue.of(f"spec.model.{field}", given, " or ".join(repr(word) for word in words))
    return words[given]


def _spelled(ours: str, words: dict[str, str]) -> str:
    return next(wire for wire, word in words.items() if word == ours)
