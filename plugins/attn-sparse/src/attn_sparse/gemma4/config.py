"""The config of a Gemma 4 decoder."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.checks import require_whole
from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """A decoder with embeddings of `hidden_size_per_layer_input` elements for every layer, 0 for none, in a table of
    `vocab_size_per_layer_input` tokens.

    Layers that share keys and values have feed-forwards of twice the width with `use_double_wide_mlp`. With
    `attention_k_eq_v` the keys and the values of full layers have one projection.
    """

    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 262144
    use_double_wide_mlp: bool = False
    attention_k_eq_v: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("hidden_size_per_layer_input", self.hidden_size_per_layer_input, ge=0, unit="elements")
        require_whole("vocab_size_per_layer_input", self.vocab_size_per_layer_input, ge=1, unit="tokens")
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            allowed = f"at least the vocab_size {self.vocab_size}"
            raise InvalidValue.of("vocab_size_per_layer_input", self.vocab_size_per_layer_input, allowed)
