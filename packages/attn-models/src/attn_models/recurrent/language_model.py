"""A language model without Transformer blocks: embedding, optionally an LSTM, layers of one mechanism, unembedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from attn_core import Capability, RaggedBatch, Slot
from attn_core.batch import ModelState
from attn_core.errors import Incompatible, InvalidValue
from attn_core.kernels.linear import Pack
from attn_core.state_faults import names_wrong_states
from attn_core.stores import ModelSpecs
from torch import Tensor, nn

from attn_models.decoder.block import replay_step, require_same_shape
from attn_models.recurrent.cells import PrepackedRnn, lstm_fields, lstm_stack, lstm_state, lstm_step, prepack_rnn
from attn_models.recurrent.config import RecurrentConfig, attention_of

LSTM = "lstm"


class RecurrentLanguageModel(nn.Module):
    """p(x_{t+1}) ∝ exp(W h_t + b), where h_t is the output of the last layer. Tokens are int64.

    Implements `attn_core.models.LanguageModel`. With LSTM layers it is the key-value(-predict) language model (Daniluk
    et al. 2017, arXiv 1702.04521, section 2); without them, depending on the mechanism, the LSTMN (Cheng et al. 2016,
    arXiv 1601.06733, section 3) or the Neural Turing Machine (Graves et al. 2014, arXiv 1410.5401).
    """

    output_layers: ClassVar[tuple[str, ...]] = ("unembedding",)
    """Names of the layers that map hidden states to logits."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_seq_len = config.max_seq_len
        self.chosen = chosen = attention_of(config)
        self.incremental = chosen.mechanism.can(Capability.INCREMENTAL)
        self.embedding = nn.Embedding(config.vocab_size, config.entering)
        stacked = (
            lstm_stack(config.entering, config.hidden_size, config.lstms, config.dropout) if config.lstms else None
        )
        self.lstm: nn.LSTM | PrepackedRnn | None = stacked
        self.attentions = nn.ModuleList(chosen.mechanism.build(chosen.config) for _ in range(config.num_layers))
        self.dropout = nn.Dropout(config.dropout)
        self.unembedding = nn.Linear(config.hidden_size, config.vocab_size)
        self._specs: dict[str, Any] = {layer_name(layer): chosen.states for layer in range(config.num_layers)}
        if stacked is not None:
            self._specs[LSTM] = {"state": Slot(lstm_fields(config.hidden_size, config.lstms))}

    def pack(self, pack: Pack) -> None:
        """Prepack or quantize the LSTM for inference."""
        if isinstance(self.lstm, nn.LSTM):
            self.lstm = prepack_rnn(self.lstm, pack)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens]."""
        hidden = self._entering(tokens)
        for attention in self._layers():
            hidden = attention(self.dropout(hidden))
        return self.logits(hidden)

    @names_wrong_states
    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, width] of the new tokens [tokens] of many requests."""
        hidden: Tensor = self.embedding(tokens)
        if self.lstm is not None:
            hidden = self._lstm_step(self.lstm, hidden, batch, state)
        for layer, attention in enumerate(self._layers()):
            own = state[layer_name(layer)]
            step = attention.step if self.incremental else partial(replay_step, attention)
            hidden = require_same_shape(step(hidden, batch, own), hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., width]."""
        scores: Tensor = self.unembedding(self.dropout(hidden))
        return scores

    def state_specs(self) -> ModelSpecs:
        """The state specs of the LSTM and of every layer, by layer name."""
        return self._specs

    def layer_mechanisms(self) -> Mapping[str, str]:
        """The mechanism of each layer by layer name."""
        return {layer_name(layer): self.chosen.mechanism.name for layer in range(len(self.attentions))}

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each layer."""
        return tuple(self.layer_mechanisms().values())

    def attention_maps(self, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """Attention weights [heads, query, key] by layer of one sequence [tokens].

        Raises `InvalidValue` for a layer that does not exist, `Incompatible` for a mechanism without weights.
        """
        name = self.chosen.mechanism.name
        if not self.chosen.mechanism.can(Capability.WEIGHTS):
            raise Incompatible(f"mechanism {name!r} returns no attention weights", mechanism=name)
        for layer in layers:
            if not 0 <= layer < len(self.attentions):
                raise InvalidValue.of("layers", layer, f"0 to {len(self.attentions) - 1}")
        hidden, maps = self._entering(tokens[None]), {}
        for layer, attention in enumerate(self._layers()):
            if layer in layers:
                maps[layer] = attention.weights(hidden)[0]
            hidden = attention(hidden)
        return maps

    def _entering(self, tokens: Tensor) -> Tensor:
        """The input of the first attention layer, [batch, tokens, width]."""
        if tokens.shape[1] > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{tokens.shape[1]} tokens", f"at most the context of {self.max_seq_len}")
        rows: Tensor = self.embedding(tokens)
        entering: Tensor = rows if self.lstm is None else self.lstm(self.dropout(rows))[0]
        return entering

    def _layers(self) -> Sequence[Any]:
        """The attention layers, which have the methods of `AttentionLayer`."""
        return cast("Sequence[Any]", self.attentions)

    def _lstm_step(self, lstm: nn.LSTM | PrepackedRnn, rows: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Run the LSTM on the embeddings `rows` [tokens, embedding] of the new tokens, and update its state."""
        view = state[LSTM]["state"]
        held = view.read()
        if batch.decoding:
            out, fresh = lstm_step(lstm, rows, held)
            view.write(fresh)
            return out
        outs, each = [], []
        for span in batch.spans():
            last = tuple(held[name][span.request, :, None].contiguous() for name in ("hidden", "cell"))
            out, after = lstm(rows[None, span.start : span.stop], last)
            outs.append(out[0])
            each.append(lstm_state(after))
        view.write({name: torch.cat([fields[name] for fields in each]) for name in ("hidden", "cell")})
        return torch.cat(outs)


def layer_name(layer: int) -> str:
    """The name under which the states of a layer are stored."""
    return f"attention.{layer}"
