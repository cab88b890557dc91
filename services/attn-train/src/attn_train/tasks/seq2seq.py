"""Sequence-to-sequence learning: an encoder-decoder learns to generate a target from its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from attn_core.errors import InvalidValue, MissingPackage
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_models.losses import doubly_stochastic_penalty, mean_cross_entropy
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import byte_pair_tokenizer, word_tokenizer
from attn_models.tokenizers.tokenizer import decoder_start_ids, encoder_input_ids, eos_id
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attn_train.tasks.base import (
    PADDED,
    CollatedTask,
    OnBatch,
    TokenDataset,
    TrainingTask,
)

AT_ONCE = 32


def translate(
    model: nn.Module,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    on_batch: OnBatch = lambda: None,
    max_new_tokens: int | None = None,
) -> list[str]:
    """Translate each source by greedy decoding with attn-engine; the model's mode is restored.

    Translations have at most `max_new_tokens` tokens, by default as many as the context allows. Sources longer than
    the encoder's context give "".
    """
    training = model.training
    model.eval()
    engine = build_engine(model, tokenizer, EngineConfig(max_num_seqs=AT_ONCE))  # type: ignore[arg-type]
    begin, max_source = decoder_start_ids(tokenizer), int(model.max_encoder_len)  # type: ignore[arg-type]
    room = int(model.max_seq_len) - len(begin)  # type: ignore[arg-type]
    count = room if max_new_tokens is None else min(room, max_new_tokens)
    task = SamplingParams(temperature=0.0, max_new_tokens=count)
    for place, source in enumerate(sources):
        ids = encoder_input_ids(tokenizer, source)
        if len(ids) <= max_source:
            engine.submit(Request(id=str(place), token_ids=begin, encoder_token_ids=ids, params=task))
    written = [""] * len(sources)
    while not engine.idle:
        for event in engine.step():
            written[int(event.request_id)] += event.delta.text
        on_batch()
    model.train(training)
    return [text.strip() for text in written]


def require_bleu() -> None:
    """Raise `MissingPackage` if sacreBLEU is not installed."""
    if find_spec("sacrebleu") is None:
        raise MissingPackage.of("attn-train[bleu]", "measuring BLEU (bleu_sentences)")


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return the corpus BLEU, 0 to 100, by sacreBLEU (Post 2018, arXiv 1804.08771), else raise `MissingPackage`."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise MissingPackage.of("attn-train[bleu]", "measuring BLEU") from error
    return float(BLEU().corpus_score(list(translations), [list(references)]).score)


TextPair = tuple[str, str]
"""A source and its target."""
TokenPair = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a source with EOS, and of a target from the decoder start token to EOS."""

WORD, BYTE_PAIRS = "word", "byte_pairs"
VOCABULARY = 8000
"""Default vocabulary size of byte pairs; "byte_pairs:4000" sets another one."""


@dataclass(frozen=True, eq=False)
class PairDataset(TokenDataset):
    """Training pairs, validation pairs with their `texts`, and the common tokenizer of both sides.

    `longest` are the contexts of encoder and decoder in tokens; `left_out` training pairs were longer, and
    `empty` pairs had an empty side; `notes` say what else was left out.
    """

    training: Sequence[TokenPair]
    validation: Sequence[TokenPair]
    texts: Sequence[TextPair]
    tokenizer: Tokenizer
    longest: tuple[int, int]
    left_out: int = 0
    empty: int = 0
    notes: str = ""

    @property
    def summary(self) -> str:
        """The number of pairs."""
        longer = f", {self.left_out} left out as too long" if self.left_out else ""
        empty = f", {self.empty} left out with an empty side" if self.empty else ""
        return f"{len(self.training)} training and {len(self.validation)} validation pairs{longer}{empty}{self.notes}"

    def task(self, config: TrainingConfig) -> TrainingTask:
        """Return the training task."""

        return Seq2SeqTask(self, config)


def tokenize_pairs(
    training: Sequence[TextPair], validation: Sequence[TextPair], *, tokenizer: str, longest: tuple[int, int]
) -> PairDataset:
    """Tokenize pairs; those longer than `longest`, (source, target) tokens, are not trained on.

    `tokenizer` is "word", "byte_pairs" or "byte_pairs:N", learned from the training pairs, or a folder with a
    tokenizer.json. Raises `InvalidValue` for an invalid size, or if no training pair is left.
    """
    made = learned_tokenizer(tokenizer, [text for pair in training for text in pair])
    kept = [pair for pair in token_pairs(training, made) if fits_model(pair, longest)]
    if not kept:
        raise InvalidValue.of(
            "data",
            f"{len(training)} pairs",
            f"at least one pair of at most {longest[0]} source and {longest[1]} target tokens",
        )
    return PairDataset(
        training=kept,
        validation=token_pairs(validation, made),
        texts=validation,
        tokenizer=made,
        longest=longest,
        left_out=len(training) - len(kept),
    )


def is_byte_pairs(tokenizer: str) -> bool:
    """Whether the tokenizer is a byte pair tokenizer that is learned from the data."""
    return tokenizer.partition(":")[0] == BYTE_PAIRS


def is_learned_tokenizer(tokenizer: str) -> bool:
    """Whether the tokenizer is learned from the data, rather than read from a folder."""
    return tokenizer == WORD or is_byte_pairs(tokenizer)


def learned_tokenizer(name: str, texts: Sequence[str]) -> Tokenizer:
    """Return the tokenizer that `name` specifies, learned from `texts` or read from a folder."""
    kind, _, size = name.partition(":")
    if kind == WORD and not size:
        return word_tokenizer(texts)
    if kind == BYTE_PAIRS:
        if size and not (size.isascii() and size.isdecimal()):
            raise InvalidValue.of("data.tokenizer", name, f"{BYTE_PAIRS}:N with a whole number")
        return byte_pair_tokenizer(texts, int(size or VOCABULARY))
    return Tokenizer.from_folder(name)


def token_pairs(pairs: Sequence[TextPair], tokenizer: Tokenizer) -> list[TokenPair]:
    """Tokenize pairs; raises `InvalidValue` for an empty source."""
    sources = (encoder_input_ids(tokenizer, source) for source, _ in pairs)
    targets = tokenizer.encode_texts([target for _, target in pairs])
    end = eos_id(tokenizer)
    return [(source, (*decoder_start_ids(tokenizer, ids), end)) for source, ids in zip(sources, targets, strict=True)]


def fits_model(pair: TokenPair, longest: tuple[int, int]) -> bool:
    """Whether a pair fits into the contexts `longest` of the encoder and the decoder."""
    return len(pair[0]) <= longest[0] and len(pair[1]) - 1 <= longest[1]


class Seq2SeqTask(CollatedTask):
    """Batches of pairs of similar length, for training with teacher forcing.

    A batch is the source tokens and their padding mask [batch, source], and inputs and targets [batch, target].
    """

    def __init__(self, pairs: PairDataset, config: TrainingConfig) -> None:
        super().__init__(config, pairs, lambda pair: len(pair[0]) + len(pair[1]), collate)
        self._pairs = pairs
        self._bleu = config.evaluation.bleu_sentences

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy with label smoothing (Szegedy et al. 2016, arXiv 1512.00567, section 7).

        Adds REINFORCE if keys are sampled, and for models with it the doubly stochastic penalty.
        """
        source, key_padding_mask, inputs, targets = batch
        weight = getattr(model, "doubly_stochastic", 0.0)
        if not weight:
            return self.reinforce.loss(model, lambda: model(inputs, source, key_padding_mask), targets, self._smoothing)
        forward: Any = model.forward_with_weights
        logits, weights, attended = forward(inputs, source, key_padding_mask)
        counts = targets != PADDED
        penalty = doubly_stochastic_penalty(weights, counts, attended)
        loss = self.reinforce.loss(model, lambda: logits, targets, self._smoothing)
        return loss + weight * penalty / counts.sum().clamp(min=1)

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:
        """Return the mean cross-entropy over at most `batches` validation batches, without label smoothing."""
        return self.mean(model, lambda batch: _loss(model, batch), batches, on_batch)

    def fits(self, example: TokenPair, longest: int) -> bool:  # noqa: ARG002 -- both sides have a length
        """See `CollatedTask.fits`."""
        return fits_model(example, self._pairs.longest)

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, Any]:
        """Return the BLEU of the first `bleu_sentences` validation sources; nothing if it is 0.

        The translation of a source that the model cannot read is empty.
        """
        texts = self._pairs.texts[: self._bleu]
        if not texts:
            return {}
        written = translate(model, self._pairs.tokenizer, [source for source, _ in texts], on_batch)
        return {"bleu": bleu(written, [target for _, target in texts])}


def collate(pairs: Sequence[TokenPair]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sources, their padding mask (True: a real token), inputs and targets [batch, ...], padded at the end."""
    sources = [torch.tensor(source) for source, _ in pairs]
    targets = [torch.tensor(target) for _, target in pairs]
    source = pad_sequence(sources, batch_first=True)
    key_padding_mask = torch.arange(source.shape[1]) < torch.tensor([len(rows) for rows in sources])[:, None]
    inputs = pad_sequence([rows[:-1] for rows in targets], batch_first=True)
    return (
        source,
        key_padding_mask,
        inputs,
        pad_sequence([rows[1:] for rows in targets], batch_first=True, padding_value=PADDED),
    )


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    source, key_padding_mask, inputs, targets = batch
    logits = model(inputs, source, key_padding_mask)
    return mean_cross_entropy(logits, targets, PADDED)
