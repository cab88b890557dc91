"""Datasets and training tasks: batches, losses and metrics that the training loop needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.devices import sent
from attn_models.decoder.mixture_of_experts import router_aux_loss
from attn_models.evaluation import IGNORED, next_token_loss
from attn_models.tokenizers import Tokenizer
from attn_schema.training import TrainingConfig
from torch import Tensor, nn

from attn_train.tasks.reinforce import Reinforce


def derived(seed: int, use: str) -> int:
    """A seed of 63 bits for `use`: equal streams for initial weights, batches and dropout would be correlated."""
    digest = hashlib.sha256(f"{seed}:{use}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RandomWindows:
    """Draws `batch` windows of `context` tokens with their next tokens, at places given by a seeded generator.

    `tokens` is [tokens], any integer type. Raises `InvalidValue` if not even one window fits.
    """

    def __init__(self, tokens: Tensor, *, context: int, batch: int, seed: int) -> None:
        if len(tokens) <= context:
            allowed = f"more than the context of {context} tokens"
            raise InvalidValue.of("data", f"{len(tokens)} tokens", allowed)
        # A view: window i is tokens i to i + context, so one gather makes a batch and its targets.
        self._windows = tokens.unfold(0, context + 1, 1)
        self._batch = batch
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64, [batch, context] each; targets are one token ahead."""
        places = torch.randint(len(self._windows), (self._batch,), generator=self.generator)
        rows = self._windows[places].long()
        return rows[:, :-1], rows[:, 1:]


def mean_loss(
    model: nn.Module, batches: RandomWindows, count: int, on_batch: Callable[[], None] = lambda: None
) -> float:
    """The mean loss over `count` batches, without dropout; the model is left in the mode it was in.

    `on_batch` is called after each batch.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = 0.0
    with torch.inference_mode():
        for _ in range(count):
            inputs, targets = to_device(batches.next_batch(), device)
            total += next_token_loss(model, inputs, targets).item()
            on_batch()
    model.train(training)
    return total / count


def auxiliary_losses(model: nn.Module) -> Tensor | float:
    """What keeps experts busy, and what layers of attention, such as compressive memory, leave of the last pass.

    To be added once to the loss of a batch, before its backward pass; 0 without any.
    """
    takers: list[Any] = [module for module in model.modules() if hasattr(module, "take_auxiliary_loss")]
    left = [taker.take_auxiliary_loss() for taker in takers]
    return sum((loss for loss in left if loss is not None), start=router_aux_loss(model))


VALIDATION_SEED = 0x5EED
"""Validation batches are the same in every measurement of every run, so that losses can be compared."""

OnBatch = Callable[[], None]
"""Called after each batch of an evaluation, so that a long one is not taken for a hang."""


class TrainingTask(Protocol):
    """Batches, loss and metrics of one run.

    Batches depend on the state of `generator` alone, which checkpoints save.
    """

    generator: torch.Generator
    tokens: int
    """Number of tokens predicted since the run started or resumed."""
    reinforce: Reinforce
    """What trains the scores of layers that sample keys; checkpoints save its state."""

    def next_batch(self) -> tuple[Tensor, ...]:
        """The tensors of the next training batch, on the CPU."""
        ...

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Training loss of a batch: a scalar, in nats per token, with auxiliary losses."""
        ...

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Mean loss over at most `batches` validation batches, without auxiliary losses; None if there are none."""
        ...

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Metrics that are measured once, after the last step, by name."""
        ...


def position_of(task: TrainingTask) -> dict[str, Tensor]:
    """Where a task is in its data, beside the state of its generator: tensors by name, none for most."""
    own: Callable[[], dict[str, Tensor]] | None = getattr(task, "position", None)
    return {} if own is None else own()


def restore_position(task: TrainingTask, position: Mapping[str, Tensor]) -> None:
    """Put back what `position_of` gave."""
    own: Callable[[Mapping[str, Tensor]], None] | None = getattr(task, "restore_position", None)
    if own is not None and position:
        own(position)


class SeededTask:
    """Base of tasks that draw batches of examples by a generator of their own."""

    def __init__(self, config: TrainingConfig) -> None:
        self._batch = config.optimizer.batch_size
        self._smoothing = config.optimizer.label_smoothing
        self.generator = torch.Generator().manual_seed(derived(config.seed, "batches"))
        self.tokens = 0
        self.reinforce = Reinforce()


class Dataset(Protocol):
    """Data in memory, tokenized if it is text."""

    @property
    def model_fields(self) -> Mapping[str, Any]:
        """Fields of the model's config that follow from the data, such as the size of the vocabulary."""
        ...

    @property
    def summary(self) -> str:
        """Number of training and validation examples, as text."""
        ...

    def task(self, config: TrainingConfig) -> TrainingTask:
        """The training task of a run, from its first batch."""
        ...

    def save(self, folder: Path, model: Any) -> Path:
        """Save the model with its tokenizer or class names; returns the folder."""
        ...


class TokenDataset:
    """Base of datasets of token ids: they fix the vocabulary, and save their `tokenizer` with the model."""

    tokenizer: Tokenizer

    @property
    def model_fields(self) -> Mapping[str, Any]:
        """The vocabulary."""
        return {"vocab_size": self.tokenizer.vocab_size}

    def save(self, folder: Path, model: Any) -> Path:
        """A folder of a `LanguageModel` with its tokenizer."""
        from attn_models.loading import save_model

        return save_model(folder, model, self.tokenizer)


PADDED = IGNORED
"""Target of padding, which losses ignore."""


def count_targets(batch: tuple[Tensor, ...]) -> int:
    """Targets of a batch, which are its last tensor, without padding."""
    return int((batch[-1] != PADDED).sum())


def batch_weight(task: TrainingTask, batch: tuple[Tensor, ...]) -> int:
    """How many things the loss of a batch is the mean of: its targets, unless the task has a `weight` of its own."""
    own: Callable[[tuple[Tensor, ...]], int] | None = getattr(task, "weight", None)
    return count_targets(batch) if own is None else own(batch)


def on_host(task: TrainingTask) -> tuple[int, ...]:
    """The places in a batch of what a loss reads on the CPU, such as numbers of documents; on a GPU it would wait."""
    own: tuple[int, ...] = getattr(task, "on_host", ())
    return own


def to_device(batch: tuple[Tensor, ...], device: torch.device, kept: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """A batch on a device, but for the parts at places `kept`; a GPU fetches it by itself, while the next is made."""
    return tuple(part if place in kept else sent(part, device) for place, part in enumerate(batch))


Text = TypeVar("Text")

BUCKET_BATCHES = 8
"""A batch is drawn from as many batches of texts that are about as long."""


def similar_in_length(by_length: Sequence[Text], batch: int, generator: torch.Generator) -> list[Text]:
    """`batch` texts of those sorted by length, about as long as one that is drawn from all; all if they are fewer."""
    count = len(by_length)
    window = min(count, BUCKET_BATCHES * batch)
    centre = int(torch.randint(count, (), generator=generator))
    first = min(max(0, centre - window // 2), count - window)
    return [by_length[first + place] for place in torch.randperm(window, generator=generator)[:batch].tolist()]


def split_validation(texts: Sequence[Text], fraction: float) -> tuple[Sequence[Text], Sequence[Text]]:
    """The texts to train on, and the fraction at the end that is kept for validation."""
    trained = len(texts) - int(len(texts) * fraction)
    return texts[:trained], texts[trained:]


def validation_batches(
    kept: Sequence[Text], collate: Callable[[Sequence[Text]], tuple[Tensor, ...]], *, batch: int, batches: int
) -> Iterator[tuple[Tensor, ...]]:
    """At most `batches` collated batches of texts, the same ones each time."""
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(VALIDATION_SEED)).tolist()
    for start in range(0, min(len(kept), batches * batch), batch):
        yield collate([kept[place] for place in order[start : start + batch]])


def mean_over_batches(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    value: Callable[[tuple[Tensor, ...]], Tensor],
    on_batch: OnBatch,
    weight: Callable[[tuple[Tensor, ...]], int] = count_targets,
    kept: tuple[int, ...] = (),
) -> float | None:
    """The mean of the `value` of batches, each of which counts as its `weight` says; None without batches.

    The model is left in the mode it was in. Parts of batches at the places `kept` stay on the CPU.
    """
    training, total, weights = model.training, 0.0, 0
    model.eval()
    device = next(model.parameters()).device
    with torch.inference_mode():
        for parts in batches:
            count = weight(parts)
            total += value(to_device(parts, device, kept)).item() * count
            weights += count
            on_batch()
    model.train(training)
    return total / weights if weights else None


def mean_validation_loss(
    model: nn.Module,
    kept: Sequence[Text],
    collate: Callable[[Sequence[Text]], tuple[Tensor, ...]],
    loss: Callable[[tuple[Tensor, ...]], Tensor],
    *,
    batch: int,
    batches: int,
    on_batch: OnBatch,
) -> float | None:
    """The mean `loss` a target over `validation_batches`; None without texts.

    The last part of a collated batch are its targets. The model is left in the mode it was in.
    """
    return mean_over_batches(model, validation_batches(kept, collate, batch=batch, batches=batches), loss, on_batch)
