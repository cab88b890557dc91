"""A mechanism that fails in the server: who asked is told which layer it was, and nobody else notices."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from asking_inference import ask, complete, drained, refused
from attn.v1.inference_pb2_grpc import InferenceServiceStub


@pytest.mark.parametrize("way", ["raises", "gives another shape", "gives NaN"])
async def test_a_failing_layer_is_named_and_others_are_served(
    stub: InferenceServiceStub, inference: Any, way: str
) -> None:
    alone = await complete(stub, ask("To be", max_new_tokens=30))
    engine: Any = inference.served.serving("tiny").engine
    layer = engine.host._loaded.model.blocks[1].attention
    step = layer.step

    def fails(query: Any, batch: Any, state: Any) -> Any:
        out = step(query, batch, state)
        late = batch.positions >= 60
        if not late.any():
            return out
        if way == "raises":
            raise RuntimeError("cannot")
        return out[:, :1] if way == "gives another shape" else out.masked_fill(late[:, None], float("nan"))

    layer.step = fails
    healthy = asyncio.gather(*(complete(stub, ask("To be", max_new_tokens=30)) for _ in range(3)))
    async with refused(grpc.StatusCode.INTERNAL, "blocks.1", "'mha'"):
        await complete(stub, ask("x" * 55, max_new_tokens=30))
    assert await healthy == [alone] * 3
    assert (await drained(stub)).kv_tokens_used == 0
