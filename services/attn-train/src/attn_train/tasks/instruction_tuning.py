"""Instruction tuning on conversations, with the loss on the assistant's answers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attn_models.evaluation import next_token_loss
from attn_models.tokenizers import Tokenizer
from attn_models.vision_language.images import TileReader
from attn_models.vision_language.prompts import TileTexts
from attn_schema.training import DataConfig, TrainingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_train.data.conversations import read_chats, read_splits
from attn_train.data.pictures import ALONE
from attn_train.data.rendering import TokenizedChat
from attn_train.tasks.base import (
    PADDED,
    CollatedTask,
    OnBatch,
    TokenDataset,
    fitting,
    training_loss,
)


@dataclass(frozen=True, eq=False)
class ChatDataset(TokenDataset):
    """Training and validation conversations; `notes` says what was left out, and `reader` reads images, if there are
    any."""

    training: Sequence[TokenizedChat]
    validation: Sequence[TokenizedChat]
    tokenizer: Tokenizer
    notes: str = ""
    reader: TileReader | None = None

    @property
    def summary(self) -> str:
        """The number of conversations and of answer tokens."""
        answered = sum(chat.answered for chat in self.training)
        counts = f"{len(self.training)} training and {len(self.validation)} validation conversations"
        return f"{counts}, {answered} target tokens in answers{self.notes}"

    @property
    def files(self) -> list[Path]:
        """The images' files."""
        return image_files((*self.training, *self.validation))

    def task(self, config: TrainingConfig) -> InstructionTask:
        """Return the training task."""
        return InstructionTask(self, config)


def chat_dataset(
    data: DataConfig, tokenizer: Tokenizer, *, max_length: int, tiles: TileTexts | str = ALONE
) -> ChatDataset:
    """Load the conversations of a file or folder; those longer than `max_length` tokens are not trained on. `tiles` is
    what encodes images, or why they are refused.

    Raises as `read_chats` does, and `InvalidValue` if no training conversation is left.
    """
    # The same conversations are for validation whatever the length of a training sequence.
    first, kept, notes = read_splits(data, lambda rows, reading: read_chats(rows, tokenizer, reading), tiles)
    training, longer = fitting(first, lambda chat: len(chat.inputs), max_length, f"conversations{notes}")
    return ChatDataset(training, kept, tokenizer, longer + notes, reader_of((*training, *kept), tiles))


def image_files(chats: Iterable[TokenizedChat]) -> list[Path]:
    """Return the files of conversations' images."""
    seen = (chat.images for chat in chats if chat.images is not None)
    return [one for images in seen for one in images.pictures if isinstance(one, Path)]


def reader_of(chats: Iterable[TokenizedChat], tiles: TileTexts | str) -> TileReader | None:
    """Return what reads conversations' images; None without any."""
    return tiles.reader if not isinstance(tiles, str) and any(chat.images for chat in chats) else None


class InstructionTask(CollatedTask):
    """Batches of conversations of similar length: inputs and targets [batch, longest], padded at the end; with images
    between them [batch, tiles, channels, side, side], also padded.

    A causal model needs no padding mask, as no token attends to the padding after it.
    """

    def __init__(self, chats: ChatDataset, config: TrainingConfig) -> None:
        super().__init__(config, chats, lambda chat: len(chat.inputs), partial(collate, reader=chats.reader))

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy of the answer tokens."""
        with seeing(model, batch):
            return training_loss(model, batch[0], batch[-1], self._smoothing)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean loss over at most `batches` validation batches; conversations that the model cannot read are
        left out, and counted."""

        def loss(batch: tuple[Tensor, ...]) -> Tensor:
            with seeing(model, batch):
                return next_token_loss(model, batch[0], batch[-1])

        return self.mean(model, loss, batches, on_batch)

    def fits(self, example: TokenizedChat, longest: int) -> bool:
        """See `CollatedTask.fits`."""
        return len(example.inputs) <= longest

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:  # noqa: ARG002 -- the loss says all
        """Return no metrics, as the loss is sufficient."""
        return {}


def seeing(model: Any, batch: tuple[Tensor, ...]) -> AbstractContextManager[None]:
    """Return a context in which a model sees the images of a batch, which stand before its targets, if it has any."""
    return model.seeing(batch[0], batch[-2]) if batch[-2].dim() == 5 else nullcontext()


def collate(chats: Sequence[TokenizedChat], reader: TileReader | None = None) -> tuple[Tensor, ...]:
    """Return inputs and targets [batch, longest], padded at the end; with a `reader` images between them, as
    `InstructionTask` has them, whose files it reads."""
    inputs = pad_sequence([torch.tensor(chat.inputs) for chat in chats], batch_first=True)
    targets = pad_sequence([torch.tensor(chat.targets) for chat in chats], batch_first=True, padding_value=PADDED)
    if reader is None:
        return inputs, targets
    own = [None if chat.images is None else chat.images.pixels(reader) for chat in chats]
    most = max((len(one) for one in own if one is not None), default=0)
    pixels = torch.zeros(len(chats), most, 3, reader.side, reader.side)
    for place, one in enumerate(own):
        if one is not None:
            pixels[place, : len(one)] = one
    return inputs, pixels, targets
