"""Claims 2, 3, 4, 5 and 8: translation of an artificial language with models of 2014 to 2017.

A sentence consists of the word ids 3 to 42. Translation replaces each word by another one; with `exchanged`,
neighbouring words are also swapped. Since the rule is known, the source word of each target word is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_experiments.report import Curves, Points, Result, Settings, judged, spread
from attn_experiments.small_models import build, learn, mean, next_token_loss, weights_of

BEGIN, END, FIRST, WORDS = 1, 2, 3, 40
LONGEST, TRAINED = 24, 12
LENGTHS = (4, 8, 12, 16, 20)
SIZES = {"vocab_size": FIRST + WORDS, "max_seq_len": LONGEST + 2, "max_encoder_len": LONGEST + 2}
STEPS, BATCH, TESTS = 700, 48, 60


@dataclass(frozen=True)
class Language:
    """The artificial language pair: a fixed replacement of words, and whether neighbouring words are swapped."""

    exchanged: bool

    def sources(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Random sentences [count, length]."""
        return torch.randint(FIRST, FIRST + WORDS, (count, length), generator=generator)

    def aligned(self, length: int) -> list[int]:
        """The source position of each target word."""
        if not self.exchanged:
            return list(range(length))
        return [min(place ^ 1, length - 1) if (place ^ 1) < length else place for place in range(length)]

    def targets(self, sources: Tensor) -> Tensor:
        """The translations [count, length]: word w, counted from 0, becomes 7 w + 5 modulo the number of words."""
        moved = sources[:, self.aligned(sources.shape[1])]
        return (7 * (moved - FIRST) + 5) % WORDS + FIRST


MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "LSTM, source forwards": ("bottleneck", {"hidden_size": 96, "embedding": 32, "reverse_source": False}),
    "LSTM, source backwards": ("bottleneck", {"hidden_size": 96, "embedding": 32, "reverse_source": True}),
    "RNNsearch": (
        "rnnsearch",
        {"hidden_size": 48, "embedding": 32, "maxout": 32, "options": {"intermediate_size": 32}},
    ),
    "Transformer": (
        "transformer",
        {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "intermediate_size": 96, "norm_place": "pre"},
    ),
}


def framed(targets: Tensor) -> tuple[Tensor, Tensor]:
    """The decoder's inputs (begin token, words) and targets (words, end token)."""
    edge = torch.ones_like(targets[:, :1])
    return torch.cat([BEGIN * edge, targets], 1), torch.cat([targets, END * edge], 1)


def trained(name: str, language: Language, seed: int, steps: int) -> Any:
    """Train a model on sentences of 1 to `TRAINED` words; all sentences of a batch have the same length."""
    family, fields = MODELS[name]
    model, generator = build(family, seed, **SIZES, **fields), torch.Generator().manual_seed(1000 + seed)

    def loss(step: int) -> Tensor:
        length = 1 + step * 5 % TRAINED
        sources = language.sources(BATCH, length, generator)
        read, wanted = framed(language.targets(sources))
        return next_token_loss(model(read, sources), wanted)

    learn(model, loss, steps, rate=6e-3, warmup=20)
    return model


@torch.inference_mode()
def right(model: Any, language: Language, length: int) -> float:
    """The fraction of words that are correct, position by position, in greedy translations of new sentences."""
    sources = language.sources(TESTS, length, torch.Generator().manual_seed(length))
    said = torch.full((TESTS, 1), BEGIN)
    for _ in range(length):
        said = torch.cat([said, model(said, sources)[:, -1:].argmax(-1)], 1)
    return (said[:, 1:] == language.targets(sources)).float().mean().item()


def measured(names: Sequence[str], language: Language, settings: Settings) -> dict[str, list[dict[int, float]]]:
    """The fraction of correct words by sentence length, for each model and seed."""
    found: dict[str, list[dict[int, float]]] = {name: [] for name in names}
    for seed in settings.runs:
        for name in names:
            model = trained(name, language, seed, settings.steps(STEPS))
            found[name].append({length: right(model, language, length) for length in LENGTHS})
            settings.say(f"seed {seed}, {name} ({weights_of(model)} weights): {found[name][-1]}")
    return found


def middle(runs: Sequence[Mapping[int, float]], length: int) -> float:
    """The median over the seeds for sentences of this length."""
    return sorted(run[length] for run in runs)[len(runs) // 2]


def table(found: Mapping[str, Sequence[Mapping[int, float]]]) -> list[dict[str, Any]]:
    """The result table: one row for each model, one column for each sentence length."""
    return [
        {"model": name} | {f"{length} words": spread([run[length] for run in runs]) for length in LENGTHS}
        for name, runs in found.items()
    ]


def curves(title: str, found: Mapping[str, Sequence[Mapping[int, float]]]) -> Curves:
    """The curves of the medians by sentence length."""
    lines = {name: [(float(n), middle(runs, n)) for n in LENGTHS] for name, runs in found.items()}
    return Curves(title=title, x="words of the sentence", y="share of right words", lines=lines)


def fixed_vector(settings: Settings) -> Result:
    """CL-4: an encoder-decoder with one fixed vector for a sentence, against RNNsearch, which attends to all of it."""
    found = measured(("LSTM, source forwards", "RNNsearch"), Language(exchanged=True), settings)
    vector, search = found["LSTM, source forwards"], found["RNNsearch"]
    verdict, because = judged(
        all_of={
            f"the fixed vector falls from 4 to {TRAINED} words": middle(vector, TRAINED) < 0.7 * middle(vector, 4),
            "RNNsearch is ahead at every length": all(middle(search, n) > middle(vector, n) for n in LENGTHS),
            f"RNNsearch stays to {TRAINED} words, the longest it was trained on": middle(search, TRAINED)
            > 0.85 * middle(search, 4),
            f"RNNsearch stays beyond that, at {LENGTHS[-1]}": middle(search, LENGTHS[-1]) > 0.85 * middle(search, 4),
        }
    )
    return Result(
        rows=table(found), verdict=verdict, because=because, curves=curves("One vector, or all of them", found)
    )


def reversed_source(settings: Settings) -> Result:
    """CL-2: the effect of reversing the source sentence."""
    names = ("LSTM, source forwards", "LSTM, source backwards")
    rows: list[dict[str, Any]] = []
    statements: dict[str, bool] = {}
    lines: dict[str, Points] = {}
    for task, language in (
        ("order stays", Language(exchanged=False)),
        ("neighbours exchanged", Language(exchanged=True)),
    ):
        found = measured(names, language, settings)
        rows += [{"task": task} | row for row in table(found)]
        scores = [mean(middle(found[name], length) for length in LENGTHS) for name in names]
        statements[f"backwards is better where {task}"] = scores[1] > scores[0] + 0.02
        lines |= {f"{name}, {task}": [(float(n), middle(found[name], n)) for n in LENGTHS] for name in names}
    verdict, because = judged(all_of=statements)
    shown = Curves(title="Source backwards", x="words of the sentence", y="share of right words", lines=lines)
    return Result(rows=rows, verdict=verdict, because=because, curves=shown)


def long_sentences(settings: Settings) -> Result:
    """CL-3: whether an LSTM with reversed source sentences gets worse on long sentences."""
    found = measured(("LSTM, source backwards",), Language(exchanged=False), settings)
    runs = found["LSTM, source backwards"]
    verdict, because = judged(
        all_of={
            f"no trouble at {length} words (0.85 of what it has at 4)": middle(runs, length) > 0.85 * middle(runs, 4)
            for length in (8, TRAINED, LENGTHS[-1])
        }
    )
    return Result(
        rows=table(found), verdict=verdict, because=because, curves=curves("An LSTM, source backwards", found)
    )


def transformer(settings: Settings) -> Result:
    """CL-8, at small scale: a Transformer against an LSTM and RNNsearch, with equal steps and batch sizes."""
    found = measured(("LSTM, source forwards", "RNNsearch", "Transformer"), Language(exchanged=True), settings)
    best = {name: middle(runs, TRAINED) for name, runs in found.items()}
    verdict, because = judged(
        all_of={
            f"the Transformer is ahead of the LSTM at {TRAINED} words": best["Transformer"]
            > best["LSTM, source forwards"] + 0.05,
            "and of RNNsearch, from as many sentences": best["Transformer"] > best["RNNsearch"] + 0.02,
        }
    )
    return Result(
        rows=table(found), verdict=verdict, because=because, curves=curves("Transformer, RNNsearch, LSTM", found)
    )


@torch.inference_mode()
def found_alignments(model: Any, language: Language, length: int, sentences: int = 30) -> tuple[float, float]:
    """How often the most attended source word is the aligned one, and the mean attention weight of the aligned word."""
    sources = language.sources(sentences, length, torch.Generator().manual_seed(77))
    read, _ = framed(language.targets(sources))
    gold, hits, weight = torch.tensor(language.aligned(length)), [], []
    for row in range(sentences):
        weights = model.attention_maps(read[row], [0], sources[row])[0].mean(0)[:length, :length]
        hits.append((weights.argmax(-1) == gold).float().mean().item())
        weight.append(weights[torch.arange(length), gold].mean().item())
    return mean(hits), mean(weight)


def alignments(settings: Settings) -> Result:
    """CL-5: the attention weights of RNNsearch, compared with the known alignment."""
    language, rows, shares, even = Language(exchanged=True), [], [], list[float]()
    for seed in settings.runs:
        model = trained("RNNsearch", language, seed, settings.steps(STEPS))
        for length in (6, TRAINED):
            hits, weight = found_alignments(model, language, length)
            said = right(model, language, length)
            rows.append(
                {
                    "seed": seed,
                    "words": length,
                    "most attended word is the translated one": f"{hits:.2f}",
                    "weight on it": f"{weight:.2f}",
                    "words right": f"{said:.2f}",
                }
            )
            shares.append((hits, said))
            even.append(weight * length)
        settings.say(f"seed {seed}: {rows[-1]}")
    learned = [hits for hits, said in shares if said > 0.9]
    verdict, because = judged(
        all_of={
            "the translated word has more than 1.5 times the mean weight, in every run": min(even) > 1.5,
            "where translation is right (above 0.9), more than nine in ten of the most attended words are": bool(
                learned
            )
            and min(learned) > 0.9,
            "every run found the alignment": min(hits for hits, _ in shares) > 0.9,
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)
