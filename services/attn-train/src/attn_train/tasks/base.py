"""Interfaces and helpers of datasets and training tasks: the batches, losses and metrics of the training loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.devices import sent
from attn_models.decoder.mixture_of_experts import router_aux_loss
from attn_models.evaluation import IGNORED
from attn_models.tokenizers import Tokenizer
from attn_schema.training import TrainingConfig
from torch import Tensor, nn

from attn_train.tasks.reinforce import Reinforce


def derived(seed: int, use: str) -> int:
    """Derive a 63-bit seed for `use`, so that initial weights, batches and dropout have independent random streams."""
    digest = hashlib.sha256(f"{seed}:{use}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class RandomWindows:
    """Draws `batch` windows of `context` tokens, with targets one token ahead, at random positions.

    `tokens` is [tokens], any integer type. Raises `InvalidValue` if not even one window fits.
    """

    def __init__(self, tokens: Tensor, *, context: int, batch: int, seed: int) -> None:
        if len(tokens) <= context:
            allowed = f"more than the context of {context} tokens"
            raise InvalidValue.of("data", f"{len(tokens)} tokens", allowed)
        # A view: window i is tokens i to i + context, so that one gather gives both inputs and targets.
        self._windows = tokens.unfold(0, context + 1, 1)
        self._batch = batch
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 [batch, context] each; targets are one token ahead."""
        places = torch.randint(len(self._windows), (self._batch,), generator=self.generator)
        rows = self._windows[places].long()
        return rows[:, :-1], rows[:, 1:]


def auxiliary_losses(model: nn.Module) -> Tensor | float:
    """Return the router losses of experts plus the auxiliary losses that layers stored in the last forward pass.

    Such layers are, for example, those with compressive memory. To be added once to the loss of a batch, before its
    backward pass; 0 if there are none.
    """
    takers: list[Any] = [module for module in model.modules() if hasattr(module, "take_auxiliary_loss")]
    left = [taker.take_auxiliary_loss() for taker in takers]
    return sum((loss for loss in left if loss is not None), start=router_aux_loss(model))


def after_update(model: nn.Module, summed: Callable[[Tensor], Tensor]) -> None:
    """Change what layers learn without gradients, such as centroids, after an update; `summed` adds over workers."""
    for module in model.modules():
        own: Callable[..., None] | None = getattr(module, "after_update", None)
        if own is not None:
            own(summed)


VALIDATION_ROWS = 12
"""The rows of a validation batch: sequences, pairs or images. They do not depend on the batch size of training, so that
runs with different ones measure the same tokens."""
VALIDATION_SEED = 0x5EED
"""The seed of validation batches, which are the same in every evaluation of every run for comparable losses."""

OnBatch = Callable[[], None]
"""Called after each batch of an evaluation, so that a long evaluation is not mistaken for a hang."""


class TrainingTask(Protocol):
    """The batches, loss and metrics of one run.

    Batches depend only on the state of `generator`, which is saved in checkpoints.
    """

    generator: torch.Generator
    tokens: int
    """The number of tokens predicted since the run started or resumed."""
    reinforce: Reinforce
    """The loss that trains the scores of layers that sample keys; its state is saved in checkpoints."""

    def next_batch(self) -> tuple[Tensor, ...]:
        """Return the tensors of the next training batch, on the CPU."""
        ...

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the training loss of a batch: a scalar, in nats per token, with auxiliary losses."""
        ...

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over at most `batches` validation batches, without auxiliary losses; None if none.

        A batch has `VALIDATION_ROWS` rows, which may be computed in parts.
        """
        ...

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the metrics that are measured once, after the last step, by name."""
        ...


def position_of(task: TrainingTask) -> dict[str, Tensor]:
    """Return the position of a task in its data, besides its generator's state, as tensors by name; usually empty."""
    own: Callable[[], dict[str, Tensor]] | None = getattr(task, "position", None)
    return {} if own is None else own()


def restore_position(task: TrainingTask, position: Mapping[str, Tensor]) -> None:
    """Restore what `position_of` returned."""
    own: Callable[[Mapping[str, Tensor]], None] | None = getattr(task, "restore_position", None)
    if own is not None and position:
        own(position)


class SeededTask:
    """Base class of tasks that draw batches of examples with a generator of their own."""

    def __init__(self, config: TrainingConfig) -> None:
        self._batch = config.optimizer.batch_size
        self._smoothing = config.optimizer.label_smoothing
        self.generator = torch.Generator().manual_seed(derived(config.seed, "batches"))
        self.tokens = 0
        self.reinforce = Reinforce()


class Dataset(Protocol):
    """The data of a job, tokenized if it is text."""

    @property
    def model_fields(self) -> Mapping[str, Any]:
        """The fields of the model's config that follow from the data, such as the vocabulary size."""
        ...

    @property
    def summary(self) -> str:
        """The number of training and validation examples, as text."""
        ...

    def task(self, config: TrainingConfig) -> TrainingTask:
        """Return the training task of a run, at its first batch."""
        ...

    def save(self, folder: Path, model: Any) -> Path:
        """Save the model with its tokenizer or class names, and return the folder."""
        ...


class TokenDataset:
    """Base class of datasets of token ids: they determine the vocabulary, and save their `tokenizer` with the model."""

    tokenizer: Tokenizer

    @property
    def model_fields(self) -> Mapping[str, Any]:
        """The vocabulary size."""
        return {"vocab_size": self.tokenizer.vocab_size}

    def save(self, folder: Path, model: Any) -> Path:
        """Save the model with its tokenizer, and return the folder."""
        from attn_models.loading import save_model

        return save_model(folder, model, self.tokenizer)


PADDED = IGNORED
"""The target of padding, which losses ignore."""


def count_targets(batch: tuple[Tensor, ...]) -> int:
    """Return the number of targets of a batch, its last tensor, without padding."""
    return int((batch[-1] != PADDED).sum())


def batch_weight(task: TrainingTask, batch: tuple[Tensor, ...]) -> int:
    """Return the number of elements that the loss of a batch averages: its targets, or `weight` of the task, if any."""
    own: Callable[[tuple[Tensor, ...]], int] | None = getattr(task, "weight", None)
    return count_targets(batch) if own is None else own(batch)


def on_host(task: TrainingTask) -> tuple[int, ...]:
    """Return the indices of the batch's tensors that the loss reads on the CPU, such as document numbers.

    Reading them from a GPU would force a synchronisation.
    """
    own: tuple[int, ...] = getattr(task, "on_host", ())
    return own


def to_device(batch: tuple[Tensor, ...], device: torch.device, kept: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """Move a batch to a device, except the tensors at the indices `kept`; copies to a GPU are asynchronous."""
    return tuple(part if place in kept else sent(part, device) for place, part in enumerate(batch))


Text = TypeVar("Text")

BUCKET_BATCHES = 8
"""A batch is drawn from this many batches' worth of texts of similar length."""


def similar_in_length(by_length: Sequence[Text], batch: int, generator: torch.Generator) -> list[Text]:
    """Draw `batch` texts from those sorted by length, similar in length to a random one; all if there are fewer."""
    count = len(by_length)
    window = min(count, BUCKET_BATCHES * batch)
    centre = int(torch.randint(count, (), generator=generator))
    first = min(max(0, centre - window // 2), count - window)
    return [by_length[first + place] for place in torch.randperm(window, generator=generator)[:batch].tolist()]


def split_validation(texts: Sequence[Text], fraction: float) -> tuple[Sequence[Text], Sequence[Text]]:
    """Split off the fraction at the end for validation; returns the training and validation texts."""
    trained = len(texts) - int(len(texts) * fraction)
    return texts[:trained], texts[trained:]


def validation_batches(
    kept: Sequence[Text], collate: Callable[[Sequence[Text]], tuple[Tensor, ...]], *, batch: int, batches: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the texts of at most `batches` validation batches, the same ones in every call, collated in parts of at
    most `batch` texts."""
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(VALIDATION_SEED)).tolist()
    chosen = order[: batches * VALIDATION_ROWS]
    for start in range(0, len(chosen), batch):
        yield collate([kept[place] for place in chosen[start : start + batch]])


def parts_of(draw: Callable[[], tuple[Tensor, ...]], batches: int, batch: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of `batches` batches that `draw` returns, in parts of at most `batch` rows."""
    for _ in range(batches):
        yield from zip(*(torch.split(part, batch) for part in draw()), strict=True)


def mean_over_batches(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    value: Callable[[tuple[Tensor, ...]], Tensor],
    on_batch: OnBatch,
    weight: Callable[[tuple[Tensor, ...]], int] = count_targets,
    kept: tuple[int, ...] = (),
) -> float | None:
    """Return the mean `value` of batches, weighted by `weight`, in evaluation mode; None without batches.

    The model's mode is restored. The tensors of a batch at the indices `kept` stay on the CPU.
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
    """Return the mean `loss` per target over `validation_batches`; None without texts.

    The last tensor of a collated batch must be its targets. The model's mode is restored.
    """
    return mean_over_batches(model, validation_batches(kept, collate, batch=batch, batches=batches), loss, on_batch)
