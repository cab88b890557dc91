"""Callers of different tokens are strangers to each other."""

from __future__ import annotations

from asking_inference import ask
from attn.v1.inference_pb2_grpc import InferenceServiceStub


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
