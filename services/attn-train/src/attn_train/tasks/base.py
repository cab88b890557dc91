"""Datasets and training tasks: batches, losses and metrics that the training loop needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from attn_train.spec import TrainingSpec


def derived(seed: int, use: str) -> int:
    """A seed of 63 bits for `use`: equal streams for initial weights, batches and dropout would be correlated."""
    digest = hashlib.sha256(f"{seed}:{use}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Batches:
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

    def draw(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64, [batch, context] each; targets are one token ahead."""
        places = torch.randint(len(self._windows), (self._batch,), generator=self.generator)
        rows = self._windows[places].long()
        return rows[:, :-1], rows[:, 1:]


IGNORED = -100
"""Targets that no loss looks at."""
TOKENS_AT_ONCE = 4096
"""Tokens of a text that are read together, in windows side by side."""


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a token, of `targets` [batch, tokens] after `inputs`, but for those `IGNORED`.

    Models that can find it without holding all logits do.
    """
    own = getattr(model, "next_token_loss", None)
    if own is not None:
        loss: Tensor = own(inputs, targets, IGNORED)
        return loss
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def text_loss(model: nn.Module, ids: Tensor, window: int) -> float:
    """The mean loss, in nats, of the tokens of a text [tokens], each after those before it in its window.

    Windows of so many tokens follow one another; the first token of the text follows none and is not judged.
    """
    inputs, targets = ids[:-1].long(), ids[1:].long()
    many = max(1, TOKENS_AT_ONCE // window) * window
    # Those that fill no window are one of their own.
    ends = [*range(many, len(targets), many), len(targets) // window * window, len(targets)]
    total = 0.0
    with torch.inference_mode():
        for start, end in pairwise([0, *ends]):
            if start < end:
                shape = (-1, min(window, end - start))
                loss = next_token_loss(model, inputs[start:end].view(shape), targets[start:end].view(shape))
                total += loss.item() * (end - start)
    return total / len(targets)


def mean_loss(model: nn.Module, batches: Batches, count: int, done: Callable[[], None] = lambda: None) -> float:
    """The mean loss over `count` batches, without dropout; the model is left in the mode it was in.

    `done` is called after each batch.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = 0.0
    with torch.inference_mode():
        for _ in range(count):
            inputs, targets = (part.to(device) for part in batches.draw())
            total += next_token_loss(model, inputs, targets).item()
            done()
    model.train(training)
    return total / count


VALIDATION_SEED = 0x5EED
"""Validation batches are the same in every measurement of every run, so that losses can be compared."""

Done = Callable[[], None]
"""Called after each piece of a long measurement."""


class Lessons(Protocol):
    """Batches of one run. What is drawn depends on `generator` alone, so that a resumed run goes on with it."""

    generator: torch.Generator
    tokens: int
    """Tokens predicted since the run began or went on."""

    def draw(self) -> tuple[Tensor, ...]:
        """The tensors of a batch."""
        ...

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """What an update lowers, in nats a token."""
        ...

    def validation_loss(self, model: nn.Module, batches: int, done: Done) -> float | None:
        """The mean over `batches` batches kept for validation; None if there are none."""
        ...

    def final_values(self, model: nn.Module, done: Done) -> Mapping[str, float]:
        """What is measured once, when training is over, by name."""
        ...


class Material(Protocol):
    """Data that has been read, and perhaps cut into tokens."""

    @property
    def decided(self) -> Mapping[str, Any]:
        """The fields of a model's config that the data decide on."""
        ...

    @property
    def sizes(self) -> str:
        """How much there is, for people."""
        ...

    def lessons(self, spec: TrainingSpec) -> Lessons:
        """Fresh batches for a run."""
        ...

    def save(self, folder: Path, model: Any) -> Path:
        """Write the model with what is needed to use it; returns the folder."""
        ...


class TokenMaterial:
    """What data of tokens decide on and keep: the `tokenizer` that cut them."""

    tokenizer: Tokenizer

    @property
    def decided(self) -> Mapping[str, Any]:
        """The vocabulary."""
        return {"vocabulary": self.tokenizer.vocabulary}

    def save(self, folder: Path, model: Any) -> Path:
        """A folder of a `LanguageModel` with its tokenizer."""
        from attn_models.loading import save_model

        return save_model(folder, model, self.tokenizer)


PADDED = IGNORED
"""The target of what only fills a batch."""

Text = TypeVar("Text")


def validation_mean(
    model: nn.Module,
    kept: Sequence[Text],
    collated: Callable[[Sequence[Text]], tuple[Tensor, ...]],
    loss: Callable[[tuple[Tensor, ...]], Tensor],
    *,
    batch: int,
    batches: int,
    done: Done,
) -> float | None:
    """The mean `loss` a target over at most `batches` batches of texts, the same ones each time; None without texts.

    The last part of a collated batch are its targets. The model is left in the mode it was in.
    """
    if not kept:
        return None
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(VALIDATION_SEED)).tolist()
    training, total, tokens = model.training, 0.0, 0
    model.eval()
    device = next(model.parameters()).device
    with torch.inference_mode():
        for start in range(0, min(len(kept), batches * batch), batch):
            parts = collated([kept[place] for place in order[start : start + batch]])
            count = int((parts[-1] != PADDED).sum())
            total += loss(tuple(part.to(device) for part in parts)).item() * count
            tokens += count
            done()
    model.train(training)
    return total / tokens
