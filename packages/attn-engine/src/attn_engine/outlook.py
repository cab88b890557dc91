"""What comes after the rows of a step: logits, or the likeliest token alone where nothing else is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from attn_engine.sequence import Sequence as Growing
from attn_engine.step import Forward


class Outlook:
    """What comes after some rows of hidden [tokens, width], each the end of a sequence that generates.

    Places count these rows. Those of sequences that take the likeliest token as it is get no logits where the model
    can find that token without.
    """

    def __init__(self, forward: Forward, hidden: Tensor, ends: Sequence[tuple[Growing, int]]) -> None:
        plain = [place for place, (sequence, _) in enumerate(ends) if not sequence.sampling.needs_logits]
        tokens = forward.greedy_tokens(hidden, [ends[place][1] for place in plain]) if plain else None
        self.tokens = dict(zip(plain, tokens, strict=True)) if tokens is not None else {}
        """The likeliest tokens, -1 where there is none, of places that have no logits."""
        self.others = [place for place in range(len(ends)) if place not in self.tokens]
        """Places that have logits."""
        self._rows = {place: row for row, place in enumerate(self.others)}
        self._logits = forward.logits(hidden, [ends[place][1] for place in self.others]) if self.others else None

    def logits(self, places: Sequence[int]) -> Tensor:
        """Logits [places, vocabulary] of places that have them, at least one."""
        rows, known = [self._rows[place] for place in places], cast("Tensor", self._logits)
        return known if rows == list(range(len(known))) else known[rows]
