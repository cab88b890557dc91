"""What clients are asked to do, each in the interpreter that has it: `python tries.py CLIENT URL` prints a line of JSON
for each feature. The model is that of scripted.py; a feature works if the client returns what the script says."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import Any

MODEL, ENCODER, KEY = "scripted", "tiny-bert", "none"
ASK, ASK_JSON, TASK = "Say hello.", "The weather as JSON.", "Add 2 and 3, then multiply the sum by 4."
HELLO, WEATHER, RESULT = "Hello there.", {"city": "Rome", "hot": True}, "20"
CALLED: list[tuple[str, int, int]] = []
"""The tools that were called in the present try."""
TRIES: dict[str, tuple[str, dict[str, Callable[[str], Any]]]] = {}
"""The package and the tries of each client, by its name and then by feature."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    CALLED.append(("add", a, b))
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    CALLED.append(("multiply", a, b))
    return a * b


def tries(client: str, package: str = "") -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a try of a client, whose feature is the name of the function without the client's."""

    def registered(function: Callable[[str], Any]) -> Callable[[str], Any]:
        feature = function.__name__.partition("__")[2].replace("_", " ")
        TRIES.setdefault(client, (package or client, {}))[1][feature] = function
        return function

    return registered


def same(found: Any, wanted: Any) -> None:
    """Raise if a client returned something else than was said."""
    if found != wanted:
        raise AssertionError(f"{found!r} instead of {wanted!r}")


def did_task(answer: Any) -> None:
    """Raise unless both tools were called and the answer has the result."""
    same(CALLED, [("add", 2, 3), ("multiply", 5, 4)])
    if RESULT not in str(answer):
        raise AssertionError(f"{answer!r} has no {RESULT}")


def refused(kind: type[Exception], function: Callable[[], Any]) -> None:
    """Raise unless a call raises this kind of error."""
    try:
        function()
    except kind:
        return
    raise AssertionError("not refused")


# --- openai ----------------------------------------------------------------------------------------------------------


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
PARAMETERS |= {"required": ["a", "b"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "strict": True, "parameters": PARAMETERS}}
    for name in ("add", "multiply")
]


@tries("openai")
def openai__chat(url: str) -> None:
    answer = openai_client(url).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": ASK}])
    same(answer.choices[0].message.content, HELLO)


@tries("openai")
def openai__stream(url: str) -> None:
    given = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "stream_options": {"include_usage": True}}
    with openai_client(url).chat.completions.stream(**given) as stream:
        same(stream.get_final_completion().choices[0].message.content, HELLO)


@tries("openai")
def openai__tools(url: str) -> None:
    client, messages = openai_client(url), [{"role": "user", "content": TASK}]
    while True:
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return did_task(message.content)
        for call in message.tool_calls:
            result = globals()[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


@tries("openai")
def openai__structured_output(url: str) -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        hot: bool

    client, messages = openai_client(url), [{"role": "user", "content": ASK_JSON}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Weather)
    same(answer.choices[0].message.parsed.model_dump(), WEATHER)
    client.chat.completions.parse(model=MODEL, messages=[*messages, answer.choices[0].message, *messages])


@tries("openai")
def openai__responses(url: str) -> None:
    client = openai_client(url)
    first = client.responses.create(model=MODEL, input=ASK)
    same(first.output_text, HELLO)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = client.responses.create(model=MODEL, input=TASK, tools=tools, previous_response_id=first.id)
    while calls := [item for item in answer.output if item.type == "function_call"]:
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id,
             "output": str(globals()[call.name](**json.loads(call.arguments)))}
            for call in calls
        ]  # fmt: skip
        answer = client.responses.create(model=MODEL, input=outputs, tools=tools, previous_response_id=answer.id)
    did_task(answer.output_text)


@tries("openai")
def openai__embeddings(url: str) -> None:
    found = openai_client(url).embeddings.create(model=ENCODER, input=["ab", "cd"])
    same([len(each.embedding) for each in found.data], [8, 8])


@tries("openai")
def openai__errors(url: str) -> None:
    import openai

    create = openai_client(url).chat.completions.create
    asked = [{"role": "user", "content": ASK}]
    refused(openai.NotFoundError, lambda: create(model="missing", messages=asked))
    refused(openai.BadRequestError, lambda: create(model=MODEL, messages=asked, temperature=-1))


# --- anthropic -------------------------------------------------------------------------------------------------------


@tries("anthropic")
def anthropic__chat(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    given = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": ASK}]}
    same(client.messages.create(**given).content[0].text, HELLO)
    with client.messages.stream(**given) as stream:
        same(stream.get_final_text(), HELLO)
    same(client.messages.count_tokens(model=MODEL, messages=given["messages"]).input_tokens > 0, True)
    refused(anthropic.NotFoundError, lambda: client.messages.create(**given | {"model": "missing"}))


@tries("anthropic")
def anthropic__tools(url: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    texts = [wraps(function)(lambda a, b, do=function: str(do(a, b))) for function in (add, multiply)]
    numbers = [anthropic.beta_tool(function) for function in texts]
    messages = [{"role": "user", "content": TASK}]
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=100, tools=numbers, messages=messages)
    did_task(runner.until_done().content[0].text)


# --- ollama ----------------------------------------------------------------------------------------------------------


@tries("ollama")
def ollama__chat(url: str) -> None:
    import ollama

    client, messages = ollama.Client(url), [{"role": "user", "content": ASK}]
    same(client.chat(MODEL, messages).message.content, HELLO)
    same("".join(part.message.content for part in client.chat(MODEL, messages, stream=True)), HELLO)
    same(client.generate(MODEL, ASK).response, HELLO)
    refused(ollama.ResponseError, lambda: client.chat("missing", messages))


@tries("ollama")
def ollama__tools(url: str) -> None:
    import ollama

    client, messages = ollama.Client(url), [{"role": "user", "content": TASK}]
    while True:
        message = client.chat(MODEL, messages, tools=[add, multiply], options={"temperature": 0}).message
        messages.append(message)
        if not message.tool_calls:
            return did_task(message.content)
        for call in message.tool_calls:
            result = globals()[call.function.name](**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": str(result)})


@tries("ollama")
def ollama__structured_output(url: str) -> None:
    import ollama

    schema = {"type": "object", "properties": {"city": {"type": "string"}, "hot": {"type": "boolean"}}}
    schema |= {"required": ["city", "hot"]}
    asked = [{"role": "user", "content": ASK_JSON}]
    same(json.loads(ollama.Client(url).chat(MODEL, asked, format=schema).message.content), WEATHER)


@tries("ollama")
def ollama__models(url: str) -> None:
    import ollama

    client = ollama.Client(url)
    same(sorted(model.model for model in client.list().models), [MODEL, ENCODER])
    same(sorted(model.model for model in client.ps().models), [MODEL, ENCODER])
    same("tools" in client.show(MODEL).capabilities, True)


@tries("ollama")
def ollama__embeddings(url: str) -> None:
    import ollama

    same([len(row) for row in ollama.Client(url).embed(ENCODER, ["ab", "cd"]).embeddings], [8, 8])


# --- libraries of several providers ----------------------------------------------------------------------------------


@tries("litellm")
def litellm__chat(url: str) -> None:
    import litellm

    given = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}
    given["messages"] = [{"role": "user", "content": ASK}]
    same(litellm.completion(**given).choices[0].message.content, HELLO)
    parts = litellm.completion(**given, stream=True)
    same("".join(part.choices[0].delta.content or "" for part in parts), HELLO)
    refused(litellm.NotFoundError, lambda: litellm.completion(**given | {"model": "openai/missing"}))
    refused(litellm.ContextWindowExceededError, lambda: litellm.completion(**given, max_tokens=100_000))


@tries("litellm")
def litellm__other_formats(url: str) -> None:
    import litellm

    asked = [{"role": "user", "content": ASK}]
    for model, base in (
        (f"ollama_chat/{MODEL}", url),
        (f"anthropic/{MODEL}", url),
        (f"hosted_vllm/{MODEL}", f"{url}/v1"),
    ):
        answer = litellm.completion(model=model, api_base=base, api_key=KEY, messages=asked, max_tokens=100)
        same(answer.choices[0].message.content, HELLO)


@tries("litellm")
def litellm__embeddings_and_rerank(url: str) -> None:
    import litellm

    given = {"api_base": f"{url}/v1", "api_key": KEY}
    same(len(litellm.embedding(model=f"openai/{ENCODER}", input=["ab"], **given).data[0]["embedding"]), 8)
    ranked = litellm.rerank(model=f"hosted_vllm/{ENCODER}", query="ab", documents=["cd", "ab"], **given)
    same(ranked.results[0]["index"], 1)


@tries("instructor")
def instructor__structured_output(url: str) -> None:
    import instructor
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city."""

        city: str
        hot: bool

    asked = [{"role": "user", "content": ASK_JSON}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        client = instructor.from_openai(openai_client(url), mode=mode)
        found = client.chat.completions.create(model=MODEL, response_model=Weather, messages=asked, max_retries=0)
        same(found.model_dump(), WEATHER)


@tries("dspy")
def dspy__prediction(url: str) -> None:
    import dspy

    model = dspy.LM(f"openai/{MODEL}", api_base=f"{url}/v1", api_key=KEY, cache=False)
    same(model(ASK)[0]["text"] if isinstance(model(ASK)[0], dict) else model(ASK)[0], HELLO)


# --- frameworks of agents --------------------------------------------------------------------------------------------


@tries("langchain", "langchain-openai")
def langchain__agent(url: str) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    found = create_agent(model, [add, multiply]).invoke({"messages": [("user", TASK)]})
    did_task(found["messages"][-1].content)


@tries("langchain", "langchain-openai")
def langchain__structured_output(url: str) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        """The weather of a city."""

        city: str
        hot: bool

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    for method in ("json_schema", "function_calling"):
        same(model.with_structured_output(Weather, method=method).invoke(ASK_JSON).model_dump(), WEATHER)


@tries("langchain", "langchain-openai")
def langchain__responses_stream(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, max_retries=0, use_responses_api=True)
    same("".join(part.text for part in model.stream(ASK)), HELLO)


@tries("langchain", "langchain-openai")
def langchain__embeddings(url: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    given = {"model": ENCODER, "base_url": f"{url}/v1", "api_key": KEY, "check_embedding_ctx_length": False}
    same([len(row) for row in OpenAIEmbeddings(**given).embed_documents(["ab", "cd"])], [8, 8])


@tries("langchain-anthropic")
def langchain_anthropic__agent(url: str) -> None:
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=url, api_key=KEY, max_retries=0, max_tokens=200)
    did_task(create_agent(model, [add, multiply]).invoke({"messages": [("user", TASK)]})["messages"][-1].text)


@tries("langchain-ollama")
def langchain_ollama__agent(url: str) -> None:
    from langchain.agents import create_agent
    from langchain_ollama import ChatOllama

    model = ChatOllama(model=MODEL, base_url=url)
    did_task(create_agent(model, [add, multiply]).invoke({"messages": [("user", TASK)]})["messages"][-1].content)


@tries("llama-index", "llama-index-llms-openai-like")
async def llama_index__agent(url: str) -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True,
                       is_function_calling_model=True, max_retries=0, context_window=8192)  # fmt: skip
    did_task(await FunctionAgent(tools=[add, multiply], llm=model).run(TASK))


@tries("llama-index", "llama-index-llms-openai-like")
def llama_index__embeddings(url: str) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    model = OpenAILikeEmbedding(model_name=ENCODER, api_base=f"{url}/v1", api_key=KEY)
    same(len(model.get_text_embedding("ab")), 8)


@tries("openai-agents")
async def openai_agents__agent(url: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(disabled=True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    tools = [agents.function_tool(add), agents.function_tool(multiply)]
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        CALLED.clear()
        agent = agents.Agent("worker", instructions="Work.", tools=tools, model=kind(MODEL, client))
        did_task((await agents.Runner.run(agent, TASK)).final_output)


@tries("pydantic-ai", "pydantic-ai-slim")
async def pydantic_ai__agent(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    did_task((await Agent(model, tools=[add, multiply]).run(TASK)).output)


@tries("pydantic-ai", "pydantic-ai-slim")
async def pydantic_ai__structured_output(url: str) -> None:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Forecast(BaseModel):
        city: str
        hot: bool

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    same((await Agent(model, output_type=Forecast).run(ASK_JSON)).output.model_dump(), WEATHER)


@tries("smolagents")
def smolagents__agent(url: str) -> None:
    import smolagents

    model = smolagents.OpenAIServerModel(MODEL, api_base=f"{url}/v1", api_key=KEY)
    tools = [smolagents.tool(add), smolagents.tool(multiply)]
    did_task(smolagents.ToolCallingAgent(tools=tools, model=model, verbosity_level=0, max_steps=4).run(TASK))


@tries("autogen", "autogen-agentchat")
async def autogen__agent(url: str) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelFamily
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    info["family"] = ModelFamily.UNKNOWN
    model = OpenAIChatCompletionClient(model=MODEL, base_url=f"{url}/v1", api_key=KEY, model_info=info)
    agent = AssistantAgent("worker", model, tools=[add, multiply], max_tool_iterations=4)
    did_task((await agent.run(task=TASK)).messages[-1].to_text())


@tries("agno")
def agno__agent(url: str) -> None:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id=MODEL, base_url=f"{url}/v1", api_key=KEY)
    did_task(Agent(model=model, tools=[add, multiply], telemetry=False).run(TASK).content)


@tries("haystack", "haystack-ai")
def haystack__agent(url: str) -> None:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    model = OpenAIChatGenerator(model=MODEL, api_base_url=f"{url}/v1", api_key=Secret.from_token(KEY))
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(add), create_tool_from_function(multiply)])
    did_task(agent.run(messages=[ChatMessage.from_user(TASK)])["messages"][-1].text)


@tries("semantic-kernel")
async def semantic_kernel__agent(url: str) -> None:
    import openai
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Numbers:
        add = staticmethod(kernel_function(add))
        multiply = staticmethod(kernel_function(multiply))

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
    agent = ChatCompletionAgent(service=service, plugins=[Numbers()])
    did_task((await agent.get_response(messages=TASK)).content)


@tries("strands", "strands-agents")
def strands__agent(url: str) -> None:
    import strands
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": f"{url}/v1", "api_key": KEY}, model_id=MODEL)
    agent = strands.Agent(model=model, tools=[strands.tool(add), strands.tool(multiply)], callback_handler=None)
    did_task(agent(TASK))


@tries("crewai")
def crewai__agent(url: str) -> None:
    import crewai
    from crewai.tools import tool

    model = crewai.LLM(model=f"openai/{MODEL}", base_url=f"{url}/v1", api_key=KEY)
    tools = [tool("add")(add), tool("multiply")(multiply)]
    agent = crewai.Agent(role="worker", goal="work", backstory="none", llm=model, tools=tools, max_iter=4)
    task = crewai.Task(description=TASK, expected_output="a number", agent=agent)
    did_task(crewai.Crew(agents=[agent], tasks=[task]).kickoff())


def main(client: str, url: str) -> None:
    """Try everything with one client."""
    package, found = TRIES[client]
    for feature, function in found.items():
        CALLED.clear()
        print(json.dumps({"begins": feature}), flush=True)
        why = ""
        try:
            outcome = function(url)
            if inspect.isawaitable(outcome):
                asyncio.run(outcome)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - whatever a client raises is the outcome
            why = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        row = {"client": client, "package": package, "version": version(package), "feature": feature, "why": why[:300]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
