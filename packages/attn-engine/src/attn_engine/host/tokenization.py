"""Converts prompts of any form to token ids, and single tokens to text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.tokenizer import decoder_start_ids, encoder_input_ids
from attn_models.vision_language.prompts import ImagePrompt, ImagePrompts
from attn_schema import ChatMessage, Prompt, SamplingParams, ScoringParams, Token, Tokenization

from attn_engine.detokenizer import token_text


class PromptTokenizer:
    """Tokenizes prompts for one model.

    `encoder` says whether the model takes an encoder prompt; `images` encodes the conversations of a model that takes
    images.
    """

    def __init__(self, tokenizer: Tokenizer, *, encoder: bool = True, images: ImagePrompts | None = None) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._images = images
        self._text = token_text(tokenizer)

    @property
    def chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.settings.chat_template is not None

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt; with an encoder prompt, those that the decoder starts with.

        Raises `InvalidValue` for an empty prompt, for an encoder prompt if the model has no encoder, and for images if
        it takes none.
        """
        return self.with_images(prompt).token_ids

    def with_images(self, prompt: Prompt) -> ImagePrompt:
        """The token ids of a prompt with the pixels of its images; raises as `ids` does."""
        if self._images is not None and prompt.chat:
            values, images = chat_template_values(prompt), [message.images for message in prompt.chat]
            return self._images.encode(self._messages(prompt), images, values)
        for place, message in enumerate(prompt.chat or ()):
            if message.images:
                given, allowed = f"{len(message.images)} images", "none, as the model takes no images"
                raise InvalidValue.of(f"prompt.chat[{place}].images", given, allowed)
        ids = self._ids(prompt)
        if self._images is not None:
            self._images.require_none(ids)
        return ImagePrompt(ids)

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.encoder_prompt is not None:
            if not self._encoder:
                raise InvalidValue.of("prompt.encoder_prompt", "a prompt", "none, as the model has no encoder")
            if prompt.chat is None and not prompt.token_ids:
                text = self._tokenizer.encode(prompt.text or "", add_special=False)
                return decoder_start_ids(self._tokenizer, text)
        if prompt.token_ids is not None:
            ids = prompt.token_ids
        elif prompt.chat is not None:
            ids = tuple(self._tokenizer.encode_chat(self._messages(prompt), chat_template_values(prompt)))
        else:
            ids = tuple(self._tokenizer.encode(prompt.text or ""))
        if not ids:
            raise InvalidValue.of("prompt", "no tokens", "at least one token")
        return ids

    def encoder_ids(self, prompt: Prompt) -> tuple[int, ...] | None:
        """The token ids of the encoder prompt, None without one; raises `InvalidValue` for an empty text."""
        if prompt.encoder_prompt is None:
            return None
        if prompt.encoder_prompt.token_ids is not None:
            return prompt.encoder_prompt.token_ids
        return encoder_input_ids(self._tokenizer, prompt.encoder_prompt.text or "")

    def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens of a prompt and the text that was tokenised; raises as `ids` does."""
        ids = self.ids(prompt)
        text = prompt.text
        if text is None and prompt.chat is not None:
            text = self._rendered(prompt, prompt.chat)
        elif text is None:
            text = self._tokenizer.decode(ids, skip_special=False)
        unknown = self._unknown(prompt.text, ids)
        if prompt.encoder_prompt is not None and prompt.encoder_prompt.text:
            unknown += self._unknown(prompt.encoder_prompt.text, self.encoder_ids(prompt) or ())
        spelled = [(i, *self._text(i)) for i in ids]
        tokens = tuple(Token(id=i, text=said, raw=raw) for i, said, raw in spelled)
        return Tokenization(tokens=tokens, text=text, unknown=tuple(dict.fromkeys(unknown)))

    def _rendered(self, prompt: Prompt, chat: Sequence[ChatMessage]) -> str:
        messages, values = self._messages(prompt), chat_template_values(prompt)
        if self._images is None or not self._images.in_parts:
            return self._tokenizer.render_chat(messages, values)
        shown = self._images.with_places(messages, [message.images for message in chat])
        return self._tokenizer.render_chat(shown, values, images=True)

    def _unknown(self, text: str | None, ids: Sequence[int]) -> tuple[str, ...]:
        """The pieces of a text that the vocabulary cannot spell; only looked up if its `ids` have the unknown token."""
        return self._tokenizer.unknown(text) if text and self._tokenizer.unk_id in ids else ()

    def words(self, params: SamplingParams | ScoringParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each of `bad_words`, at the beginning of a text and after a space."""
        given = params.bad_words if isinstance(params, SamplingParams) else ()
        spelled = [word for text in given for word in (text, f" {text.lstrip()}")]
        return tuple({tuple(self._tokenizer.encode(word, add_special=False)) for word in spelled} - {()})

    def text(self, token: int) -> str:
        """The text of a token decoded by itself; U+FFFD for part of a character."""
        return self._text(token)[0]

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        if not prompt.chat:
            raise InvalidValue.of("prompt.chat", "no messages", "at least one")
        return [
            {"role": message.role, "content": message.content}
            | _object(message.extra, f"prompt.chat[{place}].extra", CHAT_MESSAGE_FIELDS)
            for place, message in enumerate(prompt.chat)
        ]


CHAT_MESSAGE_FIELDS = frozenset({"role", "images"})
"""The keys that are fields of a message, so its further keys cannot be these."""


def chat_template_values(prompt: Prompt) -> dict[str, Any]:
    """The further values for the chat template; raises `InvalidValue`."""
    return _object(prompt.chat_template_kwargs, "prompt.chat_template_kwargs", frozenset({"messages"}))


def _object(text: str, field: str, reserved: frozenset[str]) -> dict[str, Any]:
    """The JSON object in a text, empty for an empty text; raises `InvalidValue` for anything else."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or reserved & value.keys():
        but = f" without {', '.join(sorted(reserved))}"
        raise InvalidValue.of(field, text[:60], f"a JSON object{but}")
    return value
