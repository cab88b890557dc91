"""The tagged sentences that a specification names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer

from attn_train.loop.padded import PADDED
from attn_train.loop.pairs import learned_tokenizer
from attn_train.loop.tags import TaggedSentences, TaggedTokens
from attn_train.spec import DataSpec
from attn_train.treebank import Sentence, sentences_of, treebank_files

UNTAGGED = "_"
"""What the format says of a tag that nobody gave; such words are not learned from."""


def load_tags(spec: DataSpec, context: int, tokenizer: str) -> TaggedSentences:
    """The tokens of the sentences; those longer than `context` are left out.

    Words begin with a space, so that byte pairs of words and of texts are the same; the tokens of a word have its
    depth. Raises `InvalidValue` for what cannot be read, for heads that are no tree, and where nothing is left.
    """
    training, validation = (sentences_of(paths) for paths in treebank_files(Path(spec.path or "")))
    if not validation:
        held = int(len(training) * spec.validation)
        training, validation = training[: len(training) - held], training[len(training) - held :]
    made = learned_tokenizer(tokenizer, [f" {' '.join(sentence.words)}" for sentence in training])
    names = sorted({tag for sentence in training for tag in sentence.tags} - {UNTAGGED})
    kept = tagged(training, made, names, context)
    if not kept or not names:
        allowed = f"at least one with tags and at most {context} tokens"
        raise InvalidValue.of("data", f"{len(training)} sentences", allowed)
    return TaggedSentences(kept, tagged(validation, made, names, context), names, made)


def tagged(
    sentences: Sequence[Sentence], tokenizer: Tokenizer, names: Sequence[str], context: int
) -> list[TaggedTokens]:
    """The tokens of sentences that fit into the context and have a tag of those `names`; other tags are left out."""
    numbers = {name: place for place, name in enumerate(names)}
    known: dict[str, list[int]] = {}
    found = []
    for sentence in sentences:
        new = [word for word in dict.fromkeys(sentence.words) if word not in known]
        known |= dict(zip(new, tokenizer.encode_batch([f" {word}" for word in new], add_special=False), strict=True))
        pieces = [known[word] for word in sentence.words]
        tokens = tuple(token for piece in pieces for token in piece)
        classes = tuple(
            number
            for piece, tag in zip(pieces, sentence.tags, strict=True)
            for number in [numbers.get(tag, PADDED), *[PADDED] * (len(piece) - 1)][: len(piece)]
        )
        depths = tuple(d for piece, d in zip(pieces, sentence.depths, strict=True) for d in [d] * len(piece))
        if len(tokens) <= context and any(number != PADDED for number in classes):
            found.append(TaggedTokens(tokens, classes, depths))
    return found
