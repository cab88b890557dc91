"""Computes the embeddings of a request's images for a vision-language model, before its engine gets the request."""

from __future__ import annotations

import threading
import weakref

from attn_core.errors import InvalidValue, OutOfCapacity
from attn_core.models import PromptEmbeddings
from attn_models.loading import LoadedModel
from attn_models.tokenizers import Tokenizer
from attn_models.vision_language.config import VisionDecoderConfig
from attn_models.vision_language.images import read_tile_reader
from attn_models.vision_language.prompts import ImagePrompt, ImagePrompts, TilePrompts
from torch import Tensor

MAX_BYTES = 2**30
"""The memory limit, in bytes, for the image embeddings of all waiting and running requests."""


def image_prompts(loaded: LoadedModel, tokenizer: Tokenizer) -> ImagePrompts | None:
    """What encodes images for a model; None for a model that takes no images."""
    if isinstance(loaded.config, VisionDecoderConfig):
        return TilePrompts(tokenizer, loaded.model, read_tile_reader(loaded.path, loaded.config.vision.image))
    if hasattr(loaded.model, "text_model"):
        from attn_models.hf.images import transformers_images

        return transformers_images(loaded.model, loaded.path, tokenizer)
    return None


class ImageRows:
    """Computes image embeddings for one model, and bounds the memory that those of all requests take."""

    def __init__(self, prompts: ImagePrompts) -> None:
        self.prompts = prompts
        self._lock = threading.Lock()
        self._held: list[weakref.ref[Tensor]] = []

    @classmethod
    def of(cls, loaded: LoadedModel) -> ImageRows | None:
        """The `ImageRows` of a model; None for a model that takes no images."""
        if loaded.tokenizer is None:
            raise InvalidValue.of("source", loaded.path, "a model folder with a tokenizer.json")
        prompts = image_prompts(loaded, loaded.tokenizer)
        return None if prompts is None else cls(prompts)

    def embeddings(self, prompt: ImagePrompt) -> PromptEmbeddings | None:
        """The embeddings of the image tokens of a prompt; None without images.

        Raises `OutOfCapacity` if the image embeddings of other requests take at least `MAX_BYTES` bytes.
        """
        if prompt.inputs is None:
            return None
        self._require_room()
        given = self.prompts.embeddings(prompt)
        if given is not None:
            with self._lock:
                self._held.append(weakref.ref(given.rows))
        return given

    def _require_room(self) -> None:
        with self._lock:
            held = [(one, rows) for one in self._held if (rows := one()) is not None]
            self._held = [one for one, _ in held]
            taken = sum(rows.numel() * rows.element_size() for _, rows in held)
        if taken >= MAX_BYTES:
            text = f"the image embeddings of other requests already take {taken} bytes"
            raise OutOfCapacity(text, bytes=taken, retry_seconds=1.0)
