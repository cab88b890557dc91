"""The configuration of the model that a job trains, and the largest sizes of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from attn_core.errors import InvalidValue

from attn_schema.decoder import (
    DECODER_DEFAULTS,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_TOKENS,
    MAX_WIDTH,
)
from attn_schema.schema import MODEL, Checked, in_panel

DECODER = "decoder"
_model = in_panel("Model")


def _of_decoder(name: str) -> str:
    return f"{DECODER_DEFAULTS[name]} for a decoder if not given"


def _given(name: str, value: int | None) -> int:
    if value is None:
        raise InvalidValue.of(name, None, "a whole number from 1")
    return value


class ModelConfig(Checked, frozen=True, kw_only=True):
    """The model to train. A field that is not given has the default of the family's config, under the same name."""

    family: Annotated[str, _model("Model family, such as decoder or transformer.")] = DECODER
    mechanism: (
        Annotated[str, _model(f"Attention mechanism; see `attn list mechanisms`. {_of_decoder('mechanism')}.")] | None
    ) = None
    options: Annotated[dict[str, Any], _model("Options of the mechanism.", short="-o", metavar="NAME=VALUE")] = {}  # noqa: RUF012 - msgspec copies it
    hidden_size: (
        Annotated[int, _model(f"Size of the residual stream; {_of_decoder('hidden_size')}.", ge=1, le=MAX_WIDTH)] | None
    ) = None
    num_layers: (
        Annotated[int, _model(f"Number of blocks; {_of_decoder('num_layers')}.", ge=1, le=MAX_LAYERS)] | None
    ) = None
    num_heads: (
        Annotated[int, _model(f"Query heads of a layer; {_of_decoder('num_heads')}.", ge=1, le=MAX_HEADS)] | None
    ) = None
    num_kv_heads: (
        Annotated[
            int, _model("Key/value heads of a layer, a divisor of num_heads, which is the default.", ge=1, le=MAX_HEADS)
        ]
        | None
    ) = None
    head_dim: (
        Annotated[int, _model("Size of a head; hidden_size / num_heads if not given.", ge=1, le=MAX_WIDTH)] | None
    ) = None
    intermediate_size: (
        Annotated[
            int,
            _model(
                "Inner size of the feed-forward layers; default 4 hidden_size, 8/3 of it if gated.",
                ge=1,
                le=MAX_INTERMEDIATE_SIZE,
            ),
        ]
        | None
    ) = None
    max_seq_len: (
        Annotated[
            int, _model(f"Maximum sequence length, in tokens; {_of_decoder('max_seq_len')}.", ge=1, le=MAX_TOKENS)
        ]
        | None
    ) = None
    max_encoder_len: (
        Annotated[
            int,
            _model("Maximum length of the encoder input, in tokens; only for encoder-decoders.", ge=1, le=MAX_TOKENS),
        ]
        | None
    ) = None
    norm: Annotated[Literal["layer", "rms"], _model("Normalization; layer if not given.")] | None = None
    norm_place: (
        Annotated[Literal["pre", "post", "both"], _model("Normalize before a sublayer (pre), after it (post) or both.")]
        | None
    ) = None
    feed_forward: (
        Annotated[
            Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh"],
            _model("Activation of the feed-forward layers; gelu if not given."),
        ]
        | None
    ) = None
    positions: (
        Annotated[
            str,
            _model(
                "Positions: learned, rotary, sinusoidal or none; if not given, rotary where a decoder's "
                "mechanism and head_dim allow it, else learned."
            ),
        ]
        | None
    ) = None
    dropout: Annotated[float, _model("Probability of dropping activations.", ge=0, lt=1)] | None = None
    attention_dropout: Annotated[float, _model("Probability of dropping attention weights.", ge=0, lt=1)] | None = None
    tie_word_embeddings: Annotated[bool, _model("Whether the output layer shares the token embedding.")] | None = None
    num_experts: (
        Annotated[int, _model("Experts of each feed-forward layer; none if not given.", ge=1, le=MAX_EXPERTS)] | None
    ) = None
    num_experts_per_tok: (
        Annotated[int, _model("Number of experts that each token is routed to.", ge=1, le=MAX_EXPERTS)] | None
    ) = None
    routing: (
        Annotated[
            str,
            _model(
                "Weights of the chosen experts: mixtral (softmax over them), switch or deepseek_v2 "
                "(softmax over all), deepseek_v3 (sigmoids)."
            ),
        ]
        | None
    ) = None
    router_aux_loss_coef: Annotated[float, _model("Weight of the load-balancing loss of experts.", ge=0)] | None = None
    kv_sharing: (
        Annotated[str, _model("Layers that share keys and values: cla:N (N neighbours) or yoco (the upper half).")]
        | None
    ) = None
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
        if self.base_model is not None:
            return self.base_model.rstrip("/").rpartition("/")[2]
        named = (self.mechanism or self.family) if self.family == DECODER else self.family
        return named.rpartition("/")[2]

    def with_defaults(self) -> Self:
        """A copy with `DECODER_DEFAULTS` for unset fields; unchanged for another family or with a base model."""
        if self.family != DECODER or self.base_model is not None:
            return self
        return self.replace(**{name: value for name, value in DECODER_DEFAULTS.items() if getattr(self, name) is None})
