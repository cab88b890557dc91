"""Longformer checkpoints, as Hugging Face's transformers keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import Incompatible, InvalidValue

from attn_models.decoder.config import AttentionChoice
from attn_models.encoder.block import attention_of
from attn_models.encoder.config import EncoderConfig
from attn_models.families.bert import BLOCK, READS, BertDoor
from attn_models.families.door import counted

MECHANISM = "longformer"
GLOBAL = "global_positions"
"""A key of ours, which transformers keeps and does not read: there, global tokens are an argument of every call."""


class LongformerDoor(BertDoor):
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
        first, rows = counted(values, "pad_token_id", 1, least=0) + 1, counted(values, "max_position_embeddings")
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
        return tuple(AttentionChoice(mechanism=MECHANISM, options=options | {"window": each}) for each in windows)

    def described_attentions(self, config: EncoderConfig) -> dict[str, Any]:
        """The windows, and the global positions, which must be the same in every layer."""
        windows, places = [], set()
        for layer in range(config.layers):
            attention = attention_of(config, layer)
            if attention.mechanism.name != MECHANISM:
                self.refuse(attention.mechanism.name)
            chosen: Any = attention.config
            windows.append(chosen.window)
            places.add(chosen.global_positions)
        if len(places) > 1 or any(window % 2 or not window for window in windows):
            message = "odd windows, and global positions that differ between layers, cannot be said in a longformer"
            raise Incompatible(f"{message} config.json")
        return {"attention_window": windows, GLOBAL: list(places.pop())}
