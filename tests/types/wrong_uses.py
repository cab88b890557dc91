"""What callers write wrongly, and type checkers must see: mypy and pyright report a comment that hides no error.

`nox -s types` runs both. Lines without a comment are right.
"""

from __future__ import annotations

import attn_variants
import torch
from attn_client import AsyncClient, Client, ClientSettings
from attn_core import Causal, Window
from attn_engine import LocalClient
from attn_schema import (
    ChatMessage,
    DeploymentConfig,
    EngineConfig,
    OutputDelta,
    Prompt,
    SamplingParams,
    StructuredOutput,
    TrainingConfig,
)
from attn_variants import attend

SamplingParams(temperature=0.7, top_p=0.9, stop=("\n",), n=4)
SamplingParams(temprature=0.7)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
SamplingParams(temperature="hot")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
SamplingParams(structured_output={"regex": "a"})  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
hotter = SamplingParams().temperature + 1  # type: ignore[operator] # pyright: ignore[reportOptionalOperand]
missing = SamplingParams().temprature  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
SamplingParams().temperature = 1.0  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue]
StructuredOutput(regexp="a")  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
EngineConfig(quantization="int8", max_num_seqs=4)
EngineConfig(quantisation="int8")  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
EngineConfig(max_num_seqs="4")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
DeploymentConfig(replica=2)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
TrainingConfig(optimiser=None)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
ChatMessage(role="user")  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
ChatMessage(role="user", content="hello")
Prompt(token_ids=(1, 2))
number: int = SamplingParams()  # type: ignore[assignment] # pyright: ignore[reportAssignmentType]

with Client(ClientSettings(address="127.0.0.1:50051")) as client:
    for delta in client.generate("model", "prompt", SamplingParams()):
        text: str = delta.text
        missing = delta.txt  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
    client.generate("model", 3)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    client.generate("model", "prompt", sampling={})  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    client.models.load("name", "source", engin=EngineConfig())  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    client.jobs.submit(EngineConfig())  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    client.generte("model", "prompt")  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
with LocalClient() as local:
    maps = local.attention_maps("model", "prompt", layers=[0])
    local.attention_maps("model", "prompt", layer=0)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    deltas: list[OutputDelta] = list(local.generate("model", [ChatMessage(role="user", content="hello")]))


async def ask(server: AsyncClient) -> str:
    """A completion's text."""
    print(server.complete("model", "prompt").text)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
    return (await server.complete("model", "prompt")).text


query = torch.randn(1, 2, 3, 4)
out: torch.Tensor = attend(query, query, query, attn_mask=Causal() & Window(left=3))
attend(query, query, query, is_casual=True)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
attend(query, query, query, dropout_p="0")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
Window(lft=3)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
attn_variants.layer("gqa", hidden_size=512, num_heads=8, num_kv_heads=2)
attn_variants.layer(3, hidden_size=512)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
attn_variants.layr("gqa")  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
