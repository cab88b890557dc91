"""Runs the model over the scheduled chunks of a step, and computes the logits that are needed from it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import torch
from attn_core import RaggedBatch, Source
from attn_core.errors import InternalError
from attn_core.kernels.sampling import sampling_kernel
from attn_core.models import EncoderDecoderModel, GreedyHead, LanguageModel, MixesAdapters, TakesEmbeddings
from attn_core.stores import StateStore
from attn_schema import EngineConfig
from torch import Tensor

from attn_engine import sequence as sequences
from attn_engine.graphs import StepGraphs, StepLimits, recorder_for
from attn_engine.host_numbers import on_device
from attn_engine.nan_tracer import NanTracer
from attn_engine.scheduler import ScheduledChunk
from attn_engine.tensor_parallel import LeadingStore


class BatchEntry(NamedTuple):
    """One entry of a ragged batch: the number of the sequence whose KV cache it reads, and how many tokens it has.

    `context` is the number of tokens before them; `path` holds the cache positions of the ancestors of a token in a
    draft tree, and its own.
    """

    number: int
    length: int
    context: int
    path: tuple[int, ...] | None = None


def numerics_of(config: EngineConfig) -> AbstractContextManager[object]:
    """The context in which an engine of this config computes; it may be entered again."""
    if not config.batch_invariant:
        return nullcontext()
    from attn_kernels_cpu.invariant import BatchInvariant

    return BatchInvariant()


class ModelRunner:
    """Runs the model over ragged batches against the store.

    Steps are replayed by `graphs` where these exist and support the step. `numerics` describes in words what determines
    rounding: the device, dtype, torch version and the given `options`.
    """

    def __init__(self, model: LanguageModel, store: StateStore, options: str = "") -> None:
        self.model = model
        self.store = store
        self.graphs: StepGraphs | None = None
        self.adapters: MixesAdapters | None = None
        """Applies the adapters of requests in a step; if None, no request may have an adapter."""
        self._takes_embeddings = model if isinstance(model, TakesEmbeddings) else None
        self._ranks = store.ranks if isinstance(store, LeadingStore) else None
        parameter = next(iter(model.parameters()), None)  # type: ignore[attr-defined]
        self._greedy_head = model if isinstance(model, GreedyHead) else None
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.sampling = sampling_kernel(model.vocab_size, self.device.type)
        """The kernel that samples tokens; None where torch samples."""
        dtype = "" if parameter is None else f" {parameter.dtype}".replace("torch.", "")
        self.numerics = f"{_chip(self.device)}{dtype}, {options}, torch {torch.__version__}"
        states = [spec for specs in model.state_specs().values() for spec in specs.values()]
        self.has_encoder = any(isinstance(spec, Source) for spec in states)
        self.max_encoder_len = cast("EncoderDecoderModel", model).max_encoder_len if self.has_encoder else None

    def record_steps(self, config: EngineConfig) -> None:
        """From now on record steps of the config's sizes as graphs and replay them, if the device supports graphs."""
        recorder = recorder_for(self.device)
        if recorder is not None:
            sequences, tokens = config.batch_sizes
            limits = StepLimits(min(tokens, config.max_cudagraph_capture_size), sequences)
            self.graphs = StepGraphs(self.model, self.store, recorder, limits)

    def encode(self, number: int, encoder_input: Sequence[int] | Tensor | None) -> None:
        """Run the encoder over tokens or features for a sequence that was just admitted, if the model has one."""
        if self.has_encoder and encoder_input is not None:
            model = cast("EncoderDecoderModel", self.model)
            if isinstance(encoder_input, Tensor):
                source = encoder_input.to(self.device)
            else:
                source = self._tensor(list(encoder_input))
            self.store.write_source(number, model.encode(source))

    def run(
        self, chunks: Sequence[ScheduledChunk], tracer: NanTracer | None = None
    ) -> tuple[list[ScheduledChunk], Tensor]:
        """Compute the chunks; returns them in batch order, and their hidden states [tokens, hidden_size].

        Raises whatever the model raises, and `InternalError` if it returns the wrong number of hidden states.
        """
        if self.adapters is not None and not self.adapters.mixes:
            adapters = list(dict.fromkeys(chunk.sequence.request.adapter for chunk in chunks))
            groups = [[chunk for chunk in chunks if chunk.sequence.request.adapter is one] for one in adapters]
        else:
            groups = [list(chunks)]
        parts = [self._run(group, tracer) for group in groups]
        if len(parts) == 1:
            return parts[0]
        return [chunk for ordered, _ in parts for chunk in ordered], torch.cat([hidden for _, hidden in parts])

    def _run(self, chunks: Sequence[ScheduledChunk], tracer: NanTracer | None) -> tuple[list[ScheduledChunk], Tensor]:
        """Compute chunks that the model can process in one step."""
        by_number = {chunk.sequence.number: chunk for chunk in chunks}
        numbers = self.store.order(list(by_number))
        ordered = [by_number[number] for number in numbers]
        adapted = any(chunk.sequence.request.adapter is not None for chunk in ordered)
        given = [(chunk.sequence.request.prompt_embeddings, chunk) for chunk in ordered]
        concerned = any(each is not None and each.concerns(chunk.start, chunk.length) for each, chunk in given)
        takes = self._takes_embeddings if concerned else None
        if self.graphs is not None and tracer is None and not adapted and takes is None:
            found = self.graphs.run(ordered)
            if found is not None:
                return ordered, found
        batch, names = self._batch(ordered)
        tokens = [
            token
            for chunk in ordered
            for token in (*chunk.sequence.tokens[chunk.start : chunk.start + chunk.length], *chunk.draft.tokens)
        ]
        state = self.store.view(batch, names)
        together = nullcontext() if self._ranks is None else self._ranks.step(tokens)
        placed = nullcontext() if takes is None else self._placing(takes, ordered, batch)
        with self._with_adapters(ordered) if adapted else nullcontext(), placed, together:
            hidden = self.model.step(self._tensor(tokens), batch, tracer.observed(state) if tracer else state)
        if hidden.dim() != 2 or len(hidden) != len(tokens):
            raise InternalError(f"the model returned hidden states {tuple(hidden.shape)} for {len(tokens)} tokens")
        if tracer:
            tracer.check_output(hidden)
        return ordered, hidden

    def _placing(
        self, model: TakesEmbeddings, ordered: Sequence[ScheduledChunk], batch: RaggedBatch
    ) -> AbstractContextManager[None]:
        """A context within which the step uses what prompts give in place of the embeddings of their tokens."""
        from attn_models.vision_language.placing import Part, placed_rows

        parts = [Part(c.sequence.request.prompt_embeddings, c.start, c.length, c.rows) for c in ordered]
        return model.placing(placed_rows(parts, batch.positions))

    def _with_adapters(self, ordered: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        if self.adapters is None:
            raise InternalError("a request has an adapter, but the model was not prepared for adapters")
        return self.adapters.stepping([(chunk.sequence.request.adapter, chunk.rows) for chunk in ordered])

    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [rows, vocab_size] at the given rows of the hidden states [tokens, hidden_size]."""
        return self.model.logits(self._rows(hidden, rows))

    def greedy_tokens(self, hidden: Tensor, rows: Sequence[int]) -> Tensor | None:
        """The most likely tokens at the given rows of the hidden states [tokens, hidden_size]; -1 where there is none.

        None if the model cannot find them without computing its logits.
        """
        return None if self._greedy_head is None else self._greedy_head.greedy_tokens(self._rows(hidden, rows))

    def _rows(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        # Comparing lengths is not enough: the completions of one prompt share its last row.
        return hidden if list(rows) == list(range(len(hidden))) else hidden[self._tensor(list(rows))]

    def _batch(self, chunks: Sequence[ScheduledChunk]) -> tuple[RaggedBatch, list[int]]:
        """The batch and the sequence number of each entry; every token of a draft tree is an entry of its own."""
        if not any(chunk.draft.is_tree for chunk in chunks):
            lengths, contexts = [chunk.rows for chunk in chunks], [chunk.start for chunk in chunks]
            return RaggedBatch.of(lengths, contexts, self._tensor), [chunk.sequence.number for chunk in chunks]
        entries: list[BatchEntry] = []
        for chunk in chunks:
            number, end = chunk.sequence.number, chunk.start + chunk.length
            if not chunk.draft.is_tree:
                entries.append(BatchEntry(number, chunk.rows, chunk.start))
                continue
            entries.append(BatchEntry(number, chunk.length, chunk.start))
            for node in range(len(chunk.draft)):
                path = tuple(end + ancestor for ancestor in chunk.draft.path(node))
                entries.append(BatchEntry(number, 1, end + len(path) - 1, path))
        lengths, contexts = [entry.length for entry in entries], [entry.context for entry in entries]
        batch = RaggedBatch.of(lengths, contexts, self._tensor, [entry.path for entry in entries])
        return batch, [entry.number for entry in entries]

    def _tensor(self, values: list[int]) -> Tensor:
        return on_device(values, self.device)


class LazyLogits:
    """The logits, or most likely tokens, at `ends`: sequences with the row of their last token in the hidden states.

    `hidden` is [tokens, hidden_size]; places index `ends`. Greedy sequences get no logits if the model can find the
    most likely token without them.
    """

    def __init__(self, runner: ModelRunner, hidden: Tensor, ends: Sequence[tuple[sequences.Sequence, int]]) -> None:
        self.sampling = runner.sampling
        greedy = [place for place, (sequence, _) in enumerate(ends) if not sequence.needs_logits]
        self.unread = runner.greedy_tokens(hidden, [ends[place][1] for place in greedy]) if greedy else None
        """The most likely tokens at ends without logits, on the device, until `read` is called."""
        self._greedy = greedy if self.unread is not None else []
        self.tokens: dict[int, int] = {}
        """The tokens that have been read, by place; -1 where there is none."""
        without = set(self._greedy)
        with_logits = [place for place in range(len(ends)) if place not in without]
        self.logit_rows = {place: row for row, place in enumerate(with_logits)}
        """Maps the places with logits to their rows in the logits."""
        rows = [ends[place][1] for place in with_logits]
        self._logits = runner.logits(hidden, rows) if rows else None

    def read(self, tokens: Sequence[int]) -> None:
        """Store the values of `unread` that the host has fetched."""
        self.tokens, self.unread = dict(zip(self._greedy, tokens, strict=True)), None

    def logits(self, places: Sequence[int]) -> Tensor:
        """Logits [places, vocab_size] at ends that have logits; at least one place."""
        rows, known = [self.logit_rows[place] for place in places], cast("Tensor", self._logits)
        return known if rows == list(range(len(known))) else known[on_device(rows, known.device)]


def _chip(device: torch.device) -> str:
    """The name of the chip of a device; for a CPU its instruction set, which determines the order of summation."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
