"""A tokenizer must give back what it was given; tested before a converted model is kept."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import CheckpointInvalid

from attn_models.tokenizers import Tokenizer

SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading blanks,\ttabs\n\nand lines  ",
    "café naïve Ångström",
    "你好，世界。日本語とハングル 한국어",
    "😀👍🏽👩‍👩‍👧",
    "In 2024, 3.14159 and 1,000,000",
    "def f(x): return {'a': x ** 2}  # code",
)


def check_round_trip(tokenizer: Tokenizer, path: Path) -> None:
    """Raises CheckpointInvalid, naming `path`, when a sample or a special token does not come back whole."""
    specials = [tokenizer.token(special) for special in sorted(tokenizer.special_ids)]
    for sample in (*SAMPLES, "".join(specials), *(f"{special}a" for special in specials)):
        ids = tokenizer.encode(sample, add_special=False)
        back = tokenizer.decode(ids, skip_special=False)
        if back != sample:
            raise CheckpointInvalid.of(path, f"its tokenizer turns {sample!r} into {back!r}")
    for special in specials:
        if len(tokenizer.encode(special, add_special=False)) != 1:
            raise CheckpointInvalid.of(path, f"its tokenizer cuts the special token {special!r} into pieces")
