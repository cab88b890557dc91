"""What a server's client answers, answered in this process."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch
from attn_core.errors import (
    AttnError,
    CheckpointInvalid,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidValue,
    UnknownName,
    UserError,
)
from attn_engine import LocalClient
from attn_models.loading import load_model
from attn_schema import ChatMessage, SamplingParams, StructuredOutput

UNBALANCED = SamplingParams(structured_output=StructuredOutput(regex="("))


def greedy(folder, prompt: str, count: int) -> str:
    """The likeliest continuation, by running the whole sequence again for every token."""
    loaded = load_model(folder)
    ids = loaded.tokenizer.encode(prompt)
    start = len(ids)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(loaded.model(torch.tensor([ids]))[0, -1].argmax()))
    return loaded.tokenizer.decode(ids[start:])


def test_the_completion_is_what_the_model_finds_likeliest(client, home):
    completion = client.complete("writer", "to be or ", SamplingParams(max_new_tokens=20))
    assert completion.text == greedy(home / "models" / "writer", "to be or ", 20)
    assert completion.finish_reason == "length"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (9, 20)


def test_the_score_of_a_text_is_the_sum_of_its_tokens_log_probabilities(client, home):
    loaded = load_model(home / "models" / "writer")
    texts = ["to be or not", "or not", "x"]
    for text, score in zip(texts, client.score("writer", texts), strict=True):
        ids = torch.tensor(loaded.tokenizer.encode(text))
        with torch.inference_mode():
            expected = loaded.model(ids[None])[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).sum()
        assert score.sum_logprob == pytest.approx(expected.item(), abs=1e-4)
        assert [token.id for token in score.tokens] == ids.tolist()


def test_a_folder_does_as_well_as_a_name(client, home):
    folder = str(home / "models" / "writer")
    sampling = SamplingParams(max_new_tokens=5)
    assert client.complete(folder, "abc", sampling).text == client.complete("writer", "abc", sampling).text


def test_completions_of_one_prompt_are_those_of_their_seeds(client):
    both = client.complete_all("writer", "to be", SamplingParams(max_new_tokens=6, temperature=2, seed=4, n=2))
    alone = [
        client.complete("writer", "to be", SamplingParams(max_new_tokens=6, temperature=2, seed=s)) for s in (4, 5)
    ]
    assert [completion.tokens for completion in both] == [completion.tokens for completion in alone]
    assert {completion.usage.completion_tokens for completion in both} == {12}


def test_a_beam_search_finds_nothing_less_likely_than_the_greedy_completion(client):
    found = client.complete_all("writer", "to be", SamplingParams(max_new_tokens=8, n=2, num_beams=3))
    likeliest = client.complete("writer", "to be", SamplingParams(max_new_tokens=8, top_logprobs=0, ignore_eos=True))
    assert found[0].score >= found[1].score
    assert found[0].score >= sum(token.logprob for token in likeliest.tokens) / 8 - 1e-5


def test_a_conversation_is_rendered_by_the_models_template(client, home):
    said = [
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="assistant", content="ho"),
        ChatMessage(role="user", content="what"),
    ]
    answer = "".join(chunk.text for chunk in client.chat("talker", said, SamplingParams(max_new_tokens=8)))
    assert answer == greedy(home / "models" / "talker", "<user>hi\n<assistant>ho\n<user>what\n<assistant>", 8)


def test_what_turns_have_in_common_is_computed_once(client):
    turn = [ChatMessage(role="user", content="the same words again and again")]
    first = client.complete("talker", turn, SamplingParams(max_new_tokens=4))
    second = client.complete(
        "talker", [*turn, ChatMessage(role="assistant", content=first.text)], SamplingParams(max_new_tokens=4)
    )
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens >= 32


def test_sampling_is_as_asked(client):
    told = SamplingParams(max_new_tokens=6, structured_output=StructuredOutput(regex="(yes|no)"))
    assert client.complete("writer", "is it", told).text in {"yes", "no"}
    chosen = client.complete("writer", "is it", SamplingParams(max_new_tokens=3, top_logprobs=2))
    assert all(len(token.top_logprobs) == 2 for token in chosen.tokens)
    assert chosen.tokens[0].top_logprobs[0].id == chosen.tokens[0].id
    warm = [
        client.complete("writer", "is", SamplingParams(max_new_tokens=9, temperature=2, seed=s)).text for s in (1, 1, 2)
    ]
    assert warm[0] == warm[1] != warm[2]


def test_leaving_early_frees_the_engine(client):
    chunks = client.generate("writer", "abc", SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert len(list(itertools.islice(chunks, 2))) == 2
    chunks.close()
    assert client.complete("writer", "abc", SamplingParams(max_new_tokens=2)).finish_reason == "length"


def test_threads_share_a_client(client):
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = client.complete("writer", "same", SamplingParams(max_new_tokens=12)).text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert len(set(answers.values())) == 1


@pytest.mark.parametrize(
    ("model", "prompt", "sampling", "error", "said"),
    [
        ("writter", "a", SamplingParams(), UnknownName, "writer"),
        ("/", "a", SamplingParams(), CheckpointInvalid, "config.json"),
        ("writer", "", SamplingParams(), InvalidValue, "at least one token"),
        ("writer", "ä", SamplingParams(), InvalidValue, "text"),
        ("writer", [999], SamplingParams(), InvalidValue, "token_ids"),
        (
            "writer",
            "a",
            SamplingParams(structured_output=StructuredOutput(regex="(")),
            InvalidValue,
            "structured_output",
        ),
        ("writer", "a", SamplingParams(max_new_tokens=128), ContextLengthExceeded, "128"),
        ("writer", [ChatMessage(role="user", content="a")], SamplingParams(), UserError, "chat template"),
        ("talker", [ChatMessage(role="user", content="a"), 3], SamplingParams(), InvalidValue, "ChatMessages"),
    ],
)
def test_what_cannot_be_done_is_said(client, model, prompt, sampling, error, said):
    with pytest.raises(error, match=said):
        client.complete(model, prompt, sampling)


@pytest.mark.timeout(60)
def test_closing_ends_what_runs_and_a_model_used_afterwards_is_loaded_again(home):
    client = LocalClient(home)
    sampling = SamplingParams(max_new_tokens=20)
    text = client.complete("writer", "to be", sampling).text
    running = client.generate("writer", "to be", SamplingParams(max_new_tokens=100, ignore_eos=True))
    next(running)
    client.close()
    with contextlib.suppress(AttnError):  # unless it had ended
        list(running)
    client.close()
    assert client.complete("writer", "to be", sampling).text == text
    client.close()


def test_no_time_is_no_answer(client):
    with pytest.raises(DeadlineExceeded):
        client.complete("writer", "abc", SamplingParams(max_new_tokens=100, ignore_eos=True), timeout=0.0)


def test_the_one_model_that_can_chat_is_found(client, home, tmp_path):
    assert client.only_chat_model() == "talker"
    with pytest.raises(UserError, match="attn pull"):
        LocalClient(tmp_path).only_chat_model()
    both = tmp_path / "models"
    both.mkdir()
    for name in ("one", "two"):
        (both / name).symlink_to(home / "models" / "talker")
    with pytest.raises(UserError, match="one, two"):
        LocalClient(tmp_path).only_chat_model()


def test_a_model_that_can_be_fetched_is_said_to_be(client):
    with pytest.raises(UserError, match="attn pull minilm"):
        client.embed("minilm", ["a"])
