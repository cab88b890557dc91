"""T5 and mT5 checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.checks import whole
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import FeedForwardKind

from attn_models.adapters.base import (
    Layout,
    StateDictAdapter,
    StoredTensor,
    needed,
    require_allowed,
    required_count,
)
from attn_models.encoder_decoder.config import T5Config
from attn_models.encoder_decoder.families import T5Family

if TYPE_CHECKING:
    from attn_models.encoder_decoder.t5 import T5

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
}
BUCKETS = {"buckets": "relative_attention_num_buckets", "max_distance": "relative_attention_max_distance"}
DEFAULTS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
CONTEXT = 512
"""The longest source and target in tokens, where the config gives none: T5 was trained with this length."""
FEED_FORWARDS: dict[str, FeedForwardKind] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-silu": "swiglu",
}
HF_FEED_FORWARDS = {ours: theirs for theirs, ours in reversed(FEED_FORWARDS.items())}
DENSE = {"gated-gelu": "gelu_new"}
"""The activation of a `feed_forward_proj` where it is not the last word of that name."""
SHARED = "shared.weight"
TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Other names of the embedding, which some checkpoints have beside or instead of `SHARED`."""
OUTSIDE = {
    "embedding.weight": SHARED,
    "unembedding.weight": "lm_head.weight",
    "encoder_norm.weight": "encoder.final_layer_norm.weight",
    "decoder_norm.weight": "decoder.final_layer_norm.weight",
}
ATTENTION = {"query": "q", "key": "k", "value": "v", "output": "o"}
FORWARD = {"gate": "wi_0", "up": "wi_1", "down": "wo"}


class T5Adapter(StateDictAdapter):
    """T5 and T5 v1.1 (Raffel et al. 2020, arXiv 1910.10683)."""

    model_type = "t5"
    architecture: ClassVar[str] = "T5ForConditionalGeneration"
    feed_forward: ClassVar[str] = "relu"
    shared_biases: ClassVar[bool] = True
    Config = T5Config
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }
    by_tensors = frozenset({"tie_word_embeddings"})
    # Cross-attention has no relative positions, but some checkpoints hold a table for them.
    derived_names = re.compile(r"^(en|de)coder\.embed_tokens\.|^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative")
    known_keys = frozenset(
        {
            *SIZES.values(),
            *BUCKETS.values(),
            *("num_decoder_layers", "layer_norm_epsilon", "feed_forward_proj", "dense_act_fn", "is_gated_act"),
            *("n_positions", "is_decoder", "tie_word_embeddings", "scale_decoder_outputs", "dropout_rate"),
        }
    )

    def from_hf_config(self, values: Mapping[str, Any]) -> T5Config:
        """Build the model's config from a T5Config."""
        # In transformers `is_decoder` is set on each stack; a model with it set as a whole would have two decoders.
        require_allowed(values, {"is_decoder": (False, None)})
        layers = values.get("num_decoder_layers")
        sizes: dict[str, Any] = {ours: needed(values, theirs) for ours, theirs in SIZES.items()}
        context = required_count(values, "n_positions", CONTEXT)
        options = {ours: required_count(values, theirs, DEFAULTS[theirs]) for ours, theirs in BUCKETS.items()}
        config = T5Config(
            **sizes,
            max_seq_len=context,
            max_encoder_len=context,
            num_decoder_layers=None if layers is None else required_count(values, "num_decoder_layers"),
            encoder_options=options,
            decoder_options=options,
            norm_eps=needed({"layer_norm_epsilon": 1e-6, **values}, "layer_norm_epsilon"),
            feed_forward=self.read_feed_forward(values),
            scale_output=self.scales_output(values),
            shared_biases=self.shared_biases,
        )
        T5Family().check(config)
        return config

    def read_feed_forward(self, values: Mapping[str, Any]) -> FeedForwardKind:
        """The name of the feed-forward; raises `InvalidValue` if other keys contradict it."""
        name = values.get("feed_forward_proj", self.feed_forward)
        require_allowed({"feed_forward_proj": name}, {"feed_forward_proj": tuple(FEED_FORWARDS)})
        activation = DENSE.get(name, name.rpartition("-")[2])
        parts = {"dense_act_fn": (activation,), "is_gated_act": (name.startswith("gated-"),)}
        require_allowed(values, parts)
        return FEED_FORWARDS[name]

    def scales_output(self, values: Mapping[str, Any]) -> bool:
        """Whether hidden states are multiplied by 1/√hidden_size before the unembedding.

        T5 does so; T5 v1.1, whose config sets `tie_word_embeddings` to false, does not.
        """
        flag = values.get("scale_decoder_outputs", values.get("tie_word_embeddings") is not False)
        if not isinstance(flag, bool):
            raise InvalidValue.of("scale_decoder_outputs", flag, "true or false")
        return flag

    def without_missing(self, config: T5Config, names: Iterable[str]) -> T5Config:
        """Untie the unembedding if the checkpoint has a tensor for it."""
        return dataclasses.replace(config, tie_word_embeddings=OUTSIDE["unembedding.weight"] not in set(names))

    def keys_of(self, config: T5Config) -> dict[str, Any]:
        """The keys of a T5Config, as transformers 5 reads it; raises `Incompatible` for what it cannot express."""
        names = (config.encoder, config.decoder, config.cross)
        plain = T5Config.encoder, T5Config.decoder, T5Config.cross
        if names != plain or config.encoder_options != config.decoder_options or config.cross_options:
            raise Incompatible(f"other mechanisms than {plain} cannot be expressed in a {self.model_type} config.json")
        if config.feed_forward not in HF_FEED_FORWARDS or config.max_seq_len != config.max_encoder_len:
            rule = f"feed_forward {config.feed_forward!r}, and contexts that differ, cannot be expressed in a"
            raise Incompatible(f"{rule} {self.model_type} config.json")
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
            "num_decoder_layers": config.decoder_layers,
            "n_positions": config.max_seq_len,
            **{theirs: whole(config.encoder_options.get(ours, DEFAULTS[theirs])) for ours, theirs in BUCKETS.items()},
            "layer_norm_epsilon": config.norm_eps,
            "feed_forward_proj": HF_FEED_FORWARDS[config.feed_forward],
            "tie_word_embeddings": config.scale_output,
        }

    def build(self, config: T5Config) -> T5:
        """Build a model with random weights."""
        from attn_models.encoder_decoder.t5 import T5

        return T5(config)

    def layout(self, config: T5Config) -> Layout:
        """The layout of this model's tensors, whose values depend on the size of a head."""
        return T5Layout(config.head_dim, gated=config.feed_forward in ("geglu_tanh", "swiglu"))

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """As `T5Layout` with heads of one element, whose query weights are not scaled."""
        return T5Layout(1, gated=True).tensor_mappings(parameters)


class Mt5Adapter(T5Adapter):
    """T5 v1.1 over many languages (Xue et al. 2021, arXiv 2010.11934)."""

    model_type = "mt5"
    architecture = "MT5ForConditionalGeneration"
    feed_forward = "gated-gelu"
    known_keys = T5Adapter.known_keys - {"scale_decoder_outputs"}

    def scales_output(self, values: Mapping[str, Any]) -> bool:  # noqa: ARG002 -- as transformers does
        """Always false."""
        return False


class Umt5Adapter(Mt5Adapter):
    """T5 v1.1 over many languages, with a table of position biases in every block (Chung et al. 2023, arXiv
    2304.09151).

    `tie_word_embeddings` says whether hidden states are multiplied before the unembedding, as in T5 and in training.
    transformers 5 multiplies them whatever the file says, which leaves the order of the logits as it is.
    """

    model_type = "umt5"
    architecture = "UMT5ForConditionalGeneration"
    shared_biases = False

    def scales_output(self, values: Mapping[str, Any]) -> bool:
        """Whether the file does not say that the unembedding is its own."""
        return T5Adapter.scales_output(self, {"tie_word_embeddings": values.get("tie_word_embeddings")})


class T5Layout(Layout):
    """T5's tensor names. Cross-attention query weights are multiplied by √head size: T5 does not divide by it."""

    model_type = T5Adapter.model_type
    derived_names = T5Adapter.derived_names
    copies: ClassVar[Mapping[str, str]] = dict.fromkeys(TABLES, SHARED)

    def __init__(self, head_dim: int, *, gated: bool) -> None:
        self.head_dim = head_dim
        self.forward = FORWARD if gated else FORWARD | {"up": "wi"}

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map `SHARED` to the embedding's name in the checkpoint, and every other name to itself."""
        found = {name: name for name in names}
        table = next((name for name in (SHARED, *TABLES) if name in found), None)
        return found if table is None else found | {SHARED: table}

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        return [self.stored_parameter(name) for name in parameters]

    def stored_parameter(self, name: str) -> StoredTensor:
        """The tensor of one parameter."""
        if name in OUTSIDE:
            return StoredTensor(OUTSIDE[name], (name,))
        stack, layer, part, *rest = name.split(".")
        last = 2 if stack == "decoder" else 1
        block = f"{stack}.block.{layer}.layer"
        match part:
            case "attention" if rest[0] == "modifiers":
                return StoredTensor(f"{block}.0.SelfAttention.relative_attention_bias.weight", (name,))
            case "attention":
                return StoredTensor(f"{block}.0.SelfAttention.{ATTENTION[rest[0]]}.weight", (name,))
            case "cross":
                scale = self.head_dim**0.5 if rest[0] == "query" else 1.0
                return StoredTensor(f"{block}.1.EncDecAttention.{ATTENTION[rest[0]]}.weight", (name,), scale=scale)
            case "feed_forward":
                return StoredTensor(f"{block}.{last}.DenseReluDense.{self.forward[rest[0]]}.weight", (name,))
        place = {"around_attention": 0, "around_cross": 1, "around_feed_forward": last}[part]
        return StoredTensor(f"{block}.{place}.layer_norm.weight", (name,))
