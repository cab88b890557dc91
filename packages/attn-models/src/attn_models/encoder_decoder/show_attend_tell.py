"""Show, Attend and Tell: captions of images by an LSTM with attention (Xu et al. 2015, arXiv 1502.03044)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from attn_core import DeclaredMechanism, Source
from attn_core.distributions import Hard
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.attention import LayerAttention
from attn_models.encoder_decoder.config import ShowAttendTellConfig, attention_of
from attn_models.encoder_decoder.encoder_input import EncoderOutput
from attn_models.encoder_decoder.recurrent import Attend, Held, RecurrentModel, query_projection
from attn_models.recurrent.cells import lstm_fields, lstm_stack, lstm_step


class ShowAttendTell(RecurrentModel):
    """Convolutions compute an annotation a_i of every cell; an LSTM decoder attends to them before each word.

    h_0 and c_0 are computed by one layer each from the mean annotation; ẑ_t is the attention of h_{t-1} over the
    annotations (gated, with the mechanism `visual_soft`); the LSTM computes h_t from [E y_{t-1}; ẑ_t], and p(y_t) ∝
    exp(L_o (E y_{t-1} + L_h h_t + L_z ẑ_t)) (equations 1 to 7). Cells are tokens, such as shades of grey. The paper's
    annotations come from a pretrained VGG network; here a small network with learned position embeddings is trained
    with the rest. The training loss adds the doubly stochastic penalty (equation 14) times `doubly_stochastic`.
    """

    def __init__(self, config: ShowAttendTellConfig) -> None:
        width, features = config.hidden_size, config.features
        chosen = attention_of(config)
        super().__init__(config, lstm_fields(width, 1), ("hidden", "cell"), chosen)
        if config.doubly_stochastic and _is_hard(chosen):
            allowed = f"0 with {config.mechanism}, whose weights have no gradient"
            raise InvalidValue.of("doubly_stochastic", config.doubly_stochastic, allowed)
        self.doubly_stochastic = config.doubly_stochastic
        self.grid = config.rows, config.columns
        # The encoder states have one row per cell, although the source has an end token too.
        self._specs["attention"] = {
            name: dataclasses.replace(spec, rows=config.cells) if isinstance(spec, Source) else spec
            for name, spec in chosen.states.items()
        }
        self.shades = nn.Embedding(config.vocab_size, features)
        self.places = nn.Parameter(torch.randn(config.cells, features) * features**-0.5)
        convolutions = [nn.Conv2d(features, features, 3, padding=1) for _ in range(config.convolutions)]
        for layer in convolutions:  # keeps the variance of activations (He et al. 2015)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        self.convolutions = nn.ModuleList(convolutions)
        self.embedding = nn.Embedding(config.vocab_size, config.embedding)
        self.begin = nn.ModuleDict({name: nn.Linear(features, width) for name in ("hidden", "cell")})
        self.ask = query_projection(chosen, width)
        self.decoder = lstm_stack(config.embedding + features, width, 1, 0.0)
        self.of_state = nn.Linear(width, config.embedding, bias=False)
        self.of_seen = nn.Linear(features, config.embedding, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = nn.Linear(config.embedding, config.vocab_size)

    def read(self, source: Tensor, lengths: Sequence[int]) -> EncoderOutput:
        """The annotations [batch, cells, features] of grids [batch, cells or cells + 1], and h_0 and c_0.

        Raises `InvalidValue` for a source that is not one grid, with or without the end token.
        """
        rows, columns = self.grid
        cells = rows * columns
        for length in lengths:
            if length not in {cells, cells + 1}:
                allowed = f"{rows} rows of {columns} cells, {cells} tokens, and optionally the end token"
                raise InvalidValue.of("source", f"{length} tokens", allowed)
        seen = self.shades(source[:, :cells]) + self.places
        seen = seen.transpose(1, 2).unflatten(-1, self.grid)
        for layer in self.convolutions:
            seen = torch.relu(layer(seen))
        memory = seen.flatten(2).transpose(1, 2)
        mean = memory.mean(1)
        return EncoderOutput(memory, {name: torch.tanh(layer(mean))[:, None] for name, layer in self.begin.items()})

    def advance(self, inputs: Tensor, held: Held, attend: Attend) -> tuple[Tensor, Held]:
        """The input of the output layer, E y_{t-1} + L_h h_t + L_z ẑ_t, and the new state."""
        entering = self.dropout(inputs)
        seen = attend(self.ask(held["hidden"][:, 0]))
        hidden, fresh = lstm_step(self.decoder, torch.cat([entering, seen], dim=-1), held)
        return entering + self.of_state(self.dropout(hidden)) + self.of_seen(seen), fresh

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits L_o (E y_{t-1} + L_h h_t + L_z ẑ_t) of the words."""
        scores: Tensor = self.unembedding(hidden)
        return scores


def _is_hard(chosen: LayerAttention) -> bool:
    mechanism = chosen.mechanism
    return isinstance(mechanism, DeclaredMechanism) and isinstance(mechanism.spec(chosen.config).distribution, Hard)
