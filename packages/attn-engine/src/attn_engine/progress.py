"""What a step brings to each sequence: new tokens or scores, text, and perhaps the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

from attn_core.errors import UserError
from attn_core.stores import BranchingStore
from torch import Tensor

from attn_engine import sequence as sequences
from attn_engine.adjust import Draw
from attn_engine.event import FinishReason, ScoredToken
from attn_engine.outcome import NOT_FINITE, NoTokenError, Progress
from attn_engine.outlook import Outlook
from attn_engine.sampler import choose_tokens, likeliest, log_probabilities
from attn_engine.scheduler import Chunk
from attn_engine.search import Hypothesis
from attn_engine.step import Forward
from attn_engine.verify import Guess, settle, verify

NO_TOKEN = f"no token can be chosen: {NOT_FINITE}, or none of the vocabulary can continue what the grammar asks for"


Fork = Callable[[sequences.Sequence], list[sequences.Sequence]]
"""Lets others go on from the states of a sequence; returns them."""


def advance(
    forward: Forward, chunks: Sequence[Chunk], hidden: Tensor, end_ids: Collection[int], fork: Fork
) -> list[Progress]:
    """Note the chunks as computed, choose a token for each sequence that is complete, and score those that ask.

    `hidden` [tokens, width] are the rows of the chunks, in their order. What `fork` returns for a complete sequence
    goes on from the same row.
    """
    found: list[Progress] = []
    pairs: list[tuple[sequences.Sequence, int]] = []
    guesses: list[tuple[Chunk, int]] = []
    start = 0
    for chunk in chunks:
        sequence, end = chunk.sequence, start + chunk.length
        if sequence.scoring is not None:
            found.append(_score(forward, chunk, hidden[start:end]))
        elif chunk.completes:
            pairs.append((sequence, end - 1))
        if chunk.guess.tokens:
            guesses.append((chunk, end))
        sequence.computed += chunk.length
        start += chunk.rows
    pairs += [(follower, row) for sequence, row in pairs if sequence.followers for follower in fork(sequence)]
    if pairs:
        outlook = Outlook(forward, hidden, pairs)
        searching = {place for place in outlook.others if pairs[place][0].sampling.beams}
        for place in searching:
            pairs[place][0].logits = outlook.logits([place])[0]
        growing = [(sequence, place) for place, (sequence, _) in enumerate(pairs) if place not in searching]
        found += _generate(growing, outlook, end_ids)
    return _verified(forward, found, guesses, hidden, end_ids) if guesses else found


def _verified(
    forward: Forward,
    found: Sequence[Progress],
    chunks: Sequence[tuple[Chunk, int]],
    hidden: Tensor,
    end_ids: Collection[int],
) -> list[Progress]:
    """What was found and what comes of the guesses of these chunks, whose first rows of `hidden` are given."""
    guesses: list[Guess] = []
    ends: list[tuple[sequences.Sequence, int]] = []
    for chunk, start in chunks:
        guesses.append(Guess(chunk.sequence, chunk.guess, range(len(ends), len(ends) + len(chunk.guess))))
        ends += [(chunk.sequence, start + node) for node in range(len(chunk.guess))]
    outlook = Outlook(forward, hidden, ends)
    found = verify(found, guesses, lambda growing: _generate(growing, outlook, end_ids))
    ended = {progress.sequence.number for progress in found if progress.reason is not None}
    for guess in guesses:
        if guess.sequence.number not in ended:
            settle(guess, cast("BranchingStore", forward.store))
    return found


def ended(sequence: sequences.Sequence, hypothesis: Hypothesis, end_ids: Collection[int]) -> Progress:
    """What a beam search has found, told as the completion `sequence`."""
    texts = []
    last = len(hypothesis.tokens) - 1
    ends = not sequence.sampling.ignore_end and hypothesis.tokens[last].id in end_ids
    for place, token in enumerate(hypothesis.tokens):
        sequence.tokens.append(token.id)
        if not (ends and place == last):
            texts.append(sequence.text_of(token.id))
            if sequence.guide is not None:
                sequence.guide.advance(token.id)
    texts.append(sequence.remaining_text())
    sequence.score = hypothesis.score
    reason = FinishReason.LENGTH
    if sequence.stops.found is not None:
        reason = FinishReason.STOP
    elif ends or (sequence.guide is not None and sequence.guide.complete):
        reason = FinishReason.END_OF_SEQUENCE
    return Progress(sequence, hypothesis.tokens, "".join(texts), reason)


def _generate(
    growing: Sequence[tuple[sequences.Sequence, int]], outlook: Outlook, end_ids: Collection[int]
) -> list[Progress]:
    """What comes after each sequence, of which the place in the outlook is given."""
    found = {place: ScoredToken(token) for place, token in outlook.tokens.items()}
    rest = [(sequence, place) for sequence, place in growing if place not in found]
    if rest:
        logits = outlook.logits([place for _, place in rest])
        chosen = _chosen([sequence for sequence, _ in rest], logits, end_ids)
        found.update(zip((place for _, place in rest), chosen, strict=True))
    return [_extend(sequence, found[place], end_ids) for sequence, place in growing]


def _chosen(growing: Sequence[sequences.Sequence], logits: Tensor, end_ids: Collection[int]) -> list[ScoredToken]:
    if all(sequence.sampling.greedy for sequence in growing):
        tokens = likeliest(logits)
    else:
        tokens = choose_tokens(logits, [_draw(sequence, logits, end_ids) for sequence in growing])
    return _scored(growing, logits, tokens)


def _draw(sequence: sequences.Sequence, logits: Tensor, end_ids: Collection[int]) -> Draw:
    vocabulary, device = logits.shape[-1], logits.device
    return Draw(
        sequence.sampling,
        sequence.seed,
        len(sequence.tokens),
        seen=sequence.seen(vocabulary, device),
        counts=sequence.counts(vocabulary, device),
        allowed=sequence.allowed(vocabulary, device, end_ids),
    )


def _scored(growing: Sequence[sequences.Sequence], logits: Tensor, tokens: Sequence[int]) -> list[ScoredToken]:
    scored = [ScoredToken(token) for token in tokens]
    asked = [row for row, s in enumerate(growing) if s.sampling.alternatives is not None and tokens[row] >= 0]
    if asked:
        wanted = [growing[row].sampling.alternatives or 0 for row in asked]
        details = log_probabilities(logits[asked], [tokens[row] for row in asked], max(wanted))
        for row, most, (own, likeliest) in zip(asked, wanted, details, strict=True):
            scored[row] = ScoredToken(tokens[row], own, tuple(likeliest[:most]))
    return scored


def _extend(sequence: sequences.Sequence, token: ScoredToken, end_ids: Collection[int]) -> Progress:
    """Add the token; decide whether the sequence ends."""
    if token.id < 0:
        error = NoTokenError(NO_TOKEN if sequence.guide else NOT_FINITE)
        return Progress(sequence, (), sequence.remaining_text(), FinishReason.FAILED, error)
    sequence.tokens.append(token.id)
    ended = token.id in end_ids and not sequence.sampling.ignore_end
    full = len(sequence.tokens) >= sequence.most
    text = "" if ended else sequence.text_of(token.id)
    if sequence.guide is not None and not ended:
        try:
            sequence.guide.follow(token.id)
        except UserError as failure:
            return Progress(sequence, (token,), text, FinishReason.FAILED, failure)
        ended = sequence.guide.complete
    if sequence.stops.found is None and (ended or full):
        text += sequence.remaining_text()
    reason = None
    if sequence.stops.found is not None:
        reason = FinishReason.STOP
    elif ended:
        reason = FinishReason.END_OF_SEQUENCE
    elif full:
        reason = FinishReason.LENGTH
    return Progress(sequence, (token,), text, reason)


def _score(forward: Forward, chunk: Chunk, hidden: Tensor) -> Progress:
    """Scores of the tokens that follow those of the chunk; the first token of all has none."""
    sequence, start = chunk.sequence, chunk.sequence.computed
    following = sequence.tokens[start + 1 : start + chunk.length + 1]
    most = sequence.request.task.alternatives or 0
    found = [ScoredToken(sequence.tokens[0])] if start == 0 else []
    if following:
        logits = forward.logits(hidden, range(len(following)))
        if not bool(logits.amax(-1).isfinite().all()):
            return Progress(sequence, (), reason=FinishReason.FAILED, error=NoTokenError(NOT_FINITE))
        for token, (own, likeliest) in zip(following, log_probabilities(logits, following, most), strict=True):
            found.append(ScoredToken(token, own, tuple(likeliest)))
    # After a preemption the beginning is computed again; what was told is not told twice.
    first = start + len(following) + 1 - len(found)
    fresh = found[max(0, sequence.told - first) :]
    sequence.told += len(fresh)
    return Progress(sequence, tuple(fresh), reason=FinishReason.SCORED if chunk.completes else None)
