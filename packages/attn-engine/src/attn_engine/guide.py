"""Which tokens a grammar allows next; the grammars themselves are llguidance's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from attn_core.errors import InvalidValue, MissingPackage, UserError
from attn_core.models import Tokenizer
from torch import Tensor

from attn_engine.grammar import Grammar

KEPT = 256
"""Compiled grammars that are kept for requests that ask for the same again."""


@runtime_checkable
class SpellingTokenizer(Protocol):
    """A tokenizer that knows the bytes of each token."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which no text contains."""
        ...


class Guides:
    """Compiles grammars for the vocabulary of one tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = lru_cache(1)(self._read_vocabulary)
        self._compile = lru_cache(KEPT)(self._compile_anew)

    def check(self, grammar: Grammar) -> None:
        """Raises `InvalidValue` for a grammar that cannot be compiled, and `MissingPackage` without llguidance."""
        self._compile(grammar)

    def guide(self, grammar: Grammar) -> Guide:
        """A guide at the start of the grammar; raises as `check` does."""
        return Guide(self._compile(grammar).deep_copy())

    def _compile_anew(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        vocabulary = self._vocabulary()
        compilers: dict[str, Callable[[str], str]] = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
        }
        try:
            matcher = LLMatcher(vocabulary, compilers[grammar.kind](grammar.text), log_level=0)
        except ValueError as error:
            raise _refusal(grammar, error) from error
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        return matcher

    def _read_vocabulary(self) -> Any:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise MissingPackage.of("attn-engine[grammar]", "a grammar") from error
        tokenizer = self._tokenizer
        if tokenizer is None or not isinstance(tokenizer, SpellingTokenizer):
            raise InvalidValue.of("grammar", "a grammar", "none: the engine's tokenizer does not spell single tokens")
        return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)))


class Guide:
    """Follows one completion through its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further, such as a limit that was hit; empty while it can."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def advance(self, token: int) -> None:
        """Note the token that was chosen."""
        self._matcher.consume_token(token)

    def follow(self, token: int) -> None:
        """As `advance`; raises `UserError` where the grammar cannot be followed any further."""
        self.advance(token)
        if self.error:
            raise UserError(f"the grammar cannot be followed any further: {self.error}")

    def copy(self) -> Guide:
        """Another guide at the same place."""
        return Guide(self._matcher.deep_copy())

    def allowed(self, vocabulary: int, device: torch.device) -> Tensor:
        """Which tokens may come next [vocabulary], bool; an end token where the completion may end here."""
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        words = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[:vocabulary]
        allowed[: len(words)] = words != 0
        return allowed.to(device)


class _Vocabulary:
    """A tokenizer as llguidance wants to see it, with a token more that ends where the tokenizer has none that does."""

    def __init__(self, tokenizer: Any) -> None:
        ends = sorted(tokenizer.end_ids)
        size = tokenizer.vocabulary
        # Bytes that no text holds: what is no text, a grammar must not produce.
        self.tokens = [b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in range(size)]
        self.tokens += [] if ends else [b"<end>"]
        self.eos_token_id = ends[0] if ends else size
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.special_ids | set(ends)) or [size]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._encode(text)
        return ids


def _refusal(grammar: Grammar, said: object) -> InvalidValue:
    return InvalidValue(f"grammar: this {grammar.kind} cannot be compiled: {_one_line(said)}", field="grammar")


def _one_line(said: object) -> str:
    return " ".join(str(said).split())[:300]
