"""The host of an encoder model, which embeds texts batch by batch."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path

import torch
from attn_core.errors import AttnError, DeadlineExceeded, InternalError, InvalidValue, Unavailable
from attn_models.loading.sentences import SentenceEncoder, load_sentence_encoder
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EngineConfig,
    EngineStats,
    ModelInfo,
    Prompt,
    Tensor,
    Tokenization,
    Usage,
)

from attn_engine.client import EmbedTask
from attn_engine.host.attention_maps import compute_maps
from attn_engine.host.host import ModelHost, with_process
from attn_engine.host.loading import quantization_of, use_kernel
from attn_engine.host.ranks import rank_threads
from attn_engine.host.tokenization import PromptTokenizer
from attn_engine.out_of_memory import is_out_of_memory, out_of_memory, release_memory

log = logging.getLogger(__name__)

UNLOADING = "the model is being unloaded"


class EncoderHost(ModelHost):
    """Loads the encoder in `folder`; concurrent calls are interleaved, one batch of each at a time.

    An encoder has no KV cache, so options of the KV cache have no effect. Raises `InvalidValue` for a draft model, and
    what loading raises.
    """

    REFUSAL = "the model is an encoder, which only computes embeddings and attention maps of texts"

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        if config.draft_model is not None:
            raise InvalidValue.of("draft_model", config.draft_model, "none for an encoder")
        if config.batch_invariant:
            raise InvalidValue.of("batch_invariant", "true", "false for an encoder")
        torch.set_num_threads(rank_threads(config))
        self._encoder = load_sentence_encoder(
            folder, config.dtype, device=config.device, quantization=config.quantization
        )
        use_kernel(self._encoder.model, config.kernel)
        self._tokenizer = PromptTokenizer(self._encoder.tokenizer, encoder=False)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._idle = threading.Condition()
        self._stopping = False
        self._calls: dict[str, Embedding] = {}
        self._computed = 0

    @property
    def info(self) -> ModelInfo:
        """A description of the model."""
        model = self._encoder.model
        config, parameter = model.config, next(model.parameters())
        return ModelInfo(
            architecture="encoder",
            mechanisms=tuple(dict.fromkeys(config.mechanisms)),
            num_parameters=self._encoder.parameters,
            max_seq_len=config.max_seq_len,
            vocab_size=config.vocab_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            dtype=str(parameter.dtype).removeprefix("torch."),
            quantization=quantization_of(model),
            device=str(parameter.device),
        )

    def embed(self, task: EmbedTask) -> Future[Embeddings]:
        """Compute a unit vector for each text, in a future that may be cancelled; raises `Unavailable` after `stop`.

        The future raises `InvalidValue` for a text that is too long, and `DeadlineExceeded` before the first batch
        after the deadline.
        """
        call = Embedding(self._encoder, task)
        with self._idle:
            if self._stopping:
                raise Unavailable(UNLOADING)
            self._calls[task.id] = call
        call.answer.add_done_callback(lambda _: self._leave(task.id))
        self._queue(call)
        return call.answer

    def attention_maps(self, request: AttentionMapsRequest, adapter: str = "") -> list[AttentionMap]:
        """The attention weights of a text, one map per layer, between two batches of other calls."""
        del adapter
        try:
            running = self._worker.submit(compute_maps, self._encoder, request, self._tokenizer)
        except RuntimeError:  # the thread has ended
            raise Unavailable(UNLOADING) from None
        return running.result()

    def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens of a text."""
        return self._tokenizer.tokenize(prompt)

    def cancel(self, task_id: str) -> None:
        """Cancel a call, after the batch that is being computed."""
        call = self._calls.get(task_id)
        if call is not None:
            call.answer.cancel()

    def stats(self) -> EngineStats:
        """The current load of the encoder; it has no KV cache."""
        calls = len(self._calls)
        running = min(calls, 1)
        return with_process(EngineStats(running=running, waiting=calls - running, computed_tokens=self._computed))

    def stop(self, timeout: float, error: AttnError | None = None) -> None:  # noqa: ARG002 -- its tasks end by themselves
        """Refuse new calls, let running ones finish for up to `timeout` seconds, then end the thread."""
        with self._idle:
            self._stopping = True
            self._idle.wait_for(lambda: not self._calls, timeout=timeout)
            left = list(self._calls.values())
        self._worker.shutdown(wait=False, cancel_futures=True)
        for call in left:
            call.fail(Unavailable(UNLOADING))

    def _queue(self, call: Embedding) -> None:
        """Queue the next batch of a call, after one batch of every other call."""
        try:
            self._worker.submit(self._compute_batch, call)
        except RuntimeError:  # the thread has ended
            call.fail(Unavailable(UNLOADING))

    def _compute_batch(self, call: Embedding) -> None:
        self._computed += call.step()
        if not call.answer.done():
            self._queue(call)

    def _leave(self, task_id: str) -> None:
        with self._idle:
            del self._calls[task_id]
            self._idle.notify_all()


class Embedding:
    """One call of `embed`. `answer` may be cancelled by any thread at any time; `step` is called by one thread only.

    A call that has ended releases its texts and vectors, even while the call itself is still referenced.
    """

    def __init__(self, encoder: SentenceEncoder, task: EmbedTask) -> None:
        self.answer: Future[Embeddings] = Future()
        self._end = None if task.timeout is None else time.monotonic() + task.timeout
        self._work: TextBatches | None = TextBatches(encoder, task)
        self.answer.add_done_callback(self._free)

    def step(self) -> int:
        """Compute the next batch, or set the answer after the last one; returns the number of computed tokens."""
        work = self._work
        if work is None:
            return 0
        try:
            return self._step(work)
        except AttnError as error:
            self.fail(error)
        except Exception as error:
            log.exception("texts could not be embedded")
            full = is_out_of_memory(error)
            failed = InternalError(f"the encoder failed: {type(error).__name__}")
            self.fail(out_of_memory(error, work.device, "a batch of texts") if full else failed)
        release_memory(work.device)
        return 0

    def fail(self, error: Exception) -> None:
        """End the call with an error, unless it has already ended."""
        with contextlib.suppress(InvalidStateError):
            self.answer.set_exception(error)

    def _step(self, work: TextBatches) -> int:
        if self._end is not None and time.monotonic() >= self._end:
            raise DeadlineExceeded("the deadline passed before all texts were embedded")
        computed = work.step()
        if computed is None:
            with contextlib.suppress(InvalidStateError):
                self.answer.set_result(work.answer())
        return computed or 0

    def _free(self, _: Future[Embeddings]) -> None:
        self._work = None


class TextBatches:
    """The texts of a call and the vectors that have been computed so far."""

    def __init__(self, encoder: SentenceEncoder, task: EmbedTask) -> None:
        self.device: torch.device = encoder.device
        self._encoder = encoder
        self._task = task
        self._ids: list[list[int]] = []
        self._batches: Iterator[tuple[list[int], torch.Tensor]] | None = None
        self._vectors = torch.empty(0)

    def step(self) -> int | None:
        """Compute the next batch; returns its number of tokens, or None if all texts have been computed."""
        if self._batches is None:
            self._ids = self._encoder.read(self._task.texts, self._task.max_tokens)
            self._vectors = torch.empty(len(self._ids), self._encoder.size)
            self._batches = self._encoder.batches(self._ids)
        batch = next(self._batches, None)
        if batch is None:
            return None
        places, found = batch
        self._vectors[places] = found.float().cpu()
        return sum(len(self._ids[place]) for place in places)

    def answer(self) -> Embeddings:
        """The vectors of all texts [texts, size], float32, and the usage."""
        tensor = Tensor(shape=tuple(self._vectors.shape), data=self._vectors.numpy().astype("<f4").tobytes())
        return Embeddings(embeddings=tensor, usage=Usage(prompt_tokens=sum(map(len, self._ids))))
