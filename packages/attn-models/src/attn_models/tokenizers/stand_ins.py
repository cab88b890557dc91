"""Characters that stand for control tokens which people spelled, while a template is rendered.

A chat template writes control tokens such as <|im_end|> around what people say. Whoever spells one
herself would end her turn and begin another's, so what she wrote reaches the model as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from attn_core.errors import InvalidValue

PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Unicode's private plane: no meaning of their own, left alone by what templates do to text."""


@dataclass(frozen=True)
class StandIns:
    """`spelled[c]` is the control token that the character c stands for; `messages` hold c in its place."""

    messages: list[dict[str, str]]
    spelled: Mapping[str, str]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, str]], control: Sequence[str]) -> StandIns:
        """The messages with every control token spelled in a role or a content replaced by one character.

        Raises InvalidValue when the messages leave too few characters of the private plane unused.
        """
        texts = [text for message in messages for text in message.values()]
        found = [token for token in control if token and any(token in text for text in texts)]
        stands_for = dict(zip(found, _unused(texts, len(found)), strict=True))
        pattern = re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))
        replaced = [
            {key: pattern.sub(lambda match: stands_for[match[0]], text) for key, text in message.items()}
            if found
            else dict(message)
            for message in messages
        ]
        return cls(replaced, {character: token for token, character in stands_for.items()})

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The rendered text in order, cut at the stand-ins: (piece, whether a person spelled a control token)."""
        if not self.spelled:
            yield text, False
            return
        for piece in re.split(f"([{''.join(self.spelled)}])", text):
            if piece:
                yield self.spelled.get(piece, piece), piece in self.spelled


def _unused(texts: Sequence[str], count: int) -> list[str]:
    used = set().union(*texts) if count else set()
    unused = list(islice((chr(code) for code in PRIVATE_USE if chr(code) not in used), count))
    if len(unused) < count:
        raise InvalidValue.of("messages", "nearly all characters of Unicode's private plane", "text that uses fewer")
    return unused
