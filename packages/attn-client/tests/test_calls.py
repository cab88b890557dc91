"""What goes out and what comes back, against a real server."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from attn_client import AsyncClient, ChatMessage, Client, ClientSettings
from attn_client.async_client import AsyncJobs, AsyncMechanisms, AsyncModels
from attn_client.client import Jobs, Mechanisms, Models
from attn_core import errors
from attn_gateway import GatewaySettings, TlsFiles
from attn_schema import (
    ConnectionOptions,
    DeploymentConfig,
    Embeddings,
    EngineConfig,
    FinishReason,
    ModelState,
    SamplingParams,
    Tensor,
    Usage,
)


def test_a_completion_arrives_in_pieces(client: Client) -> None:
    chunks = list(client.generate("words", "one two three", SamplingParams(max_new_tokens=4, top_logprobs=1)))
    assert "".join(chunk.text for chunk in chunks) == "one two three one "
    assert [token.logprob for chunk in chunks for token in chunk.tokens] == [-0.5] * 4
    assert chunks[0].tokens[0].top_logprobs[0].text == "one"
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.cached_tokens) == (3, 1)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("seed", 2**64, "0 to 18446744073709551615"),
        ("seed", -1, "0 to 18446744073709551615"),
        ("seed", 10**400, "0 to 18446744073709551615"),
        ("max_new_tokens", 2**31, "1 to 2147483647"),
        ("temperature", "hot", "a number from 0"),
    ],
)
def test_a_number_that_no_field_can_hold_is_refused_with_what_it_can(
    client: Client, field: str, value: object, allowed: str
) -> None:
    """Before anything is sent."""
    with pytest.raises(errors.InvalidValue, match=field) as refused:
        list(client.generate("words", "one", SamplingParams(**{field: value})))
    assert allowed in str(refused.value)
    assert client.complete("words", "one", SamplingParams(seed=2**64 - 1, max_new_tokens=1)).text


def test_a_whole_completion_is_its_pieces(client: Client) -> None:
    whole = client.complete("words", [7, 8], SamplingParams(max_new_tokens=3))
    assert (whole.text, whole.finish_reason) == ("7 8 7 ", FinishReason.LENGTH)
    assert whole.usage.completion_tokens == 3


def test_a_conversation_goes_to_the_models_template(client: Client) -> None:
    said = [ChatMessage(role="system", content="short"), ChatMessage(role="user", content="hi")]
    text = "".join(chunk.text for chunk in client.chat("words", said, SamplingParams(max_new_tokens=2)))
    assert text == "system:short user:hi "


def test_what_is_not_given_is_left_to_the_server_and_zero_is_sent(client: Client, server: Any) -> None:
    client.complete("words", "a", SamplingParams(max_new_tokens=1))
    sent = server.words.requests[-1].sampling
    assert sent == SamplingParams(max_new_tokens=1, seed=sent.seed)
    options = SamplingParams(max_new_tokens=1, temperature=0.0, seed=2**64 - 1, top_k=0, min_p=0.5, stop=["x", "y"])
    client.complete("words", "a", options)
    sent = server.words.requests[-1].sampling
    assert (sent.temperature, sent.seed, sent.top_k, sent.min_p) == (0.0, 2**64 - 1, 0, 0.5)
    assert list(sent.stop) == ["x", "y"]


@pytest.mark.parametrize("prompt", [[2**31], [1, "a"], [1, ChatMessage(role="user", content="hi")], [1.5]])
def test_a_prompt_is_text_or_tokens_or_turns_and_no_mixture(client: Client, prompt: Any) -> None:
    with pytest.raises(errors.InvalidValue, match="prompt"):
        list(client.generate("words", prompt))


def test_closing_a_stream_cancels_the_work_on_the_server(client: Client, server: Any) -> None:
    chunks = client.generate("words", "a b c")
    next(chunks)
    assert not server.words.freed.is_set()
    chunks.close()
    assert server.words.freed.wait(timeout=60)


def test_the_timeout_is_the_servers_deadline(client: Client, server: Any) -> None:
    with pytest.raises(errors.DeadlineExceeded, match=f"the call to {server.address} did not end in the time"):
        list(client.generate("words", "a b c", timeout=0.3))
    assert server.words.freed.wait(timeout=60)


def test_scores_tokens_and_load(client: Client) -> None:
    scores = client.score("words", ["a b c", "d"])
    assert [[token.logprob for token in score.tokens] for score in scores] == [[None, -1.0, -2.0], [None]]
    assert [score.sum_logprob for score in scores] == [-3.0, 0.0]
    assert [token.text for token in client.tokenize("words", "a  b").tokens] == ["a", "b"]
    assert client.engine_stats("words").kv_tokens_total == 4


def test_texts_become_vectors_in_their_order(client: Client) -> None:
    assert client.embed("words", ["a", "ab", "abc"]) == [(1, 0), pytest.approx((0.6, 0.8)), (1, 0)]
    with pytest.raises(errors.UnknownName, match="did you mean 'words'"):
        client.embed("word", ["a"])


@pytest.mark.parametrize("given", ["abc", ["a", 1], [b"a"], ["a", None]])
def test_what_is_no_list_of_texts_is_not_embedded(client: Client, given: Any) -> None:
    with pytest.raises(errors.InvalidValue, match="texts"):
        client.embed("words", given)


@pytest.mark.parametrize("shape", [[], [2], [4], [3, 2], [2, 3]])
def test_numbers_that_are_not_what_they_say_are_an_error_of_the_server(shape: list[int]) -> None:
    tensor = Tensor(shape=tuple(shape), data=bytes(16))
    with pytest.raises(errors.InternalError, match="16 bytes"):
        Embeddings(embeddings=tensor, usage=Usage()).rows()


def test_attention_maps_have_the_shape_they_say(client: Client) -> None:
    maps = client.attention_maps("words", "a b c", layers=[1, 4], heads=[2, 5])
    assert [drawn.layer for drawn in maps] == [1, 4]
    assert maps[0].heads == (2, 5)
    assert maps[0].attention_weights.shape == (2, 3, 3)
    assert maps[0].attention_weights.view().tolist()[1] == [[1, 0, 0], [0.5, 0.5, 0], pytest.approx([1 / 3] * 3)]
    assert maps[0].query_tokens == ("a", "b", "c")


def test_lists_are_whole_whatever_the_page(client: Client) -> None:
    names = [model.name for model in client.models.list()]
    assert len(names) == 150
    assert names == sorted(set(names))


def test_models_are_loaded_and_unloaded(client: Client) -> None:
    model = client.models.load("new", "/models/new")
    assert (model.name, model.source, model.state) == ("new", "/models/new", ModelState.SERVING)
    with pytest.raises(errors.AlreadyExists, match="another source"):
        client.models.load("new", "/models/other")
    client.models.unload("new")
    assert "new" not in [known.name for known in client.models.list()]


def test_settings_of_an_engine_that_no_message_carries_are_refused(client: Client) -> None:
    known = [model.name for model in client.models.list()]
    with pytest.raises(errors.InvalidValue, match=r"num_threads: 3 is not allowed.*the server was started with"):
        client.models.load("new", "/models/new", engine=EngineConfig(num_threads=3))
    with pytest.raises(errors.InvalidValue, match="tenant_weights"):
        client.models.load("new", "/models/new", engine=EngineConfig(tenant_weights={"a": 2.0}))
    assert [model.name for model in client.models.list()] == known


def test_an_error_of_the_server_is_the_same_error_here(client: Client) -> None:
    with pytest.raises(errors.UnknownName) as unknown:
        client.tokenize("word", "a")
    assert unknown.value.message == "unknown model 'word'; did you mean 'words'?"
    assert unknown.value.metadata == {"kind": "model", "name": "word", "near": "words"}
    with pytest.raises(errors.ContextLengthExceeded, match="6 tokens"):
        list(client.generate("words", "a b c d e f"))
    with pytest.raises(errors.WrongState, match="running"):
        client.jobs.resume("job-1")


def test_a_service_that_the_server_lacks_is_said_so(client: Client) -> None:
    with pytest.raises(errors.Incompatible):
        client.models.scale("m000", DeploymentConfig(replicas=2))


def test_a_server_that_is_not_there_is_one_line_that_helps() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with Client(ClientSettings(address=address)) as client, pytest.raises(errors.Unavailable) as caught:
        client.models.list()
    assert caught.value.message == f"no attn server answers at {address}; start one with: attn serve"


def test_a_request_too_large_for_the_server_is_the_callers_mistake(client: Client) -> None:
    with pytest.raises(errors.UserError, match="too large"):
        client.tokenize("words", "x" * (5 * 2**20))


def test_token_and_tls_let_in(start: Any, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    paths = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *paths], check=True, capture_output=True)
    server = start(GatewaySettings(port=0, token="right", tls=TlsFiles(certificate=certificate, key=key)))
    trusted = certificate.read_bytes()
    for token, expected in (("right", None), ("wrong", errors.Unauthenticated), (None, errors.Unauthenticated)):
        settings = ClientSettings(address=server.address, token=token, tls=True, certificates=trusted)
        with Client(settings) as client:
            if expected is None:
                assert client.tokenize("words", "a b").text == "a b"
            else:
                with pytest.raises(expected):
                    client.tokenize("words", "a b")
    plain = ClientSettings(address=server.address, timeout=10)
    with Client(plain) as client, pytest.raises(errors.Unavailable, match="--tls-ca"):
        client.tokenize("words", "a b")
    untrusting = ClientSettings(address=server.address, token="right", tls=True, timeout=10)
    with Client(untrusting) as client, pytest.raises(errors.Unavailable):
        client.tokenize("words", "a b")


async def test_the_asyncio_client_answers_the_same(server: Any) -> None:
    async with AsyncClient(ClientSettings(address=server.address, timeout=60)) as client:
        whole = await client.complete("words", "one two", SamplingParams(max_new_tokens=3))
        assert whole.text == "one two one "
        assert len(await client.models.list()) == 150
        assert [drawn.layer for drawn in await client.attention_maps("words", "a")] == [0, 1]
        assert await client.embed("words", ["a", "abc"]) == [(1, 0), (1, 0)]
        with pytest.raises(errors.UnknownName, match="did you mean 'words'"):
            await client.tokenize("word", "a")
        async with aclosing(client.generate("words", "a b")) as chunks:
            assert (await anext(chunks)).text == "a "
        assert await asyncio.to_thread(server.words.freed.wait, 60)
        with pytest.raises(errors.DeadlineExceeded):
            await client.complete("words", "a", timeout=0.2)


@pytest.mark.parametrize(
    ("waits", "awaits"),
    [(Client, AsyncClient), (Models, AsyncModels), (Mechanisms, AsyncMechanisms), (Jobs, AsyncJobs)],
)
def test_both_clients_have_the_same_calls(waits: type, awaits: type) -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        public = {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}
        return {name: list(inspect.signature(member).parameters) for name, member in public.items()}

    assert calls(waits) == calls(awaits)
    assert calls(waits)


class TestAStreamThatBreaks:
    """It goes on where it was: behind the tokens received, at another address or the same, or ends with its error."""

    OPTIONS = SamplingParams(max_new_tokens=20, temperature=1.0, n=2)

    def test_it_goes_on_behind_what_was_received(self, client: Client, server: Any) -> None:
        whole = list(client.generate("words", "a b c", self.OPTIONS))
        server.words.break_after = [7, 0, 3]
        parts = list(client.generate("words", "a b c", self.OPTIONS))
        text = ["".join(part.text for part in whole if part.index == index) for index in (0, 1)]
        assert ["".join(part.text for part in parts if part.index == index) for index in (0, 1)] == text
        assert parts[-1].resumptions == 3
        assert whole[-1].resumptions == 0
        first, *_, last = server.words.requests[-4:]
        assert first.resume is None
        assert first.sampling.seed is not None
        assert last.sampling.seed == first.sampling.seed
        received = {part.index: list(part.token_ids) for part in last.resume.received}
        assert received[0] == list(range(len(received[0])))
        assert [part.index for part in last.resume.received if part.finished] == [1]

    def test_another_gateway_goes_on_with_it(self, start: Any) -> None:
        first, second = start(), start()
        addresses = f"{first.address},{second.address}"
        with Client(ClientSettings(address=addresses, timeout=60)) as client:
            deltas = client.generate("words", "a b", SamplingParams(max_new_tokens=400))
            text = "".join(next(deltas).text for _ in range(5))
            first.shut()
            text += "".join(delta.text for delta in deltas)
            assert text == "a b " * 200
            assert len(second.words.requests) == 1
            assert client.engine_stats("words").running == 1

    async def test_the_other_client_does_the_same(self, start: Any) -> None:
        first, second = start(), start()
        async with AsyncClient(ClientSettings(address=f"{first.address},{second.address}", timeout=60)) as client:
            texts = []
            async for delta in client.generate("words", "a b", SamplingParams(max_new_tokens=400)):
                texts.append(delta.text)
                if len(texts) == 5:
                    await asyncio.to_thread(first.shut)
            assert "".join(texts) == "a b " * 200

    def test_an_address_where_nobody_answers_is_left_out(self, server: Any) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        with Client(ClientSettings(address=f"{nobody},{server.address}", timeout=60)) as client:
            assert client.complete("words", "a b", SamplingParams(max_new_tokens=2)).text == "a b "
        with Client(ClientSettings(address=f"{nobody},{server.address}", timeout=60)) as client:
            assert client.engine_stats("words").waiting == 2
        with (
            Client(ClientSettings(address=f"{nobody},{nobody}", timeout=60)) as client,
            pytest.raises(errors.Unavailable, match=nobody),
        ):
            client.complete("words", "a b")

    def test_the_deadline_holds_over_all_parts(self, server: Any, client: Client) -> None:
        server.words.break_after = [3] * 1000
        with pytest.raises(errors.DeadlineExceeded):
            list(client.generate("words", "a", SamplingParams(max_new_tokens=10_000), timeout=0.5))

    def test_one_that_always_breaks_before_its_next_token_ends(self, server: Any, client: Client) -> None:
        server.words.break_after = [3] + [0] * 1000
        with pytest.raises(errors.Unavailable, match="broken"):
            list(client.generate("words", "a", SamplingParams(max_new_tokens=100)))
        assert len(server.words.requests) < 10

    @pytest.mark.parametrize("address", ["here", "here:1,there", "here:1,,there:2", ":5"])
    def test_what_is_no_address_is_refused(self, address: str) -> None:
        with pytest.raises(errors.InvalidValue, match="HOST:PORT"):
            Client(ClientSettings(address=address))


@pytest.mark.parametrize("text", ["secret", "secret\n", "\ufeffsecret tenant=ann role=user weight=2\r\n\n"])
def test_a_token_file_is_one_token_or_the_line_that_a_server_has_for_it(tmp_path, text):
    path = tmp_path / "tokens"
    path.write_text(text, encoding="utf-8", newline="")
    assert ClientSettings.of(ConnectionOptions(token_file=path)).token == "secret"


@pytest.mark.parametrize("data", [b"", b"\n\n", b"secret\nother tenant=bob\n", "gehe\u00efm".encode(), b"\xff\xfe"])
def test_a_token_file_that_names_no_token_or_several_is_refused_without_a_word_of_it(tmp_path, data):
    path = tmp_path / "tokens"
    path.write_bytes(data)
    with pytest.raises(errors.InvalidValue) as refused:
        ClientSettings.of(ConnectionOptions(token_file=path))
    assert refused.value.metadata["field"] == "token_file"
    assert "secret" not in str(refused.value)
