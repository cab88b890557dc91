"""Conversations with images: their token ids, and the places of image embeddings among them."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attn_core.errors import ContextLengthExceeded, Incompatible, InvalidValue
from attn_core.models import PromptEmbeddings
from attn_schema import IMAGE_PLACE
from torch import Tensor

from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import Message
from attn_models.tokenizers.tokenizer import NO_VALUES
from attn_models.vision_language.config import VisionDecoderConfig
from attn_models.vision_language.images import TileReader
from attn_models.vision_language.model import VisionDecoder

IMAGE_DELIMITER, GLOBAL_IMAGE = "<fake_token_around_image>", "<global-img>"
MOST_IMAGES = 64
"""The largest number of images in one conversation."""


@dataclass(frozen=True)
class ImagePrompt:
    """Token ids, and the `inputs` of the vision tower for their images, by name, None without images. Prompts with
    equal ids and `key` have the same images."""

    token_ids: tuple[int, ...]
    inputs: Mapping[str, Tensor] | None = None
    key: str = ""


class ImagePrompts(ABC):
    """Encodes conversations with images for a model, and computes what its images give its prompts."""

    in_parts = True
    """Whether the chat template gets contents as lists of parts, see `Tokenizer.render_chat`."""

    def __init__(self, tokenizer: Tokenizer, image_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id

    @abstractmethod
    def encode(
        self, messages: Sequence[Message], images: Sequence[Sequence[bytes]], values: Mapping[str, Any] = NO_VALUES
    ) -> ImagePrompt:
        """The prompt of `messages`, and the `images` of each, the bytes of image files; `values` are those of
        `Tokenizer.render_chat`.

        Raises the errors of `with_places` and of the chat template, `InvalidValue` for a file that is not an image;
        `Incompatible` for a template that leaves images out; `ContextLengthExceeded` for more than the context.
        """

    @abstractmethod
    def embeddings(self, prompt: ImagePrompt) -> PromptEmbeddings | None:
        """What the images of a prompt give it; None without images."""

    def with_places(self, messages: Sequence[Message], images: Sequence[Sequence[bytes]]) -> list[dict[str, Any]]:
        """The messages with an `IMAGE_PLACE` in the content for each image; added before a content that has none.

        Raises `InvalidValue` if the numbers of places and images differ, and for more than `MOST_IMAGES`.
        """
        count = sum(map(len, images))
        if count > MOST_IMAGES:
            raise InvalidValue.of("images", f"{count} images", f"at most {MOST_IMAGES} in a conversation")
        return [
            {**message, "content": _with_places(message["content"] or "", len(each), place)}
            for place, (message, each) in enumerate(zip(messages, images, strict=True))
        ]

    def require_none(self, token_ids: Sequence[int]) -> None:
        """Raise `InvalidValue` for an image token in a prompt without images."""
        if self._image_token_id in token_ids:
            place = list(token_ids).index(self._image_token_id)
            allowed = "other tokens: images come with the messages of a conversation"
            raise InvalidValue.of(f"prompt.token_ids[{place}]", self._tokenizer.token(self._image_token_id), allowed)


def key_of(images: Sequence[Sequence[bytes]], tokens: Sequence[int] = ()) -> str:
    """The `key` of prompts with these images, and of tokens that they depend on besides."""
    digests = [hashlib.sha256(one).digest() for each in images for one in each]
    return hashlib.sha256(b"".join(digests) + repr(list(tokens)).encode()).hexdigest()


class TileTexts:
    """The tokens that stand for images in prompts, in the format of SmolVLM's training; raises `Incompatible` for a
    vocabulary without the tokens around images."""

    def __init__(self, tokenizer: Tokenizer, config: VisionDecoderConfig, reader: TileReader) -> None:
        missing = [token for token in (IMAGE_DELIMITER, GLOBAL_IMAGE) if tokenizer.id(token) is None]
        if missing:
            raise Incompatible(f"the tokenizer lacks {', '.join(missing)}, which delimit images")
        self.reader = reader
        self.image_token_id = config.image_token_id
        self._tokenizer = tokenizer
        self._rows = tokenizer.token(config.image_token_id) * config.tokens_per_tile

    def ids(self, rows: int, columns: int) -> list[int]:
        """The tokens of an image with these tiles, as transformers' processor of these models writes them."""
        whole = f"{IMAGE_DELIMITER}{GLOBAL_IMAGE}{self._rows}{IMAGE_DELIMITER}"
        lines = [
            "".join(f"{IMAGE_DELIMITER}<row_{row}_col_{column}>{self._rows}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        text = "".join(f"{line}\n" for line in lines) + "\n" * bool(rows) + whole
        return self._tokenizer.encode(text, add_special=False)


class TilePrompts(ImagePrompts):
    """Encodes conversations with images as `TileTexts` has them."""

    def __init__(self, tokenizer: Tokenizer, model: VisionDecoder, reader: TileReader) -> None:
        super().__init__(tokenizer, model.config.image_token_id)
        self._model = model
        self._texts = TileTexts(tokenizer, model.config, reader)

    def encode(
        self, messages: Sequence[Message], images: Sequence[Sequence[bytes]], values: Mapping[str, Any] = NO_VALUES
    ) -> ImagePrompt:
        """See `ImagePrompts.encode`; images beyond the context are not read."""
        data = [one for each in images for one in each]
        ids = self._tokenizer.encode_chat(self.with_places(messages, images), values, images=True)
        shown = ids.count(self._image_token_id)
        if shown != len(data):
            raise Incompatible(f"the chat template renders {shown} of {len(data)} images")
        return self._expanded(ids, data, key_of(images)) if data else ImagePrompt(tuple(ids))

    @torch.inference_mode()
    def embeddings(self, prompt: ImagePrompt) -> PromptEmbeddings | None:
        """See `ImagePrompts.embeddings`."""
        if prompt.inputs is None:
            return None
        rows = self._model.image_rows(prompt.inputs["pixels"])
        places = tuple(place for place, token in enumerate(prompt.token_ids) if token == self._image_token_id)
        return PromptEmbeddings(places, rows.flatten(0, 1), prompt.key)

    def _expanded(self, ids: Sequence[int], data: Sequence[bytes], key: str) -> ImagePrompt:
        image, context = self._image_token_id, self._model.max_seq_len
        found, pixels = list[int](), list[Tensor]()
        for token in ids:
            if token != image:
                found.append(token)
                continue
            tiles = self._texts.reader.read(data[len(pixels)], f"images[{len(pixels)}]")
            found += self._texts.ids(tiles.rows, tiles.columns)
            if len(found) > context:
                raise ContextLengthExceeded.of(len(found), 0, context)
            pixels.append(tiles.pixels)
        return ImagePrompt(tuple(found), {"pixels": torch.cat(pixels)}, key)


def _with_places(content: str, images: int, message: int) -> str:
    """The content with an `IMAGE_PLACE` for each image; raises `InvalidValue` if it has another number of places."""
    places = content.count(IMAGE_PLACE)
    if places == images:
        return content
    if places:
        allowed = f"{places}, one for each placeholder in the content, or no placeholders"
        raise InvalidValue.of(f"messages[{message}].images", f"{images} images", allowed)
    return IMAGE_PLACE * images + content
