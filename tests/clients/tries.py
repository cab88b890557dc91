"""What clients are asked to do, each in the interpreter that has it: `python tries.py CLIENT URL` prints a line of JSON
for each feature. The model is that of scripted.py; a feature works if the client returns what the script says."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from functools import wraps
from importlib.metadata import version
from typing import Any

import frameworks  # noqa: F401 - registers its tries
import measures  # noqa: F401 - registers its tries
from asked import (
    ASK,
    ASK_JSON,
    CALLED,
    ENCODER,
    HELLO,
    KEY,
    MODEL,
    TASK,
    TRIES,
    WEATHER,
    add,
    did_task,
    multiply,
    refused,
    same,
    tries,
)

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
