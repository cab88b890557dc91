"""Prompts of any form to token ids, and what these spell."""

from __future__ import annotations

from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.tokenizer import decoder_start_ids, encoder_input_ids

from attn_serve.answers import TokenizedAnswer
from attn_serve.requests import PromptInput
from attn_serve.spelling import Spelling


class Reader:
    """Reads prompts as one model's tokenizer does; `has_source` says whether the model reads a source."""

    def __init__(self, tokenizer: Tokenizer, *, has_source: bool = True) -> None:
        self._tokenizer = tokenizer
        self._has_source = has_source
        self.spelling = Spelling(tokenizer)

    @property
    def chat(self) -> bool:
        """Whether conversations can be read."""
        return self._tokenizer.settings.chat_template is not None

    def read(self, prompt: PromptInput) -> tuple[int, ...]:
        """The token ids; raises `InvalidValue` for an empty prompt or ids outside the vocabulary.

        With a source, text follows the token that begins what is written.
        """
        if prompt.source is not None and not self._has_source:
            raise InvalidValue.of("prompt.source", "a source", "none, the model has no source")
        if prompt.source is not None and prompt.chat is None and not prompt.tokens:
            return decoder_start_ids(self._tokenizer, self._tokenizer.encode(prompt.text or "", add_special=False))
        if prompt.tokens is not None:
            ids = prompt.tokens
        elif prompt.chat is not None:
            if not prompt.chat:
                raise InvalidValue.of("prompt.chat.messages", "no turns", "at least one")
            ids = tuple(self._tokenizer.encode_chat(_turns(prompt)))
        else:
            ids = tuple(self._tokenizer.encode(prompt.text or ""))
        if not ids:
            raise InvalidValue.of("prompt", "no tokens", "at least one token")
        return ids

    def source(self, prompt: PromptInput) -> tuple[int, ...] | None:
        """The token ids of the source, None without one; raises `InvalidValue` for an empty text."""
        if prompt.source is None:
            return None
        if prompt.source.tokens is not None:
            return prompt.source.tokens
        return encoder_input_ids(self._tokenizer, prompt.source.text or "")

    def tokenize(self, prompt: PromptInput) -> TokenizedAnswer:
        """The tokens of a prompt, and the text they spell; raises as `read` does."""
        ids = self.read(prompt)
        return TokenizedAnswer(tokens=tuple(self.spelling.token(i) for i in ids), text=self.text(prompt, ids))

    def text(self, prompt: PromptInput, ids: tuple[int, ...]) -> str:
        """The text that was tokenised: of a conversation what the template made of it, of ids their decoding."""
        if prompt.text is not None:
            return prompt.text
        if prompt.chat is not None:
            return self._tokenizer.render_chat(_turns(prompt))
        return self._tokenizer.decode(ids, skip_special=False)


def _turns(prompt: PromptInput) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in prompt.chat or ()]
