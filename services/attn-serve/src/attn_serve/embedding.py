"""Texts on their way to vectors, a batch at a time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError

import torch
from attn_core.errors import AttnError, DeadlineExceeded, InternalError
from attn_models.loading.sentences import SentenceEncoder

from attn_serve.answers import EmbeddingsAnswer
from attn_serve.requests import TextsWanted

log = logging.getLogger(__name__)


class Embedding:
    """One call. `answer` may be cancelled by any thread at any time; `step` is for one thread.

    A call that has ended holds neither texts nor vectors, whoever still holds the call.
    """

    def __init__(self, encoder: SentenceEncoder, wanted: TextsWanted) -> None:
        self.answer: Future[EmbeddingsAnswer] = Future()
        self._end = None if wanted.seconds is None else time.monotonic() + wanted.seconds
        self._work: Work | None = Work(encoder, wanted.texts)
        self.answer.add_done_callback(self._free)

    def step(self) -> int:
        """Compute a batch, or the answer after the last; returns how many tokens were computed."""
        work = self._work
        if work is None:
            return 0
        try:
            return self._step(work)
        except AttnError as error:
            self.fail(error)
        except Exception as error:
            log.exception("texts could not be embedded")
            self.fail(InternalError(f"the encoder failed: {type(error).__name__}"))
        return 0

    def fail(self, error: Exception) -> None:
        """End it, unless it has ended."""
        with contextlib.suppress(InvalidStateError):
            self.answer.set_exception(error)

    def _step(self, work: Work) -> int:
        if self._end is not None and time.monotonic() >= self._end:
            raise DeadlineExceeded("the deadline passed before all texts were embedded")
        computed = work.step()
        if computed is None:
            with contextlib.suppress(InvalidStateError):
                self.answer.set_result(work.answer())
        return computed or 0

    def _free(self, _: Future[EmbeddingsAnswer]) -> None:
        self._work = None


class Work:
    """Texts of which some have their vectors."""

    def __init__(self, encoder: SentenceEncoder, texts: Sequence[str]) -> None:
        self._encoder = encoder
        self._texts = texts
        self._ids: list[list[int]] = []
        self._batches: Iterator[tuple[list[int], torch.Tensor]] | None = None
        self._vectors = torch.empty(0)

    def step(self) -> int | None:
        """Compute a batch; how many tokens it had, None where all were computed."""
        if self._batches is None:
            self._ids = self._encoder.read(self._texts)
            self._vectors = torch.empty(len(self._ids), self._encoder.size)
            self._batches = self._encoder.batches(self._ids)
        batch = next(self._batches, None)
        if batch is None:
            return None
        places, found = batch
        self._vectors[places] = found.float()
        return sum(len(self._ids[place]) for place in places)

    def answer(self) -> EmbeddingsAnswer:
        """All vectors."""
        shape = (len(self._ids), self._vectors.shape[1])
        return EmbeddingsAnswer(shape, self._vectors.numpy().astype("<f4").tobytes(), sum(map(len, self._ids)))
