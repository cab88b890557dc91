"""What a model in training writes, and how good it is."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.errors import MissingPackage
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.seq2seq import decoder_start_ids, encoder_input_ids
from torch import nn

from attn_train.loop.lessons import Done

AT_ONCE = 32


def translate(
    model: nn.Module, tokenizer: Tokenizer, sources: Sequence[str], done: Done = lambda: None, most: int | None = None
) -> list[str]:
    """The greedy translation of each source, by the engine that serves; the model is left in the mode it was in.

    At most `most` tokens each, by default what its context holds; sources longer than the model reads give "".
    """
    training = model.training
    model.eval()
    engine = build_engine(model, tokenizer, EngineConfig(max_num_seqs=AT_ONCE))  # type: ignore[arg-type]
    begin, longest = decoder_start_ids(tokenizer), int(model.source_context)  # type: ignore[arg-type]
    room = int(model.context) - len(begin)  # type: ignore[arg-type]
    task = SamplingParams(temperature=0.0, max_new_tokens=room if most is None else min(room, most))
    for place, source in enumerate(sources):
        ids = encoder_input_ids(tokenizer, source)
        if len(ids) <= longest:
            engine.submit(Request(id=str(place), token_ids=begin, encoder_token_ids=ids, params=task))
    written = [""] * len(sources)
    while not engine.idle:
        for event in engine.step():
            written[int(event.request_id)] += event.delta.text
        done()
    model.train(training)
    return [text.strip() for text in written]


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU from 0 to 100 by sacreBLEU (Post 2018, arXiv 1804.08771); raises `MissingPackage` without it."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise MissingPackage.of("attn-train[bleu]", "measuring BLEU") from error
    return float(BLEU().corpus_score(list(translations), [list(references)]).score)
