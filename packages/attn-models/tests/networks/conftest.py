"""What several test files need: small configs, a store to step with, and mechanisms as a stranger would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attn_core import Capability, ComputedMechanism, Cost, MechanismConfig, Paper, RaggedBatch, Shape, Step, installed
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from attn_testing import DictionaryStore
from torch import Tensor, nn

STRANGER = "attn-testing"
"""Models say by which installed distribution their mechanisms are offered, so it must be a real one."""


@dataclass(frozen=True, kw_only=True)
class MeanConfig(MechanismConfig):
    """`decay` weighs older tokens less."""

    decay: float = 1.0


class RunningMean(nn.Module):
    """The mean of the tokens so far; has no step of its own, and keeps a table that no checkpoint holds."""

    def __init__(self, config: MeanConfig) -> None:
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        table = config.decay ** torch.arange(config.max_seq_len or 64, dtype=torch.float64)
        self.register_buffer("table", table, persistent=False)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        count = query.shape[1]
        distance = torch.arange(count)[:, None] - torch.arange(count)
        weights = self.table.to(query.dtype)[distance.clamp(min=0)].masked_fill(distance < 0, 0.0)
        return self.mix(weights @ query / weights.sum(-1, keepdim=True))


class Mean(ComputedMechanism):
    name = "running_mean"
    summary = "The mean of the tokens so far."
    paper = Paper(title="None", authors="Nobody", year=2024)
    equation = r"c_t = \frac1t \sum_{i \le t} x_i"
    capabilities = frozenset({Capability.CAUSAL, Capability.EXACT, Capability.BIAS, Capability.HEAD_DIM})
    Config = MeanConfig

    def build(self, config: MechanismConfig) -> RunningMean:
        assert isinstance(config, MeanConfig)
        return RunningMean(config)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        return Cost(flops=0, allowed_flops=0, parameters=config.hidden_size**2 + config.hidden_size)


class TwoSided(Mean):
    name = "two_sided_mean"
    capabilities = frozenset({Capability.BIDIRECTIONAL, Capability.EXACT, Capability.BIAS, Capability.HEAD_DIM})
    Config = MeanConfig


@pytest.fixture
def strangers() -> Iterator[None]:
    """A stranger's distribution with a mechanism that is only a full function, and one that cannot be causal."""
    registry = installed().mechanisms
    for mechanism in (Mean(), TwoSided()):
        registry.register(mechanism, STRANGER)
    yield
    for mechanism in (Mean(), TwoSided()):
        del registry._items[f"{STRANGER}/{mechanism.name}"]


@pytest.fixture
def tiny() -> Callable[..., DecoderConfig]:
    """A config of a few thousand weights; what is given replaces its fields."""

    def config(**fields: Any) -> DecoderConfig:
        plain = {
            "vocab_size": 31,
            "max_seq_len": 32,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "mechanism": "mha",
        }
        return DecoderConfig.from_plain(plain | fields)

    return config


@pytest.fixture
def stepwise() -> Callable[[Decoder, list[list[int]], list[list[int]]], list[Tensor]]:
    """Logits of each prompt computed in steps; `plan[r]` lists how many tokens each step takes of prompt r."""

    def run(model: Decoder, prompts: list[list[int]], plan: list[list[int]]) -> list[Tensor]:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        store = DictionaryStore(model.state_specs(), dtype)
        for request in range(len(prompts)):
            store.admit(request)
        done, parts = [0] * len(prompts), [[] for _ in prompts]
        for counts in zip(*plan, strict=True):
            rows = [r for r, count in enumerate(counts) if count]
            batch = RaggedBatch.of([counts[r] for r in rows], [done[r] for r in rows], torch.tensor)
            tokens = [token for r in rows for token in prompts[r][done[r] : done[r] + counts[r]]]
            with torch.no_grad():
                logits = model.logits(model.step(torch.tensor(tokens), batch, store.view(batch, rows)))
            for span in batch.spans():
                parts[rows[span.request]].append(logits[span.start : span.stop])
            done = [before + count for before, count in zip(done, counts, strict=True)]
        return [torch.cat(part) for part in parts]

    return run
