"""Images of conversations: paths, bytes and data URLs as published data hold them, which are never fetched."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import InvalidValue, UserError
from attn_models.adapters.base import StateDictAdapter
from attn_models.adapters.registry import installed_adapters
from attn_models.loading.images import open_image
from attn_models.loading.models import config_of
from attn_models.tokenizers import Tokenizer
from attn_models.vision_language.config import VisionDecoderConfig
from attn_models.vision_language.images import TileReader, read_tile_reader
from attn_models.vision_language.prompts import MOST_IMAGES, TileTexts
from attn_schema import IMAGE_PLACE
from torch import Tensor

from attn_train.data.messages import IMAGES, USER
from attn_train.data.shapes import Chat

FIELD = "config.data.dataset"
IMAGE = "<image>"
"""What stands for an image of a row in its texts, as in LLaVA's data."""
Picture = Path | bytes
"""An image file: where it is, or what it holds."""
ALONE = "they are trained on in conversations and preferences (formats chat, preference), from files not prepared"
"""Why images are refused, where nothing else is said."""


def with_images(chat: Chat, column: Any, folder: Path) -> Chat:
    """Return a conversation with the images of its messages, and those of a `column` of its row, by their places.

    Images of the column stand where parts of a message do not say which image they are; without any such part, where a
    text has `<image>`, and else before the first question. Paths are those below `folder`. Raises `InvalidValue` for
    images that are none, are elsewhere, or are not as many as their places.
    """
    given = [] if column is None else column if isinstance(column, list) else [column]
    if not given and not any(IMAGES in message for message in chat.messages):
        return chat
    messages = [dict(message) for message in chat.messages]
    shown = [_list_of(message.pop(IMAGES, [])) for message in messages]
    if not any(shown):
        shown = [[None] * str(message.get("content") or "").count(IMAGE) for message in messages]
        first = next((place for place, message in enumerate(messages) if message.get("role") == USER), 0)
        shown[first] = shown[first] if any(shown) else [None] * len(given)
        messages = [_with_content(one, lambda text: text.replace(IMAGE, IMAGE_PLACE)) for one in messages]
    for place, (message, own) in enumerate(zip(messages, shown, strict=True)):
        if own and message.get("role") != USER:
            raise InvalidValue.of(f"messages[{place}]", f"an image of the role {message.get('role')}", USER)
        if own and IMAGE_PLACE not in str(message.get("content") or ""):
            messages[place] = _with_content(message, lambda text, own=own: IMAGE_PLACE * len(own) + text)
        if (places := str(messages[place].get("content") or "").count(IMAGE_PLACE)) != len(own):
            raise InvalidValue.of(f"messages[{place}]", f"{len(own)} images", f"{places}, one for each {IMAGE_PLACE!r}")
    return replace(chat, messages=messages, images=_chosen([one for own in shown for one in own], given, folder))


def _list_of(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidValue.of(IMAGES, value, "a list of images")
    return value


def _with_content(message: Mapping[str, Any], change: Any) -> dict[str, Any]:
    content = message.get("content")
    return dict(message) | ({"content": change(content or "")} if isinstance(content, str | None) else {})


def _chosen(asked: Sequence[Any], given: Sequence[Any], folder: Path) -> tuple[Picture, ...]:
    """Return the images that are `asked` for: themselves, a number of those `given`, or None for the next of these."""
    if len(asked) > MOST_IMAGES:
        raise InvalidValue.of(IMAGES, f"{len(asked)} images", f"at most {MOST_IMAGES} in a conversation")
    unnamed = [one for one in asked if one is None or isinstance(one, int)]
    if len(unnamed) != len(given) or not all(one is None or 0 <= one < len(given) for one in unnamed):
        allowed = f"{len(unnamed)}, one for each part of a message, or {IMAGE}, that stands for one of them"
        raise InvalidValue.of(IMAGES, f"{len(given)} images", allowed)
    rest = iter(given)
    named = (given[one] if isinstance(one, int) else next(rest) if one is None else one for one in asked)
    return tuple(picture(one, folder) for one in named)


def picture(value: Any, folder: Path) -> Picture:
    """Return an image as data have it: bytes, a data URL, a path, or an object with one of these, as `datasets` writes.

    Raises `InvalidValue` for anything else, and for a path that leads out of `folder` or to no file.
    """
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidValue.of(IMAGES, value, "a path, a data URL, or an object with bytes or a path")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(";base64,")[2].encode(), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise InvalidValue.of(IMAGES, value[:60], "data:image/TYPE;base64,... with base64") from None
    path = folder / value.removeprefix("file://")
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError):
        inside = False
    if not inside:
        fetched = " (images at URLs are not fetched)" if "://" in value else ""
        raise InvalidValue.of(IMAGES, value[:200], f"an image file below {folder}, where the data are{fetched}")
    return path


def tiles_in(folder: Path, tokenizer: Tokenizer) -> TileTexts | str:
    """Return what encodes images for the model in a folder, or why it is not trained on images."""
    known = installed_adapters(StateDictAdapter)  # type: ignore[type-abstract]
    names = sorted(name for name, adapter in known.items() if issubclass(adapter.Config, VisionDecoderConfig))
    reason = f"models of the types {', '.join(names)} are trained on them, and {folder.name} is none"
    try:
        config = config_of(folder)
        if not isinstance(config, VisionDecoderConfig):
            return reason
        return TileTexts(tokenizer, config, read_tile_reader(folder, config.vision.image))
    except UserError as error:
        return f"{reason}: {error.message}"


def require_seen(chat: Chat, tiles: TileTexts | str, place: str) -> None:
    """Raise `InvalidValue` for images of a conversation that are not trained on, for the reason in `tiles`."""
    if chat.images and isinstance(tiles, str):
        raise InvalidValue.of(FIELD, f"{place}, with images", f"no images: {tiles}")


@dataclass(frozen=True, eq=False)
class SeenImages:
    """The images of a conversation: the tokens that stand for each, `image_token` among them, and their tiles."""

    pictures: tuple[Picture, ...]
    tokens: Sequence[Sequence[int]]
    tiles: Sequence[int]
    image_token: int

    @classmethod
    def of(cls, chat: Chat, tiles: TileTexts | str, place: str) -> SeenImages | None:
        """Read the images of a conversation; None without any. Raises `InvalidValue`, with the place, for a file that
        is no image, and as `require_seen` does."""
        require_seen(chat, tiles, place)
        if not chat.images or isinstance(tiles, str):
            return None
        opened = (open_image(one, f"{place}: images[{number}]") for number, one in enumerate(chat.images))
        grids = [tiles.reader.grid(*image.size) for image in opened]
        counts = [rows * columns + 1 for rows, columns in grids]
        return cls(chat.images, [tiles.ids(*grid) for grid in grids], counts, tiles.image_token_id)

    def first(self, count: int) -> SeenImages:
        """Return the first images."""
        return replace(self, pictures=self.pictures[:count], tokens=self.tokens[:count], tiles=self.tiles[:count])

    def expanded(self, ids: Sequence[int], learned: Sequence[bool]) -> tuple[list[int], list[bool]]:
        """Return ids, and which are learned, with the tokens of the images, which never are, in place of theirs.

        Raises `InvalidValue` if there are not as many image tokens as images.
        """
        shown = sum(token == self.image_token for token in ids)
        if shown != len(self.pictures):
            allowed = f"{len(self.pictures)} images, but the chat template writes {shown}"
            raise InvalidValue.of(FIELD, f"{shown} places", allowed)
        images, made, flags = iter(self.tokens), list[int](), list[bool]()
        for token, flag in zip(ids, learned, strict=True):
            own = next(images) if token == self.image_token else [token]
            made += own
            flags += [flag and token != self.image_token] * len(own)
        return made, flags

    def pixels(self, reader: TileReader) -> Tensor:
        """Read the pixels of all tiles [tiles, channels, side, side]; raises `InvalidValue` for an image that has
        changed or gone since it was read first."""
        found = []
        for one, count in zip(self.pictures, self.tiles, strict=True):
            name = str(one) if isinstance(one, Path) else "images"
            found.append(reader.read(one, name).pixels)
            if len(found[-1]) != count:
                raise InvalidValue.of(FIELD, name, f"an image of the size that it had before: {count} tiles")
        return torch.cat(found)
