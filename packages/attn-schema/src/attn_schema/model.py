"""The configuration of the model that a job trains."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec
from attn_core.errors import InvalidValue

from attn_schema.decoder import DECODER_DEFAULTS, DecoderConfig, SourceConfig
from attn_schema.schema import MODEL, Checked, PlainConfig, SchemaMeta, fields_of, in_panel, is_mapping

DECODER = "decoder"
_model = in_panel("Model")


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise InvalidValue.of(name, None, "a whole number from 1")
    return value


TEXT = ("positions", "kv_sharing")
"""Fields that are checked as text only: other families have positions of their own, and a message holds text."""


def _optional_fields(*parts: type[PlainConfig]) -> dict[str, Any]:
    """The body of a class with every field of the parts that has an option on the command line, None if not given."""
    kinds: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for part in parts:
        hints = typing.get_type_hints(part, include_extras=True)
        for info in fields_of(part):
            if info.extra:
                hint = Annotated[str, _model(info.description)] if info.name in TEXT else hints[info.name]
                mapping = is_mapping(info.kind)
                kinds[info.name] = hint if mapping else hint | None
                values[info.name] = msgspec.field(default_factory=dict) if mapping else None
    return {"__module__": __name__, "__annotations__": kinds, **values}


class _Family(Checked, frozen=True, kw_only=True):
    family: Annotated[str, _model("Model family, such as decoder or transformer.")] = DECODER


_Fields: Any = SchemaMeta(
    "_Fields", (_Family,), _optional_fields(DecoderConfig, SourceConfig), frozen=True, kw_only=True
)


class ModelConfig(_Fields, frozen=True, kw_only=True):  # type: ignore[misc, call-arg]
    """The model to train: its family, and the fields of the family's config by name.

    Those of a decoder, and `max_encoder_len`, are fields here; `model_options` has the others. A field that is not
    given has the default of the family's config.
    """

    model_options: Annotated[
        dict[str, Any], _model("Other fields of the config of the model family, such as pattern.", metavar="NAME=VALUE")
    ] = {}  # noqa: RUF012 - msgspec copies it
    base_model: (
        Annotated[
            str,
            _model(
                "Base model to fine-tune, by name or folder on the server: training starts from its weights, config "
                "and tokenizer. Other options of the model must agree with its config; max_seq_len is then the length "
                "of training sequences.",
                short="--from",
                metavar="NAME|PATH",
                names=MODEL,
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = {*self.__struct_fields__, "vocab_size"} - {"kv_sharing"}
        if named := sorted(fields & self.model_options.keys()):
            allowed = "fields without an option of their own; vocab_size is determined by the data"
            raise InvalidValue.of("model_options", named, allowed)
        plain = self.family == DECODER and self.base_model is None and self.num_experts is None
        if plain and self.routing is not None:
            raise InvalidValue.of("routing", self.routing, "none without num_experts")

    @classmethod
    def of(cls, family: str, fields: Mapping[str, Any]) -> Self:
        """Make the configuration of a model of this family from the fields of its config, by name."""
        own = {name: value for name, value in fields.items() if name in cls.__struct_fields__}
        return cls(family=family, **own, model_options={k: v for k, v in fields.items() if k not in own})

    def config_fields(self) -> dict[str, Any]:
        """The given fields of the family's config, by name."""
        own = [name for name in self.__struct_fields__ if name not in ("family", "model_options", "base_model")]
        given = {name: value for name in own if (value := getattr(self, name)) not in (None, {})}
        return given | self.model_options

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder: whether `max_encoder_len` is given."""
        return self.max_encoder_len is not None

    @property
    def sequence_length(self) -> int:
        """`max_seq_len`; raises `InvalidValue` if it is not given."""
        return _given("max_seq_len", self.max_seq_len)

    @property
    def encoder_length(self) -> int:
        """`max_encoder_len`; raises `InvalidValue` if it is not given."""
        return _given("max_encoder_len", self.max_encoder_len)

    @property
    def label(self) -> str:
        """A short name: that of the base model, else of a decoder's mechanism, else of the family."""
        named = (self.mechanism or self.family) if self.family == DECODER else self.family
        if self.base_model is not None:
            named = self.base_model.rstrip("/")
        return str(named).rpartition("/")[2]

    def with_defaults(self) -> Self:
        """A copy with `DECODER_DEFAULTS` for unset fields; unchanged for another family or with a base model."""
        if self.family != DECODER or self.base_model is not None:
            return self
        unset = {name: value for name, value in DECODER_DEFAULTS.items() if getattr(self, name) is None}
        completed: Self = self.replace(**unset)
        return completed
