"""Claims 7, 19, 20 and 39: the purpose of keys, values and heads, on texts in which a word must be retrieved."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attn_models.attention import recorded_weights
from attn_models.conversion import METHODS, HeadMap, fewer_heads
from attn_models.evaluation import text_loss
from torch import Tensor, nn

from attn_experiments.report import Curves, Result, Settings, judged, spread
from attn_experiments.small_models import build, learn, mean, next_token_loss, weights_of

NAMES, MEANINGS, ASKED = 6, 4, 6


def dictionary(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts that pair names with random meanings, one token for a pair, and then ask for the meanings of two names.

    Returns tokens [count, NAMES + ASKED] and answers [count, ASKED], in which both meanings are one token.
    """
    names = torch.rand(count, NAMES, generator=generator).argsort(1)
    meanings = torch.randint(MEANINGS, (count, NAMES), generator=generator)
    of_name = torch.zeros_like(meanings).scatter(1, names, meanings)
    one, other = (torch.randint(NAMES, (count, ASKED), generator=generator) for _ in range(2))
    tokens = torch.cat([names * MEANINGS + meanings, NAMES * MEANINGS + one * NAMES + other], dim=1)
    return tokens, of_name.gather(1, one) * MEANINGS + of_name.gather(1, other)


def lookup_model(heads: int, seed: int) -> Any:
    """A decoder with one block of width 16; its number of parameters does not depend on the number of heads."""
    return build(
        "decoder",
        seed,
        vocab_size=NAMES * (MEANINGS + NAMES),
        max_seq_len=NAMES + ASKED,
        hidden_size=16,
        num_layers=1,
        num_heads=heads,
        positions="none",
        tie_word_embeddings=False,
    )


@torch.inference_mode()
def answered(model: Any) -> float:
    """The fraction of questions in new texts that are answered correctly."""
    tokens, wanted = dictionary(500, torch.Generator().manual_seed(99))
    return float((model(tokens)[:, NAMES:].argmax(-1) == wanted).float().mean())


def two_heads(settings: Settings) -> Result:
    """CL-19: retrieval of two items at each position, with one head and with two heads of half its size."""
    rows, lines = [], {}
    shares: dict[int, list[list[float]]] = {1: [], 2: []}
    for heads, seed in ((heads, seed) for seed in settings.runs for heads in shares):
        model, generator = lookup_model(heads, seed), torch.Generator().manual_seed(seed)

        def loss(_step: int, model: Any = model, generator: torch.Generator = generator) -> Tensor:
            tokens, wanted = dictionary(32, generator)
            return next_token_loss(model(tokens)[:, NAMES:], wanted)

        course = []
        for _ in range(3):
            learn(model, loss, settings.steps(300), rate=5e-3)
            course.append(answered(model))
        shares[heads].append(course)
        settings.say(f"seed {seed}, {heads} heads, {weights_of(model)} weights: {course}")
    for heads, courses in shares.items():
        cells = {f"{300 * (part + 1)} steps": spread([course[part] for course in courses]) for part in range(3)}
        rows.append({"heads": heads} | cells)
        middle = [sorted(course[part] for course in courses)[len(courses) // 2] for part in range(3)]
        lines[f"{heads} heads"] = [(300.0 * (part + 1), share) for part, share in enumerate(middle)]
    best = {heads: [course[-1] for course in courses] for heads, courses in shares.items()}
    verdict, because = judged(
        all_of={
            "two heads answer more than one, in every run": all(b > a for a, b in zip(*best.values(), strict=True)),
            f"one head finds one thing alone (below 0.5; 1/{MEANINGS} is what guessing the other gives)": max(best[1])
            < 0.5,
        }
    )
    shown = Curves(title="Two things to be found", x="steps", y="share of right answers", lines=lines)
    return Result(rows=rows, verdict=verdict, because=because, curves=shown)


def repeats(count: int, seed: int) -> Tensor:
    """Tokens [count, 18]: six random symbols out of eight, repeated three times."""
    drawn = random.Random(seed)
    rows = [[drawn.randrange(8) for _ in range(6)] for _ in range(count)]
    return torch.tensor([row * 3 for row in rows])


def repeating(model: Any, steps: int, seed: int) -> None:
    """Train a decoder to continue repeating texts; see `repeats`."""
    data = repeats(32 * steps, seed).view(steps, 32, -1)
    learn(model, lambda step: next_token_loss(model(data[step])[:, :-1], data[step][:, 1:]), steps, rate=4e-3)


def copier(seed: int) -> Any:
    """A decoder of two blocks with four heads each, for repeating texts."""
    sizes = {"vocab_size": 8, "max_seq_len": 18, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    return build("decoder", seed, **sizes)


def pooled_heads(settings: Settings) -> Result:
    """CL-39: four key/value heads reduced to two by mean pooling, first heads or random weights, then trained again for
    a quarter of the steps.
    """
    held_out = repeats(50, 12345).flatten().tolist()
    lost: dict[str, list[float]] = {method: [] for method in METHODS}
    left: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in settings.runs:
        model = copier(seed)
        repeating(model, settings.steps(160), 1000 + seed)
        before = text_loss(model, held_out, 18)
        for method in METHODS:
            fewer, _ = fewer_heads(model, HeadMap((0, 0, 1, 1)), method, seed=seed)
            lost[method].append(text_loss(fewer, held_out, 18) - before)
            repeating(fewer, settings.steps(40), 2000 + seed)
            left[method].append(text_loss(fewer, held_out, 18) - before)
        settings.say(f"seed {seed}: " + ", ".join(f"{m} {lost[m][-1]:.2f} → {left[m][-1]:.2f}" for m in METHODS))
    rows = [
        {"heads made as": m, "loss added at once": spread(lost[m]), "after a quarter more": spread(left[m])}
        for m in METHODS
    ]
    runs = range(settings.seeds)
    verdict, because = judged(
        all_of={
            "fresh heads lose most, in every run": all(
                lost["random"][r] > max(lost["mean"][r], lost["first"][r]) for r in runs
            ),
            "means lose less than first heads, in every run": all(lost["mean"][r] < lost["first"][r] for r in runs),
            "training closes three quarters of what means lost, in every run": all(
                left["mean"][r] < lost["mean"][r] / 4 for r in runs
            ),
            "and of what fresh ones lost": all(left["random"][r] < lost["random"][r] / 4 for r in runs),
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)


def tied(model: Any, one: str, other: str) -> Any:
    """Share the weights of two projections of each layer, and return the decoder."""
    for block in model.blocks:
        setattr(block.attention, other, getattr(block.attention, one))
    return model


KINDS: dict[str, Callable[[Any], Any]] = {
    "all separate": lambda model: model,
    "one for key and value": lambda model: tied(model, "key", "value"),
    "one for query and key": lambda model: tied(model, "query", "key"),
}


def english(count: int, seed: int) -> Tensor:
    """Windows [count, 64] of characters from Python's help texts, in English; all rare characters are one token."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    common = [letter for letter, _ in Counter(text).most_common(63)]
    place = {letter: index for index, letter in enumerate(common)}
    drawn = random.Random(seed)
    starts = [drawn.randrange(len(text) - 64) for _ in range(count)]
    return torch.tensor([[place.get(letter, 63) for letter in text[s : s + 64]] for s in starts])


def writer(seed: int) -> Any:
    """A character-level decoder for English text."""
    sizes = {"vocab_size": 64, "max_seq_len": 64, "hidden_size": 48, "num_layers": 2, "num_heads": 4}
    return build("decoder", seed, **sizes)


def writing(model: Any, steps: int, seed: int) -> None:
    """Train a decoder on English text; see `english`."""
    data = english(16 * steps, seed).view(steps, 16, -1)
    learn(model, lambda step: next_token_loss(model(data[step])[:, :-1], data[step][:, 1:]), steps, rate=4e-3)


def separate_values(settings: Settings) -> Result:
    """CL-7: language models with shared weights for keys and values, against ones with shared queries and keys."""
    rows, statements = [], {}
    for task, (make, teach, held_out, length) in {
        "what repeats": (copier, repeating, repeats(100, 12345), 18),
        "English": (writer, writing, english(60, 12345), 64),
    }.items():
        losses: dict[str, list[float]] = {name: [] for name in KINDS}
        weights = {}
        for seed in settings.runs:
            for name, kind in KINDS.items():
                model = kind(make(seed))
                weights[name] = weights_of(model)
                teach(model, settings.steps(300), 1000 + seed)
                losses[name].append(text_loss(model, held_out.flatten().tolist(), length))
            settings.say(f"{task}, seed {seed}: { ({name: round(found[-1], 3) for name, found in losses.items()}) }")
        rows += [
            {"text": task, "projections": n, "weights": weights[n], "validation loss": spread(found, 3)}
            for n, found in losses.items()
        ]
        separate, shared, control = (sorted(losses[name])[settings.seeds // 2] for name in KINDS)
        statements[f"{task}: a value of its own lowers the loss by more than 0.01"] = separate < shared - 0.01
        statements[f"{task}: sharing it costs more than sharing the query's"] = shared > control + 0.01
    verdict, because = judged(all_of=statements)
    return Result(rows=rows, verdict=verdict, because=because)


ANIMATE = ("animal", "dog", "child", "horse", "cat", "driver")
PLACES = ("street", "river", "road", "bridge", "field", "lane")
OF_ANIMATE, OF_PLACES = ("tired", "afraid", "hungry"), ("wide", "long", "flooded")
FRAME = "the {} did not cross the {} because it was too {}"
VOCABULARY = sorted({*FRAME.replace("{}", "").split(), *ANIMATE, *PLACES, *OF_ANIMATE, *OF_PLACES})
IT = FRAME.split().index("it")


def sentences(count: int, drawn: random.Random, *, new: bool) -> tuple[list[list[str]], list[str]]:
    """Random sentences, and the noun that `it` refers to in each; either noun may come first.

    With `new`, the pairs of nouns are disjoint from those without.
    """
    found: list[list[str]] = []
    meant: list[str] = []
    while len(found) < count:
        animate, place = drawn.randrange(len(ANIMATE)), drawn.randrange(len(PLACES))
        if (((animate + place) % 3) == 0) != new:
            continue
        tired = drawn.random() < 0.5
        nouns = [ANIMATE[animate], PLACES[place]]
        meant.append(nouns[0 if tired else 1])
        if drawn.random() < 0.5:
            nouns.reverse()
        adjective = drawn.choice(OF_ANIMATE if tired else OF_PLACES)
        found.append(FRAME.format(*nouns, adjective).split())
    return found, meant


def ids(words: Sequence[Sequence[str]]) -> Tensor:
    """The token ids of sentences, which must have the same length."""
    return torch.tensor([[VOCABULARY.index(word) for word in sentence] for sentence in words])


def referent(settings: Settings) -> Result:
    """CL-20: "the animal did not cross the street because it was too tired", or "too wide": what `it` attends to."""
    rows, verdicts = [], []
    for seed in settings.runs:
        drawn = random.Random(seed)
        model = reader(seed)

        def loss(_step: int, model: Any = model, drawn: random.Random = drawn) -> Tensor:
            texts, meant = sentences(32, drawn, new=False)
            return nn.functional.cross_entropy(model(ids(texts))[:, IT], ids([meant])[0])

        learn(model, loss, settings.steps(400), rate=2e-3, warmup=40)
        texts, meant = sentences(200, random.Random(99), new=True)
        with torch.no_grad(), recorded_weights(model) as maps:
            right = (model(ids(texts))[:, IT].argmax(-1) == ids([meant])[0]).float().mean().item()
        looks = looked(maps[-1][:, :, IT], texts, meant)
        rows.append(
            {"seed": seed, "named right, new pairs": f"{right:.2f}"} | {n: f"{v:.2f}" for n, v in looks.items()}
        )
        verdicts.append((right, looks))
        settings.say(str(rows[-1]))
    verdict, because = judged(
        all_of={
            "it is resolved in pairs of nouns never seen together (above 0.9)": min(r for r, _ in verdicts) > 0.9,
            "a head of the last layer looks from `it` at the noun meant, more than twice as much as at the other": all(
                looks["best head, on the noun meant"] > 2 * looks["best head, on the other"] for _, looks in verdicts
            ),
            "so does the mean of its heads": all(
                looks["all heads, on the noun meant"] > 2 * looks["all heads, on the other"] for _, looks in verdicts
            ),
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)


def reader(seed: int) -> Any:
    """An encoder that predicts a word at every position."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64, "max_seq_len": 12}
    encoder = {"vocab_size": len(VOCABULARY), **sizes}
    return build("masked_lm", seed, **encoder)


def looked(weights: Tensor, texts: Sequence[Sequence[str]], meant: Sequence[str]) -> dict[str, float]:
    """The mean attention of `it` to both nouns, for the head that separates them best and over all heads.

    `weights` are those of the query `it`, [batch, heads, key].
    """
    nouns = {*ANIMATE, *PLACES}
    at = [text.index(noun) for text, noun in zip(texts, meant, strict=True)]
    other = [
        next(k for k, word in enumerate(text) if word in nouns and word != noun)
        for text, noun in zip(texts, meant, strict=True)
    ]
    rows = torch.arange(len(texts))
    right, wrong = weights[rows, :, at].mean(0), weights[rows, :, other].mean(0)
    best = int((right - wrong).argmax())
    return {
        "best head, on the noun meant": float(right[best]),
        "best head, on the other": float(wrong[best]),
        "all heads, on the noun meant": mean(right.tolist()),
        "all heads, on the other": mean(wrong.tolist()),
    }
