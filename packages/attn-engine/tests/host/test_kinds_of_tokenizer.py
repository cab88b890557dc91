"""With tokenizers of every kind, text loses nothing on its way, and structured output is what was asked for."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from attn_core import InvalidValue, installed
from attn_engine.client import TextTask
from attn_engine.detokenizer import Detokenizer
from attn_engine.host.host import ModelHost
from attn_engine.in_process import open_host
from attn_engine.structured_output import GrammarCompiler
from attn_models.loading import save_model
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import word_tokenizer
from attn_schema import EngineConfig, Prompt, SamplingParams, StructuredOutput

# With importlib mode a test file cannot import its neighbour.
sys.path.insert(0, str(Path(__file__).parent))
from delivered import Outputs
from kinds_of_tokenizer import BYTES, KINDS, tokenizer_of

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
JOINED = [kind for kind in KINDS if kind != "word pieces"]
TEXTS = (
    "ok \U0001f916\U0001f9be done",
    "the cat\n\n sat  on",
    "\u00e9\u4e2d\u6587 yes",
    "a\r\n\tb \u0928\u092e \U0001f1eb\U0001f1f7.",
)
REPLACEMENT = "\ufffd"
WITHOUT_TOKEN = 60


@pytest.fixture(scope="module")
def tokenizers_by_kind() -> dict[str, Tokenizer]:
    return {kind: tokenizer_of(kind) for kind in KINDS}


def pieces(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    detokenizer = Detokenizer.of(tokenizer, prompt)
    return "".join([*map(detokenizer.push, ids), detokenizer.copy().finish()])


def random_ids(tokenizer: Tokenizer, seed: int, count: int) -> list[int]:
    """Ids of which half are single bytes where the tokenizer has them."""
    draws = random.Random(seed)
    spelled = [tokenizer.id(piece) for piece in BYTES]
    found = [place for place in spelled if place is not None]
    return [
        draws.choice(found) if found and draws.random() < 0.5 else draws.randrange(tokenizer.vocab_size)
        for _ in range(count)
    ]


@EVERY_KIND
def test_pieces_joined_are_the_decoding_of_all_ids(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    samples = [tokenizer.encode(text, add_special=False) for text in TEXTS]
    samples += [random_ids(tokenizer, seed, 60) for seed in range(60)]
    for ids in samples:
        assert pieces(tokenizer, ids) == tokenizer.decode(ids)
        for prompt in ([tokenizer.bos_id], *samples[:8]):
            before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
            if whole.startswith(before) and not before.endswith(REPLACEMENT):
                assert before + pieces(tokenizer, ids, prompt) == whole


@pytest.mark.parametrize("kind", JOINED)
def test_special_tokens_that_are_kept_stand_between_the_same_text(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    special = max(tokenizer.special_ids)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        for place in range(len(ids)):
            detokenizer = Detokenizer.of(tokenizer, skip_special=False)
            kept = [detokenizer.push(token) for token in (*ids[:place], special, *ids[place:])]
            joined = "".join([*kept, detokenizer.finish()])
            assert joined.count(tokenizer.token(special)) == 1
            if REPLACEMENT not in joined and not tokenizer.special_ids & set(ids):
                assert joined.replace(tokenizer.token(special), "") == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", JOINED)
def test_a_grammar_has_a_special_token_only_where_it_names_its_id(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    special = max(tokenizer.special_ids - tokenizer.end_ids)
    matcher = GrammarCompiler(tokenizer).matcher(StructuredOutput(lark=f"start: TEXT <[{special}]>\nTEXT: /[a-z ]+/"))
    for token in tokenizer.encode_within("yes"):
        assert not matcher.allowed_bytes(tokenizer.vocab_size)[special]
        matcher.accept(token)
    allowed = matcher.allowed_bytes(tokenizer.vocab_size)
    assert [token for token in tokenizer.special_ids if allowed[token]] == [special]


@pytest.mark.parametrize("kind", [kind for kind in JOINED if kind != "unigram"])
def test_a_character_begun_by_the_prompt_belongs_to_the_completion(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    ids = [tokenizer.encode_within("cat"), tokenizer.encode_within("\U0001f916")]
    assert len(ids[1]) == 4
    assert pieces(tokenizer, ids[1][2:], [*ids[0], *ids[1][:2]]) == "\U0001f916"


@pytest.mark.parametrize("kind", JOINED)
def test_a_text_in_the_middle_is_spelled_by_its_own_bytes_alone(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    for text in ("yes", " yes", '{"name"', "12 cat the", "a"):
        ids = tokenizer.encode_within(text)
        assert not set(ids) & tokenizer.special_ids
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
        start = tokenizer.encode("x", add_special=False)
        assert tokenizer.decode([*start, *ids]) == tokenizer.decode(start) + text


@pytest.mark.parametrize("kind", JOINED)
def test_every_token_adds_its_bytes_to_a_text(tokenizers_by_kind, kind):
    tokenizer = tokenizers_by_kind[kind]
    start = tokenizer.encode_within("x")
    for token in sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids):
        added = tokenizer.decode([*start, token])[1:]
        if REPLACEMENT not in added:
            assert tokenizer.token_bytes(token).decode() == added


def test_words_without_a_decoder_are_spelled_with_the_spaces_between_them():
    words = word_tokenizer(["the cat sat"])
    ids = words.encode("the cat")
    assert "".join(map(words.token_text, ids)) == words.decode(ids)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "cat the"]}, "age": {"type": "integer", "minimum": 10, "maximum": 12}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": StructuredOutput(json_schema=json.dumps(SCHEMA)),
    "forced text": StructuredOutput(regex="yes the cat 12 the name: [a-c]{2,4}"),
    "free text": StructuredOutput(regex="[a-z ]{6,12}\\."),
    "grammar": StructuredOutput(lark='start: "the " ANIMAL ", " NUMBER\nANIMAL: "cat" | "dog"\nNUMBER: /[0-9]{1,3}/'),
}
FITS = {
    "schema": lambda text: {"name", "age"} == set(json.loads(text)),
    "forced text": lambda text: re.fullmatch("yes the cat 12 the name: [a-c]{2,4}", text),
    "free text": lambda text: re.fullmatch("[a-z ]{6,12}\\.", text),
    "grammar": lambda text: re.fullmatch("the (cat|dog), [0-9]{1,3}", text),
}


@pytest.fixture(scope="module", params=KINDS)
def served(request, tokenizers_by_kind, tmp_path_factory) -> Iterator[tuple[ModelHost, Tokenizer, Outputs]]:
    """A model of random weights, whose embedding has more rows than there are tokens, as those of Qwen 3 and Phi."""
    torch.manual_seed(0)
    rows = tokenizers_by_kind[request.param].vocab_size + WITHOUT_TOKEN
    family = installed().models.get("decoder")
    sizes = {"vocab_size": rows, "max_seq_len": 256, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    place = tmp_path_factory.mktemp("model")
    save_model(place, family.build(family.configure(sizes)), tokenizers_by_kind[request.param])
    tokenizer = Tokenizer.from_folder(place, rows)
    outputs = Outputs()
    host = open_host(place, EngineConfig(kv_cache_memory_bytes=2**22), outputs.put)
    yield host, tokenizer, outputs
    host.stop(timeout=10.0)


def answers(served, **params) -> list[tuple[str, list]]:
    """The text and tokens of each completion of a prompt, joined as they arrive."""
    host, _, outputs = served
    sampled = {} if "num_beams" in params else {"temperature": 2.0, "seed": 1}
    options = {"max_new_tokens": 60, "ignore_eos": "structured_output" not in params, **sampled}
    task = TextTask(prompt=Prompt(text="the cat"), params=SamplingParams(**options | params))
    host.submit(task)
    texts: dict[int, tuple[str, list]] = {}
    for output in outputs.of(task):
        assert output.error is None
        text, tokens = texts.get(output.delta.index, ("", []))
        texts[output.delta.index] = text + output.delta.text, [*tokens, *output.delta.tokens]
    return list(texts.values())


@pytest.mark.parametrize("params", [{}, {"n": 3}, {"num_beams": 2}], ids=["one", "n", "beams"])
def test_what_arrives_is_the_decoding_of_all_tokens(served, params):
    tokenizer = served[1]
    prompt = tokenizer.encode("the cat")
    for text, tokens in answers(served, **params):
        whole = tokenizer.decode([*prompt, *(token.id for token in tokens)])
        assert tokenizer.decode(prompt) + text == whole


def test_rows_without_a_token_have_no_text(served):
    size = served[1].vocab_size
    drawn = {"allowed_token_ids": (1, size, size + WITHOUT_TOKEN - 1), "top_logprobs": 2}
    ((text, tokens),) = answers(served, **drawn)
    assert {token.id for token in tokens} > {size, size + WITHOUT_TOKEN - 1}
    assert {token.text for token in tokens if token.id >= size} == {""}
    assert text == served[1].decode([token.id for token in tokens])


def test_texts_of_log_probabilities_joined_are_the_text(served):
    if served[1].joins_tokens:
        ((text, tokens),) = answers(served, top_logprobs=1, structured_output=GRAMMARS["forced text"])
        assert "".join(token.text for token in tokens if token.id not in served[1].special_ids) == text


def test_a_stop_string_ends_the_text_where_it_first_occurs(served):
    ((text, _),) = answers(served)
    stop = text[4:7]
    ((stopped, _),) = answers(served, stop=(stop,))
    assert stopped == text[: text.index(stop)]


@pytest.mark.parametrize("name", GRAMMARS)
def test_structured_output_is_valid_and_complete(served, name):
    if not served[1].joins_tokens:
        with pytest.raises(InvalidValue):
            GrammarCompiler(served[1]).check(GRAMMARS[name])
        return
    ((text, tokens),) = answers(served, structured_output=GRAMMARS[name], max_new_tokens=150)
    assert FITS[name](text)
    assert tokens
