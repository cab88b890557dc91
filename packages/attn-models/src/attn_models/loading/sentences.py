"""Sentence embeddings: vectors whose cosine similarity measures how close texts are in meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_core.states import dtype_name
from attn_schema.device import AUTO
from torch import Tensor

from attn_models.adapters.registry import encoder_adapter
from attn_models.adapters.state_dict import stored_type
from attn_models.device import resolve_device, resolve_dtype
from attn_models.loading.encoders import POOLING_MODE, build_encoder
from attn_models.loading.pooling import MODULES, SentencePooling, modules_of, pools_of, read_pooling
from attn_models.loading.sentence_settings import SentenceSettings, read_sentence_settings
from attn_models.quantization.quantize import quantize_model, require_quantization
from attn_models.tokenizers import Tokenizer
from attn_models.weights import Verify, read_folder
from attn_models.weights.safe_files import member

BATCH = 32


class SentenceEncoder:
    """An encoder with its tokenizer and pooling, by default the mean: it computes a vector of length 1 for each text
    (Reimers and Gurevych 2019, arXiv 1908.10084).

    `size` is the number of elements of a vector, `parameters` the number of parameters, whether packed or not, and
    `mechanisms` has the mechanism of each layer.
    """

    family = "encoder"
    max_encoder_len = None

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        pooling: SentencePooling | None = None,
        settings: SentenceSettings | None = None,
    ) -> None:
        self.model = model
        self.config = model.config
        self.mechanisms: tuple[str, ...] = tuple(model.config.mechanisms)
        self.pooling = pooling or SentencePooling()
        self.settings = settings or SentenceSettings()
        self._skipped = 0 if self.pooling.include_prompt else self.settings.prompt_tokens(tokenizer)
        self.device = next(model.parameters()).device
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.tokenizer = tokenizer
        self.size = self.pooling.size(model.size)

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Vectors [texts, size] of length 1, in float32 or the dtype of the weights, whichever is wider.

        Raises the errors of `read`.
        """
        ids = self.read(texts)
        rows = {place: row for places, found in self.batches(ids) for place, row in zip(places, found, strict=True)}
        return torch.stack([rows[place] for place in range(len(ids))])

    def read(self, texts: Sequence[str | Sequence[int]], max_tokens: int | None = None) -> list[list[int]]:
        """The token ids of each text: behind the prompt, and cut to the longest text, that the folder's
        sentence-transformers files name, and to `max_tokens`. A text of token ids is used as it is, but for this cut.

        Raises `InvalidValue` if `texts` is empty, and, with the index of the text, for one that has no tokens, more
        than fit into the context, or ids that the vocabulary does not have.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidValue.of("texts", texts, "at least one text, in a list")
        read = iter(self.settings.read(self.tokenizer, [text for text in texts if isinstance(text, str)], max_tokens))
        ids = [next(read) if isinstance(text, str) else list(text[:max_tokens]) for text in texts]
        size = self.model.config.vocab_size
        for place, (text, tokens) in enumerate(zip(texts, ids, strict=True)):
            if not isinstance(text, str) and not all(0 <= token < size for token in tokens):
                raise InvalidValue.of(f"texts[{place}]", "other token ids", f"ids from 0 to {size - 1}")
            if not self._skipped < len(tokens) <= self.model.max_seq_len:
                allowed = f"{self._skipped + 1} to {self.model.max_seq_len} tokens"
                raise InvalidValue.of(f"texts[{place}]", f"a text of {len(tokens)} tokens", allowed)
        return ids

    def batches(self, ids: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Embed texts, given by the result of `read`, in batches; yields the indices of a batch's texts and their
        vectors [texts, size]."""
        # Batches of texts of similar length need little padding.
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            yield places, self._embed([ids[place] for place in places])

    @torch.inference_mode()
    def _embed(self, ids: list[Sequence[int]]) -> Tensor:
        longest = max(map(len, ids))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids], device=self.device)
        lengths = torch.tensor([[len(row)] for row in ids], device=self.device)
        key_padding_mask = torch.arange(longest, device=self.device) < lengths
        hidden = self.model(tokens, key_padding_mask)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        vectors: Tensor = self.pooling(
            wide, key_padding_mask & (torch.arange(longest, device=self.device) >= self._skipped)
        )
        return vectors


def load_sentence_encoder(
    folder: str | Path,
    dtype: str = AUTO,
    *,
    device: str = "cpu",
    verify: Verify = "hashes",
    quantization: str | None = None,
) -> SentenceEncoder:
    """The sentence encoder in a folder, in evaluation mode; texts are pooled as its modules.json specifies.

    `dtype`, `device` and `quantization` are those of `load_model`, except that `auto` packs nothing: texts are computed
    in batches of many tokens, for which torch's float32 products are as fast as those of any lossless kernel.

    Raises the errors of `build_encoder` and `read_pooling`; `CheckpointInvalid` for a folder that is damaged, has no
    tokenizer or one with more tokens than the embedding has rows; those of `load_model` for a device or dtype; with
    `quantization`, those of `quantize_model`.
    """
    place = resolve_device(device)
    dtype = dtype_name(resolve_dtype(dtype, place))
    require_quantization(quantization, place.type)
    if (described := member(Path(folder), MODULES)).is_file():
        modules_of(described)  # refuses by name what may have no weights at the top, such as a Router
    checkpoint = read_folder(folder, verify=verify, device=place)
    form = None if quantization in ("auto", "none") else quantization
    model = build_encoder(checkpoint, getattr(torch, dtype) if form is None else stored_type(checkpoint))
    if checkpoint.tokenizer is None:
        raise CheckpointInvalid.of(checkpoint.path, "has no tokenizer.json")
    tokenizer = Tokenizer.from_folder(checkpoint.path, model.embedding.weight.shape[0])
    usual, said = encoder_adapter(checkpoint.config.get("model_type")).pooling, checkpoint.config.get(POOLING_MODE)
    usual = usual if said is None else pools_of(said, checkpoint.path / "config.json")
    pooling = read_pooling(checkpoint.path, model.size, usual)
    settings = read_sentence_settings(checkpoint.path)
    if settings.limit is not None:
        settings = replace(settings, limit=min(settings.limit, model.max_seq_len))
    pooling.truncate_dim = settings.truncate_dim
    float_dtype = torch.promote_types(getattr(torch, dtype), torch.float32)
    encoder = SentenceEncoder(model.eval(), tokenizer, pooling.to(place, float_dtype), settings)
    if form is not None:
        quantize_model(model, form, getattr(torch, dtype))
    return encoder
