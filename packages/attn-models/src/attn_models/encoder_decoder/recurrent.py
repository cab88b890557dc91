"""The base class of recurrent encoder-decoder models: runs the step of a cell over sequences or a ragged batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attn_core import Field, Fields, RaggedBatch, Slot, Source
from attn_core.batch import ModelState
from attn_core.errors import Incompatible, InvalidValue
from attn_core.kernels.linear import Pack
from attn_core.state_faults import names_wrong_states
from attn_core.stores import ModelSpecs
from torch import Tensor, nn
from torch.nn import functional

from attn_models.attention import LayerAttention
from attn_models.encoder_decoder.config import EncoderDecoderConfig
from attn_models.encoder_decoder.encoder_input import (
    EncoderOutput,
    SelectedMemories,
    SelectedRequests,
    WholeSequenceMemory,
    encode_each,
    encoder_input_lengths,
)
from attn_models.recurrent.cells import prepack_rnn

WIDE = 400
"""Hidden size from which prepacked matrices are faster despite a loop in Python: at 192 torch is faster, at 500
slower."""
Attend = Callable[[Tensor], Tensor]
"""A function that returns the context vectors [batch, width] for the queries [batch, width] of one time step."""
Held = Mapping[str, Tensor]
"""The recurrent state of the decoder: tensors [batch, ...] by name."""


class Padded(nn.Module):
    """Pads the last dimension with zeros at its end, to `width` elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, rows: Tensor) -> Tensor:
        """Pad `rows` [..., at most `width`] to [..., `width`]."""
        return functional.pad(rows, (0, self.width - rows.shape[-1]))


def query_projection(chosen: LayerAttention, hidden_size: int) -> nn.Module:
    """The layer that maps the decoder's state to a query of the mechanism's width: a linear layer, or, for a mechanism
    without projections, padding of the state with zeros, so that W [s; 0] is the paper's W s.

    Raises `InvalidValue` for a state that is wider than the mechanism, if that has no projections.
    """
    width = chosen.config.hidden_size
    if getattr(chosen.config, "projections", "all") == "all":
        return nn.Linear(hidden_size, width, bias=False)
    if hidden_size > width:
        allowed = f"at most {width}, the width of the source, for a mechanism without projections"
        raise InvalidValue.of("hidden_size", hidden_size, allowed)
    return Padded(width)


class RecurrentModel(nn.Module):
    """An `EncoderDecoderModel` whose decoder is a recurrent cell. Subclasses define `embedding`, `read`, `advance`,
    `dropout` and `unembedding`.

    `fields` are the cell's states; those in `begun` are initialised by the encoder, the others with zeros. The state of
    a request is a `Slot`; its initial value is a `Source` of one row, computed once when the request is admitted.
    """

    output_layers: ClassVar[tuple[str, ...]] = ("unembedding",)
    """Names of the layers that map hidden states to logits."""

    embedding: nn.Embedding
    attention: Any
    dropout: nn.Dropout
    unembedding: nn.Linear

    def __init__(
        self,
        config: EncoderDecoderConfig,
        fields: Mapping[str, Field],
        begun: Sequence[str],
        chosen: LayerAttention | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_seq_len = config.max_seq_len
        self.max_encoder_len = config.max_encoder_len
        self.chosen = chosen
        self._begun = tuple(begun)
        start = Source({name: fields[name] for name in begun}, rows=1)
        self._specs: dict[str, Any] = {"recurrence": {"state": Slot(fields), "start": start}}
        self.attention = None if chosen is None else chosen.mechanism.build(chosen.config)
        if chosen is not None:
            self._specs["attention"] = chosen.states

    def pack(self, pack: Pack) -> None:
        """Prepack or quantize the linear layers, except the unembedding, and the recurrent stacks.

        An encoder narrower than `WIDE` is left unchanged: torch's loop over time steps is faster.
        """
        for name, layer in list(self.named_children()):
            if isinstance(layer, nn.Linear) and name != "unembedding":
                setattr(self, name, pack([layer]))
            elif isinstance(layer, nn.LSTM | nn.GRU) and (name != "encoder" or layer.hidden_size >= WIDE):
                setattr(self, name, prepack_rnn(layer, pack))

    @abstractmethod
    def read(self, source: Tensor, lengths: Sequence[int]) -> EncoderOutput:
        """Encode sources [batch, source] of these lengths."""

    @abstractmethod
    def advance(self, inputs: Tensor, held: Held, attend: Attend) -> tuple[Tensor, Held]:
        """One time step: hidden states [batch, hidden] for `logits` and the cell's new state, from the embedded tokens
        [batch, embedding] and the cell's state `held`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., hidden]."""
        scores: Tensor = self.unembedding(self.dropout(hidden))
        return scores

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each attention layer."""
        return () if self.chosen is None else (self.chosen.mechanism.name,)

    def forward(self, tokens: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of tokens [batch, tokens] over sources [batch, source]."""
        return self.logits(self.hidden(tokens, self.encoder_output(source, key_padding_mask), key_padding_mask))

    def encoder_output(self, source: Tensor | None, key_padding_mask: Tensor | None = None) -> EncoderOutput:
        """The output of the encoder for sources [batch, source]."""
        return self.read(*encoder_input_lengths(source, key_padding_mask, self.max_encoder_len))

    def hidden(self, tokens: Tensor, encoded: EncoderOutput, key_padding_mask: Tensor | None) -> Tensor:
        """Hidden states [batch, tokens, width] of whole sequences over the output of the encoder for sources of which
        `key_padding_mask` [batch, source], bool, is False for padding, at the end."""
        whole = [encoded.memory.shape[1]] * len(tokens)
        return self._run(tokens, encoded, whole if key_padding_mask is None else key_padding_mask.sum(1).tolist(), None)

    def forward_with_weights(
        self, tokens: Tensor, source: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `forward`, but also returns the attention weights [batch, heads, tokens, source] and the mask of real
        source positions, bool [batch, source].
        """
        source, lengths = encoder_input_lengths(source, key_padding_mask, self.max_encoder_len)
        encoded, queries = self.read(source, lengths), list[Tensor]()
        logits = self.logits(self._run(tokens, encoded, lengths, queries))
        real = torch.arange(encoded.memory.shape[1]) < torch.tensor(lengths)[:, None]
        real = real.to(encoded.memory.device)
        weights = self.attention.weights(torch.stack(queries, dim=1), encoded.memory, key_padding_mask=real)
        return logits, weights, real

    def encode(self, source: Tensor) -> Mapping[str, Mapping[str, Fields]]:
        """The encoder states of one source [source], by layer and state name."""
        return self.source_states(self.encoder_output(source[None]))

    def source_states(self, encoded: EncoderOutput) -> Mapping[str, Mapping[str, Fields]]:
        """The encoder states from the output of the encoder for one source without padding."""
        states: dict[str, Mapping[str, Fields]] = {"recurrence": {"start": encoded.start}}
        if self.chosen is not None:
            states["attention"] = self.attention.encode(encoded.memory[0])
        return states

    def state_specs(self) -> ModelSpecs:
        """The cell's state, its initial value, and the states of the attention."""
        return self._specs

    def layer_mechanisms(self) -> Mapping[str, str]:
        """The mechanism of the cross-attention by layer name; empty without one."""
        return {} if self.chosen is None else {"attention": self.chosen.mechanism.name}

    @names_wrong_states
    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, hidden] of the new tokens [tokens] of many requests, computed step by step."""
        own, sources = state["recurrence"], state.get("attention", {})
        held = self._continued(own, batch)
        inputs = self.embedding(tokens)
        if batch.decoding:
            hidden, held = self.advance(inputs, held, self._attend(batch, sources))
            own["state"].write(held)
            return hidden
        firsts = [span.start for span in batch.spans()]
        rows: list[Tensor] = []
        for moment in range(max(batch.lengths)):
            active = [r for r, length in enumerate(batch.lengths) if length > moment]
            chosen = torch.tensor(active, device=tokens.device)
            contexts = [batch.contexts[r] + moment for r in active]
            now = RaggedBatch.of([1] * len(active), contexts, chosen.new_tensor)
            views = {name: self._select(name, view, chosen, active) for name, view in sources.items()}
            at = chosen.new_tensor([firsts[r] + moment for r in active])
            selected = {name: values[chosen] for name, values in held.items()}
            hidden, fresh = self.advance(inputs[at], selected, self._attend(now, views))
            held = {name: values.index_copy(0, chosen, fresh[name]) for name, values in held.items()}
            rows.append(hidden.new_zeros(len(tokens), hidden.shape[-1]).index_copy(0, at, hidden))
        own["state"].write(held)
        return torch.stack(rows).sum(0)

    def attention_maps(self, tokens: Tensor, layers: Sequence[int], source: Tensor | None = None) -> dict[int, Tensor]:
        """Attention weights {0: [heads, query, source]} of the sequence [tokens] over the source [source].

        Raises `InvalidValue` for a layer other than 0, `Incompatible` for a model without attention or weights.
        """
        if self.chosen is None or not hasattr(self.attention, "weights"):
            raise Incompatible("this model has no attention weights")
        for layer in layers:
            if layer != 0:
                raise InvalidValue.of("layers", layer, "0")
        given, lengths = encoder_input_lengths(None if source is None else source[None], None, self.max_encoder_len)
        encoded = self.read(given, lengths)
        queries: list[Tensor] = []
        self._run(tokens[None], encoded, lengths, queries)
        weights = self.attention.weights(torch.stack(queries, dim=1), encoded.memory)[0]
        return dict.fromkeys(layers, weights)

    def _run(
        self, tokens: Tensor, encoded: EncoderOutput, lengths: Sequence[int], queries: list[Tensor] | None
    ) -> Tensor:
        """Hidden states [batch, tokens, hidden] of whole sequences; `queries` collects the queries of the attention."""
        self._require_context(tokens)
        sources = self._initial_attention(encoded.memory, lengths)
        held = self._initial_state(encoded.start, tokens)
        inputs = self.embedding(tokens)
        rows = []
        for moment in range(tokens.shape[1]):
            now = RaggedBatch.of([1] * len(tokens), [moment] * len(tokens), tokens.new_tensor)
            hidden, held = self.advance(inputs[:, moment], held, self._attend(now, sources, queries))
            rows.append(hidden)
        return torch.stack(rows, dim=1)

    def _initial_attention(self, memory: Tensor, lengths: Sequence[int]) -> Mapping[str, Any]:
        """The states of the attention over `memory` [batch, source, width] before the first token."""
        if self.chosen is None:
            return {}
        own = {name: spec for name, spec in self.chosen.states.items() if isinstance(spec, Slot)}
        remembered = {name: WholeSequenceMemory(spec, len(memory), memory) for name, spec in own.items()}
        return {**encode_each(self.attention, memory, lengths), **remembered}

    def _select(self, name: str, view: Any, chosen: Tensor, active: Sequence[int]) -> Any:
        """The view of the attention's state `name` restricted to these requests, given as a tensor and as a list."""
        if isinstance(self._specs["attention"][name], Slot):
            return SelectedMemories(view, chosen)
        return SelectedRequests(view, active)

    def _require_context(self, tokens: Tensor) -> None:
        if tokens.shape[1] > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{tokens.shape[1]} tokens", f"at most the context of {self.max_seq_len}")

    def _attend(self, batch: RaggedBatch, sources: Mapping[str, Any], queries: list[Tensor] | None = None) -> Attend:
        def attend(query: Tensor) -> Tensor:
            if queries is not None:
                queries.append(query)
            seen: Tensor = self.attention.step(query, batch, sources)
            return seen

        return attend

    def _continued(self, own: Mapping[str, Any], batch: RaggedBatch) -> Held:
        """The cell's state of each request: the stored one, or the initial value for a request at position 0."""
        held = own["state"].read()
        if all(batch.contexts):
            return dict(held)
        fresh = batch.positions.new_tensor(batch.contexts) == 0
        start = own["start"].rows(range(batch.requests)).fields
        return {
            name: torch.where(fresh.view(-1, *[1] * (rows.dim() - 1)), start[name][:, 0], rows)
            if name in self._begun
            else rows
            for name, rows in held.items()
        }

    def _initial_state(self, start: Held, tokens: Tensor) -> Held:
        """The initial state of whole sequences: zeros for fields that the encoder does not initialise."""
        example = next(iter(start.values()))
        specs = self._specs["recurrence"]["state"].fields
        return {
            name: start[name] if name in start else example.new_zeros(len(tokens), *field.shape)
            for name, field in specs.items()
        }
