"""What the tests of training share: a small text, a small specification, and a model that learns in milliseconds."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train.tasks.language_modeling import TextDataset, tokenize
from torch import Tensor, nn

CONTEXT = 8
ROOT = Path(__file__).parents[3]
# With importlib mode a test file cannot import its neighbour.
sys.path.insert(0, str(Path(__file__).parent))


class BigramModel(nn.Module):
    """An independent little language model with everything a checkpoint must carry: ties, a buffer and dropout."""

    def __init__(self, vocabulary: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.2)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.output(self.norm(torch.tanh(self.hidden(self.dropout(self.embedding(tokens))))))


@pytest.fixture
def words() -> str:
    """A text of 4000 characters with structure that can be learned."""
    choose = random.Random(7)
    return " ".join(choose.choice(["query", "key", "value", "softmax", "head"]) for _ in range(800))[:4000]


@pytest.fixture
def text(words: str) -> TextDataset:
    return tokenize(words)


@pytest.fixture
def bigram(text: TextDataset) -> Callable[[], nn.Module]:
    """Makes the same model again and again."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        return BigramModel(text.tokenizer.vocab_size)

    return make


@pytest.fixture
def config() -> TrainingConfig:
    return TrainingConfig(
        model=ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=CONTEXT, mechanism="mha"),
        data=DataConfig(dataset="/nowhere"),
        optimizer=OptimizerConfig(steps=30, batch_size=4, learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=5),
        checkpoint=CheckpointConfig(save_steps=10, save_total_limit=2),
        evaluation=EvaluationConfig(eval_steps=15, eval_batches=2, logging_steps=1),
        seed=11,
    )


def changed(config: TrainingConfig, **changes: Any) -> TrainingConfig:
    """`config` with `optimizer__steps=5` and the like."""
    parts: dict[str, Any] = {}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part] = parts.get(part, getattr(config, part)).replace(**{field: value})
        else:
            parts[part] = value
    return config.replace(**parts)


@pytest.fixture(name="changed")
def changed_fixture() -> Callable[..., TrainingConfig]:
    return changed


class Record:
    """A report that keeps everything."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.validation: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self.checkpoints: list[int] = []
        self.lines: list[str] = []
        self.on_metrics: Callable[[int], None] = lambda step: None

    def heartbeat(self) -> None:
        pass

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.losses[step] = values["loss"]
        self.rates[step] = values["learning_rate"]
        if "validation_loss" in values:
            self.validation[step] = values["validation_loss"]
        self.on_metrics(step)

    def checkpoint(self, step: int, path: object, size: int) -> None:
        self.checkpoints.append(step)

    def log(self, text: str) -> None:
        self.lines.append(text)

    def flush(self) -> None:
        pass


@pytest.fixture
def record() -> type[Record]:
    return Record


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition; fails with what did not happen where that takes a time that no machine needs."""

    def wait(condition: Callable[[], object], what: str, seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    return wait


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A running PostgreSQL server, by the helper of attn-gateway's own tests."""
    path = ROOT / "services/attn-gateway/tests/records/postgres_server.py"
    spec = importlib.util.spec_from_file_location("postgres_server", path)
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    reason = helper.why_not()
    if reason is not None:
        pytest.skip(reason)
    with helper.postgres_server(helper.programs()) as server:
        yield server


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def fill():
    """Fills the disk of a folder."""

    def fill_disk(place):
        """Leave no byte free."""
        with (place / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    return fill_disk
