"""What a model that sees images makes of those of a request, before its engine gets it."""

from __future__ import annotations

import threading
import weakref

import torch
from attn_core.errors import InvalidValue, OutOfCapacity
from attn_engine import PromptEmbeddings
from attn_models.loading import LoadedModel
from attn_models.vision_language.config import VisionDecoderConfig
from attn_models.vision_language.images import read_tile_reader
from attn_models.vision_language.prompts import ImagePrompt, ImagePrompts
from torch import Tensor

TILES_AT_ONCE = 4
"""Tiles that the tower computes together."""
MAX_BYTES = 2**30
"""Memory for the rows of images of all requests that wait or run."""


class ImageRows:
    """Computes rows of images for one model, and bounds the memory that those of all requests take."""

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
        """Those of a model; None for one that sees no images."""
        return cls(loaded) if isinstance(loaded.config, VisionDecoderConfig) else None

    def embeddings(self, prompt: ImagePrompt) -> PromptEmbeddings | None:
        """What stands for the image tokens of a prompt; None without images.

        Raises `OutOfCapacity` where the rows of other requests take all the memory that there is for them.
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
            text = f"rows of images of other requests take {taken} bytes already"
            raise OutOfCapacity(text, bytes=taken, retry_seconds=1.0)
