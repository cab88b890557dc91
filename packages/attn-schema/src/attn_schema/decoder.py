"""The config of a decoder and its parts, which the configs of other models share. Each part checks its own fields.

A model's config inherits its parts, so that all fields have flat names, in files, in options and in code; a layer takes
the part that it needs. Fields of the panel "Model" have options on the command line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from attn_core import Rotary
from attn_core.errors import InvalidValue
from attn_core.models import KvSharing, checked_kv_sharing, kv_source_layer_of
from attn_core.rotary import rotary_scaling
from msgspec import Meta

from attn_schema.schema import MAX_INT32, PlainConfig, in_panel

MAX_LAYERS = 1024
"""Maximum number of blocks of a stack."""
MAX_EXPERTS = 2**14
"""Maximum number of experts of a layer."""
MAX_WIDTH = 2**20
"""Maximum size of the residual stream."""
MAX_INTERMEDIATE_SIZE = 2**22
MAX_HEADS = 2**14
MAX_TOKENS = 2**24
"""Maximum length of a sequence, in tokens."""

DECODER_DEFAULTS = {
    "mechanism": "attn-variants/mha",
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 4,
    "max_seq_len": 64,
}
"""The defaults of a decoder's fields that are not given to a training job."""

Norm = Literal["layer", "rms"]
NormPlace = Literal["pre", "post", "both", "after", "parallel", "parallel_shared"]
FeedForwardKind = Literal[
    "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped", "none"
]
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
Positions = Literal["learned", "sinusoidal", "rotary", "none"]
Routing = Literal["mixtral", "switch", "llama4", "deepseek_v2", "deepseek_v3"]
GROUPED = ("deepseek_v2", "deepseek_v3")
"""Routings with groups of experts and a scaling factor."""

Size = Annotated[int, Meta(ge=1, le=MAX_INT32)]
"""A whole number from 1."""
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
"""A number of layers of a stack."""
Dropout = Annotated[float, Meta(ge=0, lt=1)]
"""A probability of dropping elements in training."""

_model = in_panel("Model")


def _of_decoder(name: str) -> str:
    return f"{DECODER_DEFAULTS[name]} for a decoder if not given"


@dataclass(frozen=True, kw_only=True)
class HiddenConfig(PlainConfig):
    """The size of the hidden states that all layers of a model read and write."""

    hidden_size: Annotated[
        int, _model(f"Size of the residual stream; {_of_decoder('hidden_size')}.", ge=1, le=MAX_WIDTH)
    ]


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(HiddenConfig):
    """The vocabulary of a model of token ids, and its longest sequence in tokens."""

    vocab_size: Size
    max_seq_len: Annotated[
        int, _model(f"Maximum sequence length, in tokens; {_of_decoder('max_seq_len')}.", ge=1, le=MAX_TOKENS)
    ]


@dataclass(frozen=True, kw_only=True)
class SourceConfig(PlainConfig):
    """The longest input of the encoder of an encoder-decoder, in tokens."""

    max_encoder_len: Annotated[
        int,
        _model("Maximum length of the encoder input, in tokens; only for encoder-decoders.", ge=1, le=MAX_TOKENS),
    ]


@dataclass(frozen=True, kw_only=True)
class AttentionChoice(PlainConfig):
    """A mechanism by name, and its own options.

    Options override, for this layer, the decoder's numbers of heads, and by `rotary` its rotary positions: None turns
    them off here, a mapping changes some of the fields of `attn_core.Rotary`.
    """

    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.options.get("rotary") is not None and not isinstance(self.options["rotary"], Mapping):
            allowed = "null, for a layer without rotary positions, or an object of what differs in this layer"
            raise InvalidValue.of("rotary", self.options["rotary"], allowed)

    @property
    def has_rotary(self) -> bool:
        """Whether the layer uses rotary positions if the decoder has them."""
        return self.options.get("rotary", True) is not None

    @classmethod
    def from_plain(cls, values: object) -> AttentionChoice:
        """The choice from a name alone, or from a mapping with `mechanism` and optionally `options`."""
        if isinstance(values, str):
            return cls(mechanism=values)
        if isinstance(values, Mapping) and isinstance(values.get("mechanism"), str) and values.keys() <= CHOICE_KEYS:
            return cls(mechanism=values["mechanism"], options=values.get("options") or {})
        raise InvalidValue.of("pattern", values, "a mechanism's name, or its `mechanism` and `options`")


CHOICE_KEYS = {"mechanism", "options"}


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(HiddenConfig):
    """The number of query heads of every attention of a model."""

    num_heads: Annotated[int, _model(f"Query heads of a layer; {_of_decoder('num_heads')}.", ge=1, le=MAX_HEADS)]


@dataclass(frozen=True, kw_only=True)
class MechanismChoice(PlainConfig):
    """The `mechanism` of a model by name, and its own `options`."""

    mechanism: Annotated[
        str, _model(f"Attention mechanism; see `attn list mechanisms`. {_of_decoder('mechanism')}.")
    ] = "attn-variants/mha"
    options: Annotated[Mapping[str, Any], _model("Options of the mechanism.", short="-o", metavar="NAME=VALUE")] = (
        field(default_factory=dict)
    )


@dataclass(frozen=True, kw_only=True)
class SingleAttentionConfig(HeadsConfig, MechanismChoice):
    """An attention with one head unless `num_heads` says otherwise, as recurrent models have."""

    num_heads: Annotated[int, Meta(ge=1, le=MAX_HEADS)] = 1


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(HeadsConfig, MechanismChoice):
    """The attentions of a stack of `num_layers` layers, with `num_heads` heads each.

    Every layer uses `mechanism` with its `options`, unless `pattern` is given: then layer i uses
    `pattern[i % len(pattern)]`. `head_dim` defaults to `hidden_size / num_heads`. `attention_dropout` drops attention
    weights in training, unless the options of a layer have their own `dropout`.
    """

    num_layers: Annotated[int, _model(f"Number of blocks; {_of_decoder('num_layers')}.", ge=1, le=MAX_LAYERS)]
    head_dim: (
        Annotated[int, _model("Size of a head; hidden_size / num_heads if not given.", ge=1, le=MAX_WIDTH)] | None
    ) = None
    pattern: tuple[AttentionChoice, ...] = ()
    attention_dropout: Annotated[float, _model("Probability of dropping attention weights.", ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise InvalidValue.of(
                "num_heads", self.num_heads, f"a divisor of hidden_size {self.hidden_size}, or an explicit head_dim"
            )

    def choice(self, layer: int) -> AttentionChoice:
        """The mechanism and options of one layer."""
        if self.pattern:
            return self.pattern[layer % len(self.pattern)]
        return AttentionChoice(mechanism=self.mechanism, options=self.options)


@dataclass(frozen=True, kw_only=True)
class BiasConfig(HiddenConfig):
    """Whether the parts of a block have biases; a field of a part that is not None overrides `bias` for it."""

    bias: bool = False

    def has_bias(self, part: str) -> bool:
        """Whether a part has biases; `part` is the name of its field, one of `OWN_BIASES`."""
        own: bool | None = getattr(self, part)
        return self.bias if own is None else own


OWN_BIASES = ("norm_bias", "attention_bias", "attention_output_bias", "feed_forward_bias")


@dataclass(frozen=True, kw_only=True)
class NormConfig(BiasConfig):
    """The norms of a block: `norm` is "layer" or "rms".

    `norm_place` "pre" normalises the input of a sublayer (GPT-2), "post" the sum with the residual (Vaswani et al.
    2017), "both" the input and output of a sublayer (Gemma 2), "after" only its output (OLMo 2, arXiv 2501.00656). With
    "parallel" both sublayers read the block's input, each through its own norm (GPT-NeoX, arXiv 2204.06745), with
    "parallel_shared" through one norm (GPT-J). Only LayerNorms have biases.
    """

    norm: Annotated[Norm, _model("Normalization; if not given, rms for rotary positions, else layer.")] = "layer"
    norm_place: Annotated[
        NormPlace,
        _model(
            "Normalize before a sublayer (pre), after it (post) or both, its output alone (after), or before two "
            "sublayers that read the same input (parallel; parallel_shared with one norm)."
        ),
    ] = "pre"
    norm_eps: Annotated[float, Meta(ge=0)] = 1e-5
    norm_bias: bool | None = None


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(BiasConfig):
    """The feed-forward of a block: `feed_forward` is its activation, those of `GATED` with a gate.

    "swiglu_clamped" is gpt-oss's; "none" leaves feed-forwards and their norms out (Mamba-2, arXiv 2405.21060).
    `intermediate_size` is the inner size, by default 4 `hidden_size`, or with a gate 8/3 `hidden_size`, rounded up to a
    multiple of 8.
    """

    feed_forward: Annotated[
        FeedForwardKind,
        _model("Activation of the feed-forward layers; if not given, swiglu for rotary positions, else gelu_tanh."),
    ] = "gelu"
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
    feed_forward_bias: bool | None = None

    @property
    def inner_width(self) -> int:
        """The feed-forward's inner width."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return math.ceil(self.hidden_size / 3) * 8 if self.feed_forward in GATED else 4 * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class BlockConfig(NormConfig, FeedForwardConfig):
    """The norms and the feed-forward of a block."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(FeedForwardConfig):
    """A mixture of experts in place of some feed-forwards (arXiv 2401.04088), if `num_experts` is given.

    Layer i, counted from 0, is sparse if i >= `first_k_dense_replace` and i + 1 is a multiple of `decoder_sparse_step`
    (Qwen2-MoE). A sparse layer has `num_experts` feed-forwards of inner size `moe_intermediate_size` (by default that
    of a dense layer), of which each token uses `num_experts_per_tok`, and `n_shared_experts` that every token uses
    (DeepSeekMoE, arXiv 2401.06066), multiplied by a sigmoid gate of the token with `shared_expert_gate` (Qwen2-MoE,
    arXiv 2407.10671, section 2.2.2). `routing` sets the weights of the chosen experts: "mixtral" by a softmax over
    them, "switch" and "deepseek_v2" by a softmax over all experts, "deepseek_v3" by sigmoids normalised to sum to one,
    with a bias per expert that only affects the choice (arXiv 2412.19437, section 2.1.2), "llama4" by sigmoids that
    multiply the inputs of the experts instead of their outputs. The deepseek routings choose experts from the best
    `topk_group` of `n_group` groups, and multiply outputs by `routed_scaling_factor`. Training balances the load by an
    auxiliary loss of weight `router_aux_loss_coef` (arXiv 2101.03961), or by moving the biases by
    `router_bias_update_rate` after each step ("deepseek_v3"). `router_bias` gives the router biases.
    """

    num_experts: (
        Annotated[int, _model("Experts of each feed-forward layer; none if not given.", ge=1, le=MAX_EXPERTS)] | None
    ) = None
    num_experts_per_tok: (
        Annotated[int, _model("Number of experts that each token is routed to.", ge=1, le=MAX_EXPERTS)] | None
    ) = None
    routing: Annotated[
        Routing,
        _model(
            "Weights of the chosen experts: mixtral (softmax over them), switch or deepseek_v2 "
            "(softmax over all), deepseek_v3 (sigmoids), llama4 (sigmoids, on the inputs)."
        ),
    ] = "mixtral"
    router_bias: bool = False
    router_aux_loss_coef: Annotated[float, _model("Weight of the load-balancing loss of experts.", ge=0)] = 0.0
    router_bias_update_rate: Annotated[float, Meta(ge=0)] = 0.0
    n_shared_experts: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] | None = None
    shared_expert_gate: bool = False
    moe_intermediate_size: Annotated[int, Meta(ge=1, le=MAX_INTERMEDIATE_SIZE)] | None = None
    n_group: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] | None = None
    topk_group: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] | None = None
    routed_scaling_factor: Annotated[float, Meta(ge=0)] = 1.0
    first_k_dense_replace: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    decoder_sparse_step: Size = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts is None:
            self._require_unset()
            return
        if self.feed_forward == "none":
            raise InvalidValue.of("num_experts", self.num_experts, "none where feed_forward is 'none'")
        if self.num_experts_per_tok is None or self.num_experts_per_tok > self.num_experts:
            allowed = f"a whole number from 1 to the {self.num_experts} experts"
            raise InvalidValue.of("num_experts_per_tok", self.num_experts_per_tok, allowed)
        if self.shared_expert_gate and self.n_shared_experts is None:
            raise InvalidValue.of("shared_expert_gate", self.shared_expert_gate, "false without n_shared_experts")
        if self.routing not in GROUPED and (self.n_group is not None or self.routed_scaling_factor != 1):
            allowed = f"{' or '.join(map(repr, GROUPED))} with n_group or routed_scaling_factor"
            raise InvalidValue.of("routing", self.routing, allowed)
        if self.routing != "deepseek_v3" and self.router_bias_update_rate:
            allowed = "0, unless routing is 'deepseek_v3', which has biases"
            raise InvalidValue.of("router_bias_update_rate", self.router_bias_update_rate, allowed)
        self._require_groups(self.num_experts, self.num_experts_per_tok)

    def _require_unset(self) -> None:
        """Raise `InvalidValue` for fields that have no effect without experts."""
        usual = {name: getattr(ExpertsConfig, name) for name in ExpertsConfig.__annotations__ if name != "routing"}
        changed = {name: given for name, value in usual.items() if (given := getattr(self, name)) != value}
        if changed:
            raise InvalidValue.of("num_experts", changed, "a number of experts, or none of these fields")

    def _require_groups(self, experts: int, per_token: int) -> None:
        groups, chosen = self.n_group, self.topk_group
        if groups is None:
            if chosen is not None:
                raise InvalidValue.of("topk_group", chosen, "null without n_group")
            return
        if experts % groups:
            raise InvalidValue.of("n_group", groups, f"a divisor of the {experts} experts")
        if chosen is None or chosen > groups or chosen * (experts // groups) < per_token:
            allowed = f"at most the {groups} groups, and enough of them to contain {per_token} experts"
            raise InvalidValue.of("topk_group", chosen, allowed)

    @property
    def expert_width(self) -> int:
        """The inner width of an expert."""
        return self.moe_intermediate_size or self.inner_width

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts; otherwise it has a dense feed-forward."""
        stepped = layer >= self.first_k_dense_replace and (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts is not None and stepped


@dataclass(frozen=True, kw_only=True)
class PositionsConfig(PlainConfig):
    """`positions` is "learned", "sinusoidal" (fixed, added to embeddings that are multiplied by √width, Vaswani et al.
    2017), "rotary" or "none", which leaves positions to the mechanism.

    The fields of rotary positions are `rope_theta`, `partial_rotary_factor` (the fraction of a head that is rotated),
    `rope_interleave` (pairs are adjacent elements instead of elements half a head apart) and `rope_scaling` (like the
    option of the mechanism `rope`). Learned positions start at row `position_offset` of their table (OPT).
    """

    positions: Annotated[
        Positions,
        _model(
            "Positions: learned, rotary, sinusoidal or none; if not given, rotary where a decoder's "
            "mechanism and head_dim allow it, else learned."
        ),
    ] = "learned"
    rope_theta: Annotated[float, Meta(ge=1)] = 10000.0
    partial_rotary_factor: Annotated[float, Meta(ge=0, le=1)] = 1.0
    rope_interleave: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    position_offset: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position_offset and self.positions != "learned":
            raise InvalidValue.of("position_offset", self.position_offset, "0, unless positions are learned")
        _ = self.rotary

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions of the layers; None unless `positions` is "rotary"."""
        if self.positions != "rotary":
            return None
        return Rotary(
            base=self.rope_theta,
            fraction=self.partial_rotary_factor,
            interleaved=self.rope_interleave,
            scaling=None if self.rope_scaling is None else rotary_scaling(self.rope_scaling),
        )


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(PlainConfig):
    """`tie_word_embeddings` uses the embedding as the unembedding, which otherwise may have an `unembedding_bias`.

    `scale_embedding` multiplies embeddings by √width (Gemma), `embedding_multiplier` by a number (Granite);
    `embedding_norm` normalises them (BLOOM). Logits are multiplied by `logit_scale` (Cohere), and
    `final_logit_softcapping` c bounds them to ±c: c tanh(logits / c) (Gemma 2).
    """

    tie_word_embeddings: Annotated[bool, _model("Whether the output layer shares the token embedding.")] = True
    unembedding_bias: bool = False
    scale_embedding: bool = False
    embedding_multiplier: Annotated[float, Meta(ge=0)] = 1.0
    embedding_norm: bool = False
    logit_scale: Annotated[float, Meta(gt=0)] = 1.0
    final_logit_softcapping: Annotated[float, Meta(ge=1e-3)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unembedding_bias and self.tie_word_embeddings:
            raise InvalidValue.of("unembedding_bias", self.unembedding_bias, "false where tie_word_embeddings is true")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(EmbeddingConfig, PositionsConfig, ExpertsConfig, BlockConfig, SequenceConfig, AttentionConfig):
    """A decoder: token embeddings, blocks of causal attention and feed-forward layers, and the unembedding.

    `num_kv_heads` defaults to `num_heads`. `kv_sharing[i]` is the layer whose keys and values layer i attends to; by
    default every layer has its own. "cla:2" and "yoco" stand for such lists (`attn_core.models.KvSharing`).
    `attention_bias` (queries, keys, values) and `attention_output_bias` override `bias`.

    The output of a sublayer is multiplied by `residual_multiplier` before it is added (Granite). `dropout` applies in
    training to embeddings and the output of each sublayer.

    Multi-token prediction (arXiv 2412.19437, section 2.2): `num_nextn_predict_layers` D adds D modules that predict the
    D tokens after the next; the mean of their losses, times `nextn_predict_loss_weight`, is added to the training loss.
    They are not used outside training.

    Raises `InvalidValue` for a field outside its range; `attn_models.attention.layer_attentions` raises for mechanisms
    that do not fit.
    """

    num_kv_heads: (
        Annotated[
            int, _model("Key/value heads of a layer, a divisor of num_heads, which is the default.", ge=1, le=MAX_HEADS)
        ]
        | None
    ) = None
    kv_sharing: Annotated[
        KvSharing, _model("Layers that share keys and values: cla:N (N neighbours) or yoco (the upper half).")
    ] = ()
    attention_bias: bool | None = None
    attention_output_bias: bool | None = None
    residual_multiplier: Annotated[float, Meta(ge=0)] = 1.0
    dropout: Annotated[float, _model("Probability of dropping activations.", ge=0, lt=1)] = 0.0
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=MAX_LAYERS - 1)] = 0
    nextn_predict_loss_weight: Annotated[float, Meta(ge=0)] = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual_multiplier != 1 and self.norm_place == "post":
            raise InvalidValue.of("residual_multiplier", self.residual_multiplier, "1 with norm_place 'post'")
        if self.feed_forward == "none" and self.norm_place != "pre":
            raise InvalidValue.of("norm_place", self.norm_place, "'pre' where feed_forward is 'none'")
        if self.num_experts is not None and self.first_k_dense_replace > self.num_layers:
            allowed = f"a whole number from 0 to the {self.num_layers} layers"
            raise InvalidValue.of("first_k_dense_replace", self.first_k_dense_replace, allowed)
        if self.num_nextn_predict_layers >= self.max_seq_len:
            allowed = f"a whole number from 0, below the context {self.max_seq_len}"
            raise InvalidValue.of("num_nextn_predict_layers", self.num_nextn_predict_layers, allowed)
        object.__setattr__(self, "kv_sharing", checked_kv_sharing(self.kv_sharing, self.num_layers))

    def source_layer(self, layer: int) -> int:
        """The layer whose keys and values layer `layer` attends to: `layer` itself if it does not share."""
        return kv_source_layer_of(self.kv_sharing, layer, self.num_layers)
