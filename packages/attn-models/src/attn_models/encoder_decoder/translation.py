"""Recurrent encoder-decoder models: LSTMs without attention, RNNsearch, and Luong's LSTMs with attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core import Field
from torch import Tensor, nn

from attn_models.encoder_decoder.config import BottleneckConfig, LuongConfig, RnnsearchConfig, attention_of
from attn_models.encoder_decoder.encoder_input import EncoderOutput, reverse_sequences
from attn_models.encoder_decoder.recurrent import Attend, Held, RecurrentModel, query_projection
from attn_models.recurrent.cells import GatedCell, encode_padded, lstm_fields, lstm_stack, lstm_state, lstm_step


class Bottleneck(RecurrentModel):
    """An LSTM encoder and an LSTM decoder that starts with the encoder's last state v = (h_T, c_T)."""

    def __init__(self, config: BottleneckConfig) -> None:
        super().__init__(config, lstm_fields(config.hidden_size, config.num_layers), ("hidden", "cell"), None)
        self.reverse = config.reverse_source
        self.source_embedding = nn.Embedding(config.vocab_size, config.embedding)
        self.embedding = nn.Embedding(config.vocab_size, config.embedding)
        self.encoder = lstm_stack(config.embedding, config.hidden_size, config.num_layers, config.dropout)
        self.decoder = lstm_stack(config.embedding, config.hidden_size, config.num_layers, config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = nn.Linear(config.hidden_size, config.vocab_size)

    def read(self, source: Tensor, lengths: Sequence[int]) -> EncoderOutput:
        """Encode sources [batch, source], reversed if so configured."""
        tokens = reverse_sequences(source, lengths) if self.reverse else source
        rows, last = encode_padded(self.encoder, self.dropout(self.source_embedding(tokens)), lengths)
        return EncoderOutput(rows, lstm_state(last))

    def advance(self, inputs: Tensor, held: Held, attend: Attend) -> tuple[Tensor, Held]:  # noqa: ARG002 -- none here
        """One time step of the decoder."""
        return lstm_step(self.decoder, self.dropout(inputs), held)

    def _run(self, tokens: Tensor, encoded: EncoderOutput, *_: object) -> Tensor:
        """Compute all time steps in one call of the LSTM, which is possible without attention."""
        self._require_context(tokens)
        last = tuple(encoded.start[name].transpose(0, 1).contiguous() for name in ("hidden", "cell"))
        hidden: Tensor = self.decoder(self.dropout(self.embedding(tokens)), last)[0]
        return hidden


class Rnnsearch(RecurrentModel):
    """A bidirectional GRU encoder computes annotations h_j = [→h_j; ←h_j], to which the decoder attends before each
    word.

    c_i is the attention of s_{i-1} over the annotations; s_0 = tanh(W ←h_1). A word is predicted from t_i, the maxout
    of U s_{i-1} + V E y_{i-1} + C c_i in pairs (appendix A.2.2). The encoder's units are those of `torch.nn.GRU`. The
    mechanism has the width of an annotation, to which `ask` projects s_{i-1}. With the option `projections` "none",
    neither has projection matrices, and the score is the paper's e_ij = vᵀ tanh(W s_{i-1} + U h_j).
    """

    def __init__(self, config: RnnsearchConfig) -> None:
        width, annotation = config.hidden_size, 2 * config.hidden_size
        chosen = attention_of(config)
        super().__init__(config, {"state": Field((width,))}, ("state",), chosen)
        self.source_embedding = nn.Embedding(config.vocab_size, config.embedding)
        self.embedding = nn.Embedding(config.vocab_size, config.embedding)
        self.encoder = nn.GRU(config.embedding, width, batch_first=True, bidirectional=True)
        self.begin = nn.Linear(width, width)
        self.ask = query_projection(chosen, width)
        self.cell = GatedCell(config.embedding, annotation, width)
        self.readout = nn.Linear(width + config.embedding + annotation, 2 * config.maxout)
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = nn.Linear(config.maxout, config.vocab_size, bias=False)

    def read(self, source: Tensor, lengths: Sequence[int]) -> EncoderOutput:
        """The annotations [batch, source, 2 width] of sources [batch, source], and s_0."""
        rows, _ = encode_padded(self.encoder, self.dropout(self.source_embedding(source)), lengths)
        return EncoderOutput(rows, {"state": torch.tanh(self.begin(rows[:, 0, self.config.hidden_size :]))})

    def advance(self, inputs: Tensor, held: Held, attend: Attend) -> tuple[Tensor, Held]:
        """t_i and the new state s_i, from s_{i-1}, y_{i-1} and c_i."""
        state, entering = held["state"], self.dropout(inputs)
        context = attend(self.ask(state))
        pairs = self.readout(torch.cat([state, entering, context], dim=-1)).unflatten(-1, (-1, 2))
        return pairs.amax(-1), {"state": self.cell(entering, state, context)}


class Luong(RecurrentModel):
    """The decoder's state h_t attends to the encoder's states h̄_s; a word is predicted from h̃_t = tanh(W [c_t; h_t])
    (Luong et al. 2015, figure 2).

    With input feeding h̃_t is also an input of the next step (figure 4). The states of a reversed source are put back
    into the source's order, so that word t is at position t for local attention.
    """

    def __init__(self, config: LuongConfig) -> None:
        width = config.hidden_size
        chosen = attention_of(config)
        fields = dict(lstm_fields(width, config.num_layers))
        if config.input_feeding:
            fields["fed"] = Field((width,))
        super().__init__(config, fields, ("hidden", "cell"), chosen)
        self.feeds, self.reverse = config.input_feeding, config.reverse_source
        self.source_embedding = nn.Embedding(config.vocab_size, config.embedding)
        self.embedding = nn.Embedding(config.vocab_size, config.embedding)
        self.encoder = lstm_stack(config.embedding, width, config.num_layers, config.dropout)
        into = config.embedding + (width if self.feeds else 0)
        self.decoder = lstm_stack(into, width, config.num_layers, config.dropout)
        self.joined = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = nn.Linear(width, config.vocab_size, bias=False)

    def read(self, source: Tensor, lengths: Sequence[int]) -> EncoderOutput:
        """The states h̄ of sources [batch, source], in the source's order, and the encoder's last LSTM state, with
        which the decoder starts."""
        tokens = reverse_sequences(source, lengths) if self.reverse else source
        rows, last = encode_padded(self.encoder, self.dropout(self.source_embedding(tokens)), lengths)
        return EncoderOutput(reverse_sequences(rows, lengths) if self.reverse else rows, lstm_state(last))

    def advance(self, inputs: Tensor, held: Held, attend: Attend) -> tuple[Tensor, Held]:
        """h̃_t and the new state, from y_{t-1} and h̃_{t-1}."""
        entering = self.dropout(inputs)
        if self.feeds:
            entering = torch.cat([entering, held["fed"]], dim=-1)
        hidden, fresh = lstm_step(self.decoder, entering, held)
        attentional = torch.tanh(self.joined(torch.cat([attend(hidden), hidden], dim=-1)))
        return attentional, fresh | ({"fed": attentional} if self.feeds else {})
