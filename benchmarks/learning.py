"""Do two heads solve what one cannot, and does a decoder recover from sharing its key/value heads?

`heads`: a block of attention and feed-forward must retrieve two items at once; its number of weights does not depend on
its number of heads. In the task "places" it predicts, at every position, the two symbols 2 and 5 positions before; in
the task "dictionary" it reads 6 words, each with one of 4 meanings that differ between texts, and then predicts the
meanings of two given words, in their order. Reports the fraction of correct answers on new texts, during training.

`pooling`: a decoder with 8 heads is trained on the characters of Shakespeare. Then its 8 key/value heads are reduced to
2, as means of neighbours, as the first of each four, or with random weights, and it is trained for another 5 % of the
steps (Ainslie et al. 2023, arXiv 2305.13245, section 2.1 and figure 4). Reports validation losses, in nats per
character.

`performer`: a decoder with softmax attention is trained on the same text, its layers become Performer's (`attn convert
mechanism`), and it is trained for another tenth of the steps (Choromanski et al. 2020, section 4.3). Run:

    python benchmarks/learning.py heads --seeds 3
    python benchmarks/learning.py performer --seeds 3
    python benchmarks/learning.py pooling --seeds 3
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attn_models.conversion import METHODS, HeadMap, fewer_heads, other_mechanism
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from attn_schema.home import home_folder
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.load import load_text
from attn_train.model import configured
from attn_train.records import StopFlag
from attn_train.tasks.base import derived
from attn_train.tasks.language_modeling import LanguageModelingTask, TextDataset
from attn_train.trainer import NullReporter, Trainer
from report import write_report
from torch import Tensor
from torch.nn import functional

SYMBOLS, PLACES, NEAR, FAR = 16, 20, 2, 5
NAMES, MEANINGS, QUESTIONS_ASKED = 6, 4, 6
WIDTH, HEADS = 16, (1, 2)
SHAKESPEARE = ModelConfig(
    hidden_size=64, num_layers=2, num_heads=8, max_seq_len=64, mechanism="mha", positions="rotary"
)
PART = 0.05
"""The fraction of the steps for which a converted decoder is trained further."""
SHARED = 2
"""The number of key/value heads after the conversion."""
BATCHES = 40
FEATURES = (16, 256)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: `next_batch` returns tokens [batch, places], and the answers for positions from `first`, as tokens."""

    next_batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    first: int
    vocabulary: int
    places: int
    positions: str


def near_and_far(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random symbols, and for each position from `FAR` on, the symbols `NEAR` and `FAR` places before, as one token."""
    symbols = torch.randint(SYMBOLS, (batch, PLACES), generator=generator)
    return symbols, symbols[:, FAR - NEAR : -NEAR] * SYMBOLS + symbols[:, :-FAR]


def two_meanings(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words with their meanings, one token for each pair and in random order, then questions for two words each."""
    words = torch.rand(batch, NAMES, generator=generator).argsort(1)
    meanings = torch.randint(MEANINGS, (batch, NAMES), generator=generator)
    of_word = torch.zeros_like(meanings).scatter(1, words, meanings)
    one, other = (torch.randint(NAMES, (batch, QUESTIONS_ASKED), generator=generator) for _ in range(2))
    tokens = torch.cat([words * MEANINGS + meanings, NAMES * MEANINGS + one * NAMES + other], dim=1)
    return tokens, of_word.gather(1, one) * MEANINGS + of_word.gather(1, other)


TASKS = {
    "places": Task(next_batch=near_and_far, first=FAR, vocabulary=SYMBOLS**2, places=PLACES, positions="learned"),
    "dictionary": Task(
        next_batch=two_meanings,
        first=NAMES,
        vocabulary=NAMES * (MEANINGS + NAMES),
        places=NAMES + QUESTIONS_ASKED,
        positions="none",
    ),
}


def two_lookups(seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """One row for each task, seed and number of heads: the fraction of correct answers by step."""
    for (name, task), seed, heads in product(TASKS.items(), range(seeds), HEADS):
        torch.manual_seed(seed)
        sizes = {
            "vocab_size": task.vocabulary,
            "max_seq_len": task.places,
            "hidden_size": WIDTH,
            "num_layers": 1,
            "num_heads": heads,
        }
        model = Decoder(DecoderConfig.from_plain(sizes | {"positions": task.positions, "tie_word_embeddings": False}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
        generator = torch.Generator().manual_seed(derived(seed, "batches"))
        right = {}
        for step in range(1, steps + 1):
            tokens, wanted = task.next_batch(32, generator)
            loss = functional.cross_entropy(model(tokens)[:, task.first :].flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % (steps // 6) == 0:
                right[step] = share_right(model, task)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        yield {"task": name, "heads": heads, "seed": seed, "parameters": parameters, "right": right}


def share_right(model: Decoder, task: Task) -> float:
    """The fraction of correct answers on new texts."""
    tokens, wanted = task.next_batch(500, torch.Generator().manual_seed(99))
    with torch.inference_mode():
        return (model(tokens)[:, task.first :].argmax(-1) == wanted).float().mean().item()


def pooling(seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """One row for each seed and conversion: validation losses before, directly after, and after further training."""
    text = load_text(DataConfig(dataset="shakespeare"), home_folder(), print)
    for seed in range(seeds):
        config = specification(SHAKESPEARE, seed, steps, 1e-3)
        model = trained(config, text)
        before = loss_of(model, text, config)
        after = specification(SHAKESPEARE, seed + 1000, int(PART * steps), 1e-3)
        for method in METHODS:
            fewer, energy = fewer_heads(model, HeadMap.consecutive(8, SHARED), method, seed=seed)
            row = {"way": method, "seed": seed, "energy": energy, "before": before}
            row["converted"] = loss_of(fewer, text, config)
            Trainer(fewer, text, after).run(NullReporter(), StopFlag())
            yield row | {"recovered": loss_of(fewer, text, config)}
        Trainer(model, text, after).run(NullReporter(), StopFlag())
        yield {"way": "8 heads, as long", "seed": seed, "before": before, "recovered": loss_of(model, text, config)}
        grouped = SHAKESPEARE.replace(mechanism="gqa", num_kv_heads=SHARED)
        fresh = specification(grouped, seed, steps + int(PART * steps), 1e-3)
        yield {"way": "2 heads from the start", "seed": seed, "recovered": loss_of(trained(fresh, text), text, config)}


def performer(seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """One row for each seed and number of features: losses before, directly after, and after further training."""
    text = load_text(DataConfig(dataset="shakespeare"), home_folder(), print)
    softmax = SHAKESPEARE.replace(positions="learned", num_heads=4)
    for seed in range(seeds):
        config = specification(softmax, seed, steps, 1e-3)
        model = trained(config, text)
        before = loss_of(model, text, config)
        after = specification(softmax, seed + 1000, steps // 10, 1e-3)
        for features in FEATURES:
            converted, _ = other_mechanism(model, "performer", {"features": features}, seed=seed)
            row = {"way": f"converted, {features} features", "seed": seed, "before": before}
            row["converted"] = loss_of(converted, text, config)
            Trainer(converted, text, after).run(NullReporter(), StopFlag())
            yield row | {"recovered": loss_of(converted, text, config)}
        Trainer(model, text, after).run(NullReporter(), StopFlag())
        yield {"way": "not converted", "seed": seed, "before": before, "recovered": loss_of(model, text, config)}
        options = {"mechanism": "performer", "options": {"features": FEATURES[-1]}}
        fresh = specification(softmax.replace(**options), seed, steps + steps // 10, 1e-3)
        yield {"way": "from the start", "seed": seed, "recovered": loss_of(trained(fresh, text), text, config)}


def specification(model: ModelConfig, seed: int, steps: int, rate: float) -> TrainingConfig:
    """The configuration of a run of `steps` steps, in which the learning rate falls to a tenth."""
    optimizer = OptimizerConfig(
        steps=steps, batch_size=12, learning_rate=rate, min_learning_rate=rate / 10, warmup_steps=min(100, steps // 5)
    )
    return TrainingConfig(model=model, data=DataConfig(dataset="shakespeare"), optimizer=optimizer, seed=seed)


def trained(config: TrainingConfig, text: TextDataset) -> Decoder:
    """Train a decoder with this configuration and return it."""
    torch.manual_seed(derived(config.seed, "weights"))
    model = Decoder(configured(config.model, text.model_fields)[1])
    Trainer(model, text, config).run(NullReporter(), StopFlag())
    return model


def loss_of(model: Decoder, text: TextDataset, config: TrainingConfig) -> float:
    """The mean loss over validation batches, which are the same for every call."""
    loss = LanguageModelingTask(text, config).validation_loss(model, BATCHES, lambda: None)
    return float("nan") if loss is None else loss


QUESTIONS = {"heads": (two_lookups, 900), "pooling": (pooling, 1000), "performer": (performer, 1000)}


def main() -> None:
    """Run one of the experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    answer, usual = QUESTIONS[args.question]
    steps = args.steps or usual
    facts = {"question": args.question, "steps": steps, "seeds": args.seeds, "torch": torch.__version__}
    write_report(f"learning-{args.question}", facts, partial(answer, args.seeds, steps)(), args.out)


if __name__ == "__main__":
    main()
