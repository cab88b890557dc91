"""A mechanism that gives rows of another shape is refused, even where they could be broadcast."""

from __future__ import annotations

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.errors import InternalError
from attn_core.stores import StoreSize
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig


@pytest.mark.parametrize("rows", [slice(None, 1), slice(None, 2)])
def test_rows_that_could_be_broadcast_are_refused(rows):
    model = Decoder(
        DecoderConfig(vocab_size=7, max_seq_len=8, hidden_size=16, num_layers=2, num_heads=2, mechanism="mha")
    )
    step = model.blocks[1].attention.step
    model.blocks[1].attention.step = lambda *given: step(*given)[rows]
    store = installed().caches.get("contiguous").create(model.state_specs(), StoreSize(tokens=8, requests=1))
    assert store.admit(0)
    assert store.reserve(0, 3)
    batch = RaggedBatch.of([3], [0], torch.tensor)
    with pytest.raises(InternalError, match=rf"returned the shape \({rows.stop}, 16\); needed: \(3, 16\)"):
        model.step(torch.tensor([1, 2, 3]), batch, store.view(batch, [0]))


def test_a_model_names_the_mechanisms_of_its_layers():
    model = Decoder(
        DecoderConfig(vocab_size=7, max_seq_len=8, hidden_size=16, num_layers=2, num_heads=2, mechanism="linear")
    )
    assert model.layer_mechanisms() == {"blocks.0": "linear", "blocks.1": "linear"}
    assert model.layer_mechanisms().keys() == model.state_specs().keys()
