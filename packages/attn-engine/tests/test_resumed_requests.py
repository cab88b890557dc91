"""A request whose engine is lost goes on in another one as if nothing had happened, wherever its stream was cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attn_core.errors import InvalidValue
from attn_engine import Engine, Request, SamplingParams, StructuredOutput
from attn_schema import OutputDelta, PartialCompletion, Resumption, ScoringParams
from attn_schema.resuming import StreamProgress
from serving import assert_empty, make_engine
from small_models import JSON, KINDS, LETTERS, Bytes, small_model

PROMPT = tuple(range(3, 40, 4))
SOURCE = (5, 1, 4)
SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}'
CASES: dict[str, tuple[str, dict, Bytes]] = {
    **{f"greedy {kind}": (kind, {}, LETTERS) for kind in KINDS},
    "sampled": ("paged", {"temperature": 1.3, "seed": 7, "top_p": 0.95}, LETTERS),
    "several": ("hybrid", {"temperature": 1.3, "seed": 2**64 - 1, "n": 3}, LETTERS),
    "log probabilities": ("slot", {"temperature": 0.8, "seed": 3, "top_logprobs": 2}, LETTERS),
    "penalties": (
        "window",
        {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.9, "presence_penalty": 0.5},
        LETTERS,
    ),
    "least tokens": ("paged", {"temperature": 3.0, "seed": 4, "min_new_tokens": 9, "ignore_eos": False}, LETTERS),
    "drafts": ("paged", {"num_speculative_tokens": 4}, LETTERS),
    "structured": (
        "paged",
        {
            "temperature": 1.0,
            "seed": 11,
            "ignore_eos": False,
            "structured_output": StructuredOutput(json_schema=SCHEMA),
        },
        JSON,
    ),
    "structured several": (
        "replay",
        {
            "temperature": 1.0,
            "seed": 12,
            "n": 2,
            "ignore_eos": False,
            "structured_output": StructuredOutput(regex="[a-f]{3,9}x"),
        },
        JSON,
    ),
    "beams": ("hybrid", {"num_beams": 3, "n": 2}, LETTERS),
}


def ask(kind: str, sampling: dict, tokens: int = 12) -> Request:
    params = SamplingParams(**{"ignore_eos": True, "max_new_tokens": tokens} | sampling)
    source = SOURCE if kind in ("source", "hybrid") else None
    return Request(id="asked", token_ids=PROMPT, encoder_token_ids=source, params=params)


def deltas_of(engine: Engine, request: Request, most: int | None = None) -> list[OutputDelta]:
    """What a request returns, to its end or to the loss of the engine after `most` deltas."""
    engine.submit(request)
    found: list[OutputDelta] = []
    while not engine.idle and (most is None or len(found) < most):
        for output in engine.step():
            assert output.error is None, output.error
            found.append(output.delta)
    return found if most is None else found[:most]


def joined(deltas: list[OutputDelta]) -> dict[int, dict]:
    """The completions, with log probabilities rounded: they are computed in other batches."""
    found: dict[int, dict] = {}
    for delta in deltas:
        mine = found.setdefault(delta.index, {"ids": [], "text": "", "logprobs": [], "ended": None})
        assert mine["ended"] is None, "a delta after the end"
        mine["ids"] += [token.id for token in delta.tokens]
        mine["text"] += delta.text
        mine["logprobs"] += [
            (round(token.logprob, 9), *((top.id, round(top.logprob, 9)) for top in token.top_logprobs))
            for token in delta.tokens
            if token.logprob is not None
        ]
        if delta.finish_reason is not None:
            mine["ended"] = (delta.finish_reason, delta.stop_reason, delta.score and round(delta.score, 9))
    return found


def resumed(make, request: Request, cuts: list[int]) -> list[OutputDelta]:
    """The deltas of a request whose engine is lost after so many deltas, again and again."""
    progress, found = StreamProgress(), []
    for most in [*cuts, None]:
        part = replace(request, resume=progress.resume)
        found += [progress.take(delta) for delta in deltas_of(make(), part, most)]
    return found


@pytest.mark.parametrize("case", CASES)
def test_wherever_it_is_cut_the_rest_is_the_same(case: str) -> None:
    kind, sampling, tokenizer = CASES[case]
    model = small_model(kind)
    request = ask(kind, sampling)
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(make_engine(model, "shared", tokenizer=tokenizer, max_num_batched_tokens=17))
        return engines[-1]

    whole = deltas_of(make(), request)
    wanted, usage = joined(whole), whole[-1].usage
    assert usage is not None
    assert len(whole) > 1
    for cut in range(len(whole)):
        parts = resumed(make, request, [cut])
        assert joined(parts) == wanted, f"cut after {cut} deltas"
        assert parts[-1].usage.completion_tokens == usage.completion_tokens
        assert parts[-1].usage.prompt_tokens == usage.prompt_tokens
        assert_empty(engines[-1])
    if len(whole) > 2:
        assert joined(resumed(make, request, [1, 0, 1])) == wanted


def test_a_stop_string_and_a_character_that_the_cut_divides_are_found() -> None:
    """Text that was held back at the cut is returned by the other engine, or found to be the stop string."""
    model = small_model("paged")
    text = "".join(delta.text for delta in deltas_of(make_engine(model), ask("paged", {})))
    stopping = ask("paged", {"stop": (text[6:10],)})
    whole = deltas_of(make_engine(model), stopping)
    assert whole[-1].stop_reason == text[6:10]
    euro = Bytes(bytes(range(32, 93)) + "€".encode())
    split = deltas_of(make_engine(model, tokenizer=euro), ask("paged", {"temperature": 5.0, "seed": 3}, 40))
    for request, tokenizer, deltas in (
        (stopping, LETTERS, whole),
        (ask("paged", {"temperature": 5.0, "seed": 3}, 40), euro, split),
    ):
        for cut in range(len(deltas)):
            parts = resumed(lambda tokenizer=tokenizer: make_engine(model, tokenizer=tokenizer), request, [cut])
            assert joined(parts) == joined(deltas)


def test_scores_go_on_behind_those_that_are_known() -> None:
    model = small_model("hybrid")
    request = Request(id="asked", token_ids=PROMPT, encoder_token_ids=SOURCE, params=ScoringParams(top_logprobs=2))

    def make() -> Engine:
        return make_engine(model, max_num_batched_tokens=3)

    whole = deltas_of(make(), request)
    for cut in range(len(whole)):
        assert joined(resumed(make, request, [cut])) == joined(whole)


def test_where_numbers_are_rounded_otherwise_the_last_message_says_so() -> None:
    model = small_model("paged")
    first = deltas_of(make_engine(model), ask("paged", {}), 3)
    here = first[0].computed_on
    assert "float64" in here
    assert not any(delta.computed_on for delta in first[1:])
    received = (PartialCompletion(token_ids=tuple(token.id for delta in first for token in delta.tokens)),)
    for before, warns in ((here, False), ("", False), ("another chip", True), (f"{here}; then another chip", True)):
        request = replace(ask("paged", {}), resume=Resumption(received=received, computed_on=before))
        *rest, last = deltas_of(make_engine(model), request)
        assert all(delta.warning is None for delta in rest)
        assert (last.warning is not None) is warns
        assert not warns or before in last.warning


@pytest.mark.parametrize(
    ("sampling", "completions", "field"),
    [
        ({}, [PartialCompletion(token_ids=(64,))], r"resume\[0\]"),
        ({}, [PartialCompletion(token_ids=(1,) * 12)], "fewer than 12"),
        ({}, [PartialCompletion(index=1)], "from 0 to 0"),
        ({"n": 2}, [PartialCompletion(), PartialCompletion()], "at most once"),
        ({}, [PartialCompletion(token_ids=(1,), finished=True)], "at least one that has not"),
        ({"temperature": 1.0}, [PartialCompletion(token_ids=(1,))], "seed"),
        ({"num_beams": 2}, [PartialCompletion(token_ids=(1,))], "beam search"),
        ({"ignore_eos": False}, [PartialCompletion(token_ids=(1, 63))], "marked as finished"),
        ({"stop": ("b",)}, [PartialCompletion(token_ids=(1, 2))], "marked as finished"),
    ],
)
def test_what_cannot_have_been_received_is_refused(sampling: dict, completions: list, field: str) -> None:
    engine = make_engine(small_model("paged"))
    request = replace(ask("paged", sampling), resume=Resumption(received=completions))
    with pytest.raises(InvalidValue, match=field):
        engine.submit(request)
    assert engine.idle
    assert_empty(engine)


def test_tokens_that_the_grammar_forbids_are_refused() -> None:
    wanted = StructuredOutput(regex="[a-c]{5}")
    received = PartialCompletion(token_ids=tuple(JSON.encode("abz")))
    request = ask("paged", {"structured_output": wanted, "ignore_eos": False})
    with pytest.raises(InvalidValue, match="structured_output"):
        make_engine(small_model("paged"), tokenizer=JSON).submit(
            replace(request, resume=Resumption(received=(received,)))
        )
