"""Computes the embeddings of a request's images for a vision-language model, before its engine gets the request."""

from __future__ import annotations

import threading
import weakref

import torch
from attn_core.errors import InvalidValue, OutOfCapacity
from attn_models.loading import LoadedModel
from attn_models.vision_language.config import VisionDecoderConfig
from attn_models.vision_language.images import read_tile_reader
from attn_models.vision_language.prompts import ImagePrompt, ImagePrompts
from torch import Tensor

from attn_engine.request import PromptEmbeddings

TILES_AT_ONCE = 4
"""The number of image tiles that the vision tower processes in one batch."""
MAX_BYTES = 2**30
"""The memory limit, in bytes, for the image embeddings of all waiting and running requests."""


class ImageRows:
    """Computes image embeddings for one model, and bounds the memory that those of all requests take."""

    def __init__(self, loaded: LoadedModel) -> None:
        if loaded.tokenizer is None:
            raise InvalidValue.of("source", loaded.path, "a model folder with a tokenizer.json")
        self._model = loaded.model
        reader = read_tile_reader(loaded.path, loaded.config.vision.image)
        self.prompts = ImagePrompts(loaded.tokenizer, loaded.config, reader)
        self._lock = threading.Lock()
        self._held: list[weakref.ref[Tensor]] = []

    @classmethod
    def of(cls, loaded: LoadedModel) -> ImageRows | None:
        """The `ImageRows` of a model; None for a model that takes no images."""
        return cls(loaded) if isinstance(loaded.config, VisionDecoderConfig) else None

    def embeddings(self, prompt: ImagePrompt) -> PromptEmbeddings | None:
        """The embeddings of the image tokens of a prompt; None without images.

        Raises `OutOfCapacity` if the image embeddings of other requests take at least `MAX_BYTES` bytes.
        """
        if prompt.pixels is None:
            return None
        self._require_room()
        device = self._model.connector.weight.device
        with torch.inference_mode():
            tiles = (prompt.pixels[at : at + TILES_AT_ONCE] for at in range(0, len(prompt.pixels), TILES_AT_ONCE))
            parts = [self._model.image_rows(some.to(device)) for some in tiles]
            rows = torch.cat(parts).flatten(0, 1)
        with self._lock:
            self._held.append(weakref.ref(rows))
        return PromptEmbeddings(prompt.places, rows, prompt.key)

    def _require_room(self) -> None:
        with self._lock:
            held = [(one, rows) for one in self._held if (rows := one()) is not None]
            self._held = [one for one, _ in held]
            taken = sum(rows.numel() * rows.element_size() for _, rows in held)
        if taken >= MAX_BYTES:
            text = f"the image embeddings of other requests already take {taken} bytes"
            raise OutOfCapacity(text, bytes=taken, retry_seconds=1.0)
