"""CL-58: is attention an explanation? The tests of both sides of the debate, on texts with a known deciding word.

A text consists of the word ids 2 to 61, of which 6 are good, 6 are bad and the others are neutral. The first good or
bad word decides the label, whatever follows. One label in ten is wrong in training, so that the model stays uncertain.
The model is a bidirectional GRU, one attention with Bahdanau's score (`alignment`) from a learned query, and a linear
classifier: that of Jain and Wallace 2019 (arXiv 1902.10186). The tests are small versions of theirs, of those that
Wiegreffe and Pinter 2019 (arXiv 1908.04626) propose in response, and of the combinatorial shortcut of Bai et al. 2021
(arXiv 2006.05656).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attn_experiments.attribution.comparison import (
    adversarial_weights,
    jensen_shannon,
    kendall_tau,
    permuted_change,
    total_variation,
)
from attn_experiments.attribution.methods import exact_shapley, integrated_gradients, replaced_embeddings
from attn_experiments.report import Result, Settings, judged
from attn_experiments.small_models import layer, learn, mean

WORDS, TOKENS, GOOD, BAD = 62, 10, range(2, 8), range(8, 14)
WIDTH, STEPS, TESTED = 24, 300, 40
DOUBT = 0.1
"""The fraction of wrong labels in training."""
MOVED = 0.01
"""The maximum change of the output by adversarial weights, in total variation (Jain and Wallace, section 4.2)."""


def texts(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens [count, TOKENS] and their labels [count]; every text has at least one good or bad word."""
    tokens = torch.randint(14, WORDS, (4 * count, TOKENS), generator=generator)
    telling = torch.rand(tokens.shape, generator=generator) < 0.35
    tokens = torch.where(telling, torch.randint(2, 14, tokens.shape, generator=generator), tokens)
    tokens = tokens[telling.any(1)][:count]
    return tokens, (said(tokens).gather(1, deciding(tokens)[:, None])[:, 0] > 0).long()


def deciding(tokens: Tensor) -> Tensor:
    """The position [batch] of the deciding word: the first good or bad one."""
    return (said(tokens) != 0).int().argmax(-1)


def said(tokens: Tensor) -> Tensor:
    """The polarity of each word: 1 for good, -1 for bad, 0 for neutral."""
    good, bad = ((tokens >= words.start) & (tokens < words.stop) for words in (GOOD, BAD))
    return good.long() - bad.long()


class AttentionClassifier(nn.Module):
    """A classifier: embedding, optional bidirectional GRU, one attention layer with a learned query, two classes.

    `contextual` False omits the GRU; with `silent` True the values are learned position vectors, so that the words only
    affect the attention weights.
    """

    def __init__(self, *, contextual: bool = True, silent: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True) if contextual else None
        self.ask = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.attention = layer("alignment", hidden_size=WIDTH, num_heads=1, causal=False)
        self.classes = nn.Linear(WIDTH, 2)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH)) if silent else None

    def read(self, tokens: Tensor) -> Tensor:
        """The hidden states [batch, tokens, width] that are attended to."""
        rows: Tensor = self.embedding(tokens)
        return rows if self.reader is None else self.reader(rows)[0]

    def weights(self, rows: Tensor) -> Tensor:
        """The attention weights [batch, tokens]."""
        found: Tensor = self.attention.weights(self.ask.expand(len(rows), -1, -1), rows)[:, 0, 0]
        return found

    def classify(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Logits [batch, 2] with the given attention weights; with `silent`, the values are the position vectors."""
        values = rows if self.places is None else self.places.expand(len(rows), -1, -1)
        summed = torch.einsum("bk,bkd->bd", weights, self.attention.value(values))
        logits: Tensor = self.classes(self.attention.output(summed))
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, 2]."""
        rows = self.read(tokens)
        return self.classify(rows, self.weights(rows))


class UniformClassifier(AttentionClassifier):
    """A classifier with uniform weights, to test whether attention is needed (Wiegreffe and Pinter, section 3.2)."""

    def weights(self, rows: Tensor) -> Tensor:
        """Uniform weights, 1 / tokens each."""
        return torch.full(rows.shape[:2], 1 / rows.shape[1])


class GuidedClassifier(AttentionClassifier):
    """A classifier without GRU that uses another model's attention weights, or uniform ones without a guide.

    It tests whether the weights are useful outside of their model (Wiegreffe and Pinter, section 3.4).
    """

    def __init__(self, guide: AttentionClassifier | None) -> None:
        super().__init__(contextual=False)
        self.guide = [guide]  # in a list, so that its weights are not registered as this model's parameters

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, 2]."""
        rows, guide = self.read(tokens), self.guide[0]
        with torch.no_grad():
            uniform = torch.full(tokens.shape, 1 / tokens.shape[1])
            weights = uniform if guide is None else guide.weights(guide.read(tokens))
        return self.classify(rows, weights)


def fit(model: nn.Module, seed: int, steps: int) -> nn.Module:
    """Train a classifier and return it."""
    generator = torch.Generator().manual_seed(seed)

    def loss(_step: int) -> Tensor:
        tokens, labels = texts(64, generator)
        wrong = torch.rand(labels.shape, generator=generator) < DOUBT
        return nn.functional.cross_entropy(model(tokens), torch.where(wrong, 1 - labels, labels))

    learn(model, loss, steps, rate=1e-2)
    return model


@torch.inference_mode()
def accuracy(model: nn.Module) -> float:
    """The classification accuracy on 500 new texts."""
    tokens, labels = texts(500, torch.Generator().manual_seed(99))
    return float((model(tokens).argmax(-1) == labels).float().mean())


def importance(model: AttentionClassifier, tokens: Tensor) -> dict[str, Tensor]:
    """The importance of each word of one text [tokens] for the predicted class, by method."""
    rows = model.embedding(tokens).detach()
    named = int(model(tokens[None])[0].argmax())

    def score(given: Tensor) -> Tensor:
        with replaced_embeddings(model.embedding, given):
            found: Tensor = model(tokens[None].expand(len(given), -1)).softmax(-1)[:, named]
        return found

    def of_subsets(present: Tensor) -> Tensor:
        with torch.no_grad():
            return score(present[..., None] * rows)

    leaf = rows[None].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(leaf).sum(), leaf)
    full = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    left_out = of_subsets(full[:1]) - of_subsets(full & ~torch.eye(TOKENS, dtype=torch.bool))
    with torch.no_grad():
        attention = model.weights(model.read(tokens[None]))[0]
    return {
        "attention": attention,
        "gradient times input": (gradient[0] * rows).sum(-1).abs(),
        "leaving the word out": left_out.abs(),
        "integrated gradients": integrated_gradients(score, rows, torch.zeros_like(rows), 32).shares.abs(),
        "Shapley values": exact_shapley(of_subsets, TOKENS).abs(),
    }


def agreements(model: AttentionClassifier, tokens: Tensor) -> dict[str, tuple[float, float]]:
    """By method: the mean Kendall's τ with attention, and how often its most important word is the deciding one."""
    found: dict[str, list[tuple[float, float]]] = {}
    for text in tokens:
        place, methods = int(deciding(text[None])[0]), importance(model, text)
        for name, shares in methods.items():
            hit = float(int(shares.argmax()) == place)
            found.setdefault(name, []).append((kendall_tau(methods["attention"], shares), hit))
    return {name: (mean(tau for tau, _ in pairs), mean(hit for _, hit in pairs)) for name, pairs in found.items()}


def counterfactuals(model: AttentionClassifier, tokens: Tensor) -> dict[str, float]:
    """The effect of permuted and of adversarial weights on the output."""
    with torch.no_grad():
        rows = model.read(tokens)
        weights = model.weights(rows)

    def output_of(given: Tensor) -> Tensor:
        return model.classify(rows, given).softmax(-1)

    with torch.no_grad():
        permuted = permuted_change(weights, output_of, 50, torch.Generator().manual_seed(0))
    adversary = adversarial_weights(weights, output_of, most=MOVED)
    return {
        "permuted weights move the output by (median)": permuted.median().item(),
        "share of texts that permuting moves by less than 0.05": (permuted < 0.05).float().mean().item(),
        "adversary's divergence (median, at most 0.69)": adversary.divergence.median().item(),
    }


def answers(model: AttentionClassifier, seed: int, steps: int, tokens: Tensor) -> dict[str, float]:
    """The tests of Wiegreffe and Pinter, which retrain models, and that of the combinatorial shortcut."""
    torch.manual_seed(seed + 50)
    other = fit(AttentionClassifier(), seed + 50, steps)
    uniform = fit(UniformClassifier(), seed, steps)
    guided, unguided = (fit(GuidedClassifier(guide), seed, steps) for guide in (model, None))
    silent = fit(AttentionClassifier(silent=True), seed, steps)
    with torch.no_grad():
        pair = [each.weights(each.read(tokens)) for each in (model, other) if isinstance(each, AttentionClassifier)]
        outputs = [each(tokens).softmax(-1) for each in (model, other)]
    return {
        "accuracy": accuracy(model),
        "accuracy with uniform weights": accuracy(uniform),
        "divergence between two seeds (median)": jensen_shannon(*pair).median().item(),
        "change of output between two seeds (median)": total_variation(*outputs).median().item(),
        "accuracy of words alone, guided by its weights": accuracy(guided),
        "accuracy of words alone, uniform weights": accuracy(unguided),
        "accuracy where only the weights know the words": accuracy(silent),
    }


def attention_is_not_explanation(settings: Settings) -> Result:
    """CL-58: all tests of this module, over several seeds."""
    steps, tokens = settings.steps(STEPS), texts(TESTED, torch.Generator().manual_seed(7))[0]
    methods: list[Mapping[str, tuple[float, float]]] = []
    numbers: list[dict[str, float]] = []
    for seed in settings.runs:
        torch.manual_seed(seed)
        model = AttentionClassifier()
        fit(model, seed, steps)
        methods.append(agreements(model, tokens[: max(4, TESTED // settings.seeds)]))
        numbers.append(counterfactuals(model, tokens) | answers(model, seed, steps, tokens))
        settings.say(f"seed {seed}: { ({name: round(value, 2) for name, value in numbers[-1].items()}) }")
    tau = {name: mean(found[name][0] for found in methods) for name in methods[0]}
    hits = {name: mean(found[name][1] for found in methods) for name in methods[0]}
    rows: list[dict[str, Any]] = [
        {"measure": f"Kendall's τ of attention with {name}", "mean": f"{value:.2f}"}
        for name, value in tau.items()
        if name != "attention"
    ]
    rows += [
        {"measure": f"most important word is the deciding one, by {n}", "mean": f"{v:.2f}"} for n, v in hits.items()
    ]
    means = {name: mean(found[name] for found in numbers) for name in numbers[0]}
    rows += [{"measure": name, "mean": f"{value:.2f}"} for name, value in means.items()]
    others = [tau[name] for name in ("gradient times input", "leaving the word out")]
    verdict, because = judged(
        all_of={
            "attention ranks words otherwise than gradients and leaving out do (τ below 0.5)": max(others) < 0.5,
            "other weights, far from the model's (0.3 nats and more), give its output to 0.01": means[
                "adversary's divergence (median, at most 0.69)"
            ]
            > 0.3,
            "weights alone carry the label (accuracy above 0.7 with silent words)": means[
                "accuracy where only the weights know the words"
            ]
            > 0.7,
            "its weights are of no use to another model (no more than 0.02 better than uniform ones)": means[
                "accuracy of words alone, guided by its weights"
            ]
            < means["accuracy of words alone, uniform weights"] + 0.02,
        }
    )
    return Result(rows=rows, verdict=verdict, because=because)
