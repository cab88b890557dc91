"""Beams end at stop strings and follow structured output as a plain search over whole texts does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from attn_core.errors import UserError
from attn_engine import FinishReason, SamplingParams, StructuredOutput
from serving import assert_empty, make_engine, run_all, some_requests
from small_models import JSON, LETTERS, VOCABULARY, small_model
from test_speculative_decoding import logits_of

END = VOCABULARY - 1
WIDTH = 3


def plain_search(model, request, spell, over, possible):
    """Beam search in plain words: `over(text)` says that a text has ended, `possible(text)` that it may begin one."""
    most, penalty = request.params.max_new_tokens, request.params.length_penalty
    running, finished = [((), 0.0)], []
    while running and len(finished) < WIDTH:
        found = []
        for tokens, score in running:
            scores = logits_of(model, [*request.token_ids, *tokens]).log_softmax(-1)
            found += [((*tokens, t), score + float(scores[t])) for t in range(VOCABULARY)]
        found.sort(key=lambda item: -item[1])
        going, rank = [], 0
        for tokens, score in found:
            text = spell(tokens[:-1] if tokens[-1] == END else tokens)
            if not possible(text, tokens[-1] == END):
                continue
            if tokens[-1] == END or over(text) or len(tokens) == most:
                if rank < WIDTH:
                    finished.append((tokens, score / len(tokens) ** penalty))
            elif len(going) < WIDTH:
                going.append((tokens, score))
            rank += 1
            if len(going) == WIDTH:
                break
        running = going
    return sorted(finished, key=lambda item: -item[1])[:WIDTH]


def compare(model, tokenizer, request, over, possible, cache):
    expected = plain_search(model, request, tokenizer.decode, over, possible)
    engine = make_engine(model, cache, tokenizer=tokenizer)
    outcomes = [outcome for _, outcome in sorted(run_all(engine, [request]).items())]
    assert [tuple(outcome.ids) for outcome in outcomes] == [tokens for tokens, _ in expected]
    assert [outcome.score for outcome in outcomes] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert_empty(engine)
    return outcomes


@pytest.mark.parametrize("kind", ["paged", "slot"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_beam_ends_where_its_text_holds_a_stop_string(kind, seed):
    model = small_model(kind)
    (request,) = some_requests(model, 1, seed)
    free = SamplingParams(max_new_tokens=7, num_beams=WIDTH, early_stopping=True, n=WIDTH)
    whole = run_all(make_engine(model), [replace(request, params=free)])
    texts = [outcome.text for outcome in whole.values()]
    stops = (texts[0][2:4], texts[1][3:4], texts[2][4:6])
    stopped = replace(request, params=free.replace(stop=stops))

    def over(text):
        return any(stop in text for stop in stops)

    outcomes = compare(model, LETTERS, stopped, over, lambda text, ended: True, "shared")
    assert FinishReason.STOP in {outcome.finish_reason for outcome in outcomes}
    for outcome in outcomes:
        spelled = LETTERS.decode([token for token in outcome.ids if token != END])
        if outcome.finish_reason is FinishReason.STOP:
            assert outcome.text == spelled[: spelled.index(outcome.stop_reason)]
        else:
            assert outcome.text == spelled


@pytest.mark.parametrize(
    ("pattern", "beginning"),
    [("(ab|ba|cc){2,3}", "(ab|ba|cc){0,2}[abc]?|(ab|ba|cc){3}"), ("[a-e]{4}", "[a-e]{0,4}")],
)
def test_beams_follow_a_grammar(pattern, beginning):
    model = small_model("window")
    task = SamplingParams(
        max_new_tokens=9,
        num_beams=WIDTH,
        early_stopping=True,
        length_penalty=0.5,
        n=WIDTH,
        structured_output=StructuredOutput(regex=pattern),
    )
    request = replace(some_requests(model, 1)[0], params=task)
    can_grow = re.compile(pattern)

    def possible(text, ended):
        return bool(can_grow.fullmatch(text) if ended else re.fullmatch(beginning, text))

    def over(text):
        return bool(can_grow.fullmatch(text)) and len(text) == (6 if "|" in pattern else 4)

    outcomes = compare(model, JSON, request, over, possible, "paged")
    assert all(can_grow.fullmatch(outcome.text) for outcome in outcomes)
    assert {outcome.finish_reason for outcome in outcomes} == {FinishReason.END_OF_SEQUENCE}


def test_a_grammar_of_fewer_texts_than_are_asked_for_is_an_error_that_says_so():
    model = small_model("paged")
    task = SamplingParams(max_new_tokens=9, num_beams=4, n=4, structured_output=StructuredOutput(regex="yes|no"))
    engine = make_engine(model, tokenizer=JSON)
    outcomes = run_all(engine, [replace(some_requests(model, 1)[0], params=task)])
    error = outcomes["r0", 0].error
    assert isinstance(error, UserError)
    assert "found only 2 of the 4" in str(error)
    assert_empty(engine)
    several = replace(some_requests(model, 1)[0], params=task.replace(n=2))
    both = run_all(make_engine(model, tokenizer=JSON), [several])
    assert {outcome.text for outcome in both.values()} == {"yes", "no"}
