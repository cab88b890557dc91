"""Sentences as vectors whose angles tell how near they are in meaning."""

from __future__ import annotations

from collections.abc import Sequence
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

BATCH = 32


class SentenceEncoder:
    """An encoder with its tokenizer: the mean of a text's rows, of length 1 (Reimers and Gurevych 2019,
    arXiv 1908.10084)."""

    def __init__(self, model: Encoder, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Vectors [texts, width] of length 1, in the weights' type.

        Raises `InvalidValue` for no text, or one without tokens or with more than the context holds, by its place.
        """
        if isinstance(texts, str) or not texts:
            raise InvalidValue.of("texts", texts, "at least one text, in a list")
        ids = self.tokenizer.encode_batch(texts)
        for place, tokens in enumerate(ids):
            if not 0 < len(tokens) <= self.model.context:
                allowed = f"1 to {self.model.context} tokens"
                raise InvalidValue.of(f"texts[{place}]", f"a text of {len(tokens)} tokens", allowed)
        # Texts of one length make little padding.
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        rows: dict[int, Tensor] = {}
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            rows |= dict(zip(places, self._embed([ids[place] for place in places]), strict=True))
        return torch.stack([rows[place] for place in range(len(ids))])

    @torch.inference_mode()
    def _embed(self, ids: list[list[int]]) -> Tensor:
        longest = max(map(len, ids))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        keep = torch.arange(longest) < torch.tensor([[len(row)] for row in ids])
        hidden = self.model(tokens, keep) * keep[..., None]
        mean = hidden.sum(1) / keep.sum(1, keepdim=True)
        return nn.functional.normalize(mean, dim=-1)


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
