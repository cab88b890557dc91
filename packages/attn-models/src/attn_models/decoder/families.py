"""The model families of decoders. Imports no torch until a model is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core import ModelFamily
from attn_core.errors import InvalidValue

from attn_models.attention import layer_attentions
from attn_models.decoder.config import DecoderConfig
from attn_models.plain_config import whole

if TYPE_CHECKING:
    from attn_models.decoder.decoder import Decoder


class DecoderFamily(ModelFamily):
    """Language models of causal attention blocks."""

    name = "decoder"
    summary = "A causal language model over any mechanism: GPT-2 and Llama shapes, and what lies between."

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The config of plain values (fields of `DecoderConfig`), asked of the mechanisms it names too."""
        config = DecoderConfig.from_plain(values)
        layer_attentions(config)
        return config

    def build(self, config: DecoderConfig) -> Decoder:
        """A fresh decoder with random weights."""
        from attn_models.decoder.decoder import Decoder

        return Decoder(config)


GPT = {"norm": "layer", "norm_place": "pre", "feed_forward": "gelu_tanh", "positions": "learned", "bias": True}
PATTERN = ("mechanism", "options", "pattern", "num_kv_heads")


class NamedDecoder(DecoderFamily):
    """`usual` are the paper's fields, which may be changed; `own` are the family's, with their defaults."""

    usual: ClassVar[Mapping[str, Any]]
    own: ClassVar[Mapping[str, Any]]

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of plain values; raises `InvalidValue` for a field that names mechanisms: the paper does."""
        for name in PATTERN:
            if name in values:
                raise InvalidValue.of(name, values[name], f"nothing: {self.name} has its own; family 'decoder' has any")
        chosen = {name: values.get(name, default) for name, default in self.own.items()}
        others = {name: value for name, value in values.items() if name not in self.own}
        return super().configure({**self.usual, **others, "pattern": self.layers(chosen)})

    @abstractmethod
    def layers(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The mechanisms that the layers have in turn."""


class Gpt3Family(NamedDecoder):
    """GPT-2's blocks, every other one with a band in place of all that came before (Brown et al. 2020,
    arXiv 2005.14165, section 2.1). How wide the band was is not published: `band` counts the query's own token."""

    name = "gpt3"
    summary = "GPT-3: layers that see everything and layers that see a band, in turn (Brown et al. 2020)."
    usual = GPT
    own: ClassVar[Mapping[str, Any]] = {"band": 256}

    def layers(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Dense, then banded."""
        banded = {"mechanism": "sliding_window", "options": {"window": own["band"]}}
        return [{"mechanism": "mha"}, banded]


class SparseTransformerFamily(NamedDecoder):
    """Blocks whose patterns come in turn, so that two of them reach every earlier token (Child et al. 2019,
    arXiv 1904.10509, section 4). `kind` "strided" is for what has a period, such as rows of pixels of the length
    `stride`; "fixed" for text: blocks of `stride` tokens, of which all later ones see the last `summaries`."""

    name = "sparse_transformer"
    summary = "The Sparse Transformer: strided or fixed patterns in turn, n √n pairs (Child et al. 2019)."
    usual = GPT | {"feed_forward": "gelu"}
    own: ClassVar[Mapping[str, Any]] = {"kind": "fixed", "stride": 128, "summaries": 8}

    def layers(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What is near, then what connects."""
        if own["kind"] not in ("strided", "fixed"):
            raise InvalidValue.of("kind", own["kind"], "'strided' or 'fixed'")
        fixed = {"block": own["stride"], "summaries": own["summaries"]}
        sizes = fixed if own["kind"] == "fixed" else {"stride": own["stride"]}
        return [{"mechanism": own["kind"], "options": sizes | {"pattern": part}} for part in ("local", "column")]


class RetNetFamily(NamedDecoder):
    """Retention in the place of attention, values twice as wide as keys and feed-forwards twice as wide as the model:
    12 width² weights a block (Sun et al. 2023, arXiv 2307.08621, section 2.1). `scale_base` is of xPos, or None."""

    name = "retnet_lm"
    summary = "RetNet: retention, whose memory of a text has a fixed size (Sun et al. 2023)."
    usual: ClassVar[Mapping[str, Any]] = {
        "norm": "layer",
        "norm_place": "pre",
        "feed_forward": "gelu",
        "positions": "none",
    }
    own: ClassVar[Mapping[str, Any]] = {"scale_base": None}

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """As `NamedDecoder.configure`; `intermediate_size` is twice the width unless it is given."""
        width = whole(values.get("hidden_size"))
        return super().configure(({"intermediate_size": 2 * width} if isinstance(width, int) else {}) | dict(values))

    def layers(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Retention in all."""
        return [{"mechanism": "retnet", "options": {"scale_base": own["scale_base"]}}]


def named_decoders() -> list[ModelFamily]:
    """One of each."""
    return [Gpt3Family(), SparseTransformerFamily(), RetNetFamily()]
