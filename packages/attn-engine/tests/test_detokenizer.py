from __future__ import annotations

import pytest
from attn_engine import FinishReason, Request, SamplingParams
from attn_engine.detokenizer import Detokenizer, StopStrings
from hypothesis import example, given
from hypothesis import strategies as st
from serving import make_engine, run
from small_models import LETTERS, Bytes, small_model

BYTES = Bytes()


@given(prompt=st.binary(max_size=8), completion=st.binary(max_size=40))
@example(prompt=b"\xf0\x9f", completion="\u2603 snow \U0001f600".encode())
@example(prompt=b"", completion=b"\xff" * 9 + b"a\xe2\x98")
def test_pieces_joined_are_the_text_of_all_bytes(prompt, completion):
    detokenizer = Detokenizer.of(BYTES, list(prompt))
    text = "".join([*(detokenizer.push(byte) for byte in completion), detokenizer.finish()])
    whole = (prompt[-4:] + completion).decode(errors="replace")
    assert whole.endswith(text)
    if not prompt:
        assert text == whole


@given(text=st.text(max_size=20))
def test_valid_text_never_shows_half_a_character(text):
    detokenizer = Detokenizer.of(BYTES)
    given_out = ""
    for byte in text.encode():
        given_out += detokenizer.push(byte)
        assert text.startswith(given_out)
    assert given_out + detokenizer.finish() == text


@given(
    text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_a_stop_string_ends_the_text_wherever_the_pieces_are_cut(text, stops, data):
    finder, given_out, rest = StopStrings(stops), "", text
    while rest and finder.found is None:
        cut = data.draw(st.integers(1, len(rest)))
        given_out += finder.push(rest[:cut])
        rest = rest[cut:]
        consumed = text[: len(text) - len(rest)]
        # What has been given out never has to be taken back.
        assert consumed.startswith(given_out)
    if finder.found is None:
        given_out += finder.finish()
        assert given_out == text
        assert not any(stop in text for stop in stops)
    else:
        assert given_out + finder.found == text[: len(given_out) + len(finder.found)]
        assert not any(stop in given_out for stop in stops)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_character_by_character_the_first_completed_stop_wins(text, stops):
    finder, given_out = StopStrings(stops), ""
    for character in text:
        given_out += finder.push(character)
    ends = [(text.find(stop) + len(stop)) for stop in stops if stop in text]
    assert (finder.found is not None) == bool(ends)
    if ends:
        assert len(given_out) + len(finder.found) == min(ends)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_the_engine_stops_at_a_stop_string_across_token_borders(length):
    model = small_model("paged")
    free = run(
        make_engine(model),
        [
            Request(
                id="x",
                token_ids=(3, 4),
                params=SamplingParams(max_new_tokens=40, temperature=1.5, seed=8, ignore_eos=True),
            )
        ],
    )["x"]
    stop = free.text[10 : 10 + length]
    at = free.text.find(stop)
    task = SamplingParams(max_new_tokens=40, temperature=1.5, seed=8, ignore_eos=True, stop=("never", stop))
    outcome = run(make_engine(model), [Request(id="x", token_ids=(3, 4), params=task)])["x"]
    assert outcome.finish_reason is FinishReason.STOP
    assert outcome.stop_reason == stop
    assert outcome.text == free.text[:at]
    assert outcome.ids == free.ids[: at + length]


def test_text_that_only_looked_like_a_stop_string_comes_in_the_end():
    model = small_model("paged")
    base = SamplingParams(max_new_tokens=12, temperature=1.5, seed=8, ignore_eos=True)
    free = run(make_engine(model), [Request(id="x", token_ids=(3, 4), params=base)])["x"]
    task = SamplingParams(max_new_tokens=12, temperature=1.5, seed=8, ignore_eos=True, stop=(free.text[-3:] + "#",))
    outcome = run(make_engine(model), [Request(id="x", token_ids=(3, 4), params=task)])["x"]
    assert outcome.text == free.text == LETTERS.decode(outcome.ids)
    assert outcome.finish_reason is FinishReason.LENGTH
