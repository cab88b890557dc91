"""Completions over gRPC: the same tokens as ever, whoever else is served."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
from asking_inference import ask, complete, drained, refused
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub


async def test_the_texts_of_a_stream_joined_are_the_decoded_tokens(stub: InferenceServiceStub) -> None:
    messages = [message async for message in stub.Generate(ask(max_new_tokens=24))]
    spelled = "".join(token.text for message in messages for token in message.tokens)
    assert "".join(message.text for message in messages) == spelled
    assert len(spelled) == 24
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert all(message.finish_reason == 0 for message in messages[:-1])
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 24)


async def test_a_completion_in_a_crowd_is_the_completion_alone(stub: InferenceServiceStub) -> None:
    requests = [ask(f"{word} in a crowd", max_new_tokens=16 + place) for place, word in enumerate("abcdefghijkl")]
    alone = [await complete(stub, request) for request in requests]
    crowd = await asyncio.gather(*(complete(stub, request) for request in requests))
    assert crowd == alone
    assert len({tuple(tokens) for tokens in alone}) > 6


async def test_a_prompt_asked_again_is_read_from_memory_and_answered_the_same(stub: InferenceServiceStub) -> None:
    text = "a beginning of forty characters and not less"
    answers = []
    for _ in range(2):
        messages = [message async for message in stub.Generate(ask(text, max_new_tokens=8))]
        answers.append([token.id for message in messages for token in message.tokens])
    assert answers[0] == answers[1]
    assert messages[-1].usage.cached_tokens == 32
    assert (await stub.GetEngineStats(inference_pb2.GetEngineStatsRequest(model="tiny"))).cached_tokens >= 32


async def test_a_seed_repeats_a_sampled_completion(stub: InferenceServiceStub) -> None:
    sampled = [await complete(stub, ask(max_new_tokens=20, temperature=1.5, seed=seed)) for seed in (7, 7, 8)]
    assert sampled[0] == sampled[1] != sampled[2]


async def test_a_completion_matches_the_regular_expression_that_is_asked_for(stub: InferenceServiceStub) -> None:
    grammar = inference_pb2.StructuredOutput(regex="(yes|no) (to|or) be")
    request = ask(max_new_tokens=40, temperature=2, structured_output=grammar)
    messages = [message async for message in stub.Generate(request)]
    text = "".join(message.text for message in messages)
    assert text in {f"{word} {other} be" for word in ("yes", "no") for other in ("to", "or")}
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_END_OF_SEQUENCE


async def test_biases_and_penalties_reach_the_engine(stub: InferenceServiceStub) -> None:
    forced = await complete(stub, ask(max_new_tokens=4, logit_bias={7: 100.0}))
    assert forced == [7] * 4
    varied = await complete(stub, ask(max_new_tokens=12, logit_bias={7: 1.0, 8: 1.0}, frequency_penalty=2.0))
    assert len(set(varied)) > 3


async def test_a_stop_string_ends_the_text_before_it_appears(stub: InferenceServiceStub) -> None:
    whole = "".join([message.text async for message in stub.Generate(ask(max_new_tokens=40))])
    stop = whole[10:13]
    messages = [message async for message in stub.Generate(ask(max_new_tokens=40, stop=[stop]))]
    assert "".join(message.text for message in messages) == whole[: whole.index(stop)]
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
    assert messages[-1].stop_reason == stop


async def test_the_likeliest_alternative_of_a_greedy_token_is_the_token(stub: InferenceServiceStub) -> None:
    async for message in stub.Generate(ask(max_new_tokens=5, top_logprobs=3)):
        for token in message.tokens:
            assert token.top_logprobs[0].id == token.id
            assert abs(token.top_logprobs[0].logprob - token.logprob) < 1e-6
            assert len(token.top_logprobs) == 3


async def test_scores_of_a_completion_are_the_log_probabilities_it_was_made_with(stub: InferenceServiceStub) -> None:
    made = [
        token
        for message in [m async for m in stub.Generate(ask(max_new_tokens=8, top_logprobs=0))]
        for token in message.tokens
    ]
    text = "To be" + "".join(token.text for token in made)
    request = inference_pb2.ScoreRequest(model="tiny", prompts=[common_pb2.Prompt(text=text)])
    (score,) = (await stub.Score(request)).scores
    assert not score.tokens[0].HasField("logprob")
    for token, scored in zip(made, score.tokens[5:], strict=True):
        assert scored.id == token.id
        assert abs(scored.logprob - token.logprob) < 1e-4


async def test_a_dropped_call_frees_all_it_held(stub: InferenceServiceStub) -> None:
    for read in (1, 3):
        call = stub.Generate(ask(max_new_tokens=240))
        for _ in range(read):
            await call.read()
        call.cancel()
        load = await drained(stub)
        assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)


async def test_a_deadline_ends_the_work(stub: InferenceServiceStub) -> None:
    # So many at once that none can be whole within the deadline.
    calls = [stub.Generate(ask("x" * 20, max_new_tokens=230), timeout=0.1) for _ in range(60)]
    for call in calls:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in call:
                assert not message.finish_reason
    codes = {await call.code() for call in calls}
    # Some run out of time; of the others it is known before they begin.
    assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    load = await drained(stub)
    assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)


async def test_a_model_of_another_mechanism_is_served_beside_the_first(
    stub: InferenceServiceStub, models: object
) -> None:
    from attn.v1 import model_pb2

    answer = await models.LoadModel(model_pb2.LoadModelRequest(name="tiny-linear"))  # type: ignore[attr-defined]
    assert list(answer.model.mechanisms) == ["attn-variants/linear"]
    both = await asyncio.gather(
        complete(stub, ask(max_new_tokens=12)), complete(stub, ask(model="tiny-linear", max_new_tokens=12))
    )
    assert both[0] != both[1]
    assert [len(tokens) for tokens in both] == [12, 12]


async def test_a_completion_goes_on_while_another_model_is_loaded(stub: InferenceServiceStub, models: object) -> None:
    from attn.v1 import model_pb2

    begun = time.monotonic()
    running = asyncio.create_task(complete(stub, ask(max_new_tokens=200)))
    await models.LoadModel(model_pb2.LoadModelRequest(name="tiny-linear"))  # type: ignore[attr-defined]
    assert len(await running) == 200
    assert time.monotonic() - begun < 60


async def test_completions_of_one_prompt_are_those_of_requests_alone(stub: InferenceServiceStub) -> None:
    options = {"max_new_tokens": 9, "temperature": 1.5, "typical_p": 0.9}
    messages = [m async for m in stub.Generate(ask(seed=40, n=3, **options))]
    for choice in range(3):
        made = [token.id for m in messages if m.index == choice for token in m.tokens]
        assert made == await complete(stub, ask(seed=40 + choice, **options))
        assert [m.finish_reason for m in messages if m.index == choice and m.finish_reason] == [
            inference_pb2.FINISH_REASON_LENGTH
        ]
    assert [m.HasField("usage") for m in messages] == [False] * (len(messages) - 1) + [True]
    assert (messages[-1].usage.prompt_tokens, messages[-1].usage.completion_tokens) == (5, 27)


async def test_too_many_completions_and_an_impossible_share_are_refused(stub: InferenceServiceStub) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "n: 65", "64"):
        await complete(stub, ask(n=65))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "typical_p"):
        await complete(stub, ask(typical_p=0.0))


async def test_a_beam_search_tells_its_completions_the_best_first(stub: InferenceServiceStub) -> None:
    beams = {"num_beams": 4, "length_penalty": 0.5, "early_stopping": inference_pb2.EARLY_STOPPING_TRUE}
    request = ask(max_new_tokens=6, n=3, top_logprobs=0, **beams)
    messages = [message async for message in stub.Generate(request)]
    assert [message.index for message in messages] == [0, 1, 2]
    scores = [message.score for message in messages]
    assert scores == sorted(scores, reverse=True)
    for message in messages:
        total = sum(token.logprob for token in message.tokens)
        assert abs(message.score - total / len(message.tokens) ** 0.5) < 1e-4
    assert messages[-1].usage.completion_tokens == sum(len(message.tokens) for message in messages)
    load = await drained(stub)
    assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)


async def test_beams_with_what_conflicts_are_refused(stub: InferenceServiceStub) -> None:
    for given in ({"temperature": 0.5}, {"seed": 1}, {"n": 5}):
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, *given):
            await complete(stub, ask(num_beams=4, **given))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "num_beams", "1 to 64"):
        await complete(stub, ask(num_beams=65))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "early_stopping", "9"):
        await complete(stub, ask(num_beams=4, early_stopping=9))


async def test_guesses_change_no_token_and_are_counted(stub: InferenceServiceStub) -> None:
    text = "to be or not to be or not to be"
    plain, guessed = [await complete(stub, ask(text, max_new_tokens=60, num_speculative_tokens=n)) for n in (0, 6)]
    assert plain == guessed
    load = await stub.GetEngineStats(inference_pb2.GetEngineStatsRequest(model="tiny"))
    assert load.draft_tokens >= load.accepted_tokens
    assert load.draft_tokens > 0
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "num_speculative_tokens", "99"):
        await complete(stub, ask(num_speculative_tokens=99))


async def test_beams_end_at_stop_strings_and_follow_a_grammar(stub: InferenceServiceStub) -> None:
    grammar = inference_pb2.StructuredOutput(regex="(yes|no|never) to be")
    messages = [m async for m in stub.Generate(ask(max_new_tokens=20, num_beams=3, structured_output=grammar, n=3))]
    assert {message.text for message in messages} == {"yes to be", "no to be", "never to be"}
    request = ask(max_new_tokens=20, num_beams=3, structured_output=grammar, stop=[" t"])
    (message,) = [message async for message in stub.Generate(request)]
    assert (message.finish_reason, message.stop_reason) == (inference_pb2.FINISH_REASON_STOP, " t")
    assert message.text in {"yes", "no", "never"}
