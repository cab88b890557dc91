"""The base class of the layers of linear recurrences, and its parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from attn_core import Fields, Heads, LayerState, RaggedBatch, installed
from attn_core.batch import SlotsInPlace, Span
from attn_core.joint import Joins, joint_outputs
from attn_core.kernels.linear import Pack
from attn_core.kernels.recurrence import RecurrenceDispatcher, Steps
from attn_core.kernels.recurrent_step import (
    ConvolutionInputs,
    RecurrentStepDispatcher,
    RecurrentStepInputs,
    RecurrentStepSpec,
)
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import silu

from attn_variants.attention.projections import (
    QUERY_KEY_VALUE,
    JointProjection,
    by_heads,
    fresh_linear,
    multiplied_in,
    refuse_source,
)
from attn_variants.mechanisms.recurrence_scan import effective_weights


class ShortConvolution(nn.Module):
    """A causal depthwise convolution over the last `taps` tokens of each channel, followed by SiLU.

    Learned: `weight` [channels, taps], the newest token last, uniform in ±1/√taps like PyTorch's convolutions.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-(taps**-0.5), taps**-0.5))

    def forward(self, rows: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve rows [batch, tokens, channels]; also returns the last taps - 1 inputs, [batch, taps - 1, channels].

        `tail` contains the inputs before the first row; None is the start of a sequence, with zeros before it.
        """
        batch, tokens, channels = rows.shape
        if tail is None:
            tail = rows.new_zeros(batch, self.taps - 1, channels)
        known = torch.cat([tail.to(rows.dtype), rows], dim=1)
        weight = self.weight.to(rows.dtype)
        if not torch.is_grad_enabled():  # the weights of a tap side by side; with gradients it would cost two copies
            weight = weight.t().contiguous().t()
        summed = known[:, :tokens] * weight[:, 0]
        for tap in range(1, self.taps):
            summed.addcmul_(known[:, tap : tap + tokens], weight[:, tap])
        return silu(summed, inplace=not torch.is_grad_enabled()), known[:, tokens:]


class Places(NamedTuple):
    """The `positions` [batch or 1, tokens], int64, of tokens, all of them below `end`."""

    positions: Tensor
    end: int


def places_of(rows: Tensor) -> Places:
    """The positions of whole sequences [batch, tokens, ...]."""
    return Places(torch.arange(rows.shape[1], device=rows.device)[None], rows.shape[1])


class Projections:
    """The outputs of the linear layers of `layer` that read its input `rows` [..., hidden_size], by their names.

    Each is computed on first access; layers that are joined into one are computed together.
    """

    def __init__(self, layer: RecurrenceLayer, rows: Tensor, known: Mapping[str, Tensor] | None = None) -> None:
        self.layer = layer
        self.rows = rows
        self._known = known

    def __getitem__(self, name: str) -> Tensor:
        """The output [..., outputs] of a linear layer, such as "query" or "fade.0"."""
        joint = self.layer.joint
        if joint is None or name not in joint.names:
            module = self.layer.get_submodule(name) if "." in name else getattr(self.layer, name)
            found: Tensor = module(self.rows)
            return found
        if self._known is None:
            self._known = dict(zip(joint.names, joint(self.rows), strict=True))
        return self._known[name]

    def query_key_value(self) -> list[Tensor]:
        """Queries, keys and values [..., outputs], whose layers may be joined in training."""
        layers = self.layer.joint_layers()
        return (
            joint_outputs(self.rows, layers, self.layer.joins) if layers else [self[name] for name in QUERY_KEY_VALUE]
        )

    def through(self, name: str) -> Tensor:
        """The output of a linear layer, or of an `nn.Sequential` of two; the first may be joined with others."""
        pair: nn.Module = getattr(self.layer, name)
        if not isinstance(pair, nn.Sequential):
            return self[name]
        joint = self.layer.joint
        if joint is None or f"{name}.0" not in joint.names:
            found: Tensor = pair(self.rows)
            return found
        second: Tensor = pair[1](self[f"{name}.0"])
        return second

    def at(self, *index: slice | None) -> Projections:
        """The projections of some of the rows; if all layers are joined, slices of the outputs for all rows."""
        joint = self.layer.joint
        if joint is None or len(joint.names) == len(QUERY_KEY_VALUE):
            return Projections(self.layer, self.rows[index])
        _ = self[joint.names[0]]
        known = {name: rows[index] for name, rows in (self._known or {}).items()}
        return Projections(self.layer, self.rows[index], known)


class Inputs(NamedTuple):
    """The values from which the steps of tokens are computed.

    `projected` are the projections of rows [batch, tokens, hidden_size]; `query` and `key` [batch, tokens, key_heads,
    key_size] and `value` [batch, tokens, heads, value_size] are projected, and convolved if the layer has a
    convolution.
    """

    projected: Projections
    query: Tensor
    key: Tensor
    value: Tensor
    places: Places


class RecurrenceLayer(nn.Module):
    """A linear recurrence over inputs of `hidden_size`; subclasses compute its `steps` and may extend `finish`.

    Pairs are computed within chunks of `chunk` tokens, which affects only the speed; `taps` is the size of a short
    convolution over queries, keys and values, 0 for none; `plan` chooses the kernel. Learned: `query`, `key`, `value`,
    `output` (`nn.Linear`) and `convolution`. The state is at least float32 for all input dtypes; so are the steps,
    except for kernels that take queries, keys and values in 16 bits.

    A decode step may be computed by a kernel that updates the states in place: `step_spec` describes the computation,
    None for no such kernel, and `step_inputs` returns its inputs.
    """

    further: tuple[str, ...] = ()
    """The names of the linear layers, besides query, key and value, that read the layer's input."""

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int, taps: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.chunk = chunk
        self.plan = RecurrenceDispatcher(installed().kernels)
        self.step_plan = RecurrentStepDispatcher(installed().kernels)
        self.step_spec: RecurrentStepSpec | None = None
        into, out = heads.key_value * heads.key_size, heads.query * heads.value_size
        self.query: nn.Module = fresh_linear(hidden_size, into, bias=bias)
        self.key: nn.Module = fresh_linear(hidden_size, into, bias=bias)
        self.value: nn.Module = fresh_linear(hidden_size, out, bias=bias)
        self.output: nn.Module = fresh_linear(out, hidden_size, bias=bias)
        self.joint: JointProjection | None = None
        self.joins: Joins | None = None
        self.convolution = ShortConvolution(2 * into + out, taps) if taps else None

    @abstractmethod
    def steps(self, inputs: Inputs) -> Steps:
        """The inputs of the recurrence for some tokens: queries, keys, values, and decays and strengths if any."""

    def joint_layers(self) -> list[nn.Linear]:
        """The query, key and value layers; [] if they are packed."""
        found = [module for module in (self.query, self.key, self.value) if isinstance(module, nn.Linear)]
        return found if len(found) == len(QUERY_KEY_VALUE) else []

    def pack(self, pack: Pack) -> None:
        """Pack the projections for serving: query, key and value as one, and the output."""
        layers = [cast("nn.Linear", layer) for layer in (self.query, self.key, self.value)]
        self.joint = JointProjection.of(pack, layers)
        self.query, self.key, self.value = self.joint.parts()
        self.output = pack([cast("nn.Linear", self.output)])

    def join(self, pack: Pack) -> None:
        """Pack all linear layers that read the layer's input, including `further`, as one unquantised projection."""
        names = (*QUERY_KEY_VALUE, *self.further)
        layers = [cast("nn.Linear", self.get_submodule(name)) for name in names]
        self.joint = JointProjection.of(pack, layers, names)
        for name, part in zip(names, self.joint.parts(), strict=True):
            self.set_submodule(name, part)
        self.output = pack([cast("nn.Linear", self.output)])

    def finish(self, out: Tensor, projected: Projections) -> Tensor:
        """The layer's output [batch, tokens, hidden_size], from the recurrence's [batch, tokens, heads, value_size]."""
        found: Tensor = self.output(out.flatten(-2).to(projected.rows.dtype))
        return found

    def step_inputs(self, projected: Projections, batch: RaggedBatch, state: SlotsInPlace) -> RecurrentStepInputs:  # noqa: ARG002 -- positions, for those that turn
        """The inputs of a kernel for a decode step of rows [requests, hidden_size], as described by `step_spec`."""
        query, key, value = self._by_heads(projected.query_key_value())
        convolution = None
        if self.convolution is not None:
            into = self.heads.key_value * self.heads.key_size
            convolution = ConvolutionInputs(self.convolution.weight, None, (0, into, 2 * into))
        return RecurrentStepInputs(
            spec=cast("RecurrentStepSpec", self.step_spec),
            query=query,
            key=key,
            value=value,
            state=state,
            convolution=convolution,
        )

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` if a source is
        given.
        """
        refuse_source(source)
        projected = Projections(self, query)
        steps, _ = self._steps(projected, places_of(query), key_padding_mask, None)
        return self.finish(self.attend(steps, multiplied_in(query)), projected)

    def attend(self, steps: Steps, computed: torch.dtype) -> Tensor:
        """The outputs of the recurrence over whole sequences, [batch, tokens, heads, value_size].

        `computed` is the dtype of the model's matrix products; see `RecurrenceDispatcher.run`.
        """
        return self.plan.run(steps, None, self.chunk, computed)[0]

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The effective attention weights [batch, heads, query, key] of the values in the recurrence's outputs.

        They may be negative and need not sum to one, and do not include the norms and gates that follow.
        """
        return effective_weights(self.read(query, source, key_padding_mask)[0])

    def read(self, rows: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> tuple[Steps, Tensor | None]:
        """The steps of whole sequences; raises `InvalidValue` if a source is given."""
        refuse_source(source)
        return self._steps(Projections(self, rows), places_of(rows), key_padding_mask, None)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape.

        Reads and replaces the state "memory": "S" [requests, heads, key_size, value_size], float32, and with a
        convolution "tail" [requests, taps - 1, channels], its last inputs.
        """
        projected, decoding = Projections(self, query), batch.decoding
        if decoding:
            found = self._in_place(projected, batch, state["memory"])
            if found is not None:
                return found

        def step(span: Span, alone: RaggedBatch) -> Tensor | None:
            return self._in_place(projected.at(slice(span.start, span.stop)), alone, state["memory"], span.request)

        done = {} if decoding else {span.start: out for span, out in self.step_plan.single_tokens(batch, step)}
        before = state["memory"].read()
        if decoding:
            out, after = self._decode(projected, batch, before["S"], before.get("tail"))
        else:
            out, after = self._prefill(projected, batch, before, done)
        state["memory"].write({name: part.to(before[name].dtype) for name, part in after.items()})
        finished = self.finish(out[None], projected.at(None))[0]
        for row, found in done.items():
            finished[row] = found[0]
        return finished

    def _in_place(
        self, projected: Projections, batch: RaggedBatch, view: Any, request: int | None = None
    ) -> Tensor | None:
        """The output of a decode step by a kernel that updates states in place, for all requests of a view or one of
        them; None if there is no such kernel, or a kernel was chosen by name."""
        if self.step_spec is None or not self.step_plan.able or self.plan.name is not None:
            return None
        out = self.step_plan.run(
            self.step_spec,
            projected.rows,
            view,
            lambda state: self.step_inputs(projected, batch, state),
            gradients=torch.is_grad_enabled(),
            request=request,
        )
        return None if out is None else self.output(out.to(projected.rows.dtype))

    def _by_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        counts = (self.heads.key_value, self.heads.key_value, self.heads.query)
        return [by_heads(rows, count) for rows, count in zip(parts, counts, strict=True)]

    def _decode(
        self, projected: Projections, batch: RaggedBatch, memory: Tensor, tail: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        places = Places(batch.positions[:, None], batch.longest)
        steps, tail = self._steps(projected.at(slice(None), None), places, None, tail)
        out, after = self.plan.decode(steps, memory.to(steps.value.dtype))
        return out[:, 0], _kept(after, tail)

    def _prefill(
        self, projected: Projections, batch: RaggedBatch, before: Fields, done: Mapping[int, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The outputs and the states after them; requests whose rows are `done` keep their states and get zeros."""
        memory, tail = before["S"], before.get("tail")
        pieces, memories, tails = [], [], []
        for span in batch.spans():
            piece, request = slice(span.start, span.stop), slice(span.request, span.request + 1)
            mine = None if tail is None else tail[request]
            if span.start in done:
                pieces.append(memory.new_zeros(1, self.heads.query, memory.shape[-1]))
                memories.append(memory[request])
                tails.append(mine)
                continue
            places = Places(batch.positions[None, piece], batch.longest)
            steps, mine = self._steps(projected.at(None, piece), places, None, mine)
            held = memory[request].to(steps.value.dtype)
            if span.stop - span.start == 1:
                # As in a decode step, so that the result does not depend on the other requests of the batch.
                seen, after = self.plan.decode(steps, held)
            else:
                seen, after = self.plan.run(steps, held, self.chunk, multiplied_in(projected.rows))
            pieces.append(seen[0])
            memories.append(after)
            tails.append(mine)
        left = None if tail is None else torch.cat(tails)  # type: ignore[arg-type]
        return torch.cat(pieces), _kept(torch.cat(memories), left)

    def _steps(
        self, projected: Projections, places: Places, key_padding_mask: Tensor | None, tail: Tensor | None
    ) -> tuple[Steps, Tensor | None]:
        query, key, value = projected.query_key_value()
        if self.convolution is not None:
            mixed = wide(torch.cat([query, key, value], dim=-1))
            mixed = mixed if key_padding_mask is None else torch.where(key_padding_mask[..., None], mixed, 0)
            mixed, tail = self.convolution(mixed, tail)
            query, key, value = mixed.split([query.shape[-1], key.shape[-1], value.shape[-1]], dim=-1)
        query, key, value = self._by_heads((query, key, value))
        return self.steps(Inputs(projected, query, key, value, places)).kept(key_padding_mask), tail


def _kept(memory: Tensor, tail: Tensor | None) -> dict[str, Tensor]:
    return {"S": memory} if tail is None else {"S": memory, "tail": tail}
