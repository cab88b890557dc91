"""What a completion must match, as a request asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import InvalidValue

KINDS = ("json_schema", "regex", "lark")
LONGEST = 2**18


@dataclass(frozen=True)
class Grammar:
    """The language of a completion: `kind` is "json_schema", "regex" or "lark", and `text` is written in it.

    JSON schemas and Lark grammars as far as llguidance supports them; a regular expression matches the whole
    completion. Raises `InvalidValue` for another kind, an empty text, or one of more than 2^18 characters.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidValue.of("grammar.kind", self.kind, ", ".join(KINDS))
        if not 0 < len(self.text) <= LONGEST:
            raise InvalidValue.of("grammar", f"{len(self.text)} characters", f"from 1 to {LONGEST} characters")
