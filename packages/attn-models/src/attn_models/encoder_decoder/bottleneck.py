"""Sequence to sequence through one vector (Sutskever et al. 2014, arXiv 1409.3215)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from attn_models.encoder_decoder.config import BottleneckConfig
from attn_models.encoder_decoder.lstm_stack import lstm_fields, lstm_moment, lstm_stack, lstm_state, read_padded
from attn_models.encoder_decoder.recurrent import Attend, Held, Reading, RecurrentModel
from attn_models.encoder_decoder.sources import reversed_rows


class Bottleneck(RecurrentModel):
    """An LSTM stack reads the source; another writes, and begins with the last state of the first: v = (h_T, c_T)."""

    def __init__(self, config: BottleneckConfig) -> None:
        super().__init__(config, lstm_fields(config.width, config.layers), ("hidden", "cell"), None)
        self.reverse = config.reverse_source
        self.source_embedding = nn.Embedding(config.vocabulary, config.embedding)
        self.embedding = nn.Embedding(config.vocabulary, config.embedding)
        self.encoder = lstm_stack(config.embedding, config.width, config.layers, config.dropout)
        self.decoder = lstm_stack(config.embedding, config.width, config.layers, config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = nn.Linear(config.width, config.vocabulary)

    def read(self, source: Tensor, lengths: Sequence[int]) -> Reading:
        """Encode sources [batch, source], from their end where so configured."""
        tokens = reversed_rows(source, lengths) if self.reverse else source
        rows, last = read_padded(self.encoder, self.dropout(self.source_embedding(tokens)), lengths)
        return Reading(rows, lstm_state(last))

    def advance(self, inputs: Tensor, held: Held, attend: Attend) -> tuple[Tensor, Held]:  # noqa: ARG002 -- none here
        """One moment of the decoder."""
        return lstm_moment(self.decoder, self.dropout(inputs), held)

    def _run(self, tokens: Tensor, reading: Reading, *_: object) -> Tensor:
        """The same for whole sequences at once: nothing a word needs waits for an attention."""
        self._require_room(tokens)
        last = tuple(reading.start[name].transpose(0, 1).contiguous() for name in ("hidden", "cell"))
        hidden: Tensor = self.decoder(self.dropout(self.embedding(tokens)), last)[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """p(y) ∝ exp(W h)."""
        scores: Tensor = self.unembedding(self.dropout(hidden))
        return scores
