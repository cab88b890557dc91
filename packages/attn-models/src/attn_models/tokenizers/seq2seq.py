"""What a model with a source reads and where it begins to write, in one tokenizer's terms."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.errors import InvalidValue, UserError

from attn_models.tokenizers.tokenizer import Tokenizer


def encoder_input_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tokens of a source and the token that ends it; raises `InvalidValue` for a text without any."""
    ids = tokenizer.encode(text, add_special=False)
    if not ids:
        raise InvalidValue.of("source", text, "at least one token")
    return (*ids, eos_id(tokenizer))


def decoder_start_ids(tokenizer: Tokenizer, ids: Sequence[int] = ()) -> tuple[int, ...]:
    """The token that begins a target, and what is given of it already."""
    if tokenizer.bos_id is None:
        raise UserError("the tokenizer has no token to begin with, which a model with a source needs")
    return (tokenizer.bos_id, *ids)


def eos_id(tokenizer: Tokenizer) -> int:
    """The token that ends sources and targets."""
    if not tokenizer.end_ids:
        raise UserError("the tokenizer has no token to end with, which a model with a source needs")
    return min(tokenizer.end_ids)
