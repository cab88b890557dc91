"""CL-15: what tiles change is time; a model learns in them what it learns by the equation."""

from __future__ import annotations

import pytest
import torch
from attn_models.decoder.config import DecoderConfig
from attn_models.decoder.decoder import Decoder
from attn_variants.spec_layer import SpecLayer
from torch import nn

DAYS = {  # to train, on eight A100: (Hugging Face, Megatron-LM, FlashAttention), arXiv 2205.14135, table 2
    "GPT-2 small": (9.5, 4.7, 2.7),
    "GPT-2 medium": (21.0, 11.5, 6.9),
}
SPEEDUPS = {"GPT-2 small": (2.0, 3.5), "GPT-2 medium": (1.8, 3.0)}


@pytest.mark.parametrize("model", DAYS)
def test_cl_15_published_times_give_published_ratios(model: str) -> None:
    plain, *others = DAYS[model]
    assert [round(plain / days, 1) for days in others] == list(SPEEDUPS[model])


def losses(kernel: str) -> list[float]:
    """Losses of a small model that learns a repeating text, its attention computed by one kernel, in float64."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=7,
        max_seq_len=160,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        mechanism="sliding_window",
        options={"window": 24},
    )
    model = Decoder(config).double()
    for layer in model.modules():
        if isinstance(layer, SpecLayer):
            layer.use_kernel(kernel)
    tokens = (torch.arange(2 * 160).view(2, 160) ** 2) % 7
    steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        steps.zero_grad()
        loss.backward()
        steps.step()
        curve.append(loss.item())
    return curve


def test_cl_15_a_model_learns_in_tiles_what_it_learns_by_the_equation() -> None:
    plain, tiled = losses("plain"), losses("block_sparse")
    assert tiled == pytest.approx(plain, rel=0, abs=1e-9)
    assert plain[-1] < 0.9 * plain[0]
