"""Models of two layers for updates on a GPU that is pretended, and what their operations are seen to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_schema.training import ModelConfig, TrainingConfig
from attn_train.model import configured
from attn_train.trainer import NullReporter, Trainer
from pretend_cuda import PretendCuda, left_behind, pretended_gpu, tensors_in, to_pretended
from torch.utils._python_dispatch import TorchDispatchMode

GPT2 = ModelConfig(hidden_size=128, num_layers=2, num_heads=2, max_seq_len=128, mechanism="mha", positions="learned")
LLAMA = GPT2.replace(mechanism="gqa", num_kv_heads=1, positions="rotary", norm="rms", feed_forward="swiglu")
MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "window": LLAMA.replace(mechanism="sliding_window", num_kv_heads=None),
    "gla": GPT2.replace(mechanism="gla", positions="none"),
    "deltanet": LLAMA.replace(mechanism="deltanet", num_kv_heads=None, positions="none"),
}
LAYERS = GPT2.num_layers
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@pytest.fixture
def gpu() -> Iterator[PretendCuda]:
    with pretended_gpu() as counter:
        yield counter


def stepped(gpu: PretendCuda, data: Any, asked: TrainingConfig) -> Trainer:
    """A trainer on the pretended GPU that has made its first two steps, and whose counts begin anew."""
    family, made = configured(asked.model, data.model_fields)
    torch.manual_seed(0)
    model = family.build(made).train()
    to_pretended(model)
    training = Trainer(model, data, asked)
    for _ in range(2):
        training._one_step(NullReporter())
    gpu.reset()
    return training


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations that run inside, with the types of the tensors they read; `apart` are those that mix devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[str, tuple[torch.dtype, ...]]] = []
        self.apart: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        name, given = func.overloadpacket.__name__, list(tensors_in((args, read)))
        self.operations.append((name, tuple(tensor.dtype for tensor in given)))
        if left_behind(func, args, kwargs):
            self.apart.append(name)
        return func(*args, **(kwargs or {}))

    def types(self, *names: str) -> set[torch.dtype]:
        """The types that meet in these operations."""
        return {dtype for name, dtypes in self.operations if name in names for dtype in dtypes}
