"""Batches of encoder inputs: their lengths and reversal, and encoder states in memory as views for attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attn_core import Fields, Slot
from attn_core.batch import Rows, SlotView, SourceView
from attn_core.errors import InvalidValue
from attn_core.states import dtype_name
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """The output of an encoder: `memory` [batch, source, width], and the decoder's initial state by name."""

    memory: Tensor
    start: Mapping[str, Tensor]

    def each(self, lengths: Sequence[int]) -> list[EncoderOutput]:
        """The output for each of the sources, of these lengths."""
        starts = [{name: rows[row, None] for name, rows in self.start.items()} for row in range(len(lengths))]
        return [EncoderOutput(self.memory[row, None, :length], starts[row]) for row, length in enumerate(lengths)]


def encoder_input_lengths(
    source: Tensor | None, key_padding_mask: Tensor | None, longest: int
) -> tuple[Tensor, list[int]]:
    """The encoder input [batch, source] and the length of each sequence.

    Raises `InvalidValue` if `source` is None or longer than `longest`, for an empty sequence, and for padding that is
    not at the end.
    """
    if source is None:
        raise InvalidValue.of("source", None, "tokens [batch, source], as the model has an encoder")
    if source.shape[1] > longest:
        raise InvalidValue.of("source", f"{source.shape[1]} tokens", f"at most {longest} tokens")
    counts = torch.full((len(source),), source.shape[1]) if key_padding_mask is None else key_padding_mask.sum(-1)
    ordered = key_padding_mask is None or torch.equal(
        key_padding_mask, torch.arange(source.shape[1], device=key_padding_mask.device) < counts[:, None]
    )
    if not ordered or not bool((counts > 0).all()):
        raise InvalidValue.of(
            "key_padding_mask", "another mask", "at least one real token in each source, padding at the end"
        )
    return source, [int(count) for count in counts]


def reverse_sequences(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Reverse the real tokens of each sequence of `rows` [batch, source, ...]; padding stays at the end."""
    counts = torch.tensor(lengths, device=rows.device)[:, None]
    places = torch.arange(rows.shape[1], device=rows.device)[None]
    reversed_positions = torch.where(places < counts, counts - 1 - places, places)
    return rows[torch.arange(len(rows), device=rows.device)[:, None], reversed_positions]


@dataclass(frozen=True, eq=False)
class PaddedEncoderStates:
    """A `SourceView` of encoder states that are held in memory, padded to the longest sequence."""

    held: Rows

    def rows(self, requests: Sequence[int]) -> Rows:
        """The rows of these sequences."""
        if len(requests) == len(self.held.positions):
            return self.held
        chosen = torch.tensor(list(requests), device=self.held.positions.device)
        return Rows(
            fields={name: rows[chosen] for name, rows in self.held.fields.items()},
            positions=self.held.positions[chosen],
            key_padding_mask=None if self.held.key_padding_mask is None else self.held.key_padding_mask[chosen],
        )


@dataclass(frozen=True, eq=False)
class SelectedRequests:
    """A `SourceView` of the requests `chosen` from another view."""

    view: SourceView
    chosen: Sequence[int]

    def rows(self, requests: Sequence[int]) -> Rows:
        """The rows of these requests, which are indices into `chosen`."""
        return self.view.rows([self.chosen[request] for request in requests])


class WholeSequenceMemory:
    """A `SlotView` for training on whole sequences token by token; gradients flow through the written states."""

    def __init__(self, spec: Slot, sequences: int, like: Tensor) -> None:
        self._fields: Fields = {
            name: like.new_zeros(sequences, *field.shape, dtype=getattr(torch, dtype_name(field.dtype)))
            if field.dtype
            else like.new_zeros(sequences, *field.shape)
            for name, field in spec.fields.items()
        }

    def read(self) -> Fields:
        """The state of every sequence, [sequences, ...] each."""
        return self._fields

    def write(self, fields: Fields) -> None:
        """Replace the state of every sequence."""
        self._fields = fields


@dataclass(frozen=True, eq=False)
class SelectedMemories:
    """A `SlotView` of the requests `chosen` from another view."""

    view: SlotView
    chosen: Tensor

    def read(self) -> Fields:
        """The states of the chosen requests."""
        return {name: rows[self.chosen] for name, rows in self.view.read().items()}

    def write(self, fields: Fields) -> None:
        """Replace the states of the chosen requests; those of other requests are kept."""
        held = self.view.read()
        self.view.write({name: rows.index_copy(0, self.chosen, fields[name]) for name, rows in held.items()})


def encode_each(attention: Any, memory: Tensor, lengths: Sequence[int]) -> Mapping[str, PaddedEncoderStates]:
    """The encoder states by name, from `attention.encode` on each sequence of `memory` [batch, source, width]."""
    each: list[Mapping[str, Fields]] = [
        attention.encode(rows[:length]) for rows, length in zip(memory, lengths, strict=True)
    ]
    return {state: PaddedEncoderStates(_padded([states[state] for states in each])) for state in each[0]}


def _padded(sources: Sequence[Fields]) -> Rows:
    counts = [len(next(iter(fields.values()))) for fields in sources]
    device = next(iter(sources[0].values())).device
    positions = torch.arange(max(counts), device=device).expand(len(counts), -1)
    key_padding_mask = positions < torch.tensor(counts, device=device)[:, None] if min(counts) < max(counts) else None
    fields = {name: pad_sequence([fields[name] for fields in sources], batch_first=True) for name in sources[0]}
    return Rows(fields=fields, positions=positions, key_padding_mask=key_padding_mask)
