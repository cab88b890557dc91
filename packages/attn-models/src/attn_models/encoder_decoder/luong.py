"""Attention-based translation of Luong et al. (2015, arXiv 1508.04025): global or local, with input feeding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core import Field
from torch import Tensor, nn

from attn_models.encoder_decoder.attention import stepped_attention
from attn_models.encoder_decoder.config import LuongConfig
from attn_models.encoder_decoder.lstm_stack import lstm_fields, lstm_moment, lstm_stack, lstm_state, read_padded
from attn_models.encoder_decoder.recurrent import Attend, Held, Reading, RecurrentModel
from attn_models.encoder_decoder.sources import reversed_rows


class Luong(RecurrentModel):
    """The decoder's state h_t asks the encoder's states h̄_s; h̃_t = tanh(W [c_t; h_t]) predicts (figure 2 there).

    With input feeding the next step also reads h̃_t (figure 4). Where the source is read from its end, its states are
    put back in order, so that local attention finds word t at position t.
    """

    def __init__(self, config: LuongConfig) -> None:
        width = config.width
        chosen = stepped_attention(
            config.mechanism, config.options, width=width, heads=config.heads, context=config.source_context
        )
        fields = dict(lstm_fields(width, config.layers))
        if config.input_feeding:
            fields["fed"] = Field((width,))
        super().__init__(config, fields, ("hidden", "cell"), chosen)
        self.feeds, self.reverse = config.input_feeding, config.reverse_source
        self.source_embedding = nn.Embedding(config.vocabulary, config.embedding)
        self.embedding = nn.Embedding(config.vocabulary, config.embedding)
        self.encoder = lstm_stack(config.embedding, width, config.layers, config.dropout)
        into = config.embedding + (width if self.feeds else 0)
        self.decoder = lstm_stack(into, width, config.layers, config.dropout)
        self.joined = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = nn.Linear(width, config.vocabulary, bias=False)

    def read(self, source: Tensor, lengths: Sequence[int]) -> Reading:
        """The states h̄ of sources [batch, source] in the source's order; the decoder begins with the last."""
        tokens = reversed_rows(source, lengths) if self.reverse else source
        rows, last = read_padded(self.encoder, self.dropout(self.source_embedding(tokens)), lengths)
        return Reading(reversed_rows(rows, lengths) if self.reverse else rows, lstm_state(last))

    def advance(self, inputs: Tensor, held: Held, attend: Attend) -> tuple[Tensor, Held]:
        """h_t from y_{t-1} and h̃_{t-1}; then h̃_t."""
        entering = self.dropout(inputs)
        if self.feeds:
            entering = torch.cat([entering, held["fed"]], dim=-1)
        hidden, fresh = lstm_moment(self.decoder, entering, held)
        attentional = torch.tanh(self.joined(torch.cat([attend(hidden), hidden], dim=-1)))
        return attentional, fresh | ({"fed": attentional} if self.feeds else {})

    def logits(self, hidden: Tensor) -> Tensor:
        """p(y) ∝ exp(W_s h̃)."""
        scores: Tensor = self.unembedding(self.dropout(hidden))
        return scores
