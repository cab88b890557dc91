"""A recipe with what was given on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attn.v1 import training_pb2 as pb
from attn_core.errors import InvalidValue
from attn_core.options import parse_options
from google.protobuf.message import Message

DECODER = ("", "decoder")
MECHANISM, OPTIONS, PATTERN = "mechanism", "options", "pattern"
"""Fields of a model that say which attention it has."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What replaces a recipe's own; what is empty or None leaves it.

    `attention` is a mechanism for every layer, with `options` NAME=VALUE of its own; `fields` NAME=VALUE are those of
    the model's config. `optimizer` and `checkpoint` hold fields of their messages.
    """

    data: str = ""
    tokenizer: str = ""
    languages: str = ""
    seed: int = 0
    precision: str = ""
    attention: str = ""
    options: Sequence[str] = ()
    fields: Sequence[str] = ()
    optimizer: Mapping[str, float | None] = field(default_factory=dict)
    checkpoint: Mapping[str, int | None] = field(default_factory=dict)


def changed(spec: pb.TrainingSpec, given: Changes) -> pb.TrainingSpec:
    """The recipe with the changes; raises `InvalidValue` for what is no NAME=VALUE, and for data that are nowhere."""
    _change_data(spec.data, given)
    _change_attention(spec.model, given)
    if (steps := given.optimizer.get("steps")) is not None and spec.optimizer.HasField("warmup_steps"):
        spec.optimizer.warmup_steps = min(spec.optimizer.warmup_steps, int(steps))
    set_fields(spec.optimizer, given.optimizer)
    set_fields(spec.checkpoint, given.checkpoint)
    spec.seed = given.seed or spec.seed
    spec.precision = given.precision or spec.precision
    return spec


def set_fields(message: Message, values: Mapping[str, float | None]) -> None:
    """Set the fields of a message whose values are not None."""
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)


def _change_data(source: pb.DataSource, given: Changes) -> None:
    tokenizer, languages = given.tokenizer, given.languages
    if given.data:
        if source.path and Path(given.data).expanduser().exists():
            # A recipe for files says what lies there; only where it lies differs.
            tokenizer, languages = tokenizer or source.tokenizer, languages or source.languages
        found = data_source(given.data, tokenizer, languages)
        found.most_pairs = source.most_pairs
        if source.HasField("validation_fraction"):
            found.validation_fraction = source.validation_fraction
        source.CopyFrom(found)
    else:
        source.tokenizer = tokenizer or source.tokenizer
        source.languages = languages or source.languages


def _change_attention(model: pb.ModelConfig, given: Changes) -> None:
    options, decoder = parse_options(given.options), model.family in DECODER
    if given.attention:
        model.family_options.fields.pop(PATTERN, None)
        if decoder:
            model.mechanism.name = given.attention
            model.mechanism.options.Clear()
        else:
            model.family_options.update({MECHANISM: given.attention, OPTIONS: {}})
    if options and decoder:
        model.mechanism.options.update(options)
    elif options:
        model.family_options.get_or_create_struct(OPTIONS).update(options)
    model.family_options.update(parse_options(given.fields, "--model-option"))


def data_source(data: str, tokenizer: str, languages: str = "") -> pb.DataSource:
    """A path where `data` looks like one or is one here, else a name; raises `InvalidValue` for neither."""
    if not data:
        raise InvalidValue.of("--data", data, "a data set or a path, unless --recipe is given")
    path = Path(data).expanduser()
    if path.exists() or "/" in data:
        # The server does not know this shell's folder.
        return pb.DataSource(path=str(path.absolute()), tokenizer=tokenizer, languages=languages)
    return pb.DataSource(name=data, tokenizer=tokenizer, languages=languages)
