"""Turns the hidden states of a step into outputs: new tokens or log probabilities, text, and finish reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

from attn_core.errors import AttnError, UserError
from attn_core.kernels.sampling import SamplingKernel
from attn_core.stores import BranchingStore
from attn_schema import FinishReason, Token
from torch import Tensor

from attn_engine import sequence as sequences
from attn_engine.batch_sampler import choose_together
from attn_engine.beam_search import BeamHypothesis
from attn_engine.model_runner import LazyLogits, ModelRunner
from attn_engine.sampler import Choice, SamplingRow, choose_tokens, greedy_tokens, log_probabilities
from attn_engine.scheduler import ScheduledChunk
from attn_engine.sequence import NOT_FINITE, NoTokenError, SequenceOutput
from attn_engine.speculative import Verification, roll_back, verify
from attn_engine.state_transfer import PromptState
from attn_engine.structured_output import UNSPELLABLE

SCORED_ROWS = 256
"""The number of tokens of a scored prompt whose logits are computed at once."""

Fork = Callable[[sequences.Sequence], list[sequences.Sequence]]
"""Forks the KV cache of a sequence for its followers; returns those that got one."""
Export = Callable[[sequences.Sequence, str], PromptState]
"""Exports the state of a sequence; the text is its `computed_on`. Raises if the state cannot be exported."""


def process_step(
    runner: ModelRunner,
    chunks: Sequence[ScheduledChunk],
    hidden: Tensor,
    end_ids: Collection[int],
    fork: Fork,
    export: Export,
) -> list[SequenceOutput]:
    """Mark the chunks as computed, choose a token for each complete sequence, and score prompts of scoring requests.

    `hidden` [tokens, hidden_size] are the hidden states of the chunks, in their order. The sequences that `fork`
    returns for a complete sequence continue from the same row. For `prefill_only` requests the state is exported.
    """
    found: list[SequenceOutput] = []
    ends: list[tuple[sequences.Sequence, int]] = []
    drafts: list[tuple[ScheduledChunk, int]] = []
    leaving: list[sequences.Sequence] = []
    start = 0
    for chunk in chunks:
        sequence, end = chunk.sequence, start + chunk.length
        if sequence.scoring is not None:
            found.append(_score(runner, chunk, hidden[start:end]))
        elif chunk.completes and sequence.request.prefill_only:
            leaving.append(sequence)
        elif chunk.completes:
            ends.append((sequence, end - 1))
        if chunk.draft.tokens:
            drafts.append((chunk, end))
        sequence.computed += chunk.length
        start += chunk.rows
    found += [_exported(sequence, export, runner.numerics) for sequence in leaving]
    ends += [(follower, row) for sequence, row in ends if sequence.followers for follower in fork(sequence)]
    if ends:
        lazy = LazyLogits(runner, hidden, ends)
        beams = {place for place in lazy.logit_rows if ends[place][0].params.num_beams > 1}
        for place in beams:
            ends[place][0].logits = lazy.logits([place])[0]
        growing = [(sequence, place) for place, (sequence, _) in enumerate(ends) if place not in beams]
        found += _generate(growing, lazy, end_ids)
    return _verify_drafts(runner, found, drafts, hidden, end_ids) if drafts else found


def beam_output(sequence: sequences.Sequence, hypothesis: BeamHypothesis, end_ids: Collection[int]) -> SequenceOutput:
    """Convert a finished hypothesis of a beam search to the output of the completion `sequence`."""
    texts = []
    last = len(hypothesis.tokens) - 1
    ends = sequence.ends(hypothesis.tokens[last].id, end_ids)
    for place, token in enumerate(hypothesis.tokens):
        sequence.tokens.append(token.id)
        if not (ends and place == last):
            texts.append(sequence.text_of(token.id))
            if sequence.matcher is not None:
                sequence.matcher.accept(token.id)
    texts.append(sequence.remaining_text())
    sequence.score = hypothesis.score
    reason = FinishReason.LENGTH
    if sequence.stops.found is not None:
        reason = FinishReason.STOP
    elif ends or (sequence.matcher is not None and sequence.matcher.complete):
        reason = FinishReason.END_OF_SEQUENCE
    return SequenceOutput(sequence, hypothesis.tokens, "".join(texts), reason)


def _exported(sequence: sequences.Sequence, export: Export, computed_on: str) -> SequenceOutput:
    """The only output of a `prefill_only` sequence: its exported state, or an error."""
    try:
        state = export(sequence, computed_on)
    except AttnError as error:
        return SequenceOutput(sequence, (), error=error)
    return SequenceOutput(sequence, (), finish_reason=FinishReason.LENGTH, state=state)


def _verify_drafts(
    runner: ModelRunner,
    found: Sequence[SequenceOutput],
    chunks: Sequence[tuple[ScheduledChunk, int]],
    hidden: Tensor,
    end_ids: Collection[int],
) -> list[SequenceOutput]:
    """Extend the outputs `found` by those after accepted draft tokens.

    Each chunk comes with the row of its first draft token in `hidden` [tokens, hidden_size].
    """
    drafts: list[Verification] = []
    ends: list[tuple[sequences.Sequence, int]] = []
    for chunk, start in chunks:
        rows = range(len(ends), len(ends) + len(chunk.draft))
        drafts.append(Verification(chunk.sequence, chunk.draft, rows))
        ends += [(chunk.sequence, start + node) for node in range(len(chunk.draft))]
    lazy = LazyLogits(runner, hidden, ends)
    found = verify(found, drafts, lambda growing: _generate(growing, lazy, end_ids))
    ended = {output.sequence.number for output in found if output.ended}
    for verified in drafts:
        if verified.sequence.number not in ended:
            roll_back(verified, cast("BranchingStore", runner.store))
    return found


def _generate(
    growing: Sequence[tuple[sequences.Sequence, int]], lazy: LazyLogits, end_ids: Collection[int]
) -> list[SequenceOutput]:
    """Choose the next token of each sequence, which is given with its place among the ends of `lazy`."""
    rest = [(sequence, place) for sequence, place in growing if place in lazy.logit_rows]
    found: dict[int, Choice] = {}
    if rest:
        chosen = _choose([sequence for sequence, _ in rest], lazy, [place for _, place in rest], end_ids)
        found.update(zip((place for _, place in rest), chosen, strict=True))
    if lazy.unread is not None:
        lazy.read(lazy.unread.tolist())
    found.update({place: (token, None, ()) for place, token in lazy.tokens.items()})
    return [extended(sequence, found[place], end_ids) for sequence, place in growing]


def _choose(
    growing: Sequence[sequences.Sequence], lazy: LazyLogits, places: Sequence[int], end_ids: Collection[int]
) -> list[Choice]:
    """The choices at ends with logits.

    On a GPU the same copy also fetches the tokens of ends without logits, as the host waits for every copy.
    """
    logits = lazy.logits(places)
    if logits.device.type == "cuda":
        rows = [sequence.batch_row(logits.shape[-1], end_ids) for sequence in growing]
        choices, others = choose_together(logits, rows, lazy.unread)
        if lazy.unread is not None:
            lazy.read(others)
        return choices
    logits = logits.cpu()
    return _with_logprobs(growing, logits, chosen_tokens(growing, logits, end_ids, lazy.sampling), lazy.sampling)


def chosen_tokens(
    growing: Sequence[sequences.Sequence],
    logits: Tensor,
    end_ids: Collection[int],
    kernel: SamplingKernel | None,
) -> list[int]:
    """The next token of each sequence from logits [sequences, vocab_size] on the CPU; -1 where these are not finite."""
    if all(sequence.greedy for sequence in growing):
        return greedy_tokens(logits)
    rows = [_sampling_row(sequence, logits, end_ids) for sequence in growing]
    return choose_tokens(logits, rows, kernel)


def _sampling_row(sequence: sequences.Sequence, logits: Tensor, end_ids: Collection[int]) -> SamplingRow:
    vocab_size, device = logits.shape[-1], logits.device
    return SamplingRow(
        sequence.params,
        sequence.seed,
        len(sequence.tokens),
        token_counts=sequence.token_counts(),
        allowed=sequence.allowed(vocab_size, device, end_ids),
    )


def _with_logprobs(
    growing: Sequence[sequences.Sequence], logits: Tensor, tokens: Sequence[int], kernel: SamplingKernel | None
) -> list[Choice]:
    choices: list[Choice] = [(token, None, ()) for token in tokens]
    rows = [row for row, s in enumerate(growing) if s.params.top_logprobs is not None and tokens[row] >= 0]
    if rows:
        wanted = [growing[row].params.top_logprobs or 0 for row in rows]
        details = log_probabilities(logits[rows], [tokens[row] for row in rows], max(wanted), kernel)
        for row, count, (own, top) in zip(rows, wanted, details, strict=True):
            choices[row] = (tokens[row], own, top[:count])
    return choices


def extended(sequence: sequences.Sequence, choice: Choice, end_ids: Collection[int]) -> SequenceOutput:
    """Append the chosen token to a sequence, and decide whether the sequence ends."""
    id, logprob, top = choice  # noqa: A001
    ended = sequence.ends(id, end_ids)
    matcher = sequence.matcher
    # If no token can continue the grammar, it allows only the end of sequence, although it is not matched yet.
    if matcher is not None and (matcher.allows_nothing if id < 0 else ended and not matcher.may_end):
        error = UserError(f"structured_output: {UNSPELLABLE}", field="structured_output")
        return SequenceOutput(sequence, (), sequence.remaining_text(), error=error)
    if id < 0 and (sequence.params.allowed_token_ids or sequence.params.bad_words):
        error = UserError("allowed_token_ids, bad_words: no token may come next", field="allowed_token_ids")
        return SequenceOutput(sequence, (), sequence.remaining_text(), error=error)
    if id < 0:
        return SequenceOutput(sequence, (), sequence.remaining_text(), error=NoTokenError(NOT_FINITE))
    token = sequence.token(id, logprob, top)
    sequence.tokens.append(id)
    full = len(sequence.tokens) >= sequence.max_len
    text = "" if ended else sequence.text_of(id)
    if matcher is not None and not ended:
        try:
            matcher.accept_checked(id)
        except UserError as failure:
            return SequenceOutput(sequence, (token,), text, error=failure)
        ended = matcher.complete
    if sequence.stops.found is None and (ended or full):
        text += sequence.remaining_text()
    reason = None
    if sequence.stops.found is not None:
        reason = FinishReason.STOP
    elif ended:
        reason = FinishReason.END_OF_SEQUENCE
    elif full:
        reason = FinishReason.LENGTH
    return SequenceOutput(sequence, (token,), text, reason)


def _score(runner: ModelRunner, chunk: ScheduledChunk, hidden: Tensor) -> SequenceOutput:
    """The log probabilities of the tokens that follow those of the chunk; the very first token has none."""
    sequence, start = chunk.sequence, chunk.sequence.computed
    following = sequence.tokens[start + 1 : start + chunk.length + 1]
    count = sequence.scoring.top_logprobs if sequence.scoring else 0
    found: list[Token] = [sequence.token(sequence.tokens[0])] if start == 0 else []
    if following:
        # In parts, as the logits of a whole prompt can take more memory than all other activations.
        for begin in range(0, len(following), SCORED_ROWS):
            part = following[begin : begin + SCORED_ROWS]
            logits = runner.logits(hidden, range(begin, begin + len(part)))
            if not bool(logits.amax(-1).isfinite().all()):
                return SequenceOutput(sequence, (), error=NoTokenError(NOT_FINITE))
            for token, (own, top) in zip(part, log_probabilities(logits, part, count, runner.sampling), strict=True):
                found.append(sequence.token(token, own, top))
    # After a preemption the prompt is recomputed from its beginning; scores are not returned twice.
    first = start + len(following) + 1 - len(found)
    fresh = found[max(0, sequence.scores_returned - first) :]
    sequence.scores_returned += len(fresh)
    reason = FinishReason.LENGTH if chunk.completes else None
    return SequenceOutput(sequence, tuple(fresh), finish_reason=reason)
