"""Sentences as vectors whose angles tell how near they are in meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from torch import Tensor, nn

from attn_models.decoder.weightless import weightless
from attn_models.encoder.encoder import Encoder
from attn_models.families.bert import BertLayout
from attn_models.families.tensors import read_parameters
from attn_models.tokenizers import Tokenizer
from attn_models.weights import Verify, read_folder
from attn_models.weights.config_file import read_config

BATCH = 32


class SentenceEncoder:
    """An encoder with its tokenizer: the mean of a text's rows, of length 1 (Reimers and Gurevych 2019,
    arXiv 1908.10084)."""

    def __init__(self, model: Encoder, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Vectors [texts, width] of length 1, in the weights' type or float32, the wider.

        Raises what `read` raises.
        """
        ids = self.read(texts)
        rows = {place: row for places, found in self.batches(ids) for place, row in zip(places, found, strict=True)}
        return torch.stack([rows[place] for place in range(len(ids))])

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text.

        Raises `InvalidValue` for no text, or one without tokens or with more than the context holds, by its place.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidValue.of("texts", texts, "at least one text, in a list")
        ids = self.tokenizer.encode_batch(texts)
        for place, tokens in enumerate(ids):
            if not 0 < len(tokens) <= self.model.context:
                allowed = f"1 to {self.model.context} tokens"
                raise InvalidValue.of(f"texts[{place}]", f"a text of {len(tokens)} tokens", allowed)
        return ids

    def batches(self, ids: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Some of the texts that `read` gave at a time, until all are done: places, and vectors [texts, width]."""
        # Texts of one length make little padding.
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            yield places, self._embed([ids[place] for place in places])

    @torch.inference_mode()
    def _embed(self, ids: list[Sequence[int]]) -> Tensor:
        longest = max(map(len, ids))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids])
        keep = torch.arange(longest) < torch.tensor([[len(row)] for row in ids])
        hidden = self.model(tokens, keep)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32)) * keep[..., None]
        mean = wide.sum(1) / keep.sum(1, keepdim=True)
        return nn.functional.normalize(mean, dim=-1)


def is_sentence_encoder(folder: Path) -> bool:
    """Whether the config.json of a model folder is of an encoder; raises `CheckpointInvalid` where it is no JSON."""
    return read_config(folder / "config.json").get("model_type") == BertLayout.model_type


def load_sentence_encoder(folder: str | Path, dtype: str = "float32", *, verify: Verify = "hashes") -> SentenceEncoder:
    """The encoder of a BERT folder, on the CPU, in evaluation mode.

    Raises `CheckpointInvalid` for a folder that is damaged, has no tokenizer, or does not fit the model, naming every
    tensor that is missing, extra or misshaped; `UnknownName` for another kind of model.
    """
    checkpoint = read_folder(folder, verify=verify)
    layout = BertLayout()
    config = layout.configure(checkpoint.config, checkpoint.path / "config.json")
    if checkpoint.tokenizer is None:
        raise CheckpointInvalid.of(checkpoint.path, "has no tokenizer.json")
    tokenizer = Tokenizer.from_folder(checkpoint.path)
    if tokenizer.vocabulary > config.vocabulary:
        rule = f"{tokenizer.vocabulary} tokens in the vocabulary, {config.vocabulary} rows in the embedding"
        raise CheckpointInvalid.of(checkpoint.path, rule)
    with weightless():
        model = Encoder(config)
    parameters = read_parameters(checkpoint, layout, model.state_dict(), getattr(torch, dtype))
    model.load_state_dict(parameters, assign=True)
    return SentenceEncoder(model.eval(), tokenizer)
