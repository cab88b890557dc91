"""BERT, BigBird and Longformer checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attn_core import AttentionSpec, Full, Heads
from attn_core.errors import Incompatible, InvalidValue

from attn_models.adapters.base import (
    ACTIVATIONS,
    THEIR_ACTIVATIONS,
    EncoderAdapter,
    Stored,
    needed,
    require_allowed,
    required_count,
)
from attn_models.decoder.config import AttentionChoice
from attn_models.encoder.config import EncoderConfig, attention_of
from attn_models.encoder.encoder import Encoder

SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
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
    """Post-norm blocks that see everything (Devlin et al. 2019, arXiv 1810.04805)."""

    model_type = "bert"
    prefix = "bert."
    architecture: ClassVar[str] = "BertModel"
    activation: ClassVar[str] = "gelu"
    reads = READS
    block: ClassVar[Mapping[str, str]] = BLOCK
    said: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": tuple(ACTIVATIONS),
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "add_cross_attention": (False, None),
    }

    def configure(self, values: Mapping[str, Any]) -> EncoderConfig:
        """The encoder of a BertConfig."""
        require_allowed(values, self.said)
        sizes = {ours: needed(values, theirs) for ours, theirs in SIZES.items()}
        return EncoderConfig(
            **sizes,
            **self.places(values),
            pattern=self.attentions(values, sizes["layers"]),
            type_vocab_size=values.get("type_vocab_size", 2),
            feed_forward=ACTIVATIONS[values.get("hidden_act", self.activation)],
            norm_eps=values.get("layer_norm_eps", 1e-12),
        )

    def describe(self, config: EncoderConfig) -> dict[str, Any]:
        """A config.json of this family."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
            **self.described_places(config),
            **self.described_attentions(config),
            "type_vocab_size": config.type_vocab_size,
            "hidden_act": THEIR_ACTIVATIONS[config.feed_forward],
            "layer_norm_eps": config.norm_eps,
        }

    def build(self, config: EncoderConfig) -> Encoder:
        """A fresh encoder."""
        return Encoder(config)

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """One tensor for each parameter."""
        return [Stored(self._their_name(name), (name,)) for name in parameters]

    def places(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """How the config numbers positions."""
        return {"context": needed(values, "max_position_embeddings")}

    def described_places(self, config: EncoderConfig) -> dict[str, Any]:
        """What their config.json says of `places`."""
        if config.positions != "every":
            raise Incompatible(f"positions {config.positions!r} cannot be said in a {self.model_type} config.json")
        return {"max_position_embeddings": config.context}

    def attentions(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:  # noqa: ARG002
        """The mechanisms of the layers."""
        return (AttentionChoice(mechanism="mha"),)

    def described_attentions(self, config: EncoderConfig) -> dict[str, Any]:
        """What their config.json says of `attentions`: nothing, but raises `Incompatible` for others.

        Decided by what the mechanisms say they compute, not by their names.
        """
        size = config.width // config.heads
        plain = AttentionSpec(
            heads=Heads(query=config.heads, key_value=config.heads, key_size=size, value_size=size), mask=Full()
        )
        for layer in range(config.layers):
            attention = attention_of(config, layer)
            if attention.mechanism.spec(attention.config) != plain:
                self.refuse(attention.mechanism.name)
        return {}

    def refuse(self, mechanism: str) -> None:
        """Raises `Incompatible` for a mechanism that their config.json has no words for."""
        message = f"mechanism {mechanism!r} cannot be said in a {self.model_type} config.json"
        raise Incompatible(message, mechanism=mechanism)

    def _their_name(self, ours: str) -> str:
        module, _, leaf = ours.rpartition(".")
        if module in OUTSIDE:
            return f"{OUTSIDE[module]}.{leaf}"
        _, layer, part = module.split(".", 2)
        return f"encoder.layer.{layer}.{self.block[part]}.{leaf}"


BIGBIRD = "bigbird"
OWN = {"attention_type", "block_size", "num_random_blocks", "use_bias", "rescale_embeddings"}


class BigBirdAdapter(BertAdapter):
    """BERT whose blocks of tokens see neighbours, the first, the last, and random ones (Zaheer et al. 2020,
    arXiv 2007.14062).

    Random blocks are not part of a checkpoint: ours differ from theirs, as theirs do between training and evaluation
    (there all of them are block 0, which is then counted again).
    """

    model_type = "big_bird"
    architecture = "BigBirdModel"
    activation = "gelu_new"
    reads = READS | OWN
    said: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **BertAdapter.said,
        "attention_type": ("block_sparse", "original_full"),
        "use_bias": (True,),
        "rescale_embeddings": (False,),
    }

    def attentions(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:
        """Blocks in every layer, or all tokens."""
        if values.get("attention_type") == "original_full":
            return super().attentions(values, layers)
        options = {"block": values.get("block_size", 64), "random": values.get("num_random_blocks", 3)}
        return (AttentionChoice(mechanism=BIGBIRD, options=options),)

    def described_attentions(self, config: EncoderConfig) -> dict[str, Any]:
        """The blocks, which must be the same in every layer."""
        if set(config.mechanisms) != {BIGBIRD}:
            return super().described_attentions(config) | {"attention_type": "original_full"}
        chosen: list[Any] = [attention_of(config, layer).config for layer in range(config.layers)]
        if len({(one.block, one.random) for one in chosen}) > 1 or any(one.seed is not None for one in chosen):
            raise Incompatible("blocks that differ between layers, and seeds, cannot be said in a big_bird config.json")
        return {
            "attention_type": "block_sparse",
            "block_size": chosen[0].block,
            "num_random_blocks": chosen[0].random,
        }


LONGFORMER = "longformer"
GLOBAL = "global_positions"
"""A key of ours, which transformers keeps and does not read: there, global tokens are an argument of every call."""


class LongformerAdapter(BertAdapter):
    """RoBERTa with a window in every layer, and other projections for global tokens (Beltagy et al. 2020,
    arXiv 2004.05150).

    A config.json without `global_positions` has no global tokens, as their model without a `global_attention_mask`.
    """

    model_type = "longformer"
    prefix = "longformer."
    architecture = "LongformerModel"
    reads = READS | {"attention_window", "pad_token_id", "onnx_export", GLOBAL}
    block = BLOCK | {f"attention.inner.{name}": f"attention.self.{name}_global" for name in ("query", "key", "value")}

    def places(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Real tokens are numbered from behind the padding token's number, as RoBERTa's."""
        first, rows = (
            required_count(values, "pad_token_id", 1, least=0) + 1,
            required_count(values, "max_position_embeddings"),
        )
        if rows <= first:
            raise InvalidValue.of("max_position_embeddings", rows, f"more than {first}: positions begin there")
        return {"context": rows - first, "positions": "real", "first_position": first}

    def described_places(self, config: EncoderConfig) -> dict[str, Any]:
        """All rows of the table, and the padding token before the first that is used."""
        if config.positions != "real":
            raise Incompatible(f"positions {config.positions!r} cannot be said in a longformer config.json")
        first = config.first_position
        return {"max_position_embeddings": first + config.context, "pad_token_id": first - 1}

    def attentions(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:
        """A window for each layer, or one for all."""
        given = values.get("attention_window", 512)
        windows = given if isinstance(given, list) else [given]
        even = all(isinstance(window, int) and window > 0 and window % 2 == 0 for window in windows)
        if (isinstance(given, list) and len(given) != layers) or not even:
            raise InvalidValue.of("attention_window", given, f"an even number from 2, or {layers} of them")
        options = {GLOBAL: values.get(GLOBAL) or ()}
        return tuple(AttentionChoice(mechanism=LONGFORMER, options=options | {"window": each}) for each in windows)

    def described_attentions(self, config: EncoderConfig) -> dict[str, Any]:
        """The windows, and the global positions, which must be the same in every layer."""
        windows, places = [], set()
        for layer in range(config.layers):
            attention = attention_of(config, layer)
            if attention.mechanism.name != LONGFORMER:
                self.refuse(attention.mechanism.name)
            chosen: Any = attention.config
            windows.append(chosen.window)
            places.add(chosen.global_positions)
        if len(places) > 1 or any(window % 2 or not window for window in windows):
            message = "odd windows, and global positions that differ between layers, cannot be said in a longformer"
            raise Incompatible(f"{message} config.json")
        return {"attention_window": windows, GLOBAL: list(places.pop())}
