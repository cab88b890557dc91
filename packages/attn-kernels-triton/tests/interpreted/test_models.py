"""Models take these kernels by themselves."""

from __future__ import annotations

import pytest
import torch
from attn_core.kernels import rowwise
from attn_kernels_triton.backends import rowwise as kernels
from attn_models import losses
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig

VOCABULARY = 40
METHODS = {
    kernels.TritonRmsNorm: ("norm", "norm_sum"),
    kernels.TritonRotary: ("rotate",),
    kernels.TritonGate: ("gated",),
    kernels.TritonCrossEntropy: ("losses",),
}


@pytest.fixture
def taken(monkeypatch):
    """The methods of these kernels that were called."""
    seen = set()

    def counted(name, method):
        def run(*args, **kwargs):
            seen.add(name)
            return method(*args, **kwargs)

        return run

    for kind, names in METHODS.items():
        for name in names:
            monkeypatch.setattr(kind, name, counted(name, getattr(kind, name)))
    return seen


def learned(model: Decoder, text: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradient to every weight."""
    model.zero_grad()
    loss = model.training_loss(text[:, :-1], text[:, 1:])
    loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("place", ["pre", "post", "both"])
def test_a_decoder_takes_these_kernels_and_learns_the_same(monkeypatch, taken, place):
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        max_seq_len=16,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        norm="rms",
        norm_place=place,
        feed_forward="swiglu",
        positions="rotary",
        bias=False,
        mechanism="qk_norm",
    )
    model = Decoder(config)
    text = torch.randint(VOCABULARY, (1, 10), generator=torch.Generator().manual_seed(1))
    monkeypatch.setitem(losses.LOGITS, "cpu", 4 * VOCABULARY)
    found = learned(model, text)
    assert taken == {name for names in METHODS.values() for name in names}
    monkeypatch.setattr(rowwise, "installed_operation", lambda kind: None)
    torch.testing.assert_close(found, learned(model, text), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_types_that_no_kernel_takes_are_left_to_torch(dtype):
    rows = torch.zeros(2, 8, dtype=dtype)
    assert rowwise.row_result(rowwise.NormKernel, "plain", lambda kernel: kernel, rows) is None
