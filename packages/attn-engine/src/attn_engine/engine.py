"""The inference engine: continuous batching, in which requests join and leave the batch between any two steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

import torch
from attn_core.errors import DeadlineExceeded, InvalidValue, Unavailable, UserError
from attn_core.models import LanguageModel, MixesAdapters, TakesEmbeddings, Tokenizer
from attn_core.stores import BranchingStore, StateStore, TreeStore
from attn_schema import EngineConfig, EngineStats, OutputDelta, SamplingParams
from attn_schema.sampling import ResolvedSamplingParams
from torch import Tensor

from attn_engine.admission import AdmissionControl
from attn_engine.async_steps import AsyncSteps
from attn_engine.beam_search import BeamSearch
from attn_engine.detokenizer import Detokenizer, token_text
from attn_engine.draft_model import DraftModel
from attn_engine.fault_isolation import FaultDiagnosis, FaultIsolator
from attn_engine.graphs import DECODE, PROMPTS
from attn_engine.model_runner import ModelRunner, numerics_of
from attn_engine.out_of_memory import as_attn_error, is_out_of_memory, out_of_memory, release_memory
from attn_engine.output_processor import beam_output, process_step
from attn_engine.request import ModelLimits, Request, RequestOutput
from attn_engine.scheduler import ScheduledChunk, Scheduler
from attn_engine.sequence import NOT_FINITE, NoTokenError, Sequence, SequenceOutput
from attn_engine.sequence_group import SequenceGroup
from attn_engine.speculative import PromptLookupProposer
from attn_engine.state_transfer import require_portable
from attn_engine.structured_output import GrammarCompiler

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""Within a tenant the request with the earliest deadline is scheduled first. In this order no deadline counts as later
than this long after the arrival of its request, so that no request starves."""


class Engine:
    """Runs the requests of one model. Not thread-safe: one thread submits, cancels and steps (see `EngineLoop`).

    `store` must have been created for `model.state_specs()`. Without a `tokenizer` outputs have no text, stop strings
    are refused and no token ends a completion. `clock` returns the time, in seconds, that deadlines are compared with.
    A `draft_model` of the same vocabulary proposes draft tokens in place of `prompt_lookup`. Fields of the `config`
    that concern loading the model and the size of the cache are ignored here; see `build_engine`.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: StateStore,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig = EngineConfig(),  # noqa: B008  (frozen)
        *,
        clock: Callable[[], float] = time.monotonic,
        draft_model: DraftModel | None = None,
        prompt_lookup: PromptLookupProposer | None = None,
    ) -> None:
        if draft_model is not None:
            draft_model.require_vocab_size(model.vocab_size)
        proposer = draft_model or prompt_lookup or PromptLookupProposer()
        if config.num_speculative_tokens is None:
            config = config.replace(num_speculative_tokens=proposer.default_tokens)
        self.config = config
        self._numerics = numerics_of(config)
        with self._numerics:
            self._runner = ModelRunner(model, store, _said(config))
        if not config.enforce_eager:
            self._runner.record_steps(config)
        self._store = store
        self._tokenizer = tokenizer
        self._token_text = token_text(tokenizer)
        self._grammars = GrammarCompiler(tokenizer)
        self._end_ids = tokenizer.end_ids if tokenizer else frozenset()
        self._clock = clock
        self._stepped: float | None = None
        self.admission = AdmissionControl(config)
        self._scheduler = Scheduler(store, config, proposer)
        self._isolator = FaultIsolator(self._runner, self._scheduler)
        ahead = AsyncSteps(self._runner, self._scheduler, self._isolator, self._end_ids)
        self._async = ahead if config.async_scheduling else None
        self._diagnosis = FaultDiagnosis(self._runner, self._scheduler.prefixes, config.batch_sizes[1])
        self._limits = ModelLimits(
            vocab_size=model.vocab_size,
            max_seq_len=model.max_seq_len,
            max_encoder_len=self._runner.max_encoder_len,
            encoder_features=getattr(model, "encoder_features", None),
            embedding_size=model.embedding_size if isinstance(model, TakesEmbeddings) else None,
        )
        self._groups: dict[str, SequenceGroup] = {}
        self._outputs: list[RequestOutput] = []
        self._sequences = 0
        self._draining = False
        self._computed_tokens = self._generated_tokens = 0
        self._draft_tokens = self._accepted_tokens = 0
        if self.note:
            log.warning(self.note)

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running and all outputs have been returned."""
        return not self._groups and not self._outputs

    @property
    def tree_unsupported_reason(self) -> str | None:
        """Why draft tokens cannot form a tree (`EngineConfig.speculative_tree_width`); None if they can."""
        store = self._store
        return (
            store.tree_unsupported_reason()
            if isinstance(store, TreeStore)
            else "the cache does not support token trees"
        )

    @property
    def note(self) -> str:
        """A readable list of the config's features that are not available, with reasons; empty if all are."""
        chains = self.tree_unsupported_reason if self.config.speculative_tree_width > 1 else None
        notes = [f"draft tokens form chains, not trees: {chains}"] if chains else []
        notes += self._runner.graphs.notes if self._runner.graphs is not None else []
        if self._async is not None and self._async.reason is not None:
            notes.append(f"async_scheduling: every step waits for the one before: {self._async.reason}")
        return "; ".join(notes)

    @property
    def eager_reasons(self) -> Mapping[str, str]:
        """By kind of steps (`DECODE`, and `PROMPTS` of at most `max_cudagraph_capture_size` tokens), a readable reason
        why these run eagerly; those that are replayed as CUDA graphs are missing."""
        if self._runner.graphs is not None:
            return self._runner.graphs.reasons
        unsupported = f"CUDA graphs are not supported on {self._runner.device.type}"
        return dict.fromkeys((DECODE, PROMPTS), "enforce_eager is set" if self.config.enforce_eager else unsupported)

    def use_adapters(self, adapters: MixesAdapters) -> None:
        """Set the object that applies adapters, for requests that have one, from the next step on."""
        self._runner.adapters = adapters

    def warm_up(self) -> None:
        """Record steps of all sizes, if they can be, so that no request has to wait for that, which takes seconds."""
        if self._runner.graphs is not None:
            with torch.inference_mode():
                self._runner.graphs.record_all()

    def check(self, request: Request) -> None:
        """Raise the `UserError` that `submit` raises for a request that can never run. Thread-safe."""
        self._limits.check(request)
        if request.prefill_only or request.state is not None:
            require_portable(self._store)
        params = request.params if isinstance(request.params, SamplingParams) else None
        if self._tokenizer is None and params is not None and params.stop:
            raise InvalidValue.of("stop", params.stop, "none, as the engine has no tokenizer")
        if params is not None and params.structured_output is not None:
            self._grammars.check(params.structured_output)
        tokens = len(request.token_ids) + self._limits.max_new_tokens(request)
        if not self._store.fits(tokens):
            given = f"{tokens} tokens, max_new_tokens included"
            raise InvalidValue.of("token_ids", given, "at most as many as fit in the KV cache")
        if params is not None and params.num_beams > 1:
            self._check_beams(params.num_beams, tokens)

    def _check_beams(self, num_beams: int, tokens: int) -> None:
        if not isinstance(self._store, BranchingStore):
            raise InvalidValue.of("num_beams", num_beams, "1, as the engine's cache cannot fork a sequence")
        if num_beams > self._limits.vocab_size:
            allowed = f"at most {self._limits.vocab_size}, the size of the vocabulary"
            raise InvalidValue.of("num_beams", num_beams, allowed)
        if not self._store.holds(num_beams, tokens):
            given = f"{num_beams} beams of up to {tokens} tokens"
            raise InvalidValue.of("num_beams", given, "as many as fit in the KV cache together")

    def admit(self, request: Request) -> None:
        """Admit a request, which then waits for `begin`. Thread-safe.

        Raises `InvalidValue` or `ContextLengthExceeded` for a request that can never run, `AlreadyExists` for an id in
        use, `OutOfCapacity` if `max_queued_requests` are waiting or the deadline cannot be met.
        """
        self.check(request)
        self.admission.admit(request, self._limits.max_new_tokens(request), self._clock())

    def submit(self, request: Request) -> str:
        """Queue a request; returns its id. Raises as `admit` does, and `Unavailable` after `drain`."""
        if self._draining:
            raise Unavailable("the engine takes no new requests: it is shutting down")
        self.admit(request)
        try:
            return self.begin(request)
        except UserError:
            self.admission.left(request.id)
            raise

    def begin(self, request: Request) -> str:
        """Queue a request that was admitted; returns its id.

        Raises `InvalidValue` for a resumed request whose received tokens cannot have been generated for it.
        """
        # The bytes of a state are kept only until it is restored.
        state, request = request.state, request.without_state()
        members = [self._sequence(request, index) for index in request.open_indices]
        beams = self._beam_search(request)
        if beams is not None:
            leaders = [beams.leader]
        elif request.resume is not None:
            leaders = members  # their tokens already differ
            for member in members:
                self._resume(member)
        else:
            leader, *leader.followers = members
            leaders = [leader]
        self._groups[request.id] = SequenceGroup(list(members), beams)
        for leader in leaders:
            if state is not None:
                self._scheduler.offload.hold(leader, state)
            self._scheduler.add(leader)
        return request.id

    def cancel(self, request_id: str) -> bool:
        """End a request and free its resources; the next step returns its last output. False for an unknown id."""
        if request_id not in self._groups:
            self.admission.left(request_id, now=self._clock())
            return False
        self._end(request_id, Unavailable("the request was cancelled"))
        return True

    def step(self) -> list[RequestOutput]:
        """Compute one step for as many requests as fit; returns all outputs since the last step."""
        began = self._clock()
        between = 0.0 if self._stepped is None else began - self._stepped
        self._end_late()
        with torch.inference_mode(), self._numerics:
            chunks = self._complete_step()
            if chunks:
                # Whatever happens between two steps, such as the delivery of outputs, is a part of the engine's speed.
                spent = self._clock() - began
                self.admission.computed(_tokens_of(chunks), spent + min(between, spent))
        outputs, self._outputs = self._outputs, []
        self._stepped = None if self.idle else self._clock()
        return outputs

    def stats(self) -> EngineStats:
        """The current load of the engine, and its counters."""
        scheduler, usage = self._scheduler, self._store.usage()
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_tokens_used=usage.tokens,
            kv_tokens_total=usage.tokens_total,
            preemptions=scheduler.preemptions,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=self._generated_tokens,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            computed_tokens=self._computed_tokens,
            reloaded_tokens=scheduler.offload.reloaded_tokens,
            imported_tokens=scheduler.offload.imported_tokens,
            offloaded_bytes=scheduler.offload.bytes,
        )

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones are still completed by calls of `step`."""
        self._draining = True

    def fail_all(self, error: Exception) -> None:
        """End every request with this error and free everything; for errors that no single request has caused."""
        for request_id in list(self._groups):
            self._end(request_id, error)

    def _end_late(self) -> None:
        now = self._clock()
        late = [name for name, group in self._groups.items() if group.deadline is not None and now >= group.deadline]
        for request_id in late:
            self._end(request_id, DeadlineExceeded("the deadline passed before the request was completed"))
        if self._scheduler.running:
            waiting = [
                s.id for s in self._scheduler.waiting.values() if s.request.deadline is not None and not s.generated
            ]
            hopeless = self.admission.hopeless(waiting, now) if waiting else {}
            for request_id, error in hopeless.items():
                self._end(request_id, error)

    def _sequence(self, request: Request, index: int) -> Sequence:
        self._sequences += 1
        params, tokenizer = request.params, self._tokenizer
        skip = not isinstance(params, SamplingParams) or params.skip_special_tokens
        detokenizer = Detokenizer.of(tokenizer, request.token_ids, skip_special=skip) if tokenizer else None
        new_tokens = self._limits.max_new_tokens(request)
        sequence = Sequence(request, self._sequences, new_tokens, detokenizer, self._token_text, index)
        sequence.due = min(self._clock() + PATIENCE_SECONDS, math.inf if request.deadline is None else request.deadline)
        if isinstance(params, SamplingParams) and params.structured_output is not None:
            sequence.matcher = self._grammars.matcher(params.structured_output)
        return sequence

    def _resume(self, sequence: Sequence) -> None:
        """Let a resumed sequence continue after the tokens, or the scores, that have been received."""
        received = sequence.request.received(sequence.index)
        if sequence.scoring is not None:
            sequence.scores_returned = len(received)
        else:
            sequence.resume_after(received, self._end_ids)

    def _beam_search(self, request: Request) -> BeamSearch | None:
        params = request.params
        if not isinstance(params, ResolvedSamplingParams) or params.num_beams == 1:
            return None
        return BeamSearch(params, [self._sequence(request, 0) for _ in range(params.num_beams)], self._end_ids)

    def _complete_step(self) -> list[ScheduledChunk]:
        """Complete one step, launched ahead or scheduled now, and launch the next one ahead if possible.

        Returns the chunks of the completed step.
        """
        flying = self._async.take() if self._async else None
        if flying is None:
            chunks = self._encoded(self._scheduler.schedule())
            flying = self._async.launch(chunks) if self._async else None
            if flying is None:
                if chunks:
                    self._compute(chunks)
                return chunks
        if self._async is not None:
            self._async.launch_after(flying)
            self._computed_tokens += len(flying.sequences)
            self._emit_all(self._async.finish(flying))
        return flying.chunks

    def _encoded(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Run the encoder for admitted sequences; a request whose encoder input fails ends alone.

        Returns the chunks of the other sequences.
        """
        if not self._runner.has_encoder:
            return chunks
        ready = []
        for chunk in chunks:
            sequence = chunk.sequence
            try:
                if not sequence.encoder_written:
                    self._runner.encode(sequence.number, sequence.request.encoder_input)
                    sequence.encoder_written = True
            except Exception as error:
                log.exception("request %s: the encoder failed", sequence.id)
                self._end(sequence.id, error)
            else:
                ready.append(chunk)
        return ready

    def _compute(self, chunks: list[ScheduledChunk]) -> None:
        computed, failed = self._isolator.run(chunks)
        for step in computed:
            # Skip sequences that have ended in between because another sequence of their request failed.
            if all(self._scheduler.holds(chunk.sequence) for chunk in step.chunks):
                self._process(step.chunks, step.hidden)
        for found in failed:
            if found.sequence.id in self._groups:
                self._end(found.sequence.id, found.error)
        for request_id in {chunk.sequence.id: None for chunk in chunks}:
            group = self._groups.get(request_id)
            if group is not None and group.beams is not None and group.beams.ready:
                self._advance_beams(request_id, group.members, group.beams)

    def _process(self, ordered: list[ScheduledChunk], hidden: Tensor) -> None:
        drafted = []
        for chunk in ordered:
            if chunk.draft.tokens:
                drafted.append(chunk)
            else:
                self._scheduler.prefixes.remember(chunk.sequence, chunk.sequence.computed + chunk.length)
        self._computed_tokens += len(hidden)
        self._emit_all(self._sampled(ordered, hidden))
        self._remember_verified(drafted)

    def _emit_all(self, outputs: list[SequenceOutput]) -> None:
        """Emit the outputs of a step, and end the requests that failed in it."""
        for output in outputs:
            sequence = output.sequence
            if sequence.id not in self._groups:
                continue
            self._generated_tokens += 0 if sequence.scoring else len(output.tokens)
            error = output.error
            if error is not None:
                if isinstance(error, NoTokenError):
                    error = self._diagnosis.layer_at_fault(sequence) or error
                self._emit(output._replace(error=error))
                if sequence.id in self._groups:
                    self._end(sequence.id, error)
            elif output.tokens or output.text or output.ended:
                self._emit(output)

    def _sampled(self, ordered: list[ScheduledChunk], hidden: Tensor) -> list[SequenceOutput]:
        """The outputs of a step; if its logits do not fit into memory, all of its requests end with an error."""
        try:
            scheduler = self._scheduler
            return process_step(self._runner, ordered, hidden, self._end_ids, scheduler.fork, scheduler.offload.export)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            full = out_of_memory(error, self._runner.device, f"sampling the next tokens of {len(ordered)} sequences")
        log.error(full.message)
        for request_id in {chunk.sequence.id: None for chunk in ordered}:
            if request_id in self._groups:
                self._end(request_id, full)
        release_memory(self._runner.device)
        return []

    def _remember_verified(self, chunks: list[ScheduledChunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            self._draft_tokens += len(chunk.draft)
            self._accepted_tokens += sequence.accepted - chunk.accepted_before
            if self._scheduler.holds(sequence):
                self._scheduler.prefixes.remember(sequence, sequence.computed)

    def _advance_beams(self, request_id: str, members: list[Sequence], beams: BeamSearch) -> None:
        """Advance a beam search by one token; emit its completions when it has ended."""
        try:
            found = beams.advance(self._scheduler)
        except UserError as error:
            self._end(request_id, error)
            return
        except FloatingPointError:
            at_fault = next(sequence for sequence in beams.running if not beams.is_finite(sequence))
            self._end(request_id, self._diagnosis.layer_at_fault(at_fault) or NoTokenError(NOT_FINITE))
            return
        if found is None:
            return
        requested = members[0].request.n
        if len(found) < requested:
            text = f"the beam search found only {len(found)} of the {requested} requested completions"
            self._end(request_id, UserError(text))
            return
        members[0].cached_tokens = beams.leader.cached_tokens
        members[0].queue_time = beams.leader.queue_time
        for member in list(members):
            hypothesis = found[member.index]
            self._generated_tokens += len(hypothesis.tokens)
            self._emit(beam_output(member, hypothesis, self._end_ids))

    def _numerics_warning(self, request: Request) -> str | None:
        """A warning that, and why, a resumed request may differ from an uninterrupted one; None if it does not."""
        known = (part.computed_on for part in (request.resume, request.state) if part is not None)
        before = next((text for text in known if text and text != self._runner.numerics), None)
        if before is None:
            return None
        return f"the completion began on {before} and ended on {self._runner.numerics}, whose rounding differs"

    def _end(self, request_id: str, error: Exception) -> None:
        """End all unfinished completions of a request with an error."""
        for sequence in list(self._groups[request_id].members):
            self._emit(SequenceOutput(sequence, (), sequence.remaining_text(), error=error))

    def _emit(self, output: SequenceOutput) -> None:
        sequence, error, ended = output.sequence, output.error, output.ended
        group = self._groups[sequence.id]
        if ended:
            self._scheduler.remove(sequence)
            self._isolator.forget(sequence)
            group.remove(sequence)
            if not group.members:
                del self._groups[sequence.id]
                self.admission.left(sequence.id, None if error else group.completion_tokens, self._clock())
                for held in group.sequences:
                    self._scheduler.remove(held)
                    self._isolator.forget(held)
        computed_on = "" if group.begun else self._runner.numerics
        group.begun = True
        delta = OutputDelta(tokens=output.tokens, text=output.text, index=sequence.index, computed_on=computed_on)
        if ended:
            delta = OutputDelta(
                tokens=output.tokens,
                text=output.text,
                finish_reason=output.finish_reason,
                stop_reason=sequence.stops.found,
                usage=group.usage,
                index=sequence.index,
                score=sequence.score,
                computed_on=computed_on,
                warning=None if group.members else self._numerics_warning(sequence.request),
            )
        known = None if error is None else as_attn_error(error, self._runner.device, "a request")
        self._outputs.append(RequestOutput(sequence.id, delta, known, output.state))


def _tokens_of(chunks: list[ScheduledChunk]) -> dict[str, tuple[int, int]]:
    """The numbers of prompt tokens and completion tokens that a step has computed, by request id."""
    found: dict[str, tuple[int, int]] = {}
    for chunk in chunks:
        sequence = chunk.sequence
        prompt, new = found.get(sequence.id, (0, 0))
        decodes = bool(sequence.generated) and chunk.length == 1
        found[sequence.id] = (prompt, new + chunk.rows) if decodes else (prompt + chunk.rows, new)
    return found


def _said(config: EngineConfig) -> str:
    """The formats of weights and cache, and the number of ranks, as part of what an engine computes with."""
    ranks = f", {config.tensor_parallel_size} ranks" if config.tensor_parallel_size > 1 else ""
    return f"weights {config.quantization}, {config.kv_cache}{ranks}"
