"""What frameworks of agents are asked to do: a task of two tool calls."""

from __future__ import annotations

from asked import ASK, ASK_JSON, CALLED, ENCODER, HELLO, KEY, MODEL, TASK, WEATHER, add, did_task, multiply, same, tries


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
