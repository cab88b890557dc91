"""BLEU (Papineni et al. 2002) computed with sacreBLEU, so that scores are comparable with published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_core.errors import MissingPackage


@dataclass(frozen=True, kw_only=True)
class Bleu:
    """A BLEU score from 0 to 100, and sacreBLEU's signature, which records how it was computed."""

    score: float
    signature: str


def corpus_bleu(translations: Sequence[str], references: Sequence[str]) -> Bleu:
    """The corpus BLEU of translations with one reference each; raises `MissingPackage` without sacrebleu."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise MissingPackage.of("attn-cli[bleu]", "measuring BLEU") from error
    metric = BLEU()
    score = float(metric.corpus_score(list(translations), [list(references)]).score)
    return Bleu(score=score, signature=str(metric.get_signature()))
