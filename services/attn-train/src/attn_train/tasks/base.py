"""Interfaces and helpers of datasets and training tasks: the batches, losses and metrics of the training loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_core.kernels.devices import sent
from attn_models.decoder.mixture_of_experts import Router, counted_tokens, router_aux_loss
from attn_models.evaluation import IGNORED, next_token_loss
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


def auxiliary_losses(model: nn.Module, share: float = 1.0) -> Tensor | float:
    """Return the router losses of experts plus the auxiliary losses that layers stored in the last forward pass.

    Such layers are, for example, those with compressive memory; `share` is that of the batch in its step, where router
    losses are parts already. To be added once to the loss of a batch, before its backward pass; 0 if there are none.
    """
    takers: list[Any] = [module for module in model.modules() if hasattr(module, "take_auxiliary_loss")]
    left = [taker.take_auxiliary_loss() for taker in takers]
    return sum((loss * share for loss in left if loss is not None), start=router_aux_loss(model))


def count_load(model: nn.Module, compute: Callable[[], object]) -> None:
    """Tell the routers of experts the load of all batches of a step, on which the router loss of each depends.

    `compute` computes the losses of all batches, once more and without gradients; random numbers are then drawn again.
    """
    routers = [module for module in model.modules() if isinstance(module, Router) and module.balance]
    for router in routers:
        router.load = router.step_load = None
    if routers:
        with torch.random.fork_rng(), torch.no_grad():
            compute()
    for router in routers:
        router.step_load, router.load = router.load, None


def training_loss(model: nn.Module, inputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross-entropy of `targets` after `inputs`, [batch, tokens] each, in nats per token, and of later
    tokens too if the model predicts them; targets that are `PADDED` do not count."""
    own: Callable[..., Tensor] | None = getattr(model, "training_loss", None)
    if own is None:
        return next_token_loss(model, inputs, targets, smoothing)
    return own(inputs, targets, PADDED, smoothing)


def after_update(model: nn.Module, summed: Callable[[Tensor], Tensor]) -> None:
    """Change what layers learn without gradients, such as centroids, after an update; `summed` adds over workers."""
    for module in model.modules():
        own: Callable[..., None] | None = getattr(module, "after_update", None)
        if own is not None:
            own(summed)


@contextmanager
def counting(model: nn.Module, batch: tuple[Tensor, ...]) -> Iterator[None]:
    """While this is open, the routers of experts count the tokens up to the last target that is not `PADDED` in each
    row of a batch of inputs, ..., targets [rows, tokens], and not the padding after them."""
    targets = batch[-1]
    # With context parallelism a rank does not see where a row ends, and counts all of its tokens.
    sees = getattr(model, "places", None) is None and targets.shape == batch[0].shape and targets.dim() == 2
    if not sees or not any(isinstance(module, Router) for module in model.modules()):
        yield
        return
    with counted_tokens(model, (targets != PADDED).flip(1).cumsum(1).flip(1) > 0):
        yield


VALIDATION_ROWS = 12
"""The rows of a validation batch: conversations, pairs or images. They do not depend on the batch size of training, so
that runs with different ones measure the same tokens."""
VALIDATION_TOKENS = 3072
"""The tokens of a validation batch of a text."""
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
        """Return the training loss of a batch: a scalar, in nats per token, without auxiliary losses."""
        ...

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over at most `batches` validation batches, without auxiliary losses; None if none.

        A batch has `VALIDATION_ROWS` rows, or `VALIDATION_TOKENS` of a text, which may be computed in parts.
        """
        ...

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:
        """Return the metrics that are measured once, after the last step, by name."""
        ...


def validation_losses(task: TrainingTask, model: nn.Module, batches: int, on_batch: OnBatch) -> dict[str, float]:
    """Return the validation losses of a task by the names of its sets; the name of a single set may be empty."""
    own: Callable[..., dict[str, float]] | None = getattr(task, "validation_losses", None)
    if own is not None:
        return own(model, batches, on_batch)
    found = task.validation_loss(model, batches, on_batch)
    return {} if found is None else {"": found}


def left_out(task: TrainingTask) -> int:
    """Return the number of examples that the last validation loss of a task left out, as the model cannot take them."""
    return int(getattr(task, "validation_left_out", 0))


def require_measured(task: TrainingTask, found: object) -> None:
    """Raise `Incompatible` if nothing was `found` in measuring a task whose best weights are wanted."""
    if found is None:
        given = f" but {missing} that are left out" if (missing := left_out(task)) else ""
        problem = f"there are no validation data{given}, which load_best_model_at_end and early_stopping_patience need"
        raise Incompatible(problem, field="config.evaluation")


def next_batch(task: TrainingTask, model: nn.Module, on_batch: OnBatch) -> tuple[Tensor, ...]:
    """Return the next training batch of a task, which the model samples where its task needs that."""
    own: Callable[..., tuple[Tensor, ...]] | None = getattr(task, "sampled_batch", None)
    return task.next_batch() if own is None else own(model, on_batch)


def metrics_of(task: TrainingTask) -> dict[str, float]:
    """Return what a task has measured since the last call, by name; usually empty."""
    own: Callable[[], dict[str, float]] | None = getattr(task, "take_metrics", None)
    return {} if own is None else own()


def validation_metrics(task: TrainingTask, model: nn.Module, batches: int, on_batch: OnBatch) -> dict[str, float]:
    """Return what a task measures on at most `batches` validation batches besides losses, by name; usually empty."""
    own: Callable[..., dict[str, float]] | None = getattr(task, "validation_metrics", None)
    return {} if own is None else own(model, batches, on_batch)


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
        self.validation_left_out = 0
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
"""The number of batches' worth of examples that are sorted by length together."""


class Epochs:
    """Draws batches of examples without replacement: each is seen once in an epoch, in an order of its own.

    The examples of a batch are of similar length: an epoch is shuffled, sorted by length in pools of `BUCKET_BATCHES`
    batches, and the batches are shuffled. A batch that an epoch leaves incomplete is filled from the next one. What is
    drawn next depends only on the seed and `drawn`, the number of examples drawn so far.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self._lengths, self._batch, self._seed = lengths, batch, seed
        self._epoch, self._order = -1, list[int]()
        self.drawn = 0

    def next_batch(self) -> list[int]:
        """Return the indices of the examples of the next batch."""
        found = []
        for _ in range(self._batch):
            epoch, place = divmod(self.drawn, len(self._lengths))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._shuffled(epoch)
            found.append(self._order[place])
            self.drawn += 1
        return found

    def _shuffled(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(derived(self._seed, f"epoch {epoch}"))
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        begun = -epoch * len(order) % self._batch
        pool = BUCKET_BATCHES * self._batch
        batches = []
        for first in range(begun, len(order), pool):
            similar = sorted(order[first : first + pool], key=self._lengths.__getitem__)
            batches += [similar[start : start + self._batch] for start in range(0, len(similar), self._batch)]
        whole = len(batches) - (len(batches) > 0 and len(batches[-1]) < self._batch)
        mixed = [*torch.randperm(whole, generator=generator).tolist(), *range(whole, len(batches))]
        return [*order[:begun], *(example for place in mixed for example in batches[place])]


class ExampleTask(SeededTask):
    """Base class of tasks on examples, of which each is seen once in an epoch; `lengths` are those of the examples, and
    `batch` is the number of those that are drawn together, the config's batch size if not given."""

    def __init__(self, config: TrainingConfig, lengths: Sequence[int], batch: int | None = None) -> None:
        super().__init__(config)
        self._epochs = Epochs(lengths, batch or self._batch, derived(config.seed, "batches"))

    def position(self) -> dict[str, Tensor]:
        """Return the position for a checkpoint: the number of examples drawn, int64 [1]."""
        return {"examples": torch.tensor([self._epochs.drawn])}

    def restore_position(self, position: Mapping[str, Tensor]) -> None:
        """Continue from a position."""
        self._epochs.drawn = int(position["examples"][0])


class CollatedTask(ExampleTask):
    """Base class of tasks whose batches `collate` makes of the examples of a dataset.

    `length` is that of an example, unless the training examples know their `lengths` without being read.
    """

    def __init__(
        self,
        config: TrainingConfig,
        data: Any,
        length: Callable[[Any], int],
        collate: Callable[[Sequence[Any]], tuple[Tensor, ...]],
    ) -> None:
        lengths: Sequence[int] | None = getattr(data.training, "lengths", None)
        super().__init__(config, [length(example) for example in data.training] if lengths is None else lengths)
        self._data, self._collate = data, collate

    def next_batch(self) -> tuple[Tensor, ...]:
        """Return a batch of the next examples, of similar length."""
        batch = self._collate([self._data.training[place] for place in self._epochs.next_batch()])
        self.tokens += count_targets(batch)
        return batch

    def fits(self, example: Any, longest: int) -> bool:  # noqa: ARG002 -- unless a task says otherwise
        """Whether a model that reads `longest` tokens can be measured on an example."""
        return True

    def mean(
        self, model: nn.Module, value: Callable[[tuple[Tensor, ...]], Tensor], batches: int, on_batch: OnBatch
    ) -> float | None:
        """Return the mean `value` over at most `batches` validation batches; examples that do not fit are left out, and
        counted."""
        longest = longest_input(model)
        chosen = validation_sample(self._data.validation, batches)
        kept = [example for example in chosen if self.fits(example, longest)]
        self.validation_left_out = len(chosen) - len(kept)
        drawn = in_parts(kept, self._collate, self._batch)
        return mean_over_batches(model, drawn, value, on_batch, lambda batch: batch_weight(self, batch))  # type: ignore[arg-type]


def fitting(
    examples: Sequence[Text], length: Callable[[Text], int], longest: int, what: str, limit: str = "max_seq_len"
) -> tuple[list[Text], str]:
    """Return the examples of at most `longest` input tokens, and how many were left out, as text.

    Raises `InvalidValue`, with the length of the shortest, if none is left; `what` the examples are and `limit`, from
    which `longest` follows, are for its message.
    """
    lengths = [length(example) for example in examples]
    kept = [example for example, size in zip(examples, lengths, strict=True) if size <= longest]
    if not kept:
        shortest = f", the shortest of {min(lengths)} input tokens" if lengths else ""
        allowed = f"at least one of at most {longest} input tokens ({limit})"
        raise InvalidValue.of("config.data.dataset", f"{len(lengths)} {what}{shortest}", allowed)
    if len(kept) == len(lengths):
        return kept, ""
    return (
        kept,
        f", {len(lengths) - len(kept)} left out as too long: up to {max(lengths)} tokens for {longest} ({limit})",
    )


def split_validation(texts: Sequence[Text], fraction: float) -> tuple[Sequence[Text], Sequence[Text]]:
    """Split off the fraction at the end for validation; returns the training and validation texts."""
    trained = len(texts) - int(len(texts) * fraction)
    return texts[:trained], texts[trained:]


def longest_input(model: nn.Module) -> int:
    """Return the number of tokens that a model can read."""
    return int(getattr(model, "max_seq_len", 1 << 31))


def validation_sample(kept: Sequence[Text], batches: int) -> list[Text]:
    """Return the texts of at most `batches` validation batches, the same ones in every call."""
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(VALIDATION_SEED)).tolist()
    return [kept[place] for place in order[: batches * VALIDATION_ROWS]]


def in_parts(
    texts: Sequence[Text], collate: Callable[[Sequence[Text]], tuple[Tensor, ...]], batch: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the texts, collated in parts of at most `batch` texts."""
    for start in range(0, len(texts), batch):
        yield collate(texts[start : start + batch])


def validation_windows(tokens: int, batches: int, context: int) -> list[tuple[int, int]]:
    """Return the windows (start, stop) of at most `context` tokens in which a validation text is measured.

    Together they are evenly spaced runs of `VALIDATION_TOKENS` tokens, one for each of `batches`, or all `tokens`: the
    same tokens whatever the context, which only changes how many of those before a token the model reads.
    """
    starts = [batch * tokens // batches for batch in range(batches)] if tokens > batches * VALIDATION_TOKENS else [0]
    runs = [(start, start + VALIDATION_TOKENS if len(starts) > 1 else tokens) for start in starts]
    return [(place, min(place + context, stop)) for start, stop in runs for place in range(start, stop, context)]


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
