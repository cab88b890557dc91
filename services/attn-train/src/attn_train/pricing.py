"""The cost of a training step, before training: FLOPs from the mechanisms' cost models, seconds from timed steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from attn_core import Shape, state_bytes
from attn_core.errors import Incompatible
from attn_models.attention import LayerAttention, layer_attentions
from attn_schema.decoder import DecoderConfig
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attn_train.model import configured, shapes_only
from attn_train.step_probe import StepProbe
from attn_train.tasks.base import Dataset
from attn_train.worker import build_model

BACKWARD = 2
"""FLOPs of the backward pass, as a multiple of the forward pass (Kaplan et al. 2020, arXiv 2001.08361, table 1)."""
SAMPLED_BATCHES = 16
"""The number of batches whose shapes are averaged, as texts differ in length."""
WARM_UP = 3
"""The number of warm-up steps, which are not timed."""
CACHE_DTYPE = "float32"


@dataclass(frozen=True, kw_only=True)
class StepPrice:
    """The cost of one optimizer step of a decoder, and the sizes of its model.

    `flops` counts the matrix products of forward and backward passes, two per multiply-add; for attention only the
    query-key pairs that the mask allows (`Cost.allowed_flops`). `plain_flops` counts all pairs (`Cost.flops`), like
    torch's counter. `tokens` are the positions that are computed, padding included. `cache_bytes` is the size of the KV
    cache or state of all layers for a sequence of `max_seq_len` tokens, in float32.
    """

    flops: float
    plain_flops: float
    tokens: float
    parameters: int
    embedding_parameters: int
    cache_bytes: int


class _NoAttention(nn.Module):
    """Identity, in place of an attention layer, whose cost is added separately."""

    def forward(self, rows: Tensor, *_: Any, **__: Any) -> Tensor:
        return rows


def step_price(config: TrainingConfig, dataset: Dataset) -> StepPrice:
    """Return the cost of a step of a decoder on a dataset; raises `Incompatible` for other families and for experts."""
    _, made = configured(config.model, dataset.model_fields)
    if type(made) is not DecoderConfig or config.model.num_experts:
        message = f"the FLOPs of a step of {config.model.label!r} are not known: a decoder without experts is needed"
        raise Incompatible(message, field="config.model.family")
    with shapes_only():
        built = configured(config.model, dataset.model_fields)[0].build(made)
    parameters = sum(parameter.numel() for parameter in built.parameters())
    layers = layer_attentions(made)
    for block in built.blocks:
        block.attention = _NoAttention()
    shapes = batch_shapes(config, dataset)
    by_shape = {shape: _forward_flops(built, layers, shape) for shape in set(shapes)}
    passes = 1 + BACKWARD + config.gradient_checkpointing
    accumulated = config.optimizer.gradient_accumulation_steps
    tables = [built.embedding, built.positions, built.unembedding]
    return StepPrice(
        flops=accumulated * passes * statistics.mean(by_shape[shape][0] for shape in shapes),
        plain_flops=accumulated * passes * statistics.mean(by_shape[shape][1] for shape in shapes),
        tokens=accumulated * statistics.mean(rows * length for rows, length in shapes),
        parameters=parameters,
        embedding_parameters=sum(p.numel() for table in tables if table is not None for p in table.parameters()),
        cache_bytes=sum(
            state_bytes(layer.states, tokens=made.max_seq_len, source=0, dtype=CACHE_DTYPE) for layer in layers
        ),
    )


def batch_shapes(config: TrainingConfig, dataset: Dataset) -> list[tuple[int, int]]:
    """Return (sequences, tokens) of the inputs of the first batches of a run."""
    task = dataset.task(config)
    found = (task.next_batch()[0].shape for _ in range(SAMPLED_BATCHES))
    return [(int(shape[0]), int(shape[1])) for shape in found]


def _forward_flops(
    without_attention: nn.Module, layers: list[LayerAttention], shape: tuple[int, int]
) -> tuple[int, int]:
    """Return the FLOPs of a forward pass over a batch, with allowed query-key pairs and with all: those of attention
    layers are from the mechanisms' cost models, the others from torch's counter."""
    rows, length = shape
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        without_attention(torch.zeros(rows, length, dtype=torch.long, device="meta"))
    call = Shape(batch=rows, query=length, key=length)
    costs = [layer.mechanism.cost(layer.config, call) for layer in layers]
    rest = counter.get_total_flops()
    return rest + sum(cost.allowed_flops for cost in costs), rest + sum(cost.flops for cost in costs)


def seconds_of_a_step(config: TrainingConfig, dataset: Dataset, steps: int = 20) -> float:
    """Return the median seconds of `steps` steps on this machine, after `WARM_UP` steps."""
    probe = StepProbe(config, dataset, lambda: build_model(config, dataset))
    return statistics.median(probe.seconds(config.optimizer.batch_size, steps + WARM_UP)[WARM_UP:])
