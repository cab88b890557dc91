"""Callers of different tokens are strangers to each other."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from asking_inference import ask
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_engine.client import TextTask
from attn_engine.host.engine import EngineHost
from attn_gateway.call import tenant_named, tenant_of
from attn_schema import EngineConfig, Prompt, SamplingParams


async def cached(stub: InferenceServiceStub, text: str, token: str | None) -> int:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    messages = [message async for message in stub.Generate(ask(text, max_new_tokens=4), metadata=metadata)]
    return messages[-1].usage.cached_tokens


async def test_beginnings_are_remembered_for_the_caller_of_a_token_alone(stub: InferenceServiceStub) -> None:
    text = "what one tenant wrote is not told to another one"
    assert [await cached(stub, text, token) for token in ("ann", "bob", "ann", "bob", None, None)] == [
        0,
        0,
        32,
        32,
        0,
        32,
    ]


async def test_tenants_are_served_by_their_weights(home: Path) -> None:
    """A tenant of weight 3 gets about three times the tokens of one of weight 1, while both wait."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    names = {word: tenant_named(word) for word in ("ann", "bob")}
    config = EngineConfig(
        num_threads=1,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        kv_cache="paged",
        tenant_weights={names["ann"]: 3.0},
    )
    host = EngineHost(home / "models" / "tiny", config, told.put)
    host.submit(TextTask(id="first", prompt=Prompt(text="x"), params=SamplingParams(max_new_tokens=200)))
    for number in range(24):
        for word, tenant in names.items():
            params = SamplingParams(max_new_tokens=8, ignore_eos=True)
            host.submit(TextTask(id=f"{word}{number}", prompt=Prompt(text="To be"), params=params, tenant=tenant))
    ended: list[str] = []
    while len(ended) < 33:
        ended += [output.request_id for output in told.get() if output.last]
    host.stop(0)
    first = ended[1:]
    assert 22 <= sum(name.startswith("ann") for name in first) <= 26


def test_a_tenant_is_known_by_its_token_before_it_calls() -> None:
    """What the file of tokens says of it is found when it comes."""
    assert tenant_of((("authorization", "Bearer ann"),)) == tenant_named("ann") != tenant_named("bob")
