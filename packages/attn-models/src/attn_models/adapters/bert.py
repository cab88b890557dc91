"""BERT, RoBERTa, BigBird and Longformer checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import AttentionChoice, FeedForwardKind

from attn_models.adapters.base import (
    ACTIVATIONS,
    ATTENTION,
    EncoderAdapter,
    StoredTensor,
    inexpressible,
    needed,
    require_allowed,
    required_count,
)
from attn_models.encoder.config import EncoderConfig, attention_of

if TYPE_CHECKING:
    from attn_models.encoder.encoder import Encoder

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
OUTSIDE = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
BLOCK = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
LM_HEAD = {
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.bias": "lm_head.bias",
}
OUT_PROJ = {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
"""RoBERTa's names of heads."""
READS = frozenset(
    {
        *SIZES.values(),
        "max_position_embeddings",
        "type_vocab_size",
        "hidden_act",
        "layer_norm_eps",
        "position_embedding_type",
        "is_decoder",
        "add_cross_attention",
        "tie_word_embeddings",
    }
)


class BertAdapter(EncoderAdapter):
    """BERT: post-norm blocks with full attention (Devlin et al. 2019, arXiv 1810.04805)."""

    model_type = "bert"
    prefix = "bert."
    head_names: ClassVar[Mapping[str, str]] = {"pooler": "bert.pooler"}
    architecture: ClassVar[str] = "BertModel"
    activation: ClassVar[str] = "gelu"
    known_keys = READS
    outside: ClassVar[Mapping[str, str]] = OUTSIDE
    block: ClassVar[Mapping[str, str]] = BLOCK
    layers: ClassVar[str] = "encoder.layer"
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Tensors of a layer that hold several parameters, one after the other."""
    activations: ClassVar[Mapping[str, FeedForwardKind]] = ACTIVATIONS
    untyped: ClassVar[bool] = False
    """Whether encoders without token types can be described."""
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "add_cross_attention": (False, None),
    }

    def from_hf_config(self, values: Mapping[str, Any]) -> EncoderConfig:
        """Build the encoder config from a BertConfig."""
        require_allowed(values, {**self.allowed_values, "hidden_act": tuple(self.activations)})
        sizes = {ours: needed(values, theirs) for ours, theirs in SIZES.items()}
        usual: dict[str, Any] = {
            "pattern": self.attention_choices(values, sizes["num_layers"]),
            "type_vocab_size": values.get("type_vocab_size", 2),
            "feed_forward": self.activations[values.get("hidden_act", self.activation)],
            "norm_eps": values.get("layer_norm_eps", 1e-12),
        }
        return EncoderConfig(**sizes | usual | self.positions_of(values) | self.fields_of(values))

    def to_hf_config(self, config: EncoderConfig) -> dict[str, Any]:
        """The config.json of an encoder; raises `Incompatible` for what it cannot express.

        The result is read back, so that a field which it does not say is refused by name.
        """
        if not config.type_vocab_size and not self.untyped:
            raise inexpressible({"type_vocab_size": 0}, self.model_type)
        kinds = {ours: theirs for theirs, ours in reversed(list(self.activations.items()))}
        if config.feed_forward not in kinds:
            raise inexpressible({"feed_forward": config.feed_forward}, self.model_type)
        values = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
            **self.hf_positions(config),
            **self.hf_attention(config),
            "type_vocab_size": config.type_vocab_size,
            "hidden_act": kinds[config.feed_forward],
            "layer_norm_eps": config.norm_eps,
            **self.keys_of(config),
        }
        require_said(config, self.from_hf_config(values), self.model_type)
        return values

    def build(self, config: EncoderConfig) -> Encoder:
        """Build an encoder with random weights."""
        from attn_models.encoder.encoder import Encoder

        return Encoder(config)

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, but for those that are joined."""
        found, joints = list[StoredTensor](), {part: name for name, parts in self.joined.items() for part in parts}
        for name in parameters:
            place = name.rpartition(".")[0]
            module = place.split(".", 2)[-1] if place.startswith("blocks.") else ""
            together = self.joined.get(joints.get(module, ""), (module,))
            if module == together[0] or not module:
                whole = tuple(name.replace(module, part) for part in together) if module else (name,)
                found.append(StoredTensor(self.hf_name(name), whole))
        return found

    def fields_of(self, values: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Fields of `EncoderConfig` that BERT's config.json does not say."""
        return {}

    def keys_of(self, config: EncoderConfig) -> dict[str, Any]:  # noqa: ARG002
        """The keys of config.json that BERT's has not."""
        return {}

    def positions_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `EncoderConfig` for positions."""
        return {"max_seq_len": needed(values, "max_position_embeddings")}

    def hf_positions(self, config: EncoderConfig) -> dict[str, Any]:
        """The keys of config.json for positions; raises `Incompatible` for other kinds."""
        if config.positions != "every":
            raise Incompatible(f"positions {config.positions!r} cannot be expressed in a {self.model_type} config.json")
        return {"max_position_embeddings": config.max_seq_len}

    def attention_choices(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:  # noqa: ARG002
        """The mechanisms of the layers."""
        return (AttentionChoice(mechanism="attn-variants/mha"),)

    def hf_attention(self, config: EncoderConfig) -> dict[str, Any]:  # noqa: ARG002
        """The keys of config.json for the layers' attention: none."""
        return {}

    def hf_name(self, ours: str) -> str:
        """The checkpoint's name of a model parameter."""
        module, _, leaf = ours.rpartition(".")
        if module in self.outside:
            return f"{self.outside[module]}.{leaf}"
        _, layer, part = module.split(".", 2)
        names = {**self.block} | {part: name for name, parts in self.joined.items() for part in parts}
        return f"{self.place(layer)}.{names[part]}.{leaf}"

    def place(self, block: str) -> str:
        """The checkpoint's name of a block."""
        return f"{self.layers}.{block}"


def require_said(config: EncoderConfig, said: EncoderConfig, layout: str) -> None:
    """Raises `Incompatible` for the fields of a config that a config.json leaves out or says otherwise.

    Of attention specs are compared, so that any mechanism with the same spec is accepted.
    """
    skipped = (*ATTENTION, "attention_dropout", *(() if said.head_dim else ("head_dim",)))
    changed = {name: value for name, value in config.plain().items() if getattr(said, name) != getattr(config, name)}
    if fields := {name: value for name, value in changed.items() if name not in skipped}:
        raise inexpressible(fields, layout)
    for layer in range(config.num_layers):
        own, other = attention_of(config, layer), attention_of(said, layer)
        if own.mechanism.spec(own.config) != other.mechanism.spec(other.config):
            name = own.mechanism.name
            message = f"mechanism {name!r} cannot be expressed in a {layout} config.json"
            raise Incompatible(message, mechanism=name)


BIGBIRD = "attn-variants/bigbird"
OWN = {"attention_type", "block_size", "num_random_blocks", "use_bias", "rescale_embeddings"}


class BigBirdAdapter(BertAdapter):
    """BERT with attention to neighbouring, global and random blocks (Zaheer et al. 2020, arXiv 2007.14062).

    Random blocks are not part of a checkpoint: attn chooses other ones than transformers, whose choices also differ
    between training and evaluation (in evaluation they are all block 0, which is then counted twice).
    """

    model_type = "big_bird"
    pooled_activation = None
    architecture = "BigBirdModel"
    activation = "gelu_new"
    known_keys = READS | OWN
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **BertAdapter.allowed_values,
        "attention_type": ("block_sparse", "original_full"),
        "use_bias": (True,),
        "rescale_embeddings": (False,),
    }

    def attention_choices(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:
        """Block-sparse attention in every layer, or full attention, as `attention_type` says."""
        if values.get("attention_type") == "original_full":
            return super().attention_choices(values, layers)
        options = {"block": values.get("block_size", 64), "random": values.get("num_random_blocks", 3)}
        return (AttentionChoice(mechanism=BIGBIRD, options=options),)

    def hf_attention(self, config: EncoderConfig) -> dict[str, Any]:
        """The keys for block-sparse attention, whose options must be the same in every layer, or for full attention."""
        attentions = [attention_of(config, layer) for layer in range(config.num_layers)]
        if {attention.full_name for attention in attentions} != {BIGBIRD}:
            return super().hf_attention(config) | {"attention_type": "original_full"}
        chosen: list[Any] = [attention.config for attention in attentions]
        whole = all(one.seed is None and set(one.parts) == {"window", "global", "random"} for one in chosen)
        if len({(one.block, one.random) for one in chosen}) > 1 or not whole:
            raise Incompatible(
                "blocks that differ between layers, seeds, and parts left out have no key in a big_bird config.json"
            )
        return {
            "attention_type": "block_sparse",
            "block_size": chosen[0].block,
            "num_random_blocks": chosen[0].random,
        }


class RobertaAdapter(BertAdapter):
    """BERT with positions of real tokens only, from above the padding id (Liu et al. 2019, arXiv 1907.11692)."""

    model_type = "roberta"
    prefix = "roberta."
    head_names = LM_HEAD | OUT_PROJ
    masked_activation = "gelu"
    architecture = "RobertaModel"
    known_keys = READS | {"pad_token_id"}

    def positions_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields for positions, which are numbered from one above the padding token's id."""
        first, rows = (
            required_count(values, "pad_token_id", 1, least=0) + 1,
            required_count(values, "max_position_embeddings"),
        )
        if rows <= first:
            raise InvalidValue.of("max_position_embeddings", rows, f"more than {first}, the first position")
        return {"max_seq_len": rows - first, "positions": "real", "first_position": first}

    def hf_positions(self, config: EncoderConfig) -> dict[str, Any]:
        """The number of rows of the position table, and the padding token's id."""
        if config.positions != "real":
            raise Incompatible(f"positions {config.positions!r} cannot be expressed in a {self.model_type} config.json")
        first = config.first_position
        return {"max_position_embeddings": first + config.max_seq_len, "pad_token_id": first - 1}


class XlmRobertaAdapter(RobertaAdapter):
    """RoBERTa over many languages (Conneau et al. 2020, arXiv 1911.02116)."""

    model_type = "xlm-roberta"
    architecture = "XLMRobertaModel"


class CamembertAdapter(RobertaAdapter):
    """RoBERTa in French (Martin et al. 2020, arXiv 1911.03894)."""

    model_type = "camembert"
    architecture = "CamembertModel"


LONGFORMER = "attn-variants/longformer"
GLOBAL = "global_positions"
"""A key of attn's, which transformers keeps but does not read: there, global tokens are an argument of every call."""


class LongformerAdapter(RobertaAdapter):
    """RoBERTa with windows, and separate projections for global tokens (Beltagy et al. 2020, arXiv 2004.05150).

    A config.json without `global_positions` has no global tokens, like transformers' model without a
    `global_attention_mask`.
    """

    model_type = "longformer"
    pooled_activation = None
    prefix = "longformer."
    architecture = "LongformerModel"
    known_keys = READS | {"attention_window", "pad_token_id", "onnx_export", GLOBAL}
    block = BLOCK | {f"attention.inner.{name}": f"attention.self.{name}_global" for name in ("query", "key", "value")}

    def attention_choices(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:
        """The window of each layer, or one window for all."""
        given = values.get("attention_window", 512)
        windows = given if isinstance(given, list) else [given]
        even = all(isinstance(window, int) and window > 0 and window % 2 == 0 for window in windows)
        if (isinstance(given, list) and len(given) != layers) or not even:
            raise InvalidValue.of("attention_window", given, f"an even number from 2, or {layers} of them")
        options = {GLOBAL: values.get(GLOBAL) or ()}
        return tuple(AttentionChoice(mechanism=LONGFORMER, options=options | {"window": each}) for each in windows)

    def hf_attention(self, config: EncoderConfig) -> dict[str, Any]:
        """The windows of the layers, and the global positions, which must be the same in every layer."""
        windows, places = [], set()
        for layer in range(config.num_layers):
            attention = attention_of(config, layer)
            if attention.full_name != LONGFORMER:
                return {}  # refused by the comparison of specs
            chosen: Any = attention.config
            if set(chosen.dilations) != {1}:
                raise Incompatible(f"dilations {chosen.dilations} cannot be expressed in a longformer config.json")
            windows.append(chosen.window)
            places.add(chosen.global_positions)
        if len(places) > 1 or any(window % 2 or not window for window in windows):
            message = (
                "odd windows, and global positions that differ between layers, cannot be expressed in a longformer"
            )
            raise Incompatible(f"{message} config.json")
        return {"attention_window": windows, GLOBAL: list(places.pop())}
