"""Structured output: computes with llguidance which tokens a JSON schema, regular expression or grammar allows next."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from attn_core.errors import InvalidValue, UserError
from attn_core.models import Tokenizer
from attn_schema import StructuredOutput
from numpy.typing import NDArray
from torch import Tensor

CACHED_GRAMMARS = 256
"""The number of compiled grammars that are cached for later requests."""
LISTING = re.compile(r"\n\s*\d+ \| ")
"""The beginning of the lines that llguidance quotes behind an error."""
UNSPELLABLE = "no token of the vocabulary can continue the completion"


@runtime_checkable
class ByteTokenizer(Protocol):
    """A tokenizer whose texts are the bytes of their tokens, which it gives."""

    @property
    def joins_tokens(self) -> bool:
        """Whether they are; else no grammar can say which token may come next."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token."""
        ...

    def token(self, token_id: int) -> str:
        """The token as it is spelled in the vocabulary."""
        ...

    def encode_within(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly those of a text, without special tokens or a space in front."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which are not text."""
        ...


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = lru_cache(1)(self._read_vocabulary)
        self._compile = lru_cache(CACHED_GRAMMARS)(self._compile_uncached)

    def check(self, wanted: StructuredOutput) -> None:
        """Raises `InvalidValue` for a grammar that cannot be compiled or followed, `MissingPackage` without llguidance.

        May take seconds, during which other threads can run; `matcher` is fast afterwards.
        """
        self._compile(wanted)

    def matcher(self, wanted: StructuredOutput) -> GrammarMatcher:
        """A matcher at the start of the grammar; raises as `check` does."""
        compiled, first = self._compile(wanted)
        return GrammarMatcher(compiled.deep_copy(), self._tokenizer.vocab_size if self._tokenizer else 0, first)

    def _compile_uncached(self, wanted: StructuredOutput) -> tuple[Any, bytes]:
        """A matcher at the start of the grammar, and the bias bytes of the tokens that may come first.

        These take long to compute for a large grammar, so they are computed here once, where no other request waits.
        """
        from llguidance import LLMatcher

        vocabulary = self._vocabulary()
        compilers: dict[str, Callable[[str], str]] = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
        }
        try:
            matcher = LLMatcher(vocabulary, compilers[wanted.kind](wanted.grammar), log_level=0)
        except ValueError as error:
            raise _compile_error(wanted, error) from error
        if matcher.is_error():
            raise _compile_error(wanted, matcher.get_error())
        first = bytes(matcher.compute_logit_bias())
        token = next((place for place, bias in enumerate(first) if bias), None)
        if token is not None:
            # llguidance reports some limits only at the first token.
            beginning = matcher.deep_copy()
            beginning.consume_token(token)
            if beginning.is_error():
                raise _compile_error(wanted, beginning.get_error())
        return matcher, first

    def _read_vocabulary(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer = self._tokenizer
        if tokenizer is None or not isinstance(tokenizer, ByteTokenizer) or not tokenizer.joins_tokens:
            allowed = "none, as texts are not the bytes of their tokens with the engine's tokenizer"
            raise InvalidValue.of("structured_output", "a grammar", allowed)
        return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)))


class GrammarMatcher:
    """Matches one completion, token by token, against its grammar.

    `biases` has one byte per token, 0 for tokens that may not come next; None if it has not been computed yet.
    """

    def __init__(self, matcher: Any, vocab_size: int, biases: bytes | None = None) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._biases = biases

    @property
    def complete(self) -> bool:
        """Whether the grammar allows no further token."""
        return bool(self._matcher.is_stopped())

    @property
    def allows_nothing(self) -> bool:
        """Whether no token of the vocabulary may come next, not even the end of sequence."""
        return not any(self._allowed()[: self._vocab_size])

    @property
    def may_end(self) -> bool:
        """Whether the accepted tokens match the whole grammar, so that the completion may end."""
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str:
        """Why matching had to stop, such as a limit of llguidance; empty otherwise."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def accept(self, token: int) -> None:
        """Advance the matcher by the chosen token."""
        self._biases = None
        self._matcher.consume_token(token)

    def accept_checked(self, token: int) -> None:
        """Like `accept`; raises `UserError` if matching has to stop."""
        self.accept(token)
        if self.error:
            raise UserError(f"structured_output: grammar matching failed: {self.error}")

    def copy(self) -> GrammarMatcher:
        """A copy in the same state."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, self._biases)

    def allowed(self, vocab_size: int, device: torch.device) -> Tensor:
        """Which tokens may come next [vocab_size], bool, with an end-of-sequence token if the completion may end."""
        return torch.from_numpy(self.allowed_bytes(vocab_size)).to(device) != 0

    def allowed_bytes(self, vocab_size: int) -> NDArray[np.uint8]:
        """Like `allowed`, as an array [vocab_size], uint8, on the host: 0 for tokens that may not come next."""
        allowed = np.zeros(vocab_size, dtype=np.uint8)
        biases = np.frombuffer(self._allowed(), dtype=np.uint8)[:vocab_size]
        allowed[: len(biases)] = biases
        return allowed

    def _allowed(self) -> bytes:
        if self._biases is None:
            self._biases = bytes(self._matcher.compute_logit_bias())
        return self._biases


class _Vocabulary:
    """A tokenizer in the form that llguidance takes; one without an end-of-sequence token gets an additional one."""

    def __init__(self, tokenizer: Any) -> None:
        end_ids = sorted(tokenizer.end_ids)
        size = tokenizer.vocab_size
        # No text of a grammar produces a special token, only its id: `<[id]>` in Lark.
        special = tokenizer.special_ids
        self.tokens = [(tokenizer.token(i).encode() if i in special else tokenizer.token_bytes(i)) for i in range(size)]
        self.tokens += [] if end_ids else [b"<end>"]
        self.eos_token_id = end_ids[0] if end_ids else size
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.special_ids | set(end_ids)) or [size]
        self._encode = tokenizer.encode_within

    def __call__(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._encode(text)
        return ids


def _compile_error(wanted: StructuredOutput, cause: object) -> InvalidValue:
    message = f"structured_output: this {wanted.kind} cannot be compiled: {_one_line(cause)}"
    return InvalidValue(message, field="structured_output")


def _one_line(cause: object) -> str:
    # The grammar itself, which the library lists behind the error, is as long as all schemas of a request together.
    message = " ".join(LISTING.split(str(cause), maxsplit=1)[0].split())
    # llguidance panics if the tokenizer cannot encode the text that the grammar forces next.
    return UNSPELLABLE if message.startswith("panic:") else message[:300]
