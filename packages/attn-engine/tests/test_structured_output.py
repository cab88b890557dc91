"""Completions that match what was asked for, whatever the model would rather say."""

from __future__ import annotations

import json
import re

import pytest
from attn_core.errors import InvalidValue
from attn_engine import FinishReason, Request, SamplingParams, StructuredOutput
from serving import assert_empty, make_engine, run
from small_models import JSON, LETTERS, Bytes, small_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def asking(grammar: StructuredOutput, name: str = "r", seed: int = 0, **more) -> Request:
    task = SamplingParams(max_new_tokens=90, temperature=1.5, seed=seed, structured_output=grammar, **more)
    return Request(id=name, token_ids=(1, 2, 3), params=task)


@pytest.mark.parametrize("kind", ["paged", "slot", "window"])
def test_every_completion_matches_the_regular_expression(kind):
    pattern = r"(yes|no) [0-9]{3}(ab)*"
    engine = make_engine(small_model(kind), requests=4)
    requests = [asking(StructuredOutput(regex=pattern), f"r{seed}", seed) for seed in range(20)]
    outcomes = run(engine, requests)
    texts = {outcome.text for outcome in outcomes.values() if outcome.finish_reason is not FinishReason.LENGTH}
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 10
    assert_empty(engine)


def test_every_completion_is_the_json_that_the_schema_describes():
    engine = make_engine(small_model("paged"), tokenizer=JSON)
    grammar = StructuredOutput(json_schema=json.dumps(SCHEMA))
    for outcome in run(engine, [asking(grammar, f"r{seed}", seed) for seed in range(12)]).values():
        value = json.loads(outcome.text)
        assert value.keys() == {"name", "age", "kind"}
        assert value["kind"] in {"cat", "dog"}
        assert 0 <= value["age"] <= 99
        assert len(value["name"]) <= 5


def test_a_lark_grammar_is_followed():
    grammar = StructuredOutput(lark='start: sum\nsum: NUMBER ("+" NUMBER)+\nNUMBER: /[1-9][0-9]?/\n')
    engine = make_engine(small_model("paged"), tokenizer=JSON)
    for outcome in run(engine, [asking(grammar, f"r{seed}", seed) for seed in range(8)]).values():
        if outcome.finish_reason is FinishReason.END_OF_SEQUENCE:
            assert re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?)+", outcome.text)


def test_a_completion_ends_where_the_grammar_allows_nothing_more():
    outcome = run(make_engine(small_model("paged")), [asking(StructuredOutput(regex="abc"))])["r"]
    assert (outcome.text, len(outcome.ids)) == ("abc", 3)
    assert outcome.finish_reason is FinishReason.END_OF_SEQUENCE


def test_a_greedy_completion_takes_the_most_likely_token_that_is_allowed():
    model = small_model("paged")
    free = run(make_engine(model), [Request(id="r", token_ids=(1, 2, 3), params=SamplingParams(max_new_tokens=1))])["r"]
    task = SamplingParams(max_new_tokens=1, structured_output=StructuredOutput(regex="[a-zA-Z0-9 ]"))
    assert run(make_engine(model), [Request(id="r", token_ids=(1, 2, 3), params=task)])["r"].ids == free.ids


def test_a_grammar_gives_the_same_tokens_alone_in_a_crowd_and_after_preemption():
    model = small_model("paged")
    requests = [asking(StructuredOutput(regex=f"[a-z]{{3{i}}}"), f"r{i}", i) for i in range(6)]
    alone = {request.id: run(make_engine(model), [request])[request.id].text for request in requests}
    engine = make_engine(model, "shared", tokens=96)
    assert {name: outcome.text for name, outcome in run(engine, requests).items()} == alone
    assert engine.stats().preemptions > 0


def test_only_the_request_with_the_grammar_is_bound_by_it():
    model = small_model("paged")
    free = Request(id="free", token_ids=(4, 5), params=SamplingParams(max_new_tokens=10, ignore_eos=True))
    alone = run(make_engine(model), [free])["free"].ids
    outcomes = run(make_engine(model), [asking(StructuredOutput(regex="[0-9]{10}")), free])
    assert outcomes["free"].ids == alone
    assert outcomes["r"].text.isdigit()


@pytest.mark.parametrize("grammar", ["a{2}[!]", "a[bc]?!"])
def test_what_the_vocabulary_cannot_spell_ends_that_request_alone(grammar):
    engine = make_engine(small_model("paged"))
    asked = [asking(StructuredOutput(regex="b{2}"), "other")]
    try:
        engine.check(asking(StructuredOutput(regex=grammar)))
        asked.append(asking(StructuredOutput(regex=grammar)))
    except InvalidValue as refused:
        assert "vocabulary" in refused.message  # noqa: PT017 - or it ends when it gets there
    outcomes = run(engine, asked)
    if "r" in outcomes:
        assert "vocabulary" in outcomes["r"].error.message
    assert outcomes["other"].text == "bb"


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(", "regex"),
        ("json_schema", "no json", "json_schema"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"$ref": "http://example.com/x.json"}', "json_schema"),
        ("lark", "start: nowhere", "nowhere"),
        ("regex", "", "1 to"),
        ("regex", "a" * 2**18 + "a", "262145 characters"),
    ],
)
def test_a_bad_grammar_is_refused_before_anything_runs(kind, text, said):
    with pytest.raises(InvalidValue, match=re.escape(said)):
        make_engine(small_model("paged")).submit(asking(StructuredOutput(**{kind: text})))


def test_a_schema_that_explodes_is_refused_before_it_takes_time_of_others():
    branches = [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(1000)]
    engine = make_engine(small_model("paged"), tokenizer=JSON)
    with pytest.raises(InvalidValue, match="structured_output"):
        engine.submit(asking(StructuredOutput(json_schema=json.dumps({"anyOf": branches}))))
    outcomes = run(engine, [asking(StructuredOutput(regex="b{2}"), "other")])
    assert outcomes["other"].text == "bb"
    assert_empty(engine)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_new_tokens": 3}])
def test_options_that_contradict_a_grammar_are_refused(other):
    with pytest.raises(InvalidValue, match=next(iter(other))):
        asking(StructuredOutput(regex="a"), **other)


def test_a_tokenizer_that_does_not_spell_tokens_cannot_follow_a_grammar():
    class Mute:
        vocab_size = LETTERS.vocab_size
        end_ids = LETTERS.end_ids
        encode = Bytes.encode
        decode = staticmethod(LETTERS.decode)

    with pytest.raises(InvalidValue, match="tokenizer"):
        make_engine(small_model("paged"), tokenizer=Mute()).submit(asking(StructuredOutput(regex="a")))
