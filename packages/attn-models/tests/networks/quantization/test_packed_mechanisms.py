"""Whatever attention a decoder has, packing reaches its linear layers, and changes no more than its format says."""

from __future__ import annotations

import copy

import pytest
import torch
from attn_core import Capability, RaggedBatch, installed
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import MIN_FEATURES, quantize_model
from attn_testing import DictionaryStore
from cases import kind_of
from torch import nn

CAUSAL = sorted(mechanism.name for mechanism in installed().mechanisms if mechanism.can(Capability.CAUSAL))
READ = {name: {"key_up", "value_up"} for name in ("mla", "sparse_mla")}
"""Matrices that attention multiplies by the memory, not by its inputs."""


def decoder(tiny, mechanism):
    torch.manual_seed(4)
    return Decoder(tiny(mechanism=mechanism, hidden_size=64, intermediate_size=96, num_heads=2, num_layers=1)).eval()


def left(model):
    """The linear layers of an attention that are not packed: their own names and sizes."""
    layers = model.blocks[0].attention.named_modules()
    return {
        name.rpartition(".")[2]: (layer.in_features, layer.out_features)
        for name, layer in layers
        if isinstance(layer, nn.Linear)
    }


def served(model, tokens):
    """Logits of a prompt, then of three tokens one by one."""
    store = DictionaryStore(model.state_specs(), "float32")
    store.admit(0)
    said = []
    for piece in (tokens[:-3], *tokens[-3:].split(1)):
        batch = RaggedBatch.of([len(piece)], [len(tokens[:-3]) + len(said) - 1 if said else 0], torch.tensor)
        said.append(model.step(piece, batch, store.view(batch, [0])))
    return torch.cat(said)


@pytest.mark.sweep(lambda mechanism: kind_of(mechanism))
@pytest.mark.parametrize("mechanism", CAUSAL)
@torch.no_grad()
def test_only_narrow_layers_and_matrices_that_are_read_stay(mechanism, tiny):
    model = decoder(tiny, mechanism)
    quantize_model(model, "int8")
    wide = {name for name, sizes in left(model).items() if min(sizes) >= MIN_FEATURES}
    assert wide == READ.get(mechanism, set())
    assert served(model, torch.arange(9)).isfinite().all()


@pytest.mark.sweep(lambda mechanism: kind_of(mechanism))
@pytest.mark.parametrize("mechanism", CAUSAL)
@torch.no_grad()
def test_weights_packed_as_floats_say_what_the_model_said(mechanism, tiny):
    model, tokens = decoder(tiny, mechanism), torch.arange(9)
    packed = copy.deepcopy(model)
    quantize_model(packed, "float32")
    torch.testing.assert_close(packed(tokens[None]), model(tokens[None]), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(served(packed, tokens), served(model, tokens), rtol=1e-3, atol=1e-4)
