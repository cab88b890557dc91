"""The model families of decoders. Imports no torch until a model is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core import ModelFamily
from attn_core.checks import whole
from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.attention import layer_attentions

if TYPE_CHECKING:
    from attn_models.decoder.decoder import Decoder


class DecoderFamily(ModelFamily):
    """Language models of causal attention blocks."""

    name = "decoder"
    summary = "A causal language model over any mechanism, with the blocks of GPT-2, Llama and others."

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The config from plain values (fields of `DecoderConfig`); also raises the errors of `layer_attentions`."""
        config = DecoderConfig.from_plain(values)
        layer_attentions(config)
        return config

    def build(self, config: DecoderConfig) -> Decoder:
        """A new decoder with random weights."""
        from attn_models.decoder.decoder import Decoder

        return Decoder(config)


GPT = {"norm": "layer", "norm_place": "pre", "feed_forward": "gelu_tanh", "positions": "learned", "bias": True}
PATTERN = ("mechanism", "options", "pattern", "num_kv_heads")


class NamedDecoder(DecoderFamily):
    """A decoder from a paper: `usual` are its default fields of `DecoderConfig`, which may be overridden; `own` are the
    options of the family itself with their defaults."""

    usual: ClassVar[Mapping[str, Any]]
    own: ClassVar[Mapping[str, Any]]

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The config from plain values; raises `InvalidValue` for fields that choose mechanisms."""
        for name in PATTERN:
            if name in values:
                raise InvalidValue.of(name, values[name], f"nothing: {self.name} has its own; family 'decoder' has any")
        chosen = {name: values.get(name, default) for name, default in self.own.items()}
        others = {name: value for name, value in values.items() if name not in self.own}
        return super().configure({**self.usual, **others, "pattern": self.layers(chosen)})

    @abstractmethod
    def layers(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The mechanisms of the repeating pattern of layers."""


class Gpt3Family(NamedDecoder):
    """GPT-2's blocks, every other one with banded (sliding-window) attention (Brown et al. 2020,
    arXiv 2005.14165, section 2.1). The width of the band is not published: `band` is in tokens, the query included."""

    name = "gpt3"
    summary = "GPT-3: alternating dense and banded attention (Brown et al. 2020)."
    usual = GPT
    own: ClassVar[Mapping[str, Any]] = {"band": 256}

    def layers(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A dense layer, then a banded one."""
        banded = {"mechanism": "attn-variants/sliding_window", "options": {"window": own["band"]}}
        return [{"mechanism": "attn-variants/mha"}, banded]


class SparseTransformerFamily(NamedDecoder):
    """Alternating sparse patterns, two of which together reach every earlier token (Child et al. 2019,
    arXiv 1904.10509, section 4). `kind` "strided" is for periodic data, such as images with rows of `stride`
    pixels; "fixed" for text: blocks of `stride` tokens, the last `summaries` of which all later tokens attend to."""

    name = "sparse_transformer"
    summary = "The Sparse Transformer: alternating strided or fixed patterns, n √n pairs (Child et al. 2019)."
    usual = GPT | {"feed_forward": "gelu"}
    own: ClassVar[Mapping[str, Any]] = {"kind": "fixed", "stride": 128, "summaries": 8}

    def layers(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The local pattern, then the strided or fixed one."""
        if own["kind"] not in ("strided", "fixed"):
            raise InvalidValue.of("kind", own["kind"], "'strided' or 'fixed'")
        fixed = {"block": own["stride"], "summaries": own["summaries"]}
        sizes = fixed if own["kind"] == "fixed" else {"stride": own["stride"]}
        return [
            {"mechanism": f"attn-variants/{own['kind']}", "options": sizes | {"pattern": part}}
            for part in ("local", "column")
        ]


class RetNetFamily(NamedDecoder):
    """Retention in place of attention, values twice as wide as keys and feed-forwards twice as wide as the model: 12
    width² parameters per block (Sun et al. 2023, arXiv 2307.08621, section 2.1). `scale_base` is xPos's, or None."""

    name = "retnet_lm"
    summary = "RetNet: retention, whose state has a fixed size (Sun et al. 2023)."
    usual: ClassVar[Mapping[str, Any]] = {
        "norm": "layer",
        "norm_place": "pre",
        "feed_forward": "gelu",
        "positions": "none",
    }
    own: ClassVar[Mapping[str, Any]] = {"scale_base": None}

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Like `NamedDecoder.configure`; `intermediate_size` defaults to twice the width."""
        width = whole(values.get("hidden_size"))
        return super().configure(({"intermediate_size": 2 * width} if isinstance(width, int) else {}) | dict(values))

    def layers(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Retention in every layer."""
        return [{"mechanism": "attn-variants/retnet", "options": {"scale_base": own["scale_base"]}}]


def named_decoders() -> list[ModelFamily]:
    """One instance of each decoder family named after a paper."""
    return [Gpt3Family(), SparseTransformerFamily(), RetNetFamily()]
