"""The config of a Gemma 4 decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig
from msgspec import Meta


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """A decoder with embeddings of `hidden_size_per_layer_input` elements for every layer, 0 for none, in a table of
    `vocab_size_per_layer_input` tokens.

    Layers that share keys and values have feed-forwards of twice the width with `use_double_wide_mlp`. With
    `attention_k_eq_v` the keys and the values of full layers have one projection.
    """

    hidden_size_per_layer_input: Annotated[int, Meta(ge=0)] = 0
    vocab_size_per_layer_input: Annotated[int, Meta(ge=1)] = 262144
    use_double_wide_mlp: bool = False
    attention_k_eq_v: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            allowed = f"at least the vocab_size {self.vocab_size}"
            raise InvalidValue.of("vocab_size_per_layer_input", self.vocab_size_per_layer_input, allowed)
