"""Text to token ids and back, for any tokenizer.json; encoder inputs and decoder starts of encoder-decoder models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers
from attn_core.errors import CheckpointInvalid, InvalidValue, UserError
from numpy.typing import NDArray
from tokenizers import models

from attn_models.tokenizers.applied import apply_config
from attn_models.tokenizers.chat import (
    ControlTokenPlaceholders,
    Message,
    check_messages,
    content_parts,
    ended_after,
    render_template,
)
from attn_models.tokenizers.sentencepiece import sentencepiece_backend
from attn_models.tokenizers.settings import (
    CONFIG_NAME,
    TokenizerSettings,
    read_settings,
    read_vocabulary_settings,
    settings_files,
)
from attn_models.tokenizers.vocabulary import ByteDecoder, CharacterTable, LibraryErrors, within_rows
from attn_models.weights.checkpoint_folder import VOCABULARY_NAME, VOCABULARY_NAMES, vocabulary_file

VOCABULARY_LIMIT = 64 << 20
NO_VALUES: Mapping[str, Any] = MappingProxyType({})
TEST_CONVERSATIONS = (
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool", "user"),
)
"""Test conversations, as orders of roles that templates accept, for finding the tokens that a template writes."""
MARK = re.compile(r"<.+>|\[.+\]")
DECODING_ERRORS = LibraryErrors(
    lambda said: InvalidValue.of("token_ids", "ids", f"ids that the tokenizer can decode: {said}")
)


class Tokenizer:
    """A tokenizer of the `tokenizers` library with its special tokens and chat template.

    Never pads or truncates, whatever its file specifies. Thread-safe. `read` are the files that the settings were read
    from, which `files` returns as they are. `remarks` say what was decided where these files contradict each other.
    `rows` is the number of rows of the model's embedding; those without a token have an empty text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: TokenizerSettings,
        read: Mapping[str, Any] | None = None,
        remarks: tuple[str, ...] = (),
        rows: int = 0,
    ) -> None:
        self._read = read
        self.remarks = remarks
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.settings = settings
        decoder = repr(backend.decoder)
        self._byte_level = "ByteLevel" in decoder
        self._byte_fallback = "ByteFallback" in decoder
        self._spaced = any(kind in decoder for kind in ("WordPiece", "BPEDecoder", "CTC"))
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(place for place, token in added.items() if token.special)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._size = max(vocabulary.values()) + 1 if vocabulary else 0
        self._rows = max(self._size, rows)
        without = set(range(self._rows)).difference(vocabulary.values())
        self._byte_texts = ByteDecoder.of(backend, self._special | without)
        self._spelled_bytes = ByteDecoder(backend, ())
        single = isinstance(backend.model, models.WordLevel) and all(len(token) == 1 for token in vocabulary)
        self._characters = CharacterTable(vocabulary) if single and vocabulary else None

    @classmethod
    def from_folder(cls, folder: str | Path, rows: int | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint folder: its tokenizer.json, or else its SentencePiece file, with what the files
        beside it say (`apply_config`, `read_settings`), for a model whose embedding has `rows` rows.

        Raises `CheckpointInvalid`, naming the file, if it is missing or malformed, and as `within_rows`; for a
        SentencePiece file also what `sentencepiece_backend` raises.
        """
        path, given = vocabulary_file(Path(folder)), read_vocabulary_settings(Path(folder))
        if path is None:
            names = ", ".join(VOCABULARY_NAMES)
            raise CheckpointInvalid.of(Path(folder) / VOCABULARY_NAME, f"is missing; a tokenizer is read from {names}")
        if path.stat().st_size > VOCABULARY_LIMIT:
            raise CheckpointInvalid.of(path, f"more than {VOCABULARY_LIMIT} bytes")
        settings, read = read_settings(Path(folder)), settings_files(Path(folder))
        if path.name == VOCABULARY_NAME:
            with LibraryErrors(lambda said: CheckpointInvalid.of(path, f"not a tokenizer: {said}")):
                backend = tokenizers.Tokenizer.from_file(str(path))
        else:
            backend, named = sentencepiece_backend(path, given)
            spelled: dict[str, Any] = {**named, **settings.special_tokens}
            settings, read = replace(settings, **spelled), {}
        remarks = apply_config(backend, given, Path(folder) / CONFIG_NAME)
        if rows is not None:
            backend, left_out = within_rows(backend, rows, path)
            remarks += left_out
        return cls(backend, settings, read, remarks, rows or 0)

    @property
    def vocab_size(self) -> int:
        """The number of rows that an embedding needs: one more than the largest id."""
        return self._size

    @property
    def characters(self) -> str | None:
        """The characters of the vocabulary in the order of their ids; None unless all tokens are single characters."""
        if self._characters is None:
            return None
        return "".join(self.token(place) for place in range(self._size))

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text, None if the model has none."""
        return self._id_of(self.settings.bos_token)

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token, None if the model has none."""
        return self._id_of(self.settings.pad_token)

    @property
    def unk_id(self) -> int | None:
        """The id of the unknown token, for text that the vocabulary cannot encode; None if the model has none."""
        return self._id_of(self.settings.unk_token)

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token, for a token to be predicted; None if the model has none."""
        return self._id_of(self.settings.mask_token)

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a generation; empty for models without an end token."""
        end = self._id_of(self.settings.eos_token)
        return frozenset(self.settings.eos_ids) | (frozenset() if end is None else {end})

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens, which `decode` leaves out by default."""
        return self._special

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of `text`. Special tokens that are spelled in the text become their ids.

        With `add_special`, the special tokens that the tokenizer's post-processor defines are added, such as a token at
        the beginning. Raises `InvalidValue` for text with lone surrogates or that the vocabulary cannot encode.
        """
        return self.encode_batch([text], add_special=add_special)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """The ids of each text, computed in parallel. Raises the errors of `encode`."""
        for text in texts:
            _require_unicode(text)
        if self._characters is not None:
            return [self._characters.encode(text).tolist() for text in texts]
        batch = list(texts)
        given = batch[0][:60] if len(batch) == 1 else "a batch"
        with LibraryErrors(lambda said: InvalidValue.of("text", given, f"text that the vocabulary can encode: {said}")):
            return [encoding.ids for encoding in self.backend.encode_batch_fast(batch, add_special_tokens=add_special)]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of raw texts, to which nothing is added, and in which a special token that is spelled is ordinary
        text, as no text can end a document or begin an answer. Raises the errors of `encode`."""
        special = [] if self._characters is not None else [self.token(place) for place in self._special]
        if not any(token in text for text in texts for token in special):
            return self.encode_batch(texts, add_special=False)
        return [self._encode_plain(text) for text in texts]

    def encode_first(self, text: str, count: int) -> list[int]:
        """The ids of the beginning of `text`, at most `count` with the special tokens that are added."""
        with LibraryErrors(lambda said: InvalidValue.of("count", count, f"room for the special tokens: {said}")):
            encoding = self.backend.encode(text, add_special_tokens=False)
            encoding.truncate(count - self.backend.num_special_tokens_to_add(is_pair=False))
            ids: list[int] = self.backend.post_process(encoding).ids
        return ids

    def unknown(self, text: str) -> tuple[str, ...]:
        """The pieces of `text` that become the unknown token, each once; empty for vocabularies that cover all text."""
        unknown = self.unk_id
        if unknown is None or self._characters is not None:
            return ()
        with DECODING_ERRORS:
            encoding = self.backend.encode(text, add_special_tokens=False)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return tuple(dict.fromkeys(text[start:end] for token_id, (start, end) in places if token_id == unknown))

    def encode_corpus(self, text: str) -> NDArray[np.int32]:
        """The ids of a long text [tokens], int32: those of `encode`, a hundred times faster for characters."""
        _require_unicode(text)
        if self._characters is not None:
            return self._characters.encode(text)
        return np.asarray(self.encode(text), dtype=np.int32)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not valid UTF-8, such as part of a character, become U+FFFD.

        Raises `InvalidValue` for an id outside the vocabulary.
        """
        if skip_special and self._byte_texts is not None:
            with suppress(KeyError):
                return self._byte_texts.text(ids)
        self._require_ids(ids)
        with DECODING_ERRORS:
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token(self, token_id: int) -> str:
        """The token as it is spelled in the vocabulary. Raises `InvalidValue` for an id outside the vocabulary."""
        self._require_ids([token_id])
        spelled: str | None = self.backend.id_to_token(token_id)
        return "" if spelled is None else spelled

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds within a text, which alone may not be valid UTF-8.

        Raises `InvalidValue` for an id outside the vocabulary.
        """
        spelled = self.token(token_id)
        if self.joins_bytes(token_id):
            return bytes([int(spelled[3:5], 16)])
        if self._byte_level and spelled:
            return self._spelled_bytes[token_id]
        if token_id in self._special or self._before is None:
            return spelled.encode("utf-8")
        # The decoder alone knows what becomes of blanks, also of those in added tokens.
        before, length = self._before
        return self.decode([before, token_id])[length:].encode("utf-8")

    @cached_property
    def _before(self) -> tuple[int, int] | None:
        """A token with text, after which others are decoded as within a text, and the length of its text."""
        ordinary = sorted(set(self.backend.get_vocab(with_added_tokens=True).values()) - self._special)
        texts = ((i, self.decode([i])) for i in ordinary if not self.joins_bytes(i))
        return next(((i, len(text)) for i, text in texts if text.strip()), None)

    def token_text(self, token_id: int) -> str:
        """The text of a token within a text, with the space that it begins with; U+FFFD for part of a character."""
        if self._spaced:
            return self.decode([token_id], skip_special=False)
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @property
    def text_bytes(self) -> Mapping[int, bytes] | None:
        """The bytes that each token adds to a text, if texts are these bytes as UTF-8 (byte-level BPE), else None."""
        return self._byte_texts

    @property
    def joins_tokens(self) -> bool:
        """Whether a text is the bytes of its tokens (`token_bytes`); WordPiece, for one, writes spaces between them."""
        return not self._spaced

    def joins_bytes(self, token_id: int) -> bool:
        """Whether the token is a byte such as <0xE2>, which byte fallback decodes with the bytes next to it."""
        return self._byte_fallback and token_id in self._byte_ids

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        pieces = (self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(found for found in pieces if found is not None)

    def encode_within(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly those of `text`, as they occur within a text: without special tokens, and
        without the space that some tokenizers put in front. Raises `InvalidValue` if the vocabulary cannot spell it."""
        wanted = text.encode("utf-8")
        plain = self.encode(text, add_special=False)
        if b"".join(map(self.token_bytes, plain)) == wanted:
            return plain
        # After a line break nothing is put in front.
        start = self.encode("\n", add_special=False)
        within = self.encode(f"\n{text}", add_special=False)
        if within[: len(start)] == start and b"".join(map(self.token_bytes, within[len(start) :])) == wanted:
            return within[len(start) :]
        return self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest tokens, from left to right, that spell `text`."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids_of_bytes), None)
            if end is None:
                raise InvalidValue.of("text", repr(text[start : start + 20]), "text that the vocabulary can spell")
            ids.append(self._ids_of_bytes[text[start:end]])
            start = end
        return ids

    @cached_property
    def _ids_of_bytes(self) -> dict[bytes, int]:
        ordinary = set(self.backend.get_vocab(with_added_tokens=True).values()) - self._special
        return {self.token_bytes(token_id): token_id for token_id in sorted(ordinary, reverse=True)}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids_of_bytes), default=0)

    def id(self, token: str) -> int | None:
        """The id of the token spelled `token` in the vocabulary, None if there is none."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def render_chat(
        self,
        messages: Sequence[Message],
        values: Mapping[str, Any] = NO_VALUES,
        *,
        add_generation_prompt: bool = True,
        images: bool = False,
    ) -> str:
        """Render a conversation with the model's chat template, by default up to the start of the assistant's answer.

        `messages` are mappings with a `role`, a `content` and any further keys; `values` are further variables of the
        template, such as `tools`. With `continue_final_message` the text ends with the last
        content. With `images`, for vision-language models, the template gets contents as lists of parts
        (`content_parts`). It runs sandboxed in a separate process, for at most a second of processor time.

        Raises `UserError` if the model has no template, or if the template raises an error.
        """
        template = self.settings.chat_template
        if template is None:
            raise UserError("this model has no chat template; send a plain prompt")
        checked = check_messages(messages)
        if images:
            checked = [message | {"content": content_parts(message["content"] or "")} for message in checked]
        goes_on = bool(values.get("continue_final_message"))
        # As transformers has it: templates ask whether these are None.
        given = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt and not goes_on}
        given |= self.settings.special_tokens | dict(values)
        text = render_template(template, given | {"messages": checked})
        return ended_after(text, messages[-1].get("content") or "") if goes_on else text

    def encode_chat(
        self,
        messages: Sequence[Message],
        values: Mapping[str, Any] = NO_VALUES,
        *,
        add_generation_prompt: bool = True,
        images: bool = False,
    ) -> list[int]:
        """The ids of a conversation; the arguments are those of `render_chat`, the errors those of it and `encode`.

        Only the template can produce control tokens and turn markers: one that is spelled in a message or another value
        is encoded as ordinary text.
        """
        said = self.with_placeholders(messages, values)
        text = self.render_chat(*said.values, add_generation_prompt=add_generation_prompt, images=images)
        return self.encode_rendered(said, text)

    def with_placeholders(
        self, messages: Sequence[Message], values: Mapping[str, Any] = NO_VALUES
    ) -> ControlTokenPlaceholders:
        """The messages and further values with a placeholder for each control token that is spelled in them."""
        return ControlTokenPlaceholders.of([check_messages(messages), dict(values)], self._control_tokens_in)

    def encode_rendered(self, said: ControlTokenPlaceholders, text: str, *, within: bool = False) -> list[int]:
        """The ids of `text`, all or a part of what the template renders of `said`; `within`, if text precedes it."""
        # The template itself writes the token that begins a text.
        ids: list[int] = []
        for piece, spelled in said.pieces(text):
            if spelled:
                ids += self._encode_plain(piece)
            elif within and not ids:
                ids += self.encode_within(piece)
            else:
                ids += self.encode(piece, add_special=False)
        return ids

    def files(self) -> dict[str, bytes | dict[str, Any]]:
        """The contents of the tokenizer's files by name, for the argument `extra_files` of `write_folder`."""
        made = {CONFIG_NAME: self.settings.to_config()}
        return {VOCABULARY_NAME: self.backend.to_str(pretty=False).encode("utf-8"), **(self._read or made)}

    def config_ids(self) -> dict[str, int | list[int]]:
        """The ids of special tokens as config.json has them, where transformers reads what ends a generation."""
        ids = {"bos_token_id": self.bos_id, "pad_token_id": self.pad_id, "eos_token_id": sorted(self.end_ids)}
        ids |= {"decoder_start_token_id": self.settings.decoder_start_id}
        ids |= {"forced_bos_token_id": self.settings.forced_bos_id}
        ends = ids["eos_token_id"]
        if isinstance(ends, list):
            ids["eos_token_id"] = (ends[0] if ends else None) if len(ends) < 2 else ends
        return {name: value for name, value in ids.items() if value is not None}

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of `text`, with control tokens encoded like ordinary words."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def _control_tokens_in(self, text: str) -> list[str]:
        """The parts of `text` that would become special tokens or turn markers, as they are spelled there.

        Turn markers that are not special tokens are also found in text that the tokenizer normalizes to them, such as
        full-width characters.
        """
        control = self._special | self.turn_marker_ids
        found = [token for token in map(self.token, control) if token in text]
        if self.backend.normalizer is None or not self.turn_marker_ids:
            return found
        encoding = self.backend.encode(text, add_special_tokens=False)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return found + [text[start:end] for token_id, (start, end) in places if token_id in control]

    @cached_property
    def turn_marker_ids(self) -> frozenset[int]:
        """The ids of added tokens that are not special but mark turns in the chat template, such as ChatML's in some
        models: those in the rendered `TEST_CONVERSATIONS`, or in the template itself if it accepts none of them; and
        those in brackets that the template spells, which mark calls and thoughts."""
        template = self.settings.chat_template
        candidates = self._added - self._special
        if template is None or not candidates:
            return frozenset()
        written = ""
        for roles in TEST_CONVERSATIONS:
            with suppress(UserError):  # a template may refuse an order of roles
                written += self.render_chat([{"role": role, "content": role} for role in roles])
        spelled = {place: self.token(place) for place in candidates}
        return frozenset(
            place
            for place, token in spelled.items()
            if token and (token in (written or template) or (MARK.fullmatch(token) and token in template))
        )

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        # `encode_special_tokens` is a setting of the whole backend, which other threads use too: hence a copy.
        copied = json.loads(self.backend.to_str())
        for token in copied["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self.turn_marker_ids
        plain = tokenizers.Tokenizer.from_str(json.dumps(copied))
        plain.encode_special_tokens = True
        return plain

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.id(token)

    def _require_ids(self, ids: Sequence[int]) -> None:
        if not len(ids) or (min(ids) >= 0 and max(ids) < self._rows):
            return
        place, token_id = next((p, i) for p, i in enumerate(ids) if not 0 <= i < self._rows)
        raise InvalidValue.of(f"token_ids[{place}]", token_id, f"0 to {self._rows - 1}")


def _require_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValue.of("text", text[error.start : error.end], "Unicode without lone surrogates") from error


def encoder_input_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The token ids of a source, with the tokens that the tokenizer's post-processor puts around a text and with the
    end token; raises `InvalidValue` for a text without tokens, `UserError` without an end token."""
    (ids,) = tokenizer.encode_texts([text])
    if not ids:
        raise InvalidValue.of("source", text, "at least one token")
    plain, whole = tokenizer.encode(text, add_special=False), tokenizer.encode(text)
    before = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    after = whole[before + len(plain) :]
    end = () if tokenizer.end_ids.intersection(after) else (eos_id(tokenizer),)
    return (*whole[:before], *ids, *after, *end)


def decoder_start_ids(tokenizer: Tokenizer, ids: Sequence[int] = ()) -> tuple[int, ...]:
    """The token that starts a target, the one that is forced behind it, if any, and `ids`; raises `UserError` if the
    tokenizer has no start token."""
    start = tokenizer.settings.decoder_start_id
    start = tokenizer.bos_id if start is None else start
    if start is None:
        raise UserError("the tokenizer has no start token, which an encoder-decoder model needs")
    forced = tokenizer.settings.forced_bos_id
    return (start, *(() if forced is None else (forced,)), *ids)


def eos_id(tokenizer: Tokenizer) -> int:
    """The token that ends sources and targets; raises `UserError` if the tokenizer has none."""
    if not tokenizer.end_ids:
        raise UserError("the tokenizer has no end token, which an encoder-decoder model needs")
    return min(tokenizer.end_ids)
