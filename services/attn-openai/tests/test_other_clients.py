"""Clients that speak OpenAI's protocol for many servers work unchanged: LangChain's and litellm."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

QUESTION = "to be?"


async def text_of(http: httpx2.AsyncClient, **fields: Any) -> str:
    """What the server answers without a client."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "seed": 3, **fields}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    content: str = answer["choices"][0]["message"]["content"]
    return content


@pytest.mark.oracle
async def test_langchain_chats_streams_calls_tools_and_parses_structured_output(
    url: str, http: httpx2.AsyncClient
) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.messages import ToolMessage
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city."""

        hot: bool

    chat = langchain.ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", seed=3, max_tokens=12, max_retries=0
    )
    expected = await text_of(http, max_tokens=12)
    whole = await chat.ainvoke(QUESTION)
    assert whole.content == expected
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join([part.content async for part in chat.astream(QUESTION)]) == expected

    roomy = chat.model_copy(update={"max_tokens": 200})
    called = await roomy.bind_tools([Weather], tool_choice="Weather").ainvoke(QUESTION)
    (call,) = called.tool_calls
    assert call["name"] == "Weather"
    assert isinstance(call["args"]["hot"], bool)
    after = await chat.ainvoke([("user", QUESTION), called, ToolMessage("yes", tool_call_id=call["id"])])
    assert after.usage_metadata["output_tokens"] == 12
    for method in ("json_schema", "function_calling"):
        parsed = await roomy.with_structured_output(Weather, method=method).ainvoke(QUESTION)
        assert isinstance(parsed.hot, bool)

    vectors = langchain.OpenAIEmbeddings(
        model="tiny-bert", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    assert [len(vector) for vector in await vectors.aembed_documents(["ab", "cd"])] == [8, 8]


@pytest.mark.oracle
async def test_anthropics_client_chats_streams_and_calls_tools(url: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    asked = [{"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}]
    schema = {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"]}
    tools = [{"name": "weather", "description": "d", "input_schema": schema | {"additionalProperties": False}}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    given = {"model": "tiny", "max_tokens": 200, "system": "Be.", "messages": asked, "tools": tools}
    whole = await client.messages.create(**given, tool_choice=choice)
    async with client.messages.stream(**given, tool_choice=choice) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        (block,) = message.content
        assert (block.type, block.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
        assert isinstance(block.input["hot"], bool)
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "yes"}
    messages = [*asked, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = await client.messages.create(**given | {"messages": messages, "max_tokens": 3})
    counted = await client.messages.count_tokens(model="tiny", system="Be.", messages=messages, tools=tools)
    usage = after.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**given | {"model": "tinny"})
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(**given | {"temperature": -1})


@pytest.mark.oracle
async def test_litellm_chats_streams_and_knows_the_errors(
    url: str, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network at import
    litellm = pytest.importorskip("litellm")
    given = {
        "model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "seed": 3,
        "messages": [{"role": "user", "content": QUESTION}], "num_retries": 0,
    }  # fmt: skip
    expected = await text_of(http, max_tokens=12)
    whole = await litellm.acompletion(**given)
    assert whole.choices[0].message.content == expected
    assert whole.usage.completion_tokens == 12
    parts = [part.choices[0].delta.content or "" async for part in await litellm.acompletion(**given, stream=True)]
    assert "".join(parts) == expected
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(**given | {"model": "openai/tinny"})
    with pytest.raises(litellm.BadRequestError):
        await litellm.acompletion(**given | {"temperature": -1})
    await asyncio.sleep(0)  # its logger runs in a task of its own
