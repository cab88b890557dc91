"""Small applications of attention that courses name, on data that rules make, so that the answers are known.

`context`: translation of "it ..." into a language with three genders, alone and with the sentence before, which names
what `it` is. Nouns and verbs of the test were never seen together.

`word-order`: a masked language model reads a sentence in the active and the same in the passive. Linear probes of the
mean of its states, of its mean embedding, and of an untrained model name the voice, and who did it, of new sentences.

`pixels`: a vision Transformer whose patches are single pixels names digits of 8 x 8.

`pathfinder`: two paths in an image of 6 x 6 pixels; do the two marked ends belong to one (Linsley et al. 2018, as in
long-range arena, small)?

`series`: a decoder of values in 32 steps continues a sum of two sines with noise; its error against that of repeating
the last value, and of the mean of the series.

    python benchmarks/applications.py context --seeds 3
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attn_experiments.small_models import build, learn, next_token_loss
from report import write_report
from torch import Tensor
from torch.nn import functional

Row = dict[str, Any]

# -- context ----------------------------------------------------------------------------------------------------------

NOUNS = {
    "dog": "er",
    "cook": "er",
    "cat": "sie",
    "bird": "er",
    "clock": "sie",
    "child": "es",
    "horse": "es",
    "cow": "sie",
}
VERBS = {"sleeps": "schläft", "runs": "läuft", "eats": "frisst", "falls": "fällt", "waits": "wartet", "sings": "singt"}
BEFORE = ("the {} is here .", "we saw the {} .", "there was a {} .")


def vocabulary(texts: Sequence[str]) -> dict[str, int]:
    """The number of each word, from 3: 0 is padding, 1 begins and 2 ends a target."""
    return {word: place for place, word in enumerate(sorted({word for text in texts for word in text.split()}), 3)}


SOURCE = vocabulary([*(text.format(noun) for text in BEFORE for noun in NOUNS), "it", *VERBS])
TARGET = vocabulary([*NOUNS.values(), *VERBS.values()])
BACK = {number: word for word, number in TARGET.items()}


def translations(count: int, drawn: random.Random, *, context: bool, new: bool) -> tuple[Tensor, Tensor, list[int]]:
    """Sources [count, words], padded in front, targets [count, 4], and the place of the noun in each source."""
    sources, targets, places = [], [], []
    while len(sources) < count:
        noun, verb = drawn.choice(list(NOUNS)), drawn.choice(list(VERBS))
        if ((list(NOUNS).index(noun) + list(VERBS).index(verb)) % 4 == 0) != new:
            continue
        before = drawn.choice(BEFORE).format(noun).split() if context else []
        words = [*before, "it", verb]
        padding = (7 if context else 2) - len(words)
        sources.append([0] * padding + [SOURCE[word] for word in words])
        targets.append([1, TARGET[NOUNS[noun]], TARGET[VERBS[verb]], 2])
        places.append(padding + words.index(noun) if context else 0)
    return torch.tensor(sources), torch.tensor(targets), places


def context(seeds: int, steps: int) -> Iterator[Row]:
    """One row for each seed, without and with the sentence before."""
    for seed, told in product(range(seeds), (False, True)):
        sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64, "norm_place": "pre"}
        known = {"vocab_size": max(len(SOURCE), len(TARGET)) + 3, "max_seq_len": 4, "max_encoder_len": 8}
        model = build("transformer", seed, **sizes, **known)
        draw = partial(translations, 32, random.Random(seed), context=told, new=False)

        def loss(_: int, model: Any = model, draw: Any = draw) -> Tensor:
            sources, targets, _ = draw()
            return next_token_loss(model(targets[:, :-1], sources), targets[:, 1:])

        learn(model, loss, steps, rate=3e-3, warmup=30)
        sources, targets, places = translations(300, random.Random(99), context=told, new=True)
        with torch.inference_mode():
            said = model(targets[:, :-1], sources).argmax(-1)
        row: Row = {"seed": seed, "sentence before": told}
        row["pronoun right"] = (said[:, 0] == targets[:, 1]).float().mean().item()
        row["verb right"] = (said[:, 1] == targets[:, 2]).float().mean().item()
        if told:
            maps = [model.attention_maps(targets[n, :-1], [1], sources[n])[1][:, 0, places[n]] for n in range(50)]
            row["weight on the noun, best head"] = torch.stack(maps).mean(0).max().item()
        yield row


# -- word order -------------------------------------------------------------------------------------------------------

ACTORS = ("dog", "cat", "boy", "girl", "man", "woman", "horse", "bird")
DEEDS = ("chased", "saw", "heard", "followed")
WORDS = {w: n for n, w in enumerate(["<mask>", "the", "was", "by", ".", *DEEDS, *ACTORS])}
MASK = 0


def voices(count: int, drawn: random.Random, *, new: bool) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Sentences in the active, the same in the passive, and who did it."""
    active, passive, who = [], [], []
    while len(active) < count:
        actor, other = drawn.sample(ACTORS, 2)
        if ((ACTORS.index(actor) * 3 + ACTORS.index(other)) % 4 == 0) != new:
            continue
        deed = drawn.choice(DEEDS)
        active.append(f"the {actor} {deed} the {other} .".split())
        passive.append(f"the {other} was {deed} by the {actor} .".split())
        who.append(actor)
    return active, passive, who


def numbers(texts: Sequence[Sequence[str]]) -> Tensor:
    """The tokens [texts, words] of texts, which are as long as each other."""
    return torch.tensor([[WORDS[word] for word in text] for text in texts])


def probed(rows: Callable[[Tensor], Tensor], label: str) -> float:
    """The accuracy on new sentences of a linear classifier of `rows`, fitted to others by least squares."""
    found = []
    for new, count in ((False, 600), (True, 200)):
        active, passive, who = voices(count, random.Random(7 + new), new=new)
        x = torch.cat([rows(numbers(active)), rows(numbers(passive))])
        kinds = [0] * count + [1] * count if label == "voice" else [ACTORS.index(name) for name in who] * 2
        found.append((torch.cat([x, torch.ones(len(x), 1)], 1), torch.tensor(kinds)))
    (x, y), (new_x, new_y) = found
    fitted = torch.linalg.lstsq(x.T @ x + 1e-3 * torch.eye(x.shape[1]), x.T @ functional.one_hot(y).float()).solution
    return ((new_x @ fitted).argmax(-1) == new_y).float().mean().item()


def word_order(seeds: int, steps: int) -> Iterator[Row]:
    """One row for each seed and representation."""
    sizes = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "intermediate_size": 96, "max_seq_len": 16}
    for seed in range(seeds):
        model, drawn = build("masked_lm", seed, vocab_size=len(WORDS), **sizes), random.Random(seed)
        untrained = build("masked_lm", seed, vocab_size=len(WORDS), **sizes).eval()

        def loss(step: int, model: Any = model, drawn: random.Random = drawn) -> Tensor:
            active, passive, _ = voices(32, drawn, new=False)
            both = (active, passive) if step % 2 else (passive, active)
            tokens = numbers([one + two for one, two in zip(*both, strict=True)])
            hidden = torch.rand(tokens.shape) < 0.25
            logits = model(tokens.masked_fill(hidden, MASK))
            return functional.cross_entropy(logits[hidden], tokens[hidden])

        learn(model, loss, steps, rate=3e-3, warmup=50)
        kinds: dict[str, Callable[[Tensor], Tensor]] = {
            "states, trained": lambda tokens, model=model: model.encoder(tokens).mean(1),
            "states, untrained": lambda tokens, untrained=untrained: untrained.encoder(tokens).mean(1),
            "embeddings": lambda tokens, model=model: model.encoder.embedding(tokens).mean(1),
        }
        for name, rows in kinds.items():
            with torch.inference_mode():
                yield {"seed": seed, "mean of": name} | {what: probed(rows, what) for what in ("voice", "who did it")}


# -- images -----------------------------------------------------------------------------------------------------------


def images_learned(images: Tensor, labels: Tensor, seed: int, steps: int, patch: int, mechanism: str) -> float:
    """The accuracy on the last fifth of images [count, 1, side, side] of a vision Transformer trained on the others."""
    sizes = {"hidden_size": 48, "num_layers": 3, "num_heads": 4, "intermediate_size": 96, "mechanism": mechanism}
    shape = {"image": images.shape[-1], "channels": 1, "patch": patch, "classes": int(labels.max()) + 1}
    model, count = build("vit", seed, **sizes, **shape), len(images) * 4 // 5
    generator = torch.Generator().manual_seed(seed)

    def loss(_: int) -> Tensor:
        chosen = torch.randint(count, (64,), generator=generator)
        return functional.cross_entropy(model(images[chosen]), labels[chosen])

    learn(model, loss, steps, rate=2e-3, warmup=100)
    with torch.inference_mode():
        return (model(images[count:]).argmax(-1) == labels[count:]).float().mean().item()


def pixels(seeds: int, steps: int) -> Iterator[Row]:
    """One row for each seed and mechanism: digits as 64 tokens, a pixel each."""
    from attn_schema.training import DataConfig
    from attn_train.data.images import load_images
    from attn_train.tasks.image_classification import normalize_pixels

    data = load_images(DataConfig(dataset="digits", validation_fraction=0.2))
    images = normalize_pixels(torch.cat([data.training.images, data.validation.images]))
    labels = torch.cat([data.training.labels, data.validation.labels])
    for seed, mechanism in product(range(seeds), ("mha", "linear")):
        found = images_learned(images, labels, seed, steps, 1, mechanism)
        yield {"seed": seed, "mechanism": mechanism, "tokens": 65, "accuracy": found}


SIDE, LENGTH = 6, 4


def walk(drawn: random.Random, taken: set[tuple[int, int]], length: int) -> list[tuple[int, int]] | None:
    """A path of so many pixels that touches neither itself nor what is taken; None if none was found."""
    path = [(drawn.randrange(SIDE), drawn.randrange(SIDE))]
    for _ in range(length):
        if len(path) == length:
            break
        row, column = path[-1]
        steps = [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        drawn.shuffle(steps)
        near = {
            (r + a, c + b) for r, c in taken | set(path[:-1]) for a, b in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))
        }
        free = [step for step in steps if step not in near and min(step) >= 0 and max(step) < SIDE]
        if not free or path[0] in {(r + a, c + b) for r, c in taken for a in (-1, 0, 1) for b in (-1, 0, 1)}:
            return None
        path.append(free[0])
    return path


def paths(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [count, 1, SIDE, SIDE] of two paths with two marked ends, and whether one path has both."""
    drawn, images, labels = random.Random(seed), [], []
    while len(images) < count:
        one = walk(drawn, set(), LENGTH)
        two = walk(drawn, set(one), LENGTH) if one else None
        if one is None or two is None:
            continue
        label = drawn.randrange(2)
        image = torch.full((1, SIDE, SIDE), -1.0)
        for place in (*one, *two):
            image[0][place] = 0.0
        for place in (one[0], one[-1] if label else two[drawn.choice((0, -1))]):
            image[0][place] = 1.0
        images.append(image)
        labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def pathfinder(seeds: int, steps: int) -> Iterator[Row]:
    """One row for each seed: paths as 9 tokens, 2 x 2 pixels each. Single pixels are not learned in 2000 steps."""
    images, labels = paths(20_000, 0)
    for seed in range(seeds):
        yield {"seed": seed, "tokens": 10, "accuracy": images_learned(images, labels, seed, steps, 2, "mha")}


# -- series -----------------------------------------------------------------------------------------------------------

LEVELS, SEEN = 32, 48


def waves(count: int, generator: np.random.Generator) -> Tensor:
    """Series [count, SEEN + 1] of the levels 0 to 31: two sines of random periods and phases, and a little noise."""
    time = np.arange(SEEN + 1)
    period, phase = generator.uniform(6, 24, (count, 2, 1)), generator.uniform(0, 2 * np.pi, (count, 2, 1))
    values = np.sin(2 * np.pi * time / period + phase).sum(1) + generator.normal(0, 0.05, (count, SEEN + 1))
    return torch.tensor(np.clip((values / 4.4 + 0.5) * LEVELS, 0, LEVELS - 1).astype(np.int64))


def series(seeds: int, steps: int) -> Iterator[Row]:
    """One row for each seed: mean absolute errors of the last value, in levels."""
    for seed in range(seeds):
        sizes = {"vocab_size": LEVELS, "max_seq_len": SEEN, "hidden_size": 48, "num_layers": 2, "num_heads": 4}
        model, generator = build("decoder", seed, **sizes), np.random.default_rng(seed)

        def loss(_: int, model: Any = model, generator: np.random.Generator = generator) -> Tensor:
            given = waves(32, generator)
            return next_token_loss(model(given[:, :-1]), given[:, 1:])

        learn(model, loss, steps, rate=3e-3, warmup=50)
        given = waves(500, np.random.default_rng(12345))
        past, wanted = given[:, :-1].float(), given[:, -1].float()
        with torch.inference_mode():
            expected = model(given[:, :-1])[:, -1].softmax(-1) @ torch.arange(float(LEVELS))
        guesses = {"decoder": expected, "last value": past[:, -1], "mean": past.mean(1)}
        yield {"seed": seed} | {name: (guess - wanted).abs().mean().item() for name, guess in guesses.items()}


APPLICATIONS = {
    "context": (context, 300),
    "word-order": (word_order, 1200),
    "pixels": (pixels, 600),
    "pathfinder": (pathfinder, 3000),
    "series": (series, 500),
}


def main() -> None:
    """Run one of the applications."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("application", choices=APPLICATIONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    answer, usual = APPLICATIONS[args.application]
    steps = args.steps or usual
    facts = {"application": args.application, "steps": steps, "seeds": args.seeds, "torch": torch.__version__}
    write_report(f"application-{args.application}", facts, partial(answer, args.seeds, steps)(), args.out)


if __name__ == "__main__":
    main()
