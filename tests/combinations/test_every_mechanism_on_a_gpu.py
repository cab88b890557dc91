"""An engine on a GPU gives what it gives on the CPU, and mixes no tensor of one with those of the other.

A GPU is pretended: numbers are computed on the CPU, and what the device would be asked is seen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from attn_core import Capability, installed
from attn_engine import EngineConfig, Request, SamplingParams, ScoringParams, build_engine
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from cases import kind_of
from pretend_cuda import PretendCuda, left_behind, to_pretended

VOCABULARY = 32
PROMPT = tuple((7 * place) % VOCABULARY for place in range(40))
MECHANISMS = [
    name for name in installed().mechanisms.names() if installed().mechanisms.get(name).can(Capability.CAUSAL)
]


class StrictCuda(PretendCuda):
    """Raises as a real device does where a tensor of the CPU that is no single number meets one of the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(tensor.shape) for tensor in left_behind(func, args, kwargs)]
        if shapes:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device; on the CPU: {shapes}")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StrictCuda:
    """The pretended device; torch makes a `new_tensor` where the old one is, without asking it."""

    def new_tensor(like: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=options.get("dtype", like.dtype), device=like.device)

    monkeypatch.setattr(torch.Tensor, "new_tensor", new_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "pretended GPU")
    return StrictCuda()


def decoder(name: str) -> Decoder:
    torch.manual_seed(0)
    rotary = installed().mechanisms.get(name).can(Capability.ROTARY)
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        max_seq_len=96,
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        mechanism=name,
        positions="rotary" if rotary else "learned",
    )
    return Decoder(config).eval()


def answers(model: Decoder) -> tuple[list[float], list[int]]:
    """Log probabilities of a prompt, and tokens that are generated beside."""
    # A pretended device records no graphs.
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64, enforce_eager=True)
    engine = build_engine(model, config=config, kv_cache_tokens=192)
    engine.submit(Request(id="scored", token_ids=PROMPT, params=ScoringParams()))
    task = SamplingParams(max_new_tokens=3, ignore_eos=True)
    engine.submit(Request(id="written", token_ids=PROMPT[:20], params=task))
    scores: list[float] = []
    written: list[int] = []
    while not engine.idle:
        for event in engine.step():
            assert event.error is None, event.error
            if event.request_id == "scored":
                scores += [token.logprob for token in event.delta.tokens if token.logprob is not None]
            else:
                written += [token.id for token in event.delta.tokens]
    return scores, written


@cache
def expected(name: str) -> tuple[list[float], list[int]]:
    return answers(decoder(name))


@pytest.mark.sweep(lambda name: kind_of(name))
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_on_a_gpu_answers_as_on_the_cpu(name: str, gpu: StrictCuda) -> None:
    scores, written = expected(name)
    model = decoder(name)
    to_pretended(model)
    with gpu:
        there = answers(model)
    assert there[0] == pytest.approx(scores, abs=1e-4)
    assert there[1] == written


def test_a_tensor_that_was_left_on_the_cpu_is_found(gpu: StrictCuda) -> None:
    class Forgetful(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) + torch.zeros(1, rows.shape[-1])

    model = decoder("mha")
    model.blocks[0].feed_forward = Forgetful(32, 32)
    to_pretended(model)
    with gpu, pytest.raises(AssertionError, match="on the same device"):
        answers(model)
