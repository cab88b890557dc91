"""Log probabilities of given sequences, computed by the running engine among its other work."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Sequence

from attn_engine import EngineLoop, Event, Request, Scoring

from attn_serve.answers import SequenceAnswer, TokenAnswer
from attn_serve.news import chunk_of
from attn_serve.spelling import Spelling

Sided = tuple[tuple[int, ...], tuple[int, ...] | None]
"""A sequence of token ids and the source, if any, that it is to be scored under."""


def score_all(loop: EngineLoop, sequences: Sequence[Sided], task: Scoring, spelling: Spelling) -> list[SequenceAnswer]:
    """The scores of all sequences, each under its source; raises the first error and cancels the rest."""
    mailboxes: dict[str, queue.SimpleQueue[Event]] = {}
    try:
        for ids, source in sequences:
            request = Request(id=f"score-{uuid.uuid4().hex}", token_ids=ids, source_ids=source, task=task)
            mailboxes[request.id] = queue.SimpleQueue()
            loop.submit(request, mailboxes[request.id].put)
        return [SequenceAnswer(_collect(mailbox, spelling)) for mailbox in mailboxes.values()]
    finally:
        for request_id in mailboxes:
            loop.cancel(request_id)


def _collect(mailbox: queue.SimpleQueue[Event], spelling: Spelling) -> tuple[TokenAnswer, ...]:
    tokens: list[TokenAnswer] = []
    while True:
        chunk = chunk_of(mailbox.get(), spelling)
        if chunk.error is not None:
            raise chunk.error
        tokens += chunk.tokens
        if chunk.last:
            return tuple(tokens)
