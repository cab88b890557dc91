"""Attention maps over gRPC."""

from __future__ import annotations

import grpc
import numpy as np
from asking_inference import refused
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub

TEXT = "To be or not"


def wanted(text: str = TEXT, **choice: list[int]) -> inference_pb2.AttentionMapsRequest:
    return inference_pb2.AttentionMapsRequest(model="tiny", prompt=common_pb2.Prompt(text=text), **choice)


async def test_every_layer_comes_in_order_with_rows_that_sum_to_one_and_look_back_only(
    stub: InferenceServiceStub,
) -> None:
    maps = [message async for message in stub.AttentionMaps(wanted())]
    assert [message.layer for message in maps] == [0, 1]
    for message in maps:
        assert list(message.attention_weights.shape) == [4, len(TEXT), len(TEXT)]
        weights = np.frombuffer(message.attention_weights.data, "<f4").reshape(list(message.attention_weights.shape))
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        assert np.triu(weights, 1).max() == 0
        assert "".join(message.key_tokens) == TEXT
        assert message.mechanism.endswith("mha")


async def test_only_the_layers_and_heads_asked_for_come(stub: InferenceServiceStub) -> None:
    everything = [message async for message in stub.AttentionMaps(wanted())]
    (message,) = [message async for message in stub.AttentionMaps(wanted(layers=[1], heads=[2]))]
    assert (message.layer, list(message.heads)) == (1, [2])
    side = len(TEXT)
    whole = np.frombuffer(everything[1].attention_weights.data, "<f4").reshape(4, side, side)
    np.testing.assert_array_equal(np.frombuffer(message.attention_weights.data, "<f4").reshape(side, side), whole[2])


async def test_a_layer_or_head_that_does_not_exist_is_named(stub: InferenceServiceStub) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "layers", "2", "0 to 1"):
        [message async for message in stub.AttentionMaps(wanted(layers=[2]))]
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "heads", "4", "0 to 3"):
        [message async for message in stub.AttentionMaps(wanted(heads=[4]))]


async def test_maps_of_a_prompt_beyond_the_context_are_refused_with_the_numbers(stub: InferenceServiceStub) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "300", "256"):
        [message async for message in stub.AttentionMaps(wanted("a" * 300))]
