"""Pairs of source and target as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import byte_pair_tokenizer, word_tokenizer
from attn_models.tokenizers.tokenizer import decoder_start_ids, encoder_input_ids, eos_id

from attn_train.loop.lessons import Lessons, TokenMaterial
from attn_train.spec import TrainingSpec

TextPair = tuple[str, str]
"""A source and its target."""
TokenPair = tuple[tuple[int, ...], tuple[int, ...]]
"""Source tokens with the one that ends them, and target tokens from the one that begins to the one that ends them."""

WORD, BYTE_PAIRS = "word", "byte_pairs"
VOCABULARY = 8000
"""Tokens of byte pairs where no number is given, as "byte_pairs:4000" gives one."""


@dataclass(frozen=True, eq=False)
class PairTokens(TokenMaterial):
    """Pairs to train on, pairs kept for validation with their texts, and the tokenizer of both sides."""

    training: Sequence[TokenPair]
    validation: Sequence[TokenPair]
    texts: Sequence[TextPair]
    tokenizer: Tokenizer

    @property
    def sizes(self) -> str:
        """How many."""
        return f"{len(self.training)} training and {len(self.validation)} validation pairs"

    def lessons(self, spec: TrainingSpec) -> Lessons:
        """Batches of pairs that are about equally long."""
        from attn_train.loop.pair_lessons import PairLessons

        return PairLessons(self, spec)


def tokenise_pairs(
    training: Sequence[TextPair], validation: Sequence[TextPair], *, tokenizer: str, longest: tuple[int, int]
) -> PairTokens:
    """The tokens of pairs; those longer than `longest` source and target tokens are left out of both.

    `tokenizer` is "word", "byte_pairs" or "byte_pairs:N", learned from the pairs to train on, or a folder with a
    tokenizer.json. Raises `InvalidValue` for another word, or where no pair is left.
    """
    made = learned_tokenizer(tokenizer, [text for pair in training for text in pair])
    kept = [pair for pair in token_pairs(training, made) if fits(pair, longest)]
    if not kept:
        raise InvalidValue.of("data", f"{len(training)} pairs", f"at least one pair of at most {longest} tokens")
    both = zip(token_pairs(validation, made), validation, strict=True)
    held = [(pair, texts) for pair, texts in both if fits(pair, longest)]
    return PairTokens(
        training=kept, validation=[pair for pair, _ in held], texts=[texts for _, texts in held], tokenizer=made
    )


def is_byte_pairs(tokenizer: str) -> bool:
    """Whether it is byte pairs that are learned."""
    return tokenizer.partition(":")[0] == BYTE_PAIRS


def is_learned(tokenizer: str) -> bool:
    """Whether it is learned from the data, and not read from a folder."""
    return tokenizer == WORD or is_byte_pairs(tokenizer)


def learned_tokenizer(name: str, texts: Sequence[str]) -> Tokenizer:
    """The tokenizer that a specification names."""
    kind, _, size = name.partition(":")
    if kind == WORD and not size:
        return word_tokenizer(texts)
    if kind == BYTE_PAIRS:
        if size and not (size.isascii() and size.isdecimal()):
            raise InvalidValue.of("data.tokenizer", name, f"{BYTE_PAIRS}:N with a whole number")
        return byte_pair_tokenizer(texts, int(size or VOCABULARY))
    return Tokenizer.from_folder(name)


def token_pairs(pairs: Sequence[TextPair], tokenizer: Tokenizer) -> list[TokenPair]:
    """The tokens of each pair; raises `InvalidValue` for an empty source."""
    sources = (encoder_input_ids(tokenizer, source) for source, _ in pairs)
    targets = tokenizer.encode_batch([target for _, target in pairs], add_special=False)
    end = eos_id(tokenizer)
    return [(source, (*decoder_start_ids(tokenizer, ids), end)) for source, ids in zip(sources, targets, strict=True)]


def fits(pair: TokenPair, longest: tuple[int, int]) -> bool:
    """Whether a model with these contexts can be trained on it."""
    return len(pair[0]) <= longest[0] and len(pair[1]) - 1 <= longest[1]
