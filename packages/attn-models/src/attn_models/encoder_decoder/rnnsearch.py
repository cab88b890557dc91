"""RNNsearch: translation that learns to align (Bahdanau et al. 2015, arXiv 1409.0473)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core import Field
from torch import Tensor, nn

from attn_models.encoder_decoder.attention import stepped_attention
from attn_models.encoder_decoder.config import RnnsearchConfig
from attn_models.encoder_decoder.gated_cell import GatedCell
from attn_models.encoder_decoder.lstm_stack import read_padded
from attn_models.encoder_decoder.recurrent import Attend, Held, Reading, RecurrentModel


class Rnnsearch(RecurrentModel):
    """A bidirectional encoder writes annotations h_j = [→h_j; ←h_j], among which the decoder looks before each word.

    c_i is what s_{i-1} finds among the annotations; s_0 = tanh(W ←h_1). A word is predicted from t_i, the maxout of
    U s_{i-1} + V E y_{i-1} + C c_i in pairs (appendix A.2.2). The encoder's units are those of `torch.nn.GRU`. The
    mechanism is as wide as an annotation, so `ask` widens s_{i-1} first.
    """

    def __init__(self, config: RnnsearchConfig) -> None:
        width, annotation = config.width, 2 * config.width
        chosen = stepped_attention(
            config.mechanism, config.options, width=annotation, heads=config.heads, context=config.source_context
        )
        super().__init__(config, {"state": Field((width,))}, ("state",), chosen)
        self.source_embedding = nn.Embedding(config.vocabulary, config.embedding)
        self.embedding = nn.Embedding(config.vocabulary, config.embedding)
        self.encoder = nn.GRU(config.embedding, width, batch_first=True, bidirectional=True)
        self.begin = nn.Linear(width, width)
        self.ask = nn.Linear(width, annotation, bias=False)
        self.cell = GatedCell(config.embedding, annotation, width)
        self.readout = nn.Linear(width + config.embedding + annotation, 2 * config.maxout)
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = nn.Linear(config.maxout, config.vocabulary, bias=False)

    def read(self, source: Tensor, lengths: Sequence[int]) -> Reading:
        """The annotations [batch, source, 2 width] of sources [batch, source], and s_0."""
        rows, _ = read_padded(self.encoder, self.dropout(self.source_embedding(source)), lengths)
        return Reading(rows, {"state": torch.tanh(self.begin(rows[:, 0, self.config.width :]))})

    def advance(self, inputs: Tensor, held: Held, attend: Attend) -> tuple[Tensor, Held]:
        """t_i, and s_i from s_{i-1}, y_{i-1} and c_i."""
        state, entering = held["state"], self.dropout(inputs)
        context = attend(self.ask(state))
        pairs = self.readout(torch.cat([state, entering, context], dim=-1)).unflatten(-1, (-1, 2))
        return pairs.amax(-1), {"state": self.cell(entering, state, context)}

    def logits(self, hidden: Tensor) -> Tensor:
        """p(y) ∝ exp(W t)."""
        scores: Tensor = self.unembedding(self.dropout(hidden))
        return scores
