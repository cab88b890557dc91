"""Causal language modelling on text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_core.reinforce import samples_keys
from attn_models.evaluation import next_token_loss
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_schema import text_files
from attn_schema.text_files import whole_lines_of
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_train.data.token_shards.encoders import affixes
from attn_train.data.token_shards.inputs import has_rows
from attn_train.tasks.base import (
    PADDED,
    OnBatch,
    RandomWindows,
    TokenDataset,
    derived,
    in_parts,
    mean_over_batches,
    training_loss,
    validation_windows,
)
from attn_train.tasks.reinforce import Reinforce
from attn_train.tasks.seq2seq import learned_tokenizer

CHARACTER = "character"
LINES_AT_ONCE = 10_000


@dataclass(frozen=True, eq=False)
class TextDataset(TokenDataset):
    """The training and validation parts of a text as token ids, int32 [tokens], and the tokenizer."""

    training: Tensor
    validation: Tensor
    tokenizer: Tokenizer
    notes: str = ""

    @property
    def summary(self) -> str:
        """The number of tokens, and the share of unknown ones, if any."""
        share = unknown_share(self.training, self.tokenizer)
        unknown = f", {share:.2%} of them unknown to the tokenizer" if share else ""
        return f"{len(self.training)} training and {len(self.validation)} validation tokens{unknown}{self.notes}"

    def task(self, config: TrainingConfig) -> LanguageModelingTask:
        """Return the training task."""
        return LanguageModelingTask(self, config)


class LanguageModelingTask:
    """Next-token prediction on random windows of one long text."""

    def __init__(self, text: TextDataset, config: TrainingConfig) -> None:
        self._text = text
        self._context, self._batch = config.model.sequence_length, config.optimizer.batch_size
        self._batches = RandomWindows(
            text.training, context=self._context, batch=self._batch, seed=derived(config.seed, "batches")
        )
        self.generator = self._batches.generator
        self._smoothing = config.optimizer.label_smoothing
        self.tokens = 0
        self.reinforce = Reinforce()
        self._measured: dict[str, float] = {}

    def next_batch(self) -> tuple[Tensor, ...]:
        """Return inputs and targets, int64 [batch, context] each."""
        self.tokens += self._batch * self._context
        return self._batches.next_batch()

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy, of later tokens too if the model predicts them."""
        inputs, targets = batch
        if samples_keys(model):
            return self.reinforce.loss(model, lambda: model(inputs), targets, self._smoothing)
        return training_loss(model, inputs, targets, self._smoothing)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean next-token loss on the validation text, in its `validation_windows`; None without."""
        text = self._text.validation.long()
        windows = validation_windows(len(text) - 1, batches, self._context)
        drawn = in_parts(windows, lambda part: collate_windows(text, part), self._batch)
        loss = mean_over_batches(model, drawn, lambda batch: next_token_loss(model, batch[0], batch[1]), on_batch)
        self._measured = {} if loss is None else measures(loss, text, windows, self._text.tokenizer)
        return loss

    def validation_metrics(self, model: nn.Module, batches: int, on_batch: OnBatch) -> dict[str, float]:  # noqa: ARG002 -- measured with the loss
        """Return `text_measures` of the text that was measured last."""
        return self._measured

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, Any]:  # noqa: ARG002 -- the loss says all
        """Return no metrics, as the loss is sufficient."""
        return {}


MOST_NATS = 700.0
"""Nats of a word, as of a text without blanks, from which its perplexity is infinite."""


def text_measures(nats: float, text: str) -> dict[str, float]:
    """Return what is comparable between tokenizers of the `nats` of a text: bits per byte and perplexity by words."""
    per_word = nats / max(1, len(text.split()))
    words = math.exp(per_word) if per_word < MOST_NATS else math.inf
    return {"bits_per_byte": nats / math.log(2) / max(1, len(text.encode())), "word_perplexity": words}


def measures(loss: float, ids: Tensor, windows: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> dict[str, float]:
    """Return `text_measures` of windows of a text, int64 [tokens], in whose targets the mean `loss` is in nats."""
    runs: list[tuple[int, int]] = []
    for start, stop in windows:  # joined, as a character may reach from one into the next
        runs.append((runs.pop()[0] if runs and runs[-1][1] == start else start, stop))
    text = "".join(tokenizer.decode(ids[start + 1 : stop + 1].tolist()) for start, stop in runs)
    found = text_measures(loss * sum(stop - start for start, stop in windows), text)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def collate_windows(text: Tensor, windows: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [windows, longest] of windows of a text, int64 [tokens], padded at the end."""
    inputs = pad_sequence([text[start:stop] for start, stop in windows], batch_first=True)
    ahead = [text[start + 1 : stop + 1] for start, stop in windows]
    return inputs, pad_sequence(ahead, batch_first=True, padding_value=PADDED)


MOST_UNKNOWN = 0.5
"""The largest share of unknown tokens in a text that is trained on."""


def unknown_share(ids: Tensor, tokenizer: Tokenizer) -> float:
    """Return the share of `ids` [tokens] that are the unknown token."""
    return 0.0 if tokenizer.unk_id is None or not len(ids) else (ids == tokenizer.unk_id).float().mean().item()


def require_known(ids: Tensor, tokenizer: Tokenizer) -> None:
    """Raise `InvalidValue` for a text of which the tokenizer does not know most tokens."""
    if (share := unknown_share(ids, tokenizer)) > MOST_UNKNOWN:
        allowed = f"one that knows the text: {share:.0%} of its tokens are unknown"
        raise InvalidValue.of("data.tokenizer", "the tokenizer", allowed)


def tokenize(text: str, *, tokenizer: str = CHARACTER, validation: float = 0.1, held_out: str = "") -> TextDataset:
    """Tokenize `text`; the text `held_out` is for validation, or if it is empty the fraction `validation` at the end.

    `tokenizer` is "character" (the characters of this text are the vocabulary), "byte_pairs:N", learned from the
    training part, or a folder with a tokenizer.json. Raises `InvalidValue` for an empty text, `CheckpointInvalid` for a
    folder without a tokenizer.
    """
    if not text:
        raise InvalidValue.of("data", "an empty text", "at least one character")
    if tokenizer == CHARACTER:
        made = character_tokenizer(text + held_out)
        ids = _character_ids(text + held_out)
        kept = len(text)
    elif held_out:
        made = learned_tokenizer(tokenizer, whole_lines_of(text))
        parts = [_encoded(text, made), _encoded(held_out, made)]
        ids, kept = torch.cat(parts), len(parts[0])
    else:
        trained = text[: len(text) - int(len(text) * validation)]
        made = learned_tokenizer(tokenizer, whole_lines_of(trained))
        ids = _encoded(text, made)
        kept = len(ids)
    if not held_out:
        kept -= int(kept * validation)
    return TextDataset(training=ids[:kept], validation=ids[kept:], tokenizer=made)


def tokenize_documents(
    training: Sequence[str], validation: Sequence[str], *, tokenizer: str, notes: str = ""
) -> TextDataset:
    """Tokenize documents, each with the tokens that begin and end a text; those of characters are joined by line feeds.

    `tokenizer` is that of `tokenize`, and the errors are its.
    """
    if tokenizer == CHARACTER:
        found = tokenize("\n".join(training), held_out="\n".join(validation), validation=0.0)
        return replace(found, notes=notes)
    made = learned_tokenizer(tokenizer, training)
    first, last = affixes(made)
    parts = [
        torch.tensor([token for ids in made.encode_texts(texts) for token in (*first, *ids, *last)], dtype=torch.int32)
        for texts in (training, validation)
    ]
    require_known(parts[0], made)
    return TextDataset(parts[0], parts[1], made, notes)


def read_text(files: Sequence[Path]) -> str:
    """Read UTF-8 files, joined in this order; line ends become newlines.

    Raises `InvalidValue` for a file that cannot be read or is not UTF-8, and for one of rows, which are no text.
    """
    for file in files:
        if has_rows(file):
            allowed = "a text, without files of rows beside it"
            raise InvalidValue.of("data.dataset", str(file), allowed)
    return "".join(text_files.read_text(file, "data.dataset") for file in files)


def _character_ids(text: str) -> Tensor:
    """Return the id of each character, its rank among the characters of the text; 40 times faster than a tokenizer."""
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    present = torch.zeros(int(codes.max()) + 1, dtype=torch.int32)
    present[codes] = 1
    return (present.cumsum(0, dtype=torch.int32) - 1)[codes]


def _encoded(text: str, tokenizer: Tokenizer) -> Tensor:
    lines = whole_lines_of(text)
    groups = ["".join(lines[start : start + LINES_AT_ONCE]) for start in range(0, len(lines), LINES_AT_ONCE)]
    first = tokenizer.encode("")
    # Some tokenizers put a blank in front of each text, but none after a line break.
    blank, breaks = False, []
    if len(groups) > 1 and tokenizer.characters is None:
        breaks, one, after = tokenizer.encode_batch(["\n", "a", "\na"], add_special=False)
        blank = after[: len(breaks)] == breaks and after[len(breaks) :] != one
    later = tokenizer.encode_texts([f"\n{group}" if blank else group for group in groups[1:]])
    parts = [first, *tokenizer.encode_texts(groups[:1]), *(ids[len(breaks) if blank else 0 :] for ids in later)]
    found = torch.cat([torch.tensor(part, dtype=torch.int32) for part in parts])
    require_known(found, tokenizer)
    return found
